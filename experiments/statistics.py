"""Paired statistics: what an arm gains over the baseline, seed by seed. The distributions are scipy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["PairedDifference", "mean_and_sd", "paired_difference"]


@dataclass(frozen=True)
class PairedDifference:
    """arm − baseline over the seeds that both finished.

    `low` and `high` bound the 95 % Student t interval of the mean difference, and are None where there is none: for
    fewer than two pairs, and where all pairs differ by exactly the same. `wins`, `ties` and `losses` count pairs by
    which of the two is better.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float | None
    low: float | None
    high: float | None
    wins: int
    ties: int
    losses: int
    higher_is_better: bool
    level: float = 0.95

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def verdict(self) -> str:
        """One of "better", "worse", "no difference found" (the interval includes 0), or "no interval"."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high:
            return "no difference found"
        return "better" if (self.low > 0) == self.higher_is_better else "worse"


def paired_difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool, level: float = 0.95
) -> PairedDifference:
    """Differences over the seeds in both mappings (seed -> value)."""
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    values = np.array([arm[seed] - baseline[seed] for seed in seeds])
    low = high = None
    if len(values) >= 2 and np.ptp(values) > 0:  # equal differences have no spread to make an interval of
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(level)
        low, high = float(interval.low), float(interval.high)
    better = values > 0 if higher_is_better else values < 0
    ties = int((values == 0).sum())
    wins = int(better.sum())
    return PairedDifference(
        seeds=seeds,
        differences=tuple(values.tolist()),
        mean=float(values.mean()) if len(values) else None,
        low=low,
        high=high,
        wins=wins,
        ties=ties,
        losses=len(values) - wins - ties,
        higher_is_better=higher_is_better,
        level=level,
    )


def mean_and_sd(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and the sample standard deviation; None where there are too few values for one."""
    if not values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
