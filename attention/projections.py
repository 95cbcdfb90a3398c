"""Linear maps between the model's width and the heads, stored as frames."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, ManifoldParameter
from .frame_module import FrameModule

__all__ = ["FrameProjection"]


class FrameProjection(FrameModule):
    """x ↦ [x W₁, …, x W_h] with every frame W_i a point of ``manifold``, or its transpose y ↦ Σ yᵢ W_iᵀ.

    The frames are stored contiguous and tall, (frames, features, width), so that a shard along the first dimension
    holds whole frames. Orientation is decided here and nowhere else: the transposed map, which an output projection
    needs, uses the same storage.

    Args:
        features: size n of the model's side; a frame is (n, width).
        frames: number of frames h.
        width: columns p of a frame, at most ``features`` on Stiefel.
        bias: learn an additive bias, zero at the start.
        transpose: map from the heads to the model instead.

    Raises:
        ValueError: the manifold cannot hold (features, width), as when a Stiefel frame would be wide.

    Example:
        >>> from geodescent.manifolds import Stiefel
        >>> project = FrameProjection(8, frames=3, width=2, manifold=Stiefel())
        >>> project(torch.zeros(5, 8)).shape, project.weight.shape, project.matrix().shape
        (torch.Size([5, 6]), torch.Size([3, 8, 2]), torch.Size([6, 8]))
    """

    weight: ManifoldParameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        frames: int,
        width: int,
        *,
        manifold: Manifold,
        bias: bool = True,
        transpose: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        manifold.check_shape((frames, features, width))
        self.manifold = manifold
        self.transpose = transpose
        frame = manifold.random_point(frames, features, width, device=device, dtype=dtype)
        self.weight = ManifoldParameter(frame, manifold)
        out_features = features if transpose else frames * width
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new frames, Haar-distributed on Stiefel, and zero the bias."""
        self._redraw_frames(generator)
        if self.bias is not None:
            self.bias.zero_()

    def matrix(self) -> Tensor:
        """The map as the (out, in) matrix that ``nn.Linear`` would store."""
        rows = self.weight.mT.reshape(-1, self.weight.shape[-2])  # (frames·width, features)
        return rows.mT if self.transpose else rows

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to (..., frames·width); the other way about if ``transpose``."""
        return nn.functional.linear(x, self.matrix(), self.bias)

    def extra_repr(self) -> str:
        frames, features, width = self.weight.shape
        arrow = f"{frames}x{width} -> {features}" if self.transpose else f"{features} -> {frames}x{width}"
        return f"{arrow}, bias={self.bias is not None}, manifold={self.manifold!r}"
