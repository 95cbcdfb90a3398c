"""How far a step is from steepest descent, in any norm: bounds by weak duality, which trust no solver.

All arithmetic is float64. A batch of points is one certificate: each number is the worst over the batch, and the
batch-shaped arrays stay in ``.batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..manifolds import Manifold
from ._arrays import ArrayLike, as_float64, as_tensor, flat, frobenius, pairing, ratio, spread
from ._duality import Optimum, optimum
from ._result import Result
from .norms import Norm, find_norm

#: The tolerance of a certificate where none is given: what its dual is known to.
DEFAULT_ATOL = {"metric": 1e-12, "frobenius": 1e-12, "spectral": 1e-8}
_OTHER_ATOL = 1e-6


@dataclass(frozen=True, repr=False, eq=False)
class SteepestDescentCertificate(Result):
    """How far a step is from steepest descent; see :func:`steepest_descent_certificate`.

    ``primal``, ``dual``, ``attained``, ``gap``, ``relative_gap`` and ``cosine`` are those of the one point of the batch
    with the largest relative gap; ``tangency``, ``riesz_error`` and ``ambient_norm`` are maxima, ``stationary`` is true
    if any point is.
    """

    primal: float
    dual: float
    attained: float
    gap: float
    relative_gap: float
    cosine: float
    tangency: float
    riesz_error: float
    ambient_norm: float
    stationary: bool
    norm: str
    atol: float
    passed: bool
    batch: Mapping[str, Tensor]

    _hidden: ClassVar = frozenset({"batch"})

    @property
    def efficiency(self) -> tuple[float, float]:
        """Bounds of primal/optimum: the optimum lies between ``attained`` and ``dual``."""
        return self.cosine, 1.0 if self.attained == 0 else min(1.0, self.primal / self.attained)


def steepest_descent_certificate(
    manifold: Manifold,
    x: ArrayLike,
    egrad: ArrayLike,
    step: ArrayLike,
    norm: str | Norm = "metric",
    atol: float | None = None,
    *,
    max_iter: int = 300,
) -> SteepestDescentCertificate:
    """Is ``step`` a multiple of the minimizer of ⟨G, Δ⟩ over tangent Δ of unit length in ``norm``?

    Weak duality: for a tangent Δ and any normal N, ⟨N, Δ⟩ = 0 and so −⟨G, Δ⟩ = −⟨G + N, Δ⟩ ≤ dual·‖Δ‖ with
    dual = ‖G + N‖_*. So for any step, whoever made it, gap = dual − primal ≥ 0 with primal = −⟨G, Δ⟩/‖Δ‖ bounds how
    much faster descent could be, and relative_gap = gap/dual = 1 − cosine.

    For the norms of an inner product the best N is known: dual = ‖ξ‖, ξ the Riesz representer of G. The gap is then
    computed as dual·‖Δ/‖Δ‖ + ξ/‖ξ‖‖²/2, without cancellation, and the cosine is that of an angle. (A relative gap g is
    an angle of √(2g).) For other norms N is searched for (N = XΛ, Λ symmetric, on Stiefel), which also gives a tangent
    direction of unit length; its rate or the step's, if that is higher, is ``attained``. The optimum lies between
    ``attained`` and ``dual``, however early the search stopped, and the cosine is the ratio primal/dual.

    The bound holds on the tangent space, so a step is judged by its tangent part, and ``tangency`` = ‖Δ − PΔ‖_F/‖Δ‖_F
    says how much was left out: a step that is not tangent fails through it, whatever its gap. ``riesz_error`` is how
    far the bound is from being one. With an inner product, it is how far ξ is from representing G:
    ‖P(Mξ − G)‖_F/‖PG‖_F, M the matrix of the metric (differentiated from ``manifold.inner``), so that a wrong gradient
    conversion cannot certify itself. With another norm, how far N is from normal: ‖PN‖_F/‖PG‖_F.

    At a stationary point (‖PG‖_F within rounding of 0, ``stationary``) every tangent step is optimal by definition: the
    gap is 0 and the cosine 1. A zero step away from one has cosine 0 and relative gap 1.

    Args:
        x: points, ``(*batch, *point)``. ``egrad``, ``step``: the ambient gradient and the step, same shape.
        norm: "metric", the norm of the manifold's metric; "frobenius"; of matrices, "spectral", "1->2" (the longest
            column) and "2->inf" (the longest row); or a :class:`Norm` of your own.
        atol: bound on relative gap, tangency and Riesz error; by default 1e-12 for "metric" and "frobenius", 1e-8 for
            "spectral" and 1e-6 for other norms, whose dual is known less well.
        max_iter: of the search for N, a point.

    Raises:
        NotOnManifoldError: x is off the manifold.
        ValueError: an unknown norm, an operator norm of points that are not matrices, or a :class:`Norm` that
            contradicts itself; shapes that differ; non-finite entries; an empty batch.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel
        >>> manifold, generator = Stiefel(), torch.Generator().manual_seed(0)
        >>> x = manifold.random_point(24, 6, dtype=torch.float64, generator=generator)
        >>> g = torch.randn(24, 6, dtype=torch.float64, generator=generator)
        >>> step = -manifold.egrad_to_rgrad(x, g)
        >>> steepest_descent_certificate(manifold, x, g, step).passed
        True
        >>> spectral = steepest_descent_certificate(manifold, x, g, step, norm="spectral")
        >>> spectral.passed, 0.6 < spectral.cosine < 0.8
        (False, True)

    Sources: Boyd & Vandenberghe, "Convex optimization" (2004), section 5; for the spectral norm on Stiefel, Bernstein,
    "Modular manifolds" (2025).
    """
    chosen = find_norm(norm)
    name = str(norm) if chosen is None else chosen.name
    if atol is None:
        atol = DEFAULT_ATOL.get(name, _OTHER_ATOL) if isinstance(norm, str) else _OTHER_ATOL
    k = manifold.ndim
    if isinstance(norm, str) and chosen is not None and k != 2:
        raise ValueError(f"the norm {norm!r} is one of matrices, and points of {manifold!r} have {k} dimensions")
    x64, gradient, delta = points_and_vectors(manifold, x, egrad=egrad, step=step)
    scale = power_of_two(gradient, k)
    gradient, delta = gradient / spread(scale, k), delta / spread(power_of_two(delta, k), k)
    tangent = manifold.project(x64, delta)
    projected = manifold.project(x64, gradient)
    ambient = frobenius(gradient, k)
    stationary = is_stationary(x64, gradient, projected, k)
    if chosen is None:
        arrays = _inner_product_bounds(manifold, x64, gradient, projected, tangent, stationary, name)
    else:
        arrays = _searched_bounds(manifold, x64, projected, tangent, stationary, chosen, max_iter)
    arrays |= {
        "tangency": ratio(frobenius(delta - tangent, k), frobenius(delta, k)),
        "ambient_norm": ambient,
        "stationary": stationary,
    }
    arrays |= {field: arrays[field] * scale for field in ("primal", "dual", "attained", "gap", "ambient_norm")}
    worst = int(arrays["relative_gap"].argmax())
    at_worst = ("primal", "dual", "attained", "gap", "relative_gap", "cosine")
    one = {field: float(arrays[field].flatten()[worst]) for field in at_worst}
    most = {field: float(arrays[field].max()) for field in ("tangency", "riesz_error", "ambient_norm")}
    passed = all(value <= atol for value in (one["relative_gap"], most["tangency"], most["riesz_error"]))
    return SteepestDescentCertificate(
        **one, **most, stationary=bool(stationary.any()), norm=name, atol=atol, passed=passed, batch=arrays
    )


def _inner_product_bounds(
    manifold: Manifold,
    x: Tensor,
    gradient: Tensor,
    projected: Tensor,
    tangent: Tensor,
    stationary: Tensor,
    norm: str,
) -> dict[str, Tensor]:
    k = manifold.ndim
    inner, representer = inner_product(manifold, norm), representer_in(manifold, x, gradient, norm)
    residual = manifold.project(x, _lowered(inner, x, representer) - gradient)
    dual, length = length_in(inner, x, representer), length_in(inner, x, tangent)
    dual = torch.where(stationary, 0.0, dual)
    unit_step = tangent / spread(torch.where(length == 0, 1.0, length), k)
    unit_descent = representer / spread(torch.where(dual == 0, 1.0, dual), k)
    relative = torch.where(length == 0, 1.0, length_in(inner, x, unit_step + unit_descent) ** 2 / 2)
    relative = torch.where(stationary, 0.0, relative)
    return {
        "primal": torch.where(stationary, 0.0, -pairing(gradient, unit_step, k)),
        "dual": dual,
        "attained": dual,
        "gap": relative * dual,
        "relative_gap": relative,
        "cosine": 1 - relative,
        "riesz_error": torch.where(stationary, 0.0, ratio(frobenius(residual, k), frobenius(projected, k))),
    }


def _searched_bounds(
    manifold: Manifold,
    x: Tensor,
    projected: Tensor,
    tangent: Tensor,
    stationary: Tensor,
    norm: Norm,
    max_iter: int,
) -> dict[str, Tensor]:
    k = manifold.ndim
    best = searched_optimum(manifold, x, projected, stationary, norm, max_iter)
    length = lengths(norm, tangent, k)
    primal = -pairing(projected, tangent, k) / torch.where(length == 0, 1.0, length)
    primal = torch.where(stationary, 0.0, primal)
    gap = best.dual - primal
    # equal to rounding is equal; a step beyond the bound by more than that would be a broken bound, and stays visible
    gap = torch.where(gap.abs() <= 1e-14 * best.dual, 0.0, gap)
    relative = ratio(gap, best.dual)
    return {
        "primal": primal,
        "dual": best.dual,
        "attained": torch.maximum(best.attained, primal),
        "gap": gap,
        "relative_gap": relative,
        "cosine": 1 - relative,
        "riesz_error": ratio(frobenius(manifold.project(x, best.normal), k), frobenius(projected, k)),
    }


def searched_optimum(
    manifold: Manifold, x: Tensor, projected: Tensor, stationary: Tensor, norm: Norm, max_iter: int
) -> Optimum:
    """:func:`optimum`, with bounds of 0 at stationary points."""
    return optimum(manifold, x, torch.where(spread(stationary, manifold.ndim), 0.0, projected), norm, max_iter)


def power_of_two(value: Tensor, k: int) -> Tensor:
    """The power of two above the largest entry of each point, 1 for zero.

    Certificates divide by it: gradients and steps of 1e-200 and 1e200, whose squares are 0 and inf, have then the
    certificate of those of 1, to the bit.
    """
    _, exponent = torch.frexp(flat(value, k).abs().amax(-1))
    return torch.ldexp(torch.ones_like(exponent, dtype=value.dtype), exponent)


def is_stationary(x: Tensor, gradient: Tensor, projected: Tensor, k: int) -> Tensor:
    """Whether the tangent part of the gradient is within the rounding of its projection."""
    rounding = 8 * torch.finfo(torch.float64).eps * max(x.shape[-k:] if k else (), default=1)
    return frobenius(projected, k) <= rounding * frobenius(gradient, k)


def lengths(norm: Norm, delta: Tensor, k: int) -> Tensor:
    """‖Δ‖ of each point of a batch; the functions of a :class:`Norm` take one."""
    flat = delta.reshape(-1, *delta.shape[delta.ndim - k :])
    return torch.stack([norm.norm(each).reshape(()) for each in flat]).reshape(delta.shape[: delta.ndim - k])


def inner_product(manifold: Manifold, norm: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The inner product of "metric" or "frobenius", as a function of (x, u, v)."""
    return manifold.inner if norm == "metric" else lambda _, u, v: pairing(u, v, manifold.ndim)


def representer_in(manifold: Manifold, x: Tensor, gradient: Tensor, norm: str) -> Tensor:
    """The tangent ξ with ⟨ξ, u⟩ = tr Gᵀu in the inner product of "metric" or "frobenius"."""
    return (manifold.egrad_to_rgrad if norm == "metric" else manifold.project)(x, gradient)


def points_and_vectors(manifold: Manifold, x: ArrayLike, **vectors: ArrayLike) -> list[Tensor]:
    """x and ambient vectors at it, float64 and finite, x on the manifold within the rounding of its own dtype."""
    point = as_tensor(x, "x")
    manifold.check_point(point)
    result = [as_float64(point, "x")]
    for name, value in vectors.items():
        vector = as_float64(value, name)
        if vector.shape != point.shape:
            raise ValueError(f"{name} must have the shape of x, {tuple(point.shape)}, found {tuple(vector.shape)}")
        result.append(vector)
    if point.numel() == 0:
        raise ValueError(f"x has shape {tuple(point.shape)}: there is no point to certify")
    return result


def length_in(inner: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    return inner(x, u, u).clamp_min(0).sqrt()


def _lowered(inner: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    """The ambient tensor Mu with ⟨u, v⟩ = tr (Mu)ᵀv: the derivative in v of a metric known only as a function."""
    with torch.enable_grad():
        v = torch.zeros_like(u).requires_grad_()
        return torch.autograd.grad(inner(x, u, v).sum(), v)[0]
