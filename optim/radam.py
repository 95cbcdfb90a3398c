"""Riemannian Adam."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..manifolds import Euclidean, Manifold, ManifoldParameter
from .functional import SECOND_MOMENTS, STEP_SCALES, AdamStep, riemannian_adam_step, second_moment_shape

__all__ = ["RiemannianAdam"]

_HALF = (torch.float16, torch.bfloat16)


class RiemannianAdam(torch.optim.Optimizer):
    r"""Adam on manifolds, with plain parameters stepped exactly as :class:`torch.optim.AdamW` steps them.

    Bécigneul & Ganea, "Riemannian adaptive optimization methods" (2019), in the form of Stiefel Attention (2026):
    for a frame (the last two dimensions of a parameter; the others are a batch of independent frames), with ξ the
    Riemannian gradient and norms in the manifold's metric,

    .. math::
        m = β_1 m + (1-β_1) ξ, \quad v = β_2 v + (1-β_2) ‖ξ‖²/s, \quad
        η = -\mathrm{lr}\, \hat m / (\sqrt{\hat v} + ε), \quad η ← η \min(1, τ/‖η‖), \quad x ← R_x(η), \quad m ← T(m).

    Which parameters are frames: :class:`~geodescent.manifolds.ManifoldParameter`, and every parameter of a group that
    names its manifold, ``{"params": [...], "manifold": Stiefel()}``.

    What it claims, for ``geodescent certify`` to check (:attr:`claims`): steps are scale-free and well conditioned and
    weight decay does not touch a frame, always; the first step (and every step with β₁ = 0) is steepest descent in
    the metric's norm with ``second_moment="frame"``; steps are O(n)-equivariant with "frame" and "column". Scale-free
    is meant for ε = 0, and otherwise for gradients well above ε.

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
            the O(n)-equivariance and is there for ablations.
        step_scale: "rms": an element moves by about lr, as AdamW's elements do. "frobenius": a frame moves by about lr
            in norm, √(np) times less, as geoopt's frames do.
        trust_radius: the longest step a frame may take, in the metric's norm; None for no bound.
        decay: "decoupled" is the only kind there is so far.
        nonfinite: what to do about NaN or infinite gradients, and gradients of frames so large that their step
            overflows. "raise": a ``ValueError`` naming the parameter, before anything is touched. "skip": the whole
            step changes nothing.
        foreach: passed on to AdamW's arithmetic for the plain parameters.
        capturable: must be False; steps cannot be captured in a CUDA graph yet.

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
        nonfinite: str = "raise",
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable must be False: RiemannianAdam cannot be captured in a CUDA graph yet")
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
            "nonfinite": nonfinite,
            "foreach": foreach,
            "manifold": None,
        }
        super().__init__(params, defaults)
        self._warn_of_idle_decay()

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its frames are checked to be on their manifold."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            self._check_frames(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_frames(self, group: dict[str, Any]) -> None:
        for i, p in enumerate(group["params"]):
            manifold = manifold_of(p, group)
            if manifold is None:
                continue
            name = self._name(group, i)
            if p.dtype in _HALF:
                raise ValueError(_half_precision(name, p.dtype))
            if p.ndim < 2 or manifold.ndim != 2:
                raise ValueError(
                    f"{name} lies on {manifold!r}; RiemannianAdam steps points that are matrices (..., n, p), found "
                    f"shape {tuple(p.shape)}"
                )
            manifold.check_point(p.detach(), name=name)

    def _warn_of_idle_decay(self) -> None:
        decayed = [group for group in self.param_groups if group["weight_decay"] != 0]
        idle = [all(manifold_of(p, group) is not None for p in group["params"]) for group in decayed]
        if decayed and all(idle):
            warnings.warn(
                f"weight_decay={decayed[0]['weight_decay']:g} is set only where all parameters are frames, and there "
                "it has no effect: the gradient of the decay is normal to the manifold",
                stacklevel=3,  # the caller of the constructor
            )

    def _name(self, group: dict[str, Any], index: int) -> str:
        names = group.get("param_names")
        where = next((g for g, other in enumerate(self.param_groups) if other is group), 0)
        shape = tuple(group["params"][index].shape)
        return f"parameter {names[index]!r}" if names else f"parameter {index} of group {where}, of shape {shape},"

    @property
    def claims(self) -> frozenset[str]:
        """The certificates of ``geodescent.analysis`` that every group of this optimizer claims to hold."""
        claims = {"scale-free", "conditioning", "weight decay", "steepest descent", "equivariance"}
        for group in self.param_groups:
            if group["second_moment"] != "frame":
                claims.discard("steepest descent")
            if group["second_moment"] == "element":
                claims.discard("equivariance")
        return frozenset(claims)

    def capped_fraction(self) -> float:
        """The share of the frame steps taken so far that the trust radius shortened; NaN where none was taken."""
        capped = taken = 0.0
        for state in self.state.values():
            if "capped" in state:
                capped += float(state["capped"])
                taken += float(state["step"]) * math.prod(state["exp_avg"].shape[:-2])
        return capped / taken if taken else math.nan

    # --- step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: a gradient is not finite, or a frame's step overflows, and ``nonfinite="raise"``; nothing was
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._gradients_are_finite():
            return loss
        # every frame's step is computed before any is taken, so that a step which overflows changes nothing
        plain: list[tuple[list[Tensor], dict[str, Any]]] = []
        frames: list[tuple[Tensor, dict[str, Any], AdamStep]] = []
        for group in self.param_groups:
            params = []
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                manifold = manifold_of(p, group)
                if manifold is None:
                    params.append(p)
                    continue
                result = self._frame_step(p, manifold, group)
                if result is None:
                    if group["nonfinite"] == "skip":
                        return loss
                    raise ValueError(
                        f"the step of {self._name(group, i)} overflows {p.dtype}: its gradient is finite, but too "
                        f"large, up to {float(p.grad.abs().max()):.3g}; nothing was stepped. Clip or scale the "
                        'gradients, or pass nonfinite="skip" to skip such steps'
                    )
                frames.append((p, group, result))
            plain.append((params, group))
        for p, group, result in frames:
            self._take(p, group, result)
        for params, group in plain:
            if params:
                self._step_plain(params, group)
        return loss

    def _gradients_are_finite(self) -> bool:
        """False if the step is to be skipped. All gradients are looked at before any parameter moves."""
        entries = []
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {self._name(group, i)} is sparse, which RiemannianAdam does not support"
                    )
                entries.append((group, i, torch.isfinite(p.grad).all()))
        if not entries or bool(torch.stack([ok.to(entries[0][2].device) for *_, ok in entries]).all()):
            return True
        spoiled = [(g, i) for g, i, ok in entries if not ok]
        strict = [(g, i) for g, i in spoiled if g["nonfinite"] == "raise"]
        if not strict:
            return False
        group, i = strict[0]
        bad = int((~torch.isfinite(group["params"][i].grad)).sum())
        raise ValueError(
            f"the gradient of {self._name(group, i)} has {bad} NaN or infinite entries; nothing was stepped. Pass "
            'nonfinite="skip" to skip such steps'
        )

    def _frame_step(self, p: Tensor, manifold: Manifold, group: dict[str, Any]) -> AdamStep | None:
        """The step of one parameter's frames, not taken yet; None if it is not finite."""
        grad = p.grad
        assert grad is not None
        if p.dtype in _HALF:  # converted after the optimizer was made
            raise ValueError(_half_precision(f"a parameter of shape {tuple(p.shape)}", p.dtype))
        state = self.state.get(p)
        if not state:
            state = self._new_frame_state(p, group)
        try:
            result = riemannian_adam_step(
                manifold,
                p.detach(),
                (-grad if group["maximize"] else grad).to(p.dtype),
                state["exp_avg"],
                state["exp_avg_sq"],
                state["max_exp_avg_sq"] if group["amsgrad"] else None,
                int(state["step"]) + 1,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                second_moment=group["second_moment"],
                step_scale=group["step_scale"],
                trust_radius=group["trust_radius"],
            )
        except ValueError:  # a retraction does not take NaN
            return None
        return result if result.is_finite() else None

    def _new_frame_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        square = p.new_zeros(second_moment_shape(p.shape, group["second_moment"]))
        state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p).detach(), "exp_avg_sq": square}
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = square.clone()
        state["capped"] = torch.tensor(0.0)
        return state

    def _take(self, p: Tensor, group: dict[str, Any], result: AdamStep) -> None:
        # detach(): writing through the ManifoldParameter itself would check the point again
        p.detach().copy_(result.x)
        state = self.state[p]
        if not state:
            state.update(self._new_frame_state(p, group))
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            value = getattr(result, name)
            if value is not None:
                state[name].copy_(value)
        state["capped"] += float(result.capped.sum())

    def _step_plain(self, params: list[Tensor], group: dict[str, Any]) -> None:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                for key in keys:
                    state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        columns = {key: [self.state[p][key] for p in params] for key in keys}
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            columns["exp_avg"],
            columns["exp_avg_sq"],
            columns.get("max_exp_avg_sq", []),
            [self.state[p]["step"] for p in params],
            foreach=group["foreach"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            has_complex=any(torch.is_complex(p) for p in params),
        )


def _half_precision(name: str, dtype: torch.dtype) -> str:
    return (
        f"{name} is a {dtype} frame, and steps smaller than its rounding would be lost; keep frames in float32 and "
        "compute in half precision under torch.autocast"
    )


def manifold_of(p: Tensor, group: dict[str, Any]) -> Manifold | None:
    """The manifold that ``p`` is stepped on: its own, else its group's; None for a plain parameter."""
    manifold = p.manifold if isinstance(p, ManifoldParameter) else group.get("manifold")
    return None if isinstance(manifold, Euclidean) else manifold


def _check_options(group: dict[str, Any]) -> None:
    """Raise a ``ValueError`` that names the option of ``group`` that is out of its range."""

    def need(ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {wanted}, found {group[name]!r}")

    lr, betas, radius = group["lr"], group["betas"], group["trust_radius"]
    if isinstance(lr, Tensor):
        need(lr.numel() == 1, "lr", "a number or a tensor of one element")
    need(0 <= float(lr) < math.inf, "lr", "a finite number of at least 0")
    need(len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)")
    for name in ("eps", "weight_decay"):
        need(0 <= group[name] < math.inf, name, "a finite number of at least 0")
    need(radius is None or radius > 0, "trust_radius", "a positive number, or None for no bound")
    for name, choices in (
        ("second_moment", SECOND_MOMENTS),
        ("step_scale", STEP_SCALES),
        ("decay", ("decoupled",)),
        ("nonfinite", ("raise", "skip")),
    ):
        need(group[name] in choices, name, "one of " + ", ".join(map(repr, choices)))
    need(group["manifold"] is None or isinstance(group["manifold"], Manifold), "manifold", "a Manifold object, or None")
