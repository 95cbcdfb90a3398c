import dataclasses
import itertools

import pytest
import torch
from geodescent.experiments import training
from geodescent.experiments.arms import ARMS
from geodescent.experiments.starts import attentions, build_model
from geodescent.experiments.steppers import build_stepper
from geodescent.experiments.study_modular import ModularStudy
from geodescent.experiments.training import CellFailed, train_cell
from geodescent.manifolds import ManifoldParameter, Stiefel


@pytest.fixture
def kept_models(monkeypatch):
    """The models that train_cell builds, with copies of their frames at the start."""
    kept = []

    def build(arm, factory, seed, square_norm):
        model = build_model(arm, factory, seed, square_norm)
        frames = [p for p in model.parameters() if isinstance(p, ManifoldParameter)]
        kept.append((frames, [p.detach().clone() for p in frames]))
        return model

    monkeypatch.setattr(training, "build_model", build)
    return kept


def test_frozen_frames_do_not_move_by_a_bit(tiny_study, kept_models):
    result = train_cell(tiny_study, ARMS["frozen"], 0, tiny_study.data(0))
    ((frames, before),) = kept_models
    assert len(frames) == 2
    assert all(torch.equal(now, start) for now, start in zip(frames, before, strict=True))
    assert result.metrics["qk_movement"] == 0
    assert set(result.history["query_movement"]) == {0.0}


def test_riemannian_frames_move_and_stay_on_the_manifold(tiny_study, kept_models):
    result = train_cell(tiny_study, ARMS["riemannian-adam"], 0, tiny_study.data(0))
    ((frames, before),) = kept_models
    moved = sum(float((now.detach() - start).square().sum()) for now, start in zip(frames, before, strict=True))
    norm = sum(float(start.square().sum()) for start in before)
    movement, error, capped = (result.metrics[name] for name in ("qk_movement", "frame_error", "capped_fraction"))
    assert movement == pytest.approx((moved / norm) ** 0.5, rel=1e-5)
    assert movement is not None
    assert movement > 0.01
    for frame in frames:
        assert Stiefel().point_error(frame.detach()).max() < 1e-5
    assert error is not None
    assert error < 1e-5
    assert capped is not None
    assert 0 <= capped <= 1


def test_curves_have_one_value_an_evaluation_and_start_at_zero(tiny_study):
    result = train_cell(tiny_study, ARMS["adamw"], 0, tiny_study.data(0))
    assert result.history["step"] == [0, 4, 8]
    assert {len(values) for values in result.history.values()} == {3}
    assert result.history["query_movement"][0] == 0
    assert result.metrics["capped_fraction"] is None
    assert result.metrics["frame_error"] is None
    assert result.metrics["steps"] == 8


def test_the_same_cell_gives_the_same_numbers(tiny_study):
    one, two = (train_cell(tiny_study, ARMS["riemannian-adam"], 0, tiny_study.data(0)) for _ in range(2))
    assert (one.history, one.metrics, one.cycles) == (two.history, two.metrics, two.cycles)


def test_the_step_length_is_the_mean_of_the_steps(tiny_study, monkeypatch):
    """Against the path of the weights, recorded from outside after every step."""
    models, weights = [], []

    def build(*arguments):
        models.append(build_model(*arguments))
        return models[-1]

    def snapshot(_step=0):
        (layer,) = attentions(models[0])
        frames = torch.cat([layer.query_frames(), layer.key_frames()])
        weights.append(frames.detach().as_subclass(torch.Tensor).double().clone())

    monkeypatch.setattr(training, "build_model", build)
    monkeypatch.setattr(training, "build_stepper", lambda *a: (snapshot(), build_stepper(*a))[1])
    result = train_cell(tiny_study, ARMS["riemannian-adam"], 0, tiny_study.data(0), snapshot)
    squares = [(b - a).square().sum((1, 2)).mean() for a, b in itertools.pairwise(weights)]
    assert len(squares) == 8
    assert result.metrics["step_length"] == pytest.approx(sum(float(s.sqrt()) for s in squares) / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.2, 0.96, 0.5, 0.97, 0.98, 0.95, 0.99], 4),  # the streak that was held counts, from its start
        ([0.96, 0.96, 0.9, 0.96, 0.96, 0.9, 0.96], None),
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.96, 0.96], None),  # above at the end, but not held
    ],
)
@pytest.mark.parametrize("late", ["validation", "test"])
def test_steps_to_95(monkeypatch, accuracies, expected, late):
    """Each split has its own streak, and the run goes on to its end."""
    study = ModularStudy(p=5, width=16, heads=2, steps=7, interval=1)
    values = iter([0.0, *accuracies])
    early = {"validation": "test", "test": "validation"}[late]

    def measure(history, step, *_):
        row = {"train_loss": 1.0, "train_accuracy": 0.5, "validation_loss": 1.0}
        row |= {f"{late}_accuracy": next(values), f"{early}_accuracy": 1.0}
        for name in (*row, "step", *training._TRACKED):
            history.setdefault(name, []).append(row.get(name, step))

    monkeypatch.setattr(training, "_measure", measure)
    metrics = train_cell(study, ARMS["adamw"], 0, study.data(0)).metrics
    assert metrics[f"steps_to_95_{late}"] == expected
    assert metrics[f"steps_to_95_{early}"] == 1
    assert metrics["steps"] == 7


@pytest.mark.parametrize(("split", "steps"), [("validation", 4), ("test", 7)])
def test_a_run_stops_by_validation_data_and_never_by_test_data(monkeypatch, split, steps):
    study = ModularStudy(p=5, width=16, heads=2, steps=7, interval=1, stop_accuracy=0.95)
    values = iter([0.1, 0.2, 0.96, 0.97, 0.98, 0.1, 0.1, 0.1])

    def measure(history, step, *_):
        row = {"train_loss": 1.0, "train_accuracy": 0.5, "validation_loss": 1.0, "test_accuracy": 0.0}
        row["validation_accuracy"] = 0.0
        row[f"{split}_accuracy"] = next(values)
        for name in (*row, "step", *training._TRACKED):
            history.setdefault(name, []).append(row.get(name, step))

    monkeypatch.setattr(training, "_measure", measure)
    assert train_cell(study, ARMS["adamw"], 0, study.data(0)).metrics["steps"] == steps


def test_weights_that_diverged_in_the_last_step_are_a_failed_run(tiny_study):
    study = dataclasses.replace(tiny_study, lr=1e30, steps=1)
    with pytest.raises(CellFailed, match=r"the loss after step 1 is (nan|inf)"):
        train_cell(study, ARMS["adamw"], 0, study.data(0))


def test_a_diverging_run_says_so(tiny_study):
    study = dataclasses.replace(tiny_study, lr=1e30)
    with pytest.raises(CellFailed, match=r"loss became (nan|inf) at step \d+ \(learning rate 1e\+30\)"):
        train_cell(study, ARMS["adamw"], 0, study.data(0))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lr": 0.0}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"steps": 0}, "steps"),
        ({"interval": 0}, "interval"),
        ({"heads": 3}, "width"),
        ({"train_fraction": 2.0}, "train_fraction"),
        ({"qk_scale": 0.0}, "qk_scale"),
        ({"batch_size": 0}, "batch_size"),
        ({"shrink": 1.0}, "shrink"),
        ({"decay_cycles": 1, "weight_decay": 0.0}, "weight_decay"),
    ],
)
def test_settings_are_checked(tiny_study, change, name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(tiny_study, **change)
