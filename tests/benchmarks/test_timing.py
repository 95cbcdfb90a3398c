import gc
import itertools

import numpy as np
import pytest
from geodescent.benchmarks.timing import Spread, Timings, digits, interleave


class Clock:
    """Time passes only when a contender says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def contender(self, log, name, durations):
        durations = iter(durations)

        def call():
            log.append(name)
            self.now += next(durations)

        return call


def run(durations, **options):
    clock, log = Clock(), []
    calls = {name: clock.contender(log, name, d) for name, d in durations.items()}
    return interleave(calls, clock=clock, **options), log


def test_contenders_run_in_turn():
    timings, log = run({"a": itertools.repeat(0.1), "b": itertools.repeat(0.2)}, rounds=3, warmup=0, settle=0)
    assert log == ["a", "b"] * 3
    assert timings.seconds["a"] == pytest.approx([0.1] * 3)
    assert timings.seconds["b"] == pytest.approx([0.2] * 3)


def test_warm_up_and_settling_calls_are_not_timed():
    # two warm-up calls, then in each round one settling call, all slower than the timed one
    durations = [0.9, 0.8, 0.7, 0.1, 0.6, 0.2]
    timings, _ = run({"a": durations}, rounds=2, warmup=2, settle=1)
    assert timings.seconds["a"] == pytest.approx([0.1, 0.2])


def test_the_slow_run_in_some_rounds_and_are_paired_there():
    durations = {"fast": [1.0] * 2 + [1.0, 2.0, 3.0, 4.0], "slow": [11.0, 20.0, 60.0]}
    options = {"slow_seconds": 5.0, "slow_every": 2}
    timings, log = run(durations, rounds=4, warmup=2, settle=0, **options)
    assert log == ["fast", "fast", "slow", "fast", "slow", "fast", "fast", "slow", "fast"]
    assert timings.seconds["slow"] == [20.0, None, 60.0, None]
    ratio = timings.ratio("slow", "fast")
    assert ratio == Spread(20.0, 20.0, 20.0, 2)  # 20/1 and 60/3


def test_ratios_are_taken_round_by_round():
    # the machine is ten times slower in the second round: each ratio is 2 all the same
    timings, _ = run({"a": [2.0, 20.0, 2.0], "b": [1.0, 10.0, 1.0]}, rounds=3, warmup=0, settle=0, slow_seconds=99.0)
    assert timings.ratio("a", "b") == Spread(2.0, 2.0, 2.0, 3)


def test_a_failure_is_kept_and_the_others_go_on():
    def broken():
        raise RuntimeError("a pivot\nis zero")

    timings = interleave({"broken": broken, "fine": lambda: None}, rounds=2)
    assert timings.failures == {"broken": "RuntimeError: a pivot is zero"}
    assert timings.of("broken") is None
    assert timings.ratio("fine", "broken") is None
    assert timings.of("fine") is not None


def test_a_late_failure_drops_what_was_measured():
    durations = iter([1, 2])

    def soon_broken():
        if next(durations) == 2:
            raise ValueError("not finite")

    timings = interleave({"a": soon_broken}, rounds=3, warmup=0, settle=0)
    assert timings.failures["a"] == "ValueError: not finite"
    assert timings.of("a") is None


def test_errors_of_other_kinds_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 / 0}, rounds=1)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_while_timing_and_restored(enabled):
    before, seen = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    try:
        interleave({"a": lambda: seen.append(gc.isenabled())}, rounds=1)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)
    assert after is enabled


def test_no_rounds_are_an_error():
    with pytest.raises(ValueError, match="rounds must be at least 1, found 0"):
        interleave({"a": lambda: None}, rounds=0)


def test_spread_is_median_and_quartiles():
    values = np.random.default_rng(0).lognormal(size=101)
    ordered = sorted(values)
    assert Spread.of(list(values)) == Spread(ordered[50], ordered[25], ordered[75], 101)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_unknown_contenders_have_no_figures():
    timings = Timings({"a": [1.0]})
    assert timings.of("b") is None
    assert timings.ratio("a", "b") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.500"), (1.0, "1.00"), (12.34, "12.3"), (99.96, "100."), (1234.5, "1234"), (0.0, "0.00")],
)
def test_digits(value, text):
    assert digits(value) == text
