"""The other libraries, each of which may be missing, and the machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import warnings
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["PEERS", "describe_machine", "missing", "peer"]

PEERS = ("geoopt", "pymanopt", "geotorch")


def missing(name: str | None) -> str | None:
    """Why the peer ``name`` cannot be measured; None if it can, or if no peer is needed.

    Example:
        >>> missing(None), missing("a_library_nobody_has")
        (None, 'a_library_nobody_has is not installed')
    """
    if name is None or importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed"


def peer(name: str) -> ModuleType:
    """Import a peer.

    Raises:
        ImportError: it is not installed; the message says how to get it.

    Example:
        >>> peer("math").sqrt(4.0)
        2.0
    """
    if reason := missing(name):
        raise ImportError(f'{reason}: pip install "geodescent[benchmarks]"')
    with warnings.catch_warnings():
        # geoopt 0.5.1 decorates its maths with the deprecated torch.jit.script at import, and nowhere else
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


def describe_machine(device: str = "cpu", date: str | None = None) -> dict[str, Any]:
    """What the figures were measured on. The date is the caller's.

    Example:
        >>> describe_machine(date="2026-01-31")["date"]
        '2026-01-31'
    """
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in ("geodescent", "torch", "numpy", *PEERS):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    if hasattr(os, "getloadavg"):
        # a load above the cores before a run has begun is somebody else's, and widens every spread below
        facts["load_before"] = f"{os.getloadavg()[0]:.1f}"
    if date:
        facts["date"] = date
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
