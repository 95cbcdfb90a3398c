"""Least squares along the orbits of a head's gauge group: V*V A = C, C in the range of V*, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifolds.linalg import skew


def solve_sylvester(first: Tensor, second: Tensor, c: Tensor) -> Tensor:
    """A with S₁A + AS₂ = C, S₁ and S₂ symmetric positive semidefinite, and 0 where both vanish: ``(*batch, k, k)``."""
    s, u = torch.linalg.eigh(first)
    t, v = torch.linalg.eigh(second)
    sums = s.unsqueeze(-1) + t.unsqueeze(-2)
    return u @ _divide(u.mT @ c @ v, sums) @ v.mT


def solve_skew(total: Tensor, c: Tensor) -> Tensor:
    """The skew A with skew(S₁A + AS₂) = C, which is SA + AS = 2C with S = S₁ + S₂."""
    s, u = torch.linalg.eigh(total)
    return skew(u @ _divide(2 * (u.mT @ c @ u), s.unsqueeze(-1) + s.unsqueeze(-2)) @ u.mT)


def solve_in_basis(first: Tensor, second: Tensor, basis: Tensor, c: Tensor) -> Tensor:
    """The A in the span of an orthonormal ``basis`` (m, k, k) with ⟨B, S₁A + AS₂⟩ = ⟨B, C⟩ for every B of it."""
    moved = first.unsqueeze(-3) @ basis + basis @ second.unsqueeze(-3)
    gram = torch.einsum("aij,...bij->...ab", basis, moved)
    right = torch.einsum("aij,...ij->...a", basis, c)
    s, u = torch.linalg.eigh(gram)
    coefficients = u @ _divide(u.mT @ right.unsqueeze(-1), s.unsqueeze(-1))
    return torch.einsum("...a,aij->...ij", coefficients.squeeze(-1), basis)


def complex_basis(size: int, pairing: str, scales: bool) -> Tensor:
    """An orthonormal basis of the matrices that commute with every rotary embedding: (m, size, size).

    One rotation generator a pair of coordinates and, with ``scales``, one identity.

    Raises:
        ValueError: an unknown pairing, or an odd size.
    """
    if pairing not in ("half", "interleaved"):
        raise ValueError(f"rope must be 'half', 'interleaved' or None, found {pairing!r}")
    if size % 2:
        raise ValueError(f"rotary embeddings need an even head dimension, found {size}")
    half = size // 2
    first = torch.arange(half) if pairing == "half" else torch.arange(0, size, 2)
    second = first + half if pairing == "half" else first + 1
    rows = torch.arange(half)
    turns = torch.zeros(half, size, size, dtype=torch.float64)
    turns[rows, first, second], turns[rows, second, first] = -(0.5**0.5), 0.5**0.5
    if not scales:
        return turns
    grows = torch.zeros_like(turns)
    grows[rows, first, first] = grows[rows, second, second] = 0.5**0.5
    return torch.cat([turns, grows])


def _divide(c: Tensor, sums: Tensor) -> Tensor:
    # directions that move no weight have no share in any step
    void = sums <= torch.finfo(sums.dtype).eps * sums.shape[-1] * sums.amax((-2, -1), keepdim=True).clamp_min(0)
    return torch.where(void, 0.0, c / torch.where(void, 1.0, sums))
