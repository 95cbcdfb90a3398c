"""The command: ``python -m geodescent.benchmarks [steps|bounds|training|tracker|growth|memory|attention|drift]``."""

from __future__ import annotations

import os

# Read when numpy is loaded. pymanopt is measured with one BLAS thread: on small matrices more make it slower, twice on
# two cores, and spin on after it, on a core that the next contender needs, which then took up to twice its time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .attention import measure_attention
from .bounds import measure_bounds
from .drift import measure_drift
from .growth import SERIES, Series, measure_growth
from .memory import measure_memory
from .peers import describe_machine
from .report import Outcome, print_outcome, write_json, write_markdown
from .steps import SHAPES, measure_steps
from .tracker import measure_tracker
from .training import measure_training

WIDTH = 120

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Benchmark(StrEnum):
    """What can be measured."""

    steps = "steps"
    bounds = "bounds"
    training = "training"
    tracker = "tracker"
    growth = "growth"
    memory = "memory"
    attention = "attention"
    drift = "drift"
    all = "all"


@app.command()
def run(
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")] = Benchmark.all,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds and short runs: a look, not a figure.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds. Default: 25 steps, 15 otherwise.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    device: Annotated[str, typer.Option(help="Device of the tensors, cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of frames, gradients, models and tokens.")] = 0,
    json: Annotated[Path | None, typer.Option(help="File for all numbers.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the tables.")] = None,
    date: Annotated[str | None, typer.Option(help="Date to record with the figures.")] = None,
) -> None:
    """Measure speed, growth, memory and drift against peers. Every figure is a ratio of runs in turn, or says so."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and torch finds no CUDA device; use --device cpu")
    torch.set_num_threads(threads)
    machine = describe_machine(device, date)
    console = _console()
    console.print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items()), highlight=False)
    console.print()
    outcomes: list[Outcome] = []
    for name, measure in _benchmarks(quick, rounds, device, seed).items():
        if what not in (Benchmark.all, name):
            continue
        outcomes.append(measure())
        print_outcome(outcomes[-1], console)
        # after each one, so that a run that is stopped has written what it has
        if json is not None:
            write_json(json, outcomes, machine)
        if markdown is not None:
            write_markdown(markdown, outcomes, machine)


def _benchmarks(quick: bool, rounds: int | None, device: str, seed: int) -> dict[str, Callable[[], Outcome]]:
    def count(long: int, short: int) -> int:
        return rounds or (short if quick else long)

    options = {"device": device, "seed": seed, "progress": _progress}
    series = [Series(s.name, s.axis, s.shapes[:3], s.expected) for s in SERIES] if quick else SERIES
    shapes = SHAPES[:1] if quick else SHAPES
    return {
        "steps": lambda: measure_steps(rounds=count(25, 5), **options),
        "bounds": lambda: measure_bounds(rounds=count(15, 5), **options),
        "training": lambda: measure_training(rounds=count(15, 3), warmup=1 if quick else 2, **options),
        "tracker": lambda: measure_tracker(rounds=count(9, 3), **options),
        "growth": lambda: measure_growth(series, rounds=count(15, 5), **options),
        "memory": lambda: measure_memory(shapes, **options),
        "attention": lambda: measure_attention(**options),
        "drift": lambda: measure_drift(steps=1000 if quick else 100_000, **options),
    }


def _progress(text: str) -> None:
    sys.stderr.write(f"… {text}\n")
    sys.stderr.flush()


def _console() -> Console:
    """As wide as the terminal; where the output is a file or a pipe, as wide as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def main() -> None:
    """The command. What a user can mend is one line on stderr and exit status 2."""
    try:
        app(prog_name="python -m geodescent.benchmarks")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"benchmarks: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
