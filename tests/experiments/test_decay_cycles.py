import dataclasses

import pytest
from geodescent.experiments.arms import ARMS
from geodescent.experiments.training import train_cell


@pytest.mark.parametrize("name", ["adamw", "adamw-orth-no-decay", "frozen", "riemannian-adam", "muon", "spectral"])
def test_decay_shrinks_what_it_reaches_and_nothing_else(name, tiny_study):
    study = dataclasses.replace(tiny_study, decay_cycles=2, shrink=0.2, recovery_steps=3, lr=1e-2)
    result = train_cell(study, ARMS[name], 0, study.data(0))
    cycles = result.cycles
    assert {len(values) for values in cycles.values()} == {5}
    assert cycles["qk_norm"][0] == cycles["rest_norm"][0] == 1
    decayed = (1, 3)
    for i in decayed:
        # decay goes on until it has shrunk by at least the factor, and less than a step further
        shrunk = cycles["rest_norm"][i] / cycles["rest_norm"][i - 1]
        assert 0.2 * 0.98 < shrunk < 0.2 * 1.02
        free = not ARMS[name].frames and ARMS[name].decay
        assert cycles["qk_norm"][i] / cycles["qk_norm"][i - 1] == pytest.approx(shrunk if free else 1.0, rel=0.02)
        # one factor for all entries turns no subspace and changes no ratio
        assert cycles["qk_angle"][i] == pytest.approx(cycles["qk_angle"][i - 1], abs=2e-3)
        assert cycles["qk_condition"][i] == pytest.approx(cycles["qk_condition"][i - 1], rel=1e-3)
    assert (max(cycles["qk_angle"]) < 2e-3) == (name == "frozen")
    # training before the cycles is what it is without them
    plain = train_cell(dataclasses.replace(study, decay_cycles=0), ARMS[name], 0, study.data(0))
    assert plain.history == result.history
    assert plain.metrics == result.metrics
    assert plain.cycles == {}
