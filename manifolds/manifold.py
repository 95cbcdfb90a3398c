"""What every manifold offers: the interface that optimizers, layers and analysis are written against."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NoReturn

import torch
from torch import Tensor

from .errors import NotOnManifoldError
from .linalg import default_atol, safe_sqrt, working_precision

__all__ = ["Manifold"]


class Manifold(ABC):
    """A Riemannian manifold whose points are the trailing ``ndim`` dimensions of a tensor.

    Everything before those dimensions is batch and broadcasts. Argument order is the base point first, then the
    direction, then what is carried. Manifolds hold no tensors: device and dtype follow the point. They are immutable,
    compare and hash by value and pickle; subclasses are frozen dataclasses.

    Two maps that are often merged are kept apart here: :meth:`project` is the orthogonal projection of an ambient
    vector to the tangent space (idempotent, self-adjoint), :meth:`egrad_to_rgrad` the Riesz representer of an ambient
    gradient in this manifold's metric. They agree for the embedded metric alone.

    A new space implements the abstract methods; a method that it lacks raises ``NotImplementedError`` with the names
    of the class and the method. :meth:`exp` is the exponential map of *this* metric; a retraction is never offered
    under that name.
    """

    ndim: int

    def _missing(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {method}")

    # --- shapes -------------------------------------------------------------------------------------------------

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless the trailing dimensions can hold a point."""
        if len(shape) < self.ndim:
            raise ValueError(f"{self!r} needs points of at least {self.ndim} dimensions, found shape {tuple(shape)}")

    @abstractmethod
    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """Dimension of the manifold of points of trailing shape ``shape`` (batch dimensions do not count)."""

    # --- points -------------------------------------------------------------------------------------------------

    @abstractmethod
    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A random point of the given shape, batch dimensions first."""

    @abstractmethod
    def project_point(self, a: Tensor) -> Tensor:
        """The point nearest to the ambient tensor ``a`` in the Frobenius norm."""

    @abstractmethod
    def point_error(self, x: Tensor) -> Tensor:
        """How far ``x`` is from satisfying the defining equations; batch-shaped, 0 on the manifold."""

    def check_point(self, x: Tensor, atol: float | None = None, *, name: str = "x") -> None:
        """Raise unless ``x`` is on the manifold within ``atol`` (by default what rounding to its dtype explains).

        Args:
            name: how the error message calls the tensor.

        Raises:
            NotOnManifoldError: with the error found. A NaN is an error.
            ValueError: the shape cannot hold a point.
        """
        self.check_shape(x.shape)
        atol = default_atol(x.dtype) if atol is None else atol
        self._check_errors(self.point_error(x), atol, f"{name} is not on {self!r}: its point error", "project_point")

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @abstractmethod
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Orthogonal projection of the ambient ``z`` to the tangent space at ``x``. Idempotent and self-adjoint."""

    @abstractmethod
    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """How far ``u`` is from satisfying the tangent equations at ``x``; batch-shaped."""

    def check_tangent(self, x: Tensor, u: Tensor, atol: float | None = None, *, name: str = "u") -> None:
        """Raise unless ``u`` is tangent at ``x`` within ``atol``, by default relative to the largest entry of ``u``.

        Raises:
            NotOnManifoldError: with the error found. A NaN is an error.
        """
        if atol is None:
            size = float(u.abs().max()) if u.numel() and not u.is_meta else 1.0
            atol = default_atol(u.dtype) * max(1.0, size) if math.isfinite(size) else 0.0
        self._check_errors(
            self.tangent_error(x, u), atol, f"{name} is not tangent to {self!r}: its tangent error", "project"
        )

    @staticmethod
    def _check_errors(errors: Tensor, atol: float, subject: str, cure: str) -> None:
        if errors.is_meta or errors.numel() == 0:
            return
        worst = float(errors.max())  # max() propagates NaN
        if not worst <= atol or math.isinf(worst):
            where = f" (batch index {_argmax_index(errors)})" if errors.ndim else ""
            raise NotOnManifoldError(
                f"{subject} is {worst:.3g}{where}, allowed is {atol:.3g}; use manifold.{cure}(...) if that is meant",
                worst,
                atol,
            )

    @working_precision
    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random tangent vector at ``x`` of unit norm in the metric, and 0 where the space is a point.

        This default projects and normalizes a Gaussian tensor. It draws again where next to nothing of it is tangent,
        which is no rare event: a generator of the seed that made ``x`` repeats the numbers of ``x`` itself.
        """
        if self.dim(x.shape) == 0:
            return torch.zeros_like(x)
        dims = tuple(range(-self.ndim, 0))
        u = torch.zeros_like(x)
        good = torch.zeros(x.shape[: x.ndim - self.ndim] + (1,) * self.ndim, dtype=torch.bool, device=x.device)
        for _ in range(16):
            z = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
            tangent = self.project(x, z)
            u = torch.where(good, u, tangent)
            kept, drawn = (a.square().sum(dims, keepdim=True) if dims else a.square() for a in (tangent, z))
            good = good | (kept > torch.finfo(x.dtype).eps * drawn)
            if x.is_meta or bool(good.all()):
                break
        for _ in range(2):  # twice, for what rounding left of the normal part of a short one
            u = self.project(x, u / self.norm(x, u).reshape(good.shape))
        return u / self.norm(x, u).reshape(good.shape)

    @working_precision
    def tangent_basis(self, x: Tensor) -> Tensor:
        """A basis of the tangent space at ``x``, orthonormal in the metric: (*batch, dim, *point shape).

        This default projects the ambient unit vectors and diagonalizes their Gram matrix in the metric, so it serves
        any metric; its cost is cubic in the number of entries of a point.
        """
        batch, shape = x.shape[: x.ndim - self.ndim], x.shape[x.ndim - self.ndim :]
        size = math.prod(shape)
        units = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *(1,) * len(batch), *shape)
        spanning = self.project(x, units.expand(size, *x.shape))
        gram = self.inner(x, spanning.unsqueeze(0), spanning.unsqueeze(1)).movedim((0, 1), (-2, -1))
        values, vectors = torch.linalg.eigh(gram)
        dim = self.dim(x.shape)
        coefficients = vectors[..., size - dim :] * values[..., None, size - dim :].rsqrt()
        flat = coefficients.mT @ spanning.movedim(0, len(batch)).reshape(*batch, size, size)
        return flat.reshape(*batch, dim, *shape)

    # --- metric -------------------------------------------------------------------------------------------------

    @abstractmethod
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The metric ⟨u, v⟩ at ``x``; batch-shaped."""

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        """The metric's norm of ``u`` at ``x``; batch-shaped, with derivative 0 at u = 0."""
        return safe_sqrt(self.inner(x, u, u))

    @abstractmethod
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """The Riemannian gradient: the tangent ξ with ⟨ξ, u⟩ = tr gᵀu for every tangent u (Riesz representer)."""

    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """The Riemannian Hessian applied to ``u``, from the ambient gradient and Hessian-vector product."""
        self._missing("ehess_to_rhess")

    # --- geodesics ----------------------------------------------------------------------------------------------

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map of this manifold's metric."""
        self._missing("exp")

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The inverse of :meth:`exp` within the injectivity radius."""
        self._missing("log")

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """The geodesic distance; batch-shaped."""
        self._missing("dist")

    @property
    def injectivity_radius(self) -> float:
        """A lower bound, for all shapes, of the radius within which :meth:`log` inverts :meth:`exp`."""
        self._missing("injectivity_radius")

    # --- retraction and transport ---------------------------------------------------------------------------------

    @abstractmethod
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """Move from ``x`` along the tangent vector ``u``, to first order as the exponential map does."""

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector that :meth:`retract` takes to ``y``."""
        self._missing("inverse_retract")

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v, tangent at ``retract(x, u)``."""
        self._missing("pushforward")

    @property
    def retraction_order(self) -> int:
        """1: the error of :meth:`retract` against :meth:`exp` is O(t²); 2: it is O(t³)."""
        self._missing("retraction_order")

    @property
    def transport_is_isometric(self) -> bool:
        """Whether :meth:`transport` preserves the metric exactly."""
        return False

    @abstractmethod
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Carry the tangent vector ``v`` from ``x`` to ``retract(x, u)``."""

    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``retract(x, u)`` and each of ``vectors`` transported there; the two share most of their arithmetic."""
        return self.retract(x, u), tuple(self.transport(x, u, v) for v in vectors)


def _argmax_index(errors: Tensor) -> tuple[int, ...]:
    flat = int(errors.isnan().flatten().int().argmax()) if bool(errors.isnan().any()) else int(errors.argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape))
