"""The optimizers that `geodescent certify` checks, and how each is set up for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis import CertificateReport, certify
from ..manifolds import CanonicalMetric, Cayley, Manifold, Stiefel
from ..optim import RiemannianAdam, RiemannianSGD, SpectralDescent

__all__ = ["CERTIFIED", "Certified", "certify_all"]

TRUST_RADIUS = 1.0


@dataclass(frozen=True)
class Certified:
    """An optimizer as it is certified: ε = 0, because scale-freeness is meant for that, and no claims but its own."""

    name: str
    factory: Callable[[Any], torch.optim.Optimizer]
    manifold: Manifold
    atol: float = 1e-12


def _adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: RiemannianAdam(params, lr=1e-2, eps=0.0, trust_radius=TRUST_RADIUS, **options)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return RiemannianSGD(params, lr=1e-2, momentum=0.9, trust_radius=TRUST_RADIUS)


def _spectral(params: Any) -> torch.optim.Optimizer:
    return SpectralDescent(params, lr=0.1, trust_radius=TRUST_RADIUS)


CERTIFIED: tuple[Certified, ...] = (
    Certified("RiemannianAdam", _adam(), Stiefel()),
    Certified("RiemannianAdam, frobenius", _adam(step_scale="frobenius"), Stiefel()),
    Certified("RiemannianAdam, canonical metric", _adam(), Stiefel(CanonicalMetric(), Cayley())),
    Certified("RiemannianAdam, column", _adam(second_moment="column"), Stiefel()),
    # a rule that divides by single elements divides rounding by the smallest of them, some 1/(np) of the rest
    Certified("RiemannianAdam, gram", _adam(second_moment="gram"), Stiefel()),
    Certified("RiemannianSGD", _sgd, Stiefel()),
    Certified("SpectralDescent", _spectral, Stiefel()),
    Certified("RiemannianAdam, element", _adam(second_moment="element"), Stiefel(), atol=1e-10),
)


def certify_all(shape: tuple[int, ...], seed: int = 0) -> Iterator[CertificateReport]:
    """A report an optimizer, as each is done, on frames of `shape` (..., n, p), in float64."""
    for each in CERTIFIED:
        yield certify(
            each.factory,
            each.manifold,
            shape,
            seed=seed,
            trust_radius=TRUST_RADIUS,
            atol=each.atol,
            name=each.name,
        )
