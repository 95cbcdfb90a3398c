"""Steepest descent in the spectral norm on the tangent space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from ..manifolds import Stiefel, spectral_steepest_descent
from .base import ManifoldOptimizer, manifold_of
from .functional import within_trust_radius
from .plain import adamw_step
from .stacking import Stack

__all__ = ["SpectralDescent"]

STEP_SCALES = ("spectral", "rms")


class SpectralDescent(ManifoldOptimizer):
    r"""Steepest descent in the spectral norm on the tangent space of the Stiefel manifold ("manifold Muon").

    Bernstein, "Modular manifolds" (2025): a frame moves along the tangent vector of spectral norm at most 1 that
    descends the most along the momentum m,

    .. math::
        m = μ\,T(m) + (1-μ) ξ, \quad Δ = \arg\min_{‖Δ‖_2 ≤ 1,\ Δ \text{ tangent}} ⟨m, Δ⟩, \quad
        x ← R_x(\mathrm{lr}\, Δ),

    ξ the Riemannian gradient and T the transport along the last step. Δ has a closed form, see
    :func:`~geodescent.manifolds.spectral_steepest_descent`, which bounds its own error by duality:
    :meth:`relative_gaps`. Plain parameters take AdamW's steps.

    What it claims (:attr:`claims`): the first step is steepest descent in the spectral norm; steps are scale-free, well
    conditioned, O(n)-equivariant and covariant under the right action of O(p), and weight decay does not touch a frame.
    It is not steepest descent in the metric's norm.

    Args:
        params: parameters, named parameters, or groups; which are frames: see :class:`RiemannianAdam`. Frames must lie
            on :class:`~geodescent.manifolds.Stiefel` with the Euclidean metric.
        lr: learning rate: the spectral norm of a frame's step, see ``step_scale``.
        momentum: μ.
        betas, eps, weight_decay, amsgrad: of the plain parameters, as in AdamW. Decay has no effect on a frame.
        nesterov: descend along (1−μ)ξ + μm instead of m.
        maximize: maximize the objective.
        step_scale: "spectral": a step has spectral norm lr; "rms": its root mean square entry is lr, as about that of
            AdamW's steps is.
        trust_radius: the longest step a frame may take, in the metric's norm; None for no bound.
        nonfinite: "raise" or "skip", see :class:`RiemannianAdam`.
        foreach: passed on to AdamW's arithmetic for the plain parameters.

    Raises:
        ValueError: an argument is out of its range; the error names it.
        NotOnManifoldError: a parameter is off its manifold.

    Example:
        >>> import torch
        >>> from geodescent.manifolds import ManifoldParameter, Stiefel
        >>> p = ManifoldParameter(torch.eye(6, 2), Stiefel())
        >>> optimizer = SpectralDescent([p], lr=0.1)
        >>> (p * torch.arange(12.0).view(6, 2)).sum().backward()
        >>> optimizer.step()
        >>> bool(optimizer.relative_gaps()[0].max() < 1e-8)
        True
    """

    _choices: ClassVar = {"step_scale": STEP_SCALES}

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        amsgrad: bool = False,
        maximize: bool = False,
        step_scale: str = "spectral",
        trust_radius: float | None = None,
        nonfinite: str = "raise",
        foreach: bool | None = None,
    ) -> None:
        self._gaps: dict[int, tuple[Tensor, Tensor]] = {}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "step_scale": step_scale,
            "trust_radius": trust_radius,
            "nonfinite": nonfinite,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for i, p in enumerate(group["params"]):
            manifold = manifold_of(p, group)
            if manifold is not None and not (isinstance(manifold, Stiefel) and manifold.metric == Stiefel().metric):
                raise ValueError(
                    f"{self._name(group, i)} lies on {manifold!r}; SpectralDescent steps frames on Stiefel with "
                    "EuclideanMetric()"
                )

    @property
    def claims(self) -> frozenset[str]:
        """The certificates of ``geodescent.analysis`` that this optimizer claims to hold."""
        return self._held(
            {
                "spectral steepest descent",
                "scale-free",
                "conditioning",
                "equivariance",
                "gauge covariance",
                "weight decay",
            }
        )

    def relative_gaps(self) -> list[Tensor]:
        """The relative duality gaps of the last step, a tensor (*batch) for each parameter that has taken one.

        The step's descent is within this fraction of the best there is.
        """
        return [gap.view(p.shape[:-2]) for p, gap in self._gaps.values()]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gaps = {}

    def _trailing_shapes(self, n: int, p: int, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": (n, p)}

    def _stack_step(self, stack: Stack, grads: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        group, manifold, x = stack.group, stack.manifold, stack.all_points()
        xi = manifold.egrad_to_rgrad(x, grads)
        m = stack.arrays["exp_avg"].lerp(xi, 1 - group["momentum"])
        along = m.lerp(xi, 1 - group["momentum"]) if group["nesterov"] else m
        solved = spectral_steepest_descent(x, along)
        step = solved.step.to(x.dtype)
        if group["step_scale"] == "rms":
            size = step.square().mean((-2, -1), keepdim=True).sqrt()
            step = step / size.where(size > 0, 1.0)
        eta, capped = within_trust_radius(manifold, x, float(group["lr"]) * step, group["trust_radius"])
        for p, gap in zip(stack.params, solved.relative_gap.split(stack.counts), strict=True):
            self._gaps[id(p)] = (p, gap)
        x, (m,) = manifold.retract_transport(x, eta, m)
        return x, {"exp_avg": m}, capped

    def _step_plain(self, params: list[Tensor], group: dict[str, Any]) -> None:
        adamw_step(self.state, params, group)
