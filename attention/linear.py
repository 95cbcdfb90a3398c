"""A linear layer whose matrix is an orthonormal frame."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ..manifolds import Manifold
from .orientation import Orientation
from .oriented import OrientedFrame

__all__ = ["StiefelLinear"]


class StiefelLinear(OrientedFrame):
    """``nn.Linear`` y = s·Wx + b with W on the Stiefel manifold.

    With out ≥ in, W (out, in) is tall, WᵀW = I, and lengths are kept: ‖Wx‖ = ‖x‖. With out < in it is wide, WWᵀ = I,
    and lengths do not grow. The parameter is ``frame``, always tall, (1, n, p): W itself or, where W is wide, its
    transpose; ``orientation`` says which. ``weight`` is W times the scale, (out, in) in both cases.

    Args:
        in_features, out_features: widths.
        bias: learn an additive bias.
        manifold: where the frame lives, by default ``Stiefel()``.
        scale: a fixed number s, or "learned", one number that starts at 1.

    Shapes:
        (..., in_features) to (..., out_features).

    Raises:
        ValueError: a size is not positive, or ``scale`` is not one.

    Example:
        >>> layer = StiefelLinear(6, 3, bias=False, dtype=torch.float64)
        >>> layer.orientation.kind, layer.frame.shape, layer.weight.shape
        ('wide', torch.Size([1, 6, 3]), torch.Size([3, 6]))
        >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(3, dtype=torch.float64))
        True
        >>> layer  # doctest: +ELLIPSIS
        StiefelLinear(in_features=6, out_features=3, bias=False, orientation='wide', manifold=Stiefel(...))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        manifold: Manifold | None = None,
        scale: str | float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"in_features and out_features must be positive, found in_features = {in_features} and "
                f"out_features = {out_features}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self._set_up(Orientation((out_features, in_features)), bias, manifold, scale, device, dtype)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, manifold: Manifold | None = None, scale: str | float = "learned"
    ) -> Self:
        """The nearest such layer to ``linear``: the polar factor of its weight, times the best scale if learned.

        Example:
            >>> linear = nn.Linear(4, 4)
            >>> with torch.no_grad():
            ...     _ = nn.init.orthogonal_(linear.weight).mul_(3)
            >>> layer = StiefelLinear.from_linear(linear)
            >>> torch.allclose(layer(torch.ones(4)), linear(torch.ones(4)), atol=1e-5), round(layer.scale.item(), 4)
            (True, 3.0)
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, found {type(linear).__name__}")
        weight, bias = linear.weight, linear.bias
        options = {"manifold": manifold, "scale": scale, "device": weight.device, "dtype": weight.dtype}
        layer = cls(linear.in_features, linear.out_features, bias is not None, **options)
        layer._copy_weight(weight)
        if layer.bias is not None:
            layer.bias.detach().copy_(bias)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"
