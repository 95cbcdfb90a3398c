"""Plots of a study. Every function draws on the axes it is given; nothing touches pyplot or global settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter

from ..analysis.pictures import OKABE_ITO
from .statistics import PairedDifference

__all__ = ["Curve", "arm_colors", "mean_curve", "plot_curves", "plot_differences", "plot_headline"]

_STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Curve:
    """One run's values against the step. `part` tells curves of one run apart, such as training and validation."""

    arm: str
    seed: int
    part: str
    steps: Sequence[float]
    values: Sequence[float | None]


def arm_colors(arms: Sequence[str]) -> dict[str, str]:
    """A colour an arm, by its place."""
    return {arm: OKABE_ITO[i % len(OKABE_ITO)] for i, arm in enumerate(arms)}


def mean_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and the mean over runs; a run that ended earlier counts with its last value."""
    steps = np.array(sorted({step for curve in curves for step in curve.steps}))
    if not len(steps):
        return steps, steps
    rows = []
    for curve in curves:
        if len(curve.steps):
            known = np.asarray(curve.values, dtype=float)
            last = np.searchsorted(np.asarray(curve.steps), steps, side="right") - 1
            rows.append(np.where(last >= 0, known[np.maximum(last, 0)], np.nan))
    return steps, np.mean(rows, axis=0)


def plot_curves(
    ax: Axes,
    curves: Sequence[Curve],
    ylabel: str,
    *,
    log: bool = False,
    percent: bool = False,
    reference: tuple[float, str] | None = None,
) -> None:
    """Thin lines a run and a thick one for the mean of an arm; the line style tells the parts apart.

    Args:
        percent: the values are shares, to be shown in %.
        reference: a horizontal line, and what to call it.
    """
    arms = list(dict.fromkeys(curve.arm for curve in curves))
    parts = list(dict.fromkeys(curve.part for curve in curves))
    colors = arm_colors(arms)
    scale = 100.0 if percent else 1.0
    for arm in arms:
        for part, style in zip(parts, _STYLES, strict=False):
            own = [curve for curve in curves if curve.arm == arm and curve.part == part]
            for curve in own if len(own) > 1 else []:
                values = scale * np.asarray(curve.values, dtype=float)
                ax.plot(curve.steps, values, color=colors[arm], linestyle=style, linewidth=0.7, alpha=0.35)
            steps, mean = mean_curve(own)
            ax.plot(steps, scale * mean, color=colors[arm], linestyle=style, linewidth=2)
    handles = [Line2D([], [], color=colors[arm], linewidth=2, label=arm) for arm in arms]
    if len(parts) > 1:
        handles += [
            Line2D([], [], color="0.35", linestyle=style, label=part)
            for part, style in zip(parts, _STYLES, strict=False)
        ]
    if reference is not None:
        value, label = reference
        ax.axhline(scale * value, color="0.35", linestyle="-.", linewidth=1)
        handles.append(Line2D([], [], color="0.35", linestyle="-.", linewidth=1, label=label))
    if log:
        ax.set_yscale("log")
        # plain numbers: the range is often less than a decade
        for which in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            which(LogFormatter(minor_thresholds=(2, 0.5)))
    ax.set_xlabel("training step")
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.25)
    _legend_above(ax, handles)


def plot_headline(
    ax: Axes, values: Mapping[str, Mapping[int, float | None]], ylabel: str, cap: float | None = None
) -> None:
    """A point a run, a grey line a seed through its paired runs, a bar for the mean of an arm.

    Args:
        values: arm -> seed -> value; None, "not reached", is drawn at `cap` as an open triangle.
    """
    arms = list(values)
    colors = arm_colors(arms)
    seeds = sorted({seed for own in values.values() for seed in own})
    for seed in seeds:
        line = [(i, _or(values[arm].get(seed), cap)) for i, arm in enumerate(arms) if seed in values[arm]]
        pairs = [(x, y) for x, y in line if y is not None]
        ax.plot([x for x, _ in pairs], [y for _, y in pairs], color="0.75", linewidth=0.8, zorder=1)
    for i, arm in enumerate(arms):
        found = [value for value in values[arm].values() if value is not None]
        missing = len(values[arm]) - len(found)
        ax.plot([i] * len(found), found, "o", color=colors[arm], zorder=3)
        if missing and cap is not None:
            ax.plot([i] * missing, [cap] * missing, "^", color=colors[arm], fillstyle="none", zorder=3)
        if found and not missing:
            ax.plot([i - 0.22, i + 0.22], [np.mean(found)] * 2, color=colors[arm], linewidth=2.5, zorder=2)
    if cap is not None and any(value is None for own in values.values() for value in own.values()):
        label = "not reached by the last step"
        handle = Line2D([], [], color="0.35", marker="^", fillstyle="none", linestyle="none", label=label)
        _legend_above(ax, [handle])
    ax.set_xticks(range(len(arms)), arms)
    ax.set_xlim(-0.5, len(arms) - 0.5)
    ax.set_ylabel(ylabel)
    ax.grid(axis="y", alpha=0.25)


def plot_differences(
    ax: Axes, differences: Mapping[str, PairedDifference], colors: Mapping[str, str], xlabel: str
) -> None:
    """A row an arm: a point a pair, and the mean with its 95 % interval just below."""
    arms = list(differences)
    for row, arm in enumerate(arms):
        paired = differences[arm]
        ax.plot(paired.differences, [row - 0.12] * paired.n, "o", color=colors[arm], alpha=0.6)
        if paired.mean is not None:
            ax.plot([paired.mean], [row + 0.12], "D", color=colors[arm])
        if paired.low is not None and paired.high is not None:
            ax.plot([paired.low, paired.high], [row + 0.12] * 2, color=colors[arm], linewidth=2)
    ax.axvline(0, color="0.35", linewidth=1)
    ax.set_yticks(range(len(arms)), arms)
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set_xlabel(xlabel)
    ax.grid(axis="x", alpha=0.25)
    handles = [
        Line2D([], [], color="0.35", marker="o", linestyle="none", alpha=0.6, label="one pair"),
        Line2D([], [], color="0.35", marker="D", linewidth=2, label="mean and 95 % interval"),
    ]
    _legend_above(ax, handles)


def _legend_above(ax: Axes, handles: list[Line2D]) -> None:
    """Outside the axes, where it hides no data."""
    ax.legend(handles=handles, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _or(value: float | None, default: float | None) -> float | None:
    return default if value is None else value
