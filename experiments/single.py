"""One cell by itself: named by words, and compared with its stored results line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .arms import select_arms
from .cells import Cell, fingerprint
from .results import ResultsError, ResultsStore, latest, to_json
from .studies import STUDIES, study_from_settings

__all__ = ["cell_from_words", "find_stored", "print_cell", "print_comparison"]

Record = Mapping[str, Any]


def cell_from_words(study: str, arm: str, seed: int, settings: Sequence[str], data: str | None) -> Cell:
    """The cell of `geodescent cell`.

    Args:
        settings: NAME=VALUE, the value in JSON.
        data: where the data lie.

    Raises `ValueError` for a name that is not there or a value that is not JSON.
    """
    if study not in STUDIES:
        raise ValueError(f"unknown study {study!r}: choose one of {', '.join(STUDIES)}")
    kind = STUDIES[study]
    names = {field.name for field in dataclasses.fields(kind)} - {kind.location}
    values: dict[str, Any] = {}
    for word in settings:
        name, equals, text = word.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--set {word}: expected NAME=VALUE with one of {', '.join(sorted(names))}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            raise ValueError(f"--set {word}: the value is not JSON; texts need quotes, '{name}=\"{text}\"'") from None
    if (kind.location is None) != (data is None):
        raise ValueError(
            f"--data must {'not be given' if kind.location is None else 'say where the data lie'}: {study}"
        )
    try:
        built = study_from_settings(study, values, **({} if kind.location is None else {kind.location: data}))
    except TypeError as error:
        raise ValueError(f"--set: a value of the wrong kind ({error})") from None
    return Cell(built, select_arms([arm])[0], seed)


def find_stored(folder: Path, cell: Cell) -> Record:
    """The results line of the cell; `ResultsError` where there is none that ended well."""
    stored = latest(ResultsStore(folder).records()).get(cell.key)
    if stored is None or stored["status"] != "ok":
        raise ResultsError(f"{folder} has no finished line of this cell: {cell.identity()}")
    return stored


def print_cell(console: Console, record: Record) -> None:
    if record["status"] == "failed":
        console.print(f"FAILED: {record['error']}\n{record['traceback']}", markup=False, highlight=False)
        return
    for name, value in record["metrics"].items():
        console.print(f"{name:24} {value}", markup=False, highlight=False)
    console.print(f"{'fingerprint':24} {fingerprint(record)}", markup=False, highlight=False)


def print_comparison(console: Console, record: Record, stored: Record) -> bool:
    """Whether every stored number is the same to the last bit; says which are not."""
    if fingerprint(record) == fingerprint(stored):
        console.print("Every number is the stored one, to the last bit.")
        return True
    now = to_json(record["metrics"])
    for name, value in stored["metrics"].items():
        if now.get(name) != value:
            console.print(f"{name}: stored {value}, now {now.get(name)}", markup=False, highlight=False)
    console.print("The numbers are not the stored ones.", style="bold red")
    if (then := stored.get("hardware"), stored.get("versions"), stored.get("threads")) != (
        record["hardware"],
        record["versions"],
        record["threads"],
    ):
        console.print(f"They were made with {then}.", markup=False, highlight=False)
    return False
