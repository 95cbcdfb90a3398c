import math

import geoopt
import mpmath
import numpy as np
import pymanopt.manifolds
import pytest
import torch
from geodescent.manifolds import (
    AlphaMetric,
    CanonicalMetric,
    EuclideanMetric,
    Exponential,
    LogNotConvergedError,
    ParallelTransport,
    Stiefel,
)
from geodescent.manifolds import geodesics as formulas
from torch.autograd import gradcheck

ALPHAS = [-0.75, -0.5, -0.25, 0.0, 0.5, 2.0]
SHAPES = [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3)]
J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)


def manifold(alpha: float) -> Stiefel:
    return Stiefel(AlphaMetric(alpha), Exponential(), ParallelTransport())


def frame_and_tangents(alpha: float, shape, count=1, seed=0):
    m, generator = manifold(alpha), torch.Generator().manual_seed(seed)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    return m, x, *(m.random_tangent(x, generator) for _ in range(count))


# --- exp ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (4, 4), (5, 4), (9, 3)])
@pytest.mark.parametrize("length", [1e-3, 0.03, 1.0, 10.0])
def test_exp_is_the_definition_with_matrix_exponentials_to_fifty_digits(alpha, shape, length):
    m, x, u = frame_and_tangents(alpha, shape)
    u = length * u
    with mpmath.workdps(50):
        big_x, big_u = mpmath.matrix(x.tolist()), mpmath.matrix(u.tolist())
        a, coefficient = big_x.T * big_u, mpmath.mpf(2 * alpha + 1) / mpmath.mpf(alpha + 1)
        generator = -coefficient * big_x * a * big_x.T + big_u * big_x.T - big_x * big_u.T
        y = mpmath.expm(generator) * big_x * mpmath.expm(mpmath.mpf(alpha) / mpmath.mpf(alpha + 1) * a)
        expected = np.array(y.tolist(), dtype=float)
    np.testing.assert_allclose(m.exp(x, u).numpy(), expected, rtol=0, atol=2e-15 * max(1, length))


@pytest.mark.parametrize("shape", [(3, 1), (4, 4), (5, 3), (16, 4)])
def test_exp_agrees_with_geoopt_and_pymanopt(shape):
    m, x, u = frame_and_tangents(-0.5, shape)
    # geoopt and pymanopt use torch's matrix_exp and scipy's; 1e-10 is what the first can lose on a single matrix
    torch.testing.assert_close(m.exp(x, u), geoopt.EuclideanStiefel().expmap(x, u), rtol=0, atol=1e-10)
    peer = pymanopt.manifolds.Stiefel(*shape)
    np.testing.assert_allclose(m.exp(x, u).numpy(), peer.exp(x.numpy(), u.numpy()), rtol=0, atol=1e-12)


def test_a_long_geodesic_stays_on_the_manifold():
    m, x, u = frame_and_tangents(-0.5, (6, 4))
    assert m.point_error(m.exp(x, 300 * u)) < 1e-13


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exp_differential_is_the_derivative(alpha, shape):
    m, x, u, v = frame_and_tangents(alpha, shape, 2)
    h = 1e-4
    values = [m.exp(x, u + k * h * v) for k in (-2, -1, 1, 2)]
    expected = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    torch.testing.assert_close(m.metric.exp_differential(x, u, v), expected, rtol=0, atol=1e-11)


# --- log and dist -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3), (24, 10)])
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.85])
def test_log_inverts_exp(alpha, shape, share):
    m, x, u = frame_and_tangents(alpha, (20, *shape), seed=len(shape))
    u = share * m.injectivity_radius * u
    y = m.exp(x, u)
    v = m.log(x, y)
    relative = (v - u).flatten(-2).norm(dim=-1) / u.flatten(-2).norm(dim=-1)
    # y itself is known to a few 1e-16 an entry only, which is what a tiny vector is lost in
    assert relative.max() < 1e-10 + 1e-14 / (share * m.injectivity_radius)
    assert m.tangent_error(x, v).max() < 1e-14
    for a, b in ((x, y), (y, x)):
        torch.testing.assert_close(m.dist(a, b), m.norm(x, u), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_log_is_exact_where_exp_is_a_rotation_in_the_plane(alpha):
    x = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    for angle in (1e-9, 1e-4, 1.0, 3.0):
        y = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
        torch.testing.assert_close(
            manifold(alpha).log(x, y), torch.tensor([[0.0], [angle]]).double(), rtol=1e-7, atol=1e-16
        )
        assert float(manifold(alpha).dist(x, y)) == pytest.approx(angle, rel=1e-7)


def test_tiny_distances_in_float32():
    x, y = torch.tensor([[1.0], [0.0]]), torch.tensor([[math.cos(1e-4)], [math.sin(1e-4)]])
    assert float(Stiefel().dist(x, y)) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_points(alpha, shape):
    m, x = frame_and_tangents(alpha, shape, 0)
    assert torch.equal(m.log(x, x), torch.zeros_like(x))
    y = x.clone().requires_grad_()
    distance = m.dist(x, y)
    assert torch.equal(distance, torch.zeros(shape[:-2], dtype=torch.float64))
    (grad,) = torch.autograd.grad(distance.sum(), y)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_antipodal_and_reflected_frames_give_a_geodesic_or_a_clear_error(alpha):
    m = manifold(alpha)
    x = torch.eye(4, 2, dtype=torch.float64)
    for y in (-x, x * torch.tensor([-1.0, 1.0])):
        try:
            u = m.log(x, y)
        except LogNotConvergedError as error:
            assert error.residual > 1e-9  # noqa: PT017 - either outcome is right
        else:
            assert m.tangent_error(x, u) < 1e-12
            torch.testing.assert_close(m.exp(x, u), y, rtol=0, atol=1e-9)


def test_known_geodesics_to_the_antipode():
    x = torch.eye(4, 2, dtype=torch.float64)
    m = Stiefel(CanonicalMetric())
    torch.testing.assert_close(m.exp(x, math.pi * x @ J), -x, rtol=0, atol=1e-14)
    assert float(m.norm(x, math.pi * x @ J)) == pytest.approx(math.pi)
    turned = torch.zeros(4, 2, dtype=torch.float64)
    turned[2, 0] = math.pi
    torch.testing.assert_close(m.exp(x, turned), x * torch.tensor([-1.0, 1.0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("shape", "flip"), [((1, 1), 1), ((3, 3), 1), ((4, 4), 3)])
def test_different_components_are_an_error_with_the_residual(shape, flip):
    x = torch.eye(*shape, dtype=torch.float64)
    y = x.clone()
    y[:, :flip] *= -1
    with pytest.raises(LogNotConvergedError, match="different components") as caught:
        Stiefel().log(x, y)
    assert caught.value.residual > 1
    assert "NaN" not in str(caught.value)


def test_random_pairs_give_a_geodesic_or_a_clear_error():
    m, x = frame_and_tangents(0.0, (200, 4, 2), 0, seed=1)
    y = m.random_point(200, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = 0
    for a, b in zip(x, y, strict=True):
        try:
            u = m.log(a, b)
        except LogNotConvergedError:
            continue
        found += 1
        torch.testing.assert_close(m.exp(a, u), b, rtol=0, atol=1e-9)
    assert found >= 190


def test_one_failing_pair_of_a_batch_is_an_error_and_the_others_do_not_depend_on_it():
    m, x, u = frame_and_tangents(-0.5, (3, 4, 4))
    y = m.exp(x, u)
    y[1, :, 0] *= -1
    with pytest.raises(LogNotConvergedError):
        m.log(x, y)
    torch.testing.assert_close(m.log(x[::2], y[::2]), u[::2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [-0.75, -0.5, 0.0, 2.0])
@pytest.mark.parametrize("shape", [(3, 1), (3, 3), (5, 2), (3, 2)])
def test_gradients_of_log_and_dist(alpha, shape):
    m, x, u = frame_and_tangents(alpha, shape)
    y = m.exp(x, 1.5 * u)

    def log(x, y):
        return m.log(m.project_point(x), m.project_point(y))

    def dist(x, y):
        return m.dist(m.project_point(x), m.project_point(y))

    pair = (x.clone().requires_grad_(), y.clone().requires_grad_())
    assert gradcheck(log, pair)
    assert gradcheck(dist, pair)
    assert gradcheck(log, (x.clone().requires_grad_(), x.clone().requires_grad_()))


def test_log_takes_a_stride_of_the_batch_and_large_frames():
    m, x, u = frame_and_tangents(0.0, (2, 60, 24))
    wide = x.mT.contiguous().mT  # the same values in another memory order
    torch.testing.assert_close(m.log(wide, m.exp(x, u)), u, rtol=0, atol=1e-12)


# --- parallel transport ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parallel_transport(alpha, shape):
    """Tangent, isometric, invertible, of vanishing covariant derivative; the velocity of a geodesic is parallel."""
    m, x, u, v, w = frame_and_tangents(alpha, shape, 3)
    y, tv, tw = m.exp(x, u), m.transport(x, u, v), m.transport(x, u, w)
    assert m.tangent_error(y, tv).max() < 1e-13
    torch.testing.assert_close(m.inner(y, tv, tw), m.inner(x, v, w), rtol=0, atol=1e-13)
    h = 1e-4
    carried = [m.transport(x, k * h * u, v) for k in (-2, -1, 1, 2)]
    derivative = (carried[0] - 8 * carried[1] + 8 * carried[2] - carried[3]) / (12 * h)
    if alpha == -0.5:  # the covariant derivative of the embedded metric is the projected one
        torch.testing.assert_close(m.project(x, derivative), torch.zeros_like(x), rtol=0, atol=1e-9)
    # along its own geodesic the velocity is parallel
    turned = m.metric.exp_differential(x, u, u)
    torch.testing.assert_close(m.transport(x, u, u), turned, rtol=0, atol=1e-13)
    # and there and back is the identity
    torch.testing.assert_close(m.transport(y, -turned, tv), v, rtol=0, atol=1e-13)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", [(3, 2), (4, 4), (5, 3)])
def test_parallel_transport_is_the_limit_of_schilds_pole_ladder(alpha, shape):
    """An independent construction from exp and log alone (Lorenzi & Pennec 2014), which fixes the torsion too."""
    m, x, u, v = frame_and_tangents(alpha, shape, 2)
    u, errors = 0.8 * u, []
    for rungs in (8, 16):
        at, velocity, carried = x, u / rungs, 0.5 * v / rungs
        for _ in range(rungs):
            middle, end = m.exp(at, velocity / 2), m.exp(at, velocity)
            pole = m.exp(middle, -m.log(middle, m.exp(at, carried)))
            velocity, at, carried = m.metric.exp_differential(at, velocity, velocity), end, -m.log(end, pole)
        errors.append(float((carried * rungs / 0.5 - m.transport(x, u, v)).abs().max()))
    assert errors[1] < 1e-3
    assert errors[1] < errors[0] / 3 or errors[1] < 1e-12  # it converges with order 2


# --- injectivity radius -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "radius"),
    [
        (EuclideanMetric(), math.pi),
        (AlphaMetric(-0.75), math.pi),
        (AlphaMetric(-0.25), math.pi),
        (CanonicalMetric(), math.sqrt(4 / 5) * math.pi),
        (AlphaMetric(0.5), 0.816497 * math.pi),
        (AlphaMetric(2.0), 0.577350 * math.pi),
    ],
    ids=repr,
)
def test_injectivity_radius(metric, radius):
    assert Stiefel(metric).injectivity_radius == pytest.approx(radius, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_geodesics_close_at_twice_the_injectivity_radius(alpha):
    m, x = manifold(alpha), torch.eye(4, 2, dtype=torch.float64)
    u = x @ J
    u = u / m.norm(x, u)
    torch.testing.assert_close(m.exp(x, 2 * m.injectivity_radius * u), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_conjugate_points_within_the_injectivity_radius(alpha):
    """D exp stays invertible on the way out, for random and for low-rank directions of St(5, 2)."""
    m, x, u = frame_and_tangents(alpha, (60, 5, 2))
    x = x[:1].expand_as(u)
    u = m.project(x, u)
    u[:20, :, 1] = 0
    u = m.project(x, u)
    u = u / m.norm(x, u)[:, None, None]
    basis = m.tangent_basis(x[0])
    for share in (0.5, 0.9, 0.99):
        at = share * m.injectivity_radius * u
        images = torch.stack([m.metric.exp_differential(x, at, b.expand_as(at)) for b in basis], -1).flatten(1, 2)
        assert torch.linalg.svdvals(images)[:, -1].min() > 1e-3


def test_acceleration_adjoint_is_the_adjoint():
    _, x, u, v = frame_and_tangents(0.7, (6, 3), 2)
    g = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    left = (g * formulas.acceleration(x, u, v, 0.7)).sum()
    right = (formulas.acceleration_adjoint(x, u, g, 0.7) * v).sum()
    torch.testing.assert_close(left, right)


# --- Hessian ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_hessian_is_selfadjoint_and_the_second_derivative_along_geodesics(alpha, shape):
    m, x, u, v = frame_and_tangents(alpha, shape, 2)
    generator = torch.Generator().manual_seed(5)
    n, p = shape[-2:]
    a, b = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((n, n), (n, p)))

    def f(x):
        return (x * (a @ x)).sum((-2, -1)) + (x * b).sum((-2, -1)) ** 3

    def hessian(w):
        at = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(at).sum(), at, create_graph=True)
        (product,) = torch.autograd.grad((grad * w).sum(), at)
        return m.ehess_to_rhess(x, grad.detach(), product, w)

    h = 2e-3
    values = [f(m.exp(x, k * h * u)) for k in range(-3, 4)]
    weights = [2, -27, 270, -490, 270, -27, 2]
    second = sum(w * value for w, value in zip(weights, values, strict=True)) / (180 * h * h)
    torch.testing.assert_close(m.inner(x, hessian(u), u), second, rtol=0, atol=1e-6)
    torch.testing.assert_close(m.inner(x, hessian(u), v), m.inner(x, u, hessian(v)), rtol=0, atol=1e-11)
    assert m.tangent_error(x, hessian(u)).max() < 1e-11


def test_euclidean_hessian_agrees_with_pymanopt():
    m, x, u = frame_and_tangents(-0.5, (6, 3))
    generator = torch.Generator().manual_seed(1)
    egrad, ehess = (torch.randn(6, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    peer = pymanopt.manifolds.Stiefel(6, 3)
    expected = peer.euclidean_to_riemannian_hessian(x.numpy(), egrad.numpy(), ehess.numpy(), u.numpy())
    np.testing.assert_allclose(m.ehess_to_rhess(x, egrad, ehess, u).numpy(), expected, rtol=0, atol=1e-12)
