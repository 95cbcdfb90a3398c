"""Certificates of one step: numbers that show whether it has a property, computed without trusting what made it.

All arithmetic is float64. A batch of points is one certificate: each number is the worst over the batch, and the
batch-shaped arrays stay in ``.batch``. ``passed`` compares relative quantities with ``atol``; 1e-12 is within reach of
any float64 step whose length is not tiny against its point (a step of length s recovered from two points carries about
1e-16/s of rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..manifolds import AlphaMetric, Manifold, Stiefel
from ._arrays import ArrayLike, as_float64, as_tensor, frobenius, pairing, ratio, spread
from ._result import Result

_NORMS = ("metric", "frobenius")


@dataclass(frozen=True, repr=False, eq=False)
class SteepestDescentCertificate(Result):
    """How far a step is from steepest descent; see :func:`steepest_descent_certificate`.

    ``primal``, ``dual``, ``gap``, ``relative_gap`` and ``cosine`` are those of the one point of the batch with the
    largest relative gap; ``tangency``, ``riesz_error`` and ``ambient_norm`` are maxima, ``stationary`` is true if any
    point is.
    """

    primal: float
    dual: float
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


@dataclass(frozen=True, repr=False, eq=False)
class StationarityCertificate(Result):
    """Norms of the Riemannian and of the ambient gradient; only the first says whether a point is stationary."""

    riemannian_norm: float
    ambient_norm: float
    atol: float
    passed: bool


@dataclass(frozen=True, repr=False, eq=False)
class ConditioningCertificate(Result):
    """Condition of X + η; see :func:`conditioning_certificate`. Numbers are those of the point with the largest
    κ/bound, ``gram_min`` and ``gram_max`` the extreme eigenvalues of (X+η)ᵀ(X+η) over the batch."""

    condition_number: float
    exact: float
    bound: float
    step_norm: float
    trust_radius: float | None
    gram_min: float
    gram_max: float
    gram_bound: float
    tangency: float
    atol: float
    passed: bool
    batch: Mapping[str, Tensor]

    _hidden: ClassVar = frozenset({"batch"})


def steepest_descent_certificate(
    manifold: Manifold, x: ArrayLike, egrad: ArrayLike, step: ArrayLike, norm: str = "metric", atol: float = 1e-12
) -> SteepestDescentCertificate:
    """Is ``step`` a multiple of the minimizer of ⟨G, Δ⟩ over tangent Δ of unit length?

    Weak duality: every tangent Δ has −⟨G, Δ⟩ ≤ dual·‖Δ‖ with dual = ‖ξ‖, the dual norm of G on the tangent space and ξ
    the Riesz representer of G in ``norm``. So for any step, whoever made it, gap = dual − primal ≥ 0 with
    primal = −⟨G, Δ⟩/‖Δ‖ says how much faster descent could be, and relative_gap = gap/dual = 1 − cosine. The gap is
    computed as dual·‖Δ/‖Δ‖ + ξ/‖ξ‖‖²/2, without cancellation. (A relative gap g is an angle of √(2g).)

    The bound holds on the tangent space, so a step is judged by its tangent part, and ``tangency`` = ‖Δ − PΔ‖_F/‖Δ‖_F
    says how much was left out: a step that is not tangent fails through it, whatever its gap. ``riesz_error`` is how
    far ξ is from representing G: ‖P(Mξ − G)‖_F/‖PG‖_F, M the matrix of the metric (differentiated from
    ``manifold.inner``), so that a wrong gradient conversion cannot certify itself.

    At a stationary point (‖PG‖_F within rounding of 0, ``stationary``) every tangent step is optimal by definition: the
    gap is 0 and the cosine 1. A zero step away from one has cosine 0 and relative gap 1.

    Args:
        x: points, ``(*batch, *point)``. ``egrad``, ``step``: the ambient gradient and the step, same shape.
        norm: "metric", the norm of the manifold's metric, or "frobenius".
        atol: bound on relative gap, tangency and Riesz error.

    Raises:
        NotOnManifoldError: x is off the manifold.
        ValueError: another norm; shapes that differ; non-finite entries; an empty batch.
    """
    if norm not in _NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, _NORMS))}, found {norm!r}")
    x64, gradient, delta = points_and_vectors(manifold, x, egrad=egrad, step=step)
    k = manifold.ndim
    tangent = manifold.project(x64, delta)
    projected = manifold.project(x64, gradient)
    if norm == "metric":
        representer, inner = manifold.egrad_to_rgrad(x64, gradient), manifold.inner
    else:
        representer, inner = projected, lambda _, u, v: pairing(u, v, k)

    ambient = frobenius(gradient, k)
    rounding = 8 * torch.finfo(torch.float64).eps * max(x64.shape[-k:], default=1)
    stationary = frobenius(projected, k) <= rounding * ambient
    residual = manifold.project(x64, _lowered(inner, x64, representer) - gradient)
    riesz = torch.where(stationary, 0.0, ratio(frobenius(residual, k), frobenius(projected, k)))

    dual, length = _length(inner, x64, representer), _length(inner, x64, tangent)
    dual = torch.where(stationary, 0.0, dual)
    unit_step = tangent / spread(torch.where(length == 0, 1.0, length), k)
    unit_descent = representer / spread(torch.where(dual == 0, 1.0, dual), k)
    relative = torch.where(length == 0, 1.0, _length(inner, x64, unit_step + unit_descent) ** 2 / 2)
    relative = torch.where(stationary, 0.0, relative)
    arrays = {
        "primal": torch.where(stationary, 0.0, -pairing(gradient, unit_step, k)),
        "dual": dual,
        "gap": relative * dual,
        "relative_gap": relative,
        "cosine": 1 - relative,
        "tangency": ratio(frobenius(delta - tangent, k), frobenius(delta, k)),
        "riesz_error": riesz,
        "ambient_norm": ambient,
        "stationary": stationary,
    }
    worst = int(relative.argmax())
    one = {name: float(arrays[name].flatten()[worst]) for name in ("primal", "dual", "gap", "relative_gap", "cosine")}
    most = {name: float(arrays[name].max()) for name in ("tangency", "riesz_error", "ambient_norm")}
    passed = all(value <= atol for value in (one["relative_gap"], most["tangency"], most["riesz_error"]))
    return SteepestDescentCertificate(
        **one, **most, stationary=bool(stationary.any()), norm=norm, atol=atol, passed=passed, batch=arrays
    )


def stationarity_certificate(
    manifold: Manifold, x: ArrayLike, egrad: ArrayLike, atol: float = 1e-8
) -> StationarityCertificate:
    """Is ``x`` a stationary point: is the Riemannian gradient's norm, in the metric and the units of f, ≤ ``atol``?

    The ambient gradient does not vanish at a constrained optimum; it is reported next to it. Worst over the batch.

    Raises:
        NotOnManifoldError, ValueError: as :func:`steepest_descent_certificate`.
    """
    x64, gradient = points_and_vectors(manifold, x, egrad=egrad)
    riemannian = float(_length(manifold.inner, x64, manifold.egrad_to_rgrad(x64, gradient)).max())
    ambient = float(frobenius(gradient, manifold.ndim).max())
    return StationarityCertificate(riemannian, ambient, atol, riemannian <= atol)


def conditioning_certificate(
    manifold: Manifold, x: ArrayLike, step: ArrayLike, trust_radius: float | None = None, atol: float = 1e-12
) -> ConditioningCertificate:
    """How well conditioned is X + η, the matrix that a retraction orthonormalizes?

    κ₂(X+η), measured by SVD, is held against ``exact`` = √((1+s²max)/(1+s²min)), s the singular values of η, and
    against ``bound`` = √(1 + max(1, 1+α)·τ²), which a step of length τ in the metric α cannot exceed and some step
    attains. τ is the step's own length, or ``trust_radius`` if given; the step must then be no longer than that. Both
    identities are those of tangent steps, (X+η)ᵀ(X+η) = I + ηᵀη, so a step with a normal part fails.

    Raises:
        NotOnManifoldError: x is off the manifold.
        ValueError: the manifold is not Stiefel with a metric of the α-family; shapes that differ; non-finite entries.
    """
    if not has_conditioning_bound(manifold):
        raise ValueError(f"the conditioning bound is that of Stiefel with an AlphaMetric, found {manifold!r}")
    if trust_radius is not None and not trust_radius >= 0:
        raise ValueError(f"trust_radius must be a number >= 0 or None, found {trust_radius!r}")
    x64, eta = points_and_vectors(manifold, x, step=step)
    gram = torch.linalg.svdvals(x64 + eta) ** 2
    s = torch.linalg.svdvals(eta)
    # σmin ≥ 1 for a tangent step; a normal part can make X + η singular
    kappa = torch.where(gram[..., -1] > 0, (gram[..., 0] / gram[..., -1]).sqrt(), torch.inf)
    exact = ((1 + s[..., 0] ** 2) / (1 + s[..., -1] ** 2)).sqrt()
    length = _length(manifold.inner, x64, eta)
    radius = length if trust_radius is None else torch.full_like(length, trust_radius)
    gram_bound = 1 + max(1.0, 1 + manifold.metric.alpha) * radius**2  # type: ignore[attr-defined]
    arrays = {
        "condition_number": kappa,
        "exact": exact,
        "bound": gram_bound.sqrt(),
        "step_norm": length,
        "gram_min": gram[..., -1],
        "gram_max": gram[..., 0],
        "gram_bound": gram_bound,
        "tangency": ratio(frobenius(eta - manifold.project(x64, eta), 2), frobenius(eta, 2)),
    }
    slack = 1 + atol
    good = (
        (kappa <= arrays["bound"] * slack)
        & ((kappa - exact).abs() <= atol * exact)
        & (gram[..., -1] >= 1 - atol)
        & (gram[..., 0] <= gram_bound * slack)
        & (length <= radius * slack)
    )
    worst = int((kappa / arrays["bound"]).argmax())
    one = {name: float(arrays[name].flatten()[worst]) for name in ("condition_number", "exact", "bound")}
    most = {name: float(arrays[name].max()) for name in ("step_norm", "gram_max", "gram_bound", "tangency")}
    return ConditioningCertificate(
        **one,
        **most,
        gram_min=float(arrays["gram_min"].min()),
        trust_radius=trust_radius,
        atol=atol,
        passed=bool(good.all()),
        batch=arrays,
    )


def has_conditioning_bound(manifold: Manifold) -> bool:
    """Stiefel with a metric of the α-family: where the bound of :func:`conditioning_certificate` is known."""
    return isinstance(manifold, Stiefel) and isinstance(manifold.metric, AlphaMetric)


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


def _length(inner: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    return inner(x, u, u).clamp_min(0).sqrt()


def _lowered(inner: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    """The ambient tensor Mu with ⟨u, v⟩ = tr (Mu)ᵀv: the derivative in v of a metric known only as a function."""
    with torch.enable_grad():
        v = torch.zeros_like(u).requires_grad_()
        return torch.autograd.grad(inner(x, u, v).sum(), v)[0]
