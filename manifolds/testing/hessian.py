"""The check of the Riemannian Hessian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import (
    Invariant,
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
from .slopes import fit_slope

__all__ = ["check_hessian"]


def check_hessian(
    manifold: Manifold,
    x: Tensor,
    seed: int = 0,
    *,
    invariant: Invariant | None = None,
    rtol: float | None = None,
) -> CheckResult:
    """``ehess_to_rhess`` is linear, self-adjoint in the metric, and the second derivative along geodesics.

    In float64, on a random smooth function: what f(exp(tu)) − f − t·tr gᵀu − ½t²⟨Hess u, u⟩ leaves is O(t³). The first
    derivative is the ambient one, so that a wrong gradient conversion is not taken for a wrong Hessian.
    """
    x = x.detach().to(torch.float64)
    recorder, tol = Recorder("hessian", manifold), tolerance(x.dtype, rtol)
    generator = generator_like(x, seed)
    u, v = (lengthen(manifold, x, manifold.random_tangent(x, generator), 1.0) for _ in range(2))
    f = _smooth_function(x, x.ndim - manifold.ndim, generator, representative(invariant))
    egrad, ehess_u = _derivatives(f, x, u)
    _, ehess_v = _derivatives(f, x, v)
    hu, hv = manifold.ehess_to_rhess(x, egrad, ehess_u, u), manifold.ehess_to_rhess(x, egrad, ehess_v, v)
    scale = max(1.0, worst(hu), worst(hv))
    recorder.at_most("tangent error", worst(manifold.tangent_error(x, hu)) / scale, tol)
    both = manifold.ehess_to_rhess(x, egrad, 2 * ehess_u - ehess_v, 2 * u - v)
    recorder.at_most("linearity", gap(both, 2 * hu - hv), tol)
    asymmetry = gap(manifold.inner(x, hu, v), manifold.inner(x, u, hv))
    recorder.at_most("|<Hess u, v> - <u, Hess v>|", asymmetry / scale, tol)

    start = float(f(x))
    first, second = float(frobenius(manifold, egrad, u).sum()), float(manifold.inner(x, hu, u).sum())

    def along(t: float) -> float:
        return float(f(manifold.exp(x, t * u)))

    h = 5e-3
    quotient = (-along(2 * h) + 16 * along(h) - 30 * start + 16 * along(-h) - along(-2 * h)) / (12 * h * h)
    recorder.at_most("|<Hess u, u> - second derivative|", abs(quotient - second) / max(1.0, abs(second)), 1e-6)
    rounding = torch.finfo(x.dtype).eps * max(1.0, abs(start))
    slope = fit_slope(
        lambda t: abs(along(t) - start - t * first - t * t / 2 * second), rounding, 0.5 * min(1.0, radius(manifold))
    )
    recorder.at_least("slope of the second-order remainder", slope.slope, 2.8)
    return recorder.result()


def _smooth_function(
    x: Tensor, batch: int, generator: torch.Generator, embed: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A sum of sines and products of random linear forms, a sum over the batch: no symmetry, and all derivatives."""
    size, shape = max(1.0, worst(x) * x.shape[-1] ** 0.5 if x.ndim else 1.0), embed(x).shape
    dims = tuple(range(batch, len(shape)))
    forms = [torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator) / size**0.5 for _ in range(4)]

    def f(y: Tensor) -> Tensor:
        values = [form * embed(y) for form in forms]
        a, b, c, d = (v.sum(dims) if dims else v for v in values)
        return (torch.sin(a) + torch.cos(b) + c * d / 2).sum()

    return f


def _derivatives(f: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The ambient gradient of f, and its derivative along u."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad((gradient * u).sum(), x)
    return gradient.detach(), second
