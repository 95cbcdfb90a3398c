"""What steps a model of an arm: AdamW for everything but Q and K, the arm's rule for those."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..manifolds import ManifoldParameter
from ..optim import RiemannianAdam, RiemannianSGD, SpectralDescent
from .arms import Arm
from .scalar_adam import ScalarAdam
from .starts import attentions, qk_parameters

__all__ = ["Hyperparameters", "Stepper", "build_stepper"]


@dataclass(frozen=True)
class Hyperparameters:
    """What a cell trains with. `qk_scale` multiplies the learning rate of Q and K; `weight_decay` reaches matrices
    only, and never a frame."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    qk_scale: float = 1.0
    eps: float = 1e-8


@dataclass
class Stepper:
    """The optimizers of one model.

    Attributes:
        rest: AdamW on everything but Q and K.
        qk: what steps Q and K; None where nothing does.
        projected: frames that the polar factor brings back after each step.
        groups: for the record, what really happens to each group of parameters.
    """

    rest: torch.optim.Optimizer
    qk: torch.optim.Optimizer | None
    projected: list[ManifoldParameter] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.rest] if self.qk is None else [self.rest, self.qk]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for p in self.projected:
            p.copy_(p.manifold.project_point(p.detach().as_subclass(Tensor)))

    def capped_fraction(self) -> float | None:
        """Share of the frames' steps that the trust radius shortened; None for a rule without one."""
        if isinstance(self.qk, (RiemannianAdam, RiemannianSGD, SpectralDescent)):
            return self.qk.capped_fraction()
        return None


def build_stepper(arm: Arm, model: nn.Module, hyper: Hyperparameters) -> Stepper:
    """Decay reaches matrices that are not frames; not frames, vectors (biases, norms) or logit scales."""
    layers = attentions(model)
    qk = [p for layer in layers for p in qk_parameters(layer)]
    known = {id(p) for p in qk}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            (decayed if parameter.ndim >= 2 and not name.endswith("logit_scale") else plain).append(parameter)
    common = {"lr": hyper.lr, "betas": hyper.betas, "eps": hyper.eps}
    groups = [
        {"params": decayed, "weight_decay": hyper.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    rest = torch.optim.AdamW(groups, **common)
    decay = hyper.weight_decay if arm.decay and not arm.frames else 0.0
    rule = _rule(arm, qk, hyper, decay, layers[0].num_heads)
    stepped_by = "none" if rule is None else type(rule).__name__ + (", then the polar factor" if arm.project else "")
    report = {
        "matrices": {"numbers": _count(decayed), "weight_decay": hyper.weight_decay, "stepped_by": "AdamW"},
        "biases, norms, logit scales": {"numbers": _count(plain), "weight_decay": "none", "stepped_by": "AdamW"},
        "Q and K": {"numbers": _count(qk), "weight_decay": decay or "none", "stepped_by": stepped_by},
    }
    projected = [p for p in qk if arm.project and isinstance(p, ManifoldParameter)]
    return Stepper(rest, rule, projected, report)


def _rule(
    arm: Arm, qk: list[nn.Parameter], hyper: Hyperparameters, decay: float, heads: int
) -> torch.optim.Optimizer | None:
    lr, options = hyper.lr * hyper.qk_scale, dict(arm.options)
    adam = {"lr": lr, "betas": hyper.betas, "eps": hyper.eps}
    match arm.rule:
        case "none":
            return None
        case "adamw":
            return torch.optim.AdamW(qk, **adam, weight_decay=decay)
        case "scalar-adam":
            return ScalarAdam(qk, **adam, weight_decay=decay, heads=heads, **options)
        case "radam":
            return RiemannianAdam(qk, **adam, **options)
        case "spectral":
            return SpectralDescent(qk, lr=lr, momentum=hyper.betas[0], **options)
        case "rsgd":  # Adam's first moment, so that nothing but the normalization differs
            return RiemannianSGD(qk, lr=lr, momentum=hyper.betas[0], dampening=hyper.betas[0], **options)
        case "muon":
            return torch.optim.Muon(qk, lr=lr, weight_decay=decay, **options)
    raise ValueError(f"no rule {arm.rule!r}")


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
