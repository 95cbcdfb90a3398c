"""Modular arithmetic: every pair (a, b), split at random into training, validation and test pairs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OPERATIONS", "ModularData", "modular_pairs"]

#: name -> function of two integer tensors; the result is taken modulo p. Add to it freely.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}


@dataclass(frozen=True)
class ModularData:
    """Inputs of shape (N, 3), tokens `a b =` with "=" the token p, and targets of shape (N,), a split each."""

    p: int
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def modular_pairs(p: int, train_fraction: float, seed: int, operation: str = "add") -> ModularData:
    """All p² pairs, shuffled by `seed`: `train_fraction` of them to learn from, the rest halved into validation
    (which decides when to stop) and test (which decides nothing).

    Raises `ValueError` for p < 2, for a fraction that leaves a split empty, and for an unknown operation.
    """
    if p < 2:
        raise ValueError(f"p must be at least 2, found {p}")
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r} is unknown: choose one of {', '.join(OPERATIONS)}")
    train_size = round(train_fraction * p * p) if 0 < train_fraction < 1 else 0
    validation_size = (p * p - train_size) // 2
    if train_size < 1 or validation_size < 1:
        raise ValueError(
            f"train_fraction must leave pairs for training, validation and test: found {train_fraction} of {p * p}"
        )
    a, b = torch.meshgrid(torch.arange(p), torch.arange(p), indexing="ij")
    a, b = a.flatten(), b.flatten()
    targets = OPERATIONS[operation](a, b) % p
    inputs = torch.stack([a, b, torch.full_like(a, p)], dim=1)
    order = torch.randperm(p * p, generator=torch.Generator().manual_seed(seed))

    def part(start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        chosen = order[start:stop]
        return inputs[chosen], targets[chosen]

    middle = train_size + validation_size
    return ModularData(p, part(0, train_size), part(train_size, middle), part(middle, None))
