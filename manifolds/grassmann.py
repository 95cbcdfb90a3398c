"""The Grassmann manifold of subspaces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LogNotConvergedError
from .frames import OrthonormalFrames
from .linalg import (
    cross_gram,
    expm,
    frobenius_inner,
    frobenius_norm,
    max_entry,
    newton_schulz_polish,
    polar_differential,
    polar_factor,
    solve_right,
    sym,
    working_precision,
)
from .spectral import angle_over_sine, arcsine_ratio, exactly_zero_where

__all__ = ["Grassmann"]


@dataclass(frozen=True)
class Grassmann(OrthonormalFrames):
    """Gr(n, p): the p-dimensional subspaces of ℝⁿ, each represented by an orthonormal n×p frame X that spans it.

    Points are the last two dimensions of a tensor. X and XR, R ∈ O(p), are the same point: ``dist`` and ``log`` depend
    on the subspace of ``y`` alone, and ``exp(x, log(x, y))`` spans the subspace of ``y`` in a frame of its own. Tangent
    vectors are horizontal, XᵀU = 0, and change with the frame as U → UR. The metric is tr UᵀV, that of the quotient of
    the Stiefel manifold; ``dist`` is the root of the sum of the squared principal angles. ``transport`` is parallel
    transport, exact and isometric. Edelman, Arias & Smith, "The geometry of algorithms with orthogonality constraints"
    (1998), section 2.5; Bendokat, Zimmermann & Absil, "A Grassmann manifold handbook" (2024).
    """

    # --- shapes -------------------------------------------------------------------------------------------------

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """p(n − p)."""
        self.check_shape(shape)
        n, p = shape[-2:]
        return p * (n - p)

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Z − X XᵀZ, the horizontal part."""
        self.check_shape(x.shape)
        return z - x @ (x.mT @ z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """max |XᵀU|, computed in float32 or better."""
        self.check_shape(x.shape)
        return max_entry(cross_gram(x, u))

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return frobenius_inner(u, v)

    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """The horizontal part of ``g``; all of the tangent part of the gradient of a function of the subspace."""
        return self.project(x, g)

    @working_precision
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """P(∇²f[U]) − U Xᵀ∇f (Edelman, Arias & Smith, section 2.5.4).

        Xᵀ∇f is symmetric for a function of the subspace; its symmetric part is taken.
        """
        self.check_shape(x.shape)
        return self.project(x, ehess_u - u @ sym(x.mT @ egrad))

    # --- geodesics ----------------------------------------------------------------------------------------------

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """X cos√M + U sin√M/√M, M = UᵀU. The vertical part XᵀU, if any, is ignored.

        With U = LΣRᵀ this is the formula X R cos Σ Rᵀ + L sin Σ Rᵀ. Both functions are blocks of one exponential,
        that of the generator of the geodesic on the columns of [X, U], so the derivatives exist at U = 0 and at
        repeated singular values.
        """
        u = self.project(x, u)
        p = x.shape[-1]
        gram = u.mT @ u
        # U is divided by its size s to balance the two blocks, or the exponential would lose digits to scaling
        s = (gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt() / max(p, 1) ** 0.5).clamp_min(1e-3)[
            ..., None, None
        ]
        zero = torch.zeros_like(gram)
        identity = torch.eye(p, dtype=x.dtype, device=x.device).expand(gram.shape)
        generator = torch.cat([torch.cat([zero, -gram / s], -1), torch.cat([s * identity, zero], -1)], -2)
        block = expm(generator)[..., :p]
        return newton_schulz_polish(x @ block[..., :p, :] + (u / s) @ block[..., p:, :])

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortest horizontal vector with ``exp(x, u)`` spanning what ``y`` spans.

        With the frame of ``y`` turned to the nearest one to X, Y* = X R cos Θ Rᵀ + L sin Θ Rᵀ, it is
        (I − XXᵀ)Y* · R (Θ/sin Θ) Rᵀ, and the last factor a function of (Y* − X)ᵀ(Y* − X) = 4 sin²(Θ/2).

        Raises:
            LogNotConvergedError: a principal angle is π/2, where the shortest geodesic is not unique.
        """
        self.check_shape(x.shape)
        step, cut = _aligned_difference(x, y)
        if not x.is_meta and bool(cut.any()):
            raise LogNotConvergedError(
                "a principal angle between x and y is a right angle: the shortest geodesic is not unique "
                "(a residual of 0 means that y can be reached)",
                0.0,
            )
        u = self.project(x, self.project(x, step) @ angle_over_sine(step.mT @ step / 4))
        return exactly_zero_where((x == y).all(-1, keepdim=True).all(-2, keepdim=True), u)

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """The 2-norm of the principal angles, exact for small and for large ones.

        The derivative between coincident frames, where there is none, is taken as 0; between subspaces with a right
        angle it is that of one of the shortest geodesics.
        """
        self.check_shape(x.shape)
        step, _ = _aligned_difference(x, y)
        # S E^(−1/2) arcsin √E with SᵀS = 4E = 4 sin²(Θ/2): its norm is that of Θ
        scaled = step @ arcsine_ratio(step.mT @ step / 4)
        return frobenius_norm(exactly_zero_where((x == y).all(-1, keepdim=True).all(-2, keepdim=True), scaled))

    @property
    def injectivity_radius(self) -> float:
        return math.pi / 2

    # --- retraction and transport ---------------------------------------------------------------------------------

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """The polar factor of X + U, which spans what X + U spans: a second-order retraction."""
        self.check_shape(x.shape)
        return polar_factor(x + u)

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """Y(XᵀY)⁻¹ − X, which :meth:`retract` takes to the subspace of ``y``, in the frame nearest to X.

        Raises:
            ValueError: a principal angle is π/2.
        """
        self.check_shape(x.shape)
        m = x.mT @ y
        if not x.is_meta and bool((_smallest_square(m) <= _cut_tolerance(m) ** 2).any()):
            raise ValueError("y is not in the range of the retraction at x: a principal angle is a right angle")
        return self.project(x, solve_right(y, m))

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v, horizontal at its end.

        What is left out is the turning of the frame within the subspace, which is no motion of the point.
        """
        y = self.retract(x, u)
        return self.project(y, polar_differential(x + u, y, v))

    @working_precision
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Parallel transport along the geodesic to ``retract(x, u)``: V − (X + Y)(I + XᵀY)⁻¹YᵀV.

        The formula of Edelman, Arias & Smith, (I − LLᵀ + (L cos Θ − X R sin Θ)Lᵀ)V, for a frame Y nearest to X (XᵀY
        symmetric), as that of the polar retraction is.
        """
        return self._transport(x, self.retract(x, u), v)

    def _transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        factor = torch.linalg.cholesky(identity + sym(x.mT @ y))  # eigenvalues 1 + cos θ ≥ 1
        return v - (x + y) @ torch.cholesky_solve(y.mT @ v, factor)

    @working_precision
    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.retract(x, u)
        return y, tuple(self._transport(x, y, v) for v in vectors)


def _cut_tolerance(m: Tensor) -> float:
    """Below this a cosine is what rounding of the frames makes of 0."""
    return 16 * max(m.shape[-1], 1) * torch.finfo(m.dtype).eps


def _smallest_square(m: Tensor) -> Tensor:
    """The square of the smallest singular value of (..., p, p); not differentiable."""
    values = torch.linalg.svdvals(m.detach())
    return values[..., -1].square() if m.shape[-1] else m.new_ones(m.shape[:-2])


def _aligned_difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Y Q − X with the Q ∈ O(p) that makes it smallest (Procrustes), and where Q is not unique.

    There Q is constant to the derivative; everywhere else it is differentiated.
    """
    m = y.mT @ x
    q = polar_factor(m)
    # XᵀYQ is symmetric with the cosines as eigenvalues: a factorization tells whether one of them is 0
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    shifted = sym(m.detach().mT @ q.detach()) - _cut_tolerance(m) * identity
    cut = torch.linalg.cholesky_ex(shifted).info != 0
    if not m.is_meta and bool(cut.any()):
        at = cut[..., None, None]
        q = torch.where(at, q.detach(), polar_factor(torch.where(at, identity, m)))
    return y @ q - x, cut
