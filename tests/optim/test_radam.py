import copy
import io
import math
import warnings

import geoopt
import pytest
import torch
from geodescent.manifolds import (
    QR,
    CanonicalMetric,
    Cayley,
    Exponential,
    ManifoldParameter,
    NotOnManifoldError,
    Polar,
    Stiefel,
)
from geodescent.optim import RiemannianAdam
from torch import nn

SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.5, 0.6), "eps": 1e-3},
    {"foreach": False, "amsgrad": True, "weight_decay": 0.1},
    {"lr": torch.tensor(3e-2, dtype=torch.float64), "foreach": False},
]


def frame(*shape, seed=0, manifold=None, dtype=torch.float64):
    manifold = Stiefel() if manifold is None else manifold
    x = manifold.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return ManifoldParameter(x, manifold)


def gradients(shape, count, seed=1, dtype=torch.float64):
    return torch.randn(count, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def run(optimizer, parameter, grads):
    trajectory = []
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
        trajectory.append(parameter.detach().clone())
    return torch.stack(trajectory)


# --- against peers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("shape", [(10, 4), (4, 4), (3, 10, 4), (5, 1)])
def test_agrees_with_geoopt_over_100_steps(shape, amsgrad):
    ours = frame(*shape, manifold=Stiefel(retraction=QR()))
    euclidean = geoopt.EuclideanStiefel()
    theirs = geoopt.ManifoldParameter(ours.detach().clone(), euclidean)  # pyright: ignore[reportArgumentType]
    a = gradients((shape[-2], shape[-2]), 1)[0]
    weights = torch.arange(1, shape[-1] + 1, dtype=torch.float64)
    optimizers = [
        (ours, RiemannianAdam([ours], lr=0.05, step_scale="frobenius", trust_radius=None, amsgrad=amsgrad)),
        (theirs, geoopt.optim.RiemannianAdam([theirs], lr=0.05, amsgrad=amsgrad)),
    ]
    start = ours.detach().clone()
    for _ in range(100):
        for p, optimizer in optimizers:
            optimizer.zero_grad()
            (p * ((a + a.mT) @ p) * weights).sum().backward()
            optimizer.step()
        assert (ours - theirs).abs().max() < 1e-12
    assert (ours - start).abs().max() > 0.1


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_plain_parameters_take_adamws_steps(options):
    shapes = [(3,), (4, 5), ()]
    ours = [nn.Parameter(gradients(s, 1, seed=7)[0]) for s in shapes]
    theirs = copy.deepcopy(ours)
    options = {"lr": 1e-2, "weight_decay": 0.0, **options}
    mine, adamw = RiemannianAdam([*ours, frame(5, 3)], **options), torch.optim.AdamW(theirs, **options)
    for step in range(20):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = gradients(p.shape, 1, seed=100 * step + i)[0]
            q.grad = p.grad.clone()
        mine.step()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert float(mine.state[p]["step"]) == float(adamw.state[q]["step"]) == 20
        for key in adamw.state[q]:
            assert torch.equal(mine.state[p][key], adamw.state[q][key])


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_an_elementwise_step_along_the_sphere_is_a_projected_adam_step(options):
    """Independent value for the "element" moment: torch's Adam on the Riemannian gradient, projected, normalized."""
    p = frame(6, 1)
    plain = nn.Parameter(p.detach().clone())
    adam = torch.optim.Adam([plain], lr=1e-2, **options)
    optimizer = RiemannianAdam([p], lr=1e-2, second_moment="element", trust_radius=None, **options)
    (g,) = gradients((6, 1), 1)
    x = p.detach().clone()
    plain.grad = g - x * (x * g).sum()
    adam.step()
    (y,) = run(optimizer, p, [g])
    direction = plain.detach() - x
    direction = direction - x * (x * direction).sum()
    torch.testing.assert_close(y, (x + direction) / (x + direction).norm(), rtol=0, atol=1e-14)


# --- scale and trust radius ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("second_moment", ["frame", "column"])
def test_rms_scale_moves_an_element_by_about_lr(second_moment):
    m = Stiefel()
    p = frame(40, 10)
    x = p.detach().clone()
    (y,) = run(RiemannianAdam([p], lr=1e-3, eps=0, second_moment=second_moment), p, gradients((40, 10), 1))
    step = m.inverse_retract(x, y)
    # a scalar moment makes the root mean square of the step lr to rounding; columns differ a little from projection
    rms = float(step.pow(2).mean().sqrt())
    assert rms == pytest.approx(1e-3, rel=1e-10 if second_moment == "frame" else 0.1)


@pytest.mark.parametrize("metric_manifold", [Stiefel(), Stiefel(CanonicalMetric(), Cayley())], ids=repr)
def test_frobenius_scale_moves_a_frame_by_lr_in_the_metric(metric_manifold):
    p = frame(40, 10, manifold=metric_manifold)
    x = p.detach().clone()
    (y,) = run(RiemannianAdam([p], lr=0.1, eps=0, step_scale="frobenius"), p, gradients((40, 10), 1))
    step = metric_manifold.inverse_retract(x, y)
    assert float(metric_manifold.norm(x, step)) == pytest.approx(0.1, rel=1e-12)


def test_first_step_is_against_the_riemannian_gradient():
    m = Stiefel(CanonicalMetric(), Cayley())
    p = frame(8, 3, manifold=m)
    x, g = p.detach().clone(), gradients((8, 3), 1)[0]
    (y,) = run(RiemannianAdam([p], lr=1e-2), p, [g])
    step, xi = m.inverse_retract(x, y), m.egrad_to_rgrad(x, g)
    assert float(m.inner(x, step, xi) / m.norm(x, step) / m.norm(x, xi)) == pytest.approx(-1, abs=1e-12)


def test_trust_radius_bounds_each_frame_by_itself_and_is_counted():
    m = Stiefel()
    p = frame(2, 30, 10)
    x, g = p.detach().clone(), gradients((2, 30, 10), 1)[0]
    optimizer = RiemannianAdam([p], lr=1.0, trust_radius=0.25, betas=(0.9, 0.999))
    assert math.isnan(optimizer.capped_fraction())
    g[1] = 0
    (y,) = run(optimizer, p, [g])
    step = m.inverse_retract(x, y)
    torch.testing.assert_close(m.norm(x, step), torch.tensor([0.25, 0.0], dtype=torch.float64), rtol=0, atol=1e-14)
    assert optimizer.capped_fraction() == 0.5
    assert float(optimizer.state[p]["capped"]) == 1


@pytest.mark.parametrize("second_moment", ["frame", "column", "element"])
def test_steps_do_not_depend_on_the_scale_of_the_gradients(second_moment):
    grads = gradients((3, 6, 4), 8)
    runs = []
    for scale in (1.0, 1e-6, 1e6):
        p = frame(3, 6, 4)
        runs.append(run(RiemannianAdam([p], lr=1e-2, eps=0, second_moment=second_moment), p, scale * grads))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(runs[2], runs[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("second_moment", "holds"), [("frame", True), ("column", True), ("element", False)])
def test_equivariance(second_moment, holds):
    q = Stiefel().random_point(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = gradients((6, 4), 8)
    p, r = frame(6, 4), frame(6, 4)
    r.detach().copy_(q @ r.detach())
    options = {"lr": 1e-2, "eps": 0, "second_moment": second_moment}
    difference = run(RiemannianAdam([r], **options), r, q @ grads) - q @ run(RiemannianAdam([p], **options), p, grads)
    assert (float(difference.abs().max()) < 1e-12) == holds


def test_heads_do_not_touch_one_another():
    grads = gradients((2, 6, 3), 5)
    louder = grads * torch.tensor([100.0, 1.0], dtype=torch.float64)[:, None, None]
    p, q = frame(2, 6, 3), frame(2, 6, 3)
    a = run(RiemannianAdam([p], lr=1e-2), p, grads)
    b = run(RiemannianAdam([q], lr=1e-2), q, louder)
    assert torch.equal(a[:, 1], b[:, 1])


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifold", [Stiefel(), Stiefel(CanonicalMetric(), Cayley()), Stiefel(retraction=QR())])
@pytest.mark.parametrize("second_moment", ["frame", "column", "element"])
def test_moment_is_tangent_and_point_on_the_manifold_after_every_step(manifold, second_moment):
    p = frame(2, 5, 3, manifold=manifold, dtype=torch.float32)
    optimizer = RiemannianAdam([p], lr=0.1, second_moment=second_moment)
    for g in gradients((2, 5, 3), 20, dtype=torch.float32):
        run(optimizer, p, [g])
        assert manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"]).max() < 1e-6
        assert manifold.point_error(p.detach()).max() < 2e-6


def test_state_is_one_moment_and_a_scalar_a_frame():
    p = frame(4, 6, 3)
    optimizer = RiemannianAdam([p])
    run(optimizer, p, gradients((4, 6, 3), 1))
    assert {k: tuple(v.shape) for k, v in optimizer.state[p].items()} == {
        "step": (),
        "exp_avg": (4, 6, 3),
        "exp_avg_sq": (4, 1, 1),
        "capped": (),
    }


def test_momentum_makes_a_difference():
    grads = gradients((5, 3), 3)
    p, q = frame(5, 3), frame(5, 3)
    a = run(RiemannianAdam([p], betas=(0.0, 0.999)), p, grads)
    b = run(RiemannianAdam([q], betas=(0.9, 0.999)), q, grads)
    assert (a - b).abs().max() > 1e-4


def test_amsgrad_keeps_a_running_maximum():
    p = frame(5, 3)
    optimizer = RiemannianAdam([p], amsgrad=True, betas=(0.9, 0.5))
    before, state = torch.zeros(1, 1, dtype=torch.float64), {}
    for g in [*gradients((5, 3), 3), *(0.01 * gradients((5, 3), 5))]:
        run(optimizer, p, [g])
        state = optimizer.state[p]
        assert (state["max_exp_avg_sq"] >= torch.maximum(before, state["exp_avg_sq"])).all()
        before = state["max_exp_avg_sq"].clone()
    assert (state["max_exp_avg_sq"] > 2 * state["exp_avg_sq"]).all()


@pytest.mark.parametrize("weights_only", [True, False])
def test_resuming_is_bitwise_the_same(weights_only):
    grads = gradients((2, 6, 3), 10)
    p, b = frame(2, 6, 3), nn.Parameter(torch.ones(3, dtype=torch.float64))

    def steps(optimizer, p, b, grads):
        for g in grads:
            p.grad, b.grad = g.clone(), g[0, 0].clone()
            optimizer.step()

    optimizer = RiemannianAdam([p, b], lr=1e-2, amsgrad=True)
    steps(optimizer, p, b, grads[:5])
    file = io.BytesIO()
    torch.save({"model": [p.detach(), b.detach()], "optimizer": optimizer.state_dict()}, file)
    steps(optimizer, p, b, grads[5:])

    file.seek(0)
    saved = torch.load(file, weights_only=weights_only)
    p2 = ManifoldParameter(saved["model"][0], Stiefel())
    b2 = nn.Parameter(saved["model"][1])
    resumed = RiemannianAdam([p2, b2], lr=1e-2, amsgrad=True)
    resumed.load_state_dict(saved["optimizer"])
    steps(resumed, p2, b2, grads[5:])
    assert torch.equal(p, p2)
    assert torch.equal(b, b2)
    assert resumed.capped_fraction() == optimizer.capped_fraction()


def test_weight_decay_has_no_effect_on_a_frame_and_says_so():
    grads = gradients((5, 3), 20)
    p, q, r = frame(5, 3), frame(5, 3), frame(5, 3)
    with pytest.warns(UserWarning, match="no effect") as caught:
        decayed = RiemannianAdam([p], weight_decay=10.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    plain = RiemannianAdam([q])
    a, b = run(decayed, p, grads), run(plain, q, grads)
    assert torch.equal(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RiemannianAdam([r, nn.Parameter(torch.ones(2))], weight_decay=0.1)
        RiemannianAdam([{"params": [r]}, {"params": [nn.Parameter(torch.ones(2))]}], weight_decay=0.1)


# --- torch.optim conventions --------------------------------------------------------------------------------------


def test_gradients_are_not_written_to_and_storage_is_kept():
    p, b = frame(2, 5, 3), nn.Parameter(torch.ones(2, dtype=torch.float64))
    pointer, version = p.data_ptr(), type(p)
    optimizer = RiemannianAdam([p, b], weight_decay=0.5, maximize=True)
    p.grad, b.grad = gradients((2, 5, 3), 1)[0], torch.ones(2, dtype=torch.float64)
    before = p.grad.clone(), b.grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, before[0])
    assert torch.equal(b.grad, before[1])
    assert p.data_ptr() == pointer
    assert type(p) is version


def test_closure_runs_first_once_and_with_gradients():
    p, q = frame(5, 3), frame(5, 3)
    a = gradients((5, 3), 1)[0]
    mine, twin = RiemannianAdam([p], lr=0.1), RiemannianAdam([q], lr=0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        mine.zero_grad()
        loss = (p * a).sum()
        loss.backward()
        return loss

    expected = (q * a).sum()
    expected.backward()
    twin.step()
    loss = mine.step(closure)
    assert calls == [True]
    assert torch.equal(loss, expected)
    assert torch.equal(p, q)


def test_groups_keep_their_own_options_and_name_manifolds():
    x = frame(5, 3)
    for order in (1, -1):
        wrapped = nn.Parameter(x.detach().clone())  # as a wrapper that drops the subclass leaves it
        p, twin = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.float64))
        groups = [{"params": [p], "weight_decay": 0.1}, {"params": [wrapped], "manifold": Stiefel(), "lr": 0.1}]
        optimizer = RiemannianAdam(groups[::order], lr=1e-2)
        adamw = torch.optim.AdamW([twin], lr=1e-2, weight_decay=0.1)
        alone = frame(5, 3)
        g = gradients((5, 3), 1)[0]
        wrapped.grad, p.grad, twin.grad = g, g[0].clone(), g[0].clone()
        optimizer.step()
        adamw.step()
        assert torch.equal(p, twin)
        assert torch.equal(wrapped, run(RiemannianAdam([alone], lr=0.1), alone, [g])[0])


def test_parameters_without_gradient_are_left_alone():
    p, q = frame(5, 3), frame(5, 3, seed=3)
    optimizer = RiemannianAdam([p, q])
    before = q.detach().clone()
    run(optimizer, p, gradients((5, 3), 2))
    assert torch.equal(q, before)
    assert q not in optimizer.state


def test_schedulers_and_tensor_lr():
    p, lr = frame(5, 3), torch.ones(())
    optimizer = RiemannianAdam([p], lr=lr, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    for g in gradients((5, 3), 4):
        run(optimizer, p, [g])
        scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == 0.5


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_zero_gradients_leave_everything_in_place(eps):
    p = frame(2, 5, 3)
    before = p.detach().clone()
    optimizer = RiemannianAdam([p], lr=0.1, eps=eps)
    run(optimizer, p, torch.zeros(5, 2, 5, 3, dtype=torch.float64))
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=1e-15)
    g = gradients((2, 5, 3), 1)[0]
    g[0] = 0
    run(optimizer, p, [g])
    torch.testing.assert_close(p[0].detach(), before[0], rtol=0, atol=1e-15)
    assert torch.isfinite(p).all()
    assert not torch.equal(p[1], before[1])


@pytest.mark.parametrize("shape", [(0, 4, 2), (1, 0, 2, 4, 2)])
def test_empty_batches_of_frames(shape):
    p = frame(*shape)
    assert run(RiemannianAdam([p]), p, gradients(shape, 2)).shape == (2, *shape)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("culprit", ["frame", "bias"])
def test_nonfinite_gradient_names_the_parameter_and_changes_nothing(bad, culprit):
    p, b = frame(2, 5, 3), nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = RiemannianAdam([("frame", p), ("bias", b)])
    p.grad, b.grad = gradients((2, 5, 3), 1)[0], torch.ones(4, dtype=torch.float64)
    optimizer.step()
    spoiled = p.grad if culprit == "frame" else b.grad
    spoiled.view(-1)[1] = bad
    before = copy.deepcopy([p.detach(), b.detach(), optimizer.state_dict()["state"]])
    with pytest.raises(ValueError, match=f"gradient of parameter '{culprit}' has 1 NaN or infinite entries"):
        optimizer.step()
    for _ in range(2):
        after = [p.detach(), b.detach(), optimizer.state_dict()["state"]]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        for group in optimizer.param_groups:  # the other policy: skip
            group["nonfinite"] = "skip"
        optimizer.step()


def test_unnamed_parameters_are_named_by_place():
    p = frame(5, 3)
    optimizer = RiemannianAdam([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [p]}])
    p.grad = torch.full((5, 3), float("nan"), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"parameter 0 of group 1, of shape \(5, 3\), has 15 NaN"):
        optimizer.step()


@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley(), Exponential()], ids=repr)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("size", [1e25, 1e30, 2e38])
def test_a_finite_gradient_that_overflows_changes_nothing(retraction, amsgrad, size):
    p, q = (frame(5, 3, seed=s, manifold=Stiefel(retraction=retraction), dtype=torch.float32) for s in (0, 1))
    optimizer = RiemannianAdam([("q", q), ("p", p)], lr=0.1, amsgrad=amsgrad)
    for spoiled in (False, True):
        before = copy.deepcopy([p.detach(), q.detach(), optimizer.state_dict()["state"]])
        q.grad = gradients((5, 3), 1, dtype=torch.float32)[0]
        p.grad = size * torch.sign(q.grad) if spoiled else q.grad.clone()
        if not spoiled:
            optimizer.step()
    with pytest.raises(ValueError, match=r"the step of parameter 'p' overflows torch\.float32.* up to"):
        optimizer.step()
    optimizer.param_groups[0]["nonfinite"] = "skip"
    optimizer.step()
    after = [p.detach(), q.detach(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_raise_in_one_group_is_not_overruled_by_skip_in_another():
    p, q = frame(5, 3), frame(5, 3, seed=1)
    optimizer = RiemannianAdam([{"params": [p], "nonfinite": "skip"}, {"params": [q]}])
    p.grad = q.grad = torch.full((5, 3), float("nan"), dtype=torch.float64)
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        optimizer.step()


def test_frames_made_half_precision_later_are_stepped_in_float32():
    layer = torch.nn.Module()
    layer.weight = frame(8, 4, dtype=torch.float32)
    optimizer = RiemannianAdam(layer.parameters())
    run(optimizer, layer.weight, gradients((8, 4), 1, dtype=torch.float32))
    layer.bfloat16()
    run(optimizer, layer.weight, gradients((8, 4), 1, dtype=torch.bfloat16))
    state = optimizer.state[layer.weight]
    assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
    assert state["step"] == 2
    assert Stiefel().point_error(state["master"]) < 1e-6


def test_a_step_within_autocast_is_the_same_step():
    grads = gradients((3, 64, 16), 5, dtype=torch.float32)
    p, q = (frame(3, 64, 16, dtype=torch.float32) for _ in range(2))
    a = run(RiemannianAdam([p], lr=1e-2), p, grads)
    with torch.autocast("cpu", torch.bfloat16):
        b = run(RiemannianAdam([q], lr=1e-2), q, grads)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capturable": True}, 'nonfinite must be "skip"'),
        ({"lr": -1.0}, "lr must be a finite number of at least 0, found -1"),
        ({"lr": float("nan")}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"trust_radius": 0.0}, "trust_radius must be a positive number, or None"),
        ({"second_moment": "head"}, "second_moment must be one of 'frame', 'column', 'element', 'gram', found 'head'"),
        ({"step_scale": "adam"}, "step_scale must be one of 'rms', 'frobenius'"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"decay": "l2"}, "decay must be one of"),
        ({"decay": "fused", "lr": 0.1, "weight_decay": 10.0}, "weight_decay must be below 1/lr"),
        ({"second_moment": "gram", "amsgrad": True}, "amsgrad must be False"),
        ({"pool": True}, 'pool=True needs second_moment="gram"'),
    ],
    ids=str,
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RiemannianAdam([frame(5, 3)], **options)


def test_an_off_manifold_start_is_refused_before_the_first_step():
    p = frame(5, 3)
    p.detach().mul_(2)
    with pytest.raises(NotOnManifoldError, match=r"parameter 'w' is not on .* point error is 3"):
        RiemannianAdam([("w", p)])
    optimizer = RiemannianAdam([nn.Parameter(torch.ones(2))])
    with pytest.raises(NotOnManifoldError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3, 2))], "manifold": Stiefel()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_frames_follow_float32_ones(dtype):
    """Steps far below the rounding of the frame add up in its float32 copy."""
    grads = gradients((64, 64), 40, dtype=torch.float32)
    start = frame(64, 64, dtype=dtype)
    twin = ManifoldParameter(start.detach().float(), Stiefel(), project=True)
    a = run(RiemannianAdam([start], lr=1e-4), start, grads.to(dtype))[-1]
    b = run(RiemannianAdam([twin], lr=1e-4), twin, grads.to(dtype).float())[-1]
    assert torch.equal(a, b.to(dtype))
    assert not torch.equal(a, frame(64, 64, dtype=dtype))


def test_half_precision_frames_that_are_written_to_are_followed():
    p = frame(6, 3, dtype=torch.bfloat16)
    optimizer = RiemannianAdam([p], lr=1e-3)
    run(optimizer, p, gradients((6, 3), 2, dtype=torch.bfloat16))
    other = frame(6, 3, seed=5, dtype=torch.bfloat16)
    p.data.copy_(other.data)
    run(optimizer, p, gradients((6, 3), 1, dtype=torch.bfloat16))
    assert (p.float() - other.float()).norm() < 0.1


def test_plain_half_precision_is_warned_about_once():
    with pytest.warns(UserWarning, match="2 plain parameters are torch.bfloat16") as caught:
        RiemannianAdam([nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)])
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_gradient_of_another_dtype_is_cast():
    # torch lets a gradient of another dtype be assigned only through grad_dtype; the step casts either way
    p = frame(5, 3, dtype=torch.float32)
    p.grad_dtype = torch.float64
    optimizer = RiemannianAdam([p])
    p.grad = gradients((5, 3), 1)[0]
    optimizer.step()
    assert p.dtype == optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_sparse_gradients_are_refused():
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        RiemannianAdam([p]).step()


def test_claims_follow_the_second_moment():
    full = {"steepest descent", "scale-free", "conditioning", "equivariance", "weight decay", "gauge covariance"}
    without = {
        "frame": set(),
        "column": {"steepest descent", "gauge covariance"},
        "element": {"steepest descent", "gauge covariance", "equivariance"},
        "gram": {"steepest descent"},
    }
    for second_moment, missing in without.items():
        assert RiemannianAdam([frame(5, 3)], second_moment=second_moment).claims == full - missing
    fused = RiemannianAdam([frame(5, 3)], decay="fused", weight_decay=0.1)
    assert fused.claims == full - {"weight decay"}
    assert RiemannianAdam([frame(5, 3, manifold=Stiefel(retraction=QR()))]).claims == full - {"gauge covariance"}


# --- Gram second moment, fused decay ------------------------------------------------------------------------------


def test_a_gram_second_moment_is_covariant_under_a_change_of_basis():
    r = Stiefel().random_point(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    grads = gradients((7, 3), 6)
    for second_moment, holds in (("gram", True), ("frame", True), ("column", False), ("element", False)):
        p = frame(7, 3)
        q = ManifoldParameter(p.detach() @ r, Stiefel())
        a = run(RiemannianAdam([p], lr=1e-2, eps=0, second_moment=second_moment), p, grads)
        b = run(RiemannianAdam([q], lr=1e-2, eps=0, second_moment=second_moment), q, grads @ r)
        assert (float((b - a @ r).abs().max()) < 1e-11) == holds, second_moment


def test_the_first_step_of_a_gram_moment_whitens_the_gradient():
    """ξ(ξᵀξ)^(−1/2) is the polar factor of ξ, here from an SVD."""
    m, p = Stiefel(), frame(9, 4)
    x, (g,) = p.detach().clone(), gradients((9, 4), 1)
    u, _, vh = torch.linalg.svd(m.project(x, g), full_matrices=False)
    (y,) = run(RiemannianAdam([p], lr=1e-2, eps=0, second_moment="gram", trust_radius=None), p, [g])
    expected = -1e-2 * 9**0.5 * m.project(x, u @ vh)
    torch.testing.assert_close(m.inverse_retract(x, y), expected, rtol=0, atol=1e-12)


def test_pooled_frames_share_a_gram_moment_head_by_head():
    q, k = frame(2, 6, 3), frame(2, 6, 3, seed=1)
    optimizer = RiemannianAdam([{"params": [q, k], "pool": True}], second_moment="gram", betas=(0.9, 0.5))
    m, grads = Stiefel(), gradients((2, 2, 6, 3), 1)[0]
    xi = m.project(torch.stack([q.detach(), k.detach()]), grads)
    q.grad, k.grad = grads[0].clone(), grads[1].clone()
    optimizer.step()
    expected = 0.5 * (xi.mT @ xi).mean(0) / 6
    for p in (q, k):
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], expected, rtol=0, atol=1e-14)


def test_pooling_survives_a_rank_deficient_gradient():
    p = frame(6, 3)
    g = gradients((6, 1), 1)[0] @ gradients((1, 3), 1, seed=2)[0]
    (y,) = run(RiemannianAdam([p], lr=1e-2, eps=0, second_moment="gram"), p, [g])
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("options", [{}, {"second_moment": "column"}, {"trust_radius": 0.1}], ids=str)
def test_fused_decay_is_a_larger_learning_rate(options):
    """polar((1 − lr·λ)x + η) = polar(x + η/(1 − lr·λ)): decay 5 at lr 0.1 is lr 0.2."""
    grads = gradients((6, 3), 5)
    p, q = frame(6, 3), frame(6, 3)
    a = run(RiemannianAdam([p], lr=0.1, weight_decay=5.0, decay="fused", **options), p, grads)
    b = run(RiemannianAdam([q], lr=0.2, **options), q, grads)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_fused_decay_is_the_nearest_point_to_the_decayed_step():
    m, p = Stiefel(), frame(6, 3)
    x, grads = p.detach().clone(), gradients((6, 3), 1)
    (y,) = run(RiemannianAdam([p], lr=0.01, weight_decay=5.0, decay="fused"), p, grads)
    plain = frame(6, 3)
    (z,) = run(RiemannianAdam([plain], lr=0.01), plain, grads)
    decayed = 0.95 * x + m.inverse_retract(x, z)
    torch.testing.assert_close(y, m.project_point(decayed), rtol=0, atol=1e-12)
