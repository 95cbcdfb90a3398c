"""What bounds a step: the parts that no step of separate frames can do without, each by itself, in floors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from ..optim.fused import CHUNK_ENTRIES
from .contenders import FrameBatch, floor, recipe
from .report import Outcome, Table
from .steps import Shape, label
from .timing import Timings, interleave

__all__ = ["BOUND_SHAPES", "PARTS", "measure_bounds"]

BOUND_SHAPES: tuple[Shape, ...] = ((24, 512, 64), (144, 768, 64))

PARTS = ("five products", "gradient norms", "moment", "points in", "points out", "x − a·m")

NOTES = (
    "five products: XᵀW, W − XS, mᵀm, YP, m − XS on chunks of the step's size, into memory that is there. Gradient "
    "norms are read before anything is written, so that a NaN changes nothing; moment: β₁m + (1−β₁)G into the state; "
    "points in, out: copies of separate parameters to one batch and back. Each part is one torch call, over all "
    "parameters or over a chunk.",
    "Their sum is what a step made of torch's calls can come down to; the rest of ours is p×p arithmetic and Python.",
)


def measure_bounds(
    shapes: Sequence[Shape] = BOUND_SHAPES,
    rounds: int = 15,
    *,
    device: str = "cpu",
    seed: int = 0,
    warmup: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Time the parts of a step beside the step and the floor, in turn; arguments as for ``measure_steps``.

    Example:
        >>> outcome = measure_bounds([(2, 6, 2)], rounds=1, warmup=1)
        >>> sorted(outcome.data["shapes"][0]) == ["floors", "ours", "shape", "sum of parts"]
        True
    """
    columns, data = [], []
    for shape in shapes:
        progress(f"bounds: {label(shape)}")
        batch = FrameBatch.random(shape, seed=seed, device=device)
        calls = {"floor": floor(batch).step, "ours": recipe("ours").prepare(batch).step, **_parts(batch)}
        timings = interleave(calls, rounds, warmup=warmup, device=device)
        total = _sum_of_parts(timings, rounds)
        ratios = {name: timings.ratio(name, "floor") for name in PARTS}
        ours = timings.ratio("ours", "floor")
        columns.append([*(str(ratios[name]) for name in PARTS), f"{total:.2f}", str(ours)])
        data.append(
            {
                "shape": list(shape),
                "floors": {name: None if r is None else asdict(r) for name, r in ratios.items()},
                "sum of parts": total,
                "ours": None if ours is None else asdict(ours),
            }
        )
    rows = tuple(zip((*PARTS, "sum of these", "ours"), *columns, strict=True))
    table = Table("What bounds a step of separate frames, in floors", ("part", *map(label, shapes)), rows, NOTES)
    return Outcome("bounds", (table,), {"rounds": rounds, "seed": seed, "shapes": data})


def _parts(batch: FrameBatch) -> dict[str, Callable[[], object]]:
    x, w = batch.frames.clone(), batch.gradients.clone()
    (frames, n, p), out = x.shape, torch.empty_like(x)
    square = torch.zeros(frames, p, p, dtype=x.dtype, device=x.device)
    scale = torch.zeros(frames, 1, 1, dtype=x.dtype, device=x.device)
    points, gradients = list(x.clone().unbind(0)), [g.clone() for g in batch.gradients]
    size = max(1, CHUNK_ENTRIES[x.device.type] // (n * p))
    chunks = [slice(i, i + size) for i in range(0, frames, size)]

    def products() -> None:
        for c in chunks:
            torch.bmm(x[c].mT, w[c])
            w[c].baddbmm_(x[c], square[c], alpha=-0.5)
            torch.bmm(w[c].mT, w[c])
            torch.bmm(x[c], square[c], out=out[c])
            w[c].baddbmm_(out[c], square[c], alpha=-0.5)

    def moment() -> None:
        torch._foreach_lerp_(list(w.unbind(0)), gradients, 0.1)  # pyright: ignore[reportPrivateImportUsage]

    def points_out() -> None:
        torch._foreach_copy_(points, list(x.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]

    parts = (
        products,
        lambda: torch._foreach_norm(gradients),  # pyright: ignore[reportPrivateImportUsage]
        moment,
        lambda: torch.stack(points, out=out),
        points_out,
        lambda: torch.addcmul(x, w, scale, value=-1, out=out),
    )
    return dict(zip(PARTS, parts, strict=True))


def _sum_of_parts(timings: Timings, rounds: int) -> float:
    """The median over rounds of the parts' seconds together ÷ the floor's."""
    seconds = [timings.seconds[name] for name in PARTS]
    whole = [sum(part[i] or 0.0 for part in seconds) / (timings.seconds["floor"][i] or 1.0) for i in range(rounds)]
    return float(torch.tensor(whole).median())
