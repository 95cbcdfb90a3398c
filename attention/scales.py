"""Where the layers start: the variance of projections, and the scale of the logits that orthonormal frames need."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["LogitScale", "is_finite_number", "matched_scale", "reset_linear", "set_logit_scale", "xavier_sigma"]

LogitScale = str | float


def xavier_sigma(features: int, embed_dim: int, *, fused: bool) -> float:
    """Standard deviation of the elements of an input projection in ``nn.MultiheadAttention``.

    It draws one Xavier-uniform (3d, d) matrix where keys and values have the width of queries, else one each.

    Example:
        >>> w = nn.MultiheadAttention(64, 4).in_proj_weight.detach()
        >>> abs(float(w.std()) / xavier_sigma(64, 64, fused=True) - 1) < 0.05
        True
    """
    return math.sqrt(2 / (features + (3 if fused else 1) * embed_dim))


@torch.no_grad()
def reset_linear(linear: nn.Linear, sigma: float | None) -> None:
    """Initialize a projection as ``nn.MultiheadAttention`` does: uniform of deviation ``sigma``, and a zero bias.

    Args:
        sigma: None for the output projection, which keeps ``nn.Linear``'s own draw.

    Example:
        >>> linear = nn.Linear(4, 4)
        >>> reset_linear(linear, 1.0)
        >>> bool((linear.bias == 0).all() and (linear.weight.abs() <= 3**0.5).all())
        True
    """
    if sigma is not None:
        nn.init.uniform_(linear.weight, -math.sqrt(3) * sigma, math.sqrt(3) * sigma)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def matched_scale(head_dim: int, constrained: list[tuple[int, float]]) -> float:
    """Π σ√n / √d_h: the scale that gives the logits of frames the variance they had with Xavier's weights.

    Args:
        constrained: n and σ of each of queries and keys that is a frame, whose elements have variance 1/n.

    Example:
        >>> matched_scale(16, [])  # ordinary attention
        0.25
    """
    return math.prod(sigma * math.sqrt(n) for n, sigma in constrained) / math.sqrt(head_dim)


def is_finite_number(value: object) -> bool:
    """Whether ``value`` is a number that a fixed scale may be.

    Example:
        >>> [is_finite_number(v) for v in (2, 0.5, True, math.inf, "learned")]
        [True, True, False, False, False]
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def set_logit_scale(module: nn.Module, kind: LogitScale, start: float, heads: int, head_dim: int, **factory) -> None:
    """Register ``logit_scale`` on ``module``: a parameter if it is learned, (heads,) or (heads, d_h), else a buffer.

    Raises:
        ValueError: ``kind`` is none of "learned", "spectrum", "matched" and the finite numbers.

    Example:
        >>> module = nn.Module()
        >>> set_logit_scale(module, "learned", 0.5, 2, 8)
        >>> module.logit_scale.tolist()
        [0.5, 0.5]
    """
    ones: Tensor = torch.ones(heads, **factory)
    if kind == "learned":
        module.logit_scale = nn.Parameter(start * ones)
    elif kind == "spectrum":
        module.logit_scale = nn.Parameter(start * torch.ones(heads, head_dim, **factory))
    elif kind == "matched":
        module.register_buffer("logit_scale", start * ones)
    elif is_finite_number(kind):
        module.register_buffer("logit_scale", float(kind) * ones)
    else:
        raise ValueError(f'logit_scale must be "learned", "spectrum", "matched" or a finite number, found {kind!r}')
