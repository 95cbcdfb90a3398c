import copy
import io
import itertools

import pytest
import torch
from geodescent.attention import FrameProjection, StiefelAttention
from geodescent.manifolds import CanonicalMetric, ManifoldParameter, NotOnManifoldError, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn


def as_torch(layer: StiefelAttention) -> nn.MultiheadAttention:
    """The nn.MultiheadAttention with the same effective weights: our logit scale is folded into its queries."""
    fused = layer.kdim == layer.vdim == layer.embed_dim
    twin = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        bias=layer.out_proj.bias is not None,
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
            bias = layer.q_proj.bias.unflatten(0, (layer.num_heads, -1)).unsqueeze(-1) * gains
            twin.in_proj_bias.copy_(torch.cat([bias.flatten(), torch.zeros_like(bias.flatten()), layer.v_proj.bias]))
            twin.out_proj.bias.copy_(layer.out_proj.bias)
    return twin


def randomize_biases(layer):
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("bias"):
                p.normal_()
            if name == "logit_scale":
                p.uniform_(0.5, 2.0)


OPTIONS = [
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


def test_trains_with_riemannian_adam_and_stays_on_the_manifold():
    torch.manual_seed(0)
    layer = StiefelAttention(16, 4, constrain="qkvo", manifold=Stiefel(CanonicalMetric()))
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
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        weight, before = getattr(layer, name).weight, getattr(start, name).weight
        layer.manifold.check_point(weight.detach())
        assert (weight - before).abs().max() > 1e-2


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
    with pytest.raises(TypeError, match="attn_mask must be boolean or floating point"):
        layer(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.int64))
