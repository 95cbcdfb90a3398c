"""Which attention modules are known, and where their query and key projections are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["ProjectionLayout"]


@dataclass(frozen=True)
class ProjectionLayout:
    """Where an attention class keeps its projections, for :func:`~geodescent.attention.constrain`.

    The module must compute its logits as a fixed scale times the inner products of the heads of what its projections
    put out, up to masks and additions that do not depend on queries and keys; a query or key norm, a soft cap, an
    attention sink or a learned relative position in between would not see the same basis, and cannot be described.

    Args:
        query, key: names of two submodules, each an ``nn.Linear``.
        fused: name of one submodule for queries, keys and values, in this order and of equal size, in the place of the
            two: an ``nn.Linear``, or with ``transposed`` a layer with an (in, out) ``weight`` such as ``Conv1D``.
        head_dim: attribute of the attention module with the width of a head.
        scaling: attribute with the factor of the logits; where it is missing, 1/√d_h, and no ``logit_scale`` that is
            a number.
        rotary: rotary embeddings turn queries and keys.
        unless: (attribute, value, why) of modules of the class that it does not describe, such as
            ("is_cross_attention", True, "keys and values are fused, queries apart").

    Raises:
        ValueError: neither or both of ``fused`` and of ``query`` with ``key``.

    Example:
        >>> ProjectionLayout(query="to_q", key="to_k").head_dim
        'head_dim'
    """

    query: str | None = None
    key: str | None = None
    fused: str | None = None
    transposed: bool = False
    head_dim: str = "head_dim"
    scaling: str = "scaling"
    rotary: bool = False
    unless: tuple[tuple[str, Any, str], ...] = ()

    def __post_init__(self) -> None:
        if (self.fused is None) == (self.query is None) or (self.query is None) != (self.key is None):
            raise ValueError("a layout has either fused, or query and key")

    @property
    def names(self) -> tuple[str, ...]:
        """The submodules that are exchanged."""
        return tuple(n for n in (self.query, self.key, self.fused) if n is not None)


_BERT = ProjectionLayout(
    query="query",
    key="key",
    head_dim="attention_head_size",
    # transformers 4: learned distances are multiplied with queries and keys, in the basis these had
    unless=tuple(
        ("position_embedding_type", kind, "learned relative positions are tied to the basis of queries and keys")
        for kind in ("relative_key", "relative_key_query")
    ),
)
_PROJ = ProjectionLayout(query="q_proj", key="k_proj")
_ROTARY = ProjectionLayout(query="q_proj", key="k_proj", rotary=True)
_GPT2 = ProjectionLayout(
    fused="c_attn",
    transposed=True,
    unless=(("is_cross_attention", True, "cross-attention that fuses keys and values, with queries apart"),),
)

#: by the class's full name: a class of the same name elsewhere may compute something else
_KNOWN: dict[str, ProjectionLayout] = {
    f"transformers.models.{module}.modeling_{module}.{name}": layout
    for module, name, layout in (
        ("gpt2", "GPT2Attention", _GPT2),
        ("bert", "BertSelfAttention", _BERT),
        ("bert", "BertCrossAttention", _BERT),
        ("roberta", "RobertaSelfAttention", _BERT),
        ("roberta", "RobertaCrossAttention", _BERT),
        ("electra", "ElectraSelfAttention", _BERT),
        ("vit", "ViTAttention", _PROJ),
        ("vit", "ViTSelfAttention", _BERT),  # transformers 4
        ("deit", "DeiTAttention", _PROJ),
        ("llama", "LlamaAttention", _ROTARY),
        ("mistral", "MistralAttention", _ROTARY),
        ("qwen2", "Qwen2Attention", _ROTARY),
    )
}


def layout_of(module: nn.Module, layouts: Mapping[type, ProjectionLayout]) -> ProjectionLayout | None:
    """The layout of an attention module: the caller's for its class or a class above, or a known one."""
    for cls in type(module).__mro__:
        if cls in layouts:
            return layouts[cls]
    return _KNOWN.get(f"{type(module).__module__}.{type(module).__qualname__}")


_PROJECTION = re.compile(
    r"(q|k|query|key|qkv|to_q|to_k|to_qkv|q_lin|k_lin|wq|wk|Wqkv|c_attn|q_attn|query_key_value|in_proj)(_proj)?(_weight)?"
)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module has children or parameters of its own that are named like query or key projections."""
    names = [name for name, _ in module.named_children()]
    names += [name for name, p in module.named_parameters(recurse=False) if p.ndim > 1]
    return any(_PROJECTION.fullmatch(name) for name in names)
