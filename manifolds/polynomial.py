"""(I + E)^(−1/2) as a polynomial in E: a polar factor from matrix products alone.

The polar factor of A is A(AᵀA)^(−1/2). Where the spectrum of the Gram matrix is known to lie in an interval, as it is
after a step of bounded length, a Chebyshev polynomial of known degree is as good as a factorization, in a fraction of
the time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["InverseSqrtPolynomial", "inverse_sqrt_polynomial", "spectral_interval"]

# Past this degree the p×p products cost more than an eigendecomposition.
MAX_DEGREE = 32

# Up to this degree the interval is so short that powers of E are as stable as Chebyshev polynomials.
_MONOMIAL_DEGREE = 6


@dataclass(frozen=True)
class InverseSqrtPolynomial:
    """A polynomial q with |q(t) − (1 + t)^(−1/2)| ≤ ``error_bound`` on ``interval``, in the Chebyshev basis there."""

    interval: tuple[float, float]
    coefficients: tuple[float, ...]
    error_bound: float

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def __call__(self, e: Tensor) -> Tensor:
        """q(E) for symmetric E of shape (..., p, p) whose spectrum lies in the interval.

        By Clenshaw's recurrence, a product a degree; low degrees in powers of E, half as many products.
        """
        low, high = self.interval
        if 2 <= self.degree <= _MONOMIAL_DEGREE:
            return _by_squares(e, _monomials(self.interval, self.coefficients))
        identity = torch.eye(e.shape[-1], dtype=e.dtype, device=e.device)
        if self.degree == 0:
            return self.coefficients[0] * identity.expand_as(e)
        half = (high - low) / 2
        t = e / half - ((high + low) / (2 * half)) * identity
        ahead, now = torch.zeros_like(t), self.coefficients[-1] * identity.expand_as(t)
        for coefficient in self.coefficients[-2:0:-1]:
            ahead, now = now, 2 * (t @ now) - ahead + coefficient * identity
        return t @ now - ahead + self.coefficients[0] * identity


@functools.lru_cache(maxsize=512)
def _monomials(interval: tuple[float, float], coefficients: tuple[float, ...]) -> tuple[float, ...]:
    series = np.polynomial.Chebyshev(coefficients, domain=list(interval))
    powers = series.convert(kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1])
    return tuple(powers.coef.tolist())


def _by_squares(e: Tensor, c: tuple[float, ...]) -> Tensor:
    """Σ cₖEᵏ by Horner's rule in E² (Paterson & Stockmeyer 1973): (c₀ + c₁E + c₂E²) + E²[(c₃E + c₄E²) + E²[…]]."""
    squared = e @ e
    c = (*c, 0.0) if len(c) % 2 == 0 else c
    result = None
    for k in range(len(c) - 2, 0, -2):
        block = torch.mul(e, c[k])
        block.add_(squared, alpha=c[k + 1])
        if k == 1:
            block.diagonal(dim1=-2, dim2=-1).add_(c[0])
        if result is None:
            result = block
        elif e.ndim == 3:
            result = torch.baddbmm(block, squared, result)
        else:
            result = block + squared @ result
    assert result is not None
    return result


def inverse_sqrt_polynomial(low: float, high: float, tolerance: float) -> InverseSqrtPolynomial | None:
    """The Chebyshev polynomial for (1 + t)^(−1/2) on [low, high] of the least degree whose error bound is in tolerance.

    The bound is that of the truncated Chebyshev series of a function analytic in an ellipse (Trefethen, "Approximation
    Theory and Approximation Practice", theorem 8.2): 2Mρ^(−k)/(ρ−1), M the maximum of the function on the ellipse with
    foci low and high and parameter ρ, taken at its best ρ.

    Args:
        low, high: −1 < low ≤ high. The interval is widened to one of a fixed family, so that polynomials are reused.
        tolerance: absolute; the function is about 1.

    Returns:
        The polynomial, or None where more than ``MAX_DEGREE`` would be needed.
    """
    low, high = _round_down(low), _round_up(high)
    return _cached(low, high, tolerance) if low > -0.9 and high < math.inf else None


def spectral_interval(e: Tensor) -> tuple[float, float]:
    """An interval that holds every eigenvalue of every symmetric matrix of the batch, from trace and Frobenius norm."""
    p = e.shape[-1]
    mean = e.diagonal(dim1=-2, dim2=-1).mean(-1)
    identity = torch.eye(p, dtype=e.dtype, device=e.device)
    radius = (e - mean[..., None, None] * identity).square().sum((-2, -1)).sqrt()
    slack = 8 * p * torch.finfo(e.dtype).eps
    low, high = torch.stack([(mean - radius).min(), (mean + radius).max()]).tolist()
    return low - slack, high + slack


def _round_up(t: float) -> float:
    """Up to a multiple of an eighth of its power of two (and 0 up to 1e-6): few intervals, little lost."""
    if not math.isfinite(t):
        return math.inf
    size = max(abs(t), 1e-6)
    step = 2.0 ** (math.floor(math.log2(size)) - 3)
    return math.ceil(t / step) * step


def _round_down(t: float) -> float:
    return -_round_up(-t)


@functools.lru_cache(maxsize=512)
def _cached(low: float, high: float, tolerance: float) -> InverseSqrtPolynomial | None:
    half, centre = max((high - low) / 2, 1e-9), (high + low) / 2
    # t = −1 is the singularity: ellipses up to the one through it
    reach = (1 + centre) / half
    largest = reach + math.sqrt(reach * reach - 1)
    candidates = []
    for rho in np.geomspace(1 + 1e-3 * (largest - 1), largest, 200, endpoint=False).tolist():
        leftmost = 1 + centre - half * (rho + 1 / rho) / 2
        bound = 2 * leftmost**-0.5 / (rho - 1)
        candidates.append((rho, bound, max(0, math.ceil(math.log(bound / tolerance) / math.log(rho)))))
    degree = min(k for _, _, k in candidates)
    error = min(bound * rho**-degree for rho, bound, _ in candidates)
    if degree > MAX_DEGREE:
        return None
    count = 2 * MAX_DEGREE  # interpolation at so many points gives the series to rounding
    angles = (np.arange(count) + 0.5) * np.pi / count
    values = 1 / np.sqrt(1 + centre + half * np.cos(angles))
    series = [2 / count * float(values @ np.cos(k * angles)) for k in range(degree + 1)]
    series[0] /= 2
    return InverseSqrtPolynomial((centre - half, centre + half), tuple(series), error)
