"""The rotation group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LogNotConvergedError
from .linalg import (
    compute_dtype,
    cross_gram,
    expm,
    frobenius_inner,
    frobenius_norm,
    max_entry,
    newton_schulz_polish,
    orthonormality_error,
    polar_differential,
    polar_factor,
    qr_positive,
    safe_sqrt,
    skew,
    sym,
    working_precision,
)
from .manifold import Manifold
from .spectral import angle_over_sine, determinant_sign, exactly_zero_where, nearest_rotation

__all__ = ["SpecialOrthogonal"]


@dataclass(frozen=True)
class SpecialOrthogonal(Manifold):
    """SO(n) = {X ∈ ℝⁿˣⁿ : XᵀX = I, det X = 1}: the rotations.

    Points are the last two dimensions of a tensor. Tangent vectors at X are XA, A skew. The metric is tr UᵀV, that of
    the ambient matrix space, which is bi-invariant; a rotation by θ in one plane is then at the distance √2 θ from the
    identity (some authors halve the metric to make it θ), and the injectivity radius is √2 π. ``transport`` is parallel
    transport, exact and isometric. It is a component of the Stiefel manifold at p = n and has its geometry for the
    Euclidean metric.
    """

    ndim = 2

    # --- shapes -------------------------------------------------------------------------------------------------

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-1] != shape[-2]:
            raise ValueError(f"a rotation must be a square matrix, found shape {tuple(shape)}")

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """n(n − 1)/2."""
        self.check_shape(shape)
        return shape[-1] * (shape[-1] - 1) // 2

    # --- points -------------------------------------------------------------------------------------------------

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Haar-distributed: a Haar orthogonal matrix with its first column turned round where its determinant is −1."""
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        q = qr_positive(torch.randn(shape, dtype=compute_dtype(dtype), device=device, generator=generator))[0]
        if q.shape[-1]:
            q[..., 0] = q[..., 0] * determinant_sign(q).unsqueeze(-1)
        return q.to(dtype).contiguous()

    @working_precision
    def project_point(self, a: Tensor) -> Tensor:
        """The nearest rotation, of determinant 1 whatever the sign of det A.

        Raises:
            ValueError: ``a`` is not square, or has NaN or infinite entries.
        """
        self.check_shape(a.shape)
        return nearest_rotation(a)

    def point_error(self, x: Tensor) -> Tensor:
        """max |XᵀX − I|, computed in float32 or better, and at least 2 = |det X − 1| where det X < 0."""
        self.check_shape(x.shape)
        error = orthonormality_error(x)
        x = x.to(compute_dtype(x.dtype))
        if x.is_meta or x.numel() == 0 or not bool(torch.isfinite(x).all()):
            return error
        return torch.where(determinant_sign(x) < 0, error.clamp_min(2), error)

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """X skew(XᵀZ)."""
        self.check_shape(x.shape)
        return x @ skew(x.mT @ z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """max |XᵀU + UᵀX|, computed in float32 or better."""
        self.check_shape(x.shape)
        inner = cross_gram(x, u)
        return max_entry(inner + inner.mT)

    @working_precision
    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """X times a Gaussian skew matrix, divided by its norm; 0 where the space is a point."""
        if self.dim(x.shape) == 0:
            return torch.zeros_like(x)
        a = skew(torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator))
        return x @ (a / frobenius_norm(a)[..., None, None])

    @working_precision
    def tangent_basis(self, x: Tensor) -> Tensor:
        """X(eᵢeⱼᵀ − eⱼeᵢᵀ)/√2 for i < j, orthonormal: (*batch, dim, n, n)."""
        n = x.shape[-1]
        rows, columns = torch.triu_indices(n, n, 1, device=x.device)
        basis = x.new_zeros(self.dim(x.shape), n, n)
        index = torch.arange(len(rows), device=x.device)
        basis[index, rows, columns] = 0.5**0.5
        basis[index, columns, rows] = -(0.5**0.5)
        return x.unsqueeze(-3) @ basis

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return frobenius_inner(u, v)

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.project(x, g)

    @working_precision
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """P(∇²f[U] − U sym(Xᵀ∇f)) (Absil, Mahony & Trumpf 2013)."""
        self.check_shape(x.shape)
        return self.project(x, ehess_u - u @ sym(x.mT @ egrad))

    # --- geodesics ----------------------------------------------------------------------------------------------

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """X expm(XᵀU). The normal part of ``u``, if any, is ignored."""
        self.check_shape(x.shape)
        return newton_schulz_polish(x @ expm(skew(x.mT @ u)))

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortest tangent vector that :meth:`exp` takes to ``y``: X times the principal logarithm of XᵀY.

        Real throughout: the square root of a rotation R is the polar factor of I + R, and the logarithm of the root,
        whose angles are at most π/2, is its skew part times a polynomial of its symmetric part.

        Raises:
            LogNotConvergedError: XᵀY turns a plane by π, where the shortest geodesic is not unique.
        """
        self.check_shape(x.shape)
        root, cut, _ = _square_root(x.mT @ y)
        if not x.is_meta and bool(cut.any()):
            raise LogNotConvergedError(
                "the rotation from x to y has the eigenvalue -1: the shortest geodesic is not unique "
                "(a residual of 0 means that y can be reached)",
                0.0,
            )
        return x @ exactly_zero_where(_same(x, y), _twice_log(root))

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """The norm of the logarithm of XᵀY, the root of the sum of the squared angles of its n eigenvalues.

        The derivative between coincident rotations, where there is none, is taken as 0. Between rotations that differ
        by π in a plane, the half turn is constant to the derivative.
        """
        self.check_shape(x.shape)
        root, cut, half_turns = _square_root(x.mT @ y)
        norm = frobenius_norm(exactly_zero_where(_same(x, y), _twice_log(root)))
        if half_turns is None:
            return norm
        return torch.where(cut, safe_sqrt(norm.square() + math.pi**2 * half_turns), norm)

    @property
    def injectivity_radius(self) -> float:
        return math.pi * 2**0.5

    # --- retraction and transport ---------------------------------------------------------------------------------

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """The polar factor of X + U = X(I + A): a rotation, since det(I + A) > 0. A second-order retraction."""
        self.check_shape(x.shape)
        return polar_factor(x + u)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """X skew(R) sym(R)⁻¹, R = XᵀY: the tangents of the angles of R.

        Raises:
            ValueError: R turns a plane by π/2 or more.
        """
        self.check_shape(x.shape)
        r = x.mT @ y
        factor, info = torch.linalg.cholesky_ex(sym(r))
        if not x.is_meta and bool((info != 0).any()):
            raise ValueError("y is not in the range of the retraction at x: a plane turns by a right angle or more")
        return x @ skew(torch.cholesky_solve(skew(r), factor))

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v."""
        return polar_differential(x + u, self.retract(x, u), v)

    @working_precision
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Parallel transport along the geodesic to ``y = retract(x, u)``: X R^½ (XᵀV) R^½ with R = XᵀY.

        Left translation, Y XᵀV, is an isometry but not parallel; the two differ by the rotation R^½ on either side.
        """
        return self._transport(x, self.retract(x, u), v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        root, _, _ = _square_root(x.mT @ y)  # the angles of R are below π/2, so it is unique
        return x @ (root @ skew(x.mT @ v) @ root)

    @working_precision
    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.retract(x, u)
        root, _, _ = _square_root(x.mT @ y)
        return y, tuple(x @ (root @ skew(x.mT @ v) @ root) for v in vectors)


def _square_root(r: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The square root of a rotation, where it has the eigenvalue −1, and how many times it has it there.

    Of a rotation with the eigenvalue −1, it is the square root of that with its half turns undone.
    """
    n = r.shape[-1]
    identity = torch.eye(n, dtype=r.dtype, device=r.device)
    # I + R = R^½ · 2 cos(Θ/2), the second factor symmetric and positive: a polar decomposition
    root = polar_factor(identity + r)
    cosines = sym(root.mT @ (identity + r)).detach()
    tolerance = 64 * max(n, 1) * torch.finfo(r.dtype).eps
    cut = torch.linalg.cholesky_ex(cosines - tolerance * identity).info != 0
    if r.is_meta or not _any_below(cosines, 0.1):
        return root, cut, None
    counts = None
    if bool(cut.any()):
        _, singular, right = torch.linalg.svd((identity + r).detach())
        counts = (singular <= 2 * tolerance).sum(-1)
        counts = counts + counts % 2  # they come in pairs
        last = torch.arange(n, device=r.device) >= n - counts.unsqueeze(-1)
        null = right * last.unsqueeze(-1)
        r = torch.where(cut[..., None, None], r + 2 * null.mT @ null, r)
        root = polar_factor(identity + r)
        counts = counts.to(r.dtype)
    # near a half turn rounding turned the root within its plane; the midpoint of Q and QᵀR is free of that
    with torch.no_grad():
        better = polar_factor(root + root.mT @ r)
    return root + (better - root).detach(), cut, counts


def _any_below(s: Tensor, bound: float) -> bool:
    """Whether a symmetric matrix of the batch has an eigenvalue below ``bound``."""
    identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    return bool((torch.linalg.cholesky_ex(s - bound * identity).info != 0).any())


def _twice_log(root: Tensor) -> Tensor:
    """2 log Q for a rotation Q by angles of at most π/2."""
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    half_sines = (identity - sym(root)) / 2  # sin² of half of the angles
    return skew(2 * skew(root) @ angle_over_sine(half_sines))


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y).all(-1, keepdim=True).all(-2, keepdim=True)
