"""Spaces: what a point, a tangent vector, a length and a step are."""

import torch as _torch

from . import parameter as _parameter
from .errors import NotOnManifoldError
from .euclidean import Euclidean
from .manifold import Manifold
from .metrics import AlphaMetric, CanonicalMetric, EuclideanMetric, Metric
from .parameter import ManifoldParameter
from .retractions import QR, Cayley, Polar, Retraction
from .stiefel import Stiefel
from .transports import ProjectionTransport, VectorTransport

__all__ = [
    "QR",
    "AlphaMetric",
    "CanonicalMetric",
    "Cayley",
    "Euclidean",
    "EuclideanMetric",
    "Manifold",
    "ManifoldParameter",
    "Metric",
    "NotOnManifoldError",
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
        Euclidean,
        EuclideanMetric,
        Polar,
        ProjectionTransport,
        QR,
        Stiefel,
    ]
)
