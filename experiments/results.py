"""The results store: one JSON line a cell, on disk for good as soon as the cell ends.

A *cell* is one training run: one arm, one seed, one learning rate, under one set of settings. `OUT/STUDY/*.jsonl` holds
one line a cell. What the store promises:

- a line is appended whole, flushed and fsynced before `append` returns, so a kill loses at most the running cell;
- a kill in the middle of an append leaves a last line without a newline. Reading ignores it; the next append moves it
  to `cells.jsonl.torn` and goes on from a fresh line;
- any other damage is a `ResultsError` that names the file and the line, and the file is left as it is;
- one process writes to a folder at a time, under a lock held from `with store:` to its end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

__all__ = ["CellKey", "ResultsError", "ResultsStore", "cell_key", "latest", "settings_hash", "to_json"]

REQUIRED = ("study", "arm", "seed", "lr", "split", "status", "metrics", "settings_hash")
STATUSES = ("ok", "failed")

CellKey = tuple[str, str, int, float, str]


class ResultsError(ValueError):
    """The results folder cannot be used as it is: damaged, or held by another process."""


def to_json(value: Any) -> Any:
    """`value` with numbers that JSON has no name for (nan, ±inf) as None, tuples as lists, keys as strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return to_json(value.tolist())
    raise TypeError(f"cannot store a {type(value).__name__} in a results line: {value!r}")


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hex digits that change when any setting changes, and do not depend on the order of the settings."""
    canonical = json.dumps(to_json(settings), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def cell_key(record: Mapping[str, Any]) -> CellKey:
    """What makes two lines the same cell: study, arm, seed, learning rate and the hash of all settings."""
    return (
        str(record["study"]),
        str(record["arm"]),
        int(record["seed"]),
        float(record["lr"]),
        str(record["settings_hash"]),
    )


def latest(records: Iterable[dict[str, Any]]) -> dict[CellKey, dict[str, Any]]:
    """The last line of every cell: a failed cell that was run again later counts as its later run."""
    return {cell_key(record): record for record in records}


class ResultsStore:
    """The lines under one folder. Reading needs no lock; appending needs `with store:`.

    Raises `ResultsError` from `__enter__` when another process holds the folder, and from `records` when a line is
    damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "cells.jsonl"
        self._lock = filelock.FileLock(self.folder / ".lock")

    def __enter__(self) -> ResultsStore:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ResultsError(
                f"results folder {self.folder}: a file of that name is in the way; name another folder with --out"
            ) from None
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ResultsError(
                f"results folder {self.folder} is in use: another process holds {self.folder / '.lock'}; "
                "wait for it to end, or name another folder with --out"
            ) from None
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def records(self) -> list[dict[str, Any]]:
        """Every whole line of every `*.jsonl` in the folder, in order; a torn last line is left out."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            found += _read(path)
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, on disk when this returns."""
        if not self._lock.is_locked:
            raise ResultsError("append needs the folder's lock: use `with store: store.append(record)`")
        line = json.dumps(to_json(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        _check(json.loads(line), "the record to append")
        new = not self.path.exists()
        _set_torn_tail_aside(self.path)
        with open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _fsync_folder(self.folder)


def _check(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ResultsError(f"{where}: expected a JSON object, found {type(record).__name__}")
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise ResultsError(f"{where}: not a results line, it lacks {', '.join(missing)}")
    if record["status"] not in STATUSES:
        raise ResultsError(f"{where}: status is {record['status']!r}, expected one of {', '.join(STATUSES)}")
    try:
        cell_key(record)
    except (TypeError, ValueError) as error:
        raise ResultsError(f"{where}: seed or lr is not a number ({error})") from None
    return record


def _read(path: Path) -> list[dict[str, Any]]:
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise ResultsError(
                f"{where}: damaged ({error}); the file was not touched: mend or remove that line, or name another "
                "folder with --out"
            ) from None
        records.append(_check(value, where))
    if tail:
        # No newline: the writer was killed inside the append. If only the newline is missing, the cell is whole.
        with suppress(ValueError):
            records.append(_check(json.loads(tail), f"{path}, line {len(lines) + 1}"))
    return records


def _set_torn_tail_aside(path: Path) -> None:
    """Make `path` end with a newline: a whole last line gets one, a fragment is moved to `NAME.torn`."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    tail = content[start:]
    try:
        _check(json.loads(tail), "")
    except ValueError:
        with open(path.with_name(path.name + ".torn"), "ab") as aside:
            aside.write(tail + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
        os.truncate(path, start)
    else:
        with open(path, "ab") as file:
            file.write(b"\n")


def _fsync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut (POSIX; elsewhere folders cannot be opened)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
