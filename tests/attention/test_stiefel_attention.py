import copy
import io
import itertools
from typing import Any

import pytest
import torch
from geodescent.attention import FrameProjection, Rotary, StiefelAttention
from geodescent.manifolds import CanonicalMetric, ManifoldParameter, NotOnManifoldError, Stiefel
from geodescent.optim import RiemannianAdam
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def as_torch(layer: StiefelAttention) -> nn.MultiheadAttention:
    """The nn.MultiheadAttention with the same effective weights: our logit scale is folded into its queries."""
    fused = layer.kdim == layer.vdim == layer.embed_dim
    twin = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.out_proj.bias is not None,
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
        dtype=layer.logit_scale.dtype,
    )
    gains = layer.logit_scale.reshape(layer.num_heads, -1, 1) * layer.head_dim**0.5
    flat = {"q": layer.query_frames().mT, "k": layer.key_frames().mT, "v": layer.value_frames().mT}
    flat["q"] = gains * flat["q"]
    with torch.no_grad():
        q, k, v = (flat[r].flatten(0, 1) for r in "qkv")
        if fused:
            twin.in_proj_weight.copy_(torch.cat([q, k, v]))
        else:
            twin.q_proj_weight.copy_(q)
            twin.k_proj_weight.copy_(k)
            twin.v_proj_weight.copy_(v)
        twin.out_proj.weight.copy_(layer.output_frames().mT.flatten(0, 1).mT)
        if layer.out_proj.bias is not None:
            assert layer.q_proj.bias is not None
            assert layer.v_proj.bias is not None
            bias = (layer.q_proj.bias.unflatten(0, (layer.num_heads, -1)).unsqueeze(-1) * gains).flatten()
            key_bias = torch.zeros_like(bias) if layer.k_proj.bias is None else layer.k_proj.bias
            twin.in_proj_bias.copy_(torch.cat([bias, key_bias, layer.v_proj.bias]))
            twin.out_proj.bias.copy_(layer.out_proj.bias)
        for mine, its in ((layer.bias_k, twin.bias_k), (layer.bias_v, twin.bias_v)):
            if mine is not None and its is not None:
                its.copy_(mine)
    return twin


def randomize_biases(layer):
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "bias" in name:
                p.normal_()
            if name == "logit_scale":
                p.uniform_(0.5, 2.0)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"constrain": ()},
    {"constrain": ("q", "k", "v", "o")},
    {"frames": "whole", "constrain": "qkvo"},
    {"logit_scale": "spectrum"},
    {"logit_scale": "matched", "bias": False},
    {"logit_scale": 0.3, "num_heads": 3},
    {"num_heads": 12},
    {"kdim": 10, "vdim": 7},
    {"kdim": 20, "vdim": 12, "constrain": ("q", "k", "v"), "batch_first": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"add_zero_attn": True, "kdim": 10, "logit_scale": "spectrum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", ["none", "bool", "float", "per-head", "padding", "causal", "causal+padding"])
def test_equals_nn_multihead_attention_with_the_same_weights(options, masks):
    torch.manual_seed(0)
    options = {"embed_dim": 12, "num_heads": 4, "dtype": torch.float64, **options}
    layer = StiefelAttention(**options)
    randomize_biases(layer)
    twin = as_torch(layer)
    batch, length, keys = 3, 5, 5 if "causal" in masks else 6
    query = torch.randn(batch, length, 12, dtype=torch.float64)
    key, value = (torch.randn(batch, keys, w, dtype=torch.float64) for w in (layer.kdim, layer.vdim))
    if not layer.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    future = torch.ones(length, keys, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, -2:] = True
    ours, theirs = {
        "none": ({}, {}),
        "bool": ({"attn_mask": future},) * 2,
        "float": ({"attn_mask": torch.randn(length, keys, dtype=torch.float64)},) * 2,
        "per-head": ({"attn_mask": torch.randn(batch * layer.num_heads, length, keys, dtype=torch.float64)},) * 2,
        "padding": ({"key_padding_mask": padding},) * 2,
        "causal": ({"is_causal": True}, {"attn_mask": future}),
        "causal+padding": (
            {"is_causal": True, "key_padding_mask": padding},
            {"attn_mask": future, "key_padding_mask": padding},
        ),
    }[masks]
    for average in (True, False):
        expected, expected_weights = twin(query, key, value, average_attn_weights=average, **theirs)
        out, weights = layer(query, key, value, need_weights=True, average_attn_weights=average, **ours)
        fused, none = layer(query, key, value, **ours)
        assert none is None
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(fused, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@st.composite
def calls(draw):
    """Options of a layer, a call of it, and the same call of nn.MultiheadAttention; float32."""
    heads, width = draw(st.sampled_from([(1, 5), (2, 3), (3, 2), (4, 1)]))
    size = heads * width
    sizes = {"kdim": draw(st.sampled_from([None, size + 2])), "vdim": draw(st.sampled_from([None, size + 1]))}
    options = {
        "embed_dim": size,
        "num_heads": heads,
        "bias": draw(st.booleans()),
        "constrain": draw(st.sets(st.sampled_from("qkvo"))),
        "frames": draw(st.sampled_from(["head", "whole"])),
        "logit_scale": draw(st.sampled_from(["learned", "spectrum", "matched", 0.7])),
        "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        **sizes,
    }
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    batch, length, keys = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    batched = draw(st.booleans())
    batch = batch if batched else 1
    causal = draw(st.booleans())
    keys = length if causal else keys
    widths = (size, sizes["kdim"] or size, sizes["vdim"] or size)
    inputs = [torch.randn(batch, n, w, generator=generator) for n, w in zip((length, keys, keys), widths, strict=True)]
    if not batched:
        inputs = [t[0] for t in inputs]
    elif not options["batch_first"]:
        inputs = [t.transpose(0, 1) for t in inputs]

    def mask(*shape):
        kind = draw(st.sampled_from(["none", "bool", "float"]))
        if kind == "none":
            return None
        forbidden = torch.rand(shape, generator=generator) < 0.4
        forbidden[..., 0] = False  # no row is forbidden altogether: that case has its own test
        return (
            forbidden if kind == "bool" else torch.randn(shape, generator=generator).masked_fill(forbidden, -torch.inf)
        )

    attn_shape = draw(st.sampled_from([(length, keys), (batch * heads, length, keys)]))
    attn_mask, padding = mask(*attn_shape), mask(*((batch, keys) if batched else (keys,)))
    call = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    ours = {**call, "attn_mask": attn_mask, "key_padding_mask": padding, "is_causal": causal}

    # torch wants the causal mask spelt out, and masks of one type
    def additive(m):
        return m if m is None or m.dtype != torch.bool else torch.zeros(m.shape).masked_fill(m, -torch.inf)

    future = torch.full((length, keys), -torch.inf).triu(1)
    merged = additive(attn_mask)
    if causal:
        merged = future if merged is None else merged + future
    return options, seed, inputs, ours, {**call, "attn_mask": merged, "key_padding_mask": additive(padding)}


@given(calls())
def test_equals_nn_multihead_attention_over_all_options_in_float32(case):
    options, seed, inputs, ours, theirs = case
    torch.manual_seed(seed)
    layer = StiefelAttention(**options)
    randomize_biases(layer)
    expected, expected_weights = as_torch(layer)(*inputs, **theirs)
    out, weights = layer(*inputs, **ours)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    if expected_weights is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_query_without_keys_gets_what_torch_gives_it(kind):
    """NaN where weights are computed; zero from the fused kernels, so the output bias is left."""
    torch.manual_seed(0)
    layer = StiefelAttention(12, 4)
    randomize_biases(layer)
    twin = as_torch(layer)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[1] = True
    if kind != torch.bool:
        mask = torch.zeros(3, 3).masked_fill(mask, -torch.inf)
    x = torch.randn(2, 3, 12)
    for need_weights in (True, False):
        expected, expected_weights = twin(x, x, x, attn_mask=mask, need_weights=need_weights)
        out, weights = layer(x, x, x, attn_mask=mask, need_weights=need_weights)
        assert bool(out[:, 1].isnan().all()) is need_weights
        torch.testing.assert_close(out, expected, equal_nan=True)
        torch.testing.assert_close(weights, expected_weights, equal_nan=True)
    assert layer.out_proj.bias is not None
    torch.testing.assert_close(out[0, 1], layer.out_proj.bias)


@pytest.mark.parametrize(("batch", "length", "keys"), [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_empty_sequences_and_batches(batch, length, keys, need_weights):
    layer = StiefelAttention(12, 4)
    twin = as_torch(layer)
    query, key = torch.randn(batch, length, 12), torch.randn(batch, keys, 12)
    expected = twin(query, key, key, need_weights=need_weights)
    torch.testing.assert_close(layer(query, key, key, need_weights=need_weights), expected)
    causal = layer(query, query, query, is_causal=True, need_weights=need_weights)[0]
    assert causal.shape == (batch, length, 12)


def test_dropout_drops_what_torch_drops():
    """With weights, the same random numbers are drawn in the same order as in nn.MultiheadAttention."""
    layer = StiefelAttention(12, 4, dropout=0.4)
    twin = as_torch(layer)
    x = torch.randn(2, 5, 12)
    torch.manual_seed(1)
    expected, expected_weights = twin(x, x, x, average_attn_weights=False)
    torch.manual_seed(1)
    out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    assert (weights == 0).any()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("frames", ["head", "whole"])
def test_grouped_queries_are_heads_that_share_their_keys_and_values(groups, frames):
    torch.manual_seed(0)
    layer = StiefelAttention(16, 4, num_kv_heads=groups, frames=frames, constrain="qkv", dtype=torch.float64)
    randomize_biases(layer)
    assert layer.key_frames().shape == layer.value_frames().shape == (groups, 16, 4)
    full = StiefelAttention(16, 4, constrain=(), dtype=torch.float64)
    with torch.no_grad():
        for role in ("query", "key", "value"):
            heads = getattr(layer, f"{role}_frames")().mT
            getattr(full, f"{role[0]}_proj").weight.copy_(heads.repeat_interleave(4 // heads.shape[0], 0).flatten(0, 1))
        state = layer.state_dict()
        state["v_proj.bias"] = state["v_proj.bias"].view(groups, 4).repeat_interleave(4 // groups, 0).flatten()
        full.load_state_dict({name: t for name, t in state.items() if "weight" not in name}, strict=False)
        full.out_proj.weight.copy_(state["out_proj.weight"])
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for options in ({"is_causal": True}, {"need_weights": True}, {"attn_mask": torch.rand(8, 5, 5) < 0.3}):
        for ours, theirs in zip(layer(x, x, x, **options), full(x, x, x, **options), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_rotary_logits_depend_on_the_distance_of_positions_alone():
    torch.manual_seed(0)
    layer = StiefelAttention(16, 2, rotary=Rotary(), dtype=torch.float64)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    first, weights = layer(x, x, x, need_weights=True)
    at = torch.arange(6)
    moved, _ = layer(x, x, x, query_positions=at + 100, key_positions=at + 100)
    torch.testing.assert_close(moved, first, rtol=0, atol=1e-12)
    other, _ = layer(x, x, x, query_positions=at + 1, key_positions=at)
    assert (other - first).abs().max() > 1e-3
    # one more token with a cache of keys: the last row of the whole
    last, last_weights = layer(x[:, -1:], x, x, need_weights=True, query_positions=torch.tensor([5]))
    torch.testing.assert_close(last, first[:, -1:], rtol=0, atol=1e-12)
    torch.testing.assert_close(last_weights, weights[:, -1:], rtol=0, atol=1e-12)


def test_key_bias_exists_where_the_softmax_does_not_cancel_it():
    assert StiefelAttention(8, 2).k_proj.bias is None
    x = torch.randn(1, 4, 8)
    cases: list[dict[str, Any]] = [{"rotary": Rotary()}, {"add_zero_attn": True}]
    for options in cases:
        layer = StiefelAttention(8, 2, **options)
        before = layer(x, x, x)[0]
        assert layer.k_proj.bias is not None
        with torch.no_grad():
            layer.k_proj.bias.normal_(std=3)
        assert (layer(x, x, x)[0] - before).abs().max() > 1e-3
        assert StiefelAttention(8, 2, bias=False, **options).k_proj.bias is None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input_attends_within_each_sequence(layout):
    torch.manual_seed(0)
    layer = StiefelAttention(8, 2)
    parts = [torch.randn(n, 8) for n in (3, 1, 4)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    out, weights = layer(nested, nested, nested, need_weights=True, is_causal=True)
    assert out.is_nested
    assert out.layout == layout
    assert weights.shape == (3, 4, 4)
    for i, (part, row) in enumerate(zip(parts, out.unbind(), strict=True)):
        expected, expected_weights = layer(part, part, part, need_weights=True, is_causal=True)
        torch.testing.assert_close(row, expected)
        n = len(part)
        torch.testing.assert_close(weights[i, :n, :n], expected_weights)
        assert not weights[i, n:].any()
        assert not weights[i, :, n:].any()
    assert (nested + out).is_nested  # a residual connection
    torch.cat(out.unbind()).square().sum().backward()
    plain = parts[2].clone().requires_grad_()
    layer(plain, plain, plain, is_causal=True)[0].square().sum().backward()
    assert nested.grad is not None
    torch.testing.assert_close(nested.grad.unbind()[2], plain.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input_agrees_with_torch_in_inference():
    torch.manual_seed(0)
    layer = StiefelAttention(8, 2).eval()
    twin = as_torch(layer).eval()
    nested = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 1, 4)])
    with torch.no_grad():
        expected, expected_weights = twin(nested, nested, nested)
        out, weights = layer(nested, nested, nested, need_weights=True)
    for a, b in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("train", [True, False])
def test_serves_in_a_transformer_encoder_layer(train):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
    attention = StiefelAttention(8, 2)
    twin = copy.deepcopy(block)
    twin.self_attn, block.self_attn = as_torch(attention), attention  # pyright: ignore[reportAttributeAccessIssue]
    block.train(train)
    twin.train(train)
    x, mask = torch.randn(2, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(2, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
    with torch.set_grad_enabled(train):
        expected = twin(x, src_mask=mask, src_key_padding_mask=padding, is_causal=True)
        torch.testing.assert_close(block(x, src_mask=mask, src_key_padding_mask=padding, is_causal=True), expected)


def test_unbatched_input():
    torch.manual_seed(0)
    layer = StiefelAttention(12, 4)
    twin = as_torch(layer)
    query, key = torch.randn(5, 12), torch.randn(6, 12)
    padding = torch.tensor([False] * 5 + [True])
    expected, expected_weights = twin(query, key, key, key_padding_mask=padding)
    out, weights = layer(query, key, key, key_padding_mask=padding, need_weights=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"constrain": c, "kdim": k} for c, k in itertools.product([(), ("q",), ("k",), ("q", "k")], [32, 24])],
    ids=str,
)
@pytest.mark.parametrize("logit_scale", ["learned", "spectrum", "matched"])
def test_logits_start_with_the_variance_that_nn_multihead_attention_gives_them(options, logit_scale):
    """Monte Carlo over initializations of both layers, for one pair of inputs."""
    torch.manual_seed(0)
    x, y = torch.randn(32), torch.randn(options["kdim"])
    ours, theirs = [], []
    for _ in range(400):
        layer = StiefelAttention(32, 4, logit_scale=logit_scale, **options)
        scale = layer.logit_scale.reshape(4, -1, 1)
        frames = layer.query_frames().mT * scale
        ours.append((frames @ x * (layer.key_frames().mT @ y)).sum(-1))
        twin = nn.MultiheadAttention(32, 4, kdim=options["kdim"])
        if twin.in_proj_weight is not None:
            q, k = twin.in_proj_weight[:32], twin.in_proj_weight[32:64]
        else:
            q, k = twin.q_proj_weight, twin.k_proj_weight
        theirs.append(((q @ x).view(4, 8) * (k @ y).view(4, 8)).sum(-1) / 8**0.5)
    ratio = float((torch.cat(ours).std() / torch.cat(theirs).std()).detach())
    assert ratio == pytest.approx(1, abs=0.1)  # 1600 draws: the standard error of the ratio is about 3 %


@torch.no_grad()
def test_the_rest_starts_like_nn_multihead_attention():
    torch.manual_seed(0)
    twin, layer = nn.MultiheadAttention(256, 4), StiefelAttention(256, 4)
    expected = twin.in_proj_weight
    assert float(layer.v_proj.weight.abs().max()) == pytest.approx(float(expected.abs().max()), rel=1e-3)
    assert float(layer.v_proj.weight.std()) == pytest.approx(float(expected.std()), rel=0.02)
    assert float(layer.out_proj.weight.std()) == pytest.approx(float(twin.out_proj.weight.std()), rel=0.02)
    for module in (layer.q_proj, layer.v_proj, layer.out_proj):
        assert module.bias is not None
        assert torch.equal(module.bias, torch.zeros(256))


def test_logits_of_orthonormal_frames_are_bounded():
    torch.manual_seed(0)
    layer = StiefelAttention(16, 2, logit_scale=8**-0.5, bias=False)
    x, y = 30 * torch.randn(50, 16), torch.randn(50, 16)
    logits = (x @ layer.query_frames()) @ (y @ layer.key_frames()).mT * 8**-0.5
    assert (logits.abs() <= x.norm(dim=-1)[:, None] * y.norm(dim=-1) * 8**-0.5 * (1 + 1e-5)).all()


def test_frames_are_per_head_or_whole():
    per_head, whole = StiefelAttention(16, 4), StiefelAttention(16, 4, frames="whole")
    assert per_head.q_proj.weight.shape == (4, 16, 4)
    assert per_head.q_proj.weight.is_contiguous()
    assert whole.q_proj.weight.shape == (1, 16, 16)
    for layer in (per_head, whole):
        Stiefel().check_point(layer.query_frames().detach())
    side_by_side = whole.query_frames().detach().permute(1, 0, 2).flatten(1)
    Stiefel().check_point(side_by_side)
    # per head says nothing about the whole: two identical heads are a singular whole
    twice = torch.cat([per_head.query_frames()[0]] * 2, 1).detach()
    torch.testing.assert_close(torch.linalg.svdvals(twice), torch.tensor([2**0.5] * 4 + [0.0] * 4), rtol=0, atol=1e-6)


TRAINED: list[dict[str, Any]] = [
    {"constrain": "qkvo", "manifold": Stiefel(CanonicalMetric())},
    {"constrain": "qkvo", "frames": "whole", "logit_scale": "spectrum"},
    {"num_kv_heads": 2, "rotary": Rotary(), "logit_scale": "spectrum"},
    {"add_bias_kv": True, "constrain": "vo"},
]


@pytest.mark.parametrize("options", TRAINED, ids=str)
def test_trains_with_riemannian_adam_and_stays_on_the_manifold(options):
    torch.manual_seed(0)
    layer = StiefelAttention(16, 4, **options)
    start = copy.deepcopy(layer)
    optimizer = RiemannianAdam(layer.named_parameters(), lr=1e-2)
    x, target = torch.randn(8, 10, 16), torch.randn(8, 10, 16)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (layer(x, x, x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    before = dict(start.named_parameters())
    frames = {name: p for name, p in layer.named_parameters() if isinstance(p, ManifoldParameter)}
    assert len(frames) == len(layer.constrain)
    for name, frame in frames.items():
        layer.manifold.check_point(frame.detach())
        assert (frame - before[name]).abs().max() > 1e-2


def test_a_converted_layer_trains_from_where_the_module_was():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    layer = StiefelAttention.from_attention(module)
    optimizer = RiemannianAdam(layer.named_parameters(), lr=1e-3)
    x, target = torch.randn(8, 10, 16), torch.randn(8, 10, 16)
    start = (module(x, x, x)[0] - target).square().mean().item()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x, x, x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(start, rel=1e-5)
    assert losses[-1] < losses[0]
    for projection in (layer.q_proj, layer.k_proj):
        layer.manifold.check_point(projection.weight.detach())


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    layer = StiefelAttention(16, 4, dropout=0.5)
    x = torch.randn(2, 6, 16)
    for need_weights in (True, False):
        first, second = (layer(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(first, second)
    layer.eval()
    torch.testing.assert_close(layer(x, x, x, need_weights=True)[0], layer(x, x, x)[0])


# --- saving and moving --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_keeps_the_constraint(assign):
    torch.manual_seed(0)
    layer, other = StiefelAttention(16, 4), StiefelAttention(16, 4)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert type(other.q_proj.weight) is ManifoldParameter
    assert other.q_proj.weight.manifold == Stiefel()
    x = torch.randn(2, 3, 16)
    assert torch.equal(layer(x, x, x)[0], other(x, x, x)[0])


@pytest.mark.parametrize("assign", [False, True])
def test_an_off_manifold_checkpoint_is_refused_and_changes_no_frame(assign):
    layer = StiefelAttention(16, 4)
    before = layer.q_proj.weight.detach().clone()
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    state["q_proj.weight"] *= 2
    with pytest.raises(RuntimeError, match=r"q_proj\.weight.*point error is 3"):
        layer.load_state_dict(state, assign=assign)
    assert type(layer.q_proj.weight) is ManifoldParameter
    assert torch.equal(layer.q_proj.weight, before)


def test_meta_device_and_to_empty_keep_the_constraint():
    layer = StiefelAttention(16, 4, device="meta")
    assert layer.q_proj.weight.is_meta
    layer.to_empty(device="cpu")
    assert type(layer.q_proj.weight) is ManifoldParameter
    with torch.no_grad():
        layer.q_proj.weight.detach().zero_()  # what was allocated, made sure to be no frame
    with pytest.raises(NotOnManifoldError):
        RiemannianAdam(layer.parameters())
    layer.load_state_dict(StiefelAttention(16, 4).state_dict())
    RiemannianAdam(layer.parameters())


def test_double_and_deepcopy_keep_the_constraint():
    layer = copy.deepcopy(StiefelAttention(16, 4)).double()
    assert type(layer.q_proj.weight) is ManifoldParameter
    assert layer.q_proj.weight.dtype == layer.logit_scale.dtype == torch.float64


@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("back", [torch.float32, torch.float64])
def test_frames_are_as_orthonormal_as_their_type_allows_after_conversion(there, back):
    layer = StiefelAttention(64, 4).to(there).to(back)
    for module in (layer.q_proj, layer.k_proj):
        assert Stiefel().point_error(module.weight.detach()).max() < 10 * torch.finfo(back).eps * 8
    RiemannianAdam(layer.parameters())


def test_autocast_runs():
    layer = StiefelAttention(16, 4)
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (True, False):
            out, _ = layer(x, x, x, need_weights=need_weights, is_causal=True)
            assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, x, x, is_causal=True)[0], rtol=0, atol=0.05)


def test_reset_parameters_draws_new_frames():
    projection = FrameProjection(16, 2, 4, manifold=Stiefel())
    before = projection.weight.detach().clone()
    projection.reset_parameters(torch.Generator().manual_seed(0))
    assert not torch.equal(before, projection.weight)
    Stiefel().check_point(projection.weight.detach())
    assert "16 -> 2x4" in repr(projection)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "embed_dim must be a positive multiple of num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, found 3"),
        ({"rotary": Rotary(dim=6)}, "head_dim = 4 and dim = 6"),
        ({"rotary": Rotary(), "num_heads": 16}, "head dimension must be even"),
        ({"rotary": Rotary(), "add_bias_kv": True}, "add_bias_kv .* cannot be combined with rotary"),
        ({"num_heads": 0}, "embed_dim must be a positive multiple of num_heads"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"frames": "heads"}, 'frames must be "head" or "whole"'),
        ({"constrain": ("q", "x")}, "constrain may name q, k, v, o, found x"),
        ({"logit_scale": "temperature"}, "logit_scale must be"),
        ({"logit_scale": float("nan")}, "logit_scale must be"),
        ({"kdim": 3}, r"the k projection cannot be constrained.*n >= p"),
        ({"frames": "whole", "kdim": 15}, r"the k projection cannot be constrained.*n = 15 rows and p = 16"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StiefelAttention(**{"embed_dim": 16, "num_heads": 4, **options})


def test_bad_inputs_are_named():
    layer, x = StiefelAttention(16, 4), torch.zeros(2, 3, 16)
    with pytest.raises(ValueError, match="query, key and value"):
        layer(x, x[0], x)
    with pytest.raises(ValueError, match="attn_mask must be of shape"):
        layer(x, x, x, attn_mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="key_padding_mask must be of shape"):
        layer(x, x, x, key_padding_mask=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="query_positions and key_positions"):
        layer(x, x, x, query_positions=torch.arange(3))
    nested = torch.nested.nested_tensor([torch.zeros(2, 16), torch.zeros(1, 16)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested input must be"):
        layer(nested, x, x)
    with pytest.raises(ValueError, match="nested input must be"):
        layer(nested, nested, nested, attn_mask=torch.zeros(2, 2))
    with pytest.raises(TypeError, match="attn_mask must be boolean or floating point"):
        layer(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": Rotary(), "constrain": "qkvo"}], ids=str)
def test_compiles_whole(options):
    torch.manual_seed(0)
    layer = StiefelAttention(16, 4, **options)
    x = torch.randn(2, 6, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in ({"is_causal": True}, {"need_weights": True, "key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}):
        ours, expected = compiled(x, x, x, **call), layer(x, x, x, **call)
        torch.testing.assert_close(ours, expected)
    compiled(x, x, x)[0].sum().backward()
    assert layer.q_proj.weight.grad is not None


def test_exports():
    layer = StiefelAttention(16, 4, num_kv_heads=2, rotary=Rotary())
    x = torch.randn(2, 6, 16)
    program = torch.export.export(layer, (x, x, x), {"is_causal": True})
    torch.testing.assert_close(program.module()(x, x, x, is_causal=True), layer(x, x, x, is_causal=True))


def test_repr_says_what_is_not_the_default():
    text = repr(StiefelAttention(16, 4, num_kv_heads=2, rotary=Rotary()))
    assert "embed_dim=16, num_heads=4, num_kv_heads=2, constrain=('q', 'k'), rotary=Rotary(base=10000.0" in text
    assert "num_kv_heads" not in repr(StiefelAttention(16, 4))
