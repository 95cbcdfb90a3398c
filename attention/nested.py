"""Nested tensors, whose sequences have lengths of their own, as padded ones and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["pad_nested", "unpad_nested"]


def pad_nested(nested: Any) -> tuple[Tensor, Tensor]:
    """The sequences padded with zeros, (batch, longest, width), and where the padding is, (batch, longest).

    Raises:
        ValueError: ``nested`` is not a batch of (length, width), or is jagged with holes.

    Example:
        >>> nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
        >>> pad_nested(nested)[1]
        tensor([[False, False],
                [False,  True]])
    """
    if nested.ndim != 3 or (nested.layout == torch.jagged and nested.lengths() is not None):
        raise ValueError("a nested query, key or value must be a batch of (length, width) stored without holes")
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    lengths = torch.tensor([t.shape[0] for t in nested.unbind()], device=nested.device)
    return padded, torch.arange(padded.shape[1], device=nested.device) >= lengths[:, None]


def unpad_nested(padded: Tensor, padding: Tensor, like: Any) -> Tensor:
    """``padded`` without its padding, nested like ``like``: sums of the two are possible.

    Example:
        >>> nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
        >>> bool((nested - unpad_nested(*pad_nested(nested), nested)).values().any())
        False
    """
    if like.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(padded[~padding], like.offsets())
    rows = [row[~empty] for row, empty in zip(padded, padding, strict=True)]
    return torch.nested.as_nested_tensor(rows)
