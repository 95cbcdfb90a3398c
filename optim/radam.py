"""Riemannian Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ManifoldOptimizer, manifold_of
from .capturable import capturable_adam_step, check_capturable, frame_lr
from .functional import SECOND_MOMENTS, STEP_SCALES, riemannian_adam_step, second_moment_shape
from .fused import AdamOptions, fused_adam_step, has_fused_step
from .plain import adamw_step
from .stacking import Stack

__all__ = ["RiemannianAdam"]


class RiemannianAdam(ManifoldOptimizer):
    r"""Adam on manifolds, with plain parameters stepped exactly as :class:`torch.optim.AdamW` steps them.

    Bécigneul & Ganea, "Riemannian adaptive optimization methods" (2019), in the form of Stiefel Attention (2026):
    for a frame (the last two dimensions of a parameter; the others are a batch of independent frames), with ξ the
    Riemannian gradient and norms in the manifold's metric,

    .. math::
        m = β_1 m + (1-β_1) ξ, \quad v = β_2 v + (1-β_2) ‖ξ‖²/s, \quad
        η = -\mathrm{lr}\, \hat m / (\sqrt{\hat v} + ε), \quad η ← η \min(1, τ/‖η‖), \quad x ← R_x(η), \quad m ← T(m).

    Which parameters are frames: :class:`~geodescent.manifolds.ManifoldParameter`, and every parameter of a group that
    names its manifold, ``{"params": [...], "manifold": Stiefel()}``.

    Its state is one moment of a frame's size, tangent at the current point after every step, and one scalar a frame:
    half of Adam's. Frames in float16 and bfloat16 are stepped from float32 copies in the state.

    What it claims, for ``geodescent certify`` to check (:attr:`claims`): steps are scale-free and well conditioned and
    weight decay does not touch a frame, always (the last not with ``decay="fused"``); the first step (and every step
    with β₁ = 0) is steepest descent in the metric's norm with ``second_moment="frame"``; steps are O(n)-equivariant
    with all but "element", and covariant under the right action of O(p) with "frame" and "gram" (not with the QR
    retraction). Scale-free is meant for ε = 0, and otherwise for gradients well above ε.

    Args:
        params: parameters, named parameters, or groups, as for every torch optimizer.
        lr: learning rate. What it means for a frame is set by ``step_scale``.
        betas: decay rates of the two moments.
        eps: added to the denominator. 0 is allowed, and 0/0 is a step of 0.
        weight_decay: decoupled decay of the plain parameters, as in AdamW. It has no effect on a frame whatever its
            value, by theorem: the gradient λX of the decay is normal to the manifold, P(λX) = 0. Decay that is set
            on nothing but frames is warned about once.
        amsgrad: normalize by the running maximum of the second moment.
        maximize: maximize the objective.
        second_moment: "frame", one scalar a frame; "column", one a column; "element", one an element, which breaks
            the O(n)-equivariance and is there for ablations; "gram", the p×p matrix R = EMA(ξᵀξ), by which the
            direction is m R^(−1/2), projected: a preconditioner that is covariant under the change of a head's basis,
            X → XO with O in O(p), as is "frame", while columns and elements are not.
        step_scale: "rms": an element moves by about lr, as AdamW's elements do. "frobenius": a frame moves by about lr
            in norm, √(np) times less, as geoopt's frames do.
        trust_radius: the longest step a frame may take, in the metric's norm; None for no bound.
        decay: "decoupled", or "fused" for study: weight decay taken into a frame's step before the retraction, which
            is the point nearest to (1 − lr·λ)x + η. As decay is normal to the manifold this only lengthens the step:
            it equals the learning rate lr/(1 − lr·λ), so lr·λ ≥ 1 is refused. Plain parameters decay as in AdamW.
        nonfinite: what to do about NaN or infinite gradients, and gradients of frames so large that their step
            overflows. "raise": a ``ValueError`` naming the parameter, before anything is touched. "skip": the whole
            step changes nothing.
        pool: with "gram", average R over the parameters of a group, frame by frame, as for the query and key frames
            of one layer, which share a basis; they must have the same shape. An option of groups.
        foreach: passed on to AdamW's arithmetic for the plain parameters. Frames are always stacked.
        capturable: step without waiting for the device and without branches on data, so that :meth:`step` can be
            captured in a CUDA graph and replayed. The step counters are then tensors on the parameters' device, and so
            must be an ``lr`` that is to change between replays. For frames on Stiefel with an
            :class:`~geodescent.manifolds.AlphaMetric`, the polar retraction and projection transport,
            ``second_moment="frame"`` and a ``trust_radius``, up to 1.4 in float64 and 2.9 in float32 for α ≤ 0;
            ``nonfinite`` must be "skip", which is decided on the device, for all parameters alike. All parameters are
            on one device, none sharded; other combinations are refused by name. A step does the arithmetic of the
            worst case within the trust radius, so a smaller one is cheaper, and without a graph the ordinary step is
            faster. Before capture take a step, which makes the state, with the gradients present that will be there
            later, in tensors that stay. Capture anew after ``load_state_dict``, which keeps this option, and
            ``nonfinite`` too where the state was saved with another ``capturable``.

    Raises:
        ValueError: an argument is out of its range; the error names it.
        NotOnManifoldError: a parameter is off its manifold; it is not silently projected.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        second_moment: str = "frame",
        step_scale: str = "rms",
        trust_radius: float | None = 1.0,
        decay: str = "decoupled",
        pool: bool = False,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "second_moment": second_moment,
            "step_scale": step_scale,
            "trust_radius": trust_radius,
            "decay": decay,
            "pool": pool,
            "nonfinite": nonfinite,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    _choices: ClassVar = {
        "second_moment": SECOND_MOMENTS,
        "step_scale": STEP_SCALES,
        "decay": ("decoupled", "fused"),
    }

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if {g["capturable"] for g in self.param_groups} == {True, False}:
            raise ValueError("capturable must be the same in all groups: a step is captured whole or not at all")
        if group["capturable"]:
            manifolds = [manifold_of(p, group) for p in group["params"]]
            check_capturable(group, manifolds, [self._name(group, i) for i in range(len(manifolds))])
        if group["second_moment"] == "gram" and group["amsgrad"]:
            raise ValueError('amsgrad must be False with second_moment="gram": matrices have no largest one')
        if group["pool"]:
            shapes = sorted({tuple(p.shape) for p in group["params"]})
            if group["second_moment"] != "gram" or len(shapes) != 1:
                raise ValueError(
                    f'pool=True needs second_moment="gram" and parameters of one shape, found '
                    f"{group['second_moment']!r} and {shapes}; put what shares a basis in a group of its own"
                )

    @property
    def claims(self) -> frozenset[str]:
        """The certificates of ``geodescent.analysis`` that every group of this optimizer claims to hold."""
        claims = {
            "scale-free",
            "conditioning",
            "weight decay",
            "steepest descent",
            "equivariance",
            "gauge covariance",
        }
        for group in self.param_groups:
            if group["second_moment"] != "frame":
                claims.discard("steepest descent")
            if group["second_moment"] == "element":
                claims.discard("equivariance")
            if group["second_moment"] in ("column", "element"):
                claims.discard("gauge covariance")
            if group["decay"] == "fused":
                claims.discard("weight decay")
        return self._held(claims)

    # --- step ---------------------------------------------------------------------------------------------------

    def _trailing_shapes(self, n: int, p: int, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        square = second_moment_shape(n, p, group["second_moment"])
        shapes = {"exp_avg": (n, p), "exp_avg_sq": square}
        return {**shapes, "max_exp_avg_sq": square} if group["amsgrad"] else shapes

    def _step_sorted(self, stacks: list[Stack], plain: list[tuple[list[Tensor], dict[str, Any]]]) -> None:
        if self.param_groups[0].get("capturable"):
            capturable_adam_step(stacks, plain, self.state)
        else:
            super()._step_sorted(stacks, plain)

    def _has_fast_step(self, stack: Stack) -> bool:
        return has_fused_step(stack.manifold, stack.group["second_moment"])

    def _fast_step(self, stack: Stack, grads: Tensor | None, norms: Tensor) -> None:
        names = ("betas", "eps", "amsgrad", "maximize", "step_scale", "trust_radius")
        options = {name: stack.group[name] for name in names}
        fused_adam_step(stack, grads, norms, AdamOptions(step=stack.step + 1, lr=_frame_lr(stack.group), **options))

    def _stack_step(self, stack: Stack, grads: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        group, arrays = stack.group, stack.arrays
        names = ("betas", "eps", "second_moment", "step_scale", "trust_radius")
        result = riemannian_adam_step(
            stack.manifold,
            stack.all_points(),
            grads,
            arrays["exp_avg"],
            arrays["exp_avg_sq"],
            arrays.get("max_exp_avg_sq"),
            stack.step + 1,
            lr=_frame_lr(group),
            pooled=len(stack.params) if group["pool"] else 1,
            **{name: group[name] for name in names},
        )
        keys = self._trailing_shapes(*stack.shape, group)
        return result.x, {key: getattr(result, key) for key in keys}, result.capped

    def _step_plain(self, params: list[Tensor], group: dict[str, Any]) -> None:
        adamw_step(self.state, params, group)

    # --- state --------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for every optimizer here; ``capturable`` stays as it is, and counters go to the device that it asks for.

        Raises:
            ValueError: the state does not fit; nothing was loaded.
        """
        groups = list(state_dict["param_groups"])
        for i, (mine, saved) in enumerate(zip(self.param_groups, groups, strict=False)):
            groups[i] = {**saved, "capturable": mine["capturable"]}
            if saved.get("capturable", False) != mine["capturable"]:
                groups[i]["nonfinite"] = mine["nonfinite"]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for group in self.param_groups:
            capturable = group["capturable"]
            for p in group["params"]:
                state = self.state.get(p, {})
                for key in ("step", "capped"):
                    if key in state:
                        state[key] = torch.as_tensor(state[key]).to(p.device if capturable else "cpu", torch.float32)
            if capturable and isinstance(group["lr"], Tensor) and group["params"]:
                group["lr"] = group["lr"].to(group["params"][0].device)


def _frame_lr(group: dict[str, Any]) -> float:
    return float(frame_lr(float(group["lr"]), group))
