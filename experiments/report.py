"""The report folder of a study: one self-contained HTML page, the same as Markdown, CSV and SVG of each plot."""

from __future__ import annotations

import base64
import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from .arms import ARMS
from .claims import Claim, claims_of, counts
from .figures import ReportFigure, figures_of
from .files import write_whole
from .grid import FACTORIAL
from .plan import read_plan
from .studies import study_from_settings
from .study import Study
from .summary import Summary, summarize
from .tables import claim_table, control_table, factorial_table, statistics_table, tuning_table

__all__ = ["Report", "load_report", "markdown_text", "report_folder"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """Everything that a report says, before it is laid out."""

    folder: Path
    study: Study
    plan: Mapping[str, Any]
    roles: Mapping[str, Sequence[Record]]
    summary: Summary
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class _Shown:
    figure: ReportFigure
    source: str  # a data: URI
    csv_name: str
    svg_name: str


def load_report(folder: Path) -> Report:
    """What the results folder of a study says. Raises `ResultsError` where it holds none."""
    plan, roles = read_plan(folder)
    study = study_from_settings(plan["study"], plan["settings"])
    summary = summarize(roles.get("report", []), study.headline)
    return Report(folder, study, plan, roles, summary, claims_of(plan["study"], roles))


def report_folder(folder: str | os.PathLike[str]) -> Path:
    """Write `folder/report` from the stored results; returns the path of the page.

    Each file is written beside its name and moved there whole, the page last, so a crash leaves the old page or the
    new one.
    """
    report = load_report(Path(folder))
    out = report.folder / "report"
    out.mkdir(parents=True, exist_ok=True)
    shown = []
    for figure in figures_of(report.roles, report.summary):
        svg = figure.svg()
        names = f"{figure.name}.csv", f"{figure.name}.svg"
        write_whole(out / names[0], _csv(figure.header, figure.rows))
        write_whole(out / names[1], svg)
        shown.append(_Shown(figure, "data:image/svg+xml;base64," + base64.b64encode(svg).decode(), *names))
    write_whole(out / "table.csv", _csv(report.summary.header, report.summary.rows))
    write_whole(out / "report.md", _render(report, shown, "report.md").encode())
    page = out / "index.html"
    write_whole(page, _render(report, shown, "report.html").encode())
    return page


def _render(report: Report, shown: Sequence[_Shown], template: str) -> str:
    """The page as text. Everything that comes from settings or results is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=template.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = markdown_text
    records = [record for own in report.roles.values() for record in own]
    failures = {(r["arm"], r["seed"], r["lr"], r["settings_hash"]): r for r in records if r["status"] == "failed"}
    return environment.get_template(template).render(
        study=report.study,
        summary=report.summary,
        figures=shown,
        claims=claim_table(report.claims),
        counts=counts(report.claims),
        tables=[
            table
            for table in (
                statistics_table(report.summary),
                factorial_table(report.roles, report.plan, FACTORIAL),
                control_table(report.roles),
                tuning_table(report.roles, report.study.headline),
                tuning_table(report.roles, report.study.headline, "control"),
            )
            if table is not None
        ],
        arms=[(name, _describe(name)) for name in dict.fromkeys(record["arm"] for record in records)],
        decay=_decay(records),
        failures=list(failures.values()),
        facts=_facts(report, records),
    )


def _describe(arm: str) -> str:
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


def _facts(report: Report, records: Sequence[Record]) -> list[tuple[str, str]]:
    cells = list({(r["arm"], r["seed"], r["lr"], r["settings_hash"]): r for r in records}.values())
    seconds = sum(record["wall_seconds"] for record in cells)
    by_role = ", ".join(f"{len(own)} {role}" for role, own in report.roles.items())
    ended = sorted(str(record["ended"]) for record in cells)
    example = next((record["command"] for record in report.roles.get("report", ()) if "command" in record), "–")
    settings = ", ".join(f"{name} = {value}" for name, value in report.plan["settings"].items())
    return [
        ("Command", report.plan["command"]),
        ("Command of one run", example),
        ("Task", report.study.describe()),
        ("Settings, this project's choices", settings),
        ("Grid", ", ".join(f"{name} = {value}" for name, value in report.plan["grid"].items() if name != "arms")),
        ("Seeds reported", _seeds(report.roles.get("report", ()))),
        ("Seeds for tuning, not reported", _seeds(report.roles.get("tuning", ()))),
        ("Runs", f"{len(cells)} ({by_role}; some serve twice), {seconds / 3600:.2f} hours of one worker in all"),
        ("Versions", _common(", ".join(f"{k} {v}" for k, v in record["versions"].items()) for record in cells)),
        ("Hardware", _common(str(record["hardware"]) for record in cells)),
        ("Threads", _common(str(record["threads"]) for record in cells)),
        ("Run from", f"{ended[0]} to {ended[-1]}" if ended else "–"),
    ]


def _seeds(records: Sequence[Record]) -> str:
    return ", ".join(map(str, sorted({record["seed"] for record in records}))) or "none"


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


def markdown_text(text: object) -> str:
    """`text` as Markdown shows it: nothing in it starts a tag, a cell or an emphasis."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return "".join("\\" + character if character in "\\|*_`[]" else character for character in escaped)
