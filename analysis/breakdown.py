"""Why a step scores less than it could: its loss against steepest descent, split into causes that add up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..manifolds import Manifold
from ._arrays import ArrayLike, frobenius, pairing, ratio, spread
from ._result import Result
from .norms import Norm, find_norm
from .steepest import (
    inner_product,
    is_stationary,
    length_in,
    lengths,
    points_and_vectors,
    power_of_two,
    representer_in,
    searched_optimum,
)


@dataclass(frozen=True, repr=False, eq=False)
class ScoreBreakdown(Result):
    """See :func:`score_breakdown`. The five causes sum to ``loss`` = 1 − ``efficiency``; numbers are those of the point
    of the batch with the largest loss, and the batch-shaped arrays stay in ``.batch``."""

    efficiency: float
    loss: float
    norm_mismatch: float
    momentum_lag: float
    direction: float
    tangency: float
    retraction: float
    retraction_error: float
    speed: float
    norm: str
    rule_norm: str
    batch: Mapping[str, Tensor]

    #: the terms of the loss
    CAUSES: ClassVar = ("norm_mismatch", "momentum_lag", "direction", "tangency", "retraction")
    _hidden: ClassVar = frozenset({"batch"})

    def shares(self) -> dict[str, float]:
        """Each cause's share of the loss; all zero where there is no loss."""
        return {cause: getattr(self, cause) / self.loss if self.loss else 0.0 for cause in self.CAUSES}


def score_breakdown(
    manifold: Manifold,
    x: ArrayLike,
    egrad: ArrayLike,
    step: ArrayLike,
    *,
    norm: str | Norm = "metric",
    rule_norm: str | Norm | None = None,
    momentum: ArrayLike | None = None,
    after: ArrayLike | None = None,
    max_iter: int = 300,
) -> ScoreBreakdown:
    """Split the loss of a step against steepest descent in ``norm`` into its causes.

    The efficiency of a tangent direction d is e(d) = −⟨G, d⟩/(dual·‖d‖), dual the best rate in ``norm`` (see
    :func:`steepest_descent_certificate`). From the ideal, e = 1, to what happened, one fault at a time is let in, and a
    cause's term is what the efficiency falls by (or rises, if the term is negative: two faults may cancel):

    1. ``norm_mismatch``: 1 − e(d₁), d₁ steepest descent for G in the norm that the rule is built on, ``rule_norm``.
    2. ``momentum_lag``: e(d₁) − e(d₂), d₂ steepest descent in ``rule_norm`` for ``momentum`` in the place of G.
    3. ``direction``: e(d₂) − e(d₃), d₃ = P(step): what the rule does otherwise, such as an elementwise preconditioner.
    4. ``tangency``: e(d₃) − e(d₃)τ, τ = ‖P(step)‖/max(‖P(step)‖, ‖step‖): length spent on a part that moves nothing.
    5. ``retraction``: e(d₃)τ − e(d₅)τ, d₅ = ``manifold.inverse_retract(x, after)``, the velocity that the manifold's
       own retraction needs to get where the optimizer got.

    ``efficiency`` is what is left, e(d₅)τ. A retraction may also be of the wrong speed along the right direction, which
    no rate shows: ``speed`` = ⟨d₅, d₃⟩/⟨d₃, d₃⟩, and ``retraction_error`` = ‖d₅ − d₃‖/‖d₃‖, in the metric. Both have an
    error of the step's length where the optimizer's retraction is another than the manifold's, and where a step with a
    normal part is retracted: keep steps short. A rule that forgets the constraint loses by ``tangency`` alone where its
    norm is an inner product's; in the spectral norm the projection of its answer is not steepest either, and the rest
    of the loss is one of ``direction``.

    Args:
        x: points, ``(*batch, *point)``; all other arrays have its shape. ``egrad``: the ambient gradient there.
        step: the rule's proposal, before any retraction; it need not be tangent.
        norm: that the score is taken in. ``rule_norm``: that the rule is built on; by default the same.
        momentum: the ambient (co)vector that the rule follows in the place of the gradient; by default the gradient. A
            tangent average of Riemannian gradients is one for the embedded metric; for another, of ambient gradients.
        after: the points after the step; by default the step is taken to have been retracted as the manifold does.
        max_iter: as in :func:`steepest_descent_certificate`.

    Raises:
        NotOnManifoldError, ValueError: as :func:`steepest_descent_certificate`; ``after`` off the manifold, or out of
            the range of the inverse retraction.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel
        >>> manifold, generator = Stiefel(), torch.Generator().manual_seed(0)
        >>> x = manifold.random_point(24, 6, dtype=torch.float64, generator=generator)
        >>> g = torch.randn(24, 6, dtype=torch.float64, generator=generator)
        >>> score = score_breakdown(manifold, x, g, -g)  # not projected
        >>> score.shares()["tangency"] > 1 - 1e-12
        True
    """
    wanted, own = find_norm(norm), find_norm(norm if rule_norm is None else rule_norm)
    names = [str(given) if found is None else found.name for given, found in ((norm, wanted), (rule_norm or norm, own))]
    k = manifold.ndim
    given = {"egrad": egrad, "step": step, "momentum": egrad if momentum is None else momentum}
    x64, gradient, proposal, followed = points_and_vectors(manifold, x, **given)
    gradient, followed = (a / spread(power_of_two(a, k), k) for a in (gradient, followed))
    velocity = tangent = manifold.project(x64, proposal)
    if after is not None:
        (reached,) = points_and_vectors(manifold, after)
        if reached.shape != x64.shape:
            raise ValueError(f"after must have the shape of x, {tuple(x64.shape)}, found {tuple(reached.shape)}")
        velocity = manifold.inverse_retract(x64, reached)

    projected = manifold.project(x64, gradient)
    stationary = is_stationary(x64, gradient, projected, k)
    dual = _steepest(manifold, x64, gradient, wanted, names[0], max_iter)[0]

    def length(u: Tensor) -> Tensor:
        return length_in(inner_product(manifold, names[0]), x64, u) if wanted is None else lengths(wanted, u, k)

    def efficiency(u: Tensor) -> Tensor:
        return torch.where(stationary, 1.0, _fraction(-pairing(projected, u, k), dual * length(u)))

    # the search for the ideal ends near it, not at it: what is the same by definition has the same score
    stages = [torch.ones_like(dual)]
    if names[0] == names[1] and wanted is own:
        stages += stages
    else:
        stages.append(efficiency(_steepest(manifold, x64, gradient, own, names[1], max_iter)[1]))
    if momentum is None:
        stages.append(stages[-1])
    else:
        stages.append(efficiency(_steepest(manifold, x64, followed, own, names[1], max_iter)[1]))
    moving, whole = length(tangent), length(proposal)
    kept = torch.where(stationary, 1.0, _fraction(moving, torch.maximum(moving, whole)))
    stages.append(efficiency(tangent))
    stages.append(stages[-1] * kept)
    stages.append(stages[-1] if after is None else efficiency(velocity) * kept)

    terms = dict(zip(ScoreBreakdown.CAUSES, (a - b for a, b in itertools.pairwise(stages)), strict=True))
    square = manifold.inner(x64, tangent, tangent)
    arrays = {
        "efficiency": stages[-1],
        "loss": 1 - stages[-1],
        **terms,
        "retraction_error": ratio(length_in(manifold.inner, x64, velocity - tangent), square.sqrt()),
        "speed": torch.where(square == 0, 1.0, _fraction(manifold.inner(x64, velocity, tangent), square)),
    }
    worst = int(arrays["loss"].argmax())
    values = {field: float(array.flatten()[worst]) for field, array in arrays.items()}
    return ScoreBreakdown(**values, norm=names[0], rule_norm=names[1], batch=arrays)


def _steepest(
    manifold: Manifold, x: Tensor, gradient: Tensor, norm: Norm | None, name: str, max_iter: int
) -> tuple[Tensor, Tensor]:
    """The best rate, batch-shaped, and a direction that has it (or nearly, where it had to be searched for)."""
    if norm is None:
        xi = representer_in(manifold, x, gradient, name)
        return length_in(inner_product(manifold, name), x, xi), -xi
    projected = manifold.project(x, gradient)
    stationary = is_stationary(x, gradient, projected, manifold.ndim)
    best = searched_optimum(manifold, x, projected, stationary, norm, max_iter)
    return best.dual, best.direction * spread(frobenius(projected, manifold.ndim), manifold.ndim)


def _fraction(numerator: Tensor, denominator: Tensor) -> Tensor:
    zero = denominator == 0
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))
