"""Modular arithmetic and composition of permutations: every pair (a, b) of a finite set, split at random into
training, validation and test pairs."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OPERATIONS", "ModularData", "describe_operation", "elements", "operation_pairs"]

#: name -> function of two integer tensors; the result is taken modulo p. Add to it freely.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}
#: composition in the symmetric group on p things: no Fourier modes of a cyclic group to find
COMPOSE = "compose"


@dataclass(frozen=True)
class ModularData:
    """Inputs of shape (N, 3), tokens `a b =` with "=" the token after the last element, and targets of shape (N,), a
    split each."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def elements(operation: str, p: int) -> int:
    """How many elements the operation acts on: p, or p! permutations."""
    return math.factorial(p) if operation == COMPOSE else p


def describe_operation(operation: str, p: int) -> str:
    return (
        f"Composition in the symmetric group S_{p}"
        if operation == COMPOSE
        else f"The operation “{operation}” modulo {p}"
    )


def operation_pairs(p: int, train_fraction: float, seed: int, operation: str = "add") -> ModularData:
    """All pairs, shuffled by `seed`: `train_fraction` of them to learn from, the rest halved into validation and test.

    Args:
        p: the modulus; with "compose", the number of things permuted, 2 to 6.

    Raises `ValueError` for p < 2, for a fraction that leaves a split empty, and for an unknown operation.

    Example:
        >>> data = operation_pairs(3, 0.5, seed=0)
        >>> [len(targets) for _, targets in (data.train, data.validation, data.test)]
        [4, 2, 3]
    """
    if p < 2:
        raise ValueError(f"p must be at least 2, found {p}")
    if operation not in (*OPERATIONS, COMPOSE):
        raise ValueError(f"operation {operation!r} is unknown: choose one of {', '.join((*OPERATIONS, COMPOSE))}")
    if operation == COMPOSE and p > 6:
        raise ValueError(f"p must be at most 6 with operation={COMPOSE!r}, whose p!² pairs are all made; found {p}")
    size = elements(operation, p)
    train_size = round(train_fraction * size**2) if 0 < train_fraction < 1 else 0
    validation_size = (size**2 - train_size) // 2
    if train_size < 1 or validation_size < 1:
        raise ValueError(
            f"train_fraction must leave pairs for training, validation and test: found {train_fraction} of {size**2}"
        )
    a, b = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    a, b = a.flatten(), b.flatten()
    targets = _compose(p)[a, b] if operation == COMPOSE else OPERATIONS[operation](a, b) % p
    inputs = torch.stack([a, b, torch.full_like(a, size)], dim=1)
    order = torch.randperm(size**2, generator=torch.Generator().manual_seed(seed))

    def part(start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        chosen = order[start:stop]
        return inputs[chosen], targets[chosen]

    middle = train_size + validation_size
    return ModularData(part(0, train_size), part(train_size, middle), part(middle, None))


def _compose(p: int) -> Tensor:
    """(p!, p!): the number of a∘b, permutations numbered in lexicographic order."""
    permutations = list(itertools.permutations(range(p)))
    number = {permutation: i for i, permutation in enumerate(permutations)}
    return torch.tensor([[number[tuple(a[i] for i in b)] for b in permutations] for a in permutations])
