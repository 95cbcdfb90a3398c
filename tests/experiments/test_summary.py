from typing import Any

import numpy as np
from geodescent.experiments.study import Headline
from geodescent.experiments.summary import summarize
from geodescent.experiments.tables import statistics_table
from scipy import stats

STEPS = Headline(
    "steps", "steps_tuned", "steps to 95 %", "steps to 95 %", "steps", False, digits=0, cap=1000, goal="got there"
)
ACCURACY = Headline("test_accuracy", "validation_accuracy", "test accuracy", "test accuracy, %", "%", True, 100.0, 2)


def _column(summary, name):
    return {row[0]: row[summary.header.index(name)] for row in summary.rows}


def test_a_run_that_did_not_get_there_is_shown_so_and_counts_as_the_cap(make_record):
    records = [
        make_record("adamw", 0, metrics={"steps": None}),
        make_record("adamw", 1, metrics={"steps": 400}),
        make_record("frozen", 0, metrics={"steps": 300}),
        make_record("frozen", 1, metrics={"steps": 500}),
    ]
    summary = summarize(records, STEPS)
    assert _column(summary, "reached") == {"adamw": "1 of 2", "frozen": "2 of 2"}
    assert _column(summary, "steps to 95 %, mean ± sd") == {"adamw": "≥ 700 ± 424", "frozen": "400 ± 141"}
    difference = summary.arms[1].difference
    assert difference is not None
    assert difference.differences == (-700.0, 100.0)
    assert _column(summary, "wins") == {"adamw": "–", "frozen": "1 of 2"}
    assert any("“Not reached” counts as the last step, 1,000" in note for note in summary.notes)
    assert summary.words[0] == "Runs that got there within 1,000 steps: adamw in 1 of 2, frozen in 2 of 2."


def test_no_run_got_there(make_record):
    summary = summarize([make_record(seed=seed, metrics={"steps": None}) for seed in (0, 1)], STEPS)
    assert _column(summary, "steps to 95 %, mean ± sd") == {"adamw": "not reached"}


def test_words_say_no_difference_where_the_interval_includes_zero(make_record):
    values = {"adamw": (0.5, 0.6, 0.7), "frozen": (0.6, 0.5, 0.71), "riemannian-adam": (0.55, 0.66, 0.75)}
    records = [
        make_record(arm, seed, metrics={"test_accuracy": value})
        for arm, own in values.items()
        for seed, value in enumerate(own)
    ]
    words = summarize(records, ACCURACY).words
    assert "frozen against adamw: no difference found in test accuracy (mean +0.33 points" in words[0]
    assert "which includes 0; better in 2 of 3 pairs" in words[0]
    assert words[1].startswith("riemannian-adam is better than adamw in test accuracy: +5.33 points on average")


PAIR = (("adamw", 0.5), ("frozen", 0.6))


def test_one_pair_has_no_interval(make_record):
    summary = summarize([make_record(), make_record("frozen", metrics={"test_accuracy": 0.8})], ACCURACY)
    assert _column(summary, "minus adamw [95 % Holm interval]")["frozen"] == "−10.00 (one pair)"
    assert "from one pair of runs" in summary.words[0]
    alike = [make_record(arm, seed, metrics={"test_accuracy": v}) for seed in (0, 1) for arm, v in PAIR]
    summary = summarize(alike, ACCURACY)
    assert _column(summary, "minus adamw [95 % Holm interval]")["frozen"] == "+10.00 (all pairs alike)"
    assert "no verdict" in summary.words[0]


def test_failed_cells_are_counted_and_left_out(make_record):
    records = [
        make_record(),
        make_record("frozen", status="failed", metrics={"steps": 3}, history={}, error="it diverged"),
    ]
    summary = summarize(records, ACCURACY)
    assert _column(summary, "n") == {"adamw": "1", "frozen": "0 (1 failed)"}
    assert _column(summary, "test accuracy, %, mean ± sd")["frozen"] == "–"
    assert any("1 of 2 runs failed" in sentence and "it diverged" in sentence for sentence in summary.words)
    assert any("nothing to compare" in sentence for sentence in summary.words)


def test_without_the_baseline_nothing_is_compared(make_record):
    summary = summarize([make_record("frozen", seed) for seed in (0, 1)], ACCURACY)
    assert summary.arms[0].difference is None
    assert _column(summary, "minus adamw [95 % Holm interval]") == {"frozen": "–"}


def test_every_statistic_is_shown_as_scipy_computes_it(make_record):
    own, base = (0.55, 0.66, 0.75, 0.61, 0.70, 0.58, 0.66), (0.5, 0.6, 0.7, 0.62, 0.64, 0.55, 0.61)
    records = [
        make_record(arm, seed, metrics={"test_accuracy": value})
        for arm, values in (("adamw", base), ("frozen", own))
        for seed, value in enumerate(values)
    ]
    table = statistics_table(summarize(records, ACCURACY))
    assert table is not None
    shown = dict(zip(table.header, table.rows[0], strict=True))
    difference = 100 * (np.array(own) - np.array(base))
    t = stats.ttest_rel(100 * np.array(own), 100 * np.array(base))
    low, high = t.confidence_interval()
    wilcoxon: Any = stats.wilcoxon(difference)
    assert shown["mean difference, points"] == f"{difference.mean():+.2f}"
    # one arm: Holm's family has one member
    assert shown["t interval"] == shown["Holm interval"] == f"[{low:+.2f}, {high:+.2f}]"
    assert shown["p, t"] == shown["p, Holm"] == f"{t.pvalue:.3f}".removeprefix("0")
    assert shown["p, Wilcoxon"] == f"{wilcoxon.pvalue:.3f}".removeprefix("0")
    assert shown["wins, ties, losses"] == "6, 0, 1"
    ends = [float(end) for end in shown["bootstrap interval"].strip("[]").split(",")]
    assert difference.min() < ends[0] < difference.mean() < ends[1] < difference.max()


def test_one_arm_alone_has_no_statistics(make_record):
    assert statistics_table(summarize([make_record()], ACCURACY)) is None
