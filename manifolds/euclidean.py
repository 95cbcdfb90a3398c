"""Euclidean space."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .linalg import safe_sqrt
from .manifold import Manifold

__all__ = ["Euclidean"]


@dataclass(frozen=True)
class Euclidean(Manifold):
    """ℝ^shape with the standard inner product over the trailing ``ndim`` dimensions."""

    ndim: int = 1

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        self.check_shape(shape)
        return math.prod(shape[len(shape) - self.ndim :])

    def _dims(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A standard normal tensor."""
        self.check_shape(shape)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def project_point(self, a: Tensor) -> Tensor:
        return a

    def point_error(self, x: Tensor) -> Tensor:
        """0, and NaN where ``x`` is not finite."""
        return _batch_max((x - x).abs(), self._dims())

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return z

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        return self.point_error(u)

    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        u = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        norm = safe_sqrt(self.inner(x, u, u))
        return u / norm.reshape(norm.shape + (1,) * self.ndim)

    def tangent_basis(self, x: Tensor) -> Tensor:
        """The unit vectors of the space."""
        batch, shape = x.shape[: x.ndim - self.ndim], x.shape[x.ndim - self.ndim :]
        units = torch.eye(math.prod(shape), dtype=x.dtype, device=x.device).reshape(-1, *shape)
        return units.expand(*batch, *units.shape)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum(self._dims()) if self.ndim else u * v

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return g

    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        return ehess_u

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x, y - x)

    @property
    def injectivity_radius(self) -> float:
        return math.inf

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return v

    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return v


def _batch_max(a: Tensor, dims: tuple[int, ...]) -> Tensor:
    return a.amax(dims) if dims else a
