import copy
import io
import warnings
from typing import Any

import pytest
import torch
from geodescent.attention.constrain import constrain, frame_state_dict, release, reproject
from geodescent.attention.constrained_multihead_attention import ConstrainedMultiheadAttention
from geodescent.attention.head_projection import HeadProjection
from geodescent.attention.projection_layouts import ProjectionLayout
from geodescent.attention.stiefel_attention import StiefelAttention
from geodescent.manifolds import CanonicalMetric, Cayley, CayleyTransport, Grassmann, ManifoldParameter, Stiefel
from geodescent.optim import AveragedModel, RiemannianAdam
from torch import nn

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randomized(module, seed=0) -> Any:
    """Weights that make attention uneven, and biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (0.4 if p.ndim > 1 else 0.5))
    return module


def multihead(dtype=torch.float64, **options) -> Any:
    return randomized(nn.MultiheadAttention(16, 4, **{"batch_first": True, "dtype": dtype, **options}))


def frames_of(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, ManifoldParameter)}


def worst_point_error(model):
    return max(float(p.manifold.point_error(p.detach()).max()) for p in frames_of(model).values())


class Mixer(nn.Module):
    """Attention as people write it: separate or fused projections, query groups, rotary embeddings."""

    def __init__(self, d=16, heads=4, key_heads=4, fused=False, rotary=False, bias=True, dtype=torch.float64):
        super().__init__()
        self.width, self.rotary, self.groups = d // heads, rotary, heads // key_heads
        self.factor = 0.3
        if fused:
            self.qkv = nn.Linear(d, 3 * d, bias, dtype=dtype)
        else:
            self.to_q = nn.Linear(d, d, bias, dtype=dtype)
            self.to_k = nn.Linear(d, key_heads * self.width, bias, dtype=dtype)
            self.to_v = nn.Linear(d, key_heads * self.width, bias, dtype=dtype)
        self.fused = fused

    def forward(self, x, weights=False):
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.to_q(x), self.to_k(x), self.to_v(x))
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in (q, k, v))
        if self.rotary:
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
            turn = torch.polar(torch.ones_like(angle), angle)
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
                for t in (q, k)
            )
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        attention = torch.softmax(self.factor * q @ k.mT, -1)
        return attention if weights else attention @ v


def layout(**options):
    names: dict[str, Any] = {"fused": "qkv"} if options.pop("fused", False) else {"query": "to_q", "key": "to_k"}
    return {Mixer: ProjectionLayout(**names, head_dim="width", scaling="factor", **options)}


# --- nn.MultiheadAttention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 10, "vdim": 7}, {"batch_first": False}, {"add_zero_attn": True, "bias": False}],
    ids=str,
)
def test_multihead_attention_keeps_outputs_and_attention_weights(dtype, options):
    layer = multihead(dtype, **options)
    query, key, value = (draw(2, 5, n, dtype=dtype, seed=n) for n in (16, layer.kdim, layer.vdim))
    length = 5 if layer.batch_first else 2
    mask = draw(length, length, dtype=dtype)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    calls: list[dict[str, Any]] = [{}, {"attn_mask": mask}, {"average_attn_weights": False}, {"need_weights": False}]
    if layer.batch_first:
        calls.append({"key_padding_mask": padding})
    before = [layer(query, key, value, **call) for call in calls]
    report = constrain(layer)
    assert [a.method for a in report.layers] == ["exact"]
    assert frames_of(layer)["query.frames"].shape == (4, 16, 4)
    assert report.layers[0].weight_change < TOLERANCE[dtype]
    for call, expected in zip(calls, before, strict=True):
        for new, old in zip(layer(query, key, value, **call), expected, strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=TOLERANCE[dtype])
    released = release(layer)
    assert released == [""]
    assert type(layer) is nn.MultiheadAttention
    torch.testing.assert_close(layer(query, key, value)[0], before[0][0], rtol=0, atol=TOLERANCE[dtype])


def test_unbatched_input_and_self_attention():
    layer = multihead()
    x = draw(5, 16)
    before = layer(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype), is_causal=True)
    constrain(layer)
    after = layer(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype), is_causal=True)
    for new, old in zip(after, before, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_the_released_layer(seed):
    """The chain rule through frames and gains, against autograd through the ordinary matrices."""
    layer, x = multihead(), draw(2, 5, 16, seed=seed)
    constrain(layer)
    ordinary = copy.deepcopy(layer)
    release(ordinary)
    for m in (layer, ordinary):
        m(x, x, x)[0].square().sum().backward()
    gradient = ordinary.in_proj_weight.grad.unflatten(0, (3, 4, 4)).mT  # (role, head, d, d_h)
    gain = layer.query.gain.detach()
    torch.testing.assert_close(layer.query.frames.grad, gradient[0] * gain[:, None], rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.key.frames.grad, gradient[1], rtol=0, atol=1e-10)
    expected = (layer.query.frames * gradient[0]).sum(-2)
    torch.testing.assert_close(layer.query.gain.grad, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_fast_path_and_nested_tensors_use_the_constrained_matrices(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x = draw(3, 5, 16, dtype=torch.float32)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        before = encoder(x, src_key_padding_mask=padding)
        constrain(encoder)
        with torch.no_grad():  # weights that the original has never seen
            for module in encoder.modules():
                if isinstance(module, HeadProjection):
                    frames = module.frames.detach()
                    frames.copy_(Stiefel().random_point(*frames.shape, generator=torch.Generator().manual_seed(3)))
        fast = encoder(x, src_key_padding_mask=padding)
        enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = encoder(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)
    torch.testing.assert_close(fast[~padding], slow[~padding], rtol=0, atol=2e-6)
    assert float((fast - before)[~padding].abs().max()) > 1e-3


def test_decoder_layers_are_constrained_in_self_and_cross_attention():
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True, dtype=torch.float64).eval()
    source, target = draw(2, 5, 16), draw(2, 4, 16, seed=1)
    report = constrain(model, inputs=(source, target))
    assert [a.name for a in report.layers] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    assert report.exact
    assert report.output_change is not None
    assert report.output_change < 1e-12


# --- classes of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_described_layouts_convert_exactly_and_release(fused, bias):
    model = nn.Sequential(randomized(Mixer(fused=fused, bias=bias)), nn.Linear(4, 4, dtype=torch.float64))
    x = draw(2, 6, 16)
    weights, keys = model[0](x, weights=True), {k: v.shape for k, v in model.state_dict().items()}
    report = constrain(model, layouts=layout(fused=fused))
    assert [(a.name, a.kind, a.method) for a in report.layers] == [("0", "Mixer", "exact")]
    torch.testing.assert_close(model[0](x, weights=True), weights, rtol=0, atol=1e-12)
    assert {k: v.shape for k, v in model.state_dict().items()} == keys
    assert list(model.state_dict()) == list(keys)
    assert release(model) == ["0"]
    assert type(model[0].qkv if fused else model[0].to_q) is nn.Linear
    torch.testing.assert_close(model[0](x, weights=True), weights, rtol=0, atol=1e-12)
    assert not frames_of(model)
    other = randomized(Mixer(fused=fused, bias=bias), seed=5)
    model[0].load_state_dict(other.state_dict())  # nothing converts any more
    assert torch.equal(model[0](x), other(x))
    constrain(model, layouts=layout(fused=fused))  # and again


@pytest.mark.parametrize("options", [{"rotary": True}, {"key_heads": 2}, {"rotary": True, "key_heads": 2}], ids=str)
@pytest.mark.parametrize("logit_scale", ["spectrum", "learned"])
def test_polar_conversions_say_so_and_by_how_much(options, logit_scale):
    model = randomized(Mixer(**options))
    x = draw(1, 6, 16)
    before = model(x)
    rotary = options.get("rotary", False)
    report = constrain(model, layouts=layout(rotary=rotary), logit_scale=logit_scale, inputs=x)
    (row,) = report.layers
    assert row.method == "polar"
    assert not report.exact
    assert ("rotary" in row.reason) == rotary
    assert ("shared by several" in row.reason) == ("key_heads" in options)
    assert (row.heads, row.key_heads) == (4, options.get("key_heads", 4))
    assert 1e-3 < row.circuit_change < 1
    assert report.output_change == pytest.approx(float((model(x) - before).abs().max().detach()))
    assert row.reason in repr(report)


def test_circuit_change_is_that_of_the_logits():
    model = randomized(Mixer())
    before = [copy.deepcopy(m) for m in (model.to_q, model.to_k)]
    (row,) = constrain(model, layouts=layout(), logit_scale="learned").layers

    def circuits(to_q, to_k):
        """From the layers' outputs alone: key biases cancel in differences to the key of a zero input."""
        x, y = torch.eye(17, 16, dtype=torch.float64), torch.eye(17, 16, dtype=torch.float64)  # the last is zero
        q, k = (f(t).unflatten(-1, (4, 4)).transpose(0, 1) for f, t in ((to_q, x), (to_k, y)))
        bilinear = q @ (k - k[:, -1:]).mT
        return torch.cat([bilinear[:, :-1] - bilinear[:, -1:], bilinear[:, -1:]], 1)[..., :-1]

    old, new = circuits(*before), circuits(model.to_q, model.to_k)
    expected = ((new - old).norm(dim=(-2, -1)) / old.norm(dim=(-2, -1))).max()
    assert row.circuit_change == pytest.approx(float(expected.detach()), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"key_heads": 2}], ids=str)
def test_weight_change_is_that_of_the_layer_on_normal_tokens(options):
    model = randomized(Mixer(**options))
    x = torch.randn(1, 48, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = model(x, weights=True)
    (row,) = constrain(model, layouts=layout(), logit_scale="learned").layers
    expected = (model(x, weights=True) - before).abs().max()
    assert row.weight_change > 1e-3
    assert row.weight_change == pytest.approx(float(expected.detach()), rel=1e-9)


def test_fixed_and_matched_scales():
    model = randomized(Mixer())
    fixed = copy.deepcopy(model)
    constrain(fixed, layouts=layout(), logit_scale=0.6)
    x = draw(1, 6, 16)
    u, v = fixed.to_q.frames, fixed.to_k.frames
    assert fixed.to_q.gain is not None
    assert not fixed.to_q.gain.requires_grad
    q, k = x[0] @ u + fixed.to_q.bias.view(4, 1, 4) * 0, x[0] @ v
    logits = 0.6 * q @ k.mT + 0.3 * (fixed.to_q.bias.view(4, 1, 4) @ k.mT)
    torch.testing.assert_close(fixed(x, weights=True)[0], torch.softmax(logits, -1), rtol=0, atol=1e-12)
    matched, learned = copy.deepcopy(model), copy.deepcopy(model)
    constrain(matched, layouts=layout(), logit_scale="matched")
    constrain(learned, layouts=layout(), logit_scale="learned")
    torch.testing.assert_close(matched(x), learned(x), rtol=0, atol=1e-14)
    assert "to_q.gain" in dict(learned.named_parameters())
    assert "to_q.gain" not in dict(matched.named_parameters())


def test_whole_frames():
    model = randomized(Mixer())
    (row,) = constrain(model, layouts=layout(), frames="whole").layers
    assert row.method == "polar"
    assert row.frame_shape == (1, 16, 16)
    assert "one frame over all heads" in row.reason
    assert worst_point_error(model) < 1e-12


def test_the_manifold_is_the_one_asked_for():
    layer = multihead()
    manifold = Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())
    constrain(layer, manifold=manifold)
    assert {p.manifold for p in frames_of(layer).values()} == {manifold}


# --- what is left alone ---------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.good = first
        self.other = second


def tied():
    module = Mixer()
    module.to_k.weight = module.to_q.weight
    return module


def parametrized():
    module = Mixer()
    nn.utils.parametrizations.weight_norm(module.to_q)
    return module


def adapted():
    class Adapter(nn.Linear):
        pass

    module = Mixer()
    module.to_k = Adapter(16, 16, dtype=torch.float64)
    return module


def quantized():
    from torch.ao.nn.quantized.dynamic import Linear

    module: Any = Mixer(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*", UserWarning)
        module.to_q = Linear(16, 16)
        copy.deepcopy(module)  # the warning comes once a process
    return module


def hooked():
    module = Mixer()
    module.to_q.register_forward_hook(lambda *args: None)
    return module


def infinite():
    module = Mixer()
    with torch.no_grad():
        module.to_q.weight[0, 0] = torch.inf
    return module


class Wrapper(nn.MultiheadAttention):
    pass


class OddAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)


SKIPS = {
    "tied": (tied, "to_q.weight is tied: other.to_q.weight is other.to_k.weight"),
    "parametrized": (parametrized, "to_q is a .*ParametrizedLinear, not a plain nn.Linear"),
    "adapted": (adapted, "to_k is a .*Adapter, not a plain nn.Linear"),
    "quantized": (quantized, "to_q is a torch.ao.nn.quantized.dynamic.*Linear, not a plain"),
    "hooks": (hooked, "to_q has hooks"),
    "meta": (lambda: Mixer().to("meta"), "to_q.weight is on the meta device"),
    "not finite": (infinite, "to_q.weight has NaN or infinite"),
    "wide": (lambda: multihead(kdim=3, vdim=3), "key frames would be wide: 3 rows and 4 columns"),
    "subclass": (lambda: Wrapper(16, 4), "Wrapper is a subclass of nn.MultiheadAttention"),
    "add_bias_kv": (lambda: multihead(add_bias_kv=True), "add_bias_kv"),
    "add_zero_attn": (lambda: multihead(add_zero_attn=True), "add_zero_attn with biases"),
    "unknown": (OddAttention, "unknown layout: class .*OddAttention"),
    "unknown fused": (lambda: nn.ModuleDict({"qkv": nn.Linear(4, 12)}), "unknown layout: class .*ModuleDict"),
    "stiefel": (lambda: StiefelAttention(16, 4), "has frames already"),
}


@pytest.mark.parametrize("kind", SKIPS)
def test_what_cannot_be_constrained_is_named_with_a_reason(kind):
    make, reason = SKIPS[kind]
    model = Pair(multihead(), make())
    before = copy.deepcopy(model.other)
    report = constrain(model, layouts=layout())
    assert [a.name for a in report.layers] == ["good"]
    assert [s.name for s in report.skipped] == ["other"]
    with pytest.raises(ValueError, match=f"no attention layer of the model can be constrained:\n  other .*{reason}"):
        constrain(model, "other", layouts=layout())
    assert f"skipped other ({type(model.other).__name__}): " in repr(report)
    assert [(n, type(m)) for n, m in model.other.named_modules()] == [(n, type(m)) for n, m in before.named_modules()]


def test_a_layer_is_constrained_once():
    layer = multihead()
    constrain(layer)
    with pytest.raises(ValueError, match="is constrained already"):
        constrain(layer)
    model = Mixer(fused=True)
    constrain(model, layouts=layout(fused=True))
    with pytest.raises(ValueError, match="is constrained already"):
        constrain(model, layouts=layout(fused=True))


def test_one_module_in_two_places_is_one_layer():
    shared = multihead()
    model = Pair(shared, shared)
    report = constrain(model)
    assert len(report.layers) == 1
    assert not report.skipped
    assert model.other is model.good


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("good", ["good"]),
        (["g*", "other"], ["good", "other"]),
        (lambda name, module: name == "other", ["other"]),
        (None, ["good", "other"]),
    ],
)
def test_select(select, names):
    report = constrain(Pair(multihead(), multihead()), select)
    assert [a.name for a in report.layers] == names
    assert not report.skipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "nothing*"}, "select names no attention layer by 'nothing\\*'; there are ''"),
        ({"frames": "both"}, "frames must be"),
        ({"logit_scale": "loud"}, "logit_scale must be"),
        ({"logit_scale": float("nan")}, "logit_scale must be"),
        ({"logit_scale": True}, "logit_scale must be"),
        ({"manifold": Grassmann()}, "manifold must be a Stiefel manifold"),
    ],
    ids=str,
)
def test_errors_change_nothing(options, message):
    layer = multihead()
    before = layer.state_dict()
    with pytest.raises(ValueError, match=message):
        constrain(layer, **options)
    assert type(layer) is nn.MultiheadAttention
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_a_model_without_attention_and_a_release_of_nothing():
    with pytest.raises(ValueError, match="none was found"):
        constrain(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="nothing in the model was constrained"):
        release(nn.Linear(3, 3))


def test_the_random_state_modes_and_frozen_parameters_are_kept():
    layer = multihead()
    layer.eval()
    layer.in_proj_weight.requires_grad_(False)
    state = torch.get_rng_state()
    constrain(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m.training for m in layer.modules())
    assert not layer.query.frames.requires_grad
    assert not layer.value_weight.requires_grad
    assert layer.query.bias is not None
    assert layer.query.bias.requires_grad
    release(layer)
    assert torch.equal(torch.get_rng_state(), state)


def test_report_is_plain_data():
    report = constrain(Pair(multihead(), OddAttention()), inputs=None)
    data = report.to_dict()
    assert data["layers"][0]["method"] == "exact"
    assert data["layers"][0]["frame_shape"] == (4, 16, 4)
    assert data["skipped"][0]["name"] == "other"
    assert data["output_change"] is None


# --- saving and loading ---------------------------------------------------------------------------------------------

MODELS = {
    "multihead": (lambda: multihead(), {}),
    "multihead float32": (lambda: multihead(torch.float32), {}),
    "separate widths": (lambda: multihead(kdim=10, vdim=7), {}),
    "no bias": (lambda: multihead(bias=False), {}),
    "separate": (lambda: randomized(Mixer()), {"layouts": layout()}),
    "fused": (lambda: randomized(Mixer(fused=True)), {"layouts": layout(fused=True)}),
    "rotary groups": (lambda: randomized(Mixer(key_heads=2)), {"layouts": layout(rotary=True)}),
    "learned": (lambda: randomized(Mixer()), {"layouts": layout(), "logit_scale": "learned"}),
    "matched": (lambda: randomized(Mixer()), {"layouts": layout(), "logit_scale": "matched"}),
    "whole": (lambda: randomized(Mixer()), {"layouts": layout(), "frames": "whole"}),
}


def trained(name) -> tuple[Any, Any, Any, Any]:
    """A constrained model away from where the conversion put it, and a way to run it."""
    make, options = MODELS[name]
    model = make()
    constrain(model, **options)

    def run(m):
        if isinstance(m, nn.MultiheadAttention):
            dtype = m.out_proj.weight.dtype
            return m(draw(2, 5, 16, dtype=dtype), *(draw(2, 5, n, dtype=dtype, seed=n) for n in (m.kdim, m.vdim)))[0]
        return m(draw(2, 5, 16))

    optimizer = RiemannianAdam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        run(model).square().sum().backward()
        optimizer.step()
    return model, run, lambda: make(), options


def saved(state, **options):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_state_dicts_load_strictly_both_ways(name, assign):
    model, run, make, options = trained(name)
    tolerance = 20 * TOLERANCE[next(model.parameters()).dtype]
    state = saved(model.state_dict())
    ordinary = make()
    assert [(k, v.shape) for k, v in state.items()] == [(k, v.shape) for k, v in ordinary.state_dict().items()]
    ordinary.load_state_dict(state, assign=assign)
    torch.testing.assert_close(run(ordinary), run(model), rtol=0, atol=tolerance)

    again = make()
    constrain(again, **options)
    again.load_state_dict(state, assign=assign)
    torch.testing.assert_close(run(again), run(model), rtol=0, atol=tolerance)
    assert all(type(p) is type(q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    # not only the outputs: frames and gains come back in the basis they had
    for (key, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["multihead", "separate", "fused", "separate widths"])
def test_ordinary_weights_are_converted_when_they_are_loaded(name):
    model, run, make, _options = trained(name)
    other = randomized(make(), seed=5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(model), run(other), rtol=0, atol=1e-11)
    assert worst_point_error(model) < 1e-12


@pytest.mark.parametrize("name", ["multihead", "separate", "fused"])
def test_a_negative_gain_keeps_its_logits_and_its_sign_goes_to_the_frame(name):
    model, run, make, options = trained(name)
    gains = next(p for n, p in model.named_parameters() if n.endswith("gain"))
    with torch.no_grad():
        gains[:, 0] *= -3
    again, ordinary = make(), make()
    constrain(again, **options)
    for m in (again, ordinary):
        m.load_state_dict(model.state_dict())
        torch.testing.assert_close(run(m), run(model), rtol=0, atol=1e-11)
    (query, twin) = (next(p for n, p in m.named_parameters() if "frames" in n) for m in (model, again))
    found = next(p for n, p in again.named_parameters() if n.endswith("gain"))
    torch.testing.assert_close(found, gains.abs(), rtol=0, atol=1e-13)
    sign = torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(twin, query * sign, rtol=0, atol=1e-13)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_frame_state_dicts_restore_every_bit(name, assign):
    model, run, make, options = trained(name)
    state = saved(frame_state_dict(model))
    again = make()
    constrain(again, **options)
    again.load_state_dict(state, assign=assign)
    assert torch.equal(run(again), run(model))
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert set(model.state_dict()) == set(make().state_dict())  # the ordinary form is the default again


def test_training_goes_on_from_a_frame_state_dict_as_if_never_stopped():
    torch.manual_seed(0)
    straight, x = multihead(), draw(2, 5, 16)
    constrain(straight)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x, x, x)[0] - 1).square().mean().backward()
            optimizer.step()

    optimizer = RiemannianAdam(straight.parameters(), lr=1e-2)
    train(straight, optimizer, 3)
    checkpoint = saved({"model": frame_state_dict(straight), "optimizer": optimizer.state_dict()})
    train(straight, optimizer, 3)
    resumed = multihead()
    constrain(resumed)
    resumed.load_state_dict(checkpoint["model"])
    optimizer = RiemannianAdam(resumed.parameters(), lr=1e-2)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(resumed, optimizer, 3)
    for p, q in zip(resumed.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["multihead", "separate", "fused"])
def test_frames_off_the_manifold_are_refused_and_half_rounded_ones_reported(name, assign):
    model, _run, _make, _options = trained(name)
    bad = {k: 1.1 * v if k.endswith("frames") else v for k, v in frame_state_dict(model).items()}
    frames = {n: p.detach().clone() for n, p in frames_of(model).items()}
    with pytest.raises(RuntimeError, match=r"point error is 0\.21"):
        model.load_state_dict(bad, assign=assign)
    for n, p in frames_of(model).items():
        assert torch.equal(p, frames[n])
    if assign:
        return
    halves = {k: v.half() for k, v in frame_state_dict(model).items()}
    with pytest.warns(UserWarning, match=r"saved in lower precision and is off Stiefel.*reproject\(model\)"):
        model.load_state_dict(halves)
    assert 1e-5 < worst_point_error(model) < 1e-2
    errors = reproject(model)
    assert set(errors) == set(frames)
    assert max(errors.values()) > 1e-5
    assert worst_point_error(model) < 1e-12


def test_ordinary_half_precision_checkpoints_are_converted():
    model, run, make, _options = trained("separate")
    halves = {k: v.half() for k, v in model.state_dict().items()}
    ordinary = make()
    ordinary.load_state_dict(halves)
    model.load_state_dict(halves)
    assert worst_point_error(model) < 1e-12
    torch.testing.assert_close(run(model), run(ordinary), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["multihead", "separate widths", "separate", "fused"])
def test_wrong_state_dicts_are_errors_with_the_original_keys(name):
    model, run, _make, _options = trained(name)
    state = model.state_dict()
    before = run(model)
    for key in state:
        if "out_proj" in key or "to_v" in key:
            continue
        rest = {k: v for k, v in state.items() if k != key}
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"\.'):
            model.load_state_dict(rest)
        assert model.load_state_dict(rest, strict=False).missing_keys == [key]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, key: torch.cat([state[key]] * 2)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "extra"'):
        model.load_state_dict({**state, "extra": torch.ones(1)})
    result = model.load_state_dict({}, strict=False)
    assert set(result.missing_keys) == set(state)
    torch.testing.assert_close(run(model), before, rtol=0, atol=1e-11)


def test_half_of_a_pair_is_loaded_beside_the_other_half():
    model, run, make, _options = trained("separate")
    other = randomized(make(), seed=5).state_dict()
    expected = make()
    expected.load_state_dict({**model.state_dict(), "to_q.weight": other["to_q.weight"]})
    model.load_state_dict({"to_q.weight": other["to_q.weight"]}, strict=False)
    torch.testing.assert_close(run(model), run(expected), rtol=0, atol=1e-11)
    with pytest.raises(RuntimeError, match="frames come from queries and keys together"):
        model.to_q.load_state_dict({"weight": other["to_q.weight"], "bias": other["to_q.bias"]})


@pytest.mark.parametrize("name", MODELS)
def test_deepcopy_and_pickle_are_independent_and_load(name):
    model, run, make, _options = trained(name)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    state = model.state_dict()
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(run(twin), run(model))
        before = run(model)
        twin.load_state_dict(randomized(make(), seed=7).state_dict())
        assert not torch.allclose(run(twin), before)
        assert torch.equal(run(model), before)
        twin.load_state_dict(state)
        assert worst_point_error(twin) < 1e-5
        release(twin)
        assert frames_of(model)
        assert not frames_of(twin)


# --- conversions and wrappers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multihead float32", "separate", "fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_keeps_the_constraint_and_projects_only_on_request(name, dtype):
    model, _run, _make, _options = trained(name)
    model.to(dtype)
    assert all(isinstance(p, ManifoldParameter) and p.dtype == dtype for p in frames_of(model).values())
    assert len(frames_of(model)) == 2
    rounded = {n: p.detach().clone() for n, p in frames_of(model).items()}
    assert 1e-5 < worst_point_error(model) < 3e-2
    model.load_state_dict(frame_state_dict(model))
    assert all(torch.equal(p, rounded[n]) for n, p in frames_of(model).items())
    reproject(model)
    assert worst_point_error(model) < 3e-2
    model.float()
    assert worst_point_error(model) < 1e-5  # a gain in precision projects, as for every frame of the package


def test_double_of_a_float32_model_is_orthonormal_in_double():
    layer = multihead(torch.float32)
    constrain(layer)
    layer.double()
    assert worst_point_error(layer) < 1e-14


@pytest.mark.parametrize("name", ["multihead", "separate", "fused"])
def test_training_keeps_frames_and_lowers_the_loss(name):
    make, options = MODELS[name]
    model = make()
    constrain(model, **options)
    _, run, _, _ = trained(name)
    start = {n: p.detach().clone() for n, p in frames_of(model).items()}
    optimizer = RiemannianAdam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (run(model) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert worst_point_error(model) < 1e-12
    assert all(float((p - start[n]).detach().norm()) > 1e-3 for n, p in frames_of(model).items())


def test_averages_stay_on_the_manifold():
    model, _run, make, _options = trained("multihead")
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    model.query.frames.detach().copy_(Stiefel().random_point(4, 16, 4, dtype=torch.float64))
    averaged.update_parameters(model)
    assert worst_point_error(averaged) < 1e-12
    assert isinstance(averaged.module, ConstrainedMultiheadAttention)
    assert set(averaged.module.state_dict()) == set(make().state_dict())


@pytest.mark.parametrize("name", ["multihead", "separate", "fused"])
def test_export_gives_the_plain_forward_pass(name):
    model, _run, _make, _options = trained(name)
    model.eval()
    x = draw(2, 5, 16)
    arguments = (x, x, x) if name == "multihead" else (x,)
    program = torch.export.export(model, arguments)
    found, expected = program.module()(*arguments), model(*arguments)
    if name == "multihead":
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any(word in n for n in names for word in ("svd", "qr", "eigh", "geodescent"))


def test_functional_call_and_vmap_over_frames():
    layer, x = multihead(), draw(2, 5, 16)
    constrain(layer)
    values = {n: p.detach() for n, p in layer.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(layer, values, (x, x, x))[0], layer(x, x, x)[0])


def test_the_effective_weight_is_read_like_that_of_a_linear_layer():
    model = randomized(Mixer())
    constrain(model, layouts=layout())
    x = draw(3, 16)
    assert model.to_q.weight.shape == (16, 16)
    torch.testing.assert_close(nn.functional.linear(x, model.to_q.weight, model.to_q.bias), model.to_q(x))
    assert (model.to_q.in_features, model.to_q.out_features) == (16, 16)
    assert "frames=4x16x4" in repr(model)
