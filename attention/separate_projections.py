"""Attention modules whose query and key projections are two submodules: these are exchanged, the rest stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .constraint import Constraint, RowWeights, load_pair
from .head_projection import HeadProjection

__all__ = ["SeparatePair", "install_separate", "release_separate", "separate_pair"]

#: the attribute of the attention module that holds its SeparatePair
_ATTRIBUTE = "geodescent_pair"


@dataclass(frozen=True)
class SeparatePair:
    """Names of the two submodules, and what binds them."""

    query: str
    key: str
    constraint: Constraint
    handle: RemovableHandle


def separate_pair(module: nn.Module) -> SeparatePair | None:
    """What :func:`install_separate` left on the module."""
    return vars(module).get(_ATTRIBUTE)


def install_separate(module: nn.Module, query: str, key: str, constraint: Constraint) -> bool:
    """Exchange the two ``nn.Linear`` named ``query`` and ``key``; whether attention weights are unchanged."""
    q, k = module.get_submodule(query), module.get_submodule(key)
    rows = RowWeights(q.weight, k.weight, q.bias, k.bias)  # type: ignore[arg-type]
    new_q, new_k, exact = constraint.pair(rows)
    setattr(module, query, new_q.train(q.training))
    setattr(module, key, new_k.train(k.training))
    handle = module.register_load_state_dict_pre_hook(_convert_on_load)
    setattr(module, _ATTRIBUTE, SeparatePair(query, key, constraint, handle))
    return exact


def release_separate(module: nn.Module) -> None:
    """Put ``nn.Linear`` back, with the effective weights."""
    pair = separate_pair(module)
    assert pair is not None
    for name in (pair.query, pair.key):
        projection = module.get_submodule(name)
        assert isinstance(projection, HeadProjection)
        setattr(module, name, _linear(projection))
    pair.handle.remove()
    delattr(module, _ATTRIBUTE)


@torch.no_grad()
def _linear(projection: HeadProjection) -> nn.Linear:
    bias = projection.saved_bias
    # the meta device spares the initialization, which would also move the global random state
    linear = nn.Linear(projection.in_features, projection.out_features, bias is not None, device="meta")
    linear.weight = nn.Parameter(projection.weight.detach().clone(), projection.frames.requires_grad)
    if bias is not None:
        grad = bias.requires_grad if projection.bias is not None else projection.frames.requires_grad
        linear.bias = nn.Parameter(bias.detach().clone(), grad)
    return linear.train(projection.training)


def _convert_on_load(
    module: nn.Module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
) -> None:
    pair = separate_pair(module)
    assert pair is not None
    query, key = module.get_submodule(pair.query), module.get_submodule(pair.key)
    assert isinstance(query, HeadProjection)
    assert isinstance(key, HeadProjection)
    prefixes = (f"{prefix}{pair.query}.", f"{prefix}{pair.key}.")
    names = {"query": prefixes[0] + "weight", "key": prefixes[1] + "weight"}
    for role, projection, start in (("query_bias", query, prefixes[0]), ("key_bias", key, prefixes[1])):
        if projection.saved_bias is not None:
            names[role] = start + "bias"
    if names["query"] not in state_dict and names["key"] not in state_dict:
        return  # frames themselves, which the projections load, or nothing, which they report
    found = {}
    for role, name in names.items():
        if name in state_dict:
            found[role] = state_dict.pop(name)
        elif strict:
            missing_keys.append(name)
    load_pair(
        pair.constraint,
        query,
        key,
        found,
        state_dict,
        prefixes,
        local_metadata.get("assign_to_params_buffers", False),
        error_msgs,
    )
