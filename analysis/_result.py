"""What every result here shares: plain values in ``to_dict()``, a readable ``repr``, escaped HTML for notebooks."""

from __future__ import annotations

import dataclasses
import html
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ._conversion import pandas, restore


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """The result that gave ``values`` by :meth:`to_dict`; arrays come back as float64, what it left out as None.

        Raises:
            ValueError: values are missing or left over; they are named.
        """
        hints = typing.get_type_hints(cls)
        names = {field.name for field in cls._fields()}
        left = sorted(set(values) - names)
        missing = sorted(n for n in names - set(values) if type(None) not in typing.get_args(hints[n]))
        if missing or left:
            raise ValueError(f"values must be what {cls.__name__}.to_dict() gives; missing {missing}, left over {left}")
        return cls(**{name: restore(hints[name], values.get(name)) for name in names})

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``: a line a part (a layer, a row) of a result that has parts, else one line.

        Numbers a head stay together in one cell; ``frame.explode([...])`` gives them lines of their own. What belongs
        to the whole is in ``frame.attrs``.

        Raises:
            ImportError: pandas is not installed.
        """
        values, parts = self.to_dict(), self._parts()
        lines = values.pop(parts[0]) if parts else [values]
        pd = pandas()
        all_names = [f.name for f in (parts[1] if parts else self)._fields()]
        names = [name for name in all_names if not lines or name in lines[0]]
        columns = {name: [line[name] for line in lines] for name in names}
        # pandas would make NaN of None
        frame = pd.DataFrame(
            {name: pd.Series(cells, dtype=object) if None in cells else cells for name, cells in columns.items()}
        )
        frame.attrs = values if parts else {}
        return frame

    @classmethod
    def from_pandas(cls, frame: Any) -> typing.Self:
        """The result that gave ``frame`` by :meth:`to_pandas`, with the lines that it has now."""
        parts = cls._parts()
        # one column at a time: a row of mixed columns would turn whole numbers into floats
        columns = {name: [_plain_cell(cell) for cell in frame[name]] for name in frame.columns}
        lines = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        if parts:
            return cls.from_dict({**frame.attrs, parts[0]: lines})
        if len(lines) != 1:
            raise ValueError(f"frame must have one line, found {len(lines)}")
        return cls.from_dict(lines[0])

    @classmethod
    def _parts(cls) -> tuple[str, Any] | None:
        """The field that holds results, and their class."""
        for name, hint in typing.get_type_hints(cls).items():
            kinds = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
            if len(kinds) == 2 and isinstance(kinds[0], type) and issubclass(kinds[0], Result):
                return name, kinds[0]
        return None

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)  # type: ignore[arg-type]

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


def _plain_cell(cell: Any) -> Any:
    """What ``to_dict()`` had where pandas holds a scalar of numpy's."""
    return cell.item() if isinstance(cell, np.generic) else cell


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
