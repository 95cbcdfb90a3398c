"""The README's Python runs, in one session and in its order."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


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
