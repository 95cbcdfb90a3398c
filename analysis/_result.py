"""What every result here shares: plain values in ``to_dict()``, a readable ``repr``, escaped HTML for notebooks."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch


def plain(value: Any) -> Any:
    """``value`` as nested dicts, lists and Python scalars: arrays become lists, results their ``to_dict()``."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    return value


def show(value: Any) -> str:
    """One cell of a table: six significant digits, ``yes``/``no`` for truth values, ``-`` for nothing to say."""
    if value is None:
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain text table, columns aligned left."""
    cells = [list(header), *([show(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The same table as HTML. Every cell is escaped: layer and optimizer names come from the caller."""

    def line(tag: str, row: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(show(value))}</{tag}>" for value in row) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{line('th', header)}</thead>"
        f"<tbody>{body}</tbody></table>"
    )


class Result:
    """Base of the frozen dataclasses this package returns.

    Subclasses are declared ``@dataclass(frozen=True, repr=False, eq=False)``: they hold arrays, for which field-wise
    equality has no truth value. Fields named in ``_hidden`` stay out of ``repr`` and HTML, not out of ``to_dict()``.
    """

    _hidden: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain Python values (non-finite floats stay floats)."""
        return {field.name: plain(getattr(self, field.name)) for field in self._fields()}

    def _fields(self) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(self)  # type: ignore[arg-type]

    def _title(self) -> str:
        return type(self).__name__

    def _header(self) -> Sequence[str]:
        return ("quantity", "value")

    def _rows(self) -> list[Sequence[Any]]:
        return [(f.name, getattr(self, f.name)) for f in self._fields() if f.name not in self._hidden]

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(self._header(), self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._header(), self._rows())


def axes(ax: Any) -> Any:
    """``ax``, or the axes of a new figure: matplotlib is needed here and nowhere else in this package."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib: pip install matplotlib, or read the numbers from to_dict()"
        ) from error
    return plt.subplots()[1]
