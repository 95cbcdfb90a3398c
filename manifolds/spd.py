"""Symmetric positive definite matrices with the affine-invariant metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LogNotConvergedError, NotOnManifoldError
from .linalg import compute_dtype, expm, frobenius_inner, frobenius_norm, sym, working_precision
from .manifold import Manifold
from .spectral import log_spd, nearest_psd_shift, sqrt_spd

__all__ = ["SymmetricPositiveDefinite"]


@dataclass(frozen=True)
class SymmetricPositiveDefinite(Manifold):
    """The symmetric positive definite n×n matrices with the affine-invariant metric tr X⁻¹UX⁻¹V.

    Points are the last two dimensions of a tensor; tangent vectors are the symmetric matrices. X → AXAᵀ is an isometry
    for every invertible A, and so is inversion; any two points are joined by one geodesic. ``transport`` is parallel
    transport, exact and isometric. Every map works in the coordinates L⁻¹ · L⁻ᵀ of a Cholesky factor of the base point,
    so the digits lost grow with the root of its condition number. Pennec, Fillard & Ayache, "A Riemannian framework
    for tensor computing" (2006); Bhatia, "Positive Definite Matrices" (2007), chapter 6.

    The antisymmetric part of an argument is ignored.

    Raises:
        NotOnManifoldError: the base point is not positive definite (but not by ``project`` and ``project_point``).
    """

    ndim = 2

    # --- shapes -------------------------------------------------------------------------------------------------

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-1] != shape[-2]:
            raise ValueError(f"a positive definite matrix must be square, found shape {tuple(shape)}")

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """n(n + 1)/2."""
        self.check_shape(shape)
        return shape[-1] * (shape[-1] + 1) // 2

    def _factor(self, x: Tensor, name: str = "x") -> Tensor:
        """The lower Cholesky factor."""
        self.check_shape(x.shape)
        factor, info = torch.linalg.cholesky_ex(sym(x))
        if not x.is_meta and bool((info != 0).any()):
            raise NotOnManifoldError(
                f"{name} is not positive definite; use manifold.project_point(...) if that is meant",
                1.0,
                0.0,
            )
        return factor

    # --- points -------------------------------------------------------------------------------------------------

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """expm(S/√n) with S Gaussian in the space of symmetric matrices (standard normal in any orthonormal basis).

        There is no uniform law, the space being unbounded; this one is invariant under X → QXQᵀ, Q ∈ O(n), and under
        inversion. The eigenvalues of S/√n lie about in [−√2, √2], so the condition number is about 17 for large n.
        """
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        s = sym(torch.randn(shape, dtype=compute_dtype(dtype), device=device, generator=generator))
        half = expm(s / (2 * max(shape[-1], 1) ** 0.5))
        return sym(half @ half.mT).to(dtype)

    @working_precision
    def project_point(self, a: Tensor) -> Tensor:
        """The nearest symmetric matrix whose eigenvalues are at least n·ε times the largest absolute one.

        The set of points is open, so there is no nearest one to a matrix outside. A zero matrix gives a tiny multiple
        of the identity.

        Raises:
            ValueError: ``a`` has NaN or infinite entries.
        """
        self.check_shape(a.shape)
        if not a.is_meta and not bool(torch.isfinite(a).all()):
            raise ValueError(f"cannot project a tensor with NaN or infinite entries to {self!r}")
        if a.numel() == 0:
            return a.clone()
        s = sym(a)
        largest = torch.linalg.eigvalsh(s.detach()).abs().amax(-1)
        info = torch.finfo(s.dtype)
        floor = (4 * s.shape[-1] * info.eps * largest).clamp_min(info.tiny**0.5)
        return sym(s + nearest_psd_shift(s, floor))

    def point_error(self, x: Tensor) -> Tensor:
        """max |X − Xᵀ| relative to the largest entry, and 1 more where X is not positive definite."""
        self.check_shape(x.shape)
        x = x.to(compute_dtype(x.dtype))
        if x.shape[-1] == 0:
            return x.new_zeros(x.shape[:-2])
        largest = x.abs().amax((-2, -1))
        error = (x - x.mT).abs().amax((-2, -1)) / torch.where(largest > 0, largest, torch.ones_like(largest))
        finite = torch.isfinite(largest)[..., None, None]
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        info = torch.linalg.cholesky_ex(sym(torch.where(finite, x, identity))).info
        return error + (info != 0)

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """(Z + Zᵀ)/2."""
        self.check_shape(x.shape)
        return sym(z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """max |U − Uᵀ|."""
        self.check_shape(x.shape)
        u = u.to(compute_dtype(u.dtype))
        return (u - u.mT).abs().amax((-2, -1)) if u.shape[-1] else u.new_zeros(u.shape[:-2])

    @working_precision
    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Isotropic in the metric: L S Lᵀ/‖S‖ with S a Gaussian symmetric matrix and X = LLᵀ."""
        s = sym(torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator))
        factor = self._factor(x)
        return sym(factor @ (s / frobenius_norm(s)[..., None, None]) @ factor.mT)

    @working_precision
    def tangent_basis(self, x: Tensor) -> Tensor:
        """L Eᵢⱼ Lᵀ with Eᵢⱼ the orthonormal symmetric unit matrices, i ≤ j, and X = LLᵀ: (*batch, dim, n, n)."""
        n = x.shape[-1]
        factor = self._factor(x).unsqueeze(-3)
        rows, columns = torch.triu_indices(n, n, device=x.device)
        basis = x.new_zeros(self.dim(x.shape), n, n)
        index = torch.arange(len(rows), device=x.device)
        entries = torch.full((len(rows),), 0.5**0.5, dtype=x.dtype, device=x.device).masked_fill(rows == columns, 1)
        basis[index, rows, columns] = entries
        basis[index, columns, rows] = entries
        return factor @ basis @ factor.mT

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        factor = self._factor(x)
        a = _whiten(factor, u)
        return frobenius_inner(a, a if v is u else _whiten(factor, v))

    @working_precision
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """X sym(G) X."""
        self.check_shape(x.shape)
        x = sym(x)
        return sym(x @ sym(g) @ x)

    @working_precision
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """X sym(∇²f[U]) X + sym(U sym(∇f) X) (Jeuris, Vandebril & Vandereycken 2012, section 4.1.4)."""
        self.check_shape(x.shape)
        x = sym(x)
        return sym(x @ sym(ehess_u) @ x + sym(u) @ sym(egrad) @ x)

    # --- geodesics ----------------------------------------------------------------------------------------------

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """L expm(L⁻¹UL⁻ᵀ) Lᵀ with X = LLᵀ."""
        factor = self._factor(x)
        # as a product F Fᵀ, so that the result is positive definite however far its eigenvalues are apart
        root = factor @ expm(_whiten(factor, u) / 2)
        return sym(root @ root.mT)

    def _whitened_log(self, factor: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """log(L⁻¹YL⁻ᵀ)."""
        with torch.no_grad():
            digits = torch.linalg.solve_triangular(factor, self._factor(y, "y"), upper=False)
        if not y.is_meta and not bool(torch.isfinite(digits).all()):
            raise LogNotConvergedError("x and y are too far apart for their number format", math.inf)
        return log_spd(_whiten(factor, y - x), digits)

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """L logm(L⁻¹YL⁻ᵀ) Lᵀ with X = LLᵀ; unique for every pair.

        Raises:
            NotOnManifoldError: ``x`` or ``y`` is not positive definite.
        """
        factor = self._factor(x)
        return sym(factor @ self._whitened_log(factor, x, y) @ factor.mT)

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """‖logm(X⁻½YX⁻½)‖, the root of the sum of the squared logarithms of the eigenvalues of X⁻¹Y.

        The derivative between coincident points, where there is none, is taken as 0.
        """
        return frobenius_norm(self._whitened_log(self._factor(x), x, y))

    @property
    def injectivity_radius(self) -> float:
        return math.inf

    # --- retraction and transport ---------------------------------------------------------------------------------

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """X + U + UX⁻¹U/2, the second-order Taylor polynomial of :meth:`exp`, positive definite for every U."""
        factor = self._factor(x)
        u = sym(u)
        half = torch.linalg.solve_triangular(factor, u, upper=False)
        return sym(x) + u + sym(half.mT @ half) / 2

    @working_precision
    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        """L((2L⁻¹YL⁻ᵀ − I)^½ − I)Lᵀ: of the vectors that :meth:`retract` takes to ``y``, the one next to 0.

        Raises:
            ValueError: 2Y − X is not positive definite: no such vector.
        """
        factor = self._factor(x)
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        change = 2 * _whiten(factor, y - x)
        if not x.is_meta and bool((torch.linalg.cholesky_ex(identity + change.detach()).info != 0).any()):
            raise ValueError("y is not in the range of the retraction at x: 2y - x is not positive definite")
        # √(1+c) − 1 = c/(√(1+c) + 1), which keeps the digits of a small change
        root = torch.linalg.cholesky(sqrt_spd(identity + change) + identity)
        return sym(factor @ sym(torch.cholesky_solve(change, root)) @ factor.mT)

    @property
    def transport_is_isometric(self) -> bool:
        return True

    @property
    def retraction_order(self) -> int:
        return 2

    @working_precision
    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The differential of :meth:`retract` at u along v: V + sym(UX⁻¹V)."""
        factor = self._factor(x)
        left, right = (torch.linalg.solve_triangular(factor, sym(a), upper=False) for a in (u, v))
        return sym(v) + sym(left.mT @ right)

    @working_precision
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Parallel transport along the geodesic to ``y = retract(x, u)``: E V Eᵀ with E = (YX⁻¹)^½."""
        return self.retract_transport(x, u, v)[1][0]

    @working_precision
    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        factor = self._factor(x)
        w = _whiten(factor, u)
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        root = factor @ sqrt_spd(sym(identity + w + w @ w / 2))  # E = root L⁻¹
        return self.retract(x, u), tuple(sym(root @ _whiten(factor, v) @ root.mT) for v in vectors)


def _whiten(factor: Tensor, u: Tensor) -> Tensor:
    """L⁻¹ sym(U) L⁻ᵀ, symmetric."""
    left = torch.linalg.solve_triangular(factor, sym(u), upper=False)
    return sym(torch.linalg.solve_triangular(factor, left.mT, upper=False))
