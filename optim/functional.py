"""The arithmetic of one optimizer step on a batch of frames, free of any bookkeeping."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..manifolds import Manifold
from ..manifolds.linalg import safe_sqrt

__all__ = [
    "AdamStep",
    "pooled_square",
    "riemannian_adam_step",
    "safe_divide",
    "second_moment_shape",
    "within_trust_radius",
]

SECOND_MOMENTS = ("frame", "column", "element", "gram")
STEP_SCALES = ("rms", "frobenius")


class AdamStep(NamedTuple):
    """What one step produced: the new points, the moments there, and which frames the trust radius shortened."""

    x: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    capped: Tensor


def second_moment_shape(n: int, p: int, second_moment: str) -> tuple[int, int]:
    """Shape of the second moment of one n×p frame: a scalar, a row, the whole, or a Gram matrix."""
    return {"frame": (1, 1), "column": (1, p), "element": (n, p), "gram": (p, p)}[second_moment]


def pooled_square(manifold: Manifold, x: Tensor, xi: Tensor, second_moment: str, step_scale: str) -> Tensor:
    """The square of the gradient that the second moment averages, of :func:`second_moment_shape`.

    "rms" divides by the number of elements pooled, so that a step moves an element by about lr, as AdamW does;
    "frobenius" does not, so that what was pooled moves by about lr in norm.
    """
    n, p = xi.shape[-2:]
    if second_moment == "gram":  # ξ(ξᵀξ)^(−1/2) has Frobenius norm √p
        gram = xi.mT @ xi
        return gram / n if step_scale == "rms" else gram * p
    if second_moment == "frame":
        square, pooled = manifold.inner(x, xi, xi)[..., None, None], n * p
    elif second_moment == "column":
        square, pooled = (xi * xi).sum(-2, keepdim=True), n
    else:
        square, pooled = xi * xi, 1
    return square / pooled if step_scale == "rms" else square


def safe_divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0/0 = 0: a frame without gradient stays where it is, also with eps = 0."""
    zero = b == 0
    return torch.where(zero, torch.zeros_like(a), a / torch.where(zero, torch.ones_like(b), b))


def _precondition(m: Tensor, gram: Tensor, eps: float) -> Tensor:
    """M(R^(1/2) + εI)⁻¹ for positive semidefinite R, in float64; a direction without gradient so far is left out."""
    if not bool(torch.isfinite(gram).all()):  # overflowed, which eigh does not take and the caller will find
        return torch.full_like(m, torch.nan)
    values, vectors = torch.linalg.eigh(gram.double())
    # below rounding of the largest eigenvalue nothing is known of the gradient
    known = values > gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:]
    roots = torch.where(known, values.clamp(min=0), 0.0).sqrt()
    inverse = torch.where(known, 1 / torch.where(known, roots + eps, 1.0), 0.0)
    return (m.double() @ (vectors * inverse.unsqueeze(-2)) @ vectors.mT).to(m.dtype)


def within_trust_radius(manifold: Manifold, x: Tensor, eta: Tensor, radius: float | None) -> tuple[Tensor, Tensor]:
    """The step η, shortened to the radius in the metric's norm where it is longer, and where that was so."""
    length = safe_sqrt(manifold.inner(x, eta, eta))
    if radius is None:
        return eta, torch.zeros_like(length, dtype=torch.bool)
    capped = length > radius
    factor = torch.where(capped, radius / torch.where(capped, length, 1.0), 1.0)
    return eta * factor[..., None, None], capped


def riemannian_adam_step(
    manifold: Manifold,
    x: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: int,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    second_moment: str,
    step_scale: str,
    trust_radius: float | None,
    pooled: int = 1,
) -> AdamStep:
    """One Riemannian Adam step on frames x of shape (..., n, p).

    With ξ the Riemannian gradient, norms in the metric, T the transport along the last step (already applied to
    ``exp_avg``) and s the number of elements pooled ("rms") or 1 ("frobenius"):

        m = β₁m + (1−β₁)ξ,   v = β₂v + (1−β₂)‖ξ‖²/s,   η = −lr·m̂/(√v̂ + ε),   η ← η·min(1, τ/‖η‖),   x ← R_x(η)

    Bécigneul & Ganea, "Riemannian adaptive optimization methods" (2019), with one scalar second moment a frame as in
    geoopt, and the "rms" scale and trust radius of Stiefel Attention (2026). A second moment of columns or elements
    divides m̂ in the ambient space and projects the result to the tangent space, and so does the
    Gram matrix R = EMA(ξᵀξ), by m̂R̂^(−1/2): in the frame's own columns, so it moves along with the frame.

    Args:
        grad: the ambient gradient.
        exp_avg: first moment, tangent at x.
        max_exp_avg_sq: running maximum of the second moment (amsgrad). None without amsgrad.
        step: number of this step, from 1.
        pooled: average the square over so many equal parts of the first dimension, which then share a second moment.

    Returns:
        New tensors; nothing is written to.

    Raises:
        ValueError: the retraction refused an overflowed step.
    """
    beta1, beta2 = betas
    xi = manifold.egrad_to_rgrad(x, grad)
    exp_avg = exp_avg.lerp(xi, 1 - beta1)
    square = pooled_square(manifold, x, xi, second_moment, step_scale)
    if pooled > 1:
        parts = square.reshape(pooled, -1, *square.shape[-2:])
        square = parts.mean(0, keepdim=True).expand_as(parts).reshape(square.shape)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * square
    if max_exp_avg_sq is not None:
        max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    second = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq

    bias_correction1, bias_correction2 = 1 - beta1**step, 1 - beta2**step
    if second_moment == "gram":
        direction = _precondition(exp_avg, second / bias_correction2, eps)
    else:
        direction = safe_divide(exp_avg, (second / bias_correction2).sqrt() + eps)
    if second_moment != "frame":
        direction = manifold.project(x, direction)
    eta, capped = within_trust_radius(manifold, x, direction * (-lr / bias_correction1), trust_radius)

    x, (exp_avg,) = manifold.retract_transport(x, eta, exp_avg)
    return AdamStep(x, exp_avg, exp_avg_sq, max_exp_avg_sq, capped)
