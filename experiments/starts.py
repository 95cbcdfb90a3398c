"""The model of an arm at the paired start of a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ..attention import StiefelAttention
from .arms import Arm

__all__ = ["attentions", "build_model", "qk_parameters"]


class ModelFactory(Protocol):
    def __call__(self, attention: Mapping[str, Any]) -> nn.Module: ...


_FREE = {"constrain": (), "logit_scale": "learned"}
_FRAMES = {"constrain": ("q", "k"), "frames": "head", "logit_scale": "learned"}


def build_model(arm: Arm, factory: ModelFactory, seed: int, input_square_norm: float) -> nn.Module:
    """The arm's model: within a seed every arm has the same values outside Q and K, all arms that start orthonormal
    the same frames, and all logits the same variance at the start.

    Draws nothing from the caller's generator.

    Args:
        factory: builds the model from arguments of `StiefelAttention`, drawing from torch's global generator.
        input_square_norm: ‖x‖² of what the attention reads, about, by which the scale of normalized queries and keys
            is matched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        free = factory(attention=_FREE)
        torch.manual_seed(seed)
        framed = factory(attention=_FRAMES)
    model, other = (framed, free) if arm.frames else (free, framed)
    if arm.frames:
        own = {id(p) for layer in attentions(model) for p in (*qk_parameters(layer), layer.logit_scale)}
        paired = dict(free.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if id(parameter) not in own:
                    parameter.copy_(paired[name])
    if arm.orthonormal_start:
        _take_frames(model, other)
    if arm.normalize:
        for layer in attentions(model):
            _normalize(layer, input_square_norm)
    if arm.rule == "none":
        for layer in attentions(model):
            for parameter in qk_parameters(layer):
                parameter.requires_grad_(False)
    return model


def attentions(model: nn.Module) -> list[StiefelAttention]:
    return [module for module in model.modules() if isinstance(module, StiefelAttention)]


def qk_parameters(layer: StiefelAttention) -> list[nn.Parameter]:
    """The query and the key weight."""
    return [cast(nn.Parameter, projection.weight) for projection in (layer.q_proj, layer.k_proj)]


@torch.no_grad()
def _take_frames(model: nn.Module, framed: nn.Module) -> None:
    for layer, source in zip(attentions(model), attentions(framed), strict=True):
        for own, theirs in ((layer.q_proj, source.q_proj), (layer.k_proj, source.k_proj)):
            assert not isinstance(theirs, nn.Linear)
            own.weight.copy_(theirs.matrix())
        layer.logit_scale.copy_(source.logit_scale)


@torch.no_grad()
def _normalize(layer: StiefelAttention, input_square_norm: float) -> None:
    """Divide every head's queries and keys by their norms, and set the scale that gives the logits the variance they
    had: s²·d_h·(σ²‖x‖²)² before, s²/d_h of unit vectors in random directions after."""

    def unit(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        return nn.functional.normalize(out.unflatten(-1, (-1, layer.head_dim)), dim=-1).flatten(-2)

    sigma = math.sqrt(2 / (4 * layer.embed_dim))  # of nn.MultiheadAttention's fused (3d, d) matrix
    for projection in (layer.q_proj, layer.k_proj):
        projection.register_forward_hook(unit)
    layer.logit_scale.mul_(layer.head_dim * sigma**2 * input_square_norm)
