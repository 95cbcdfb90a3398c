import math

import pytest
import torch
from geodescent.benchmarks import training
from geodescent.benchmarks.gpt import GPTShape
from geodescent.benchmarks.peers import missing
from geodescent.benchmarks.steps import point_error
from geodescent.benchmarks.training import ARMS, BASE, TrainingStep, measure_training
from torch import testing

TINY = GPTShape(layers=1, width=16, heads=2, batch=2, length=8, vocabulary=7)


def step_of(name):
    if reason := missing(ARMS[name].needs):
        pytest.skip(reason)
    return TrainingStep(ARMS[name], TINY)


def frames_of(step):
    frames = step.frames()
    assert frames is not None
    return frames


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_learns_and_keeps_its_constraint(name):
    step = step_of(name)
    losses = [step() for _ in range(30)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    frames = step.frames()
    assert (frames is None) == (not ARMS[name].constrained)
    if frames is not None:
        assert frames.shape == (4, 16, 8)
        assert point_error(frames) < 1e-4  # what the parametrizations hold in float32; ours is far below
    assert len(step.optimizer_seconds) == 30


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.constrained])
def test_constrained_arms_start_alike_and_their_frames_move(name):
    ours, other = step_of("ours"), step_of(name)
    start = frames_of(other).clone()
    testing.assert_close(start, frames_of(ours), rtol=0, atol=2e-6)
    testing.assert_close(other(), ours(), rtol=1e-5, atol=1e-5)
    other()
    assert (frames_of(other) - start).abs().amax((1, 2)).min() > 1e-5


def test_every_parameter_is_trained_once():
    for name in ARMS:
        if missing(ARMS[name].needs):
            continue
        step = TrainingStep(ARMS[name], TINY)
        trained = [p for group in step.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in trained} == {id(p) for p in step.model.parameters()}
        assert len(trained) == len({id(p) for p in trained})


def test_threads_are_left_as_they_were():
    pytest.importorskip("geotorch")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        TrainingStep(ARMS["geotorch.orthogonal"], TINY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_measurement_and_missing_peers(monkeypatch):
    monkeypatch.setattr(training, "missing", lambda name: f"{name} is not installed" if name == "geotorch" else None)
    outcome = measure_training(TINY, rounds=2, warmup=1)
    arms = outcome.data["arms"]
    assert set(arms) == set(ARMS)
    assert arms["geotorch.orthogonal"] == {"skipped": "geotorch is not installed"}
    assert arms[BASE]["ratio"]["median"] == 1
    for name in set(ARMS) - {"geotorch.orthogonal"}:
        assert arms[name]["step_milliseconds"]["count"] == arms[name]["optimizer_milliseconds"]["count"] == 2
        assert 0 < arms[name]["optimizer_milliseconds"]["low"] < arms[name]["step_milliseconds"]["high"]
    held = outcome.data["held_to"]
    assert held["verdict"] == ("met" if held["measured"]["median"] <= 1.05 else "not met")
    rows = {row[0]: row for row in outcome.tables[0].rows}
    assert rows["geotorch.orthogonal"][1] == "geotorch is not installed"
