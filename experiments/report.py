"""The report folder: one self-contained HTML page, and beside it the CSV behind each plot."""

from __future__ import annotations

import base64
import csv
import io
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from .arms import ARMS
from .figures import ReportFigure, figures_of
from .studies import Study
from .summary import Summary, summarize

__all__ = ["write_report"]

Record = dict[str, Any]


@dataclass(frozen=True)
class _Shown:
    figure: ReportFigure
    source: str  # a data: URI
    csv_name: str


def write_report(folder: str | os.PathLike[str], study: Study, records: Sequence[Record], command: str) -> Path:
    """Write the page and its CSV files; returns the path of the page.

    Each file is written beside its name and moved there whole, the page last, so a crash leaves the old page or the
    new one.

    Args:
        records: the results lines to report on, all of `study`.
        command: the command that made them, as it would be typed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarize(records, study.headline)
    shown = []
    for figure in figures_of(records, summary):
        name = f"{figure.name}.csv"
        _write(folder / name, _csv(figure.header, figure.rows))
        source = "data:image/svg+xml;base64," + base64.b64encode(figure.svg()).decode()
        shown.append(_Shown(figure, source, name))
    _write(folder / "table.csv", _csv(summary.header, summary.rows))
    page = folder / "index.html"
    _write(page, render(study, records, summary, shown, command).encode())
    return page


def render(study: Study, records: Sequence[Record], summary: Summary, shown: Sequence[_Shown], command: str) -> str:
    """The page as text. Everything that comes from settings or results is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        study=study,
        summary=summary,
        figures=shown,
        arms=[(name, _describe(name, records)) for name in dict.fromkeys(record["arm"] for record in records)],
        decay=_decay(records),
        failures=[record for record in records if record["status"] == "failed"],
        facts=_facts(study, records, command),
    )


def _describe(arm: str, records: Sequence[Record]) -> str:
    return ARMS[arm].description if arm in ARMS else "An arm that this version does not know."


def _decay(records: Sequence[Record]) -> list[tuple[str, str, str, str, str]]:
    """arm, group, numbers in it, what stepped it, and the decay it had."""
    rows = []
    seen = set()
    for record in records:
        groups = record["config"].get("groups")
        if record["arm"] in seen or not groups:
            continue
        seen.add(record["arm"])
        for name, group in groups.items():
            if group["numbers"]:
                rows.append(
                    (record["arm"], name, f"{group['numbers']:,}", group["stepped_by"], str(group["weight_decay"]))
                )
    return rows


def _facts(study: Study, records: Sequence[Record], command: str) -> list[tuple[str, str]]:
    settings = {"lr": study.lr, **study.settings()}
    seconds = sum(record["wall_seconds"] for record in records)
    seeds = sorted({record["seed"] for record in records})
    return [
        ("Command", command),
        ("Task", study.describe()),
        ("Settings, this project's choices", ", ".join(f"{name} = {value}" for name, value in settings.items())),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Runs", f"{len(records)}, {seconds:,.0f} s of training and measuring in all"),
        ("Versions", _common(", ".join(f"{k} {v}" for k, v in record["versions"].items()) for record in records)),
        ("Hardware", _common(str(record["hardware"]) for record in records)),
        ("Threads", _common(str(record["threads"]) for record in records)),
        ("Last run ended", max((str(record["ended"]) for record in records), default="–")),
    ]


def _common(texts: Any) -> str:
    """The one text that all runs share, or each with its number of runs."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{text} ({number} runs)" for text, number in counts.items())


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """UTF-8, one header line; numbers as Python writes them, so that reading gives the same number; None is empty."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue().encode()


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
