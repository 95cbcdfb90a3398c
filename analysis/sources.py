"""The attention layers of a module, a state dict or a checkpoint, found at once and read one at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .checkpoints import Checkpoint
from .head_weights import HeadWeights, LayerReader, LayoutError, copy64
from .layouts import AttentionLayout, Match, layouts_from, recognise, unclaimed
from .model_config import Facts, facts_from_config, facts_from_module

Layouts = AttentionLayout | str | Iterable[AttentionLayout | str] | None
Heads = int | Mapping[str, int] | None


@dataclass(frozen=True)
class Given:
    """What the caller says about layers that do not say it themselves; see :func:`attention_geometry`."""

    num_heads: Heads = None
    num_key_value_heads: Heads = None
    head_dim: int | None = None
    layout: Layouts = None
    config: Mapping[str, Any] | None = None


class Layers:
    """Names of the layers of a model, a way to read each, and what was left out and why."""

    def __init__(self, readers: Mapping[str, Callable[[], HeadWeights]], skipped: Mapping[str, str], kind: str) -> None:
        self.names = list(readers)
        self._readers = readers
        self.skipped = dict(skipped)
        self.kind = kind

    def read(self, name: str) -> HeadWeights | None:
        """The layer, or None, with the reason in ``skipped``."""
        try:
            return self._readers[name]()
        except LayoutError as error:
            self.skipped[name] = str(error)
            return None

    def nothing(self) -> ValueError:
        """The error for a model without a single layer that can be read."""
        reasons = "; ".join(f"{name}: {why}" for name, why in list(self.skipped.items())[:3])
        return ValueError(
            f"no attention layer found in {self.kind}; looked for nn.MultiheadAttention, modules with query_frames() "
            "and key_frames(), and the projections that geodescent.analysis.LAYOUTS names"
            + (f". Left out: {reasons}" if reasons else "; give layout= for others")
        )


@contextlib.contextmanager
def open_layers(source: Any, given: Given) -> Iterator[Layers]:
    """The layers of a module, a mapping or a path, to be read while the context lasts."""
    if isinstance(source, nn.Module):
        yield _of_module(source, given)
    elif isinstance(source, (str, os.PathLike)):
        with Checkpoint(Path(source)) as state:
            yield _of_state(state, given, str(source))
    elif isinstance(source, Mapping):
        yield _of_state(source, given, type(source).__name__)
    else:
        raise TypeError(f"model_or_state must be a module, a state dict or a path, found {type(source).__name__}")


def _of_state(state: Mapping[str, Any], given: Given, kind: str) -> Layers:
    config = given.config
    if config is None:
        config = state.config if isinstance(state, Checkpoint) else {}
    return _found(state, given, kind, lambda match: facts_from_config(config, match.name))


def _found(state: Mapping[str, Any], given: Given, kind: str, facts: Callable[[Match], Facts]) -> Layers:
    keys = [key for key in state if isinstance(key, str)]
    by_name: dict[str, Match] = {}
    for match in recognise(keys, layouts_from(given.layout)):
        by_name.setdefault(match.name, match)
    matches = list(by_name.values())
    reader = LayerReader(state, given.num_heads, given.num_key_value_heads, given.head_dim)
    left = unclaimed(keys, matches, lambda key: len(_shape(state, key)))
    readers = {match.name: _later(reader, match, facts) for match in matches}
    return Layers(readers, {name: _why(tails) for name, tails in left.items()}, kind)


def _later(reader: LayerReader, match: Match, facts: Callable[[Match], Facts]) -> Callable[[], HeadWeights]:
    return lambda: reader.read(match, facts(match))


def _shape(state: Mapping[str, Any], key: str) -> tuple[int, ...]:
    return state.shape(key) if isinstance(state, Checkpoint) else tuple(np.shape(state[key]))


def _why(tails: list[str]) -> str:
    what = ", ".join(tails[:4]) + (", …" if len(tails) > 4 else "")
    if any("lora_" in tail for tail in tails):
        return f"adapters beside the weights ({what}): merge them first"
    if any(tail.endswith(("qweight", "qzeros", "weight_packed")) for tail in tails):
        return f"quantized ({what}): load it dequantized"
    return f"no known layout has its weights ({what}): give layout="


def _of_module(model: nn.Module, given: Given) -> Layers:
    direct: dict[str, Callable[[], HeadWeights]] = {}
    for name, module in model.named_modules():
        if all(callable(getattr(module, side, None)) for side in ("query_frames", "key_frames")):
            direct[name or "(root)"] = _later_frames(module, name or "(root)")
    inside = tuple("" if name == "(root)" else f"{name}." for name in direct)
    state = {key: value for key, value in _weights(model) if not (inside and key.startswith(inside))}

    def facts(match: Match) -> Facts:
        owner = model.get_submodule(match.owner)
        if isinstance(owner, nn.MultiheadAttention):
            return Facts(num_heads=owner.num_heads, rotary=False)
        if given.config is not None:
            return facts_from_config(given.config, match.name)
        return facts_from_module(model, match.owner, match.name)

    found = _found(state, given, type(model).__name__, facts)
    readers = {**direct, **{name: found._readers[name] for name in found.names}}
    place = {name or "(root)": i for i, (name, _) in enumerate(model.named_modules())}
    order = sorted(readers, key=lambda name: place.get(name, len(place)))
    return Layers({name: readers[name] for name in order}, found.skipped, found.kind)


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and parametrized tensors by name; a tensor under a parametrization as it is used.

    A module that saves its weights in another form than it holds them in, as a constrained projection saves ordinary
    matrices, is read as it saves them.
    """
    saved: list[str] = []
    for name, module in model.named_modules():
        if ".parametrizations." in f".{name}." or any(f"{name}.".startswith(prefix) for prefix in saved):
            continue
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            prefix = f"{name}." if name else ""
            saved.append(prefix)
            yield from ((k, v) for k, v in module.state_dict(prefix=prefix).items() if isinstance(v, Tensor))
            continue
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        parametrized = getattr(module, "parametrizations", None)
        for tensor in (*own, *(parametrized if isinstance(parametrized, nn.ModuleDict) else ())):
            with torch.no_grad():
                value = getattr(module, tensor)
            if isinstance(value, Tensor):
                yield f"{name}.{tensor}" if name else tensor, value


def _later_frames(module: nn.Module, name: str) -> Callable[[], HeadWeights]:
    return lambda: _from_frames(module, name)


@torch.no_grad()
def _from_frames(module: nn.Module, name: str) -> HeadWeights:
    """A module that gives its own frames, as ``StiefelAttention`` does."""

    def frames(side: str) -> Tensor | None:
        method = getattr(module, f"{side}_frames", None)
        return copy64(cast("Callable[[], Tensor]", method)()) if callable(method) else None

    def bias(projection: str, heads: int) -> Tensor | None:
        value = getattr(getattr(module, projection, None), "bias", None)
        return copy64(value).unflatten(0, (heads, -1)) if isinstance(value, Tensor) else None

    query, key, value = frames("query"), frames("key"), frames("value")
    assert query is not None
    assert key is not None
    scale = copy64(cast(Tensor, module.logit_scale))
    return HeadWeights(
        name=name,
        query_frames=query,
        key_frames=key,
        value_frames=value,
        output_frames=None if value is None else frames("output"),
        query_bias=bias("q_proj", query.shape[0]),
        key_bias=bias("k_proj", key.shape[0]),
        value_bias=None if value is None else bias("v_proj", value.shape[0]),
        logit_scale=scale,
        rotary=False,
        notes=(),
    )
