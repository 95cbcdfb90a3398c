"""What weight decay does to attention geometry, and what the gradient does, constrained and not, beside predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..manifolds import ManifoldParameter, Stiefel
from ._result import Result
from ._screen import median
from .decay_measures import QUANTITIES, follow, read_circuits
from .decay_predictions import Setting, deviations, limits, predictions
from .decay_systems import Circuit, CircuitSystem, ModuleSystem, System

__all__ = ["QUANTITIES", "DecayArm", "WeightDecayDrift", "weight_decay_drift"]

Schedule = Callable[[int], float]


@dataclass(frozen=True, repr=False, eq=False)
class DecayArm(Result):
    """One run. Rows are recorded ``steps``, columns the heads of all layers; ``spectrum`` has the directions third.

    ``query_norm``, ``key_norm``: ‖W‖_F. ``balance``: ‖W_QᵀW_Q + b_Q b_Qᵀ − W_KᵀW_K‖_F, which gradient flow of a loss of
    the logits conserves. ``query_condition``, ``key_condition``: κ₂. ``spectrum``: singular values of W_Q W_Kᵀ.
    ``moved``: √(‖W_Q' − W_Q‖² + ‖W_K' − W_K‖²) over √(‖W_Q‖² + ‖W_K‖²).

    ``predictions``: what theory says of some of these, in the same shapes. ``limits``: what that tends to, as it is
    usually written: "balance" for small steps, e^(−2·lr·λ·t), and "spectrum" (heads, directions) at the end of time,
    the soft threshold. ``deviations`` and ``limit_deviations``: the largest difference from either over the largest
    size of the prediction, or where that is 0, of what the quantity is made of.
    """

    name: str
    constrained: bool
    steps: Tensor
    query_norm: Tensor
    key_norm: Tensor
    balance: Tensor
    query_condition: Tensor
    key_condition: Tensor
    spectrum: Tensor
    moved: Tensor
    predictions: dict[str, Tensor]
    deviations: dict[str, float]
    limits: dict[str, Tensor]
    limit_deviations: dict[str, float]

    _hidden: ClassVar = frozenset(QUANTITIES) | {"steps", "predictions", "limits"}

    @property
    def label(self) -> str:
        return f"{self.name}, {'constrained' if self.constrained else 'plain'}"


@dataclass(frozen=True, repr=False, eq=False)
class WeightDecayDrift(Result):
    """The runs of :func:`weight_decay_drift`, a line each: medians over heads at the end, the largest deviation from a
    prediction of all quantities that have one, and of the spectrum at the end from the soft threshold."""

    lr: float
    weight_decay: float
    cycle: int
    loss: str
    arms: tuple[DecayArm, ...]

    def __getitem__(self, label: str) -> DecayArm:
        """The run of this label, such as "decay, constrained"."""
        for arm in self.arms:
            if arm.label == label:
                return arm
        raise KeyError(f"no run {label!r}, there are {[arm.label for arm in self.arms]}")

    def decay_effect(self, quantity: str, *, constrained: bool = False) -> Tensor:
        """Decay and gradient less gradient alone, from the same start: what is due to decay, step by step."""
        kind = "constrained" if constrained else "plain"
        both, alone = self[f"decay and gradient, {kind}"], self[f"gradient, {kind}"]
        return getattr(both, quantity) - getattr(alone, quantity)

    def _title(self) -> str:
        steps = int(self.arms[0].steps[-1])
        return f"WeightDecayDrift: lr {self.lr:g}, weight decay {self.weight_decay:g}, {steps} steps, {self.loss}"

    def _header(self) -> tuple[str, ...]:
        measured = ("‖Q‖", "‖K‖", "balance", "κ(Q)", "σ₁(QKᵀ)", "σₚ(QKᵀ)", "moved")
        return ("run", *measured, "off prediction", "off threshold")

    def _rows(self) -> list[Any]:
        rows = []
        for arm in self.arms:
            last = (arm.query_norm, arm.key_norm, arm.balance, arm.query_condition)
            ends = (arm.spectrum[..., 0], arm.spectrum[..., -1], arm.moved)
            values = [median(t[-1].tolist()) for t in (*last, *ends)]
            off = max(arm.deviations.values(), default=None), arm.limit_deviations.get("spectrum")
            rows.append((arm.label, *(_short(value) for value in (*values, *off))))
        return rows

    def plot(self, ax: Any = None, quantity: str = "balance") -> Any:
        """``quantity`` of every run over its prediction; see :func:`~geodescent.analysis.pictures.plot_decay`."""
        from .pictures import plot_decay

        return plot_decay(self, quantity, ax)


def _short(value: float | None) -> str | None:
    """Four digits: nine columns of six would not fit a screen."""
    return None if value is None else f"{value:.4g}"


def weight_decay_drift(
    module: Any,
    lr: float,
    weight_decay: float,
    steps: int,
    *,
    loss: Callable[[nn.Module], Tensor] | None = None,
    constrained: nn.Module | None = None,
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None = None,
    cycle: int | None = None,
    records: int = 100,
    **layout: Any,
) -> WeightDecayDrift:
    r"""Run decoupled weight decay on copies of a module's attention: alone, with a gradient, and switched on and off.

    A step is W ← (1 − lr·λ)W − lr·G, on a manifold x ← R_x(−lr(λ·P(x) + grad)). The runs and what theory says of them:

    - **decay**, plain: everything shrinks alike, ‖W‖ by r^t and the circuit by r^{2t}, r = 1 − lr·λ ≈ e^(−lr·λ), which
      no condition number can see. Constrained: nothing happens, since the decay is normal to the manifold, P(x) = 0.
    - **decay and gradient**: a gradient of the logits conserves W_QᵀW_Q − W_KᵀW_K to first order in lr, so decay alone
      acts on it: r^{2t} ≈ e^(−2·lr·λ·t) (Arora, Cohen & Hazan, "On the optimization of deep networks", 2018).
      Constrained: it is 0, the spectrum of a circuit of frames is all ones, and κ = 1, whatever the loss.
    - With the default loss, ½‖W_Q W_Kᵀ − M‖_F² for each head's circuit M at the start, decay is the nuclear norm
      penalty λ‖·‖_* on the circuit, whose minimum has the singular values max(σ − λ, 0) (Srebro, Rennie & Jaakkola,
      "Maximum-margin matrix factorization", 2004). The way there is a logistic curve for each singular value, exact
      for balanced factors (Saxe, McClelland & Ganguli, 2014) and predicted step by step; the threshold is reached
      where lr·λ·t ≫ 1, and last by singular values near λ.
    - **gradient**: the same without decay, so that the difference is due to decay (:meth:`decay_effect`).
    - **cyclic**: decay on for ``cycle`` steps, off for as many, and so on.

    Args:
        module: a module, state dict or checkpoint with attention, as :func:`~geodescent.analysis.attention_geometry`
            takes. It is not changed, and no random numbers are drawn (but by the loss).
        lr, weight_decay: lr·λ must be below 1.
        steps: of every run.
        loss: of a module, such as ``lambda model: model(x, x, x)[0].square().mean()``; ``module`` must then be one. By
            default each head holds its own circuit, as above.
        constrained: the module's twin with frames, for the loss; one that has frames is its own. Without a loss the
            twin's frames are the polar factors of the module's.
        optimizer: (parameters, weight decay) to an optimizer of the module, for the runs with a loss, instead of the
            step above, whose predictions then do not apply.
        cycle: steps of a phase of the cyclic run; by default a fifth of all.
        records: how many steps are measured, about.
        **layout: ``num_heads`` and others, for :func:`~geodescent.analysis.attention_geometry`.

    Raises:
        ValueError: an argument is out of its range; a run that is no longer finite, as with an ``lr`` too large.

    Example:
        >>> import torch
        >>> found = weight_decay_drift(torch.nn.MultiheadAttention(8, 2), lr=0.1, weight_decay=0.5, steps=40)
        >>> plain, frames = found["decay, plain"], found["decay, constrained"]
        >>> bool(plain.query_norm[-1].max() < 0.2 * plain.query_norm[0].min()), float(frames.moved.max()) < 1e-12
        (True, True)
        >>> found["decay and gradient, plain"].deviations["balance"] < 0.05
        True
    """
    if not (lr > 0 and weight_decay >= 0 and lr * weight_decay < 1):
        raise ValueError(f"lr and weight_decay must have 0 < lr, 0 ≤ lr·λ < 1, found {lr} and {weight_decay}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    cycle = max(1, steps // 5) if cycle is None else cycle
    if cycle < 1:
        raise ValueError(f"cycle must be at least 1, found {cycle}")
    if loss is not None and not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch module where a loss is given, found {type(module).__name__}")
    plain = read_circuits(module, layout)
    project = Stiefel().project_point
    frames: list[Circuit] = [(project(q), project(k), None) for q, k, _ in plain]
    every = max(1, steps // max(1, records))
    marks = sorted({*range(0, steps + 1, every), steps})

    def system(is_constrained: bool, with_loss: bool) -> System | None:
        if loss is None or not with_loss:
            start = frames if is_constrained else plain
            return CircuitSystem(start, Stiefel() if is_constrained else None, held=with_loss)
        twin = constrained if is_constrained else module
        has_frames = any(isinstance(p, ManifoldParameter) for p in module.parameters())
        if is_constrained and twin is None and has_frames:
            twin = module
        if twin is None or (not is_constrained and has_frames):
            return None
        return ModuleSystem(copy.deepcopy(twin), loss, optimizer, lambda model: read_circuits(model, layout))

    arms = []
    for name, with_loss, schedule in _schedules(weight_decay, cycle):
        for is_constrained in (False, True):
            run = system(is_constrained, with_loss)
            if run is not None:
                own_rule = optimizer is None or not with_loss
                setting = Setting(with_loss, is_constrained, loss is None, own_rule, lr, schedule, marks)
                arms.append(_arm(name, run, setting))
    what = "each head holding its circuit" if loss is None else "the module's loss"
    return WeightDecayDrift(lr=lr, weight_decay=weight_decay, cycle=cycle, loss=what, arms=tuple(arms))


def _arm(name: str, system: System, setting: Setting) -> DecayArm:
    label = f"{name}, {'constrained' if setting.constrained else 'plain'}"
    measured = follow(system, setting.lr, setting.decay, setting.marks, label)
    predicted, limit = predictions(measured, setting), limits(measured, setting)
    return DecayArm(
        name=name,
        constrained=setting.constrained,
        steps=torch.tensor(setting.marks),
        **measured,
        predictions=predicted,
        deviations=deviations(measured, predicted),
        limits=limit,
        limit_deviations=deviations(measured, limit),
    )


def _schedules(weight_decay: float, cycle: int) -> Iterator[tuple[str, bool, Schedule]]:
    """Name, whether there is a gradient, and the decay of each step, counted from 0."""
    yield "decay", False, lambda _: weight_decay
    yield "gradient", True, lambda _: 0.0
    yield "decay and gradient", True, lambda _: weight_decay
    yield "cyclic", True, lambda t: weight_decay if t // cycle % 2 == 0 else 0.0
