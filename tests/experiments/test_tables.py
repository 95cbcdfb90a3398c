from geodescent.experiments.study import Headline
from geodescent.experiments.tables import control_table, tuning_table

STEPS = Headline(
    "steps_to_95_test", "tuned", "steps to 95 %", "steps to 95 %", "steps", False, digits=0, cap=800, goal="got there"
)


def test_the_sweep_counts_what_was_not_reached_as_the_choice_does(make_record):
    """A rate that got there once, and soon, is not shown as better than one that always did."""
    tuned = {0.01: (100, None, None), 0.03: (300, 300, 300), 0.1: (None, None, None)}
    records = [
        make_record(seed=1000 + i, lr=lr, metrics={"tuned": value, "steps": 400})
        for lr, values in tuned.items()
        for i, value in enumerate(values)
    ]
    table = tuning_table({"tuning": records}, STEPS)
    assert table is not None
    column = table.header.index("steps to 95 %")
    assert [row[column] for row in table.rows] == ["≥ 300 (1 of 3 reached)", "300", "not reached"]


def test_a_failed_run_of_the_sweep_counts_for_nothing(make_record):
    """Also where it comes first and says nothing of its steps."""
    records = [
        make_record(seed=1000, status="failed", metrics={}, error="it diverged"),
        make_record(seed=1001, metrics={"tuned": None, "steps": 400}),
        make_record(seed=1002, metrics={"tuned": 200, "steps": 400}),
    ]
    records[0]["metrics"] = {}
    table = tuning_table({"tuning": records}, STEPS)
    assert table is not None
    assert table.rows[0][table.header.index("steps to 95 %")] == "≥ 300 (1 of 2 reached)"
    alone = tuning_table({"tuning": records[:1]}, STEPS)
    assert alone is not None
    assert alone.rows[0][alone.header.index("steps to 95 %")] == "failed"


def test_the_control_shows_its_own_learning_rates(make_record):
    records = [
        make_record(arm, seed, lr=lr, metrics={"test_accuracy": accuracy + 0.01 * seed, "steps_to_95_test": None})
        for arm, lr, accuracy in (("adamw", 0.003, 0.5), ("frozen", 0.001, 0.4))
        for seed in (0, 1)
    ]
    table = control_table({"control": records})
    assert table is not None
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["learning rate"] for row in rows] == ["0.003", "0.001"]
    assert [row["test accuracy, %"] for row in rows] == ["50.50 ± 0.71", "40.50 ± 0.71"]
    assert rows[1]["minus adamw [95 % interval]"].startswith("−10.00")
    assert [row["reached 95 %"] for row in rows] == ["0 of 2", "0 of 2"]
