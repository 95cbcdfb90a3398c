"""Spaces: what a point, a tangent vector, a length and a step are."""

import torch as _torch

from . import parameter as _parameter
from .errors import LogNotConvergedError, NotOnManifoldError
from .euclidean import Euclidean
from .grassmann import Grassmann
from .interop import from_geoopt, to_geoopt
from .manifold import Manifold
from .metrics import AlphaMetric, CanonicalMetric, EuclideanMetric, Metric
from .oblique import Oblique
from .parameter import ManifoldParameter
from .product import Product
from .retractions import QR, Cayley, Exponential, Polar, Retraction
from .spd import SymmetricPositiveDefinite
from .special_orthogonal import SpecialOrthogonal
from .spectral_descent import SpectralDescentResult, spectral_steepest_descent
from .sphere import Sphere
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
    "Grassmann",
    "LogNotConvergedError",
    "Manifold",
    "ManifoldParameter",
    "Metric",
    "NotOnManifoldError",
    "Oblique",
    "ParallelTransport",
    "Polar",
    "Product",
    "ProjectionTransport",
    "Retraction",
    "SpecialOrthogonal",
    "SpectralDescentResult",
    "Sphere",
    "Stiefel",
    "SymmetricPositiveDefinite",
    "VectorTransport",
    "from_geoopt",
    "spectral_steepest_descent",
    "to_geoopt",
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
        Grassmann,
        Oblique,
        ParallelTransport,
        Polar,
        Product,
        ProjectionTransport,
        QR,
        SpecialOrthogonal,
        Sphere,
        Stiefel,
        SymmetricPositiveDefinite,
    ]
)
