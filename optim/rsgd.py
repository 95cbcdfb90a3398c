"""Riemannian stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .base import ManifoldOptimizer
from .functional import within_trust_radius
from .plain import sgd_step
from .stacking import Stack

__all__ = ["RiemannianSGD"]


class RiemannianSGD(ManifoldOptimizer):
    r"""Stochastic gradient descent on manifolds; plain parameters are stepped exactly as :class:`torch.optim.SGD` does.

    Bonnabel, "Stochastic gradient descent on Riemannian manifolds" (2013), with momentum as in torch: for a frame,
    with ξ the Riemannian gradient, T the transport along the last step and d the direction,

    .. math::
        m = μ\,T(m) + (1-κ) ξ, \quad d = m \ \text{or, with Nesterov,}\ ξ + μ m, \quad x ← R_x(-\mathrm{lr}\, d),

    κ the dampening; the first step has m = ξ. The momentum in the state is tangent at the current point.

    What it claims (:attr:`claims`): the first step, and every step without momentum, is steepest descent in the
    metric's norm; steps are well conditioned for their length, O(n)-equivariant and covariant under the right
    action of O(p), and weight decay does not touch a frame. They are not scale-free: a step is proportional to the
    gradient.

    Args:
        params: parameters, named parameters, or groups; which are frames: see :class:`RiemannianAdam`.
        lr: learning rate.
        momentum: μ. dampening: κ. nesterov: needs a momentum and no dampening.
        weight_decay: L2 decay of the plain parameters, as in torch. It has no effect on a frame, by theorem.
        maximize: maximize the objective.
        trust_radius: the longest step a frame may take, in the metric's norm; None for no bound.
        nonfinite: "raise" or "skip", see :class:`RiemannianAdam`.
        foreach: passed on to torch's SGD for the plain parameters.

    Raises:
        ValueError: an argument is out of its range; the error names it.
        NotOnManifoldError: a parameter is off its manifold.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import ManifoldParameter, Stiefel
        >>> p = ManifoldParameter(torch.eye(5, 2), Stiefel())
        >>> optimizer = RiemannianSGD([p], lr=0.1, momentum=0.9)
        >>> p[4, 0].backward()
        >>> optimizer.step()
        >>> round(float(p[4, 0].detach()), 3)
        -0.1
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        trust_radius: float | None = None,
        nonfinite: str = "raise",
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "trust_radius": trust_radius,
            "nonfinite": nonfinite,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov=True needs a momentum above 0 and no dampening")

    @property
    def claims(self) -> frozenset[str]:
        """The certificates of ``geodescent.analysis`` that this optimizer claims to hold."""
        return self._held({"steepest descent", "conditioning", "equivariance", "gauge covariance", "weight decay"})

    def _trailing_shapes(self, n: int, p: int, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"momentum_buffer": (n, p)} if group["momentum"] != 0 else {}

    def _stack_step(self, stack: Stack, grads: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        group, manifold, x = stack.group, stack.manifold, stack.all_points()
        direction = xi = manifold.egrad_to_rgrad(x, grads)
        momentum = None
        if group["momentum"] != 0:
            momentum = xi
            if stack.step > 0:
                momentum = group["momentum"] * stack.arrays["momentum_buffer"] + (1 - group["dampening"]) * xi
            direction = xi + group["momentum"] * momentum if group["nesterov"] else momentum
        eta, capped = within_trust_radius(manifold, x, -float(group["lr"]) * direction, group["trust_radius"])
        if momentum is None:
            return manifold.retract(x, eta), {}, capped
        x, (momentum,) = manifold.retract_transport(x, eta, momentum)
        return x, {"momentum_buffer": momentum}, capped

    @torch.no_grad()
    def _step_plain(self, params: list[Tensor], group: dict[str, Any]) -> None:
        sgd_step(self.state, params, group)
