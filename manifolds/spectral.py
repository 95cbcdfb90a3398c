"""Smooth functions of symmetric matrices, and of squared lengths, that stay smooth where textbook forms are 0/0.

The textbook exponentials and logarithms divide by sines of angles and differentiate eigenvectors, and have no
derivative at zero vectors, coincident points and repeated eigenvalues, although the maps are smooth there. Here every
function is written in the square of the angle or of its half sine, in which it is analytic, or has its derivative from
divided differences (Daleckii & Krein 1965), which are finite at repeated eigenvalues. All take batches in the leading
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linalg import lyapunov_solve, skew, sym

__all__ = [
    "angle_over_sine",
    "arcsine_ratio",
    "atan_sqrt_ratio",
    "cos_sqrt",
    "determinant_sign",
    "exactly_zero_where",
    "log_spd",
    "nearest_psd_shift",
    "nearest_rotation",
    "sinc_sqrt",
    "sqrt_spd",
]


# --- functions of numbers -----------------------------------------------------------------------------------------


def _series(t: Tensor, coefficients: list[float]) -> Tensor:
    result = torch.full_like(t, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * t + c
    return result


def _with_series_near_zero(
    t: Tensor, bound: float, coefficients: list[float], elsewhere: Callable[[Tensor], Tensor]
) -> Tensor:
    small = t < bound
    one = torch.ones_like(t)
    # the branch not taken is evaluated at 1, so that its derivative is finite and drops out
    near = _series(torch.where(small, t, one), coefficients)
    return torch.where(small, near, elsewhere(torch.where(small, one, t)))


_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9)]
_SINC = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]
_ATAN = [(-1.0) ** k / (2 * k + 1) for k in range(9)]


def cos_sqrt(t: Tensor) -> Tensor:
    """cos √t for t ≥ 0, with all its derivatives at 0."""
    return _with_series_near_zero(t, 0.25, _COS, lambda s: s.sqrt().cos())


def sinc_sqrt(t: Tensor) -> Tensor:
    """sin √t / √t for t ≥ 0, with its value 1 and all its derivatives at 0."""
    return _with_series_near_zero(t, 0.25, _SINC, lambda s: s.sqrt().sin() / s.sqrt())


def atan_sqrt_ratio(t: Tensor) -> Tensor:
    """arctan √t / √t for t ≥ 0, with its value 1 and all its derivatives at 0."""
    return _with_series_near_zero(t, 0.01, _ATAN, lambda s: s.sqrt().atan() / s.sqrt())


def exactly_zero_where(same: Tensor, a: Tensor) -> Tensor:
    """``a`` with the value 0 where ``same``, and the derivative of ``a`` everywhere."""
    return torch.where(same, a - a.detach(), a)


# --- polynomials of symmetric matrices ----------------------------------------------------------------------------


def _chebyshev(function: Callable[[float], float], degree: int) -> list[float]:
    """Coefficients of the interpolant of ``function`` on [0, ½] in Chebyshev polynomials."""
    count = degree + 1
    angles = [math.pi * (j + 0.5) / count for j in range(count)]
    values = [function((math.cos(a) + 1) / 4) for a in angles]
    raw = [
        2 / count * math.fsum(v * math.cos(k * a) for v, a in zip(values, angles, strict=True)) for k in range(count)
    ]
    return [raw[0] / 2, *raw[1:]]


# The nearest singularity is t = 1, so the coefficients fall like 5.83^(−k): 1e-18 at degree 23, 1e-8 at degree 10.
_ARCSINE_RATIO = _chebyshev(lambda t: math.asin(math.sqrt(t)) / math.sqrt(t), 23)
_ANGLE_OVER_SINE = _chebyshev(lambda t: math.asin(math.sqrt(t)) / math.sqrt(t * (1 - t)), 23)


def _clenshaw(e: Tensor, coefficients: list[float]) -> Tensor:
    if e.dtype != torch.float64:
        coefficients = coefficients[:11]
    identity = torch.eye(e.shape[-1], dtype=e.dtype, device=e.device)
    z = 4 * e - identity
    ahead, after = coefficients[-1] * identity.expand_as(e), torch.zeros_like(e)
    for c in reversed(coefficients[1:-1]):
        ahead, after = 2 * z @ ahead - after + c * identity, ahead
    return z @ ahead - after + coefficients[0] * identity


def arcsine_ratio(e: Tensor) -> Tensor:
    """arcsin(√E) E^(−1/2) of symmetric (..., p, p) with spectrum in [0, ½].

    A Chebyshev polynomial: as exact as an eigendecomposition, with every derivative. With E = sin²(θ/2) it is
    (θ/2) / sin(θ/2), for angles θ up to π/2.
    """
    return _clenshaw(e, _ARCSINE_RATIO)


def angle_over_sine(e: Tensor) -> Tensor:
    """arcsin(√E) (E(I − E))^(−1/2) of symmetric (..., p, p) with spectrum in [0, ½]: θ / sin θ for E = sin²(θ/2)."""
    return _clenshaw(e, _ANGLE_OVER_SINE)


# --- square root --------------------------------------------------------------------------------------------------


class _Sqrt(torch.autograd.Function):
    @staticmethod
    def forward(s: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        return sym((vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (root,) = ctx.saved_tensors  # Z² = S: Z dZ + dZ Z = dS, and that solve is self-adjoint
        return lyapunov_solve(root, sym(grad_outputs[0]))


def sqrt_spd(s: Tensor) -> Tensor:
    """The square root of symmetric positive definite (..., p, p). Twice differentiable."""
    result = _Sqrt.apply(s)
    assert isinstance(result, Tensor)
    return result


# --- logarithm ----------------------------------------------------------------------------------------------------


def _log_difference(a: Tensor, b: Tensor) -> Tensor:
    """(log a − log b)/(a − b) = 2 artanh(z)/z / (a + b), z = (a − b)/(a + b): exact for near and for far pairs."""
    z2 = ((a - b) / (a + b)).square()
    ratio = _with_series_near_zero(
        z2, 0.01, [1.0 / (2 * k + 1) for k in range(9)], lambda s: torch.atanh(s.sqrt()) / s.sqrt()
    )
    # artanh overflows where b/a rounds away; the logarithms themselves are exact there
    far = z2 > 0.25
    direct = (a.log() - b.log()) / torch.where(far, a - b, torch.ones_like(a - b))
    return torch.where(far, direct, 2 * torch.where(far, torch.ones_like(ratio), ratio) / (a + b))


def _log_second_difference(s: Tensor) -> Tensor:
    """The divided differences log[sᵢ, sⱼ, sₖ] of (..., p) as (..., p, p, p)."""
    triples = torch.stack(
        torch.broadcast_tensors(s[..., :, None, None], s[..., None, :, None], s[..., None, None, :]), -1
    ).sort(-1)[0]
    a, b, c = triples.unbind(-1)
    far = c - a > 0.2 * c
    gap = torch.where(far, c - a, torch.ones_like(a))
    recursive = (_log_difference(b, c) - _log_difference(a, b)) / gap
    # near: Taylor about the mean m, Σ (−1)^(k−1)/(k mᵏ) h_{k−2}, h the complete symmetric polynomials of the offsets
    m = triples.mean(-1)
    x, y, z = ((v - m) / m for v in (a, b, c))
    e2, e3 = x * y + y * z + z * x, x * y * z
    h = [torch.zeros_like(m), torch.zeros_like(m), torch.ones_like(m)]
    near = -h[-1] / 2
    for k in range(3, 18):
        h.append(e3 * h[-3] - e2 * h[-2])
        near = near + (-1) ** (k - 1) / k * h[-1]
    return torch.where(far, recursive, near / m.square())


def _eigen(d: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of I + D = ZZᵀ, their logarithms, and the eigenvectors."""
    small, vectors = torch.linalg.eigh(d)
    near = small.abs().amax(-1, keepdim=True) <= 0.5 if small.shape[-1] else small.new_ones((), dtype=torch.bool)
    left, singular, _ = torch.linalg.svd(z)
    values = torch.where(near, 1 + small, singular.square())
    logs = torch.where(near, torch.log1p(torch.where(near, small, torch.zeros_like(small))), 2 * singular.log())
    return values, logs, torch.where(near.unsqueeze(-1) if near.ndim else near, vectors, left)


class _Log(torch.autograd.Function):
    @staticmethod
    def forward(d: Tensor, z: Tensor) -> Tensor:
        _, logs, vectors = _eigen(d, z)
        return sym((vectors * logs.unsqueeze(-2)) @ vectors.mT)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        d, z = ctx.saved_tensors
        return _LogDerivative.apply(d, z, sym(grad_outputs[0])), None


class _LogDerivative(torch.autograd.Function):
    """The derivative of log(I + D) in direction E: divided differences in the eigenbasis. Self-adjoint in E."""

    @staticmethod
    def forward(d: Tensor, z: Tensor, e: Tensor) -> Tensor:
        values, _, v = _eigen(d, z)
        first = _log_difference(values.unsqueeze(-1), values.unsqueeze(-2))
        return v @ (first * (v.mT @ e @ v)) @ v.mT

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: Tensor):  # type: ignore[override]
        d, z, e = ctx.saved_tensors
        values, _, v = _eigen(d, z)
        grad, e = v.mT @ sym(grad_outputs[0]) @ v, v.mT @ e @ v
        second = _log_second_difference(values)  # indexed i, k, j
        to_d = torch.einsum("...ikj,...ik,...kj->...ij", second, e, grad)
        first = _log_difference(values.unsqueeze(-1), values.unsqueeze(-2))
        return v @ (to_d + to_d.mT) @ v.mT, None, v @ (first * grad) @ v.mT


def log_spd(d: Tensor, z: Tensor) -> Tensor:
    """The logarithm of the symmetric positive definite I + D = ZZᵀ, (..., p, p). Twice differentiable in D.

    The two arguments are the same matrix twice. Near the identity D has the digits (log1p); far from it Z has them,
    since its singular values spread half as far as the eigenvalues do. Z only lends its digits: the derivative is that
    of a function of D.
    """
    result = _Log.apply(d, z.detach())
    assert isinstance(result, Tensor)
    return result


# --- projections --------------------------------------------------------------------------------------------------


class _PositivePart(torch.autograd.Function):
    """V max(λ, 0) Vᵀ of a symmetric matrix, differentiated by divided differences."""

    @staticmethod
    def forward(s: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        return sym((vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: Tensor):  # type: ignore[override]
        (s,) = ctx.saved_tensors
        values, v = torch.linalg.eigh(s)
        a, b = values.unsqueeze(-1), values.unsqueeze(-2)
        positive = (a > 0).to(s.dtype)
        gap = a - b
        apart = gap.abs() > 0
        quotient = (a.clamp_min(0) - b.clamp_min(0)) / torch.where(apart, gap, torch.ones_like(gap))
        first = torch.where(apart, quotient, positive.expand_as(gap))
        return v @ (first * (v.mT @ sym(grad_outputs[0]) @ v)) @ v.mT


def nearest_psd_shift(s: Tensor, floor: Tensor) -> Tensor:
    """The smallest symmetric change that lifts the eigenvalues of symmetric ``s`` to ``floor``; 0 where they are."""
    identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    result = _PositivePart.apply(floor[..., None, None] * identity - s)
    assert isinstance(result, Tensor)
    return result


def determinant_sign(a: Tensor) -> Tensor:
    """The sign of det A of (..., n, n): 1, −1, and 0 where A is exactly singular. Not differentiable.

    From the reflections of a Householder QR: a reflection with factor τ has determinant −1, and τ = 0 is none.
    (``torch.linalg.slogdet`` on batches is one of the calls that are silently wrong; see :mod:`.linalg`.)
    """
    packed, tau = torch.geqrf(a.detach())
    diagonal = packed.diagonal(dim1=-2, dim2=-1).sign()
    reflections = torch.where(tau != 0, -torch.ones_like(tau), torch.ones_like(tau))
    return (diagonal * reflections).prod(-1)


class _NearestRotation(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor) -> Tensor:
        if a.numel() == 0:
            return a.clone()
        try:
            left, _, right = torch.linalg.svd(a)
        except RuntimeError as error:  # torch.linalg.LinAlgError
            if bool(torch.isfinite(a).all()):
                raise
            raise ValueError("cannot take the nearest rotation of a matrix with NaN or infinite entries") from error
        # where the determinant is negative, the cheapest repair is to turn round the smallest singular direction
        last = torch.where(determinant_sign(left @ right) < 0, -1.0, 1.0).to(a.dtype)
        signs = torch.ones_like(left[..., 0, :])
        signs[..., -1] = last
        return (left * signs.unsqueeze(-2)) @ right

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        # A = QH with H symmetric, perhaps indefinite: dQ = QΩ, HΩ + ΩH = QᵀdA − dAᵀQ
        a, q = ctx.saved_tensors
        return 2 * q @ lyapunov_solve(sym(q.mT @ a), skew(q.mT @ grad_outputs[0]))


def nearest_rotation(a: Tensor) -> Tensor:
    """The orthogonal matrix of determinant 1 nearest to (..., n, n) in the Frobenius norm.

    Umeyama (1991): the polar factor, with the direction of the smallest singular value turned round where its
    determinant is −1. Not unique, and without derivative, where that singular value is repeated or A is rank-deficient.

    Raises:
        ValueError: A has NaN or infinite entries.
    """
    result = _NearestRotation.apply(a)
    assert isinstance(result, Tensor)
    return result


# --- random directions --------------------------------------------------------------------------------------------
