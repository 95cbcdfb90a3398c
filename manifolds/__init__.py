"""Spaces: what a point, a tangent vector, a length and a step are."""

import torch as _torch

from . import parameter as _parameter
from .errors import LogNotConvergedError, NotOnManifoldError
from .euclidean import Euclidean
from .manifold import Manifold
from .metrics import AlphaMetric, CanonicalMetric, EuclideanMetric, Metric
from .parameter import ManifoldParameter
from .retractions import QR, Cayley, Exponential, Polar, Retraction
from .stiefel import Stiefel
from .transports import (
    CayleyTransport,
    DifferentiatedTransport,
    ParallelTransport,
    ProjectionTransport,
    VectorTransport,
)

__all__ = [
    "QR",
    "AlphaMetric",
    "CanonicalMetric",
    "Cayley",
    "CayleyTransport",
    "DifferentiatedTransport",
    "Euclidean",
    "EuclideanMetric",
    "Exponential",
    "LogNotConvergedError",
    "Manifold",
    "ManifoldParameter",
    "Metric",
    "NotOnManifoldError",
    "ParallelTransport",
    "Polar",
    "ProjectionTransport",
    "Retraction",
    "Stiefel",
    "VectorTransport",
]

# `torch.load(weights_only=True)` rebuilds only what is listed. These are plain value objects whose construction
# runs no code of the file's.
_torch.serialization.add_safe_globals(
    [
        _parameter.rebuild,
        AlphaMetric,
        CanonicalMetric,
        Cayley,
        CayleyTransport,
        DifferentiatedTransport,
        Euclidean,
        EuclideanMetric,
        Exponential,
        ParallelTransport,
        Polar,
        ProjectionTransport,
        QR,
        Stiefel,
    ]
)
