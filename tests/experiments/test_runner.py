import dataclasses
import json

import pytest
from geodescent.experiments import runner
from geodescent.experiments.arms import select_arms
from geodescent.experiments.results import ResultsStore
from geodescent.experiments.runner import plan, run_cells
from geodescent.experiments.studies import Cifar10Study
from geodescent.experiments.training import train_cell


class Quiet:
    def __init__(self):
        self.started, self.ended, self.steps = [], [], 0

    def cell_started(self, cell, number, of):
        self.started.append((cell.arm.name, cell.seed))

    def stepped(self, step):
        self.steps += 1

    def cell_ended(self, cell, record, steps):
        self.ended.append(record)


def _run(cells, folder):
    progress = Quiet()
    with ResultsStore(folder) as store:
        return run_cells(cells, store, progress, threads=1), progress


def test_every_line_has_what_others_rely_on(tiny_study, tmp_path):
    run, progress = _run(plan(tiny_study, select_arms(), [0]), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [line["arm"] for line in lines] == ["adamw", "frozen", "riemannian-adam"]
    for line in lines:
        assert line["study"] == "modular"
        assert (line["seed"], line["lr"], line["split"], line["status"]) == (0, tiny_study.lr, "test", "ok")
        assert all(value is None or isinstance(value, (int, float)) for value in line["metrics"].values())
        assert line["config"]["groups"]["frames"]["weight_decay"] == "none"
        assert line["config"]["groups"]["matrices"]["weight_decay"] == tiny_study.weight_decay
        assert line["config"]["study"]["p"] == 5
        assert line["versions"]["torch"]
        assert line["threads"] == 1
        assert line["wall_seconds"] > 0
    assert run.fresh == 3
    assert progress.steps == 24


def test_seeds_come_whole_pair_by_whole_pair(tiny_study):
    cells = plan(tiny_study, select_arms(["adamw", "frozen"]), [0, 1])
    assert [(cell.arm.name, cell.seed) for cell in cells] == [
        ("adamw", 0),
        ("frozen", 0),
        ("adamw", 1),
        ("frozen", 1),
    ]


def test_finished_cells_are_not_run_again_and_other_settings_are_other_cells(tiny_study, tmp_path):
    cells = plan(tiny_study, select_arms(["adamw", "frozen"]), [0])
    _run(cells[:1], tmp_path)
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert run.fresh == 1
    assert [record["arm"] for record in run.records] == ["adamw", "frozen"]
    for change in ({"steps": 4}, {"lr": 2e-3}, {"weight_decay": 0.5}):
        other = plan(dataclasses.replace(tiny_study, **change), select_arms(["adamw"]), [0])
        assert _run(other, tmp_path)[0].fresh == 1
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 5


def test_a_run_goes_on_after_a_torn_line(tiny_study, tmp_path):
    cells = plan(tiny_study, select_arms(["adamw", "frozen"]), [0])
    _run(cells, tmp_path)
    path = tmp_path / "cells.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-200])  # killed while it wrote the second cell
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert [record["status"] for record in run.records] == ["ok", "ok"]
    first, second = (json.loads(line) for line in path.read_bytes().splitlines())
    assert (first["arm"], second["arm"]) == ("adamw", "frozen")


def test_a_failing_cell_is_recorded_and_the_rest_runs(tiny_study, tmp_path, monkeypatch):
    def train(study, arm, seed, data, on_step):
        if arm.name == "frozen":
            on_step(3)
            raise RuntimeError("out of luck")
        return train_cell(study, arm, seed, data, on_step)

    monkeypatch.setattr(runner, "train_cell", train)
    cells = plan(tiny_study, select_arms(), [0])
    run, _ = _run(cells, tmp_path)
    assert [record["status"] for record in run.records] == ["ok", "failed", "ok"]
    (failed,) = run.failed
    assert failed["error"] == "RuntimeError: out of luck"
    assert "Traceback" in failed["traceback"]
    assert failed["metrics"] == {"steps": 3}

    monkeypatch.setattr(runner, "train_cell", train_cell)  # mended: only the failed cell is run again
    run, progress = _run(cells, tmp_path)
    assert progress.started == [("frozen", 0)]
    assert not run.failed


def test_a_diverged_cell_has_a_plain_message(tiny_study, tmp_path):
    cells = plan(dataclasses.replace(tiny_study, lr=1e30), select_arms(["adamw"]), [0])
    (failed,) = _run(cells, tmp_path)[0].failed
    assert failed["error"].startswith("the training loss became")


def test_data_that_cannot_be_read_are_not_a_failed_cell(tmp_path):
    from geodescent.experiments.studies import Cifar10Study

    cells = plan(Cifar10Study(data_folder=str(tmp_path / "none")), select_arms(), [0])
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        _run(cells, tmp_path / "out")
    assert not (tmp_path / "out" / "cells.jsonl").exists()


def test_the_content_of_the_data_makes_the_cell_and_not_its_place(tmp_path, write_cifar):
    def key(name, seed):
        write_cifar(tmp_path / name, seed=seed)
        study = Cifar10Study(data_folder=str(tmp_path / name), records=20)
        return plan(study, select_arms(["adamw"]), [0])[0].key

    assert key("a", seed=0) == key("b", seed=0)
    assert key("a", seed=0) != key("c", seed=1)
    assert key("a", seed=1) == key("c", seed=1)  # the same folder, written again with other data
