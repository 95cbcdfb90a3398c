"""The small transformers of the studies. Every arm runs the same one: only `attention` differs between arms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import StiefelAttention

__all__ = ["CharTransformer", "ModularTransformer", "PatchTransformer"]


class ModularTransformer(nn.Module):
    """One layer, no normalization, learned positions: tokens `a b =` of shape (N, 3) to p logits, read at "=".

    Only the last position's query is computed, because only its output is read.

    Args:
        p: number of elements; the vocabulary is 0 … p − 1 and "=".
        attention: further arguments of `StiefelAttention`, such as `constrain` and `logit_scale`.
    """

    def __init__(self, p: int, width: int = 128, heads: int = 4, attention: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(p + 1, width) / width**0.5)
        self.positions = nn.Parameter(torch.randn(3, width) / width**0.5)
        self.attention = StiefelAttention(width, heads, bias=False, **(attention or {}))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.unembedding = nn.Linear(width, p, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.embedding) + self.positions
        last = x[:, -1:]
        last = last + self.attention(last, x, x)[0]
        last = last + self.mlp(last)
        return self.unembedding(last[:, 0])


class PatchTransformer(nn.Module):
    """A small vision transformer, pre-LayerNorm, mean pooling: images of shape (N, 3, side, side) to class logits."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        patch: int = 4,
        side: int = 32,
        classes: int = 10,
        attention: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch must divide the image side {side}, found {patch}")
        self.patch = patch
        self.embedding = nn.Linear(3 * patch * patch, width)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width, heads, attention or {}) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embedding(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class CharTransformer(nn.Module):
    """A small causal transformer, pre-LayerNorm, learned positions: indices (N, L) to logits (N, vocabulary, L).

    Args:
        context: the longest L.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        attention: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(vocabulary, width))
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(_Block(width, heads, attention or {}, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, indices: Tensor) -> Tensor:
        x = nn.functional.embedding(indices, self.embedding) + self.positions[: indices.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: Mapping[str, Any], causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.attention = StiefelAttention(width, heads, **attention)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, is_causal=self.causal)[0]
        return x + self.mlp(self.norm2(x))
