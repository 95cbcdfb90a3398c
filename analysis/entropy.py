"""How spread a head's attention is: the entropy of its weights, from the weights themselves or from hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._arrays import ArrayLike, as_tensor
from .geometry import LayerGeometry
from .model_config import ADDITIVE


def weights_entropy(weights: ArrayLike) -> Tensor:
    """Shannon entropy −Σ aᵢ log aᵢ of attention weights over their last dimension, in nats.

    Args:
        weights: (..., keys), nonnegative, of sum 1 along the last dimension, such as the ``attentions`` that a Hugging
            Face model returns under ``output_attentions=True``: (batch, heads, queries, keys).

    Returns:
        (...), float64, between 0 (one key) and log(keys) (all alike). NaN where a weight is NaN.

    Example:
        >>> weights_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.0000, 0.6931], dtype=torch.float64)
    """
    tensor = as_tensor(weights, "weights").to(torch.float64)
    return 0 - torch.xlogy(tensor, tensor).sum(-1)  # not its negative: that of one weight of 1 would be −0


def attention_entropy(
    layer: LayerGeometry,
    hidden: ArrayLike,
    keys: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    causal: bool = False,
) -> Tensor:
    """Entropy of the attention that a layer pays on given inputs, in nats.

    Args:
        layer: a geometry with its frames.
        hidden: what the layer's query projection is applied to, (..., L, d): the input of the attention module itself,
            after a pre-norm if the model has one.
        keys: what the key projection is applied to, (..., S, kdim); ``hidden`` in self-attention.
        mask: added to the logits, (L, S) or broadcast to (..., heads, L, S); boolean masks are True where attention is
            *not* allowed, as in ``nn.MultiheadAttention``.
        causal: forbid keys after the query's position.

    Returns:
        (..., heads, L), float64; at most log S. NaN for a query that may attend to nothing.

    Raises:
        ValueError: a geometry without frames; inputs of another width; a layer with rotary positions, or of which
            nothing says whether it has them, or with something else between its projections and the softmax: take the
            weights from the model and :func:`weights_entropy`.

    Example:
        >>> from geodescent.analysis import attention_entropy, attention_geometry
        >>> layer = attention_geometry(torch.nn.MultiheadAttention(16, 4)).layers[0]
        >>> attention_entropy(layer, torch.zeros(2, 5, 16)).shape           # a batch of 2, 5 positions
        torch.Size([2, 4, 5])
    """
    if layer.query_frames is None or layer.key_frames is None:
        raise ValueError(f"layer {layer.name!r} was measured with keep_frames=False: its entropy needs the frames")
    between = [note for note in layer.notes if not (note == ADDITIVE and mask is not None)]
    if layer.rotary is not False:
        between.insert(0, "rotary positions" if layer.rotary else "rotary positions for all that is known")
    if between:
        raise ValueError(
            f"layer {layer.name!r} has {', '.join(between)} between its projections and the softmax: take the weights "
            "from the model and weights_entropy(), or give layout=AttentionLayout(..., rotary=False) if it has none"
        )
    x = _inputs(hidden, "hidden", layer.query_frames)
    y = x if keys is None else _inputs(keys, "keys", layer.key_frames)
    share = layer.num_heads // layer.num_key_value_heads
    query = x.unsqueeze(-3) @ layer.query_frames
    if layer.query_bias is not None:
        query = query + layer.query_bias[:, None, :]
    scale = layer.logit_scale if layer.logit_scale.ndim == 2 else layer.logit_scale[:, None]
    key = (y.unsqueeze(-3) @ layer.key_frames).repeat_interleave(share, -3)
    logits = query * scale[:, None, :] @ key.mT
    if mask is not None:
        given = torch.as_tensor(mask)
        logits = logits.masked_fill(given, -math.inf) if given.dtype == torch.bool else logits + given.to(torch.float64)
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, -math.inf)
    return weights_entropy(torch.softmax(logits, -1))


def _inputs(value: Any, name: str, frames: Tensor) -> Tensor:
    tensor = as_tensor(value, name).to("cpu", torch.float64)
    if tensor.ndim < 2 or tensor.shape[-1] != frames.shape[-2]:
        raise ValueError(f"{name} must be (..., length, {frames.shape[-2]}), found {tuple(tensor.shape)}")
    return tensor
