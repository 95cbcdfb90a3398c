"""What `geodescent inspect` prints and writes: the attention geometry of a checkpoint, and its drift from another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..analysis import AttentionGeometry, DriftReport, attention_geometry, drift
from ..analysis._screen import bands, median


@dataclass(frozen=True)
class Inspection:
    """The geometry of ``checkpoint``, and its drift from ``against`` where there is one."""

    checkpoint: Path
    against: Path | None
    geometry: AttentionGeometry
    drift: DriftReport | None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it: NaN and infinities are the strings "nan", "inf" and "-inf"."""
        return {
            "checkpoint": str(self.checkpoint),
            "against": None if self.against is None else str(self.against),
            "geometry": _strict(self.geometry.to_dict()),
            "drift": None if self.drift is None else _strict(self.drift.to_dict()),
        }

    def write_json(self, path: Path) -> None:
        """Write :meth:`to_dict`, making the folder if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def inspect_checkpoint(checkpoint: Path, against: Path | None, samples: int, seed: int, **given: Any) -> Inspection:
    """Measure a checkpoint, a layer at a time.

    Args:
        checkpoint, against: paths as :class:`geodescent.analysis.Checkpoint` takes them.
        samples, seed: of the random subspaces, as :func:`geodescent.analysis.drift` takes them.
        **given: what :func:`geodescent.analysis.attention_geometry` is given besides.

    Raises:
        ValueError: a file that cannot be read, that would run code, or in which there is no attention.
        OSError: there is no such file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "model.pt")
        ...     torch.save(torch.nn.MultiheadAttention(16, 4).state_dict(), path)
        ...     inspection = inspect_checkpoint(path, None, samples=0, seed=0, num_heads=4)
        >>> inspection.geometry["(root)"].num_heads
        4
    """
    try:
        geometry = attention_geometry(checkpoint, keep_frames=False, **given)
        moved = None if against is None else drift(against, checkpoint, samples=samples, seed=seed, **given)
    except ImportError as error:  # safetensors is not among what the package needs
        raise ValueError(str(error)) from error
    return Inspection(checkpoint, against, geometry, moved)


def print_inspection(console: Console, inspection: Inspection, rows: int = 16, worst: int = 5) -> None:
    """Tables that fit a screen: geometry by layer or by runs of layers, then the worst heads; drift likewise.

    Args:
        console: where to.
        inspection: what.
        rows: rows a table; consecutive layers share one where there are more.
        worst: heads in the tables of the worst; 0 for none of these tables.
    """
    geometry, moved = inspection.geometry, inspection.drift
    short = _Shortener([layer.name for layer in geometry.layers])
    table = _table(
        f"Attention geometry of {inspection.checkpoint}: medians over heads{short.where}", _GEOMETRY, "heads"
    )
    _fill(table, geometry.layers, _GEOMETRY, rows, short)
    console.print(table)
    _say(console, _notes(geometry))
    if worst:
        table = _table("Worst heads: the largest condition number of W_Q or W_K", _WORST, "head")
        _rank(table, geometry.layers, _WORST, worst, lambda g: torch.maximum(g.query_condition, g.key_condition), short)
        console.print(table)
    if moved is not None:
        table = _table(f"Drift from {inspection.against}: medians over heads", _DRIFT, "heads")
        _fill(table, moved.layers, _DRIFT, rows, short)
        console.print(table)
        if samples := moved.layers[0].random_samples:
            _say(console, [f"% of the mean over {samples} draws of independent random subspaces with these spectra."])
        if worst:
            table = _table("Heads that moved most: QK gauge distance over the circuit's size", _MOVED, "head")
            _rank(table, moved.layers, _MOVED, worst, lambda d: d.gauge_movement, short)
            console.print(table)
    skipped = {**geometry.skipped, **({} if moved is None else moved.skipped)}
    lines = [f"left out: {name}: {why}" for name, why in list(skipped.items())[:3]]
    if len(skipped) > 3:
        lines.append(f"left out: {len(skipped) - 3} more, all in the file of --json")
    _say(console, lines, "yellow")


Columns = Mapping[str, Callable[[Any], Tensor | None]]

# what each column shows of a layer, a number a head
_GEOMETRY: Columns = {
    "κ(W_Q)": lambda g: g.query_condition,
    "κ(W_K)": lambda g: g.key_condition,
    "QK σ₁": lambda g: g.spectrum[:, 0],
    "QK eff. rank": lambda g: g.effective_rank,
    "QK stable rank": lambda g: g.stable_rank,
    "|logit| ≤": lambda g: g.logit_bound,
    "OV σ₁": lambda g: None if g.ov_spectrum is None else g.ov_spectrum[:, 0],
    "OV eff. rank": lambda g: g.ov_effective_rank,
    "of d_h": lambda g: torch.full((g.num_heads,), float(g.head_dim)),
}
_WORST: Columns = {
    "κ(W_Q)": lambda g: g.query_condition,
    "κ(W_K)": lambda g: g.key_condition,
    "QK σ₁": lambda g: g.spectrum[:, 0],
    "QK eff. rank": lambda g: g.effective_rank,
    "|logit| ≤": lambda g: g.logit_bound,
}


def _percent(value: Tensor | None, random: Tensor | float | None) -> Tensor | None:
    return None if value is None or random is None else 100 * value / torch.as_tensor(random)


_DRIFT: Columns = {
    "Q moved": lambda d: d.query_movement,
    "K moved": lambda d: d.key_movement,
    "Q subspace": lambda d: d.query_distance,
    "% ": lambda d: _percent(d.query_distance, d.random_query_distance),
    "K subspace": lambda d: d.key_distance,
    "%  ": lambda d: _percent(d.key_distance, d.random_key_distance),
    "QK gauge": lambda d: d.gauge_distance,
    "%   ": lambda d: _percent(d.gauge_distance, d.random_gauge_distance),
    "OV gauge": lambda d: d.ov_gauge_distance,
    "%    ": lambda d: _percent(d.ov_gauge_distance, d.random_ov_gauge_distance),
    "QK spectrum": lambda d: d.spectrum_change,
}
_MOVED: Columns = {
    "gauge movement": lambda d: d.gauge_movement,
    "Q moved": lambda d: d.query_movement,
    "K moved": lambda d: d.key_movement,
    "QK spectrum": lambda d: d.spectrum_change,
}


class _Shortener:
    """Layer names without the parts that all of them share."""

    def __init__(self, names: Sequence[str]) -> None:
        self._head = self._tail = self.where = ""
        if len(names) > 1:
            split = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in names]
            around = {(m.group(1), m.group(3)) if m else None for m in split}
            if len(around) == 1 and (only := around.pop()):
                self._head, self._tail = only
                self.where = f"; layer N is {self._head}N{self._tail}"

    def __call__(self, name: str) -> Text:
        # names come from files: as Text, nothing in them is read as markup
        return Text(name.removeprefix(self._head).removesuffix(self._tail))


def _table(title: str, columns: Columns, heads: str) -> Table:
    table = Table(title=Text(title))
    for i, name in enumerate(("layer", heads, *columns)):
        table.add_column(name.strip(), justify="left" if i == 0 else "right", overflow="fold")
    return table


def _fill(table: Table, layers: Sequence[Any], columns: Columns, rows: int, short: _Shortener) -> None:
    for label, run in bands(layers, rows):
        values = ([v for layer in run for v in _numbers(of(layer))] for of in columns.values())
        heads = sum(layer.num_heads for layer in run)
        table.add_row(short(label), str(heads), *(_show(median(v)) for v in values))


def _rank(
    table: Table, layers: Sequence[Any], columns: Columns, count: int, by: Callable[[Any], Tensor], short: _Shortener
) -> None:
    # NaN, a head that is broken, comes first
    worst = [
        (math.inf if math.isnan(value) else value, -i, -head)
        for i, layer in enumerate(layers)
        for head, value in enumerate(by(layer).tolist())
    ]
    for _, i, head in sorted(worst, reverse=True)[:count]:
        cells = [_numbers(of(layers[-i])) for of in columns.values()]
        table.add_row(short(layers[-i].name), str(-head), *(_show(c[-head] if c else None) for c in cells))


def _numbers(value: Tensor | None) -> list[float]:
    return [] if value is None else value.tolist()


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _notes(geometry: AttentionGeometry) -> list[str]:
    notes = ["QK is W_Q diag(scale) W_Kᵀ. |logit| ≤ holds for inputs of norm √d, masks and position biases apart."]
    rotary = {layer.rotary for layer in geometry.layers}
    if True in rotary:
        notes.append("Rotary positions: QK is that of a query and a key at the same position, the bound holds for all.")
    if None in rotary:
        notes.append("Nothing says whether positions rotate queries and keys: the bound allows for it.")
    shared = {layer.num_heads // layer.num_key_value_heads for layer in geometry.layers} - {1}
    if shared:
        notes.append(f"Grouped queries: {', '.join(map(str, sorted(shared)))} heads share a key and a value.")
    if others := sorted({note for layer in geometry.layers for note in layer.notes}):
        notes.append(f"Between projections and softmax, and not in QK: {', '.join(others)}.")
    return notes


def _say(console: Console, lines: Sequence[str], style: str = "dim") -> None:
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False)


def _strict(value: Any) -> Any:
    """The same for JSON, which has no non-finite numbers."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
