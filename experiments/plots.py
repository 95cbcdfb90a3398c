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

__all__ = [
    "Curve",
    "arm_colors",
    "mean_curve",
    "plot_curves",
    "plot_cycles",
    "plot_differences",
    "plot_effects",
    "plot_growth",
    "plot_headline",
    "plot_scatter",
]

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
    ax: Axes, values: Mapping[str, Mapping[int, float | None]], xlabel: str, cap: float | None = None
) -> None:
    """A row an arm: a point a run and a bar for the mean of an arm; of few arms, a grey line a seed through its paired
    runs.

    Args:
        values: arm -> seed -> value; None, "not reached", is drawn at `cap` as an open triangle.
    """
    arms = list(values)
    colors = arm_colors(arms)
    if len(arms) <= 4:
        for seed in sorted({seed for own in values.values() for seed in own}):
            line = [(i, _or(values[arm].get(seed), cap)) for i, arm in enumerate(arms) if seed in values[arm]]
            pairs = [(y, x) for y, x in line if x is not None]
            ax.plot([x for _, x in pairs], [y for y, _ in pairs], color="0.75", linewidth=0.8, zorder=1)
    for i, arm in enumerate(arms):
        found = [value for value in values[arm].values() if value is not None]
        missing = len(values[arm]) - len(found)
        ax.plot(found, [i] * len(found), "o", color=colors[arm], alpha=0.7, zorder=3)
        if missing and cap is not None:
            ax.plot([cap] * missing, [i] * missing, ">", color=colors[arm], fillstyle="none", zorder=3)
        if found and not missing:
            ax.plot([np.mean(found)] * 2, [i - 0.32, i + 0.32], color=colors[arm], linewidth=2.5, zorder=2)
    if cap is not None and any(value is None for own in values.values() for value in own.values()):
        label = "not reached by the last step"
        handle = Line2D([], [], color="0.35", marker=">", fillstyle="none", linestyle="none", label=label)
        _legend_above(ax, [handle])
    _rows(ax, arms)
    ax.set_xlabel(xlabel)


def plot_differences(
    ax: Axes, differences: Mapping[str, PairedDifference], colors: Mapping[str, str], xlabel: str
) -> None:
    """A row an arm: a point a pair, and the mean with its Holm-adjusted 95 % interval just below."""
    arms = list(differences)
    for row, arm in enumerate(arms):
        paired = differences[arm]
        interval = (paired.adjusted_low, paired.adjusted_high)
        _interval(ax, row, colors[arm], paired.differences, paired.mean, interval)
    ax.axvline(0, color="0.35", linewidth=1)
    _rows(ax, arms)
    ax.set_xlabel(xlabel)
    _legend_above(ax, _interval_handles("one pair", "mean and Holm-adjusted 95 % interval"))


def plot_effects(
    ax: Axes,
    effects: Mapping[str, tuple[Sequence[float], float | None, tuple[float | None, float | None]]],
    xlabel: str,
    margin: float | None = None,
) -> None:
    """A row an effect: a point a seed, the mean and its interval; and the margin within which it counts as none.

    Args:
        effects: name -> values by seed, their mean, and the interval.
    """
    for row, (values, mean, interval) in enumerate(effects.values()):
        _interval(ax, row, OKABE_ITO[row % len(OKABE_ITO)], values, mean, interval)
    ax.axvline(0, color="0.35", linewidth=1)
    handles = _interval_handles("one seed", "mean and 95 % interval")
    if margin is not None:
        ax.axvspan(-margin, margin, color="0.5", alpha=0.15, linewidth=0)
        handles.append(Line2D([], [], color="0.5", alpha=0.3, linewidth=8, label="counts as none"))
    _rows(ax, list(effects))
    ax.set_xlabel(xlabel)
    _legend_above(ax, handles)


def plot_growth(ax: Axes, gaps: Mapping[float, Sequence[float]], xlabel: str, ylabel: str) -> None:
    """The gap of each pair at each size of the data, and its mean.

    Args:
        gaps: size -> a value a pair.
    """
    sizes = sorted(gaps)
    for size in sizes:
        ax.plot([size] * len(gaps[size]), gaps[size], "o", color=OKABE_ITO[0], alpha=0.6)
    ax.plot(sizes, [np.mean(gaps[size]) for size in sizes], "-D", color=OKABE_ITO[1], linewidth=2)
    ax.axhline(0, color="0.35", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.25)
    handles = [
        Line2D([], [], color=OKABE_ITO[0], marker="o", linestyle="none", alpha=0.6, label="one pair"),
        Line2D([], [], color=OKABE_ITO[1], marker="D", linewidth=2, label="mean"),
    ]
    _legend_above(ax, handles)


def plot_cycles(ax: Axes, runs: Mapping[str, Sequence[Sequence[float]]], ylabel: str, log: bool = False) -> None:
    """Values at the end of training, after each decay and after each retraining: a thin line a run, a thick one for the
    mean of an arm.

    Args:
        runs: arm -> run -> 1 + 2·cycles values.
    """
    colors = arm_colors(list(runs))
    longest = 1
    for arm, own in runs.items():
        for values in own:
            longest = max(longest, len(values))
            ax.plot(range(len(values)), values, color=colors[arm], linewidth=0.7, alpha=0.35)
        ax.plot(range(len(own[0])), np.mean(own, axis=0), "-o", color=colors[arm], linewidth=2)
    if log:
        ax.set_yscale("log")
    ax.set_xticks(range(longest), ["trained", *("decayed" if i % 2 else "retrained" for i in range(1, longest))])
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.25)
    _legend_above(ax, [Line2D([], [], color=colors[arm], marker="o", linewidth=2, label=arm) for arm in runs])


def plot_scatter(ax: Axes, points: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str) -> None:
    """A point a run, coloured and marked by its arm.

    Args:
        points: arm -> (x, y) of each run.
    """
    handles = []
    for i, (arm, own) in enumerate(points.items()):
        color, marker = OKABE_ITO[i % len(OKABE_ITO)], "osD^vP"[i // len(OKABE_ITO) % 6]
        ax.plot([x for x, _ in own], [y for _, y in own], marker, color=color, alpha=0.75)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle="none", label=arm))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.25)
    _legend_above(ax, handles)


def _interval(
    ax: Axes,
    row: int,
    color: str,
    values: Sequence[float],
    mean: float | None,
    interval: tuple[float | None, float | None],
) -> None:
    ax.plot(values, [row - 0.12] * len(values), "o", color=color, alpha=0.6)
    if mean is not None:
        ax.plot([mean], [row + 0.12], "D", color=color)
    low, high = interval
    if low is not None and high is not None:
        ax.plot([low, high], [row + 0.12] * 2, color=color, linewidth=2)


def _interval_handles(point: str, bar: str) -> list[Line2D]:
    return [
        Line2D([], [], color="0.35", marker="o", linestyle="none", alpha=0.6, label=point),
        Line2D([], [], color="0.35", marker="D", linewidth=2, label=bar),
    ]


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.25)


def _legend_above(ax: Axes, handles: list[Line2D]) -> None:
    """Outside the axes, where it hides no data."""
    ax.legend(handles=handles, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _or(value: float | None, default: float | None) -> float | None:
    return default if value is None else value
