"""The README's Python runs, in one session and in its order."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from geodescent.experiments.plan import read_plan
from geodescent.experiments.readme import headline_tables
from geodescent.experiments.report import report_folder
from geodescent.experiments.results import cell_key

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "results"
STUDIES = ("cifar10", "modular", "charlm")


def test_readme_snippets_run():
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)
    assert "a Riemannian step" in printed.getvalue()
    assert "steepest descent" in printed.getvalue()


def test_the_tables_of_speed_are_those_of_the_last_run():
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## Speed") : text.index("## What the studies found")]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert len(tables) == 2
    results = (README.parent / "results" / "benchmarks.md").read_text(encoding="utf-8")
    for table in tables:
        assert table in results


def test_the_tables_of_studies_are_those_of_the_stored_results():
    text = README.read_text(encoding="utf-8")
    command = re.search(r"^geodescent report (.*) --readme README.md$", text, re.MULTILINE)
    assert command is not None
    assert command[1].split() == [f"results/{study}" for study in STUDIES]
    section = text[text.index("<!-- studies -->\n") : text.index("<!-- end of studies -->")]
    assert section == "<!-- studies -->\n" + headline_tables([RESULTS / study for study in STUDIES])


@pytest.mark.parametrize("study", STUDIES)
def test_the_reports_in_the_repository_are_those_of_the_stored_results(study, tmp_path):
    for name in ("plan.json", "cells.jsonl"):
        (tmp_path / name).write_bytes((RESULTS / study / name).read_bytes())
    rebuilt = report_folder(tmp_path).parent
    stored = RESULTS / study / "report"
    assert sorted(path.name for path in stored.iterdir()) == sorted(path.name for path in rebuilt.iterdir())
    for name in ("report.md", "table.csv"):
        assert (stored / name).read_text(encoding="utf-8") == (rebuilt / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("study", STUDIES)
def test_every_planned_run_is_stored_and_none_failed(study):
    plan, roles = read_plan(RESULTS / study)
    records = [record for own in roles.values() for record in own]
    assert len(records) == len(plan["jobs"])
    assert {record["status"] for record in records} == {"ok"}
    assert {cell_key(record) for record in records} == {cell_key(job) for job in plan["jobs"]}
