"""Geometry of real transformers, against circuits found by probing the models with unit vectors.

The probes know nothing of how weights are stored: a head's QK circuit comes from the model's own attention weights, its
OV circuit from what its output projection puts out.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from geodescent.analysis import (
    AttentionLayout,
    Checkpoint,
    attention_entropy,
    attention_geometry,
    drift,
    weights_entropy,
)
from geodescent.experiments import cli
from safetensors.torch import load_file
from torch import nn

D, VOCAB = 32, 40
SIZES = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
FEED = {"intermediate_size": 48}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T: Any = transformers  # its configurations take any keyword


def still(width):
    """Rotary embeddings of position 0 for every token: no rotation."""
    return lambda n: (torch.ones(1, n, width, dtype=torch.float64), torch.zeros(1, n, width, dtype=torch.float64))


ROTARY = {"position_embeddings": still(8)}

# model class, configuration, its attention modules, the name of the output projection, arguments of its forward
MODELS = {
    "gpt2": (
        T.GPT2Model,
        T.GPT2Config(
            n_embd=D, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64, scale_attn_by_inverse_layer_idx=True
        ),
        lambda m: [b.attn for b in m.h],
        "c_proj",
        {},
    ),
    "bert": (
        T.BertModel,
        T.BertConfig(**SIZES, **FEED),
        lambda m: [layer.attention for layer in m.encoder.layer],
        "output.dense",
        {},
    ),
    "vit": (
        T.ViTModel,
        T.ViTConfig(hidden_size=D, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4, **FEED),
        lambda m: [layer.attention for layer in m.layers],
        "o_proj",
        {},
    ),
    "llama": (
        T.LlamaModel,
        T.LlamaConfig(**SIZES, **FEED, num_key_value_heads=2),
        lambda m: [layer.self_attn for layer in m.layers],
        "o_proj",
        ROTARY,
    ),
    "qwen2": (
        T.Qwen2Model,
        T.Qwen2Config(**SIZES, **FEED, num_key_value_heads=1),
        lambda m: [layer.self_attn for layer in m.layers],
        "o_proj",
        ROTARY,
    ),
    "mistral": (
        T.MistralModel,
        T.MistralConfig(**SIZES, **FEED, num_key_value_heads=2, head_dim=16),
        lambda m: [layer.self_attn for layer in m.layers],
        "o_proj",
        {"position_embeddings": still(16)},
    ),
    "phi3": (
        T.Phi3Model,
        T.Phi3Config(**SIZES, **FEED, **SPECIAL, num_key_value_heads=2),
        lambda m: [layer.self_attn for layer in m.layers],
        "o_proj",
        ROTARY,
    ),
    "gpt-neox": (
        T.GPTNeoXModel,
        T.GPTNeoXConfig(**SIZES, **FEED),
        lambda m: [layer.attention for layer in m.layers],
        "dense",
        {"position_embeddings": still(2)},
    ),
    "falcon-grouped": (
        T.FalconModel,
        T.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2, bias=True),
        lambda m: [layer.self_attention for layer in m.h],
        "dense",
        ROTARY,
    ),
    "falcon-multi-query": (
        T.FalconModel,
        T.FalconConfig(**SIZES, multi_query=True),
        lambda m: [layer.self_attention for layer in m.h],
        "dense",
        ROTARY,
    ),
    "bloom": (
        T.BloomModel,
        T.BloomConfig(hidden_size=D, n_layer=2, n_head=4, vocab_size=VOCAB),
        lambda m: [layer.self_attention for layer in m.h],
        "dense",
        {},
    ),
    "gpt-neo": (  # no 1/√d_h
        T.GPTNeoModel,
        T.GPTNeoConfig(
            hidden_size=D, num_layers=2, num_heads=4, vocab_size=VOCAB, attention_types=[[["global"], 2]], **SPECIAL
        ),
        lambda m: [layer.attn.attention for layer in m.h],
        "out_proj",
        {},
    ),
    "t5": (  # nor here
        T.T5EncoderModel,
        T.T5Config(d_model=D, d_kv=8, num_layers=2, num_heads=4, d_ff=48, vocab_size=VOCAB),
        lambda m: [block.layer[0].SelfAttention for block in m.encoder.block],
        "o",
        {},
    ),
    "distilbert": (
        T.DistilBertModel,
        T.DistilBertConfig(dim=D, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=VOCAB),
        lambda m: [layer.attention for layer in m.transformer.layer],
        "out_lin",
        {},
    ),
    "modernbert": (
        T.ModernBertModel,
        T.ModernBertConfig(**SIZES, **FEED, **SPECIAL, cls_token_id=1, sep_token_id=2),
        lambda m: [layer.attn for layer in m.layers],
        "Wo",
        ROTARY,
    ),
    "opt": (
        T.OPTModel,
        T.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=D, max_position_embeddings=64),
        lambda m: [layer.self_attn for layer in m.decoder.layers],
        "out_proj",
        {},
    ),
}


def build(name):
    cls, config, *_ = MODELS[name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval().double()
    with torch.no_grad():  # logits of a few units, and biases that matter
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def forward(name, attention, hidden):
    arguments = {k: v(hidden.shape[1]) for k, v in MODELS[name][4].items()}
    count = hidden.shape[1]
    nothing = torch.zeros(hidden.shape[0], 1, count, count, dtype=hidden.dtype)
    if name.startswith("falcon"):
        arguments |= {"alibi": None, "attention_mask": nothing, "output_attentions": True}
    elif name == "bloom":
        alibi = torch.zeros(4 * hidden.shape[0], 1, count, dtype=hidden.dtype)
        arguments |= {"residual": torch.zeros_like(hidden), "alibi": alibi, "attention_mask": nothing}
        arguments |= {"output_attentions": True}
    elif name == "t5":
        arguments |= {"position_bias": nothing.expand(-1, 4, -1, -1)}
    elif name == "gpt-neo":
        attention.bias.fill_(True)  # its causal mask, which would hide half the logits
    elif name in ("llama", "qwen2", "mistral", "phi3", "gpt-neox", "opt"):
        arguments |= {"attention_mask": nothing}
    return attention(hidden, **arguments)


@torch.no_grad()
def probed_qk(name, attention):
    """x W_Q diag(s) W_Kᵀ yᵀ on unit vectors, from log attention weights: whatever depends on the query alone or on the
    key alone, biases and the normalization included, cancels in the second difference."""
    hidden = torch.cat([torch.zeros(1, D), torch.eye(D)]).double()[None]
    outputs = (out for out in forward(name, attention, hidden) if out is not None)
    weights = next(out for out in outputs if out.shape == (1, 4, D + 1, D + 1) and out.sum() > D)  # T5: its bias too
    log = weights[0].double().log()
    return (log[:, 1:, 1:] - log[:, 1:, :1] - log[:, :1, 1:] + log[:, :1, :1]).numpy()


@torch.no_grad()
def probed_ov(name, attention):
    """What a lone token's value becomes, a head: sequences of one token, and all heads but one silenced on the way into
    the output projection."""
    projection = attention.get_submodule(MODELS[name][3])
    hidden = torch.cat([torch.zeros(1, D), torch.eye(D)]).double()[:, None]
    outputs = []
    seen = {}
    for head in range(4):

        def only(_, inputs, head=head):
            cut = inputs[0].unflatten(-1, (4, -1)).clone()
            cut[..., [h for h in range(4) if h != head], :] = 0
            return (cut.flatten(-2),)

        handles = [
            projection.register_forward_pre_hook(only),
            projection.register_forward_hook(lambda _, __, out: seen.update(out=out)),
        ]
        forward(name, attention, hidden)
        for handle in handles:
            handle.remove()
        out = seen["out"].reshape(D + 1, -1)
        outputs.append((out[1:] - out[:1]).numpy())
    return np.stack(outputs)


def check(name, model, geometry, rtol):
    modules = MODELS[name][2](model)
    assert len(geometry.layers) == len(modules) == 2
    assert not geometry.skipped
    for layer, module in zip(geometry.layers, modules, strict=True):
        assert layer.num_heads == 4
        qk = np.linalg.svd(probed_qk(name, module), compute_uv=False)
        k = layer.spectrum.shape[-1]
        np.testing.assert_allclose(layer.spectrum, qk[:, :k], rtol=rtol, atol=rtol * qk.max())
        assert qk[:, k:].max(initial=0) < 10 * rtol * qk.max()
        ov = np.linalg.svd(probed_ov(name, module), compute_uv=False)
        np.testing.assert_allclose(layer.ov_spectrum, ov[:, :k], rtol=1e-9, atol=1e-9 * ov.max())


@pytest.mark.parametrize("name", MODELS)
def test_spectra_are_those_of_the_probed_circuits(name, tmp_path):
    model = build(name)
    check(name, model, attention_geometry(model), 2e-5)  # some of the models take their softmax in float32
    model.save_pretrained(tmp_path)
    check(name, model, attention_geometry(tmp_path), 2e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    state = load_file(tmp_path / "model.safetensors")
    arrays = {key: value.numpy() for key, value in state.items()}
    check(name, model, attention_geometry(arrays, config=config), 2e-5)
    if name in ("gpt2", "bert", "vit", "llama"):
        told = None if name == "gpt2" else 4  # the scale by layer is in gpt2's configuration only
        (tmp_path / "config.json").unlink()
        if told:
            check(name, model, attention_geometry(tmp_path, num_heads=told), 2e-5)
        with pytest.raises(ValueError, match="give num_heads"):
            attention_geometry(tmp_path)


@pytest.mark.parametrize(("name", "groups", "rotary"), [("gpt2", 4, False), ("llama", 2, True), ("vit", 4, False)])
def test_what_a_configuration_says(name, groups, rotary):
    layer: Any = attention_geometry(build(name)).layers[0]
    assert (layer.num_key_value_heads, layer.rotary) == (groups, rotary)
    assert layer.key_frames.shape[0] == groups


def test_the_logit_bound_holds_under_rotary_positions():
    model = build("qwen2")  # query and key biases, and rotary positions
    layer = attention_geometry(model).layers[0]
    module = model.layers[0].self_attn
    hidden = torch.randn(1, 24, D, dtype=torch.float64)
    hidden = hidden / hidden.norm(dim=-1, keepdim=True) * 3
    seen = []
    handles = [p.register_forward_hook(lambda _, __, out: seen.append(out)) for p in (module.q_proj, module.k_proj)]
    angles = torch.randn(1, 24, 8, dtype=torch.float64).repeat(1, 1, 1)
    angles = torch.cat([angles[..., :4], angles[..., :4]], -1)
    with torch.no_grad():
        _, weights = module(hidden, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
    for handle in handles:
        handle.remove()
    query, key = (s[0].unflatten(-1, (-1, 8)) for s in seen)
    norms = query.norm(dim=-1).amax(0) * key.norm(dim=-1).amax() / 8**0.5
    # logits lie within ±bound, so log ratios of weights within twice that
    log = weights[0].double().log()
    spread = (log.amax(-1) - log.amin(-1)).amax(-1)
    bound = layer.max_logit(3.0)
    assert (norms <= bound + 1e-9).all()
    assert (spread <= 2 * bound + 1e-5).all()
    assert (spread > 0.05 * bound).all()


def test_entropy_is_that_of_the_models_weights():
    model = build("bert")
    ids = torch.arange(12)[None] % VOCAB
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True)
    for i, layer in enumerate(attention_geometry(model).layers):
        got = attention_entropy(layer, out.hidden_states[i])
        torch.testing.assert_close(got, weights_entropy(out.attentions[i]), rtol=1e-4, atol=1e-6)
    rotary = attention_geometry(build("llama")).layers[0]
    with pytest.raises(ValueError, match="rotary positions between its projections"):
        attention_entropy(rotary, torch.zeros(5, D))


def test_shards_are_read_as_one_file(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = attention_geometry(tmp_path / "one"), attention_geometry(tmp_path / "many")
    assert one.to_dict() == many.to_dict()
    index = tmp_path / "many" / "model.safetensors.index.json"
    assert attention_geometry(index).to_dict() == one.to_dict()
    text = json.loads(index.read_text())
    text["weight_map"] = dict.fromkeys(text["weight_map"], "../one/model.safetensors")
    index.write_text(json.dumps(text))
    with pytest.raises(ValueError, match="no checkpoint file of its own folder"):
        attention_geometry(index)


def test_drift_between_files_and_models(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        for layer in model.layers:  # one gauge for the group's queries and its key, another for values and outputs
            mix = torch.linalg.qr(torch.randn(2, 8, 8, dtype=torch.float64)).Q
            attention = layer.self_attn
            for group in range(2):
                attention.k_proj.weight[8 * group : 8 * group + 8] = (
                    mix[group].T @ attention.k_proj.weight[8 * group : 8 * group + 8]
                )
                for head in (2 * group, 2 * group + 1):
                    attention.q_proj.weight[8 * head : 8 * head + 8] = (
                        mix[group].T @ attention.q_proj.weight[8 * head : 8 * head + 8]
                    )
    model.save_pretrained(tmp_path / "after")
    report = drift(tmp_path / "before", tmp_path / "after", samples=2)
    layer: Any
    for layer in report.layers:
        assert layer.query_movement.min() > 0.5
        assert layer.gauge_movement.max() < 1e-12
        assert layer.ov_gauge_movement.max() < 1e-12
        assert layer.spectrum_change.max() < 1e-12
    # a model with a head on top has longer names
    torch.manual_seed(0)
    wrapped = T.LlamaForCausalLM(model.config)
    wrapped.model.load_state_dict(model.state_dict())
    assert drift(tmp_path / "after", wrapped, samples=0)["layers.0.self_attn"].query_movement.max() < 1e-6


def test_query_and_key_norms_and_adapters_are_named(tmp_path):
    config = T.Qwen3Config(**SIZES, **FEED, num_key_value_heads=2, head_dim=8)
    layer = attention_geometry(T.Qwen3Model(config)).layers[0]
    assert layer.notes == ("query and key norms",)
    assert torch.isnan(layer.logit_bound).all()
    tiny = T.DeepseekV3Config(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=VOCAB,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        intermediate_size=48,
        n_routed_experts=2,
        moe_intermediate_size=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    )
    model = T.DeepseekV3Model(tiny)
    with pytest.raises(ValueError, match=r"kv_a_proj.* give layout="):
        attention_geometry(model)


def test_towers_have_their_own_configuration(tmp_path):
    part = {"num_hidden_layers": 1, "intermediate_size": 48}
    config = T.CLIPConfig(
        text_config={**part, "hidden_size": D, "num_attention_heads": 4, "vocab_size": VOCAB, **SPECIAL},
        vision_config={**part, "hidden_size": 48, "num_attention_heads": 6, "image_size": 8, "patch_size": 4},
    )
    model = T.CLIPModel(config)
    model.save_pretrained(tmp_path)
    for geometry in (attention_geometry(model), attention_geometry(tmp_path)):
        assert sorted((layer.name.split("_")[0], layer.num_heads) for layer in geometry.layers) == [
            ("text", 4),
            ("vision", 6),
        ]
    bart = T.BartConfig(
        d_model=D,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCAB,
        **SPECIAL,
    )
    model = T.BartModel(bart)
    model.save_pretrained(tmp_path / "bart")
    for geometry in (attention_geometry(model), attention_geometry(tmp_path / "bart")):
        assert {layer.name: layer.num_heads for layer in geometry.layers} == {
            "encoder.layers.0.self_attn": 4,
            "decoder.layers.0.self_attn": 2,
            "decoder.layers.0.encoder_attn": 2,
        }


def test_a_layout_of_ones_own():
    state = {f"mixer.{part}": torch.randn(D, D) for part in ("to_q.w", "to_k.w", "to_v.w", "to_out.w")}
    layout = AttentionLayout(query="to_q.w", key="to_k.w", value="to_v.w", output="to_out.w", rotary=False)
    layer = attention_geometry(state, num_heads=4, layout=layout)["mixer"]
    reference = nn.MultiheadAttention(D, 4, bias=False)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([state[f"mixer.to_{p}.w"] for p in "qkv"]))
        reference.out_proj.weight.copy_(state["mixer.to_out.w"])
    want = attention_geometry(reference).layers[0]
    torch.testing.assert_close(layer.spectrum, want.spectrum)
    torch.testing.assert_close(layer.ov_spectrum, want.ov_spectrum)


@pytest.mark.parametrize(
    "content", [b"", b"hello" * 10, (2**62).to_bytes(8, "little") + b"{}", (8).to_bytes(8, "little") + b'{"a": 1}']
)
def test_a_broken_safetensors_file_is_one_line_and_status_2(tmp_path, content, capsys):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no readable safetensors file"):
        attention_geometry(path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", str(path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_inspect_reads_only_the_attention_a_layer_at_a_time(tmp_path, monkeypatch, capsys):
    build("llama").save_pretrained(tmp_path)
    read = []
    original = Checkpoint.__getitem__

    def recorded(self, key):
        value = original(self, key)  # a KeyError where there is no such tensor
        read.append(key)
        return value

    monkeypatch.setattr(Checkpoint, "__getitem__", recorded)
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", str(tmp_path)])
    assert stop.value.code == 0
    assert "Grouped queries: 2 heads share a key and a value." in capsys.readouterr().out
    assert all(".self_attn." in key for key in read)
    layers = [key.split(".")[1] for key in read]
    assert layers == sorted(layers)
    assert len(read) == len(set(read)) == 8
