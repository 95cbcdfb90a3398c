"""Paired statistics: what an arm gains over the baseline, seed by seed. The tests and intervals are scipy's, the
correction for several arms statsmodels'."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

__all__ = [
    "PairedDifference",
    "adjust",
    "bootstrap_interval",
    "compare_many",
    "has_spread",
    "mean_and_sd",
    "paired_difference",
    "t_interval",
]

RESAMPLES = 10_000
#: values that are equal to this share of themselves are apart by rounding alone
_ROUNDING = 1e-10


@dataclass(frozen=True)
class PairedDifference:
    """arm − baseline over the seeds that both finished.

    Attributes:
        low, high: Student's t interval of the mean difference at `level`; None where there is none: for fewer than two
            pairs, and where all pairs differ by exactly the same.
        bootstrap_low, bootstrap_high: the BCa bootstrap interval, from `RESAMPLES` resamples with a fixed seed.
        t_p, wilcoxon_p: two-sided p-values of the paired t test and of Wilcoxon's signed-rank test, which leaves pairs
            that do not differ out.
        sd: of the differences.
        hedges_g: effect size, the mean difference in units of `sd` (Cohen's d_z), as Hedges (1981) corrects it.
        adjusted_p, adjusted_low, adjusted_high: Holm's, over all arms that are compared; see `adjust`.
        wins, ties, losses: pairs by which of the two is better.
        unpaired: seeds that only one of the two finished, as where a run failed.
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
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    t_p: float | None = None
    wilcoxon_p: float | None = None
    sd: float | None = None
    hedges_g: float | None = None
    adjusted_p: float | None = None
    adjusted_low: float | None = None
    adjusted_high: float | None = None
    unpaired: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def verdict(self) -> str:
        """One of "better", "worse", "no difference found" (the adjusted interval includes 0), or "no interval"."""
        if self.adjusted_low is None or self.adjusted_high is None:
            return "no interval"
        if self.adjusted_low <= 0 <= self.adjusted_high:
            return "no difference found"
        return "better" if (self.adjusted_low > 0) == self.higher_is_better else "worse"


def paired_difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool, level: float = 0.95
) -> PairedDifference:
    """Differences over the seeds in both mappings (seed -> value); its adjusted interval is the plain one.

    Raises `ValueError` for values that are not finite.

    Example:
        >>> paired_difference({0: 3.0, 1: 5.0, 2: 4.5}, {0: 2.0, 1: 3.0, 2: 3.0}, higher_is_better=True).wins
        3
    """
    for name, found in (("arm", arm), ("baseline", baseline)):
        if wrong := {seed: value for seed, value in found.items() if not math.isfinite(value)}:
            raise ValueError(
                f"{name} must have finite values, found {wrong}: leave such runs out, or count them as a cap"
            )
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    values = np.array([arm[seed] - baseline[seed] for seed in seeds])
    better = values > 0 if higher_is_better else values < 0
    ties = int((values == 0).sum())
    wins = int(better.sum())
    found = PairedDifference(
        seeds=seeds,
        differences=tuple(values.tolist()),
        mean=float(values.mean()) if len(values) else None,
        low=None,
        high=None,
        wins=wins,
        ties=ties,
        losses=len(values) - wins - ties,
        higher_is_better=higher_is_better,
        level=level,
        unpaired=tuple(sorted(arm.keys() ^ baseline.keys())),
    )
    if not has_spread(values):
        return found
    p = _p_value(stats.ttest_1samp(values, 0.0))
    sd = float(values.std(ddof=1))
    low, high = t_interval(values, level)
    bootstrap_low, bootstrap_high = bootstrap_interval(values, level)
    degrees = len(values) - 1
    return replace(
        found,
        low=low,
        high=high,
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        t_p=p,
        wilcoxon_p=_wilcoxon(values),
        sd=sd,
        hedges_g=float(values.mean()) / sd * (1 - 3 / (4 * degrees - 1)),
        adjusted_p=p,
        adjusted_low=low,
        adjusted_high=high,
    )


def compare_many(
    arms: Mapping[str, Mapping[int, float]],
    baseline: Mapping[int, float],
    higher_is_better: bool,
    level: float = 0.95,
) -> dict[str, PairedDifference]:
    """Every arm (name -> seed -> value) against the baseline, adjusted for their number by Holm's method."""
    return adjust({name: paired_difference(own, baseline, higher_is_better, level) for name, own in arms.items()})


def adjust(differences: Mapping[str, PairedDifference]) -> dict[str, PairedDifference]:
    """Holm's p-values of the t tests of a family, and t intervals that exclude 0 exactly where Holm's test rejects.

    The k-th smallest of m p-values is tested at α/(m − k + 1), until one is not rejected; the interval of a rejected
    one has that level, and those of the rest the level at which the first of them was not (Holm 1979; such intervals
    are compatible with the tests and as wide as Bonferroni's at most).
    """
    testable = sorted((d.t_p, name) for name, d in differences.items() if d.t_p is not None)
    if not testable:
        return dict(differences)
    alpha = 1 - next(iter(differences.values())).level
    ps = [p for p, _ in testable]
    tested: Any = multipletests(ps, alpha=alpha, method="holm")
    rejected, adjusted = tested[:2]
    found = dict(differences)
    ranks = len(ps)
    first_kept = next((k for k, reject in enumerate(rejected) if not reject), ranks)
    for k, (_, name) in enumerate(testable):
        share = alpha / (ranks - min(k, first_kept))
        low, high = t_interval(np.array(differences[name].differences), 1 - share)
        found[name] = replace(found[name], adjusted_p=float(adjusted[k]), adjusted_low=low, adjusted_high=high)
    return found


def has_spread(values: np.ndarray) -> bool:
    """Whether there is something to make an interval of: two values that are apart by more than rounding."""
    return len(values) >= 2 and bool(np.ptp(values) > _ROUNDING * np.abs(values).max())


def t_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of values that have a spread."""
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(level)
    return float(interval.low), float(interval.high)


def bootstrap_interval(values: np.ndarray, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The BCa interval of the mean of values that differ, at least two; the percentile interval where BCa has none."""
    generator = np.random.default_rng(seed)
    options = {"confidence_level": level, "n_resamples": RESAMPLES, "rng": generator}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        interval = stats.bootstrap((values,), np.mean, method="BCa", **options).confidence_interval
        if not math.isfinite(interval.low + interval.high):
            interval = stats.bootstrap((values,), np.mean, method="percentile", **options).confidence_interval
    return float(interval.low), float(interval.high)


def _wilcoxon(values: np.ndarray) -> float | None:
    """Exact for few pairs without ties, as scipy decides; pairs that do not differ are left out."""
    differing = values[values != 0]
    return _p_value(stats.wilcoxon(differing)) if len(differing) else None


def _p_value(test: Any) -> float:
    return float(test.pvalue)


def mean_and_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and the sample standard deviation; None where there are too few values for one."""
    if not values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
