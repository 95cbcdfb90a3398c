import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from geodescent.analysis import CERTIFICATES
from geodescent.experiments import certification, cli
from geodescent.experiments.certification import Certified, certify_all
from geodescent.experiments.grid import FACTORIAL, SIZES, Grid, Variation
from geodescent.experiments.results import ResultsStore
from geodescent.experiments.study_cifar10 import Cifar10Study
from geodescent.manifolds import Stiefel
from geodescent.optim import RiemannianAdam
from typer.testing import CliRunner

TINY = ["study", "modular", "--quick", "--p", "5", "--train-fraction", "0.6"]
TINY += ["--steps", "30", "--seeds", "2", "--jobs", "1"]

TINY_SETTINGS = {"p": 5, "width": 16, "heads": 2, "steps": 8, "interval": 4, "train_fraction": 0.6, "recovery_steps": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    torch.set_num_threads(1)


def _lines(folder):
    return [json.loads(line) for line in (folder / "modular" / "cells.jsonl").read_text().splitlines()]


def test_a_study_from_end_to_end(tmp_path):
    arguments = [*TINY, "--out", str(tmp_path)]
    first = CliRunner().invoke(cli.app, arguments)
    assert first.exit_code == 0, first.output
    assert len(_lines(tmp_path)) == 6
    for needed in ("riemannian-adam", "Q/K moved", "minus", "not reached", "Report:", "what is claimed"):
        assert needed in first.stdout
    assert "6 runs to go; expected time at most about" in first.stdout.splitlines()[2]  # before it starts
    assert "\x1b" not in first.stdout  # no colours and no moving bar in a pipe
    assert len(first.stdout.splitlines()) < 70
    page = tmp_path / "modular" / "report" / "index.html"
    assert str(page) in first.stdout
    text = page.read_text(encoding="utf-8")
    assert "<code>geodescent study modular --quick --seeds 2 --steps 30 --p 5 --train-fraction 0.6 --out" in text
    assert "--lr" not in text  # not typed

    again = CliRunner().invoke(cli.app, [*arguments, "--arm", "frozen"])
    assert again.exit_code == 0
    assert "2 of 2 runs were there already" in again.stdout
    assert len(_lines(tmp_path)) == 6


def test_a_sweep_from_end_to_end(tmp_path, monkeypatch):
    """Every role of a study, at a size of milliseconds, two at a time, and the report rebuilt to the same bytes."""
    grid = Grid(
        ("adamw", "frozen", *FACTORIAL),
        lrs=(1e-3, 1e-2),
        decays=(1.0,),
        other_seeds=2,
        matched_seeds=2,
        variations={"cycles": Variation(("adamw", "riemannian-adam"), 2, {"decay_cycles": (1,)})},
    )
    monkeypatch.setitem(SIZES["modular"], "default", (TINY_SETTINGS, grid))
    result = CliRunner().invoke(cli.app, ["study", "modular", "--jobs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "modular" / "plan.json").read_text())
    assert {job["role"] for job in plan["jobs"]} == {"tuning", "report", "matching", "matched", "cycles"}
    assert set(plan["choices"]) == set(grid.arms)
    for name, match in plan["matched"].items():
        assert match["settled"], name
        assert 0.9 < match["length_ratio"] < 1.12, name
    done = {(line["arm"], line["seed"], line["lr"], line["settings_hash"]) for line in _lines(tmp_path)}
    assert {(job["arm"], job["seed"], job["lr"], job["settings_hash"]) for job in plan["jobs"]} == done
    page = tmp_path / "modular" / "report" / "index.html"
    before = page.read_bytes()
    page.unlink()
    rebuilt = CliRunner().invoke(cli.app, ["report", str(tmp_path / "modular")])
    assert rebuilt.exit_code == 0, rebuilt.output
    assert page.read_bytes() == before


CYCLED = Grid(
    ("adamw", "frozen"),
    lrs=(1e-3, 1e-2),
    decays=(1.0,),
    other_seeds=1,
    qk_scales={"adamw": (0.1, 1.0)},
    variations={
        "cycles": Variation(("adamw",), 1, {"decay_cycles": (1,)}),
        "control": Variation(("adamw", "frozen"), 1, {"train_fraction": (0.5,)}, lrs=(1e-3, 3e-3)),
    },
)


def test_one_learning_rate_replaces_every_sweep_and_without_decay_nothing_cycles(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES["modular"], "default", (TINY_SETTINGS, CYCLED))
    options = ["--lr", "0.003", "--weight-decay", "0", "--jobs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["study", "modular", *options])
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "modular" / "plan.json").read_text())
    assert sorted(job["role"] for job in plan["jobs"]) == ["control", "control", "report", "report"]
    assert {job["lr"] for job in plan["jobs"]} == {0.003}


def test_a_variation_that_cannot_run_is_an_error_before_the_first_run(tmp_path, monkeypatch):
    """Decay of 1/lr would shrink everything to nothing in one step."""
    monkeypatch.setitem(SIZES["modular"], "default", (TINY_SETTINGS, CYCLED))
    result = CliRunner().invoke(cli.app, ["study", "modular", "--weight-decay", "100", "--out", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert "weight_decay must be above 0 and below 1/lr where it cycles, found 100.0" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_cifar10_from_end_to_end(tmp_path, write_cifar, monkeypatch):
    write_cifar(tmp_path / "data" / "cifar-10-batches-bin", records=420)
    monkeypatch.setattr(Cifar10Study, "__init__", _small(Cifar10Study.__init__))
    result = CliRunner().invoke(
        cli.app,
        f"study cifar10 --quick --data {tmp_path / 'data'} --train-images 40 --epochs 1 --batch-size 20 --seeds 1 "
        f"--jobs 1 --out {tmp_path / 'out'}".split(),
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "cifar10" / "cells.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"] * 3
    assert "test accuracy" in result.stdout


def test_download_comes_before_the_study_and_its_failure_is_one_line(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "download_with_progress", lambda console, folder: asked.append(folder) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["study", "cifar10", "--data", str(tmp_path / "d"), "--download", "--out", str(tmp_path)])
    assert asked == [tmp_path / "d"]


def test_charlm_from_end_to_end(tmp_path):
    text = tmp_path / "any.txt"
    text.write_text("Grüße, 世界! to be, or not to be. " * 60, encoding="utf-8")
    arguments = ["study", "charlm", "--quick", "--data", str(text), "--steps", "10", "--width", "16", "--layers", "1"]
    result = CliRunner().invoke(cli.app, [*arguments, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "charlm" / "cells.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"] * 3
    assert "bits" in result.stdout


def test_a_cell_runs_from_its_stored_command_and_is_compared(tmp_path, capsys):
    assert CliRunner().invoke(cli.app, [*TINY, "--out", str(tmp_path)]).exit_code == 0
    line = _lines(tmp_path)[-1]
    words = shlex.split(line["command"])
    assert words[0] == "geodescent"
    folder = str(tmp_path / "modular")
    same = CliRunner().invoke(cli.app, [*words[1:], "--against", folder])
    assert same.exit_code == 0, same.output
    assert "to the last bit" in same.output
    path = tmp_path / "modular" / "cells.jsonl"
    changed = line | {"metrics": line["metrics"] | {"test_accuracy": 0.123}}
    path.write_text(path.read_text() + json.dumps(changed) + "\n")
    other = CliRunner().invoke(cli.app, [*words[1:], "--against", folder])
    assert other.exit_code == 1
    assert "test_accuracy: stored 0.123" in other.output
    code, printed = _main(capsys, *words[1:], "--seed", "5", "--against", folder)
    assert (code, "no finished line of this cell" in printed.err) == (2, True)


def _small(original):
    def init(self, **settings):
        original(self, **(settings | {"records": 420, "width": 16, "validation_images": 20}))

    return init


def test_a_killed_study_goes_on(tmp_path):
    """A real process, killed without warning while it trains, then run to its end by the same command."""
    command = [sys.executable, "-m", "geodescent.experiments.cli", *TINY, "--steps", "60", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    path = tmp_path / "modular" / "cells.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = path.read_bytes()
    whole = before.count(b"\n")
    assert 2 <= whole < 6
    with open(path, "ab") as file:
        file.write(b'{"study": "modular", "arm": "ada')  # and its last write was torn

    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{6 - whole} runs to go, {whole} there already" in done.stdout
    assert path.read_bytes().startswith(before)
    cells = [(line["arm"], line["seed"]) for line in _lines(tmp_path)]
    assert len(cells) == len(set(cells)) == 6


def _main(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code, capsys.readouterr()


def test_what_the_user_can_mend_is_one_line(tmp_path, capsys):
    out = ("--out", str(tmp_path / "out"))
    for arguments, message in (
        (("study", "modular", "--arm", "sgd"), "unknown arm 'sgd': the arms are adamw, frozen, riemannian-adam"),
        (("study", "modular", "--train-fraction", "1.5"), "train_fraction"),
        (("study", "cifar10", "--data", str(tmp_path / "none")), "none does not exist"),
        (("study", "charlm", "--data", str(tmp_path / "none")), "none does not exist"),
        (("study", "modular", "--quick", "--full"), "--quick and --full exclude each other"),
        (("study", "modular", "--backend", "slurm"), "backend must be one of local, ray, dask"),
        (("study", "modular", "--lr", "-1"), "lr must be positive"),
    ):
        code, printed = _main(capsys, *arguments, *out)
        assert code == 2
        assert message in printed.err
        assert len(printed.err.splitlines()) == 1
        assert "Traceback" not in printed.err + printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modulr", "--arm", "adamw"], "unknown study 'modulr'"),
        (["modular", "--arm", "sgd"], "unknown arm 'sgd'"),
        (["modular", "--arm", "adamw", "--set", "nonsense=1"], "expected NAME=VALUE with one of"),
        (["modular", "--arm", "adamw", "--set", "operation=add"], "the value is not JSON"),
        (["modular", "--arm", "adamw", "--set", 'steps="many"'], "wrong kind"),
        (["modular", "--arm", "adamw", "--data", "x"], "--data must not be given"),
        (["cifar10", "--arm", "adamw"], "--data must say where the data lie"),
    ],
)
def test_a_cell_that_is_not_one_is_one_line(capsys, words, message):
    code, printed = _main(capsys, "cell", *words)
    assert code == 2
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_folder_without_a_plan_has_no_report(tmp_path, capsys):
    code, printed = _main(capsys, "report", str(tmp_path))
    assert (code, "holds no plan.json" in printed.err) == (2, True)


def test_a_held_folder_and_a_damaged_file_are_one_line(tmp_path, capsys):
    with ResultsStore(tmp_path / "modular"):
        code, printed = _main(capsys, *TINY, "--out", str(tmp_path))
    assert (code, "in use" in printed.err) == (2, True)
    path = tmp_path / "modular" / "cells.jsonl"
    path.write_bytes(b"garbage\n")
    code, printed = _main(capsys, *TINY, "--out", str(tmp_path))
    assert code == 2
    assert f"{path}, line 1" in printed.err
    assert path.read_bytes() == b"garbage\n"


def test_a_failed_run_gives_a_report_and_exit_status_1(tmp_path, capsys):
    code, printed = _main(capsys, *TINY, "--lr", "1e30", "--arm", "adamw", "--out", str(tmp_path))
    assert code == 1
    assert "FAILED, the training loss became" in printed.out
    assert (tmp_path / "modular" / "report" / "index.html").exists()


def test_stopped_by_the_keyboard(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_jobs", interrupted)
    code, printed = _main(capsys, *TINY, "--out", str(tmp_path))
    assert code == 130
    assert "the same command goes on from here" in printed.out


def test_version(capsys):
    code, printed = _main(capsys, "--version")
    assert code == 0
    assert printed.out.startswith("geodescent ")


def test_certify_prints_every_certificate_and_holds(capsys):
    code, printed = _main(capsys, "certify", "--n", "8", "--p", "3")
    assert code == 0, printed.out
    for needed in ("steepest descent", "scale-free", "conditioning", "equivariance", "weight decay"):
        assert printed.out.count(f"│ {needed} ") == len(certification.CERTIFIED)


def test_certify_exits_1_when_a_claim_does_not_hold(capsys, monkeypatch):
    class Boaster(RiemannianAdam):
        @property
        def claims(self):
            return frozenset(CERTIFICATES)

    boaster = Certified("Boaster", lambda params: Boaster(params, eps=0.0, second_moment="element"), Stiefel())
    monkeypatch.setattr(certification, "CERTIFIED", (boaster,))
    code, printed = _main(capsys, "certify", "--n", "8", "--p", "3")
    assert code == 1
    assert "Boaster: equivariance does not hold" in printed.out


def test_certify_names_wide_frames(capsys):
    code, printed = _main(capsys, "certify", "--n", "3", "--p", "8")
    assert code == 2
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("shape", [(5, 1), (4, 4), (1, 1), (3, 5)])
def test_certify_refuses_shapes_that_tell_rules_apart_no_more(shape, capsys):
    code, printed = _main(capsys, "certify", "--n", str(shape[0]), "--p", str(shape[1]))
    assert code == 2
    assert "p must be above 1 and below n" in printed.err


@pytest.mark.parametrize("seed", range(3, 5))
def test_certificates_of_larger_frames_hold_as_claimed(seed):
    assert all(report.consistent for report in certify_all((2, 96, 32), seed))
