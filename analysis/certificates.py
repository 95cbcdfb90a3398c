"""Certificates of one step: numbers that show whether it has a property, computed without trusting what made it.

All arithmetic is float64. A batch of points is one certificate: each number is the worst over the batch, and the
batch-shaped arrays stay in ``.batch``. ``passed`` compares relative quantities with ``atol``; 1e-12 is within reach of
any float64 step whose length is not tiny against its point (a step of length s recovered from two points carries about
1e-16/s of rounding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..manifolds import AlphaMetric, Manifold, Stiefel
from ._arrays import ArrayLike, frobenius, ratio
from ._result import Result
from .steepest import (
    SteepestDescentCertificate,
    length_in,
    points_and_vectors,
    steepest_descent_certificate,
)

__all__ = [
    "ConditioningCertificate",
    "StationarityCertificate",
    "SteepestDescentCertificate",
    "conditioning_certificate",
    "has_conditioning_bound",
    "points_and_vectors",
    "stationarity_certificate",
    "steepest_descent_certificate",
]


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


def stationarity_certificate(
    manifold: Manifold, x: ArrayLike, egrad: ArrayLike, atol: float = 1e-8
) -> StationarityCertificate:
    """Is ``x`` a stationary point: is the Riemannian gradient's norm, in the metric and the units of f, ≤ ``atol``?

    The ambient gradient does not vanish at a constrained optimum; it is reported next to it. Worst over the batch.

    Raises:
        NotOnManifoldError, ValueError: as :func:`steepest_descent_certificate`.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel
        >>> a, x = torch.diag(torch.tensor([3.0, 2.0, 1.0]).double()), torch.eye(3, 2, dtype=torch.float64)
        >>> found = stationarity_certificate(Stiefel(), x, -2 * a @ x)  # of −tr(XᵀAX) at eigenvectors
        >>> round(found.ambient_norm, 6), found.riemannian_norm, found.passed
        (7.211103, 0.0, True)
    """
    x64, gradient = points_and_vectors(manifold, x, egrad=egrad)
    riemannian = float(length_in(manifold.inner, x64, manifold.egrad_to_rgrad(x64, gradient)).max())
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

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel
        >>> x = torch.eye(4, 2, dtype=torch.float64)
        >>> step = torch.zeros(4, 2, dtype=torch.float64)
        >>> step[2, 0] = 0.75  # √(1 + 0.75²) = 1.25
        >>> found = conditioning_certificate(Stiefel(), x, step)
        >>> round(found.condition_number, 12), found.passed
        (1.25, True)
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
    length = length_in(manifold.inner, x64, eta)
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
