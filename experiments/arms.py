"""The arms of a study: where Q and K live, where they start, and what steps them.

Everything else of the model is the same in every arm, starts from the same values and is stepped by AdamW. A new arm is
one more entry of `ARMS`; `starts.py` builds its model and `steppers.py` what steps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ARMS", "BASELINE", "RULES", "Arm", "select_arms"]

#: Every paired difference is taken against this arm.
BASELINE = "adamw"

#: what may step Q and K
RULES = ("adamw", "none", "rsgd", "radam", "spectral", "scalar-adam", "muon")


@dataclass(frozen=True)
class Arm:
    """One way to treat Q and K.

    Attributes:
        name: as given to `--arm`.
        description: one plain sentence for the report.
        frames: Q and K are orthonormal frames a head and stay so; else they are free matrices.
        rule: what steps Q and K, one of `RULES`.
        options: arguments of the rule, as (name, value) pairs.
        orthonormal_start: free matrices start at the frames that the constrained arms start at.
        decay: weight decay reaches Q and K. It never reaches frames, where it is void.
        project: the step is taken in the ambient space and the polar factor afterwards brings it back.
        normalize: queries and keys are divided by their norms, a head at a time.
    """

    name: str
    description: str
    frames: bool = False
    rule: str = "adamw"
    options: tuple[tuple[str, Any], ...] = ()
    orthonormal_start: bool = False
    decay: bool = True
    project: bool = False
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}; found {self.rule!r}")
        if self.project and not self.frames:
            raise ValueError(f"project needs frames to project onto; {self.name!r} has frames=False")

    def settings(self) -> dict[str, Any]:
        """Everything that defines the arm, as plain values, for the results line and its hash."""
        values = asdict(self)
        del values["name"], values["description"]
        return {**values, "options": dict(self.options)}


_RMS = (("second_moment", "frame"), ("step_scale", "rms"), ("trust_radius", 1.0))

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("adamw", "Q and K are free matrices, stepped and decayed by AdamW like everything else."),
        Arm(
            "frozen",
            "Q and K are random orthonormal frames a head that never move.",
            frames=True,
            rule="none",
        ),
        Arm(
            "riemannian-adam",
            "Q and K are frames, moved on the Stiefel manifold by Riemannian Adam with one second moment a frame; an "
            "entry moves by about the learning rate, as under AdamW (“rms”).",
            frames=True,
            rule="radam",
            options=_RMS,
        ),
        Arm(
            "adamw-orth",
            "As adamw, but Q and K start at the orthonormal frames and the logit scale of the constrained arms.",
            orthonormal_start=True,
        ),
        Arm(
            "adamw-orth-no-decay",
            "As adamw-orth, without weight decay on Q and K: decay is void on a frame, so this is the fair comparator.",
            orthonormal_start=True,
            decay=False,
        ),
        Arm(
            "riemannian-adam-elementwise",
            "As riemannian-adam with a second moment an element, projected to the tangent space: scale-free, not "
            "equivariant.",
            frames=True,
            rule="radam",
            options=(("second_moment", "element"), *_RMS[1:]),
        ),
        Arm(
            "scalar-project",
            "Frames; Adam with one second moment a frame on the ambient gradient, then the polar factor: scale-free, "
            "equivariant, not projected.",
            frames=True,
            rule="scalar-adam",
            project=True,
        ),
        Arm(
            "adamw-project",
            "Frames; elementwise Adam on the ambient gradient, then the polar factor: scale-free, not equivariant, not "
            "projected.",
            frames=True,
            project=True,
        ),
        Arm(
            "rsgd",
            "Frames; Riemannian gradient descent with Adam's first moment: the step is proportional to the gradient.",
            frames=True,
            rule="rsgd",
            options=(("trust_radius", 1.0),),
        ),
        Arm(
            "scale-free-euclidean",
            "Free matrices from AdamW's start and with its decay; Adam with one second moment a head: scale-freeness "
            "without the manifold.",
            rule="scalar-adam",
        ),
        Arm(
            "riemannian-adam-frobenius",
            "As riemannian-adam, but a whole frame moves by about the learning rate in norm, as geoopt's do: "
            "√(np) times less.",
            frames=True,
            rule="radam",
            options=(_RMS[0], ("step_scale", "frobenius"), _RMS[2]),
        ),
        Arm(
            "spectral",
            "Frames; steepest descent in the spectral norm on the tangent space (“manifold Muon”), entries moving as "
            "in riemannian-adam.",
            frames=True,
            rule="spectral",
            options=(("step_scale", "rms"), ("trust_radius", 1.0)),
        ),
        Arm(
            "muon",
            "Free matrices; orthogonalized momentum (Muon), scaled to AdamW's root mean square.",
            rule="muon",
            options=(("adjust_lr_fn", "match_rms_adamw"), ("momentum", 0.95), ("nesterov", True)),
        ),
        Arm(
            "adamw-qk-norm",
            "As adamw, with queries and keys normalized a head at a time: the usual cure for growing logits.",
            normalize=True,
        ),
    )
}


def select_arms(names: Iterable[str] | None = None) -> tuple[Arm, ...]:
    """The named arms in the order of the registry, each once; all of them for None.

    Raises `ValueError` for a name that is not there, with the names that are.
    """
    chosen = list(ARMS) if names is None else list(names)
    if unknown := [name for name in chosen if name not in ARMS]:
        raise ValueError(f"unknown arm {', '.join(map(repr, unknown))}: the arms are {', '.join(ARMS)}")
    return tuple(arm for name, arm in ARMS.items() if name in chosen)
