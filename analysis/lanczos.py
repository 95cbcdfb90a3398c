"""Both ends of the spectrum of a self-adjoint operator that is known by its products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

__all__ = ["RitzValues", "lanczos"]

# the chance that an eigenvalue lies farther outside than ``missed`` says
RISK = 1e-3


@dataclass(frozen=True)
class RitzValues:
    """What ``products`` applications of an operator tell of its spectrum.

    ``values`` ascending; within ``errors[i]`` of ``values[i]`` lies an eigenvalue, always. Whether an eigenvalue lies
    outside of all of them no finite number of products can exclude, but with probability 99.9 % over the random start
    none lies more than ``missed`` outside (infinite while that is not known). ``dimension``: of what was not deflated.
    """

    values: np.ndarray
    errors: np.ndarray
    missed: float
    products: int
    dimension: int


def lanczos(
    apply: Callable[[Tensor], Tensor],
    start: Tensor,
    inner: Callable[[Tensor, Tensor], Tensor],
    *,
    dimension: int,
    steps: int = 100,
    tolerance: float = 1e-6,
    deflate: Iterable[Tensor] = (),
) -> RitzValues:
    """Lanczos' method with full reorthogonalization, twice, in an inner product of the caller's.

    The errors are the residuals |βₖ sₖᵢ| of the Ritz pairs (Parlett, "The Symmetric Eigenvalue Problem", 1998, §13.2).
    ``missed`` follows Kuczyński & Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos algorithms
    with a random start" (1992): for a positive semidefinite matrix of order N and a uniform start, the relative error
    of the largest Ritz value after k products exceeds ε with probability at most 1.648 √N e^(−√ε(2k−1)). Here it is
    applied to A − λ_min and λ_max − A.

    Args:
        apply: v ↦ Av for vectors (N,), self-adjoint in ``inner``.
        start: uniformly distributed in direction on the space, (N,); in coordinates that are not orthonormal, N may
            exceed ``dimension``.
        inner: ((k, N) or (N,), (N,)) to (k,) or ().
        dimension: of the space in which ``start`` and the products lie.
        steps: products at most.
        tolerance: stop when both ends are known to this, relative to the larger one in size.
        deflate: vectors whose span is left out: A is replaced by PAP on their orthogonal complement.

    Raises:
        ValueError: a product is not finite, ``start`` is zero outside of the deflated span, or ``steps`` is below 1.

    Example:
        >>> a = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
        >>> start = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> found = lanczos(lambda v: a @ v, start, lambda u, v: u @ v, dimension=8)
        >>> [round(float(x), 9) for x in found.values], found.missed
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.0)
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    left_out = _orthonormal(deflate, inner)
    dimension -= len(left_out)

    def within(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - inner(left_out, v) @ left_out if len(left_out) else v
        return v

    basis = torch.empty(0, len(start), dtype=start.dtype, device=start.device)
    w, size = within(start), float(inner(start, start).sqrt())
    diagonal, beside = [], []
    beta = float(inner(w, w).clamp(min=0).sqrt())
    if not beta > 1e-12 * size:
        raise ValueError("start must have a part outside of the deflated span, found none")
    scale, k = 0.0, 0
    values = errors = np.zeros(0)
    for k in range(1, min(steps, dimension) + 1):
        basis = torch.cat([basis, (w / beta)[None]])
        w = within(apply(basis[-1]))
        if not bool(torch.isfinite(w).all()):
            raise ValueError("the operator gave a product that is not finite")
        scale = max(scale, float(inner(w, w).clamp(min=0).sqrt()))
        diagonal.append(float(inner(basis[-1], w)))
        for _ in range(2):
            w = w - inner(basis, w) @ basis
        beta = float(inner(w, w).clamp(min=0).sqrt())
        values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside))
        errors = np.abs(beta * vectors[-1])
        # an invariant subspace: a random start has a part along every eigenvector, so no eigenvalue is missing
        if k == dimension or beta <= 1e-13 * scale * math.sqrt(k):
            return RitzValues(values, np.maximum(errors * (k < dimension), _rounding(scale)), 0.0, k, dimension)
        if max(errors[0], errors[-1]) <= tolerance * max(abs(values[0]), abs(values[-1])):
            break
        beside.append(beta)
    return RitzValues(values, np.maximum(errors, _rounding(scale)), _missed(values, dimension, k), k, dimension)


def _rounding(scale: float) -> float:
    return 8 * np.finfo(float).eps * scale


def _missed(values: np.ndarray, dimension: int, products: int) -> float:
    root = math.log(2 * 1.648 * math.sqrt(dimension) / RISK) / (2 * products - 1)
    share = root * root  # of the true spread
    return float(share * (values[-1] - values[0]) / (1 - 2 * share)) if share < 0.5 else math.inf


def _orthonormal(vectors: Iterable[Tensor], inner: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """An orthonormal basis of the span, by modified Gram–Schmidt; what depends on the others is dropped."""
    basis: list[Tensor] = []
    for v in vectors:
        before = float(inner(v, v).sqrt())
        for _ in range(2):
            for b in basis:
                v = v - inner(b, v) * b
        after = float(inner(v, v).clamp(min=0).sqrt())
        if after > 1e-10 * before:
            basis.append(v / after)
    return torch.stack(basis) if basis else torch.empty(0, 0)
