"""Which plots a report shows, from which numbers: each figure carries the rows of its CSV, its caption and its alt
text."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .claims import accuracy, effects_of, growth_gaps
from .plots import (
    Curve,
    arm_colors,
    plot_curves,
    plot_cycles,
    plot_differences,
    plot_effects,
    plot_growth,
    plot_headline,
    plot_scatter,
)
from .summary import Summary
from .verdicts import MARGIN

__all__ = ["ReportFigure", "figures_of"]

Record = dict[str, Any]

#: curves of more arms than these are a tangle; the table has them all
CURVES = ("adamw", "frozen", "riemannian-adam", "adamw-orth-no-decay", "rsgd", "muon")


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


def figures_of(roles: Mapping[str, Sequence[Record]], summary: Summary) -> tuple[ReportFigure, ...]:
    """The figures that the records can fill, the ones that decide first: none for a quantity that no run has."""
    found = [
        _differences(summary),
        _headline(summary, _runs(roles.get("report", ()))),
        _factorial(roles),
        _growth(roles),
        _freezing(roles),
        *_cycles(roles),
        *_learning(roles.get("report", ())),
    ]
    return tuple(figure for figure in found if figure is not None)


def _runs(records: Sequence[Record]) -> str:
    ok = [record for record in records if record["status"] == "ok"]
    return f"{len(ok)} runs of {', '.join(dict.fromkeys(record['arm'] for record in ok))}"


def _learning(records: Sequence[Record]) -> tuple[ReportFigure | None, ...]:
    ok = [record for record in records if record["status"] == "ok" and record["arm"] in CURVES]
    runs = _runs(ok)
    random = [record["random_angle"] for record in ok if record.get("random_angle")]
    angle_reference = (sum(random) / len(random), "random subspaces") if random else None
    return (
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
    )


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
    xlabel = headline.label + ("" if headline.unit == "steps" else f" ({headline.unit})")
    means = {arm.arm: arm.mean if arm.reached else None for arm in summary.arms}
    reached = "; ".join(
        f"{arm} {'not reached' if mean is None else f'{mean:,.{headline.digits}f}'}" for arm, mean in means.items()
    )
    lines = ", and a grey line joins the runs of one seed" if len(values) <= 4 else ""
    return ReportFigure(
        "headline",
        headline.label[0].upper() + headline.label[1:],
        f"{better} is better: a dot is one run, a bar the mean of an arm all of whose runs have a value{lines}.",
        f"Dot plot of {headline.label} for {runs}. Means: {reached}.",
        ("arm", "seed", headline.metric),
        tuple((arm, seed, value) for arm, own in values.items() for seed, value in own.items()),
        lambda ax: plot_headline(ax, values, xlabel, headline.cap),
        height=1.4 + 0.32 * len(values),
    )


def _differences(summary: Summary) -> ReportFigure | None:
    headline = summary.headline
    differences = {arm.arm: arm.difference for arm in summary.arms if arm.difference is not None and arm.difference.n}
    if not differences:
        return None
    unit = headline.difference_unit
    better = "right" if headline.higher_is_better else "left"
    verdicts = "; ".join(f"{arm} {paired.verdict}" for arm, paired in differences.items())
    return ReportFigure(
        "differences",
        "Paired differences from adamw",
        f"The {better} of the line at 0 is better than adamw; an interval that crosses 0 shows no difference.",
        f"Paired differences in {headline.label} against the baseline: {verdicts}.",
        ("arm", "seed", f"difference_{unit}", "mean", "low", "high"),
        tuple(
            (arm, seed, value, paired.mean, paired.adjusted_low, paired.adjusted_high)
            for arm, paired in differences.items()
            for seed, value in zip(paired.seeds, paired.differences, strict=True)
        ),
        lambda ax: plot_differences(
            ax, differences, arm_colors([arm.arm for arm in summary.arms]), f"arm minus adamw ({unit})"
        ),
        height=1.4 + 0.4 * len(differences),
    )


def _factorial(roles: Mapping[str, Sequence[Record]]) -> ReportFigure | None:
    effects = {effect.factor: effect.difference for effect in effects_of(roles) if effect.difference.n}
    if not effects:
        return None
    shown = {name: (d.differences, d.mean, (d.adjusted_low, d.adjusted_high)) for name, d in effects.items()}
    text = "; ".join(f"{name} {d.mean:+.2f}" for name, d in effects.items() if d.mean is not None)
    return ReportFigure(
        "factorial",
        "What each property adds",
        "Effect on test accuracy of each property with the other two held fixed, between arms at one learning rate and "
        f"one mean step length; within ±{MARGIN:g} point, the grey band, it counts as none.",
        f"Effects in points of test accuracy: {text}.",
        ("property", "seed", "effect_points", "mean", "low", "high"),
        tuple(
            (name, seed, value, d.mean, d.adjusted_low, d.adjusted_high)
            for name, d in effects.items()
            for seed, value in zip(d.seeds, d.differences, strict=True)
        ),
        lambda ax: plot_effects(ax, shown, "effect on test accuracy (points)", MARGIN),
        height=1.6 + 0.5 * len(shown),
    )


def _growth(roles: Mapping[str, Sequence[Record]]) -> ReportFigure | None:
    gaps = growth_gaps(roles)
    if len(gaps) < 2:
        return None
    shared = set.intersection(*(set(own) for own in gaps.values()))  # the seeds that the verdict rests on
    gaps = {size: {seed: gap for seed, gap in own.items() if seed in shared} for size, own in gaps.items()}
    if not shared:
        return None
    text = "; ".join(f"{size:,.0f} images {sum(own.values()) / len(own):+.2f}" for size, own in sorted(gaps.items()))
    return ReportFigure(
        "growth",
        "The gap against the size of the data",
        "Rising with the number of training images would be a gap that widens with data.",
        f"Mean gap of riemannian-adam over adamw in points: {text}.",
        ("train_images", "seed", "gap_points"),
        tuple((size, seed, gap) for size, own in sorted(gaps.items()) for seed, gap in own.items()),
        lambda ax: plot_growth(
            ax,
            {size: list(own.values()) for size, own in gaps.items()},
            "training images",
            "riemannian-adam minus adamw (points)",
        ),
    )


def _freezing(roles: Mapping[str, Sequence[Record]]) -> ReportFigure | None:
    ok = [record for record in roles.get("report", ()) if record["status"] == "ok"]
    moved = {(record["arm"], record["seed"]): 100 * record["metrics"]["qk_movement"] for record in ok}
    points = {
        arm: [(moved[arm, seed], value) for seed, value in own.items()] for arm, own in accuracy(ok).items() if own
    }
    if "frozen" not in points or len(points) < 2:
        return None
    means = "; ".join(
        f"{arm} moved {sum(x for x, _ in own) / len(own):.1f} %, accuracy {sum(y for _, y in own) / len(own):.1f} %"
        for arm, own in points.items()
    )
    return ReportFigure(
        "freezing",
        "Accuracy against how far Q and K moved",
        "A dot is one run. If moving the frames mattered, accuracy would rise from the frozen runs at 0.",
        f"Scatter of test accuracy against movement. Means: {means}.",
        ("arm", "moved_percent", "test_accuracy_percent"),
        tuple((arm, x, y) for arm, own in points.items() for x, y in own),
        lambda ax: plot_scatter(ax, points, "‖W − W₀‖ / ‖W₀‖ of Q and K (%)", "test accuracy (%)"),
        height=5.0 if len(points) > 6 else 3.8,
    )


def _cycles(roles: Mapping[str, Sequence[Record]]) -> tuple[ReportFigure, ...]:
    runs: dict[str, list[Record]] = {}
    for record in roles.get("cycles", ()):
        if record["status"] == "ok" and record.get("cycles"):
            runs.setdefault(record["arm"], []).append(record)
    if not runs:
        return ()
    shown = (
        ("qk_angle", "Decay cycles: where Q and K point", "turn of Q's and K's column spaces (rad)", False,
         "How far the column spaces of Q and K are from where they were when training ended: decay turns nothing, "
         "retraining may."),
        ("qk_norm", "Decay cycles: the size of Q and K", "‖Q, K‖, as a share of trained", True,
         "Decay shrinks free matrices at their own learning rate, where it reaches them; frames keep their size."),
        ("validation_accuracy", "Decay cycles: accuracy", "validation accuracy", False,
         "Accuracy collapses with the decayed model; the height after retraining is what was got back."),
    )  # fmt: skip

    def figure(key: str, title: str, ylabel: str, log: bool, caption: str) -> ReportFigure:
        values = {arm: [record["cycles"][key] for record in own] for arm, own in runs.items()}
        ends = "; ".join(f"{arm} {sum(v[-1] for v in own) / len(own):.3g}" for arm, own in values.items())
        return ReportFigure(
            f"cycles_{key}",
            title,
            caption,
            f"Line plot of {ylabel} over decay cycles. Means at the end: {ends}.",
            ("arm", "seed", "event", key),
            tuple(
                (arm, r["seed"], i, value)
                for arm, own in runs.items()
                for r in own
                for i, value in enumerate(r["cycles"][key])
            ),
            lambda ax: plot_cycles(ax, values, ylabel, log),
        )

    return tuple(figure(*each) for each in shown)
