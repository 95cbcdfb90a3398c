"""The queue of a study on disk: every job that is known, what has been chosen, and the command that asked for it.

`plan.json` lies beside the results lines. A job is done when its cell has a line with status "ok" there, so the two
files together are the queue: whatever is killed, what is left to do is the jobs without a line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arms import Arm
from .files import write_whole
from .grid import Grid
from .protocol import Job, choices, jobs_of, matched_scales
from .results import CellKey, ResultsError, ResultsStore, cell_key, latest, to_json
from .study import Study

__all__ = ["PlannedStudy", "read_plan"]

Record = dict[str, Any]
_FILE = "plan.json"


@dataclass(frozen=True)
class PlannedStudy:
    """A study as it was asked for: what to run, and how it was typed."""

    study: Study
    arms: tuple[Arm, ...]
    grid: Grid
    size: str
    command: str

    def jobs(self, ended: Mapping[CellKey, Mapping[str, Any]]) -> list[Job]:
        return jobs_of(self.study, self.arms, self.grid, ended)

    def write(self, folder: Path, jobs: Sequence[Job], ended: Mapping[CellKey, Mapping[str, Any]]) -> None:
        """Write `folder/plan.json` whole."""
        chosen = choices(self.study, self.arms, self.grid, ended)
        matched = matched_scales(self.study, self.arms, self.grid, ended)
        plan = {
            "study": self.study.name,
            "size": self.size,
            "command": self.command,
            "settings": {"lr": self.study.lr, **self.study.settings()},
            "arms": [arm.name for arm in self.arms],
            "grid": dataclasses.asdict(self.grid),
            "choices": {name: dataclasses.asdict(choice) for name, choice in chosen.items()},
            "matched": {
                name: {"qk_scale": scale, "length_ratio": ratio, "settled": settled}
                for name, (scale, ratio, settled) in matched.items()
            },
            "jobs": [{"role": job.role, **job.cell.identity()} for job in jobs],
        }
        write_whole(folder / _FILE, (json.dumps(to_json(plan), indent=1) + "\n").encode())


def read_plan(folder: Path) -> tuple[dict[str, Any], dict[str, list[Record]]]:
    """The plan of a results folder, and its results lines by role, in the plan's order; jobs without a line are left
    out.

    Raises `ResultsError` where there is no plan or it is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise ResultsError(
            f"{folder} holds no {_FILE}: name a folder that `geodescent study` wrote, such as runs/modular"
        )
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        jobs = [(job["role"], cell_key(job)) for job in plan["jobs"]]
        missing = {"study", "size", "command", "settings", "arms", "grid", "choices", "matched"} - plan.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is damaged ({error!r}): run the study again with the same --out") from None
    if missing:
        raise ResultsError(f"{path} lacks {', '.join(sorted(missing))}: run the study again with the same --out")
    lines = latest(ResultsStore(folder).records())
    roles: dict[str, list[Record]] = {}
    for role, key in jobs:
        if key in lines:
            roles.setdefault(role, []).append(lines[key])
    return plan, roles
