"""Riemannian metrics on the Stiefel manifold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .linalg import frobenius_inner, newton_schulz_polish, skew, sym

__all__ = ["AlphaMetric", "CanonicalMetric", "EuclideanMetric", "Metric"]


class Metric(ABC):
    """A Riemannian metric. Value objects: immutable, compared by value, without tensors.

    Points are (..., n, p) with XᵀX = I. A metric is defined by :meth:`inner` and its Riesz map
    :meth:`egrad_to_rgrad`.
    """

    @abstractmethod
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """⟨u, v⟩ at x; batch-shaped."""

    @abstractmethod
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """The tangent ξ with ⟨ξ, u⟩ = tr gᵀu for every tangent u."""

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map of this metric."""
        raise NotImplementedError(f"{type(self).__name__} has no exp")


@dataclass(frozen=True, eq=False)
class AlphaMetric(Metric):
    """The one-parameter family ⟨U, V⟩ = tr Uᵀ(I − a XXᵀ)V with a = (2α+1)/(2(α+1)), α > −1.

    Hüper, Markina & Silva Leite, "A Lagrangian approach to extremal curves on Stiefel manifolds" (2021); Zimmermann &
    Hüper, "Computing the Riemannian logarithm on the Stiefel manifold: metrics, methods, and performance" (2022).
    α = −1/2 is the Euclidean (embedded) metric, α = 0 the canonical one.

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

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """Exp_x(u) in p-sized factors.

        With A = XᵀU and B = U − XA, the generator of the geodesic (math of the two papers above) maps the columns of
        [X, B] among themselves, M[X, B] = [X, B][[A/(α+1), −BᵀB], [I, 0]]. One 2p×2p exponential in that
        (not orthonormal) basis therefore gives expm(M)X without a QR factorization, and with a derivative also where
        B loses rank, as it does at u = 0.
        """
        p = x.shape[-1]
        inner = x.mT @ u
        a = skew(inner)
        b = u - x @ inner
        gram = b.mT @ b
        # B is divided by its size s to balance the two blocks, or the exponential would lose digits to scaling
        s = (gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt() / p**0.5).clamp_min(1e-3)[..., None, None]
        identity = torch.eye(p, dtype=x.dtype, device=x.device).expand(gram.shape)
        top = torch.cat([a / (self.alpha + 1), -gram / s], -1)
        bottom = torch.cat([s * identity, torch.zeros_like(identity)], -1)
        block = torch.linalg.matrix_exp(torch.cat([top, bottom], -2))[..., :p]
        y = x @ block[..., :p, :] + (b / s) @ block[..., p:, :]
        if self.alpha != 0:
            y = y @ torch.linalg.matrix_exp(self.alpha / (self.alpha + 1) * a)
        return newton_schulz_polish(y)


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
