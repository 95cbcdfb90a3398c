import json
import math

import matplotlib.figure
import numpy as np
import pytest
import torch
from geodescent.analysis import attention_geometry
from geodescent.attention import StiefelAttention
from torch import nn


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def circuits(layer):
    """W_Q diag(scale) W_Kᵀ a head, as full matrices."""
    scale = layer.logit_scale if layer.logit_scale.ndim == 2 else layer.logit_scale[:, None]
    return layer.query_frames @ torch.diag_embed(scale.expand(-1, layer.head_dim)) @ layer.key_frames.mT


class TestOrdinaryAttention:
    @pytest.mark.parametrize("kdim", [None, 20])
    def test_the_circuit_is_the_bilinear_form_of_the_logits(self, kdim):
        module = nn.MultiheadAttention(16, 4, kdim=kdim, bias=False, dtype=torch.float64)
        x = torch.randn(5, 16, dtype=torch.float64)
        y = torch.randn(6, kdim or 16, dtype=torch.float64)
        value = torch.randn(6, 16, dtype=torch.float64)
        _, weights = module(x, y, value, average_attn_weights=False)
        (layer,) = attention_geometry(module).layers
        logits = x @ circuits(layer) @ y.mT
        torch.testing.assert_close(torch.softmax(logits, -1), weights, rtol=1e-12, atol=1e-14)
        sigma = np.linalg.svd(circuits(layer).numpy(), compute_uv=False)
        np.testing.assert_allclose(layer.spectrum, sigma[:, :4], rtol=1e-12)
        np.testing.assert_allclose(sigma[:, 4:], 0, atol=1e-13)
        np.testing.assert_allclose(layer.circuit_norm, torch.linalg.matrix_norm(circuits(layer)), rtol=1e-12)

    def test_numbers_a_head(self):
        module = nn.MultiheadAttention(16, 4)
        (layer,) = attention_geometry(module).layers
        for head in range(4):
            wq = module.in_proj_weight[4 * head : 4 * (head + 1)].detach().double().numpy()
            wk = module.in_proj_weight[16 + 4 * head : 16 + 4 * (head + 1)].detach().double().numpy()
            assert layer.query_norm[head].item() == pytest.approx(np.linalg.norm(wq))
            assert layer.key_norm[head].item() == pytest.approx(np.linalg.norm(wk))
            assert layer.query_condition[head].item() == pytest.approx(np.linalg.cond(wq))
            assert layer.key_condition[head].item() == pytest.approx(np.linalg.cond(wk))


class TestStiefelAttention:
    @pytest.mark.parametrize("frames", ["head", "whole"])
    def test_the_spectrum_of_frames_is_the_logit_scale(self, frames):
        module = StiefelAttention(16, 4, frames=frames, dtype=torch.float64)
        assert isinstance(module.logit_scale, torch.Tensor)
        with torch.no_grad():
            module.logit_scale.copy_(torch.tensor([1.0, 2.0, -0.5, 3.0]))
        (layer,) = attention_geometry(module).layers
        want = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)[:, None].expand(4, 4)
        torch.testing.assert_close(layer.spectrum, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(layer.effective_rank, torch.full((4,), 4.0, dtype=torch.float64))
        torch.testing.assert_close(layer.query_condition, torch.ones(4, dtype=torch.float64))
        assert layer.query_orthonormality.max() < 1e-13
        assert layer.query_norm[0].item() == pytest.approx(2)

    def test_a_gain_per_direction_is_in_the_spectrum(self):
        module = StiefelAttention(16, 4, logit_scale="spectrum", dtype=torch.float64)
        assert isinstance(module.logit_scale, torch.Tensor)
        gains = torch.rand(4, 4, dtype=torch.float64)
        with torch.no_grad():
            module.logit_scale.copy_(gains)
        (layer,) = attention_geometry(module).layers
        torch.testing.assert_close(layer.spectrum, gains.sort(-1, descending=True).values, rtol=1e-11, atol=1e-14)

    def test_unconstrained_equals_multihead_attention_with_its_weights(self):
        module = StiefelAttention(16, 4, constrain=(), logit_scale="matched", bias=False)
        other = nn.MultiheadAttention(16, 4, bias=False)
        with torch.no_grad():
            other.in_proj_weight.copy_(
                torch.cat([module.get_parameter(f"{role}_proj.weight") for role in ("q", "k", "v")])
            )
        a, b = attention_geometry(module).to_dict(), attention_geometry(other).to_dict()
        for key in ("spectrum", "query_condition", "effective_rank", "key_norm"):
            np.testing.assert_allclose(a["layers"][0][key], b["layers"][0][key], rtol=1e-6)


class TestWhere:
    def test_layers_are_found_inside_a_model_in_order_and_by_name(self):
        model = nn.Sequential(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
            ),
            nn.Linear(16, 16),
            StiefelAttention(16, 4),
        )
        geometry = attention_geometry(model)
        assert [layer.name for layer in geometry.layers] == ["0.layers.0.self_attn", "0.layers.1.self_attn", "2"]
        assert geometry["2"].num_heads == 4
        with pytest.raises(KeyError, match="no layer '3'"):
            geometry["3"]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.MultiheadAttention(16, 4),
            lambda: nn.MultiheadAttention(16, 4, kdim=20),
            lambda: StiefelAttention(16, 4),
            lambda: StiefelAttention(16, 4, frames="whole", logit_scale="spectrum"),
            lambda: StiefelAttention(16, 4, constrain=("k",), logit_scale="matched"),
        ],
    )
    def test_a_state_dict_says_what_the_model_says(self, make):
        model = nn.ModuleDict({"attn": make()})
        want = attention_geometry(model)
        got = attention_geometry(model.state_dict(), num_heads=4)
        assert got.to_dict() == want.to_dict()
        assert torch.equal(got["attn"].query_frames, want["attn"].query_frames)

    def test_heads_of_a_state_dict_by_name(self):
        model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4), "b": nn.MultiheadAttention(16, 2)})
        geometry = attention_geometry(model.state_dict(), num_heads={"a": 4, "b": 2})
        assert [layer.num_heads for layer in geometry.layers] == [4, 2]
        with pytest.raises(ValueError, match="how many heads layer 'a' has: give num_heads"):
            attention_geometry(model.state_dict())
        with pytest.raises(ValueError, match="num_heads = 3 does not divide the width 16"):
            attention_geometry(model.state_dict(), num_heads=3)

    def test_errors(self):
        with pytest.raises(ValueError, match="no attention layer found in Linear"):
            attention_geometry(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="no 'k_proj_weight'"):
            attention_geometry({"q_proj_weight": torch.zeros(4, 4)}, num_heads=2)
        with pytest.raises(ValueError, match=r"\(8, 2\) and keys \(8, 1\); grouped"):
            attention_geometry({"q_proj.weight": torch.zeros(16, 4), "k_proj.weight": torch.zeros(8, 4)}, num_heads=8)
        with pytest.raises(TypeError, match="found int"):
            attention_geometry(3)  # type: ignore[arg-type]


def test_what_was_measured_does_not_move_with_the_model():
    module = nn.MultiheadAttention(16, 4, dtype=torch.float64)
    (layer,) = attention_geometry(module).layers
    kept = layer.query_frames.clone()
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert torch.equal(layer.query_frames, kept)
    assert not layer.query_frames.requires_grad


def test_broken_weights_are_shown_as_they_are():
    module = nn.MultiheadAttention(16, 4)
    with torch.no_grad():
        module.in_proj_weight[0, 0] = math.nan
        module.in_proj_weight[4:8] = 0
    (layer,) = attention_geometry(module).layers
    assert torch.isnan(layer.spectrum[0]).all()
    assert torch.isnan(layer.query_condition[0])
    assert layer.query_condition[1] == math.inf
    assert layer.effective_rank[1] == 0
    assert torch.isfinite(layer.spectrum[1:]).all()


def test_repr_html_dict_and_plot():
    model = nn.ModuleDict({"<i>": nn.MultiheadAttention(8, 2)})
    geometry = attention_geometry(model)
    assert len(repr(geometry).splitlines()) == 2 + 1 + 2
    assert "&lt;i&gt;" in geometry._repr_html_()
    assert "<i>" not in geometry._repr_html_()
    as_dict = json.loads(json.dumps(geometry.to_dict()))
    assert len(as_dict["layers"][0]["spectrum"]) == 2
    assert "query_frames" not in as_dict["layers"][0]
    ax = matplotlib.figure.Figure().subplots()
    assert geometry.plot(ax) is ax
    assert len(ax.lines) == 2
