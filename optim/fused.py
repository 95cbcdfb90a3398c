"""The Riemannian Adam step of frames with one scalar second moment, in five products of size n·p², in place.

On the Stiefel manifold with an α-metric, polar retraction and projection transport most of a step happens in p×p: with
w = β₁m + (1−β₁)G, the product XᵀW gives both the projection and Xᵀm of the new moment; the Gram matrix of the retracted
point is I + a²mᵀm; and X₊ᵀm = P(Xᵀm − a·mᵀm) needs no product with n. What is left is the gradient's product, its
projection, mᵀm, the retraction and the transport. Frames go through in chunks whose temporaries fit a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifolds import AlphaMetric, Manifold, Polar, ProjectionTransport, Stiefel
from ..manifolds.linalg import full_float32_products, polar_factor, skew
from ..manifolds.polynomial import inverse_sqrt_polynomial
from .stacking import Chunk, Stack

__all__ = ["fused_adam_step", "has_fused_step"]

# X₊ has an orthonormality error of its own rounding, and what X had besides; every so many steps the true XᵀX is used,
# so that rounding cannot add up.
CORRECTION_INTERVAL = 8

# entries of a chunk: a few arrays of this size fit a cache, and fewer calls would not pay
CHUNK_ENTRIES = {"cpu": 2**18, "cuda": 2**25}


def has_fused_step(manifold: Manifold, second_moment: str) -> bool:
    """Whether :func:`fused_adam_step` is this manifold's step."""
    return (
        type(manifold) is Stiefel
        and isinstance(manifold.metric, AlphaMetric)
        and manifold.retraction == Polar()
        and manifold.vector_transport == ProjectionTransport()
        and second_moment == "frame"
    )


@full_float32_products()
def fused_adam_step(
    stack: Stack,
    grads: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    amsgrad: bool,
    maximize: bool,
    step_scale: str,
    trust_radius: float | None,
) -> None:
    """Step all frames of ``stack`` and its state; equal to :func:`.functional.riemannian_adam_step` to rounding.

    Args:
        grads: the gathered gradients, which are overwritten; None to gather them chunk by chunk. Their norms must be
            known to be finite and far from overflow, since chunks are written as they are done.
    """
    n, p = stack.shape
    step = stack.step + 1
    corrected = step % CORRECTION_INTERVAL == 1
    stack.follow_parameters()
    raw = stack.gradients() if grads is None else None
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    capped: list[tuple[Chunk, Tensor]] = []
    for chunk in stack.chunks(CHUNK_ENTRIES.get(stack.device.type, 2**25) // max(1, n * p)):
        frames = chunk.stop - chunk.start
        if grads is None:
            assert raw is not None
            g = stack.gather_gradients(raw, chunk, stack.scratch("g", frames))
        else:
            g = grads[chunk.start : chunk.stop]
        if maximize:
            g = g.neg_()
        x, spare = stack.points(chunk, stack.scratch("x", frames)), stack.scratch("spare", frames)
        state = {key: stack.arrays[key][chunk.start : chunk.stop] for key in keys}
        x, short = _step_chunk(
            stack.manifold, x, g, spare, state, step, corrected, lr, betas, eps, step_scale, trust_radius
        )
        stack.write(x, chunk)
        if short is not None:
            capped.append((chunk, short))
    stack.advance()
    if capped:
        flags = torch.zeros(stack.frames, dtype=torch.bool, device=stack.device)
        for chunk, short in capped:
            flags[chunk.start : chunk.stop] = short
        stack.count_capped(flags)


def _step_chunk(
    manifold: Manifold,
    x: Tensor,
    g: Tensor,
    spare: Tensor,
    state: dict[str, Tensor],
    step: int,
    corrected: bool,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step_scale: str,
    trust_radius: float | None,
) -> tuple[Tensor, Tensor | None]:
    """One step of a chunk; x, g and spare, of shape (b, n, p), are overwritten.

    Returns:
        The new points, and which frames were capped, or None for none.
    """
    assert isinstance(manifold, Stiefel)
    assert isinstance(manifold.metric, AlphaMetric)
    alpha, metric_a = manifold.metric.alpha, manifold.metric.a
    (b, n, p), (beta1, beta2) = x.shape, betas
    m, v = state["exp_avg"], state["exp_avg_sq"]

    # the moment, m ← β₁m + (1−β₁)ξ with ξ = G − X(sym C − (2α+1) skew C), C = XᵀG; m is tangent, so XᵀW has
    # the symmetric part (1−β₁) sym C and the skew part β₁Xᵀm + (1−β₁) skew C
    a_old = None if metric_a == 0 else skew(x.mT @ m)
    w = g.lerp_(m, beta1)
    inner = x.mT @ w
    twice = inner + inner.mT  # 2 sym(XᵀW)
    rotation = torch.sub(inner, twice, alpha=0.5)
    if a_old is not None:
        fresh = rotation - beta1 * a_old
        twice.sub_(fresh, alpha=2 * (2 * alpha + 1))
        rotation = beta1 * a_old + (2 * alpha + 2) * fresh
    w.baddbmm_(x, twice, alpha=-0.5)

    # the second moment; (1−β₁)ξ is the difference of the moments
    xi = torch.sub(w, m, alpha=beta1, out=spare)
    square = torch.linalg.vector_norm(xi.view(b, -1), dim=-1).square_()
    if a_old is not None:
        square = square - metric_a * (rotation - beta1 * a_old).square().sum((-2, -1))
    pooled = n * p if step_scale == "rms" else 1
    v.mul_(beta2).add_(square.view(b, 1, 1), alpha=(1 - beta2) / ((1 - beta1) ** 2 * pooled))
    second = v
    if "max_exp_avg_sq" in state:
        second = torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
    denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
    scale = torch.where(denominator == 0, 0.0, lr / (1 - beta1**step) / denominator)

    # the step's length and the spectrum of its Gram matrix
    gram = w.mT @ w
    length = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    if metric_a != 0:
        length = length - metric_a * rotation.square().sum((-2, -1))
    length = length.clamp_(min=0).sqrt_().view(b, 1, 1) * scale
    if trust_radius is not None:
        scale = torch.where(length > trust_radius, scale * (trust_radius / length), scale)
    e = gram * scale.square()
    if corrected:
        e += x.mT @ x
        e.diagonal(dim1=-2, dim2=-1).sub_(1)
    high = torch.linalg.vector_norm(e.view(b, -1), dim=-1)
    longest, high = torch.stack([length.max(), high.max()]).tolist()
    slack = 8 * p * torch.finfo(x.dtype).eps
    polynomial = inverse_sqrt_polynomial(-slack, high + slack, torch.finfo(x.dtype).eps / 4)

    # x₊ = (x − a·m)P, then the transport m ← m − x₊ sym(x₊ᵀm)
    y = x.sub_(torch.mul(w, scale, out=spare))
    if polynomial is None:  # far: no polynomial of moderate degree
        x = polar_factor(y, "exact")
        carried = x.mT @ w
    else:
        root = polynomial(e)
        x = torch.bmm(y, root, out=spare)
        carried = torch.bmm(root, rotation.sub_(gram.mul_(scale)))
    torch.baddbmm(w, x, carried + carried.mT, alpha=-0.5, out=m)
    capped = None
    if trust_radius is not None and longest > trust_radius:
        capped = (length > trust_radius).view(b)
    return x, capped
