"""What fused layers with constrained queries and keys share: their state dict is that of the layer they replace."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from .constraint import Constraint, RowWeights, load_pair
from .head_projection import HeadProjection
from .sharding import placed_like, whole

__all__ = ["FusedState"]


class FusedState(nn.Module):
    """Holds the projections ``query`` and ``key`` and the plain ``value_weight`` (out, in) and ``value_bias``."""

    query: HeadProjection
    key: HeadProjection
    value_weight: nn.Parameter
    value_bias: nn.Parameter | None
    constraint: Constraint

    def _hold(self, rows: RowWeights, value: Tensor, value_bias: Tensor | None, constraint: Constraint) -> bool:
        """Set up from ordinary weights; whether attention weights are unchanged."""
        self.constraint = constraint
        self.query, self.key, exact = constraint.pair(rows)
        for projection in (self.query, self.key):
            projection.saved_above = True
            projection.train(self.training)
        self.value_weight = nn.Parameter(
            value.detach().clone(memory_format=torch.contiguous_format), value.requires_grad
        )
        self.value_bias = None
        if value_bias is not None:
            self.value_bias = nn.Parameter(value_bias.detach().clone(), value_bias.requires_grad)
        return exact

    def fused_weight(self) -> Tensor:
        """Queries, keys, values: (out, in)."""
        return torch.cat([self.query.weight, self.key.weight, self.value_weight])

    def fused_bias(self) -> Tensor | None:
        """Queries, keys, values: (out,), with zeros where the conversion dropped the keys' bias."""
        query, key = self.query.saved_bias, self.key.saved_bias
        if query is None or key is None or self.value_bias is None:
            return None
        return torch.cat([query, key, self.value_bias])

    @staticmethod
    def thirds(tensor: Tensor, suffix: str = "") -> dict[str, Tensor]:
        """A fused tensor, its outputs first, by role: "query", "key" and "value", each with the suffix."""
        return dict(zip([f"{role}{suffix}" for role in ("query", "key", "value")], tensor.chunk(3), strict=True))

    @abstractmethod
    def ordinary(self) -> dict[str, Tensor]:
        """The entries of the state dict of the layer this one replaces."""

    @abstractmethod
    def split(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        """Such entries by role: "query", "key", "value", and the same with "_bias"; weights as (out, in)."""

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        if self.query.saves_frames:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self.ordinary().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        now_entries = self.ordinary()
        # a frame_state_dict has its own keys; where there are both, the ordinary ones are meant:
        # torch.distributed.checkpoint.state_dict adds the model's own parameters to what it loads
        if prefix + "value_weight" not in state_dict or any(prefix + name in state_dict for name in now_entries):
            entries = {}
            for name, now in now_entries.items():
                if prefix + name not in state_dict:
                    missing_keys.append(prefix + name)
                    continue
                tensor = whole(state_dict.pop(prefix + name))
                if tensor.shape == now.shape:
                    entries[name] = tensor
                else:
                    error_msgs.append(
                        f"size mismatch for {prefix}{name}: copying a tensor of shape {tuple(tensor.shape)} from "
                        f"checkpoint, the shape in current model is {tuple(now.shape)}."
                    )
            found = self.split(entries)
            for role in ("value", "value_bias"):
                if role in found:
                    name = "value_weight" if role == "value" else role
                    state_dict[prefix + name] = placed_like(found.pop(role), getattr(self, name))
            if found:
                load_pair(
                    self.constraint,
                    self.query,
                    self.key,
                    found,
                    state_dict,
                    (f"{prefix}query.", f"{prefix}key."),
                    local_metadata.get("assign_to_params_buffers", False),
                    error_msgs,
                )
            missing_keys = []  # what is missing is named above, by the keys of the layer this one replaces
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
