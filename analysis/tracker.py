"""A log of the attention geometry of a model in training."""

from __future__ import annotations

import csv
import functools
import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ._conversion import pandas
from ._result import text_table
from .drift import kept_weights
from .geometry import attention_geometry
from .layer_drift import movements
from .random_subspaces import haar_band
from .track_file import TrackFile

_GEOMETRY = ("query_condition", "key_condition", "effective_rank")


class GeometryTracker:
    """Records, row by row, the geometry of ``model``'s attention and its drift since the tracker was made.

    A row has ``step``, the caller's scalars, and for every layer and head ``LAYER/HEAD/QUANTITY`` with the quantities
    ``query_condition``, ``key_condition``, ``effective_rank``, and against the start ``query_movement``,
    ``key_movement`` (‖W'−W‖/‖W‖), ``query_distance``, ``key_distance`` (principal-angle drift, 2-norm) and
    ``gauge_distance``; see :class:`LayerGeometry` and :class:`LayerDrift`. ``mean/QUANTITY`` is the mean over layers
    and heads. A head with weights that are not finite has NaN, and the run goes on.

    Recording changes nothing in the model and draws no random numbers.

    Args:
        model: a module with attention layers, measured now and again at each :meth:`record`. Of a model in
            ``DistributedDataParallel`` or under ``torch.compile`` the module inside is measured.
        path: a JSONL file to append each row to as it is recorded, with the geometry of the start beside it as
            ``PATH.start.pt``; its folder is made. A tracker on a path that exists goes on there: drift stays drift
            since the first start, and where training begins again from an earlier checkpoint, the rows of that step and
            later ones are superseded (their lines stay in the file). JSON has no non-finite numbers: they are written
            as the strings "nan", "inf" and "-inf", which ``float()`` reads.

    Raises:
        ValueError: no attention layer in the model; a path that belongs to another model, or to no tracker.

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(8, 2)
        >>> tracker = GeometryTracker(model)
        >>> row = tracker.record(0, loss=2.5)
        >>> row["loss"], row["mean/query_movement"]
        (2.5, 0.0)
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self.start = attention_geometry(_inner(model), ov=False)
        self.rows: list[dict[str, float]] = []
        self.path = None if path is None else Path(path)
        self._file = None if path is None else TrackFile(path)
        if self._file is not None:
            self.start, self.rows = self._file.open(self.start)

    def record(self, step: int, **scalars: Any) -> dict[str, float]:
        """Measure the model and append a row, which is returned.

        Args:
            step: the training step, any integer; rows keep the order of the calls.
            **scalars: numbers of the caller's, such as the loss; one-element tensors are read.

        Raises:
            TypeError: a scalar that is not a number. The row is then not added.
            RuntimeError: another tracker, perhaps of another process, has written to the file.
        """
        row: dict[str, float] = {"step": int(step)}
        for name, value in scalars.items():
            try:
                row[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"{name} must be a number, found {value!r}") from error
        now = attention_geometry(_inner(self.model), ov=False)
        means: dict[str, list[float]] = {}
        for before, layer in zip(self.start.layers, now.layers, strict=True):
            moved = movements(kept_weights(before), kept_weights(layer))
            quantities = {name: getattr(layer, name) for name in _GEOMETRY} | moved
            for quantity, values in quantities.items():
                for head, value in enumerate(values.tolist()):
                    row[f"{layer.name}/{head}/{quantity}"] = value
                    means.setdefault(quantity, []).append(value)
        row |= {f"mean/{quantity}": math.fsum(values) / len(values) for quantity, values in means.items()}
        if self._file is not None:
            self._file.append(row, self.rows)
        self.rows.append(row)
        return row

    @functools.cached_property
    def random(self) -> dict[str, tuple[float, float]]:
        """Where the subspace distances of random subspaces lie, 5 to 95 %: what no memory of the start looks like."""
        frames = {"query": "query_frames", "key": "key_frames"}
        shapes = {
            f"{side}_distance": {tuple(getattr(layer, name).shape[-2:]) for layer in self.start.layers}
            for side, name in frames.items()
        }
        bands = {quantity: [haar_band(n, p, 256, 0) for n, p in sizes] for quantity, sizes in shapes.items()}
        return {quantity: (min(b[0] for b in band), max(b[1] for b in band)) for quantity, band in bands.items()}

    def to_dict(self) -> dict[str, list[float]]:
        """A list a column, NaN where a row lacks it."""
        columns = dict.fromkeys(key for row in self.rows for key in row)
        return {key: [row.get(key, math.nan) for row in self.rows] for key in columns}

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame`` indexed by ``step``.

        Raises:
            ImportError: pandas is not installed.
        """
        pd, columns = pandas(), self.to_dict()
        return pd.DataFrame(columns).set_index("step") if columns else pd.DataFrame()

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV, a column a quantity; what a row lacks is empty."""
        columns = dict.fromkeys(key for row in self.rows for key in row)
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)

    def to_tensorboard(self, writer: Any) -> None:
        """Add every number that is finite as a scalar.

        Args:
            writer: a ``SummaryWriter``, or a folder for a new one.

        Raises:
            ImportError: a folder is given and tensorboard is not installed.
        """
        own = isinstance(writer, (str, os.PathLike))
        if own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("to_tensorboard() needs tensorboard: pip install tensorboard") from error
            writer = SummaryWriter(os.fspath(writer))
        for row in self.rows:
            for name, value in row.items():
                if name != "step" and math.isfinite(value):
                    writer.add_scalar(name, value, row["step"])
        if own:
            writer.close()

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


def _inner(model: nn.Module) -> nn.Module:
    """The module whose names do not depend on how it is trained."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model
