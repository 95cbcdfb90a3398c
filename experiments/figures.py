"""Which plots a report shows, from which numbers: each figure carries the rows of its CSV, its caption and its alt
text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .plots import Curve, arm_colors, plot_curves, plot_differences, plot_headline
from .summary import Summary

__all__ = ["ReportFigure", "figures_of"]

Record = dict[str, Any]


@dataclass(frozen=True)
class ReportFigure:
    """`draw` puts on its axes exactly the numbers of `rows` (and means of them)."""

    name: str
    title: str
    caption: str
    alt: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    draw: Callable[[Axes], None]
    height: float = 3.6

    def svg(self) -> bytes:
        """The figure as an SVG file with the same bytes for the same numbers."""
        with matplotlib.rc_context({"svg.hashsalt": self.name, "font.size": 10.0}):
            figure = Figure(figsize=(6.4, self.height), layout="constrained")
            self.draw(figure.add_subplot())
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def figures_of(records: Sequence[Record], summary: Summary) -> tuple[ReportFigure, ...]:
    """The figures that the records can fill: none for a quantity that no run has."""
    ok = [record for record in records if record["status"] == "ok"]
    arms = ", ".join(dict.fromkeys(record["arm"] for record in ok))
    runs = f"{len(ok)} runs of {arms}"
    random = [record["random_angle"] for record in ok if record.get("random_angle")]
    angle_reference = (sum(random) / len(random), "random subspaces") if random else None
    found = [
        _headline(summary, runs),
        _differences(summary),
        _curves(
            ok,
            "accuracy",
            "Accuracy",
            {"training": "train_accuracy", "validation": "validation_accuracy"},
            "accuracy (%)",
            "Read off how far validation (dashed) lags behind training (solid): the longer the lag, the later an arm "
            "generalizes from what it has memorized.",
            runs,
            percent=True,
        ),
        _curves(
            ok,
            "loss",
            "Loss",
            {"training": "train_loss", "validation": "validation_loss"},
            "cross-entropy (nats)",
            "Read off the gap between training and validation: where it widens, an arm is fitting its training data "
            "only.",
            runs,
            log=True,
        ),
        _curves(
            ok,
            "condition",
            "Condition number of Q and K",
            {"Q": "query_condition", "K": "key_condition"},
            "condition number κ",
            "Read off whether the directions of a head stay equally strong: frames stay at 1 by construction, free "
            "matrices need not.",
            runs,
            log=True,
        ),
        _curves(
            ok,
            "angles",
            "Principal-angle drift of Q and K",
            {"Q": "query_angle", "K": "key_angle"},
            "distance from the start (rad)",
            "Read off how far the subspaces of Q and K have turned from their start; at the height of the dash-dotted "
            "line they are as far from it as random subspaces would be."
            if angle_reference
            else "Read off how far the subspaces of Q and K have turned from their start.",
            runs,
            reference=angle_reference,
        ),
        _curves(
            ok,
            "movement",
            "Movement of Q and K",
            {"Q": "query_movement", "K": "key_movement"},
            "‖W − W₀‖ / ‖W₀‖ (%)",
            "Read off how far the weights have moved as a share of their starting norm: frozen frames stay at 0.",
            runs,
            percent=True,
        ),
    ]
    return tuple(figure for figure in found if figure is not None)


def _curves(
    records: Sequence[Record],
    name: str,
    title: str,
    parts: dict[str, str],
    ylabel: str,
    caption: str,
    runs: str,
    **style: Any,
) -> ReportFigure | None:
    curves = [
        Curve(record["arm"], record["seed"], part, record["history"]["step"], record["history"][key])
        for record in records
        for part, key in parts.items()
        if record["history"].get(key)
    ]
    if not curves:
        return None
    rows = tuple(
        (curve.arm, curve.seed, curve.part, step, value)
        for curve in curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    )
    ends = "; ".join(_ends(curves, arm, style.get("percent", False)) for arm in dict.fromkeys(c.arm for c in curves))
    return ReportFigure(
        name,
        title,
        caption,
        f"Line plot of {ylabel} against the training step for {runs}. Mean at the end: {ends}.",
        ("arm", "seed", "part", "step", name),
        rows,
        lambda ax: plot_curves(ax, curves, ylabel, **style),
    )


def _ends(curves: Sequence[Curve], arm: str, percent: bool) -> str:
    texts = []
    for part in dict.fromkeys(curve.part for curve in curves):
        last = [c.values[-1] for c in curves if c.arm == arm and c.part == part]
        known = [value for value in last if value is not None]
        if known:
            mean = sum(known) / len(known)
            texts.append(f"{part} {100 * mean:.1f} %" if percent else f"{part} {mean:.3g}")
    return f"{arm} {', '.join(texts)}"


def _headline(summary: Summary, runs: str) -> ReportFigure | None:
    headline = summary.headline
    values = {arm.arm: arm.values for arm in summary.arms if arm.values}
    if not values:
        return None
    better = "Higher" if headline.higher_is_better else "Lower"
    ylabel = headline.label + ("" if headline.unit == "steps" else f" ({headline.unit})")
    means = {arm.arm: arm.mean if arm.reached else None for arm in summary.arms}
    reached = "; ".join(
        f"{arm} {'not reached' if mean is None else f'{mean:,.{headline.digits}f}'}" for arm, mean in means.items()
    )
    return ReportFigure(
        "headline",
        headline.label[0].upper() + headline.label[1:],
        f"{better} is better: a dot is one run, a bar the mean of an arm all of whose runs have a value, and a grey "
        "line joins the runs of one seed.",
        f"Dot plot of {headline.label} for {runs}. Means: {reached}.",
        ("arm", "seed", headline.metric),
        tuple((arm, seed, value) for arm, own in values.items() for seed, value in own.items()),
        lambda ax: plot_headline(ax, values, ylabel, headline.cap),
    )


def _differences(summary: Summary) -> ReportFigure | None:
    headline = summary.headline
    differences = {arm.arm: arm.difference for arm in summary.arms if arm.difference is not None and arm.difference.n}
    if not differences:
        return None
    unit = "points" if headline.unit == "%" else headline.unit
    better = "right" if headline.higher_is_better else "left"
    verdicts = "; ".join(f"{arm} {paired.verdict}" for arm, paired in differences.items())
    return ReportFigure(
        "differences",
        "Paired differences",
        f"The {better} of the line at 0 is better than the baseline; an interval that crosses 0 shows no difference.",
        f"Paired differences in {headline.label} against the baseline: {verdicts}.",
        ("arm", "seed", f"difference_{unit}", "mean", "low", "high"),
        tuple(
            (arm, seed, value, paired.mean, paired.low, paired.high)
            for arm, paired in differences.items()
            for seed, value in zip(paired.seeds, paired.differences, strict=True)
        ),
        lambda ax: plot_differences(
            ax, differences, arm_colors([arm.arm for arm in summary.arms]), f"arm minus baseline ({unit})"
        ),
        height=1.5 + 0.6 * len(differences),
    )
