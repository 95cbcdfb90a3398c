"""How far frames leave the manifold over a hundred thousand float32 steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..manifolds import ManifoldParameter, Stiefel
from ..optim import RiemannianAdam
from .report import Outcome, Table
from .steps import point_error

__all__ = ["BOUND", "drift_curve", "log_spaced", "measure_drift", "sparkline"]

BOUND = 5e-6
SHAPES = ((64, 32), (128, 64))
LR = 1e-2
FRAMES = 8
NOISE = 1.0


def log_spaced(steps: int, per_decade: int = 4) -> list[int]:
    """Step counts from 1 to ``steps``, equally spaced on a logarithmic scale.

    Example:
        >>> log_spaced(1000, per_decade=2)
        [1, 3, 10, 32, 100, 316, 1000]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    count = math.ceil(per_decade * math.log10(steps)) if steps > 1 else 0
    return sorted({min(steps, round(10 ** (i / per_decade))) for i in range(count + 1)} | {steps})


def drift_curve(
    n: int,
    p: int,
    steps: int,
    *,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    device: str = "cpu",
    seed: int = 0,
    every: int = 1000,
) -> tuple[list[tuple[int, float]], float]:
    """Step a stack of frames along noisy gradients of a fixed quadratic, and watch max|XᵀX − I|.

    The gradient is A X + B + noise, with A symmetric positive definite and fixed, B fixed, and fresh Gaussian noise of
    the same size a step, so that the frames never come to rest.

    Args:
        n, p: rows and columns of a frame.
        steps: number of steps.
        make: the optimizer of the frames, :class:`~geodescent.optim.RiemannianAdam` with lr = 1e-2 by default.
        device, seed: of frames and gradients.
        every: the error is also looked at every so many steps between the points of the curve.

    Returns:
        The curve, pairs of a step and the largest error of any frame after it, computed in float64; and the largest
        error that was seen at all.

    Example:
        >>> curve, worst = drift_curve(6, 3, 20)
        >>> [step for step, _ in curve], worst < 1e-5
        ([1, 2, 3, 6, 10, 18, 20], True)
    """
    generator = torch.Generator(device).manual_seed(seed)
    start = Stiefel().random_point(FRAMES, n, p, generator=torch.Generator().manual_seed(seed)).to(device)
    param = ManifoldParameter(start, Stiefel())
    optimizer = RiemannianAdam([param], lr=LR) if make is None else make([param])

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    root = normal(n, n) / math.sqrt(n)
    a, b = root @ root.mT, normal(FRAMES, n, p)
    marks = set(log_spaced(steps))
    curve, worst = [], 0.0
    x, gradient = param.detach(), torch.empty_like(start)
    param.grad = gradient
    for step in range(1, steps + 1):
        gradient.normal_(0.0, NOISE, generator=generator).add_(b)
        gradient.add_(a @ x)
        optimizer.step()
        if step in marks or step % every == 0:
            error = point_error(x)
            worst = max(worst, error) if error == error else math.inf
            if step in marks:
                curve.append((step, error))
    return curve, worst


def measure_drift(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    steps: int = 100_000,
    *,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """The drift of RiemannianAdam with its defaults at lr = 1e-2, held to max|XᵀX − I| < 5e-6.

    Args:
        shapes: (rows, columns) of the frames; eight of each are stepped as a stack.
        steps: number of steps.
        device, seed, progress: as for :func:`~geodescent.benchmarks.steps.measure_steps`.

    Example:
        >>> outcome = measure_drift([(6, 3)], steps=10)
        >>> outcome.data["shapes"][0]["verdict"]
        'met'
    """
    rows, lines, data = [], [], []
    for n, p in shapes:
        progress(f"drift: {steps} steps on St({n}, {p})")
        curve, worst = drift_curve(n, p, steps, device=device, seed=seed)
        verdict = "met" if worst < BOUND else "not met"
        rows.append((f"St({n}, {p})", f"{curve[-1][1]:.1e}", f"{worst:.1e}", f"< {BOUND:.0e}", verdict))
        lines.append((n, p, curve))
        numbers: dict[str, Any] = {"shape": [n, p], "curve": curve, "largest": worst, "verdict": verdict}
        data.append(numbers)
    header = ("manifold", f"after {steps} steps", "largest seen", "held to", "verdict")
    notes = (
        f"{FRAMES} float32 frames, RiemannianAdam with its defaults at lr = {LR:g}, noisy gradients of a fixed "
        "quadratic. The largest error is looked for at the steps of the curve and every 1000 steps.",
    )
    tables = [Table("Drift: max|XᵀX−I|", header, tuple(rows), notes)]
    if lines:
        marks = [step for step, _ in lines[0][2]]
        curve_header = ("step", *(f"St({n}, {p})" for n, p, _ in lines))
        curve_rows = [(str(step), *(f"{curve[i][1]:.1e}" for _, _, curve in lines)) for i, step in enumerate(marks)]
        curve_rows.append(("curve", *(sparkline([error for _, error in curve]) for _, _, curve in lines)))
        tables.append(Table("Drift: the curve", curve_header, tuple(curve_rows)))
    data_all = {"steps": steps, "lr": LR, "frames": FRAMES, "bound": BOUND, "seed": seed, "shapes": data}
    return Outcome("drift", tuple(tables), data_all)


def sparkline(values: Sequence[float]) -> str:
    """Bars of eight heights, the smallest value the lowest, on a logarithmic scale; × where a value is not finite.

    Example:
        >>> sparkline([1e-7, 1e-6, 1e-5, float("nan")])
        '▁▅█×'
    """
    logs = [math.log10(v) if math.isfinite(v) and v > 0 else None for v in values]
    known = [v for v in logs if v is not None]
    low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)

    def bar(value: float, log: float | None) -> str:
        if log is None:
            return "▁" if value == 0 else "×"
        return "▁▂▃▄▅▆▇█"[round(7 * (log - low) / span) if span else 0]

    return "".join(bar(v, log) for v, log in zip(values, logs, strict=True))
