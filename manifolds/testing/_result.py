"""What a check returns: plain numbers, the limits they were held to, and a table to read them in."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CheckResult", "ConformanceReport", "Measurement", "Recorder"]


@dataclass(frozen=True)
class Measurement:
    """One measured number and what it has to satisfy.

    Attributes:
        name: what was measured.
        value: the number; NaN satisfies nothing.
        relation: ``"<="`` or ``">="`` to ``limit``; ``"holds"`` for a fact, whose value is 1 or 0; ``"reported"`` for a
            number that nothing is claimed of.
        limit: the bound, or None.
    """

    name: str
    value: float
    relation: str = "reported"
    limit: float | None = None

    @property
    def passed(self) -> bool:
        if self.relation == "holds":
            return self.value == 1
        if self.limit is None:
            return True
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit

    def __str__(self) -> str:
        if self.relation == "holds":
            return f"{self.name}: {'yes' if self.passed else 'NO'}"
        bound = "" if self.limit is None else f" ({self.relation} {self.limit:.3g})"
        return f"{self.name}: {self.value:.3g}{bound}{'' if self.passed else '  <-- FAILED'}"


@dataclass(frozen=True, repr=False)
class CheckResult:
    """The measurements of one check.

    ``result["name of a measurement"]`` is its number.

    Attributes:
        name: the check, as in ``check_<name>``.
        subject: the ``repr`` of what was checked.
        measurements: in the order they were taken.
        notes: what a reader should know besides, such as which methods were not there to be measured.
    """

    name: str
    subject: str
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(m.passed for m in self.measurements)

    @property
    def failures(self) -> tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if not m.passed)

    def __getitem__(self, name: str) -> float:
        for measurement in self.measurements:
            if measurement.name == name:
                return measurement.value
        raise KeyError(f"no measurement {name!r} in {self.name}: there are {[m.name for m in self.measurements]}")

    def to_dict(self) -> dict[str, object]:
        """Plain numbers and strings, ready for JSON."""
        return {
            "name": self.name,
            "subject": self.subject,
            "passed": self.passed,
            "measurements": {m.name: {"value": m.value, "limit": m.limit} for m in self.measurements},
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        head = f"{self.name} of {self.subject}: {'passed' if self.passed else 'FAILED'}"
        return "\n  ".join([head, *map(str, self.measurements), *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Recorder:
    """Collects the measurements of a check in progress."""

    def __init__(self, name: str, subject: object) -> None:
        self._name, self._subject = name, repr(subject)
        self._measurements: list[Measurement] = []
        self._notes: list[str] = []

    def at_most(self, name: str, value: float, limit: float) -> None:
        self._measurements.append(Measurement(name, float(value), "<=", limit))

    def at_least(self, name: str, value: float, limit: float) -> None:
        self._measurements.append(Measurement(name, float(value), ">=", limit))

    def holds(self, name: str, fact: bool, explanation: str = "") -> None:
        self._measurements.append(Measurement(name, float(fact), "holds"))
        if explanation and not fact:
            self.note(f"{name}: {explanation}")

    def report(self, name: str, value: float) -> None:
        self._measurements.append(Measurement(name, float(value)))

    def note(self, text: str) -> None:
        self._notes.append(text)

    def result(self) -> CheckResult:
        return CheckResult(self._name, self._subject, tuple(self._measurements), tuple(self._notes))


@dataclass(frozen=True, repr=False)
class ConformanceReport:
    """All checks of one manifold at one shape.

    Attributes:
        subject: the ``repr`` of the manifold.
        shape: of the point that was used.
        results: of the checks that ran, in order.
        missing: the checks that did not, because a method raised ``NotImplementedError``, and what it said.
    """

    subject: str
    shape: tuple[int, ...]
    results: tuple[CheckResult, ...]
    missing: dict[str, str]

    @property
    def passed(self) -> bool:
        """Nothing that is there failed; what is missing does not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(r.name for r in self.results if not r.passed)

    def __getitem__(self, name: str) -> CheckResult:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"no result {name!r}: {self.missing.get(name, f'there are {[r.name for r in self.results]}')}")

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Check, verdict, and the measurement that comes nearest to its limit (or is farthest beyond it)."""
        for result in self.results:
            told = result.failures or [m for m in result.measurements if m.limit is not None]
            worst = max(told, key=_strain, default=None)
            yield result.name, "passed" if result.passed else "FAILED", "" if worst is None else str(worst)
        for name, message in self.missing.items():
            yield name, "missing", message

    def to_dict(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "shape": list(self.shape),
            "passed": self.passed,
            "results": [r.to_dict() for r in self.results],
            "missing": dict(self.missing),
        }

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max((len(name) for name, *_ in rows), default=0)
        head = f"{self.subject} at shape {self.shape}: {'passed' if self.passed else 'FAILED'}"
        return "\n".join([head, *(f"  {name:<{width}}  {verdict:<7}  {worst}" for name, verdict, worst in rows)])

    def _repr_html_(self) -> str:
        head = f"{self.subject} at shape {self.shape}: {'passed' if self.passed else 'FAILED'}"
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row) + "</tr>"
            for row in self._rows()
        )
        return (
            f"<table><caption>{html.escape(head)}</caption>"
            f"<tr><th>check</th><th></th><th>nearest to its limit</th></tr>{body}</table>"
        )


def _strain(measurement: Measurement) -> float:
    """How much of its limit a measurement uses up; above 1 it fails. A NaN or a fact that fails is the worst."""
    if not measurement.passed and (measurement.limit is None or measurement.value != measurement.value):
        return float("inf")
    value, limit = abs(measurement.value), measurement.limit
    if not limit:
        return 0.0
    return value / limit if measurement.relation == "<=" else limit / value if value else float("inf")
