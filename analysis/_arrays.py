"""Arrays in, float64 tensors inside, and the per-point sums that every measurement uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

ArrayLike = Tensor | np.ndarray


def as_tensor(value: Any, name: str) -> Tensor:
    """``value`` as a detached real tensor of its own floating dtype (integers become float64).

    Raises:
        TypeError: not a tensor or something numpy reads as an array of real numbers; the argument is named.
    """
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a tensor or an array of numbers, found {type(value).__name__}") from error
    # a parameter subclass is measured as the plain tensor it holds
    tensor = value.detach().as_subclass(Tensor)
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, found {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.to(torch.float64)


def as_float64(value: Any, name: str) -> Tensor:
    """``value`` as a detached float64 tensor, finite or a ``ValueError`` that names the argument."""
    tensor = as_tensor(value, name).to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} contains {int((~torch.isfinite(tensor)).sum())} non-finite entries")
    return tensor


def flat(value: Tensor, ndim: int) -> Tensor:
    """The trailing ``ndim`` dimensions as one: ``(*batch, k)``."""
    return value.flatten(value.ndim - ndim) if ndim else value.unsqueeze(-1)


def pairing(a: Tensor, b: Tensor, ndim: int) -> Tensor:
    """Sum of products over the trailing ``ndim`` dimensions, batch-shaped."""
    return (flat(a, ndim) * flat(b, ndim)).sum(-1)


def frobenius(value: Tensor, ndim: int) -> Tensor:
    """Euclidean length over the trailing ``ndim`` dimensions, batch-shaped."""
    return torch.linalg.vector_norm(flat(value, ndim), dim=-1)


def spread(scale: Tensor, ndim: int) -> Tensor:
    """A batch-shaped factor with ``ndim`` trailing ones, to multiply points by."""
    return scale.reshape(*scale.shape, *([1] * ndim))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator`` with 0/0 = 0 and c/0 = inf: the relative size of something that must vanish."""
    zero = denominator == 0
    quotient = numerator / torch.where(zero, torch.ones_like(denominator), denominator)
    return torch.where(zero & (numerator > 0), torch.full_like(quotient, torch.inf), quotient)
