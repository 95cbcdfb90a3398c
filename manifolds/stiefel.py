"""The Stiefel manifold of orthonormal frames."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .frames import OrthonormalFrames
from .linalg import cross_gram, max_entry, project_tangent, working_precision
from .metrics import EuclideanMetric, Metric
from .retractions import Polar, Retraction
from .transports import ProjectionTransport, VectorTransport

__all__ = ["Stiefel"]


@dataclass(frozen=True)
class Stiefel(OrthonormalFrames):
    """St(n, p) = {X ∈ ℝⁿˣᵖ : XᵀX = I}, n ≥ p: the orthonormal p-frames of ℝⁿ.

    Points are the last two dimensions of a tensor. Tangent vectors at X satisfy XᵀU + UᵀX = 0. Wide matrices
    (n < p) are a ``ValueError``: store the transpose; layers own that choice, nothing transposes silently.

    Args:
        metric: :class:`EuclideanMetric`, :class:`CanonicalMetric`, another :class:`AlphaMetric`, or your own.
        retraction: :class:`Polar`, :class:`QR`, :class:`Cayley` or :class:`Exponential`.
        vector_transport: :class:`ProjectionTransport`, :class:`DifferentiatedTransport`, :class:`CayleyTransport`
            (with the Cayley retraction) or :class:`ParallelTransport` (with the exponential one).

    Example:
        >>> import torch
        >>> manifold = Stiefel()
        >>> x = manifold.random_point(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> u = manifold.random_tangent(x)
        >>> bool(manifold.point_error(manifold.retract(x, u)) < 1e-14)
        True
    """

    metric: Metric = field(default_factory=EuclideanMetric)
    retraction: Retraction = field(default_factory=Polar)
    vector_transport: VectorTransport = field(default_factory=ProjectionTransport)

    def __post_init__(self) -> None:
        for name, kind in (("metric", Metric), ("retraction", Retraction), ("vector_transport", VectorTransport)):
            found = getattr(self, name)
            if not isinstance(found, kind):
                raise TypeError(f"{name} must be a {kind.__name__} object, found {found!r}")
        self.vector_transport.check(self)

    # --- shapes -------------------------------------------------------------------------------------------------

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """np − p(p+1)/2."""
        self.check_shape(shape)
        n, p = shape[-2:]
        return n * p - p * (p + 1) // 2

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Z − X sym(XᵀZ), orthogonal in the ambient inner product whatever the metric."""
        self.check_shape(x.shape)
        return project_tangent(x, z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """max |XᵀU + UᵀX|, computed in float32 or better."""
        self.check_shape(x.shape)
        inner = cross_gram(x, u)
        return max_entry(inner + inner.mT)

    # --- metric -------------------------------------------------------------------------------------------------

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.metric.inner(x, u, v)

    @working_precision
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.metric.egrad_to_rgrad(x, g)

    @working_precision
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """The Riemannian Hessian along the tangent ``u``: self-adjoint in the metric, ⟨Hess u, u⟩ = d²/dt² f(Exp(tu)).

        As a bilinear form it is ∇²f[u, v] + ⟨∇f, S(u, v)⟩, −S the Christoffel form; the metric's Riesz map makes a
        vector of it.
        """
        self.check_shape(x.shape)
        return self.metric.egrad_to_rgrad(x, ehess_u + self.metric.hessian_correction(x, egrad, u))

    # --- geodesics ----------------------------------------------------------------------------------------------

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map of ``metric``. The normal part of ``u``, if any, is ignored."""
        self.check_shape(x.shape)
        return self.metric.exp(x, u)

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The logarithm of ``metric``: the u with exp(x, u) = y.

        Beyond the injectivity radius it may be the velocity of a geodesic that is not the shortest.

        Raises:
            LogNotConvergedError: no geodesic from x to y was found.
        """
        self.check_shape(x.shape)
        return self.metric.log(x, y)

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """The length of :meth:`log`; 0 with derivative 0 at equal points."""
        return self.norm(x, self.log(x, y))

    @property
    def injectivity_radius(self) -> float:
        return self.metric.injectivity_radius

    # --- retraction and transport ---------------------------------------------------------------------------------

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.retraction.with_metric(self.metric).retract(x, u)

    def inverse_retract(self, x: Tensor, y: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.retraction.with_metric(self.metric).inverse_retract(x, y)

    def pushforward(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.retraction.with_metric(self.metric).pushforward(x, u, v)

    @property
    def retraction_order(self) -> int:
        """What the retraction guarantees against this metric for 1 < p < n; see :mod:`.retractions`."""
        return self.retraction.order(self.metric)

    @property
    def transport_is_isometric(self) -> bool:
        return self.vector_transport.isometric

    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.vector_transport.transport(self, x, u, v)

    def retract_transport(self, x: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.retract(x, u)
        return y, tuple(self.vector_transport.transport(self, x, u, v, y) for v in vectors)
