"""How far one attention layer moved: in its weights, in its subspaces, and modulo the gauge of its circuits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ._result import Result
from .drift_measures import CircuitDrift, Pair, SideDrift, per_head, relative_change, subspace_distances
from .head_weights import HeadWeights
from .layer_geometry import circuit_spectrum


@dataclass(frozen=True, repr=False, eq=False)
class LayerDrift(Result):
    """The drift of one layer: numbers a head, ``(heads,)``, unless said otherwise.

    **Weights.** ``*_movement`` is ‖W' − W‖_F/‖W‖_F. ``*_procrustes`` is min over R ∈ O(d_h) of ‖W' − W R‖_F, what is
    left of the movement once the frame's own rotation is taken out.

    **Subspaces.** ``query_angles`` and ``key_angles`` (heads, d_h) are the principal angles between the column spaces
    before and after, ``*_distance`` their 2-norm. NaN for a head whose weight has lost rank.

    **Circuits.** ``gauge_distance`` is d, d² = min over R ∈ O(d_h) of ‖W_Q' − W_Q R‖² + ‖W_K' − W_K R‖², after
    balancing both pairs (W_Q W_Kᵀ = UΣVᵀ → UΣ^½, VΣ^½; frames are balanced already), so that it depends on the
    circuit W_Q W_Kᵀ alone; for frames d² = 4d_h − 2‖W_QᵀW_Q' + W_KᵀW_K'‖_*. ``gauge_movement`` is d over the balanced
    pair's norm before. In grouped-query attention one key serves several queries, so R acts on all of them at once:
    the pair is then the group's stacked queries and their key, and each of its heads has the group's distance. A
    scale per frame direction belongs to the circuit, a scale a head does not: its change is ``logit_scale_movement``
    = ‖s' − s‖/‖s‖. ``ov_gauge_*`` say the same of W_V and W_O. ``spectrum_change`` is ‖σ' − σ‖/‖σ‖ of the circuit's
    singular values, the scale included, ``ov_spectrum_change`` that of the OV circuit.

    **Random subspaces.** ``random_*`` stands beside each distance: its mean over ``random_samples`` draws of
    independent random subspaces of the same dimensions, with the spectra measured. For ``*_movement`` it is exact, the
    root mean square √(1 + ‖W'‖²/‖W‖²). A spectrum does not depend on subspaces, so its change has none. None where no
    samples were asked for; OV is None where it was not read.

    With rotary positions only 2 × 2 rotations commute with the positions, not all of O(d_h): the gauge distance of
    queries and keys is then a lower bound on that modulo the symmetries the layer has. OV is not concerned.
    """

    name: str
    num_heads: int
    query_movement: Tensor
    key_movement: Tensor
    random_query_movement: Tensor
    random_key_movement: Tensor
    query_procrustes: Tensor
    key_procrustes: Tensor
    random_query_procrustes: Tensor | None
    random_key_procrustes: Tensor | None
    query_distance: Tensor
    key_distance: Tensor
    random_query_distance: float | None
    random_key_distance: float | None
    gauge_distance: Tensor
    gauge_movement: Tensor
    random_gauge_distance: Tensor | None
    spectrum_change: Tensor
    logit_scale_movement: Tensor
    query_angles: Tensor
    key_angles: Tensor
    value_distance: Tensor | None
    output_distance: Tensor | None
    random_value_distance: float | None
    random_output_distance: float | None
    ov_gauge_distance: Tensor | None
    ov_gauge_movement: Tensor | None
    random_ov_gauge_distance: Tensor | None
    ov_spectrum_change: Tensor | None
    random_samples: int

    #: the quantities with one number a head
    PER_HEAD: ClassVar = (
        "query_movement",
        "key_movement",
        "query_procrustes",
        "key_procrustes",
        "query_distance",
        "key_distance",
        "gauge_distance",
        "gauge_movement",
        "spectrum_change",
        "logit_scale_movement",
    )
    # heading and field of each column of the table
    _table: ClassVar = (
        ("Q moved", "query_movement"),
        ("K moved", "key_movement"),
        ("Q subspace", "query_distance"),
        ("random", "random_query_distance"),
        ("K subspace", "key_distance"),
        ("random", "random_key_distance"),
        ("QK gauge distance", "gauge_distance"),
        ("random", "random_gauge_distance"),
        ("OV gauge distance", "ov_gauge_distance"),
        ("random", "random_ov_gauge_distance"),
        ("QK spectrum", "spectrum_change"),
    )

    def _title(self) -> str:
        return f"LayerDrift of {self.name}"

    def _header(self) -> Sequence[str]:
        return ("layer", "head", *(heading for heading, _ in self._table))

    def _columns(self) -> list[list[Any]]:
        values = [getattr(self, name) for _, name in self._table]
        return [value.tolist() if isinstance(value, Tensor) else [value] * self.num_heads for value in values]

    def _rows(self) -> list[Sequence[Any]]:
        columns = self._columns()
        return [(self.name, head, *(column[head] for column in columns)) for head in range(self.num_heads)]


def compare_layers(old: HeadWeights, new: HeadWeights, samples: int, seed: int, ov: bool) -> LayerDrift:
    for side in ("query_frames", "key_frames", "value_frames", "output_frames"):
        a, b = getattr(old, side), getattr(new, side)
        if a is not None and b is not None and a.shape != b.shape:
            raise ValueError(f"layer {old.name!r}: {side} are {tuple(a.shape)} before and {tuple(b.shape)} after")
    heads = old.query_frames.shape[0]
    # the side with a frame a head comes first: the other may be shared; and the seeds of two sides differ, so that
    # their random subspaces are independent
    queries, keys = Pair(old.query_frames, new.query_frames), Pair(old.key_frames, new.key_frames)
    query, key = (SideDrift(pair, heads, samples, 2 * seed + i) for i, pair in enumerate((queries, keys)))
    circuit = CircuitDrift(queries, keys, _gains(old, new), samples, seed)
    value = output = through = ov_change = None
    if ov and all(getattr(w, f"{side}_frames") is not None for w in (old, new) for side in ("output", "value")):
        outputs, values = (
            Pair(getattr(old, f"{side}_frames"), getattr(new, f"{side}_frames")) for side in ("output", "value")
        )
        output, value = (SideDrift(pair, heads, samples, 2 * seed + i) for i, pair in enumerate((outputs, values)))
        through = CircuitDrift(outputs, values, (None, None), samples, seed)
        ov_change = _spectrum_change(outputs, values, (None, None))
    return LayerDrift(
        name=old.name,
        num_heads=heads,
        query_movement=query.movement,
        key_movement=key.movement,
        random_query_movement=query.random_movement,
        random_key_movement=key.random_movement,
        query_procrustes=query.procrustes,
        key_procrustes=key.procrustes,
        random_query_procrustes=query.random_procrustes,
        random_key_procrustes=key.random_procrustes,
        query_distance=query.distance,
        key_distance=key.distance,
        random_query_distance=query.random_distance,
        random_key_distance=key.random_distance,
        gauge_distance=circuit.distance,
        gauge_movement=circuit.movement,
        random_gauge_distance=circuit.random_distance,
        spectrum_change=_spectrum_change(queries, keys, (old.logit_scale, new.logit_scale)),
        logit_scale_movement=relative_change(*(_per_direction(w, _has_gains(old, new)) for w in (old, new))),
        query_angles=query.angles,
        key_angles=key.angles,
        value_distance=value and value.distance,
        output_distance=output and output.distance,
        random_value_distance=value and value.random_distance,
        random_output_distance=output and output.random_distance,
        ov_gauge_distance=through and through.distance,
        ov_gauge_movement=through and through.movement,
        random_ov_gauge_distance=through and through.random_distance,
        ov_spectrum_change=ov_change,
        random_samples=samples,
    )


def movements(old: HeadWeights, new: HeadWeights) -> dict[str, Tensor]:
    """Five of :func:`compare_layers`' quantities, in half of its time: for every few steps of a training run."""
    heads = old.query_frames.shape[0]
    queries, keys = Pair(old.query_frames, new.query_frames), Pair(old.key_frames, new.key_frames)
    query, key = ((per_head(pair.movement, heads), subspace_distances(pair, heads)) for pair in (queries, keys))
    circuit = CircuitDrift(queries, keys, _gains(old, new), 0, 0)
    return {
        "query_movement": query[0],
        "key_movement": key[0],
        "query_distance": query[1],
        "key_distance": key[1],
        "gauge_distance": circuit.distance,
    }


def _has_gains(old: HeadWeights, new: HeadWeights) -> bool:
    """Whether a logit scale is a gain a direction, which belongs to the circuit; one a head does not turn it."""
    return 2 in (old.logit_scale.ndim, new.logit_scale.ndim)


def _gains(old: HeadWeights, new: HeadWeights) -> tuple[Tensor | None, Tensor | None]:
    return (old.logit_scale, new.logit_scale) if _has_gains(old, new) else (None, None)


def _spectrum_change(left: Pair, right: Pair, scales: tuple[Tensor | None, Tensor | None]) -> Tensor:
    return relative_change(
        circuit_spectrum(left.old, right.old, scales[0]), circuit_spectrum(left.new, right.new, scales[1])
    )


def _per_direction(w: HeadWeights, per_direction: bool) -> Tensor:
    """The logit scale as (heads, 1), or as (heads, d_h) to compare with a layer that has a gain per direction."""
    scale = w.logit_scale if w.logit_scale.ndim == 2 else w.logit_scale[:, None]
    return scale.expand(-1, w.query_frames.shape[-1]) if per_direction else scale
