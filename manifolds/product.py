"""Products of manifolds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .linalg import compute_dtype, safe_sqrt, working_precision
from .manifold import Manifold

__all__ = ["Product"]

Factor = tuple[Manifold, tuple[int, ...]]


@dataclass(frozen=True, init=False, repr=False)
class Product(Manifold):
    """The product of manifolds with the sum of their metrics.

    A point is one vector, the last dimension of a tensor: the entries of a point of each factor, flattened and
    concatenated in the order of the factors. :meth:`pack` makes it from the points and :meth:`unpack` gives them back,
    so one tensor holds the whole, batches included, and an optimizer sees one parameter. Every map acts on each factor
    by itself; ``dist`` and ``norm`` are roots of sums of squares.

    Args:
        factors: pairs of a manifold and the shape of its points, batch dimensions left out.

    Raises:
        TypeError: a factor is not such a pair.
        ValueError: no factors, or a shape that cannot hold a point of its manifold.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Euclidean, Stiefel
        >>> m = Product((Stiefel(), (5, 3)), (Euclidean(), (4,)))
        >>> x = m.random_point(2, m.size, dtype=torch.float64)
        >>> [tuple(part.shape) for part in m.unpack(x)]
        [(2, 5, 3), (2, 4)]
        >>> torch.equal(m.pack(*m.unpack(x)), x)
        True
    """

    factors: tuple[Factor, ...]

    ndim = 1

    def __init__(self, *factors: tuple[Manifold, Sequence[int]]) -> None:
        if not factors:
            raise ValueError("a product needs at least one factor, Product((manifold, shape), ...)")
        checked = []
        for factor in factors:
            try:
                manifold, shape = factor
                shape = tuple(int(n) for n in shape)
            except (TypeError, ValueError):
                raise TypeError(f"a factor must be a pair (manifold, shape of its points), found {factor!r}") from None
            if not isinstance(manifold, Manifold):
                raise TypeError(f"a factor must be a pair (manifold, shape of its points), found {factor!r}")
            if len(shape) != manifold.ndim:
                raise ValueError(f"points of {manifold!r} have {manifold.ndim} dimensions, found the shape {shape}")
            manifold.check_shape(shape)
            checked.append((manifold, shape))
        object.__setattr__(self, "factors", tuple(checked))

    def __repr__(self) -> str:
        return f"Product({', '.join(repr(factor) for factor in self.factors)})"

    # --- the vector and its parts ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of entries of a point."""
        return sum(math.prod(shape) for _, shape in self.factors)

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-1] != self.size:
            raise ValueError(
                f"a point of {self!r} is a vector of {self.size} entries, found shape {tuple(shape)}; "
                "pack(*points) makes one"
            )

    def pack(self, *parts: Tensor) -> Tensor:
        """One tensor (..., size) of a point (or tangent vector) of each factor; their batches broadcast.

        Raises:
            ValueError: not one tensor for each factor, or of another shape than the factor's.
        """
        if len(parts) != len(self.factors):
            raise ValueError(f"pack needs one tensor for each of the {len(self.factors)} factors, found {len(parts)}")
        for part, (manifold, shape) in zip(parts, self.factors, strict=True):
            if part.shape[part.ndim - len(shape) :] != shape or part.ndim < len(shape):
                raise ValueError(f"the part on {manifold!r} must have shape (..., {shape}), found {tuple(part.shape)}")
        batch = torch.broadcast_shapes(
            *(part.shape[: part.ndim - len(shape)] for part, (_, shape) in zip(parts, self.factors, strict=True))
        )
        flat = [
            part.expand((*batch, *shape)).reshape((*batch, math.prod(shape)))
            for part, (_, shape) in zip(parts, self.factors, strict=True)
        ]
        return torch.cat(flat, -1)

    def unpack(self, x: Tensor) -> tuple[Tensor, ...]:
        """The parts of a point (or tangent vector), each (..., *shape of the factor); views where strides allow."""
        self.check_shape(x.shape)
        pieces = x.split([math.prod(shape) for _, shape in self.factors], -1)
        return tuple(
            piece.reshape((*x.shape[:-1], *shape)) for piece, (_, shape) in zip(pieces, self.factors, strict=True)
        )

    def _parts(self, function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        """``function(manifold, *parts)`` for each factor."""
        unpacked = [self.unpack(t) for t in tensors]
        return [function(m, *parts) for (m, _), *parts in zip(self.factors, *unpacked, strict=True)]

    def _map(self, method: str, *tensors: Tensor) -> Tensor:
        return self.pack(*self._parts(lambda m, *parts: getattr(m, method)(*parts), *tensors))

    # --- points -------------------------------------------------------------------------------------------------

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """The sum of the factors' dimensions."""
        self.check_shape(shape)
        return sum(manifold.dim(part) for manifold, part in self.factors)

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Independent random points of the factors, each of its factor's law; ``shape`` ends in :attr:`size`."""
        self.check_shape(shape)
        return self.pack(
            *(
                manifold.random_point(*shape[:-1], *part, dtype=dtype, device=device, generator=generator)
                for manifold, part in self.factors
            )
        )

    def project_point(self, a: Tensor) -> Tensor:
        return self._map("project_point", a)

    def point_error(self, x: Tensor) -> Tensor:
        """The largest of the factors' errors."""
        return torch.stack(self._parts(lambda m, a: m.point_error(a), x)).amax(0)

    # --- tangent vectors ----------------------------------------------------------------------------------------

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self._map("project", x, z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """The largest of the factors' errors."""
        return torch.stack(self._parts(lambda m, a, b: m.tangent_error(a, b), x, u)).amax(0)

    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Random tangent vectors of the factors, of lengths as those of the parts of a Gaussian vector, normalized."""
        parts, lengths = [], []
        exact = compute_dtype(x.dtype)
        for (manifold, shape), part in zip(self.factors, self.unpack(x), strict=True):
            parts.append(manifold.random_tangent(part, generator))
            gaussian = torch.randn(
                *x.shape[:-1], manifold.dim(shape), dtype=exact, device=x.device, generator=generator
            )
            lengths.append(safe_sqrt(gaussian.square().sum(-1)))
        total = safe_sqrt(sum((a.square() for a in lengths), torch.zeros_like(lengths[0])))
        total = torch.where(total > 0, total, torch.ones_like(total))
        return self.pack(
            *(
                part * (length / total).to(x.dtype).reshape((*x.shape[:-1], *(1,) * len(shape)))
                for part, length, (_, shape) in zip(parts, lengths, self.factors, strict=True)
            )
        )

    @working_precision
    def tangent_basis(self, x: Tensor) -> Tensor:
        """The factors' bases, one after another: (*batch, dim, size)."""
        rows = []
        parts = self.unpack(x)
        for i, (manifold, _) in enumerate(self.factors):
            if manifold.dim(parts[i].shape) == 0:
                continue
            basis = manifold.tangent_basis(parts[i])
            zeros = [torch.zeros_like(part).unsqueeze(x.ndim - 1) for part in parts]
            rows.append(self.pack(*zeros[:i], basis, *zeros[i + 1 :]))
        return torch.cat(rows, -2) if rows else x.new_zeros(*x.shape[:-1], 0, self.size)

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return torch.stack(self._parts(lambda m, a, b, c: m.inner(a, b, c), x, u, v)).sum(0)

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self._map("egrad_to_rgrad", x, g)

    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        return self._map("ehess_to_rhess", x, egrad, ehess_u, u)

    # --- geodesics ----------------------------------------------------------------------------------------------

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self._map("exp", x, u)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The factors' logarithms; an error of one is that of the whole."""
        return self._map("log", x, y)

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_sqrt(torch.stack(self._parts(lambda m, a, b: m.dist(a, b).square(), x, y)).sum(0))

    @property
    def injectivity_radius(self) -> float:
        """The smallest of the factors' radii."""
        return min(manifold.injectivity_radius for manifold, _ in self.factors)

    # --- retraction and transport ---------------------------------------------------------------------------------

    @property
    def transport_is_isometric(self) -> bool:
        """Whether the transports of all factors preserve their metrics."""
        return all(manifold.transport_is_isometric for manifold, _ in self.factors)

    @property
    def retraction_order(self) -> int:
        """The lowest order of a factor's retraction."""
        return min(manifold.retraction_order for manifold, _ in self.factors)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self._map("retract", x, u)

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        return self._map("inverse_retract", x, y)

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v, by factors."""
        return self._map("pushforward", x, u, v)

    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self._map("transport", x, u, v)

    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        unpacked = [self.unpack(v) for v in vectors]
        results = [
            manifold.retract_transport(part, step, *(v[i] for v in unpacked))
            for i, ((manifold, _), part, step) in enumerate(
                zip(self.factors, self.unpack(x), self.unpack(u), strict=True)
            )
        ]
        y = self.pack(*(point for point, _ in results))
        return y, tuple(self.pack(*(carried[j] for _, carried in results)) for j in range(len(vectors)))
