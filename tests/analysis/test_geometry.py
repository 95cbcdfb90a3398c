import json
import math
from typing import Any

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
        want: Any = attention_geometry(model)
        got: Any = attention_geometry(model.state_dict(), num_heads=4)
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
        for width in (6, 7):
            state = {"q_proj.weight": torch.zeros(16, 4), "k_proj.weight": torch.zeros(width, 4)}
            with pytest.raises(ValueError, match=f"8 query heads of dimension 2 do not share keys of width {width}"):
                attention_geometry(state, num_heads=8)
        state["k_proj.weight"] = torch.zeros(8, 4)
        with pytest.raises(ValueError, match="num_key_value_heads = 2, but with num_heads = 8 the key width 8 makes 4"):
            attention_geometry(state, num_heads=8, num_key_value_heads=2)
        with pytest.raises(ValueError, match="head_dim = 4, but 8 heads of width 16 have 2"):
            attention_geometry(state, num_heads=8, head_dim=4)
        for empty in ({}, {"q_proj.weight": torch.zeros(4)}):
            with pytest.raises(ValueError, match="no attention layer found in dict"):
                attention_geometry(empty, num_heads=2)
        with pytest.raises(ValueError, match="does not divide the width 0"):
            attention_geometry({f"{p}_proj.weight": torch.zeros(0, 4) for p in "qk"}, num_heads=2)
        with pytest.raises(ValueError, match="on the meta device"):
            attention_geometry(nn.MultiheadAttention(8, 2, device="meta"))
        with pytest.raises(TypeError, match="found int"):
            attention_geometry(3)  # type: ignore[arg-type]


def grouped(heads=4, groups=2, width=8, d=24, dtype=torch.float64):
    """A state dict of grouped-query attention."""
    shapes = {"q_proj": (heads * width, d), "k_proj": (groups * width, d), "v_proj": (groups * width, d)}
    state = {f"attn.{name}.weight": torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return state | {"attn.o_proj.weight": torch.randn(d, heads * width, dtype=dtype)}


class TestGroupedQueries:
    def test_heads_share_their_groups_key_and_value(self):
        state = grouped()
        layer: Any = attention_geometry(state, num_heads=4)["attn"]
        assert (layer.num_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)
        for head in range(4):
            q = state["attn.q_proj.weight"][8 * head : 8 * head + 8].numpy()
            o = state["attn.o_proj.weight"][:, 8 * head : 8 * head + 8].numpy()
            k, v = (state[f"attn.{n}_proj.weight"][8 * (head // 2) :][:8].numpy() for n in "kv")
            qk = np.linalg.svd(q.T @ k / math.sqrt(8), compute_uv=False)
            ov = np.linalg.svd(v.T @ o.T, compute_uv=False)
            np.testing.assert_allclose(layer.spectrum[head], qk[:8], rtol=1e-11)
            np.testing.assert_allclose(layer.ov_spectrum[head], ov[:8], rtol=1e-11)
            assert layer.key_condition[head].item() == pytest.approx(np.linalg.cond(k))
            assert layer.key_norm[head].item() == pytest.approx(np.linalg.norm(k))
            assert layer.circuit_condition[head].item() == pytest.approx(qk[0] / qk[7])
            assert layer.stable_rank[head].item() == pytest.approx(np.sum(qk**2) / qk[0] ** 2)
            share = qk[:8] / qk.sum()
            assert layer.effective_rank[head].item() == pytest.approx(np.exp(-np.sum(share * np.log(share))))
            assert layer.ov_norm[head].item() == pytest.approx(np.linalg.norm(v.T @ o.T))

    def test_repeated_keys_give_the_ungrouped_layer(self):
        state = grouped()
        apart = dict(state)
        for name in ("attn.k_proj.weight", "attn.v_proj.weight"):
            apart[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
        a, b = (attention_geometry(s, num_heads=4)["attn"] for s in (state, apart))
        assert b.num_key_value_heads == 4
        for name in (*a.PER_HEAD, *a.PER_HEAD_OV, "spectrum", "ov_spectrum", "key_spectrum"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-12, atol=0)


class TestOutputValueCircuit:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64),
            lambda: nn.MultiheadAttention(16, 4, vdim=12, batch_first=True, dtype=torch.float64),
            lambda: StiefelAttention(16, 4, dtype=torch.float64),
            lambda: StiefelAttention(16, 4, constrain=("v", "o"), frames="whole", dtype=torch.float64),
        ],
    )
    def test_heads_add_up_to_what_a_lone_value_becomes(self, make):
        module = make()
        layer: Any = attention_geometry(module).layers[0]
        through = layer.value_frames @ layer.output_frames.mT
        x = torch.randn(3, 1, 16, dtype=torch.float64)  # batches of one token: every weight is 1
        y = torch.randn(3, 1, layer.value_frames.shape[-2], dtype=torch.float64)
        with torch.no_grad():
            difference = module(x, x, y)[0] - module(x, x, torch.zeros_like(y))[0]
        torch.testing.assert_close(difference, y @ through.sum(0), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(
            layer.ov_spectrum, np.linalg.svd(through.numpy(), compute_uv=False)[:, :4], rtol=1e-10, atol=1e-14
        )

    def test_it_is_left_out_where_it_is_not_wanted_or_not_there(self):
        module = nn.MultiheadAttention(16, 4)
        for layer in (
            attention_geometry(module, ov=False).layers[0],
            attention_geometry({k: v for k, v in module.state_dict().items() if "out" not in k}, 4).layers[0],
        ):
            assert layer.ov_spectrum is None
            assert layer._rows()[0][-3:] == (None, None, None)
        full = attention_geometry(module).layers[0]
        torch.testing.assert_close(layer.spectrum, full.spectrum)


class TestLogitBound:
    def test_it_is_attained(self):
        layer = attention_geometry(nn.MultiheadAttention(16, 4, bias=False, dtype=torch.float64)).layers[0]
        for head, m in enumerate(circuits(layer)):
            u, _, vh = torch.linalg.svd(m)
            assert layer.max_logit(2.0, 3.0)[head].item() == pytest.approx((2 * u[:, 0] @ m @ (3 * vh[0])).item())
        torch.testing.assert_close(layer.logit_bound, layer.max_logit(4.0))

    def test_a_query_bias_counts_and_a_key_bias_does_not(self):
        module = nn.MultiheadAttention(16, 4, dtype=torch.float64)
        with torch.no_grad():
            module.in_proj_bias.normal_()
        layer = attention_geometry(module).layers[0]
        x = torch.nn.functional.normalize(torch.randn(500, 16, dtype=torch.float64), dim=-1) * 2
        _, weights = module(x, x, x, average_attn_weights=False)
        logits = weights.log()
        # a constant along the keys is free: the logits' spread is what can be seen of them
        spread = (logits.amax(-1) - logits.amin(-1)).amax(-1) / 2
        bound = layer.max_logit(2.0)
        assert (spread <= bound).all()
        assert (spread > bound / 4).all()
        without = attention_geometry({k: v for k, v in module.state_dict().items() if "bias" not in k}, 4).layers[0]
        assert (bound > without.max_logit(2.0)).all()
        with torch.no_grad():
            assert module.in_proj_bias is not None
            module.in_proj_bias[16:32] = 100
        torch.testing.assert_close(attention_geometry(module).layers[0].max_logit(2.0), bound)

    @pytest.mark.parametrize("rotary", [True, None])
    def test_rotations_between_queries_and_keys_are_allowed_for(self, rotary):
        state = grouped() | {"attn.q_proj.bias": torch.randn(32), "attn.k_proj.bias": torch.randn(16)}
        config = {"num_attention_heads": 4} | ({"rope_theta": 10000.0} if rotary else {})
        layer = attention_geometry(state, config=config)["attn"]
        assert layer.rotary is rotary
        x = torch.nn.functional.normalize(torch.randn(200, 24, dtype=torch.float64), dim=-1)
        rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
        q, k = (x @ state[f"attn.{n}_proj.weight"].mT + state[f"attn.{n}_proj.bias"].double() for n in ("q", "k"))
        q, k = q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)).repeat_interleave(2, -2)
        logits = torch.einsum("ihd,de,jhe->hij", q, rotation, k) / math.sqrt(8)
        largest = logits.abs().amax((-2, -1))
        assert (largest <= layer.max_logit(1.0)).all()
        # and without biases there is a rotation that attains it
        free = attention_geometry({k: v for k, v in state.items() if "bias" not in k}, config=config)["attn"]
        for head in range(4):
            wq = state["attn.q_proj.weight"][8 * head : 8 * head + 8].mT
            wk = state["attn.k_proj.weight"][8 * (head // 2) :][:8].mT
            (uq, _, vq), (uk, _, vk) = torch.linalg.svd(wq), torch.linalg.svd(wk)
            between = vq.mT @ vk  # orthogonal, takes the one's first direction to the other's
            logit = (uq[:, 0] @ wq) @ between @ (uk[:, 0] @ wk) / math.sqrt(8)
            assert free.max_logit(1.0)[head].item() == pytest.approx(abs(logit.item()))


class TestUnknown:
    def test_what_is_not_understood_is_named(self):
        known = nn.MultiheadAttention(8, 2).state_dict()
        state = {f"a.attn.{k}": v for k, v in known.items()}
        state |= {"b.attn.kv_a.weight": torch.zeros(4, 4), "b.attn.q_a.weight": torch.zeros(4, 4)}
        state |= {
            "c.attn.q_proj.base_layer.weight": torch.zeros(4, 4),
            "c.attn.q_proj.lora_A.weight": torch.zeros(1, 4),
        }
        state |= {f"d.attn.{p}_proj.weight": torch.zeros(4, 4, dtype=torch.int8) for p in "qk"}
        state |= {f"e.attn.{p}_proj.weight": torch.zeros(4, 4) for p in "qk"} | {
            "e.attn.q_proj.weight_scale": torch.ones(1)
        }
        state |= {"f.attn.q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32), "g.attn.norm.weight": torch.zeros(4)}
        geometry = attention_geometry(state, num_heads=2)
        assert [layer.name for layer in geometry.layers] == ["a.attn"]
        assert set(geometry.skipped) == {f"{x}.attn" for x in "bcdef"}
        assert "kv_a.weight, q_a.weight" in geometry.skipped["b.attn"]
        assert "merge them first" in geometry.skipped["c.attn"]
        for name in "def":
            assert "quantized" in geometry.skipped[f"{name}.attn"]
        assert "left out: b.attn" in repr(geometry)
        assert "2 more, see .skipped" in repr(geometry)
        with pytest.raises(ValueError, match=r"no attention layer found.*Left out: b\.attn: no known layout"):
            attention_geometry({k: v for k, v in state.items() if k.startswith("b.")}, num_heads=2)

    def test_parametrized_weights_are_read_as_they_are_used(self):
        class Layer(nn.Module):
            num_heads = 2

            def __init__(self):
                super().__init__()
                for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                    setattr(self, name, nn.Linear(8, 8, bias=False))

        model = nn.ModuleList([Layer()])
        assert isinstance(model[0].q_proj, nn.Linear)
        nn.utils.parametrizations.orthogonal(model[0].q_proj)
        layer = attention_geometry(model)["0"]
        assert not attention_geometry(model).skipped
        torch.testing.assert_close(layer.query_condition, torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0)
        assert layer.key_condition.min() > 1.05


def test_numpy_state_dicts_half_precision_and_frames_that_were_not_kept():
    module = nn.MultiheadAttention(16, 4)
    want = attention_geometry(module)
    arrays = {key: value.numpy() for key, value in module.state_dict().items()}
    assert attention_geometry(arrays, 4).to_dict() == want.to_dict()
    lean = attention_geometry(module, keep_frames=False)
    assert lean.layers[0].query_frames is None
    assert lean.to_dict() == want.to_dict()
    rough = attention_geometry(module.bfloat16()).layers[0]
    assert rough.spectrum.dtype == torch.float64
    torch.testing.assert_close(rough.spectrum, want.layers[0].spectrum, rtol=0.02, atol=2e-3)


def test_a_large_model_prints_on_one_screen():
    model = nn.ModuleDict({f"block{i}": nn.MultiheadAttention(16, 4) for i in range(40)})
    geometry = attention_geometry(model)
    lines = repr(geometry).splitlines()
    assert len(lines) <= 30
    assert "block0–1" in lines[3] or "block0 " in lines[3]
    assert sum(int(line.split("median of ")[1].split()[0]) for line in lines[3:]) == 160


def test_what_was_measured_does_not_move_with_the_model():
    module = nn.MultiheadAttention(16, 4, dtype=torch.float64)
    layer: Any = attention_geometry(module).layers[0]
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


@pytest.mark.parametrize("scale", ["spectrum", "learned"])
def test_constrained_attention_is_read_as_the_ordinary_attention_it_is(scale):
    from geodescent.attention import constrain

    torch.manual_seed(0)
    for make in (
        lambda: nn.MultiheadAttention(16, 4),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False),
    ):
        model = make()
        before = attention_geometry(model)
        constrain(model, logit_scale=scale)
        after = attention_geometry(model)
        assert [layer.name for layer in after.layers] == [layer.name for layer in before.layers]
        assert not after.skipped
        for old, new in zip(before.layers, after.layers, strict=True):
            if scale == "spectrum":  # exact
                torch.testing.assert_close(new.spectrum, old.spectrum, rtol=0, atol=1e-6)
            assert new.key_condition.max() < 1 + 1e-5
            torch.testing.assert_close(new.ov_spectrum, old.ov_spectrum, rtol=0, atol=1e-6)
