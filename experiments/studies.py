"""The studies there are, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .study import Study
from .study_charlm import CharlmStudy
from .study_cifar10 import Cifar10Study
from .study_modular import ModularStudy

__all__ = ["STUDIES", "study_from_settings"]

#: name -> class
STUDIES: dict[str, type[Study]] = {study.name: study for study in (ModularStudy, Cifar10Study, CharlmStudy)}


def study_from_settings(name: str, settings: Mapping[str, Any], **changes: Any) -> Study:
    """The study of a results line: `settings` may lack what is not stored, and hold what identifies data.

    Raises `ValueError` for a study that this version does not know.
    """
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}: this version has {', '.join(STUDIES)}")
    known = {field.name for field in dataclasses.fields(STUDIES[name])}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return STUDIES[name](**({key: value for key, value in values.items() if key in known} | changes))
