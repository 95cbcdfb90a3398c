"""Steepest descent in a norm without a closed form: a near-minimizer of the dual, whose bound needs no trust in it.

For min ⟨G, Δ⟩ over tangent Δ with ‖Δ‖ ≤ 1, every normal N gives −⟨G, Δ⟩ ≤ ‖G + N‖_*: ⟨N, Δ⟩ = 0. The solvers here look
for the N with the smallest bound; whatever they return, the bound holds, and the direction they return is feasible, so
the optimum lies between the two. A normal N is a Z − PZ with P the orthogonal projection to the tangent space, so this
works on every manifold with an orthogonal ``project``; on Stiefel N = XΛ, Λ symmetric.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..manifolds import Manifold, Stiefel, spectral_steepest_descent
from ..manifolds.linalg import lyapunov_solve, sym
from ._arrays import frobenius, spread
from .norms import ONE_TO_TWO, SPECTRAL, TWO_TO_INF, Norm

#: From (x, g, Λ, δ): the Λ that minimizes a quadratic which touches the dual, smoothed by δ, at Λ from above; and minus
#: the gradient there of that dual in C = G + XΛ, a point of the unit ball.
Majorizer = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

_HISTORY = 8  # of Anderson acceleration
_TOLERANCE = 1e-11  # relative gap at which a solver stops
_STALLED = 1e-8  # relative gap above which another is tried after it
_SMOOTHING = 1e-9  # the final δ, relative to ‖G‖_F: columns, rows and singular values below it gain no more weight


class Optimum(NamedTuple):
    """``direction``: tangent, of unit length, with rate ``attained``; ``normal``: the N whose bound is ``dual``.

    ``attained`` ≤ optimum ≤ ``dual``, both batch-shaped.
    """

    direction: Tensor
    normal: Tensor
    attained: Tensor
    dual: Tensor


def optimum(manifold: Manifold, x: Tensor, tangent_gradient: Tensor, norm: Norm, max_iter: int) -> Optimum:
    """Bounds of max −⟨G, Δ⟩ over tangent Δ with ‖Δ‖ ≤ 1, for float64 points (*batch, *point) and tangent G = PG.

    A zero gradient has a zero direction, and bounds of 0.
    """
    k = manifold.ndim
    batch = x.shape[: x.ndim - k]
    size = frobenius(tangent_gradient, k)
    # every norm is homogeneous: gradients of 1e-200 and 1e200 are the same problem
    unit = tangent_gradient / spread(torch.where(size == 0, 1.0, size), k)
    points, gradients = (a.reshape(-1, *a.shape[a.ndim - k :]) for a in (x, unit))
    found = [_one(manifold, *pair, norm, max_iter) for pair in zip(points, gradients, strict=True)]
    direction, normal = (
        torch.stack(parts).reshape(x.shape) for parts in ([s.direction for s in found], [s.normal for s in found])
    )
    attained, dual = (
        x.new_tensor(parts).reshape(batch) for parts in ([s.attained for s in found], [s.dual for s in found])
    )
    return Optimum(direction, normal * spread(size, k), attained * size, dual * size)


def _one(manifold: Manifold, x: Tensor, g: Tensor, norm: Norm, max_iter: int) -> _Search:
    search, zero = _Search(manifold, x, g, norm), torch.zeros_like(g)
    if not bool(g.any()):
        search.dual = 0.0
        return search
    search.look(zero, _checked_lmo(norm, g))
    majorizer = _MAJORIZERS.get(norm.name) if _is_builtin(norm) and isinstance(manifold, Stiefel) else None
    if norm is SPECTRAL and isinstance(manifold, Stiefel) and max_iter > 0:
        solution = spectral_steepest_descent(x, g)
        search.look(x @ solution.multiplier, solution.step)
    if majorizer is not None:
        _majorize(search, majorizer, max_iter)
    # where rows or columns of G + XΛ vanish at the optimum, majorizing can stall; bundles do not mind
    if majorizer is None or not search.within(_STALLED):
        _bundle(search, max_iter)
    return search


class _Search:
    """The best bounds seen so far on one point's problem."""

    def __init__(self, manifold: Manifold, x: Tensor, g: Tensor, norm: Norm) -> None:
        self.manifold, self.x, self.g, self.norm = manifold, x, g, norm
        self.direction, self.normal = torch.zeros_like(g), torch.zeros_like(g)
        self.attained, self.dual = 0.0, math.inf
        # a float32 frame has tangent and normal vectors to its own rounding only
        self.tolerance = max(_TOLERANCE, 16 * float(manifold.point_error(x)))

    def project(self, z: Tensor) -> Tensor:
        return self.manifold.project(self.x, z)

    def bound(self, normal: Tensor) -> float:
        """‖G + N‖_*, remembered if it is the lowest, of the normal part of what is given as ``normal``."""
        # what rounding left of a tangent part would make it no bound
        normal = normal - self.project(normal)
        value = float(self.norm.dual_norm(self.g + normal))
        if value < self.dual:
            self.dual, self.normal = value, normal
        return value

    def offer(self, direction: Tensor) -> None:
        """Remember the tangent part of ``direction``, at unit length, if its rate is the highest."""
        tangent = self.project(direction)
        length = float(self.norm.norm(tangent))
        if length > 0 and (rate := -float((self.g * tangent).sum()) / length) > self.attained:
            self.attained, self.direction = rate, tangent / length

    def look(self, normal: Tensor, direction: Tensor) -> float:
        self.offer(direction)
        return self.bound(normal)

    def within(self, tolerance: float) -> bool:
        return self.dual - self.attained <= tolerance * self.dual

    @property
    def done(self) -> bool:
        return self.within(self.tolerance)


def _majorize(search: _Search, majorizer: Majorizer, max_iter: int) -> None:
    """Monotone majorize–minimize over Λ, with Anderson acceleration wherever that is lower."""
    x, g = search.x, search.g
    multiplier = x.new_zeros(x.shape[-1], x.shape[-1])
    steps: list[Tensor] = []
    images: list[Tensor] = []
    for iteration in range(max_iter):
        if search.done:
            return
        image, direction = majorizer(x, g, multiplier, max(_SMOOTHING, 10 ** (-1 - iteration / 3)))
        image = sym(image)
        following, value = image, search.look(x @ image, direction)
        steps, images = [*steps, (image - multiplier).flatten()][-_HISTORY:], [*images, image.flatten()][-_HISTORY:]
        if len(steps) > 1:
            accelerated = _anderson(steps, images).reshape(image.shape)
            if search.bound(x @ accelerated) < value:
                following = accelerated
            else:
                steps, images = [], []
        multiplier = following


def _anderson(steps: list[Tensor], images: list[Tensor]) -> Tensor:
    """Walker & Ni, "Anderson acceleration for fixed-point iterations" (2011), type II with full mixing."""
    d_steps = torch.stack([b - a for a, b in itertools.pairwise(steps)], 1)
    d_images = torch.stack([b - a for a, b in itertools.pairwise(images)], 1)
    # the rank-revealing driver: near the optimum the differences are rounding
    weights = torch.linalg.lstsq(d_steps, steps[-1].unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return images[-1] - d_images @ weights


def _column_majorizer(x: Tensor, g: Tensor, multiplier: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    # Σⱼ ‖cⱼ‖ ≤ Σⱼ (‖cⱼ‖²/hⱼ + hⱼ)/2: the minimizing Λ entry by entry
    c = g + x @ multiplier
    inverse = (torch.linalg.vector_norm(c, dim=-2) ** 2 + delta**2).rsqrt()
    weighted = (x.mT @ g) * inverse
    return -(weighted + weighted.mT) / (inverse.unsqueeze(0) + inverse.unsqueeze(1)), -c * inverse


def _row_majorizer(x: Tensor, g: Tensor, multiplier: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    # the same with weights on rows: XᵀWX Λ + Λ XᵀWX = −2 sym(XᵀWG)
    c = g + x @ multiplier
    inverse = (torch.linalg.vector_norm(c, dim=-1, keepdim=True) ** 2 + delta**2).rsqrt()
    weighted = x * inverse
    return lyapunov_solve(sym(x.mT @ weighted), -2 * sym(weighted.mT @ g)), -c * inverse


_MAJORIZERS: dict[str, Majorizer] = {
    "1->2": _column_majorizer,
    "2->inf": _row_majorizer,
}


def _is_builtin(norm: Norm) -> bool:
    return norm is SPECTRAL or norm is ONE_TO_TWO or norm is TWO_TO_INF


def _bundle(search: _Search, max_iter: int) -> None:
    """Proximal bundle method on the dual, for a norm known only through its oracle.

    Each oracle answer Δᵢ gives a plane below the dual norm, ‖C‖_* ≥ ⟨C, −Δᵢ⟩. The proximal step on the maximum of the
    planes is N ← N − t Σ wᵢqᵢ, q the normal parts of −Δᵢ; Σ wᵢΔᵢ, a point of the ball that is nearly tangent, is
    the primal direction (Kiwiel 1990; it is also the augmented Lagrangian of the primal by fully corrective
    Frank–Wolfe).
    """
    g, norm = search.g, search.norm
    center = candidate = search.normal
    value = search.dual
    atoms = np.empty((0, g.numel()))
    normals = np.empty((0, g.numel()))
    weights = np.empty(0)
    step, nulls = 0.0, 0
    for _ in range(max_iter):
        if search.done:
            return
        atom = -_checked_lmo(norm, g + candidate)
        search.offer(-atom)
        atoms = np.vstack([atoms, atom.flatten().numpy()])
        normals = np.vstack([normals, (atom - search.project(atom)).flatten().numpy()])
        weights = np.append(weights, 0.0 if weights.size else 1.0)
        heights = atoms @ (g + center).flatten().numpy()
        gram = normals @ normals.T
        if step == 0.0:
            step = 0.3 * value / gram[0, 0] if gram[0, 0] > 0 else 1.0
        weights = _simplex_qp(step * gram, heights, weights)
        search.offer(-torch.from_numpy(weights @ atoms).reshape(g.shape))
        candidate = center - step * torch.from_numpy(weights @ normals).reshape(g.shape)
        reached = search.bound(candidate)
        predicted = value - float((heights - step * gram @ weights) @ weights)
        if value - reached >= 0.1 * predicted:
            step *= 2.0 if value - reached >= 0.7 * predicted else 1.0
            center, value, nulls = candidate, reached, 0
        else:
            nulls += 1
            step *= 0.8 if nulls % 5 == 0 else 1.0
        keep = (weights > 0) | (np.arange(weights.size) >= weights.size - 20)
        atoms, normals, weights = atoms[keep], normals[keep], weights[keep]


def _checked_lmo(norm: Norm, c: Tensor) -> Tensor:
    answer = norm.lmo(c)
    length, rate, dual = float(norm.norm(answer)), -float((c * answer).sum()), float(norm.dual_norm(c))
    if not (length <= 1 + 1e-6 and abs(rate - dual) <= 1e-6 * abs(dual)):
        raise ValueError(
            f"the norm {norm.name!r} contradicts itself: at one point its lmo has norm {length:.6g}, which must be at "
            f"most 1, and attains −{rate:.6g}, which must be minus the dual_norm, {dual:.6g}"
        )
    return answer


def _simplex_qp(gram: np.ndarray, linear: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The minimizer of ½wᵀKw − aᵀw over w ≥ 0, Σw = 1, by an active set that starts from ``weights``."""
    size = len(linear)
    scale = max(float(np.abs(gram).max()), float(np.abs(linear).max()))
    if scale == 0:
        return weights
    gram = gram / scale + 1e-13 * np.eye(size)
    linear = linear / scale
    active = [int(i) for i in np.flatnonzero(weights > 0)]
    for _ in range(20 * size + 50):
        k = len(active)
        system = np.ones((k + 1, k + 1))
        system[:k, :k], system[k, k] = gram[np.ix_(active, active)], 0.0
        target = np.linalg.lstsq(system, np.append(linear[active], 1.0), rcond=1e-14)[0][:k]
        if target.min() >= -1e-14:
            weights = np.zeros(size)
            weights[active] = target.clip(0)
            weights /= weights.sum()
            slope = gram @ weights - linear
            entering = int(slope.argmin())
            if entering in active or slope[entering] >= slope @ weights - 1e-13:
                break
            active.append(entering)
        else:
            current = weights[active]
            falling = target < -1e-14
            reach = np.full(k, np.inf)
            reach[falling] = current[falling] / (current[falling] - target[falling])
            leaving = int(reach.argmin())
            current = current + reach[leaving] * (target - current)
            current[leaving] = 0.0
            weights = np.zeros(size)
            weights[active] = current.clip(0)
            weights /= weights.sum()
            active.pop(leaving)
    return weights
