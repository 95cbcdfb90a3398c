"""Checkpoint files as state dicts whose tensors are read one at a time. Nothing here runs code from a file."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_KNOWN = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# where training loops put the weights, the likeliest first
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "params")


class Checkpoint(Mapping[str, Any]):
    """A state dict on disk: keys and shapes at once, a tensor when it is asked for.

    Keys come in natural order (layer 2 before layer 10). ``config`` is the ``config.json`` beside the file, or empty.
    Use as a context manager, or :meth:`close` it.

    Args:
        path: a ``.safetensors`` file; a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file, read with
            ``torch.load(weights_only=True)`` and nothing else; an index of shards (``….index.json``); or a folder that
            holds one of these under Hugging Face's names, or one such file.

    Raises:
        ValueError: the file cannot be read, holds no tensors, or would run code; the message has one line.
        OSError: there is no such file.
        ImportError: a ``.safetensors`` file without the safetensors package.

    Example:
        >>> import tempfile, torch
        >>> from geodescent.analysis import Checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2, 3)}, f"{folder}/model.pt")
        ...     with Checkpoint(f"{folder}/model.pt") as state:
        ...         state.shape("w")
        (2, 3)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _weights_file(Path(path))
        self._open = contextlib.ExitStack()
        self._files: dict[Path, tuple[Any, frozenset[str]]] = {}
        self.config: dict[str, Any] = _config_beside(self.path)
        try:
            if self.path.name.endswith(".index.json"):
                where = _shards(self.path)
            else:
                where = dict.fromkeys(self._file(self.path)[1], self.path)
        except BaseException:
            self.close()
            raise
        self._where = {key: where[key] for key in sorted(where, key=_natural)}
        if not self._where:
            raise ValueError(f"{self.path} holds no tensors")

    def __getitem__(self, key: str) -> Any:
        return self._entry(key).get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it where the format allows."""
        return tuple(self._entry(key).get_slice(key).get_shape())

    def close(self) -> None:
        """Close the files. Tensors that were read stay."""
        self._open.close()
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, key: str) -> Any:
        file, keys = self._file(self._where[key])
        if key not in keys:
            raise ValueError(f"the index names {key!r} in {self._where[key].name}, which has no such tensor")
        return file

    def _file(self, path: Path) -> tuple[Any, frozenset[str]]:
        if path not in self._files:
            file = self._safe(path) if path.suffix == ".safetensors" else _Pickled(path)
            self._files[path] = file, frozenset(file.keys())
        return self._files[path]

    def _safe(self, path: Path) -> Any:
        try:
            safetensors = importlib.import_module("safetensors")
        except ImportError as error:
            raise ImportError(f"reading {path.name} needs safetensors: pip install safetensors") from error
        try:
            return self._open.enter_context(safetensors.safe_open(path, framework="pt", device="cpu"))
        except (safetensors.SafetensorError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} is no readable safetensors file: {_first_line(error)}") from error


class _Pickled:
    """A file of ``torch.save`` behind the three methods of a safetensors handle that are used here."""

    def __init__(self, path: Path) -> None:
        self._state = _state_in(_load(path), path)

    def keys(self) -> list[str]:
        return list(self._state)

    def get_tensor(self, key: str) -> Tensor:
        return self._state[key]

    def get_slice(self, key: str) -> _Pickled._Shape:
        return self._Shape(self._state[key])

    class _Shape:
        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings():
            # about pickle protocols and TorchScript: whatever is wrong becomes an error below
            warnings.simplefilter("ignore", UserWarning)
            # mapped, where the format allows: the optimizer's half of a training checkpoint is then never read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        why = "it asks for code to be run, or is no file of torch.save"
        raise ValueError(f"{path} was refused, nothing in it was run: {why}{_asked_for(error)}") from error
    except Exception as error:  # the weights-only unpickler fails in as many ways as there are broken files
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


def _asked_for(error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]+)|(?:global|class|function|type) ['`]?([\w.]+\.[\w.]+)", str(error))
    return f" ({found.group(1) or found.group(2)})" if found else ""


def _state_in(loaded: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a state dict: save model.state_dict()")
    candidates = {"": loaded, **{str(k): v for k, v in loaded.items() if isinstance(v, Mapping)}}
    # a lone step counter beside the weights is no state dict
    found = {name: _tensors(value) for name, value in candidates.items()}
    with_tensors = {name: state for name, state in found.items() if any(t.ndim > 1 for t in state.values())}
    for name in ("", *_NESTED):
        if name in with_tensors:
            return with_tensors[name]
    if len(with_tensors) == 1:
        return next(iter(with_tensors.values()))
    if with_tensors:
        raise ValueError(f"{path} holds several state dicts, {', '.join(with_tensors)}: save the one to read by itself")
    raise ValueError(f"{path} holds no tensors by name")


def _tensors(mapping: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in mapping.items() if isinstance(key, str) and isinstance(value, Tensor)}


def _weights_file(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.is_dir():
        for name in _KNOWN:
            if (path / name).is_file():
                return path / name
        found = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", *_PICKLED) and p.is_file())
        if len(found) != 1:
            what = ", ".join(p.name for p in found[:5]) or "none"
            raise ValueError(f"{path} must hold {' or '.join(_KNOWN)} or one checkpoint, found {what}: name the file")
        return found[0]
    if path.name.endswith(".index.json") or path.suffix in (".safetensors", *_PICKLED):
        return path
    raise ValueError(
        f"{path} is no checkpoint this reads: .safetensors, {', '.join(_PICKLED)}, an .index.json, or a folder of them"
    )


def _shards(index: Path) -> dict[str, Path]:
    where = _json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} has no weight_map")
    for name in set(map(str, where.values())):
        # an index may name files of its folder, not read the rest of the disk
        if Path(name).name != name or name in ("", "..") or Path(name).suffix not in (".safetensors", *_PICKLED):
            raise ValueError(f"{index} names the shard {name!r}, which is no checkpoint file of its own folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names the shard {name!r}, which is not there")
    return {str(key): index.parent / str(name) for key, name in where.items()}


def _config_beside(path: Path) -> dict[str, Any]:
    file = path.parent / "config.json"
    return _json(file) if file.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no readable JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _first_line(error: BaseException) -> str:
    """The first line of a message, or its first sentence where that is a paragraph."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return line if len(line) <= 150 else line.split(". ")[0]


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", key)]
