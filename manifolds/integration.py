"""Geodesics of a metric known only by its inner product and its Riesz map: an integrator and a shooting solver.

The geodesic flow is Hamilton's for H(x, p) = ½⟨p, R_x(p)⟩, R the Riesz map, p an ambient covector: ẋ = R_x(p) is
tangent whatever p is, so x stays on the manifold, and the normal part of p changes nothing. Differentiating ẋ gives
the ambient acceleration γ'' = D_x R_x(p)[ẋ] + R_x(ṗ), ṗ = −∂H/∂x, which is quadratic in γ'. Its polarization S is
minus the Christoffel form, and parallel transport is V' = S(γ', V).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import LogNotConvergedError
from .linalg import frobenius_norm, polar_factor, project_tangent, qr_positive

if TYPE_CHECKING:
    from .metrics import Metric

__all__ = ["TOLERANCE", "geodesic", "polarized_acceleration", "shoot"]

#: Relative tolerance of the integrator, held by its own error estimate.
TOLERANCE = 1e-9

_LEVELS = 9  # of extrapolation
_MAX_ITERATIONS = 60
_STRIDE = 0.5  # of the end point, an iteration of the shooting solver


def _acceleration(metric: Metric, x: Tensor, u: Tensor) -> Tensor:
    """γ''(0) of the geodesic from x with velocity u; see the module."""
    with torch.enable_grad():
        v = torch.zeros_like(u).requires_grad_()
        # the covector of u: the derivative of ⟨u, ·⟩
        (momentum,) = torch.autograd.grad(metric.inner(x, u, v).sum(), v, create_graph=True)
        at = (x if x.requires_grad else x.detach()).clone()
        at = at if at.requires_grad else at.requires_grad_()
        velocity = metric.egrad_to_rgrad(at, momentum)
        energy = (momentum * velocity).sum() / 2
        force = -_grad(energy, at)
        # D_x R_x(p)[u] as the derivative in w of (the derivative in x of ⟨w, R_x(p)⟩) · u
        w = torch.zeros_like(u).requires_grad_()
        turning = _grad((_grad((w * velocity).sum(), at) * u).sum(), w)
    result = turning + metric.egrad_to_rgrad(x, force)
    return result if torch.is_grad_enabled() and (x.requires_grad or u.requires_grad) else result.detach()


def _grad(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, create_graph=True, materialize_grads=True)[0]


def polarized_acceleration(metric: Metric, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """S(u, v) = (a(u+v) − a(u−v))/4 for the quadratic acceleration a."""
    x, u, v = torch.broadcast_tensors(x, u, v)
    return (_acceleration(metric, x, u + v) - _acceleration(metric, x, u - v)) / 4


def geodesic(metric: Metric, x: Tensor, u: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The end of the geodesic from x with velocity u at time 1, and v (by default u) carried there. Differentiable.

    The Gragg–Bulirsch–Stoer method: the modified midpoint rule with 2, 4, 6, … steps over a stretch of length at most
    1, extrapolated in the square of the step until the estimated error is below :data:`TOLERANCE` times max(1, ‖u‖);
    stretches are halved where it is not reached. The result is projected back to the manifold and its tangent space.

    Raises:
        RuntimeError: the tolerance was not reached.
    """
    x, u = torch.broadcast_tensors(x, u)
    state = [x, project_tangent(x, u)]
    if v is not None:
        state.append(project_tangent(x, v))
        state = list(torch.broadcast_tensors(*state))
    if x.numel() == 0:
        return state[0].clone(), state[-1]
    size = max(1.0, float(frobenius_norm(u.detach()).max()))
    # rounding bounds what float32 can reach
    tolerance = max(TOLERANCE, 50 * torch.finfo(x.dtype).eps) * size
    stretches = math.ceil(size)
    while True:
        end, error = _integrate(metric, state, stretches, tolerance)
        if error <= tolerance:
            break
        stretches *= 2
        if stretches > 64 * size or not error < math.inf:
            raise RuntimeError(
                f"a geodesic of {metric!r} was integrated to an error of {error:.2g}, and {tolerance:.2g} is asked "
                "for; the metric is not smooth enough, or the velocity too large"
            )
    y = polar_factor(end[0])
    return y, project_tangent(y, end[-1])


def _integrate(metric: Metric, state: list[Tensor], stretches: int, tolerance: float) -> tuple[list[Tensor], float]:
    """The state at time 1, and the estimated error, the sum over stretches; stops early where it is too large."""
    total = 0.0
    for _ in range(stretches):
        table: list[list[list[Tensor]]] = []
        error = math.inf
        for level in range(_LEVELS):
            row = [_midpoint(metric, state, 1 / stretches, 2 * (level + 1))]
            for k in range(level):
                ratio = ((level + 1) / (level - k)) ** 2
                row.append([a + (a - b) / (ratio - 1) for a, b in zip(row[-1], table[-1][k], strict=True)])
            if level:
                error = max(float((a - b).detach().abs().max()) for a, b in zip(row[-1], row[-2], strict=True))
            table.append(row)
            if error <= tolerance / stretches:
                break
        total += error
        if not total <= tolerance:
            return state, total
        state = table[-1][-1]
    return state, total


def _midpoint(metric: Metric, state: list[Tensor], length: float, steps: int) -> list[Tensor]:
    """Gragg's modified midpoint rule, whose error has even powers of the step only."""
    h = length / steps
    # the slopes differentiate inside; without detaching, the graph would grow with the steps for nothing
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in state)

    def slope(s: list[Tensor]) -> list[Tensor]:
        x, velocity, *carried = s
        result = [velocity, _acceleration(metric, x, velocity)]
        result += [polarized_acceleration(metric, x, velocity, v) for v in carried]
        return result if recording else [r.detach() for r in result]

    def moved(s: list[Tensor], k: list[Tensor], factor: float) -> list[Tensor]:
        return [a + factor * b for a, b in zip(s, k, strict=True)]

    before, now = state, moved(state, slope(state), h)
    for _ in range(steps - 1):
        before, now = now, moved(before, slope(now), 2 * h)
    return [(a + b) / 2 for a, b in zip(before, moved(now, slope(now), h), strict=True)]


@torch.no_grad()
def shoot(metric: Metric, x: Tensor, y: Tensor) -> Tensor:
    """The u with exp(x, u) = y, by Newton's method on a path to y; the Jacobian by central differences. No autograd.

    Meant for small manifolds: an iteration integrates 2·dim geodesics.

    Raises:
        LogNotConvergedError: the end stays farther than 100 · :data:`TOLERANCE` from y.
    """
    x, y = torch.broadcast_tensors(x, y)
    u = torch.zeros_like(x)
    if x.numel() == 0:
        return u
    basis = _tangent_frames(x)
    step, worst = 1e-4, float("inf")
    for _ in range(_MAX_ITERATIONS):
        end = metric.exp(x, u)
        residual = frobenius_norm(end - y)
        worst = float(residual.max())
        if worst <= TOLERANCE:
            break
        error = project_tangent(end, y - end)
        length = frobenius_norm(error)
        error = error * (_STRIDE / length.clamp_min(_STRIDE))[..., None, None]
        forward = metric.exp(x.unsqueeze(0), u + step * basis)
        backward = metric.exp(x.unsqueeze(0), u - step * basis)
        jacobian = ((forward - backward) / (2 * step)).flatten(-2).movedim(0, -1)
        q, r = qr_positive(jacobian)
        right = q.mT @ error.flatten(-2).unsqueeze(-1)
        try:
            coefficients = torch.linalg.solve_triangular(r, right, upper=True).squeeze(-1)
        except RuntimeError:  # singular: at a conjugate point
            break
        u = u + (coefficients.movedim(-1, 0)[..., None, None] * basis).sum(0)
        if not bool(torch.isfinite(u).all()):
            break
    if not worst <= 100 * TOLERANCE:
        raise LogNotConvergedError(
            f"no geodesic of {metric!r} from x to y was found: the best one ends {worst:.2g} from y", worst
        )
    return u


def _tangent_frames(x: Tensor) -> Tensor:
    """A basis of the tangent space, (dim, *x.shape), orthonormal in the ambient inner product."""
    n, p = x.shape[-2:]
    units = torch.eye(n * p, dtype=x.dtype, device=x.device).reshape(n * p, *(1,) * (x.ndim - 2), n, p)
    images = project_tangent(x, units.expand(n * p, *x.shape))
    flat = images.flatten(-2).movedim(0, -1)  # the projection as a symmetric matrix: eigenvalues 0 and 1
    vectors = torch.linalg.eigh(flat).eigenvectors[..., -(n * p - p * (p + 1) // 2) :] if n * p else flat
    if n * p == p * (p + 1) // 2:
        vectors = vectors[..., :0]
    return vectors.movedim(-1, 0).reshape(-1, *x.shape)
