"""Vector transports: carrying a tangent vector along a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .manifold import Manifold

__all__ = ["ProjectionTransport", "VectorTransport"]


class VectorTransport(ABC):
    """A vector transport associated with a manifold's retraction. Value objects: immutable, compared by value."""

    isometric: ClassVar[bool]
    """Whether the metric's inner products are preserved exactly."""

    @abstractmethod
    def transport(self, manifold: Manifold, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        """Carry ``v`` from ``x`` to ``y = manifold.retract(x, u)``; pass ``y`` where it is known already."""


@dataclass(frozen=True)
class ProjectionTransport(VectorTransport):
    """T(v) = P_y(v), the projection to the new tangent space.

    Absil, Mahony & Sepulchre (2008), section 8.1.3. It never lengthens a vector in the ambient norm.
    """

    isometric: ClassVar[bool] = False

    def transport(self, manifold: Manifold, x: Tensor, u: Tensor, v: Tensor, y: Tensor | None = None) -> Tensor:
        return manifold.project(manifold.retract(x, u) if y is None else y, v)
