import math
from typing import Any

import pytest
import torch
from geodescent.analysis import LAYOUTS, AttentionLayout, attention_geometry
from torch import nn

D, HEADS, WIDTH = 12, 4, 3


@pytest.fixture
def reference():
    """nn.MultiheadAttention with weights worth telling apart, its geometry, and its parts a head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.MultiheadAttention(D, HEADS, dtype=torch.float64)
        with torch.no_grad():
            module.in_proj_bias.normal_()
    q, k, v = module.in_proj_weight.detach().chunk(3)
    bq, bk, bv = module.in_proj_bias.detach().chunk(3)
    return attention_geometry(module).layers[0], (q, k, v), (bq, bk, bv), module.out_proj.weight.detach()


def stacked(parts, order):
    """The rows of three projections in one matrix, as written by a loop over heads."""
    if order == "blocks":
        return torch.cat(parts)
    rows = []
    for head in range(HEADS):
        for part in parts:
            rows += [part[WIDTH * head + i] for i in range(WIDTH)]
    return torch.stack(rows)


def state_of(layout, weights, biases, out, order):
    """A state dict in this layout, of a layer called "block.0"."""
    turn = (lambda w: w.mT) if layout is LAYOUTS["gpt2"] else (lambda w: w)
    output = layout.output if isinstance(layout.output, str) else layout.output[0]
    state = {f"block.0.{output}": turn(out)}
    if layout.fused:
        state[f"block.0.{layout.fused}"] = turn(stacked(weights, order))
        state[f"block.0.{layout.fused.replace('weight', 'bias')}"] = stacked(biases, order)
        return state
    for name, w, b in zip((layout.query, layout.key, layout.value), weights, biases, strict=True):
        state[f"block.0.{name}"] = turn(w)
        if not name.endswith("_weight"):
            state[f"block.0.{name.replace('weight', 'bias')}"] = b
    if layout is LAYOUTS["torch-separate"]:
        state["block.0.in_proj_bias"] = torch.cat(biases)
    return state


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_layer(name, reference):
    want, weights, biases, out = reference
    layout = LAYOUTS[name]
    order = "groups" if name == "query_key_value" else "blocks"
    state = state_of(layout, weights, biases, out, order)
    geometry = attention_geometry(state, num_heads=HEADS)
    assert not geometry.skipped
    got = geometry["block.0"]
    scale = (layout.scale or 1 / math.sqrt(WIDTH)) * math.sqrt(WIDTH)
    torch.testing.assert_close(got.spectrum, scale * want.spectrum, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.ov_spectrum, want.ov_spectrum, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.query_frames, want.query_frames)
    torch.testing.assert_close(got.key_frames, want.key_frames)
    torch.testing.assert_close(got.output_frames, want.output_frames)
    torch.testing.assert_close(got.query_bias, want.query_bias)
    torch.testing.assert_close(got.query_bias_gain, scale * want.query_bias_gain)
    assert got.rotary is layout.rotary


@pytest.mark.parametrize("transposed", [False, True])
def test_gpt2_lies_either_way(transposed, reference):
    want, weights, _, out = reference
    fused = torch.cat(weights)
    state = {"c_attn.weight": fused.mT if transposed else fused, "c_proj.weight": out.mT if transposed else out}
    layer = attention_geometry(state, num_heads=HEADS).layers[0]
    torch.testing.assert_close(layer.spectrum, want.spectrum)
    torch.testing.assert_close(layer.ov_spectrum, want.ov_spectrum)


def test_orders_differ_and_can_be_said(reference):
    want, weights, biases, out = reference
    layout = LAYOUTS["query_key_value"]
    blocks = state_of(layout, weights, biases, out, "blocks")
    wrong = attention_geometry(blocks, num_heads=HEADS).layers[0]
    assert not torch.allclose(wrong.spectrum, want.spectrum)
    mine = AttentionLayout(fused="query_key_value.weight", order="blocks", output="dense.weight")
    torch.testing.assert_close(
        attention_geometry(blocks, num_heads=HEADS, layout=mine).layers[0].spectrum, want.spectrum
    )
    told = attention_geometry(blocks, config={"model_type": "chatglm", "num_attention_heads": HEADS}).layers[0]
    torch.testing.assert_close(told.spectrum, want.spectrum)


def test_a_layout_for_transposed_separate_weights(reference):
    want, weights, _, out = reference
    state = {f"x.{name}": w.mT for name, w in zip("QKVO", (*weights, out), strict=True)}
    layout = AttentionLayout(query="Q", key="K", value="V", output="O", transposed=True, scale=2.0, rotary=False)
    layer = attention_geometry(state, num_heads=HEADS, layout=[layout, "torch"])["x"]
    torch.testing.assert_close(layer.spectrum, 2 * math.sqrt(WIDTH) * want.spectrum)
    torch.testing.assert_close(layer.ov_spectrum, want.ov_spectrum)


def test_only_the_layouts_asked_for_are_tried():
    state = {f"attn.{n}_proj.weight": torch.ones(4, 4) for n in "qk"}
    with pytest.raises(ValueError, match=r"no attention layer found.*attn: no known layout has its weights"):
        attention_geometry(state, num_heads=2, layout="bert")
    assert attention_geometry(state, num_heads=2, layout=("bert", "proj")).layers[0].name == "attn"


def test_shapes_that_do_not_fit_are_named():
    for state, why in (
        ({"attn.c_attn.weight": torch.ones(8, 20)}, r"shape \(8, 20\) is not the queries, keys and values of 4 heads"),
        (
            {"attn.c_attn.weight": torch.ones(8, 16), "attn.q_attn.weight": torch.ones(8, 8)},
            r"keys and values only, its queries are in q_attn.weight",
        ),
        ({"attn.qkv.weight": torch.ones(24, 8, 1, 1)}, r"has shape \(24, 8, 1, 1\), not that of a matrix"),
        ({"attn.q_proj.weight": torch.ones(8, 8)}, "but no 'attn.k_proj.weight'"),
        (
            {f"attn.{n}_proj.weight": torch.ones(8, 8) for n in "qkv"} | {"attn.o_proj.weight": torch.ones(8, 16)},
            "takes 4 numbers a head where values have 2",
        ),
        (
            {f"attn.{n}_proj.weight": torch.ones(8, 8) for n in "qk"} | {"attn.logit_scale": torch.ones(4, 1, 1)},
            "its logit_scale has shape",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            attention_geometry(state, num_heads=4)


def test_bad_layouts():
    bad: Any = ({}, {"query": "q"}, {"query": "q", "key": "k", "fused": "qkv"})
    for arguments in bad:
        with pytest.raises(ValueError, match="either fused, or query and key"):
            AttentionLayout(**arguments)
    with pytest.raises(ValueError, match='order must be "blocks" or "groups"'):
        AttentionLayout(fused="qkv", order="heads")
    with pytest.raises(ValueError, match="layout must be an AttentionLayout or one of torch"):
        attention_geometry({"w": torch.ones(2, 2)}, layout="gpt3")
