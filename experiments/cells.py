"""A cell: one arm, one seed, under one study's settings; and the results line that running it gives."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from .arms import ARMS, Arm
from .distributed import Processes
from .results import CellKey, cell_key, settings_hash, to_json
from .studies import study_from_settings
from .study import Study, StudyData
from .training import CellFailed, CellResult, train_cell

__all__ = ["TUNING_SEED", "Cell", "cell_of", "environment", "fingerprint", "run_cell"]

#: seeds from here on choose learning rates and are never reported
TUNING_SEED = 1000


@dataclass(frozen=True)
class Cell:
    study: Study
    arm: Arm
    seed: int

    def settings(self) -> dict[str, Any]:
        return {"study": self.study.settings(), "arm": self.arm.settings()}

    @functools.cached_property
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

    def command(self, threads: int) -> str:
        """What runs this cell alone, with every setting that is not its study's default."""
        words = ["geodescent", "cell", self.study.name, "--arm", self.arm.name, "--seed", str(self.seed)]
        for field in dataclasses.fields(self.study):
            value = getattr(self.study, field.name)
            if field.name == self.study.location:
                words += ["--data", value]
            elif value != field.default:
                words += ["--set", f"{field.name}={json.dumps(to_json(value))}"]
        return shlex.join([*words, "--threads", str(threads)])


def cell_of(record: Mapping[str, Any], **changes: Any) -> Cell:
    """The cell of a results line; `changes` are settings that are not stored, such as where the data lie.

    Raises `ValueError` for an arm or a study that this version does not know.
    """
    if record["arm"] not in ARMS:
        raise ValueError(f"unknown arm {record['arm']!r}: this version has {', '.join(ARMS)}")
    study = study_from_settings(record["study"], record["config"]["study"] | {"lr": record["lr"]}, **changes)
    return Cell(study, ARMS[record["arm"]], record["seed"])


def run_cell(
    cell: Cell,
    threads: int,
    on_step: Callable[[int], None] | None = None,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Train the cell on `threads` threads; returns its results line, "failed" with the traceback where it raised."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    begin = time.perf_counter()
    steps = 0

    def count(step: int) -> None:
        nonlocal steps
        steps = step
        if on_step is not None:
            on_step(step)

    outcome: dict[str, Any]
    try:
        data = _data(cell.study, cell.seed)
        result = train_cell(cell.study, cell.arm, cell.seed, data, count, processes)
        outcome = _ok(result)
    except Exception as error:
        outcome = {
            "status": "failed",
            "metrics": {"steps": steps},
            "history": {},
            "error": str(error) if isinstance(error, CellFailed) else f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    finally:
        torch.set_num_threads(before)
    config = {**cell.settings(), "groups": outcome.pop("groups", None)}
    return {
        **cell.identity(),
        "split": "validation" if cell.seed >= TUNING_SEED else "test",
        **outcome,
        "config": config,
        "command": cell.command(threads),
        **environment(),
        "threads": threads,
        "processes": 1 if processes is None else processes.count,
        "wall_seconds": time.perf_counter() - begin,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def fingerprint(record: Mapping[str, Any]) -> str:
    """Sixteen hex digits of every number that running the cell again must give: all but times."""
    numbers = {name: record.get(name) for name in ("metrics", "history", "cycles", "random_angle", "parameters")}
    return hashlib.sha256(json.dumps(to_json(numbers), sort_keys=True).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _data(study: Study, seed: int) -> StudyData:
    """Several arms of one seed and of one study's settings read the same data; a worker keeps the last two."""
    return study.data(seed)


def _ok(result: CellResult) -> dict[str, Any]:
    return {"status": "ok", **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)}}


@functools.cache
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
