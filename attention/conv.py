"""A convolution whose flattened kernel is an orthonormal frame."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..manifolds import Manifold
from .orientation import Orientation
from .oriented import OrientedFrame

__all__ = ["StiefelConv2d"]

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class StiefelConv2d(OrientedFrame):
    """``nn.Conv2d`` whose kernel, flattened to (out/groups) × (in/groups · kh · kw), is on the Stiefel manifold.

    What is orthonormal is the map of a patch to the outputs at a place, a frame a group; the convolution of a whole
    image is not an isometry, but with stride at least 1 its spectral norm is at most s·√(kh·kw), because no pixel is
    in more patches than that (Singla and Feizi, "Fantastic Four", 2021). Orientation as in :class:`StiefelLinear`:
    ``frame`` is always tall, (groups, n, p), ``weight`` the kernel (out, in/groups, kh, kw) times the scale.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: of
            ``nn.Conv2d``.
        manifold: where the frames live, by default ``Stiefel()``.
        scale: a fixed number s, or "learned", one number that starts at 1.

    Shapes:
        (N, in_channels, H, W), or without N, to what ``nn.Conv2d`` gives.

    Raises:
        ValueError: an argument is out of its range; the error names it.

    Example:
        >>> layer = StiefelConv2d(3, 8, 3, padding=1)
        >>> layer(torch.zeros(2, 3, 10, 10)).shape, layer.orientation.kind, layer.frame.shape
        (torch.Size([2, 8, 10, 10]), 'wide', torch.Size([1, 27, 8]))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        manifold: Manifold | None = None,
        scale: str | float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_channels", in_channels), ("out_channels", out_channels)):
            if groups < 1 or size < 1 or size % groups:
                raise ValueError(f"{name} must be a positive multiple of groups, found {size} and groups = {groups}")
        if padding_mode not in _PADDING_MODES:
            raise ValueError(f"padding_mode must be one of {', '.join(_PADDING_MODES)}, found {padding_mode!r}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size, "kernel_size", 1)
        self.stride = _pair(stride, "stride", 1)
        self.dilation = _pair(dilation, "dilation", 1)
        self.groups = groups
        self.padding_mode = padding_mode
        if isinstance(padding, str):
            if padding not in ("same", "valid"):
                raise ValueError(f'padding must be "same", "valid" or a size, found {padding!r}')
            if padding == "same" and self.stride != (1, 1):
                raise ValueError(f'padding must not be "same" with a stride, found stride = {self.stride}')
            self.padding = padding
        else:
            self.padding = _pair(padding, "padding", 0)
        kernel = (out_channels, in_channels // groups, *self.kernel_size)
        self._set_up(Orientation(kernel, groups), bias, manifold, scale, device, dtype)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, *, manifold: Manifold | None = None, scale: str | float = "learned") -> Self:
        """The nearest such layer to ``conv``: the polar factors of its kernel, times the best scale if learned.

        Example:
            >>> conv = nn.Conv2d(2, 4, 3, stride=2)
            >>> layer = StiefelConv2d.from_conv(conv)
            >>> layer(torch.ones(1, 2, 9, 9)).shape == conv(torch.ones(1, 2, 9, 9)).shape
            True
        """
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"conv must be an nn.Conv2d, found {type(conv).__name__}")
        names = (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        )
        options = {"manifold": manifold, "scale": scale, "device": conv.weight.device, "dtype": conv.weight.dtype}
        layer = cls(**{name: getattr(conv, name) for name in names}, bias=conv.bias is not None, **options)
        layer._copy_weight(conv.weight)
        if layer.bias is not None and conv.bias is not None:
            layer.bias.detach().copy_(conv.bias)
        return layer.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._margins(), mode=self.padding_mode)
            padding = 0
        return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _margins(self) -> list[int]:
        """Left, right, top and bottom, as ``F.pad`` takes them."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        return [side for size in reversed(self.padding) for side in (int(size), int(size))]

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        defaults = {"padding": (0, 0), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join((*parts, self._describe()))


def _pair(value: int | tuple[int, int], name: str, least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(v, int) and v >= least for v in pair):
        raise ValueError(f"{name} must be an integer of at least {least}, or two of them, found {value!r}")
    return pair
