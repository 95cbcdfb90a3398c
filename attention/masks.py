"""Attention masks in the one form that every code path takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["merge_masks"]


def merge_masks(
    logits: tuple[int, int, int, int],
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    causal: bool = False,
    extra_keys: int = 0,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Merge masks into one, broadcastable to the logits, or None for no mask.

    Args:
        logits: their shape (batch, heads, L, S), S without the extra keys.
        attn_mask: (L, S) or (batch·heads, L, S). True forbids attention, or a float is added to the logits.
        key_padding_mask: (batch, S), likewise.
        causal: also forbid keys after the query's position.
        extra_keys: how many keys that no mask forbids come after the S.
        dtype, device: of the logits.

    Returns:
        A boolean mask, True where attention is forbidden, if all masks given are boolean: an eighth of the memory of
        a float one. Otherwise a mask of ``dtype`` to add.

    Raises:
        ValueError: a mask has another shape; TypeError: it is neither boolean nor floating point.

    Example:
        >>> padding = torch.tensor([[False, False, True]])
        >>> merge_masks((1, 4, 3, 3), None, padding, causal=True, dtype=torch.float32, device="cpu")[0, 0].int()
        tensor([[0, 1, 1],
                [0, 0, 1],
                [0, 0, 1]], dtype=torch.int32)
    """
    batch, heads, length, keys = logits
    masks: list[Tensor] = []
    if attn_mask is not None:
        _check_type(attn_mask, "attn_mask")
        if attn_mask.shape == (length, keys):
            masks.append(attn_mask)
        elif attn_mask.shape == (batch * heads, length, keys):
            masks.append(attn_mask.unflatten(0, (batch, heads)))
        else:
            raise ValueError(
                f"attn_mask must be of shape {(length, keys)} or {(batch * heads, length, keys)}, found "
                f"{tuple(attn_mask.shape)}"
            )
    if key_padding_mask is not None:
        _check_type(key_padding_mask, "key_padding_mask")
        if key_padding_mask.shape != (batch, keys):
            raise ValueError(
                f"key_padding_mask must be of shape {(batch, keys)}, found {tuple(key_padding_mask.shape)}"
            )
        masks.append(key_padding_mask[:, None, None, :])
    if causal:
        masks.append(torch.ones(length, keys, dtype=torch.bool, device=device).triu(1))
    if not masks:
        return None
    total = masks[0] if all(m.dtype == torch.bool for m in masks) else _to_additive(masks[0], dtype)
    for mask in masks[1:]:
        total = total | mask if total.dtype == torch.bool else total + _to_additive(mask, dtype)
    return F.pad(total, (0, extra_keys)) if extra_keys else total


def _check_type(mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean or floating point, found {mask.dtype}")


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
