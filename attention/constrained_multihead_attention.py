"""``nn.MultiheadAttention`` with constrained queries and keys and everything else as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .constraint import Constraint, RowWeights
from .fused_state import FusedState

__all__ = ["IN_PROJECTION", "ConstrainedMultiheadAttention", "multihead_parts"]

#: the parameters of an ``nn.MultiheadAttention`` that are exchanged, in the order of its state dict
IN_PROJECTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


class ConstrainedMultiheadAttention(FusedState, nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` whose query and key matrices are made of frames.

    :func:`~geodescent.attention.constrain` turns layers into it in place, so that every reference to the layer stays
    good, and :func:`~geodescent.attention.release` turns them back. ``in_proj_weight``, ``in_proj_bias`` and their
    kind are the effective matrices, computed whenever they are read: code that reads them, as the inference path of
    ``nn.TransformerEncoderLayer`` does, computes what :meth:`forward` computes.

    Example:
        >>> from geodescent.attention.constrain import constrain
        >>> layer = nn.MultiheadAttention(8, 2)
        >>> report = constrain(layer)
        >>> type(layer).__name__, layer.query.frames.shape, list(layer.state_dict())[:2]
        ('ConstrainedMultiheadAttention', torch.Size([2, 8, 4]), ['in_proj_weight', 'in_proj_bias'])
    """

    @classmethod
    def adopt(cls, layer: nn.MultiheadAttention, constraint: Constraint) -> bool:
        """Turn ``layer`` into an object of this class; whether attention weights are unchanged."""
        parts = multihead_parts(layer)
        for name in IN_PROJECTION:
            del layer._parameters[name]
        layer.__class__ = cls
        assert isinstance(layer, cls)
        return layer._hold(*parts, constraint)

    @torch.no_grad()
    def release(self) -> None:
        """Turn this object back into an ``nn.MultiheadAttention`` with the effective weights."""
        entries: dict[str, Any] = dict.fromkeys(IN_PROJECTION)
        grad = self.query.frames.requires_grad or self.value_weight.requires_grad
        for name, tensor in self.ordinary().items():
            entries[name] = nn.Parameter(tensor.detach().clone(), grad)
        del self.query, self.key, self.value_weight, self.value_bias, self.constraint
        self.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        for name, parameter in entries.items():
            self.register_parameter(name, parameter)

    # --- what nn.MultiheadAttention keeps as parameters -----------------------------------------------------------

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return self.fused_weight() if self._qkv_same_embed_dim else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        return self.fused_bias()

    @property
    def q_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.query.weight

    @property
    def k_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.key.weight

    @property
    def v_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return None if self._qkv_same_embed_dim else self.value_weight

    def ordinary(self) -> dict[str, Tensor]:
        return {name: tensor for name in IN_PROJECTION if (tensor := getattr(self, name)) is not None}

    def split(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {
            role: entries[f"{role[0]}_proj_weight"]
            for role in ("query", "key", "value")
            if f"{role[0]}_proj_weight" in entries
        }
        for name, suffix in (("in_proj_weight", ""), ("in_proj_bias", "_bias")):
            if name in entries:
                found |= self.thirds(entries[name], suffix)
        return found

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``."""
        if query.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        # nn.MultiheadAttention.forward reads each matrix several times; here it is computed once
        swap = self.batch_first and query.dim() == 3
        if swap:
            # one tensor in several roles stays one: torch then projects it in one product
            turned = {id(t): t.transpose(0, 1) for t in (query, key, value)}
            query, key, value = (turned[id(t)] for t in (query, key, value))
        same = self._qkv_same_embed_dim
        out, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.fused_weight() if same else None,
            self.fused_bias(),
            None,
            None,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not same,
            q_proj_weight=None if same else self.query.weight,
            k_proj_weight=None if same else self.key.weight,
            v_proj_weight=None if same else self.value_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return out.transpose(0, 1) if swap else out, weights


def multihead_parts(layer: nn.MultiheadAttention) -> tuple[RowWeights, Tensor, Tensor | None]:
    """Query and key rows, value weight and value bias of an ``nn.MultiheadAttention``."""
    weights: tuple[Any, ...] = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    if layer._qkv_same_embed_dim:
        weights = layer.in_proj_weight.chunk(3)
    biases: tuple[Any, ...] = (None,) * 3
    if layer.in_proj_bias is not None:
        biases = layer.in_proj_bias.chunk(3)
    return RowWeights(weights[0], weights[1], biases[0], biases[1]), weights[2], biases[2]
