"""How the cost of a step grows with rows, columns and the number of frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .contenders import FrameBatch, floor, recipe
from .report import Outcome, Table
from .timing import Spread, interleave

__all__ = ["SERIES", "PowerLaw", "Series", "fit_power_law", "measure_growth"]


@dataclass(frozen=True)
class PowerLaw:
    """seconds ∝ size^exponent.

    Attributes:
        exponent: slope of log seconds over log size, by least squares.
        standard_error: of the exponent; NaN for two points, which determine the line.

    Example:
        >>> print(PowerLaw(0.98, 0.021))
        0.98 ± 0.02
    """

    exponent: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} ± {self.standard_error:.2f}"


def fit_power_law(sizes: Sequence[float], seconds: Sequence[float]) -> PowerLaw:
    """Fit the exponent of a power law.

    Raises:
        ValueError: fewer than two different sizes, or lengths that differ.

    Example:
        >>> law = fit_power_law([1, 2, 4, 8], [3, 12, 48, 192])
        >>> round(law.exponent, 6), law.standard_error < 1e-6
        (2.0, True)
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"sizes must be two or more, different, and as many as seconds, found {sizes} and {seconds}")
    x, y = np.log(np.asarray(sizes, dtype=float)), np.log(np.asarray(seconds, dtype=float))
    centred = x - x.mean()
    slope = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    freedom = len(x) - 2
    error = float(np.sqrt(residuals @ residuals / freedom / (centred @ centred))) if freedom else float("nan")
    return PowerLaw(slope, error)


@dataclass(frozen=True)
class Series:
    """Shapes (frames, rows, columns) that differ in one size.

    Attributes:
        name: of the size. axis: its place in a shape. shapes: the shapes.
        expected: the exponent of the cost.

    Example:
        >>> Series("rows n", 1, ((8, 64, 16), (8, 128, 16)), 1.0).sizes
        [64, 128]
    """

    name: str
    axis: int
    shapes: tuple[tuple[int, int, int], ...]
    expected: float

    @property
    def sizes(self) -> list[int]:
        """What differs."""
        return [shape[self.axis] for shape in self.shapes]


# Large enough that arithmetic and memory bound the step, not the calls: there the law has set in.
SERIES = (
    Series("rows n", 1, tuple((24, n, 64) for n in (256, 512, 1024, 2048)), 1.0),
    Series("columns p", 2, tuple((24, 1024, p) for p in (32, 64, 128, 256)), 2.0),
    Series("frames", 0, tuple((frames, 512, 64) for frames in (16, 32, 64, 128)), 1.0),
)


def measure_growth(
    series: Sequence[Series] = SERIES,
    rounds: int = 15,
    *,
    device: str = "cpu",
    seed: int = 0,
    warmup: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Fit the exponents of RiemannianAdam's step, and of the floor's, to medians of interleaved runs.

    Args:
        series: which sizes grow.
        rounds, device, seed, warmup, progress: as for :func:`~geodescent.benchmarks.steps.measure_steps`.

    Example:
        >>> series = Series("rows n", 1, ((2, 4, 2), (2, 8, 2), (2, 16, 2)), 1.0)
        >>> outcome = measure_growth([series], rounds=1, warmup=1)
        >>> outcome.data["series"][0]["sizes"]
        [4, 8, 16]
    """
    rows, data = [], []
    for one in series:
        progress(f"growth: {one.name}")
        ours, floors = _medians(one, rounds, device, seed, warmup)
        law = fit_power_law(one.sizes, [s.median for s in ours])
        floor_law = fit_power_law(one.sizes, [s.median for s in floors])
        keeps = law.exponent <= one.expected + 2 * law.standard_error
        verdict = "no faster than expected" if keeps else "faster than expected"
        fixed = "×".join("·" if i == one.axis else str(s) for i, s in enumerate(one.shapes[0]))
        sizes = ", ".join(map(str, one.sizes))
        rows.append((one.name, fixed, sizes, str(law), str(floor_law), f"{one.expected:g}", verdict))
        data.append(
            {
                **asdict(one),
                "sizes": one.sizes,
                "ours": {**asdict(law), "seconds": [asdict(s) for s in ours]},
                "floor": {**asdict(floor_law), "seconds": [asdict(s) for s in floors]},
                "verdict": verdict,
            }
        )
    header = ("size", "frames×n×p", "values", "exponent, ours", "exponent, floor", "expected", "growth")
    notes = (
        "Slope of log seconds over log size by least squares on medians, ± its standard error. The verdict allows two "
        "standard errors.",
        "The floor's exponents, of two matrix products, show what the processor makes of the sizes.",
    )
    return Outcome("growth", (Table("Growth of one step", header, tuple(rows), notes),), {"series": data})


def _medians(one: Series, rounds: int, device: str, seed: int, warmup: int) -> tuple[list[Spread], list[Spread]]:
    """Seconds of ours and of the floor at every size, all of them in turn."""
    calls = {}
    for size, shape in zip(one.sizes, one.shapes, strict=True):
        batch = FrameBatch.random(shape, seed=seed, device=device)
        calls[f"ours {size}"] = recipe("ours").prepare(batch).step
        calls[f"floor {size}"] = floor(batch).step
    timings = interleave(calls, rounds, warmup=warmup, device=device, slow_seconds=60.0)
    if timings.failures:
        raise RuntimeError(f"growth in {one.name} could not be measured: {dict(timings.failures)}")
    medians = [[timings.of(f"{who} {size}") for size in one.sizes] for who in ("ours", "floor")]
    ours, floors = ([spread for spread in spreads if spread is not None] for spreads in medians)
    return ours, floors
