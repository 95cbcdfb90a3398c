"""A whole training step of a small GPT: forward, backward and the optimizer, constrained and not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import RiemannianAdam
from .gpt import GPT, GPTShape
from .peers import missing, peer
from .report import Outcome, Table
from .steps import point_error
from .targets import TRAINING_BOUND
from .timing import Spread, interleave, synchronize

__all__ = ["ARMS", "Arm", "TrainingStep", "measure_training"]

LR = 3e-4
WEIGHT_DECAY = 0.01  # AdamW's default, of everybody's plain parameters

BASE = "AdamW"


@dataclass(frozen=True)
class Arm:
    """A way to train the model.

    Attributes:
        constrained: query and key projections are frames.
        constrain: turns the frames of a constrained model into what the arm needs.
        optimizer: of a model.
        needs: the peer that must be installed.

    Example:
        >>> sorted(name for name, arm in ARMS.items() if not arm.constrained)
        ['AdamW', 'RiemannianAdam, nothing constrained']
    """

    constrained: bool
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    constrain: Callable[[nn.Module], None] = lambda _: None
    needs: str | None = None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # What stands behind a parametrization is not decayed: those are coordinates, not weights, and torch's hold signs
    # on a diagonal that the least decay rounds to zero, and with it the whole matrix.
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if ".parametrizations." not in name], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named if ".parametrizations." in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, foreach=True)


def _riemannian_adam(model: nn.Module) -> torch.optim.Optimizer:
    return RiemannianAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, foreach=True)


def _geoopt_adam(model: nn.Module) -> torch.optim.Optimizer:
    return peer("geoopt").optim.RiemannianAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


def _geoopt_frames(projection: nn.Module) -> None:
    geoopt = peer("geoopt")
    frames = _plain(projection).detach()
    projection.weight = geoopt.ManifoldParameter(frames, manifold=geoopt.EuclideanStiefel())


def _torch_orthogonal(projection: nn.Module) -> None:
    _plain(projection)
    nn.utils.parametrizations.orthogonal(projection, "weight")


def _geotorch_orthogonal(projection: nn.Module) -> None:
    frames = _plain(projection).detach().clone()
    threads = torch.get_num_threads()
    # it takes determinants of a batch of (n, n) matrices here, and here only: a batched LU, which torch 2.13 on several
    # threads gets wrong on some processors, or never finishes
    torch.set_num_threads(1)
    try:
        peer("geotorch").orthogonal(projection, "weight")
        projection.weight = frames  # it draws frames of its own; start where everybody starts
    finally:
        torch.set_num_threads(threads)


def _plain(projection: nn.Module) -> nn.Parameter:
    """Make the frames an ordinary parameter, which others may then constrain in their way."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    projection.weight = nn.Parameter(weight.detach().clone())
    return projection.weight


ARMS: dict[str, Arm] = {
    BASE: Arm(False, _adamw),
    "ours": Arm(True, _riemannian_adam),
    "RiemannianAdam, nothing constrained": Arm(False, _riemannian_adam),
    "geoopt Euclidean": Arm(True, _geoopt_adam, _geoopt_frames, needs="geoopt"),
    "torch parametrizations.orthogonal": Arm(True, _adamw, _torch_orthogonal),
    "geotorch.orthogonal": Arm(True, _adamw, _geotorch_orthogonal, needs="geotorch"),
}


@dataclass
class TrainingStep:
    """One arm's model, batch and optimizer; a call takes one training step.

    Example:
        >>> step = TrainingStep(ARMS["ours"], GPTShape(1, 8, 2, 2, 4, 5))
        >>> bool(step() > 0), len(step.optimizer_seconds)
        (True, 1)
    """

    arm: Arm
    shape: GPTShape
    device: str = "cpu"
    seed: int = 0
    optimizer_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)  # frames, embeddings and perceptrons start alike in all constrained arms
        self.model = GPT(self.shape, self.arm.constrained).to(self.device)
        if self.arm.constrained:
            for projection in self.model.frame_projections():
                self.arm.constrain(projection)
        self.optimizer = self.arm.optimizer(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.shape.batch, self.shape.length + 1)
        self.tokens = torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device)

    def __call__(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(self.tokens)
        loss.backward()
        synchronize(self.device)
        start = time.perf_counter()
        self.optimizer.step()
        synchronize(self.device)
        self.optimizer_seconds.append(time.perf_counter() - start)
        return float(loss.detach())

    def frames(self) -> Tensor | None:
        """All query and key frames as they are used, (layers · 2 · heads, n, p); None if they are unconstrained."""
        if not self.arm.constrained:
            return None
        with torch.no_grad():
            return torch.cat([projection.weight.detach() for projection in self.model.frame_projections()])  # type: ignore[operator]


def measure_training(
    shape: GPTShape | None = None,
    rounds: int = 15,
    *,
    device: str = "cpu",
    seed: int = 0,
    warmup: int = 2,
    slow_seconds: float = 4.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Time whole training steps in turn: frames under RiemannianAdam, the unconstrained model under AdamW, and peers.

    Args:
        shape: of model and batch; the default has 10.7 million parameters and 8×128 tokens.
        rounds: timed steps of each arm; one that takes over ``slow_seconds`` is timed in every fifth round.
        device, seed, warmup, progress: as for :func:`~geodescent.benchmarks.steps.measure_steps`.

    Example:
        >>> outcome = measure_training(GPTShape(1, 8, 2, 2, 4, 5), rounds=1, warmup=1)
        >>> outcome.data["arms"]["ours"]["step_milliseconds"]["count"]
        1
    """
    shape = GPTShape() if shape is None else shape
    steps: dict[str, TrainingStep] = {}
    skipped: dict[str, str] = {}
    for name, arm in ARMS.items():
        if reason := missing(arm.needs):
            skipped[name] = reason
            continue
        progress(f"training: building {name}")
        steps[name] = TrainingStep(arm, shape, device, seed)
    progress("training: timing")
    # no settling: a step this long is its own, and the optimizer's seconds stay one entry a round
    timings = interleave(steps, rounds, warmup=warmup, settle=0, device=device, slow_seconds=slow_seconds)
    skipped |= timings.failures
    rows, arms = [], {}
    for name in ARMS:
        if name in skipped:
            rows.append((name, skipped[name], "–", "–", "–"))
            arms[name] = {"skipped": skipped[name]}
            continue
        step, seconds, ratio = steps[name], timings.of(name), timings.ratio(name, BASE)
        assert seconds is not None
        optimizer = Spread.of(step.optimizer_seconds[-seconds.count :]).scaled(1e3)
        frames = step.frames()
        error = None if frames is None else point_error(frames)
        shown = "–" if error is None else f"{error:.1e}"
        relative = "–" if ratio is None else _precise(ratio)
        rows.append((name, str(seconds.scaled(1e3)), str(optimizer), relative, shown))
        arms[name] = {
            "step_milliseconds": asdict(seconds.scaled(1e3)),
            "optimizer_milliseconds": asdict(optimizer),
            "ratio": None if ratio is None else asdict(ratio),
            "orthonormality_error": error,
        }
    ratio = timings.ratio("ours", BASE)
    met = None if ratio is None else ratio.median <= TRAINING_BOUND
    said = {True: "met", False: "not met", None: "not measured"}[met]
    header = ("arm", "step, ms", "of it the optimizer, ms", f"step ÷ {BASE}", "max|XᵀX−I|")
    title = (
        f"A whole training step: GPT of {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
        f"{shape.batch}×{shape.length} tokens"
    )
    measured = "not measured" if ratio is None else _precise(ratio)
    notes = (
        f"ours ÷ {BASE}: {measured}, held to ≤ {TRAINING_BOUND}: {said}.",
        f"{BASE}: the same model, unconstrained, torch.optim.AdamW(foreach=True). The others hold query and key "
        "projections orthonormal per head; the parametrizations are trained by the same AdamW.",
        f"Float32, {shape.vocabulary} tokens in the vocabulary, {rounds} rounds in turn; ratios are taken round by "
        "round.",
    )
    data: dict[str, Any] = {"shape": asdict(shape), "rounds": rounds, "seed": seed, "arms": arms}
    data["held_to"] = {"bound": TRAINING_BOUND, "measured": None if ratio is None else asdict(ratio), "verdict": said}
    return Outcome("training", (Table(title, header, tuple(rows), notes),), data)


def _precise(ratio: Spread) -> str:
    """Ratios near 1 are read to a percent and better."""
    if ratio.median >= 2:
        return str(ratio)
    return f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"
