"""Pictures of weight decay: what theory predicts over what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ._pictures import OKABE_ITO, legend, log_axis, unit
from ._result import axes

if TYPE_CHECKING:
    from .weight_decay import DecayArm, WeightDecayDrift

__all__ = ["plot_decay", "plot_soft_threshold"]

# less than this share of the largest is rounding
_ZERO = 1e-10
# a curve of frames below this share of all plain ones would leave a logarithmic axis to the empty space between
_FAR_BELOW = 1e-3


def plot_decay(found: WeightDecayDrift, quantity: str = "balance", ax: Any = None) -> Any:
    """A quantity of every run against the step, median over heads with the band of all, over its prediction.

    Crosses are predictions, dotted the limit of small steps, dashed lines frames. Runs that do not differ are one line,
    with the names of all. On a logarithmic axis frames far below the plain matrices lie at the bottom, and say where
    they would be.

    Args:
        quantity: of :class:`~geodescent.analysis.DecayArm`, such as "balance", "query_norm", "query_condition" or
            "spectrum", of which the mean over directions is drawn.

    Example:
        >>> import torch
        >>> from geodescent.analysis import weight_decay_drift
        >>> found = weight_decay_drift(torch.nn.MultiheadAttention(8, 2), lr=0.1, weight_decay=0.5, steps=5)
        >>> plot_decay(found, "query_norm").get_xlabel()
        'step'
    """
    ax = axes(ax)
    groups = _alike(found.arms, quantity)
    curves = [_per_head(getattr(runs[0], quantity)) for runs in groups]
    largest = max((float(c[np.isfinite(c)].max(initial=0.0)) for c in curves), default=0.0)
    plain = [c for runs, c in zip(groups, curves, strict=True) if not runs[0].constrained]
    least = min((float(c[np.isfinite(c)].min(initial=np.inf)) for c in plain), default=0.0)
    below = [
        bool((c <= _ZERO * largest).all()) or (runs[0].constrained and bool((c < _FAR_BELOW * least).all()))
        for runs, c in zip(groups, curves, strict=True)
    ]
    seen = [c for c, is_below in zip(curves, below, strict=True) if not is_below]
    log = bool(seen) and all(bool((c > 0).all()) for c in seen)
    bottom = min(float(c.min()) for c in seen) / 3 if log else 0.0
    crosses = dots = None
    for runs, values, is_below in zip(groups, curves, below, strict=True):
        arm, steps = runs[0], runs[0].steps.numpy()
        place = next(i for i, other in enumerate(found.arms) if other is arm) // 2
        # lines that run over each other stay visible below the thinner ones
        color = "black" if len(runs) == _same_kind(found, arm) else OKABE_ITO[place % len(OKABE_ITO)]
        look = {"color": color, "linestyle": "--" if arm.constrained else "-"}
        width = 3.6 - 0.7 * min(place, 3)
        label = _label(found, runs)
        if is_below and log:
            where = "zero" if values.max() <= _ZERO * largest else f"below {values.max():.0e}"
            ax.plot(steps, np.full(len(steps), bottom), linewidth=width, label=f"{label} ({where})", **look)
            continue
        ax.plot(steps, np.median(values, 1), linewidth=width, label=label, **look)
        if values.shape[1] > 1:
            ax.fill_between(steps, values.min(1), values.max(1), color=color, alpha=0.12, linewidth=0)
        if quantity in arm.predictions:
            expected = np.median(_per_head(arm.predictions[quantity]), 1)
            some = np.unique(np.linspace(0, len(steps) - 1, 8).round().astype(int))
            marks = ax.plot(
                steps[some], expected[some], "x", color="0.15", markersize=5, markeredgewidth=1.2, zorder=3
            )[0]
            crosses = crosses or marks
        if quantity in arm.limits and arm.limits[quantity].ndim == getattr(arm, quantity).ndim:
            expected = np.median(_per_head(arm.limits[quantity]), 1)
            line = ax.plot(steps, expected, ":", color="black", linewidth=1, zorder=2.5)[0]
            dots = dots or line
    if crosses is not None:
        crosses.set_label("predicted")
    if dots is not None:
        dots.set_label("small steps: exp(−2·lr·λ·t)")
    if log:
        log_axis(ax, np.concatenate([c.ravel() for c in seen]))
    ax.set_xlabel("step")
    ax.set_ylabel(unit(quantity))
    # many names would hide the lines
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
    legend(ax, **(above if len(ax.get_legend_handles_labels()[1]) > 7 else {}))
    return ax


def plot_soft_threshold(found: WeightDecayDrift, ax: Any = None) -> Any:
    """Each singular value of each head's circuit at the end against that at the start, over what theory says of it.

    With decay alone all shrink alike, a line through 0; with a gradient that holds the circuit λ comes off each, and
    what is below λ vanishes; on frames all stay at 1. For :func:`~geodescent.analysis.weight_decay_drift` with its
    default loss; with another the lines of the gradient are left out.

    Example:
        >>> import torch
        >>> from geodescent.analysis import weight_decay_drift
        >>> found = weight_decay_drift(torch.nn.MultiheadAttention(8, 2), lr=0.1, weight_decay=0.1, steps=200)
        >>> plot_soft_threshold(found).get_xlabel()
        'singular value of W_Q W_Kᵀ at the start'
    """
    ax = axes(ax)
    crosses = None
    for name, color, marker in (("decay", OKABE_ITO[0], "o"), ("decay and gradient", OKABE_ITO[2], "s")):
        for constrained in (False, True):
            arm = next((a for a in found.arms if a.name == name and a.constrained == constrained), None)
            if arm is None:
                continue
            start, end = arm.spectrum[0].flatten().numpy(), arm.spectrum[-1].flatten().numpy()
            shape = {"marker": "D" if constrained else marker, "alpha": 0.35 if constrained else 0.6}
            ax.plot(start, end, linestyle="none", color=color, markersize=5, label=arm.label, **shape)
            if "spectrum" in arm.predictions:
                order = np.argsort(start)
                expected = arm.predictions["spectrum"][-1].flatten().numpy()
                some = order[np.unique(np.linspace(0, len(order) - 1, 12).round().astype(int))]
                crosses = ax.plot(
                    start[some], expected[some], "x", color="0.15", markersize=5, markeredgewidth=1.2, zorder=3
                )[0]
            if "spectrum" in arm.limits:
                knots = np.array([0.0, found.weight_decay, max(found.weight_decay, float(start.max()))])
                ax.plot(knots, knots - np.minimum(knots, found.weight_decay), ":", color="black", linewidth=1.2)
                ax.lines[-1].set_label("at the end of time: max(σ − λ, 0)")
    if crosses is not None:
        crosses.set_label("predicted")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=-0.02 * ax.get_ylim()[1])
    ax.set_xlabel("singular value of W_Q W_Kᵀ at the start")
    ax.set_ylabel(f"singular value after {int(found.arms[0].steps[-1])} steps")
    legend(ax)
    return ax


def _alike(arms: tuple[DecayArm, ...], quantity: str) -> list[list[DecayArm]]:
    """Runs of one kind whose measurements do not differ, in the order of their first."""
    groups: list[list[DecayArm]] = []
    for arm in arms:
        values = getattr(arm, quantity)
        for group in groups:
            other = getattr(group[0], quantity)
            same = group[0].constrained == arm.constrained and other.shape == values.shape
            if same and np.allclose(values, other, rtol=1e-9, atol=_ZERO, equal_nan=True):
                group.append(arm)
                break
        else:
            groups.append([arm])
    return groups


def _same_kind(found: WeightDecayDrift, arm: DecayArm) -> int:
    return sum(other.constrained == arm.constrained for other in found.arms)


def _label(found: WeightDecayDrift, runs: list[DecayArm]) -> str:
    if len(runs) == 1:
        return runs[0].label
    kind = runs[0].label.rpartition(", ")[2]
    if len(runs) == _same_kind(found, runs[0]):
        return f"all runs, {kind}"
    return f"{' / '.join(arm.name for arm in runs)}, {kind}"


def _per_head(values: Tensor) -> np.ndarray:
    return (values if values.ndim == 2 else values.mean(-1)).numpy()
