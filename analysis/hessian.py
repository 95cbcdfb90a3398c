"""How well conditioned a function is: the Riemannian Hessian's spectrum, for constrained and plain parameters alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..manifolds import Manifold
from ._result import Result
from .lanczos import RitzValues, lanczos

__all__ = ["HessianSpectrum", "hessian_condition_number", "model_hessian"]


@dataclass(frozen=True, repr=False, eq=False)
class HessianSpectrum(Result):
    """Both ends of the spectrum of a Riemannian Hessian.

    ``smallest``, ``largest``: Ritz values; an eigenvalue lies within ``smallest_error`` and ``largest_error`` of each,
    always (but for the rounding of the function's own precision). ``missed``: with probability 99.9 % over the random
    start no eigenvalue lies farther outside of the two; infinite after few products, 0 where the whole space was seen.
    (The start is uniform in the Euclidean metric; another multiplies the chance of 0.1 % by no more than the ratio of
    the longest to the shortest length that it gives to a vector of Frobenius norm 1.)

    ``definite``: True if every eigenvalue is positive by these bounds, False if one is negative, None if neither is
    known. ``condition_number``: largest over smallest where no eigenvalue below 0 was found, infinite where the
    smallest is 0 within its error, NaN where one is negative: the ends then say nothing of what is near 0.

    ``gradient_norm``: of the Riemannian gradient. Where it is not 0 the Hessian depends on the metric's connection, and
    not on the function alone. ``dimension``: of the space less what was deflated. ``products``: Hessian-vector
    products. ``ritz``: all Ritz values.
    """

    smallest: float
    largest: float
    smallest_error: float
    largest_error: float
    missed: float
    definite: bool | None
    condition_number: float
    gradient_norm: float
    dimension: int
    products: int
    ritz: Tensor

    _hidden: ClassVar = frozenset({"ritz"})


def hessian_condition_number(
    manifold: Manifold,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    steps: int = 100,
    tolerance: float = 1e-6,
    deflate: Iterable[Tensor] = (),
    seed: int = 0,
) -> HessianSpectrum:
    """The spectrum of the Riemannian Hessian of ``f`` at ``x``, in the manifold's metric, by Lanczos' method.

    Args:
        f: a twice differentiable scalar function of a point, in torch; for a batch of points, of all of them.
        x: a point (n, p), or a batch, which is one point of the product of manifolds.
        steps: Hessian-vector products at most.
        tolerance: relative accuracy of both ends at which to stop.
        deflate: tangent vectors of x's shape that are left out, such as the gauge directions XA with A skew of a
            function that is the same at XR, along which the Hessian is 0 at a minimum.
        seed: of the random start.

    Raises:
        ValueError: f or a product is not finite, or f's value is not a scalar.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import Sphere
        >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64))
        >>> x = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # the Rayleigh quotient's minimum
        >>> found = hessian_condition_number(Sphere(), lambda x: x @ a @ x / 2, x)
        >>> round(found.smallest, 9), round(found.largest, 9), round(found.condition_number, 9)  # λᵢ − λ₁
        (1.0, 8.0, 8.0)
    """
    point = x.detach().clone().requires_grad_()
    return _spectrum([point], [manifold], lambda: f(point), [[u] for u in deflate], steps, tolerance, seed)


def model_hessian(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    names: Sequence[str] | None = None,
    manifolds: Mapping[str, Manifold] | None = None,
    steps: int = 100,
    tolerance: float = 1e-6,
    deflate: Iterable[Mapping[str, Tensor]] = (),
    seed: int = 0,
) -> HessianSpectrum:
    """The spectrum of the Hessian of a model's loss in some of its parameters, frames on their manifold.

    The space is the product of the parameters' manifolds: those of :class:`~geodescent.manifolds.ManifoldParameter`,
    and Euclidean space for the others. The same network with plain matrices in the place of frames can so be compared.

    Args:
        model: whose parameters are measured at their present values; nothing of it changes.
        loss: the loss at the present parameters, with the same data each time it is called.
        names: of parameters; by default all that require gradients.
        manifolds: of parameters that are frames but do not know it, by name.
        steps, tolerance, seed: as in :func:`hessian_condition_number`.
        deflate: directions to leave out, name to tangent vector; a name that is missing is 0.

    Fused attention kernels have no second derivatives: the loss is computed with torch's plain attention.

    Raises:
        ValueError: unknown names; the loss, or a product, is not finite; the loss does not depend on the parameters.

    Example:
        >>> import torch
        >>> from geodescent.analysis import model_hessian
        >>> layer, x = torch.nn.Linear(3, 1, bias=False).double(), torch.eye(3).double() * torch.tensor([1.0, 2.0, 4.0])
        >>> found = model_hessian(layer, lambda: layer(x).square().sum() / 2)
        >>> round(found.smallest, 9), round(found.largest, 9), round(found.condition_number, 9)
        (1.0, 16.0, 16.0)
    """
    own = dict(model.named_parameters())
    chosen = [name for name, p in own.items() if p.requires_grad] if names is None else list(names)
    unknown = [name for name in [*chosen, *(manifolds or {})] if name not in own]
    if unknown or not chosen:
        raise ValueError(f"names must be parameters of the model that require gradients, found {unknown or chosen}")
    params = [own[name] for name in chosen]
    spaces = [(manifolds or {}).get(name, getattr(p, "manifold", None)) for name, p in zip(chosen, params, strict=True)]
    directions = [[u[name] if name in u else torch.zeros_like(own[name]) for name in chosen] for u in deflate]
    return _spectrum(params, spaces, loss, directions, steps, tolerance, seed)


def _spectrum(
    params: Sequence[Tensor],
    spaces: Sequence[Manifold | None],
    loss: Callable[[], Tensor],
    deflate: Iterable[Sequence[Tensor]],
    steps: int,
    tolerance: float,
    seed: int,
) -> HessianSpectrum:
    space = _ProductSpace([p.detach().as_subclass(Tensor) for p in params], spaces)
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        value = loss()
        if value.numel() != 1 or not bool(torch.isfinite(value)):
            raise ValueError(f"the function must give one finite number, found {value.detach()}")
        grads = _derivative(value.sum(), params, None)
        egrads = [g.detach() for g in grads]

        def product(v: Tensor) -> Tensor:
            u = space.parts(v)
            ehess_u = _derivative(grads, params, [part.to(p.dtype) for part, p in zip(u, params, strict=True)])
            return space.join(space.hessian(egrads, ehess_u, u))

        if space.dimension == 0:
            raise ValueError("the parameters must leave a direction to move in, found a space of dimension 0")
        found = lanczos(
            product,
            space.random(seed),
            space.inner,
            dimension=space.dimension,
            steps=steps,
            tolerance=tolerance,
            deflate=[space.join(space.project(u)) for u in deflate],
        )
    gradient = space.join(space.gradient(egrads))
    return _result(found, float(space.inner(gradient, gradient).clamp(min=0).sqrt()))


def _derivative(outputs: Any, params: Sequence[Tensor], directions: list[Tensor] | None) -> list[Tensor]:
    """Derivatives of outputs, or of their products with directions, zero where there is none, themselves derivable."""
    kept = outputs if directions is None else [g for g in outputs if g.requires_grad]
    if directions is not None:
        directions = [u for u, g in zip(directions, outputs, strict=True) if g.requires_grad]
        if not kept:
            return [torch.zeros_like(p).as_subclass(Tensor) for p in params]
    found = torch.autograd.grad(
        kept, params, directions, create_graph=directions is None, retain_graph=True, allow_unused=True
    )
    if directions is None and all(g is None for g in found):
        raise ValueError("the function does not depend on the parameters")
    return [
        torch.zeros_like(p).as_subclass(Tensor) if g is None else g.as_subclass(Tensor)
        for g, p in zip(found, params, strict=True)
    ]


def _result(found: RitzValues, gradient_norm: float) -> HessianSpectrum:
    low, high = float(found.values[0]), float(found.values[-1])
    low_error, high_error = float(found.errors[0]), float(found.errors[-1])
    definite: bool | None = None
    if low - low_error - found.missed > 0:
        definite = True
    elif low + low_error < 0:
        definite = False
    condition = math.nan
    if abs(low) <= low_error + 1e-12 * abs(high):
        condition = math.inf
    elif low > 0:
        condition = high / low
    return HessianSpectrum(
        smallest=low,
        largest=high,
        smallest_error=low_error,
        largest_error=high_error,
        missed=found.missed,
        definite=definite,
        condition_number=condition,
        gradient_norm=gradient_norm,
        dimension=found.dimension,
        products=found.products,
        ritz=torch.from_numpy(found.values.copy()),
    )


class _ProductSpace:
    """The tangent space at a point of a product of manifolds (None for Euclidean), as vectors (N,) in float64."""

    def __init__(self, points: Sequence[Tensor], manifolds: Sequence[Manifold | None]) -> None:
        self.points = [x.to(torch.float64) for x in points]
        self.manifolds = manifolds
        self.sizes = [x.numel() for x in self.points]
        self.dimension = sum(map(_dimension, self.points, manifolds))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([u.reshape(-1).to(torch.float64) for u in parts])

    def parts(self, v: Tensor) -> list[Tensor]:
        """Vectors (k, N) or (N,) as tensors of the points' shapes."""
        return [
            part.reshape(*v.shape[:-1], *x.shape) for part, x in zip(v.split(self.sizes, -1), self.points, strict=True)
        ]

    def inner(self, u: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros(u.shape[:-1], dtype=torch.float64, device=u.device)
        for x, m, a, b in zip(self.points, self.manifolds, self.parts(u), self.parts(v), strict=True):
            if m is None:
                total = total + (a * b).flatten(u.ndim - 1).sum(-1)
            else:
                values = m.inner(x, a, b)
                total = total + (values.flatten(u.ndim - 1).sum(-1) if values.ndim >= u.ndim else values)
        return total

    def project(self, z: Sequence[Tensor]) -> list[Tensor]:
        z = [part.to(torch.float64) for part in z]
        return [
            part if m is None else m.project(x, part) for x, m, part in zip(self.points, self.manifolds, z, strict=True)
        ]

    def random(self, seed: int) -> Tensor:
        """A direction that is uniform in the ambient inner product."""
        # a stream of its own: the one of this seed may have made the point, and gives no tangent direction again
        generator = torch.Generator().manual_seed(seed + 0x4C616E637A6F73)
        noise = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.device) for x in self.points]
        return self.join(self.project(noise))

    def gradient(self, egrads: Sequence[Tensor]) -> list[Tensor]:
        return [
            g.to(torch.float64) if m is None else m.egrad_to_rgrad(x, g.to(torch.float64))
            for x, m, g in zip(self.points, self.manifolds, egrads, strict=True)
        ]

    def hessian(self, egrads: Sequence[Tensor], ehess_u: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(self.points, self.manifolds, egrads, ehess_u, u, strict=True)
        return [
            h.to(torch.float64) if m is None else m.ehess_to_rhess(x, g.to(torch.float64), h.to(torch.float64), v)
            for x, m, g, h, v in parts
        ]


def _dimension(x: Tensor, manifold: Manifold | None) -> int:
    if manifold is None:
        return x.numel()
    return manifold.dim(x.shape) * math.prod(x.shape[: x.ndim - manifold.ndim])
