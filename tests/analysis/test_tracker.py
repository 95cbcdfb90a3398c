import builtins
import copy
import csv
import json
import math
import subprocess
import sys
import time

import matplotlib.figure
import numpy as np
import pytest
import torch
from geodescent.analysis import GeometryTracker, attention_geometry, drift, read_track
from geodescent.attention import StiefelAttention
from geodescent.manifolds import Stiefel
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
    first = tracker.record(0, loss=torch.tensor(2.5, requires_grad=True), accuracy=0)
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
    assert [line.get_label() for line in ax.lines] == ["query distance", "loss"]
    assert np.asarray(ax.lines[1].get_ydata()).tolist() == [1.0, 0.5]
    assert ax.get_legend() is not None


def test_random_subspaces_are_as_far_as_the_band_says(model):
    low, high = GeometryTracker(model).random["query_distance"]
    generator = torch.Generator().manual_seed(9)
    a, b = (Stiefel().random_point(500, 8, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    distances = torch.linalg.vector_norm(torch.linalg.svdvals(a.mT @ b).clamp(max=1).acos(), dim=-1)
    assert 0.85 < ((distances > low) & (distances < high)).double().mean() < 0.95


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_drifts_from_its_first_start(model, tmp_path):
    path = tmp_path / "run.jsonl"
    tracker = GeometryTracker(model, path)
    tracker.record(0)
    shake(model)
    tracker.record(10, loss=1.0)
    shake(model)
    again = GeometryTracker(model, path)  # measures the model as it is now, but drift goes on from the start
    assert again.rows == tracker.rows == read_track(path)
    row = again.record(20)
    assert row["b/0/query_movement"] > tracker.rows[1]["b/0/query_movement"] > 0
    assert row == {**GeometryTracker(model, path).record(30), "step": 20}


def test_rows_of_an_abandoned_branch_are_superseded_and_kept_in_the_file(model, tmp_path):
    path = tmp_path / "run.jsonl"
    tracker = GeometryTracker(model, path)
    for step in (0, 10, 20, 30):
        tracker.record(step, loss=float(step))
    again = GeometryTracker(model, path)
    again.record(20, loss=-1.0)  # training began again from the checkpoint of step 15
    again.record(5, loss=-2.0)  # rows of one session keep the order of the calls
    expected = [(0, 0.0), (10, 10.0), (20, -1.0), (5, -2.0)]
    for rows in (again.rows, read_track(path), GeometryTracker(model, path).rows):
        assert [(row["step"], row["loss"]) for row in rows] == expected
    assert path.read_text().count('"loss": 30.0') == 1


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_line_cut_off_by_a_crash_costs_that_row_alone(model, tmp_path, cut):
    path = tmp_path / "run.jsonl"
    tracker = GeometryTracker(model, path)
    rows = [tracker.record(step) for step in (0, 1, 2)]
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_track(path) == rows[:2]
    again = GeometryTracker(model, path)
    assert again.rows == rows[:2]
    again.record(2)
    assert read_track(path) == rows


def test_killed_while_it_writes(model, tmp_path):
    """kill -9 in the middle of a run: every row whose record() returned is there."""
    path, told = tmp_path / "run.jsonl", tmp_path / "told"
    code = f"""
import torch
from geodescent.analysis import GeometryTracker
tracker = GeometryTracker(torch.nn.MultiheadAttention(8, 2), {str(path)!r})
for step in range(10_000):
    tracker.record(step)
    with open({str(told)!r}, "a") as file:
        file.write("x")
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        deadline = time.monotonic() + 60
        while (not told.exists() or told.stat().st_size < 20) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert told.stat().st_size >= 20
    assert len(read_track(path)) >= told.stat().st_size
    assert [row["step"] for row in read_track(path)] == list(range(len(read_track(path))))


def test_another_models_file_is_refused_and_left_alone(model, tmp_path):
    path = tmp_path / "run.jsonl"
    GeometryTracker(model, path).record(0)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"other attention layers.*a: 2 heads of 4"):
        GeometryTracker(nn.MultiheadAttention(8, 2), path)
    with pytest.raises(ValueError, match="other attention layers"):
        GeometryTracker(nn.ModuleDict({"a": StiefelAttention(8, 4), "b": nn.MultiheadAttention(8, 2)}), path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_that_is_no_trackers_is_refused_and_left_alone(model, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work\n")
    with pytest.raises(ValueError, match="choose another path"):
        GeometryTracker(model, path)
    assert path.read_text() == "years of work\n"
    other = tmp_path / "run.jsonl"
    GeometryTracker(model, other).record(0)
    other.write_text("years of work\n" + other.read_text())
    before = other.read_text()
    with pytest.raises(ValueError, match="line 1: not a row"):
        GeometryTracker(model, other)
    assert other.read_text() == before


def test_two_trackers_on_one_file_do_not_mix_their_rows(model, tmp_path):
    path = tmp_path / "run.jsonl"
    first = GeometryTracker(model, path)
    first.record(0)
    second = GeometryTracker(model, path)
    second.record(1)
    with pytest.raises(RuntimeError, match="written to by somebody else"):
        first.record(1)
    second.record(2)
    assert [row["step"] for row in read_track(path)] == [0, 1, 2]


def test_weights_that_are_not_finite_are_recorded_and_the_run_goes_on(model, tmp_path):
    tracker = GeometryTracker(model, tmp_path / "run.jsonl")
    with torch.no_grad():
        model["b"].in_proj_weight[0] = math.nan  # of the first head's queries
    row = tracker.record(1)
    assert math.isnan(row["b/0/query_condition"])
    assert math.isfinite(row["b/1/query_condition"])
    assert math.isfinite(row["a/0/gauge_distance"])
    assert math.isnan(read_track(tmp_path / "run.jsonl")[0]["b/0/query_condition"])


def test_wrappers_do_not_change_the_names(model, tmp_path):
    path = tmp_path / "run.jsonl"
    GeometryTracker(model, path).record(0)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        GeometryTracker(wrapped, path).record(1)  # pyright: ignore[reportArgumentType]
    assert {key for key in read_track(path)[-1] if key.startswith("a/0/")}


# --- exports ----------------------------------------------------------------------------------------------------------


def test_csv_has_every_number(model, tmp_path):
    tracker = GeometryTracker(model)
    tracker.record(0, loss=1.0)
    tracker.record(5)
    tracker.to_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == tracker.rows


def test_tensorboard_gets_every_finite_number(model):
    class Writer:
        def __init__(self):
            self.found = {}

        def add_scalar(self, name, value, step):
            self.found[name, step] = value

    tracker, writer = GeometryTracker(model), Writer()
    tracker.record(0, loss=1.0)
    tracker.record(5, loss=math.inf)
    tracker.to_tensorboard(writer)
    expected = {(k, r["step"]): v for r in tracker.rows for k, v in r.items() if k != "step" and math.isfinite(v)}
    assert writer.found == expected
    assert ("loss", 5) not in writer.found
