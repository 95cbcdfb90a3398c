"""What will step what: a look at a model before training it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..manifolds import Euclidean, ManifoldParameter

__all__ = ["ParameterReport", "ParameterRow", "parameter_report"]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter. ``point_error`` is the worst of its frames, and None for a plain parameter."""

    name: str
    shape: tuple[int, ...]
    manifold: str | None
    point_error: float | None
    stepped_by: str


@dataclass(frozen=True)
class ParameterReport:
    """The rows of :func:`parameter_report`; prints as a table."""

    rows: tuple[ParameterRow, ...]

    def __repr__(self) -> str:
        header = ("name", "shape", "manifold", "point error", "stepped by")
        cells: list[tuple[str, ...]] = [header]
        for r in self.rows:
            error = "" if r.point_error is None else f"{r.point_error:.1e}"
            cells.append((r.name, str(r.shape), r.manifold or "", error, r.stepped_by))
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"rows": [asdict(row) for row in self.rows]}


def parameter_report(model: nn.Module) -> ParameterReport:
    """A row a parameter of ``model``: name, shape, manifold, point error, and what :class:`RiemannianAdam` does.

    Example:
        >>> from geodescent.attention import StiefelAttention
        >>> report = parameter_report(StiefelAttention(8, 2, bias=False))
        >>> report.rows[0].name, report.rows[0].shape
        ('logit_scale', (2,))
    """
    rows = []
    for name, p in model.named_parameters():
        constrained = isinstance(p, ManifoldParameter) and not isinstance(p.manifold, Euclidean)
        stepped_by = "nothing (requires_grad is False)"
        if p.requires_grad:
            stepped_by = "a Riemannian step" if constrained else "an AdamW step"
        error = None
        if isinstance(p, ManifoldParameter):
            errors = p.manifold.point_error(p.detach())
            error = float(errors.max()) if errors.numel() else 0.0
        manifold = repr(p.manifold) if isinstance(p, ManifoldParameter) else None
        rows.append(ParameterRow(name, tuple(p.shape), manifold, error, stepped_by))
    return ParameterReport(tuple(rows))
