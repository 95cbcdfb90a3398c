"""Which way round a weight is stored as a frame: the one place that decides, flattens and transposes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Orientation"]


@dataclass(frozen=True)
class Orientation:
    """How a weight (out, in), or a kernel (out, in/groups, *kernel), is a tall frame, or one a group.

    A kernel is flattened to the matrix (out/groups) × (in/groups · kernel) of each group. Where that is tall or
    square, the frame *is* the matrix: its columns are orthonormal, WᵀW = I, and x ↦ Wx keeps lengths. Where it is
    wide, the frame is the transpose: the rows of W are orthonormal, WWᵀ = I. Frames are stored as (groups, n, p), also
    a single one, so that a shard along the first dimension, as ``fully_shard`` makes them, holds whole frames.

    Args:
        shape: of the weight, as torch's layers store it.
        groups: of a grouped convolution; a frame each.

    Raises:
        ValueError: ``shape`` has fewer than two dimensions or an empty one, or ``groups`` does not divide out.

    Example:
        >>> Orientation((10, 4)).kind, Orientation((10, 4)).frame_shape
        ('tall', (1, 10, 4))
        >>> Orientation((8, 2, 3, 3)).kind, Orientation((8, 2, 3, 3)).frame_shape
        ('wide', (1, 18, 8))
        >>> Orientation((8, 2, 3, 3), groups=4).frame_shape
        (4, 18, 2)
    """

    shape: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ValueError(f"shape must be (out, in, ...) with no empty dimension, found {self.shape}")
        if self.groups < 1 or self.shape[0] % self.groups:
            raise ValueError(f"groups must divide the {self.shape[0]} rows, found {self.groups}")

    @property
    def rows(self) -> int:
        """Rows of a group's matrix."""
        return self.shape[0] // self.groups

    @property
    def columns(self) -> int:
        """Columns of a group's matrix."""
        return math.prod(self.shape[1:])

    @property
    def kind(self) -> str:
        """ "tall" (square counts as tall) or "wide"."""
        return "tall" if self.rows >= self.columns else "wide"

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """(groups, n, p) with n ≥ p."""
        return (self.groups, max(self.rows, self.columns), min(self.rows, self.columns))

    def to_frame(self, weight: Tensor) -> Tensor:
        """The weight laid out as tall matrices, a view where possible. It is a frame only if the weight is one.

        Example:
            >>> import torch
            >>> Orientation((2, 3)).to_frame(torch.arange(6).reshape(2, 3)).tolist()
            [[[0, 3], [1, 4], [2, 5]]]
        """
        if tuple(weight.shape) != self.shape:
            raise ValueError(f"weight must be of shape {self.shape}, found {tuple(weight.shape)}")
        matrix = weight.flatten(1).unflatten(0, (self.groups, self.rows))
        return matrix if self.kind == "tall" else matrix.mT

    def to_weight(self, frame: Tensor) -> Tensor:
        """The weight that ``frame`` stores: the inverse of :meth:`to_frame`.

        Example:
            >>> import torch
            >>> kernel, orientation = torch.randn(8, 2, 3, 3), Orientation((8, 2, 3, 3), groups=2)
            >>> bool((orientation.to_weight(orientation.to_frame(kernel)) == kernel).all())
            True
        """
        matrix = frame if self.kind == "tall" else frame.mT
        return matrix.reshape(self.shape)
