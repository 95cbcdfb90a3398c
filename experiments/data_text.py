"""Characters of a text file, cut into a training, a validation and a test part."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["TextData", "load_text", "text_digest"]


@dataclass(frozen=True)
class TextData:
    """Indices into `vocabulary`, int64, a 1-D tensor a part."""

    vocabulary: str
    train: Tensor
    validation: Tensor
    test: Tensor


def load_text(path: str | os.PathLike[str], held_out: float = 0.1) -> TextData:
    """The text in its order: the first part to train on, then `held_out`/2 of it to validate on and the rest to test.

    Every character of the file is in the vocabulary, in the order of code points.

    Raises `FileNotFoundError`, or `ValueError` for a file that is not UTF-8 or too short to be cut.
    """
    path = _existing(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {path} is not UTF-8 ({error}): convert it, or name another file") from None
    vocabulary = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(vocabulary)}
    indices = torch.tensor([number[character] for character in text])
    train, validation = round(len(text) * (1 - held_out)), round(len(text) * (1 - held_out / 2))
    parts = indices[:train], indices[train:validation], indices[validation:]
    if min(map(len, parts)) < 2:
        raise ValueError(f"text file {path}: {len(text)} characters are too few to cut in three")
    return TextData(vocabulary, *parts)


def text_digest(path: str | os.PathLike[str]) -> str:
    """Sixteen hex digits of the SHA-256 of the file."""
    path = _existing(path)
    stat = path.stat()
    return _digest(str(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _digest(path: str, _size: int, _changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _existing(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"text file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    return path
