"""A low-rank change of a linear layer, U S Vᵀ with orthonormal U and V."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..manifolds import Manifold, ManifoldParameter, Stiefel
from .frame_module import FrameModule

__all__ = ["StiefelLoRA"]


class StiefelLoRA(FrameModule):
    """y = base(x) + U S Vᵀ x with U ∈ St(out, r) and V ∈ St(in, r), and ``base`` frozen.

    S is zero at the start, so the layer starts as ``base``, while U and V are full frames from the first step: the
    rank cannot collapse, and the singular values of the change are those of S. Only S has a gradient at S = 0; U and
    V follow once it moves.

    The state dict always holds the unmerged weights, also while merged, and loading unmerges.

    Args:
        base: the layer to adapt; its parameters stop requiring gradients.
        rank: r, at most min(in, out).
        core: "diagonal", S a vector of r gains; "full", an r×r matrix.
        dropout: on the input of the change, while training.
        manifold: where U and V live, by default ``Stiefel()``.
        dtype: of U, S and V, by default that of ``base``.

    Shapes:
        (..., in) to (..., out). U is ``left`` (1, out, r), V is ``right`` (1, in, r), whose first dimension lets
        ``fully_shard`` keep frames whole; S is ``core`` (r,) or (r, r).

    Raises:
        TypeError: ``base`` is not an ``nn.Linear`` with a real weight.
        ValueError: ``rank``, ``core`` or ``dropout`` is out of its range.

    Example:
        >>> base = nn.Linear(8, 6)
        >>> layer = StiefelLoRA(base, rank=2)
        >>> x = torch.randn(3, 8)
        >>> bool((layer(x) == base(x)).all()), sorted(n for n, p in layer.named_parameters() if p.requires_grad)
        (True, ['core', 'left', 'right'])
        >>> with torch.no_grad():
        ...     _ = layer.core.fill_(1.0)
        >>> expected = layer(x)
        >>> torch.allclose(layer.merge()(x), expected, atol=1e-5)  # now one product
        True
    """

    frame_names = ("left", "right")
    left: ManifoldParameter
    right: ManifoldParameter
    unmerged_weight: Tensor | None

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        *,
        core: str = "diagonal",
        dropout: float = 0.0,
        manifold: Manifold | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
            found = (
                f"{type(base).__name__} of {base.weight.dtype}" if isinstance(base, nn.Linear) else type(base).__name__
            )
            raise TypeError(f"base must be an nn.Linear with a floating-point weight, found {found}")
        if not 1 <= rank <= min(base.in_features, base.out_features):
            raise ValueError(
                f"rank must be from 1 to min(in_features, out_features) = {min(base.in_features, base.out_features)}, "
                f"found {rank}"
            )
        if core not in ("diagonal", "full"):
            raise ValueError(f'core must be "diagonal" or "full", found {core!r}')
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), found {dropout!r}")
        self.base = base.requires_grad_(False)
        self.rank = rank
        self.dropout = dropout
        self.manifold = Stiefel() if manifold is None else manifold
        factory = {"device": base.weight.device, "dtype": base.weight.dtype if dtype is None else dtype}
        self.left = ManifoldParameter(self.manifold.random_point(1, base.out_features, rank, **factory), self.manifold)
        self.right = ManifoldParameter(self.manifold.random_point(1, base.in_features, rank, **factory), self.manifold)
        self.core = nn.Parameter(torch.zeros(*(rank,) * (1 if core == "diagonal" else 2), **factory))
        self.register_buffer("unmerged_weight", None, persistent=False)
        self.register_state_dict_post_hook(_keep_unmerged)

    @property
    def merged(self) -> bool:
        """Whether ``base.weight`` holds the change."""
        return self.unmerged_weight is not None

    def change(self) -> Tensor:
        """U S Vᵀ, (out, in)."""
        left, right = self.left[0], self.right[0]
        return (left * self.core if self.core.ndim == 1 else left @ self.core) @ right.mT

    @torch.no_grad()
    def merge(self) -> StiefelLoRA:
        """Add the change to ``base.weight`` so that the layer is one product. The old weight is kept for unmerging.

        Merged, U, S and V get no gradients. Merging twice is merging once.
        """
        if not self.merged:
            weight = self.base.weight
            self.unmerged_weight = weight.detach().clone()
            weight.copy_(weight.to(self.core.dtype) + self.change())
        return self

    @torch.no_grad()
    def unmerge(self) -> StiefelLoRA:
        """Put the weight from before :meth:`merge` back, to the last bit.

        Example:
            >>> layer = StiefelLoRA(nn.Linear(4, 4), rank=1)
            >>> before = layer.base.weight.clone()
            >>> bool((layer.merge().unmerge().base.weight == before).all())
            True
        """
        if self.unmerged_weight is not None:
            self.base.weight.copy_(self.unmerged_weight)
            self.unmerged_weight = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.merged:
            return out
        z = x.to(self.core.dtype) if not torch.is_autocast_enabled(x.device.type) else x
        z = F.dropout(z, self.dropout, self.training) @ self.right[0]
        z = z * self.core if self.core.ndim == 1 else z @ self.core.mT
        return out + (z @ self.left[0].mT).to(out.dtype)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        self.unmerge()  # what is loaded into base next is unmerged
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        core = "diagonal" if self.core.ndim == 1 else "full"
        merged = ", merged" if self.merged else ""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"rank={self.rank}, core={core!r}{dropout}, manifold={self.manifold!r}{merged}"


def _keep_unmerged(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    assert isinstance(module, StiefelLoRA)
    if module.unmerged_weight is not None:
        state_dict[prefix + "base.weight"] = module.unmerged_weight
