"""What is declared before a study is run: its sizes, and for each the grid of learning rates, scales, decays, arms and
seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .arms import ARMS

__all__ = ["FACTORIAL", "FEW_ARMS", "SIZES", "Grid", "Variation"]

#: the arms that decide whether scale-freeness, equivariance or projection matters -> which of the three each has
FACTORIAL: dict[str, dict[str, bool]] = {
    "riemannian-adam": {"scale-free": True, "equivariant": True, "projected": True},
    "riemannian-adam-elementwise": {"scale-free": True, "equivariant": False, "projected": True},
    "scalar-project": {"scale-free": True, "equivariant": True, "projected": False},
    "adamw-project": {"scale-free": True, "equivariant": False, "projected": False},
    "rsgd": {"scale-free": False, "equivariant": True, "projected": True},
}
FEW_ARMS: tuple[str, ...] = ("adamw", "frozen", "riemannian-adam")


@dataclass(frozen=True)
class Variation:
    """Chosen arms run once more under other settings.

    Attributes:
        changes: setting -> its values, one set of cells for each value.
        lrs: candidates for a sweep of its own, by validation data of one seed, for a task unlike the main one; else an
            arm keeps what was chosen for it there.
    """

    arms: tuple[str, ...]
    seeds: int
    changes: Mapping[str, tuple[Any, ...]]
    lrs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Grid:
    """Everything that is tried.

    Attributes:
        arms: in the order of the table.
        lrs, decays: candidates of every arm; one of each means that nothing is chosen.
        qk_scales: arm -> candidates of Q's and K's learning rate as a multiple of the others'; 1 where it is not there.
        tuning_seeds: seeds, none of them reported, on which candidates are compared by validation data.
        seeds: arm -> paired seeds that are reported.
        other_seeds: the same for arms that are not in `seeds`.
        matched_seeds: seeds of the arms of `FACTORIAL` at one learning rate and one mean step length; 0 for none.
        variations: role -> what is run besides, at each arm's chosen settings.
    """

    arms: tuple[str, ...]
    lrs: tuple[float, ...]
    decays: tuple[float, ...]
    other_seeds: int
    seeds: Mapping[str, int] = field(default_factory=dict)
    qk_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tuning_seeds: int = 1
    matched_seeds: int = 0
    variations: Mapping[str, Variation] = field(default_factory=dict)

    def seeds_of(self, arm: str) -> int:
        return self.seeds.get(arm, self.other_seeds)


_ALL = tuple(ARMS)
_QK = {"adamw": (0.1, 0.3, 1.0)}
#: the arms that a claim compares at their own tuned settings; those of `FACTORIAL` are compared on the matched seeds
_COMPARED = (*FEW_ARMS, "adamw-orth-no-decay", "rsgd")
_DECIDING: dict[str, int] = dict.fromkeys(_COMPARED, 12)
_CYCLED = ("adamw", "adamw-orth-no-decay", "frozen", "riemannian-adam")
_FULL_QK = {
    "adamw": (0.03, 0.1, 0.3, 1.0, 3.0),
    "adamw-orth": (0.1, 0.3, 1.0),
    "adamw-orth-no-decay": (0.1, 0.3, 1.0),
    "riemannian-adam": (0.3, 1.0, 3.0),
    "riemannian-adam-frobenius": (0.3, 1.0, 3.0),
    "rsgd": (1.0, 1e2, 1e4),
    "spectral": (0.3, 1.0, 3.0),
}

#: study -> size -> (settings of the study, grid)
SIZES: dict[str, dict[str, tuple[dict[str, Any], Grid]]] = {
    "modular": {
        "quick": ({}, Grid(FEW_ARMS, (1e-2,), (1.0,), other_seeds=4)),
        "default": (
            {},
            Grid(
                _ALL,
                (3e-3, 1e-2, 3e-2),
                (1.0,),
                other_seeds=5,
                seeds=dict.fromkeys(_COMPARED, 10),
                qk_scales=_QK,
                tuning_seeds=2,
                matched_seeds=10,
                variations={
                    "cycles": Variation(_CYCLED, 5, {"decay_cycles": (2,)}),
                    "control": Variation(FEW_ARMS, 3, {"operation": ("compose",)}, lrs=(1e-3, 3e-3)),
                },
            ),
        ),
        "full": (
            {"p": 59, "train_fraction": 0.4, "steps": 5000},
            Grid(
                _ALL,
                (3e-4, 1e-3, 3e-3, 1e-2),
                (0.3, 1.0, 3.0),
                other_seeds=10,
                seeds=_DECIDING,
                qk_scales=_FULL_QK,
                tuning_seeds=3,
                matched_seeds=12,
                variations={
                    "cycles": Variation(_CYCLED, 10, {"decay_cycles": (3,)}),
                    "control": Variation(_ALL, 5, {"operation": ("compose",)}, lrs=(1e-3, 3e-3, 1e-2)),
                },
            ),
        ),
    },
    "cifar10": {
        "quick": ({"train_images": 1000, "epochs": 2}, Grid(FEW_ARMS, (3e-3,), (0.05,), other_seeds=2)),
        "default": (
            {},
            Grid(
                _ALL,
                (3e-4, 1e-3, 3e-3),
                (0.05,),
                other_seeds=12,
                qk_scales=_QK,
                matched_seeds=10,
                variations={
                    "growth": Variation(("adamw", "riemannian-adam"), 5, {"train_images": (1000, 2000, 8000)}),
                },
            ),
        ),
        "full": (
            {"train_images": 20_000, "epochs": 20, "batch_size": 100},
            Grid(
                _ALL,
                (3e-4, 1e-3, 3e-3, 1e-2),
                (0.01, 0.05, 0.2),
                other_seeds=10,
                seeds=_DECIDING,
                qk_scales=_FULL_QK,
                tuning_seeds=2,
                matched_seeds=12,
                variations={
                    "growth": Variation(FEW_ARMS, 10, {"train_images": (2500, 5000, 10_000, 40_000)}),
                    "cycles": Variation(_CYCLED, 5, {"decay_cycles": (3,)}),
                },
            ),
        ),
    },
    "charlm": {
        "quick": ({"steps": 100, "interval": 50}, Grid(FEW_ARMS, (3e-3,), (0.1,), other_seeds=2)),
        "default": (
            {},
            Grid(
                _ALL,
                (1e-3, 3e-3, 1e-2),
                (0.1,),
                other_seeds=5,
                qk_scales=_QK,
                matched_seeds=5,
                variations={"cycles": Variation(_CYCLED, 5, {"decay_cycles": (2,)})},
            ),
        ),
        "full": (
            {"steps": 5000, "context": 128, "width": 128, "layers": 4, "interval": 500},
            Grid(
                _ALL,
                (3e-4, 1e-3, 3e-3, 1e-2),
                (0.01, 0.1, 0.3),
                other_seeds=10,
                seeds=_DECIDING,
                qk_scales=_FULL_QK,
                tuning_seeds=2,
                matched_seeds=10,
                variations={"cycles": Variation(_CYCLED, 5, {"decay_cycles": (3,)})},
            ),
        ),
    },
}
