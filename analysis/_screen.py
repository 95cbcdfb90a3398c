"""Tables over the heads of a model that fit one screen, whatever the model's size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

SCREEN_ROWS = 24


class _Layer(Protocol):
    @property
    def name(self) -> str: ...


L = TypeVar("L", bound=_Layer)


def fits(rows: int) -> bool:
    """Whether a row a head fits a screen."""
    return rows <= SCREEN_ROWS


def bands(layers: Sequence[L], rows: int = SCREEN_ROWS) -> list[tuple[str, Sequence[L]]]:
    """At most ``rows`` runs of consecutive layers, of lengths that differ by one at most, each with a label."""
    count = min(rows, len(layers))
    cuts = [round(i * len(layers) / count) for i in range(count + 1)]
    runs = [layers[a:b] for a, b in itertools.pairwise(cuts)]
    return [(span(run[0].name, run[-1].name), run) for run in runs]


def span(first: str, last: str) -> str:
    """The names from one to another: "h.0–3.attn" where they differ in one number, else "first … last".

    Example:
        >>> span("h.8.attn", "h.11.attn")
        'h.8–11.attn'
    """
    if first == last:
        return first
    a, b = (re.split(r"(\d+)", name) for name in (first, last))
    apart = [i for i in range(len(a)) if a[i] != b[i]] if len(a) == len(b) else []
    if len(apart) != 1 or not apart[0] % 2:  # numbers are at the odd places
        return f"{first} … {last}"
    i = apart[0]
    return "".join([*a[:i], f"{a[i]}–{b[i]}", *a[i + 1 :]])


def median(values: Sequence[Any]) -> float | None:
    """Median of the numbers that are not NaN, NaN if all are, None without a number."""
    numbers = [value for value in values if value is not None]
    good = sorted(value for value in numbers if not math.isnan(value))
    if not good:
        return math.nan if numbers else None
    middle = len(good) // 2
    return good[middle] if len(good) % 2 else (good[middle - 1] + good[middle]) / 2
