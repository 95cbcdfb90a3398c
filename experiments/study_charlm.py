"""Character language modelling: a small causal transformer on any text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .data_text import load_text, text_digest
from .models import CharTransformer
from .study import Batch, Headline, Study, StudyData, need

__all__ = ["CharlmStudy"]


@dataclass(frozen=True)
class CharlmStudy(Study):
    """The text is cut in its order; batches are windows at random places of its first part.

    Attributes:
        text_file: any UTF-8 text.
        context: characters a window.
        windows: how many windows of validation and test text are evaluated, evenly spaced.
        vocabulary: how many characters the model knows, from a text's own on; unused ones do no harm.
    """

    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    width: int = 64
    text_file: str = ""
    context: int = 64
    batch_size: int = 32
    steps: int = 400
    interval: int = 100
    layers: int = 2
    windows: int = 400
    vocabulary: int = 128

    name: ClassVar[str] = "charlm"
    title: ClassVar[str] = "Character language model"
    location: ClassVar[str | None] = "text_file"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("context", "batch_size", "steps", "interval", "layers", "windows", "vocabulary"):
            need(getattr(self, field) >= 1, field, "at least 1", getattr(self, field))

    def data_identity(self) -> dict[str, str]:
        return {"text_sha256": text_digest(self.text_file)}

    @property
    def headline(self) -> Headline:
        metrics, scale = ("test_loss", "validation_loss"), 1 / math.log(2)
        return Headline(*metrics, "test loss", "bits a character", "bits", False, scale=scale, digits=3)

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def evaluate_every(self) -> int:
        return self.interval

    def describe(self) -> str:
        return (
            f"The next character of a text: windows of {self.context} characters, {self.layers}-layer causal "
            f"transformer of width {self.width} with {self.heads} heads, {self.steps:,} steps of "
            f"{self.batch_size} windows"
        )

    def build(self, attention: Mapping[str, Any]) -> nn.Module:
        return CharTransformer(self.vocabulary, self.context, self.width, self.layers, self.heads, attention)

    def data(self, seed: int) -> StudyData:
        text = load_text(self.text_file)
        need(len(text.vocabulary) <= self.vocabulary, "vocabulary", f"at least {len(text.vocabulary)}", self.vocabulary)
        for name in ("train", "validation", "test"):
            longest = len(getattr(text, name)) - 1
            need(self.context <= longest, "context", f"at most {longest}, the {name} text's length", self.context)

        def windows(part: Tensor, starts: Tensor) -> Batch:
            places = starts[:, None] + torch.arange(self.context)
            return part[places], part[places + 1]

        def spread(part: Tensor, count: int) -> Batch:
            return windows(part, torch.linspace(0, len(part) - self.context - 1, count).long())

        def batches() -> Iterator[Batch]:
            generator = torch.Generator().manual_seed(seed)
            last = len(text.train) - self.context
            while True:
                yield windows(text.train, torch.randint(last, (self.batch_size,), generator=generator))

        train = spread(text.train, max(1, self.windows // 4))
        return StudyData(batches, train, spread(text.validation, self.windows), spread(text.test, self.windows))
