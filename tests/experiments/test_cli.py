import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from geodescent.analysis import CERTIFICATES
from geodescent.experiments import certification, cli
from geodescent.experiments.certification import Certified, certify_all
from geodescent.experiments.results import ResultsStore
from geodescent.experiments.study_cifar10 import Cifar10Study
from geodescent.manifolds import Stiefel
from geodescent.optim import RiemannianAdam
from typer.testing import CliRunner

TINY = ["study", "modular", "--p", "5", "--train-fraction", "0.6", "--steps", "30", "--seeds", "2"]


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
    for needed in ("riemannian-adam", "Q/K moved", "minus", "not reached", "Report:"):
        assert needed in first.stdout
    assert "\x1b" not in first.stdout  # no colours and no moving bar in a pipe
    assert len(first.stdout.splitlines()) < 60
    page = tmp_path / "modular" / "report" / "index.html"
    assert str(page) in first.stdout
    text = page.read_text(encoding="utf-8")
    assert "<code>geodescent study modular --seeds 2 --steps 30 --p 5 --train-fraction 0.6 --out" in text
    assert "--lr" not in text  # not typed

    again = CliRunner().invoke(cli.app, [*arguments, "--arm", "frozen"])
    assert again.exit_code == 0
    assert "2 of 2 runs were there already" in again.stdout
    assert len(_lines(tmp_path)) == 6


def test_cifar10_from_end_to_end(tmp_path, write_cifar, monkeypatch):
    write_cifar(tmp_path / "data" / "cifar-10-batches-bin", records=420)
    monkeypatch.setattr(Cifar10Study, "__init__", _small(Cifar10Study.__init__))
    result = CliRunner().invoke(
        cli.app,
        f"study cifar10 --data {tmp_path / 'data'} --train-images 40 --epochs 1 --batch-size 20 --seeds 1 --threads 1 "
        f"--out {tmp_path / 'out'}".split(),
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "cifar10" / "cells.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"] * 3
    assert "test accuracy" in result.stdout


def _small(original):
    def init(self, **settings):
        original(self, **settings, records=420, width=16, validation_images=20)

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
    assert f"{whole} of 6 runs were there already" in done.stdout
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
    ):
        code, printed = _main(capsys, *arguments, *out)
        assert code == 2
        assert message in printed.err
        assert len(printed.err.splitlines()) == 1
        assert "Traceback" not in printed.err + printed.out


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

    monkeypatch.setattr(cli, "run_cells", interrupted)
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
