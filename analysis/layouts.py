"""Where the projections of an attention layer are among the keys of a state dict."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from .model_config import ADDITIVE

Suffix = str | tuple[str, ...]


@dataclass(frozen=True)
class AttentionLayout:
    """How a kind of attention layer stores its projections, for :func:`attention_geometry` and :func:`drift`.

    A layer is recognised by a key that ends, after a dot or at its start, in ``query`` or in ``fused``; what comes
    before is the layer's name. The other keys are that name followed by their suffix; a tuple is tried in order.
    Biases are found by "bias" in the place of the last "weight".

    Args:
        query, key, value: keys of separate projections; ``value`` may be missing in a model.
        fused: key of one matrix of all three, in the place of the three. ``order`` says how its outputs lie: "blocks",
            all queries, all keys, all values; "groups", for each key-value head its queries, its key, its value.
        output: key of the output projection, without which there is no OV circuit.
        transposed: weights are (in, out), as in GPT-2's ``Conv1D``, not (out, in), as in ``nn.Linear``. None: as the
            shape says for a fused matrix, (out, in) for separate ones.
        scale: what multiplies the logits; None for 1/√d_h, or what the model's configuration says.
        rotary: whether positions rotate queries and keys; None for what the model's configuration says.
        notes: what else is between projections and softmax, such as "additive position bias".

    Raises:
        ValueError: neither or both of ``fused`` and of ``query`` with ``key``, or another ``order``.

    Example:
        >>> import torch
        >>> from geodescent.analysis import AttentionLayout, attention_geometry
        >>> mine = AttentionLayout(query="to_q.weight", key="to_k.weight", value="to_v.weight", output="to_out.weight")
        >>> state = {f"mixer.to_{part}.weight": torch.eye(8) for part in ("q", "k", "v", "out")}
        >>> attention_geometry(state, num_heads=2, layout=mine)["mixer"].head_dim
        4
    """

    query: str | None = None
    key: str | None = None
    value: str | None = None
    fused: str | None = None
    output: Suffix = ()
    order: str | None = None
    transposed: bool | None = None
    scale: float | None = None
    rotary: bool | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.fused is None) == (self.query is None) or (self.query is None) != (self.key is None):
            raise ValueError("a layout has either fused, or query and key (and value)")
        if self.order not in (None, "blocks", "groups"):
            raise ValueError(f'order must be "blocks" or "groups", found {self.order!r}')

    @property
    def anchor(self) -> str:
        """The suffix by which a layer is recognised."""
        return self.fused or self.query or ""


def _separate(query: str, key: str, value: str, output: Suffix, **more: object) -> AttentionLayout:
    return AttentionLayout(query=query, key=key, value=value, output=output, **more)  # type: ignore[arg-type]


_ATTENTION_OUT = ("output.dense.weight",)

#: the layouts that are tried, in this order; a layer belongs to the first that fits
LAYOUTS: dict[str, AttentionLayout] = {
    # nn.MultiheadAttention
    "torch": AttentionLayout(
        fused="in_proj_weight", output="out_proj.weight", order="blocks", transposed=False, rotary=False
    ),
    "torch-separate": _separate("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight", rotary=False),
    # StiefelAttention, Llama, Mistral, Qwen, Gemma, BART, OPT, CLIP, Whisper, Phi, GPT-J, ViT in memory
    "proj": _separate(
        "q_proj.weight", "k_proj.weight", "v_proj.weight", ("o_proj.weight", "out_proj.weight", "dense.weight")
    ),
    # Phi-3
    "qkv_proj": AttentionLayout(fused="qkv_proj.weight", output=("o_proj.weight", "out_proj.weight"), order="blocks"),
    # GPT-2 (Conv1D), nanoGPT (Linear), GPT-BigCode
    "gpt2": AttentionLayout(fused="c_attn.weight", output="c_proj.weight"),
    # BERT and its family; ViT's files
    "bert": _separate("self.query.weight", "self.key.weight", "self.value.weight", _ATTENTION_OUT),
    "vit": _separate("attention.query.weight", "attention.key.weight", "attention.value.weight", _ATTENTION_OUT),
    "distilbert": _separate("q_lin.weight", "k_lin.weight", "v_lin.weight", "out_lin.weight", rotary=False),
    "t5": _separate(*(f"SelfAttention.{x}.weight" for x in "qkvo"), scale=1.0, rotary=False, notes=(ADDITIVE,)),
    "t5-cross": _separate(*(f"EncDecAttention.{x}.weight" for x in "qkvo"), scale=1.0, rotary=False),
    # GPT-NeoX, Falcon, BLOOM: heads interleaved
    "query_key_value": AttentionLayout(fused="query_key_value.weight", output="dense.weight"),
    # MPT, ModernBERT
    "wqkv": AttentionLayout(fused="Wqkv.weight", output=("out_proj.weight", "Wo.weight"), order="blocks"),
    # timm
    "qkv": AttentionLayout(fused="qkv.weight", output="proj.weight", order="blocks"),
    # Llama as Meta stores it
    "llama-meta": _separate("wq.weight", "wk.weight", "wv.weight", "wo.weight"),
}


@dataclass(frozen=True)
class Match:
    """A layer that was recognised: its name, the prefix of its keys, and the layout it has."""

    name: str
    prefix: str
    layout: AttentionLayout

    @property
    def owner(self) -> str:
        """Name of the module whose children the projections are."""
        parts = f"{self.prefix}{self.layout.anchor}".split(".")
        return ".".join(parts[: -1 if self.layout.anchor.endswith("_weight") else -2])


def layouts_from(layout: AttentionLayout | str | Iterable[AttentionLayout | str] | None) -> tuple[AttentionLayout, ...]:
    """The layouts to try.

    Raises:
        ValueError: a name that is none of :data:`LAYOUTS`.
    """
    if layout is None:
        return tuple(LAYOUTS.values())
    chosen = [layout] if isinstance(layout, (AttentionLayout, str)) else list(layout)
    found = []
    for item in chosen:
        if isinstance(item, str) and item not in LAYOUTS:
            raise ValueError(f"layout must be an AttentionLayout or one of {', '.join(LAYOUTS)}, found {item!r}")
        found.append(LAYOUTS[item] if isinstance(item, str) else item)
    return tuple(found)


def recognise(keys: Iterable[str], layouts: Collection[AttentionLayout]) -> Iterator[Match]:
    """The attention layers among the keys, in the order of the keys."""
    for key in keys:
        for layout in layouts:
            if key == layout.anchor or key.endswith(f".{layout.anchor}"):
                prefix = key.removesuffix(layout.anchor)
                yield Match(prefix.removesuffix(".") or "(root)", prefix, layout)
                break


def unclaimed(keys: Iterable[str], matches: Collection[Match], ndim: Callable[[str], int]) -> dict[str, list[str]]:
    """Matrices that are by their name part of attention but of no layer that was recognised, by the layer's name."""
    prefixes = tuple(match.prefix for match in matches)
    found: dict[str, list[str]] = {}
    for key in keys:
        if prefixes and key.startswith(prefixes):
            continue
        parts = key.split(".")
        place = next((i for i, part in enumerate(parts[:-1]) if _ATTENTION.search(part)), None)
        if place is not None and ndim(key) > 1:
            found.setdefault(".".join(parts[: place + 1]), []).append(".".join(parts[place + 1 :]))
    return found


_ATTENTION = re.compile(r"(^|_)(attn|attention|self_attn|mha)$|Attention$")


def bias_key(weight_key: str) -> str:
    """The key of the bias that goes with a weight."""
    head, _, tail = weight_key.rpartition("weight")
    return f"{head}bias{tail}"
