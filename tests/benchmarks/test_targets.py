import pytest
from geodescent.benchmarks.steps import SHAPES
from geodescent.benchmarks.targets import STEP_TARGETS, Target, held_to_row, step_verdicts, verdict
from geodescent.benchmarks.timing import Spread

S = (24, 512, 64)
PEER = Target(S, "peer", "ours", 3.0, at_least=True, aim=4.0)
FLOOR = Target(S, "ours", "floor", 3.0, at_least=False, aim=2.2, decisive=True)


def at(median):
    return Spread(median, median / 2, median * 2, 9)


@pytest.mark.parametrize(
    ("target", "ratio", "said"),
    [
        (PEER, 2.99, "not met"),
        (PEER, 3.0, "met"),
        (PEER, 4.0, "met, and the aim"),
        (FLOOR, 3.01, "not met"),
        (FLOOR, 3.0, "met"),
        (FLOOR, 2.2, "met, and the aim"),
        (Target(S, "a", "b", 15.0, at_least=True), 99.0, "met"),
    ],
)
def test_verdict_is_of_the_median(target, ratio, said):
    assert verdict(target, at(ratio)) == said


def test_not_measured_is_said():
    assert verdict(PEER, None) == "not measured"
    assert held_to_row(PEER, None, "not measured")[2] == "–"


@pytest.mark.parametrize(
    ("peer", "floor", "said"),
    [
        (2.0, 2.5, "not met; the floor decides: met"),
        (2.0, 3.5, "not met"),
        (3.5, 3.5, "met"),
    ],
)
def test_the_floor_decides_where_the_two_disagree(peer, floor, said):
    verdicts = step_verdicts({PEER: at(peer), FLOOR: at(floor)})
    assert verdicts[PEER] == said


def test_the_floor_decides_nothing_about_other_shapes_and_metrics():
    elsewhere = Target((96, 128, 32), "peer", "ours", 3.0, at_least=True)
    canonical = Target(S, "peer", "ours, canonical", 15.0, at_least=True)
    verdicts = step_verdicts({elsewhere: at(2.0), canonical: at(2.0), FLOOR: at(2.0)})
    assert verdicts[elsewhere] == verdicts[canonical] == "not met"


def test_there_are_targets_for_the_shapes_that_are_measured():
    assert {t.shape for t in STEP_TARGETS} == set(SHAPES)
    assert len(STEP_TARGETS) == 10
