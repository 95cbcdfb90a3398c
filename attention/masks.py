"""Attention masks in the one form that every code path takes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["additive_mask"]


def additive_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Merge masks into one that is added to the logits, broadcastable to (batch, heads, L, S), or None for no mask.

    Args:
        q: (batch, heads, L, d_h); k: (batch, heads, S, d_h).
        attn_mask: (L, S) or (batch·heads, L, S). True forbids attention, or a float is added.
        key_padding_mask: (batch, S), likewise.
        causal: also forbid keys after the query's position.

    Raises:
        ValueError: a mask has another shape; TypeError: it is neither boolean nor floating point.
    """
    batch, heads, length = q.shape[:3]
    keys = k.shape[2]
    total: Tensor | None = None
    if attn_mask is not None:
        if attn_mask.shape == (length, keys):
            total = _to_additive(attn_mask, "attn_mask", q.dtype)
        elif attn_mask.shape == (batch * heads, length, keys):
            total = _to_additive(attn_mask, "attn_mask", q.dtype).unflatten(0, (batch, heads))
        else:
            raise ValueError(
                f"attn_mask must be of shape {(length, keys)} or {(batch * heads, length, keys)}, found "
                f"{tuple(attn_mask.shape)}"
            )
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, keys):
            raise ValueError(
                f"key_padding_mask must be of shape {(batch, keys)}, found {tuple(key_padding_mask.shape)}"
            )
        padding = _to_additive(key_padding_mask, "key_padding_mask", q.dtype)[:, None, None, :]
        total = padding if total is None else total + padding
    if causal:
        ahead = torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(1)
        future = _to_additive(ahead, "is_causal", q.dtype)
        total = future if total is None else total + future
    return total


def _to_additive(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean or floating point, found {mask.dtype}")
    return mask.to(dtype)
