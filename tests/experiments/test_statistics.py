import math
from typing import Any

import numpy as np
import pytest
from geodescent.experiments.statistics import adjust, compare_many, mean_and_sd, paired_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats


def test_the_interval_is_that_of_the_paired_t_test():
    generator = np.random.default_rng(0)
    arm, baseline = generator.normal(1, 1, 6), generator.normal(0, 1, 6)
    paired = paired_difference(dict(enumerate(arm)), dict(enumerate(baseline)), higher_is_better=True)
    expected = stats.ttest_rel(arm, baseline).confidence_interval(0.95)
    assert paired.mean == pytest.approx(np.mean(arm) - np.mean(baseline))
    assert (paired.low, paired.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_three_pairs_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, and t(0.975, 2) = 4.302653 of any table
    paired = paired_difference({0: 1.0, 1: 4.0, 2: 6.0}, {0: 0.0, 1: 2.0, 2: 3.0, 9: 5.0}, higher_is_better=True)
    assert paired.seeds == (0, 1, 2)
    assert paired.differences == (1.0, 2.0, 3.0)
    assert paired.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert paired.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert (paired.wins, paired.ties, paired.losses) == (3, 0, 0)
    assert paired.verdict == "no difference found"


@pytest.mark.parametrize(
    ("differences", "higher_is_better", "verdict", "wins"),
    [
        ((5.0, 6.0, 5.5), True, "better", 3),
        ((5.0, 6.0, 5.5), False, "worse", 0),
        ((-5.0, -6.0, -5.5), False, "better", 3),
        ((-5.0, 6.0, 0.0), True, "no difference found", 1),
        ((2.0, 2.0), True, "no interval", 2),  # no spread: t is undefined, and two coins can fall alike
        ((0.3, 0.1 + 0.2, 0.3), True, "no interval", 3),  # apart by rounding alone
        ((0.0, 0.0), True, "no interval", 0),
        ((3.0,), True, "no interval", 1),
        ((), True, "no interval", 0),
    ],
)
def test_verdicts(differences, higher_is_better, verdict, wins):
    paired = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(9), 0.0), higher_is_better)
    assert paired.verdict == verdict
    assert paired.wins == wins
    assert paired.n == len(differences) == paired.wins + paired.ties + paired.losses
    assert (paired.low is None) == (verdict == "no interval")


def test_mean_and_sd():
    assert mean_and_sd([]) == (None, None)
    assert mean_and_sd([3.0]) == (3.0, None)
    assert mean_and_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)


# --- against scipy, tables and definitions --------------------------------------------------------------------------

AN_ARM = {0: 41.2, 1: 40.1, 2: 43.0, 3: 39.9, 4: 42.4, 5: 41.1}
A_BASELINE = {0: 40.0, 1: 40.3, 2: 41.1, 3: 38.2, 4: 41.5, 5: 40.9}


def test_every_figure_is_what_it_is_called():
    paired = paired_difference(AN_ARM, A_BASELINE, higher_is_better=True)
    arm, baseline = list(AN_ARM.values()), list(A_BASELINE.values())
    assert paired.t_p == pytest.approx(stats.ttest_rel(arm, baseline).pvalue)
    # one difference is negative and it is the smallest but one, −0.2 after +0.2: all 2^6 signs counted by hand below
    values = [a - b for a, b in zip(arm, baseline, strict=True)]
    ranks = stats.rankdata(np.abs(np.round(values, 9)))
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    sums = [sum(r for r, keep in zip(ranks, f"{i:06b}", strict=True) if keep == "1") for i in range(64)]
    exact = min(1.0, 2 * np.mean([total >= observed - 1e-9 for total in sums]))
    assert paired.wilcoxon_p == pytest.approx(exact, rel=0.35)  # scipy approximates where ranks are tied
    assert paired.sd == pytest.approx(np.std(values, ddof=1))
    # Hedges' exact correction for 5 degrees of freedom is Γ(5/2)/(√(5/2)·Γ(2)) = 0.8408; his approximation 0.8421
    assert paired.hedges_g == pytest.approx(np.mean(values) / np.std(values, ddof=1) * 0.8408, rel=2e-3)
    assert paired.bootstrap_low is not None
    assert paired.bootstrap_high is not None
    assert paired.low is not None
    assert min(values) < paired.bootstrap_low < np.mean(values) < paired.bootstrap_high < max(values)
    assert paired.low < paired.bootstrap_low  # the bootstrap is narrower for few pairs
    assert paired_difference(AN_ARM, A_BASELINE, higher_is_better=True) == paired  # a fixed seed


def test_wilcoxon_without_ties_is_exact_and_five_pairs_cannot_be_significant():
    assert (
        paired_difference(dict(enumerate([1.0, 2, 3, 4, 5])), dict.fromkeys(range(5), 0.0), True).wilcoxon_p == 0.0625
    )
    ten = paired_difference(dict(enumerate(np.arange(1.0, 11))), dict.fromkeys(range(10), 0.0), True)
    assert ten.wilcoxon_p == pytest.approx(2 / 2**10)
    with_zeros = paired_difference(dict(enumerate([1.0, 2, 3, 4, 5, 0])), dict.fromkeys(range(6), 0.0), True)
    assert with_zeros.wilcoxon_p == 0.0625


def test_the_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        paired = paired_difference(dict(enumerate(generator.normal(3, 2, 25))), dict.fromkeys(range(25), 0.0), True)
        assert paired.bootstrap_low is not None
        assert paired.bootstrap_high is not None
        hits += paired.bootstrap_low <= 3 <= paired.bootstrap_high
    assert 50 <= hits <= 60


def test_seeds_that_one_of_the_two_lacks_are_named():
    assert paired_difference({0: 1.0, 2: 3.0}, {0: 0.0, 1: 1.0, 2: 1.5}, True).unpaired == (1,)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=r"baseline must have finite values, found \{3:"):
        paired_difference({3: 1.0}, {3: wrong}, True)


# --- several arms ---------------------------------------------------------------------------------------------------

ARMS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 10**6)), min_size=1, max_size=7)


def _family(specification):
    return {
        f"arm{i}": dict(enumerate(np.random.default_rng(seed).normal(mean, 1, 6)))
        for i, (mean, seed) in enumerate(specification)
    }


@settings(max_examples=15, deadline=None)
@given(ARMS)
def test_intervals_exclude_zero_exactly_where_holm_rejects(specification):
    """Holm's procedure from its definition: the smallest p against α/m, the next against α/(m − 1), until one fails."""
    compared: dict[str, Any] = compare_many(_family(specification), dict.fromkeys(range(6), 0.0), True)
    order = sorted(compared, key=lambda name: compared[name].t_p)
    rejecting = True
    for k, name in enumerate(order):
        paired = compared[name]
        rejecting = rejecting and paired.t_p <= 0.05 / (len(order) - k)
        assert (paired.adjusted_p <= 0.05) == rejecting
        excludes = paired.adjusted_low > 0 or paired.adjusted_high < 0
        assert excludes == rejecting
        assert paired.adjusted_p >= paired.t_p
        assert paired.adjusted_low <= paired.low < paired.high <= paired.adjusted_high
        assert paired.verdict == ("no difference found" if not rejecting else "better" if paired.mean > 0 else "worse")


def test_one_arm_needs_no_adjustment_and_arms_without_interval_do_not_count():
    alone = compare_many({"a": AN_ARM}, A_BASELINE, True)["a"]
    assert (alone.adjusted_p, alone.adjusted_low) == (alone.t_p, alone.low)
    with_alike = compare_many({"a": AN_ARM, "alike": A_BASELINE}, A_BASELINE, True)
    assert with_alike["a"] == alone
    assert with_alike["alike"].adjusted_p is None
    assert adjust({}) == {}
