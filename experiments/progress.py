"""Progress of a study: a bar with the time left on a terminal, a line a run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .runner import Cell

__all__ = ["StudyProgress", "show_progress"]

#: steps of the first run that the first estimate of the whole study is made from, after a few that warm up
_WARM_UP, _TIMED = 5, 25


class StudyProgress:
    """Counts steps over all runs. A run that ends early takes its unused steps off the total, so the time left is
    that of the steps still to come at most.

    Args:
        bar: the bar to move, or None for plain lines.
    """

    def __init__(self, console: Console, cells: Sequence[Cell], bar: Progress | None) -> None:
        self.console = console
        self.cells = cells
        self.bar = bar
        self.task: TaskID | None = None
        self.total = 0
        self.before = 0  # steps of the runs that have ended
        self.begin = time.perf_counter()
        self.timed: tuple[int, float] | None = None
        self.estimated = False

    def cell_started(self, cell: Cell, number: int, of: int) -> None:
        if number == 1:
            self.begin = time.perf_counter()
            self.total = of * cell.study.total_steps
            done = f", {len(self.cells) - of} of {len(self.cells)} there already" if of < len(self.cells) else ""
            self._say(f"{cell.study.title}: {of} runs of at most {cell.study.total_steps:,} steps{done}")
            self._say(cell.study.describe())
            if self.bar is not None:
                self.task = self.bar.add_task("", total=self.total)
        self.label = f"{number}/{of} {cell.arm.name}, seed {cell.seed}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=self.label)

    def stepped(self, step: int) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.before + step)
        if self.estimated:
            return
        if self.timed is None and step >= _WARM_UP:
            self.timed = (step, time.perf_counter())
        elif self.timed is not None and step >= self.timed[0] + _TIMED:
            a_step = (time.perf_counter() - self.timed[1]) / (step - self.timed[0])
            self._say(f"Expected: at most about {_duration(a_step * (self.total - step))} at this pace")
            self.estimated = True

    def cell_ended(self, cell: Cell, record: dict[str, Any], steps: int) -> None:
        self.before += steps
        self.total -= cell.study.total_steps - steps
        self.estimated = True
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.before, total=self.total)
        elapsed = time.perf_counter() - self.begin
        left = elapsed / max(self.before, 1) * (self.total - self.before)
        text = f"{self.label}: {_outcome(cell, record)}, {record['wall_seconds']:.1f} s"
        if self.bar is None and left > 0:
            text += f"; at most about {_duration(left)} left"
        self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


@contextmanager
def show_progress(console: Console, cells: Sequence[Cell]) -> Iterator[StudyProgress]:
    """A `StudyProgress` that suits the console."""
    if not console.is_terminal:
        yield StudyProgress(console, cells, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
        TimeElapsedColumn(),
        TextColumn("left at most"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=60) as bar:
        yield StudyProgress(console, cells, bar)


def _outcome(cell: Cell, record: dict[str, Any]) -> str:
    if record["status"] == "failed":
        return f"FAILED, {record['error']}"
    headline = cell.study.headline
    value = record["metrics"].get(headline.metric)
    if value is None:
        return f"{headline.label}: not reached (validation {record['metrics']['validation_accuracy']:.1%})"
    unit = " %" if headline.unit == "%" else ""
    return f"{headline.label} {value * headline.scale:,.{headline.digits}f}{unit}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
