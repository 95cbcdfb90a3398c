"""Runs the cells of one study one after another and stores each as it ends."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import torch

from .arms import Arm
from .results import CellKey, ResultsStore, cell_key, latest, settings_hash
from .studies import Study, StudyData
from .training import CellFailed, CellResult, train_cell

__all__ = ["Cell", "Progress", "RunReport", "environment", "plan", "run_cells"]


@dataclass(frozen=True)
class Cell:
    study: Study
    arm: Arm
    seed: int

    def settings(self) -> dict[str, Any]:
        return {"study": self.study.settings(), "arm": self.arm.settings()}

    @property
    def key(self) -> CellKey:
        return cell_key(self.identity())

    def identity(self) -> dict[str, Any]:
        """The fields of a results line that say which cell it is."""
        return {
            "study": self.study.name,
            "arm": self.arm.name,
            "seed": self.seed,
            "lr": self.study.lr,
            "settings_hash": settings_hash(self.settings()),
        }


class Progress(Protocol):
    """What the runner tells whoever shows progress."""

    def cell_started(self, cell: Cell, number: int, of: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def cell_ended(self, cell: Cell, record: dict[str, Any], steps: int) -> None: ...


@dataclass(frozen=True)
class RunReport:
    """The results line of every cell of the study, in the order of `cells`; `fresh` of them were run just now."""

    records: list[dict[str, Any]]
    fresh: int

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["status"] == "failed"]


def plan(study: Study, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Cell]:
    """Every arm of a seed before the next seed, so that a study stopped halfway has whole pairs."""
    return [Cell(study, arm, seed) for seed in seeds for arm in arms]


def run_cells(cells: Sequence[Cell], store: ResultsStore, progress: Progress, threads: int) -> RunReport:
    """Run what `store` does not have as "ok" yet. A cell that fails is stored as failed, with its traceback, and the
    next one is run; a failed cell is run again by the next call.

    The caller holds the store's lock, and keeps it until this returns. Raises what `study.data` raises: data that
    cannot be read are the user's to mend, and no cell's failure.
    """
    done = {key: record for key, record in latest(store.records()).items() if record["status"] == "ok"}
    todo = [cell for cell in cells if cell.key not in done]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data: StudyData | None = None
    loaded_seed: int | None = None
    try:
        for number, cell in enumerate(todo, start=1):
            progress.cell_started(cell, number, len(todo))
            if cell.seed != loaded_seed:
                data, loaded_seed = cell.study.data(cell.seed), cell.seed
            assert data is not None
            record, steps = _run(cell, data, progress, threads)
            store.append(record)
            done[cell.key] = record
            progress.cell_ended(cell, record, steps)
    finally:
        torch.set_num_threads(before)
    return RunReport([done[cell.key] for cell in cells], fresh=len(todo))


def _run(cell: Cell, data: StudyData, progress: Progress, threads: int) -> tuple[dict[str, Any], int]:
    begin = time.perf_counter()
    steps = 0

    def on_step(step: int) -> None:
        nonlocal steps
        steps = step
        progress.stepped(step)

    outcome: dict[str, Any]
    try:
        outcome = _ok(train_cell(cell.study, cell.arm, cell.seed, data, on_step))
    except Exception as error:
        outcome = {
            "status": "failed",
            "metrics": {"steps": steps},
            "history": {},
            "error": str(error) if isinstance(error, CellFailed) else f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    config = {**cell.settings(), "lr": cell.study.lr, "groups": outcome.pop("groups", None)}
    record = {
        **cell.identity(),
        # the split that the headline numbers come from; learning rates will be chosen on "validation" lines
        "split": "test",
        **outcome,
        "config": config,
        "versions": environment()["versions"],
        "hardware": environment()["hardware"],
        "threads": threads,
        "wall_seconds": time.perf_counter() - begin,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return record, steps


def _ok(result: CellResult) -> dict[str, Any]:
    return {
        "status": "ok",
        "metrics": result.metrics,
        "history": result.history,
        "groups": result.groups,
        "parameters": result.parameters,
        "random_angle": result.random_angle,
    }


def environment() -> dict[str, Any]:
    """Versions and hardware, as plain text."""
    versions = {"python": platform.python_version()}
    for name in ("geodescent", "torch", "numpy", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"versions": versions, "hardware": f"{_cpu_name()}, {os.cpu_count()} CPUs, {platform.system()}"}


def _cpu_name() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.split(":", 1)[1].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
