"""How far the attention of a model has moved: in its weights, in its subspaces, and modulo the gauge of Q and K."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..manifolds import Stiefel
from ._arrays import ratio
from ._result import Result, axes
from .geometry import AttentionGeometry, LayerGeometry, attention_geometry, circuit_core
from .spectra import angles_between, procrustes_distance


@dataclass(frozen=True, repr=False, eq=False)
class LayerDrift(Result):
    """The drift of one layer: numbers a head, ``(heads,)``, unless said otherwise.

    ``*_movement`` is ‖W' − W‖_F/‖W‖_F. ``*_angles`` (heads, d_h) are the principal angles between the column spaces
    before and after, and ``*_distance`` their 2-norm; ``random_*_distance`` is its mean for independent random
    subspaces of the same dimensions. Angles are NaN for a head whose weight has lost rank.

    ``gauge_distance`` is d, d² = min over R ∈ O(d_h) of ‖W_Q' − W_Q R‖² + ‖W_K' − W_K R‖², after balancing both pairs
    (W_Q W_Kᵀ = UΣVᵀ → UΣ^½, VΣ^½; frames are balanced already), so that it depends on the circuit W_Q W_Kᵀ alone;
    ``gauge_movement`` is d over the balanced pair's norm before; ``random_gauge_distance`` the mean of d for
    independent random subspaces with the same spectra. A scale per frame direction belongs to the circuit, a scale a
    head does not: its change is ``logit_scale_movement`` = ‖s' − s‖/‖s‖. The random values are None where no samples
    were asked for.
    """

    name: str
    num_heads: int
    query_movement: Tensor
    key_movement: Tensor
    query_distance: Tensor
    key_distance: Tensor
    random_query_distance: float | None
    random_key_distance: float | None
    gauge_distance: Tensor
    gauge_movement: Tensor
    random_gauge_distance: Tensor | None
    logit_scale_movement: Tensor
    query_angles: Tensor
    key_angles: Tensor

    #: the quantities with one number a head
    PER_HEAD: ClassVar = (
        "query_movement",
        "key_movement",
        "query_distance",
        "key_distance",
        "gauge_distance",
        "gauge_movement",
        "logit_scale_movement",
    )
    _table: ClassVar = (
        "layer",
        "head",
        "Q moved",
        "K moved",
        "Q subspace",
        "random",
        "K subspace",
        "random",
        "gauge distance",
        "random",
    )

    def _title(self) -> str:
        return f"LayerDrift of {self.name}"

    def _header(self) -> Sequence[str]:
        return self._table

    def _rows(self) -> list[Sequence[Any]]:
        gauge = [None] * self.num_heads if self.random_gauge_distance is None else self.random_gauge_distance.tolist()
        columns = (
            self.query_movement.tolist(),
            self.key_movement.tolist(),
            self.query_distance.tolist(),
            [self.random_query_distance] * self.num_heads,
            self.key_distance.tolist(),
            [self.random_key_distance] * self.num_heads,
            self.gauge_distance.tolist(),
            gauge,
        )
        return [(self.name, head, *(column[head] for column in columns)) for head in range(self.num_heads)]


@dataclass(frozen=True, repr=False, eq=False)
class DriftReport(Result):
    """The drift of every attention layer; see :class:`LayerDrift`."""

    layers: tuple[LayerDrift, ...]

    def __getitem__(self, name: str) -> LayerDrift:
        """The layer of this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}, there are {[layer.name for layer in self.layers]}")

    def _title(self) -> str:
        return f"DriftReport of {len(self.layers)} layers"

    def _header(self) -> Sequence[str]:
        return LayerDrift._table

    def _rows(self) -> list[Sequence[Any]]:
        return [row for layer in self.layers for row in layer._rows()]

    def plot(self, ax: Any = None) -> Any:
        """Subspace distance of Q and K a head, as a share of that of random subspaces where known. Returns the axes."""
        ax = axes(ax)
        labels = [f"{layer.name} {head}" for layer in self.layers for head in range(layer.num_heads)]
        for side, offset in (("query", -0.2), ("key", 0.2)):
            heights: list[float] = []
            for layer in self.layers:
                unit = getattr(layer, f"random_{side}_distance") or 1.0
                heights += [value / unit for value in getattr(layer, f"{side}_distance").tolist()]
            ax.bar([i + offset for i in range(len(labels))], heights, width=0.4, label=side)
        ax.set_xticks(range(len(labels)), labels, rotation=90)
        shares = all(layer.random_query_distance is not None for layer in self.layers)
        ax.set_ylabel("subspace distance" + (", random subspaces = 1" if shares else ""))
        ax.legend()
        return ax


def drift(
    before: nn.Module | Mapping[str, Any] | AttentionGeometry,
    after: nn.Module | Mapping[str, Any] | AttentionGeometry,
    *,
    num_heads: int | Mapping[str, int] | None = None,
    samples: int = 32,
    seed: int = 0,
) -> DriftReport:
    """Compare the attention of two models, layer by layer and head by head.

    Args:
        before, after: what :func:`attention_geometry` takes, or its results. A model that is trained in place must be
            measured before: pass ``attention_geometry(model)`` of the start.
        num_heads: as in :func:`attention_geometry`, for state dicts.
        samples: random subspaces for the expected values; 0 leaves those out. ``seed``: theirs, so reports reproduce.

    Raises:
        ValueError: layers of other names or shapes.
    """
    old, new = attention_geometry(before, num_heads), attention_geometry(after, num_heads)
    names = [layer.name for layer in old.layers]
    if names != [layer.name for layer in new.layers]:
        raise ValueError(f"before has the layers {names}, after has {[layer.name for layer in new.layers]}")
    return DriftReport(tuple(_layer_drift(a, b, samples, seed) for a, b in zip(old.layers, new.layers, strict=True)))


def _layer_drift(old: LayerGeometry, new: LayerGeometry, samples: int, seed: int) -> LayerDrift:
    for side in ("query_frames", "key_frames"):
        a, b = getattr(old, side), getattr(new, side)
        if a.shape != b.shape:
            raise ValueError(f"layer {old.name!r}: {side} are {tuple(a.shape)} before and {tuple(b.shape)} after")
    with_scale = 2 in (old.logit_scale.ndim, new.logit_scale.ndim)
    first, second = _balanced(old, with_scale), _balanced(new, with_scale)
    gauge = procrustes_distance(torch.cat(second[:2], -2), torch.cat(first[:2], -2))
    angles = [_angles(getattr(old, side), getattr(new, side)) for side in ("query_frames", "key_frames")]
    random: list[float | None] = [None, None]
    random_gauge = None
    if samples:
        # different seeds for the two sides: their subspaces are independent
        haar = [
            _haar_sample(frames.shape[-2], min(frames.shape[-2:]), samples, 2 * seed + i)
            for i, frames in enumerate((old.query_frames, old.key_frames))
        ]
        random = [distance for _, distance in haar]
        random_gauge = _random_gauge(first[2], second[2], haar[0][0], haar[1][0])
    return LayerDrift(
        name=old.name,
        num_heads=old.num_heads,
        query_movement=_movement(old.query_frames, new.query_frames),
        key_movement=_movement(old.key_frames, new.key_frames),
        query_distance=torch.linalg.vector_norm(angles[0], dim=-1),
        key_distance=torch.linalg.vector_norm(angles[1], dim=-1),
        random_query_distance=random[0],
        random_key_distance=random[1],
        gauge_distance=gauge,
        gauge_movement=ratio(gauge, (2 * first[2].sum(-1)).sqrt()),
        random_gauge_distance=random_gauge,
        logit_scale_movement=_movement(*(_per_direction(layer, with_scale) for layer in (old, new))),
        query_angles=angles[0],
        key_angles=angles[1],
    )


def _movement(old: Tensor, new: Tensor) -> Tensor:
    norm = functools.partial(torch.linalg.vector_norm, dim=tuple(range(1, old.ndim)))
    return ratio(norm(new - old), norm(old))


def _per_direction(layer: LayerGeometry, per_direction: bool) -> Tensor:
    """The logit scale as (heads, 1), or as (heads, d_h) to compare with a layer that has a gain per direction."""
    scale = layer.logit_scale if layer.logit_scale.ndim == 2 else layer.logit_scale[:, None]
    return scale.expand(-1, layer.head_dim) if per_direction else scale


def _angles(old: Tensor, new: Tensor) -> Tensor:
    if old.shape[-2] < old.shape[-1]:
        # fewer input features than columns: the column space is not a plane of dimension d_h
        return torch.full((old.shape[0], old.shape[-2]), torch.nan, dtype=torch.float64)
    return angles_between(old, new, dependent="nan")


def _balanced(layer: LayerGeometry, with_scale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(UΣ^½, VΣ^½, Σ) of the circuit, NaN for a head with non-finite weights."""
    q, core, k = circuit_core(layer.query_frames, layer.key_frames, layer.logit_scale if with_scale else None)
    good = torch.isfinite(core).all(-1).all(-1)[:, None, None]
    u, sigma, vh = torch.linalg.svd(torch.where(good, core, 0.0), full_matrices=False)
    sigma = torch.where(good[..., 0], sigma, torch.nan)
    root = sigma.sqrt().unsqueeze(-2)
    return q @ u * root, k @ vh.mT * root, sigma


@functools.lru_cache(maxsize=64)
def _haar_sample(n: int, p: int, samples: int, seed: int) -> tuple[Tensor, float]:
    """Overlaps (samples, p, p) of Haar-random p-frames of ℝⁿ with the first p axes, and the mean subspace distance."""
    generator = torch.Generator().manual_seed(seed)
    frames = Stiefel().random_point(samples, n, p, dtype=torch.float64, generator=generator)
    angles = angles_between(torch.eye(n, p, dtype=torch.float64), frames)
    return frames[..., :p, :].clone(), float(torch.linalg.vector_norm(angles, dim=-1).mean())


def _random_gauge(old: Tensor, new: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Mean d over random subspaces: d² = 2Σσ + 2Σσ' − 2‖Σ^½(C_Q + C_K)Σ'^½‖_*, C the overlaps of Haar-random frames."""
    r = old.shape[-1]
    overlap = query[:, :r, :r] + key[:, :r, :r]
    core = old.sqrt()[:, None, :, None] * overlap * new.sqrt()[:, None, None, :]
    good = torch.isfinite(core).all(-1).all(-1)
    nuclear = torch.linalg.svdvals(torch.where(good[..., None, None], core, 0.0)).sum(-1)
    squared = 2 * (old.sum(-1) + new.sum(-1))[:, None] - 2 * nuclear
    return squared.clamp_min(0).sqrt().mean(-1)
