"""Riemannian metrics on the Stiefel manifold."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from . import geodesics, integration
from .linalg import frobenius_inner, skew, sym

__all__ = ["AlphaMetric", "CanonicalMetric", "EuclideanMetric", "Metric"]


class Metric(ABC):
    """A Riemannian metric. Value objects: immutable, compared by value, without tensors.

    Points are (..., n, p) with XᵀX = I. A metric is defined by :meth:`inner` and its Riesz map
    :meth:`egrad_to_rgrad`, which must be smooth functions of x in torch operations; that is all a new metric has to
    write. The rest then comes from a geodesic integrator and a shooting solver, to the relative tolerance
    ``integration.TOLERANCE`` (1e-9), or an error where that is not reached. A metric with closed forms overrides them.
    """

    @abstractmethod
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """⟨u, v⟩ at x; batch-shaped."""

    @abstractmethod
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """The tangent ξ with ⟨ξ, u⟩ = tr gᵀu for every tangent u."""

    def acceleration(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """S(u, v), symmetric and bilinear, with S(u, u) the ambient acceleration γ''(0) of the geodesic along u.

        −S is the Christoffel form in ambient coordinates: V is parallel along γ iff V' = S(γ', V).
        """
        return integration.polarized_acceleration(self, x, u, v)

    def hessian_correction(self, x: Tensor, egrad: Tensor, u: Tensor) -> Tensor:
        """The ambient Z with tr ZᵀV = ⟨egrad, S(u, V)⟩ for every tangent V; see :meth:`acceleration`."""
        with torch.enable_grad():
            v = torch.zeros_like(u).requires_grad_()
            value = (egrad * self.acceleration(x, u, v)).sum()
            recording = any(t.requires_grad for t in (x, egrad, u))
            return torch.autograd.grad(value, v, create_graph=recording)[0]

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map. The normal part of u, if any, is ignored."""
        return integration.geodesic(self, x, u)[0]

    def exp_differential(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The derivative of s ↦ exp(x, u + s·v) at s = 0."""
        raise NotImplementedError(f"{type(self).__name__} has no exp_differential")

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The u with exp(x, u) = y.

        Raises:
            LogNotConvergedError: none was found.
        """
        return integration.shoot(self, x, y)

    def parallel_transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Carry v along the geodesic from x with velocity u to exp(x, u)."""
        return integration.geodesic(self, x, u, v)[1]

    @property
    def injectivity_radius(self) -> float:
        """A lower bound, for all shapes, of the radius within which exp is injective."""
        raise NotImplementedError(f"{type(self).__name__} has no injectivity_radius")


@dataclass(frozen=True, eq=False)
class AlphaMetric(Metric):
    """The one-parameter family ⟨U, V⟩ = tr Uᵀ(I − a XXᵀ)V with a = (2α+1)/(2(α+1)), α > −1.

    Hüper, Markina & Silva Leite, "A Lagrangian approach to extremal curves on Stiefel manifolds" (2021); Zimmermann &
    Hüper, "Computing the Riemannian logarithm on the Stiefel manifold: metrics, methods, and performance" (2022).
    α = −1/2 is the Euclidean (embedded) metric, α = 0 the canonical one. The geodesics are in
    :mod:`geodescent.manifolds.geodesics`.

    Raises:
        ValueError: α ≤ −1, or not finite.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not -1 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be a finite number above -1, found {self.alpha!r}")

    def __eq__(self, other: object) -> bool:
        # EuclideanMetric() and AlphaMetric(-1/2) are the same metric, so classes do not count
        return self.alpha == other.alpha if isinstance(other, AlphaMetric) else NotImplemented

    def __hash__(self) -> int:
        return hash((AlphaMetric, self.alpha))

    @property
    def a(self) -> float:
        """The coefficient of XXᵀ in ⟨U, V⟩ = tr Uᵀ(I − a XXᵀ)V."""
        return (2 * self.alpha + 1) / (2 * (self.alpha + 1))

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        ambient = frobenius_inner(u, v)
        if self.a == 0:
            return ambient
        return ambient - self.a * frobenius_inner(x.mT @ u, x.mT @ v)

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        # P(G) + (2α+1) XXᵀP(G), and XᵀP(G) = skew(XᵀG)
        inner = x.mT @ g
        rotation = -sym(inner)
        if self.alpha != -0.5:
            rotation = rotation + (2 * self.alpha + 1) * skew(inner)
        return g + x @ rotation

    def acceleration(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return geodesics.acceleration(x, u, v, self.alpha)

    def hessian_correction(self, x: Tensor, egrad: Tensor, u: Tensor) -> Tensor:
        return geodesics.acceleration_adjoint(x, u, egrad, self.alpha)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return geodesics.exp(x, u, self.alpha)

    def exp_differential(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return geodesics.exp_differential(x, u, v, self.alpha)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return geodesics.log(x, y, self.alpha)

    def parallel_transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return geodesics.parallel_transport(x, u, v, self.alpha)

    @property
    def injectivity_radius(self) -> float:
        """π for α = −1/2 (Zimmermann & Stoye 2024) and √(4/5)π for α = 0 (Rentmeesters 2013), both proved.

        For other α the radius that is conjectured (Absil & Mataigne 2024), which is proved only as an upper bound: with
        β = 1/(2(α+1)), π·min(1, √(2β), √2·t/π), t the first root of sin t/t + ((1−β)/β)·cos t, where geodesics close
        or conjugate points appear.
        """
        if self.alpha == 0:
            return math.sqrt(4 / 5) * math.pi
        beta = 1 / (2 * (self.alpha + 1))
        return min(math.pi, math.sqrt(2 * beta) * math.pi, math.sqrt(2) * _first_conjugate_angle(beta))


def _first_conjugate_angle(beta: float) -> float:
    """The first positive root of sin t + ((1−β)/β)·t·cos t, by bisection; π where there is none before."""

    def f(t: float) -> float:
        return math.sin(t) + (1 - beta) / beta * t * math.cos(t)

    # f > 0 near 0 if β ≤ 1, and cos turns negative at π/2; for β > 1 the second term is negative from the start
    samples = [math.pi * i / 4096 for i in range(1, 4097)]
    for low, high in itertools.pairwise(samples):
        if f(low) * f(high) <= 0:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (low, middle) if f(low) * f(middle) <= 0 else (middle, high)
            return low
    return math.pi


class EuclideanMetric(AlphaMetric):
    """The metric of the ambient matrix space, tr UᵀV; the member α = −1/2 of :class:`AlphaMetric`."""

    def __init__(self) -> None:
        super().__init__(-0.5)

    def __repr__(self) -> str:
        return "EuclideanMetric()"


class CanonicalMetric(AlphaMetric):
    """tr Uᵀ(I − XXᵀ/2)V, the metric of the quotient O(n)/O(n−p); the member α = 0 of :class:`AlphaMetric`.

    Edelman, Arias & Smith, "The geometry of algorithms with orthogonality constraints" (1998), section 2.4.
    """

    def __init__(self) -> None:
        super().__init__(0.0)

    def __repr__(self) -> str:
        return "CanonicalMetric()"
