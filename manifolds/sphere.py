"""The unit sphere, and what it shares with matrices of unit columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import LogNotConvergedError
from .linalg import compute_dtype, safe_sqrt, working_precision
from .manifold import Manifold
from .spectral import atan_sqrt_ratio, cos_sqrt, sinc_sqrt

__all__ = ["Sphere"]


class UnitVectors(Manifold):
    """Tensors whose vectors along one axis have length 1, with the metric of the ambient space.

    The common part of :class:`Sphere` (one vector a point) and :class:`Oblique` (the columns of a matrix).
    """

    _axis: ClassVar[int]

    def _dot(self, u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum(self._axis, keepdim=True)

    def _length(self, u: Tensor) -> Tensor:
        return safe_sqrt(self._dot(u, u))

    def _point_dims(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    # --- shapes -------------------------------------------------------------------------------------------------

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[self._axis] < 1:
            raise ValueError(f"a unit vector needs at least one entry, found shape {tuple(shape)}")

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """n − 1 for each vector of n entries."""
        self.check_shape(shape)
        n = shape[self._axis]
        return math.prod(shape[len(shape) - self.ndim :]) // n * (n - 1)

    # --- points -------------------------------------------------------------------------------------------------

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Uniform: each vector is a Gaussian one divided by its length."""
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        gaussian = torch.randn(shape, dtype=compute_dtype(dtype), device=device, generator=generator)
        return self._unit(gaussian).to(dtype)

    def _unit(self, a: Tensor) -> Tensor:
        # lengths are taken of vectors scaled by their largest entry: no overflow, and the same for 1e-200·a
        largest = a.detach().abs().amax(self._axis, keepdim=True)
        a = a / torch.where(largest > 0, largest, torch.ones_like(largest))
        first = torch.zeros_like(a)
        first.select(self._axis, 0).fill_(1)
        return torch.where(largest > 0, a / torch.where(largest > 0, self._length(a), torch.ones_like(largest)), first)

    @working_precision
    def project_point(self, a: Tensor) -> Tensor:
        """Each vector divided by its length. Of a zero vector, to which every point is nearest, the first unit vector.

        Raises:
            ValueError: ``a`` has NaN or infinite entries.
        """
        self.check_shape(a.shape)
        if not a.is_meta and not bool(torch.isfinite(a).all()):
            raise ValueError(f"cannot project a tensor with NaN or infinite entries to {self!r}")
        return self._unit(a)

    def point_error(self, x: Tensor) -> Tensor:
        """The largest |‖x‖² − 1| of a vector, computed in float32 or better."""
        self.check_shape(x.shape)
        x = x.to(compute_dtype(x.dtype))
        return self._largest(self._dot(x, x) - 1)

    def _largest(self, a: Tensor) -> Tensor:
        return a.abs().amax(self._point_dims()) if a.shape[-1] else a.new_zeros(a.shape[: a.ndim - self.ndim])

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """z − x⟨x, z⟩ for each vector."""
        self.check_shape(x.shape)
        return z - x * self._dot(x, z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """The largest |⟨x, u⟩| of a vector, computed in float32 or better."""
        self.check_shape(x.shape)
        return self._largest(self._dot(x.to(compute_dtype(x.dtype)), u.to(compute_dtype(u.dtype))))

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return (u * v).sum(self._point_dims())

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.project(x, g)

    @working_precision
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """P(∇²f[u] − u⟨x, ∇f⟩) for each vector (Absil, Mahony & Trumpf 2013)."""
        self.check_shape(x.shape)
        return self.project(x, ehess_u - u * self._dot(x, egrad))

    # --- geodesics ----------------------------------------------------------------------------------------------

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """x cos‖u‖ + u sin‖u‖/‖u‖ for each vector. The normal part of ``u``, if any, is ignored."""
        u = self.project(x, u)
        t = self._dot(u, u)
        return self._unit(x * cos_sqrt(t) + u * sinc_sqrt(t))

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortest tangent vector that :meth:`exp` takes to ``y``.

        Raises:
            LogNotConvergedError: ``y`` holds the antipode of a vector of ``x``, to which every direction leads.
        """
        self.check_shape(x.shape)
        away, along = self._dot(y - x, y - x) / 4, self._dot(x + y, x + y) / 4  # sin² and cos² of half the angle
        if not x.is_meta and bool((along.detach() <= (8 * torch.finfo(along.dtype).eps) ** 2).any()):
            raise LogNotConvergedError(
                "y is the antipode of x, or a vector of y that of the same vector of x: the shortest geodesic is not "
                "unique (a residual of 0 means that y can be reached)",
                0.0 if x.shape[self._axis] > 1 else 2.0,
            )
        # of y − x and y + x, which have the same tangent part, the shorter one has the digits of a tiny sine
        obtuse = away >= along
        sine = self.project(x, torch.where(obtuse, y + x, y - x))
        one = torch.ones_like(away)
        near, far = torch.where(obtuse, one, along), torch.where(obtuse, away, one)
        # θ/sin θ = 2 arctan(√(away/along)) / (2 √(away · along)), or by the sine itself where it vanishes with along
        acute = atan_sqrt_ratio(torch.where(obtuse, one, away) / near) / near
        angle = 2 * torch.atan2(far.sqrt(), torch.where(obtuse, along, one).sqrt())
        ratio = torch.where(obtuse, angle / torch.where(obtuse, self._dot(sine, sine), one).sqrt(), acute)
        return self.project(x, sine * ratio)

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """2 arctan(‖x − y‖/‖x + y‖) for each vector, exact at every angle (Kahan); their root sum of squares.

        The derivative at coincident and at antipodal points, where there is none, is taken as 0. On the two points of
        S⁰, which no geodesic joins, it is the angle π.
        """
        self.check_shape(x.shape)
        angles = 2 * torch.atan2(self._length(x - y), self._length(x + y))
        return safe_sqrt(angles.square().sum(self._point_dims()))

    @property
    def injectivity_radius(self) -> float:
        return math.pi

    # --- retraction and transport ---------------------------------------------------------------------------------

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """(x + u)/‖x + u‖ for each vector, a second-order retraction."""
        self.check_shape(x.shape)
        return self._unit(x + u)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """y/⟨x, y⟩ − x for each vector.

        Raises:
            ValueError: a vector of ``y`` is a right angle or more away from its vector of ``x``.
        """
        self.check_shape(x.shape)
        cosine = self._dot(x, y)
        if not x.is_meta and not bool((cosine > 0).all()):
            raise ValueError("y is not in the range of the retraction at x: they are a right angle or more apart")
        return self.project(x, y) / cosine

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v: (v − y⟨y, v⟩)/‖x + u‖ for each vector, at y."""
        return self.project(self.retract(x, u), v) / self._length(x + u)

    @working_precision
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Parallel transport along the great circle to ``retract(x, u)``: v − ⟨y, v⟩(x + y)/(1 + ⟨x, y⟩)."""
        return self._transport(x, self.retract(x, u), v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v - (x + y) * (self._dot(y, v) / (1 + self._dot(x, y)))

    @working_precision
    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.retract(x, u)
        return y, tuple(self._transport(x, y, v) for v in vectors)


@dataclass(frozen=True)
class Sphere(UnitVectors):
    """Sⁿ⁻¹ = {x ∈ ℝⁿ : ‖x‖ = 1}: points are the last dimension of a tensor. The metric is that of ℝⁿ.

    ``transport`` is parallel transport, exact and isometric; ``retract`` is the normalization of x + u, of order 2.
    Absil, Mahony & Sepulchre, "Optimization Algorithms on Matrix Manifolds" (2008), examples 3.6.1, 4.1.1 and 8.1.1.

    Example:
        >>> import torch
        >>> m = Sphere()
        >>> north, east = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
        >>> round(float(m.dist(north, east)), 4)
        1.5708
    """

    ndim = 1
    _axis = -1
