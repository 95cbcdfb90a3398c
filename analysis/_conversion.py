"""Results from plain values: the way back from ``to_dict()`` and ``to_pandas()``."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def restore(hint: Any, value: Any) -> Any:
    """``value``, as :func:`._result.plain` gave it, as the type that a field is declared to have.

    Real numbers in tensors are float64, whatever they were.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else restore(next(a for a in arguments if a is not type(None)), value)
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(restore(kind, item) for kind, item in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: restore(arguments[1], item) for key, item in value.items()}
    if hint is torch.Tensor:
        array = np.asarray(value)
        return torch.from_numpy(array.astype(float) if array.dtype.kind == "f" else array.copy())
    if isinstance(hint, type) and hasattr(hint, "from_dict"):
        return hint.from_dict(value)
    return float(value) if hint is float else value


def pandas() -> Any:
    """pandas, which is not needed otherwise.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import pandas as module
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install pandas, or use to_dict()") from error
    return module
