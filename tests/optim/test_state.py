"""Saving and loading: other precisions, orders and sets of parameters."""

import copy
import io

import pytest
import torch
from geodescent.manifolds import QR, ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam, RiemannianSGD, SpectralDescent
from torch import nn


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model(dtype=torch.float64):
    x = Stiefel().random_point(2, 6, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    y = Stiefel().random_point(6, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return {
        "q": ManifoldParameter(x, Stiefel()),
        "k": ManifoldParameter(y, Stiefel()),
        "bias": nn.Parameter(draw(3, dtype=dtype)),
    }


def steps(optimizer, named, seeds):
    for seed in seeds:
        for i, p in enumerate(named.values()):
            p.grad = draw(*p.shape, seed=10 * seed + i, dtype=p.dtype)
        optimizer.step()


def saved(optimizer, weights_only=True):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


MAKERS = [
    lambda params: RiemannianAdam(params, lr=0.05, amsgrad=True),
    lambda params: RiemannianAdam(params, lr=0.05, second_moment="gram"),
    lambda params: RiemannianSGD(params, lr=0.05, momentum=0.9),
    lambda params: SpectralDescent(params, lr=0.05),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.filterwarnings("ignore:.*plain parameters are torch.bfloat16")
def test_five_and_five_steps_are_ten(make, dtype, weights_only):
    whole = model(dtype)
    ten = make(whole.items())
    steps(ten, whole, range(5))
    halfway, state = copy.deepcopy(whole), saved(ten, weights_only)
    steps(ten, whole, range(5, 10))
    resumed = make(halfway.items())
    resumed.load_state_dict(state)
    steps(resumed, halfway, range(5, 10))
    for name in whole:
        assert torch.equal(whole[name], halfway[name]), name
    assert float(resumed.state[halfway["q"]]["step"]) == 10


def test_moments_of_half_precision_frames_keep_their_precision():
    named = model(torch.bfloat16)
    frames = {name: named[name] for name in ("q", "k")}
    optimizer = RiemannianAdam(frames.items())
    steps(optimizer, frames, [0])
    state = saved(optimizer)
    state["state"][0]["exp_avg_sq"].fill_(1 / 3)
    other = RiemannianAdam(copy.deepcopy(frames).items())
    other.load_state_dict(state)
    loaded = other.state[other.param_groups[0]["params"][0]]
    assert loaded["exp_avg_sq"].dtype == loaded["master"].dtype == torch.float32
    assert float(loaded["exp_avg_sq"][0, 0, 0]) == pytest.approx(1 / 3, abs=1e-7)


def test_a_float32_state_serves_a_float64_model():
    named = model(torch.float32)
    optimizer = RiemannianAdam(named.items())
    steps(optimizer, named, range(3))
    doubled = {
        name: ManifoldParameter(p.detach().double(), Stiefel(), project=True)
        if isinstance(p, ManifoldParameter)
        else nn.Parameter(p.detach().double())
        for name, p in named.items()
    }
    other = RiemannianAdam(doubled.items())
    other.load_state_dict(saved(optimizer))
    steps(other, doubled, [3])
    assert other.state[doubled["q"]]["exp_avg"].dtype == torch.float64
    assert Stiefel().point_error(doubled["q"].detach()).max() < 1e-13


def test_named_parameters_are_matched_by_name():
    named = model()
    optimizer = RiemannianAdam(named.items(), lr=0.05)
    steps(optimizer, named, range(3))
    twin = copy.deepcopy(named)
    other = RiemannianAdam(list(twin.items())[::-1], lr=0.05)
    other.load_state_dict(saved(optimizer))
    steps(optimizer, named, [3])
    steps(other, twin, [3])
    for name in named:
        assert torch.equal(named[name], twin[name])


@pytest.mark.parametrize("named_too", [True, False])
def test_a_state_that_does_not_fit_is_refused_whole(named_too):
    named = model()
    optimizer = RiemannianAdam(named.items() if named_too else named.values())
    steps(optimizer, named, range(2))
    state = saved(optimizer)
    frozen = {name: p for name, p in copy.deepcopy(named).items() if name != "k"}
    other = RiemannianAdam(frozen.items() if named_too else frozen.values())
    wanted = "'k' is saved, but is not in group 0: is it frozen" if named_too else "saved with 3 parameters and has 2"
    with pytest.raises(ValueError, match=wanted):
        other.load_state_dict(state)
    assert not other.state
    larger = {**copy.deepcopy(named), "k": ManifoldParameter(torch.eye(7, 3, dtype=torch.float64), Stiefel())}
    third = RiemannianAdam(larger.items())
    with pytest.raises(ValueError, match=r"'k' has shape \(7, 3\), its saved exp_avg \(6, 3\)"):
        third.load_state_dict(state)
    state["state"][0]["exp_avg"].view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match="the saved exp_avg of 'q' has NaN"):
        RiemannianAdam(copy.deepcopy(named).items()).load_state_dict(state)


def test_state_is_half_of_adams():
    p = ManifoldParameter(Stiefel().random_point(4, 64, 16), Stiefel())
    q = nn.Parameter(p.detach().clone())
    ours, adam = RiemannianAdam([p]), torch.optim.Adam([q])
    p.grad = q.grad = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0))
    ours.step()
    adam.step()
    size = [sum(v.numel() for v in o.state[r].values()) for o, r in ((ours, p), (adam, q))]
    assert size[0] <= 0.501 * size[1]


def test_a_groups_manifold_is_saved_as_words_and_checked():
    x = torch.nn.Parameter(Stiefel().random_point(5, 3))
    state = RiemannianAdam([{"params": [x], "manifold": Stiefel()}]).state_dict()
    assert state["param_groups"][0]["manifold"] == repr(Stiefel())
    same = RiemannianAdam([{"params": [x], "manifold": Stiefel()}])
    same.load_state_dict(state)
    assert same.param_groups[0]["manifold"] == Stiefel()
    other = RiemannianAdam([{"params": [x], "manifold": Stiefel(retraction=QR())}])
    with pytest.raises(ValueError, match="was saved with manifold"):
        other.load_state_dict(state)
    assert other.param_groups[0]["manifold"] == Stiefel(retraction=QR())
