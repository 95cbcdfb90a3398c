"""Verdicts on claims, by rules that were declared before the runs.

A claimed effect is confirmed when its Holm-adjusted 95 % interval lies wholly on the claimed side of 0, and refuted
when it lies wholly on the other side. A claimed size is refuted when that interval excludes it, and confirmed when it
includes it and excludes 0. A claimed null is confirmed by two one-sided tests at 5 % within the margin, and refuted
when the adjusted interval lies wholly outside it. Everything else is undecided at this size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from statsmodels.stats.weightstats import DescrStatsW

from .statistics import PairedDifference, has_spread, t_interval

__all__ = [
    "CONFIRMED",
    "MARGIN",
    "REFUTED",
    "UNDECIDED",
    "Verdict",
    "direction_verdict",
    "null_verdict",
    "range_verdict",
    "size_verdict",
    "trend_verdict",
]

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided at this size"

#: a difference within ± this many points counts as none
MARGIN = 1.0


@dataclass(frozen=True)
class Verdict:
    """What the numbers say of a claim.

    Attributes:
        word: `CONFIRMED`, `REFUTED` or `UNDECIDED`.
        estimate, low, high: the figure and its interval; None where there is none.
        reason: the rule that decided.
        n: pairs or seeds that it rests on.
    """

    word: str
    estimate: float | None
    low: float | None
    high: float | None
    reason: str
    n: int


def direction_verdict(difference: PairedDifference, sign: int = 1) -> Verdict:
    """Of the claim that the mean difference has this sign.

    Example:
        >>> from geodescent.experiments.statistics import paired_difference
        >>> better = paired_difference({0: 2.0, 1: 2.1, 2: 1.9}, {0: 1.0, 1: 1.0, 2: 1.0}, True)
        >>> direction_verdict(better).word, direction_verdict(better, sign=-1).word
        ('confirmed', 'refuted')
    """
    low, high = difference.adjusted_low, difference.adjusted_high
    if low is None or high is None:
        return _none(difference)
    if low > 0 or high < 0:
        right = (low > 0) == (sign > 0)
        word, reason = (
            (CONFIRMED, "the interval excludes 0") if right else (REFUTED, "the interval is on the other side of 0")
        )
    else:
        word, reason = UNDECIDED, "the interval includes 0"
    return Verdict(word, difference.mean, low, high, reason, difference.n)


def size_verdict(difference: PairedDifference, claimed: float) -> Verdict:
    """Of the claim that the mean difference is `claimed`, which is not 0."""
    low, high = difference.adjusted_low, difference.adjusted_high
    if low is None or high is None:
        return _none(difference)
    if not low <= claimed <= high:
        word, reason = REFUTED, f"the interval excludes {claimed:+g}"
    elif low > 0 or high < 0:
        word, reason = CONFIRMED, f"the interval includes {claimed:+g} and excludes 0"
    else:
        word, reason = UNDECIDED, f"the interval includes {claimed:+g} and 0"
    return Verdict(word, difference.mean, low, high, reason, difference.n)


def null_verdict(difference: PairedDifference, margin: float = MARGIN) -> Verdict:
    """Of the claim that there is no difference beyond ±margin: two one-sided t tests (Schuirmann 1987)."""
    low, high = difference.adjusted_low, difference.adjusted_high
    if low is None or high is None:
        if difference.n >= 2 and difference.mean is not None and abs(difference.mean) < margin:
            return Verdict(
                CONFIRMED, difference.mean, None, None, f"all pairs differ by the same, below {margin:g}", difference.n
            )
        return _none(difference)
    p = DescrStatsW(np.array(difference.differences)).ttost_mean(-margin, margin)[0]
    if p < 0.05:
        word, reason = CONFIRMED, f"two one-sided tests within ±{margin:g} (p = {p:.2g})"
    elif low > margin or high < -margin:
        word, reason = REFUTED, f"the interval is outside ±{margin:g}"
    else:
        word, reason = UNDECIDED, f"two one-sided tests within ±{margin:g} fail (p = {p:.2g})"
    return Verdict(word, difference.mean, low, high, reason, difference.n)


def range_verdict(ratios: Sequence[float], low: float, high: float) -> Verdict:
    """Of the claim that a ratio lies in [low, high], by the t interval of the geometric mean over seeds.

    Raises `ValueError` for ratios that are not positive.
    """
    if any(not ratio > 0 or math.isinf(ratio) for ratio in ratios):
        raise ValueError(f"ratios must be positive and finite, found {list(ratios)}")
    logs = np.log(ratios)
    if not has_spread(logs):
        estimate = math.exp(float(logs.mean())) if len(ratios) else None
        return Verdict(UNDECIDED, estimate, None, None, "no interval: too few seeds, or all alike", len(ratios))
    below, above = (math.exp(end) for end in t_interval(logs))
    claimed = f"{low:g} to {high:g}"
    if below >= low and above <= high:
        word, reason = CONFIRMED, f"the interval lies within {claimed}"
    elif above < low or below > high:
        word, reason = REFUTED, f"the interval excludes {claimed}"
    else:
        word, reason = UNDECIDED, f"the interval overlaps {claimed} in part"
    return Verdict(word, math.exp(float(logs.mean())), below, above, reason, len(ratios))


def trend_verdict(gaps: Mapping[float, Mapping[int, float]]) -> Verdict:
    """Of the claim that a gap grows with the size of the data: the slope against log₂(size), a least-squares line a
    seed, and the t interval of its mean over seeds.

    Args:
        gaps: size -> seed -> gap, in the direction that is claimed to grow. Seeds that lack a size are left out.
    """
    sizes = sorted(gaps)
    seeds = sorted(set.intersection(*(set(own) for own in gaps.values()))) if gaps else []
    if len(sizes) < 2 or not seeds:
        return Verdict(UNDECIDED, None, None, None, "no slope: too few sizes or seeds", len(seeds))
    x = np.log2(sizes)
    slopes = np.array([np.polyfit(x, [gaps[size][seed] for size in sizes], 1)[0] for seed in seeds])
    if not has_spread(slopes):
        reason = "no interval: too few seeds, or all alike"
        return Verdict(UNDECIDED, float(slopes.mean()), None, None, reason, len(seeds))
    low, high = t_interval(slopes)
    word, reason = (
        (CONFIRMED, "the slope's interval is above 0")
        if low > 0
        else (REFUTED, "the slope's interval is below 0")
        if high < 0
        else (UNDECIDED, "the slope's interval includes 0")
    )
    return Verdict(word, float(slopes.mean()), low, high, reason, len(seeds))


def _none(difference: PairedDifference) -> Verdict:
    return Verdict(UNDECIDED, difference.mean, None, None, "no interval: too few pairs, or all alike", difference.n)
