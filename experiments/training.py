"""One cell: train one arm from one seed, and measure along the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis import GeometryTracker, drift
from ..manifolds import ManifoldParameter
from ..optim import RiemannianAdam
from .arms import Arm, build_model, build_optimizer
from .studies import Batch, Study, StudyData

__all__ = ["CellFailed", "CellResult", "train_cell"]

#: history name -> the tracker's column, a mean over layers and heads
_TRACKED = {
    "query_condition": "mean/query_condition",
    "key_condition": "mean/key_condition",
    "query_angle": "mean/query_distance",
    "key_angle": "mean/key_distance",
    "query_movement": "mean/query_movement",
    "key_movement": "mean/key_movement",
}


class CellFailed(RuntimeError):
    """The run cannot go on; the message says why, for the results line."""


@dataclass(frozen=True)
class CellResult:
    """Flat numbers, curves (`step` and one list a quantity), and what was in force."""

    metrics: dict[str, float | None]
    history: dict[str, list[float]]
    groups: dict[str, dict[str, Any]]
    parameters: int = 0
    random_angle: float | None = field(default=None)


def train_cell(
    study: Study, arm: Arm, seed: int, data: StudyData, on_step: Callable[[int], None] | None = None
) -> CellResult:
    """Train to the study's end, or until its validation accuracy has been held.

    Args:
        data: `study.data(seed)`, the same for every arm.
        on_step: called after every step with the number of steps taken.

    Raises:
        CellFailed: the loss became NaN or infinite.
    """
    model = build_model(arm, study.build, seed)
    optimizer, groups = build_optimizer(arm, model, study.hyperparameters())
    tracker = GeometryTracker(model)
    before = {name: p.detach().as_subclass(Tensor).clone() for name, p in _queries_and_keys(model)}
    history: dict[str, list[float]] = {}
    train99: int | None = None
    reached: int | None = None
    held = 0
    batches = data.batches()
    _measure(history, 0, model, data.train, data.validation, tracker)

    step, learning_seconds = 0, 0.0
    for step in range(1, study.total_steps + 1):
        inputs, targets = next(batches)
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if not math.isfinite(loss.item()):
            raise CellFailed(
                f"the training loss became {loss.item()} at step {step} (learning rate {study.lr:g}): the run diverged"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        learning_seconds += time.perf_counter() - begin
        if step % study.evaluate_every == 0 or step == study.total_steps:
            _measure(history, step, model, data.train, data.validation, tracker)
            if train99 is None and history["train_accuracy"][-1] >= 0.99:
                train99 = step
            if study.stop_accuracy is not None:
                above = history["validation_accuracy"][-1] >= study.stop_accuracy
                reached = (reached if held else step) if above else None
                held = held + 1 if above else 0
        if on_step is not None:
            on_step(step)
        if study.stop_accuracy is not None and held >= study.hold:
            break

    test_loss, test_accuracy = _evaluate(model, data.test)
    metrics: dict[str, float | None] = {
        "test_accuracy": test_accuracy,
        "test_loss": test_loss,
        **{f"{name}_{what}": history[f"{name}_{what}"][-1] for name in ("train", "validation") for what in _EVALUATED},
        **{name: history[name][-1] for name in _TRACKED},
        "qk_movement": _relative_movement(model, before),
        "frame_error": _frame_error(model),
        "capped_fraction": optimizer.capped_fraction() if isinstance(optimizer, RiemannianAdam) else None,
        "steps": step,
        "seconds_per_step": learning_seconds / max(step, 1),
    }
    if study.stop_accuracy is not None:
        # held at the very end for fewer evaluations than `hold` is not "reached": it might have fallen again
        metrics["steps_to_95"] = reached if held >= study.hold else None
        metrics["steps_to_99_train"] = train99
    random = drift(tracker.start, tracker.start, samples=32).layers
    angles = [value for layer in random for value in (layer.random_query_distance, layer.random_key_distance) if value]
    return CellResult(
        metrics,
        history,
        groups,
        parameters=sum(p.numel() for p in model.parameters()),
        random_angle=math.fsum(angles) / len(angles) if angles else None,
    )


_EVALUATED = ("loss", "accuracy")


def _measure(
    history: dict[str, list[float]], step: int, model: nn.Module, train: Batch, validation: Batch, tracker: Any
) -> None:
    row: dict[str, float] = {"step": step}
    for name, split in (("train", train), ("validation", validation)):
        row |= dict(zip((f"{name}_{what}" for what in _EVALUATED), _evaluate(model, split), strict=True))
    tracked = tracker.record(step)
    row |= {name: tracked[column] for name, column in _TRACKED.items()}
    for name, value in row.items():
        history.setdefault(name, []).append(value)


@torch.no_grad()
def _evaluate(model: nn.Module, split: Batch, chunk: int = 2048) -> tuple[float, float]:
    """Mean loss and accuracy."""
    training = model.training
    model.eval()
    loss = right = 0.0
    for inputs, targets in zip(split[0].split(chunk), split[1].split(chunk), strict=True):
        logits = model(inputs)
        loss += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        right += (logits.argmax(-1) == targets).sum().item()
    model.train(training)
    return loss / len(split[1]), right / len(split[1])


def _queries_and_keys(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if name.endswith(("q_proj.weight", "k_proj.weight"))]


def _relative_movement(model: nn.Module, before: dict[str, Tensor]) -> float:
    """‖W − W₀‖/‖W₀‖ over all query and key weights together."""
    moved = started = 0.0
    for name, parameter in _queries_and_keys(model):
        now = parameter.detach().as_subclass(Tensor)
        moved += float((now - before[name]).double().square().sum())
        started += float(before[name].double().square().sum())
    return math.sqrt(moved / started)


def _frame_error(model: nn.Module) -> float | None:
    """The largest departure of any frame from its manifold; None without frames."""
    errors = [
        float(p.manifold.point_error(p.detach().as_subclass(Tensor)).max())
        for p in model.parameters()
        if isinstance(p, ManifoldParameter)
    ]
    return max(errors, default=None)
