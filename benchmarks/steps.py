"""One optimizer step on batches of frames, against peers and against the floor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .contenders import RECIPES, FrameBatch, Ready, floor, pymanopt_momentum
from .peers import missing
from .report import Outcome, Table
from .targets import STEP_TARGETS, held_to_row, step_verdicts
from .timing import Timings, interleave

__all__ = ["SHAPES", "label", "measure_steps", "point_error"]

Shape = tuple[int, int, int]

SHAPES: tuple[Shape, ...] = ((24, 512, 64), (144, 768, 64), (96, 128, 32), (288, 64, 16))

NOTES = (
    "Medians and quartiles of runs in turn (A B A B …), each turn one untimed step and one timed; float32, a parameter "
    "a frame unless it says one parameter. Ratios are taken round by round.",
    "floor: X(XᵀX) on the batch. ours: RiemannianAdam on Stiefel(), on its canonical metric, and with Cayley() and "
    "CayleyTransport() besides. AdamW steps plain tensors of the same shape and keeps nothing orthonormal.",
    "pymanopt has no Adam: its row projects the gradient, retracts (by numpy's QR, in float64 inside) and transports a "
    f"momentum, frame by frame; OPENBLAS_NUM_THREADS is {os.environ.get('OPENBLAS_NUM_THREADS', 'not set')}.",
    "geoopt canonical: a parameter a frame only, since its batched LU fails from n = 160 on some processors. Its curve "
    "keeps X orthonormal, but its derivative is not the step.",
)


def measure_steps(
    shapes: Sequence[Shape] = SHAPES,
    rounds: int = 25,
    *,
    device: str = "cpu",
    seed: int = 0,
    warmup: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Time one step of every contender on every shape, in turn.

    Args:
        shapes: (frames, rows, columns) of the batches.
        rounds: timed steps of each contender; who takes over a second is timed in every fifth round.
        device: of the frames. pymanopt runs on the CPU and is left out elsewhere.
        seed: of frames and gradients.
        warmup: untimed steps of each.
        progress: is told what is being measured.

    Returns:
        Tables of milliseconds, of multiples of the floor and of the targets, and the numbers: for every shape and
        contender the quartiles, and max|XᵀX − I| of its frames after its last step.

    Example:
        >>> outcome = measure_steps([(2, 6, 2)], rounds=1, warmup=1)
        >>> outcome.data["shapes"][0]["contenders"]["ours"]["milliseconds"]["count"]
        1
    """
    timings, errors, absent = {}, {}, {}
    for shape in shapes:
        progress(f"steps: {label(shape)}")
        ready, absent[shape] = _contenders(FrameBatch.random(shape, seed=seed, device=device), device)
        calls = {name: contender.step for name, contender in ready.items()}
        timings[shape] = interleave(calls, rounds, warmup=warmup, device=device)
        points = {name: contender.points() for name, contender in ready.items()}
        errors[shape] = {name: None if x is None else point_error(x) for name, x in points.items()}
        absent[shape] |= timings[shape].failures
    names = ["floor", *(r.name for r in RECIPES), "pymanopt"]
    columns = ("contender", *map(label, shapes))

    def cells(name: str, value: Callable[[Timings], object]) -> tuple[str, ...]:
        return (name, *(absent[s].get(name) or str(value(timings[s])) for s in shapes))

    milliseconds = tuple(cells(name, lambda t, name=name: t.of(name).scaled(1e3)) for name in names)  # pyright: ignore
    floors = tuple(
        (*cells(name, lambda t, name=name: t.ratio(name, "floor")), _worst(errors[s].get(name) for s in shapes))
        for name in names[1:]
    )
    targets = {t: timings[t.shape].ratio(t.numerator, t.denominator) for t in STEP_TARGETS if t.shape in timings}
    verdicts = step_verdicts(targets)
    tables = (
        Table("One optimizer step, milliseconds", columns, milliseconds, NOTES),
        Table("One optimizer step, in floors", (*columns, "max|XᵀX−I|"), floors),
        Table(
            "Held to",
            ("frames", "ratio", "measured", "held to", "aim", "verdict"),
            tuple(held_to_row(t, targets[t], verdicts[t]) for t in targets),
            ("Medians decide. Where the floor and the ratio to geoopt disagree, the floor decides.",),
        ),
    )
    data = {
        "rounds": rounds,
        "seed": seed,
        "shapes": [
            {"shape": list(s), "contenders": {n: _numbers(n, timings[s], errors[s], absent[s]) for n in names}}
            for s in shapes
        ],
        "held_to": [
            {**asdict(t), "measured": None if r is None else asdict(r), "verdict": verdicts[t]}
            for t, r in targets.items()
        ],
    }
    return Outcome("steps", tables, data)


def point_error(points: torch.Tensor) -> float:
    """max|XᵀX − I| over a batch of frames, in float64.

    Example:
        >>> point_error(torch.tensor([[2.0], [0.0]]))
        3.0
    """
    x = points.detach().double()
    return float((x.mT @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)).abs().max())


def _contenders(batch: FrameBatch, device: str) -> tuple[dict[str, Ready], dict[str, str]]:
    """Contenders on copies of the batch, and those who are left out, each with the reason."""
    ready, absent = {"floor": floor(batch)}, {}
    for entry in RECIPES:
        if reason := missing(entry.needs):
            absent[entry.name] = reason
        else:
            ready[entry.name] = entry.prepare(batch)
    if reason := missing("pymanopt"):
        absent["pymanopt"] = reason
    elif torch.device(device).type != "cpu":
        absent["pymanopt"] = "numpy: CPU only"
    else:
        ready["pymanopt"] = pymanopt_momentum(batch)
    return ready, absent


def _numbers(name: str, timings: Timings, errors: dict[str, float | None], absent: dict[str, str]) -> dict[str, Any]:
    if name in absent:
        return {"skipped": absent[name]}
    seconds, floors = timings.of(name), timings.ratio(name, "floor")
    return {
        "milliseconds": None if seconds is None else asdict(seconds.scaled(1e3)),
        "floors": None if floors is None else asdict(floors),
        "orthonormality_error": errors[name],
    }


def _worst(errors: Iterable[float | None]) -> str:
    values = [e for e in errors if e is not None]
    return f"{max(values):.1e}" if values else "–"


def label(shape: Shape) -> str:
    """A shape as it is printed.

    Example:
        >>> label((24, 512, 64))
        '24×512×64'
    """
    return "×".join(map(str, shape))
