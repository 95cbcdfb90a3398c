"""constrain() on Hugging Face models built from configurations, through the libraries that train, save and export them.

What a conversion must keep is taken from the models' own attention weights and outputs.
"""

import copy
import io
from typing import Any

import pytest
import torch
import transformers
from geodescent.attention.constrain import constrain, frame_state_dict, release, reproject
from geodescent.attention.head_projection import HeadProjection
from geodescent.manifolds import ManifoldParameter
from geodescent.optim import RiemannianAdam
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

D, VOCAB = 32, 40
SIZES = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
FEED = {"intermediate_size": 48}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T: Any = transformers  # its configurations take any keyword
IMAGE = {"image_size": 8, "patch_size": 4}
DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROTARY = {**SIZES, **FEED, **SPECIAL, "num_key_value_heads": 2}

# class, configuration, names of the attention modules
EXACT = {
    "gpt2": (
        T.GPT2LMHeadModel,
        T.GPT2Config(
            n_embd=D,
            n_layer=2,
            n_head=4,
            vocab_size=VOCAB,
            n_positions=64,
            scale_attn_by_inverse_layer_idx=True,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **SPECIAL,
        ),
        "transformer.h.{}.attn",
    ),
    "bert": (T.BertModel, T.BertConfig(**SIZES, **FEED, **DROP), "encoder.layer.{}.attention.self"),
    "roberta": (T.RobertaModel, T.RobertaConfig(**SIZES, **FEED, **DROP), "encoder.layer.{}.attention.self"),
    "electra": (
        T.ElectraModel,
        T.ElectraConfig(**SIZES, **FEED, **DROP, embedding_size=D),
        "encoder.layer.{}.attention.self",
    ),
    "vit": (T.ViTModel, T.ViTConfig(**SIZES, **FEED, **IMAGE, **DROP), "layers.{}.attention"),
    "vit no bias": (T.ViTModel, T.ViTConfig(**SIZES, **FEED, **IMAGE, **DROP, qkv_bias=False), "layers.{}.attention"),
    "deit": (T.DeiTModel, T.DeiTConfig(**SIZES, **FEED, **IMAGE, **DROP), None),
}
POLAR = {
    "llama": (T.LlamaForCausalLM, T.LlamaConfig(**ROTARY, attention_bias=True), "model.layers.{}.self_attn"),
    "llama a key head a query head": (
        T.LlamaForCausalLM,
        T.LlamaConfig(**{**ROTARY, "num_key_value_heads": 4}),
        "model.layers.{}.self_attn",
    ),
    "mistral": (T.MistralForCausalLM, T.MistralConfig(**ROTARY), "model.layers.{}.self_attn"),
    "qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**ROTARY), "model.layers.{}.self_attn"),
}
MODELS = {**EXACT, **POLAR}
FOUR = ["gpt2", "bert", "vit", "llama"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
FLOAT32_SOFTMAX = ("vit", "deit")  # of transformers' eager attention, in a float64 model as well


def build(name, dtype=torch.float32, attention="eager", seed=0):
    """A model with uneven attention and biases that are not zero."""
    cls, config, _ = MODELS[name]
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = cls(config).to(dtype).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
            elif "attn" in key or "attention" in key:
                p.mul_(12)
    return model


def inputs(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    if name.startswith(("vit", "deit")):
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).to(dtype)}
    ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def output(model, name, dtype=torch.float32):
    result = model(**inputs(name, dtype))
    return result.logits if "logits" in result else result.last_hidden_state


def attentions(model, name, dtype=torch.float32):
    return torch.stack(model(**inputs(name, dtype), output_attentions=True).attentions)


def frames_of(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, ManifoldParameter)}


def worst_point_error(model):
    return max(float(p.manifold.point_error(p.detach()).max()) for p in frames_of(model).values())


def loss_of(model, name):
    if "input_ids" in inputs(name) and isinstance(model, (T.GPT2LMHeadModel, T.LlamaForCausalLM)):
        ids = inputs(name)["input_ids"]
        return model(input_ids=ids, labels=ids).loss
    return (output(model, name) - 0.5).square().mean()


def trained(name, steps=3, **options):
    model = build(name)
    constrain(model, **options)
    optimizer = RiemannianAdam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, name).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_attention_weights_and_outputs_are_kept(name, dtype):
    model = build(name, dtype)
    before, weights = output(model, name, dtype), attentions(model, name, dtype)
    keys = [(k, v.shape, v.dtype) for k, v in model.state_dict().items()]
    assert float(weights.detach().std()) > 0.05  # far from uniform
    report = constrain(model, inputs=inputs(name, dtype))
    assert report.exact
    assert not report.skipped
    assert len(report.layers) == 2
    pattern = MODELS[name][2]
    if pattern is not None:
        assert [a.name for a in report.layers] == [pattern.format(i) for i in (0, 1)]
    tolerance = 1e-5 if name.startswith(FLOAT32_SOFTMAX) else TOLERANCE[dtype]
    torch.testing.assert_close(attentions(model, name, dtype), weights, rtol=0, atol=tolerance)
    torch.testing.assert_close(output(model, name, dtype), before, rtol=0, atol=3 * tolerance)
    assert [(k, v.shape, v.dtype) for k, v in model.state_dict().items()] == keys
    assert worst_point_error(model) < TOLERANCE[dtype]
    constrained = output(model, name, dtype)
    assert len(release(model)) == 2
    assert not frames_of(model)
    assert not any(isinstance(m, HeadProjection) for m in model.modules())
    torch.testing.assert_close(output(model, name, dtype), constrained, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", EXACT)
def test_outputs_of_fused_attention_are_kept_in_double_precision(name):
    model = build(name, torch.float64, attention="sdpa")
    report = constrain(model, inputs=inputs(name, torch.float64))
    assert report.output_change is not None
    assert report.output_change < 1e-12


@pytest.mark.parametrize("logit_scale", ["spectrum", "learned"])
@pytest.mark.parametrize("name", POLAR)
def test_rotary_models_are_polar_and_the_report_is_right(name, logit_scale):
    model = build(name, torch.float64)
    before = output(model, name, torch.float64)
    keys = [(k, v.shape) for k, v in model.state_dict().items()]
    report = constrain(model, logit_scale=logit_scale, inputs=inputs(name, torch.float64))
    assert [a.method for a in report.layers] == ["polar", "polar"]
    assert all("rotary" in a.reason for a in report.layers)
    grouped = MODELS[name][1].num_key_value_heads == 2
    assert all(("shared by several query heads" in a.reason) == grouped for a in report.layers)
    after = output(model, name, torch.float64)
    assert report.output_change == pytest.approx(float((after - before).abs().max().detach()), rel=1e-9)
    assert all(0.01 < a.circuit_change < 0.9 for a in report.layers)
    assert [(k, v.shape) for k, v in model.state_dict().items()] == keys
    release(model)
    torch.testing.assert_close(output(model, name, torch.float64), after, rtol=0, atol=1e-12)


def test_rotary_models_of_frames_with_scales_are_kept():
    """Where weights have the form already, nothing is lost: the polar conversion is a projection."""
    model = build("llama", torch.float64)
    constrain(model)
    release(model)
    before = output(model, "llama", torch.float64)
    report = constrain(model, inputs=inputs("llama", torch.float64))
    assert report.output_change is not None
    assert report.output_change < 1e-9
    torch.testing.assert_close(output(model, "llama", torch.float64), before, rtol=0, atol=1e-9)


def test_weight_change_of_rotary_attention_is_that_of_the_layer_on_normal_tokens():
    model = build("llama", torch.float64)
    x = torch.randn(1, 48, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(48)[None]

    def weights():
        rotary = model.model.rotary_emb(x, positions)
        return [b.self_attn(x, position_embeddings=rotary, attention_mask=None)[1] for b in model.model.layers]

    before = weights()
    report = constrain(model)
    for row, old, new in zip(report.layers, before, weights(), strict=True):
        assert row.weight_change == pytest.approx(float((new - old).abs().max().detach()), abs=1e-6)
        assert row.weight_change > 1e-2


@pytest.mark.parametrize("name", FOUR)
def test_eager_and_sdpa_agree(name):
    model = trained(name)
    fused = build(name, attention="sdpa")
    constrain(fused)
    fused.load_state_dict(frame_state_dict(model))
    torch.testing.assert_close(output(fused, name), output(model, name), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generate(name, attention):
    model = build(name, attention=attention)
    ids = inputs(name)["input_ids"]
    constrain(model)
    ordinary = copy.deepcopy(model)
    release(ordinary)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, **options)
    assert torch.equal(found, ordinary.generate(ids, **options))
    assert torch.equal(found, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("name", FOUR)
def test_training_keeps_frames_and_lowers_the_loss(name):
    start = build(name)
    constrain(start)
    model = trained(name, steps=15)
    assert float(loss_of(model, name).detach()) < 0.95 * float(loss_of(start, name).detach())
    assert worst_point_error(model) < 1e-5
    moved = {n: float((p - frames_of(start)[n]).norm().detach()) for n, p in frames_of(model).items()}
    assert len(moved) == 4
    assert min(moved.values()) > 1e-2


def test_gradient_checkpointing_gives_the_same_gradients():
    model = build("gpt2")
    constrain(model)
    twin = copy.deepcopy(model).train()
    # renamed in transformers 5
    getattr(twin, "activation_checkpointing_enable", twin.gradient_checkpointing_enable)()
    for m in (model.train(), twin):
        loss_of(m, "gpt2").backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-6)


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR)
def test_save_pretrained_gives_an_ordinary_model_that_constrains_to_the_same_frames(name, tmp_path):
    model = trained(name)
    model.save_pretrained(tmp_path)
    ordinary, info = MODELS[name][0].from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert not frames_of(ordinary)
    ordinary.eval()
    torch.testing.assert_close(output(ordinary, name), output(model, name), rtol=0, atol=1e-6)
    constrain(ordinary)
    for (key, p), q in zip(ordinary.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", FOUR)
def test_safetensors_and_torch_files_load_strictly_both_ways(name, tmp_path):
    model = trained(name)
    tied = {"lm_head.weight"} if name == "gpt2" else set()  # safetensors files hold no shared tensors
    save_file({k: v for k, v in model.state_dict().items() if k not in tied}, tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    if tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    for loaded in (state, torch.load(buffer, weights_only=True)):
        for assign in (False, True):
            ordinary, again = build(name, seed=1), build(name, seed=2)
            constrain(again)
            for m in (ordinary, again):
                m.load_state_dict(loaded, assign=assign)
                torch.testing.assert_close(output(m, name), output(model, name), rtol=0, atol=2e-6)
            assert len(frames_of(again)) == 4
            assert worst_point_error(again) < 1e-5


def test_safetensors_of_frames_and_its_own_model_functions(tmp_path):
    model = trained("bert")
    save_file(frame_state_dict(model), tmp_path / "frames.safetensors")
    again = build("bert", seed=1)
    constrain(again)
    again.load_state_dict(load_file(tmp_path / "frames.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    save_model(model, str(tmp_path / "model.safetensors"))
    for m in (again, build("bert", seed=2)):
        missing, unexpected = load_model(m, str(tmp_path / "model.safetensors"))
        assert not missing
        assert not unexpected
        torch.testing.assert_close(output(m, "bert"), output(model, "bert"), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", FOUR)
def test_deepcopy_half_and_back(name):
    model = trained(name)
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin, name), output(model, name))
    twin.half()
    assert all(p.dtype == torch.float16 for p in frames_of(twin).values())
    assert len(frames_of(twin)) == 4
    assert 1e-5 < worst_point_error(twin) < 4e-3
    errors = reproject(twin)
    assert set(errors) == set(frames_of(twin))
    twin.float()
    assert worst_point_error(twin) < 1e-5
    twin.load_state_dict(model.state_dict())
    # not outputs: .half() has rounded the frequencies of rotary embeddings for good
    for (key, p), q in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")


# --- export ---------------------------------------------------------------------------------------------------------


def export_arguments(model, name):
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return {k: v for k, v in inputs(name).items() if k != "attention_mask"}


@pytest.mark.parametrize("name", FOUR)
def test_torch_export(name):
    model = trained(name)
    arguments = export_arguments(model, name)
    program = torch.export.export(model, (), arguments)
    found, expected = program.module()(**arguments)[0], model(**arguments)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning", "ignore:.*is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["gpt2", "vit", "llama"])
def test_onnx(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = trained(name)
    arguments = export_arguments(model, name)
    program = torch.onnx.export(model, kwargs=arguments, dynamo=True, verbose=False)
    assert program is not None
    program.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    feed = {k: v.numpy() for k, v in arguments.items() if k in {i.name for i in session.get_inputs()}}
    found = torch.from_numpy(session.run(None, feed)[0])
    torch.testing.assert_close(found, model(**arguments)[0].detach(), rtol=0, atol=2e-5)


# --- what is left alone ---------------------------------------------------------------------------------------------


def test_cross_attention_of_bert_is_converted_and_that_of_gpt2_is_named():
    torch.manual_seed(0)
    config = T.BertConfig(**SIZES, **FEED, **DROP, is_decoder=True, add_cross_attention=True)
    bert = T.BertModel(config).double().eval()
    states = torch.randn(2, 5, D, dtype=torch.float64)
    ids = inputs("bert")["input_ids"]
    report = constrain(bert, inputs={"input_ids": ids, "encoder_hidden_states": states, "use_cache": False})
    assert [a.kind for a in report.layers] == ["BertSelfAttention", "BertCrossAttention"] * 2
    assert report.exact
    assert report.output_change is not None
    assert report.output_change < 1e-12
    config = copy.deepcopy(MODELS["gpt2"][1])
    config.add_cross_attention = True
    report = constrain(T.GPT2Model(config))
    assert [a.name for a in report.layers] == ["h.0.attn", "h.1.attn"]
    assert [s.name for s in report.skipped] == ["h.0.crossattention", "h.1.crossattention"]
    assert all("cross-attention" in s.reason for s in report.skipped)


def test_unknown_classes_are_named():
    model = T.DistilBertModel(T.DistilBertConfig(dim=D, n_layers=1, n_heads=4, hidden_dim=48, vocab_size=VOCAB))
    with pytest.raises(ValueError, match=r"transformer\.layer\.0\.attention .*unknown layout: class .*DistilBert"):
        constrain(model)
    mixed = nn.ModuleDict({"known": build("bert"), "unknown": model})
    report = constrain(mixed)
    assert [a.name.split(".")[0] for a in report.layers] == ["known", "known"]
    assert [s.name for s in report.skipped] == ["unknown.transformer.layer.0.attention"]
