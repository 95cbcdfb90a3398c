"""Pictures of measurements. Each takes the axes to draw on, or makes its own, and returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._pictures import MOST_LINES, MOST_NAMES, OKABE_ITO, STYLES, layer_names, legend, log_axis, ramp, thinned, unit
from ._result import axes
from .decay_pictures import plot_decay, plot_soft_threshold

if TYPE_CHECKING:
    from .certify import CertificateReport
    from .drift import DriftReport
    from .geometry import AttentionGeometry
    from .tracker import GeometryTracker

__all__ = [
    "OKABE_ITO",
    "plot_angles",
    "plot_certificates",
    "plot_decay",
    "plot_drift",
    "plot_soft_threshold",
    "plot_spectra",
    "plot_tracks",
]


def plot_spectra(geometry: AttentionGeometry, ax: Any = None, *, circuit: str = "qk") -> Any:
    """Singular values of the QK or OV circuit against their index, a line a head, a colour a layer.

    Where the heads are too many to be told apart, their lines are faint and each layer's median over heads is bold.

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
    colors = ramp(len(layers))
    spectra = [layer.spectrum if circuit == "qk" else layer.ov_spectrum for layer in layers]
    # a logarithmic axis has no zero
    shown = [np.where(s.numpy() > 0, s.numpy(), math.nan) if s is not None else np.empty((0, 1)) for s in spectra]
    many = sum(map(len, shown)) > MOST_LINES
    bold: list[Any] = []
    for i, heads in enumerate(shown):
        named = len(layers) <= MOST_NAMES or i in (0, len(layers) - 1)
        look = {"color": colors[i], "label": layers[i].name if named else None}
        index = range(1, heads.shape[1] + 1)
        for head, values in enumerate(heads):
            own = {"color": colors[i], "alpha": 0.15, "linewidth": 0.6} if many else {"alpha": 0.7, "linewidth": 1}
            ax.plot(index, values, **own, **({} if many else {**look, "label": look["label"] if head == 0 else None}))
        if many and len(heads):
            with np.errstate(all="ignore"):
                bold.append((index, np.ma.median(np.ma.masked_invalid(heads), axis=0), look))
    for index, values, look in bold:
        ax.plot(index, values, linewidth=1.8, **look)
    log_axis(ax, np.concatenate([heads.ravel() for heads in shown]))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("index of the singular value")
    ax.set_ylabel(f"singular value of the {circuit.upper()} circuit")
    legend(ax, "layer, median over heads" if many else "layer")
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
    ax.set_xticks(thinned(widest))
    places = thinned(len(rows))
    names, said = layer_names([layer.name for layer in report.layers])
    ax.set_yticks(places, [names[i] for i in places])
    ax.set_xlabel("head")
    ax.set_ylabel(said)
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
            random = getattr(layer, f"random_{side}_distance") if relative else 1.0
            places += [i + offset] * len(values)
            heights += [value / random for value in values]
        size = 5 if len(report.layers) <= MOST_NAMES else 3
        ax.plot(places, heights, marker, color=color, alpha=0.7, markersize=size, label=side, clip_on=False)
    if relative:
        ax.axhline(1, color="black", linewidth=1, linestyle="--", label="random subspaces")
    places = thinned(len(report.layers))
    names, said = layer_names([layer.name for layer in report.layers])
    labels = [names[i] for i in places]
    if max(map(len, labels)) <= 3:
        ax.set_xticks(places, labels)
    else:
        few = len(places) <= 6
        ax.set_xticks(places, labels, rotation=30 if few else 90, ha="right" if few else "center")
    ax.set_xlabel(said)
    ax.set_xlim(-0.5, len(report.layers) - 0.5)
    ax.set_ylim(0, max(ax.get_ylim()[1], 1e-6))  # less is rounding, which would fill the picture
    ax.set_ylabel("subspace distance" + (", random subspaces = 1" if relative else ", radians (2-norm of the angles)"))
    legend(ax)
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
        color, style = OKABE_ITO[i % len(OKABE_ITO)], STYLES[i % len(STYLES)]
        heads = [v for name, v in columns.items() if name.endswith(f"/{quantity}") and not name.startswith("mean/")]
        middle = columns.get(f"mean/{quantity}", columns.get(quantity))
        if middle is None:
            continue
        label = quantity.replace("_", " ")
        ax.plot(steps, middle, color=color, linestyle=style, linewidth=2, label=label)
        if len(heads) > 1:
            table = np.ma.masked_invalid(np.array(heads, dtype=float))
            ax.fill_between(steps, table.min(0), table.max(0), color=color, alpha=0.2, linewidth=0)
    units = list(dict.fromkeys(unit(quantity) for quantity in quantities))
    for i, said in enumerate(units):
        bands = [known[quantity] for quantity in quantities if quantity in known and unit(quantity) == said]
        if bands:
            low, high = min(b[0] for b in bands), max(b[1] for b in bands)
            whose = f" ({said})" if len(units) > 1 else ""
            look = {"facecolor": "0.85", "edgecolor": "0.7", "linewidth": 0, "hatch": ("", "//", "..")[i % 3]}
            ax.axhspan(low, high, zorder=0, label=f"random subspaces, 5 to 95 %{whose}", **look)
    ax.set_xlabel("training step")
    ax.set_ylabel("; ".join(units))
    legend(ax)
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
    # bars end there whatever was measured
    ticks = {smallest: "≤10⁻⁴", 1e-2: "0.01", 1.0: "1", 1e2: "100", largest: "≥10⁴"}
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("measured ÷ bound (holds left of 1, hatched: fails)")
    from matplotlib.patches import Patch

    handles = [Patch(color=OKABE_ITO[i % len(OKABE_ITO)], label=r.optimizer) for i, r in enumerate(several)]
    ax.legend(handles=handles, fontsize="small", frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax
