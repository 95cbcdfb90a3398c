"""What a study prints when it has ended."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .report import load_report
from .tables import claim_table

__all__ = ["print_summary"]

#: columns of the arms' table that the report has and the terminal has no room for
_HIDDEN = ("p, Wilcoxon", "effect size", "step length", "seconds a run", "test accuracy")
_VERDICTS = {"confirmed": "green", "refuted": "red", "undecided at this size": "yellow"}


def print_summary(console: Console, folder: Path) -> None:
    """The arms, the claims, and what they say in words."""
    report = load_report(folder)
    summary = report.summary
    shown = [i for i, name in enumerate(summary.header) if name not in _HIDDEN]
    title = f"{report.study.title}, {sum(arm.n + arm.failed for arm in summary.arms)} reported runs"
    console.print(_table(title, [summary.header[i] for i in shown], [[row[i] for i in shown] for row in summary.rows]))
    for note in summary.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    claims = claim_table(report.claims)
    table = Table(title="Claims, at this size")
    for name, width in zip(claims.header[:5], (5, 52, 22, 30, 3), strict=True):
        table.add_column(name, overflow="fold", max_width=width)
    for row in claims.rows:
        table.add_row(*row[:2], f"[{_VERDICTS[row[2]]}]{row[2]}[/]", *(text.replace("[", "\\[") for text in row[3:5]))
    console.print(table)
    for sentence in summary.words:
        console.print(f"• {sentence}", markup=False, highlight=False)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for i, name in enumerate(header):
        width = max((len(row[i]) for row in rows), default=0)  # heads are broken so that cells need not be
        head = textwrap.fill(name, max(width, 9))
        table.add_column(head, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table
