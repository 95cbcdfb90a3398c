"""Cells over real local clusters of two workers, and one cell over two processes of torchrun."""

import json
import os
import subprocess
import sys

import pytest
from geodescent.experiments.arms import select_arms
from geodescent.experiments.cells import Cell, fingerprint, run_cell
from geodescent.experiments.protocol import Job
from geodescent.experiments.results import ResultsStore
from geodescent.experiments.runner import Pool, run_jobs
from geodescent.experiments.study_modular import ModularStudy


class Quiet:
    def round_started(self, cells, known): ...
    def cell_ended(self, cell, record): ...


@pytest.fixture
def study():
    return ModularStudy(p=5, width=16, heads=2, steps=8, interval=4, train_fraction=0.6)


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_cluster_of_two_workers_gives_the_numbers_of_one_process(backend, study, tmp_path):
    pytest.importorskip({"dask": "distributed", "ray": "ray"}[backend])
    cells = [Cell(study, arm, seed) for seed in (0, 1) for arm in select_arms(["adamw", "riemannian-adam"])]
    cells.append(Cell(ModularStudy(p=5, width=16, heads=2, steps=8, lr=1e30, train_fraction=0.6), cells[0].arm, 0))
    jobs = [Job("report", cell) for cell in cells]
    with ResultsStore(tmp_path) as store:
        run = run_jobs(lambda _: jobs, store, Pool(workers=2, threads=1, backend=backend), Quiet())
    records = [record for _, record in run.jobs]
    assert [record["status"] for record in records] == ["ok"] * 4 + ["failed"]
    assert "Traceback" in records[-1]["traceback"]
    assert [fingerprint(record) for record in records[:4]] == [fingerprint(run_cell(cell, 1)) for cell in cells[:4]]
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 5


def test_torchrun_shares_one_cell_among_two_processes(tmp_path):
    """The batch does not divide by two; the numbers are those of one process to rounding."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    study = ["study", "charlm", "--data", str(text), "--quick", "--arm", "riemannian-adam", "--seeds", "1"]
    study += ["--steps", "20", "--width", "16", "--layers", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def lines(name, *launcher):
        command = [sys.executable, *launcher, "-m", "geodescent.experiments.cli", *study, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / name / "charlm" / "cells.jsonl").read_text().splitlines()]

    (one,) = lines("one")
    (two,) = lines("two", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert (one["processes"], two["processes"]) == (1, 2)
    for name, value in one["metrics"].items():
        if name != "frame_error":
            assert two["metrics"][name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
    assert one["metrics"]["qk_movement"] > 0.01
