"""The Stiefel manifold of orthonormal frames."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .linalg import compute_dtype, polar_factor, qr_positive, sym, upcast_half
from .manifold import Manifold
from .metrics import EuclideanMetric, Metric
from .retractions import Polar, Retraction
from .transports import ProjectionTransport, VectorTransport

__all__ = ["Stiefel"]


@dataclass(frozen=True)
class Stiefel(Manifold):
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

    ndim = 2

    def __post_init__(self) -> None:
        for name, kind in (("metric", Metric), ("retraction", Retraction), ("vector_transport", VectorTransport)):
            found = getattr(self, name)
            if not isinstance(found, kind):
                raise TypeError(f"{name} must be a {kind.__name__} object, found {found!r}")
        self.vector_transport.check(self)

    # --- shapes -------------------------------------------------------------------------------------------------

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        n, p = shape[-2:]
        if n < p:
            raise ValueError(
                f"a Stiefel frame must be tall, n >= p, found n = {n} rows and p = {p} columns in shape "
                f"{tuple(shape)}; store its transpose, {p} by {n}"
            )

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """np − p(p+1)/2."""
        self.check_shape(shape)
        n, p = shape[-2:]
        return n * p - p * (p + 1) // 2

    # --- points -------------------------------------------------------------------------------------------------

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A Haar-distributed frame: QR with positive diagonal of a Gaussian matrix (Mezzadri 2007)."""
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        gaussian = torch.randn(shape, dtype=compute_dtype(dtype), device=device, generator=generator)
        return qr_positive(gaussian)[0].to(dtype).contiguous()

    @upcast_half
    def project_point(self, a: Tensor) -> Tensor:
        """The polar factor of ``a``, nearest in the Frobenius norm. For rank-deficient ``a``, one of the nearest.

        Raises:
            ValueError: ``a`` is wide, or has NaN or infinite entries.
        """
        self.check_shape(a.shape)
        return polar_factor(a)

    def point_error(self, x: Tensor) -> Tensor:
        """max |XᵀX − I|, computed in float32 or better."""
        self.check_shape(x.shape)
        x = x.to(compute_dtype(x.dtype))
        return _max_entry(x.mT @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))

    # --- tangent vectors ----------------------------------------------------------------------------------------

    @upcast_half
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        """Z − X sym(XᵀZ), orthogonal in the ambient inner product whatever the metric."""
        self.check_shape(x.shape)
        return z - x @ sym(x.mT @ z)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """max |XᵀU + UᵀX|, computed in float32 or better."""
        self.check_shape(x.shape)
        inner = x.to(compute_dtype(x.dtype)).mT @ u.to(compute_dtype(u.dtype))
        return _max_entry(inner + inner.mT)

    # --- metric -------------------------------------------------------------------------------------------------

    @upcast_half
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.metric.inner(x, u, v)

    @upcast_half
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        self.check_shape(x.shape)
        return self.metric.egrad_to_rgrad(x, g)

    @upcast_half
    def ehess_to_rhess(self, x: Tensor, egrad: Tensor, ehess_u: Tensor, u: Tensor) -> Tensor:
        """The Riemannian Hessian along the tangent ``u``: self-adjoint in the metric, ⟨Hess u, u⟩ = d²/dt² f(Exp(tu)).

        As a bilinear form it is ∇²f[u, v] + ⟨∇f, S(u, v)⟩, −S the Christoffel form; the metric's Riesz map makes a
        vector of it.
        """
        self.check_shape(x.shape)
        return self.metric.egrad_to_rgrad(x, ehess_u + self.metric.hessian_correction(x, egrad, u))

    # --- geodesics ----------------------------------------------------------------------------------------------

    @upcast_half
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """The exponential map of ``metric``. The normal part of ``u``, if any, is ignored."""
        self.check_shape(x.shape)
        return self.metric.exp(x, u)

    @upcast_half
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


def _max_entry(a: Tensor) -> Tensor:
    """max |aᵢⱼ| over the last two dimensions, 0 for an empty matrix; NaN propagates."""
    return a.abs().amax((-2, -1)) if a.shape[-1] else a.new_zeros(a.shape[:-2])
