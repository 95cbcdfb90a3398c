"""Verdicts against intervals and tests computed here from first principles."""

import math

import numpy as np
import pytest
from geodescent.experiments.statistics import paired_difference
from geodescent.experiments.verdicts import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    direction_verdict,
    null_verdict,
    range_verdict,
    size_verdict,
    trend_verdict,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats


def _paired(values):
    return paired_difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), higher_is_better=True)


#: mean 2 and 95 % interval 2 ± 1.24
AROUND_TWO = (1.0, 3.0, 2.0, 1.5, 2.5, 2.0, 0.5, 3.5)
_HALF = stats.t.ppf(0.975, 7) * np.std(AROUND_TWO, ddof=1) / math.sqrt(8)


@pytest.mark.parametrize(
    ("values", "sign", "word"),
    [
        (AROUND_TWO, 1, CONFIRMED),
        (AROUND_TWO, -1, REFUTED),
        ([-v for v in AROUND_TWO], 1, REFUTED),
        ([-v for v in AROUND_TWO], -1, CONFIRMED),
        ((1.0, -1.0, 0.5), 1, UNDECIDED),
        ((1.0,), 1, UNDECIDED),
        ((2.0, 2.0), 1, UNDECIDED),
        ((), 1, UNDECIDED),
    ],
)
def test_directions(values, sign, word):
    assert direction_verdict(_paired(values), sign).word == word


@pytest.mark.parametrize(
    ("claimed", "word"),
    [
        (2.0 + 0.99 * _HALF, CONFIRMED),
        (2.0 + 1.01 * _HALF, REFUTED),
        (2.0 - 0.99 * _HALF, CONFIRMED),
        (2.0 - 1.01 * _HALF, REFUTED),
        (8.98, REFUTED),
    ],
)
def test_sizes_by_the_interval(claimed, word):
    verdict = size_verdict(_paired(AROUND_TWO), claimed)
    assert verdict.word == word
    assert verdict.estimate == pytest.approx(2.0)
    assert verdict.high == pytest.approx(2.0 + _HALF)
    assert verdict.n == 8


def test_a_size_within_an_interval_that_includes_zero_is_undecided():
    assert size_verdict(_paired((-4.0, 12.0, 3.0)), 8.98).word == UNDECIDED


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((0.1, -0.2, 0.3, 0.0, -0.1, 0.2), CONFIRMED),
        ((0.1, -5.0, 5.3, 0.0), UNDECIDED),
        ([v - 0.5 for v in AROUND_TWO], UNDECIDED),  # the mean is outside, the interval is not
        ((4.0, 5.0, 4.5, 5.5, 4.2), REFUTED),
        ((-4.0, -5.0, -4.5, -5.5, -4.2), REFUTED),
        ((0.0, 0.0, 0.0), CONFIRMED),
        ((2.0, 2.0, 2.0), UNDECIDED),
        ((0.3,), UNDECIDED),
    ],
)
def test_nulls(values, word):
    assert null_verdict(_paired(values)).word == word


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=12).filter(lambda v: np.ptp(v) > 1e-3), st.floats(0.2, 3))
def test_two_one_sided_tests_are_the_ninety_percent_interval_within_the_margin(values, margin):
    low, high = stats.t.interval(0.9, len(values) - 1, np.mean(values), stats.sem(values))
    within = -margin < low and high < margin
    assert (null_verdict(_paired(values), margin).word == CONFIRMED) == within


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ((30.0, 31.0, 29.0, 33.0), CONFIRMED),
        ((100.0, 110.0, 95.0, 105.0), REFUTED),
        ((3.0, 3.3, 2.9), REFUTED),
        ((20.0, 24.0, 30.0, 22.0), UNDECIDED),
        ((30.0,), UNDECIDED),
        ((), UNDECIDED),
    ],
)
def test_ranges(ratios, word):
    assert range_verdict(ratios, 24, 40).word == word


def test_the_mean_ratio_is_geometric_and_ratios_are_checked():
    assert range_verdict((10.0, 1000.0), 24, 40).estimate == pytest.approx(100.0)
    with pytest.raises(ValueError, match="ratios must be positive"):
        range_verdict((1.0, 0.0), 24, 40)


def _gaps(slopes):
    return {
        size: {seed: slope * math.log2(size / 1000) + seed for seed, slope in enumerate(slopes)}
        for size in (1000.0, 2000.0, 8000.0)
    }


@pytest.mark.parametrize(
    ("slopes", "word"),
    [
        ((1.0, 1.2, 0.9), CONFIRMED),
        ((-1.0, -1.2, -0.9), REFUTED),
        ((1.0, -1.2, 0.4), UNDECIDED),
        ((1.0,), UNDECIDED),
    ],
)
def test_trends(slopes, word):
    verdict = trend_verdict(_gaps(slopes))
    assert verdict.word == word
    if len(slopes) > 1:
        assert verdict.estimate == pytest.approx(np.mean(slopes))
        expected = stats.t.interval(0.95, len(slopes) - 1, np.mean(slopes), stats.sem(slopes))
        assert (verdict.low, verdict.high) == pytest.approx(expected)


def test_a_seed_that_lacks_a_size_is_left_out_of_the_trend():
    gaps = _gaps((1.0, 1.2, 0.9, 50.0))
    del gaps[8000][3]
    assert trend_verdict(gaps).n == 3
    assert trend_verdict({}).word == UNDECIDED
