"""Adam with one second moment a head, in the ambient space: for the arms that are scale-free without a manifold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["ScalarAdam"]


class ScalarAdam(torch.optim.Optimizer):
    r"""Adam whose second moment is the mean square of a whole head's gradient:

    .. math::
        m = β_1 m + (1-β_1) g, \quad v = β_2 v + (1-β_2) ‖g‖²/s, \quad w ← (1 - \mathrm{lr}\,λ)\, w
        - \mathrm{lr}\, \hat m / (\sqrt{\hat v} + ε),

    s the entries of a head. It is scale-free and equivariant under rotations of the width, as `RiemannianAdam` is, and
    knows no manifold.

    Args:
        params: parameters or groups, each parameter (heads, n, p) or, as `nn.Linear` stores it, (heads·p, n).
        heads: heads a parameter, an option of groups.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        heads: int = 1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "heads": heads})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.reshape(group["heads"], -1)
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(grad), "v": torch.zeros_like(grad[:, :1])}
                state["step"] += 1
                state["m"].lerp_(grad, 1 - beta1)
                state["v"].lerp_(grad.square().mean(1, keepdim=True), 1 - beta2)
                root = (state["v"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                update = state["m"] / (1 - beta1 ** state["step"]) / root
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view(p.shape), alpha=-group["lr"])
        return loss
