"""The tables of a report besides that of the arms: rows of text, for the terminal, HTML and Markdown alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .claims import Claim, accuracy, matched_lengths
from .statistics import mean_and_sd, paired_difference
from .study import Headline
from .summary import (
    Summary,
    effect_size,
    interval,
    learning_rate,
    learning_rates,
    number,
    p_value,
    signed,
    significant,
)

__all__ = ["TextTable", "claim_table", "control_table", "factorial_table", "statistics_table", "tuning_table"]

Roles = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class TextTable:
    """Rows of text under a header, with a title and a note."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def claim_table(claims: Sequence[Claim]) -> TextTable:
    """What was claimed, the verdict, the figure with its interval, and why."""
    rows = tuple(
        (
            claim.number,
            claim.text,
            claim.verdict.word,
            _figure(claim),
            str(claim.verdict.n),
            claim.tested,
            claim.verdict.reason,
        )
        for claim in claims
    )
    header = ("claim", "what is claimed", "verdict", "found [95 % interval]", "n", "what was measured", "why")
    return TextTable("Claims", header, rows)


def _figure(claim: Claim) -> str:
    verdict = claim.verdict
    if verdict.estimate is None:
        return "–"

    def show(value: float) -> str:
        return f"{value:.3g}" if claim.digits < 0 else signed(value, claim.digits)

    unit = f" {claim.unit}" if claim.unit else ""
    if verdict.low is None or verdict.high is None:
        return show(verdict.estimate) + unit
    return f"{show(verdict.estimate)} [{show(verdict.low)}, {show(verdict.high)}]{unit}"


def statistics_table(summary: Summary) -> TextTable | None:
    """Every statistic of the paired differences from the baseline."""
    digits = summary.headline.digits
    rows = []
    for arm in summary.arms:
        d = arm.difference
        if d is None or d.mean is None:
            continue
        rows.append(
            (
                arm.arm,
                str(d.n),
                signed(d.mean, digits),
                interval(d.low, d.high, digits),
                interval(d.bootstrap_low, d.bootstrap_high, digits),
                interval(d.adjusted_low, d.adjusted_high, digits),
                p_value(d.t_p),
                p_value(d.wilcoxon_p),
                p_value(d.adjusted_p),
                effect_size(d),
                f"{d.wins}, {d.ties}, {d.losses}",
            )
        )
    if not rows:
        return None
    header = (
        "arm",
        "pairs",
        f"mean difference, {summary.headline.difference_unit}",
        "t interval",
        "bootstrap interval",
        "Holm interval",
        "p, t",
        "p, Wilcoxon",
        "p, Holm",
        "Hedges' g",
        "wins, ties, losses",
    )
    note = (
        "95 % intervals of the mean paired difference in the headline number: Student's, the BCa bootstrap's, and "
        "Student's widened for the number of arms by Holm's method, which the verdicts use. Five pairs cannot have a "
        "Wilcoxon p below .0625."
    )
    return TextTable("Paired statistics, minus adamw", header, tuple(rows), note)


def factorial_table(
    roles: Roles, plan: Mapping[str, Any], design: Mapping[str, Mapping[str, bool]]
) -> TextTable | None:
    """The arms of the factorial: what each has, its step length against the reference's, and its accuracy."""
    records = [record for record in roles.get("matched", ()) if record["status"] == "ok"]
    if not records:
        return None
    values, ratios = accuracy(records), matched_lengths(roles)
    rates = {record["arm"]: learning_rate(record) for record in records}
    rows = []
    for arm, has in design.items():
        if arm in values:
            mean, sd = mean_and_sd(list(values[arm].values()))
            settled = plan["matched"].get(arm, {}).get("length_ratio")
            rows.append(
                (
                    arm,
                    *("yes" if level else "no" for level in has.values()),
                    rates[arm],
                    significant(ratios.get(arm)),
                    significant(settled),
                    str(len(values[arm])),
                    f"{number(mean, 2)} ± {number(sd, 2)}",
                )
            )
    factors = next(iter(design.values()))
    header = (
        "arm",
        *factors,
        "learning rate",
        "step length ÷ riemannian-adam's",
        "the same, tuning",
        "n",
        "test accuracy, %",
    )
    note = (
        "All at the learning rate that validation data chose for riemannian-adam; the rate of Q and K is scaled until "
        "the mean step length of tuning runs is within 10 % of riemannian-adam's, or for four tries at most."
    )
    return TextTable("Arms at one step length", header, tuple(rows), note)


def control_table(roles: Roles) -> TextTable | None:
    """The negative control: arms on permutations."""
    records = [record for record in roles.get("control", ()) if record["status"] == "ok"]
    values = accuracy(records)
    if not values:
        return None
    rows = []
    for arm, own in values.items():
        mean, sd = mean_and_sd(list(own.values()))
        found = [record["metrics"] for record in records if record["arm"] == arm]
        reached = [metrics["steps_to_95_test"] for metrics in found]
        steps, _ = mean_and_sd([step for step in reached if step is not None])
        difference = "–"
        if arm != "adamw" and "adamw" in values:
            paired = paired_difference(own, values["adamw"], higher_is_better=True)
            difference = "–" if paired.mean is None else signed(paired.mean, 2)
            if paired.low is not None and paired.high is not None:
                difference += " " + interval(paired.low, paired.high, 2)
        count = sum(step is not None for step in reached)
        rows.append(
            (
                arm,
                learning_rates(record for record in records if record["arm"] == arm),
                str(len(own)),
                f"{number(mean, 2)} ± {number(sd, 2)}",
                difference,
                f"{count} of {len(found)}",
                number(steps, 0),
            )
        )
    header = (
        "arm",
        "learning rate",
        "n",
        "test accuracy, %",
        "minus adamw [95 % interval]",
        "reached 95 %",
        "at step, mean",
    )
    note = (
        "Composition of permutations has no cyclic structure to find. Each arm's learning rate was chosen on "
        "validation data of this task."
    )
    return TextTable("Negative control: composition in S₅", header, tuple(rows), note)


def tuning_table(roles: Roles, headline: Headline, of: str = "") -> TextTable | None:
    """The sweep, of the main task or of a variation: every candidate of every arm on validation data."""
    by_candidate: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for record in roles.get(f"{of}-tuning" if of else "tuning", ()):
        decay = record["config"]["study"]["weight_decay"]
        by_candidate.setdefault((record["arm"], learning_rate(record), decay), []).append(record)
    if not by_candidate:
        return None
    rows = []
    for (arm, rate, decay), records in by_candidate.items():
        ok = [record["metrics"] for record in records if record["status"] == "ok"]
        values = [m[headline.tuning_metric] for m in ok if m.get(headline.tuning_metric) is not None]
        # what was not reached counts as the last step, as it did when the candidates were compared
        missed = [m["steps"] for m in ok if m.get(headline.tuning_metric) is None and headline.cap is not None]
        mean, _ = mean_and_sd([headline.scale * value for value in [*values, *missed]])
        shown = number(mean, headline.digits) if values else ("failed" if not ok else "not reached")
        if values and missed:
            shown = f"≥ {shown} ({len(values)} of {len(ok)} reached)"
        loss, _ = mean_and_sd([m["validation_loss"] for m in ok])
        rows.append((arm, rate, f"{decay:g}", str(len(records)), shown, number(loss, 3)))
    unit = f", {headline.unit}" if headline.unit != "steps" else ""
    label = headline.label.replace("test", "validation") + unit
    header = ("arm", "learning rate", "weight decay", "runs", label, "validation loss")
    title = f"Sweep on validation data{f' of the {of}' if of else ''}"
    return TextTable(title, header, tuple(rows), "Seeds that are not reported.")
