"""How far a conversion moves an attention layer and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..manifolds.linalg import full_float32_products
from .conversion import HeadWeights

__all__ = ["circuit_change", "model_output", "weight_change"]

_TOKENS = 48
_SEED = 0
_ROTARY_BASE = 10_000.0  # of the Llama family; only representative, a layer does not know its own


@full_float32_products()
def circuit_change(before: HeadWeights, after: HeadWeights, *, rotary: bool) -> float:
    """max over heads of ‖C' − C‖_F / ‖C‖_F, C the logits' bilinear form with the query bias as one more row.

    With rotary embeddings positions are equal, and the key bias, which then counts, is one more row of the keys.
    Relative errors down to the rounding of float64 are seen: the difference is factored, never formed.
    """
    old, new = _augmented(before.double(), rotary), _augmented(after.double(), rotary)
    left = torch.linalg.qr(torch.cat([new[0], -old[0]], -1)).R
    right = torch.linalg.qr(torch.cat([new[1], old[1]], -1)).R
    moved = (left @ right.mT).norm(dim=(-2, -1))
    size = (torch.linalg.qr(old[0]).R @ torch.linalg.qr(old[1]).R.mT).norm(dim=(-2, -1))
    ratio = torch.where(moved == 0, 0.0, moved / torch.where(size == 0, 1.0, size))
    return float(ratio.max())


def _augmented(w: HeadWeights, rotary: bool) -> tuple[Tensor, Tensor]:
    query, key = w.query, w.key
    if w.query_bias is not None:
        query = torch.cat([query, w.query_bias.unsqueeze(-2)], -2)
    if rotary and w.key_bias is not None:
        key = torch.cat([key, w.key_bias.unsqueeze(-2)], -2)
    return query, key.repeat_interleave(query.shape[0] // key.shape[0], 0)


@full_float32_products()
def weight_change(before: HeadWeights, after: HeadWeights, *, scaling: float, rotary: bool) -> float:
    """The largest change of an attention weight, in float64, on 48 standard normal tokens, as after a layer norm.

    With rotary embeddings the tokens are in a row, and planes are those of the Llama family.
    """
    generator = torch.Generator().manual_seed(_SEED)
    d, dk = before.query.shape[-2], before.key.shape[-2]
    x = torch.randn(_TOKENS, d, generator=generator, dtype=torch.float64)
    y = x if d == dk else torch.randn(_TOKENS, dk, generator=generator, dtype=torch.float64)
    old, new = (_attention_weights(w.double(), x, y, scaling, rotary) for w in (before, after))
    return float((new - old).abs().max())


def _attention_weights(w: HeadWeights, x: Tensor, y: Tensor, scaling: float, rotary: bool) -> Tensor:
    q, k = x.to(w.query.device) @ w.query, y.to(w.key.device) @ w.key
    q = q if w.query_bias is None else q + w.query_bias.unsqueeze(-2)
    k = k if w.key_bias is None else k + w.key_bias.unsqueeze(-2)
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    if rotary:
        q, k = _rotated(q), _rotated(k)
    return torch.softmax(scaling * q @ k.mT, -1)


def _rotated(t: Tensor) -> Tensor:
    tokens, width = t.shape[-2:]
    half = width // 2
    rate = _ROTARY_BASE ** (-torch.arange(half, dtype=t.dtype, device=t.device) / max(half, 1))
    angle = torch.arange(tokens, dtype=t.dtype, device=t.device).unsqueeze(-1) * rate
    a, b, rest = t[..., :half], t[..., half : 2 * half], t[..., 2 * half :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


@torch.no_grad()
def model_output(model: nn.Module, inputs: Any) -> Tensor:
    """The first floating-point tensor of what the model in eval mode makes of ``inputs``; its mode is kept.

    Raises:
        ValueError: the output holds none.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    finally:
        for module, training in modes:
            module.training = training
    found = _first_tensor(output)
    if found is None:
        raise ValueError(f"the model's output, a {type(output).__name__}, holds no floating-point tensor to compare")
    return found.detach()


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        # of a Hugging Face output the logits, whatever stands before them, such as a loss
        parts = [value[n] for n in ("logits", "last_hidden_state") if n in value] + list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = value
    return next((t for t in map(_first_tensor, parts) if t is not None), None)
