"""The attention layers of a model that can be constrained, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .constrained_multihead_attention import IN_PROJECTION, ConstrainedMultiheadAttention, multihead_parts
from .constraint import Constraint, RowWeights
from .fused_projection import FusedProjection, fused_parts
from .fused_state import FusedState
from .head_projection import HeadProjection
from .projection_layouts import ProjectionLayout, layout_of, looks_like_attention
from .separate_projections import install_separate, separate_pair
from .sharding import is_sharded
from .stiefel_attention import StiefelAttention

__all__ = ["Place", "Tensors", "find_places"]

Tensors = Mapping[int, list[str]]  # the names under which a parameter, by its id, is in the model


@dataclass(frozen=True)
class Place:
    """An attention module, with its layout: None for ``nn.MultiheadAttention`` and for classes that are not known."""

    name: str
    module: nn.Module
    layout: ProjectionLayout | None

    @property
    def kind(self) -> str:
        """The class, for reports."""
        return type(self.module).__name__

    @property
    def constrained(self) -> bool:
        """Whether :meth:`install` has been here."""
        if isinstance(self.module, ConstrainedMultiheadAttention) or separate_pair(self.module) is not None:
            return True
        fused = None if self.layout is None else self.layout.fused
        return fused is not None and isinstance(getattr(self.module, fused, None), FusedProjection)

    # --- what speaks against it -------------------------------------------------------------------------------------

    def problem(self, names: Tensors) -> str | None:
        """Why the layer cannot be constrained, or None."""
        m = self.module
        if self.constrained:
            return "is constrained already"
        if any(is_sharded(p) for p in m.parameters()):
            return "is sharded: constrain before sharding"
        if isinstance(m, StiefelAttention):
            return "has frames already: set its options when it is made"
        if isinstance(m, nn.MultiheadAttention):
            if type(m) is not nn.MultiheadAttention:
                return f"unknown layout: {self.kind} is a subclass of nn.MultiheadAttention"
            if m.bias_k is not None:
                return "add_bias_kv: a learned key is tied to the basis of the keys"
            if m.add_zero_attn and m.in_proj_bias is not None:
                return "add_zero_attn with biases: beside a zero key, the bias of the others is not cancelled"
        elif self.layout is None:
            return f"unknown layout: class {type(m).__module__}.{self.kind}; describe it by layouts={{...}}"
        else:
            for attribute, value, why in self.layout.unless:
                if getattr(m, attribute, None) == value:
                    return why
        if (problem := self._problem_of_projections()) is not None:
            return problem
        for name, tensor in self.parameters().items():
            if (problem := _problem_of_parameter(name, tensor, names)) is not None:
                return problem
        weights = self.weights()
        width = self.head_dim
        if not isinstance(width, int) or width < 1:
            return f"the width of a head is unknown: found {width!r}"
        if weights.query.shape[0] % width or weights.key.shape[0] % width:
            return f"{weights.query.shape[0]} queries and {weights.key.shape[0]} keys are no multiples of {width}"
        if weights.query.shape[0] % weights.key.shape[0]:
            return f"{weights.query.shape[0] // width} query heads are no multiple of {weights.key.shape[0] // width}"
        return None

    def _problem_of_projections(self) -> str | None:
        if self.layout is None:
            return None
        for name in self.layout.names:
            child = getattr(self.module, name, None)
            if not isinstance(child, nn.Module):
                return f"unknown layout: no submodule {name!r}"
            kind = type(child)
            conv = self.layout.transposed and kind.__name__ == "Conv1D"
            if kind is not nn.Linear and not conv:
                return (
                    f"{name} is a {kind.__module__}.{kind.__name__}, not a plain nn.Linear: quantized, adapted and "
                    "parametrized projections are left alone"
                )
            hooks = (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)
            if any(hooks) or "forward" in vars(child):
                return f"{name} has hooks, or a forward of its own, which would be lost"
        if self.layout.fused is not None:
            weight = getattr(self.module, self.layout.fused).weight
            if weight.shape[1 if self.layout.transposed else 0] % 3:
                return (
                    f"{self.layout.fused} of shape {tuple(weight.shape)} is not queries, keys and values of equal size"
                )
        return None

    # --- what is there ----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """What will be exchanged, by name within the module."""
        m = self.module
        if self.layout is None:
            found = {n: getattr(m, n) for n in IN_PROJECTION}
        else:
            found = {}
            for child in self.layout.names:
                found |= {f"{child}.{p}": getattr(getattr(m, child), p, None) for p in ("weight", "bias")}
        return {n: t for n, t in found.items() if t is not None}

    @property
    def head_dim(self) -> Any:
        return getattr(self.module, "head_dim" if self.layout is None else self.layout.head_dim, None)

    @property
    def scaling(self) -> float | None:
        """What the module multiplies its logits by, if it says so."""
        if self.layout is None:
            return self.head_dim**-0.5
        value = getattr(self.module, self.layout.scaling, None)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def rotary(self) -> bool:
        return self.layout is not None and self.layout.rotary

    def weights(self) -> RowWeights:
        """The effective weights, constrained or not."""
        m = self.module
        if self.constrained:
            return RowWeights.of(*self.projections())
        if isinstance(m, nn.MultiheadAttention):
            return multihead_parts(m)[0]
        assert self.layout is not None
        if self.layout.fused is not None:
            return fused_parts(getattr(m, self.layout.fused), self.layout.transposed)[0]
        q, k = (getattr(m, name) for name in self.layout.names)
        return RowWeights(q.weight, k.weight, q.bias, k.bias)

    def projections(self) -> tuple[HeadProjection, HeadProjection]:
        """The constrained projections."""
        pair = separate_pair(self.module)
        if pair is not None:
            query, key = self.module.get_submodule(pair.query), self.module.get_submodule(pair.key)
        else:
            fused = self.module if self.layout is None else self.module.get_submodule(self.layout.fused or "")
            assert isinstance(fused, FusedState)
            query, key = fused.query, fused.key
        assert isinstance(query, HeadProjection)
        assert isinstance(key, HeadProjection)
        return query, key

    # --- what is done to it -----------------------------------------------------------------------------------------

    def install(self, constraint: Constraint) -> bool:
        """Constrain the layer; whether attention weights are unchanged."""
        m = self.module
        if isinstance(m, nn.MultiheadAttention):
            return ConstrainedMultiheadAttention.adopt(m, constraint)
        assert self.layout is not None
        if self.layout.fused is None:
            query, key = self.layout.names
            return install_separate(m, query, key, constraint)
        fused = FusedProjection(getattr(m, self.layout.fused), constraint, transposed=self.layout.transposed)
        setattr(m, self.layout.fused, fused)
        return fused.exact


def _problem_of_parameter(name: str, tensor: Any, names: Tensors) -> str | None:
    if hasattr(tensor, "ds_id"):
        return f"{name} is sharded by DeepSpeed: constrain before sharding"
    if type(tensor) is not nn.Parameter:
        return f"{name} is a {type(tensor).__name__}, not a plain nn.Parameter"
    if tensor.is_meta:
        return f"{name} is on the meta device: load weights first"
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"{name} has dtype {tensor.dtype}"
    if len(names.get(id(tensor), [])) > 1:
        return f"{name} is tied: " + " is ".join(names[id(tensor)])
    if not bool(torch.isfinite(tensor).all()):
        return f"{name} has NaN or infinite entries"
    return None


def find_places(model: nn.Module, layouts: Mapping[type, ProjectionLayout]) -> list[Place]:
    """The attention modules of a model, of known classes and of others that look like one."""
    places, holders, unknown = [], [], set()
    for name, module in model.named_modules():
        layout = layout_of(module, layouts)
        known = layout is not None or isinstance(module, (nn.MultiheadAttention, StiefelAttention))
        if not known and isinstance(module, (FusedState, HeadProjection)):
            continue
        holds = known or looks_like_attention(module)
        if holds:
            holders.append(name)
        if holds or _named_attention(module):
            places.append(Place(name, module, layout))
        if not known:
            unknown.add(name)

    def is_part_or_wrapper(place: Place) -> bool:
        above = any(_is_below(place.name, holder) for holder in holders)
        return above or (place.name not in holders and any(_is_below(holder, place.name) for holder in holders))

    return [place for place in places if place.name not in unknown or not is_part_or_wrapper(place)]


def _named_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and next(module.parameters(), None) is not None


def _is_below(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}." if other else "")
