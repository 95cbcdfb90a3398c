"""Multi-head attention with orthonormal query and key frames."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..manifolds import Manifold, Stiefel
from .masks import additive_mask
from .projections import FrameProjection

__all__ = ["StiefelAttention"]

ROLES = ("q", "k", "v", "o")


class StiefelAttention(nn.Module):
    """``nn.MultiheadAttention`` whose chosen projections are orthonormal frames.

    Head h has logits s_h · (x U_h)(y V_h)ᵀ with frames U_h, V_h on the manifold, (d, d_h) and tall, and a scale s_h
    since orthonormal frames give smaller logits than the usual initialization does. The learned and the matched
    scale start where the same layer built by ``nn.MultiheadAttention`` would put its logits: their variance over
    initializations is the same for every pair of inputs. A frame's elements have variance 1/n, Xavier's have σ², so
    that is s = Π σ√n / √d_h over the constrained ones of q and k, 1/(2√d_h) for both.

    An unconstrained projection is an ordinary ``nn.Linear`` initialized as ``nn.MultiheadAttention`` does, so
    ``constrain=()`` with ``logit_scale="matched"`` is ordinary attention. There is no key bias: it adds a constant
    along the keys, which the softmax cancels.

    Args:
        embed_dim: width d of queries and outputs.
        num_heads: number of heads; d_h = d / num_heads.
        dropout: on the attention weights, while training.
        bias: additive biases of the query, value and output projections.
        constrain: which of "q", "k", "v", "o" are frames.
        frames: "head", a frame a head; "whole", one (d, d) frame over all heads.
        manifold: where the frames live.
        logit_scale: "learned", one scale a head; "spectrum", a learned gain per frame direction; "matched", fixed at
            the starting value; or a number, fixed.
        kdim, vdim: widths of keys and values, by default d.
        batch_first: (batch, length, d) if true, else (length, batch, d).

    Shapes:
        query (L, d), key (S, kdim), value (S, vdim), with a batch dimension or without.

    Raises:
        ValueError: an argument is out of its range, or a frame would be wide; the error names it.
    """

    q_proj: nn.Linear | FrameProjection
    k_proj: nn.Linear | FrameProjection
    v_proj: nn.Linear | FrameProjection
    out_proj: nn.Linear | FrameProjection
    logit_scale: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        constrain: Iterable[str] = ("q", "k"),
        frames: str = "head",
        manifold: Manifold | None = None,
        logit_scale: str | float = "learned",
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a positive multiple of num_heads, found embed_dim = {embed_dim} and "
                f"num_heads = {num_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), found {dropout!r}")
        if frames not in ("head", "whole"):
            raise ValueError(f'frames must be "head" or "whole", found {frames!r}')
        constrain = tuple(constrain)
        if unknown := set(constrain) - set(ROLES):
            raise ValueError(f"constrain may name {', '.join(ROLES)}, found {', '.join(sorted(unknown))}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.batch_first = batch_first
        self.constrain = tuple(r for r in ROLES if r in constrain)
        self.manifold = Stiefel() if manifold is None else manifold
        factory = {"device": device, "dtype": dtype}

        def projection(role: str, features: int, bias: bool, transpose: bool = False) -> nn.Linear | FrameProjection:
            if role not in constrain:
                return nn.Linear(features, embed_dim, bias=bias, **factory)
            count, width = (num_heads, self.head_dim) if frames == "head" else (1, embed_dim)
            try:
                return FrameProjection(
                    features, count, width, manifold=self.manifold, bias=bias, transpose=transpose, **factory
                )
            except ValueError as error:
                raise ValueError(
                    f"the {role} projection cannot be constrained with frames={frames!r}: {error}"
                ) from None

        self.q_proj = projection("q", embed_dim, bias)
        self.k_proj = projection("k", self.kdim, False)
        self.v_proj = projection("v", self.vdim, bias)
        self.out_proj = projection("o", embed_dim, bias, transpose=True)
        self._reset_linears()

        start = self._matched_scale()
        ones = torch.ones(num_heads, **factory)
        if logit_scale == "learned":
            self.logit_scale = nn.Parameter(start * ones)
        elif logit_scale == "spectrum":
            self.logit_scale = nn.Parameter(start * torch.ones(num_heads, self.head_dim, **factory))
        elif logit_scale == "matched":
            self.register_buffer("logit_scale", start * ones)
        elif isinstance(logit_scale, (int, float)) and math.isfinite(logit_scale):
            self.register_buffer("logit_scale", float(logit_scale) * ones)
        else:
            raise ValueError(
                f'logit_scale must be "learned", "spectrum", "matched" or a finite number, found {logit_scale!r}'
            )

    # --- initialization -----------------------------------------------------------------------------------------

    def _xavier_sigma(self, features: int) -> float:
        """Standard deviation of the elements of an input projection in ``nn.MultiheadAttention``."""
        # it draws one Xavier-uniform (3d, d) matrix where keys and values have the width of queries, else one each
        fused = self.kdim == self.vdim == self.embed_dim
        return math.sqrt(2 / (features + (3 if fused else 1) * self.embed_dim))

    def _matched_scale(self) -> float:
        scale = 1 / math.sqrt(self.head_dim)
        for role, features in (("q", self.embed_dim), ("k", self.kdim)):
            if role in self.constrain:
                scale *= self._xavier_sigma(features) * math.sqrt(features)
        return scale

    @torch.no_grad()
    def _reset_linears(self) -> None:
        for module in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if not isinstance(module, nn.Linear):
                continue
            if module is not self.out_proj:  # the output projection keeps nn.Linear's own initialization
                bound = math.sqrt(3) * self._xavier_sigma(module.in_features)
                nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    # --- geometry -----------------------------------------------------------------------------------------------

    def query_frames(self) -> Tensor:
        """W_Q a head, (num_heads, d, d_h), tall, whatever the storage."""
        return self._frames(self.q_proj)

    def key_frames(self) -> Tensor:
        """W_K a head, (num_heads, kdim, d_h)."""
        return self._frames(self.k_proj)

    def value_frames(self) -> Tensor:
        """W_V a head, (num_heads, vdim, d_h)."""
        return self._frames(self.v_proj)

    def output_frames(self) -> Tensor:
        """W_Oᵀ a head, (num_heads, d, d_h): the head's output y is added as y W_O."""
        return self._frames(self.out_proj)

    def _frames(self, module: nn.Linear | FrameProjection) -> Tensor:
        matrix = module.matrix() if isinstance(module, FrameProjection) else module.weight
        if module is self.out_proj:
            matrix = matrix.mT
        return matrix.unflatten(0, (self.num_heads, self.head_dim)).mT

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments, masks and results are those of ``nn.MultiheadAttention``.

        Boolean masks are True where attention is *not* allowed; float masks are added to the logits.

        Args:
            query, key, value: see the class.
            key_padding_mask: (batch, S), or (S,) for unbatched input.
            need_weights: also return the attention weights. Without them torch's fused kernels are used.
            attn_mask: (L, S), or (batch · num_heads, L, S).
            average_attn_weights: average the weights over heads.
            is_causal: forbid keys after the query's position, besides what the masks forbid.

        Returns:
            The output, shaped like ``query``, and the weights (batch, L, S), per head (batch, num_heads, L, S) if not
            averaged, or None.
        """
        batched = query.ndim == 3
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                "query, key and value must all be (length, width) or all be batched with 3 dimensions, found shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        q, k, v = (self._split(t) for t in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        scale = self.logit_scale.to(q.dtype)
        q = q * (scale[:, None, :] if scale.ndim == 2 else scale[:, None, None])
        # torch's kernels take the causal flag or a mask, not both
        flag = is_causal and attn_mask is None and key_padding_mask is None and not need_weights
        mask = additive_mask(q, k, attn_mask, key_padding_mask, causal=is_causal and not flag)
        p = self.dropout if self.training else 0.0

        weights = None
        if need_weights:
            logits = q @ k.mT
            weights = F.softmax(logits if mask is None else logits + mask, -1)
            weights = F.dropout(weights, p) if p else weights
            heads = weights @ v
            if average_attn_weights:
                weights = weights.mean(1)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=flag, scale=1.0)

        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _split(self, t: Tensor) -> Tensor:
        """(batch, length, d) to (batch, heads, length, d_h)."""
        return t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, constrain={self.constrain!r}"
