from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geodescent.experiments.study_modular import ModularStudy

CIFAR_NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


@pytest.fixture
def tiny_study() -> ModularStudy:
    """Seconds become milliseconds: eight steps of a narrow model on 25 pairs."""
    return ModularStudy(p=5, width=16, heads=2, steps=8, interval=4, train_fraction=0.6)


@pytest.fixture
def write_cifar() -> Callable[..., dict[str, np.ndarray]]:
    """Writes six files of random records in the official layout; returns the raw records, (records, 3073), by name."""

    def write(folder: Path, records: int = 20, seed: int = 0) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(seed)
        folder.mkdir(parents=True, exist_ok=True)
        raw = {}
        for name in CIFAR_NAMES:
            content = generator.integers(0, 256, (records, 3073), dtype=np.uint8)
            content[:, 0] = np.arange(records) % 10
            (folder / name).write_bytes(content.tobytes())
            raw[name] = content
        return raw

    return write


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """A results line as the runner writes them."""

    def make(arm: str = "adamw", seed: int = 0, **changes: Any) -> dict[str, Any]:
        metrics = {
            "test_accuracy": 0.9,
            "steps": 100,
            "step_length": 0.01,
            "validation_loss": 1.0,
            "qk_movement": 0.5,
            "query_condition": 2.0,
            "key_condition": 3.0,
            "capped_fraction": None,
        }
        history = {
            "step": [0, 4, 8],
            "train_accuracy": [0.1, 0.5, 1.0],
            "validation_accuracy": [0.1, 0.3, 0.9],
            "train_loss": [2.0, 1.0, 0.1],
            "validation_loss": [2.0, 1.5, 0.7],
            "query_condition": [1.0, 1.5, 2.0],
            "key_condition": [1.0, 2.0, 3.0],
            "query_angle": [0.0, 0.2, 0.4],
            "key_angle": [0.0, 0.1, 0.3],
            "query_movement": [0.0, 0.25, 0.5],
            "key_movement": [0.0, 0.2, 0.4],
        }
        record = {
            "study": "modular",
            "arm": arm,
            "seed": seed,
            "lr": 1e-3,
            "settings_hash": "0" * 12,
            "split": "test",
            "status": "ok",
            "metrics": metrics | changes.pop("metrics", {}),
            "history": history,
            "random_angle": 1.3,
            "config": {
                "study": {"qk_scale": 1.0, "weight_decay": 1.0, "train_images": 4000},
                "groups": {"matrices": {"numbers": 7, "weight_decay": 1.0, "stepped_by": "AdamW"}},
            },
            "command": "geodescent cell modular --arm adamw",
            "versions": {"python": "3", "torch": "2"},
            "hardware": "a processor",
            "threads": 1,
            "wall_seconds": 2.0,
            "ended": "2026-01-01T00:00:00+0000",
        }
        return record | changes

    return make
