"""The studies' tables in a README: between two comment lines, for a command to write and a test to check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .files import write_whole
from .report import Report, load_report, markdown_text
from .tables import claim_table

__all__ = ["headline_tables", "update_readme"]

START, END = "<!-- studies -->", "<!-- end of studies -->"
_COLUMNS = ("arm", "learning rate", "n", "reached", "wins", "Q/K moved")


def headline_tables(folders: Sequence[Path]) -> str:
    """The arms and the claims of each study, in Markdown."""
    return "\n".join(_section(load_report(folder)) for folder in folders)


def update_readme(readme: Path, folders: Sequence[Path]) -> None:
    """Put the tables between the two marks of `readme`; what is outside stays.

    Raises `ValueError` where the marks are not there, once each and in order.
    """
    text = readme.read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{readme} must have the lines {START} and {END}, once each and in this order")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    write_whole(readme, f"{before}{START}\n{headline_tables(folders)}{END}{after}".encode())


def _section(report: Report) -> str:
    headline, summary = report.summary.headline, report.summary
    wanted = [
        i for i, name in enumerate(summary.header) if name in _COLUMNS or name.startswith((headline.short, "minus "))
    ]
    claims = claim_table(report.claims)
    # certificates are the same for every study
    rows = [row[:5] for row in claims.rows if not row[6].startswith("certificate")]
    lines = [
        f"### {report.study.title}",
        "",
        f"`{report.plan['command']}`: {markdown_text(report.study.describe())}.",
        "",
        *_rows([summary.header[i] for i in wanted], [[row[i] for i in wanted] for row in summary.rows]),
        "",
        *_rows(claims.header[:5], rows),
        "",
    ]
    return "\n".join(lines) + "\n"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(map(markdown_text, header)) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(markdown_text, row)) + " |" for row in rows),
    ]
