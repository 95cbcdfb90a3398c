import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from geodescent.experiments.factorial import factorial_effects, length_ratios
from geodescent.experiments.grid import FACTORIAL
from hypothesis import given, settings
from hypothesis import strategies as st

EFFECTS = st.tuples(*[st.floats(-5, 5)] * 3)


def _values(effects, noise=0.0, seeds=6, arms=FACTORIAL):
    generator = np.random.default_rng(0)
    return {
        arm: {
            seed: 40.0
            + 3 * seed
            + sum(e * has for e, has in zip(effects, FACTORIAL[arm].values(), strict=True))
            + noise * float(generator.normal())
            for seed in range(seeds)
        }
        for arm in arms
    }


@settings(max_examples=15, deadline=None)
@given(EFFECTS)
def test_additive_effects_are_found_and_the_seeds_level_does_not_matter(effects):
    found = factorial_effects(_values(effects), FACTORIAL, higher_is_better=True)
    assert [effect.factor for effect in found] == ["scale-free", "equivariant", "projected"]
    for effect, true in zip(found, effects, strict=True):
        assert effect.difference.differences == pytest.approx([true] * 6, abs=1e-9)


def test_the_effects_are_those_of_a_regression_with_a_block_a_seed():
    values = _values((2.0, -1.0, 0.5), noise=1.0)
    table = pd.DataFrame(
        [
            {"y": y, "seed": seed, **{k.replace("-", "_"): float(v) for k, v in FACTORIAL[arm].items()}}
            for arm, own in values.items()
            for seed, y in own.items()
        ]
    )
    both = "I((2 * equivariant - 1) * (2 * projected - 1))"
    fit = smf.ols(f"y ~ scale_free + equivariant + projected + {both} + C(seed)", table).fit()
    for effect in factorial_effects(values, FACTORIAL, higher_is_better=True):
        assert effect.difference.mean == pytest.approx(fit.params[effect.factor.replace("-", "_")])


def test_the_contrasts_are_the_differences_of_arms_that_they_mean():
    """Each with the other two factors held fixed, whatever equivariance and projection do together."""
    values = _values((2.0, -1.0, 0.5), noise=1.0, seeds=2)
    scale_free, equivariant, projected = (
        effect.difference.differences for effect in factorial_effects(values, FACTORIAL, higher_is_better=True)
    )
    names = ("riemannian-adam", "riemannian-adam-elementwise", "scalar-project", "adamw-project", "rsgd")
    for seed in (0, 1):
        full, elementwise, scalar, neither, rsgd = (values[name][seed] for name in names)
        assert scale_free[seed] == pytest.approx(full - rsgd)
        assert equivariant[seed] == pytest.approx(((full - elementwise) + (scalar - neither)) / 2)
        assert projected[seed] == pytest.approx(((full - scalar) + (elementwise - neither)) / 2)


def test_an_interaction_is_no_effect_of_a_third_factor():
    ninety = ("riemannian-adam", "adamw-project", "rsgd")
    values = {arm: dict.fromkeys(range(3), 90.0 if arm in ninety else 80.0) for arm in FACTORIAL}
    for effect in factorial_effects(values, FACTORIAL, higher_is_better=True):
        assert effect.difference.mean == pytest.approx(0.0, abs=1e-9)


def test_what_cannot_be_told_apart_is_left_out():
    without = factorial_effects(_values((2.0, -1.0, 0.5), arms=["riemannian-adam", "rsgd"]), FACTORIAL, True)
    assert [(effect.factor, effect.difference.mean) for effect in without] == [("scale-free", pytest.approx(2.0))]
    confounded = ["riemannian-adam", "adamw-project"]  # differ in two at once
    assert factorial_effects(_values((2.0, -1.0, 0.5), arms=confounded), FACTORIAL, True) == ()
    assert factorial_effects({}, FACTORIAL, True) == ()


def test_a_seed_that_lacks_an_arm_is_left_out():
    values = _values((2.0, -1.0, 0.5))
    del values["rsgd"][3]
    assert all(effect.difference.seeds == (0, 1, 2, 4, 5) for effect in factorial_effects(values, FACTORIAL, True))


def test_an_arm_without_a_design_is_named():
    with pytest.raises(ValueError, match="mine"):
        factorial_effects({"mine": {0: 1.0}}, FACTORIAL, True)


def test_length_ratios_are_geometric():
    lengths = {"a": [1.0, 4.0], "b": [2.0, 2.0], "c": [8.0, 2.0], "still": [0.0, 0.0]}
    assert length_ratios(lengths, "b") == pytest.approx({"a": 1.0, "b": 1.0, "c": 2.0})
    assert length_ratios(lengths, "none") == {}
