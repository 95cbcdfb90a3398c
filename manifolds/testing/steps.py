"""Checks of retractions and vector transports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import (
    Invariant,
    derivative,
    frobenius,
    gap,
    generator_like,
    lengthen,
    radius,
    representative,
    tolerance,
    worst,
)
from ._result import CheckResult, Recorder

__all__ = [
    "check_inverse_retraction",
    "check_pushforward",
    "check_retraction_first_order",
    "check_transport",
    "claims_isometry",
]

# what the five-point stencil leaves, with room
_STENCIL = 1e-8


def check_retraction_first_order(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    length: float = 1.0,
    invariant: Invariant | None = None,
    rtol: float | None = None,
) -> CheckResult:
    """R_x(0) = x, DR_x(0) = id, and R_x(u) is on the manifold. In float64, whatever the dtype of ``x``.

    Args:
        length: of u, in the metric.
    """
    x = x.detach().to(torch.float64)
    recorder, tol = Recorder("retraction_first_order", manifold), tolerance(x.dtype, rtol)
    generator, embed = generator_like(x, seed), representative(invariant)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), 1.0)
    recorder.at_most("|R(0) - x|", gap(embed(manifold.retract(x, torch.zeros_like(u))), embed(x)), tol)
    found, expected = derivative(lambda t: embed(manifold.retract(x, t * u))), derivative(lambda t: embed(x + t * u))
    recorder.at_most("|DR(0)[u] - u|", gap(found, expected), _STENCIL)
    recorder.at_most("point error of R(u)", worst(manifold.point_error(manifold.retract(x, length * u))), tol)
    return recorder.result()


def check_inverse_retraction(
    manifold: Manifold, x: Tensor, seed: int = 0, *, length: float = 0.5, rtol: float | None = None
) -> CheckResult:
    """``inverse_retract`` gives back the tangent vector that ``retract`` took.

    Args:
        length: of u, in the metric.
    """
    recorder, tol = Recorder("inverse_retraction", manifold), tolerance(x.dtype, rtol)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator_like(x, seed)), length)
    found = manifold.inverse_retract(x, manifold.retract(x, u))
    scale = max(1.0, worst(x))
    recorder.at_most("|inverse_retract(retract(u)) - u|", gap(found, u) / scale, tol)
    recorder.at_most("tangent error", worst(manifold.tangent_error(x, found)) / scale, tol)
    return recorder.result()


def check_pushforward(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    length: float = 0.5,
    invariant: Invariant | None = None,
    rtol: float | None = None,
) -> CheckResult:
    """``pushforward(x, u, v)``, of the manifold or of its retraction, is the derivative of R_x at u along v.

    In float64, whatever the dtype of ``x``.

    Raises:
        NotImplementedError: neither the manifold nor its retraction has a ``pushforward``.
    """
    x = x.detach().to(torch.float64)
    recorder, tol = Recorder("pushforward", manifold), tolerance(x.dtype, rtol)
    holder: Any = getattr(manifold, "retraction", manifold)
    if hasattr(holder, "with_metric"):  # a retraction that depends on the metric, as the exponential map does
        holder = holder.with_metric(getattr(manifold, "metric", None))
    if not hasattr(holder, "pushforward"):
        raise NotImplementedError(f"{type(manifold).__name__} has no pushforward")
    generator, embed = generator_like(x, seed), representative(invariant)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), length)
    v = lengthen(manifold, x, manifold.random_tangent(x, generator), 1.0)
    y, found = manifold.retract(x, u), holder.pushforward(x, u, v)
    quotient = derivative(lambda t: embed(manifold.retract(x, u + t * v)))
    recorder.at_most(
        "|DR(u)[v] - difference quotient|", gap(derivative(lambda t: embed(y + t * found)), quotient), _STENCIL
    )
    recorder.at_most("tangent error at R(u)", worst(manifold.tangent_error(y, found)) / max(1.0, worst(found)), tol)
    return recorder.result()


def claims_isometry(manifold: Manifold) -> bool:
    """Whether the transport is said to be isometric: ``vector_transport.isometric`` or ``transport_is_isometric``."""
    transport = getattr(manifold, "vector_transport", None)
    if transport is not None:
        return bool(getattr(transport, "isometric", False))
    return bool(getattr(manifold, "transport_is_isometric", False))


def check_transport(
    manifold: Manifold, x: Tensor, seed: int = 0, *, length: float = 0.5, rtol: float | None = None
) -> CheckResult:
    """``transport`` is linear, tangent at the end of the step, the identity for no step; isometric where it says so.

    Where it claims nothing, how far it is from an isometry is reported.

    Args:
        length: of the step, in the metric.
    """
    recorder = Recorder("transport", manifold)
    tol = tolerance(x.dtype, rtol) * max(1.0, worst(x))
    generator = generator_like(x, seed)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), min(length, 0.85 * radius(manifold)))
    v, w = (lengthen(manifold, x, manifold.random_tangent(x, generator), 1.0) for _ in range(2))
    y = manifold.retract(x, u)
    tv, tw = manifold.transport(x, u, v), manifold.transport(x, u, w)
    recorder.at_most("tangent error at R(u)", worst(manifold.tangent_error(y, tv)) / max(1.0, worst(tv)), tol)
    recorder.at_most("linearity", gap(manifold.transport(x, u, 2 * v - 3 * w), 2 * tv - 3 * tw), tol)
    recorder.at_most("|T(v) - v| for u = 0", gap(manifold.transport(x, torch.zeros_like(u), v), v), tol)
    fused_y, fused = manifold.retract_transport(x, u, v, w)
    recorder.at_most("retract_transport, point", gap(fused_y, y), tol)
    recorder.at_most("retract_transport, vectors", max(gap(fused[0], tv), gap(fused[1], tw)), tol)
    defect = max(
        gap(manifold.inner(y, manifold.transport(x, u, a), manifold.transport(x, u, b)), manifold.inner(x, a, b))
        for a, b in ((v, v), (v, w), (w, w))
    )
    if claims_isometry(manifold):
        recorder.at_most("isometry, |<Tv, Tw> - <v, w>|", defect, tol)
    else:
        recorder.report("isometry (not claimed), |<Tv, Tw> - <v, w>|", defect)
    recorder.report(
        "ambient length of T(v) over that of v", _ratio(frobenius(manifold, tv, tv), frobenius(manifold, v, v))
    )
    return recorder.result()


def _ratio(a: Tensor, b: Tensor) -> float:
    nonzero = b > 0
    return worst((a[nonzero] / b[nonzero]).sqrt()) if bool(nonzero.any()) else 1.0
