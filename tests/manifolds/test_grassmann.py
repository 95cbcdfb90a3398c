import math
import pickle

import geoopt
import mpmath
import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
import torch
from geodescent.manifolds import LogNotConvergedError
from geodescent.manifolds.grassmann import Grassmann
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

M = Grassmann()
SHAPES = [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3)]
MOVING = [shape for shape in SHAPES if shape[-2] > shape[-1]]


def frames(*shape, count=2, seed=0):
    """A frame, and unit tangent vectors there."""
    generator = torch.Generator().manual_seed(seed)
    x = M.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count - 1))


def with_angles(n, angles, seed=0):
    """A frame and a tangent vector of the given singular values, and the turned frame of its end point."""
    p = len(angles)
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]
    r, turn = (torch.linalg.qr(torch.randn(p, p, dtype=torch.float64, generator=generator))[0] for _ in range(2))
    angles = torch.tensor(angles, dtype=torch.float64)
    x, normal = q[:, :p], q[:, p : 2 * p]
    u = normal @ torch.diag(angles) @ r.mT
    y = (x @ r @ torch.diag(angles.cos()) + normal @ torch.diag(angles.sin())) @ r.mT
    return x, u, y @ turn


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


def projector(x):
    return x @ x.mT


@pytest.mark.parametrize("shape", SHAPES)
def test_exp_log_and_distance(shape):
    x, u = frames(*shape)
    n, p = shape[-2:]
    assert M.dim(shape) == p * (n - p)
    length = 0.85 * M.injectivity_radius if n > p else 0.0
    y = M.exp(x, length * u)
    assert M.point_error(y).max() < 1e-14
    turn = torch.linalg.qr(torch.randn(p, p, dtype=torch.float64, generator=torch.Generator().manual_seed(7)))[0]
    for end in (y, y @ turn):  # the frame of y does not matter
        close(M.log(x, end), length * u, 1e-14)
        close(M.dist(x, end), torch.full(shape[:-2], length, dtype=torch.float64), 1e-14)
    # nor does that of x, up to its turning the tangent vectors too
    close(M.log(x @ turn, y), length * u @ turn, 1e-14)


@given(st.lists(st.floats(0, 1.57), min_size=1, max_size=4), st.integers(0, 2**31))
def test_principal_angles(angles, seed):
    """By construction from the angles, repeated ones among them, and by scipy."""
    x, u, y = with_angles(9, angles, seed)
    close(projector(M.exp(x, u)), projector(y), 2e-15 * 9)
    # near the cut locus, at π/2, rounding in y is magnified by 1/cos
    close(M.log(x, y), u, 1e-14 + 2e-15 / math.cos(max(angles)))
    expected = math.hypot(*angles)
    assert float(M.dist(x, y)) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    by_scipy = np.linalg.norm(scipy.linalg.subspace_angles(x.numpy(), y.numpy()))
    assert by_scipy == pytest.approx(expected, abs=1e-7)  # not more accurate than that near 0


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 1.0])
def test_distance_keeps_its_digits(angle):
    with mpmath.workdps(40):
        c, s = (float(f(mpmath.mpf(angle))) for f in (mpmath.cos, mpmath.sin))
    x, y = (torch.tensor([[a], [b]], dtype=torch.float64) for a, b in ((1, 0), (-c, -s)))
    assert float(M.dist(x, y)) == pytest.approx(angle, rel=1e-15)
    if angle == 1e-4:
        assert float(M.dist(x.float(), y.float())) == pytest.approx(angle, rel=1e-6)


def test_coincident_points():
    x, _ = frames(2, 5, 3)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    distance = M.dist(a, b)
    assert torch.equal(distance.detach(), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(M.log(x, x), torch.zeros_like(x))
    assert all(torch.equal(g, torch.zeros_like(x)) for g in torch.autograd.grad(distance.sum(), (a, b)))
    # the same subspace in another frame is the same point, to rounding
    turned = x.flip(-1)
    assert M.dist(x, turned).max() < 1e-15
    assert M.log(x, turned).abs().max() < 1e-15


@pytest.mark.parametrize("angles", [[math.pi / 2], [math.pi / 2, 0.3], [math.pi / 2, math.pi / 2]])
def test_right_angles(angles):
    x, _, y = with_angles(6, angles)
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    distance = M.dist(a, b)
    assert float(distance.detach()) == pytest.approx(math.hypot(*angles), abs=1e-14)
    for point, grad in zip((x, y), torch.autograd.grad(distance, (a, b)), strict=True):
        assert bool(torch.isfinite(grad).all())
        assert float(M.project(point, grad).norm()) == pytest.approx(1, abs=1e-12)  # of one of the shortest geodesics
    with pytest.raises(LogNotConvergedError, match="not unique") as caught:
        M.log(torch.stack([x, x]), torch.stack([x, y]))
    assert caught.value.residual == 0
    with pytest.raises(ValueError, match="right angle"):
        M.inverse_retract(x, y)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
def test_log_next_to_the_cut_locus(gap):
    x, u, y = with_angles(7, [math.pi / 2 - gap, 0.4, 1e-5])
    close(M.log(x, y), u, 1e-14)
    assert float(M.dist(x, y)) == pytest.approx(float(u.norm()), rel=1e-14)


@pytest.mark.parametrize("shape", [(3, 1), (5, 3), (8, 2)])
def test_agrees_with_pymanopt(shape):
    peer = pymanopt.manifolds.Grassmann(*shape)
    x, u, v = frames(*shape, count=3)
    y = M.exp(x, v)
    np.testing.assert_allclose(
        projector(M.exp(x, u)).numpy(), projector(torch.tensor(peer.exp(x.numpy(), u.numpy()))), atol=1e-12
    )
    np.testing.assert_allclose(M.log(x, y).numpy(), peer.log(x.numpy(), y.numpy()), atol=1e-12)
    np.testing.assert_allclose(float(M.dist(x, y)), peer.dist(x.numpy(), y.numpy()), atol=1e-12)
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    np.testing.assert_allclose(M.project(x, g).numpy(), peer.projection(x.numpy(), g.numpy()), atol=1e-13)
    np.testing.assert_allclose(
        projector(M.retract(x, u)).numpy(), projector(torch.tensor(peer.retraction(x.numpy(), u.numpy()))), atol=1e-12
    )


def test_horizontal_geodesics_are_those_of_stiefel():
    """geoopt's Euclidean Stiefel exponential, which is sound, of a horizontal vector."""
    x, u = frames(2, 6, 3)
    close(M.exp(x, 1.2 * u), geoopt.EuclideanStiefel().expmap(x, 1.2 * u), 1e-13)


@pytest.mark.parametrize("shape", MOVING)
def test_transport_is_parallel(shape):
    """Isometric, takes velocity to velocity, and its covariant derivative vanishes: the change is vertical."""
    x, u, v = frames(*shape, count=3)
    y, (tv, tu) = M.retract_transport(x, u, v, M.log(x, M.retract(x, u)))
    assert M.tangent_error(y, tv).max() < 1e-14
    close(M.norm(y, tv), torch.ones(shape[:-2], dtype=torch.float64))
    close(tu, -M.log(y, x), 1e-14)
    h = 1e-4
    change = (M.transport(x, h * u, v) - M.transport(x, -h * u, v)) / (2 * h)
    assert M.project(x, change).abs().max() < 1e-7


def test_transport_by_the_formula_of_edelman_arias_and_smith():
    x, u, _ = with_angles(7, [0.9, 0.2, 0.2])
    v = M.random_tangent(x, torch.Generator().manual_seed(5))
    left, sigma, right = torch.linalg.svd(u, full_matrices=False)
    turn = -x @ right.mT @ torch.diag(sigma.sin()) @ left.mT + left @ torch.diag(sigma.cos() - 1) @ left.mT
    # the retraction goes to where exp goes along the arctangents
    step = left @ torch.diag(sigma.tan()) @ right
    close(M.transport(x, step, v), v + turn @ v, 1e-14)


def test_hessian_is_the_second_derivative_along_geodesics():
    x, u, v = frames(6, 3, count=3)
    a = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def f(y):  # of the subspace alone
        p = y @ y.mT
        return (p @ a @ p @ a.mT).diagonal().sum() + (p @ a).diagonal().sum() ** 3

    def hess(w):
        egrad, ehess_w = gradient_and_hessian(f, x, w)
        return M.ehess_to_rhess(x, egrad, ehess_w, w)

    second = second_derivative(lambda s: f(M.exp(x, s * u)))
    close(M.inner(x, hess(u), u), second, 1e-11)
    close(M.inner(x, hess(u), v), M.inner(x, u, hess(v)), 1e-11)
    assert M.tangent_error(x, hess(u)) < 1e-13


def test_retraction_is_of_second_order_and_inverts():
    x, u = frames(9, 4)
    errors = [float((M.retract(x, t * u) - M.exp(x, t * u)).norm()) for t in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(3, abs=0.01)
    turn = torch.linalg.qr(torch.ones(4, 4, dtype=torch.float64) + torch.eye(4))[0]
    close(M.inverse_retract(x, M.retract(x, 3 * u) @ turn), 3 * u, 1e-13)


def test_differential_of_the_retraction():
    x, u, v = frames(6, 3, count=3)
    h = 1e-5
    moved = [projector(M.retract(x, u + t * v)) for t in (h, -h)]
    y, w = M.retract(x, u), M.pushforward(x, u, v)
    assert M.tangent_error(y, w) < 1e-14
    close((moved[0] - moved[1]) / (2 * h), y @ w.mT + w @ y.mT, 1e-9)


@pytest.mark.parametrize("angles", [[0.0, 0.0], [0.5, 0.5], [1.2, 0.0], [1.2, 0.3]])
def test_derivatives_at_zero_and_repeated_singular_values(angles):
    x, u, y = (a.clone().requires_grad_() for a in with_angles(5, angles))
    v = M.random_tangent(x.detach(), torch.Generator().manual_seed(1)).requires_grad_()
    for function, args in [
        (M.exp, (x, u)),
        (M.log, (x, y)),
        (M.retract, (x, u)),
        (M.inverse_retract, (x, y)),
        (M.transport, (x, u, v)),
        (M.project, (x, v)),
    ]:
        assert gradcheck(function, args, fast_mode=True)
        assert gradgradcheck(function, args, fast_mode=True)
    if max(angles) > 0:
        assert gradcheck(M.dist, (x, y))
        assert gradgradcheck(M.dist, (x, y), fast_mode=True)


def test_haar_law(generator):
    x = M.random_point(4000, 3, 3, dtype=torch.float64, generator=generator)
    trace = x.diagonal(dim1=-2, dim2=-1).sum(-1)
    close(trace.mean(), torch.zeros((), dtype=torch.float64), 0.08)
    p = projector(M.random_point(4000, 3, 1, dtype=torch.float64, generator=generator))
    close(p.mean(0), torch.eye(3, dtype=torch.float64) / 3, 0.03)


def test_a_tangent_from_the_seed_of_its_point():
    """The Gaussian matrix that made x has no part off x: the draw is repeated, not noise blown up."""
    x = M.random_point(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u = M.random_tangent(x, torch.Generator().manual_seed(1))
    assert M.tangent_error(x, u) < 1e-15
    close(M.norm(x, u), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions(dtype, generator):
    x = M.random_point(2, 64, 8, dtype=dtype, generator=generator)
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
    x = torch.zeros(*batch, 4, 2)
    for result in (M.exp(x, x), M.log(x, x), M.retract(x, x), M.inverse_retract(x, x), M.transport(x, x, x)):
        assert result.shape == x.shape
    assert M.random_tangent(M.random_point(*batch, 4, 2)).shape == x.shape
    assert M.dist(x, x).shape == M.inner(x, x, x).shape == M.point_error(x).shape == batch


@pytest.mark.parametrize("p", [128, 192])
def test_batches_on_two_threads(p):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, u, v = frames(4, 2 * p, p, count=3)
        y = M.exp(x, 1.3 * u)
        close(M.log(x, y), 1.3 * u, 1e-13)
        z, (w,) = M.retract_transport(x, u, v)
        close(M.inverse_retract(x, z), u, 1e-13)
        close(M.norm(z, w), torch.ones(4, dtype=torch.float64), 1e-13)
    finally:
        torch.set_num_threads(threads)


def test_value_object_and_shapes():
    assert pickle.loads(pickle.dumps(M)) == M
    assert repr(M) == "Grassmann()"
    assert hash(M) == hash(Grassmann())
    with pytest.raises(ValueError, match=r"n >= p.*2 rows.*3 columns"):
        M.dim((2, 3))
    close(M.random_tangent(torch.eye(3)), torch.zeros(3, 3))
