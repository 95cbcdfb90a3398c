"""Certificates of a step rule: properties of the map from gradients to steps, found by running it twice.

A rule is any ``step_fn(x, gradients)`` that returns the tangent steps, one a gradient, taken from ``x`` with a fresh
optimizer state: analysis knows nothing else of an optimizer. All arithmetic is float64, and differences are relative to
the step's own length, the worst over steps and batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..manifolds import Manifold, Stiefel
from ._arrays import ArrayLike, as_float64, as_tensor, frobenius, ratio
from ._result import Result
from .certificates import points_and_vectors

StepFn = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, repr=False, eq=False)
class ScaleFreeCertificate(Result):
    """See :func:`scale_free_certificate`. ``deviations`` has one number a scale, the worst over steps and batch."""

    deviation: float
    degree: float
    smallest_step: float
    scales: tuple[float, ...]
    deviations: tuple[float, ...]
    atol: float
    passed: bool


@dataclass(frozen=True, repr=False, eq=False)
class EquivarianceCertificate(Result):
    """See :func:`equivariance_certificate`. ``deviations`` has one number a step, the worst over the batch."""

    deviation: float
    smallest_step: float
    deviations: tuple[float, ...]
    atol: float
    passed: bool


@dataclass(frozen=True, repr=False, eq=False)
class GaugeCertificate(Result):
    """See :func:`gauge_certificate`. ``deviations`` has one number a step, the worst over the batch."""

    deviation: float
    smallest_step: float
    deviations: tuple[float, ...]
    atol: float
    passed: bool


@dataclass(frozen=True, repr=False, eq=False)
class WeightDecayCertificate(Result):
    """See :func:`weight_decay_certificate`. ``step_deviation`` is None where no ``step_fn`` was given."""

    projected_decay: float
    gradient_change: float
    step_deviation: float | None
    weight_decay: float
    atol: float
    passed: bool


def scale_free_certificate(
    step_fn: StepFn,
    x: ArrayLike,
    gradients: Sequence[ArrayLike],
    scales: Sequence[float] = (1e-3, 1.0, 1e3),
    atol: float = 1e-12,
    ndim: int = 2,
) -> ScaleFreeCertificate:
    """Are the steps unchanged when every gradient is multiplied by c > 0?

    Args:
        step_fn: ``step_fn(x, gradients)`` returns the tangent steps, one a gradient, taken from ``x`` with a fresh
            optimizer state. An ε in a denominator breaks scale-freeness by about ε/(c·‖G‖): certify with ε = 0.
        x: the start, ``(*batch, *point)``. ``gradients``: the ambient gradients of the successive steps.
        scales: the factors c.
        ndim: trailing dimensions of a point.

    Returns:
        ``deviation``: the largest ‖η_c − η_1‖/‖η_1‖ over scales, steps and batch. ``degree``: d in ‖η_c‖ ∝ c^d, from
        the first steps at the extreme scales (0 for a scale-free rule, 1 for gradient descent). ``smallest_step``: the
        smallest ‖η_1‖; steps that are all zero pass vacuously, and this number shows it.

    Raises:
        ValueError: a scale that is not positive, fewer than two different scales including 1, or a wrong number of
            steps.

    Example:
        >>> import torch
        >>> x, gradients = torch.eye(5, 3, dtype=torch.float64), [torch.ones(5, 3, dtype=torch.float64)]
        >>> scale_free_certificate(lambda x, gs: [-g / g.norm() for g in gs], x, gradients).passed
        True
        >>> scale_free_certificate(lambda x, gs: [-g for g in gs], x, gradients).passed
        False
    """
    factors = [float(c) for c in scales]
    if not factors or not all(0 < c < float("inf") for c in factors) or set(factors) == {1.0}:
        raise ValueError(f"scales must be positive numbers, one of them other than 1, found {tuple(scales)}")
    base = _run(step_fn, x, gradients)
    runs = {c: _run(step_fn, x, [as_tensor(g, "gradients") * c for g in gradients]) for c in factors}
    deviations = tuple(max(_deviations(runs[c], base, ndim)) for c in factors)
    runs[1.0] = base
    low, high = min(runs), max(runs)
    first = [float(torch.linalg.vector_norm(runs[c][0])) for c in (low, high)]
    moved = min(first) > 0
    return ScaleFreeCertificate(
        deviation=max(deviations),
        degree=math.log(first[1] / first[0]) / math.log(high / low) if moved else 0.0,
        smallest_step=min(float(frobenius(step, ndim).min()) for step in base),
        scales=tuple(factors),
        deviations=deviations,
        atol=atol,
        passed=max(deviations) <= atol,
    )


def equivariance_certificate(
    step_fn: StepFn,
    x: ArrayLike,
    gradients: Sequence[ArrayLike],
    generator: torch.Generator | None = None,
    atol: float = 1e-12,
) -> EquivarianceCertificate:
    """Does X → QX, G → QG give η → Qη for a Haar-random Q ∈ O(n)?

    Args:
        step_fn: as in :func:`scale_free_certificate`. ``x``: ``(*batch, n, p)``; Q acts on the rows of every matrix.
        generator: draws Q; by default a fixed one, so that the certificate is reproducible.

    Returns:
        ``deviation``: the largest ‖η(QX, QG) − Qη(X, G)‖/‖η‖ over steps and batch; one number a step in ``deviations``.

    Raises:
        ValueError: x is not a matrix, or a wrong number of steps.

    Example:
        >>> import torch
        >>> x, gradients = torch.eye(5, 3, dtype=torch.float64), [torch.eye(5, 3, dtype=torch.float64)]
        >>> equivariance_certificate(lambda x, gs: [-g for g in gs], x, gradients).passed
        True
        >>> equivariance_certificate(lambda x, gs: [-g.sign() for g in gs], x, gradients).passed
        False
    """
    start = _matrices(x)
    q = _haar(start, start.shape[-2], (), generator)
    base = _run(step_fn, start, gradients)
    moved = _run(step_fn, q @ start, [q @ as_float64(g, "gradients") for g in gradients])
    deviations = _deviations(moved, [q @ step for step in base], 2)
    return EquivarianceCertificate(
        deviation=max(deviations),
        smallest_step=min(float(frobenius(step, 2).min()) for step in base),
        deviations=deviations,
        atol=atol,
        passed=max(deviations) <= atol,
    )


def gauge_certificate(
    step_fn: StepFn,
    x: ArrayLike,
    gradients: Sequence[ArrayLike],
    generator: torch.Generator | None = None,
    atol: float = 1e-12,
    *,
    independent: bool = False,
) -> GaugeCertificate:
    """Does X → XR, G → GR give η → ηR for a Haar-random R ∈ O(p)?

    A head's Q and K frames mean the same after (W_Q R, W_K R): a rule that fails here trains a model that depends on
    how its heads were written down. (Elementwise and columnwise second moments fail; one scalar a frame, and whitening
    by a p×p second moment, hold.)

    Args:
        step_fn: as in :func:`scale_free_certificate`. ``x``: ``(*batch, n, p)``; R acts on the columns.
        generator: draws R; by default a fixed one, so that the certificate is reproducible.
        independent: an R of its own for each matrix of the batch, which a rule that pools matrices need not bear,
            rather than one for all.

    Returns:
        ``deviation``: the largest ‖η(XR, GR)Rᵀ − η(X, G)‖/‖η‖ over steps and batch, the steps compared after rotating
        back; one number a step in ``deviations``.

    Raises:
        ValueError: x is not a matrix, or a wrong number of steps.

    Example:
        >>> import torch
        >>> x = torch.eye(5, 3, dtype=torch.float64)
        >>> gradients = list(torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)))
        >>> gauge_certificate(lambda x, gs: [-0.1 * g for g in gs], x, gradients).passed
        True
        >>> gauge_certificate(lambda x, gs: [-0.1 * g.sign() for g in gs], x, gradients).passed
        False
    """
    start = _matrices(x)
    r = _haar(start, start.shape[-1], start.shape[:-2] if independent else (), generator)
    base = _run(step_fn, start, gradients)
    turned = _run(step_fn, start @ r, [as_float64(g, "gradients") @ r for g in gradients])
    deviations = _deviations([step @ r.mT for step in turned], base, 2)
    return GaugeCertificate(
        deviation=max(deviations),
        smallest_step=min(float(frobenius(step, 2).min()) for step in base),
        deviations=deviations,
        atol=atol,
        passed=max(deviations) <= atol,
    )


def weight_decay_certificate(
    manifold: Manifold,
    x: ArrayLike,
    weight_decay: float,
    *,
    step_fn: StepFn | None = None,
    gradients: Sequence[ArrayLike] | None = None,
    atol: float = 1e-12,
) -> WeightDecayCertificate:
    """Is L2 decay void on this manifold: P(λX) = 0, and the same Riemannian gradient with and without λX?

    With ``step_fn`` (see :func:`scale_free_certificate`) the optimizer is asked too: it is run on ``gradients`` and
    again with λX_t added to each of them, X_t the points of the first run, and must take the same steps.

    Returns:
        ``projected_decay``: ‖P(λX)‖/‖λX‖. ``gradient_change``: ‖grad(G+λX) − grad(G)‖/(‖G‖+‖λX‖) for the first of
        ``gradients``, or a Gaussian G of a fixed seed. ``step_deviation``: as in :func:`scale_free_certificate`. Worst
        over batch.

    Raises:
        NotOnManifoldError: x is off the manifold.
        ValueError: weight_decay is not a positive number; step_fn without gradients.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Euclidean, Stiefel
        >>> x = torch.eye(5, 3, dtype=torch.float64)
        >>> weight_decay_certificate(Stiefel(), x, 0.1).passed, weight_decay_certificate(Euclidean(), x, 0.1).passed
        (True, False)
    """
    if not 0 < weight_decay < float("inf"):
        raise ValueError(
            f"weight_decay must be a positive number, found {weight_decay!r}: without decay nothing is shown"
        )
    if step_fn is not None and not gradients:
        raise ValueError("step_fn needs gradients to be run on, found none")
    (x64,) = points_and_vectors(manifold, x)
    k = manifold.ndim
    if gradients:
        gradient = as_float64(gradients[0], "gradients")
    else:
        gradient = torch.randn(x64.shape, dtype=torch.float64, generator=_seeded()).to(x64.device)
    decay = weight_decay * x64
    change = manifold.egrad_to_rgrad(x64, gradient + decay) - manifold.egrad_to_rgrad(x64, gradient)
    projected = float(ratio(frobenius(manifold.project(x64, decay), k), frobenius(decay, k)).max())
    relative = float(ratio(frobenius(change, k), frobenius(gradient, k) + frobenius(decay, k)).max())
    deviation = None
    if step_fn is not None and gradients:
        base = _run(step_fn, x64, gradients)
        at, decayed = x64, []
        for g, step in zip(gradients, base, strict=True):
            decayed.append(as_float64(g, "gradients") + weight_decay * at)
            at = manifold.retract(at, step)
        deviation = max(_deviations(_run(step_fn, x64, decayed), base, k))
    passed = all(value <= atol for value in (projected, relative, deviation or 0.0))
    return WeightDecayCertificate(projected, relative, deviation, weight_decay, atol, passed)


def _run(step_fn: StepFn, x: ArrayLike, gradients: Sequence[ArrayLike]) -> list[Tensor]:
    if not len(gradients):
        raise ValueError("gradients must hold at least one gradient, found none")
    # copies, so that a step_fn that writes into its arguments cannot change the comparison
    start = as_float64(x, "x").clone()
    steps = step_fn(start, [as_float64(g, "gradients").clone() for g in gradients])
    steps = [as_float64(step, "a step of step_fn") for step in steps]
    if len(steps) != len(gradients):
        raise ValueError(f"step_fn must return one step a gradient, {len(gradients)}, found {len(steps)}")
    for step in steps:
        if step.shape != start.shape:
            raise ValueError(
                f"step_fn's steps must have the shape of x, {tuple(start.shape)}, found {tuple(step.shape)}"
            )
    return steps


def _deviations(steps: Sequence[Tensor], reference: Sequence[Tensor], ndim: int) -> tuple[float, ...]:
    return tuple(
        float(ratio(frobenius(a - b, ndim), frobenius(b, ndim)).max()) for a, b in zip(steps, reference, strict=True)
    )


def _matrices(x: ArrayLike) -> Tensor:
    start = as_float64(x, "x")
    if start.ndim < 2:
        raise ValueError(f"x must be a matrix or a batch of matrices, found shape {tuple(start.shape)}")
    return start


def _haar(like: Tensor, size: int, batch: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    drawn = _seeded() if generator is None else generator
    q = Stiefel().random_point(*batch, size, size, dtype=torch.float64, device=drawn.device, generator=drawn)
    return q.to(like.device)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
