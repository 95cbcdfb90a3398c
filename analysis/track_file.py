"""The file of a tracked run: rows that outlive a crash, and the geometry at the start beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .geometry import AttentionGeometry
from .layer_geometry import LayerGeometry

__all__ = ["TrackFile", "read_track"]

Row = dict[str, float]

# a line that says: what follows began again at an earlier step, from a checkpoint
_RESTART = "restarted from step"


class TrackFile:
    """A JSONL file of rows and, beside it, ``PATH.start.pt`` with the geometry that drift is measured against.

    Every row is on the disk when :meth:`append` returns. A line that was cut off by a crash is taken away when the file
    is opened again; nothing else is ever removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.start_path = self.path.with_name(self.path.name + ".start.pt")
        self._lock = FileLock(f"{self.path}.lock")
        self._size = 0
        self._resumed_rows = 0

    def open(self, now: AttentionGeometry) -> tuple[AttentionGeometry, list[Row]]:
        """The geometry at the start and the rows so far; those of a new run where there is no file yet.

        Raises:
            ValueError: the file belongs to a model with other attention layers, or is no file of a tracker; it stays as
                it is.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            if not self.start_path.exists():
                if self.path.exists() and self.path.stat().st_size:
                    raise ValueError(
                        f"path {str(self.path)!r} has no {self.start_path.name!r} beside it, so its rows cannot be "
                        "continued; choose another path"
                    )
                _write_whole(self.start_path, _saved(now))
                return now, []
            start = _loaded(self.start_path)
            if (mine := _layout(now)) != (theirs := _layout(start)):
                difference = next(a or b for a, b in zip([*theirs, None], [*mine, None], strict=False) if a != b)
                raise ValueError(
                    f"path {str(self.path)!r} belongs to a model with other attention layers (first difference: "
                    f"{difference}); choose another path"
                )
            if not self.path.exists():
                return start, []
            rows, good = _read(self.path)
            if good < self.path.stat().st_size:
                os.truncate(self.path, good)
            self._size, self._resumed_rows = good, len(rows)
            return start, rows

    def append(self, row: Row, rows: list[Row]) -> None:
        """Write a row; the first one after a resume that is not later than ``rows`` takes their later ones out.

        Raises:
            RuntimeError: somebody else has written to the file since.
        """
        text = ""
        if self._resumed_rows:
            kept = [old for old in rows[: self._resumed_rows] if old["step"] < row["step"]]
            if len(kept) < self._resumed_rows:
                text = json.dumps({_RESTART: row["step"]}) + "\n"
                rows[: self._resumed_rows] = kept
            self._resumed_rows = 0
        strict = {key: value if math.isfinite(value) else str(value) for key, value in row.items()}
        text += json.dumps(strict, allow_nan=False) + "\n"
        with self._lock:
            size = self.path.stat().st_size if self.path.exists() else 0
            if size != self._size:
                raise RuntimeError(
                    f"{str(self.path)!r} was written to by somebody else: {size} bytes where this tracker left "
                    f"{self._size}. Another tracker continues it; give this one a path of its own"
                )
            with self.path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        self._size = size + len(text.encode())


def read_track(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a tracker's file, also while it is written to or after a crash; a line that was cut off is left out.

    Raises:
        ValueError: a line before the last is no row.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from geodescent.analysis import GeometryTracker
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> row = GeometryTracker(torch.nn.MultiheadAttention(8, 2), path).record(3, loss=0.5)
        >>> read_track(path) == [row]
        True
    """
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[list[Row], int]:
    """The rows, and the length of the file up to the last whole line."""
    content = path.read_bytes()
    lines = content.split(b"\n")
    good, rows = 0, []
    for number, line in enumerate(lines[:-1], 1):
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if not isinstance(row, dict) or not ("step" in row or _RESTART in row):
            if number == len(lines) - 1:
                break
            raise ValueError(f"{str(path)!r}, line {number}: not a row of a GeometryTracker: {line[:60]!r}")
        if _RESTART in row:
            rows = [old for old in rows if old["step"] < row[_RESTART]]
        else:
            rows.append({key: float(value) if key != "step" else value for key, value in row.items()})
        good += len(line) + 1
    return rows, good


def _layout(geometry: AttentionGeometry) -> list[str]:
    return [
        f"{layer.name}: {layer.num_heads} heads of {layer.head_dim}, queries {_shape(layer.query_frames)}, "
        f"keys {_shape(layer.key_frames)}"
        for layer in geometry.layers
    ]


def _shape(frames: Any) -> str:
    return "×".join(map(str, frames.shape))


def _saved(geometry: AttentionGeometry) -> dict[str, Any]:
    layers = [
        {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)} for layer in geometry.layers
    ]
    return {"layers": [{**layer, "notes": list(layer["notes"])} for layer in layers], "skipped": dict(geometry.skipped)}


def _loaded(path: Path) -> AttentionGeometry:
    saved = torch.load(path, weights_only=True)
    layers = tuple(LayerGeometry(**{**layer, "notes": tuple(layer["notes"])}) for layer in saved["layers"])
    return AttentionGeometry(layers=layers, skipped=saved["skipped"])


def _write_whole(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
