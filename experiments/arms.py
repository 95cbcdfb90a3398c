"""The arms of a study: which projections are frames, and what steps them.

Within a seed every arm starts from the same values outside Q and K, copied by name from one reference model, and all
arms with frames start from the same frames. A new arm is one more entry of `ARMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..attention import StiefelAttention
from ..manifolds import ManifoldParameter
from ..optim import RiemannianAdam

__all__ = ["ARMS", "BASELINE", "Arm", "Hyperparameters", "build_model", "build_optimizer", "select_arms"]

#: Every paired difference is taken against this arm.
BASELINE = "adamw"


class ModelFactory(Protocol):
    def __call__(self, attention: Mapping[str, Any]) -> nn.Module: ...


@dataclass(frozen=True)
class Hyperparameters:
    """What every arm of a study shares. `weight_decay` reaches matrices only, and never a frame."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    eps: float = 1e-8


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: as given to `--arm`.
        description: one plain sentence for the report.
        attention: arguments of `StiefelAttention`; `{}` of them all is its default, frames for Q and K.
        train_frames: whether frames move at all.
        optimizer: the class that steps everything.
        options: further arguments of the optimizer, recorded with the results.
    """

    name: str
    description: str
    attention: Mapping[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    train_frames: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Everything that defines the arm, as plain values, for the results line and its hash."""
        return {
            "attention": {key: list(v) if isinstance(v, tuple) else v for key, v in self.attention.items()},
            "optimizer": getattr(self.optimizer, "__name__", repr(self.optimizer)),
            "train_frames": self.train_frames,
            "options": dict(self.options),
        }


_FRAMES = {"constrain": ("q", "k"), "frames": "head", "logit_scale": "learned"}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            "adamw",
            "Q and K are free matrices, stepped and decayed by AdamW like everything else, with the same learned, "
            "undecayed logit scale a head as the other arms.",
            {"constrain": (), "logit_scale": "learned"},
            torch.optim.AdamW,
        ),
        Arm(
            "frozen",
            "Q and K are random orthonormal frames a head that never move; AdamW steps the rest.",
            _FRAMES,
            torch.optim.AdamW,
            train_frames=False,
        ),
        Arm(
            "riemannian-adam",
            "Q and K are orthonormal frames a head, moved on the Stiefel manifold; the rest is stepped as by AdamW.",
            _FRAMES,
            RiemannianAdam,
            options={"second_moment": "frame", "step_scale": "rms", "trust_radius": 1.0},
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


def build_model(arm: Arm, factory: ModelFactory, seed: int) -> nn.Module:
    """The arm's model at the paired start of `seed`: see the module's text. Draws nothing from the caller's
    generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = factory(attention=ARMS[BASELINE].attention)
        torch.manual_seed(seed)
        model = factory(attention=arm.attention)
        paired = dict(reference.named_parameters())
        qk = qk_names(model) | qk_names(reference)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name not in qk:
                    parameter.copy_(paired[name])
    if not arm.train_frames:
        for parameter in model.parameters():
            if isinstance(parameter, ManifoldParameter):
                parameter.requires_grad_(False)
    return model


def qk_names(model: nn.Module) -> set[str]:
    """Names of the parameters that may differ between arms: Q and K weights and logit scales."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, StiefelAttention):
            for name in ("q_proj.weight", "k_proj.weight", "logit_scale"):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def build_optimizer(
    arm: Arm, model: nn.Module, hyper: Hyperparameters
) -> tuple[torch.optim.Optimizer, dict[str, dict[str, Any]]]:
    """The optimizer, and for the record what really happens to each group of parameters.

    Decay reaches matrices that are not frames; not frames, vectors (biases, norms) or logit scales.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    frames: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManifoldParameter):
            frames.append(parameter)
        elif parameter.ndim >= 2 and not name.endswith("logit_scale"):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": hyper.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if frames and arm.train_frames:
        groups.append({"params": frames, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    optimizer = arm.optimizer(groups, lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, **arm.options)

    stepped_by = type(optimizer).__name__
    report: dict[str, dict[str, Any]] = {
        "matrices": {"numbers": _count(decayed), "weight_decay": hyper.weight_decay, "stepped_by": stepped_by},
        "biases, norms, logit scales": {"numbers": _count(plain), "weight_decay": "none", "stepped_by": stepped_by},
        "frames": {
            "numbers": _count(frames),
            "weight_decay": "none",
            "stepped_by": stepped_by if arm.train_frames and frames else "none",
        },
    }
    return optimizer, report


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
