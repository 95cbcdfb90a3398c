import copy
import json
import math

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
    (layer,) = attention_geometry(module).layers
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
    assert len(ax.patches) == 8
