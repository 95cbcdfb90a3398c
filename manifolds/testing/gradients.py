"""The check of automatic differentiation through every map."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import Invariant, ambient, derivative, generator_like, lengthen, radius, representative, worst
from ._result import CheckResult, Recorder

__all__ = ["check_gradients"]

_LIMIT = 1e-7


def check_gradients(manifold: Manifold, x: Tensor, seed: int = 0, *, invariant: Invariant | None = None) -> CheckResult:
    """Backward passes agree with difference quotients, also at u = 0. In float64.

    Every map is taken as a function of an ambient tensor that is first projected to the tangent space, at a generic
    one and at 0. For the base point, x itself moves along a retraction.
    """
    x = x.detach().to(torch.float64)
    recorder = Recorder("gradients", manifold)
    generator, embed = generator_like(x, seed), representative(invariant)
    z, g = ambient(x, generator), ambient(x, generator)
    length = 0.3 * min(1.0, radius(manifold))
    generic = lengthen(manifold, x, manifold.random_tangent(x, generator), length)
    moved = lengthen(manifold, x, manifold.random_tangent(x, generator), length)
    zero = torch.zeros_like(x)
    step = g * (length / max(1.0, worst(g) * g.numel() ** 0.5))  # an ambient vector that x drags along

    def tangent(w: Tensor) -> Tensor:
        return manifold.project(x, w)

    def near(w: Tensor) -> Tensor:
        return manifold.project_point(x + tangent(w))

    maps: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]] = {
        "project, in z": (lambda w: manifold.project(x, w), (z,)),
        "project, in x": (lambda w: manifold.project(near(w), z), (generic,)),
        "project_point": (lambda w: embed(manifold.project_point(x + length * w)), (z, zero)),
        "egrad_to_rgrad, in g": (lambda w: manifold.egrad_to_rgrad(x, w), (g,)),
        "egrad_to_rgrad, in x": (lambda w: manifold.egrad_to_rgrad(near(w), g), (generic,)),
        "norm, in u": (lambda w: manifold.norm(x, tangent(w)), (generic,)),
        "retract, in u": (lambda w: embed(manifold.retract(x, tangent(w))), (generic, zero)),
        "retract, in x": (lambda w: embed(manifold.retract(near(w), manifold.project(near(w), step))), (generic, zero)),
        "exp, in u": (lambda w: embed(manifold.exp(x, tangent(w))), (generic, zero)),
        "exp, in x": (lambda w: embed(manifold.exp(near(w), manifold.project(near(w), step))), (generic, zero)),
        "log, in y": (lambda w: manifold.log(x, near(w)), (generic, zero)),
        "log, in x": (lambda w: manifold.log(near(w), x), (generic,)),
        "dist, in y": (lambda w: manifold.dist(x, near(w)), (generic,)),
        "inverse_retract, in y": (lambda w: manifold.inverse_retract(x, near(w)), (generic, zero)),
        "transport, in v": (lambda w: manifold.transport(x, moved, tangent(w)), (generic,)),
        "transport, in u": (lambda w: manifold.transport(x, tangent(w), moved), (generic, zero)),
    }
    missing = []
    for name, (function, places) in maps.items():
        for place in places:
            label = f"{name}{' at 0' if place is zero else ''}"
            try:
                recorder.at_most(label, _gradient_gap(function, place, generator), _LIMIT)
            except NotImplementedError:
                missing.append(label)
    if missing:
        recorder.note(f"not implemented, so not measured: {', '.join(missing)}")
    return recorder.result()


def _gradient_gap(function: Callable[[Tensor], Tensor], place: Tensor, generator: torch.Generator) -> float:
    """The difference between the two derivatives of a random linear form of the result, along a random direction."""
    w = place.detach().clone().requires_grad_()
    value = function(w)
    weights = torch.randn(value.shape, dtype=value.dtype, device=value.device, generator=generator)
    direction = torch.randn(w.shape, dtype=w.dtype, device=w.device, generator=generator)
    direction = direction / max(1.0, float(direction.norm()) if direction.numel() else 1.0)
    # a constant has no graph, and derivative 0; a graph that is cut shows as 0 where the quotient is not
    gradient = torch.zeros_like(w)
    if value.requires_grad:
        (found,) = torch.autograd.grad((weights * value).sum(), w, allow_unused=True)
        gradient = gradient if found is None else found
    with torch.no_grad():
        quotient = float(derivative(lambda t: (weights * function(place + t * direction)).sum()))
    return abs(float((gradient * direction).sum()) - quotient) / max(1.0, abs(quotient))
