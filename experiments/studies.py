"""The studies: what is learned, from which data, for how long, and which number decides.

A study is a frozen dataclass of its settings: they are stored with every result and their hash tells cells of
different settings apart. How to split, batch and evaluate hangs on it; how to train is `training.py`'s.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .arms import Hyperparameters
from .data_cifar10 import cifar10_digest, load_cifar10
from .data_modular import modular_pairs
from .models import ModularTransformer, PatchTransformer

__all__ = ["Batch", "Cifar10Study", "Headline", "ModularStudy", "Study", "StudyData"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Headline:
    """The number that a study compares arms by.

    `cap` is what a run that never got there counts as in differences and wins; the table still says "not reached".
    """

    metric: str
    label: str
    short: str  # for the table's head
    unit: str
    higher_is_better: bool
    scale: float = 1.0  # stored value × scale = shown value
    digits: int = 1
    cap: float | None = None
    goal: str = ""  # what a run with a cap may not reach, as a verb phrase


@dataclass(frozen=True)
class StudyData:
    """Training batches, endless and in the same order for every arm of a seed, and the splits to evaluate on."""

    batches: Callable[[], Iterator[Batch]]
    train: Batch
    validation: Batch
    test: Batch


@dataclass(frozen=True)
class Study(ABC):
    """What the settings of all studies have in common."""

    lr: float = 1e-3
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    width: int = 128
    heads: int = 4

    name: ClassVar[str]
    title: ClassVar[str]
    #: settings that do not change a cell's result, such as where the data lie
    not_hashed: ClassVar[frozenset[str]] = frozenset()
    #: threads where the user names none; None for all
    default_threads: ClassVar[int | None] = None
    #: validation accuracy at which a run that holds it for `hold` evaluations in a row stops; None to go on to the end
    stop_accuracy: float | None = None
    hold: int = 3

    def __post_init__(self) -> None:
        _need(self.lr > 0, "lr", "positive", self.lr)
        _need(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)
        _need(self.hold >= 1, "hold", "at least 1", self.hold)
        _need(self.heads >= 1 and self.width % self.heads == 0, "width", "a multiple of heads", self.width)

    def settings(self) -> dict[str, Any]:
        """Every setting that a result depends on, except the learning rate, which has a field of its own."""
        values = dataclasses.asdict(self) | self.data_identity()
        return {key: value for key, value in values.items() if key not in self.not_hashed | {"lr"}}

    def data_identity(self) -> dict[str, str]:
        """What tells data from other data, where they come from files: a digest of the content, not its place."""
        return {}

    def hyperparameters(self) -> Hyperparameters:
        return Hyperparameters(self.lr, self.betas, self.weight_decay)

    @property
    @abstractmethod
    def headline(self) -> Headline:
        """The number that arms are compared by."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Training steps at most."""

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


@dataclass(frozen=True)
class ModularStudy(Study):
    """Modular arithmetic, full batch: memorized soon, understood later ("grokking")."""

    lr: float = 3e-3
    p: int = 31
    operation: str = "add"
    train_fraction: float = 0.65
    steps: int = 800
    interval: int = 25
    stop_accuracy: float | None = 0.95

    name: ClassVar[str] = "modular"
    title: ClassVar[str] = "Modular arithmetic"
    # so small a model gains a quarter from a second thread, and loses tenfold where another process wants that core
    default_threads: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _need(self.steps >= 1, "steps", "at least 1", self.steps)
        _need(self.interval >= 1, "interval", "at least 1", self.interval)
        modular_pairs(self.p, self.train_fraction, 0, self.operation)  # raises for what cannot be split

    @property
    def headline(self) -> Headline:
        label = "steps to 95 % validation accuracy"
        goal = f"reached 95 % validation accuracy and held it for {self.hold} evaluations in a row"
        return Headline("steps_to_95", label, "steps to 95 %", "steps", False, digits=0, cap=self.steps, goal=goal)

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def evaluate_every(self) -> int:
        return self.interval

    def describe(self) -> str:
        share = f"{100 * self.train_fraction:.0f} %"
        return (
            f"The operation “{self.operation}” modulo {self.p}: {share} of {self.p**2:,} pairs to "
            f"train on, the rest halved into validation and test; one-layer transformer of width {self.width} with "
            f"{self.heads} heads, full batch, at most {self.steps:,} steps"
        )

    def build(self, attention: Mapping[str, Any]) -> nn.Module:
        return ModularTransformer(self.p, self.width, self.heads, attention)

    def data(self, seed: int) -> StudyData:
        pairs = modular_pairs(self.p, self.train_fraction, seed, self.operation)

        def batches() -> Iterator[Batch]:
            while True:
                yield pairs.train

        return StudyData(batches, pairs.train, pairs.validation, pairs.test)


@dataclass(frozen=True)
class Cifar10Study(Study):
    """CIFAR-10 in 4×4 patches, a small vision transformer."""

    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    width: int = 64
    data_folder: str = ""
    train_images: int = 10_000
    validation_images: int = 2_000
    epochs: int = 6
    batch_size: int = 100
    layers: int = 2
    patch: int = 4
    records: int = 10_000

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "CIFAR-10"
    not_hashed: ClassVar[frozenset[str]] = frozenset({"data_folder"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("train_images", "validation_images", "epochs", "batch_size", "layers", "patch"):
            _need(getattr(self, field) >= 1, field, "at least 1", getattr(self, field))

    def data_identity(self) -> dict[str, str]:
        return {"data_sha256": cifar10_digest(self.data_folder)}

    @property
    def headline(self) -> Headline:
        return Headline("test_accuracy", "test accuracy", "test accuracy, %", "%", True, scale=100.0, digits=2)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.train_images // self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def evaluate_every(self) -> int:
        return max(1, self.steps_per_epoch // 2)

    def describe(self) -> str:
        return (
            f"{self.train_images:,} training images, the whole test file, {self.patch}×{self.patch} patches; "
            f"{self.layers}-layer transformer of width {self.width} with {self.heads} heads, {self.epochs} "
            f"{'epoch' if self.epochs == 1 else 'epochs'} of batches of {self.batch_size}, no augmentation"
        )

    def build(self, attention: Mapping[str, Any]) -> nn.Module:
        return PatchTransformer(self.width, self.layers, self.heads, self.patch, attention=attention)

    def data(self, seed: int) -> StudyData:
        loaded = load_cifar10(self.data_folder, self.train_images, self.validation_images, seed, self.records)
        images, labels = loaded.train

        def batches() -> Iterator[Batch]:
            generator = torch.Generator().manual_seed(seed)
            while True:
                order = torch.randperm(len(labels), generator=generator)
                for chosen in order.split(self.batch_size):
                    yield images[chosen], labels[chosen]

        seen = slice(0, self.validation_images)  # training accuracy on as many images as validation accuracy
        return StudyData(batches, (images[seen], labels[seen]), loaded.validation, loaded.test)


def _need(ok: bool, name: str, wanted: str, found: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {wanted}, found {found!r}")
