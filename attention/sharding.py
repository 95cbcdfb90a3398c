"""Tensors that are sharded over processes (DTensor): gathered for a conversion, and laid out again after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["is_sharded", "placed_like", "whole"]


def is_sharded(t: Any) -> bool:
    """Whether ``t`` is a ``torch.distributed.tensor.DTensor``, without importing it.

    Example:
        >>> import torch
        >>> is_sharded(torch.ones(2))
        False
    """
    return hasattr(t, "device_mesh") and hasattr(t, "placements")


def whole(t: Tensor) -> Tensor:
    """The full tensor on every process; a collective call where ``t`` is sharded."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def placed_like(t: Tensor, target: Tensor) -> Tensor:
    """``t``, which is the same on every process, laid out as ``target`` is."""
    if not is_sharded(target):
        return t
    from torch.distributed.tensor import distribute_tensor

    # every process has the values, so nothing is sent
    mesh: Any = target.device_mesh  # type: ignore[attr-defined]
    return distribute_tensor(t, mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]
