"""Which cells a study consists of: the sweep, the choice that validation data make of it, the paired seeds that are
reported, the arms at one step length, and the variations.

What comes later depends on what came out earlier, so `jobs_of` is asked again until it has nothing new: it is a
function of the results so far and of nothing else, and a study that was killed goes on where it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import ARMS, Arm
from .cells import TUNING_SEED, Cell
from .grid import FACTORIAL, Grid, Variation
from .results import CellKey
from .study import Study

__all__ = ["MATCHED_TO", "Choice", "Job", "check_variations", "choices", "jobs_of", "matched_scales"]

Records = Mapping[CellKey, Mapping[str, Any]]

#: the arm whose learning rate and mean step length the arms of the factorial take
MATCHED_TO = "riemannian-adam"
#: step lengths within this factor of each other count as one
_MATCH = 1.1
_MATCHING_ROUNDS = 4


@dataclass(frozen=True)
class Job:
    """A cell, and what it is for: "tuning", "matching", "report", "matched", or the name of a variation, with "-tuning"
    for the sweep of its own."""

    role: str
    cell: Cell


@dataclass(frozen=True)
class Choice:
    """What validation data chose for an arm."""

    lr: float
    qk_scale: float
    weight_decay: float


def jobs_of(study: Study, arms: Sequence[Arm], grid: Grid, records: Records) -> list[Job]:
    """Every job that is known by now, in the order to run them; a cell may have several roles.

    Args:
        records: the cells that have ended, failed ones too.
    """
    jobs = [Job("tuning", cell) for arm in arms for _, cells in _candidates(study, arm, grid) for cell in cells]
    chosen = choices(study, arms, grid, records)
    settled = {arm.name: _with(study, choice) for arm in arms if (choice := chosen.get(arm.name)) is not None}
    most = max((grid.seeds_of(arm.name) for arm in arms), default=0)
    # every arm of a seed before the next seed, so that a study stopped halfway has whole pairs
    for seed in range(most):
        jobs += [
            Job("report", Cell(settled[arm.name], arm, seed))
            for arm in arms
            if arm.name in settled and seed < grid.seeds_of(arm.name)
        ]
    jobs += _matching(study, arms, grid, records, settled)
    for role, variation in grid.variations.items():
        jobs += _variation(role, variation, study, grid, records, settled)
    return jobs


def check_variations(study: Study, grid: Grid) -> None:
    """Raises `ValueError` where a variation cannot be run with some candidate: before the first run, not after the
    sweep."""
    for variation in grid.variations.values():
        for lr, decay in itertools.product(variation.lrs or grid.lrs, grid.decays):
            for name, values in variation.changes.items():
                for value in values:
                    _vary(dataclasses.replace(study, lr=lr, weight_decay=decay), name, value)


def choices(study: Study, arms: Sequence[Arm], grid: Grid, records: Records) -> dict[str, Choice]:
    """arm -> the candidate with the best mean of the tuning metric over the tuning seeds; an arm whose sweep has not
    ended is left out. A run that failed, or never got there, counts as the worst."""
    headline = study.headline
    sign = -1.0 if headline.higher_is_better else 1.0
    worst = math.inf

    def cost(cell: Cell) -> float:
        record = records[cell.key]
        value = record["metrics"].get(headline.tuning_metric) if record["status"] == "ok" else None
        if value is None:
            value = headline.cap if record["status"] == "ok" else None
        return worst if value is None else sign * value

    def tie_break(cell: Cell) -> float:  # where nobody reached a goal, validation loss still tells candidates apart
        record = records[cell.key]
        loss = record["metrics"].get("validation_loss") if record["status"] == "ok" else None
        return worst if loss is None else loss

    found = {}
    for arm in arms:
        candidates = list(_candidates(study, arm, grid, even_one=True))
        if len(candidates) == 1:
            found[arm.name] = candidates[0][0]
        elif all(cell.key in records for _, cells in candidates for cell in cells):
            found[arm.name] = min(candidates, key=lambda c: (sum(map(cost, c[1])), sum(map(tie_break, c[1]))))[0]
    return found


def matched_scales(
    study: Study, arms: Sequence[Arm], grid: Grid, records: Records
) -> dict[str, tuple[float, float | None, bool]]:
    """arm -> (Q/K scale, mean step length ÷ that of `MATCHED_TO`, whether that is settled), for the arms of the
    factorial that have been tried."""
    jobs_tried = _matching_tries(study, arms, grid, records)
    return {name: (tries[-1][0], tries[-1][1], settled) for name, (tries, settled) in jobs_tried.items() if tries}


def _candidates(
    study: Study, arm: Arm, grid: Grid, even_one: bool = False
) -> Iterator[tuple[Choice, tuple[Cell, ...]]]:
    """The candidates of an arm with their cells on the tuning seeds; none where there is only one to choose from."""
    scales = grid.qk_scales.get(arm.name, (1.0,))
    found = [Choice(*values) for values in itertools.product(grid.lrs, scales, grid.decays)]
    if len(found) == 1 and not even_one:
        return
    for choice in found:
        yield choice, _tuning_cells(_with(study, choice), arm, grid)


def _variation(
    role: str, variation: Variation, study: Study, grid: Grid, records: Records, settled: Mapping[str, Study]
) -> list[Job]:
    arms = [ARMS[name] for name in variation.arms if name in settled]
    jobs: list[Job] = []
    bases: list[Mapping[str, Study]] = []  # arm -> its study, for each value
    for name, values in variation.changes.items():
        for value in values:
            if not variation.lrs:
                bases.append({arm.name: _vary(settled[arm.name], name, value) for arm in arms})
                continue
            varied, sweep = _vary(study, name, value), dataclasses.replace(grid, lrs=variation.lrs, tuning_seeds=1)
            for arm in arms:
                jobs += [Job(f"{role}-tuning", cell) for _, cells in _candidates(varied, arm, sweep) for cell in cells]
            chosen = choices(varied, arms, sweep, records)
            bases.append({name: _with(varied, choice) for name, choice in chosen.items()})
    for seed in range(variation.seeds):
        jobs += [Job(role, Cell(own[arm.name], arm, seed)) for own in bases for arm in arms if arm.name in own]
    return jobs


def _with(study: Study, choice: Choice) -> Study:
    return dataclasses.replace(study, **dataclasses.asdict(choice))


def _vary(study: Study, name: str, value: Any) -> Study:
    """A variation of one setting, with what must change along."""
    changes = {name: value}
    if (name, value) == ("operation", "compose"):  # S_5: 14,400 pairs, too many for a full batch, and slow to learn
        changes |= {"p": 5, "batch_size": 512, "train_fraction": 0.8, "steps": 2000, "interval": 100}
    return dataclasses.replace(study, **changes)


# --- one step length ------------------------------------------------------------------------------------------------


def _matching(
    study: Study, arms: Sequence[Arm], grid: Grid, records: Records, settled: Mapping[str, Study]
) -> list[Job]:
    jobs = []
    tries = _matching_tries(study, arms, grid, records)
    for name, (tried, _) in tries.items():
        for scale, _ in tried:
            cells = _tuning_cells(_scaled(settled[MATCHED_TO], scale), ARMS[name], grid)
            jobs += [Job("matching", cell) for cell in cells]
    for seed in range(grid.matched_seeds):
        for name, (tried, done) in tries.items():
            if done:
                jobs.append(Job("matched", Cell(_scaled(settled[MATCHED_TO], tried[-1][0]), ARMS[name], seed)))
    return jobs


def _matching_tries(
    study: Study, arms: Sequence[Arm], grid: Grid, records: Records
) -> dict[str, tuple[list[tuple[float, float | None]], bool]]:
    """arm -> scales tried with the ratio of step lengths that came out (None: not run yet), and whether the last will
    do. A scale that missed is corrected by its ratio: lengths are nearly proportional to learning rates."""
    chosen = choices(study, arms, grid, records).get(MATCHED_TO)
    if chosen is None or not grid.matched_seeds:
        return {}
    base = _with(study, chosen)
    target = _length(base, ARMS[MATCHED_TO], grid, records)
    found: dict[str, tuple[list[tuple[float, float | None]], bool]] = {}
    for arm in (arm for arm in arms if arm.name in FACTORIAL):
        if arm.name == MATCHED_TO:
            found[arm.name] = [(base.qk_scale, None if target is None else 1.0)], target is not None
            continue
        if target is None:
            continue
        tried: list[tuple[float, float | None]] = []
        scale, done = base.qk_scale, False
        while not done:
            length = _length(_scaled(base, scale), arm, grid, records)
            ratio = None if length is None else length / target
            tried.append((scale, ratio))
            if not ratio:
                break
            done = 1 / _MATCH < ratio < _MATCH or len(tried) == _MATCHING_ROUNDS
            if not done:
                scale = float(f"{scale / ratio:.3g}")
        found[arm.name] = tried, done
    return found


def _scaled(study: Study, qk_scale: float) -> Study:
    return dataclasses.replace(study, qk_scale=qk_scale)


def _tuning_cells(study: Study, arm: Arm, grid: Grid) -> tuple[Cell, ...]:
    return tuple(Cell(study, arm, TUNING_SEED + i) for i in range(grid.tuning_seeds))


def _length(study: Study, arm: Arm, grid: Grid, records: Records) -> float | None:
    """Geometric mean over the tuning seeds of a run's mean step length; None before all have ended well."""
    found = [records.get(cell.key) for cell in _tuning_cells(study, arm, grid)]
    lengths = [record["metrics"]["step_length"] for record in found if record is not None and record["status"] == "ok"]
    return statistics.geometric_mean(lengths) if len(lengths) == len(found) and min(lengths) > 0 else None
