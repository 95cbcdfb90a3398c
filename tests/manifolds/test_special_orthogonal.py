import math
import pickle

import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
import torch
from geodescent.manifolds import LogNotConvergedError, NotOnManifoldError, Stiefel
from geodescent.manifolds.special_orthogonal import SpecialOrthogonal
from geodescent.manifolds.spectral import determinant_sign
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from torch.autograd import gradcheck, gradgradcheck

M = SpecialOrthogonal()
SHAPES = [(1, 1), (2, 2), (3, 3), (5, 5), (2, 4, 4)]
I2 = torch.eye(2, dtype=torch.float64)
J = torch.tensor([[0.0, -1], [1, 0]], dtype=torch.float64)


def rotations(*shape, count=2, seed=0):
    """A rotation, and unit tangent vectors there."""
    generator = torch.Generator().manual_seed(seed)
    x = M.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count - 1))


def turning(angles, n, seed=0):
    """A skew matrix that turns planes at the given speeds, and scipy's exponential of it."""
    a = np.zeros((n, n))
    for i, angle in enumerate(angles):
        a[2 * i + 1, 2 * i], a[2 * i, 2 * i + 1] = angle, -angle
    q = rotations(n, n, count=1, seed=seed)[0].numpy()
    a = q @ a @ q.T
    a = (a - a.T) / 2
    return torch.tensor(a), torch.tensor(scipy.linalg.expm(a))


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


def test_scaling_of_the_metric():
    """A quarter turn is √2 π/2 away."""
    assert float(M.dist(I2, J)) == pytest.approx(math.pi / 2**0.5, rel=1e-15)
    close(M.log(I2, J), math.pi / 2 * J)
    close(M.exp(I2, J), torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64))
    assert float(M.inner(I2, J, J)) == 2
    assert M.injectivity_radius == pytest.approx(float(M.dist(I2, -I2)))
    assert [M.dim((n, n)) for n in (1, 2, 3, 4)] == [0, 1, 3, 6]


@pytest.mark.parametrize("shape", SHAPES)
def test_exp_log_and_distance(shape):
    x, u = rotations(*shape)
    length = 0.85 * M.injectivity_radius if M.dim(shape) else 0.0
    y = M.exp(x, length * u)
    assert M.point_error(y).max() < 1e-14
    close(M.log(x, y), length * u, 1e-14)
    close(M.dist(x, y), torch.full(shape[:-2], length, dtype=torch.float64), 1e-14)
    if M.dim(shape):
        close(M.dist(x, M.exp(x, 1e-9 * u)), torch.full(shape[:-2], 1e-9, dtype=torch.float64), 1e-15)


@given(st.lists(st.floats(0, 3.14), min_size=1, max_size=3), st.integers(0, 2**31))
def test_angles(angles, seed):
    a, y = turning(angles, 7, seed)
    identity = torch.eye(7, dtype=torch.float64)
    close(M.exp(identity, a), y, 1e-14)
    assert float(M.dist(identity, y)) == pytest.approx(math.sqrt(2) * math.hypot(*angles), rel=1e-8, abs=2e-15)
    # two planes that turn by nearly π are told apart only as well as they differ from it
    nearest = sorted(2 * math.pi - b - c for i, b in enumerate(angles) for c in angles[i:])[0]
    close(M.log(identity, y), a, 1e-13 / nearest)


def test_agrees_with_scipy_and_pymanopt():
    peer = pymanopt.manifolds.SpecialOrthogonalGroup(4)
    x, u, v = rotations(4, 4, count=3)
    y = M.exp(x, 1.5 * v)
    np.testing.assert_allclose(M.exp(x, u).numpy(), x.numpy() @ scipy.linalg.expm(x.numpy().T @ u.numpy()), atol=1e-14)
    np.testing.assert_allclose(
        M.log(x, y).numpy(), x.numpy() @ np.real(scipy.linalg.logm(x.numpy().T @ y.numpy())), atol=1e-12
    )
    # their tangent vectors are the skew factors
    np.testing.assert_allclose((x.mT @ M.log(x, y)).numpy(), peer.log(x.numpy(), y.numpy()), atol=1e-12)
    np.testing.assert_allclose(float(M.dist(x, y)), peer.dist(x.numpy(), y.numpy()), atol=1e-12)


def test_three_dimensional_rotations():
    vectors = np.random.default_rng(0).uniform(-1.7, 1.7, (20, 3))
    y = torch.tensor(Rotation.from_rotvec(vectors).as_matrix())
    logs = M.log(torch.eye(3, dtype=torch.float64), y)
    found = torch.stack([logs[:, 2, 1], logs[:, 0, 2], logs[:, 1, 0]], -1)
    np.testing.assert_allclose(found.numpy(), vectors, atol=1e-13)


def test_it_is_a_component_of_stiefel():
    x, u, v = rotations(4, 4, count=3)
    g = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    stiefel = Stiefel()
    for name, args in [
        ("project", (g,)),
        ("exp", (u,)),
        ("retract", (u,)),
        ("inner", (u, v)),
        ("egrad_to_rgrad", (g,)),
    ]:
        close(getattr(M, name)(x, *args), getattr(stiefel, name)(x, *args))


def test_coincident_points():
    x, _ = rotations(2, 4, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    distance = M.dist(a, b)
    assert torch.equal(distance.detach(), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(M.log(x, x), torch.zeros_like(x))
    assert all(torch.equal(g, torch.zeros_like(x)) for g in torch.autograd.grad(distance.sum(), (a, b)))


@pytest.mark.parametrize("angles", [[math.pi], [math.pi, 1.0], [math.pi, math.pi, 0.3]])
def test_half_turns(angles):
    identity = torch.eye(7, dtype=torch.float64)
    _, y = turning(angles, 7)
    _, other = turning([math.pi - 1e-6, 2.0], 7, seed=1)  # in one batch with an ordinary pair
    a = torch.stack([identity, identity]).requires_grad_()
    b = torch.stack([y, other]).requires_grad_()
    distance = M.dist(a, b)
    expected = torch.tensor([math.hypot(*angles), math.hypot(math.pi - 1e-6, 2.0)], dtype=torch.float64)
    close(distance.detach(), 2**0.5 * expected, 1e-13)
    for grad in torch.autograd.grad(distance.sum(), (a, b)):
        assert bool(torch.isfinite(grad).all())
    with pytest.raises(LogNotConvergedError, match="not unique") as caught:
        M.log(a, b)
    assert caught.value.residual == 0


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("second", [None, 0.5])
def test_log_next_to_a_half_turn_reaches_the_point(gap, second):
    identity = torch.eye(6, dtype=torch.float64)
    angles = [math.pi - gap, math.pi - 2 * gap if second is None else second]
    a, y = turning(angles, 6)
    v = M.log(identity, y)
    close(M.exp(identity, v), y, 1e-14)
    assert float(v.norm()) == pytest.approx(2**0.5 * math.hypot(*angles), rel=1e-14)
    assert float(M.dist(identity, y)) == pytest.approx(2**0.5 * math.hypot(*angles), rel=1e-14)
    if second is not None:  # the plane is well determined
        close(v, a, 1e-13)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_transport_is_parallel(n):
    """Isometric, takes velocity to velocity, and its ambient change along the geodesic is normal."""
    x, u, v = rotations(2, n, n, count=3)
    y, (tv, tu) = M.retract_transport(x, u, v, M.log(x, M.retract(x, u)))
    assert M.tangent_error(y, tv).max() < 1e-14
    close(M.norm(y, tv), torch.ones(2, dtype=torch.float64))
    close(tu, -M.log(y, x))
    h = 1e-4
    change = (M.transport(x, h * u, v) - M.transport(x, -h * u, v)) / (2 * h)
    assert M.project(x, change).abs().max() < 1e-7
    close(M.transport(x, u, v), tv, 1e-15)


def test_hessian_is_the_second_derivative_along_geodesics():
    x, u = rotations(4, 4)
    a = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def f(y):
        return (a * y).sum() ** 3 + (y @ a @ y * a).sum()

    egrad, ehess_u = gradient_and_hessian(f, x, u)
    second = second_derivative(lambda s: f(M.exp(x, s * u)))
    close(M.inner(x, M.ehess_to_rhess(x, egrad, ehess_u, u), u), second, 1e-11)


def test_retraction_is_of_second_order_and_inverts():
    x, u = rotations(5, 5)
    errors = [float((M.retract(x, t * u) - M.exp(x, t * u)).norm()) for t in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(3, abs=0.01)
    close(M.inverse_retract(x, M.retract(x, 2 * u)), 2 * u)
    with pytest.raises(ValueError, match="right angle"):
        M.inverse_retract(I2, J @ J)
    h = 1e-5
    v = rotations(5, 5, count=3)[2]
    close(
        M.pushforward(x, u, v),
        (M.retract(x, u + h * v) - M.retract(x, u - h * v)) / (2 * h),
        1e-9,
    )


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4), (200, 2, 2)])
def test_nearest_rotation(shape):
    """No rotation near by is nearer, and the determinant is 1 also where that of the argument is negative."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape, dtype=torch.float64, generator=generator)
    q = M.project_point(a)
    assert M.point_error(q).max() < 1e-14
    distance = (q - a).norm(dim=(-2, -1))
    for _ in range(20):
        other = M.exp(q, 0.01 * M.random_tangent(q, generator))
        assert bool(((other - a).norm(dim=(-2, -1)) > distance).all())


def test_nearest_rotation_by_kabsch():
    a = np.random.default_rng(3).normal(size=(10, 3, 3))
    for b in a:
        expected = Rotation.align_vectors(b.T, np.eye(3))[0].as_matrix()  # of rows, so that b = Σ bᵢeᵢᵀ
        np.testing.assert_allclose(M.project_point(torch.tensor(b)).numpy(), expected, atol=1e-12)
    with pytest.raises(ValueError, match="NaN"):
        M.project_point(torch.full((3, 3), math.nan))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_sign_of_the_determinant(n):
    a = torch.randn(40, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    assert determinant_sign(a).tolist() == [float(np.sign(np.linalg.det(b))) for b in a.numpy()]
    assert determinant_sign(torch.eye(n)) == 1
    assert determinant_sign(torch.diag(torch.tensor([-1.0] + [1.0] * (n - 1)))) == -1


def test_reflections_are_off_the_manifold():
    reflection = torch.diag(torch.tensor([1.0, 1, -1]))
    assert M.point_error(reflection) == 2
    with pytest.raises(NotOnManifoldError, match="point error is 2"):
        M.check_point(torch.stack([torch.eye(3), reflection]))
    with pytest.raises(NotOnManifoldError, match="nan"):
        M.check_point(torch.full((3, 3), math.nan))
    with pytest.raises(ValueError, match="square"):
        M.check_point(torch.eye(3, 2))


@pytest.mark.parametrize("angles", [[0.0, 0.0], [0.5, 0.5], [2.6, 0.4], [3.0, 3.0]])
def test_derivatives_at_zero_and_repeated_angles(angles):
    x = rotations(4, 4, count=1)[0].requires_grad_()
    a, _ = turning(angles, 4)
    u = (x.detach() @ a).requires_grad_()
    y = M.exp(x.detach(), u.detach()).requires_grad_()
    v = M.random_tangent(x.detach(), torch.Generator().manual_seed(1)).requires_grad_()
    for function, args in [
        (M.exp, (x, u)),
        (M.log, (x, y)),
        (M.retract, (x, u)),
        (M.transport, (x, u, v)),
        (M.project_point, ((x + 0.1 * v).detach().requires_grad_(),)),
        (M.project_point, ((x.flip(-1) + 0.1 * v).detach().requires_grad_(),)),
    ]:
        assert gradcheck(function, args, fast_mode=True)
        assert gradgradcheck(function, args, fast_mode=True)
    if max(angles) < 1:
        assert gradcheck(M.inverse_retract, (x, y), fast_mode=True)
    if max(angles) > 0:
        assert gradcheck(M.dist, (x, y), fast_mode=True)


def test_haar_law(generator):
    x = M.random_point(4000, 3, 3, dtype=torch.float64, generator=generator)
    assert M.point_error(x).max() < 1e-14
    close(x.mean(0), torch.zeros(3, 3, dtype=torch.float64), 0.04)
    close((x * x).mean(0), torch.full((3, 3), 1 / 3, dtype=torch.float64), 0.03)
    # the angle of a uniform rotation has the density (1 − cos θ)/π, with mean π/2 + 2/π
    angles = M.dist(torch.eye(3, dtype=torch.float64), x) / 2**0.5
    assert float(angles.mean()) == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.04)


def test_tangent_basis():
    x = rotations(2, 4, 4, count=1)[0]
    basis = M.tangent_basis(x)
    assert M.tangent_error(x.unsqueeze(1), basis).max() < 1e-15
    gram = torch.einsum("bkij,blij->bkl", basis, basis)
    close(gram, torch.eye(6, dtype=torch.float64).expand(2, 6, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions(dtype, generator):
    x = M.random_point(2, 16, 16, dtype=dtype, generator=generator)
    u = M.random_tangent(x, generator)
    y = M.exp(x, u)
    for point in (x, y, M.retract(x, u)):
        assert point.dtype == dtype
        M.check_point(point)
    eps = torch.finfo(dtype).eps
    assert float((M.log(x, y) - u).abs().max()) < 10 * eps
    assert float((M.dist(x, y) - 1).abs().max()) < 10 * eps


@pytest.mark.parametrize("batch", [(0,), (1, 0, 2)])
def test_empty_batches(batch):
    x = torch.zeros(*batch, 3, 3)
    for result in (M.exp(x, x), M.log(x, x), M.retract(x, x), M.inverse_retract(x, x), M.transport(x, x, x)):
        assert result.shape == x.shape
    assert M.project_point(M.random_tangent(M.random_point(*batch, 3, 3))).shape == x.shape
    assert M.dist(x, x).shape == M.inner(x, x, x).shape == M.point_error(x).shape == batch


@pytest.mark.parametrize("n", [128, 192])
def test_batches_on_two_threads(n):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, u, v = rotations(4, n, n, count=3)
        assert M.point_error(x).max() < 1e-13
        y = M.exp(x, 3 * u)
        close(M.log(x, y), 3 * u, 1e-13)
        z, (w,) = M.retract_transport(x, u, v)
        close(M.inverse_retract(x, z), u, 1e-13)
        close(M.norm(z, w), torch.ones(4, dtype=torch.float64), 1e-13)
    finally:
        torch.set_num_threads(threads)


def test_value_object():
    assert pickle.loads(pickle.dumps(M)) == M
    assert repr(M) == "SpecialOrthogonal()"
    assert hash(M) == hash(SpecialOrthogonal())
