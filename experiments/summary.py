"""From results lines to the table and the plain words: numbers first, and text computed from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import BASELINE
from .statistics import PairedDifference, compare_many, mean_and_sd
from .study import Headline

__all__ = [
    "ArmSummary",
    "Summary",
    "effect_size",
    "interval",
    "learning_rate",
    "learning_rates",
    "number",
    "p_value",
    "signed",
    "significant",
    "summarize",
]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class ArmSummary:
    """One row of the table. Averages are over the cells that ended well; `values` is seed -> headline value, with
    None for "not reached", in shown units, and `mean` and `sd` count that as the headline's cap."""

    arm: str
    lr: str
    n: int
    failed: int
    values: dict[int, float | None]
    mean: float | None
    sd: float | None
    difference: PairedDifference | None  # None for the baseline itself, and where there is no baseline
    test_accuracy: float | None
    qk_movement: float | None
    condition: float | None
    capped: float | None
    seconds: float | None

    @property
    def reached(self) -> int:
        return sum(value is not None for value in self.values.values())


@dataclass(frozen=True)
class Summary:
    headline: Headline
    arms: tuple[ArmSummary, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    words: tuple[str, ...]


def summarize(records: Sequence[Record], headline: Headline, baseline: str = BASELINE) -> Summary:
    """The table of `records`, arms in the order in which they first appear."""
    by_arm: dict[str, list[Record]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], []).append(record)
    differences: dict[str, PairedDifference] = {}
    if baseline in by_arm:
        counted = {arm: counted_values(found, headline) for arm, found in by_arm.items()}
        reference = counted.pop(baseline)
        differences = compare_many(counted, reference, headline.higher_is_better)
    arms = tuple(_arm(arm, found, headline, differences.get(arm)) for arm, found in by_arm.items())
    header, rows = _table(arms, headline, baseline)
    return Summary(headline, arms, header, rows, _notes(arms, headline), _words(arms, records, headline, baseline))


def learning_rate(record: Record) -> str:
    """The learning rate, and that of Q and K where it is another."""
    scale = record["config"].get("study", {}).get("qk_scale", 1.0)
    return f"{record['lr']:g}" + (f" (Q/K ×{scale:g})" if scale != 1 else "")


def headline_values(records: Sequence[Record], headline: Headline) -> dict[int, float | None]:
    """seed -> the headline number in shown units, None where it was not reached."""
    values: dict[int, float | None] = {}
    for record in records:
        if record["status"] == "ok":
            value = record["metrics"].get(headline.metric)
            values[record["seed"]] = None if value is None else value * headline.scale
    return values


def learning_rates(records: Iterable[Record]) -> str:
    """Each that occurs, once."""
    return ", ".join(dict.fromkeys(map(learning_rate, records)))


def counted_values(records: Sequence[Record], headline: Headline) -> dict[int, float]:
    """seed -> the headline number in shown units, with "not reached" counted as the cap."""
    values = {
        seed: headline.cap if value is None else value for seed, value in headline_values(records, headline).items()
    }
    return {seed: value for seed, value in values.items() if value is not None}


def _arm(arm: str, records: Sequence[Record], headline: Headline, difference: PairedDifference | None) -> ArmSummary:
    ok = [record for record in records if record["status"] == "ok"]
    values = headline_values(records, headline)
    mean, sd = mean_and_sd(list(counted_values(records, headline).values()))

    def average(name: str) -> float | None:
        found = [record["metrics"].get(name) for record in ok]
        return mean_and_sd([value for value in found if value is not None])[0]

    query, key = average("query_condition"), average("key_condition")
    return ArmSummary(
        arm=arm,
        lr=learning_rates(records),
        n=len(ok),
        failed=len(records) - len(ok),
        values=values,
        mean=mean,
        sd=sd,
        difference=difference,
        test_accuracy=average("test_accuracy"),
        qk_movement=average("qk_movement"),
        condition=None if query is None or key is None else max(query, key),
        capped=average("capped_fraction"),
        seconds=mean_and_sd([record["wall_seconds"] for record in ok])[0],
    )


# --- the table ----------------------------------------------------------------------------------------------------


def _table(
    arms: Sequence[ArmSummary], headline: Headline, baseline: str
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    columns: list[tuple[str, list[str]]] = [
        ("arm", [arm.arm for arm in arms]),
        ("learning rate", [arm.lr for arm in arms]),
        ("n", [str(arm.n) + (f" ({arm.failed} failed)" if arm.failed else "") for arm in arms]),
        (f"{headline.short}, mean ± sd", [_headline_cell(arm, headline) for arm in arms]),
        *(
            [("reached", [f"{arm.reached} of {arm.n + arm.failed}" for arm in arms])]
            if headline.cap is not None
            else []
        ),
        (f"minus {baseline} [95 % Holm interval]", [_difference_cell(arm.difference, headline) for arm in arms]),
        ("p, Holm", [_p_cell(arm.difference, "adjusted_p") for arm in arms]),
        ("p, Wilcoxon", [_p_cell(arm.difference, "wilcoxon_p") for arm in arms]),
        ("effect size", [effect_size(arm.difference) for arm in arms]),
        ("wins", [_wins_cell(arm.difference) for arm in arms]),
    ]
    if headline.metric != "test_accuracy":
        columns.append(("test accuracy", [_percent(arm.test_accuracy, 1) for arm in arms]))
    columns += [
        ("Q/K moved", [_percent(arm.qk_movement, 1) for arm in arms]),
        ("κ at the end", [significant(arm.condition) for arm in arms]),
        ("capped steps", [_percent(arm.capped, 1) for arm in arms]),
        ("seconds a run", [number(arm.seconds, 1) for arm in arms]),
    ]
    header = tuple(name for name, _ in columns)
    return header, tuple(zip(*(cells for _, cells in columns), strict=True))


def _reached(arm: ArmSummary) -> str:
    return f"{arm.reached} of {arm.n + arm.failed}"


def _headline_cell(arm: ArmSummary, headline: Headline) -> str:
    if not arm.values:
        return "–"
    if not arm.reached:
        return "not reached"
    # with the cap for what was not reached, as in the differences, the mean is a lower bound
    text = ("≥ " if arm.reached < len(arm.values) else "") + number(arm.mean, headline.digits)
    return text if arm.sd is None else f"{text} ± {number(arm.sd, headline.digits)}"


def _difference_cell(difference: PairedDifference | None, headline: Headline) -> str:
    if difference is None or difference.mean is None:
        return "–"
    text = signed(difference.mean, headline.digits)
    low, high = difference.adjusted_low, difference.adjusted_high
    if low is None or high is None:
        return f"{text} ({'one pair' if difference.n == 1 else 'all pairs alike'})"
    return f"{text} {interval(low, high, headline.digits)}"


def _p_cell(difference: PairedDifference | None, name: str) -> str:
    return "–" if difference is None else p_value(getattr(difference, name))


def effect_size(difference: PairedDifference | None) -> str:
    return "–" if difference is None or difference.hedges_g is None else signed(difference.hedges_g, 2)


def _wins_cell(difference: PairedDifference | None) -> str:
    if difference is None or not difference.n:
        return "–"
    ties = f", {difference.ties} tied" if difference.ties else ""
    return f"{difference.wins} of {difference.n}{ties}"


def _notes(arms: Sequence[ArmSummary], headline: Headline) -> tuple[str, ...]:
    better = "Higher" if headline.higher_is_better else "Lower"
    notes = [
        f"{better} is better. Differences are taken between runs of the same seed, which share their data, its order "
        "and every initial value outside Q and K; the interval is Student's t over seeds, "
        "adjusted for the number of arms by Holm's method.",
        "Q/K moved: ‖W − W₀‖/‖W₀‖ over all query and key weights. κ: condition number of a head's Q or K, mean over "
        "heads and layers, the larger of Q and K. Capped: steps of frames that the trust radius shortened.",
        "Principal-angle drift: the 2-norm of the angles between the column space of a head's Q or K now and at the "
        "start, mean over heads and layers.",
    ]
    if headline.cap is not None and any(arm.reached < arm.n for arm in arms):
        notes.insert(
            1,
            f"“Not reached” counts as the last step, {headline.cap:,.0f}, in means, differences and wins: a mean "
            "with ≥ is a lower bound.",
        )
    return tuple(notes)


# --- the words ----------------------------------------------------------------------------------------------------


def _words(arms: Sequence[ArmSummary], records: Sequence[Record], headline: Headline, baseline: str) -> tuple[str, ...]:
    words = []
    if headline.cap is not None:
        reached = ", ".join(f"{arm.arm} in {_reached(arm)}" for arm in arms)
        if reached:
            words.append(f"Runs that {headline.goal} within {headline.cap:,.0f} steps: {reached}.")
    compared = [(arm.arm, arm.difference) for arm in arms if arm.difference is not None]
    alike = [name for name, difference in compared if difference.verdict == "no difference found"]
    together = len(alike) > 3
    for name, difference in compared:
        if not (together and name in alike):
            words.append(_comparison(name, difference, headline, baseline))
    if together:
        words.append(f"No difference from {baseline} in {headline.label} was found for {', '.join(alike)}.")
    moved = [(arm.arm, arm.qk_movement) for arm in arms if arm.qk_movement is not None]
    if moved:
        parts = [f"{name}: {'not at all' if value == 0 else _percent(value, 1)}" for name, value in moved]
        words.append(f"How far Q and K moved from where they began, as a share of their norm: {'; '.join(parts)}.")
    conditions = [f"{arm.arm} {significant(arm.condition)}" for arm in arms if arm.condition is not None]
    if conditions:
        words.append(f"Condition number of Q and K at the end (1 is perfect): {'; '.join(conditions)}.")
    if failed := [record for record in records if record["status"] == "failed"]:
        first = failed[0]
        words.append(
            f"{len(failed)} of {len(records)} runs failed and are left out, with their pairs, which flatters an arm "
            f"that fails; the first, {first['arm']} with seed {first['seed']}: {first.get('error', 'no message')}"
        )
    return tuple(words)


def _comparison(arm: str, difference: PairedDifference, headline: Headline, baseline: str) -> str:
    if difference.mean is None:
        return f"{arm} and {baseline} have no seed in common that both finished: nothing to compare."
    size = _amount(difference.mean, headline)
    low, high = difference.adjusted_low, difference.adjusted_high
    if low is None or high is None:
        pairs = "from one pair of runs" if difference.n == 1 else f"in all {difference.n} pairs alike"
        return f"{arm} minus {baseline}: {size}, {pairs}: without spread there is no interval, and no verdict."
    interval = f"Holm-adjusted 95 % interval {_amount(low, headline)} to {_amount(high, headline)}"
    score = f"better in {difference.wins} of {difference.n} pairs"
    if difference.verdict == "no difference found":
        return (
            f"{arm} against {baseline}: no difference found in {headline.label} (mean {size}, {interval}, which "
            f"includes 0; {score})."
        )
    return (
        f"{arm} is {difference.verdict} than {baseline} in {headline.label}: {size} on average ({interval}; {score})."
    )


def _amount(value: float, headline: Headline) -> str:
    return f"{signed(value, headline.digits)} {headline.difference_unit}"


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    if value is None or not value:
        return number(value, 0)
    return number(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def interval(low: float | None, high: float | None, digits: int) -> str:
    return "–" if low is None or high is None else f"[{signed(low, digits)}, {signed(high, digits)}]"


def p_value(p: float | None) -> str:
    if p is None:
        return "–"
    return "< .001" if p < 0.001 else "1" if p > 0.9995 else f"{p:.3f}".removeprefix("0")


def signed(value: float, digits: int) -> str:
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return ("+" if value > 0 else "−") + text


def _percent(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"
