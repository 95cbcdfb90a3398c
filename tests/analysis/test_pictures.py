"""Pictures draw the numbers they are given, name their axes and units, and leave out what is not a number."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from geodescent.analysis import (
    GeometryTracker,
    attention_geometry,
    certify,
    drift,
    plot_angles,
    plot_certificates,
    plot_decay,
    plot_drift,
    plot_spectra,
    plot_tracks,
    weight_decay_drift,
)
from geodescent.analysis.pictures import OKABE_ITO, plot_soft_threshold
from geodescent.manifolds import Stiefel
from geodescent.optim import RiemannianAdam
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn


@pytest.fixture
def ax():
    return Figure().subplots()


def model(layers=2, heads=2, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({f"layer{i}": nn.MultiheadAttention(4 * heads, heads) for i in range(layers)})


def texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def collisions(ax):
    """Pairs of names of one axis that run into each other when drawn."""
    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    found = 0
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        boxes = [
            label.get_window_extent(canvas.get_renderer())
            for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            if low <= place <= high and label.get_text()
        ]
        found += sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return found


def report(layers=2, heads=2, samples=4):
    return drift(model(layers, heads), model(layers, heads, seed=1), samples=samples)


def test_spectra_are_a_line_a_head(ax):
    geometry = attention_geometry(model(3))
    assert plot_spectra(geometry, ax) is ax
    drawn = [np.asarray(line.get_ydata()).tolist() for line in ax.lines]
    assert drawn == [values.tolist() for layer in geometry.layers for values in layer.spectrum]
    assert texts(ax) == ["layer0", "layer1", "layer2"]
    assert "QK" in ax.get_ylabel()
    assert ax.get_xlabel()
    plot_spectra(geometry, ax, circuit="ov")
    assert "OV" in ax.get_ylabel()
    with pytest.raises(ValueError, match="circuit must be"):
        plot_spectra(geometry, ax, circuit="kq")


def test_a_zero_singular_value_is_a_gap_and_not_the_bottom_of_the_axis(ax):
    state = {"q_proj.weight": torch.diag(torch.tensor([2.0, 0.0])), "k_proj.weight": torch.eye(2)}
    plot_spectra(attention_geometry(state, num_heads=1), ax)
    values = np.asarray(ax.lines[0].get_ydata())
    assert values[0] > 0
    assert math.isnan(values[1])


def test_many_layers_are_a_ramp_with_two_names(ax):
    plot_spectra(attention_geometry(model(20)), ax)
    assert texts(ax) == ["layer0", "layer19"]
    assert len({colors.to_hex(line.get_color()) for line in ax.lines}) == 20


def test_the_heads_of_many_are_faint_under_the_medians_of_layers(ax):
    geometry = attention_geometry(model(3, 12))
    plot_spectra(geometry, ax)
    faint, bold = ax.lines[:36], ax.lines[36:]
    assert [np.asarray(line.get_ydata()).tolist() for line in bold] == [
        pytest.approx(np.median(layer.spectrum.numpy(), axis=0).tolist()) for layer in geometry.layers
    ]
    assert max(line.get_alpha() for line in faint) < 0.3
    assert min(line.get_linewidth() for line in bold) > 2 * max(line.get_linewidth() for line in faint)
    assert texts(ax) == ["layer0", "layer1", "layer2"]


def test_a_short_logarithmic_axis_has_plain_numbers(ax):
    state = {"q_proj.weight": torch.diag(torch.tensor([4.0, 3.0, 2.0])), "k_proj.weight": torch.eye(3)}
    plot_spectra(attention_geometry(state, num_heads=1), ax)
    assert ax.get_yscale() == "log"
    FigureCanvasAgg(ax.figure).draw()
    low, high = ax.get_ylim()
    shown = [label.get_text() for label in ax.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert len(shown) >= 2
    assert all(text == f"{float(text):g}" for text in shown)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 4), (24, 16)])
@pytest.mark.parametrize("picture", [plot_spectra, plot_angles, plot_drift])
def test_names_do_not_run_into_each_other_whatever_the_size(layers, heads, picture):
    """Of a checkpoint's long names too, on a figure of the usual size."""
    generator = torch.Generator().manual_seed(0)
    states = [
        {
            f"model.layers.{i}.self_attn.{side}_proj.weight": torch.randn(2 * heads, 6, generator=generator)
            for i in range(layers)
            for side in "qk"
        }
        for _ in range(2)
    ]
    ax = Figure(figsize=(6.4, 4.8), layout="constrained").subplots()
    if picture is plot_spectra:
        plot_spectra(attention_geometry(states[0], num_heads=heads), ax)
    else:
        picture(drift(*states, num_heads=heads, samples=2), ax)
    assert collisions(ax) == 0
    box = ax.get_position()
    assert box.width > 0.5  # names leave the picture its room
    assert box.height > 0.5
    assert ax.get_xlabel()
    assert ax.get_ylabel()


@pytest.mark.parametrize("side", ["query", "key"])
def test_angles_are_a_map_by_layer_and_head_in_degrees(ax, side):
    found = report(3, 2)
    plot_angles(found, ax, side=side)
    grid = ax.images[0].get_array()
    expected = [[math.degrees(float(a.max())) for a in getattr(layer, f"{side}_angles")] for layer in found.layers]
    assert np.asarray(grid) == pytest.approx(np.array(expected))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer0", "layer1", "layer2"]
    assert "degrees" in ax.figure.axes[1].get_ylabel()  # of the colour bar
    assert len(ax.texts) == 6


def test_a_head_without_angles_and_layers_of_other_widths_are_left_blank(ax):
    found = report(2, 3)
    first = found.layers[0]
    angles = first.query_angles.clone()
    angles[1] = math.nan
    found = dataclasses.replace(found, layers=(dataclasses.replace(first, query_angles=angles[:2]), *found.layers[1:]))
    plot_angles(found, ax)
    mask = np.ma.getmaskarray(ax.images[0].get_array())
    assert mask.tolist() == [[False, True, True], [False, False, False]]
    assert [text.get_text() for text in ax.texts].count("–") == 2


def test_a_large_map_has_no_numbers_and_few_names(ax):
    found = report(1, 2)
    many = dataclasses.replace(found, layers=found.layers * 60)
    plot_angles(many, ax)
    assert not ax.texts
    assert len(ax.get_yticks()) <= 24


def test_drift_is_a_point_a_head_in_units_of_random_subspaces(ax):
    found = report(2, 2, samples=8)
    plot_drift(found, ax)
    query, key = ax.lines[0], ax.lines[1]
    expected = [
        value / layer.random_query_distance for layer in found.layers for value in layer.query_distance.tolist()
    ]
    assert np.asarray(query.get_ydata()).tolist() == pytest.approx(expected)
    assert texts(ax) == ["query", "key", "random subspaces"]
    assert query.get_marker() != key.get_marker()  # not by colour alone
    assert ax.get_xlabel() == "layer"
    other = Figure().subplots()
    plot_drift(report(samples=0), other)
    assert "radians" in other.get_ylabel()
    assert "random" not in " ".join(texts(other))


def test_tracks_are_means_with_the_band_of_heads_and_of_random_subspaces(ax):
    module = model()
    tracker = GeometryTracker(module)
    for step in (0, 5, 10):
        tracker.record(step, loss=1.0 / (1 + step))
        with torch.no_grad():
            weight = module.get_parameter("layer0.in_proj_weight")
            weight.add_(0.1 * torch.randn_like(weight))
    plot_tracks(tracker, ax)
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [row["mean/query_distance"] for row in tracker.rows]
    assert np.asarray(ax.lines[0].get_xdata()).tolist() == [0, 5, 10]
    assert texts(ax) == ["query distance", "key distance", "random subspaces, 5 to 95 %"]
    assert "radians" in ax.get_ylabel()
    styles = {line.get_linestyle() for line in ax.lines}
    assert len(styles) == 2
    other = Figure().subplots()
    plot_tracks(tracker, other, quantities=("loss", "no such thing"))
    assert texts(other) == ["loss"]


def test_quantities_of_two_units_have_both_on_the_axis_and_the_band_says_whose_it_is(ax):
    tracker = GeometryTracker(model())
    for step in (0, 1):
        tracker.record(step)
    plot_tracks(tracker, ax, quantities=("query_condition", "query_distance"))
    assert ax.get_ylabel() == "κ₂ of W_Q; subspace distance, radians"
    assert texts(ax)[-1] == "random subspaces, 5 to 95 % (subspace distance, radians)"


def test_a_drift_of_nothing_is_at_zero_and_not_a_picture_of_rounding(ax):
    same = model()
    plot_drift(drift(same, same, samples=0), ax)
    assert ax.get_ylim() == (0, 1e-6)


def test_a_drift_that_is_not_a_number_leaves_the_others(ax):
    found = report(1, 3)
    values = found.layers[0].query_distance.clone()
    values[1] = math.nan
    plot_drift(dataclasses.replace(found, layers=(dataclasses.replace(found.layers[0], query_distance=values),)), ax)
    assert np.isnan(np.asarray(ax.lines[0].get_ydata())).tolist() == [False, True, False]
    assert math.isfinite(ax.get_ylim()[1])


def test_certificates_are_bars_that_cross_one_exactly_where_they_fail(ax):
    good = certify(lambda p: RiemannianAdam(p, lr=1e-2, eps=0.0), Stiefel(), (6, 2), steps=1, name="<Adam>")
    bad = certify(lambda p: torch.optim.SGD(p, lr=0.1), Stiefel(), (6, 2), steps=1)
    plot_certificates([good, bad], ax)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [row.name for row in good.rows]
    for container, found in zip(ax.containers, (good, bad), strict=True):
        for bar, row in zip(container, found.rows, strict=True):
            end = bar.get_x() + bar.get_width()
            assert (end <= 1 + 1e-9) == row.holds, row.name
            assert bool(bar.get_hatch()) != row.holds
    assert texts(ax) == ["<Adam>", "SGD"]
    single = Figure().subplots()
    assert good.plot(single) is single


def test_a_certificate_that_is_not_a_number_is_a_full_bar(ax):
    found = certify(lambda p: RiemannianAdam(p, lr=1e-2, eps=0.0), Stiefel(), (6, 2), steps=1)
    row = dataclasses.replace(found.rows[0], value=math.nan, holds=False)
    plot_certificates(dataclasses.replace(found, rows=(row, *found.rows[1:])), ax)
    assert ax.containers[0][0].get_width() >= ax.get_xlim()[1] / 2.5


@pytest.mark.parametrize("quantity", ["balance", "query_norm", "spectrum", "moved"])
def test_decay_is_drawn_over_its_prediction(ax, quantity):
    found = weight_decay_drift(model(1), lr=0.1, weight_decay=0.5, steps=20)
    assert found.plot(ax, quantity) is ax
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in ax.lines}
    values = getattr(found["decay, plain"], quantity)
    values = values if values.ndim == 2 else values.mean(-1)
    assert drawn["decay, plain"] == pytest.approx(np.median(values.numpy(), 1))
    assert "predicted" in drawn
    crosses = next(line for line in ax.lines if line.get_label() == "predicted")
    steps, heights = np.asarray(crosses.get_xdata()), np.asarray(crosses.get_ydata())
    measured = dict(zip(found["decay, plain"].steps.tolist(), drawn["decay, plain"], strict=True))
    assert heights == pytest.approx([measured[step] for step in steps], rel=1e-9)  # decay alone is as predicted
    assert ax.get_ylabel()
    assert plot_decay(found, quantity, ax) is ax


def test_runs_that_do_not_differ_are_one_line_and_zero_is_at_the_bottom(ax):
    found = weight_decay_drift(model(1), lr=0.1, weight_decay=0.5, steps=20)
    plot_decay(found, "balance", ax)
    assert texts(ax).count("all runs, constrained (zero)") == 1
    assert "predicted" in texts(ax)
    assert "small steps: exp(−2·lr·λ·t)" in texts(ax)
    smallest = min(float(found[f"{name}, plain"].balance.min()) for name in ("decay", "gradient", "cyclic"))
    assert 0.01 * smallest < ax.get_ylim()[0] < smallest  # the rounding of frames, 1e-16, does not stretch the axis
    small = tuple(
        dataclasses.replace(arm, balance=torch.full_like(arm.balance, 2e-6 * (1 + i))) if arm.constrained else arm
        for i, arm in enumerate(found.arms)
    )
    third = Figure().subplots()
    plot_decay(dataclasses.replace(found, arms=small), "balance", third)
    assert "gradient, constrained (below 8e-06)" in texts(third)
    assert third.get_ylim()[0] > 0.01 * smallest
    other = Figure().subplots()
    plot_decay(found, "query_condition", other)
    assert "decay / gradient, plain" in texts(other)  # neither changes it


def test_one_head_one_step_and_an_infinite_condition_number_are_drawn(ax):
    state = {"q_proj.weight": torch.diag(torch.tensor([1.0, 0.0])), "k_proj.weight": torch.eye(2)}
    found = weight_decay_drift(state, lr=0.1, weight_decay=0.5, steps=1, num_heads=1)
    for quantity in ("query_condition", "balance", "spectrum"):
        plot_decay(found, quantity, ax)
    FigureCanvasAgg(ax.figure).draw()


def test_singular_values_at_the_end_lie_over_the_soft_threshold(ax):
    found = weight_decay_drift(model(1), lr=0.1, weight_decay=0.1, steps=200)
    assert plot_soft_threshold(found, ax) is ax
    drawn = {line.get_label(): np.asarray(line.get_xydata()) for line in ax.lines}
    arm = found["decay and gradient, plain"]
    both = np.stack([arm.spectrum[0].flatten().numpy(), arm.spectrum[-1].flatten().numpy()], 1)
    assert drawn["decay and gradient, plain"] == pytest.approx(both)
    kink = drawn["at the end of time: max(σ − λ, 0)"]
    assert kink[:2].tolist() == [[0.0, 0.0], [0.1, 0.0]]
    assert kink[-1, 0] - kink[-1, 1] == pytest.approx(0.1)
    assert "predicted" in drawn
    assert "200 steps" in ax.get_ylabel()
    assert ax.get_xlabel()


def test_the_palette_is_told_apart_by_the_colour_blind():
    """Machado, Oliveira & Fernandes 2009, severity 1: neighbours differ in a simulated view of each kind."""
    views = {
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    rgb = np.array([colors.to_rgb(color) for color in OKABE_ITO])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for view in views.values():
        seen = linear @ np.array(view).T
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + np.eye(len(seen))
        assert apart.min() > 0.06


def test_shared_axes_show_all_that_is_drawn_on_them():
    flat = attention_geometry({"q_proj.weight": torch.eye(4), "k_proj.weight": torch.eye(4)}, num_heads=1)
    steep = attention_geometry(
        {"q_proj.weight": torch.diag(torch.tensor([4.0, 1.0, 0.1, 0.01])), "k_proj.weight": torch.eye(4)}, num_heads=1
    )
    first, second = Figure().subplots(1, 2, sharey=True)
    plot_spectra(steep, first)
    plot_spectra(flat, second)
    low, high = first.get_ylim()
    values = [float(v) for axes in (first, second) for line in axes.lines for v in np.asarray(line.get_ydata())]
    assert low < min(values)
    assert high > max(values)
