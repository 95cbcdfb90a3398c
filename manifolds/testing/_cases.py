"""Inputs, tolerances and derivatives that the checks share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..manifold import Manifold

__all__ = [
    "METHODS",
    "Invariant",
    "ambient",
    "call",
    "derivative",
    "frobenius",
    "gap",
    "generator_like",
    "inputs",
    "lengthen",
    "radius",
    "representative",
    "tolerance",
    "worst",
]

Invariant = Callable[[Tensor], Tensor]
"""Sends every representative of a point of a quotient space to one tensor, smoothly; as X ↦ XXᵀ for subspaces."""

# How the methods that take and return tensors are called, in the names of `inputs`. `tangent_basis` is not among them:
# a basis is not unique, so two right answers differ.
METHODS: dict[str, tuple[str, ...]] = {
    "point_error": ("x",),
    "tangent_error": ("x", "u"),
    "project": ("x", "z"),
    "project_point": ("a",),
    "inner": ("x", "u", "v"),
    "norm": ("x", "u"),
    "egrad_to_rgrad": ("x", "z"),
    "ehess_to_rhess": ("x", "z", "w", "u"),
    "exp": ("x", "u"),
    "log": ("x", "y"),
    "dist": ("x", "y"),
    "retract": ("x", "u"),
    "inverse_retract": ("x", "y"),
    "transport": ("x", "u", "v"),
    "retract_transport": ("x", "u", "v"),
}


def tolerance(dtype: torch.dtype, rtol: float | None = None) -> float:
    """The relative error that rounding explains: 10⁴ units in the last place unless the caller says otherwise."""
    return 1e4 * torch.finfo(dtype).eps if rtol is None else rtol


def representative(invariant: Invariant | None) -> Invariant:
    return (lambda x: x) if invariant is None else invariant


def generator_like(x: Tensor, seed: int) -> torch.Generator:
    # Not `seed` itself: whoever made x with the same seed made it of the same numbers, and their projection to the
    # tangent space at x is no generic vector (on Stiefel, xR projects to x skew(R), which has no part off x).
    return torch.Generator(device=x.device).manual_seed((2654435761 * (seed + 1)) % 2**32)


def ambient(x: Tensor, generator: torch.Generator, spread: float = 0.0) -> Tensor:
    """A Gaussian tensor like ``x``; its entries are scaled by random powers of ten, ``spread`` decades apart."""
    z = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    if spread:
        z = z * 10 ** (spread * (torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator) - 0.5))
    return z


def radius(manifold: Manifold) -> float:
    """The length within which exp is inverted: the injectivity radius, 3 where that is infinite, 1 where unknown."""
    try:
        found = manifold.injectivity_radius
    except NotImplementedError:
        return 1.0
    return found if math.isfinite(found) else 3.0


def lengthen(manifold: Manifold, x: Tensor, u: Tensor, length: float) -> Tensor:
    """``u`` scaled to ``length`` in the metric; 0 stays 0."""
    norm = manifold.norm(x, u)
    norm = torch.where(norm > 0, norm, torch.ones_like(norm))
    return u * (length / norm).reshape(norm.shape + (1,) * manifold.ndim)


def inputs(manifold: Manifold, x: Tensor, seed: int, batch: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """A tensor of shape ``batch + x.shape`` for each argument name in ``METHODS``; with a batch, at new points."""
    generator = generator_like(x, seed)
    if batch:
        x = manifold.random_point(*batch, *x.shape, dtype=x.dtype, device=x.device, generator=generator)
    length = 0.3 * min(1.0, radius(manifold))
    u = lengthen(manifold, x, manifold.random_tangent(x, generator), length)
    v = lengthen(manifold, x, manifold.random_tangent(x, generator), 1.0)
    return {
        "x": x,
        "u": u,
        "v": v,
        "y": manifold.project_point(x + u).detach(),
        "z": ambient(x, generator),
        "w": ambient(x, generator),
        "a": x + 0.1 * ambient(x, generator),
    }


def call(manifold: Manifold, method: str, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The tensors that a method of ``METHODS`` returns, as one flat tuple."""
    result = getattr(manifold, method)(*(given[name] for name in METHODS[method]))
    if isinstance(result, Tensor):
        return (result,)
    y, carried = result
    return (y, *carried)


def worst(a: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor, NaN if there is one."""
    return float(a.detach().abs().max()) if a.numel() else 0.0


def frobenius(manifold: Manifold, u: Tensor, v: Tensor) -> Tensor:
    """The ambient inner product over the dimensions of a point; batch-shaped."""
    dims = tuple(range(-manifold.ndim, 0))
    return (u * v).sum(dims) if dims else u * v


def gap(found: Tensor, expected: Tensor) -> float:
    """max |found − expected|, relative to max |expected| where that is above 1; infinite where the shapes differ."""
    if found.shape != expected.shape:
        return math.inf
    return worst(found - expected) / max(1.0, worst(expected))


def derivative(function: Callable[[float], Tensor], h: float = 1e-3) -> Tensor:
    """d/dt function(t) at 0 by the five-point stencil, with an error of about h⁴/30 times the fifth derivative."""
    return (8 * (function(h) - function(-h)) - (function(2 * h) - function(-2 * h))) / (12 * h)
