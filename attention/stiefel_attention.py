"""Multi-head attention with orthonormal query and key frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, Stiefel
from .from_torch import arguments_of, copy_attention
from .kernels import attend
from .masks import merge_masks
from .nested import pad_nested, unpad_nested
from .projections import FrameProjection
from .rotary import Rotary
from .scales import LogitScale, matched_scale, reset_linear, set_logit_scale, xavier_sigma

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
    ``constrain=()`` with ``logit_scale="matched"`` is ordinary attention. A key bias adds a constant along the keys,
    which the softmax cancels, so there is one only where it does not: with ``rotary`` or ``add_zero_attn``.

    Args:
        embed_dim: width d of queries and outputs.
        num_heads: number of heads; d_h = d / num_heads.
        dropout: on the attention weights, while training.
        bias: additive biases of the query, value and output projections.
        constrain: which of "q", "k", "v", "o" are frames.
        frames: "head", a frame a head; "whole", one frame over all heads of a projection.
        manifold: where the frames live.
        logit_scale: "learned", one scale a head; "spectrum", a learned gain per frame direction; "matched", fixed at
            the starting value; or a number, fixed.
        kdim, vdim: widths of keys and values, by default d.
        num_kv_heads: number of key and value heads, each shared by num_heads / num_kv_heads consecutive query heads
            (grouped-query attention); by default num_heads.
        rotary: rotary position embedding of queries and keys. :class:`Rotary` says what gauge freedom it leaves.
        add_bias_kv, add_zero_attn: a learned, and a zero, key and value after the others, as ``nn.MultiheadAttention``.
        batch_first: (batch, length, d) if true, else (length, batch, d).

    Shapes:
        query (L, d), key (S, kdim), value (S, vdim), with a batch dimension or without, or nested.

    Raises:
        ValueError: an argument is out of its range, or a frame would be wide; the error names it.

    Example:
        >>> attention = StiefelAttention(16, 4)
        >>> x = torch.randn(2, 5, 16)
        >>> attention(x, x, x, is_causal=True)[0].shape
        torch.Size([2, 5, 16])
        >>> attention.q_proj.weight.shape, attention.q_proj.weight.manifold == Stiefel()
        (torch.Size([4, 16, 4]), True)
    """

    q_proj: nn.Linear | FrameProjection
    k_proj: nn.Linear | FrameProjection
    v_proj: nn.Linear | FrameProjection
    out_proj: nn.Linear | FrameProjection
    logit_scale: Tensor
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    # nn.TransformerEncoderLayer reads these of its attention; with these values it calls forward, as it should
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

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
        logit_scale: LogitScale = "learned",
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
        rotary: Rotary | None = None,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        constrain = tuple(constrain)
        _check(embed_dim, num_heads, num_kv_heads, dropout, frames, constrain)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.batch_first = batch_first
        self.constrain = tuple(r for r in ROLES if r in constrain)
        self.frames = frames
        self.manifold = Stiefel() if manifold is None else manifold
        self.rotary = rotary
        self.add_zero_attn = add_zero_attn
        if rotary is not None:
            rotary.rotated(self.head_dim)
            if add_bias_kv:
                raise ValueError("add_bias_kv gives a key without a position, so it cannot be combined with rotary")
        factory = {"device": device, "dtype": dtype}

        def projection(role: str, features: int, heads: int, bias: bool) -> nn.Linear | FrameProjection:
            width = heads * self.head_dim
            if role not in constrain:
                return nn.Linear(features, width, bias=bias, **factory)
            count, columns = (heads, self.head_dim) if frames == "head" else (1, width)
            options = {"manifold": self.manifold, "bias": bias, "transpose": role == "o"}
            try:
                return FrameProjection(features, count, columns, **options, **factory)
            except ValueError as error:
                raise ValueError(
                    f"the {role} projection cannot be constrained with frames={frames!r}: {error}"
                ) from None

        self.q_proj = projection("q", embed_dim, num_heads, bias)
        self.k_proj = projection("k", self.kdim, num_kv_heads, bias and (rotary is not None or add_zero_attn))
        self.v_proj = projection("v", self.vdim, num_kv_heads, bias)
        self.out_proj = projection("o", embed_dim, num_heads, bias)
        for name in ("bias_k", "bias_v"):
            extra = torch.empty(1, 1, num_kv_heads * self.head_dim, **factory) if add_bias_kv else None
            self.register_parameter(name, None if extra is None else nn.Parameter(nn.init.xavier_normal_(extra)))

        fused = self.kdim == self.vdim == embed_dim
        sigmas = {n: xavier_sigma(n, embed_dim, fused=fused) for n in (embed_dim, self.kdim, self.vdim)}
        for module in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(module, nn.Linear):
                reset_linear(module, None if module is self.out_proj else sigmas[module.in_features])
        framed = [n for role, n in (("q", embed_dim), ("k", self.kdim)) if role in constrain]
        start = matched_scale(self.head_dim, [(n, sigmas[n]) for n in framed])
        set_logit_scale(self, logit_scale, start, num_heads, self.head_dim, **factory)

    @classmethod
    def from_attention(
        cls,
        module: nn.MultiheadAttention,
        logit_scale: LogitScale = "spectrum",
        *,
        constrain: Iterable[str] = ("q", "k"),
        frames: str = "head",
        manifold: Manifold | None = None,
    ) -> Self:
        """The layer that attends as ``module`` does, exactly or as nearly as the options allow.

        With the defaults it is exact: W_Q W_Kᵀ = U Σ Vᵀ of each head gives the frames U and V, Σ/√d_h the gains, and
        the query bias is carried into the new basis. Exact too, for full column rank, are a single constrained one of
        q and k, and of v and o, with a frame a head: the other factor absorbs what is left of it. Otherwise the frames
        are the polar factors of the weights (with "spectrum", of the frames U, V of the heads side by side), and the
        scales those with the least squared error of U s Vᵀ. ``module`` is left as it is.

        Args:
            logit_scale: "spectrum"; "learned" and "matched", the best single scale of each head; or a number.
            constrain, frames, manifold: see the class.

        Raises:
            TypeError: ``module`` is not an ``nn.MultiheadAttention``.
            ValueError: ``logit_scale`` is the number 0, or a frame would be wide.

        Example:
            >>> module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
            >>> exact = StiefelAttention.from_attention(module)
            >>> x = torch.randn(2, 5, 16, dtype=torch.float64)
            >>> torch.allclose(exact(x, x, x)[0], module(x, x, x)[0], rtol=0, atol=1e-12)
            True
        """
        options = {"constrain": constrain, "frames": frames, "manifold": manifold, "logit_scale": logit_scale}
        layer = cls(**arguments_of(module), **options)
        copy_attention(module, layer, free_scale=isinstance(logit_scale, str))
        return layer.train(module.training)

    # --- geometry -----------------------------------------------------------------------------------------------

    def query_frames(self) -> Tensor:
        """W_Q a head, (num_heads, d, d_h), tall, whatever the storage."""
        return self._frames(self.q_proj)

    def key_frames(self) -> Tensor:
        """W_K a head, (num_kv_heads, kdim, d_h)."""
        return self._frames(self.k_proj)

    def value_frames(self) -> Tensor:
        """W_V a head, (num_kv_heads, vdim, d_h)."""
        return self._frames(self.v_proj)

    def output_frames(self) -> Tensor:
        """W_Oᵀ a head, (num_heads, d, d_h): the head's output y is added as y W_O."""
        return self._frames(self.out_proj)

    def _frames(self, module: nn.Linear | FrameProjection) -> Tensor:
        matrix = module.matrix() if isinstance(module, FrameProjection) else module.weight
        if module is self.out_proj:
            matrix = matrix.mT
        return matrix.unflatten(0, (-1, self.head_dim)).mT

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
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments, masks and results are those of ``nn.MultiheadAttention``.

        Boolean masks are True where attention is *not* allowed; float masks are added to the logits. A query whose
        keys are all forbidden gets what torch gives it: NaN with ``need_weights``, else zero from the heads, so the
        output bias.

        Args:
            query, key, value: see the class. Nested tensors carry their lengths: no masks then but ``is_causal``, and
                the weights come back padded with zeros.
            key_padding_mask: (batch, S), or (S,) for unbatched input.
            need_weights: also return the attention weights. Without them torch's fused kernels are used.
            attn_mask: (L, S), or (batch · num_heads, L, S).
            average_attn_weights: average the weights over heads.
            is_causal: forbid keys after the query's position, besides what the masks forbid. It needs no mask, and
                without one nothing of size L × S is made.
            query_positions, key_positions: of the rotary embedding, (L,) or (batch, L); by default 0, 1, ….

        Returns:
            The output, shaped like ``query``, and the weights (batch, L, S), per head (batch, num_heads, L, S) if not
            averaged, or None.
        """
        if any(t.is_nested for t in (query, key, value)):
            masked = key_padding_mask is not None or attn_mask is not None
            if masked or not all(t.is_nested for t in (query, key, value)) or not self.batch_first:
                raise ValueError(
                    "nested input must be nested in query, key and value, batch first, and without attn_mask and "
                    "key_padding_mask: its lengths say what is padding"
                )
            (q, gaps), (k, padding), (v, _) = pad_nested(query), pad_nested(key), pad_nested(value)
            masks = (padding, need_weights, None, average_attn_weights, is_causal)
            out, weights = self._attend(q, k, v, *masks, query_positions, key_positions)
            if weights is not None:
                weights = weights.masked_fill(gaps[:, None, :, None] if weights.ndim == 4 else gaps[..., None], 0.0)
            return unpad_nested(out, gaps, query), weights
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
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        out, weights = self._attend(query, key, value, *masks, query_positions, key_positions)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, query, key, value, key_padding_mask, need_weights, attn_mask, average, is_causal, at_q, at_k
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self._split(t) for t in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        # the scale goes to the queries, before the kernel, whose own scale is one number for all heads
        scale = self.logit_scale.to(q.dtype)
        q = q * (scale[:, None, :] if scale.ndim == 2 else scale[:, None, None])
        if self.rotary is not None:
            at_q = torch.arange(q.shape[2], device=q.device) if at_q is None else at_q
            at_k = torch.arange(k.shape[2], device=k.device) if at_k is None else at_k
            q, k = self.rotary.rotate(q, at_q), self.rotary.rotate(k, at_k)
        elif at_q is not None or at_k is not None:
            raise ValueError("query_positions and key_positions are for rotary embedding: this layer has rotary=None")
        logits = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        k, v = self._extra_keys(k, v)
        extra = k.shape[2] - logits[3]
        # torch's kernels take the causal flag or a mask, not both
        flag = is_causal and attn_mask is None and key_padding_mask is None and not need_weights and not extra
        masks = (attn_mask, key_padding_mask)
        options = {"causal": is_causal and not flag, "extra_keys": extra, "dtype": q.dtype, "device": q.device}
        mask = merge_masks(logits, *masks, **options)
        dropout = self.dropout if self.training else 0.0
        heads, weights = attend(q, k, v, mask, causal=flag, dropout=dropout, need_weights=need_weights)
        if weights is not None and average:
            weights = weights.mean(1)
        return self.out_proj(heads.transpose(1, 2).flatten(2)), weights

    def _extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shape = (k.shape[0], k.shape[1], 1, self.head_dim)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self._split(self.bias_k.to(k.dtype)).expand(shape)), 2)
            v = torch.cat((v, self._split(self.bias_v.to(v.dtype)).expand(shape)), 2)
        if self.add_zero_attn:
            k, v = torch.cat((k, k.new_zeros(shape)), 2), torch.cat((v, v.new_zeros(shape)), 2)
        return k, v

    def _split(self, t: Tensor) -> Tensor:
        """(batch, length, heads·d_h) to (batch, heads, length, d_h)."""
        return t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        grouped = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        rotary = f", rotary={self.rotary!r}" if self.rotary is not None else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{grouped}, constrain={self.constrain!r}{rotary}"


def _check(embed_dim: int, num_heads: int, num_kv_heads: int, dropout: float, frames: str, constrain: tuple) -> None:
    if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a positive multiple of num_heads, found embed_dim = {embed_dim} and "
            f"num_heads = {num_heads}"
        )
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, found {num_kv_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), found {dropout!r}")
    if frames not in ("head", "whole"):
        raise ValueError(f'frames must be "head" or "whole", found {frames!r}')
    if unknown := set(constrain) - set(ROLES):
        raise ValueError(f"constrain may name {', '.join(ROLES)}, found {', '.join(sorted(unknown))}")
