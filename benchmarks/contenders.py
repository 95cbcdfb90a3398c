"""Who takes part in the optimizer step: this library, its peers, and the floor.

Everybody steps the same frames along the same gradients, which are set once and which no step changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..manifolds import CanonicalMetric, Cayley, CayleyTransport, Manifold, ManifoldParameter, Stiefel
from ..optim import RiemannianAdam, RiemannianSGD, SpectralDescent
from .peers import peer

__all__ = ["RECIPES", "FrameBatch", "Ready", "Recipe", "floor", "pymanopt_momentum", "recipe"]

LR = 1e-3


@dataclass(frozen=True)
class FrameBatch:
    """Frames (B, n, p) with orthonormal columns, and gradients of the same shape.

    Example:
        >>> batch = FrameBatch.random((2, 5, 3))
        >>> batch.frames.shape, batch.gradients.dtype
        (torch.Size([2, 5, 3]), torch.float32)
    """

    frames: Tensor
    gradients: Tensor

    @classmethod
    def random(
        cls, shape: tuple[int, int, int], *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> FrameBatch:
        """Haar-distributed frames and Gaussian gradients, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        frames = Stiefel().random_point(*shape, dtype=dtype, generator=generator)
        gradients = 0.03 * torch.randn(shape, dtype=dtype, generator=generator)
        return cls(frames.to(device), gradients.to(device))


@dataclass(frozen=True)
class Ready:
    """A contender on a batch of its own.

    Attributes:
        step: what is timed.
        points: where its frames are now, (B, n, p); None if its points are not frames.

    Example:
        >>> ready = floor(FrameBatch.random((2, 5, 3)))
        >>> ready.step().shape, ready.points()
        (torch.Size([2, 5, 3]), None)
    """

    step: Callable[[], object]
    points: Callable[[], Tensor | None]


@dataclass(frozen=True)
class Recipe:
    """How an optimizer takes part.

    Attributes:
        name: of the contender.
        parameter: makes a parameter of one frame (n, p), or of all (B, n, p) if not ``separate``.
        optimizer: makes the optimizer of a list of parameters.
        separate: a parameter a frame, as in a model that stores them so.
        constrained: the points stay orthonormal.
        needs: the peer that must be installed.

    Example:
        >>> ready = recipe("ours").prepare(FrameBatch.random((2, 5, 3)))
        >>> _ = ready.step()
        >>> ready.points().shape
        torch.Size([2, 5, 3])
    """

    name: str
    parameter: Callable[[Tensor], nn.Parameter]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    separate: bool = True
    constrained: bool = True
    needs: str | None = None

    def parameters(self, batch: FrameBatch) -> list[nn.Parameter]:
        """Parameters of this contender alone, with their gradients."""
        if self.separate:
            pairs = list(zip(batch.frames.unbind(0), batch.gradients.unbind(0), strict=True))
        else:
            pairs = [(batch.frames, batch.gradients)]
        params = []
        for frame, gradient in pairs:
            param = self.parameter(frame.clone())
            param.grad = gradient.clone()
            params.append(param)
        return params

    def prepare(self, batch: FrameBatch) -> Ready:
        """The contender on a copy of the batch."""
        params = self.parameters(batch)

        def points() -> Tensor | None:
            if not self.constrained:
                return None
            values = [p.detach() for p in params]
            return torch.stack(values) if self.separate else values[0]

        return Ready(self.optimizer(params).step, points)


def _ours(name: str, manifold: Manifold, make: Callable[..., Any] = RiemannianAdam, separate: bool = True) -> Recipe:
    def parameter(x: Tensor) -> nn.Parameter:
        return ManifoldParameter(x, manifold)

    return Recipe(name, parameter, lambda params: make(params, lr=LR), separate)


def _geoopt(name: str, manifold: str) -> Recipe:
    def parameter(x: Tensor) -> nn.Parameter:
        geoopt = peer("geoopt")
        return geoopt.ManifoldParameter(x, manifold=getattr(geoopt, manifold)())

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return peer("geoopt").optim.RiemannianAdam(params, lr=LR)

    return Recipe(name, parameter, optimizer, needs="geoopt")


# geoopt's canonical step solves an n×n system a frame. On one batched parameter that is a batched LU, which torch 2.13
# gets wrong on some processors, so it takes part with a parameter a frame only. Its retraction is a Cayley transform
# of the right cost and of the wrong speed: the curve's derivative is not the step.
RECIPES = (
    _ours("ours", Stiefel()),
    _ours("ours, one parameter", Stiefel(), separate=False),
    _ours("ours, canonical", Stiefel(CanonicalMetric())),
    _ours("ours, Cayley", Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())),
    _ours("RiemannianSGD", Stiefel(), lambda params, lr: RiemannianSGD(params, lr=lr, momentum=0.9)),
    _ours("SpectralDescent", Stiefel(), SpectralDescent),
    _geoopt("geoopt Euclidean", "EuclideanStiefel"),
    _geoopt("geoopt canonical", "CanonicalStiefel"),
    Recipe(
        "AdamW fused",
        nn.Parameter,
        lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
        constrained=False,
    ),
)


def recipe(name: str) -> Recipe:
    """The recipe of a contender.

    Raises:
        KeyError: no contender has the name.

    Example:
        >>> recipe("geoopt Euclidean").needs
        'geoopt'
    """
    for candidate in RECIPES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no contender is called {name!r}; there are {', '.join(repr(r.name) for r in RECIPES)}")


def floor(batch: FrameBatch) -> Ready:
    """X(XᵀX): a Gram matrix and an application, which no retraction can do without.

    Example:
        >>> batch = FrameBatch.random((2, 5, 3))
        >>> torch.allclose(floor(batch).step(), batch.frames, atol=1e-5)
        True
    """
    x = batch.frames.clone()

    @torch.no_grad()
    def step() -> Tensor:
        return x @ (x.mT @ x)

    return Ready(step, lambda: None)


def pymanopt_momentum(batch: FrameBatch) -> Ready:
    """pymanopt's Stiefel geometry in numpy, frame by frame: project the gradient, retract (QR), transport a momentum.

    It has no Adam; this is gradient descent with momentum, which does less arithmetic than a step of Adam.

    Raises:
        ImportError: pymanopt is not installed.

    Example:
        >>> ready = pymanopt_momentum(FrameBatch.random((2, 5, 3)))
        >>> ready.step()
        >>> ready.points().shape
        torch.Size([2, 5, 3])
    """
    count, n, p = batch.frames.shape
    manifold = peer("pymanopt.manifolds").Stiefel(n, p)
    x, g = (np.array(t.cpu().numpy()) for t in (batch.frames, batch.gradients))
    m = np.zeros_like(x)

    def step() -> None:
        for i in range(count):
            direction = 0.9 * m[i] + 0.1 * manifold.projection(x[i], g[i])
            y = manifold.retraction(x[i], -LR * direction)
            m[i] = manifold.transport(x[i], y, direction)
            x[i] = y

    return Ready(step, lambda: torch.from_numpy(x))
