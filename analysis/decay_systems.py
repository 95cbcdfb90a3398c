"""What weight decay is run on: the circuits of heads by themselves, or a whole module with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ..manifolds import Manifold

__all__ = ["CircuitSystem", "ModuleSystem", "System"]

Circuit = tuple[Tensor, Tensor, Tensor | None]


class System(Protocol):
    """Something with query and key factors that takes steps."""

    def circuits(self) -> list[Circuit]:
        """Queries (heads, n, p), keys and query biases of every layer, in float64."""
        ...

    def step(self, lr: float, weight_decay: float) -> None:
        """One step with decoupled decay."""
        ...


class CircuitSystem:
    """Factors by themselves, on ``manifold`` or (None) in Euclidean space.

    ``held``: the loss ½‖W_Q W_Kᵀ − M‖_F² a head, M the circuit at the start; a bias has no gradient there. Its gradient
    needs no n×n matrix: (W_Q W_Kᵀ − M)W_K = W_Q(W_KᵀW_K) − A(BᵀW_K) with M = ABᵀ.
    """

    def __init__(self, start: list[Circuit], manifold: Manifold | None, held: bool) -> None:
        self.start, self.manifold, self.held = start, manifold, held
        self.now = start  # steps make new tensors

    def circuits(self) -> list[Circuit]:
        return self.now

    def step(self, lr: float, weight_decay: float) -> None:
        stepped = []
        for (a, b, _), (q, k, bias) in zip(self.start, self.now, strict=True):
            g_q = g_k = q.new_zeros(())
            if self.held:
                g_q = q @ (k.mT @ k) - a @ (b.mT @ k)
                g_k = k @ (q.mT @ q) - b @ (a.mT @ q)
            bias = None if bias is None else (1 - lr * weight_decay) * bias
            stepped.append((self._move(q, g_q, lr, weight_decay), self._move(k, g_k, lr, weight_decay), bias))
        self.now = stepped

    def _move(self, w: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> Tensor:
        if self.manifold is None:
            return (1 - lr * weight_decay) * w - lr * gradient
        return manifold_step(self.manifold, w, gradient.expand_as(w), lr, weight_decay)


class ModuleSystem:
    """A module that is stepped in place along the gradient of its loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module], Tensor],
        optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None,
        read: Callable[[nn.Module], list[Circuit]],
    ) -> None:
        self.model, self.loss, self.read = model, loss, read
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = None if optimizer is None else optimizer(self.params, 0.0)

    def circuits(self) -> list[Circuit]:
        return self.read(self.model)

    def step(self, lr: float, weight_decay: float) -> None:
        with torch.enable_grad():
            value = self.loss(self.model)
            grads = torch.autograd.grad(value, self.params, allow_unused=True)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = lr, weight_decay
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g
            self.optimizer.step()
            return
        with torch.no_grad():
            for p, g in zip(self.params, grads, strict=True):
                x = p.detach().as_subclass(Tensor)
                gradient = torch.zeros_like(x) if g is None else g.as_subclass(Tensor)
                manifold = getattr(p, "manifold", None)
                if manifold is None:
                    x.mul_(1 - lr * weight_decay).sub_(gradient, alpha=lr)
                else:
                    x.copy_(manifold_step(manifold, x, gradient, lr, weight_decay))


def manifold_step(manifold: Manifold, x: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> Tensor:
    """R_x(−lr(λP(x) + grad)): decay is a step like any other, and what of it is tangent is taken."""
    return manifold.retract(x, -lr * (weight_decay * manifold.project(x, x) + manifold.egrad_to_rgrad(x, gradient)))
