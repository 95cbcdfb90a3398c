import pytest
import torch
from geodescent.benchmarks.contenders import RECIPES
from geodescent.benchmarks.memory import Allocations, allocations, measure_memory, state_bytes
from torch import nn


def test_peak_and_kept_are_exact():
    kept = []

    def call():
        a = torch.empty(1000)  # 4000 bytes
        b = torch.empty(500, dtype=torch.float64)  # 4000 more
        del a
        kept.append(torch.empty(100))  # 400: the peak was 8000
        del b

    assert allocations(call) == Allocations(peak=8000, kept=400)


def test_tensors_that_were_there_before_do_not_count():
    x = torch.ones(1000)
    assert allocations(lambda: x.neg_()) == Allocations(peak=0, kept=0)
    # a view is nobody's memory, its copy is
    assert allocations(lambda: (x[:500], x[:500].clone())).peak == 2000


def test_a_result_is_not_kept():
    found = allocations(lambda: torch.empty(250))
    assert found.peak == 1000


def test_state_of_adam_is_two_moments_and_a_count():
    params = [nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params)
    assert state_bytes(optimizer) == 0
    optimizer.step()
    assert state_bytes(optimizer) == 2 * 4 * (24 + 3) + 2 * 4


def test_measurement_of_every_optimizer():
    outcome = measure_memory([(4, 64, 16)])
    (shape,) = outcome.data["shapes"]
    size = 4 * 64 * 16 * 4
    assert shape["parameter_bytes"] == size
    assert set(shape["contenders"]) == {r.name for r in RECIPES}
    for numbers in shape["contenders"].values():
        # the state is made during the run and is part of what is kept, which is part of the peak
        assert numbers["peak"] >= numbers["kept"] >= numbers["state"] > 0
    adam = shape["contenders"]["AdamW fused"]
    assert adam["state"] == 2 * size + 4 * 4  # and a step count for each of four parameters
    assert shape["contenders"]["ours"]["state_per_adam"] == pytest.approx(0.5, abs=0.01)
    (table,) = outcome.tables
    assert [row[0] for row in table.rows] == [r.name for r in RECIPES]
