"""The slope test: of which order a retraction agrees with the exponential map."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import Invariant, generator_like, lengthen, radius, representative
from ._result import CheckResult, Recorder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Slope", "check_order", "claimed_order", "fit_slope", "measure_order", "plot_slopes"]

# An error this many times the rounding error is known to about three digits, so that its logarithm can be fitted.
_ABOVE_ROUNDING = 1000.0
# The fit spans this factor in t: long enough for rounding not to tilt it, short enough for higher powers of t not to.
_SPAN = 10.0


@dataclass(frozen=True, repr=False)
class Slope:
    """A straight line through log(error) against log(t).

    Attributes:
        t: step lengths, increasing.
        errors: the error at each of them.
        slope: of the line; infinite where every error is rounding.
        intercept: log10 of the error that the line has at t = 1.
        window: the smallest and the largest t that were fitted.
        rounding: the error below which nothing is said.
    """

    t: tuple[float, ...]
    errors: tuple[float, ...]
    slope: float
    intercept: float
    window: tuple[float, float]
    rounding: float

    @property
    def exact(self) -> bool:
        """There is no error besides rounding."""
        return math.isinf(self.slope)

    @property
    def order(self) -> float:
        """The order of a retraction whose error this is: an error of O(t^(k+1)) is order k."""
        return self.slope - 1

    def __repr__(self) -> str:
        if self.exact:
            return f"Slope(exact: every error is below {self.rounding:.1g})"
        low, high = self.window
        return f"Slope({self.slope:.3f} over {low:.1e} <= t <= {high:.1e}, error at t = 1: {10**self.intercept:.2g})"


def fit_slope(error: Callable[[float], float], rounding: float, t_max: float = 0.5, per_decade: int = 6) -> Slope:
    """Fit the power with which ``error(t)`` vanishes as t → 0.

    The line is fitted over one decade of t, the smallest whose errors stand clear of ``rounding``: there the leading
    power of t dominates the higher ones. Where errors shrink so slowly that ``t_max · 10⁻⁸`` still stands clear, the
    smallest decade above that is taken.
    """
    t: list[float] = []
    errors: list[float] = []
    lost = 0
    for i in range(8 * per_decade + 1):
        t.insert(0, t_max * 10 ** (-i / per_decade))
        errors.insert(0, error(t[0]))
        if not math.isfinite(errors[0]):
            return Slope(tuple(t), tuple(errors), math.nan, math.nan, (t[0], t[-1]), rounding)
        # several in a row: one error alone may dip by chance
        lost = lost + 1 if errors[0] <= _ABOVE_ROUNDING * rounding else 0
        if lost == per_decade // 2:
            break
    lost_at = [i for i, e in enumerate(errors) if e <= _ABOVE_ROUNDING * rounding]
    first = lost_at[-1] + 1 if lost_at else 0
    count = len(t)
    chosen = [i for i in range(first, count) if t[i] <= _SPAN * t[first] * 1.001]
    if len(chosen) < per_decade // 2:
        return Slope(tuple(t), tuple(errors), math.inf, -math.inf, (t[0], t[-1]), rounding)
    xs, ys = [math.log10(t[i]) for i in chosen], [math.log10(errors[i]) for i in chosen]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(xs, ys, strict=True)) / sum((a - x_mean) ** 2 for a in xs)
    return Slope(tuple(t), tuple(errors), slope, y_mean - slope * x_mean, (t[chosen[0]], t[chosen[-1]]), rounding)


def claimed_order(manifold: Manifold) -> int:
    """What the manifold says of its retraction: ``retraction.order(metric)`` or ``retraction_order``; 1 if nothing."""
    retraction = getattr(manifold, "retraction", None)
    if hasattr(retraction, "order"):
        return int(retraction.order(getattr(manifold, "metric", None)))  # type: ignore[union-attr]
    return int(getattr(manifold, "retraction_order", 1))


def measure_order(
    manifold: Manifold,
    x: Tensor,
    u: Tensor | None = None,
    *,
    retraction: Any = None,
    seed: int = 0,
    invariant: Invariant | None = None,
) -> Slope:
    """The power of t in ‖R_x(tu) − exp_x(tu)‖, in float64.

    A retraction of order k has power k + 1.

    Args:
        x: a point, or a batch, over which errors add up.
        u: a tangent vector; by default two random ones, so that no single direction decides.
        retraction: a value object to put in the place of ``manifold.retraction``, or, where the manifold holds none,
            an object with ``retract(x, u)``; by default the manifold's own.

    Raises:
        NotImplementedError: the manifold has no ``exp``.
    """
    x = x.detach().to(torch.float64)
    if u is None:
        generator = generator_like(x, seed)
        directions = [manifold.random_tangent(x, generator) for _ in range(2)]
    else:
        directions = [u.detach().to(torch.float64)]
    directions = [lengthen(manifold, x, d, 1.0) for d in directions]
    step = (manifold if retraction is None else _with_retraction(manifold, retraction)).retract
    embed = representative(invariant)

    def error(t: float) -> float:
        # each direction on its own: nothing here relies on batches being right
        return sum(float((embed(step(x, t * d)) - embed(manifold.exp(x, t * d))).norm()) for d in directions)

    scale = max(1.0, float(embed(x).norm()) if x.numel() else 1.0)
    return fit_slope(error, torch.finfo(x.dtype).eps * scale * len(directions), 0.5 * min(1.0, radius(manifold)))


def check_order(
    manifold: Manifold, x: Tensor, seed: int = 0, *, invariant: Invariant | None = None, margin: float = 0.1
) -> CheckResult:
    """The retraction agrees with ``exp`` to at least the order it claims.

    At least, since the order is what holds for every shape, and at some shapes (p = n, p = 1) more holds.
    """
    recorder = Recorder("order", manifold)
    slope = measure_order(manifold, x, seed=seed, invariant=invariant)
    recorder.at_least("slope of |R(tu) - exp(tu)|", slope.slope, claimed_order(manifold) + 1 - margin)
    recorder.note(repr(slope))
    return recorder.result()


def plot_slopes(
    manifold: Manifold,
    x: Tensor | None = None,
    ax: Axes | None = None,
    *,
    retractions: Sequence[Any] | None = None,
    invariant: Invariant | None = None,
    seed: int = 0,
) -> Axes:
    """Draw ‖R_x(tu) − exp_x(tu)‖ against t in logarithmic axes, with guide lines of slope 2 and 3.

    Needs matplotlib, which is imported here.

    Args:
        x: a point; by default a random one of a small shape.
        ax: the axes to draw in; by default new ones.
        retractions: value objects to compare, each put in the place of ``manifold.retraction``; by default the
            manifold's own.

    Returns:
        The axes.

    Example:
        ``plot_slopes(Stiefel(), retractions=[Polar(), QR(), Cayley()])``
    """
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(5, 4), layout="constrained")[1]
    x = _some_point(manifold, seed) if x is None else x
    if retractions is None:
        retractions = [None]
    slopes = []
    for retraction in retractions:
        slope = measure_order(manifold, x, retraction=retraction, seed=seed, invariant=invariant)
        slopes.append(slope)
        label = repr(retraction or getattr(manifold, "retraction", manifold))
        text = "exact" if slope.exact else f"slope {slope.slope:.2f}"
        # a zero has no logarithm: it is drawn at the rounding level
        (line,) = ax.plot(slope.t, [max(e, slope.rounding / 10) for e in slope.errors], label=f"{label}: {text}")
        if not slope.exact:
            ax.plot(
                slope.window,
                [10**slope.intercept * t**slope.slope for t in slope.window],
                "o",
                color=line.get_color(),
                markersize=4,
            )
    # the parts that are the same for all lines; a whole repr is wider than the axes
    title = type(manifold).__name__ + (f", {manifold.metric!r}" if hasattr(manifold, "metric") else "")  # type: ignore[attr-defined]
    rounding, largest = slopes[0].rounding, max(max(s.errors) for s in slopes)
    top, t = 3 * max(largest, 1e3 * rounding), max((s.t for s in slopes), key=len)
    for power, style in ((2, "--"), (3, ":")):
        guide = [(s, top * (s / t[-1]) ** power) for s in t]
        guide = [point for point in guide if point[1] > rounding]
        ax.plot(*zip(*guide, strict=True), style, color="0.6", linewidth=1, label=f"t^{power}")
    ax.axhline(rounding, color="0.85", linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="t", ylabel="|R(tu) - exp(tu)|", title=title)
    ax.legend(fontsize="small")
    return ax


def _with_retraction(manifold: Manifold, retraction: Any) -> Any:
    """The manifold with another retraction, where it holds one; otherwise the retraction itself."""
    if dataclasses.is_dataclass(manifold) and hasattr(manifold, "retraction"):
        # the vector transport, which may belong to the retraction that goes, is left at its default
        fields = {
            f.name: getattr(manifold, f.name) for f in dataclasses.fields(manifold) if f.name != "vector_transport"
        }
        return type(manifold)(**{**fields, "retraction": retraction})
    return retraction


def _some_point(manifold: Manifold, seed: int) -> Tensor:
    for shape in ((9, 4)[-manifold.ndim :] if manifold.ndim else (), (4,) * manifold.ndim):
        try:
            manifold.check_shape(shape)
        except ValueError:
            continue
        return manifold.random_point(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    raise ValueError(f"x must be given: no default shape is known for {manifold!r}")
