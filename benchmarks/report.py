"""What a benchmark hands back, and its three forms: a table in the terminal, Markdown, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

__all__ = ["Outcome", "Table", "print_outcome", "to_markdown", "write_json", "write_markdown"]


@dataclass(frozen=True)
class Table:
    """Cells of text under a header.

    Attributes:
        title: one line.
        header: column names; the first column is aligned left, the others right.
        rows: cells, as many a row as the header has.
        notes: sentences below the table.

    Raises:
        ValueError: a row has more or fewer cells than the header.

    Example:
        >>> Table("Sums", ("of", "value"), (("1, 2", "3"),)).rows[0]
        ('1, 2', '3')
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"a row of {self.title!r} has {len(row)} cells, the header {len(self.header)}: {row}")


@dataclass(frozen=True)
class Outcome:
    """The result of one benchmark.

    Attributes:
        name: of the benchmark, as on the command line.
        tables: for readers.
        data: plain numbers, for JSON.

    Example:
        >>> Outcome("sums", (), {"value": 3}).data
        {'value': 3}
    """

    name: str
    tables: tuple[Table, ...]
    data: dict[str, Any] = field(default_factory=dict)


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the tables of an outcome.

    Example:
        >>> table = Table("Sums", ("of", "value"), (("1, 2", "3"),))
        >>> print_outcome(Outcome("sums", (table,)), Console(width=40, force_terminal=False))  # doctest: +ELLIPSIS
        Sums
        ...
    """
    for table in outcome.tables:
        console.print(Text(table.title, style="bold"))
        rich = RichTable()
        for i, name in enumerate(table.header):
            rich.add_column(Text(name), justify="left" if i == 0 else "right", overflow="fold")
        for row in table.rows:
            rich.add_row(*map(Text, row))  # not markup: a cell may quote an error
        console.print(rich)
        for note in table.notes:
            console.print(f"• {note}", markup=False, highlight=False)
        console.print()


def to_markdown(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> str:
    """The tables as GitHub Markdown, under one line on the machine.

    Example:
        >>> table = Table("Sums", ("of", "value"), (("a|b", "3"),), ("A note.",))
        >>> print(to_markdown([Outcome("sums", (table,))], {"cpu": "a processor"}))
        Machine: cpu a processor.
        <BLANKLINE>
        **Sums**
        <BLANKLINE>
        | of | value |
        |---|---:|
        | a\\|b | 3 |
        <BLANKLINE>
        A note.
        <BLANKLINE>
    """
    facts = [f"{key.replace('_', ' ')} {value}" for key, value in machine.items() if isinstance(value, (str, int))]
    lines = [f"Machine: {', '.join(facts)}.", ""]
    for table in (table for outcome in outcomes for table in outcome.tables):
        lines += [f"**{table.title}**", "", _line(table.header), "|---|" + "---:|" * (len(table.header) - 1)]
        lines += [_line(row) for row in table.rows]
        lines += ["", *(line for note in table.notes for line in (note, ""))]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def write_markdown(path: Path, outcomes: Sequence[Outcome], machine: dict[str, Any]) -> None:
    """Write :func:`to_markdown` to a file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "table.md"
        >>> write_markdown(path, [], {"threads": 2})
        >>> path.read_text(encoding="utf-8")
        'Machine: threads 2.\\n'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_markdown(outcomes, machine), encoding="utf-8")


def write_json(path: Path, outcomes: Sequence[Outcome], machine: dict[str, Any]) -> None:
    """Write the machine and every outcome's numbers; a number that is not finite is written as null.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "numbers.json"
        >>> write_json(path, [Outcome("sums", (), {"value": 3, "error": math.nan})], {"threads": 2})
        >>> json.loads(path.read_text(encoding="utf-8"))
        {'machine': {'threads': 2}, 'sums': {'value': 3, 'error': None}}
    """
    content = {"machine": machine, **{outcome.name: outcome.data for outcome in outcomes}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
