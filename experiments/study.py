"""What every study is: what is learned, from which data, for how long, and which number decides.

A study is a frozen dataclass of its settings: they are stored with every result and their hash tells cells of
different settings apart. How to split, batch and evaluate hangs on it; how to train is `training.py`'s.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .steppers import Hyperparameters

__all__ = ["Batch", "Headline", "Study", "StudyData", "need"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Headline:
    """The number that a study compares arms by.

    `cap` is what a run that never got there counts as in differences and wins; the table still says "not reached".
    `tuning_metric` is the same quantity on validation data, by which learning rates are chosen.
    """

    metric: str
    tuning_metric: str
    label: str
    short: str  # for the table's head
    unit: str
    higher_is_better: bool
    scale: float = 1.0  # stored value × scale = shown value
    digits: int = 1
    cap: float | None = None
    goal: str = ""  # what a run with a cap may not reach, as a verb phrase

    @property
    def difference_unit(self) -> str:
        return "points" if self.unit == "%" else self.unit


@dataclass(frozen=True)
class StudyData:
    """Training batches, endless and in the same order for every arm of a seed, and the splits to evaluate on."""

    batches: Callable[[], Iterator[Batch]]
    train: Batch
    validation: Batch
    test: Batch


@dataclass(frozen=True)
class Study(ABC):
    """What the settings of all studies have in common.

    Attributes:
        lr: learning rate of everything but Q and K.
        qk_scale: their learning rate as a multiple of it.
        weight_decay: decoupled decay of matrices.
        stop_accuracy: validation accuracy at which a run that holds it for `hold` evaluations in a row stops; None, as
            in every declared grid, to give all arms the same number of steps.
        decay_cycles: how many times, when training is over, everything that decays is shrunk to `shrink` of its norm by
            weight decay alone and then trained again for `recovery_steps`.
    """

    lr: float = 1e-3
    qk_scale: float = 1.0
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    width: int = 128
    heads: int = 4
    stop_accuracy: float | None = None
    hold: int = 3
    decay_cycles: int = 0
    shrink: float = 0.1
    recovery_steps: int = 200

    #: accuracy whose first step, held for `hold` evaluations in a row, is recorded; None where there is no such goal
    goal_accuracy: ClassVar[float | None] = None

    name: ClassVar[str]
    title: ClassVar[str]
    #: the setting that says where the data lie, which does not change a cell's result; None for generated data
    location: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        need(self.lr > 0, "lr", "positive", self.lr)
        need(self.qk_scale > 0, "qk_scale", "positive", self.qk_scale)
        need(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)
        need(self.hold >= 1, "hold", "at least 1", self.hold)
        need(self.heads >= 1 and self.width % self.heads == 0, "width", "a multiple of heads", self.width)
        need(self.decay_cycles >= 0, "decay_cycles", "at least 0", self.decay_cycles)
        need(0 < self.shrink < 1, "shrink", "above 0 and below 1", self.shrink)
        need(self.recovery_steps >= 1, "recovery_steps", "at least 1", self.recovery_steps)
        cycles = self.decay_cycles
        rate = self.lr * self.weight_decay
        need(not cycles or 0 < rate < 1, "weight_decay", "above 0 and below 1/lr where it cycles", self.weight_decay)

    def settings(self) -> dict[str, Any]:
        """Every setting that a result depends on, except the learning rate, which has a field of its own."""
        values = dataclasses.asdict(self) | self.data_identity()
        return {key: value for key, value in values.items() if key not in ("lr", self.location)}

    def data_identity(self) -> dict[str, str]:
        """What tells data from other data, where they come from files: a digest of the content, not its place."""
        return {}

    def hyperparameters(self) -> Hyperparameters:
        return Hyperparameters(self.lr, self.betas, self.weight_decay, self.qk_scale)

    @property
    def input_square_norm(self) -> float:
        """‖x‖² of what the attention reads at the start, about; by default of what leaves a LayerNorm."""
        return float(self.width)

    @property
    @abstractmethod
    def headline(self) -> Headline:
        """The number that arms are compared by."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Training steps at most, before any decay cycle."""

    @property
    @abstractmethod
    def evaluate_every(self) -> int:
        """Steps between evaluations."""

    @abstractmethod
    def describe(self) -> str:
        """The task in one sentence without its full stop."""

    @abstractmethod
    def build(self, attention: Mapping[str, Any]) -> nn.Module:
        """A model with these arguments of `StiefelAttention`, from torch's global generator."""

    @abstractmethod
    def data(self, seed: int) -> StudyData:
        """The data of one seed, the same for every arm."""


def need(ok: bool, name: str, wanted: str, found: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {wanted}, found {found!r}")
