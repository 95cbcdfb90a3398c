"""Stacked, chunked and fused steps against the plain formula, one frame at a time."""

import copy

import pytest
import torch
from geodescent.manifolds import AlphaMetric, CanonicalMetric, ManifoldParameter, Polar, Stiefel
from geodescent.optim import RiemannianAdam, fused
from geodescent.optim.functional import riemannian_adam_step
from torch import nn

FUSED = [Stiefel(), Stiefel(CanonicalMetric()), Stiefel(AlphaMetric(0.7)), Stiefel(AlphaMetric(-0.8))]


def draw(shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def points(manifold, *shape, seed=0, dtype=torch.float64):
    return manifold.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def reference(manifold, x, grads, *, lr, amsgrad=False, trust_radius=1.0, step_scale="rms", maximize=False):
    """The functional step, with an SVD for the polar factor, on one frame."""
    n, p = x.shape
    exact = Stiefel(manifold.metric, Polar(method="exact"))
    m, v = torch.zeros(n, p, dtype=x.dtype), torch.zeros(1, 1, dtype=x.dtype)
    largest = torch.zeros_like(v) if amsgrad else None
    for i, g in enumerate(grads):
        step = riemannian_adam_step(
            exact,
            x,
            -g if maximize else g,
            m,
            v,
            largest,
            i + 1,
            lr=lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            second_moment="frame",
            step_scale=step_scale,
            trust_radius=trust_radius,
        )
        x, m, v, largest = step.x, step.exp_avg, step.exp_avg_sq, step.max_exp_avg_sq
    return x, m, v


@pytest.mark.parametrize("manifold", FUSED, ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-2},
        {"lr": 1e-2, "amsgrad": True, "maximize": True},
        {"lr": 0.3, "trust_radius": 0.4},  # capped
        {"lr": 2.0, "trust_radius": None},  # beyond the reach of the polynomial
        {"lr": 1e-2, "step_scale": "frobenius"},
    ],
    ids=str,
)
def test_the_fused_step_is_the_formula(manifold, options):
    shapes = [(9, 4), (2, 3, 9, 4), (9, 4), (4, 4), (5, 1), (1, 1)]
    starts = [points(manifold, *shape, seed=i) for i, shape in enumerate(shapes)]
    params = [ManifoldParameter(x.clone(), manifold) for x in starts]
    optimizer = RiemannianAdam(params, **options)
    grads = [draw((20, *shape), 50 + i) for i, shape in enumerate(shapes)]
    for step in range(20):
        for p, g in zip(params, grads, strict=True):
            p.grad = g[step].clone()
        optimizer.step()
    for p, x, g in zip(params, starts, grads, strict=True):
        n, k = x.shape[-2:]
        flat = zip(x.view(-1, n, k), g.view(20, -1, n, k).unbind(1), strict=True)
        expected = [reference(manifold, frame, history, **options) for frame, history in flat]
        for index, state in enumerate((p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])):
            wanted = torch.stack([e[index] for e in expected])
            # steps of many radians multiply rounding from one to the next
            tolerance = 1e-8 if options.get("trust_radius", 1.0) is None else 1e-10
            torch.testing.assert_close(state.reshape(wanted.shape), wanted, rtol=tolerance, atol=tolerance)


def test_chunks_that_cut_through_parameters_change_nothing(monkeypatch):
    manifold = Stiefel()
    shapes = [(3, 12, 4), (12, 4), (5, 12, 4)]

    def trajectory():
        params = [ManifoldParameter(points(manifold, *shape, seed=i), manifold) for i, shape in enumerate(shapes)]
        optimizer = RiemannianAdam(params, lr=1e-2, trust_radius=0.05)
        for step in range(6):
            for i, p in enumerate(params):
                p.grad = draw(p.shape, 10 * step + i)
                p.grad *= step % 2 + 1
            optimizer.step()
        capped = [float(optimizer.state[p]["capped"]) for p in params]
        return [p.detach().clone() for p in params], capped

    whole, capped = trajectory()
    assert sum(capped) > 0
    for frames in (1, 2, 4):
        monkeypatch.setitem(fused.CHUNK_ENTRIES, "cpu", 48 * frames)
        cut, cut_capped = trajectory()
        assert cut_capped == capped
        for a, b in zip(whole, cut, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_order_and_company_do_not_matter():
    manifold = Stiefel()
    shapes = [(6, 3), (4, 2), (2, 6, 3), (6, 3), (4, 2)]
    grads = [draw((5, *shape), i) for i, shape in enumerate(shapes)]

    def trajectory(order, together):
        params = [ManifoldParameter(points(manifold, *shape, seed=i), manifold) for i, shape in enumerate(shapes)]
        bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
        listed = [params[i] for i in order]
        optimizers = (
            [RiemannianAdam([*listed, bias], lr=0.05)] if together else [RiemannianAdam([p], lr=0.05) for p in listed]
        )
        for step in range(5):
            for p, g in zip(params, grads, strict=True):
                p.grad = g[step].clone()
            bias.grad = torch.ones(2, dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.step()
        return params

    alone = trajectory(range(5), together=False)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        for a, b in zip(alone, trajectory(order, together=True), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_parameters_may_come_and_go():
    """A parameter without gradient keeps its own count of steps, and its bias correction."""
    manifold = Stiefel()
    x = [points(manifold, 6, 3, seed=i) for i in range(2)]
    p, q = (ManifoldParameter(a.clone(), manifold) for a in x)
    optimizer = RiemannianAdam([p, q], lr=0.05)
    grads = draw((6, 6, 3), 3)
    for step, g in enumerate(grads):
        p.grad, q.grad = g.clone(), g.clone() if step % 2 else None
        optimizer.step()
    for parameter, start, mine in ((p, x[0], grads), (q, x[1], grads[1::2])):
        torch.testing.assert_close(parameter.detach(), reference(manifold, start, mine, lr=0.05)[0], rtol=0, atol=1e-13)
    assert [float(optimizer.state[a]["step"]) for a in (p, q)] == [6, 3]


def test_state_put_in_place_by_hand_is_used():
    manifold = Stiefel()
    p = ManifoldParameter(points(manifold, 6, 3), manifold)
    optimizer = RiemannianAdam([p], lr=0.05)
    history = draw((4, 6, 3), 1)
    for g in history[:2]:
        p.grad = g.clone()
        optimizer.step()
    saved = copy.deepcopy(dict(optimizer.state[p])), p.detach().clone()
    for g in history[2:]:
        p.grad = g.clone()
        optimizer.step()
    end = p.detach().clone()
    optimizer.state[p] = saved[0]
    p.detach().copy_(saved[1])
    for g in history[2:]:
        p.grad = g.clone()
        optimizer.step()
    assert torch.equal(p.detach(), end)


def test_strided_storage_stays_where_it_is():
    manifold = Stiefel()
    x = points(manifold, 4, 6, 3)
    backing = torch.zeros(3, 6, 8, dtype=torch.float64)
    strided = backing.permute(2, 1, 0)[::2]  # (4, 6, 3)
    strided.copy_(x)
    p, q = ManifoldParameter(strided, manifold), ManifoldParameter(x.clone(), manifold)
    pointer, strides = p.data_ptr(), p.stride()
    optimizers = [RiemannianAdam([p], lr=0.05), RiemannianAdam([q], lr=0.05)]
    for g in draw((3, 4, 6, 3), 1):
        p.grad, q.grad = g.clone(), g.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-14)
    assert (p.data_ptr(), p.stride()) == (pointer, strides)
    assert torch.equal(backing[:, :, ::2].permute(2, 1, 0), p.detach())
    assert not backing[:, :, 1::2].any()


@pytest.mark.parametrize("shape", [(64, 32), (32, 32)])
def test_rounding_does_not_add_up(shape):
    """2,000 float32 steps, long ones: the points stay as orthonormal as rounding allows, the moment as tangent."""
    manifold = Stiefel()
    p = ManifoldParameter(points(manifold, *shape, dtype=torch.float32), manifold)
    optimizer = RiemannianAdam([p], lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    target = draw(shape, 9, torch.float32)
    for _ in range(2000):
        p.grad = target + torch.randn(shape, generator=generator)
        optimizer.step()
        assert manifold.point_error(p.detach()) < 3e-6
    moment = optimizer.state[p]["exp_avg"]
    assert manifold.tangent_error(p.detach(), moment) < 2e-6 * float(moment.abs().max()) + 1e-6


@pytest.mark.parametrize("manifold", FUSED, ids=repr)
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-9), (torch.float32, 2e-3)], ids=str)
@pytest.mark.parametrize("tangent", [1.0, 0.2, 1e-3, 0.0])
def test_a_gradient_that_is_nearly_normal_keeps_its_own_length(manifold, dtype, accuracy, tangent):
    """G = XS + a small tangent part, as near a minimum: ‖ξ‖² = ‖G‖² − ‖XS‖² would lose all digits."""
    x = points(manifold, 3, 12, 4, dtype=torch.float64)
    s = draw((3, 4, 4), 1)
    xi = manifold.random_tangent(x, generator=torch.Generator().manual_seed(2))
    # the ambient gradient whose Riemannian gradient is ``tangent`` times xi, by the definition of the Riesz representer
    basis = manifold.tangent_basis(x)
    riesz = manifold.inner(x[:, None], basis, xi[:, None])  # <b, xi> = <b, G>_F for all tangent b
    gram = (basis.flatten(-2) @ basis.flatten(-2).mT).double()
    lift = torch.linalg.lstsq(gram, riesz[..., None]).solution
    g = x @ (s + s.mT) + tangent * (basis * lift[..., None]).sum(1)
    p = ManifoldParameter(x.to(dtype), manifold, project=True)
    optimizer = RiemannianAdam([p], lr=1e-3, step_scale="frobenius")
    p.grad = g.to(dtype)
    optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"].flatten().double()
    expected = torch.full((3,), 1e-3 * tangent**2, dtype=torch.float64)
    # the tangent part itself is rounded with G: ‖XS‖·eps beside ``tangent``
    noise = 1e-3 * (20 * torch.finfo(dtype).eps * g.norm(dim=(-2, -1)).max()) ** 2
    torch.testing.assert_close(v, expected, rtol=accuracy, atol=float(noise))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batched", [False, True])
def test_many_half_precision_frames_are_stepped_in_float32(dtype, batched):
    """More entries than are gathered at once: lengths of gradients are taken in float32 there too."""
    start = points(Stiefel(), 80, 128, 64, dtype=torch.float32)
    grads = draw((3, *start.shape), 3, torch.float32).to(dtype)

    parts = [start] if batched else list(start)
    half = [ManifoldParameter(part.to(dtype), Stiefel(), project=True) for part in parts]
    single = [ManifoldParameter(Stiefel().project_point(p.detach().float()), Stiefel()) for p in half]
    optimizers = [RiemannianAdam(half, lr=1e-3), RiemannianAdam(single, lr=1e-3)]
    for g in grads:
        for params, cast in ((half, dtype), (single, torch.float32)):
            for p, part in zip(params, [g] if batched else list(g), strict=True):
                p.grad = part.to(cast)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(half, single, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizers[0].state[p][key], optimizers[1].state[q][key], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(optimizers[0].state[p]["master"], q.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("manifold", FUSED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 4), (4, 4), (64, 16)], ids=str)
def test_gradients_that_stay_normal_do_not_lead_off_the_manifold(manifold, dtype, shape):
    """G = XS throughout: gradient and moment are rounding, which Adam divides by its own length."""
    x = points(manifold, *shape, dtype=dtype)
    s = draw((shape[1], shape[1]), 1, dtype)
    s = s + s.mT
    p = ManifoldParameter(x, manifold)
    optimizer = RiemannianAdam([p], lr=1e-2, eps=0.0)
    size = float(s.abs().sum())
    for _ in range(60):
        p.grad = p.detach() @ s
        optimizer.step()
    eps = torch.finfo(dtype).eps
    assert manifold.point_error(p.detach()).max() < 40 * eps
    # as tangent as a gradient that is rounded can be
    assert manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"]).max() < 4 * eps * size


@pytest.mark.parametrize("manifold", FUSED, ids=repr)
def test_a_frame_that_somebody_wrote_to_gets_its_gradients_own_length(manifold):
    """The moment is tangent at the old point; what of it is normal at the new one must not enter the second moment."""
    p = ManifoldParameter(points(manifold, 9, 4), manifold)
    optimizer = RiemannianAdam([p], lr=1e-2)
    for seed in range(3):
        p.grad = draw((9, 4), seed)
        optimizer.step()
    v = float(optimizer.state[p]["exp_avg_sq"])
    with torch.no_grad():
        p.copy_(points(manifold, 9, 4, seed=7))
    p.grad = 1e-3 * draw((9, 4), 5)
    xi = manifold.egrad_to_rgrad(p.detach(), p.grad)
    expected = 0.999 * v + 0.001 * float(manifold.inner(p.detach(), xi, xi)) / 36
    optimizer.step()
    assert float(optimizer.state[p]["exp_avg_sq"]) == pytest.approx(expected, rel=1e-12)
    assert manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"]) < 1e-14
