"""The Riemannian Adam step of frames with one scalar second moment, in five products of size n·p², in place.

On the Stiefel manifold with an α-metric, polar retraction and projection transport most of a step happens in p×p: with
w = β₁m + (1−β₁)G, the product XᵀW gives both the projection and Xᵀm of the new moment; the gradient's length is that of
G less its normal part's; the Gram matrix of the retracted point is I + a²mᵀm; and X₊ᵀm = P(Xᵀm − a·mᵀm) needs no
product with n. What is left is the gradient's product, its projection, mᵀm, the retraction and the transport. Frames
go through in chunks whose temporaries fit a cache, and the moment is updated where it lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..manifolds import AlphaMetric, Manifold, Polar, ProjectionTransport, Stiefel
from ..manifolds.linalg import full_float32_products, polar_factor, skew
from ..manifolds.polynomial import inverse_sqrt_polynomial
from .stacking import Chunk, Stack

__all__ = ["CHUNK_ENTRIES", "AdamOptions", "chunks_of", "fused_adam_step", "has_fused_step"]

# X₊ has an orthonormality error of its own rounding, and what X had besides; every so many steps the true XᵀX is used,
# so that rounding cannot add up.
CORRECTION_INTERVAL = 8

# entries of a chunk: enough that calls cost little beside arithmetic, few enough that a chunk stays in a cache
CHUNK_ENTRIES = {"cpu": 2**20, "cuda": 2**25}

# the gradient's length is taken from ‖G‖² less its normal part where at most four bits cancel
CANCELLATION = 1 / 16


class AdamOptions(NamedTuple):
    """What all chunks of a step have in common; ``step`` counts from 1."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    maximize: bool
    step_scale: str
    trust_radius: float | None


def has_fused_step(manifold: Manifold, second_moment: str) -> bool:
    """Whether :func:`fused_adam_step` is this manifold's step."""
    return (
        type(manifold) is Stiefel
        and isinstance(manifold.metric, AlphaMetric)
        and manifold.retraction == Polar()
        and manifold.vector_transport == ProjectionTransport()
        and second_moment == "frame"
    )


def chunks_of(stack: Stack) -> list[Chunk]:
    """The frames of ``stack`` in chunks that suit the caches of its device."""
    n, p = stack.shape
    return stack.chunks(CHUNK_ENTRIES.get(stack.device.type, 2**25) // max(1, n * p))


@full_float32_products()
def fused_adam_step(stack: Stack, grads: Tensor | None, norms: Tensor, options: AdamOptions) -> None:
    """Step all frames of ``stack`` and its state; equal to :func:`.functional.riemannian_adam_step` to rounding.

    Args:
        grads: the gathered gradients; None to read them chunk by chunk.
        norms: the Frobenius norms of the frames' gradients, (frames,). They must be finite and far from overflow,
            since chunks are written as they are done.
    """
    stack.follow_parameters()
    moved = stack.were_written_to()  # the moment is then tangent elsewhere
    capped: list[tuple[Chunk, Tensor]] = []
    for chunk in chunks_of(stack):
        gradient = _Gradient(stack, chunk, grads, options.maximize)
        x, short = _step_chunk(stack, chunk, gradient, norms[chunk.start : chunk.stop], moved, options)
        stack.write(x, chunk)
        if short is not None:
            capped.append((chunk, short))
    stack.advance()
    if capped:
        flags = torch.zeros(stack.frames, dtype=torch.bool, device=stack.device)
        for chunk, short in capped:
            flags[chunk.start : chunk.stop] = short
        stack.count_capped(flags)


class _Gradient(NamedTuple):
    """The gradients of a chunk; ``grads`` are those of the whole stack where they have been gathered."""

    stack: Stack
    chunk: Chunk
    grads: Tensor | None
    maximize: bool

    def tensor(self) -> Tensor:
        """(frames, n, p)"""
        if self.grads is None:
            g = self.stack.gather_gradients(self.chunk)
        else:
            g = self.grads[self.chunk.start : self.chunk.stop]
        return -g if self.maximize else g

    def mix_into(self, name: str, weight: float) -> None:
        """m ← m + weight·(G − m) for the chunk of the stack's array ``name``, without a copy of G where that can be."""
        if self.grads is None and not self.maximize:
            self.stack.mix_gradients(name, self.chunk, weight)
        else:
            self.stack.arrays[name][self.chunk.start : self.chunk.stop].lerp_(self.tensor(), weight)


def _step_chunk(
    stack: Stack, chunk: Chunk, gradient: _Gradient, norms: Tensor, moved: bool, options: AdamOptions
) -> tuple[Tensor, Tensor | None]:
    """The new points of a chunk, whose state is updated, and which frames were capped, or None for none."""
    manifold, (n, p), b = stack.manifold, stack.shape, chunk.stop - chunk.start
    assert isinstance(manifold, Stiefel)
    assert isinstance(manifold.metric, AlphaMetric)
    step, (beta1, beta2), trust_radius = options.step, options.betas, options.trust_radius
    alpha, metric_a = manifold.metric.alpha, manifold.metric.a
    x, spare = stack.points(chunk, stack.scratch("x", b)), stack.scratch("spare", b)
    m, v = (stack.arrays[key][chunk.start : chunk.stop] for key in ("exp_avg", "exp_avg_sq"))
    if moved:
        m.copy_(manifold.project(x, m))

    # the moment, m ← β₁m + (1−β₁)ξ with ξ = G − X(sym C − (2α+1) skew C), C = XᵀG; m is tangent, so XᵀW, with
    # W = β₁m + (1−β₁)G, has the symmetric part (1−β₁) sym C and the skew part β₁Xᵀm + (1−β₁) skew C
    a_old = None if metric_a == 0 else skew(x.mT @ m)
    gradient.mix_into("exp_avg", 1 - beta1)
    inner = x.mT @ m
    twice = inner + inner.mT  # 2 sym(XᵀW)
    rotation = torch.sub(inner, twice, alpha=0.5)
    # (1−β₁)²‖ξ‖² in the metric
    whole = norms.square() * (1 - beta1) ** 2
    square = whole - 0.25 * torch.linalg.vector_norm(twice.view(b, -1), dim=-1).square_()
    if a_old is not None:
        fresh = rotation - beta1 * a_old  # (1−β₁) skew C
        square += (4 * (1 + alpha) ** 2 * (1 - metric_a) - 1) * fresh.square().sum((-2, -1))
        twice.sub_(fresh, alpha=2 * (2 * alpha + 1))
        rotation = beta1 * a_old + (2 * alpha + 2) * fresh
    nearly_normal = not bool((square >= CANCELLATION * whole).all())
    if nearly_normal:
        xi = manifold.egrad_to_rgrad(x, gradient.tensor())
        square = manifold.inner(x, xi, xi) * (1 - beta1) ** 2
    m.baddbmm_(x, twice, alpha=-0.5)
    if nearly_normal:  # m may be all rounding, with a normal part of its own size, which is then divided by its length
        normal = x.mT @ m
        m.baddbmm_(x, normal + normal.mT, alpha=-0.5)

    # the second moment
    pooled = n * p if options.step_scale == "rms" else 1
    v.mul_(beta2).add_(square.view(b, 1, 1), alpha=(1 - beta2) / ((1 - beta1) ** 2 * pooled))
    second = v
    if options.amsgrad:
        largest = stack.arrays["max_exp_avg_sq"][chunk.start : chunk.stop]
        second = torch.maximum(largest, v, out=largest)
    denominator = (second / (1 - beta2**step)).sqrt_().add_(options.eps)
    scale = (options.lr / (1 - beta1**step)) / denominator
    if options.eps == 0:
        scale = torch.where(denominator == 0, 0.0, scale)

    # the step's length and the spectrum of its Gram matrix
    gram = m.mT @ m
    length = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    if metric_a != 0:
        length = length - metric_a * rotation.square().sum((-2, -1))
    length = length.clamp_(min=0).sqrt_().view(b, 1, 1) * scale
    capped = None
    if trust_radius is not None and float(length.max()) > trust_radius:
        too_long = length > trust_radius
        scale, capped = torch.where(too_long, scale * (trust_radius / length), scale), too_long.view(b)
    e = gram * scale.square()
    if step % CORRECTION_INTERVAL == 1:
        e += x.mT @ x
        e.diagonal(dim1=-2, dim2=-1).sub_(1)
    high = float(torch.linalg.vector_norm(e.view(b, -1), dim=-1).max())
    slack = 8 * p * torch.finfo(x.dtype).eps
    polynomial = inverse_sqrt_polynomial(-slack, high + slack, torch.finfo(x.dtype).eps / 4)

    # x₊ = (x − a·m)P, then the transport m ← m − x₊ sym(x₊ᵀm)
    y = x.addcmul_(m, scale, value=-1)
    if polynomial is None:  # far: no polynomial of moderate degree
        x = polar_factor(y, "exact")
        carried = x.mT @ m
    else:
        root = polynomial(e)
        torch.bmm(y, root, out=spare)
        x = spare
        carried = torch.bmm(root, rotation.sub_(gram.mul_(scale)))
    m.baddbmm_(x, carried + carried.mT, alpha=-0.5)
    return x, capped
