"""Euclidean space."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .linalg import compute_dtype, working_precision
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
        self.check_shape(a.shape)
        return a

    def point_error(self, x: Tensor) -> Tensor:
        """0, and NaN where ``x`` is not finite."""
        self.check_shape(x.shape)
        difference = (x - x).to(compute_dtype(x.dtype)).abs()
        if not self.ndim:
            return difference
        return difference.amax(self._dims()) if difference.numel() else difference.sum(self._dims())

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self._broadcast(x, z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        return self.point_error(self._broadcast(x, u))

    def tangent_basis(self, x: Tensor) -> Tensor:
        """The unit vectors of the space."""
        self.check_shape(x.shape)
        batch, shape = x.shape[: x.ndim - self.ndim], x.shape[x.ndim - self.ndim :]
        units = torch.eye(math.prod(shape), dtype=x.dtype, device=x.device).reshape(-1, *shape)
        return units.expand(*batch, *units.shape)

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        product = self._broadcast(x, u * v)
        return product.sum(self._dims()) if self.ndim else product

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self._broadcast(x, g)

    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        return self._broadcast(x, ehess_u)

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return x + u

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return y - x

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x, self.log(x, y))

    @property
    def injectivity_radius(self) -> float:
        return math.inf

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.exp(x, u)

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        return self.log(x, y)

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._broadcast(x, v)

    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._broadcast(x, v)

    def _broadcast(self, x: Tensor, v: Tensor) -> Tensor:
        """``v``, for every point of the batch of ``x``."""
        self.check_shape(x.shape)
        return v if v.shape == x.shape else v.expand(torch.broadcast_shapes(v.shape, x.shape))
