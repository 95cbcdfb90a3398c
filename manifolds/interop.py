"""Manifolds of geoopt (Kochurov et al. 2020) here, and manifolds of here there. geoopt is imported only when called.

The maps are always those of the library that has them right. In geoopt 0.5.1

- ``CanonicalStiefel.retr`` has the derivative u + xxᵀu instead of u, and its ``proju``, a gradient conversion, is not
  idempotent;
- ``Sphere.dist`` cuts the cosine off at 1 − 1e-7, so it is 4.5e-4 between equal points;
- stereographic ``inner`` without ``keepdim`` broadcasts a batch of b vectors to b×b numbers;
- most spaces lack ``dist`` and ``logmap``, or have them without derivative at coincident points.

So a geoopt manifold that this package has too becomes ours, and one of ours goes to geoopt as a geoopt manifold that
calls our maps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .euclidean import Euclidean
from .linalg import default_atol, working_precision
from .manifold import Manifold
from .metrics import CanonicalMetric, EuclideanMetric
from .retractions import QR, Cayley, Exponential
from .spd import SymmetricPositiveDefinite
from .sphere import Sphere
from .stiefel import Stiefel
from .transports import CayleyTransport, ProjectionTransport

__all__ = ["GeooptManifold", "from_geoopt", "to_geoopt"]


def _geoopt() -> Any:
    try:
        import geoopt
    except ImportError as error:
        raise ImportError("geoopt is not installed, and this needs it: pip install geoopt") from error
    return geoopt


# --- ours, for geoopt -----------------------------------------------------------------------------------------------


def to_geoopt(manifold: Manifold) -> Any:
    """A ``geoopt.Manifold`` on which geoopt's optimizers run with the maps of ``manifold``.

    ``Euclidean`` becomes geoopt's own, and :class:`GeooptManifold` gives back what it wraps. Every other manifold is
    wrapped: the result is an instance of the geoopt class of the same space, where there is one
    (``EuclideanStiefel``, ``CanonicalStiefel``, ``Sphere``, ``SymmetricPositiveDefinite``), and every method is ours;
    its attribute ``geodescent`` is ``manifold``. geoopt's ``transp(x, y, v)`` follows the retraction from x to y, so
    it needs ``inverse_retract``.

    Raises:
        ImportError: geoopt is not installed.
        TypeError: ``manifold`` is not a manifold of this package.

    Example:
        >>> import geoopt
        >>> theirs = to_geoopt(Stiefel())
        >>> isinstance(theirs, geoopt.EuclideanStiefel), theirs.geodescent == Stiefel()
        (True, True)
    """
    if not isinstance(manifold, Manifold):
        raise TypeError(f"manifold must be a geodescent.manifolds.Manifold object, found {manifold!r}")
    geoopt = _geoopt()
    if isinstance(manifold, Euclidean):
        return geoopt.Euclidean(manifold.ndim)
    if isinstance(manifold, GeooptManifold):
        return manifold.geoopt_manifold
    base = geoopt.Manifold
    if isinstance(manifold, Stiefel):
        if manifold.metric == EuclideanMetric():
            base = geoopt.EuclideanStiefel
        elif manifold.metric == CanonicalMetric():
            base = geoopt.CanonicalStiefel
    elif isinstance(manifold, Sphere):
        base = geoopt.Sphere
    elif isinstance(manifold, SymmetricPositiveDefinite):
        base = geoopt.SymmetricPositiveDefinite
    return _wrapper(base)(manifold)


@functools.cache
def _wrapper(base: Any) -> Any:
    """The subclass of a geoopt class whose every method is that of a manifold of ours."""
    geoopt = _geoopt()

    class GeodescentManifold(base):
        __scaling__ = geoopt.Manifold.__scaling__.copy()
        reversible = False

        def __new__(cls, manifold: Manifold):
            return torch.nn.Module.__new__(cls)

        def __init__(self, manifold: Manifold) -> None:
            torch.nn.Module.__init__(self)
            self.geodescent = manifold
            self.ndim = manifold.ndim
            self.name = type(manifold).__name__

        def __reduce__(self):
            return to_geoopt, (self.geodescent,)

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other) and self.geodescent == other.geodescent  # type: ignore[attr-defined]

        def __hash__(self) -> int:
            return hash((type(self), self.geodescent))

        def __repr__(self) -> str:
            return f"to_geoopt({self.geodescent!r})"

        # --- checks

        def _check_shape(self, shape, name):
            try:
                self.geodescent.check_shape(shape)
            except ValueError as error:
                return False, f"`{name}`: {error}"
            return True, None

        def _check_point_on_manifold(self, x, *, atol=1e-5, rtol=1e-5):
            return self._verdict(self.geodescent.point_error(x), max(atol, default_atol(x.dtype)))

        def _check_vector_on_tangent(self, x, u, *, atol=1e-5, rtol=1e-5):
            size = max(1.0, float(u.abs().max()) if u.numel() else 1.0)
            return self._verdict(self.geodescent.tangent_error(x, u), max(atol, default_atol(u.dtype)) * size)

        @staticmethod
        def _verdict(errors, atol):
            worst = float(errors.max()) if errors.numel() else 0.0
            return (True, None) if worst <= atol else (False, f"error {worst:.3g} above {atol:.3g}")

        # --- maps

        def _keep(self, a, keepdim):
            return a.reshape(a.shape + (1,) * self.ndim) if keepdim else a

        def projx(self, x):
            return self.geodescent.project_point(x)

        def proju(self, x, u):
            return self.geodescent.project(x, u)

        def egrad2rgrad(self, x, u):
            return self.geodescent.egrad_to_rgrad(x, u)

        def inner(self, x, u, v=None, *, keepdim=False):
            return self._keep(self.geodescent.inner(x, u, u if v is None else v), keepdim)

        def component_inner(self, x, u, v=None):
            return self.inner(x, u, v, keepdim=True)

        def norm(self, x, u, *, keepdim=False):
            return self._keep(self.geodescent.norm(x, u), keepdim)

        def dist(self, x, y, *, keepdim=False):
            return self._keep(self.geodescent.dist(x, y), keepdim)

        def dist2(self, x, y, *, keepdim=False):
            return self.dist(x, y, keepdim=keepdim).square()

        def expmap(self, x, u):
            return self.geodescent.exp(x, u)

        def logmap(self, x, y):
            return self.geodescent.log(x, y)

        def retr(self, x, u):
            return self.geodescent.retract(x, u)

        def transp(self, x, y, v):
            return self.geodescent.transport(x, self.geodescent.inverse_retract(x, y), v)

        def transp_follow_retr(self, x, u, v):
            return self.geodescent.transport(x, u, v)

        def retr_transp(self, x, u, v):
            y, (carried,) = self.geodescent.retract_transport(x, u, v)
            return y, carried

        def transp_follow_expmap(self, x, u, v):
            return self.transp(x, self.expmap(x, u), v)

        def expmap_transp(self, x, u, v):
            y = self.expmap(x, u)
            return y, self.transp(x, y, v)

        # --- points

        def random(self, *size, dtype=None, device=None, **kwargs):
            size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            point = self.geodescent.random_point(*size, dtype=dtype, device=device, **kwargs)
            return geoopt.ManifoldTensor(point, manifold=self)

        def origin(self, *size, dtype=None, device=None, seed=42):
            generator = torch.Generator(device or "cpu").manual_seed(seed)
            return self.random(*size, dtype=dtype, device=device, generator=generator)

    return GeodescentManifold


# --- geoopt's, for us -----------------------------------------------------------------------------------------------


def from_geoopt(manifold: Any) -> Manifold:
    """A manifold of this package for a ``geoopt.Manifold``.

    ``Euclidean``, ``EuclideanStiefel`` (QR retraction, projection transport), ``EuclideanStiefelExact`` (exponential
    retraction), ``CanonicalStiefel`` (Cayley retraction and transport, the correct ones), ``Sphere`` and
    ``SymmetricPositiveDefinite("AIM")`` become ours, and what :func:`to_geoopt` made becomes what it was made from.
    Every other geoopt manifold is wrapped in :class:`GeooptManifold`, with geoopt's maps as they are.

    Raises:
        ImportError: geoopt is not installed.
        TypeError: ``manifold`` is not a geoopt manifold.

    Example:
        >>> import geoopt
        >>> from_geoopt(geoopt.EuclideanStiefel()) == Stiefel(EuclideanMetric(), QR(), ProjectionTransport())
        True
    """
    geoopt = _geoopt()
    if not isinstance(manifold, geoopt.Manifold):
        raise TypeError(f"manifold must be a geoopt.Manifold object, found {manifold!r}")
    ours = getattr(manifold, "geodescent", None)
    if ours is not None:
        return ours
    kind = type(manifold)
    if kind is geoopt.Euclidean:
        return Euclidean(manifold.ndim)
    if kind is geoopt.EuclideanStiefel:
        return Stiefel(EuclideanMetric(), QR(), ProjectionTransport())
    if kind is geoopt.EuclideanStiefelExact:
        return Stiefel(EuclideanMetric(), Exponential(), ProjectionTransport())
    if kind is geoopt.CanonicalStiefel:
        return Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())
    if kind is geoopt.Sphere and manifold.projector is None:
        return Sphere()
    if kind is geoopt.SymmetricPositiveDefinite and manifold.default_metric.value == "AIM":
        return SymmetricPositiveDefinite()
    return GeooptManifold(manifold)


@dataclass(frozen=True, eq=False)
class GeooptManifold(Manifold):
    """A geoopt manifold that this package does not have, with geoopt's maps: made by :func:`from_geoopt`.

    ``point_error`` and ``tangent_error`` are the distances to geoopt's projections, whose accuracy is geoopt's.
    ``inverse_retract`` and ``ehess_to_rhess`` are not known to geoopt; ``log``, ``dist`` and ``exp`` are where it has
    them. Equal where class, ``repr`` and buffers are.
    """

    geoopt_manifold: Any
    ndim: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ndim", self.geoopt_manifold.ndim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeooptManifold):
            return NotImplemented
        mine, theirs = self.geoopt_manifold, other.geoopt_manifold
        if type(mine) is not type(theirs) or repr(mine) != repr(theirs):
            return False
        a, b = mine.state_dict(), theirs.state_dict()
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

    def __hash__(self) -> int:
        return hash((type(self.geoopt_manifold), repr(self.geoopt_manifold)))

    def _dims(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    def dim(self, shape: torch.Size | tuple[int, ...]) -> int:
        """The trace of the projection to a tangent space, measured at one point: geoopt does not say."""
        self.check_shape(shape)
        shape = tuple(shape[len(shape) - self.ndim :])
        size = math.prod(shape)
        x = self.random_point(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        units = torch.eye(size, dtype=x.dtype).reshape(size, *shape)
        projected = torch.stack([self.project(x, unit) for unit in units])
        return round(float((projected * units).sum()))

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """geoopt's ``random``, of whatever law it has. With a generator, the global one is seeded from it meanwhile."""
        self.check_shape(shape)
        if generator is None:
            return self._draw(shape, dtype, device)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        devices = [] if device is None or torch.device(device).type == "cpu" else [device]
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return self._draw(shape, dtype, device)

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        # a geoopt manifold with parameters of its own draws in their type only
        free = self.geoopt_manifold.dtype is None
        x = self.geoopt_manifold.random(*shape, **({"dtype": dtype, "device": device} if free else {}))
        x = x.detach().as_subclass(Tensor)
        if free or (dtype in (None, x.dtype) and device in (None, x.device)):
            return x
        return self.project_point(x.to(x.device if device is None else device, x.dtype if dtype is None else dtype))

    @working_precision
    def project_point(self, a: Tensor) -> Tensor:
        self.check_shape(a.shape)
        return self.geoopt_manifold.projx(a)

    def point_error(self, x: Tensor) -> Tensor:
        """The largest change that geoopt's ``projx`` makes."""
        return self._largest(self.project_point(x) - x)

    def tangent_error(self, x: Tensor, u: Tensor) -> Tensor:
        """The largest change that geoopt's ``proju`` makes."""
        return self._largest(self.project(x, u) - u)

    def _largest(self, a: Tensor) -> Tensor:
        return a.abs().amax(self._dims()) if self.ndim else a.abs()

    @working_precision
    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self.geoopt_manifold.proju(x, z)

    @working_precision
    def random_tangent(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A projected Gaussian tensor divided by its norm."""
        u = self.project(x, torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator))
        norm = self.norm(x, u)
        norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        return u / norm.reshape(norm.shape + (1,) * self.ndim)

    @working_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        # without keepdim, stereographic inner products of geoopt 0.5.1 broadcast a batch against itself
        value = self.geoopt_manifold.inner(x, u, v, keepdim=True)
        return value.squeeze(self._dims()) if self.ndim else value

    @working_precision
    def egrad_to_rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.geoopt_manifold.egrad2rgrad(x, g)

    @working_precision
    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self.geoopt_manifold.expmap(x, u)

    @working_precision
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return self.geoopt_manifold.logmap(x, y)

    @working_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self.geoopt_manifold.dist(x, y)

    @working_precision
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.geoopt_manifold.retr(x, u)

    @working_precision
    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self.geoopt_manifold.transp_follow_retr(x, u, v)
