"""CIFAR-10 from the official binary layout, `cifar-10-batches-bin`.

Six files, `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`, each of 10,000 records of 3073 bytes: the
label, then the red, green and blue planes of a 32×32 image, row by row. (https://www.cs.toronto.edu/~kriz/cifar.html)
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["CLASSES", "Cifar10", "cifar10_digest", "load_cifar10"]

TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
RECORDS = 10_000
RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = 10


@dataclass(frozen=True)
class Cifar10:
    """Images of shape (N, 3, 32, 32), float32, normalized by the chosen training images' mean and standard deviation
    a channel; labels of shape (N,), int64."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_cifar10(
    folder: str | os.PathLike[str],
    train_images: int,
    validation_images: int,
    seed: int,
    records: int = RECORDS,
) -> Cifar10:
    """`train_images` and `validation_images` different images, drawn by `seed` and balanced over the classes, from the
    five training files, and the whole test file.

    Args:
        folder: the folder of the six files, or the folder above it.
        records: records a file, 10,000 in the official data.

    Raises `FileNotFoundError` when the folder or a file is missing, `ValueError` when a file has another size than it
    must have, a label is above 9, or more images are asked for than there are.
    """
    root = _locate(Path(folder))
    available = len(TRAIN_FILES) * records
    if train_images < CLASSES:
        raise ValueError(f"train_images must be at least {CLASSES}, one a class; found {train_images}")
    if validation_images < 1:
        raise ValueError(f"validation_images must be at least 1, found {validation_images}")
    if train_images + validation_images > available:
        raise ValueError(
            f"train_images + validation_images is {train_images} + {validation_images}, but the training files hold "
            f"{available} images"
        )
    parts = [_read(root / name, records) for name in TRAIN_FILES]
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    test_images, test_labels = _read(root / TEST_FILE, records)

    order = _balanced_order(labels, np.random.default_rng(seed))
    chosen, held_out = order[:train_images], order[train_images : train_images + validation_images]
    mean, std = _channel_statistics(images[chosen])

    def normalize(bytes_: np.ndarray) -> Tensor:
        scaled = (bytes_.astype(np.float32) / 255 - mean[:, None, None]) / std[:, None, None]
        return torch.from_numpy(scaled.astype(np.float32))

    return Cifar10(
        train=(normalize(images[chosen]), torch.from_numpy(labels[chosen])),
        validation=(normalize(images[held_out]), torch.from_numpy(labels[held_out])),
        test=(normalize(test_images), torch.from_numpy(test_labels)),
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
    )


def cifar10_digest(folder: str | os.PathLike[str]) -> str:
    """Sixteen hex digits of the SHA-256 of the six files: the same pixels are the same data, wherever they lie.

    Raises `FileNotFoundError` as :func:`load_cifar10` does.
    """
    root = _locate(Path(folder))
    paths = [root / name for name in (*TRAIN_FILES, TEST_FILE)]
    return _digest(tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=8)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def _locate(folder: Path) -> Path:
    """`folder` if it holds the batches, else `folder/cifar-10-batches-bin`."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"CIFAR-10 folder {folder} {what}")
    nested = folder / "cifar-10-batches-bin"
    root = nested if nested.is_dir() and not (folder / TEST_FILE).is_file() else folder
    missing = [name for name in (*TRAIN_FILES, TEST_FILE) if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"CIFAR-10 folder {root} lacks {', '.join(missing)}: expected the official binary layout, "
            f"{TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILE}, there or in {folder / 'cifar-10-batches-bin'}"
        )
    return root


def _read(path: Path, records: int) -> tuple[np.ndarray, np.ndarray]:
    expected, found = records * RECORD_BYTES, path.stat().st_size
    if found != expected:
        raise ValueError(
            f"{path}: found {found:,} bytes, expected {expected:,} ({records:,} records of {RECORD_BYTES}); "
            "the file is truncated or not in the official binary layout: unpack it again"
        )
    raw = np.fromfile(path, dtype=np.uint8).reshape(records, RECORD_BYTES)
    labels = raw[:, 0].astype(np.int64)
    wrong = np.flatnonzero(labels >= CLASSES)
    if wrong.size:
        raise ValueError(
            f"{path}: record {wrong[0]} has label {labels[wrong[0]]}, expected 0 to {CLASSES - 1}; the file is damaged "
            "or not in the official binary layout"
        )
    return raw[:, 1:].reshape(records, 3, 32, 32), labels


def _balanced_order(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A random order of all images in which every prefix is as balanced over the classes as the data allow."""
    order = generator.permutation(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)  # how many of its class come before an image
    for label in range(CLASSES):
        of_class = order[labels[order] == label]
        rank[of_class] = np.arange(len(of_class))
    return order[np.argsort(rank[order], kind="stable")]


def _channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation a channel, of bytes scaled to [0, 1]: from the histogram of the 256 values, so that
    50,000 images need no copy in floating point. A constant channel gets 1, to be centred and not divided by zero."""
    values = np.arange(256) / 255
    shares = np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(3)]) / images[:, 0].size
    mean = shares @ values
    std = np.sqrt(shares @ values**2 - mean**2)
    return mean, np.where(std > 1e-7, std, 1.0)
