"""The two solvers of :mod:`.spectral_descent`, in p×p blocks: Gram matrices where they are accurate enough, else SVDs.

The names are those of that module, which has the formulas. Each solver returns the value of the step it returns and the
dual bound of the multiplier it returns, so neither needs to be trusted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .linalg import frobenius_inner, max_entry, newton_schulz_polish, skew, sym

__all__ = ["Problem", "solve"]

_EPS = torch.finfo(torch.float64).eps

# With ‖Ω‖² + ‖N‖² = 1, singular values of R and Γ below this are rounding. msign is 0 on their space: a solution there,
# and the one that does not depend on the basis.
_RANK_TOLERANCE = 1e-13


class Problem(NamedTuple):
    """A batch of problems with ‖Ω‖² + ‖N‖² = 1, or 0: the frame is XW, and N is ``normal/unit``; all float64."""

    x: Tensor
    whitening: Tensor  # W = (XᵀX)^(−½)
    normal: Tensor
    unit: Tensor
    omega: Tensor  # Ω = skew(WXᵀG)
    residual: Tensor  # WXᵀN, which is rounding
    gram: Tensor  # NᵀN


_Solution = tuple[Tensor, Tensor, Tensor, Tensor]  # step, Λ₀, primal, dual


def solve(problem: Problem, exact: bool) -> _Solution:
    """Δ, Λ₀, −⟨G, Δ⟩ and ‖[Ω + Λ₀; R]‖_*. ``exact``: Δ is wanted to 1e-13, not to 1e-9 for rounding to float32."""
    n, p = problem.x.shape[-2:]
    tolerance, condition = (3e-13, 1e3) if exact else (3e-10, 1e5)
    if n < 2 * p:
        return _robust(problem)
    lower, inverse, promising = _cholesky(problem.gram, tolerance)
    if not bool(promising.any()):
        return _robust(problem)
    solution, good = _fast(problem, lower.mT, inverse.mT, tolerance, condition)
    bad = ~(good & promising)
    if bool(bad.any()):
        again = _robust(Problem(*(part[bad] for part in problem)))
        for part, replacement in zip(solution, again, strict=True):
            part[bad] = replacement
    return solution


def _lifted(omega: Tensor, r: Tensor) -> Tensor:
    """Γ = [Ω −Rᵀ/2; R/2 0]."""
    corner = r.new_zeros(*r.shape[:-1], r.shape[-2])
    return torch.cat([torch.cat([omega, r / 2], -2), torch.cat([-r.mT / 2, corner], -2)], -1)


def _cholesky(gram: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """L with LLᵀ = NᵀN, L⁻¹, and where NL⁻ᵀ is orthonormal to ``tolerance``; elsewhere both are I."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lower, info = torch.linalg.cholesky_ex(gram)
    lower = torch.where((info == 0)[:, None, None], lower, identity)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    good = (info == 0) & (_hidden_error(gram, inverse) < tolerance)
    mask = good[:, None, None]
    return torch.where(mask, lower, identity), torch.where(mask, inverse, identity), good


def _hidden_error(gram: Tensor, inverse: Tensor) -> Tensor:
    """About ε κ(N)²: how far N R⁻¹ is from orthonormal by rounding in NᵀN, which does not show in p×p."""
    return _EPS / gram.shape[-1] * gram.diagonal(dim1=-2, dim2=-1).sum(-1) * frobenius_inner(inverse, inverse)


def _fast(problem: Problem, r: Tensor, inverse: Tensor, tolerance: float, condition: float) -> tuple[_Solution, Tensor]:
    """For n ≥ 2p, Q = N R⁻¹ and κ(Γ) ≤ ``condition``; and for which problems it came out good to ``tolerance``."""
    x, whitening, normal, unit, omega, residual, gram = problem
    p = x.shape[-1]
    identity = torch.eye(p, dtype=x.dtype, device=x.device)
    gamma = _lifted(omega, r)
    squares, vectors = torch.linalg.eigh(-(gamma @ gamma))
    good = squares[:, 0] * condition**2 > squares[:, -1]
    values = torch.where(good[:, None], squares, 1.0).sqrt()
    # squaring Γ costs accuracy ε κ(Γ)², and each Newton–Schulz step squares what is missing
    sign = skew(gamma @ (vectors / values.unsqueeze(-2)) @ vectors.mT)
    for _ in range(2):
        before, sign = sign, newton_schulz_polish(sign)
        if not bool((max_entry(sign - before)[good] > 1e-8).any()):
            break
    a, b = sign[:, :p, :p], inverse @ sign[:, p:, :p]

    # at least how far ΔᵀΔ is from I
    mixed = a.mT @ residual @ b
    defect = a.mT @ a + mixed + mixed.mT + b.mT @ gram @ b - identity
    excess = defect.abs().sum(-1).amax(-1) + _hidden_error(gram, inverse)
    shrink = torch.rsqrt(1 + excess)[:, None, None]
    a, b = a * shrink, b * shrink
    tangency = max_entry(sym(residual @ b))
    step = (x @ (whitening @ -a)).baddbmm_(normal, -b / unit)
    primal = frobenius_inner(omega, a + residual @ b) + frobenius_inner(residual, a) + frobenius_inner(gram, b)

    # H is the inverse of the upper block of P⁻¹
    upper = vectors[:, :p] / values.sqrt().unsqueeze(-2)
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(upper @ upper.mT), identity, upper=False)
    h = root.mT @ root
    multiplier = sym(a @ h - h @ a)
    top = omega + multiplier
    # by the squares of the singular values of [Ω + Λ₀; R], whose condition is about that of Γ
    dual = torch.linalg.eigvalsh(top.mT @ top + gram).clamp_min(0).sqrt().sum(-1)
    good &= (excess < tolerance) & (tangency < tolerance) & ((dual - primal).abs() < 1e-10 * dual)
    return (step, multiplier, primal, dual), good


def _robust(problem: Problem) -> _Solution:
    """For every Γ, singular ones too, by Householder QR and SVDs: two to three times the time of :func:`_fast`."""
    x, whitening, normal, unit, omega, residual, _ = problem
    n, p = x.shape[-2:]
    k = min(p, n - p)
    identity = torch.eye(k, dtype=x.dtype, device=x.device)
    basis, factor = torch.linalg.qr(normal)
    factor = factor / unit
    left, values, right = torch.linalg.svd(factor)
    left, values, right = left[..., :k], values[:, :k], right[:, :k]
    present = values > _RANK_TOLERANCE
    # Q = (basis·left − XW·overlap)·upright: the columns of small singular values σ are off by ε‖N‖/σ, mostly along X,
    # and without that are shorter than 1. Those that do not count are 0.
    left = left * present.unsqueeze(-2)
    overlap = whitening @ (x.mT @ basis) @ left
    lower = torch.linalg.cholesky(identity - overlap.mT @ overlap)
    upright = torch.linalg.solve_triangular(lower, identity, upper=False).mT
    r = lower.mT @ ((values * present).unsqueeze(-1) * right)

    sign_left, values, sign_right = torch.linalg.svd(_lifted(omega, r))
    values = torch.where(values > _RANK_TOLERANCE, values, 0.0)
    sign = skew((sign_left * (values > 0).unsqueeze(-2)) @ sign_right)
    a, b = sign[:, :p, :p], upright @ sign[:, p:, :p]
    along, across = a - overlap @ b, left @ b  # Δ = −XW·along − basis·across
    step = (x @ (whitening @ -along)).baddbmm_(basis, -across)
    primal = frobenius_inner(omega, a) + frobenius_inner(residual, along) + frobenius_inner(factor, across)

    # P = FᵀF with F = [F₁ F₂] = values^½·sign_right, and H is the Gram matrix of what F₂ leaves of F₁: good up to
    # κ(Γ) = 1/ε, where P₂₂⁻¹ is good up to 1/√ε
    root = values.sqrt().unsqueeze(-1) * sign_right
    rest = root[..., :p]
    if k:
        span = torch.linalg.qr(root[..., p:])[0] * present.unsqueeze(-2)
        rest = rest - span @ (span.mT @ rest)
    h = rest.mT @ rest
    multiplier = sym(a @ h - h @ a)
    dual = torch.linalg.svdvals(torch.cat([omega + multiplier, r], -2)).sum(-1)
    return step, multiplier, primal, dual
