import pytest
from geodescent.benchmarks import bounds
from geodescent.benchmarks.bounds import PARTS, measure_bounds
from geodescent.benchmarks.timing import Timings


def test_the_sum_is_taken_round_by_round():
    """One noisy round of one part must not decide: the sum's ratio is the median over rounds."""
    seconds = {name: [1.0, 1.0, 100.0] for name in PARTS} | {"floor": [2.0, 1.0, 4.0]}
    assert bounds._sum_of_parts(Timings(seconds), 3) == len(PARTS)


def test_every_part_and_the_step_are_in_the_table():
    outcome = measure_bounds([(3, 6, 2), (2, 5, 5)], rounds=2, warmup=1)
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == [*PARTS, "sum of these", "ours"]
    for shape, found in zip([[3, 6, 2], [2, 5, 5]], outcome.data["shapes"], strict=True):
        assert found["shape"] == shape
        assert found["ours"]["median"] > 0
        medians = [found["floors"][name]["median"] for name in PARTS]
        assert all(m > 0 for m in medians)
        assert found["sum of parts"] == pytest.approx(sum(medians), rel=1.0)
