import copy
import json
import math
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from geodescent.analysis import attention_geometry, drift
from geodescent.attention import StiefelAttention
from torch import nn


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def frames(module):
    layer: Any = attention_geometry(module).layers[0]
    return layer.query_frames.numpy(), layer.key_frames.numpy()


def set_heads(module, query, key):
    """Write (heads, d, d_h) frames into an nn.MultiheadAttention."""
    with torch.no_grad():
        d = module.embed_dim
        module.in_proj_weight[:d] = torch.as_tensor(query).mT.reshape(d, d)
        module.in_proj_weight[d : 2 * d] = torch.as_tensor(key).mT.reshape(d, d)


def balanced(m, p):
    u, s, vh = np.linalg.svd(m)
    return u[:, :p] * np.sqrt(s[:p]), vh[:p].T * np.sqrt(s[:p])


def procrustes(a, b):
    """min over R ∈ O(p) of ‖a − bR‖, with scipy's minimizer."""
    rotation, _ = scipy.linalg.orthogonal_procrustes(b, a)
    return np.linalg.norm(a - b @ rotation)


def test_nothing_moved():
    model = nn.MultiheadAttention(16, 4)
    (layer,) = drift(model, copy.deepcopy(model)).layers
    for name in layer.PER_HEAD:
        assert getattr(layer, name).abs().max() < 1e-13, name
    wide = nn.MultiheadAttention(32, 4)  # frames with rows enough to be reduced
    assert drift(wide, copy.deepcopy(wide), samples=0).layers[0].query_movement.max() == 0


def test_movement_and_angles_against_definitions():
    a, b = nn.MultiheadAttention(16, 4, dtype=torch.float64), nn.MultiheadAttention(16, 4, dtype=torch.float64)
    (layer,) = drift(a, b).layers
    for head in range(4):
        for old, new, side in zip(frames(a), frames(b), ("query", "key"), strict=True):
            w, w2 = old[head], new[head]
            moved = np.linalg.norm(w2 - w) / np.linalg.norm(w)
            angles = scipy.linalg.subspace_angles(w, w2)[::-1]
            assert getattr(layer, f"{side}_movement")[head].item() == pytest.approx(moved, rel=1e-12)
            np.testing.assert_allclose(getattr(layer, f"{side}_angles")[head], angles, rtol=1e-10)
            assert getattr(layer, f"{side}_distance")[head].item() == pytest.approx(np.linalg.norm(angles))


class TestGaugeDistance:
    def test_frames_against_explicit_minimisation(self):
        a, b = StiefelAttention(16, 4, dtype=torch.float64), StiefelAttention(16, 4, dtype=torch.float64)
        (layer,) = drift(a, b).layers
        (q, k), (q2, k2) = frames(a), frames(b)
        for head in range(4):
            want = procrustes(np.vstack([q2[head], k2[head]]), np.vstack([q[head], k[head]]))
            nuclear = np.linalg.norm(q[head].T @ q2[head] + k[head].T @ k2[head], "nuc")
            assert want**2 == pytest.approx(4 * 4 - 2 * nuclear)
            assert layer.gauge_distance[head].item() == pytest.approx(want, rel=1e-12)
            assert layer.gauge_movement[head].item() == pytest.approx(want / math.sqrt(8), rel=1e-12)

    def test_no_rotation_does_better(self):
        a, b = StiefelAttention(8, 2, dtype=torch.float64), StiefelAttention(8, 2, dtype=torch.float64)
        (layer,) = drift(a, b).layers
        (q, k), (q2, k2) = frames(a), frames(b)
        rotations = scipy.stats.ortho_group.rvs(4, size=3000, random_state=0)
        tried = np.linalg.norm(q2[0] - q[0] @ rotations, axis=(1, 2)) ** 2
        tried += np.linalg.norm(k2[0] - k[0] @ rotations, axis=(1, 2)) ** 2
        assert layer.gauge_distance[0].item() <= math.sqrt(tried.min())
        assert layer.gauge_distance[0].item() >= 0.5 * math.sqrt(tried.min())

    def test_unconstrained_is_balanced_first(self):
        a, b = nn.MultiheadAttention(12, 3, dtype=torch.float64), nn.MultiheadAttention(12, 3, dtype=torch.float64)
        (layer,) = drift(a, b).layers
        (q, k), (q2, k2) = frames(a), frames(b)
        for head in range(3):
            old, new = balanced(q[head] @ k[head].T, 4), balanced(q2[head] @ k2[head].T, 4)
            want = procrustes(np.vstack(new), np.vstack(old))
            assert layer.gauge_distance[head].item() == pytest.approx(want, rel=1e-10)

    def test_invariant_to_the_gauge_of_frames(self):
        a, b = StiefelAttention(16, 4, dtype=torch.float64), StiefelAttention(16, 4, dtype=torch.float64)
        base = drift(a, b)["(root)"].gauge_distance
        turned = copy.deepcopy(b)
        rotation = torch.linalg.qr(torch.randn(4, 4, 4, dtype=torch.float64)).Q
        with torch.no_grad():
            for name in ("q_proj", "k_proj"):
                weight = turned.get_parameter(f"{name}.weight")
                weight.copy_(weight.detach() @ rotation)
        torch.testing.assert_close(drift(a, turned)["(root)"].gauge_distance, base, rtol=1e-12, atol=1e-13)
        alone = drift(b, turned)["(root)"]
        assert alone.gauge_distance.max() < 1e-13
        assert alone.query_distance.max() < 1e-13
        assert alone.query_movement.min() > 0.1

    def test_invariant_to_the_whole_linear_gauge_of_unconstrained_weights(self):
        a, b = nn.MultiheadAttention(16, 4, dtype=torch.float64), nn.MultiheadAttention(16, 4, dtype=torch.float64)
        base = drift(a, b)["(root)"].gauge_distance
        turned = copy.deepcopy(b)
        mix = torch.randn(4, 4, 4, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)
        q, k = (torch.as_tensor(w) for w in frames(b))
        set_heads(turned, q @ mix, k @ torch.linalg.inv(mix).mT)
        torch.testing.assert_close(drift(a, turned)["(root)"].gauge_distance, base, rtol=1e-9, atol=1e-11)

    def test_a_scale_a_head_is_no_drift_of_frames_but_is_reported(self):
        a = StiefelAttention(16, 4, dtype=torch.float64)
        b = copy.deepcopy(a)
        assert isinstance(b.logit_scale, torch.Tensor)
        with torch.no_grad():
            b.logit_scale.mul_(1.5)
        (layer,) = drift(a, b).layers
        assert layer.gauge_distance.max() < 1e-13
        torch.testing.assert_close(layer.logit_scale_movement, torch.full((4,), 0.5, dtype=torch.float64))

    def test_a_gain_per_direction_is_drift_of_the_circuit(self):
        a = StiefelAttention(16, 4, dtype=torch.float64, logit_scale="spectrum")
        b = copy.deepcopy(a)
        assert isinstance(a.logit_scale, torch.Tensor)
        assert isinstance(b.logit_scale, torch.Tensor)
        with torch.no_grad():
            a.logit_scale.fill_(1.0)
            b.logit_scale.fill_(1.0)
            b.logit_scale[:, 0] = 4.0
        # σ: 1 → 4 along one direction moves both balanced factors by √4 − √1 there
        (layer,) = drift(a, b).layers
        torch.testing.assert_close(layer.gauge_distance, torch.full((4,), math.sqrt(2), dtype=torch.float64))
        scalar = StiefelAttention(16, 4, dtype=torch.float64)
        assert drift(scalar, a, samples=2).layers[0].logit_scale_movement.shape == (4,)


class TestRandomReference:
    def test_expected_values_are_those_of_independent_models(self):
        models = [StiefelAttention(24, 6, dtype=torch.float64) for _ in range(12)]
        pairs = [drift(a, b).layers[0] for a, b in zip(models[::2], models[1::2], strict=True)]
        for measured, expected in (
            ("query_distance", "random_query_distance"),
            ("key_distance", "random_key_distance"),
            ("gauge_distance", "random_gauge_distance"),
        ):
            mean = torch.stack([getattr(layer, measured) for layer in pairs]).mean()
            assert float(mean) == pytest.approx(float(torch.as_tensor(getattr(pairs[0], expected)).mean()), rel=0.02)

    def test_lines_have_the_closed_form(self):
        # the angle of two random lines of ℝ³ is uniform in its cosine: its mean is 1 radian
        (layer,) = drift(nn.MultiheadAttention(3, 3), nn.MultiheadAttention(3, 3), samples=4000).layers
        assert layer.random_query_distance == pytest.approx(1.0, abs=0.02)
        assert layer.random_key_distance == pytest.approx(1.0, abs=0.02)

    def test_reproducible_and_optional(self):
        a, b = nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4)
        assert drift(a, b).to_dict() == drift(a, b).to_dict()
        assert drift(a, b).to_dict() != drift(a, b, seed=1).to_dict()
        (layer,) = drift(a, b, samples=0).layers
        assert layer.random_query_distance is None
        assert layer.random_gauge_distance is None


def grouped(generator, heads=4, groups=2, width=4, d=20):
    """A state dict of grouped-query attention."""
    shapes = {"q": (heads * width, d), "k": (groups * width, d), "v": (groups * width, d), "o": (d, heads * width)}
    return {
        f"{name}_proj.weight": torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }


class TestGroupedQueries:
    def test_gauge_of_a_group_against_its_stack(self, generator):
        a, b = grouped(generator), grouped(generator)
        (layer,) = drift(a, b, num_heads=4, samples=0).layers
        for group in range(2):
            factors = []
            for state in (a, b):
                query = state["q_proj.weight"][8 * group : 8 * group + 8].unflatten(0, (2, 4)).mT.reshape(40, 4)
                key = state["k_proj.weight"][4 * group : 4 * group + 4].mT
                factors.append(np.vstack(balanced((query @ key.mT).numpy(), 4)))
            want = procrustes(factors[1], factors[0])
            for head in (2 * group, 2 * group + 1):
                assert layer.gauge_distance[head].item() == pytest.approx(want, rel=1e-10)
                assert layer.gauge_movement[head].item() == pytest.approx(want / np.linalg.norm(factors[0]), rel=1e-10)

    def test_invariant_to_the_groups_joint_gauge_and_to_no_other(self, generator):
        a, b = grouped(generator), grouped(generator)
        base = drift(a, b, num_heads=4, samples=0).layers[0]
        mix = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator) + 2 * torch.eye(4, dtype=torch.float64)
        inverse = torch.stack([torch.linalg.inv(m) for m in mix])
        turned = dict(b)

        def apply(name, matrices, heads):
            rows = b[name].unflatten(0, (heads, 4))
            turned[name] = (matrices.mT @ rows).flatten(0, 1)

        apply("q_proj.weight", mix.repeat_interleave(2, 0), 4)
        apply("k_proj.weight", inverse.mT, 2)
        apply("v_proj.weight", inverse.mT, 2)
        turned["o_proj.weight"] = (
            (b["o_proj.weight"].unflatten(1, (4, 4)).movedim(1, 0) @ mix.repeat_interleave(2, 0))
            .movedim(0, 1)
            .flatten(1)
        )
        same = drift(a, turned, num_heads=4, samples=0).layers[0]
        for name in ("gauge_distance", "ov_gauge_distance", "query_distance", "key_distance", "output_distance"):
            torch.testing.assert_close(getattr(same, name), getattr(base, name), rtol=1e-8, atol=1e-10)
        moved: Any = drift(b, turned, num_heads=4, samples=0).layers[0]
        assert moved.gauge_movement.max() < 1e-9
        assert moved.ov_gauge_movement.max() < 1e-9
        assert moved.spectrum_change.max() < 1e-9
        assert moved.query_movement.min() > 0.1
        # one head of a group turned by itself changes the group's circuit
        turned["q_proj.weight"] = turned["q_proj.weight"].clone()
        turned["q_proj.weight"][:4] = mix[0].mT @ turned["q_proj.weight"][:4]
        assert drift(b, turned, num_heads=4, samples=0).layers[0].gauge_movement[:2].min() > 1e-2


def test_procrustes_and_spectrum_changes_against_definitions(generator):
    a, b = grouped(generator, groups=4), grouped(generator, groups=4)
    layer: Any = drift(a, b, num_heads=4, samples=0).layers[0]
    for h in range(4):
        wq, wk, wv = ([s[f"{n}_proj.weight"][4 * h : 4 * h + 4].mT.numpy() for s in (a, b)] for n in "qkv")
        wo = [s["o_proj.weight"][:, 4 * h : 4 * h + 4].mT.numpy() for s in (a, b)]
        assert layer.query_procrustes[h].item() == pytest.approx(procrustes(wq[1], wq[0]))
        assert layer.key_procrustes[h].item() == pytest.approx(procrustes(wk[1], wk[0]))
        for change, left, right in (
            (layer.spectrum_change, wq, [k.T for k in wk]),
            (layer.ov_spectrum_change, wv, wo),
        ):
            old, new = (np.linalg.svd(x @ y, compute_uv=False) for x, y in zip(left, right, strict=True))
            assert change[h].item() == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
        angles = scipy.linalg.subspace_angles(*wv)
        assert layer.value_distance[h].item() == pytest.approx(np.linalg.norm(angles))


def test_random_values_of_movement_procrustes_and_ov_are_those_of_independent_models(generator):
    states = [grouped(generator) for _ in range(40)]
    reports = [drift(a, b, num_heads=4).layers[0] for a, b in zip(states[::2], states[1::2], strict=True)]
    for name in ("query_procrustes", "key_procrustes", "gauge_distance", "ov_gauge_distance"):
        measured = torch.stack([getattr(layer, name) for layer in reports]).mean()
        expected = torch.stack([getattr(layer, f"random_{name}") for layer in reports]).mean()
        assert float(measured) == pytest.approx(float(expected), rel=0.02), name
    squares = torch.stack([layer.query_movement**2 - layer.random_query_movement**2 for layer in reports])
    assert abs(float(squares.mean())) < 0.1
    for name in ("value", "output"):
        measured = torch.stack([getattr(layer, f"{name}_distance") for layer in reports]).mean()
        assert float(measured) == pytest.approx(getattr(reports[0], f"random_{name}_distance"), rel=0.03)
    assert reports[0].random_samples == 32


def test_tiny_drifts_are_not_lost():
    a = nn.MultiheadAttention(64, 8, dtype=torch.float64)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.in_proj_weight.add_(1e-9 * torch.randn_like(b.in_proj_weight))
    (layer,) = drift(a, b, samples=0).layers
    (q, _), (q2, _) = frames(a), frames(b)
    for h in range(8):
        assert layer.query_movement[h].item() == pytest.approx(
            np.linalg.norm(q2[h] - q[h]) / np.linalg.norm(q[h]), rel=1e-4
        )
        angles = scipy.linalg.subspace_angles(q[h], q2[h])
        assert layer.query_distance[h].item() == pytest.approx(np.linalg.norm(angles), rel=1e-4)
    assert (layer.gauge_distance > 1e-10).all()
    assert (layer.gauge_distance < 1e-7).all()


def test_layers_are_paired_by_what_their_names_share():
    a, b = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    short, long = nn.ModuleDict({"h0": a, "h1": b}), nn.ModuleDict({"model": nn.ModuleDict({"h0": a, "h1": b})})
    for report in (drift(short, long, samples=0), drift(long, short, samples=0)):
        assert all(layer.query_movement.max() == 0 for layer in report.layers)
    turned = nn.ModuleDict({"h1": b, "h0": a})
    assert drift(short, turned, samples=0)["h0"].query_movement.max() == 0
    with pytest.raises(ValueError, match=r"before has the layers \['h1'\] that after lacks"):
        drift(short, nn.ModuleDict({"h0": a}))


def test_geometries_without_frames_and_layers_that_cannot_be_read():
    a = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="keep_frames=False: its drift needs the frames"):
        drift(attention_geometry(a, keep_frames=False), a)
    assert drift(attention_geometry(a, ov=False), a).layers[0].ov_gauge_distance is None
    state = {f"x.{k}": v for k, v in a.state_dict().items()} | {
        f"y.{p}_proj.weight": torch.zeros(4, 4, dtype=torch.int8) for p in "qk"
    }
    report = drift(state, state, num_heads=2, samples=0)
    assert [layer.name for layer in report.layers] == ["x"]
    assert "quantized" in report.skipped["y"]
    assert "1 left out" in repr(report)
    with pytest.raises(ValueError, match="no attention layer found"):
        drift(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_large_report_prints_on_one_screen():
    model = nn.ModuleDict({f"block{i}": nn.MultiheadAttention(8, 2) for i in range(40)})
    assert len(repr(drift(model, model, samples=2)).splitlines()) <= 30


def test_a_broken_head_spoils_only_itself():
    a = nn.MultiheadAttention(16, 4)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.in_proj_weight[0, 0] = math.nan
        b.in_proj_weight[4:8] = 0
    (layer,) = drift(a, b).layers
    assert torch.isnan(layer.gauge_distance[0])
    assert torch.isnan(layer.query_angles[:2]).all()
    assert layer.query_movement[1] == 1
    assert layer.gauge_distance[2:].max() < 1e-6
    assert layer.key_distance.max() < 1e-6


def test_fewer_key_features_than_columns():
    a, b = nn.MultiheadAttention(8, 1, kdim=3), nn.MultiheadAttention(8, 1, kdim=3)
    (layer,) = drift(a, b).layers
    assert torch.isnan(layer.key_angles).all()
    assert torch.isfinite(layer.gauge_distance).all()


def test_state_dicts_and_mismatches():
    a, b = nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4)
    assert drift(a.state_dict(), b.state_dict(), num_heads=4).to_dict() == drift(a, b).to_dict()
    with pytest.raises(ValueError, match="before has the layers"):
        drift(a, nn.ModuleDict({"x": b}))
    with pytest.raises(ValueError, match=r"query_frames are \(4, 16, 4\) before and \(2, 16, 8\) after"):
        drift(a, nn.MultiheadAttention(16, 2))
    with pytest.raises(KeyError, match="no layer 'x'"):
        drift(a, b)["x"]


def test_repr_html_dict_and_plot():
    report = drift(nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4))
    assert len(repr(report).splitlines()) == 2 + 1 + 4
    assert report._repr_html_().count("<tr>") == 1 + 4
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["num_heads"] == 4
    ax = matplotlib.figure.Figure().subplots()
    assert report.plot(ax) is ax
    assert [len(np.asarray(line.get_xdata())) for line in ax.lines[:2]] == [4, 4]
