"""What the weights of an attention layer do not say: heads, the scale of the logits, rotary positions.

A state dict holds none of it. It comes from the caller, from the ``config.json`` beside a checkpoint, or, for a module,
from the attributes of the module that owns the projections and from the nearest ``config`` above it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

# what lies between the projections and the softmax besides a scale; the QK circuit knows nothing of it
QK_NORM = "query and key norms"
SOFT_CAP = "soft cap"
ADDITIVE = "additive position bias"
ROPE_FACTOR = "rotary attention factor"

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "d_kv", "attention_head_size")
_SCALE = ("scaling", "softmax_scale", "scale")
_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_dim", "rotary_emb_base", "rotary")
# models whose logits are the plain bilinear form; for others no sign of rotary positions does not mean that none are
_NOT_ROTARY = re.compile(
    "albert|bart|bert|beit|bloom|clip|clip_text_model|clip_vision_model|deit|dinov2|distilbert|electra|gpt2|"
    "gpt_bigcode|gpt_neo|marian|mbart|mpt|mt5|opt|pegasus|roberta|siglip|t5|vit|vit_mae|whisper|xlm-roberta"
)
_UNSCALED = frozenset({"gpt_neo", "t5", "mt5", "umt5", "switch_transformers"})


@dataclass(frozen=True)
class Facts:
    """None where nothing says. ``scale`` multiplies the logits before ``divisor`` divides them."""

    num_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    divisor: float = 1.0
    rotary: bool | None = None
    order: str | None = None
    notes: tuple[str, ...] = ()


def facts_from_config(config: Mapping[str, Any], layer: str) -> Facts:
    """Read a Hugging Face style configuration, or any mapping with its keys, for the layer of this name."""
    part = _part(config, layer)
    kind = part.get("model_type", config.get("model_type"))
    side = "decoder" if re.search(r"(^|\.)decoder(\.|$)", layer) else "encoder"
    heads = _whole(part, (f"{side}_attention_heads", *_HEADS))
    attention = part.get("attn_config")
    attention = attention if isinstance(attention, Mapping) else {}
    alibi = bool(part.get("alibi") or attention.get("alibi")) or kind == "bloom"
    notes = [ADDITIVE] if alibi else []
    if part.get("attn_logit_softcapping"):
        notes.append(SOFT_CAP)
    if _rope_types(part) & {"yarn", "longrope"}:
        notes.append(ROPE_FACTOR)
    multi_query = part.get("multi_query")
    return Facts(
        num_heads=heads,
        num_key_value_heads=_whole(part, _KV_HEADS),
        head_dim=_whole(part, _HEAD_DIM),
        scale=_config_scale(part, attention, kind),
        divisor=_last_number(layer) + 1.0 if part.get("scale_attn_by_inverse_layer_idx") else 1.0,
        rotary=_config_rotary(part, kind, alibi),
        order={"chatglm": "blocks", "gpt_bigcode": "blocks" if multi_query in (None, True) else "groups"}.get(
            str(kind)
        ),
        notes=tuple(notes),
    )


def facts_from_module(model: nn.Module, owner: str, layer: str) -> Facts:
    """Read the module ``owner`` that holds a layer's projections, then the nearest configuration above it."""
    module = model.get_submodule(owner)
    own = {name: getattr(module, name, None) for name in (*_HEADS, *_KV_HEADS, *_HEAD_DIM, *_SCALE)}
    config = next((c for c in map(_config_of, _ancestors(model, owner)) if c is not None), None)
    known = Facts() if config is None else facts_from_config(config, layer)
    scale = next((own[n] for n in _SCALE if isinstance(own[n], float)), None)
    rotary = known.rotary
    if rotary is None and any("rotary" in type(child).__name__.lower() for child in module.modules()):
        rotary = True
    return Facts(
        num_heads=_whole(own, _HEADS) or known.num_heads,
        num_key_value_heads=_whole(own, _KV_HEADS) or known.num_key_value_heads,
        head_dim=_whole(own, _HEAD_DIM) or known.head_dim,
        scale=known.scale if scale is None else scale,
        # an attribute is the scale in force, whatever it is made of
        divisor=known.divisor if scale is None else 1.0,
        rotary=rotary,
        order=known.order,
        notes=known.notes,
    )


def _part(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The configuration of the tower that the layer belongs to."""
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping) and _has_heads(value):
            tower = name.removesuffix("_config")
            if re.search(rf"(^|[._]){re.escape(tower)}([._]|$)", layer):
                return value
    if _has_heads(config):
        return config
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _has_heads(config: Mapping[str, Any]) -> bool:
    return _whole(config, _HEADS) is not None


def _whole(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _config_scale(part: Mapping[str, Any], attention: Mapping[str, Any], kind: Any) -> float | None:
    for name, power in (("attention_multiplier", 1.0), ("query_pre_attn_scalar", -0.5)):
        if isinstance(part.get(name), (int, float)):
            return float(part[name]) ** power
    if isinstance(attention.get("softmax_scale"), (int, float)):
        return float(attention["softmax_scale"])
    return 1.0 if kind in _UNSCALED or part.get("scale_attn_weights") is False else None


def _config_rotary(part: Mapping[str, Any], kind: Any, alibi: bool) -> bool | None:
    if alibi:
        return False
    if any(part.get(name) for name in _ROTARY) or part.get("position_embedding_type") in ("rope", "rotary"):
        return True
    return False if _NOT_ROTARY.fullmatch(str(kind)) else None


def _rope_types(part: Mapping[str, Any]) -> set[str]:
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        value = part.get(name)
        if isinstance(value, Mapping):
            for entry in (value, *(v for v in value.values() if isinstance(v, Mapping))):
                found.add(str(entry.get("rope_type", entry.get("type"))))
    return found


def _last_number(layer: str) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", layer)
    return int(numbers[-1]) if numbers else 0


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    while name:
        yield model.get_submodule(name)
        name = name.rpartition(".")[0]
    yield model


def _config_of(module: nn.Module) -> Mapping[str, Any] | None:
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        return config
    to_dict: Callable[[], Any] | None = getattr(config, "to_dict", None)
    value = to_dict() if callable(to_dict) else None
    if not isinstance(value, Mapping):
        return None
    # attribute aliases, such as num_attention_heads for n_head, are not among the keys
    aliases = {name: getattr(config, name, None) for name in (*_HEADS, *_KV_HEADS)}
    return {**{k: v for k, v in aliases.items() if v is not None}, **value}
