"""A small GPT whose query and key projections are frames, or are kept orthonormal by somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import StiefelAttention

__all__ = ["GPT", "GPTShape"]


@dataclass(frozen=True)
class GPTShape:
    """Sizes of the model and of its batch; by default those of a character-level GPT of 10.7 million parameters.

    Example:
        >>> GPTShape().width // GPTShape().heads
        64
    """

    layers: int = 6
    width: int = 384
    heads: int = 6
    batch: int = 8
    length: int = 128
    vocabulary: int = 65


class GPT(nn.Module):
    """Pre-LayerNorm decoder: causal scaled-dot-product attention and a GELU perceptron a block, learned positions.

    Args:
        shape: its sizes.
        constrained: query and key projections are frames on Stiefel, one a head; otherwise they are ``nn.Linear``.

    Shapes:
        tokens (N, T) to logits (N, T, vocabulary), T at most ``shape.length``.

    Example:
        >>> model = GPT(GPTShape(layers=1, width=8, heads=2, length=4, vocabulary=5), constrained=True)
        >>> model(torch.zeros(3, 4, dtype=torch.long)).shape
        torch.Size([3, 4, 5])
    """

    def __init__(self, shape: GPTShape, constrained: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.length, shape.width))
        self.blocks = nn.ModuleList(_Block(shape, constrained) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, over (N, T + 1) tokens."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def frame_projections(self) -> Iterator[nn.Module]:
        """The query and key projections, whose ``weight`` is (heads, width, head width) if the model is constrained."""
        for block in self.blocks:
            assert isinstance(block, _Block)
            yield block.attention.q_proj
            yield block.attention.k_proj


class _Block(nn.Module):
    def __init__(self, shape: GPTShape, constrained: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = StiefelAttention(shape.width, shape.heads, constrain=("q", "k") if constrained else ())
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, is_causal=True)[0]
        return x + self.mlp(self.norm2(x))
