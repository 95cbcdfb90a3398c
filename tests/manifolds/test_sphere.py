import math
import pickle

import mpmath
import numpy as np
import pymanopt.manifolds
import pytest
import torch
from geodescent.manifolds import LogNotConvergedError
from geodescent.manifolds.sphere import Sphere
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

M = Sphere()
E1, E2 = torch.eye(2, dtype=torch.float64)


def point_and_tangents(*shape, count=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = M.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count))


def close(a, b, atol=1e-14):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def second_derivative(f):
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(f(t), t, create_graph=True)
    return torch.autograd.grad(first, t)[0]


def gradient_and_hessian(f, x, u):
    x = x.detach().clone().requires_grad_()
    (egrad,) = torch.autograd.grad(f(x), x, create_graph=True)
    return egrad.detach(), torch.autograd.grad(egrad, x, u)[0]


def test_worked_values():
    close(M.exp(E1, E2), torch.tensor([math.cos(1), math.sin(1)], dtype=torch.float64))
    close(M.retract(E1, E2), torch.tensor([0.5**0.5, 0.5**0.5], dtype=torch.float64))
    assert float(M.dist(E1, E2)) == pytest.approx(math.pi / 2, abs=1e-15)
    close(M.log(E1, E2), math.pi / 2 * E2)
    assert M.dim((7, 4)) == 3
    assert M.injectivity_radius == math.pi


@given(st.integers(2, 6), st.floats(1e-12, 3.1), st.integers(0, 2**31))
def test_exp_and_log_along_a_geodesic(n, length, seed):
    """Unit speed by chords: ‖x − exp(x, tu)‖ = 2 sin(t/2), in the plane of x and u; and log is its inverse."""
    x, u = point_and_tangents(n, seed=seed)
    y = M.exp(x, length * u)
    assert M.point_error(y) < 4e-15
    assert float((y - x).norm()) == pytest.approx(2 * math.sin(length / 2), abs=4e-15)
    close(y - x * (x @ y) - u * (u @ y), torch.zeros_like(x), 4e-15)
    close(M.log(x, y), length * u, 2e-14 * max(1, 1 / (math.pi - length)))
    assert float(M.dist(x, y)) == pytest.approx(length, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("angle", [1e-12, 1e-9, 1e-4, 1.0, math.pi - 1e-9])
def test_distance_keeps_its_digits(angle):
    with mpmath.workdps(50):
        y = torch.tensor([float(mpmath.cos(angle)), float(mpmath.sin(angle))], dtype=torch.float64)
    assert float(M.dist(E1, y)) == pytest.approx(angle, rel=1e-15 if angle < 0.1 else 1e-14)
    if angle == 1e-4:
        assert float(M.dist(E1.float(), y.float())) == pytest.approx(1e-4, rel=1e-6)


def test_coincident_points():
    x, _ = point_and_tangents(3, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    distance = M.dist(a, b)
    assert torch.equal(distance.detach(), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(M.log(x, x), torch.zeros_like(x))
    for grad in torch.autograd.grad(distance.sum(), (a, b)):
        assert torch.equal(grad, torch.zeros_like(x))


def test_antipodes():
    x, u = point_and_tangents(3, 4)
    a, b = x.clone().requires_grad_(), (-x).requires_grad_()
    distance = M.dist(a, b)
    close(distance.detach(), torch.full((3,), math.pi, dtype=torch.float64))
    for grad in torch.autograd.grad(distance.sum(), (a, b)):
        assert bool(torch.isfinite(grad).all())
    y = torch.stack([x[0], -x[1], M.exp(x[2], u[2])])  # one antipode in the batch
    with pytest.raises(LogNotConvergedError, match="antipode") as caught:
        M.log(x, y)
    assert caught.value.residual == 0
    with pytest.raises(ValueError, match="right angle"):
        M.inverse_retract(x, y)
    # S⁰ is two points, and no geodesic joins them
    with pytest.raises(LogNotConvergedError) as caught:
        M.log(x.new_ones(1), -x.new_ones(1))
    assert caught.value.residual == 2


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
def test_log_next_to_the_antipode_reaches_the_point(gap):
    x, u = point_and_tangents(5)
    y = M.exp(x, (math.pi - gap) * u)
    v = M.log(x, y)
    close(M.exp(x, v), y, 1e-15)
    assert float(v.norm()) == pytest.approx(math.pi - gap, abs=1e-15 * 2)


def test_agrees_with_pymanopt():
    peer = pymanopt.manifolds.Sphere(5)
    x, u, v = point_and_tangents(5, count=2)
    u, y = 1.3 * u, M.exp(x, 0.8 * v)
    np.testing.assert_allclose(M.exp(x, u).numpy(), peer.exp(x.numpy(), u.numpy()), atol=1e-14)
    np.testing.assert_allclose(M.log(x, y).numpy(), peer.log(x.numpy(), y.numpy()), atol=1e-13)
    np.testing.assert_allclose(M.dist(x, y).numpy(), peer.dist(x.numpy(), y.numpy()), atol=1e-13)
    np.testing.assert_allclose(M.retract(x, u).numpy(), peer.retraction(x.numpy(), u.numpy()), atol=1e-14)
    egrad, ehess = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).numpy()
    np.testing.assert_allclose(
        M.ehess_to_rhess(x, torch.tensor(egrad), torch.tensor(ehess), u).numpy(),
        peer.euclidean_to_riemannian_hessian(x.numpy(), egrad, ehess, u.numpy()),
        atol=1e-14,
    )


def test_hessian_is_the_second_derivative_along_geodesics():
    x, u = point_and_tangents(4)
    a = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def f(y):
        return (y @ a @ y) ** 2 + y.sum() ** 3

    second = second_derivative(lambda s: f(M.exp(x, s * u)))
    egrad, ehess_u = gradient_and_hessian(f, x, u)
    close(M.inner(x, M.ehess_to_rhess(x, egrad, ehess_u, u), u), second, 1e-12)


def test_transport_is_parallel():
    """It takes the geodesic's velocity to its velocity, and leaves what is orthogonal to its plane alone."""
    x, u, v = point_and_tangents(5, count=2)
    y = M.retract(x, 0.8 * u)
    angle = math.atan(0.8)
    carried = M.transport(x, 0.8 * u, v)
    assert M.tangent_error(y, carried) < 1e-15
    velocity = u * math.cos(angle) - x * math.sin(angle)
    along = float(v @ u)
    close(carried, v + along * (velocity - u))
    z, (w,) = M.retract_transport(x, 0.8 * u, v)
    assert torch.equal(z, y)
    assert torch.equal(w, carried)


def test_retraction_is_of_second_order_and_inverts():
    x, u = point_and_tangents(5)
    errors = [float((M.retract(x, t * u) - M.exp(x, t * u)).norm()) for t in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(3, abs=0.01)
    close(M.inverse_retract(x, M.retract(x, 2 * u)), 2 * u)


@pytest.mark.parametrize("length", [0.0, 1e-6, 0.4, 0.6, 2.5])  # on both sides of where the series end
def test_derivatives(length):
    x, u, v = (a.requires_grad_() for a in point_and_tangents(2, 3, count=2))
    step = (length * u).detach().requires_grad_()
    y = M.exp(x, step).detach().requires_grad_()
    for function, args in [
        (M.exp, (x, step)),
        (M.log, (x, y)),
        (M.retract, (x, step)),
        (M.transport, (x, step, v)),
        (M.project, (x, v)),
        (M.project_point, (step + x.detach(),)),
        (M.inner, (x, u, v)),
    ]:
        assert gradcheck(function, args, fast_mode=True)
        assert gradgradcheck(function, args, fast_mode=True)
    if length >= 0.1:
        assert gradcheck(M.dist, (x, y), fast_mode=True)


def test_projection_to_the_sphere():
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for scale in (1.0, 1e-300, 1e300):
        close(M.project_point(scale * a), torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert M.project_point(torch.zeros(2, 3)).tolist() == [[1, 0, 0], [1, 0, 0]]
    with pytest.raises(ValueError, match="NaN"):
        M.project_point(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="at least one entry"):
        M.check_shape((3, 0))
    # the vector is not tangent: its normal part is ignored, or the result would be off the sphere
    close(M.exp(E1, 0.1 * E1 + E2), M.exp(E1, E2))


def test_uniform_law(generator):
    x = M.random_point(20000, 3, dtype=torch.float64, generator=generator)
    # Archimedes: each coordinate is uniform in [−1, 1]
    quantiles = torch.quantile(x, torch.tensor([0.1, 0.25, 0.5, 0.9], dtype=torch.float64), 0)
    close(quantiles, torch.tensor([[-0.8], [-0.5], [0.0], [0.8]], dtype=torch.float64).expand(4, 3), 0.03)


@pytest.mark.parametrize("batch", [(0,), (1, 0, 2)])
def test_empty_batches(batch):
    x = torch.zeros(*batch, 4)
    for result in (M.exp(x, x), M.log(x, x), M.retract(x, x), M.transport(x, x, x), M.random_point(*batch, 4)):
        assert result.shape == x.shape
    assert M.dist(x, x).shape == M.inner(x, x, x).shape == M.point_error(x).shape == batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions(dtype, generator):
    x = M.random_point(3, 64, dtype=dtype, generator=generator)
    u = M.random_tangent(x, generator)
    y = M.exp(x, u)
    for point in (x, y, M.retract(x, u)):
        assert point.dtype == dtype
        M.check_point(point)
    M.check_tangent(M.retract(x, u), M.transport(x, u, u))
    eps = torch.finfo(dtype).eps
    assert float((M.log(x, y) - u).abs().max()) < 4 * eps
    assert float((M.dist(x, y) - 1).abs().max()) < 4 * eps


def test_value_object():
    assert Sphere() == M
    assert hash(M) == hash(Sphere())
    assert pickle.loads(pickle.dumps(M)) == M
    assert repr(M) == "Sphere()"
    assert M.random_tangent(torch.ones(2, 1)).tolist() == [[0], [0]]
