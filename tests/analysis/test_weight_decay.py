"""Weight decay against closed forms, and against torch's own optimizers on a real module."""

import copy
import math

import pytest
import torch
from geodescent.analysis import WeightDecayDrift, weight_decay_drift
from geodescent.analysis.decay_predictions import deviations, held_spectrum
from geodescent.attention import StiefelAttention
from geodescent.optim import RiemannianAdam
from scipy.integrate import solve_ivp
from torch import nn


def layer(bias=True, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(12, 3, bias=bias, dtype=dtype, batch_first=True)
    if bias:
        nn.init.normal_(module.in_proj_bias, std=0.3)
    return module


def heads(module):
    """Queries and keys (heads, n, p), read off in_proj_weight by hand."""
    q, k, _ = module.in_proj_weight.detach().double().chunk(3)
    return q.view(3, 4, 12).mT, k.view(3, 4, 12).mT


def unchanged(module, before):
    return all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_decay_alone_shrinks_plain_factors_alike_and_leaves_frames():
    module = layer()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = weight_decay_drift(module, lr=0.1, weight_decay=0.3, steps=50)
    assert unchanged(module, before)
    assert torch.equal(torch.get_rng_state(), state)
    q, k = heads(module)
    plain, frames = found["decay, plain"], found["decay, constrained"]
    left = 0.97**50
    assert torch.allclose(plain.query_norm[-1], left * torch.linalg.matrix_norm(q), rtol=1e-12)
    assert torch.allclose(plain.key_norm[-1], left * torch.linalg.matrix_norm(k), rtol=1e-12)
    assert torch.allclose(plain.query_condition[-1], torch.linalg.cond(q), rtol=1e-9)  # it cannot see the shrinking
    spectrum = torch.linalg.svdvals(q @ k.mT)[:, :4]
    assert torch.allclose(plain.spectrum[-1], left**2 * spectrum, rtol=1e-9)
    assert max(plain.deviations.values()) < 1e-12
    assert max(frames.deviations.values()) < 1e-12
    assert frames.moved.max() < 1e-13
    assert torch.allclose(frames.spectrum, torch.ones_like(frames.spectrum), atol=1e-12)
    assert plain.steps[0] == 0
    assert plain.steps[-1] == 50


def test_the_held_circuit_is_soft_thresholded_by_decay():
    """At the minimum of ½‖AB − M‖² + λ/2(‖A‖² + ‖B‖²); singular values below λ vanish."""
    q, k = (
        torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(s)))[0]
        for s in (0, 1)
    )
    sigma = torch.tensor([2.0, 1.0, 0.2], dtype=torch.float64)
    state = {"q_proj.weight": (q * sigma.sqrt() * 1.3).mT, "k_proj.weight": (k * sigma.sqrt() / 1.3).mT}
    found = weight_decay_drift(state, lr=0.1, weight_decay=0.5, steps=600, num_heads=1, records=20)
    arm = found["decay and gradient, plain"]
    # scaled by 1/√3: not part of the circuit that is held
    assert arm.spectrum[-1, 0].tolist() == pytest.approx([1.5, 0.5, 0.0], abs=2e-3)
    assert arm.limits["spectrum"][0].tolist() == pytest.approx([1.5, 0.5, 0.0], abs=1e-12)
    assert arm.limit_deviations["spectrum"] < 1e-3
    assert arm.deviations["spectrum"] < 0.03  # on the way there: these factors are not balanced
    assert arm.balance[-1, 0] < 1e-6 * arm.balance[0, 0]
    assert found["gradient, plain"].moved.max() < 1e-12  # it starts at its minimum
    assert torch.allclose(found.decay_effect("spectrum")[-1], arm.spectrum[-1] - arm.spectrum[0])


@pytest.mark.parametrize("lr", [0.1, 0.02])
def test_balance_decays_as_predicted_up_to_the_step_length(lr):
    found = weight_decay_drift(layer(), lr=lr, weight_decay=0.5, steps=round(2 / lr))
    for name in ("decay and gradient, plain", "cyclic, plain"):
        assert found[name].deviations["balance"] < 0.3 * lr
    both, cyclic = found["decay and gradient, plain"], found["cyclic, plain"]
    assert both.balance[-1].max() < 0.2 * both.balance[0].max()  # e^(−2) left, and the prediction is not vacuous
    assert cyclic.balance[-1].min() > 1.5 * both.balance[-1].min()  # off for two of five phases
    flat = cyclic.balance[(cyclic.steps > found.cycle) & (cyclic.steps < 2 * found.cycle)]
    assert (flat.max(0).values / flat.min(0).values).max() < 1 + 0.3 * lr


@pytest.mark.parametrize("bias", [True, False])
def test_a_modules_own_loss_conserves_balance_and_decay_shrinks_it(bias):
    """The query bias belongs to the balance: logits are (xW_Q + b)(yW_K)ᵀ."""
    module, x = layer(bias), torch.randn(4, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    twin = StiefelAttention(12, 3, dtype=torch.float64)
    before = [copy.deepcopy(m.state_dict()) for m in (module, twin)]
    found = weight_decay_drift(
        module,
        lr=0.02,
        weight_decay=0.5,
        steps=60,
        loss=lambda m: (m(x, x, x)[0] - x.roll(1, 1)).square().mean(),
        constrained=twin,
        records=10,
    )
    assert unchanged(module, before[0])
    assert unchanged(twin, before[1])
    assert found["gradient, plain"].deviations["balance"] < 1e-3
    assert found["gradient, plain"].moved[-1].min() > 1e-3
    assert found["decay and gradient, plain"].deviations["balance"] < 1e-3
    assert found.decay_effect("balance")[-1].max() < 0
    for name in ("gradient", "decay and gradient", "cyclic"):
        frames = found[f"{name}, constrained"]
        assert frames.deviations["query_condition"] < 1e-12
        assert frames.deviations["spectrum"] < 1e-12
        assert frames.moved[-1].min() > 1e-4
    # decay reaches frames only through the rest of the model
    assert found["decay, constrained"].moved.max() < 1e-12


def test_the_built_in_step_is_torchs_sgd_with_decoupled_decay():
    module, x = layer(), torch.randn(4, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = weight_decay_drift(module, lr=0.05, weight_decay=0.2, steps=7, loss=lambda m: m(x, x, x)[0].cos().mean())
    mine = copy.deepcopy(module)
    for _ in range(7):
        mine.zero_grad()
        mine(x, x, x)[0].cos().mean().backward()
        with torch.no_grad():
            for p in mine.parameters():
                p.mul_(1 - 0.05 * 0.2)
        torch.optim.SGD(mine.parameters(), lr=0.05).step()
    q, k = heads(mine)
    assert torch.allclose(found["decay and gradient, plain"].query_norm[-1], torch.linalg.matrix_norm(q), rtol=1e-12)
    assert torch.allclose(found["decay and gradient, plain"].key_norm[-1], torch.linalg.matrix_norm(k), rtol=1e-12)


def test_other_optimizers_and_frames():
    module = StiefelAttention(12, 3, dtype=torch.float64)
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = weight_decay_drift(
        module,
        lr=0.01,
        weight_decay=0.5,
        steps=10,
        loss=lambda m: m(x, x, x)[0].cos().mean(),
        optimizer=lambda params, decay: RiemannianAdam(params, lr=1.0, weight_decay=decay),
    )
    labels = [arm.label for arm in found.arms]
    assert "gradient, constrained" in labels
    assert "gradient, plain" not in labels  # its module has frames, and no plain twin was given
    assert found["cyclic, constrained"].moved[-1].min() > 1e-3
    assert found["cyclic, constrained"].deviations["query_condition"] < 1e-9


def test_grouped_queries_and_layers_of_other_sizes():
    state = {
        "layers.0.self_attn.q_proj.weight": torch.randn(8, 6),
        "layers.0.self_attn.k_proj.weight": torch.randn(4, 6),
        "layers.1.self_attn.q_proj.weight": torch.randn(4, 6),
        "layers.1.self_attn.k_proj.weight": torch.randn(4, 6),
    }
    found = weight_decay_drift(state, lr=0.01, weight_decay=0.5, steps=5, head_dim=2)
    assert found["decay, plain"].query_norm.shape == (6, 4 + 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr and weight_decay"),
        ({"lr": 1.0, "weight_decay": 1.0}, "lr and weight_decay"),
        ({"weight_decay": -0.1}, "lr and weight_decay"),
        ({"lr": math.nan}, "lr and weight_decay"),
        ({"steps": 0}, "steps"),
        ({"cycle": 0}, "cycle"),
        ({"lr": 1e3, "weight_decay": 0.0, "steps": 200, "loss": lambda m: (m.in_proj_weight**4).sum()}, "lower lr"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        weight_decay_drift(layer(), **{"lr": 0.1, "weight_decay": 0.1, "steps": 2, **arguments})


def test_a_loss_needs_a_module():
    with pytest.raises(ValueError, match="module must be a torch module"):
        weight_decay_drift(layer().state_dict(), 0.1, 0.1, 2, loss=lambda m: torch.zeros(()), num_heads=3)


def test_the_predicted_spectrum_solves_the_flow_of_the_factors():
    """Against the differential equation of balanced factors a = b = √s, decay switched off and on, integrated."""
    sigma, lr = [2.0, 0.5, 0.2], 0.01
    path = held_spectrum(
        torch.tensor([sigma], dtype=torch.float64),
        lr,
        lambda t: 0.5 if t < 300 or t >= 500 else 0.0,
        [0, 300, 500, 900],
    )
    for i, s in enumerate(sigma):
        a = s**0.5
        for k, (decay, span) in enumerate([(0.5, 3.0), (0.0, 2.0), (0.5, 4.0)]):
            solved = solve_ivp(
                lambda _, w, s=s, decay=decay: -(w * w - s) * w - decay * w, (0, span), [a], rtol=1e-10, atol=1e-12
            )
            a = solved.y[0, -1]
            assert float(path[k + 1, 0, i]) == pytest.approx(a * a, rel=1e-7)


@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_balanced_factors_follow_the_predicted_spectrum_up_to_the_step_length(lr):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    root = torch.tensor([1.5, 1.0, 0.3], dtype=torch.float64).sqrt()
    state = {"q_proj.weight": (q * root).mT, "k_proj.weight": (k * root).mT}
    found = weight_decay_drift(state, lr=lr, weight_decay=0.4, steps=round(3 / lr), num_heads=1, records=10)
    for name in ("decay and gradient, plain", "cyclic, plain"):
        arm = found[name]
        assert arm.deviations["spectrum"] < 0.3 * lr
        assert (arm.spectrum[-1] / arm.spectrum[0]).min() < 0.7  # there was something to predict


def test_the_law_of_small_steps_stands_beside_that_of_the_steps_taken():
    found = weight_decay_drift(layer(), lr=0.1, weight_decay=0.5, steps=40)
    arm = found["decay, plain"]
    t = arm.steps[:, None].double()
    assert torch.allclose(arm.limits["balance"], arm.balance[0] * torch.exp(-2 * 0.1 * 0.5 * t), rtol=1e-12)
    assert arm.deviations["balance"] < 1e-12 < 1e-3 < arm.limit_deviations["balance"] < 0.05
    cyclic = found["cyclic, plain"]  # 8 on, 8 off: the 16 steps of decay in 24 count
    assert torch.allclose(cyclic.limits["balance"][24], arm.limits["balance"][16])
    assert found["decay, constrained"].limits == {}


def test_deviations_leave_out_what_is_not_finite():
    one = torch.ones(2, 1)
    seen = {"balance": torch.tensor([[math.nan], [1.5]]), "query_condition": one * math.inf, "query_norm": 2 * one}
    off = deviations(seen, {"balance": 2 * one, "query_condition": one})
    assert off["balance"] == pytest.approx(0.25)
    assert math.isnan(off["query_condition"])
    # a prediction of 0 is held against the squared norm, of which the balance is made
    assert deviations(seen, {"balance": 0 * one})["balance"] == pytest.approx(1.5 / 4)


def test_a_rank_deficient_head_has_an_infinite_condition_number():
    state = {"q_proj.weight": torch.diag(torch.tensor([1.0, 0.0])), "k_proj.weight": torch.eye(2)}
    found = weight_decay_drift(state, lr=0.1, weight_decay=0.5, steps=4, num_heads=1)
    assert torch.isinf(found["decay, plain"].query_condition).all()
    assert math.isnan(found["decay, plain"].deviations["query_condition"])
    assert found["decay, plain"].deviations["spectrum"] < 1e-12
    assert "inf" in repr(found)


def test_the_result_fits_a_screen_and_comes_back_from_plain_values():
    found = weight_decay_drift(layer(), lr=0.1, weight_decay=0.3, steps=20)
    lines = repr(found).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 140
    again = WeightDecayDrift.from_dict(found.to_dict())
    assert repr(again) == repr(found)
    assert torch.equal(again["cyclic, plain"].limits["balance"], found["cyclic, plain"].limits["balance"])
    with pytest.raises(KeyError, match="no run 'gradient'"):
        found["gradient"]
