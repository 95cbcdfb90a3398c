"""A log of the attention geometry of a model in training."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import nn

from ._result import text_table
from .drift import drift
from .geometry import attention_geometry

_GEOMETRY = ("query_condition", "key_condition", "effective_rank")
_DRIFT = ("query_movement", "key_movement", "query_distance", "key_distance", "gauge_distance")


class GeometryTracker:
    """Records, row by row, the geometry of ``model``'s attention and its drift since the tracker was made.

    A row has ``step``, the caller's scalars, and for every layer and head ``LAYER/HEAD/QUANTITY`` with the quantities
    ``query_condition``, ``key_condition``, ``effective_rank``, and against the start ``query_movement``,
    ``key_movement`` (‖W'−W‖/‖W‖), ``query_distance``, ``key_distance`` (principal-angle drift, 2-norm) and
    ``gauge_distance``; see :class:`LayerGeometry` and :class:`LayerDrift`. ``mean/QUANTITY`` is the mean over layers
    and heads.

    Recording changes nothing in the model and draws no random numbers.

    Args:
        model: a module with attention layers; it is measured now, and again at each :meth:`record`.
        path: a JSONL file to append each row to as it is recorded; its folder is made. JSON has no non-finite numbers:
            they are written as the strings "nan", "inf" and "-inf", which ``float()`` reads.

    Raises:
        ValueError: no attention layer in the model.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self.start = attention_geometry(model, ov=False)
        self.rows: list[dict[str, float]] = []
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def record(self, step: int, **scalars: Any) -> dict[str, float]:
        """Measure the model and append a row, which is returned.

        Args:
            step: the training step, any integer; rows keep the order of the calls.
            **scalars: numbers of the caller's, such as the loss; one-element tensors are read.

        Raises:
            TypeError: a scalar that is not a number. The row is then not added.
        """
        row: dict[str, float] = {"step": int(step)}
        for name, value in scalars.items():
            try:
                row[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"{name} must be a number, found {value!r}") from error
        now = attention_geometry(self.model, ov=False)
        moved = drift(self.start, now, samples=0, ov=False)
        means: dict[str, list[float]] = {}
        for layer, change in zip(now.layers, moved.layers, strict=True):
            for source, quantities in ((layer, _GEOMETRY), (change, _DRIFT)):
                for quantity in quantities:
                    for head, value in enumerate(getattr(source, quantity).tolist()):
                        row[f"{layer.name}/{head}/{quantity}"] = value
                        means.setdefault(quantity, []).append(value)
        row |= {f"mean/{quantity}": math.fsum(values) / len(values) for quantity, values in means.items()}
        self.rows.append(row)
        if self.path is not None:
            strict = {key: value if math.isfinite(value) else str(value) for key, value in row.items()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(strict, allow_nan=False) + "\n")
        return row

    def to_dict(self) -> dict[str, list[float]]:
        """A list a column, NaN where a row lacks it."""
        columns = dict.fromkeys(key for row in self.rows for key in row)
        return {key: [row.get(key, math.nan) for row in self.rows] for key in columns}

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame`` indexed by ``step``.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas, or use to_dict()") from error
        columns = self.to_dict()
        return pandas.DataFrame(columns).set_index("step") if columns else pandas.DataFrame()

    def plot(self, ax: Any = None, quantities: tuple[str, ...] = ("query_distance", "key_distance")) -> Any:
        """Quantities against the step; see :func:`~geodescent.analysis.pictures.plot_tracks`."""
        from .pictures import plot_tracks

        return plot_tracks(self, ax, quantities=quantities)

    def __repr__(self) -> str:
        shown = [key for key in (self.rows[-1] if self.rows else {}) if "/" not in key or key.startswith("mean/")]
        title = f"GeometryTracker of {len(self.start.layers)} layers, {len(self.rows)} rows"
        if not shown:
            return title
        return f"{title}\n{text_table(('last row', 'value'), [(key, self.rows[-1][key]) for key in shown])}"
