"""Memory of a step: the optimizer's state, what it keeps, and the peak while it steps."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .contenders import RECIPES, FrameBatch, Recipe
from .peers import missing
from .report import Outcome, Table
from .steps import SHAPES, label

__all__ = ["Allocations", "allocations", "measure_memory", "state_bytes"]

NOTES = (
    "In units of the parameters' bytes, besides parameters and gradients. Kept: state and whatever else lives on "
    "between steps. Peak: at any moment of the first three steps, with what is kept.",
    "Adam's state is two moments; the state's share is the largest over the shapes.",
    "Counted by torch's allocator, through its profiler; not counted: workspaces inside BLAS and LAPACK, and pymanopt, "
    "whose arrays are numpy's.",
)


@dataclass(frozen=True)
class Allocations:
    """Bytes of tensors that came to live while something ran.

    Attributes:
        peak: most at any moment.
        kept: at the end. Releases of what was there at the start are not seen.

    Example:
        >>> allocations(lambda: torch.empty(100)).peak
        400
    """

    peak: int
    kept: int


def allocations(call: Callable[[], object], device: str = "cpu") -> Allocations:
    """Follow torch's allocator while ``call`` runs: exact, and the same in every run.

    torch's profiler records every allocation and release on the CPU and on CUDA. The process' resident size would add
    whatever the libraries load and keep, and tracemalloc does not see tensors. What is not counted: workspaces inside
    BLAS and LAPACK, and numpy's arrays.

    Args:
        call: its result is released after the measurement.
        device: whose memory is counted.

    Example:
        >>> keep = []
        >>> def call():
        ...     temporary = torch.empty(1000)
        ...     keep.append(torch.empty(500))
        >>> allocations(call)
        Allocations(peak=6000, kept=2000)
    """
    cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports its own start and end on stderr
    with profile(activities=activities, profile_memory=True) as profiler:
        result = call()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kind = 1 if cuda else 0  # DeviceType of c10
    records = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == kind]
    live = peak = 0
    for record in sorted(records, key=lambda e: (e["ts"], e["args"].get("Ev Idx", 0))):
        live += int(record["args"]["Bytes"])
        peak = max(peak, live)
    return Allocations(peak, live)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(8))
        >>> p.grad = torch.ones(8)
        >>> optimizer = torch.optim.Adam([p])
        >>> optimizer.step()
        >>> state_bytes(optimizer)  # two moments and a step count of four bytes
        68
    """
    tensors = [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def measure_memory(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    *,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """State, kept and peak memory of every optimizer, in units of its parameters.

    Args:
        shapes, device, seed, progress: as for :func:`~geodescent.benchmarks.steps.measure_steps`.

    Example:
        >>> outcome = measure_memory([(2, 40, 8)])
        >>> state = outcome.data["shapes"][0]["contenders"]["ours"]["state_per_adam"]
        >>> 0.5 < state < 0.55  # one moment, and a scalar a frame
        True
    """
    data = []
    for shape in shapes:
        progress(f"memory: {label(shape)}")
        batch = FrameBatch.random(shape, seed=seed, device=device)
        size = batch.frames.numel() * batch.frames.element_size()
        numbers: dict[str, dict[str, Any]] = {}
        for entry in RECIPES:
            if reason := missing(entry.needs):
                numbers[entry.name] = {"skipped": reason}
                continue
            found = _measure(entry, batch, device)
            # Adam: two moments of the parameters' size
            numbers[entry.name] = {**found, "state_per_adam": found["state"] / (2 * size)}
        data.append({"shape": list(shape), "parameter_bytes": size, "contenders": numbers})
    header = ("optimizer", "state ÷ Adam's", *map(label, shapes))
    table = Table(
        "Memory: kept after a step / peak of a step", header, tuple(_row(r.name, data) for r in RECIPES), NOTES
    )
    return Outcome("memory", (table,), {"shapes": data})


def _row(name: str, data: list[dict[str, Any]]) -> tuple[str, ...]:
    found = [(shape["contenders"][name], shape["parameter_bytes"]) for shape in data]
    reasons = [numbers["skipped"] for numbers, _ in found if "skipped" in numbers]
    if reasons:
        return (name, reasons[0], *("–" for _ in data))
    state = max(numbers["state_per_adam"] for numbers, _ in found)
    return (name, f"{state:.3f}", *(f"{n['kept'] / size:.2f} / {n['peak'] / size:.2f}" for n, size in found))


def _measure(entry: Recipe, batch: FrameBatch, device: str) -> dict[str, Any]:
    # once beforehand: what a library allocates at its first use is not the optimizer's
    entry.prepare(FrameBatch(batch.frames[:1], batch.gradients[:1])).step()
    params = entry.parameters(batch)
    made = []

    def run() -> None:
        made.append(entry.optimizer(params))
        for _ in range(3):
            made[0].step()

    found = allocations(run, device)
    return {**asdict(found), "state": state_bytes(made[0])}
