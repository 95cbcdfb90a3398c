"""Query and key matrices as frames with gains: the mathematics of :func:`~geodescent.attention.constrain`.

A head with queries x W_Q + b_Q and keys y W_K + b_K has logits

    (x W_Q + b_Q)(y W_K + b_K)ᵀ = x M yᵀ + (W_K b_Qᵀ)ᵀ yᵀ + terms that are constant along the keys,    M = W_Q W_Kᵀ,

and the softmax cancels the constant ones, the only ones with b_K. With the thin QR factorizations W_Q = Q_q R_q and
W_K = Q_k R_k and the singular value decomposition R_q R_kᵀ = A Σ Bᵀ of a d_h×d_h matrix,

    M = U Σ Vᵀ,    U = Q_q A,  V = Q_k B,

so queries x U Σ + c and keys y V have the same logits, with c = b_Q R_kᵀ B: W_K b_Qᵀ lies in the range of W_K, which V
spans also where M has no full rank. That is exact, for every input. Where keys are shared by several query heads, B is
taken from all heads of the group, and the columns of W_Q R_kᵀ B are in general not orthogonal. Rotary embeddings stand
between W_Q and W_K and leave no basis to choose but rotations of their planes. In these cases, and for a single scale
a head or one frame over all heads, each matrix is replaced by the nearest U diag(g) (Frobenius) that
:func:`fit_frames` finds; with a single scale that is the polar factor, g = tr(UᵀW)/d_h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..manifolds.linalg import full_float32_products, max_entry, polar_factor

__all__ = ["HeadWeights", "QueryKeyFrames", "convert_query_key", "fit_frames"]


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Ordinary query and key weights, head by head and tall.

    Shapes: query (h, d, d_h), key (h_k, d_k, d_h), query_bias (h, d_h), key_bias (h_k, d_h); h_k divides h, and query
    head i reads key head i·h_k // h, as grouped-query attention does.

    Example:
        >>> HeadWeights.from_rows(torch.ones(6, 8), torch.ones(4, 8), None, None, head_dim=2).key.shape
        torch.Size([2, 8, 2])
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None

    @classmethod
    def from_rows(
        cls, query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, head_dim: int
    ) -> HeadWeights:
        """From (out, in) matrices and (out,) biases, as ``nn.Linear`` stores them."""

        def heads(rows: Tensor) -> Tensor:
            return rows.detach().unflatten(0, (-1, head_dim))

        return cls(
            heads(query).mT,
            heads(key).mT,
            None if query_bias is None else heads(query_bias),
            None if key_bias is None else heads(key_bias),
        )

    def double(self) -> HeadWeights:
        """A copy in float64, on the CPU where the device has no float64."""
        device = torch.device("cpu") if self.query.device.type == "mps" else self.query.device

        def up(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, torch.float64, copy=True)

        query, key = up(self.query), up(self.key)
        assert query is not None
        assert key is not None
        return HeadWeights(query, key, up(self.query_bias), up(self.key_bias))


@dataclass(frozen=True, eq=False)
class QueryKeyFrames:
    """Queries x U diag(query_gain) + query_bias, keys y V diag(key_gain) + key_bias; float64.

    Shapes: query (h, d, d_h), key (h_k, d_k, d_h), or (1, d, h·d_h) and (1, d_k, h_k·d_h) for one frame over all
    heads; query_gain (h, d_h), or (h, 1) for a single scale; key_gain likewise or None for ones; biases as in
    :class:`HeadWeights`. ``exact``: attention weights are those of the matrices that were converted.
    """

    query: Tensor
    key: Tensor
    query_gain: Tensor
    key_gain: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    exact: bool


@full_float32_products()
def convert_query_key(
    weights: HeadWeights,
    *,
    frames: str = "head",
    gains: str = "direction",
    rotary: bool = False,
    atol: float = 1e-10,
) -> QueryKeyFrames:
    """Frames, gains and biases with the attention weights of ``weights``; see the module for when that is exact.

    Exact for ``frames="head"`` with ``gains="direction"``, a key head a query head, and no rotary embedding; then the
    key bias is left out. Weights that are frames with gains already, as when such a layer is loaded again, keep their
    basis: singular vectors are defined only up to order, sign and rotations of equal singular values. Computed in
    float64.

    Args:
        weights: what to convert.
        frames: "head", a frame a head; "whole", one frame over all heads.
        gains: "direction", one a frame direction; "head", one a head.
        rotary: rotations by position stand between the projections and the logits.
        atol: how far from orthonormal frames with gains may be to keep their basis.

    Raises:
        ValueError: a frame would be wide, or weights are not finite.

    Example:
        >>> import torch
        >>> w = HeadWeights(*torch.randn(2, 3, 8, 4, dtype=torch.float64))  # 3 heads of width 4 in a model of width 8
        >>> new = convert_query_key(w)
        >>> circuit = (new.query * new.query_gain[:, None]) @ new.key.mT
        >>> new.exact, torch.allclose(circuit, w.query @ w.key.mT)
        (True, True)
    """
    w = weights.double()
    heads, key_heads = w.query.shape[0], w.key.shape[0]
    group = heads // key_heads
    for role, matrix in (("query", w.query), ("key", w.key)):
        columns = matrix.shape[-1] if frames == "head" else matrix.shape[0] * matrix.shape[-1]
        if matrix.shape[-2] < columns:
            raise ValueError(
                f"{role} frames of {matrix.shape[-2]} rows and {columns} columns would be wide; frames={frames!r} "
                f"needs at most {matrix.shape[-2]} columns"
            )
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError(f"the {role} weights have NaN or infinite entries")

    exact = frames == "head" and gains == "direction" and group == 1 and not rotary
    query_bias, key_bias = w.query_bias, w.key_bias
    query, key, singular = w.query, w.key, None
    if not rotary:
        query, key, query_bias, singular = _shared_basis(w, group, atol)
        key_bias = None
    key_gain = None
    if frames == "head" and group == 1 and singular is not None:
        query_gain = singular if gains == "direction" else singular.mean(-1, keepdim=True)
    else:
        query = query if singular is None else query * singular.unsqueeze(-2)
        query, query_gain = fit_frames(query, frames=frames, gains=gains)
        if rotary or frames == "whole":
            key, key_gain = fit_frames(key, frames=frames, gains=gains)
    if key_gain is not None and not (rotary and gains == "direction"):
        # a scale of the keys moves to the queries that read them, a gain a direction only where no rotation is between
        moved = key_gain.repeat_interleave(group, 0)
        query_gain = query_gain * moved
        query_bias = None if query_bias is None else query_bias * moved
        key_bias = None if key_bias is None else key_bias / torch.where(key_gain == 0, torch.inf, key_gain)
        key_gain = None
    return QueryKeyFrames(query, key, query_gain, key_gain, query_bias, key_bias, exact)


def _shared_basis(w: HeadWeights, group: int, atol: float) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, orthonormal keys and query bias of the same logits, and the gains of the queries if a group is one head.

    With one query head a key head the queries come back as the frames U, otherwise as matrices W_Q R_kᵀ B.
    """
    key_heads, _, width = w.key.shape
    q_frames, q_upper = torch.linalg.qr(w.query.unflatten(0, (key_heads, group)))
    k_frames, k_upper = torch.linalg.qr(w.key)
    core = q_upper @ k_upper.mT.unsqueeze(1)  # (h_k, group, ·, d_h)
    left, singular, right = torch.linalg.svd(core.flatten(1, 2), full_matrices=False)
    to_basis = k_upper.mT @ right.mT
    key = k_frames @ right.mT

    lengths = w.query.norm(dim=-2)
    units = w.query / torch.where(lengths == 0, 1.0, lengths).unsqueeze(-2)
    settled = (_off_identity(w.key) <= atol) & (_off_diagonal(units) <= atol).unflatten(0, (key_heads, group)).all(1)
    identity = torch.eye(width, dtype=key.dtype, device=key.device)
    to_basis = torch.where(settled[:, None, None], identity, to_basis)
    key = torch.where(settled[:, None, None], w.key, key)
    bias = None
    if w.query_bias is not None:
        bias = (w.query_bias.unflatten(0, (key_heads, group)) @ to_basis).flatten(0, 1)
    if group > 1:
        return (w.query.unflatten(0, (key_heads, group)) @ to_basis.unsqueeze(1)).flatten(0, 1), key, bias, None
    if bool((lengths[settled] == 0).any()):
        units = torch.where((lengths == 0).any(-1)[:, None, None], polar_factor(units, "exact"), units)
    query = torch.where(settled[:, None, None], units, q_frames.squeeze(1) @ left)
    return query, key, bias, torch.where(settled[:, None], lengths, singular)


def _off_identity(a: Tensor) -> Tensor:
    return max_entry(a.mT @ a - torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))


def _off_diagonal(a: Tensor) -> Tensor:
    gram = a.mT @ a
    return max_entry(gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)))


def fit_frames(
    matrices: Tensor, *, frames: str = "head", gains: str = "direction", iterations: int = 50
) -> tuple[Tensor, Tensor]:
    """Frames U and gains g with U diag(g) near ``matrices``, a stationary point of ‖W − U diag(g)‖_F.

    By turns U is the polar factor of W diag(g), which maximizes tr Uᵀ W diag(g), and g_j = u_jᵀw_j, or its mean over a
    head for one gain a head; both only lower the distance. It starts from the lengths of the columns, so weights of
    that form come back as they are. One gain over a frame is settled after one turn: the polar factor.

    Args:
        matrices: (h, n, d_h), float64.
        frames, gains: as for :func:`convert_query_key`.
        iterations: turns at most; it stops when gains move by less than 1e-12 of the largest.

    Returns:
        (U, g): (h, n, d_h), or (1, n, h·d_h) for "whole"; (h, d_h), or (h, 1).

    Example:
        >>> import torch
        >>> u = torch.linalg.qr(torch.randn(2, 5, 3, dtype=torch.float64))[0]
        >>> g = torch.tensor([[3.0, 2.0, 1.0], [1.0, 4.0, 0.5]], dtype=torch.float64)
        >>> frames, gains = fit_frames(u * g[:, None])
        >>> torch.allclose(frames, u), torch.allclose(gains, g)
        (True, True)
    """
    heads, rows, width = matrices.shape
    target = matrices if frames == "head" else matrices.transpose(0, 1).reshape(1, rows, heads * width)

    def averaged(columns: Tensor) -> Tensor:
        per_head = columns.reshape(heads, width)
        return per_head if gains == "direction" else per_head.mean(-1, keepdim=True)

    gain = averaged(matrices.norm(dim=-2))
    frame = target
    for _ in range(iterations):
        spread = gain.expand(heads, width).reshape(target.shape[0], 1, -1)
        frame = polar_factor(target * spread, "exact")
        before, gain = gain, averaged((frame * target).sum(-2))
        if bool((gain - before).abs().max() <= 1e-12 * gain.abs().max()):
            break
    return frame, gain
