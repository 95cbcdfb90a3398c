"""What a constrained query-key pair must fulfil, and how ordinary weights become one, at first and on loading."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..manifolds import Manifold
from ..manifolds.linalg import default_atol
from .conversion import HeadWeights, QueryKeyFrames, convert_query_key
from .head_projection import HeadProjection
from .sharding import placed_like, whole

__all__ = ["Constraint", "RowWeights", "load_pair"]


@dataclass(frozen=True, eq=False)
class RowWeights:
    """Query and key weights as ``nn.Linear`` stores them: (out, in) and (out,).

    Example:
        >>> RowWeights(torch.ones(6, 8), torch.ones(6, 8), None, None).by_head(2).query.shape
        torch.Size([3, 8, 2])
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None

    @classmethod
    def of(cls, query: HeadProjection, key: HeadProjection) -> RowWeights:
        """The effective weights of a constrained pair, gathered if they are sharded."""
        rows = (query.weight, key.weight, query.saved_bias, key.saved_bias)
        return cls(*(None if t is None else whole(t.detach()) for t in rows))  # type: ignore[arg-type]

    def by_head(self, head_dim: int) -> HeadWeights:
        """The same, head by head and tall."""
        return HeadWeights.from_rows(self.query, self.key, self.query_bias, self.key_bias, head_dim)


@dataclass(frozen=True)
class Constraint:
    """How one attention layer is constrained; kept with the layer, for loading and release.

    ``scaling`` is what the layer itself multiplies its logits by.

    Example:
        >>> from torch import nn
        >>> from geodescent.manifolds import Stiefel
        >>> constraint = Constraint(Stiefel(), "head", "spectrum", rotary=False, head_dim=4, scaling=0.5)
        >>> to_q, to_k = nn.Linear(8, 8), nn.Linear(8, 8)
        >>> q, k, exact = constraint.pair(RowWeights(to_q.weight, to_k.weight, to_q.bias, to_k.bias))
        >>> q.frames.shape, exact
        (torch.Size([2, 8, 4]), True)
    """

    manifold: Manifold
    frames: str
    logit_scale: str | float
    rotary: bool
    head_dim: int
    scaling: float

    def convert(self, weights: RowWeights, dtype: torch.dtype) -> QueryKeyFrames:
        """Frames, gains and biases of ordinary weights, to be stored in ``dtype``."""
        return convert_query_key(
            weights.by_head(self.head_dim),
            frames=self.frames,
            gains="direction" if self.logit_scale == "spectrum" else "head",
            rotary=self.rotary,
            # half of what a ManifoldParameter allows: kept frames must pass its check in its own arithmetic
            atol=default_atol(dtype) / 2,
        )

    def tensors(
        self, converted: QueryKeyFrames, dtype: torch.dtype, device: torch.device
    ) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        """The entries ``frames``, ``gain`` and ``bias`` of the two projections."""
        query_gain = converted.query_gain
        if not isinstance(self.logit_scale, str):
            query_gain = torch.full_like(query_gain, self.logit_scale / self.scaling)

        def stored(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, dtype).contiguous()

        def flat(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.flatten()

        c = converted
        query = {"frames": c.query, "gain": query_gain, "bias": flat(c.query_bias)}
        key = {"frames": c.key, "gain": c.key_gain, "bias": flat(c.key_bias)}
        return {n: stored(t) for n, t in query.items()}, {n: stored(t) for n, t in key.items()}

    def pair(self, weights: RowWeights) -> tuple[HeadProjection, HeadProjection, bool]:
        """New query and key projections, and whether attention weights are unchanged."""
        dtype, device = weights.query.dtype, weights.query.device
        converted = self.convert(weights, dtype)
        built = []
        for entries, weight, bias in zip(
            self.tensors(converted, dtype, device),
            (weights.query, weights.key),
            (weights.query_bias, weights.key_bias),
            strict=True,
        ):
            frames = entries["frames"]
            assert frames is not None
            built.append(
                HeadProjection(
                    frames,
                    entries["gain"],
                    entries["bias"],
                    manifold=self.manifold,
                    learn_gain=self.logit_scale in ("spectrum", "learned"),
                    dropped_bias=bias is not None and entries["bias"] is None,
                    requires_grad=weight.requires_grad,
                    bias_requires_grad=bias is not None and bias.requires_grad,
                )
            )
        return built[0], built[1], converted.exact


def load_pair(
    constraint: Constraint,
    query: HeadProjection,
    key: HeadProjection,
    found: dict[str, Tensor],
    state_dict: MutableMapping[str, Tensor],
    prefixes: tuple[str, str],
    assign: bool,
    error_msgs: list[str],
) -> None:
    """Put the entries that the two projections load into ``state_dict``, converted from ordinary weights.

    Args:
        found: what was loaded of "query", "key", "query_bias", "key_bias"; what is missing is as it is now.
        prefixes: the prefixes of the keys of the two projections.
        assign: the loaded tensors replace the old ones, with their dtype.
    """
    now = RowWeights.of(query, key)
    found = {role: whole(tensor) for role, tensor in found.items()}
    for role, tensor in found.items():
        expected = getattr(now, role)
        if tensor.shape != expected.shape:
            error_msgs.append(
                f'size mismatch for the {role} weights under "{prefixes[0]}": copying a tensor of shape '
                f"{tuple(tensor.shape)} from checkpoint, the shape in current model is {tuple(expected.shape)}."
            )
            found = {}
            break
        if tensor.is_meta:
            error_msgs.append(f'the {role} weights under "{prefixes[0]}" are on the meta device: there is no data')
            found = {}
            break
    dtype = found["query"].dtype if assign and "query" in found else query.frames.dtype
    device = found["query"].device if assign and "query" in found else query.frames.device
    weights = dataclasses.replace(now, **found)
    try:
        converted = constraint.convert(weights, dtype)
    except ValueError as error:
        error_msgs.append(f'under "{prefixes[0]}": {error}')
        converted = constraint.convert(now, dtype)
    tensors = constraint.tensors(converted, dtype, device)
    for prefix, entries, projection in zip(prefixes, tensors, (query, key), strict=True):
        for name, tensor in entries.items():
            if tensor is not None:
                state_dict[prefix + name] = placed_like(tensor, getattr(projection, name))
