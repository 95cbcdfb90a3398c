"""Decay cycles: weight decay alone shrinks a trained model, then it is trained again; what becomes of the geometry of
its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..analysis import GeometryTracker
from ..optim import RiemannianAdam
from .arms import Arm
from .evaluation import evaluate
from .starts import attentions, qk_parameters
from .steppers import build_stepper
from .study import Study, StudyData

__all__ = ["run_decay_cycles"]


def run_decay_cycles(
    study: Study, arm: Arm, model: nn.Module, data: StudyData, learn: Callable[[int], None]
) -> dict[str, list[float]]:
    """Cycle, measuring at the start, after each decay and after each recovery.

    Args:
        learn: takes one training step, given its number.

    Returns:
        One list a quantity, 1 + 2·cycles long: `validation_loss` and `validation_accuracy`; `qk_angle`, the distance of
        the column spaces of Q and K from those at the start, and `qk_condition`, means over heads and layers;
        `qk_norm` and `rest_norm`, Frobenius norms of Q and K and of every other matrix as shares of those at the start.
    """
    tracker = GeometryTracker(model)
    qk = [p for layer in attentions(model) for p in qk_parameters(layer)]
    known = {id(p) for p in qk}
    rest = [p for name, p in model.named_parameters() if id(p) not in known and p.ndim >= 2]
    start = _norm(qk), _norm(rest)
    rows: dict[str, list[float]] = {}

    def measure(step: int) -> None:
        tracked = tracker.record(step)
        loss, accuracy = evaluate(model, data.validation)
        row = {
            "validation_loss": loss,
            "validation_accuracy": accuracy,
            "qk_angle": (tracked["mean/query_distance"] + tracked["mean/key_distance"]) / 2,
            "qk_condition": max(tracked["mean/query_condition"], tracked["mean/key_condition"]),
            "qk_norm": _norm(qk) / start[0],
            "rest_norm": _norm(rest) / start[1],
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)

    measure(0)
    step = 0
    for cycle in range(study.decay_cycles):
        _decay(study, arm, model)
        measure(2 * cycle + 1)
        for _ in range(study.recovery_steps):
            step += 1
            learn(step)
        measure(2 * cycle + 2)
    return rows


def _decay(study: Study, arm: Arm, model: nn.Module) -> None:
    """Steps with gradients of zero, from moments of zero, until (1 − lr·λ)^steps is `study.shrink`. Frames have the
    same decay set on them as the matrices: that it does nothing to them is what is looked at."""
    stepper = build_stepper(arm, model, study.hyperparameters())
    if isinstance(stepper.qk, RiemannianAdam):
        for group in stepper.qk.param_groups:
            group["weight_decay"] = study.weight_decay
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    for _ in range(math.ceil(math.log(study.shrink) / math.log1p(-study.lr * study.weight_decay))):
        stepper.step()
    stepper.zero_grad()


def _norm(parameters: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(p.detach().as_subclass(Tensor).double().square().sum()) for p in parameters))
