import builtins
import copy
import json
import math

import matplotlib.figure
import pytest
import torch
from geodescent.analysis import GeometryTracker, attention_geometry, drift
from geodescent.attention import StiefelAttention
from torch import nn


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield nn.ModuleDict({"a": StiefelAttention(8, 2), "b": nn.MultiheadAttention(8, 2)})


def shake(model):
    with torch.no_grad():
        model["b"].in_proj_weight.add_(0.1 * torch.randn_like(model["b"].in_proj_weight))


def test_rows_hold_the_geometry_and_the_drift_since_the_start(model):
    start = copy.deepcopy(model)
    tracker = GeometryTracker(model)
    first = tracker.record(0, loss=torch.tensor(2.5), accuracy=0)
    assert first["loss"] == 2.5
    assert first["mean/query_movement"] == 0
    shake(model)
    row = tracker.record(10, loss=2)
    want = drift(start, model)["b"]
    assert row["b/1/query_movement"] == pytest.approx(want.query_movement[1].item())
    assert row["b/0/key_distance"] == pytest.approx(want.key_distance[0].item())
    assert row["b/0/key_condition"] == pytest.approx(attention_geometry(model)["b"].key_condition[0].item())
    assert row["a/0/query_movement"] == 0
    moved = [row[f"{layer}/{head}/query_movement"] for layer in "ab" for head in range(2)]
    assert row["mean/query_movement"] == pytest.approx(sum(moved) / 4)
    columns = tracker.to_dict()
    assert columns["step"] == [0, 10]
    assert math.isnan(columns["accuracy"][1])


def test_recording_leaves_the_model_and_the_random_state_alone(model):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    tracker = GeometryTracker(model)
    tracker.record(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_jsonl_is_written_through_and_strict(model, tmp_path):
    path = tmp_path / "run" / "geometry.jsonl"
    tracker = GeometryTracker(model, path)
    tracker.record(0, loss=math.nan)
    with torch.no_grad():
        model["b"].in_proj_weight[:4] = 0
    row = tracker.record(1, loss=1.0)

    def refuse(constant):
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert math.isnan(float(lines[0]["loss"]))
    assert row["b/0/query_condition"] == float(lines[1]["b/0/query_condition"]) == math.inf
    GeometryTracker(model, path).record(2)
    assert len(path.read_text().splitlines()) == 3


def test_bad_scalars_are_refused_and_not_recorded(model, tmp_path):
    tracker = GeometryTracker(model, tmp_path / "x.jsonl")
    for bad in ("low", torch.zeros(2), None):
        with pytest.raises(TypeError, match="loss must be a number"):
            tracker.record(0, loss=bad)
    assert tracker.rows == []
    assert not tracker.path.exists()  # type: ignore[union-attr]


def test_a_model_without_attention_is_an_error():
    with pytest.raises(ValueError, match="no attention layer found"):
        GeometryTracker(nn.Linear(2, 2))


def test_to_pandas(model):
    pandas = pytest.importorskip("pandas")
    tracker = GeometryTracker(model)
    assert tracker.to_pandas().empty
    tracker.record(0, loss=1.0)
    tracker.record(5, loss=0.5)
    frame = tracker.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc[5, "loss"] == 0.5


def test_missing_libraries_are_named(model, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("pandas", "matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    tracker = GeometryTracker(model)
    with pytest.raises(ImportError, match="to_pandas\\(\\) needs pandas"):
        tracker.to_pandas()
    with pytest.raises(ImportError, match="plot\\(\\) needs matplotlib"):
        tracker.plot()


def test_plot_and_repr(model):
    tracker = GeometryTracker(model)
    assert "0 rows" in repr(tracker)
    ax = matplotlib.figure.Figure().subplots()
    assert tracker.plot(ax) is ax
    tracker.record(0, loss=1.0)
    shake(model)
    tracker.record(1, loss=0.5)
    assert "mean/gauge_distance" in repr(tracker)
    ax = matplotlib.figure.Figure().subplots()
    tracker.plot(ax, quantities=("query_distance", "loss"))
    assert len(ax.lines) == 4 + 1 + 1
    assert ax.get_legend() is not None
