"""Softmax attention on heads: by torch's fused kernels, or explicitly where the weights are asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attend"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(qkᵀ + mask) v, and the weights if they are needed. The logit scale is in ``q`` already.

    Without weights this is ``F.scaled_dot_product_attention``, so nothing of size L × S is made where torch has a
    fused kernel for the device, and no mask either where ``causal`` says it all.

    Args:
        q: (batch, heads, L, d_h); k, v: (batch, key heads, S, d_h), each key head shared by heads/key heads
            consecutive heads.
        mask: broadcastable to (batch, heads, L, S); True forbids, a float is added.
        causal: forbid keys after the query's position; only without ``mask``, as torch's kernels have it.
        dropout: the probability of dropping a weight.

    A row whose keys are all forbidden follows torch: NaN where the weights are computed, zero in the fused kernels.

    Example:
        >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 6, 8)
        >>> attend(q, k, k)[0].shape
        torch.Size([2, 4, 5, 8])
    """
    group = q.shape[1] // k.shape[1]
    if not need_weights:
        allowed = ~mask if mask is not None and mask.dtype == torch.bool else mask
        grouped = {"enable_gqa": True} if group > 1 else {}
        heads = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=1.0, **grouped
        )
        return heads, None
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT
    if mask is not None:
        logits = logits.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    weights = F.softmax(logits, -1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights
