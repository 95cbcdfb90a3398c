"""How far the attention of a model has moved, layer by layer: two models, state dicts or checkpoints compared."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._result import Result
from ._screen import bands, fits, median
from .geometry import AttentionGeometry, LayerGeometry
from .head_weights import HeadWeights
from .layer_drift import LayerDrift, compare_layers
from .sources import Given, Heads, Layers, Layouts, open_layers

__all__ = ["DriftReport", "LayerDrift", "drift"]

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str] | AttentionGeometry


@dataclass(frozen=True, repr=False, eq=False)
class DriftReport(Result):
    """The drift of every attention layer; see :class:`LayerDrift`. ``skipped`` as in :class:`AttentionGeometry`.

    Where the heads do not fit a screen, ``repr`` shows the median over the heads of a layer, or of a run of layers.
    """

    layers: tuple[LayerDrift, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerDrift:
        """The layer of this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}, there are {[layer.name for layer in self.layers]}")

    def _title(self) -> str:
        left = f", {len(self.skipped)} left out, see .skipped" if self.skipped else ""
        return f"DriftReport of {len(self.layers)} layers{left}"

    def _header(self) -> Sequence[str]:
        return self.layers[0]._header()

    def _rows(self) -> list[Sequence[Any]]:
        if fits(sum(layer.num_heads for layer in self.layers)):
            return [row for layer in self.layers for row in layer._rows()]
        rows: list[Sequence[Any]] = []
        for label, run in bands(self.layers):
            columns = zip(*(layer._columns() for layer in run), strict=True)
            values = (median([value for part in column for value in part]) for column in columns)
            rows.append((label, f"median of {sum(layer.num_heads for layer in run)}", *values))
        return rows

    def plot(self, ax: Any = None) -> Any:
        """Subspace distances by layer and head; see :func:`~geodescent.analysis.pictures.plot_drift`."""
        from .pictures import plot_drift

        return plot_drift(self, ax)


def drift(
    before: Source,
    after: Source,
    *,
    num_heads: Heads = None,
    num_key_value_heads: Heads = None,
    head_dim: int | None = None,
    layout: Layouts = None,
    config: Mapping[str, Any] | None = None,
    samples: int = 32,
    seed: int = 0,
    ov: bool = True,
) -> DriftReport:
    """Compare the attention of two models, layer by layer and head by head.

    Checkpoints are read a layer at a time. Layers are paired by name; where one model's names are the other's with a
    longer prefix ("transformer.h.0.attn" and "h.0.attn"), by what they share.

    Args:
        before, after: what :func:`attention_geometry` takes, or its results. A model that is trained in place must be
            measured before: pass ``attention_geometry(model)`` of the start.
        num_heads, num_key_value_heads, head_dim, layout, config: as in :func:`attention_geometry`.
        samples: random subspaces for the expected values; 0 leaves those out. ``seed``: theirs, so reports reproduce.
        ov: compare the OV circuits too.

    Raises:
        ValueError: layers of other names or shapes; a geometry that was measured with ``keep_frames=False``.

    Example:
        >>> import torch
        >>> from geodescent.analysis import drift
        >>> layer = torch.nn.MultiheadAttention(16, 4)
        >>> report = drift(layer, layer, samples=4)
        >>> bool(report["(root)"].gauge_distance.max() < 1e-12)
        True
    """
    given = Given(num_heads, num_key_value_heads, head_dim, layout, config)
    moved = []
    with _layers(before, given) as old, _layers(after, given) as new:
        for first, second in _paired(old.names, new.names):
            a, b = old.read(first), new.read(second)
            if a is not None and b is not None:
                moved.append(compare_layers(a, b, samples, seed, ov))
        if not moved:
            raise (old if old.skipped or not old.names else new).nothing()
    return DriftReport(tuple(moved), {**new.skipped, **old.skipped})


def _layers(source: Source, given: Given) -> AbstractContextManager[Any]:
    if isinstance(source, AttentionGeometry):
        return nullcontext(_Measured(source))
    return open_layers(source, given)


class _Measured(Layers):
    """A geometry's layers, with the frames it kept."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        super().__init__(
            {layer.name: functools.partial(kept_weights, layer) for layer in geometry.layers}, {}, "a geometry"
        )


def kept_weights(layer: LayerGeometry) -> HeadWeights:
    """The weights that a geometry was measured of."""
    if layer.query_frames is None or layer.key_frames is None:
        raise ValueError(f"layer {layer.name!r} was measured with keep_frames=False: its drift needs the frames")
    return HeadWeights(
        name=layer.name,
        query_frames=layer.query_frames,
        key_frames=layer.key_frames,
        value_frames=layer.value_frames,
        output_frames=layer.output_frames,
        query_bias=layer.query_bias,
        key_bias=layer.key_bias,
        value_bias=None,
        logit_scale=layer.logit_scale,
        rotary=layer.rotary,
        notes=layer.notes,
    )


def _paired(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    if set(old) == set(new):
        return ((name, name) for name in old)
    if len(old) == len(new) and all(
        f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}") for a, b in zip(old, new, strict=True)
    ):
        return zip(old, new, strict=True)
    only_old, only_new = [n for n in old if n not in new], [n for n in new if n not in old]
    raise ValueError(
        f"before has the layers {_some(only_old)} that after lacks, after has {_some(only_new)} that before lacks: "
        "the models must have the same attention layers"
    )


def _some(names: Sequence[str]) -> str:
    return f"{list(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
