"""Checks of the exponential map, the logarithm and the distance.

A geodesic is recognized here by the Gauss lemma, ⟨Dexp_x(u)[v], γ'(1)⟩ = ⟨v, u⟩ with γ(t) = exp_x(tu). It holds for the
exponential map, and for no other map with exp_x(0) = x and derivative id there: the lemma makes the radial curves the
gradient lines of a function whose gradient has length 1, and such lines are shortest. v = u says that the speed is
constant; the other v tell the geodesics of one metric from those of another, which on a homogeneous space may have
constant speed in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import (
    Invariant,
    ambient,
    derivative,
    gap,
    generator_like,
    lengthen,
    radius,
    representative,
    tolerance,
    worst,
)
from ._result import CheckResult, Recorder

__all__ = ["check_dist", "check_exp_log", "check_geodesic"]

# what the five-point stencil leaves, with room
_STENCIL = 1e-8


def check_geodesic(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    fraction: float = 0.5,
    invariant: Invariant | None = None,
    rtol: float | None = None,
) -> CheckResult:
    """``exp`` starts at x with velocity u, stays on the manifold, and follows geodesics of the manifold's metric.

    In float64, whatever the dtype of ``x``.

    Args:
        fraction: the length of u, in injectivity radii.
    """
    x = x.detach().to(torch.float64)
    recorder, tol = Recorder("geodesic", manifold), tolerance(x.dtype, rtol)
    generator, embed = generator_like(x, seed), representative(invariant)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), fraction * radius(manifold))
    scale = max(1.0, worst(u))
    recorder.at_most("|exp(0) - x|", gap(embed(manifold.exp(x, torch.zeros_like(u))), embed(x)), tol)
    y = manifold.exp(x, u)
    recorder.at_most("point error of exp(u)", worst(manifold.point_error(y)), tol)
    velocity = derivative(lambda t: embed(manifold.exp(x, t * u)))
    recorder.at_most("|velocity at 0 - u|", gap(velocity, derivative(lambda t: embed(x + t * u))), _STENCIL)

    def horizontal(v: Tensor) -> Tensor:
        # representatives may turn along their class on the way; elsewhere a derivative is tangent as it is
        return v if invariant is None else manifold.project(y, v)

    end = horizontal(derivative(lambda t: manifold.exp(x, (1 + t) * u)))
    square = manifold.inner(x, u, u)
    length = max(worst(square) ** 0.5, 1e-6)
    recorder.at_most(
        "| |velocity|^2 at the end - |u|^2 |",
        worst(manifold.inner(y, end, end) - square) / length**2,
        10 * _STENCIL,
    )
    errors = []
    for _ in range(3):
        v = manifold.random_tangent(x, generator)

        def varied(t: float, v: Tensor = v) -> Tensor:
            return manifold.exp(x, u + t * v)

        change = horizontal(derivative(varied))
        errors.append(worst(manifold.inner(y, change, end) - manifold.inner(x, v, u)) / length)
    recorder.at_most("Gauss lemma, |<Dexp(u)[v], end velocity> - <v, u>|", max(errors), 10 * _STENCIL)

    # an ambient gradient passed by mistake: projected or refused, but never off the manifold
    z = ambient(x, generator)
    z = u + 0.1 * (z - manifold.project(x, z))
    try:
        stray = worst(manifold.point_error(manifold.exp(x, z)))
    except ValueError:
        stray = 0.0
    recorder.at_most("point error of exp for a vector that is not tangent", stray, tol * scale)
    return recorder.result()


def check_exp_log(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    fraction: float = 0.5,
    invariant: Invariant | None = None,
    rtol: float | None = None,
) -> CheckResult:
    """``log`` inverts ``exp``: log(exp(u)) = u, exp(log(y)) = y, log(x) = 0.

    Args:
        fraction: the length of u, in injectivity radii.
        rtol: allowed relative to the length of u, besides the rounding of the end point; 1e-10 in float64.
    """
    recorder = Recorder("exp_log", manifold)
    eps, embed = torch.finfo(x.dtype).eps, representative(invariant)
    relative = max(1e-10, 1e4 * eps) if rtol is None else rtol
    generator = generator_like(x, seed)
    length = fraction * radius(manifold)
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), length)
    y = manifold.exp(x, u)
    found = manifold.log(x, y)
    limit = relative * length + 1e3 * eps * max(1.0, worst(x))
    recorder.at_most("|log(exp(u)) - u|", worst(found - u), limit)
    recorder.at_most("tangent error of the log", worst(manifold.tangent_error(x, found)), limit)
    recorder.at_most("|exp(log(y)) - y|", gap(embed(manifold.exp(x, found)), embed(y)), limit)
    # dist is held to |u| by check_dist: here the log is held to dist where there is one
    try:
        distance = manifold.dist(x, y)
    except NotImplementedError as error:
        recorder.note(str(error))
    else:
        recorder.at_most("| |log| - dist |", gap(manifold.norm(x, found), distance), 2 * limit)
    nothing = manifold.log(x, x.clone())
    recorder.at_most("|log(x, x)|", worst(nothing), 64 * eps * max(1.0, worst(x)))
    return recorder.result()


def check_dist(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    fraction: float = 0.5,
    rtol: float | None = None,
) -> CheckResult:
    """``dist`` is the length of the geodesic, a distance, accurate when tiny, and has a finite gradient everywhere.

    Args:
        fraction: the length of the geodesics, in injectivity radii; up to half.
    """
    recorder = Recorder("dist", manifold)
    eps = torch.finfo(x.dtype).eps
    tol = max(1e-10, 1e4 * eps) if rtol is None else rtol
    generator = generator_like(x, seed)
    length = fraction * radius(manifold)
    flat = manifold.dim(x.shape) == 0
    u, v = (lengthen(manifold, x, manifold.random_tangent(x, generator), length) for _ in range(2))
    y = manifold.exp(x, u)
    middle = manifold.exp(x, u / 2)
    xy = manifold.dist(x, y)
    recorder.holds("batch-shaped", tuple(xy.shape) == tuple(x.shape[: x.ndim - manifold.ndim]))
    recorder.at_most("|dist(x, exp(u)) - |u||", gap(xy, manifold.norm(x, u)), tol)
    recorder.at_most("|dist(x, y) - dist(y, x)|", gap(manifold.dist(y, x), xy), tol)
    half = manifold.dist(x, middle) + manifold.dist(middle, y)
    recorder.at_most("additive along a geodesic", gap(half, xy), tol)
    quarter_u, quarter_v = manifold.exp(x, u / 4), manifold.exp(x, v / 4)
    across = manifold.dist(quarter_u, quarter_v)
    around = manifold.dist(x, quarter_u) + manifold.dist(x, quarter_v)
    recorder.at_most("triangle inequality, excess", worst((across - around).clamp_min(0)), tol * max(1.0, length))
    tiny = 1e-9 if x.dtype == torch.float64 else 1e-4
    found = manifold.dist(x, manifold.exp(x, u * (tiny / length)))
    expected = torch.zeros_like(found) if flat else torch.full_like(found, tiny)
    limit = 1e-3 if x.dtype == torch.float64 else 2e-2
    recorder.at_most(f"relative error at a distance of {tiny:g}", worst(found - expected) / tiny, limit)
    recorder.at_most("dist(x, x)", worst(manifold.dist(x, x.clone())), 8 * eps * max(1.0, worst(x)))
    for name, end in (("coincident", x), ("distant", y)):
        end = end.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(manifold.dist(x, end).sum(), end)
        recorder.holds(f"finite gradient at {name} points", bool(torch.isfinite(gradient).all()))
    return recorder.result()
