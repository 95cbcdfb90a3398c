import math

import pytest
import torch
from geodescent.analysis import attention_geometry
from torch import nn

STATE = {f"h.{i}.attn.{n}_proj.weight": torch.eye(8) for i in (0, 1) for n in "qk"}


def layer(config, i=0, state=None):
    return attention_geometry(STATE if state is None else state, config=config)[f"h.{i}.attn"]


@pytest.mark.parametrize("name", ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"])
def test_heads_by_many_names(name):
    assert layer({name: 2}).num_heads == 2


def test_heads_from_the_width_of_one():
    assert layer({"head_dim": 2}).num_heads == 4
    assert attention_geometry(STATE, head_dim=2).layers[0].num_heads == 4


def test_what_the_caller_says_goes_first():
    assert attention_geometry(STATE, 4, config={"n_head": 2}).layers[0].num_heads == 4
    by_name = attention_geometry(STATE, {"h.1.attn": 4}, config={"n_head": 2})
    assert [layer.num_heads for layer in by_name.layers] == [2, 4]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 1 / math.sqrt(4)),
        ({"scale_attn_weights": False}, 1.0),
        ({"model_type": "gpt_neo"}, 1.0),
        ({"attention_multiplier": 0.125}, 0.125),
        ({"query_pre_attn_scalar": 16}, 0.25),
        ({"attn_config": {"softmax_scale": 0.3}}, 0.3),
        ({"attn_config": {"softmax_scale": None}}, 0.5),
    ],
)
def test_scales(config, scale):
    assert layer({"n_head": 2, **config}).logit_scale.tolist() == pytest.approx([scale] * 2)


def test_the_scale_by_layer():
    config = {"n_head": 2, "scale_attn_by_inverse_layer_idx": True}
    assert layer(config, 1).logit_scale[0].item() == pytest.approx(0.5 / 2)
    assert layer(config | {"scale_attn_weights": False}, 1).logit_scale[0].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        ({}, None),
        ({"model_type": "new"}, None),
        ({"model_type": "gpt2"}, False),
        ({"rope_theta": 1e4}, True),
        ({"rope_parameters": {"rope_theta": 1e4}}, True),
        ({"rotary_pct": 0.25}, True),
        ({"position_embedding_type": "rope"}, True),
        ({"rope_theta": 1e4, "alibi": True}, False),
        ({"attn_config": {"alibi": True}}, False),
    ],
)
def test_positions(config, rotary):
    assert layer({"n_head": 2, **config}).rotary is rotary


def test_what_else_lies_between():
    assert layer({"n_head": 2, "attn_logit_softcapping": 30.0}).notes == ("soft cap",)
    assert layer({"n_head": 2, "alibi": True}).notes == ("additive position bias",)
    yarn = layer({"n_head": 2, "rope_parameters": {"full": {"rope_type": "yarn"}}})
    assert yarn.notes == ("rotary attention factor",)
    assert torch.isnan(yarn.logit_bound).all()
    normed = layer({"n_head": 2}, state=STATE | {"h.0.attn.q_norm.weight": torch.ones(4)})
    assert normed.notes == ("query and key norms",)


def test_towers_and_sides():
    state = {f"{t}_model.h.0.attn.{n}_proj.weight": torch.eye(12) for t in ("text", "vision") for n in "qk"}
    config = {"text_config": {"num_attention_heads": 2}, "vision_config": {"num_attention_heads": 3}}
    assert [layer.num_heads for layer in attention_geometry(state, config=config).layers] == [2, 3]
    state = {f"{t}.h.0.attn.{n}_proj.weight": torch.eye(12) for t in ("encoder", "decoder") for n in "qk"}
    config = {"encoder_attention_heads": 2, "decoder_attention_heads": 3, "num_attention_heads": 6}
    assert [layer.num_heads for layer in attention_geometry(state, config=config).layers] == [2, 3]
    # a language model inside another says so for layers of no tower
    assert layer({"text_config": {"num_attention_heads": 4}}).num_heads == 4


class Attention(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 4)
        for name, value in attributes.items():
            setattr(self, name, value)


class Config:
    """As transformers' configurations are: attributes, some of them aliases, and to_dict()."""

    num_attention_heads = 4

    def to_dict(self):
        return {"n_head": 4, "rope_theta": 1e4, "model_type": "mine"}


def test_modules_say_it_themselves():
    own = attention_geometry(nn.ModuleDict({"a": Attention(num_heads=2, scaling=0.3)}))["a"]
    assert (own.num_heads, own.num_key_value_heads, own.rotary) == (2, 1, None)
    assert own.logit_scale.tolist() == [0.3, 0.3]
    model = nn.ModuleDict({"a": Attention()})
    object.__setattr__(model, "config", Config())
    above = attention_geometry(model)["a"]
    assert (above.num_heads, above.num_key_value_heads, above.rotary) == (4, 2, True)
    assert attention_geometry(model, config={"n_head": 2})["a"].num_heads == 2
    with pytest.raises(ValueError, match="how many heads layer 'a' has"):
        attention_geometry(nn.ModuleDict({"a": Attention()}))
