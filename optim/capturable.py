"""Riemannian Adam without a look at any value: a step that a CUDA graph records once and replays.

Nothing here waits for the device or branches on data. The retraction's polynomial has a degree that follows from the
trust radius; the step counter, the count of capped frames and a learning rate that changes are tensors on the device;
and whether the step is taken, all gradients being finite, is one more such tensor, by which every write is selected.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..manifolds import AlphaMetric, Manifold, Stiefel
from ..manifolds.linalg import (
    compute_dtype,
    default_atol,
    frobenius_inner,
    full_float32_products,
    project_tangent,
    skew,
    sym,
)
from ..manifolds.polynomial import InverseSqrtPolynomial, inverse_sqrt_polynomial
from .fused import chunks_of, has_fused_step
from .plain import found_inf_adamw_step
from .stacking import Chunk, Stack

__all__ = [
    "CapturableStep",
    "capturable_adam_step",
    "capturable_frame_step",
    "check_capturable",
    "frame_lr",
    "retraction_polynomial",
]

_CAPTURABLE = (
    "capturable are plain parameters and frames on Stiefel with an AlphaMetric (EuclideanMetric and CanonicalMetric "
    'are two), Polar() and ProjectionTransport(), with second_moment="frame", a trust_radius and nonfinite="skip"'
)

# Gram matrices of frames rounded to half precision, less the identity, have their spectrum in here with room to spare.
_ROUNDED = (-0.5, 1.0)


class CapturableStep(NamedTuple):
    """New points and moments, which frames the trust radius shortened (frames,), and whether all of it is finite ()."""

    x: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    capped: Tensor
    finite: Tensor


# --- what can be captured -------------------------------------------------------------------------------------------


def retraction_polynomial(
    metric: AlphaMetric, p: int, dtype: torch.dtype, trust_radius: float
) -> InverseSqrtPolynomial | None:
    """The polynomial for (I + E)^(−1/2) of every step within the trust radius; None where its degree is too high.

    A tangent step η of length at most τ in the metric has squared singular values of at most max(1, 1+α)·τ²: the
    metric's square is ‖B‖² + ‖A‖²/(2(α+1)) for η = XA + QB, and the singular values of the skew A come in pairs. The
    interval has room for points that are as far off the manifold as a point check lets pass.

    Example:
        >>> retraction_polynomial(AlphaMetric(-0.5), 64, torch.float32, trust_radius=0.1).degree
        3
    """
    slack = p * default_atol(dtype)
    bound = max(1.0, 1 + metric.alpha) * trust_radius**2
    return inverse_sqrt_polynomial(-slack, bound + slack, torch.finfo(dtype).eps / 4)


def check_capturable(group: dict[str, Any], manifolds: Sequence[Manifold | None], names: Sequence[str]) -> None:
    """Raise a ``ValueError`` that names what in ``group`` cannot be captured.

    Args:
        manifolds, names: of each parameter of the group; None for a plain one.
    """
    if group["nonfinite"] != "skip":
        raise ValueError(
            f'nonfinite must be "skip" with capturable=True, found {group["nonfinite"]!r}: a captured step cannot look '
            'at its gradients and raise. Pass nonfinite="skip", which skips such steps on the device'
        )
    for p, manifold, name in zip(group["params"], manifolds, names, strict=True):
        if hasattr(p, "placements"):
            raise ValueError(f"{name} is sharded, which is not capturable; pass capturable=False")
        if manifold is None:
            if p.is_complex():
                raise ValueError(f"{name} is complex, which is not capturable; pass capturable=False")
        else:
            _polynomial(group, manifold, p, name)
    lr, devices = group["lr"], {p.device for p in group["params"]}
    if isinstance(lr, Tensor) and devices != {lr.device}:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"lr is a tensor on {lr.device} and its parameters are on {found}: with capturable=True it must be where "
            "they are, for replays to see it change"
        )


def _polynomial(group: dict[str, Any], manifold: Manifold, t: Tensor, name: str) -> InverseSqrtPolynomial:
    if not has_fused_step(manifold, group["second_moment"]):
        raise ValueError(
            f"{name} lies on {manifold!r} with second_moment={group['second_moment']!r}, which is not capturable; "
            f"{_CAPTURABLE}"
        )
    assert isinstance(manifold, Stiefel)
    assert isinstance(manifold.metric, AlphaMetric)
    p, dtype, radius = t.shape[-1], compute_dtype(t.dtype), group["trust_radius"]
    if radius is None:
        raise ValueError(f"trust_radius must be a number with capturable=True, found None; {_CAPTURABLE}")
    found = retraction_polynomial(manifold.metric, p, dtype, radius)
    if found is None:
        while retraction_polynomial(manifold.metric, p, dtype, radius) is None and radius > 1e-3:
            radius *= 0.95
        raise ValueError(
            f"trust_radius={group['trust_radius']:g} is too large for capturable=True: a captured retraction needs a "
            f"polynomial of moderate degree, which in {dtype} with {manifold.metric!r} there is up to about "
            f"{math.floor(100 * radius) / 100:g}"
        )
    return found


# --- the step of frames ---------------------------------------------------------------------------------------------


def capturable_frame_step(
    x: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    lr: float | Tensor,
    *,
    metric: AlphaMetric,
    polynomial: InverseSqrtPolynomial,
    betas: tuple[float, float],
    eps: float,
    step_scale: str,
    trust_radius: float,
) -> CapturableStep:
    """The step of :func:`.functional.riemannian_adam_step` with ``second_moment="frame"``, on frames (frames, n, p).

    A pure function of tensors, with the same operations whatever they hold: it can be traced, compiled and captured.

    Args:
        grad: the ambient gradient.
        step: number of this step, from 1, a tensor of no dimension.
        lr: a number, or a tensor of no dimension.
        polynomial: from :func:`retraction_polynomial`.

    Example:
        >>> x, m, v = torch.eye(3, 2).unsqueeze(0), torch.zeros(1, 3, 2), torch.zeros(1, 1, 1)
        >>> gradient = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
        >>> metric = AlphaMetric(-0.5)
        >>> result = capturable_frame_step(
        ...     x, gradient, m, v, None, torch.tensor(1.0), 0.1, metric=metric, betas=(0.9, 0.999), eps=1e-8,
        ...     polynomial=retraction_polynomial(metric, 2, x.dtype, 1.0), step_scale="frobenius", trust_radius=1.0
        ... )
        >>> -result.x[0, 2, 0] / result.x[0, 0, 0]  # the tangent of the angle that the first column turned by
        tensor(0.1000)
    """
    beta1, beta2 = betas
    n, p = x.shape[-2:]
    xi = metric.egrad_to_rgrad(x, grad)
    m = exp_avg.lerp(xi, 1 - beta1)
    square = metric.inner(x, xi, xi)[..., None, None]
    v = beta2 * exp_avg_sq + ((1 - beta2) / (n * p if step_scale == "rms" else 1)) * square
    largest = None if max_exp_avg_sq is None else torch.maximum(max_exp_avg_sq, v)
    second = v if largest is None else largest
    denominator = (second / _bias_correction(beta2, step, x.dtype)).sqrt() + eps
    scale = (lr / _bias_correction(beta1, step, x.dtype)) / denominator
    # 0/0 = 0: a frame without gradient stays where it is, also with eps = 0
    scale = torch.where(denominator == 0, torch.zeros_like(scale), scale)

    # projected once more: where the gradient is nearly normal to the manifold, as near a minimum, rounding leaves ξ a
    # normal part as long as itself, and the division by √v makes steps of any length of it
    inner = x.mT @ m
    m = m - x @ sym(inner)
    length = frobenius_inner(m, m) - metric.a * frobenius_inner(skew(inner), skew(inner))
    length = length.clamp(min=0).sqrt()[..., None, None] * scale
    too_long = length > trust_radius
    scale = torch.where(too_long, scale * (trust_radius / length), scale)

    # the Gram matrix of x + η itself, and not I + ηᵀη: what rounding left in x is damped and does not add up
    y = x - scale * m
    gram = y.mT @ y
    root = polynomial(gram - torch.eye(p, dtype=x.dtype, device=x.device))
    x = y @ root
    # lengths and p×p matrices tell of every entry: a single one that is not finite spoils them
    finite = torch.isfinite(length).all() & torch.isfinite(v).all() & torch.isfinite(root).all()
    return CapturableStep(x, project_tangent(x, m), v, largest, too_long.flatten(), finite)


def _bias_correction(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor | float:
    """1 − βᵗ, without the cancellation that it has in float32 for β near 1."""
    return 1.0 if beta == 0 else -torch.expm1(step.to(dtype) * math.log(beta))


# --- the step of an optimizer ---------------------------------------------------------------------------------------


@full_float32_products()
def capturable_adam_step(
    stacks: Sequence[Stack],
    plain: Sequence[tuple[list[Tensor], dict[str, Any]]],
    states: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """Step all stacks and plain parameters, or, where a gradient is not finite or a step overflows, nothing.

    Until it is known which, the new points and moments of all frames are held: twice the memory of the frames.

    Raises:
        ValueError: gradients are sparse, or parameters are on several devices.
    """
    params = [*(p for stack in stacks for p in stack.params), *(p for those, _ in plain for p in those)]
    _check_gradients(params)
    results: list[tuple[Stack, Chunk, CapturableStep]] = []
    for stack in stacks:
        results += [(stack, chunk, _step_chunk(stack, chunk)) for chunk in chunks_of(stack)]
    flags = [result.finite for _, _, result in results]
    # the largest entries cannot overflow, as norms can, and NaN is larger than any
    grads = [p.grad for those, _ in plain for p in those if p.grad is not None and p.grad.numel()]
    if grads:
        largest = torch._foreach_norm(grads, math.inf)  # pyright: ignore[reportPrivateImportUsage]
        flags += [torch.isfinite(norm) for norm in largest]
    if not params:
        return
    good = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=params[0].device)

    for stack, chunk, result in results:
        _write(stack, chunk, result, good)
    for stack in stacks:
        # views of this array are what the state holds; the stack's own counter is of no use to a replay
        stack.arrays["step"] += good
        capped = [result.capped for other, _, result in results if other is stack]
        if capped:
            stack.count_capped(torch.cat(capped) & good)
    found_inf = (~good).to(torch.float32)
    for those, group in plain:
        found_inf_adamw_step(states, those, group, found_inf)


def _check_gradients(params: Sequence[Tensor]) -> None:
    sparse = [p for p in params if p.grad is not None and p.grad.layout is not torch.strided]
    if sparse:
        raise ValueError(f"the gradient of a parameter of shape {tuple(sparse[0].shape)} is sparse: not supported")
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}: with capturable=True they must be on one "
            "device; use an optimizer for each"
        )


def frame_lr(lr: float | Tensor, group: dict[str, Any]) -> float | Tensor:
    """The learning rate of frames in a group whose rate is ``lr``: fused decay amounts to a larger one.

    Example:
        >>> round(frame_lr(0.1, {"decay": "fused", "weight_decay": 2.0}), 6)
        0.125
    """
    return lr / (1 - lr * group["weight_decay"]) if group["decay"] == "fused" else lr


def _step_chunk(stack: Stack, chunk: Chunk) -> CapturableStep:
    manifold, group, part = stack.manifold, stack.group, slice(chunk.start, chunk.stop)
    # options of a group may have changed since they were checked
    polynomial = _polynomial(group, manifold, stack.locals[0], "a parameter")
    assert isinstance(manifold, Stiefel)
    assert isinstance(manifold.metric, AlphaMetric)
    lr, grads = group["lr"], stack.gather_gradients(chunk)
    largest = stack.arrays["max_exp_avg_sq"][part] if group["amsgrad"] else None
    return capturable_frame_step(
        _points(stack, chunk),
        -grads if group["maximize"] else grads,
        stack.arrays["exp_avg"][part],
        stack.arrays["exp_avg_sq"][part],
        largest,
        stack.arrays["step"][0] + 1,
        frame_lr(lr.reshape(()) if isinstance(lr, Tensor) else lr, group),
        metric=manifold.metric,
        polynomial=polynomial,
        **{name: group[name] for name in ("betas", "eps", "step_scale", "trust_radius")},
    )


def _points(stack: Stack, chunk: Chunk) -> Tensor:
    """The points to step; of half-precision frames that somebody has written to since, the projection."""
    if not stack.is_half:
        return stack.points(chunk)
    stored, master = _stored(stack, chunk), stack.arrays["master"][chunk.start : chunk.stop]
    moved = (master.to(stored.dtype) != stored).any(-1).any(-1)
    y = stored.to(stack.dtype)
    polynomial = inverse_sqrt_polynomial(*_ROUNDED, torch.finfo(stack.dtype).eps / 4)
    assert polynomial is not None
    nearest = y @ polynomial(y.mT @ y - torch.eye(y.shape[-1], dtype=y.dtype, device=y.device))
    return torch.where(moved[:, None, None], nearest, master)


def _stored(stack: Stack, chunk: Chunk) -> Tensor:
    """A copy (frames, n, p) of the parameters themselves, in their own precision."""
    return torch.cat([t.reshape(-1, *stack.shape) for t in chunk.targets])


def _write(stack: Stack, chunk: Chunk, new: CapturableStep, good: Tensor) -> None:
    """Put the new values in place where ``good``, else the old ones, bit by bit."""
    arrays = {"exp_avg": new.exp_avg, "exp_avg_sq": new.exp_avg_sq, "max_exp_avg_sq": new.max_exp_avg_sq}
    if stack.is_half:
        arrays["master"] = new.x
    for key, value in arrays.items():
        if value is not None:
            old = stack.arrays[key][chunk.start : chunk.stop]
            torch.where(good, value, old, out=old)
    old = _stored(stack, chunk)
    stack.scatter(torch.where(good, new.x.to(old.dtype), old), chunk)
