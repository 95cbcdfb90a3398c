"""What an audit of an optimizer found: a row a parameter and step, and a table a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ._result import Result
from ._screen import SCREEN_ROWS, median


@dataclass(frozen=True, repr=False, eq=False)
class AuditRow(Result):
    """One parameter at one step; of several matrices, the worst number. None is "not measured".

    ``efficiency``: rate of descent along the realized velocity over the best, for the gradient at that step; 1 is
    steepest descent, and momentum, preconditioning and a forgotten projection lower it. The velocity is the tangent
    vector that the manifold's retraction takes to where the optimizer went. ``tangency``: the share of the
    displacement, in the Frobenius norm, that is no motion on the manifold, 0 where the points stay on it.
    ``point_error``: how far off it they are after the step. ``rms_step``: root mean square of the displacement's
    elements; ``effective_step``: that over the learning rate, about 1 for AdamW. ``retraction_error``: ‖DR(0)u − u‖/‖u‖
    of the parameter's own retraction along the velocity, 0 for a retraction and not for a map of the wrong speed.
    ``equivariance_defect``: how far a fresh optimizer's first step is from turning with the data under Q ∈ O(n),
    relative to it. ``condition_number``: κ₂ of the matrix after the step; ``step_condition``: κ₂(X + velocity), which a
    retraction has to orthonormalize.

    A step with a non-finite gradient or parameter has no numbers but its length.
    """

    name: str
    step: int
    manifold: str
    shape: tuple[int, ...]
    lr: float
    rms_step: float
    effective_step: float
    efficiency: float | None = None
    tangency: float | None = None
    point_error: float | None = None
    retraction_error: float | None = None
    equivariance_defect: float | None = None
    condition_number: float | None = None
    step_condition: float | None = None


@dataclass(frozen=True, repr=False, eq=False)
class AuditReport(Result):
    """What :func:`audit` recorded: ``rows`` in the order of steps. Prints a line a parameter: the median efficiency and
    effective step, the largest of the errors, and the last condition number."""

    optimizer: str
    norm: str
    steps: int
    rows: tuple[AuditRow, ...]

    _columns: ClassVar[tuple[tuple[str, str, Callable[[list[Any]], Any]], ...]] = (
        ("efficiency", "efficiency", median),
        ("tangency", "tangency", max),
        ("step/lr", "effective_step", median),
        ("retraction error", "retraction_error", max),
        ("equivariance defect", "equivariance_defect", max),
        ("κ", "condition_number", lambda values: values[-1]),
        ("κ(X+step)", "step_condition", max),
    )

    def __getitem__(self, name: str) -> tuple[AuditRow, ...]:
        """The rows of the parameter of this name."""
        rows = tuple(row for row in self.rows if row.name == name)
        if not rows:
            raise KeyError(f"no parameter {name!r} was audited, there are {self.parameters()}")
        return rows

    def parameters(self) -> list[str]:
        """The names of the parameters, in their order."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def _title(self) -> str:
        return f"Audit of {self.optimizer}: {self.steps} steps, efficiency in the norm {self.norm!r}"

    def _header(self) -> Sequence[str]:
        return ("parameter", "shape", "steps", *(title for title, _, _ in self._columns))

    def _rows(self) -> list[Sequence[Any]]:
        names = self.parameters()
        shown = names if len(names) <= SCREEN_ROWS else names[: SCREEN_ROWS - 1]
        lines: list[Sequence[Any]] = [self._line(name) for name in shown]
        if len(names) > len(shown):
            more = f"… {len(names) - len(shown)} more: to_pandas()"
            lines.append((more, *[None] * (len(self._header()) - 1)))
        return lines

    def _line(self, name: str) -> Sequence[Any]:
        rows = self[name]
        cells = []
        for _, field, summary in self._columns:
            values = [value for value in (getattr(row, field) for row in rows) if value is not None]
            cells.append(summary(values) if values else None)
        return (name, "×".join(map(str, rows[0].shape)), len(rows), *cells)
