import dataclasses
import math

import pytest
import torch
from geodescent.benchmarks import contenders, steps
from geodescent.benchmarks.contenders import RECIPES, FrameBatch, floor, pymanopt_momentum, recipe
from geodescent.benchmarks.steps import measure_steps, point_error
from geodescent.benchmarks.targets import STEP_TARGETS
from geodescent.manifolds import Stiefel
from torch import testing

SHAPE = (3, 8, 2)


def points_of(ready):
    points = ready.points()
    assert points is not None
    return points


@pytest.fixture(scope="module")
def batch():
    return FrameBatch.random(SHAPE)


def test_the_batch_is_on_the_manifold_and_the_same_each_time(batch):
    assert point_error(batch.frames) < 1e-6
    again = FrameBatch.random(SHAPE)
    assert torch.equal(batch.frames, again.frames)
    assert torch.equal(batch.gradients, again.gradients)
    assert not torch.equal(batch.frames, FrameBatch.random(SHAPE, seed=1).frames)


@pytest.mark.parametrize("entry", RECIPES, ids=lambda r: r.name)
def test_every_contender_descends_stays_and_leaves_gradients_alone(entry, batch):
    frames, gradients = batch.frames.clone(), batch.gradients.clone()
    params = entry.parameters(batch)
    assert len(params) == (SHAPE[0] if entry.separate else 1)
    optimizer = entry.optimizer(params)
    for _ in range(3):
        optimizer.step()
    after = torch.stack([p.detach().as_subclass(torch.Tensor) for p in params]).view(SHAPE)
    # whatever the optimizer, three steps along one gradient lower ⟨g, x⟩ in every frame
    assert ((after - frames) * gradients).sum((1, 2)).max() < 0
    if entry.constrained:
        assert point_error(after) < 2e-6
    # the contenders own copies, and no step changes its gradient
    assert torch.equal(batch.frames, frames)
    grads = torch.stack([p.grad for p in params]).view(SHAPE)
    assert torch.equal(grads, gradients)


def test_points_are_those_that_were_stepped(batch):
    ready = recipe("ours").prepare(batch)
    assert torch.equal(points_of(ready), batch.frames)
    ready.step()
    assert not torch.equal(points_of(ready), batch.frames)
    assert recipe("AdamW fused").prepare(batch).points() is None


def test_separate_and_stacked_parameters_take_the_same_step(batch):
    separate, stacked = (recipe(name).prepare(batch) for name in ("ours", "ours, one parameter"))
    for _ in range(3):
        separate.step()
        stacked.step()
    testing.assert_close(separate.points(), stacked.points(), rtol=0, atol=1e-6)


def test_the_floor_is_a_gram_matrix_and_an_application(batch):
    expected = torch.stack([x @ (x.T @ x) for x in batch.frames])
    testing.assert_close(floor(batch).step(), expected)


def test_pymanopt_follows_the_manifold(batch):
    ready = pymanopt_momentum(batch)
    ready.step()
    # the first step is -lr·0.1·P(g), retracted: to first order in its length that is where the frame is
    x, g = batch.frames.double(), batch.gradients.double()
    step = -contenders.LR * 0.1 * Stiefel().project(x, g)
    testing.assert_close(points_of(ready).double(), x + step, rtol=0, atol=2e-7)
    assert point_error(points_of(ready)) < 1e-6


def test_unknown_contender():
    with pytest.raises(KeyError, match="no contender is called 'nobody'"):
        recipe("nobody")


def test_measurement_covers_everybody_on_every_shape():
    outcome = measure_steps([SHAPE, (2, 5, 3)], rounds=2, warmup=1)
    names = {"floor", "pymanopt", *(r.name for r in RECIPES)}
    assert [s["shape"] for s in outcome.data["shapes"]] == [[3, 8, 2], [2, 5, 3]]
    for shape in outcome.data["shapes"]:
        assert set(shape["contenders"]) == names
        for name, numbers in shape["contenders"].items():
            assert numbers["milliseconds"]["count"] == 2
            assert numbers["milliseconds"]["low"] > 0
            assert (numbers["orthonormality_error"] is None) == (name in ("floor", "AdamW fused"))
        assert shape["contenders"]["floor"]["floors"]["median"] == 1
    milliseconds, floors, held = outcome.tables
    assert [row[0] for row in milliseconds.rows] == ["floor", *(r.name for r in RECIPES), "pymanopt"]
    assert len(floors.rows) == len(milliseconds.rows) - 1
    assert held.rows == ()  # no target is set for these shapes


def test_targets_are_printed_for_their_shapes(monkeypatch):
    monkeypatch.setattr(steps, "STEP_TARGETS", [dataclasses.replace(STEP_TARGETS[0], shape=SHAPE)])
    outcome = measure_steps([SHAPE], rounds=1, warmup=1)
    (row,) = outcome.tables[2].rows
    (numbers,) = outcome.data["held_to"]
    assert row[:2] == ("3×8×2", "geoopt Euclidean ÷ ours")
    ratio = numbers["measured"]["median"]
    assert row[-1].startswith("met") == (ratio >= numbers["bound"])


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr(
        steps, "missing", lambda name: f"{name} is not installed" if name in ("geoopt", "pymanopt") else None
    )
    outcome = measure_steps([SHAPE], rounds=1, warmup=1)
    rows = {row[0]: row[1] for row in outcome.tables[0].rows}
    assert rows["geoopt Euclidean"] == rows["geoopt canonical"] == "geoopt is not installed"
    assert rows["pymanopt"] == "pymanopt is not installed"
    assert outcome.data["shapes"][0]["contenders"]["pymanopt"] == {"skipped": "pymanopt is not installed"}


def test_point_error():
    assert point_error(torch.eye(4, 2)) == 0
    # a column of length 1 + e has error (1 + e)² − 1
    assert math.isclose(point_error(1.001 * torch.eye(4, 2, dtype=torch.float64)), 1.001**2 - 1, rel_tol=1e-9)
