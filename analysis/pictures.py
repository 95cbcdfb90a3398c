"""Pictures of measurements. Each takes the axes to draw on, or makes its own, and returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ._result import axes

if TYPE_CHECKING:
    from .certify import CertificateReport
    from .drift import DriftReport
    from .geometry import AttentionGeometry
    from .tracker import GeometryTracker
    from .weight_decay import WeightDecayDrift

__all__ = ["OKABE_ITO", "plot_angles", "plot_certificates", "plot_decay", "plot_drift", "plot_spectra", "plot_tracks"]

# Okabe & Ito's palette, distinguishable under the common colour blindnesses; yellow is left out, it vanishes on white
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")

# more names than this do not fit a legend or an axis
_MOST_NAMES = 12


def plot_spectra(geometry: AttentionGeometry, ax: Any = None, *, circuit: str = "qk") -> Any:
    """Singular values of the QK or OV circuit against their index, a line a head, a colour a layer.

    Args:
        circuit: "qk" or "ov".

    Example:
        >>> import torch
        >>> from geodescent.analysis import attention_geometry
        >>> ax = plot_spectra(attention_geometry(torch.nn.MultiheadAttention(8, 2)))
        >>> ax.get_ylabel()
        'singular value of the QK circuit'
    """
    if circuit not in ("qk", "ov"):
        raise ValueError(f'circuit must be "qk" or "ov", found {circuit!r}')
    ax = axes(ax)
    layers = geometry.layers
    ramp = _ramp(len(layers))
    for i, layer in enumerate(layers):
        spectrum = layer.spectrum if circuit == "qk" else layer.ov_spectrum
        for head, values in enumerate([] if spectrum is None else spectrum.tolist()):
            shown = [value if value > 0 else math.nan for value in values]  # a logarithmic axis has no zero
            label = layer.name if head == 0 and (len(layers) <= _MOST_NAMES or i in (0, len(layers) - 1)) else None
            ax.plot(range(1, len(values) + 1), shown, color=ramp[i], alpha=0.7, linewidth=1, label=label)
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("index of the singular value")
    ax.set_ylabel(f"singular value of the {circuit.upper()} circuit")
    _legend(ax, "layer")
    return ax


def plot_angles(report: DriftReport, ax: Any = None, *, side: str = "query") -> Any:
    """Heat map by layer and head of the largest principal angle between a head's subspaces before and after.

    Args:
        side: "query" or "key".

    Example:
        >>> import torch
        >>> from geodescent.analysis import drift
        >>> layers = [torch.nn.MultiheadAttention(8, 2) for _ in range(2)]
        >>> plot_angles(drift(*layers, samples=0)).get_xlabel()
        'head'
    """
    if side not in ("query", "key"):
        raise ValueError(f'side must be "query" or "key", found {side!r}')
    ax = axes(ax)
    rows = [
        [math.degrees(max(head)) if head and all(map(math.isfinite, head)) else math.nan for head in angles.tolist()]
        for angles in (getattr(layer, f"{side}_angles") for layer in report.layers)
    ]
    widest = max(map(len, rows))
    grid = np.array([[*row, *[math.nan] * (widest - len(row))] for row in rows])
    image = ax.imshow(np.ma.masked_invalid(grid), vmin=0, vmax=90, cmap="cividis", aspect="auto")
    ax.set_xticks(_thinned(widest))
    places = _thinned(len(rows))
    ax.set_yticks(places, [report.layers[i].name for i in places])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.figure.colorbar(image, ax=ax, label=f"largest {side} angle, degrees")
    if grid.size <= 48:
        for (i, j), value in np.ndenumerate(grid):
            shade = "black" if value > 50 else "white"
            ax.text(j, i, "–" if math.isnan(value) else f"{value:.0f}", ha="center", va="center", color=shade)
    return ax


def plot_drift(report: DriftReport, ax: Any = None) -> Any:
    """Subspace distance of queries and keys, a point a head, layer by layer; 1 is where random subspaces are.

    Example:
        >>> import torch
        >>> from geodescent.analysis import drift
        >>> layers = [torch.nn.MultiheadAttention(8, 2) for _ in range(2)]
        >>> plot_drift(drift(*layers, samples=4)).get_ylabel()
        'subspace distance, random subspaces = 1'
    """
    ax = axes(ax)
    relative = all(layer.random_query_distance and layer.random_key_distance for layer in report.layers)
    for side, color, marker, offset in (("query", OKABE_ITO[0], "o", -0.12), ("key", OKABE_ITO[1], "s", 0.12)):
        places, heights = [], []
        for i, layer in enumerate(report.layers):
            values = getattr(layer, f"{side}_distance").tolist()
            unit = getattr(layer, f"random_{side}_distance") if relative else 1.0
            places += [i + offset] * len(values)
            heights += [value / unit for value in values]
        ax.plot(places, heights, marker, color=color, alpha=0.7, markersize=5, label=side)
    if relative:
        ax.axhline(1, color="black", linewidth=1, linestyle="--", label="random subspaces")
    places = _thinned(len(report.layers))
    few = len(places) <= 6
    ax.set_xticks(
        places, [report.layers[i].name for i in places], rotation=30 if few else 90, ha="right" if few else "center"
    )
    ax.set_xlim(-0.5, len(report.layers) - 0.5)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("subspace distance" + (", random subspaces = 1" if relative else ", radians (2-norm of the angles)"))
    _legend(ax)
    return ax


def plot_tracks(
    tracker: GeometryTracker,
    ax: Any = None,
    *,
    quantities: Sequence[str] = ("query_distance", "key_distance"),
    random: Mapping[str, tuple[float, float]] | None = None,
) -> Any:
    """Quantities of a tracked training run against the step: the mean bold over heads, all heads within the band.

    Args:
        quantities: columns of the tracker, such as "query_condition" or a scalar that was recorded.
        random: where a quantity lies for random subspaces, drawn as a grey band; by default as the tracker says.

    Example:
        >>> import torch
        >>> from geodescent.analysis import GeometryTracker
        >>> tracker = GeometryTracker(torch.nn.MultiheadAttention(8, 2))
        >>> _ = tracker.record(0), tracker.record(10)
        >>> plot_tracks(tracker).get_xlabel()
        'training step'
    """
    ax = axes(ax)
    columns = tracker.to_dict()
    steps = columns.get("step", [])
    known = tracker.random if random is None else random
    for i, quantity in enumerate(quantities):
        color, style = OKABE_ITO[i % len(OKABE_ITO)], _STYLES[i % len(_STYLES)]
        heads = [v for name, v in columns.items() if name.endswith(f"/{quantity}") and not name.startswith("mean/")]
        middle = columns.get(f"mean/{quantity}", columns.get(quantity))
        if middle is None:
            continue
        label = quantity.replace("_", " ")
        ax.plot(steps, middle, color=color, linestyle=style, linewidth=2, label=label)
        if len(heads) > 1:
            table = np.ma.masked_invalid(np.array(heads, dtype=float))
            ax.fill_between(steps, table.min(0), table.max(0), color=color, alpha=0.2, linewidth=0)
    bands = [known[quantity] for quantity in quantities if quantity in known]
    if bands:
        low, high = min(b[0] for b in bands), max(b[1] for b in bands)
        ax.axhspan(low, high, color="0.85", zorder=0, label="random subspaces, 5 to 95 %")
    ax.set_xlabel("training step")
    units = {_unit(quantity) for quantity in quantities}
    ax.set_ylabel(units.pop() if len(units) == 1 else "value")
    _legend(ax)
    return ax


def plot_certificates(reports: CertificateReport | Sequence[CertificateReport], ax: Any = None) -> Any:
    """Bars of each certificate's defect over its bound, on a logarithmic axis: left of 1 it holds; hatched, it fails.

    Args:
        reports: one report, or several of optimizers to compare, a colour each.

    Example:
        >>> import torch
        >>> from geodescent.analysis import certify
        >>> from geodescent.manifolds import Stiefel
        >>> report = certify(lambda params: torch.optim.SGD(params, lr=0.1), Stiefel(), (6, 2), steps=1)
        >>> plot_certificates(report).get_xlabel()
        'measured ÷ bound (holds left of 1, hatched: fails)'
    """
    ax = axes(ax)
    several = [reports] if not isinstance(reports, Sequence) else list(reports)
    names = list(dict.fromkeys(row.name for report in several for row in report.rows))
    width = 0.8 / len(several)
    smallest, largest = 1e-4, 1e4
    for i, report in enumerate(several):
        found = {row.name: row for row in report.rows}
        places, lengths, hatches = [], [], []
        for j, name in enumerate(names):
            if name not in found:
                continue
            row = found[name]
            share = row.value / row.bound if row.bound else (0.0 if row.holds else math.inf)
            share = largest if math.isnan(share) else min(max(share, smallest), largest)
            places.append(j + (i - (len(several) - 1) / 2) * width)
            lengths.append(share)
            hatches.append("" if row.holds else "///")
        bars = ax.barh(
            places,
            [length - smallest / 2 for length in lengths],
            left=smallest / 2,
            height=0.9 * width,
            color=OKABE_ITO[i % len(OKABE_ITO)],
        )
        for bar, hatch in zip(bars, hatches, strict=True):
            bar.set_hatch(hatch)
            bar.set_edgecolor("white")
    ax.axvline(1, color="black", linewidth=1)
    ax.set_xscale("log")
    ax.set_xlim(smallest / 2, 2 * largest)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("measured ÷ bound (holds left of 1, hatched: fails)")
    from matplotlib.patches import Patch

    handles = [Patch(color=OKABE_ITO[i % len(OKABE_ITO)], label=r.optimizer) for i, r in enumerate(several)]
    ax.legend(handles=handles, fontsize="small", frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def plot_decay(found: WeightDecayDrift, quantity: str = "balance", ax: Any = None) -> Any:
    """A quantity of every run that differs from another, median over heads with the band of all, over its prediction.

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
    positive, drawn = True, []
    for i, arm in enumerate(found.arms):
        values = _per_head(getattr(arm, quantity))
        color, style = OKABE_ITO[i // 2 % len(OKABE_ITO)], "--" if arm.constrained else "-"
        steps = arm.steps.tolist()
        middle = np.median(values, 1)
        positive = positive and bool((values > 0).all())
        ax.plot(steps, middle, color=color, linestyle=style, linewidth=1.8, label=arm.label)
        if values.shape[1] > 1:
            ax.fill_between(steps, values.min(1), values.max(1), color=color, alpha=0.12, linewidth=0)
        if quantity in arm.predictions:
            expected = np.median(_per_head(arm.predictions[quantity]), 1)
            known = np.flatnonzero(np.isfinite(expected))
            known = known[:: max(1, len(known) // 8)]
            drawn.append(
                ax.plot(np.array(steps)[known], expected[known], "x", color=color, markersize=7, markeredgewidth=1.8)[0]
            )
    if drawn:
        drawn[0].set_label("predicted")
    if positive:
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel(_unit(quantity))
    _legend(ax)
    return ax


_UNITS = {
    "query_norm": "‖W_Q‖ (Frobenius)",
    "key_norm": "‖W_K‖ (Frobenius)",
    "balance": "‖W_QᵀW_Q − W_KᵀW_K‖ (Frobenius)",
    "query_condition": "κ₂ of W_Q",
    "key_condition": "κ₂ of W_K",
    "spectrum": "singular value of W_Q W_Kᵀ, mean",
    "moved": "‖W − W(0)‖ / ‖W(0)‖",
    "effective_rank": "effective rank of the QK circuit",
    "query_movement": "‖W − W(0)‖ / ‖W(0)‖",
    "key_movement": "‖W − W(0)‖ / ‖W(0)‖",
    "query_distance": "subspace distance, radians",
    "key_distance": "subspace distance, radians",
    "gauge_distance": "gauge distance (Frobenius)",
}


def _unit(quantity: str) -> str:
    return _UNITS.get(quantity, quantity.replace("_", " "))


def _per_head(values: Tensor) -> np.ndarray:
    return (values if values.ndim == 2 else values.mean(-1)).numpy()


def _ramp(count: int) -> list[Any]:
    """A colour a layer: the palette for few, a ramp that reads as an order for many."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    from matplotlib import colormaps

    return [colormaps["cividis"](i / (count - 1)) for i in range(count)]


def _thinned(count: int) -> list[int]:
    """Places of ticks: all, or every so many where they would run into each other."""
    return list(range(0, count, max(1, math.ceil(count / (2 * _MOST_NAMES)))))


def _legend(ax: Any, title: str | None = None) -> None:
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize="small", title=title, framealpha=0.8, edgecolor="none")
