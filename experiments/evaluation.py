"""Loss and accuracy on a split."""

from __future__ import annotations

import torch
from torch import nn

from .study import Batch

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(model: nn.Module, split: Batch, chunk: int = 2048) -> tuple[float, float]:
    """Mean loss, in nats, and accuracy over all targets; the model's logits are (N, classes, …) for targets (N, …)."""
    training = model.training
    model.eval()
    loss = right = 0.0
    for inputs, targets in zip(split[0].split(chunk), split[1].split(chunk), strict=True):
        logits = model(inputs)
        loss += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        right += (logits.argmax(1) == targets).sum().item()
    model.train(training)
    return loss / split[1].numel(), right / split[1].numel()
