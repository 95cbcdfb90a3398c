"""Modular arithmetic, and the negative control: composition of permutations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .data_modular import describe_operation, elements, operation_pairs
from .models import ModularTransformer
from .study import Batch, Headline, Study, StudyData, need

__all__ = ["ModularStudy"]


@dataclass(frozen=True)
class ModularStudy(Study):
    """Memorized soon, understood later ("grokking").

    Attributes:
        p: the modulus; with `operation="compose"`, the number of things permuted.
        batch_size: pairs a step; None for all training pairs.
    """

    lr: float = 1e-2
    p: int = 31
    operation: str = "add"
    train_fraction: float = 0.65
    batch_size: int | None = None
    steps: int = 400
    interval: int = 25

    goal_accuracy: ClassVar[float | None] = 0.95
    name: ClassVar[str] = "modular"
    title: ClassVar[str] = "Modular arithmetic"

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.steps >= 1, "steps", "at least 1", self.steps)
        need(self.interval >= 1, "interval", "at least 1", self.interval)
        need(self.batch_size is None or self.batch_size >= 1, "batch_size", "at least 1 or None", self.batch_size)
        operation_pairs(self.p, self.train_fraction, 0, self.operation)  # raises for what cannot be split

    @property
    def input_square_norm(self) -> float:
        return 2.0  # no normalization: an embedding and a position, each with entries of variance 1/width

    @property
    def headline(self) -> Headline:
        label = "steps to 95 % test accuracy"
        goal = f"reached 95 % test accuracy and held it for {self.hold} evaluations in a row"
        metrics = ("steps_to_95_test", "steps_to_95_validation")
        return Headline(*metrics, label, "steps to 95 %", "steps", False, digits=0, cap=self.steps, goal=goal)

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def evaluate_every(self) -> int:
        return self.interval

    def describe(self) -> str:
        share = f"{100 * self.train_fraction:.0f} %"
        batch = "full batch" if self.batch_size is None else f"batches of {self.batch_size}"
        return (
            f"{describe_operation(self.operation, self.p)}: {share} of {elements(self.operation, self.p) ** 2:,} pairs "
            f"to train on, the rest halved into validation and test; one-layer transformer of width {self.width} with "
            f"{self.heads} heads, {batch}, {'' if self.stop_accuracy is None else 'at most '}{self.steps:,} steps"
        )

    def build(self, attention: Mapping[str, Any]) -> nn.Module:
        return ModularTransformer(elements(self.operation, self.p), self.width, self.heads, attention)

    def data(self, seed: int) -> StudyData:
        pairs = operation_pairs(self.p, self.train_fraction, seed, self.operation)

        def batches() -> Iterator[Batch]:
            inputs, targets = pairs.train
            generator = torch.Generator().manual_seed(seed)
            while True:
                if self.batch_size is None:
                    yield pairs.train
                    continue
                for chosen in torch.randperm(len(targets), generator=generator).split(self.batch_size):
                    yield inputs[chosen], targets[chosen]

        return StudyData(batches, pairs.train, pairs.validation, pairs.test)
