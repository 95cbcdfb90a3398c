import copy

import pytest
import torch
from geodescent.manifolds import QR, CanonicalMetric, Cayley, ManifoldParameter, Sphere, Stiefel
from geodescent.optim import RiemannianSGD
from torch import nn

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]


def gradients(shape, count, seed=1):
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def frame(*shape, seed=0, manifold=None):
    manifold = Stiefel() if manifold is None else manifold
    generator = torch.Generator().manual_seed(seed)
    return ManifoldParameter(manifold.random_point(*shape, dtype=torch.float64, generator=generator), manifold)


def run(optimizer, parameter, grads):
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_plain_parameters_take_torchs_steps(options):
    ours = [nn.Parameter(gradients(shape, 1, seed=7)[0]) for shape in [(3,), (4, 5), ()]]
    theirs = copy.deepcopy(ours)
    mine, sgd = RiemannianSGD([*ours, frame(5, 3)], lr=0.1, **options), torch.optim.SGD(theirs, lr=0.1, **options)
    for step in range(10):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = gradients(p.shape, 1, seed=100 * step + i)[0]
            q.grad = p.grad.clone()
        mine.step()
        sgd.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_two_steps_with_momentum_have_the_textbook_values():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = RiemannianSGD([p], lr=0.1, momentum=0.9)
    ones = torch.ones(1, 1, dtype=torch.float64)
    assert float(run(optimizer, p, ones)) == pytest.approx(-0.1, abs=1e-15)
    assert float(run(optimizer, p, ones)) == pytest.approx(-0.29, abs=1e-15)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_a_frame_too_small_to_curve_steps_as_torch_steps_its_tangent_vector(options):
    """On a short scale a manifold is flat: the path in the first tangent space is torch's with projected gradients."""
    x, (g,) = frame(6, 3), gradients((6, 3), 1)
    start, m = x.detach().clone(), Stiefel()
    flat = nn.Parameter(torch.zeros(6, 3, dtype=torch.float64))
    optimizer, sgd = RiemannianSGD([x], lr=1e-6, **options), torch.optim.SGD([flat], lr=1e-6, **options)
    for _ in range(4):
        x.grad, flat.grad = g.clone(), m.project(start, g)
        optimizer.step()
        sgd.step()
    torch.testing.assert_close(x - start, flat, rtol=1e-4, atol=2e-9)


@pytest.mark.parametrize(
    "manifold", [Stiefel(), Stiefel(CanonicalMetric(), Cayley()), Stiefel(retraction=QR())], ids=repr
)
def test_the_momentum_is_tangent_and_the_first_step_steepest(manifold):
    p = frame(2, 5, 3, manifold=manifold)
    optimizer = RiemannianSGD([p], lr=0.05, momentum=0.9)
    before = p.detach().clone()
    (g, *rest) = gradients((2, 5, 3), 6)
    after = run(optimizer, p, [g])
    step, xi = manifold.inverse_retract(before, after), manifold.egrad_to_rgrad(before, g)
    torch.testing.assert_close(step, -0.05 * xi, rtol=0, atol=1e-12)
    for g in rest:
        run(optimizer, p, [g])
        assert manifold.tangent_error(p.detach(), optimizer.state[p]["momentum_buffer"]).max() < 1e-12
        assert manifold.point_error(p.detach()).max() < 1e-13


def test_steps_are_of_degree_one_until_the_trust_radius():
    m, (g,) = Stiefel(), gradients((6, 3), 1)
    lengths = []
    for scale in (1.0, 3.0, 1e6):
        p = frame(6, 3)
        before = p.detach().clone()
        optimizer = RiemannianSGD([p], lr=0.01, trust_radius=0.5)
        lengths.append(float(m.norm(before, m.inverse_retract(before, run(optimizer, p, [scale * g])))))
    assert lengths[1] == pytest.approx(3 * lengths[0], rel=1e-10)
    assert lengths[2] == pytest.approx(0.5, rel=1e-12)
    assert optimizer.capped_fraction() == 1.0


def test_weight_decay_does_not_touch_a_frame():
    p, q = frame(5, 3), frame(5, 3)
    with pytest.warns(UserWarning, match="no effect"):
        decayed = RiemannianSGD([p], lr=0.1, momentum=0.9, weight_decay=10.0)
    grads = gradients((5, 3), 5)
    assert torch.equal(run(decayed, p, grads), run(RiemannianSGD([q], lr=0.1, momentum=0.9), q, grads))


def test_it_descends_to_the_dominant_subspace():
    a = torch.diag(torch.arange(8.0, 0.0, -1.0, dtype=torch.float64))
    p = frame(8, 2)
    optimizer = RiemannianSGD([p], lr=0.1, momentum=0.5)
    for _ in range(300):
        optimizer.zero_grad()
        (-(p * (a @ p)).sum() / 2).backward()
        optimizer.step()
    assert float((p * (a @ p)).sum().detach()) == pytest.approx(15.0, abs=1e-9)  # the two largest eigenvalues, 8 + 7


def test_options_that_do_not_go_together_are_named():
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        RiemannianSGD([frame(5, 3)], lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="momentum must be"):
        RiemannianSGD([frame(5, 3)], lr=0.1, momentum=-0.5)
    with pytest.raises(ValueError, match="points that are matrices"):
        RiemannianSGD([ManifoldParameter(torch.eye(3)[0], Sphere())], lr=0.1)


def test_a_copy_of_the_optimizer_goes_on_alike():
    p = frame(5, 3)
    optimizer = RiemannianSGD([p], lr=0.1, momentum=0.9)
    grads = gradients((5, 3), 4)
    run(optimizer, p, grads[:2])
    twin, q = copy.deepcopy((optimizer, p))
    assert torch.equal(run(optimizer, p, grads[2:]), run(twin, q, grads[2:]))
