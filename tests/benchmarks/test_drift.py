import math

import pytest
import torch
from geodescent.benchmarks import drift
from geodescent.benchmarks.drift import BOUND, drift_curve, log_spaced, measure_drift, sparkline


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 12_345, 100_000])
def test_log_spaced(steps):
    marks = log_spaced(steps)
    assert marks[0] == 1
    assert marks[-1] == steps
    assert marks == sorted(set(marks))
    assert len(marks) <= 4 * math.log10(steps) + 2


def test_log_spaced_needs_a_step():
    with pytest.raises(ValueError, match="steps must be at least 1, found 0"):
        log_spaced(0)


def test_the_default_optimizer_keeps_the_bound():
    outcome = measure_drift([(16, 8)], steps=300)
    (numbers,) = outcome.data["shapes"]
    assert [step for step, _ in numbers["curve"]] == log_spaced(300)
    assert 0 < numbers["largest"] < BOUND
    assert numbers["largest"] >= max(error for _, error in numbers["curve"])
    assert numbers["verdict"] == "met"
    assert outcome.tables[1].rows[-1][0] == "curve"


class Leaky(torch.optim.Optimizer):
    """Lengthens every column by a thousandth a step."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.detach().mul_(1.001)


def test_a_leak_is_measured():
    curve, worst = drift_curve(6, 3, 100, make=Leaky)
    for step, error in curve:
        assert error == pytest.approx(1.001 ** (2 * step) - 1, rel=1e-3)
    assert worst == curve[-1][1] > BOUND


def test_the_largest_error_is_also_looked_for_between_the_points_of_the_curve():
    class Hiccup(Leaky):
        count = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.count += 1
            p = self.param_groups[0]["params"][0].detach()
            if self.count in (75, 76):  # 56 and 100 are on the curve
                p.mul_(2.0 if self.count == 75 else 0.5)

    curve, worst = drift_curve(6, 3, 100, make=Hiccup, every=25)
    assert max(error for _, error in curve) < 1e-5
    assert worst == pytest.approx(3.0, abs=1e-5)


def test_nan_is_not_within_the_bound(monkeypatch):
    monkeypatch.setattr(drift, "point_error", lambda x: math.nan)
    (numbers,) = measure_drift([(6, 3)], steps=2).data["shapes"]
    assert numbers["verdict"] == "not met"


def test_gradients_are_noisy_and_repeatable():
    seen = []

    class Watch(Leaky):
        @torch.no_grad()
        def step(self, closure=None):
            seen.append(self.param_groups[0]["params"][0].grad.clone())

    for _ in range(2):
        drift_curve(6, 3, 2, make=Watch)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])


def test_sparkline():
    assert sparkline([1e-8, 1e-4]) == "▁█"
    assert sparkline([2e-7, 2e-7]) == "▁▁"
    assert sparkline([math.inf, math.nan]) == "××"
    assert sparkline([0.0, 1e-6, 1e-5]) == "▁▁█"
