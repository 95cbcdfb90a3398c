"""What the pictures share: colours, units, names that fit, ticks that can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# Okabe & Ito's palette, distinguishable under the common colour blindnesses; yellow is left out, it vanishes on white
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")

# more names than this do not fit a legend, more than twice as many not an axis
MOST_NAMES = 12
# more lines than this cannot be followed one by one
MOST_LINES = 24

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


def unit(quantity: str) -> str:
    """What an axis of ``quantity`` says."""
    return _UNITS.get(quantity, quantity.replace("_", " "))


def ramp(count: int) -> list[Any]:
    """A colour a layer: the palette for few, a ramp that reads as an order for many."""
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    from matplotlib import colormaps

    # its end is too pale for a line on white
    return [colormaps["cividis"](0.9 * i / (count - 1)) for i in range(count)]


def thinned(count: int) -> list[int]:
    """Places of ticks: all, or every so many where they would run into each other."""
    return list(range(0, count, max(1, math.ceil(count / (2 * MOST_NAMES)))))


def layer_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names for the ticks of an axis, and for the axis: of many that differ in one number, that number.

    Example:
        >>> layer_names([f"h.{i}.attn" for i in range(8)])
        (['0', '1', '2', '3', '4', '5', '6', '7'], 'layer, # of h.#.attn')
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    if len(names) <= MOST_NAMES // 2 or len({len(part) for part in parts}) > 1:
        return list(names), "layer"
    apart = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(apart) != 1 or not apart[0] % 2:  # numbers are at the odd places
        return list(names), "layer"
    i, first = apart[0], parts[0]
    return [part[i] for part in parts], f"layer, # of {''.join([*first[:i], '#', *first[i + 1 :]])}"


def legend(ax: Any, title: str | None = None, **where: Any) -> None:
    """A legend, if something is named."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize="small", title=title, framealpha=0.8, edgecolor="none", **where)


def log_axis(ax: Any, values: Any) -> None:
    """A logarithmic y axis; over less than two decades its ticks are plain numbers, not sums of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    shown = np.asarray(values, dtype=float)
    shown = shown[np.isfinite(shown) & (shown > 0)]
    if not shown.size or shown.max() > 100 * shown.min():
        return
    near = shown.max() < 10 * shown.min()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if near else (1, 2, 5), numticks=20))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    if shown.max() < 1.5 * shown.min():  # around a constant too
        middle = math.sqrt(shown.max() * shown.min())
        low, high = min(0.7 * middle, 0.95 * shown.min()), max(1.5 * middle, 1.05 * shown.max())
        if len(ax.get_shared_y_axes().get_siblings(ax)) > 1:  # others may need more
            low, high = min(low, ax.get_ylim()[0]), max(high, ax.get_ylim()[1])
        ax.set_ylim(low, high)
