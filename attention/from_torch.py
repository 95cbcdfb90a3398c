"""The weights of an ``nn.MultiheadAttention`` as frames, gains and what is left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..manifolds import Manifold
from .projections import FrameProjection

if TYPE_CHECKING:
    from .stiefel_attention import StiefelAttention

__all__ = ["arguments_of", "copy_attention"]


def arguments_of(module: nn.MultiheadAttention) -> dict[str, Any]:
    """The arguments of ``StiefelAttention`` for a layer of the sizes and options of ``module``.

    Raises:
        TypeError: ``module`` is not an ``nn.MultiheadAttention``.

    Example:
        >>> arguments_of(nn.MultiheadAttention(16, 4, dropout=0.1))["num_heads"]
        4
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be an nn.MultiheadAttention, found {type(module).__name__}")
    weight = module.out_proj.weight
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout,
        "bias": module.in_proj_bias is not None,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "batch_first": module.batch_first,
        "device": weight.device,
        "dtype": weight.dtype,
    }


@torch.no_grad()
def copy_attention(module: nn.MultiheadAttention, layer: StiefelAttention, *, free_scale: bool) -> None:
    """Fill ``layer`` with the weights of ``module``; see ``StiefelAttention.from_attention``.

    Everything is computed a head in float64 on the CPU and rounded once.

    Args:
        free_scale: the logit scale of ``layer`` may be set; otherwise it is kept.

    Raises:
        ValueError: the kept scale is 0.

    Example:
        >>> from geodescent.attention import StiefelAttention
        >>> module, layer = nn.MultiheadAttention(8, 2), StiefelAttention(8, 2, logit_scale="spectrum")
        >>> copy_attention(module, layer, free_scale=True)
        >>> q, k = module.in_proj_weight[:4].mT, module.in_proj_weight[8:12].mT
        >>> gains = layer.logit_scale[0] * 4**0.5
        >>> torch.allclose(layer.query_frames()[0] * gains @ layer.key_frames()[0].mT, q @ k.mT, atol=1e-5)
        True
    """
    source = _Source.of(module)
    polar = _Polar(layer.manifold, layer.frames == "whole")
    kept = None if free_scale else _copy64(layer.logit_scale)
    if kept is not None and not bool(kept.all()):
        raise ValueError("logit_scale must not be 0: no frames give the logits of the module then")
    spectrum = layer.logit_scale.ndim == 2
    circuit = _circuit(source, layer.constrain, polar, kept, spectrum, torch.finfo(layer.logit_scale.dtype).eps)
    w_v, w_o, to_value = _value_path(source, layer.constrain, polar)

    _write(layer.q_proj, circuit.w_q, circuit.b_q)
    _write(layer.k_proj, circuit.w_k, circuit.to_key(source.b_k))
    _write(layer.v_proj, w_v, to_value(source.b_v))
    _write(layer.out_proj, w_o, _copy64(module.out_proj.bias).flatten(), output=True)
    if free_scale:
        layer.logit_scale.copy_(circuit.gains if spectrum else circuit.gains[:, 0])
    if layer.bias_k is not None and layer.bias_v is not None:
        # where the layer has no key bias the other keys lose b_k, so the extra key must lose it as well
        lost = source.b_k if layer.k_proj.bias is None else torch.zeros_like(source.b_k)
        layer.bias_k.copy_(circuit.to_key(source.bias_k - lost).reshape(layer.bias_k.shape))
        layer.bias_v.copy_(to_value(source.bias_v).reshape(layer.bias_v.shape))


@dataclass
class _Source:
    """Weights a head, (heads, n, d_h), W_O transposed, and biases (heads, d_h), zero where there are none."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor
    b_k: Tensor
    b_v: Tensor
    bias_k: Tensor
    bias_v: Tensor

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> _Source:
        if module.in_proj_weight is None:
            rows = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        else:
            rows = list(module.in_proj_weight.chunk(3))
        nothing = module.out_proj.weight.new_zeros(module.embed_dim)
        biases = (nothing,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        extra = (nothing if b is None else b.flatten() for b in (module.bias_k, module.bias_v))
        weights = (_copy64(w).unflatten(0, (module.num_heads, -1)).mT for w in (*rows, module.out_proj.weight.mT))
        return cls(*weights, *(_copy64(b).unflatten(0, (module.num_heads, -1)) for b in (*biases, *extra)))


@dataclass
class _Polar:
    """The nearest frames to the weights of the heads: a frame a head, or one of them side by side."""

    manifold: Manifold
    whole: bool

    def __call__(self, w: Tensor) -> Tensor:
        if not self.whole:
            return self.manifold.project_point(w)
        frame = self.manifold.project_point(w.transpose(0, 1).flatten(1))
        return frame.unflatten(1, (w.shape[0], -1)).transpose(0, 1)


@dataclass
class _Circuit:
    w_q: Tensor
    b_q: Tensor
    w_k: Tensor
    gains: Tensor  # (heads, d_h), equal in a head unless they are a spectrum
    to_key: Callable[[Tensor], Tensor]  # a vector of key space, (heads, d_h), in the new basis


def _circuit(
    s: _Source, constrain: tuple[str, ...], polar: _Polar, kept: Tensor | None, spectrum: bool, eps: float
) -> _Circuit:
    """(x W_Q + b_q)·(y W_K + b_k)/√d_h as (x W'_Q + b'_q) g (y W'_K + b'_k)ᵀ.

    What b'_q must be follows from W'_K g b'_q = W_K b_q/√d_h, and b'_k likewise.
    """
    heads, _, width = s.w_q.shape
    root = width**0.5
    shape = (heads, width)
    given = None if kept is None else (kept if kept.ndim == 2 else kept[:, None]).expand(shape)
    q_framed, k_framed = "q" in constrain, "k" in constrain

    if q_framed and k_framed:
        if spectrum:
            u, v = _singular_frames(s.w_q, s.w_k)
            u, v = (polar(u), polar(v)) if polar.whole else (u, v)
        else:
            u, v = polar(s.w_q), polar(s.w_k)
        from_q, from_k = u.mT @ s.w_q / root, v.mT @ s.w_k
        bias = _apply(from_k, s.b_q) / root
        gains = given
        if gains is None:
            gains = torch.linalg.diagonal(from_q @ from_k.mT)  # the least squares of U g Vᵀ
            gains = gains if spectrum else gains.mean(-1, keepdim=True).expand(shape)
            # a direction that is dead but for its bias keeps a gain that the bias can be divided by
            floor = eps * torch.maximum(gains.abs(), bias.abs()).amax(-1, keepdim=True)
            gains = torch.where((gains.abs() < floor) & (bias != 0), floor, gains)
        divisor = torch.where(gains == 0, torch.ones_like(gains), gains)
        return _Circuit(u, bias / divisor, v, gains, lambda c: _apply(from_q, c) / divisor)

    if q_framed:
        u = polar(s.w_q)
        rest = s.w_q.mT @ u  # W_Q = U restᵀ
        w_k = s.w_k @ rest / root
        gains = given if given is not None else _norm_ratio(w_k, s.w_k, root).expand(shape)
        return _Circuit(
            u,
            _solve(rest, s.b_q),
            w_k / gains.unsqueeze(-2),
            gains,
            lambda c: _apply(rest.mT, c) / (root * gains),
        )
    if k_framed:
        v = polar(s.w_k)
        rest = s.w_k.mT @ v
        w_q = s.w_q @ rest / root
        gains = given if given is not None else _norm_ratio(w_q, s.w_q, root).expand(shape)
        b_q = _apply(rest.mT, s.b_q) / (root * gains)
        return _Circuit(w_q / gains.unsqueeze(-2), b_q, v, gains, lambda c: _solve(rest, c))
    gains = given if given is not None else s.w_q.new_full(shape, 1 / root)
    factor = 1 / (root * gains)
    return _Circuit(s.w_q * factor.unsqueeze(-2), s.b_q * factor, s.w_k, gains, lambda c: c)


def _singular_frames(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    """U and V of W_Q W_Kᵀ = U Σ Vᵀ, orthonormal also where a factor is rank deficient, through p×p."""
    (q_q, r_q), (q_k, r_k) = torch.linalg.qr(w_q), torch.linalg.qr(w_k)
    left, _, right = torch.linalg.svd(r_q @ r_k.mT)
    return q_q @ left, q_k @ right.mT


def _value_path(
    s: _Source, constrain: tuple[str, ...], polar: _Polar
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """W_V and W_Oᵀ, the constrained ones frames, and the map of vectors of value space to the new basis."""
    v_framed, o_framed = "v" in constrain, "o" in constrain
    if v_framed and o_framed:
        o = polar(s.w_o)
        return polar(s.w_v), o, lambda b: _apply(o.mT @ s.w_o, b)
    if v_framed:
        v = polar(s.w_v)
        rest = s.w_v.mT @ v  # W_V = V restᵀ, so W_O becomes restᵀ W_O
        return v, s.w_o @ rest, lambda b: _solve(rest, b)
    if o_framed:
        o = polar(s.w_o)
        rest = s.w_o.mT @ o
        return s.w_v @ rest, o, lambda b: _apply(rest.mT, b)
    return s.w_v, s.w_o, lambda b: b


def _copy64(t: Tensor | None) -> Tensor:
    """A float64 copy on the CPU, empty for None."""
    if t is None:
        return torch.zeros(0, dtype=torch.float64)
    return t.detach().to("cpu", torch.float64, copy=True)


def _apply(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.unsqueeze(-1)).squeeze(-1)


def _solve(a: Tensor, b: Tensor) -> Tensor:
    """The least solution x of the p×p systems A x = b, that of least squares where A is singular."""
    return torch.linalg.lstsq(a, b.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)


def _norm_ratio(a: Tensor, b: Tensor, root: float) -> Tensor:
    """‖A‖/‖B‖ a head, (heads, 1), or that of ordinary attention, 1/√d_h, where a norm vanishes."""
    a, b = (t.norm(dim=(-2, -1)) for t in (a, b))
    return torch.where((a > 0) & (b > 0), a / b, 1 / root).unsqueeze(-1)


def _write(projection: nn.Linear | FrameProjection, w: Tensor, bias: Tensor, *, output: bool = False) -> None:
    """Store W (heads, n, d_h) and a bias in whatever layout ``projection`` has."""
    side_by_side = w.transpose(0, 1).flatten(1)  # (n, heads·d_h)
    if isinstance(projection, FrameProjection):
        whole = projection.weight.shape[0] == 1
        projection.weight.copy_(side_by_side.unsqueeze(0) if whole else w)
    else:
        projection.weight.copy_(side_by_side if output else side_by_side.mT)
    if projection.bias is not None:
        projection.bias.copy_(bias.flatten())
