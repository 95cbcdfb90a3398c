"""The claims of the papers, and what the runs of one study say of each.

"Stiefel Attention" and "Directions That Don't Drift" (2026) are known to this project by their abstracts and digests;
sizes and settings here are this project's own, so a verdict is about the claim at the size that was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arms import BASELINE
from .certification import certify_all
from .factorial import Effect, factorial_effects, length_ratios
from .grid import FACTORIAL
from .statistics import compare_many, paired_difference
from .verdicts import (
    CONFIRMED,
    MARGIN,
    REFUTED,
    UNDECIDED,
    Verdict,
    direction_verdict,
    null_verdict,
    range_verdict,
    size_verdict,
    trend_verdict,
)

__all__ = ["Claim", "accuracy", "claims_of", "counts", "effects_of", "growth_gaps", "matched_lengths"]

Record = Mapping[str, Any]
Roles = Mapping[str, Sequence[Record]]

#: a turn below this many radians is rounding
_STILL = 2e-3
#: arms whose mean step lengths differ by more than this factor are not at one step length: a choice of this project
_SAME_LENGTH = 1.25


@dataclass(frozen=True)
class Claim:
    """One row of the claim table.

    Attributes:
        number: as in the papers' list, with a letter where one claim is several statements.
        text: what is claimed.
        tested: the number that tests it, in words.
        unit: of the verdict's figure.
    """

    number: str
    text: str
    tested: str
    verdict: Verdict
    unit: str = "points"
    digits: int = 2


def accuracy(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """arm -> seed -> test accuracy in %, of the runs that ended well."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if record["status"] == "ok":
            found.setdefault(record["arm"], {})[record["seed"]] = 100 * record["metrics"]["test_accuracy"]
    return found


def effects_of(roles: Roles) -> tuple[Effect, ...]:
    """The factorial's effects on test accuracy, in points."""
    return factorial_effects(accuracy(roles.get("matched", ())), FACTORIAL, higher_is_better=True)


def claims_of(study: str, roles: Roles) -> tuple[Claim, ...]:
    """Every claim that this study's runs, or the certificates, can speak to."""
    return (*_certified(), *_decay(roles), *_gain(study, roles), *_freezing(roles), *_why(roles))


# --- 1 and 2: certificates, and decay -------------------------------------------------------------------------------


def _certified() -> Iterator[Claim]:
    report = next(iter(certify_all((2, 24, 6))))
    texts = {
        "steepest descent": ("1a", "The step is steepest descent in the embedded metric"),
        "scale-free": ("1b", "The step does not depend on the gradient's scale"),
        "conditioning": ("1c", "The step keeps frames well conditioned"),
        "equivariance": ("1d", "The step is O(d)-equivariant"),
        "weight decay": ("2a", "Weight decay has zero Riemannian gradient on a frame"),
    }
    for row in report.rows:
        if row.name in texts:
            number, text = texts[row.name]
            verdict = Verdict(
                CONFIRMED if row.holds else REFUTED,
                row.value,
                None,
                None,
                f"certificate in float64, held to {row.bound:.2g}",
                1,
            )
            yield Claim(number, text, row.quantity, verdict, unit="", digits=-1)


def _decay(roles: Roles) -> Iterator[Claim]:
    by_arm: dict[str, dict[int, Record]] = {}
    for record in roles.get("cycles", ()):
        if record["status"] == "ok" and record.get("cycles"):
            by_arm.setdefault(record["arm"], {})[record["seed"]] = record["cycles"]
    frames = by_arm.get("riemannian-adam")
    if not frames:
        return
    turned = [
        max(abs(c["qk_angle"][i] - c["qk_angle"][i - 1]) for i in range(1, len(c["qk_angle"]), 2))
        for c in frames.values()
    ]
    left = float(np.mean([c["rest_norm"][1] for c in frames.values()]))
    most = max(turned)
    yield Claim(
        "2b",
        "Decay that collapses the rest of the model leaves the attention geometry",
        "largest change, while decay shrinks all other matrices to "
        f"{100 * left:.0f} % of their norm, of the distance of Q's and K's column spaces from before the cycles, "
        "riemannian-adam",
        Verdict(
            CONFIRMED if most < _STILL else REFUTED, most, None, None, f"below {_STILL:g} counts as none", len(turned)
        ),
        unit="rad",
        digits=-1,
    )
    for name, why in (
        ("adamw", ""),
        ("adamw-orth-no-decay", ", which shares the start and does not decay Q and K either"),
    ):
        if name in by_arm:
            own, other = ({seed: c["qk_angle"][-1] for seed, c in arm.items()} for arm in (frames, by_arm[name]))
            shrunk = float(np.mean([c["qk_norm"][1] for c in by_arm[name].values()]))
            yield Claim(
                "2c" if name == BASELINE else "2d",
                f"After decay and retraining the geometry is nearer to where it was than {name}'s{why}",
                f"distance of Q's and K's column spaces from before the cycles, riemannian-adam minus {name}, whose Q "
                f"and K a decay shrinks to {100 * shrunk:.0f} %",
                direction_verdict(paired_difference(own, other, higher_is_better=False), sign=-1),
                unit="rad",
            )


# --- 3 and 4: the gain ----------------------------------------------------------------------------------------------


def _gain(study: str, roles: Roles) -> Iterator[Claim]:
    values = accuracy(roles.get("report", ()))
    if BASELINE not in values or "riemannian-adam" not in values:
        return
    baseline = values.pop(BASELINE)
    gain = compare_many(values, baseline, higher_is_better=True)["riemannian-adam"]
    tested = "test accuracy, riemannian-adam minus adamw, each at its own tuned learning rate"
    number, where = {
        "modular": ("3", "on modular arithmetic"),
        "cifar10": ("4", "on CIFAR-10 patches"),
    }.get(study, ("–", "(not claimed for this task)"))
    yield Claim(f"{number}a", f"Stiefel attention is more accurate than AdamW {where}", tested, direction_verdict(gain))
    if study == "modular":
        yield Claim("3b", "… by 35.9 points (97.0 % against 61.1 %)", tested, size_verdict(gain, 35.9))
    if study == "cifar10":
        yield Claim("4b", "… by 8.98 points", tested, size_verdict(gain, 8.98))
        yield Claim("4c", "… by 6.79 points, the most that the companion paper has", tested, size_verdict(gain, 6.79))
    fair = values.get("adamw-orth-no-decay")
    if fair is not None:
        yield Claim(
            f"{number}d",
            "… and more than AdamW from the same orthonormal start without decay on Q and K",
            "test accuracy, riemannian-adam minus adamw-orth-no-decay",
            direction_verdict(paired_difference(values["riemannian-adam"], fair, higher_is_better=True)),
        )
    gaps = growth_gaps(roles)
    if len(gaps) > 1:
        sizes = ", ".join(f"{size:,.0f}" for size in sorted(gaps))
        yield Claim(
            "4e",
            "The gap widens with data",
            f"slope of the gap in points a doubling of the training images ({sizes}), at equal epochs and the learning "
            "rates tuned for the main size",
            trend_verdict(gaps),
        )


def growth_gaps(roles: Roles) -> dict[float, dict[int, float]]:
    """training images -> seed -> test accuracy of riemannian-adam minus adamw, in points."""
    by_size: dict[float, list[Record]] = {}
    if roles.get("growth"):
        for record in (*roles.get("report", ()), *roles["growth"]):
            by_size.setdefault(record["config"]["study"]["train_images"], []).append(record)
    gaps = {}
    for size, records in by_size.items():
        values = accuracy(records)
        own, base = values.get("riemannian-adam", {}), values.get(BASELINE, {})
        if common := sorted(own.keys() & base.keys()):
            gaps[float(size)] = {seed: own[seed] - base[seed] for seed in common}
    return gaps


# --- 5: freezing ----------------------------------------------------------------------------------------------------


def _freezing(roles: Roles) -> Iterator[Claim]:
    report = [record for record in roles.get("report", ()) if record["status"] == "ok"]
    values = accuracy(report)
    # a step is proportional to its learning rate, and the arms may have been tuned to different ones
    lengths = {(r["arm"], r["seed"]): r["metrics"]["step_length"] / _qk_lr(r) for r in report}
    ratios = [
        lengths[BASELINE, seed] / length
        for (arm, seed), length in lengths.items()
        if arm == "rsgd" and length > 0 and (BASELINE, seed) in lengths
    ]
    if ratios:
        yield Claim(
            "5a",
            "A fixed-step Riemannian update moves 24 to 40 times less a step than AdamW's",
            "mean step length ÷ learning rate of Q and K, adamw ÷ rsgd",
            range_verdict(ratios, 24, 40),
            unit="×",
            digits=-1,
        )
        moved = [100 * r["metrics"]["qk_movement"] for r in report if r["arm"] == "rsgd"]
        most = max(moved)
        yield Claim(
            "5b",
            "… and its frames barely leave their start",
            "largest movement of Q and K as a share of their norm, rsgd (barely: below 5 %, this project's choice)",
            Verdict(CONFIRMED if most < 5 else REFUTED, most, None, None, "below 5 % or not", len(moved)),
            unit="%",
            digits=-1,
        )
    for number, arm in (("5c", "rsgd"), ("5d", "riemannian-adam")):
        if arm in values and "frozen" in values:
            cost = paired_difference(values[arm], values["frozen"], higher_is_better=True)
            yield Claim(
                number,
                f"Freezing the frames costs little (0.28 points) against {arm}",
                f"test accuracy, {arm} minus frozen, each at its tuned learning rate; a null within ±{MARGIN:g} point",
                null_verdict(cost),
            )


def _qk_lr(record: Record) -> float:
    return record["lr"] * record["config"]["study"]["qk_scale"]


# --- 6: why ---------------------------------------------------------------------------------------------------------


def _why(roles: Roles) -> Iterator[Claim]:
    texts = {
        "scale-free": ("6a", "The gain comes from the scale-free step", False),
        "projected": ("6b", "The projection adds nothing measurable", True),
        "equivariant": ("6c", "Equivariance adds nothing measurable", True),
    }
    effects = {effect.factor: effect.difference for effect in effects_of(roles)}
    ratios = matched_lengths(roles)
    matched = all(1 / _SAME_LENGTH < ratio < _SAME_LENGTH for ratio in ratios.values())
    lengths = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} of riemannian-adam's" if ratios else "unknown"
    for factor, (number, text, null) in texts.items():
        if factor in effects:
            verdict = null_verdict(effects[factor]) if null else direction_verdict(effects[factor])
            if not matched:
                verdict = replace(verdict, word=UNDECIDED, reason=f"step lengths differ too much: {lengths}")
            rule = f"; a null within ±{MARGIN:g} point" if null else ""
            where = f"at one learning rate and mean step lengths of {lengths}"
            tested = f"effect of {factor} on test accuracy, {where}{rule}"
            yield Claim(number, text, tested, verdict)


def matched_lengths(roles: Roles) -> dict[str, float]:
    """arm -> mean step length ÷ riemannian-adam's, over the matched runs themselves."""
    lengths: dict[str, list[float]] = {}
    for record in roles.get("matched", ()):
        if record["status"] == "ok":
            lengths.setdefault(record["arm"], []).append(record["metrics"]["step_length"])
    return length_ratios(lengths, "riemannian-adam")


def counts(claims: Sequence[Claim]) -> dict[str, int]:
    """How many claims have each verdict."""
    return {word: sum(claim.verdict.word == word for claim in claims) for word in (CONFIRMED, REFUTED, UNDECIDED)}
