import dataclasses
import json
from contextlib import contextmanager

import pytest
import torch
from geodescent.experiments import cells as cells_module
from geodescent.experiments.arms import ARMS, select_arms
from geodescent.experiments.cells import Cell, cell_of, fingerprint, run_cell
from geodescent.experiments.protocol import Job
from geodescent.experiments.results import ResultsStore
from geodescent.experiments.runner import Pool, run_jobs
from geodescent.experiments.single import cell_from_words
from geodescent.experiments.study_cifar10 import Cifar10Study
from geodescent.experiments.training import train_cell

FEW = ("adamw", "frozen", "riemannian-adam")


class Quiet:
    def __init__(self):
        self.started, self.ended = [], []

    def round_started(self, cells, known):
        self.started += [(cell.arm.name, cell.seed) for cell in cells]

    def cell_ended(self, cell, record):
        self.ended.append(record)


def _cells(study, arms=FEW, seeds=(0,)):
    return [Cell(study, arm, seed) for seed in seeds for arm in select_arms(arms)]


def _run(cells, folder, pool=None):
    progress = Quiet()
    with ResultsStore(folder) as store:
        jobs = [Job("report", cell) for cell in cells]
        return run_jobs(lambda _: jobs, store, pool or Pool(), progress), progress


def _lines(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def test_every_line_has_what_others_rely_on(tiny_study, tmp_path):
    run, _ = _run(_cells(tiny_study), tmp_path)
    lines = _lines(tmp_path)
    assert [line["arm"] for line in lines] == list(FEW)
    for line in lines:
        assert line["study"] == "modular"
        assert (line["seed"], line["lr"], line["split"], line["status"]) == (0, tiny_study.lr, "test", "ok")
        assert all(value is None or isinstance(value, (int, float)) for value in line["metrics"].values())
        assert line["config"]["groups"]["matrices"]["weight_decay"] == tiny_study.weight_decay
        assert line["config"]["study"]["p"] == 5
        assert line["versions"]["torch"]
        assert line["hardware"]
        assert line["threads"] == 1
        assert line["wall_seconds"] > 0
        assert line["timing"]["seconds_per_step"] > 0
    assert run.fresh == 3


@pytest.mark.parametrize("name", ["riemannian-adam", "muon"])
def test_the_stored_command_runs_the_cell_again_to_the_last_bit(tiny_study, name):
    study = dataclasses.replace(tiny_study, decay_cycles=1, recovery_steps=2, lr=2e-3)
    record = run_cell(Cell(study, ARMS[name], 3), threads=1)
    words = record["command"].split()
    assert words[:3] == ["geodescent", "cell", "modular"]
    options = list(zip(words[3::2], words[4::2], strict=True))
    settings = [value for option, value in options if option == "--set"]
    given = {option: value for option, value in options if option != "--set"}
    again = cell_from_words("modular", given["--arm"], int(given["--seed"]), settings, None)
    assert again.key == Cell(study, ARMS[name], 3).key
    assert cell_of(json.loads(json.dumps(record))).key == again.key
    repeated = run_cell(again, threads=int(given["--threads"]))
    assert fingerprint(repeated) == fingerprint(json.loads(json.dumps(record)))
    other = run_cell(dataclasses.replace(again, seed=4), threads=1)
    assert fingerprint(other) != fingerprint(record)


def test_tuning_seeds_are_the_validation_split(tiny_study):
    assert run_cell(Cell(tiny_study, ARMS["frozen"], 1000), threads=1)["split"] == "validation"


def test_finished_cells_are_not_run_again_and_other_settings_are_other_cells(tiny_study, tmp_path):
    cells = _cells(tiny_study, ("adamw", "frozen"))
    _run(cells[:1], tmp_path)
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert run.fresh == 1
    assert [record["arm"] for _, record in run.jobs] == ["adamw", "frozen"]
    for change in ({"steps": 4}, {"lr": 2e-3}, {"weight_decay": 0.5}, {"qk_scale": 0.5}):
        other = _cells(dataclasses.replace(tiny_study, **change), ("adamw",))
        assert _run(other, tmp_path)[0].fresh == 1
    assert len(_lines(tmp_path)) == 6


def test_later_rounds_see_what_earlier_ones_gave_and_a_cell_of_two_jobs_runs_once(tiny_study, tmp_path):
    first, second, _ = _cells(tiny_study)

    def jobs_of(ended):
        jobs = [Job("tuning", first), Job("report", first)]
        if first.key in ended:
            assert ended[first.key]["status"] == "ok"
            jobs.append(Job("matched", second))
        return jobs

    planned = []
    with ResultsStore(tmp_path) as store:
        run = run_jobs(jobs_of, store, Pool(), Quiet(), lambda jobs, ended: planned.append((len(jobs), len(ended))))
    assert planned == [(2, 0), (3, 1), (3, 2)]
    assert run.fresh == 2
    assert [job.role for job, _ in run.jobs] == ["tuning", "report", "matched"]


def test_several_at_a_time_give_the_same_numbers(tiny_study, tmp_path):
    cells = _cells(tiny_study, seeds=(0, 1))
    one, _ = _run(cells, tmp_path / "one")
    two, _ = _run(cells, tmp_path / "two", Pool(workers=2, threads=1))
    assert [fingerprint(record) for _, record in one.jobs] == [fingerprint(record) for _, record in two.jobs]
    assert len(_lines(tmp_path / "two")) == 6


def test_a_run_goes_on_after_a_torn_line(tiny_study, tmp_path):
    cells = _cells(tiny_study, ("adamw", "frozen"))
    _run(cells, tmp_path)
    path = tmp_path / "cells.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-200])  # killed while it wrote the second cell
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert [record["status"] for _, record in run.jobs] == ["ok", "ok"]
    assert [line["arm"] for line in _lines(tmp_path)] == ["adamw", "frozen"]


def test_a_failing_cell_is_recorded_and_the_rest_runs(tiny_study, tmp_path, monkeypatch):
    def train(study, arm, seed, data, on_step, processes):
        if arm.name == "frozen":
            on_step(3)
            raise RuntimeError("out of luck")
        return train_cell(study, arm, seed, data, on_step, processes)

    monkeypatch.setattr(cells_module, "train_cell", train)
    cells = _cells(tiny_study)
    run, _ = _run(cells, tmp_path)
    assert [record["status"] for _, record in run.jobs] == ["ok", "failed", "ok"]
    (failed,) = run.failed
    assert failed["error"] == "RuntimeError: out of luck"
    assert "Traceback" in failed["traceback"]
    assert failed["metrics"] == {"steps": 3}

    monkeypatch.setattr(cells_module, "train_cell", train_cell)  # mended: only the failed cell is run again
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert not run.failed


def test_a_diverged_cell_has_a_plain_message(tiny_study, tmp_path):
    (failed,) = _run(_cells(dataclasses.replace(tiny_study, lr=1e30), ("adamw",)), tmp_path)[0].failed
    assert failed["error"].startswith("the training loss became")


def test_threads_are_those_asked_for_while_a_cell_runs_and_restored(tiny_study, monkeypatch):
    seen = []
    monkeypatch.setattr(cells_module, "train_cell", lambda *_: seen.append(torch.get_num_threads()) or 1 / 0)
    before = torch.get_num_threads()
    assert run_cell(Cell(tiny_study, ARMS["adamw"], 0), threads=2)["status"] == "failed"
    assert seen == [2]
    assert torch.get_num_threads() == before


def test_data_that_cannot_be_read_are_not_a_failed_cell(tmp_path):
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        _run(_cells(Cifar10Study(data_folder=str(tmp_path / "none"))), tmp_path / "out")
    assert not (tmp_path / "out" / "cells.jsonl").exists()


def test_the_content_of_the_data_makes_the_cell_and_not_its_place(tmp_path, write_cifar):
    def key(name, seed):
        write_cifar(tmp_path / name, seed=seed)
        return _cells(Cifar10Study(data_folder=str(tmp_path / name), records=20), ("adamw",))[0].key

    assert key("a", seed=0) == key("b", seed=0)
    assert key("a", seed=0) != key("c", seed=1)
    assert key("a", seed=1) == key("c", seed=1)  # the same folder, written again with other data


@pytest.mark.parametrize(("settings", "name"), [({"backend": "slurm"}, "backend"), ({"address": "x:1"}, "address")])
def test_a_pool_is_checked(settings, name):
    with pytest.raises(ValueError, match=name):
        Pool(**settings)


@contextmanager
def _without(monkeypatch, module):
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, module, None)
        yield


@pytest.mark.parametrize(("backend", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_a_backend_that_is_not_installed_says_what_to_install(tiny_study, tmp_path, monkeypatch, backend, module):
    with _without(monkeypatch, module), pytest.raises(ValueError, match="pip install"):
        _run(_cells(tiny_study), tmp_path, Pool(2, backend=backend))
