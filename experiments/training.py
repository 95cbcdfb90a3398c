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
from .arms import Arm
from .decay_cycles import run_decay_cycles
from .distributed import Processes
from .evaluation import evaluate
from .starts import attentions, build_model, qk_parameters
from .steppers import Stepper, build_stepper
from .study import Batch, Study, StudyData

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
    """Flat numbers, curves (`step` and one list a quantity), and what was in force. Everything but `timing` is the same
    to the last bit when the cell is run again on the same machine with as many threads."""

    metrics: dict[str, float | None]
    history: dict[str, list[float]]
    groups: dict[str, dict[str, Any]]
    parameters: int = 0
    random_angle: float | None = field(default=None)
    cycles: dict[str, list[float]] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


def train_cell(
    study: Study,
    arm: Arm,
    seed: int,
    data: StudyData,
    on_step: Callable[[int], None] | None = None,
    processes: Processes | None = None,
) -> CellResult:
    """Train to the study's end, or until its validation accuracy has been held; then its decay cycles.

    Args:
        data: `study.data(seed)`, the same for every arm.
        on_step: called after every step with the number of steps taken.
        processes: the processes among which each batch is shared; None for this one alone.

    Raises:
        CellFailed: the loss became NaN or infinite, of the last weights too.
    """
    processes = processes or Processes()
    model = build_model(arm, study.build, seed, study.input_square_norm)
    stepper = build_stepper(arm, model, study.hyperparameters())
    learner = _Learner(model, stepper, data, processes)
    tracker = GeometryTracker(model)
    goals = {name: _Goal(study.goal_accuracy, study.hold) for name in ("validation", "test")}
    stop = _Goal(study.stop_accuracy, study.hold)  # never looks at test data
    before = learner.queries_and_keys()
    history: dict[str, list[float]] = {}
    train99: int | None = None
    _measure(history, 0, model, data, tracker, study.goal_accuracy is not None)

    step = 0
    for step in range(1, study.total_steps + 1):
        learner.learn(step, study.lr)
        if step % study.evaluate_every == 0 or step == study.total_steps:
            _measure(history, step, model, data, tracker, study.goal_accuracy is not None)
            if train99 is None and history["train_accuracy"][-1] >= 0.99:
                train99 = step
            for name, goal in goals.items():
                goal.seen(step, history.get(f"{name}_accuracy", [math.nan])[-1])
            stop.seen(step, history["validation_accuracy"][-1])
        if on_step is not None:
            on_step(step)
        if stop.held:
            break

    test_loss, test_accuracy = evaluate(model, data.test)
    if not math.isfinite(test_loss + learner.path):
        raise CellFailed(f"the loss after step {step} is {test_loss} (learning rate {study.lr:g}): the run diverged")
    metrics: dict[str, float | None] = {
        "test_accuracy": test_accuracy,
        "test_loss": test_loss,
        **{f"{name}_{what}": history[f"{name}_{what}"][-1] for name in ("train", "validation") for what in _EVALUATED},
        **{name: history[name][-1] for name in _TRACKED},
        "qk_movement": _relative_movement(learner.queries_and_keys(), before),
        "step_length": learner.path / max(step, 1),
        "logit_scale": float(
            torch.stack([layer.logit_scale.detach().abs().mean() for layer in attentions(model)]).mean()
        ),
        "frame_error": _frame_error(model),
        "capped_fraction": stepper.capped_fraction(),
        "steps": step,
    }
    if study.goal_accuracy is not None:
        metrics |= {f"steps_to_95_{name}": goal.reached for name, goal in goals.items()}
        metrics["steps_to_99_train"] = train99
    random = drift(tracker.start, tracker.start, samples=32).layers
    angles = [value for layer in random for value in (layer.random_query_distance, layer.random_key_distance) if value]
    cycles: dict[str, list[float]] = {}
    if study.decay_cycles:
        cycles = run_decay_cycles(study, arm, model, data, lambda n: learner.learn(n, study.lr))
    return CellResult(
        metrics,
        history,
        stepper.groups,
        parameters=sum(p.numel() for p in model.parameters()),
        random_angle=math.fsum(angles) / len(angles) if angles else None,
        cycles=cycles,
        timing={"seconds_per_step": learner.seconds / max(learner.steps, 1)},
    )


_EVALUATED = ("loss", "accuracy")


@dataclass
class _Goal:
    """Whether an accuracy has been held for `hold` evaluations in a row, and from which step on. Held at the very end
    for fewer is not "reached": it might have fallen again."""

    accuracy: float | None
    hold: int
    since: int = 0
    count: int = 0

    def seen(self, step: int, accuracy: float) -> None:
        if self.held or self.accuracy is None:
            return
        if accuracy >= self.accuracy:
            self.since = self.since if self.count else step
            self.count += 1
        else:
            self.count = 0

    @property
    def held(self) -> bool:
        return self.count >= self.hold

    @property
    def reached(self) -> int | None:
        return self.since if self.held else None


class _Learner:
    """Takes training steps, and measures how far they go and how long they take."""

    def __init__(self, model: nn.Module, stepper: Stepper, data: StudyData, processes: Processes) -> None:
        self.model, self.stepper, self.processes = model, stepper, processes
        self.batches = data.batches()
        self.frames = sum(layer.num_heads + layer.num_kv_heads for layer in attentions(model))
        self.path = 0.0  # the sum of the steps' lengths, each the root mean square over frames of its Frobenius norm
        self.seconds = 0.0
        self.steps = 0

    def learn(self, step: int, lr: float) -> None:
        """One step. Raises `CellFailed` where the loss is not finite."""
        inputs, targets = next(self.batches)
        before = self.queries_and_keys()
        begin = time.perf_counter()
        loss = self.processes.backward(self.model, self.stepper.zero_grad, inputs, targets)
        if not math.isfinite(loss):
            raise CellFailed(f"the training loss became {loss} at step {step} (learning rate {lr:g}): the run diverged")
        self.stepper.step()
        self.seconds += time.perf_counter() - begin
        self.steps += 1
        moved = sum(float((w - old).square().sum()) for w, old in zip(self.queries_and_keys(), before, strict=True))
        self.path += math.sqrt(moved / self.frames)

    def queries_and_keys(self) -> list[Tensor]:
        """Copies of them."""
        weights = [p for layer in attentions(self.model) for p in qk_parameters(layer)]
        return [w.detach().as_subclass(Tensor).clone() for w in weights]


def _measure(
    history: dict[str, list[float]], step: int, model: nn.Module, data: StudyData, tracker: GeometryTracker, test: bool
) -> None:
    row: dict[str, float] = {"step": step}
    splits: dict[str, Batch] = {"train": data.train, "validation": data.validation}
    for name, split in (splits | ({"test": data.test} if test else {})).items():
        row |= dict(zip((f"{name}_{what}" for what in _EVALUATED), evaluate(model, split), strict=True))
    tracked = tracker.record(step)
    row |= {name: tracked[column] for name, column in _TRACKED.items()}
    for name, value in row.items():
        history.setdefault(name, []).append(value)


def _relative_movement(now: list[Tensor], before: list[Tensor]) -> float:
    """‖W − W₀‖/‖W₀‖ over all query and key weights together."""
    moved = sum(float((w - old).double().square().sum()) for w, old in zip(now, before, strict=True))
    return math.sqrt(moved / sum(float(old.double().square().sum()) for old in before))


def _frame_error(model: nn.Module) -> float | None:
    """The largest departure of any frame from its manifold; None without frames."""
    errors = [
        float(p.manifold.point_error(p.detach().as_subclass(Tensor)).max())
        for p in model.parameters()
        if isinstance(p, ManifoldParameter)
    ]
    return max(errors, default=None)
