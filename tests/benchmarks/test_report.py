import io
import json
import math

import pytest
from geodescent.benchmarks.report import Outcome, Table, print_outcome, to_markdown, write_json, write_markdown
from rich.console import Console

TABLE = Table("One | title", ("who", "measured"), (("[bold]a|b[/bold]", "3.2 (3.0–3.4)"),), ("A [note].",))


def printed(outcome, width=120):
    stream = io.StringIO()
    print_outcome(outcome, Console(file=stream, width=width))
    return stream.getvalue()


def test_every_cell_and_note_is_printed_as_it_is():
    text = printed(Outcome("x", (TABLE,)))
    for part in ("One | title", "who", "measured", "[bold]a|b[/bold]", "3.2 (3.0–3.4)", "• A [note]."):
        assert part in text


def test_markdown_escapes_bars_and_lists_the_machine():
    text = to_markdown([Outcome("x", (TABLE,))], {"processor": "P", "threads": 2, "load_before": "0.5"})
    lines = text.splitlines()
    assert lines[0] == "Machine: processor P, threads 2, load before 0.5."
    assert "| [bold]a\\|b[/bold] | 3.2 (3.0–3.4) |" in lines
    assert "|---|---:|" in lines
    assert "A [note]." in lines


def test_rows_must_fit_the_header():
    with pytest.raises(ValueError, match=r"'t' has 1 cells, the header 2"):
        Table("t", ("a", "b"), (("only",),))


def test_files(tmp_path):
    outcome = Outcome(
        "steps", (TABLE,), {"ratio": 1.5, "shape": (2, 3), "error": math.inf, "nested": [{"x": math.nan}]}
    )
    path = tmp_path / "new" / "out.json"
    write_json(path, [outcome], {"date": "2026-01-31"})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert content["machine"] == {"date": "2026-01-31"}
    assert content["steps"] == {"ratio": 1.5, "shape": [2, 3], "error": None, "nested": [{"x": None}]}
    write_markdown(tmp_path / "new" / "out.md", [outcome], {"date": "2026-01-31"})
    assert "One | title" in (tmp_path / "new" / "out.md").read_text(encoding="utf-8")
