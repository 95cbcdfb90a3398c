"""The weights of one attention layer, a matrix a head, cut out of whatever a model or a state dict stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._arrays import as_tensor
from .layouts import AttentionLayout, Match, bias_key
from .model_config import QK_NORM, Facts


class LayoutError(ValueError):
    """A layer that looks like attention but is stored in a way this package does not read."""


@dataclass(frozen=True)
class HeadWeights:
    """One layer in float64 on the CPU. H heads; G key and value heads, each shared by H/G consecutive heads.

    Frames are tall: ``query_frames`` (H, d, d_h), ``key_frames`` (G, kdim, d_h), ``value_frames`` (G, vdim, d_v) and
    ``output_frames`` (H, d_out, d_v), the transpose of W_O, by which a head's output y is added as y W_O. Biases are
    (H, d_h), (G, d_h), (G, d_v). ``logit_scale`` is (H,), or (H, d_h) with a gain per direction.
    """

    name: str
    query_frames: Tensor
    key_frames: Tensor
    value_frames: Tensor | None
    output_frames: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    logit_scale: Tensor
    rotary: bool | None
    notes: tuple[str, ...]


def copy64(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU, free of subclass and graph."""
    tensor = tensor.detach().as_subclass(Tensor)
    if tensor.is_meta:
        raise ValueError("the weights are on the meta device and have no values: load them first")
    return tensor.to("cpu", torch.float64, copy=True)


def to_heads(rows: Tensor, heads: int, name: str) -> Tensor:
    """(heads·d_h, d_in), or stored frames (k, d_in, d_out/k), as (heads, d_in, d_h) in float64."""
    if rows.ndim == 3:
        rows = rows.mT.reshape(-1, rows.shape[-2])
    if heads < 1 or rows.shape[0] % heads or not rows.numel():
        raise ValueError(f"layer {name!r}: num_heads = {heads} does not divide the width {rows.shape[0]}")
    return copy64(rows.unflatten(0, (heads, -1)).mT)


_NO_HEADS = (
    "nothing says how many heads layer {!r} has: give num_heads (--heads on the command line), or a config with "
    "num_attention_heads"
)


class LayerReader:
    """Cuts the layers that a layout describes out of a state dict."""

    def __init__(
        self,
        state: Mapping[str, Any],
        num_heads: int | Mapping[str, int] | None,
        num_key_value_heads: int | Mapping[str, int] | None,
        head_dim: int | None,
    ) -> None:
        self.state = state
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim

    def read(self, match: Match, facts: Facts) -> HeadWeights:
        """One layer.

        Raises:
            LayoutError: it is stored in a way that the layout does not describe.
            ValueError: the number of heads is not known, or does not fit.
        """
        layout, prefix, name = match.layout, match.prefix, match.name
        scale = self._stored_scale(prefix)
        heads = self._heads(match, facts, scale)
        if layout.fused is not None:
            parts, biases = self._fused(match, facts, heads)
        else:
            parts, biases = self._separate(match)
        if heads is None:
            size = self.head_dim or facts.head_dim
            width = _width(parts[0])
            if size is None or width % size:
                raise ValueError(_NO_HEADS.format(name))
            heads = width // size
        query = to_heads(parts[0], heads, name)
        if self.head_dim not in (None, query.shape[-1]):
            raise ValueError(
                f"layer {name!r}: head_dim = {self.head_dim}, but {heads} heads of width {_width(parts[0])} have "
                f"{query.shape[-1]}"
            )
        groups = self._groups(match, _width(parts[1]), heads, query.shape[-1])
        value = None if parts[2] is None else to_heads(parts[2], groups, name)
        output = None if value is None else self._output(match, heads, value.shape[-1])
        notes = (*facts.notes, *layout.notes)
        if any(f"{prefix}{n}.weight" in self.state for n in ("q_norm", "k_norm", "q_layernorm", "query_norm")):
            notes = (*notes, QK_NORM)
        return HeadWeights(
            name=name,
            query_frames=query,
            key_frames=to_heads(parts[1], groups, name),
            value_frames=value,
            output_frames=output,
            query_bias=_bias(biases[0], heads),
            key_bias=_bias(biases[1], groups),
            value_bias=_bias(biases[2], groups),
            logit_scale=_scale(layout, facts, scale, heads, query.shape[-1]),
            # a layer that stores its own scale is one of this package's, without positions
            rotary=False if scale is not None else facts.rotary if layout.rotary is None else layout.rotary,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _tensor(self, key: str) -> Tensor:
        value = self.state[key]
        raw = value.dtype if isinstance(value, Tensor) else None
        stem = key.removesuffix("weight")
        packed = [s for s in ("weight_scale", "weight_scale_inv", "SCB", "weight.absmax") if f"{stem}{s}" in self.state]
        if packed or (raw is not None and not raw.is_floating_point):
            raise LayoutError(f"{key!r} is quantized ({packed[0] if packed else raw}): load it dequantized")
        tensor = as_tensor(value, key)
        if tensor.ndim not in (2, 3):
            raise LayoutError(f"{key!r} has shape {tuple(tensor.shape)}, not that of a matrix")
        return tensor

    def _vector(self, key: str) -> Tensor | None:
        value = self.state.get(key)
        return None if value is None else copy64(as_tensor(value, key))

    def _stored_scale(self, prefix: str) -> Tensor | None:
        value = self.state.get(f"{prefix}logit_scale")
        if value is None:
            return None
        scale = copy64(as_tensor(value, f"{prefix}logit_scale"))
        if scale.ndim not in (1, 2):
            raise LayoutError(f"its logit_scale has shape {tuple(scale.shape)}: a scale a head is (heads,)")
        return scale

    def _heads(self, match: Match, facts: Facts, scale: Tensor | None) -> int | None:
        if scale is not None:
            return scale.shape[0]
        given = self.num_heads.get(match.name) if isinstance(self.num_heads, Mapping) else self.num_heads
        return facts.num_heads if given is None else given

    def _groups(self, match: Match, key_width: int, heads: int, head_dim: int) -> int:
        groups, rest = divmod(key_width, head_dim)
        if rest or groups < 1 or heads % groups:
            raise ValueError(
                f"layer {match.name!r}: {heads} query heads of dimension {head_dim} do not share keys of width "
                f"{key_width} evenly: num_heads is wrong, or this is no grouped-query attention"
            )
        given = self.num_key_value_heads
        given = given.get(match.name) if isinstance(given, Mapping) else given
        if given is not None and given != groups:
            raise ValueError(
                f"layer {match.name!r}: num_key_value_heads = {given}, but with num_heads = {heads} the key width "
                f"{key_width} makes {groups}"
            )
        return groups

    def _separate(self, match: Match) -> tuple[list[Any], Sequence[Tensor | None]]:
        layout, keys = match.layout, []
        for part in (layout.query, layout.key, layout.value):
            keys.append(None if part is None else f"{match.prefix}{part}")
        for other in keys[1:2]:
            if other not in self.state:
                raise LayoutError(f"the state has {keys[0]!r} but no {other!r}")
        parts = [None if k is None or k not in self.state else self._tensor(k) for k in keys]
        if layout.transposed:
            parts = [None if p is None else p.mT for p in parts]
        biases = [None if k is None else self._vector(bias_key(k)) for k in keys]
        stacked = self._vector(f"{match.prefix}in_proj_bias")
        if stacked is not None and all(b is None for b in biases):
            biases = list(stacked.chunk(3))
        return parts, biases

    def _fused(self, match: Match, facts: Facts, heads: int | None) -> tuple[list[Any], Sequence[Tensor | None]]:
        key = f"{match.prefix}{match.layout.fused}"
        if f"{match.prefix}q_attn.weight" in self.state:
            # GPT-2's cross-attention: with half as many key heads the widths would fit all the same
            raise LayoutError(f"{key!r} is keys and values only, its queries are in q_attn.weight")
        weight = self._tensor(key)
        if heads is None:
            raise ValueError(_NO_HEADS.format(match.name))
        size = self.head_dim or facts.head_dim
        transposed, layout = match.layout.transposed, match.layout
        options = [weight.mT] if transposed else [weight] if transposed is False else [weight, weight.mT]
        fitting = [(option, cut) for option in options if (cut := _cut(option, heads, size)) is not None]
        if not fitting:
            if size is None and min(weight.shape) % heads:
                raise ValueError(
                    f"layer {match.name!r}: num_heads = {heads} does not divide the width {min(weight.shape)}"
                )
            raise LayoutError(
                f"{key!r} of shape {tuple(weight.shape)} is not the queries, keys and values of {heads} heads"
            )
        rows, (groups, dim) = fitting[0]
        order = (
            facts.order or layout.order or ("groups" if match.layout.fused == "query_key_value.weight" else "blocks")
        )
        bias = self._vector(bias_key(key))
        split = _blocks if order == "blocks" else _groups
        biases = [None] * 3 if bias is None else [b.flatten() for b in split(bias[:, None], heads, groups, dim)]
        return list(split(rows, heads, groups, dim)), biases

    def _output(self, match: Match, heads: int, value_dim: int) -> Tensor | None:
        layout = match.layout
        suffixes = (layout.output,) if isinstance(layout.output, str) else layout.output
        key = next((k for s in suffixes if (k := f"{match.prefix}{s}") in self.state), None)
        if key is None:
            return None
        weight = self._tensor(key)
        # frames are stored tall; a square matrix does not say which way it lies: as the layer's other weights do
        tall = weight.ndim == 3 or self._is_transposed(match)
        frames = to_heads(weight if tall else weight.mT, heads, match.name)
        if frames.shape[-1] != value_dim:
            raise LayoutError(f"{key!r} takes {frames.shape[-1]} numbers a head where values have {value_dim}")
        return frames

    def _is_transposed(self, match: Match) -> bool:
        layout = match.layout
        if layout.transposed is not None or layout.fused is None:
            return bool(layout.transposed)
        shape = self._tensor(f"{match.prefix}{layout.fused}").shape
        return shape[-1] > shape[-2]


def _width(part: Tensor) -> int:
    """Numbers that a projection puts out."""
    return part.shape[0] if part.ndim == 2 else part.shape[0] * part.shape[-1]


def _bias(bias: Tensor | None, heads: int) -> Tensor | None:
    return None if bias is None else bias.unflatten(0, (heads, -1))


def _cut(rows: Tensor, heads: int, head_dim: int | None) -> tuple[int, int] | None:
    """Key-value heads and head dimension that a fused (out, in) matrix has, if it can be one."""
    if rows.ndim != 2:
        return None
    dim, rest = (head_dim, 0) if head_dim else divmod(rows.shape[1], heads)
    if rest or dim < 1 or rows.shape[0] % dim:
        return None
    twice = rows.shape[0] // dim - heads
    groups = twice // 2
    return None if twice < 2 or twice % 2 or heads % groups else (groups, dim)


def _blocks(rows: Tensor, heads: int, groups: int, dim: int) -> tuple[Tensor, ...]:
    return rows.split([heads * dim, groups * dim, groups * dim])


def _groups(rows: Tensor, heads: int, groups: int, dim: int) -> tuple[Tensor, ...]:
    """GPT-NeoX, BLOOM, Megatron and Falcon: for each key-value head its queries, its key, its value."""
    cut = rows.unflatten(0, (groups, heads // groups + 2, dim))
    return cut[:, :-2].flatten(0, 2), cut[:, -2].flatten(0, 1), cut[:, -1].flatten(0, 1)


def _scale(layout: AttentionLayout, facts: Facts, stored: Tensor | None, heads: int, dim: int) -> Tensor:
    if stored is not None:
        return stored
    value = layout.scale if layout.scale is not None else facts.scale
    value = (1 / math.sqrt(dim) if value is None else value) / facts.divisor
    return torch.full((heads,), value, dtype=torch.float64)
