"""The protocol is driven by made-up results: what it asks for next is what is tested."""

import dataclasses
import math

import pytest
from geodescent.experiments.arms import ARMS, select_arms
from geodescent.experiments.cells import TUNING_SEED
from geodescent.experiments.grid import FACTORIAL, SIZES, Grid, Variation
from geodescent.experiments.protocol import choices, jobs_of, matched_scales
from geodescent.experiments.study_modular import ModularStudy

#: step length ÷ (lr·scale) of each arm, as it might be
SPEED = {"riemannian-adam": 10.0, "riemannian-adam-elementwise": 10.5, "scalar-project": 5.0, "rsgd": 0.002}


@pytest.fixture
def grid():
    return Grid(
        arms=tuple(ARMS),
        lrs=(1e-3, 3e-3),
        decays=(1.0,),
        other_seeds=2,
        seeds={"adamw": 3},
        qk_scales={"adamw": (0.1, 1.0)},
        tuning_seeds=2,
        matched_seeds=2,
        variations={"cycles": Variation(("adamw", "frozen"), 1, {"decay_cycles": (2,)})},
    )


def _record(cell, best_lr=3e-3, best_scale=0.1, status="ok", power=1.0):
    steps = 100 + 1000 * abs(math.log(cell.study.lr / best_lr)) + 100 * abs(math.log(cell.study.qk_scale / best_scale))
    length = SPEED.get(cell.arm.name, 10.0) * (cell.study.lr * cell.study.qk_scale) ** power
    metrics = {"steps_to_95_validation": min(steps, 800), "validation_loss": 1.0, "step_length": length}
    return {"status": status, "metrics": metrics}


def _drive(study, arms, grid, answer=_record):
    """Answer every job until there are no more; the rounds of jobs."""
    records, rounds = {}, []
    while True:
        jobs = jobs_of(study, arms, grid, records)
        todo = {job.cell.key: job.cell for job in jobs if job.cell.key not in records}
        if not todo:
            return records, rounds
        rounds.append([job for job in jobs if job.cell.key in todo])
        records |= {key: answer(cell) for key, cell in todo.items()}
        assert len(rounds) < 20


def test_nothing_is_reported_before_validation_data_have_chosen(tiny_study, grid):
    arms = select_arms()
    _, rounds = _drive(tiny_study, arms, grid)
    assert {job.role for job in rounds[0]} == {"tuning"}
    assert {job.cell.seed for job in rounds[0]} == {TUNING_SEED, TUNING_SEED + 1}
    # 13 arms of 2 rates and one of 2 × 2, on two seeds
    assert len(rounds[0]) == (13 * 2 + 4) * 2
    later = [job for jobs in rounds[1:] for job in jobs]
    assert {job.cell.seed >= TUNING_SEED for job in later if job.role == "matching"} == {True}
    reported = [job for job in later if job.role == "report"]
    assert all(job.cell.study.lr == 3e-3 for job in reported)
    assert {job.cell.study.qk_scale for job in reported if job.cell.arm.name == "adamw"} == {0.1}
    assert max(job.cell.seed for job in reported) < TUNING_SEED
    counts = {name: sum(job.cell.arm.name == name for job in reported) for name in ARMS}
    assert counts == {name: 3 if name == "adamw" else 2 for name in ARMS}
    # whole pairs first
    assert [job.cell.seed for job in reported] == sorted(job.cell.seed for job in reported)


def test_the_factorial_runs_at_one_rate_and_one_step_length(tiny_study, grid):
    arms = select_arms()
    records, rounds = _drive(tiny_study, arms, grid)
    matched = [job.cell for jobs in rounds for job in jobs if job.role == "matched"]
    shared = [cell for cell in matched if cell.arm.name != "riemannian-adam"]  # its own cells are the reported ones
    assert {cell.arm.name for cell in shared} == set(FACTORIAL) - {"riemannian-adam", *_shared_with_report(shared)}
    scales = matched_scales(tiny_study, arms, grid, records)
    assert scales["riemannian-adam"] == (1.0, 1.0, True)
    for name, (scale, ratio, settled) in scales.items():
        assert settled
        assert ratio == pytest.approx(1.0, rel=0.1)
        assert SPEED.get(name, 10.0) * scale == pytest.approx(10.0, rel=0.1)
    assert scales["rsgd"][0] == pytest.approx(5000.0, rel=0.01)


def _shared_with_report(cells):
    """Arms whose matched cells are cells of the report: the same rate and scale."""
    return set(FACTORIAL) - {cell.arm.name for cell in cells}


def test_a_scale_that_never_matches_is_given_up_and_says_so(tiny_study, grid):
    arms = select_arms()
    records, rounds = _drive(tiny_study, arms, grid, lambda cell: _record(cell, power=3.0))
    tries = [job.cell for jobs in rounds for job in jobs if job.role == "matching" and job.cell.arm.name == "rsgd"]
    assert 2 <= len({cell.study.qk_scale for cell in tries}) <= 4
    _, ratio, settled = matched_scales(tiny_study, arms, grid, records)["rsgd"]
    assert settled
    assert ratio is not None
    assert not 0.9 < ratio < 1.1


def test_failed_and_never_reaching_candidates_are_not_chosen(tiny_study, grid):
    arms = select_arms(["adamw", "frozen"])

    def answer(cell):
        if cell.study.lr == 3e-3:
            return _record(cell, status="failed") | {"metrics": {"steps": 3}}
        record = _record(cell)
        record["metrics"]["steps_to_95_validation"] = None
        record["metrics"]["validation_loss"] = 1 / cell.study.qk_scale
        return record

    records, _ = _drive(tiny_study, arms, grid, answer)
    chosen = choices(tiny_study, arms, grid, records)
    assert (chosen["frozen"].lr, chosen["adamw"].lr) == (1e-3, 1e-3)
    assert chosen["adamw"].qk_scale == 1.0  # nobody got there: the smaller validation loss


def test_one_candidate_is_not_tuned(tiny_study):
    grid = Grid(("adamw", "frozen"), (3e-3,), (1.0,), other_seeds=2)
    (jobs,) = _drive(tiny_study, select_arms(grid.arms), grid)[1]
    assert [(job.role, job.cell.arm.name, job.cell.seed) for job in jobs] == [
        ("report", "adamw", 0),
        ("report", "frozen", 0),
        ("report", "adamw", 1),
        ("report", "frozen", 1),
    ]


def test_variations_keep_what_was_chosen(tiny_study, grid):
    _, rounds = _drive(tiny_study, select_arms(), grid)
    cycles = [job.cell for jobs in rounds for job in jobs if job.role == "cycles"]
    assert {(cell.arm.name, cell.study.decay_cycles, cell.study.lr) for cell in cycles} == {
        ("adamw", 2, 3e-3),
        ("frozen", 2, 3e-3),
    }


def test_a_variation_may_have_a_sweep_of_its_own(tiny_study, grid):
    """On a task unlike the main one another rate may be best: here 1e-3, where the main task's is 3e-3."""
    variation = Variation(("adamw", "frozen"), 2, {"decay_cycles": (2,)}, lrs=(3e-4, 1e-3))
    grid = dataclasses.replace(grid, variations={"control": variation})

    def answer(cell):
        return _record(cell, best_lr=1e-3 if cell.study.decay_cycles else 3e-3)

    records, rounds = _drive(tiny_study, select_arms(), grid, answer)
    own = [job.cell for jobs in rounds for job in jobs if job.role == "control-tuning"]
    # adamw has two rates of Q and K for each learning rate
    assert {(cell.arm.name, cell.study.lr, cell.seed) for cell in own} == {
        (arm, lr, TUNING_SEED) for arm in ("adamw", "frozen") for lr in (3e-4, 1e-3)
    }
    assert len(own) == 2 * 2 + 2
    reported = [job.cell for jobs in rounds for job in jobs if job.role == "control"]
    assert [(cell.arm.name, cell.study.lr, cell.seed) for cell in reported] == [
        ("adamw", 1e-3, 0), ("frozen", 1e-3, 0), ("adamw", 1e-3, 1), ("frozen", 1e-3, 1)
    ]  # fmt: skip
    assert {cell.study.decay_cycles for cell in (*own, *reported)} == {2}
    assert all(c.lr == 3e-3 for c in choices(tiny_study, select_arms(), grid, records).values())


def test_step_lengths_are_matched_over_all_tuning_seeds(tiny_study, grid):
    """A seed on which an arm's steps are twice as long must not decide alone."""

    def answer(cell):
        record = _record(cell)
        if cell.arm.name == "rsgd" and cell.seed == TUNING_SEED:
            record["metrics"]["step_length"] *= 4.0
        return record

    arms = select_arms()
    records, _ = _drive(tiny_study, arms, grid, answer)
    scale, ratio, settled = matched_scales(tiny_study, arms, grid, records)["rsgd"]
    assert settled
    assert ratio == pytest.approx(1.0, rel=0.1)
    assert scale == pytest.approx(5000.0 / 2.0, rel=0.01)  # geometric mean of 4 and 1


@pytest.mark.parametrize("size", ["quick", "default", "full"])
@pytest.mark.parametrize("name", list(SIZES))
def test_every_declared_grid_is_one_that_can_run(name, size):
    settings, grid = SIZES[name][size]
    arms = select_arms(grid.arms)
    study = ModularStudy() if name != "modular" else ModularStudy(**settings)
    assert grid.seeds_of("adamw") >= 2
    for variation in grid.variations.values():
        assert set(variation.arms) <= set(grid.arms)
        for setting in variation.changes:
            known = {"train_images", "decay_cycles", "operation"}
            assert setting in known
    if size == "full" or name == "modular":
        small = dataclasses.replace(grid, variations={})
        records, rounds = _drive(study, arms, small)
        assert records
        assert (len(rounds) == 1) == (size == "quick")


def test_arms_that_decide_a_claim_have_ten_seeds_or_more():
    """Five pairs can never be significant by Wilcoxon."""
    compared = ("adamw", "frozen", "riemannian-adam", "adamw-orth-no-decay", "rsgd")
    _, grid = SIZES["cifar10"]["default"]
    assert min(map(grid.seeds_of, compared)) >= 12
    assert grid.matched_seeds >= 10
    _, grid = SIZES["modular"]["default"]
    assert min(map(grid.seeds_of, compared)) >= 10
    assert min(grid.matched_seeds, 10) == 10
    assert grid.other_seeds >= 5
    assert SIZES["charlm"]["default"][1].other_seeds >= 5
