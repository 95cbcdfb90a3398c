"""Timing several things in turn, A B C A B C …, so that their ratios outlive a busy machine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["Spread", "Timings", "interleave", "synchronize"]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    Example:
        >>> Spread.of([1.0, 2.0, 4.0, 3.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0, count=5)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and quartiles of ``values``, which must not be empty."""
        if not values:
            raise ValueError("values must hold at least one measurement, found none")
        low, median, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high), len(values))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.low)}–{digits(self.high)})"


def digits(value: float) -> str:
    """Three significant digits, without an exponent for everyday numbers.

    Example:
        >>> digits(0.012345), digits(3.14159), digits(314.159), digits(31415.9)
        ('0.0123', '3.14', '314', '31416')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


@dataclass(frozen=True)
class Timings:
    """Seconds of every contender in every round; None in a round in which it did not run.

    Attributes:
        seconds: name to one entry a round.
        failures: name to the error of a contender that failed; it has no seconds.

    Example:
        >>> print(Timings({"a": [2.0, None, 4.0]}).of("a"))
        3.00 (2.50–3.50)
    """

    seconds: Mapping[str, Sequence[float | None]]
    failures: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> Spread | None:
        """Seconds of one call of a contender; None if it failed or is not here."""
        values = [s for s in self.seconds.get(name, ()) if s is not None]
        return Spread.of(values) if values else None

    def ratio(self, name: str, other: str) -> Spread | None:
        """Seconds of ``name`` ÷ seconds of ``other``, round by round, over the rounds in which both ran.

        Example:
            >>> Timings({"a": [2.0, 4.0, None], "b": [1.0, 2.0, 9.0]}).ratio("a", "b").median
            2.0
        """
        pairs = zip(self.seconds.get(name, ()), self.seconds.get(other, ()), strict=False)
        values = [a / b for a, b in pairs if a is not None and b is not None]
        return Spread.of(values) if values else None


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    settle: int = 1,
    device: str | torch.device = "cpu",
    slow_seconds: float = 1.0,
    slow_every: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time one call of each contender, in turn, ``rounds`` times, with Python's garbage collector off.

    Args:
        calls: name to what is timed. A ``RuntimeError`` or ``ValueError`` is kept as the contender's failure.
        rounds: number of rounds.
        warmup: untimed calls of each before the first round.
        settle: untimed calls at the beginning of each turn: nobody is timed in the caches of whoever came before.
        device: synchronized before and after each call if it is a CUDA device.
        slow_seconds, slow_every: who takes longer than this is warmed up less, does not settle and runs in every
            ``slow_every``-th round only, the first among them, so that others can have many rounds.
        clock: seconds.

    Raises:
        ValueError: ``rounds`` is below 1.

    Example:
        >>> timings = interleave({"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))}, rounds=3)
        >>> timings.of("long").count, timings.ratio("long", "short").median > 1
        (3, True)
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, found {rounds}")

    def timed(name: str) -> float:
        synchronize(device)
        start = clock()
        calls[name]()
        synchronize(device)
        return clock() - start

    failures: dict[str, str] = {}
    slow: set[str] = set()
    seconds: dict[str, list[float | None]] = {name: [None] * rounds for name in calls}
    with _without_collector():
        for name in calls:
            try:
                last = spent = 0.0
                for _ in range(warmup):
                    if spent > 2 * slow_seconds:
                        break
                    last = timed(name)
                    spent += last
                if last > slow_seconds:
                    slow.add(name)
            except (RuntimeError, ValueError) as error:
                failures[name] = _one_line(error)
        for i in range(rounds):
            for name in calls:
                if name in failures or (name in slow and i % slow_every):
                    continue
                try:
                    for _ in range(0 if name in slow else settle):
                        calls[name]()
                    seconds[name][i] = timed(name)
                except (RuntimeError, ValueError) as error:
                    failures[name] = _one_line(error)
    return Timings({name: [] if name in failures else values for name, values in seconds.items()}, failures)


def synchronize(device: str | torch.device) -> None:
    """Wait for a CUDA device; nothing on others.

    Example:
        >>> synchronize("cpu")
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:117] + '…' if len(text) > 118 else text}"
