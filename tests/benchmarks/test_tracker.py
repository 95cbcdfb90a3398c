import pytest
from geodescent.benchmarks import tracker
from geodescent.benchmarks.gpt import GPTShape
from geodescent.benchmarks.timing import Timings
from geodescent.benchmarks.tracker import EVERY, measure_tracker


@pytest.mark.parametrize(("record", "verdict"), [(0.9, "met"), (1.1, "not met")])
def test_the_share_is_that_of_a_run_with_a_record_every_so_many_steps(monkeypatch, record, verdict):
    def timed(calls, rounds, **options):
        for call in calls.values():
            call()
        return Timings({"step": [1.0] * rounds, "record": [record] * rounds})

    monkeypatch.setattr(tracker, "interleave", timed)
    outcome = measure_tracker(GPTShape(1, 8, 2, 2, 4, 5), rounds=3)
    assert outcome.data["share"]["median"] == pytest.approx(record / (EVERY + record))
    assert outcome.data["held_to"]["verdict"] == verdict
    (table,) = outcome.tables
    assert table.rows[2][1].startswith(f"{record / (EVERY + record):.1%}")
    assert table.notes[0].endswith(f"{verdict}.")
