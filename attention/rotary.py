"""Rotary position embedding, and the gauge freedom that it leaves to query and key frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotary"]


@dataclass(frozen=True)
class Rotary:
    """Turn pairs of coordinates of queries and keys by angles proportional to their positions (Su et al. 2021).

    At position t pair j turns by t·θ_j, θ_j = base^(−2j/dim), so that logits depend on positions by their difference
    alone: (R_t q)·(R_s k) = q·R_{s−t} k.

    **The gauge.** Without it, the logits of a head are those of W_Q A, W_K A for every orthogonal A: of the weights
    only the product W_Q W_Kᵀ counts. With it A must commute with every R_t. The frequencies differ, so on the
    rotated coordinates that leaves one rotation of the plane of each pair, dim/2 angles instead of the
    d_h(d_h − 1)/2 of O(d_h), besides O(d_h − dim) on the coordinates that are not rotated. (With unconstrained
    weights each pair may also be scaled in W_Q and inversely in W_K; frames forbid that. Gains per frame direction
    that differ within a pair break the pair's rotation too.) :meth:`gauge` gives these A. Since the SVD of W_Q W_Kᵀ
    needs an A outside of the commutant, weights with rotary embedding become frames by polar factors only.

    A value: it holds no tensor, and its angles are computed in float32 or better.

    Args:
        base: of the geometric sequence of wavelengths.
        dim: how many leading coordinates of a head are rotated, by default all. Even.
        interleaved: pair coordinates (2j, 2j+1), as the paper and GPT-J do; otherwise (j, j + dim/2), as Llama does.

    Example:
        >>> rotary, x = Rotary(), torch.randn(2, 3, 7, 8)
        >>> y = rotary.rotate(x, torch.arange(7))
        >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1)), bool((y[:, :, 0] == x[:, :, 0]).all())
        (True, True)
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ValueError(f"base must be greater than 1, found {self.base!r}")
        if self.dim is not None and (self.dim <= 0 or self.dim % 2):
            raise ValueError(f"dim must be positive and even, found {self.dim!r}")

    def rotated(self, head_dim: int) -> int:
        """How many coordinates of a head of width ``head_dim`` are rotated.

        Raises:
            ValueError: it is odd, or smaller than ``dim``.

        Example:
            >>> Rotary(dim=4).rotated(16), Rotary().rotated(16)
            (4, 16)
        """
        dim = head_dim if self.dim is None else self.dim
        if dim > head_dim or dim % 2:
            raise ValueError(
                f"the head dimension must be even, and at least the rotated dim, found head_dim = {head_dim} and "
                f"dim = {self.dim}"
            )
        return dim

    def frequencies(self, head_dim: int, dtype: torch.dtype = torch.float32, device=None) -> Tensor:
        """θ, radians a position: (rotated dim / 2,).

        Example:
            >>> Rotary(base=100.0).frequencies(4)
            tensor([1.0000, 0.1000])
        """
        dim = self.rotated(head_dim)
        return self.base ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / -dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """R_t x: (batch, heads, length, head_dim) at ``positions``, (length,) or (batch, length)."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = positions.to(dtype).unsqueeze(-1) * self.frequencies(x.shape[-1], dtype, x.device)
        return self._turn(x, angles if angles.ndim == 2 else angles.unsqueeze(1)).to(x.dtype)

    def gauge(self, angles: Tensor, head_dim: int) -> Tensor:
        """The orthogonal (..., head_dim, head_dim) A that turn pair j by ``angles`` (..., j) and commute with each R_t.

        Frames W_Q A and W_K A with the same A give the same attention.

        Example:
            >>> rotary = Rotary()
            >>> a, x = rotary.gauge(torch.tensor([0.3, -1.0]), 4), torch.randn(1, 1, 5, 4)
            >>> positions = torch.arange(5)
            >>> torch.allclose(rotary.rotate(x @ a, positions), rotary.rotate(x, positions) @ a, atol=1e-6)
            True
        """
        if angles.shape[-1:] != (self.rotated(head_dim) // 2,):
            raise ValueError(
                f"angles must end in a dimension of {self.rotated(head_dim) // 2}, one a pair, found shape "
                f"{tuple(angles.shape)}"
            )
        identity = torch.eye(head_dim, dtype=angles.dtype, device=angles.device)
        return self._turn(identity.expand(*angles.shape[:-1], -1, -1), angles.unsqueeze(-2))

    def _turn(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        dim = 2 * cos.shape[-1]
        head, rest = x[..., :dim], x[..., dim:]
        a, b = (head[..., ::2], head[..., 1::2]) if self.interleaved else head.chunk(2, -1)
        turned = (a * cos - b * sin, b * cos + a * sin)
        out = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat((out, rest.to(out.dtype)), -1) if rest.shape[-1] else out
