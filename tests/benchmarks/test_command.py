import json
import os
import re
import subprocess
import sys

import pytest
import torch
from geodescent.benchmarks import __main__ as command
from geodescent.benchmarks.growth import Series, measure_growth
from geodescent.benchmarks.report import Outcome, Table
from geodescent.benchmarks.steps import measure_steps
from typer.testing import CliRunner

NAMES = ["steps", "training", "growth", "memory", "drift"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recorded(monkeypatch):
    """The command with benchmarks that only write down how they were called."""
    calls = []

    def fake(name):
        def measure(*args, **kwargs):
            calls.append((name, args, kwargs))
            return Outcome(name, (Table(f"table of {name}", ("a",), (("1",),)),), {"name": name})

        return measure

    for name in NAMES:
        monkeypatch.setattr(command, f"measure_{name}", fake(name))
    return calls


def invoke(*arguments):
    return CliRunner().invoke(command.app, [str(a) for a in arguments])


def test_all_is_the_default(recorded):
    result = invoke()
    assert result.exit_code == 0
    assert [name for name, _, _ in recorded] == NAMES
    assert all(f"table of {name}" in result.output for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_can_be_chosen(recorded, name):
    assert invoke(name).exit_code == 0
    assert [called for called, _, _ in recorded] == [name]


def test_options_reach_the_benchmark(recorded, tmp_path):
    path = tmp_path / "out.json"
    result = invoke("steps", "--rounds", 7, "--threads", 1, "--seed", 3, "--json", path, "--date", "2026-01-31")
    assert result.exit_code == 0
    (_, _, options) = recorded[0]
    assert (options["rounds"], options["seed"], options["device"]) == (7, 3, "cpu")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["steps"] == {"name": "steps"}
    assert content["machine"]["threads"] == torch.get_num_threads() == 1
    assert content["machine"]["date"] == "2026-01-31"


def test_quick_is_shorter(recorded):
    invoke()
    long = {name: options for name, _, options in recorded}
    recorded.clear()
    invoke("--quick")
    short = {name: options for name, _, options in recorded}
    assert long["drift"]["steps"] == 100_000
    assert short["drift"]["steps"] < 10_000
    for name in ("steps", "training", "growth"):
        assert short[name]["rounds"] < long[name]["rounds"]


def test_markdown_holds_the_tables(recorded, tmp_path):
    path = tmp_path / "table.md"
    assert invoke("--markdown", path).exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert all(f"**table of {name}**" in text for name in NAMES)


def test_real_tables_fit_120_columns(monkeypatch):
    # names and figures as long as they get, on frames that are quick
    monkeypatch.setattr(command, "measure_steps", lambda **_: measure_steps([(1, 4, 2)] * 4, rounds=1, warmup=1))
    series = [Series("columns p", 2, ((24, 8, 1), (24, 8, 2), (24, 8, 4), (24, 8, 8)), 2.0)]
    monkeypatch.setattr(command, "measure_growth", lambda *_, **__: measure_growth(series, rounds=1, warmup=1))
    for name in ("steps", "growth"):
        result = invoke(name)
        assert result.exit_code == 0, result.exception
        tables = [line for line in result.output.splitlines() if re.match("[┏┡└┃│]", line)]
        assert tables
        assert max(map(len, tables)) <= 120


def test_the_module_runs_and_bad_devices_are_one_line():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
    words = [sys.executable, "-m", "geodescent.benchmarks", "drift", "--device", "cuda"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: error: device is 'cuda'")
    assert "Traceback" not in done.stderr
