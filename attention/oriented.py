"""What layers have in common whose weight is one frame, or one a group, times a scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, ManifoldParameter, Stiefel
from .frame_module import FrameModule
from .orientation import Orientation
from .scales import is_finite_number

__all__ = ["OrientedFrame"]


class OrientedFrame(FrameModule):
    """Holds ``frame``, tall :class:`ManifoldParameter` (groups, n, p), and gives ``weight`` in torch's layout.

    Subclasses call :meth:`_set_up`. The state dict has "frame", and "scale" if that is learned, and "bias".
    """

    frame_names = ("frame",)
    frame: ManifoldParameter
    bias: nn.Parameter | None
    orientation: Orientation
    scale: float | nn.Parameter

    def _set_up(
        self,
        orientation: Orientation,
        bias: bool,
        manifold: Manifold | None,
        scale: str | float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.orientation = orientation
        self.manifold = Stiefel() if manifold is None else manifold
        start = self.manifold.random_point(*orientation.frame_shape, device=device, dtype=dtype)
        self.frame = ManifoldParameter(start, self.manifold)
        if scale == "learned":
            self.scale = nn.Parameter(torch.ones((), device=device, dtype=dtype))
        elif is_finite_number(scale):
            self.scale = float(scale)
        else:
            raise ValueError(f'scale must be "learned" or a finite number, found {scale!r}')
        if bias:
            empty = torch.empty(orientation.shape[0], device=device, dtype=dtype)
            self.bias = nn.Parameter(empty)
        else:
            self.register_parameter("bias", None)
        self._reset_bias()

    @torch.no_grad()
    def _reset_bias(self) -> None:
        if self.bias is not None:  # as nn.Linear and nn.Conv2d do
            bound = 1 / math.sqrt(self.orientation.columns)
            nn.init.uniform_(self.bias, -bound, bound)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw a new frame, Haar-distributed on Stiefel, and a bias as torch's layer does; a learned scale is 1."""
        self._redraw_frames(generator)
        if isinstance(self.scale, nn.Parameter):
            self.scale.fill_(1.0)
        self._reset_bias()

    @property
    def weight(self) -> Tensor:
        """The matrix or kernel that torch's layer would store, scale included; computed from the frame when read."""
        weight = self.orientation.to_weight(self.frame)
        return weight if isinstance(self.scale, float) and self.scale == 1.0 else self.scale * weight

    @torch.no_grad()
    def _copy_weight(self, weight: Tensor) -> None:
        """The nearest frame to ``weight``; a learned scale becomes the best one, tr(frameᵀ weight)/(columns)."""
        matrix = self.orientation.to_frame(weight.detach())
        frame = self.manifold.project_point(matrix)
        self.frame.copy_(frame)
        if isinstance(self.scale, nn.Parameter):
            self.scale.copy_((frame * matrix).sum() / (frame.numel() // frame.shape[-2]))

    def _describe(self) -> str:
        """The end of ``extra_repr``."""
        scale = "learned" if isinstance(self.scale, nn.Parameter) else self.scale
        scale = "" if scale == 1.0 else f", scale={scale!r}"
        return f"bias={self.bias is not None}, orientation={self.orientation.kind!r}{scale}, manifold={self.manifold!r}"
