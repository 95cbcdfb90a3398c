"""Checks at one point: projection, metric, gradient, basis, random points."""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import ambient, frobenius, gap, generator_like, tolerance, worst
from ._result import CheckResult, Recorder

__all__ = [
    "check_metric",
    "check_project_point",
    "check_projection",
    "check_random",
    "check_riesz",
    "check_tangent_basis",
]


def check_projection(
    manifold: Manifold, x: Tensor, seed: int = 0, *, spread: float = 0.0, rtol: float | None = None
) -> CheckResult:
    """``project`` is the orthogonal projection to the tangent space: tangent, idempotent, self-adjoint.

    Args:
        spread: over how many powers of ten the entries of the projected tensors are spread.
    """
    recorder, tol = Recorder("projection", manifold), tolerance(x.dtype, rtol)
    generator = generator_like(x, seed)
    z, w = ambient(x, generator, spread), ambient(x, generator, spread)
    z, w = z / max(1.0, worst(z)), w / max(1.0, worst(w))
    pz, pw = manifold.project(x, z.clone()), manifold.project(x, w.clone())
    scale = max(1.0, worst(x)) ** 2
    recorder.at_most("tangent error of P(z)", worst(manifold.tangent_error(x, pz)) / scale, tol)
    recorder.at_most("|P(P(z)) - P(z)|", gap(manifold.project(x, pz), pz) / scale, tol)
    recorder.at_most(
        "|<P(z), w> - <z, P(w)>|", gap(frobenius(manifold, pz, w), frobenius(manifold, z, pw)) / scale, tol
    )
    t = manifold.random_tangent(x, generator)
    recorder.at_most("|P(u) - u| for tangent u", gap(manifold.project(x, t), t), tol)
    return recorder.result()


def check_project_point(
    manifold: Manifold, x: Tensor, seed: int = 0, *, noise: float = 0.1, rtol: float | None = None
) -> CheckResult:
    """``project_point`` keeps points and goes to a nearest one: what it removes is normal to the manifold there.

    Args:
        noise: standard deviation of what is added to an entry of x. An open set, such as the positive definite
            matrices, has no nearest point to what lies outside, and needs less.
    """
    recorder, tol = Recorder("project_point", manifold), tolerance(x.dtype, rtol)
    a = x + noise * ambient(x, generator_like(x, seed))
    y = manifold.project_point(a.clone())
    recorder.at_most("point error", worst(manifold.point_error(y)), tol)
    recorder.at_most("|project_point(x) - x|", gap(manifold.project_point(x.clone()), x), tol)
    recorder.at_most("tangent part of a - project_point(a)", worst(manifold.project(y, a - y)), tol)
    return recorder.result()


def check_metric(manifold: Manifold, x: Tensor, seed: int = 0, *, rtol: float | None = None) -> CheckResult:
    """``inner`` is symmetric, bilinear and positive on tangent vectors, and ``norm`` is its norm."""
    recorder, tol = Recorder("metric", manifold), tolerance(x.dtype, rtol)
    generator = generator_like(x, seed)
    u, v, w = (manifold.random_tangent(x, generator) for _ in range(3))
    uv = manifold.inner(x, u, v)
    recorder.at_most("|<u, v> - <v, u>|", gap(uv, manifold.inner(x, v, u)), tol)
    combined = manifold.inner(x, u, 2 * v - 3 * w)
    recorder.at_most("bilinearity", gap(combined, 2 * uv - 3 * manifold.inner(x, u, w)), tol)
    square = manifold.inner(x, u, u)
    nonzero = frobenius(manifold, u, u) > 0
    recorder.holds("<u, u> > 0", bool((square[nonzero] > 0).all()))
    recorder.at_most("|norm(u)^2 - <u, u>|", gap(manifold.norm(x, u) ** 2, square), tol)
    recorder.holds("batch-shaped", tuple(uv.shape) == tuple(x.shape[: x.ndim - manifold.ndim]))
    return recorder.result()


def check_riesz(
    manifold: Manifold, x: Tensor, seed: int = 0, *, spread: float = 0.0, rtol: float | None = None
) -> CheckResult:
    """``egrad_to_rgrad`` represents the differential in the metric: ⟨grad, u⟩ = tr gᵀu for every tangent u."""
    recorder, tol = Recorder("riesz", manifold), tolerance(x.dtype, rtol)
    generator = generator_like(x, seed)
    g = ambient(x, generator, spread)
    g = g / max(1.0, worst(g))
    vectors = [manifold.random_tangent(x, generator) for _ in range(3)]
    expected = [frobenius(manifold, g, u) for u in vectors]
    xi = manifold.egrad_to_rgrad(x, g.clone())
    scale = max(1.0, worst(manifold.norm(x, xi)))
    recorder.at_most("tangent error of the gradient", worst(manifold.tangent_error(x, xi)) / max(1.0, worst(xi)), tol)
    errors = [gap(manifold.inner(x, xi, u), e) / scale for u, e in zip(vectors, expected, strict=True)]
    recorder.at_most("|<grad, u> - tr g'u|", max(errors), tol)
    return recorder.result()


def check_tangent_basis(manifold: Manifold, x: Tensor, *, rtol: float | None = None) -> CheckResult:
    """``tangent_basis`` has ``dim`` tangent vectors, orthonormal in the metric."""
    recorder, tol = Recorder("tangent_basis", manifold), tolerance(x.dtype, rtol)
    basis, dim = manifold.tangent_basis(x), manifold.dim(x.shape)
    batch = x.ndim - manifold.ndim
    expected = (*x.shape[:batch], dim, *x.shape[batch:])
    recorder.holds("shape (*batch, dim, *point)", tuple(basis.shape) == expected, f"found {tuple(basis.shape)}")
    if recorder.result().passed:
        rows = basis.movedim(batch, 0)
        tangency = max((worst(manifold.tangent_error(x, row)) / max(1.0, worst(row)) for row in rows), default=0.0)
        recorder.at_most("tangent error", tangency, tol)
        # a row of the Gram matrix at a time, as a batch
        base = x.expand_as(rows)
        identity = torch.eye(dim, dtype=x.dtype, device=x.device).reshape(dim, dim, *(1,) * batch)
        errors = [
            worst(manifold.inner(base, row.expand_as(rows), rows) - one)
            for row, one in zip(rows, identity, strict=True)
        ]
        recorder.at_most("|Gram matrix - I|", max(errors, default=0.0), tol)
        # all of the space: a random tangent vector is its own expansion
        u = manifold.random_tangent(x, generator_like(x, 0))
        expansion = sum((_scale(manifold, manifold.inner(x, u, row), row) for row in rows), torch.zeros_like(u))
        recorder.at_most("|u - its expansion|", gap(expansion, u), tol)
    return recorder.result()


def check_random(manifold: Manifold, x: Tensor, seed: int = 0, *, rtol: float | None = None) -> CheckResult:
    """Random points and unit tangent vectors are what they say, and repeat with their generator."""
    recorder, tol = Recorder("random", manifold), tolerance(x.dtype, rtol)

    def point(seed: int) -> Tensor:
        generator = generator_like(x, seed)
        return manifold.random_point(*x.shape, dtype=x.dtype, device=x.device, generator=generator)

    y = point(seed)
    recorder.holds("shape, dtype and device as asked", (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device))
    recorder.at_most("point error", worst(manifold.point_error(y)), tol)
    recorder.holds("the same with the same seed", torch.equal(y, point(seed)))
    # from the state of the generator that made y: its numbers are then y's own, and the normal part of them is large
    u = manifold.random_tangent(y, generator_like(x, seed))
    recorder.holds("random_tangent is like its point", (u.shape, u.dtype, u.device) == (y.shape, y.dtype, y.device))
    recorder.at_most("tangent error", worst(manifold.tangent_error(y, u)) / max(1.0, worst(u)), tol)
    expected = float(manifold.dim(y.shape) > 0)
    recorder.at_most("|norm - 1|" if expected else "norm", worst(manifold.norm(y, u) - expected), tol)
    recorder.holds(
        "the same tangent with the same seed", torch.equal(u, manifold.random_tangent(y, generator_like(x, seed)))
    )
    state = torch.random.get_rng_state()
    manifold.random_tangent(point(seed), generator_like(x, seed))
    recorder.holds("the global generator is left alone", torch.equal(state, torch.random.get_rng_state()))
    return recorder.result()


def _scale(manifold: Manifold, coefficient: Tensor, row: Tensor) -> Tensor:
    return coefficient.reshape(coefficient.shape + (1,) * manifold.ndim) * row
