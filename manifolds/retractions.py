"""Retractions on the Stiefel manifold: first-order stand-ins for the exponential map.

The order of a retraction belongs to the pair (retraction, metric): 1 means an error O(t²) against that metric's
exponential map, 2 an error O(t³). ``order`` says what is guaranteed for every shape 1 < p < n; at p = 1 all of these
are of order 2, and at p = n the polar and Cayley retractions are, for every metric of the α-family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .geodesics import split
from .linalg import (
    lu_unpivoted,
    newton_schulz_polish,
    polar_differential,
    polar_factor,
    qr_positive,
    solve_right,
    stein_lyapunov_solve,
    working_precision,
)
from .metrics import CanonicalMetric, EuclideanMetric, Metric
from .polynomial import InverseSqrtPolynomial, inverse_sqrt_polynomial

__all__ = ["QR", "Cayley", "Exponential", "Polar", "Retraction"]


class Retraction(ABC):
    """A retraction R with R_x(0) = x and DR_x(0) = id. Value objects: immutable, compared by value."""

    @abstractmethod
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """R_x(u) for x, u of shape (..., n, p), n ≥ p; batches broadcast."""

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent u at x with R_x(u) = y.

        Raises:
            ValueError: y is not in the range of R_x.
        """
        raise NotImplementedError(f"{type(self).__name__} has no inverse_retract")

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential DR_x(u)[v], tangent at R_x(u), for v tangent at x."""
        raise NotImplementedError(f"{type(self).__name__} has no pushforward")

    def with_metric(self, metric: Metric) -> Retraction:
        """The same retraction on a manifold with this metric; only :class:`Exponential` depends on it."""
        return self

    @abstractmethod
    def order(self, metric: Metric) -> int:
        """1: the error against ``metric``'s exponential map is O(t²); 2: it is O(t³). See the module."""


@dataclass(frozen=True)
class Polar(Retraction):
    """R_x(u) = (x + u)(I + uᵀu)^(−1/2), the point nearest to x + u.

    Absil & Malick, "Projection-like retractions on matrix manifolds" (2012). Computed as the polar factor of x + u
    with its true Gram matrix, so that rounding in x is damped, not carried along.

    Args:
        method: "auto", "exact" or "polynomial". All agree to rounding. A polynomial in the Gram matrix is two products
            with n and a few of p×p where the step is short; see :meth:`polynomial`.
    """

    method: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in ("auto", "exact", "polynomial"):
            raise ValueError(f"method must be 'auto', 'exact' or 'polynomial', found {self.method!r}")

    def __repr__(self) -> str:
        return "Polar()" if self.method == "auto" else f"Polar(method={self.method!r})"

    @staticmethod
    def polynomial(step_norm: float, tolerance: float) -> InverseSqrtPolynomial | None:
        """The polynomial q with (x + u)·q(uᵀu) the polar factor to ``tolerance``, for steps ‖u‖₂ ≤ ``step_norm``.

        Its ``degree`` follows from the bound on the step, such as a trust radius, before any step is taken, and
        ``error_bound`` bounds |q(t) − (1+t)^(−1/2)|, so that of the retraction is √(1 + ‖u‖₂²) times that. None where
        the degree would be too high.
        """
        return inverse_sqrt_polynomial(0.0, step_norm**2, tolerance)

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return polar_factor(x + u, self.method)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        # y = (x+u)S⁻¹ with S symmetric positive: u = yS − x is tangent iff MS + SMᵀ = 2I, M = xᵀy
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        m = x.mT @ y
        try:
            s = stein_lyapunov_solve(m, 2 * identity.expand_as(m))
        except ValueError as error:
            raise ValueError(_out_of_range("polar")) from error
        if s.numel() and not bool((torch.linalg.cholesky_ex(s).info == 0).all()):
            raise ValueError(_out_of_range("polar"))
        return y @ s - x

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return polar_differential(x + u, self.retract(x, u), v)

    def order(self, metric: Metric) -> int:
        return 2 if metric == EuclideanMetric() else 1


@dataclass(frozen=True)
class QR(Retraction):
    """R_x(u) = qf(x + u), the Q factor with diag R > 0.

    Absil, Mahony & Sepulchre, "Optimization Algorithms on Matrix Manifolds" (2008), example 4.1.3; inverse:
    Kaneko, Fiori & Tanaka, "Empirical arithmetic averaging over the compact Stiefel manifold" (2013).
    """

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return qr_positive(x + u)[0]

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        # u = yR − x is tangent iff MR + RᵀMᵀ = 2I, M = xᵀy, for upper triangular R. With M = LU, V = URL⁻ᵀ is upper
        # triangular too, and V + Vᵀ = 2L⁻¹L⁻ᵀ gives it entry by entry.
        lower, upper = lu_unpivoted(x.mT @ y)
        pivots = upper.diagonal(dim1=-2, dim2=-1)
        if not bool((pivots > 0).all()):  # then, and only then, diag R > 0
            raise ValueError(_out_of_range("QR"))
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        c = inverse @ inverse.mT
        v = 2 * c.triu(1) + torch.diag_embed(c.diagonal(dim1=-2, dim2=-1))
        return y @ torch.linalg.solve_triangular(upper, v @ lower.mT, upper=True) - x

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        # d(QR): with W = V R⁻¹, dQ = Q(L − Lᵀ) + (I − QQᵀ)W, L the strictly lower part of QᵀW
        q, r = qr_positive(x + u)
        w = torch.linalg.solve_triangular(r, v, upper=True, left=False)
        inner = q.mT @ w
        lower = inner.tril(-1)
        return q @ (lower - lower.mT - inner) + w

    def order(self, metric: Metric) -> int:
        return 1


@dataclass(frozen=True)
class Cayley(Retraction):
    """R_x(u) = (I − W/2)⁻¹(I + W/2)x with W = (Pu)xᵀ − x(Pu)ᵀ, P = I − xxᵀ/2.

    Wen & Yin, "A feasible method for optimization with orthogonality constraints" (2013). Computed in p×p: with
    A = xᵀu and B = u − xA it equals −x + (2x + B)(I + BᵀB/4 − A/2)⁻¹, whose matrix has symmetric part ≥ I, so it
    never breaks down. (Without P the derivative at 0 is u + xxᵀu: not a retraction.) Inverse: Zhu & Sato,
    "Riemannian conjugate gradient methods with inverse retraction" (2020).
    """

    @staticmethod
    def core(a: Tensor, b: Tensor) -> Tensor:
        """I + BᵀB/4 − A/2, the p×p matrix of a step u = xA + B."""
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        return identity + b.mT @ b / 4 - a / 2

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        a, b = split(x, u)
        return newton_schulz_polish(solve_right(2 * x + b, self.core(a, b)) - x)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        k = identity + x.mT @ y
        u = 2 * (solve_right(y, k) + solve_right(x, k.mT) - x)
        # k is singular where y is out of range, but its factors may be noise and not zero: see whether u leads to y
        if not bool(((self.retract(x, u) - y).abs() <= 1e4 * torch.finfo(x.dtype).eps).all()):
            raise ValueError(_out_of_range("Cayley"))
        return u

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        (a, b), (da, db) = split(x, u), split(x, v)
        k = self.core(a, b)
        dk = (db.mT @ b + b.mT @ db) / 4 - da / 2
        return solve_right(db - solve_right(2 * x + b, k) @ dk, k)

    def order(self, metric: Metric) -> int:
        return 2 if metric == CanonicalMetric() else 1


@dataclass(frozen=True)
class Exponential(Retraction):
    """R_x(u) = Exp_x(u), the exponential map of a metric; of the manifold's own where none is named.

    Args:
        metric: whose geodesics to follow. None: :class:`Stiefel` fills in its metric.
    """

    metric: Metric | None = None

    def with_metric(self, metric: Metric) -> Exponential:
        return Exponential(metric) if self.metric is None else self

    def _own(self) -> Metric:
        if self.metric is None:
            raise ValueError("Exponential() follows the metric of a manifold: use it through one, or name a metric")
        return self.metric

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self._own().exp(x, u)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        return self._own().log(x, y)

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._own().exp_differential(x, u, v)

    def order(self, metric: Metric) -> int:
        """2 for its own metric, where it is exact; 1 for any other."""
        return 2 if self.with_metric(metric) == Exponential(metric) else 1


def _out_of_range(kind: str) -> str:
    return f"y is not in the range of the {kind} retraction at x: the two points are too far apart"
