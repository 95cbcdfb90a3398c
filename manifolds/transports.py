"""Vector transports on the Stiefel manifold: carrying a tangent vector along a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .geodesics import split
from .linalg import solve_left, working_precision
from .retractions import Cayley, Exponential

if TYPE_CHECKING:
    from .stiefel import Stiefel

__all__ = [
    "CayleyTransport",
    "DifferentiatedTransport",
    "ParallelTransport",
    "ProjectionTransport",
    "VectorTransport",
]


class VectorTransport(ABC):
    """A vector transport associated with a manifold's retraction. Value objects: immutable, compared by value."""

    isometric: ClassVar[bool]
    """Whether the metric's inner products are preserved exactly."""

    def check(self, manifold: Stiefel) -> None:
        """Raise ``ValueError`` where this transport does not end where the manifold's retraction does."""
        return

    @abstractmethod
    def transport(self, manifold: Stiefel, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        """Carry ``v`` from ``x`` to ``y = manifold.retract(x, u)``; pass ``y`` where it is known already."""


@dataclass(frozen=True)
class ProjectionTransport(VectorTransport):
    """T(v) = P_y(v), the projection to the new tangent space.

    Absil, Mahony & Sepulchre (2008), section 8.1.3. It never lengthens a vector in the ambient norm.
    """

    isometric: ClassVar[bool] = False

    def transport(self, manifold: Stiefel, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        return manifold.project(manifold.retract(x, u) if y is None else y, v)


@dataclass(frozen=True)
class DifferentiatedTransport(VectorTransport):
    """T(v) = DR_x(u)[v], the differential of the manifold's retraction R (Absil, Mahony & Sepulchre 2008, 8.1.2)."""

    isometric: ClassVar[bool] = False

    def transport(self, manifold: Stiefel, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        return manifold.pushforward(x, u, v)


@dataclass(frozen=True)
class CayleyTransport(VectorTransport):
    """T(v) = (I − W/2)⁻¹(I + W/2)v, the orthogonal matrix of the Cayley retraction; goes with that retraction only.

    Zhu, "A Riemannian conjugate gradient method for optimization on the Stiefel manifold" (2017). Left multiplication
    by an orthogonal matrix is an isometry of every α-metric. For v = xA₂ + B₂ and K the p×p matrix of the retraction,
    z₁ = K⁻¹(A₂ − BᵀB₂/2) and T(v) = x(2z₁ − A₂) + B₂ + Bz₁.
    """

    isometric: ClassVar[bool] = True

    def check(self, manifold: Stiefel) -> None:
        if not isinstance(manifold.retraction, Cayley):
            raise ValueError(
                f"CayleyTransport() ends at the Cayley retraction's point, and retraction is {manifold.retraction!r}; "
                "use retraction=Cayley(), or another vector_transport"
            )

    @working_precision
    def transport(self, manifold: Stiefel, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        (a, b), (a2, b2) = split(x, u), split(x, v)
        z = solve_left(Cayley.core(a, b), a2 - b.mT @ b2 / 2)
        return x @ (2 * z - a2) + b2 + b @ z


@dataclass(frozen=True)
class ParallelTransport(VectorTransport):
    """Parallel transport along the geodesic, by the Levi-Civita connection; goes with the exponential retraction.

    Exact for the α-metrics; for another metric to the tolerance of the integrator.
    """

    isometric: ClassVar[bool] = True

    def check(self, manifold: Stiefel) -> None:
        found = manifold.retraction
        if not isinstance(found, Exponential) or found.with_metric(manifold.metric) != Exponential(manifold.metric):
            raise ValueError(
                f"ParallelTransport() ends at the exponential map's point, and retraction is {found!r}; "
                "use retraction=Exponential(), or another vector_transport"
            )

    @working_precision
    def transport(self, manifold: Stiefel, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        return manifold.metric.parallel_transport(x, u, v)
