"""What it costs to track the attention geometry of a training run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..analysis import GeometryTracker
from .gpt import GPTShape
from .report import Outcome, Table
from .targets import TRACKING_BOUND
from .timing import Spread, interleave
from .training import ARMS, TrainingStep

__all__ = ["EVERY", "measure_tracker"]

EVERY = 50


def measure_tracker(
    shape: GPTShape | None = None,
    rounds: int = 9,
    *,
    device: str = "cpu",
    seed: int = 0,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Time a record of :class:`~geodescent.analysis.GeometryTracker`, to the disk, beside a training step, in turn.

    The share is that of a run with a record every 50 steps, record ÷ (50 steps + record). Arguments as for
    :func:`~geodescent.benchmarks.training.measure_training`.

    Example:
        >>> outcome = measure_tracker(GPTShape(1, 8, 2, 2, 4, 5), rounds=1)
        >>> 0 < outcome.data["share"]["median"] < 1
        True
    """
    shape = GPTShape() if shape is None else shape
    progress("tracker")
    training = TrainingStep(ARMS["ours"], shape, device, seed)
    with tempfile.TemporaryDirectory() as folder:
        tracker = GeometryTracker(training.model, Path(folder) / "track.jsonl")
        calls = {"step": training, "record": lambda: tracker.record(len(tracker.rows), loss=0.0)}
        timings = interleave(calls, rounds, warmup=warmup, settle=0, device=device, slow_seconds=60.0)
    step, record, ratio = timings.of("step"), timings.of("record"), timings.ratio("record", "step")
    assert step is not None
    assert record is not None
    assert ratio is not None
    median, low, high = (r / (EVERY + r) for r in (ratio.median, ratio.low, ratio.high))
    share = Spread(median, low, high, ratio.count)
    met = share.median <= TRACKING_BOUND
    percent = f"{share.median:.1%} ({share.low:.1%}–{share.high:.1%})"
    rows = (
        ("a training step, ms", str(step.scaled(1e3))),
        ("a record, ms", str(record.scaled(1e3))),
        (f"share of the time, a record every {EVERY} steps", percent),
    )
    notes = (
        f"{shape.layers} layers of {shape.heads} heads, written to the disk: {percent}, held to ≤ "
        f"{TRACKING_BOUND:.0%}: {'met' if met else 'not met'}.",
    )
    data = {
        "every": EVERY,
        "rounds": rounds,
        "seed": seed,
        "step_milliseconds": asdict(step.scaled(1e3)),
        "record_milliseconds": asdict(record.scaled(1e3)),
        "share": asdict(share),
        "held_to": {"bound": TRACKING_BOUND, "verdict": "met" if met else "not met"},
    }
    return Outcome("tracker", (Table("Tracking the attention geometry", ("what", "measured"), rows, notes),), data)
