"""Steepest descent in the spectral norm on the Stiefel tangent space, in closed form and with a certificate.

The problem is min ⟨G, Δ⟩ over Δ tangent at X with ‖Δ‖₂ ≤ 1, the step of "manifold Muon". Its dual is min ‖G + XΛ‖_*
over symmetric Λ, since −⟨G, Δ⟩ = −⟨G + XΛ, Δ⟩ ≤ ‖G + XΛ‖_* for all of them. One matrix sign of 2p rows solves both.

**The step.** The tangent vectors are Δ = SX with S skew-symmetric, n×n, and the smallest ‖S‖₂ among the S of one Δ is
‖Δ‖₂: in a basis that starts with X, S = [A −Bᵀ; B D], where [A; B] is Δ and D is free; by Parrott's theorem some D
makes ‖S‖₂ = ‖[A; B]‖₂, so does −Dᵀ, and so does their mean, which is skew-symmetric. So the problem is
min ⟨skew(GXᵀ), S⟩ over skew-symmetric S with ‖S‖₂ ≤ 1, which has no other constraint:

    Δ = −msign(skew(GXᵀ)) X,    −⟨G, Δ⟩ = ‖skew(GXᵀ)‖_*.

With Ω = skew(XᵀG) and the factorization N = G − XXᵀG = QR, skew(GXᵀ) is Γ = [Ω −Rᵀ/2; R/2 0] in the basis [X Q], of
at most p + min(p, n−p) columns. The first p columns of msign(Γ) are [A; B], and Δ = −XA − QB.

**The multiplier.** P = |Γ| = (ΓᵀΓ)^½ commutes with msign(Γ). Let H = P₁₁ − P₁₂ P₂₂⁻¹ P₂₁, the Schur complement of its
lower block. Then Λ₀ = AH − HA makes [A; B] the polar factor of [Ω + Λ₀; R]: its symmetric factor is 2H where R is
p×p and nonsingular, and otherwise 2H less a part that A maps to skew-symmetric matrices. So
‖[Ω + Λ₀; R]‖_* = ⟨[Ω; R], [A; B]⟩, and Λ = Λ₀ − sym(XᵀG) closes the gap.

The gap that is reported relies on none of this: it is computed from the step and the multiplier that are returned.

Sources: Parrott, "On a quotient norm and the Sz.-Nagy–Foiaş lifting theorem" (1978), for the dilation; Bernstein,
"Modular manifolds" (2025), for the problem and its dual, which is solved there by dual ascent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import frobenius_norm, max_entry, skew, sym
from .spectral_solvers import Problem, solve

__all__ = ["SpectralDescentResult", "spectral_steepest_descent"]

_EPS = torch.finfo(torch.float64).eps

# Frames are worked on in groups of about this many entries, so that the float64 copies stay in the cache: with all at
# once, 144 frames of 768×64 took twice the time.
_GROUP_ENTRIES = 2**18


class SpectralDescentResult(NamedTuple):
    """A solution of min ⟨G, Δ⟩ over Δ tangent at X with ‖Δ‖₂ ≤ 1, and the bound that certifies it.

    All but the step are float64.

    Attributes:
        step: Δ, (..., n, p), in the dtype of x.
        multiplier: the symmetric Λ, (..., p, p): no feasible step has −⟨G, Δ⟩ > ‖G + XΛ‖_*.
        primal: −⟨G, Δ⟩ for the step, before it is rounded to the dtype of x, (...,).
        dual: ‖G + XΛ‖_*, (...,).
        relative_gap: (dual − primal)/dual, (...,); 0 where dual is 0. The step attains the fraction
            1 − ``relative_gap`` of the fastest descent, or more.
    """

    step: Tensor
    multiplier: Tensor
    primal: Tensor
    dual: Tensor
    relative_gap: Tensor


@torch.no_grad()
def spectral_steepest_descent(x: Tensor, g: Tensor) -> SpectralDescentResult:
    """The tangent step of spectral norm at most 1 along which ⟨G, ·⟩ falls fastest, with a certificate.

    Δ = −msign(skew(GXᵀ)) X, computed in float64 whatever the dtypes: see the module. It is the same for cG, c > 0, and
    for G + XS, S symmetric; QX and QG have QΔ, XO and GO have ΔO, for orthogonal Q and O. Where G does not determine
    the step, on the null space of skew(GXᵀ), it is 0.

    The problem is posed at the frame nearest to ``x``, from which a float32 frame differs by rounding, and for the
    float64 tangent part of ``g``. Where that is within the rounding of the dtypes of ‖G‖, G is normal: step, primal,
    dual and gap are 0.

    Args:
        x: frames with orthonormal columns, (..., n, p).
        g: ambient gradients of the same shape, of any scale.

    Raises:
        TypeError: x or g is not real floating-point.
        ValueError: shapes that differ or are not (..., n, p) with n ≥ p; NaN or infinite entries; columns of x that are
            far from orthonormal.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel, spectral_steepest_descent
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = Stiefel().random_point(24, 6, dtype=torch.float64, generator=generator)
        >>> g = torch.randn(24, 6, dtype=torch.float64, generator=generator)
        >>> result = spectral_steepest_descent(x, g)
        >>> round(torch.linalg.matrix_norm(result.step, 2).item(), 12)
        1.0
        >>> bound = torch.linalg.matrix_norm(g + x @ result.multiplier, "nuc")
        >>> bool(bound + (g * result.step).sum() < 1e-12 * bound)
        True
    """
    for name, tensor in (("x", x), ("g", g)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a real floating-point tensor, found {tensor.dtype}; convert with .to(...)")
    if x.ndim < 2 or x.shape[-2] < x.shape[-1]:
        raise ValueError(f"x must have shape (..., n, p) with n ≥ p, found {tuple(x.shape)}")
    if g.shape != x.shape:
        raise ValueError(f"g must have the shape of x, {tuple(x.shape)}, found {tuple(g.shape)}")
    *batch, n, p = x.shape
    if x.numel() == 0:
        scalar = x.new_zeros(batch, dtype=torch.float64)
        multiplier = x.new_zeros((*batch, p, p), dtype=torch.float64)
        return SpectralDescentResult(torch.zeros_like(x), multiplier, scalar, scalar.clone(), scalar.clone())
    frames, gradients = x.reshape(-1, n, p), g.reshape(-1, n, p)
    size = max(1, _GROUP_ENTRIES // (n * p)) if x.device.type == "cpu" else len(frames)
    groups = [_group(*pair) for pair in zip(frames.split(size), gradients.split(size), strict=True)]
    parts = [torch.cat(part) if len(groups) > 1 else part[0] for part in zip(*groups, strict=True)]
    return SpectralDescentResult(*(part.reshape((*batch, *part.shape[1:])) for part in parts))


def _group(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The fields of the result for (m, n, p)."""
    dtype, n, p = x.dtype, *x.shape[-2:]
    # a normal G leaves this much of its length behind when it is projected
    rounding = max(16 * _EPS, torch.finfo(dtype).eps, torch.finfo(g.dtype).eps)
    low, high = g.flatten(1).aminmax(dim=1)
    largest = torch.maximum(-low, high).double()[:, None, None]  # NaN propagates
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("g has NaN or infinite entries: no step is steepest for it; drop that gradient or the step")
    x = x.double()
    whitening = _inverse_root(x.mT @ x)  # XW is the frame, which is never formed
    if g.dtype == torch.float64:
        g = g / torch.where(largest > 0, largest, 1.0)
    else:  # no square can overflow
        g, largest = g.double(), torch.ones_like(largest)

    cross = whitening @ (x.mT @ g)
    normal, residual, gram, length = _project_out(x, whitening, g, cross)
    ambient = torch.hypot(length, frobenius_norm(cross))
    if n > p and bool((frobenius_norm(residual) > 64 * _EPS * length).any()):
        # ‖N‖ ≪ ‖G‖, so that the rounding of G counts in N
        normal, residual, gram, length = _project_out(x, whitening, normal, residual)
    if n == p:  # N = 0
        residual, gram, length = torch.zeros_like(cross), torch.zeros_like(cross), torch.zeros_like(length)
    omega = skew(cross)
    length = torch.hypot(length, frobenius_norm(omega))
    scale = torch.where(length > rounding * ambient, length, 0.0)[:, None, None]
    unit = torch.where(scale > 0, scale, torch.inf)
    problem = Problem(x, whitening, normal, unit, omega / unit, residual / unit, gram / unit**2)

    step, multiplier, primal, dual = solve(problem, exact=dtype == torch.float64)
    gap = torch.where(dual > 0, (dual - primal) / torch.where(dual > 0, dual, 1.0), 0.0).clamp_min(0)
    multiplier = (multiplier * scale - sym(cross)) * largest
    scale = (scale * largest)[:, 0, 0]
    return step.to(dtype), multiplier, primal * scale, dual * scale, gap


def _project_out(x: Tensor, whitening: Tensor, g: Tensor, cross: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """N = G − XW·(WXᵀG), WXᵀN, NᵀN and ‖N‖_F."""
    normal = torch.baddbmm(g, x, whitening @ cross, alpha=-1)
    gram = normal.mT @ normal
    return normal, whitening @ (x.mT @ normal), gram, gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()


def _inverse_root(gram: Tensor) -> Tensor:
    """(XᵀX)^(−½) for XᵀX near I, by Newton–Schulz."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    found = float(max_entry(gram - identity).max())
    root = identity.expand_as(gram)
    for _ in range(20 if found < 0.2 else 0):  # NaN compares false
        defect = root @ gram @ root - identity
        root = sym(root - root @ defect / 2)
        if float(max_entry(defect).max()) < 1e-9:  # squared by the step just taken
            return root
    raise ValueError(f"x must have orthonormal columns, found max|XᵀX − I| = {found:.3g}; see Stiefel.project_point")
