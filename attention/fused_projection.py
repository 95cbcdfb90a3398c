"""Fused query-key-value projections with constrained queries and keys, such as ``c_attn`` of GPT-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .constraint import Constraint, RowWeights
from .fused_state import FusedState

__all__ = ["FusedProjection", "fused_parts"]


class FusedProjection(FusedState):
    """One projection to queries, keys and values, in this order, with frames for the first two.

    :func:`~geodescent.attention.constrain` makes them. It stands for an ``nn.Linear``, or for Hugging Face's
    ``Conv1D``, whose weight is (in, out); ``weight``, ``bias`` and ``state_dict()`` are those of the layer it replaces.

    Args:
        original: the layer to replace; it is left as it is.
        constraint: how to constrain queries and keys.
        transposed: the original's weight is (in, out).

    Example:
        >>> from geodescent.manifolds import Stiefel
        >>> constraint = Constraint(Stiefel(), "head", "spectrum", rotary=False, head_dim=4, scaling=0.5)
        >>> layer = FusedProjection(nn.Linear(8, 24), constraint, transposed=False)
        >>> layer(torch.zeros(5, 8)).shape, list(layer.state_dict())
        (torch.Size([5, 24]), ['weight', 'bias'])
    """

    def __init__(self, original: nn.Module, constraint: Constraint, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.original_type = type(original)
        self.train(original.training)
        self.exact = self._hold(*fused_parts(original, transposed), constraint)

    @property
    def weight(self) -> Tensor:
        """The effective weight, oriented as in the layer that this one replaces."""
        rows = self.fused_weight()
        return rows.mT.contiguous() if self.transposed else rows

    @property
    def bias(self) -> Tensor | None:
        """The effective bias, (out,)."""
        return self.fused_bias()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return nn.functional.linear(x, self.fused_weight(), self.fused_bias())

    @torch.no_grad()
    def release(self) -> nn.Module:
        """A layer of the original's class with the effective weights."""
        weight, bias = self.weight, self.bias
        out_features, in_features = weight.T.shape if self.transposed else weight.shape
        make: Any = self.original_type
        with torch.device("meta"):  # spares the initialization, which would also move the global random state
            layer = make(out_features, in_features) if self.transposed else make(in_features, out_features)
        grad = self.query.frames.requires_grad or self.value_weight.requires_grad
        layer.weight = nn.Parameter(weight.detach().clone(), grad)
        layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), grad)
        return layer.train(self.training)

    def ordinary(self) -> dict[str, Tensor]:
        bias = self.bias
        return {"weight": self.weight} | ({} if bias is None else {"bias": bias})

    def split(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        if "weight" in entries:
            found |= self.thirds(entries["weight"].mT if self.transposed else entries["weight"])
        if "bias" in entries:
            found |= self.thirds(entries["bias"], "_bias")
        return found


def fused_parts(layer: nn.Module, transposed: bool) -> tuple[RowWeights, Tensor, Tensor | None]:
    """Query and key rows, value weight and value bias of a fused layer of equal thirds."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    # a part of a parameter has its requires_grad
    query, key, value = (weight.mT if transposed else weight).chunk(3)
    biases: tuple[Any, ...] = (None,) * 3
    if isinstance(bias, Tensor):
        biases = bias.chunk(3)
    return RowWeights(query, key, biases[0], biases[1]), value, biases[2]
