"""All certificates on one optimizer, as a black box: :func:`certify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..manifolds import Manifold, ManifoldParameter, NotOnManifoldError
from ._arrays import frobenius, ratio
from ._result import Result, html_table, text_table
from .certificates import (
    ConditioningCertificate,
    SteepestDescentCertificate,
    conditioning_certificate,
    has_conditioning_bound,
    steepest_descent_certificate,
)
from .invariance import (
    EquivarianceCertificate,
    GaugeCertificate,
    ScaleFreeCertificate,
    StepFn,
    WeightDecayCertificate,
    equivariance_certificate,
    gauge_certificate,
    scale_free_certificate,
    weight_decay_certificate,
)

OptimizerFactory = Callable[[list[ManifoldParameter]], torch.optim.Optimizer]

_KINDS: dict[str, type[Result]] = {
    "steepest descent": SteepestDescentCertificate,
    "scale-free": ScaleFreeCertificate,
    "conditioning": ConditioningCertificate,
    "equivariance": EquivarianceCertificate,
    "weight decay": WeightDecayCertificate,
    "gauge covariance": GaugeCertificate,
    "spectral steepest descent": SteepestDescentCertificate,
}

#: The certificates, by the names that ``claims`` uses.
CERTIFICATES = tuple(_KINDS)

# a step is steepest in one norm or in another, and both only by chance
_STEEPEST = frozenset({"steepest descent", "spectral steepest descent"})
_SPECTRAL_ATOL = 1e-8


@dataclass(frozen=True, repr=False, eq=False)
class CertificateRow(Result):
    """One line of a report: a number held against ``bound``, whether it holds, and whether that was claimed."""

    name: str
    quantity: str
    value: float
    bound: float
    holds: bool
    claimed: bool | None

    @property
    def consistent(self) -> bool | None:
        """Holds exactly where claimed; None where no claims are known."""
        return None if self.claimed is None else self.holds == self.claimed


@dataclass(frozen=True, repr=False, eq=False)
class CertificateReport(Result):
    """What :func:`certify` found.

    ``passed``: every certificate holds, steepest descent in one of the two norms. ``consistent``: each holds exactly
    where it is claimed, None if no claims are known. ``momentum_lag``: the cosine between each step and steepest
    descent in the metric at its own point, first step included: reported, not judged after the first, since momentum is
    meant to lag. ``certificates`` has the full results by name.
    """

    optimizer: str
    manifold: str
    shape: tuple[int, ...]
    steps: int
    seed: int
    rows: tuple[CertificateRow, ...]
    momentum_lag: tuple[float, ...]
    left_manifold: bool
    passed: bool
    consistent: bool | None
    certificates: dict[str, Result]

    _table: ClassVar = ("certificate", "quantity", "value", "bound", "holds", "claimed")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        found = {name: _KINDS[name].from_dict(value) for name, value in values["certificates"].items()}
        return dataclasses.replace(super().from_dict({**values, "certificates": {}}), certificates=found)

    def _title(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"{self.optimizer} on {self.manifold}, {shape}, {self.steps} steps, float64, seed {self.seed}"

    def _cells(self) -> list[Sequence[Any]]:
        return [(row.name, row.quantity, row.value, row.bound, row.holds, row.claimed) for row in self.rows]

    def _notes(self) -> str:
        verdict = {
            True: "every claim holds, and nothing else does",
            False: "claims and certificates differ",
            None: "no claims",
        }
        lag = ", ".join(f"{cosine:.4f}" for cosine in self.momentum_lag)
        note = f"{verdict[self.consistent]}; cosine with steepest descent, step by step: {lag}"
        return note + ("; the optimizer LEFT the manifold" if self.left_manifold else "")

    def plot(self, ax: Any = None) -> Any:
        """Each certificate over its bound; see :func:`~geodescent.analysis.pictures.plot_certificates`."""
        from .pictures import plot_certificates

        return plot_certificates(self, ax)

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(self._table, self._cells())}\n{self._notes()}"

    def _repr_html_(self) -> str:
        return html_table(f"{self._title()}: {self._notes()}", self._table, self._cells())


def black_box_step_fn(optimizer_factory: OptimizerFactory, manifold: Manifold) -> StepFn:
    """``step_fn(x, gradients)`` of an optimizer: run it on one parameter, and recover each tangent step.

    The parameter starts at ``x`` with a fresh optimizer, ``p.grad`` is set and ``optimizer.step()`` called for each
    gradient, and the step is ``manifold.inverse_retract(before, after)``. That is the vector the optimizer retracted if
    its retraction is the manifold's. For another retraction it is the vector that *this* retraction would need to reach
    the same point; the two differ at second or third order in the step's length, so audit an optimizer with a manifold
    of its own retraction. Where the parameter leaves the manifold, or goes farther than the retraction can reach, there
    is no such vector, and the plain displacement stands in for it; it is not tangent, and the certificates show that.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Euclidean
        >>> step_fn = black_box_step_fn(lambda params: torch.optim.SGD(params, lr=0.5), Euclidean())
        >>> step_fn(torch.zeros(1, 2), [torch.ones(1, 2)])
        [tensor([[-0.5000, -0.5000]])]
    """

    def step_fn(x: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
        return _trajectory(optimizer_factory, manifold, x, gradients)[1]

    return step_fn


def certify(
    optimizer_factory: OptimizerFactory,
    manifold: Manifold,
    shape: Sequence[int],
    *,
    steps: int = 5,
    seed: int = 0,
    claims: Collection[str] | None = None,
    weight_decay: float = 0.1,
    trust_radius: float | None = None,
    atol: float = 1e-12,
    name: str | None = None,
) -> CertificateReport:
    """Run the certificates, in float64, on one optimizer seen as a black box.

    The start is ``manifold.random_point(*shape)``, the gradients those of a linear cost with noise, C + Z_t/2 for
    Gaussian C and Z_t. Steepest descent, in the metric and in the spectral norm, is judged at the first step, where
    momentum has no past; conditioning at every step that starts on the manifold. Gauge covariance is that of all
    matrices of a batch turned alike; it takes a retraction that is covariant too, which QR is not. See
    :func:`black_box_step_fn` for how a step is recovered.

    Args:
        optimizer_factory: ``optimizer_factory(params)`` makes the optimizer. Give it ε = 0 if it is to be scale-free,
            and a learning rate whose steps are of length 1e-2 or longer.
        manifold: with the optimizer's own retraction. Conditioning needs Stiefel with an α-metric, and fails elsewhere.
        shape: of the point, ``(*batch, *point)``. With one column, or a manifold of dimension 0 or 1, every rule has
            some of the properties; to tell rules apart take 1 < p < n.
        steps: number of steps. ``seed``: of the point and the gradients.
        claims: the certificates the optimizer is said to have, a subset of :data:`CERTIFICATES`; by default the
            attribute ``claims`` of the optimizer, if it has one.
        weight_decay: the λ of the weight decay certificate: λX is added to the gradients by hand, and the optimizer's
            own option ``weight_decay``, where its groups have one, is set to λ against 0.
        trust_radius: the bound on a step's length that conditioning is held to; by default each step's own length.
        atol: tolerance of every certificate, where steps can be recovered that well. A step of length s is the
            difference of two points and known to about 1e-16·‖X‖/s; where that is larger, it is the tolerance, up to
            1e-6. "spectral steepest descent" has 1e-8 at least, and where the optimum is known less well than
            that, what it is known to. The ``bound`` of each row is the tolerance that was applied.
        name: what to call the optimizer; by default its class.

    Raises:
        ValueError: steps < 1; an unknown claim; what the certificates and the manifold raise.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Stiefel
        >>> report = certify(lambda params: torch.optim.SGD(params, lr=0.1), Stiefel(), (6, 2), steps=1)
        >>> report.passed, report.left_manifold  # torch's SGD knows nothing of the manifold
        (False, True)
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(*shape, dtype=torch.float64, generator=generator)
    cost, *noise = torch.randn(steps + 1, *x.shape, dtype=torch.float64, generator=generator)
    gradients = [cost + z / 2 for z in noise]

    optimizer = optimizer_factory([ManifoldParameter(x.clone(), manifold)])
    claimed = getattr(optimizer, "claims", None) if claims is None else claims
    if claimed is not None and (unknown := set(claimed) - set(CERTIFICATES)):
        raise ValueError(f"unknown claims {sorted(unknown)}: the certificates are {', '.join(CERTIFICATES)}")

    points, taken = _trajectory(optimizer_factory, manifold, x, gradients)
    atol = max(atol, _resolution(x, taken, manifold.ndim))

    # a point off the manifold has no tangent space to judge a step in; the first step always has one
    judged = [i for i in range(steps) if _is_point(manifold, points[i])]
    descents = [steepest_descent_certificate(manifold, points[i], gradients[i], taken[i], atol=atol) for i in judged]
    step_fn = black_box_step_fn(optimizer_factory, manifold)
    scale_free = scale_free_certificate(step_fn, x, gradients, atol=atol, ndim=manifold.ndim)
    decay = weight_decay_certificate(manifold, x, weight_decay, step_fn=step_fn, gradients=gradients, atol=atol)
    own = _own_decay(optimizer_factory, manifold, x, gradients, weight_decay)
    certificates: dict[str, Any] = {"steepest descent": descents[0], "scale-free": scale_free}
    measured: dict[str, tuple[str, float, float]] = {
        "steepest descent": (
            "relative gap or tangency",
            max(descents[0].relative_gap, descents[0].tangency, descents[0].riesz_error),
            atol,
        ),
        "scale-free": (f"deviation (degree {scale_free.degree:.3g})", scale_free.deviation, atol),
        "weight decay": (
            "decayed step, relative",
            max(decay.projected_decay, decay.gradient_change, decay.step_deviation or 0.0, own),
            atol,
        ),
    }
    if has_conditioning_bound(manifold):
        at, moved = torch.stack([points[i] for i in judged]), torch.stack([taken[i] for i in judged])
        conditioning = conditioning_certificate(manifold, at, moved, trust_radius, atol)
        certificates["conditioning"] = conditioning
        radius = "its own length" if trust_radius is None else f"radius {trust_radius:g}"
        what = f"condition number of X + η, against {radius}"
        measured["conditioning"] = (what, conditioning.condition_number, conditioning.bound)
    else:
        measured["conditioning"] = ("no bound on this manifold", float("nan"), float("nan"))
    if manifold.ndim == 2:
        equivariance = equivariance_certificate(step_fn, x, gradients, atol=atol)
        certificates["equivariance"] = equivariance
        measured["equivariance"] = ("deviation", equivariance.deviation, atol)
        gauge = gauge_certificate(step_fn, x, gradients, atol=atol)
        certificates["gauge covariance"] = gauge
        measured["gauge covariance"] = ("deviation", gauge.deviation, atol)
        spectral = _spectral_certificate(manifold, x, gradients[0], taken[0], atol)
        certificates["spectral steepest descent"] = spectral
        measured["spectral steepest descent"] = (
            "relative gap or tangency",
            max(spectral.relative_gap, spectral.tangency, spectral.riesz_error),
            spectral.atol,
        )
    else:
        for which in ("equivariance", "gauge covariance", "spectral steepest descent"):
            measured[which] = ("points are not matrices", float("nan"), float("nan"))
    certificates["weight decay"] = decay

    rows = tuple(
        CertificateRow(
            which,
            *measured[which],
            holds=which in certificates
            and bool(certificates[which].passed)
            and (which != "weight decay" or own <= atol),
            claimed=None if claimed is None else which in claimed,
        )
        for which in CERTIFICATES
    )
    return CertificateReport(
        optimizer=type(optimizer).__name__ if name is None else name,
        manifold=repr(manifold),
        shape=tuple(x.shape),
        steps=steps,
        seed=seed,
        rows=rows,
        momentum_lag=tuple(descent.cosine for descent in descents),
        left_manifold=not all(_is_point(manifold, point) for point in points),
        passed=all(row.holds for row in rows if row.name not in _STEEPEST)
        and any(row.holds for row in rows if row.name in _STEEPEST),
        consistent=None if claimed is None else all(bool(row.consistent) for row in rows),
        certificates=certificates,
    )


def _spectral_certificate(
    manifold: Manifold, x: Tensor, gradient: Tensor, step: Tensor, atol: float
) -> SteepestDescentCertificate:
    """Steepest in the spectral norm, to 1e-8, the precision of the step, or what the optimum itself is known to."""
    bound = max(_SPECTRAL_ATOL, atol)
    found = steepest_descent_certificate(manifold, x, gradient, step, "spectral", bound)
    unknown = float(ratio(found.batch["dual"] - found.batch["attained"], found.batch["dual"]).max())
    if unknown <= bound / 2:
        return found
    return steepest_descent_certificate(manifold, x, gradient, step, "spectral", bound + unknown)


def _trajectory(
    optimizer_factory: OptimizerFactory, manifold: Manifold, x: Tensor, gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The points visited, the start first, and the step taken from each but the last; see :func:`black_box_step_fn`."""
    parameter = ManifoldParameter(x.clone(), manifold)
    optimizer = optimizer_factory([parameter])
    points, steps = [x.clone()], []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        before, after = points[-1], parameter.detach().as_subclass(Tensor).clone()
        points.append(after)
        step = after - before
        if _is_point(manifold, before) and _is_point(manifold, after):
            # out of the inverse's range (a huge step of a rule that is not scale-free) the displacement stays
            with suppress(ValueError):
                step = manifold.inverse_retract(before, after)
        steps.append(step)
    return points, steps


def _own_decay(
    optimizer_factory: OptimizerFactory,
    manifold: Manifold,
    x: Tensor,
    gradients: Sequence[Tensor],
    weight_decay: float,
) -> float:
    """The largest relative change of a step when the optimizer's own decay is switched on; 0 where it has none."""

    def decayed(params: list[ManifoldParameter], amount: float) -> torch.optim.Optimizer:
        optimizer = optimizer_factory(params)
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = amount
        return optimizer

    runs = [
        _trajectory(lambda params, amount=amount: decayed(params, amount), manifold, x, gradients)[1]
        for amount in (0.0, weight_decay)
    ]
    return max(
        float(ratio(frobenius(b - a, manifold.ndim), frobenius(a, manifold.ndim)).max())
        for a, b in zip(*runs, strict=True)
    )


def _resolution(x: Tensor, steps: Sequence[Tensor], ndim: int) -> float:
    """The relative error to expect in the shortest of the steps, each recovered as a difference of points like x."""
    lengths = torch.cat([frobenius(step, ndim).flatten() for step in steps])
    lengths = lengths[lengths > 0]
    if not lengths.numel():
        return 0.0
    # the factor covers the sums of n products that a point and its inverse retraction are made of
    rounding = 16 * torch.finfo(torch.float64).eps * float(frobenius(x, ndim).max())
    return min(rounding / float(lengths.min()), 1e-6)


def _is_point(manifold: Manifold, x: Tensor) -> bool:
    try:
        manifold.check_point(x)
    except NotOnManifoldError:
        return False
    return True
