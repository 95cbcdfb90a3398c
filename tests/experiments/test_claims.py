"""Made-up results with a known truth: the verdicts must be the ones that the numbers were made for."""

import numpy as np
import pytest
from geodescent.experiments.claims import claims_of, counts, effects_of, growth_gaps
from geodescent.experiments.grid import FACTORIAL
from geodescent.experiments.verdicts import CONFIRMED, REFUTED, UNDECIDED


@pytest.fixture
def runs(make_record):
    """(arm, accuracy in %, seeds, changes) -> records of noisy runs."""

    def make(arm, level, seeds=10, sd=0.3, images=4000, cycles=None, **metrics):
        generator = np.random.default_rng([len(arm), seeds, images])
        records = []
        for seed in range(seeds):
            value = (level + 2 * np.sin(seed) + sd * generator.normal()) / 100
            record = make_record(arm, seed, metrics={"test_accuracy": float(value), **metrics}, cycles=cycles or {})
            record["config"]["study"]["train_images"] = images
            records.append(record)
        return records

    return make


def _claims(study, **roles):
    return {claim.number: claim for claim in claims_of(study, roles)}


def test_the_certificates_are_in_every_table():
    claims = _claims("charlm")
    assert set(claims) == {"1a", "1b", "1c", "1d", "2a"}
    assert {claim.verdict.word for claim in claims.values()} == {CONFIRMED}
    assert counts(list(claims.values())) == {CONFIRMED: 5, REFUTED: 0, UNDECIDED: 0}


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (9.0, (CONFIRMED, CONFIRMED, REFUTED)),
        (2.0, (CONFIRMED, REFUTED, REFUTED)),
        (0.0, (UNDECIDED, REFUTED, REFUTED)),
        (-5.0, (REFUTED, REFUTED, REFUTED)),
    ],
)
def test_the_gain(runs, gain, words):
    claims = _claims("cifar10", report=[*runs("adamw", 40.0), *runs("riemannian-adam", 40.0 + gain)])
    assert tuple(claims[number].verdict.word for number in ("4a", "4b", "4c")) == words
    assert claims["4a"].verdict.estimate == pytest.approx(gain, abs=0.5)
    assert "4e" not in claims
    elsewhere = _claims("modular", report=[*runs("adamw", 60.0), *runs("riemannian-adam", 60.0 + gain)])
    assert elsewhere["3a"].verdict.word == words[0]
    assert elsewhere["3b"].verdict.word == REFUTED


def test_the_gain_is_adjusted_for_the_number_of_arms(runs):
    pair = [*runs("adamw", 40.0), *runs("riemannian-adam", 40.4)]
    alone = _claims("cifar10", report=pair)["4a"].verdict
    others = [record for i in range(12) for record in runs(f"arm{i}", 40.0)]
    family = _claims("cifar10", report=[*pair, *others])["4a"].verdict
    ends = [end for end in (family.low, alone.low, alone.high, family.high) if end is not None]
    assert len(ends) == 4
    assert ends == sorted(set(ends))


def test_freezing(runs):
    report = [
        *runs("adamw", 40.0, step_length=0.03),
        *runs("rsgd", 40.1, step_length=0.001, qk_movement=0.004),
        *runs("frozen", 40.0, step_length=0.0, qk_movement=0.0),
        *runs("riemannian-adam", 44.0),
    ]
    claims = _claims("cifar10", report=report)
    assert claims["5a"].verdict.word == UNDECIDED  # thirty in every run: no spread, no interval
    assert claims["5b"].verdict.word == CONFIRMED
    assert claims["5c"].verdict.word == CONFIRMED
    assert claims["5d"].verdict.word == REFUTED
    for i, record in enumerate(report):
        record["metrics"]["step_length"] *= 1 + 0.01 * np.cos(i)
    assert _claims("cifar10", report=report)["5a"].verdict.word == CONFIRMED
    for record in report:
        if record["arm"] == "rsgd":  # the same step at a tenth of the rate is ten times the step a rate
            record["lr"] /= 10
            record["metrics"]["qk_movement"] = 0.2
    changed = _claims("cifar10", report=report)
    assert changed["5a"].verdict.estimate == pytest.approx(3.0, rel=0.05)
    assert (changed["5a"].verdict.word, changed["5b"].verdict.word) == (REFUTED, REFUTED)


def test_why(runs):
    def matched(scale_free, equivariant, projected):
        truth = {"scale-free": scale_free, "equivariant": equivariant, "projected": projected}
        return [
            record
            for arm, has in FACTORIAL.items()
            for record in runs(arm, 40.0 + sum(truth[factor] for factor, level in has.items() if level))
        ]

    claims = _claims("cifar10", matched=matched(3.0, 0.0, 0.0))
    assert [claims[n].verdict.word for n in ("6a", "6b", "6c")] == [CONFIRMED] * 3
    claims = _claims("cifar10", matched=matched(-3.0, 4.0, 0.0))
    assert [claims[n].verdict.word for n in ("6a", "6b", "6c")] == [REFUTED, CONFIRMED, REFUTED]
    assert len(effects_of({"matched": matched(1.0, 1.0, 1.0)})) == 3
    longer = matched(3.0, 0.0, 0.0)
    for record in longer:
        if record["arm"] == "rsgd":
            record["metrics"] = record["metrics"] | {"step_length": 1.3 * record["metrics"]["step_length"]}
    claims = _claims("cifar10", matched=longer)
    assert [claims[n].verdict.word for n in ("6a", "6b", "6c")] == [UNDECIDED] * 3
    assert claims["6a"].verdict.reason == "step lengths differ too much: 1.00 to 1.30 of riemannian-adam's"
    assert effects_of({}) == ()


def test_growth(runs):
    def growth(slope):
        roles = {"report": [*runs("adamw", 40.0, 4), *runs("riemannian-adam", 40.0 + 2 * slope, 4)], "growth": []}
        for images, level in ((1000, 0.0), (16_000, 4.0)):
            roles["growth"] += runs("adamw", 40.0, 4, images=images)
            roles["growth"] += runs("riemannian-adam", 40.0 + slope * level, 4, images=images)
        return roles

    assert sorted(growth_gaps(growth(1.0))) == [1000, 4000, 16_000]
    words = {slope: _claims("cifar10", **growth(slope))["4e"].verdict.word for slope in (1.0, 0.0, -1.0)}
    assert words == {1.0: CONFIRMED, 0.0: UNDECIDED, -1.0: REFUTED}
    assert growth_gaps({"report": growth(1.0)["report"]}) == {}


def test_decay_cycles(runs):
    def cycles(angles):
        return {"qk_angle": angles, "rest_norm": [1.0, 0.1, 0.6], "qk_norm": [1.0, 0.25, 0.8]}

    frames = runs("riemannian-adam", 90.0, 1, cycles=cycles([0.0, 1e-4, 0.8]))
    frames += [record | {"seed": seed} for record in frames for seed in (1, 2)]
    for i, record in enumerate(frames):
        record["cycles"] = cycles([0.0, 1e-4, 0.8 + 0.01 * i])
    free = [record | {"arm": "adamw", "cycles": cycles([0.0, 0.0, 2.0])} for record in frames]
    claims = _claims("modular", cycles=[*frames, *free])
    assert (claims["2b"].verdict.word, claims["2c"].verdict.word) == (CONFIRMED, CONFIRMED)
    assert "shrinks to 25 %" in claims["2c"].tested
    assert "2d" not in claims
    turned = [record | {"cycles": cycles([0.0, 0.5, 3.0 + record["seed"]])} for record in frames]
    claims = _claims("modular", cycles=[*turned, *free])
    assert (claims["2b"].verdict.word, claims["2c"].verdict.word) == (REFUTED, UNDECIDED)


def test_failed_runs_count_for_nothing(runs):
    report = [*runs("adamw", 40.0), *runs("riemannian-adam", 49.0)]
    failed = [record | {"status": "failed", "metrics": {"steps": 3}, "seed": 99} for record in runs("frozen", 0.0, 1)]
    assert _claims("cifar10", report=[*report, *failed])["4a"].verdict.word == CONFIRMED
