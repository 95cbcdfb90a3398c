"""CIFAR-10 in patches, a small vision transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .data_cifar10 import cifar10_digest, load_cifar10
from .models import PatchTransformer
from .study import Batch, Headline, Study, StudyData, need

__all__ = ["Cifar10Study"]


@dataclass(frozen=True)
class Cifar10Study(Study):
    """CIFAR-10 in 4×4 patches, a small vision transformer."""

    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    width: int = 64
    data_folder: str = ""
    train_images: int = 4_000
    validation_images: int = 2_500
    epochs: int = 5
    batch_size: int = 50
    layers: int = 2
    patch: int = 4
    records: int = 10_000

    name: ClassVar[str] = "cifar10"
    title: ClassVar[str] = "CIFAR-10"
    location: ClassVar[str | None] = "data_folder"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("train_images", "validation_images", "epochs", "batch_size", "layers", "patch"):
            need(getattr(self, field) >= 1, field, "at least 1", getattr(self, field))

    def data_identity(self) -> dict[str, str]:
        return {"data_sha256": cifar10_digest(self.data_folder)}

    @property
    def headline(self) -> Headline:
        metrics = ("test_accuracy", "validation_accuracy")
        return Headline(*metrics, "test accuracy", "test accuracy, %", "%", True, scale=100.0, digits=2)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.train_images // self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def evaluate_every(self) -> int:
        return 2 * self.steps_per_epoch

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

        seen = slice(0, 500)  # enough to see how far the fit has come
        return StudyData(batches, (images[seen], labels[seen]), loaded.validation, loaded.test)
