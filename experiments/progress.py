"""Progress of a study: how long it will take before it starts, a bar on a terminal, a line a run elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .cells import Cell
from .evaluation import evaluate
from .starts import build_model
from .steppers import build_stepper
from .study import Study

__all__ = ["StudyProgress", "seconds_per_cell", "show_progress"]


def seconds_per_cell(cell: Cell, threads: int, timed: int = 8) -> float:
    """What the cell will take at most, from a few of its steps and one evaluation, on this machine as it is now."""
    study, before = cell.study, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        begin = time.perf_counter()
        data = study.data(cell.seed)
        loading = time.perf_counter() - begin
        model = build_model(cell.arm, study.build, cell.seed, study.input_square_norm)
        stepper = build_stepper(cell.arm, model, study.hyperparameters())
        for number, (inputs, targets) in enumerate(itertools.islice(data.batches(), timed + 2)):
            if number == 2:  # the first ones warm up
                begin = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        a_step = (time.perf_counter() - begin) / timed
        begin = time.perf_counter()
        for split in (data.train, data.validation):
            evaluate(model, split)
        evaluation = time.perf_counter() - begin
        begin = time.perf_counter()
        evaluate(model, data.test)
        last = time.perf_counter() - begin
    finally:
        torch.set_num_threads(before)
    return loading + last + a_step * study.total_steps + evaluation * (1 + study.total_steps / study.evaluate_every)


class StudyProgress:
    """Counts cells. What is left is judged by what the cells of this run took.

    Args:
        bar: the bar to move, or None for plain lines.
        workers: cells at a time.
    """

    def __init__(self, console: Console, study: Study, bar: Progress | None, threads: int, workers: int) -> None:
        self.console, self.study, self.bar = console, study, bar
        self.threads, self.workers = threads, workers
        self.task: TaskID | None = None
        self.known = 0
        self.ended = 0
        self.left = 0
        self.seconds = 0.0
        self.work = 0  # steps at most of the cells that have ended
        self.work_left = 0

    def round_started(self, cells: Sequence[Cell], known: int) -> None:
        first = not self.known
        self.left, self.work_left = len(cells), sum(cell.study.total_steps for cell in cells)
        if first:
            self._say(f"{self.study.title}. {self.study.describe()}.")
        more = known - self.known
        self.known = known
        text = f"{len(cells)} runs to go"
        if known > len(cells):
            text += f", {known - len(cells)} there already or shared" if first else f", {more} of them new"
        if first:
            text += f"; {self._estimate(cells)}"
        self._say(text)
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=len(cells))
            else:
                self.bar.update(self.task, total=self.ended + len(cells))

    def _estimate(self, cells: Sequence[Cell]) -> str:
        each = seconds_per_cell(cells[0], self.threads) / max(cells[0].study.total_steps, 1)
        total = each * self.work_left / self.workers
        return f"expected time at most about {_duration(total)} for these, {self.workers} at a time"

    def cell_ended(self, cell: Cell, record: dict[str, Any]) -> None:
        self.ended += 1
        self.left -= 1
        self.seconds += record["wall_seconds"]
        self.work += cell.study.total_steps
        self.work_left -= cell.study.total_steps
        tuned = " (tuning)" if record["split"] == "validation" else ""
        text = f"{cell.arm.name}, lr {cell.study.lr:g}, seed {cell.seed}{tuned}: {_outcome(cell, record)}"
        text += f", {record['wall_seconds']:.1f} s"
        if self.left:
            text += f"; {self.left} to go, about {_duration(self.seconds / self.work * self.work_left / self.workers)}"
        self._say(text)
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.ended)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


@contextmanager
def show_progress(console: Console, study: Study, threads: int, workers: int) -> Iterator[StudyProgress]:
    """A `StudyProgress` that suits the console."""
    if not console.is_terminal:
        yield StudyProgress(console, study, None, threads, workers)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        yield StudyProgress(console, study, bar, threads, workers)


def _outcome(cell: Cell, record: dict[str, Any]) -> str:
    if record["status"] == "failed":
        return f"FAILED, {record['error']}"
    headline = cell.study.headline
    value = record["metrics"].get(headline.metric)
    if value is None:
        return f"{headline.label}: not reached (validation {record['metrics']['validation_accuracy']:.1%})"
    unit = f" {headline.unit}" if headline.unit in ("%", "bits") else ""
    return f"{headline.label} {value * headline.scale:,.{headline.digits}f}{unit}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
