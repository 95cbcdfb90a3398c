"""What :func:`~geodescent.attention.constrain` did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ConstrainedLayer", "ConstraintReport", "SkippedLayer"]


@dataclass(frozen=True)
class ConstrainedLayer:
    """One attention layer.

    Attributes:
        name: the attention module in the model.
        kind: its class, before.
        method: "exact": attention weights are unchanged up to rounding; "polar": they moved.
        heads, key_heads: how many of each.
        frame_shape, key_frame_shape: of the stored frames.
        logit_scale: "spectrum", "learned", "matched" or the fixed number.
        point_error: max |XᵀX − I| of its frames.
        circuit_change: of the bilinear form of the logits with its query bias, relative, in the Frobenius norm, over
            the worst head; with rotary embeddings at equal positions.
        weight_change: the largest change of an attention weight on standard normal probes, in float64.
        reason: why the method is "polar", empty for "exact".
    """

    name: str
    kind: str
    method: str
    heads: int
    key_heads: int
    frame_shape: tuple[int, ...]
    key_frame_shape: tuple[int, ...]
    logit_scale: str | float
    point_error: float
    circuit_change: float
    weight_change: float
    reason: str


@dataclass(frozen=True)
class SkippedLayer:
    """An attention layer, or what looks like one, that was left alone, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class ConstraintReport:
    """The result of :func:`~geodescent.attention.constrain`; prints as a table.

    Attributes:
        layers: what was constrained.
        skipped: what was selected, or may have been meant, and left alone.
        output_change: the largest change of an element of the model's output for the ``inputs`` given, in eval mode,
            and ``output_size`` its largest element before; None without inputs.

    Example:
        >>> from torch import nn
        >>> from geodescent.attention.constrain import constrain
        >>> report = constrain(nn.MultiheadAttention(8, 2))
        >>> report.exact, report.layers[0].frame_shape, report.skipped
        (True, (2, 8, 4), ())
    """

    layers: tuple[ConstrainedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    output_change: float | None = None
    output_size: float | None = None

    @property
    def exact(self) -> bool:
        """Whether all that was constrained was converted exactly."""
        return all(layer.method == "exact" for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        header = ("layer", "class", "method", "heads", "frames", "scale", "point error", "circuit moved by", "weights")
        rows = []
        for a in self.layers:
            heads = str(a.heads) if a.heads == a.key_heads else f"{a.heads}/{a.key_heads}"
            frames = "x".join(map(str, a.frame_shape))
            errors = [f"{e:.1e}" for e in (a.point_error, a.circuit_change, a.weight_change)]
            rows.append((a.name or "(root)", a.kind, a.method, heads, frames, str(a.logit_scale), *errors))
        lines = [f"ConstraintReport: {len(self.layers)} constrained, {len(self.skipped)} skipped"]
        if rows:
            lines += _table(header, rows)
        for reason in dict.fromkeys(a.reason for a in self.layers if a.reason):
            lines.append(f"polar, not exact: {reason}")
        if self.output_change is not None:
            lines.append(
                f"the model's output moved by {self.output_change:.1e}, its largest element {self.output_size:.1e}"
            )
        lines += [f"skipped {s.name or '(root)'} ({s.kind}): {s.reason}" for s in self.skipped]
        return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
