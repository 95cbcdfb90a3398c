import math
import pickle

import geoopt
import mpmath
import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
import torch
from geodescent.manifolds import NotOnManifoldError
from geodescent.manifolds.spd import SymmetricPositiveDefinite
from torch.autograd import gradcheck, gradgradcheck

M = SymmetricPositiveDefinite()
SHAPES = [(1, 1), (2, 2), (5, 5), (2, 3, 3)]


def matrices(*shape, count=2, seed=0):
    """A point, and unit tangent vectors there."""
    generator = torch.Generator().manual_seed(seed)
    x = M.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count - 1))


def conditioned(condition, n, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    a = q @ torch.diag(values) @ q.mT
    return (a + a.mT) / 2


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


def test_positive_numbers():
    """1×1: the metric uv/x² makes the logarithm an isometry; f(x) = x has the gradient 4 at x = 2."""
    x, y, one = (torch.tensor([[a]], dtype=torch.float64) for a in (2.0, 10.0, 1.0))
    assert float(M.egrad_to_rgrad(x, one)) == 4
    assert float(M.dist(x, y)) == pytest.approx(math.log(5), rel=1e-15)
    assert float(M.log(x, y)) == pytest.approx(2 * math.log(5), rel=1e-15)
    assert float(M.exp(x, one)) == pytest.approx(2 * math.exp(0.5), rel=1e-15)
    assert float(M.retract(x, one)) == pytest.approx(3.25, rel=1e-15)
    assert float(M.norm(x, one)) == pytest.approx(0.5, rel=1e-15)
    assert M.injectivity_radius == math.inf
    assert [M.dim((n, n)) for n in (1, 2, 3)] == [1, 3, 6]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1e-9, 0.1, 5.0])
def test_exp_log_and_distance(shape, length):
    x, u = matrices(*shape)
    y = M.exp(x, length * u)
    assert M.point_error(y).max() == 0
    # what storing y loses is ε times the condition number
    close(M.log(x, y), length * u, 1e-12)
    close(M.dist(x, y), torch.full(shape[:-2], length, dtype=torch.float64), 1e-13)


def test_exp_and_log_by_the_matrix_functions_of_scipy():
    """x^½ f(x^−½ · x^−½) x^½ with the symmetric square root, where the code uses a Cholesky factor."""
    x, u, v = (a.numpy() for a in matrices(4, 4, count=3))
    y = M.exp(torch.tensor(x), torch.tensor(2 * v)).numpy()
    root = np.asarray(scipy.linalg.sqrtm(x))
    inverse = np.linalg.inv(root)
    np.testing.assert_allclose(
        M.exp(torch.tensor(x), torch.tensor(u)).numpy(),
        root @ scipy.linalg.expm(inverse @ u @ inverse) @ root,
        atol=1e-13,
    )
    np.testing.assert_allclose(
        M.log(torch.tensor(x), torch.tensor(y)).numpy(),
        root @ np.asarray(scipy.linalg.logm(inverse @ y @ inverse)) @ root,
        atol=1e-13,
    )
    values = scipy.linalg.eigvalsh(y, x)
    assert float(M.dist(torch.tensor(x), torch.tensor(y))) == pytest.approx(np.linalg.norm(np.log(values)), rel=1e-13)


@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_ill_conditioned_pairs_against_50_digits(condition):
    x, y = conditioned(condition, 5, 0), conditioned(condition, 5, 1)
    with mpmath.workdps(50):
        factor = mpmath.cholesky(mpmath.matrix(x.tolist()))
        inverse = factor**-1
        values, vectors = mpmath.eigsy(inverse * mpmath.matrix(y.tolist()) * inverse.T)
        logs = [mpmath.log(v) for v in values]
        distance = float(mpmath.sqrt(sum(a * a for a in logs)))
        log = factor * vectors * mpmath.diag(logs) * vectors.T * factor.T
        expected = torch.tensor([[float(log[i, j]) for j in range(5)] for i in range(5)], dtype=torch.float64)
    assert float(M.dist(x, y)) == pytest.approx(distance, rel=1e-11)
    assert float(M.norm(x, M.log(x, y) - expected)) < 1e-10 * distance
    u = M.random_tangent(x, torch.Generator().manual_seed(2))
    assert float(M.norm(x, M.log(x, M.exp(x, 5 * u)) - 5 * u)) < 5e-10


def test_isometries():
    """X → AXAᵀ and X → X⁻¹ keep distances; the midpoint of the geodesic is the geometric mean."""
    x, u = matrices(4, 4)
    y = M.exp(x, 1.7 * u)
    a = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert float(M.dist(a @ x @ a.mT, a @ y @ a.mT)) == pytest.approx(1.7, rel=1e-12)
    assert float(M.dist(torch.linalg.inv(x), torch.linalg.inv(y))) == pytest.approx(1.7, rel=1e-12)
    mean = M.exp(x, M.log(x, y) / 2)
    close(mean @ torch.linalg.inv(x) @ mean, y, 1e-13)  # the Riccati equation of the geometric mean


def test_agrees_with_pymanopt_and_geoopt():
    peer, other = pymanopt.manifolds.SymmetricPositiveDefinite(4), geoopt.SymmetricPositiveDefinite()
    x, u, v = matrices(4, 4, count=3)
    y = M.exp(x, v)
    g, h = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for found, expected in [
        (M.exp(x, u), peer.exp(x.numpy(), u.numpy())),
        (M.log(x, y), peer.log(x.numpy(), y.numpy())),
        (M.dist(x, y), peer.dist(x.numpy(), y.numpy())),
        (M.inner(x, u, v), peer.inner_product(x.numpy(), u.numpy(), v.numpy())),
        (M.egrad_to_rgrad(x, g), peer.euclidean_to_riemannian_gradient(x.numpy(), g.numpy())),
        (
            M.ehess_to_rhess(x, g, h, u),
            peer.euclidean_to_riemannian_hessian(x.numpy(), g.numpy(), h.numpy(), u.numpy()),
        ),
        (M.retract(x, u), peer.retraction(x.numpy(), u.numpy())),
        (M.exp(x, u), other.expmap(x, u).numpy()),
        (M.retract(x, u), other.retr(x, u).numpy()),
        (M.inner(x, u, v), other.inner(x, u, v).numpy()),
        (M.transport(x, u, v), other.transp(x, other.retr(x, u), v).numpy()),
    ]:
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_riesz_identity_and_hessian():
    x, u = matrices(4, 4)
    a = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def f(y):
        return torch.logdet(y) ** 2 + (a * y).sum() ** 2 + (y @ a @ y).sum()

    egrad, ehess_u = gradient_and_hessian(f, x, u)
    close(M.inner(x, M.egrad_to_rgrad(x, egrad), u), (egrad * u).sum(), 1e-11)
    second = second_derivative(lambda s: f(M.exp(x, s * u)))
    close(M.inner(x, M.ehess_to_rhess(x, egrad, ehess_u, u), u), second, 1e-10)


def test_coincident_points():
    x, _ = matrices(2, 4, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    distance = M.dist(a, b)
    assert torch.equal(distance.detach(), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(M.log(x, x), torch.zeros_like(x))
    assert all(torch.equal(g, torch.zeros_like(x)) for g in torch.autograd.grad(distance.sum(), (a, b)))
    # one part in 1e9 apart, to the digits that the difference has
    assert float(M.dist(x, (1 + 1e-9) * x)[0]) == pytest.approx(2e-9, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_transport_is_parallel(shape):
    """Isometric, takes velocity to velocity, and solves V' = ½(UX⁻¹V + VX⁻¹U), which the metric's connection says."""
    x, u, v = matrices(*shape, count=3)
    y, (tv, tu) = M.retract_transport(x, u, v, M.log(x, M.retract(x, u)))
    close(M.norm(y, tv), torch.ones(shape[:-2], dtype=torch.float64), 1e-13)
    close(tu, -M.log(y, x), 1e-13)
    h = 1e-4
    change = (M.transport(x, h * u, v) - M.transport(x, -h * u, v)) / (2 * h)
    half = u @ torch.linalg.inv(x) @ v / 2
    close(change, half + half.mT, 1e-7)


@pytest.mark.parametrize("length", [1.0, 1e3])
def test_retraction(length):
    x, u = matrices(5, 5)
    errors = [float((M.retract(x, t * u) - M.exp(x, t * u)).norm()) for t in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(3, abs=0.01)
    assert M.point_error(M.retract(x, length * u)) == 0
    assert M.point_error(M.retract(x, -length * u)) == 0
    close(M.retract(x, 0 * u), x, 0)
    close(M.inverse_retract(x, M.retract(x, 0.9 * u)), 0.9 * u, 1e-13)
    with pytest.raises(ValueError, match="not positive definite"):
        M.inverse_retract(x, x / 4)
    v = matrices(5, 5, count=3)[2]
    close(M.pushforward(x, u, v), (M.retract(x, u + 1e-5 * v) - M.retract(x, u - 1e-5 * v)) / 2e-5, 1e-9)


@pytest.mark.parametrize("eigenvalues", [[1.0, 1, 1], [2.0, 2, 0.5], [3.0, 2.9, 1e-3], [1.0, 1e-7, 1e-7]])
def test_derivatives_at_repeated_eigenvalues(eigenvalues):
    """The base point is I and the other has these eigenvalues, so the logarithm is taken of exactly them."""
    q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    x = torch.eye(3, dtype=torch.float64).requires_grad_()
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    y = (q @ torch.diag(values) @ q.mT).requires_grad_()
    g = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if min(eigenvalues) > 1e-2:
        assert gradcheck(M.log, (x, y), fast_mode=True)
        assert gradgradcheck(M.log, (x, y), fast_mode=True)
    # the derivative by a difference quotient in 60 digits
    e = (g + g.mT) / 2
    with mpmath.workdps(60):

        def log(h):
            w, v = mpmath.eigsy(mpmath.matrix(y.tolist()) + h * mpmath.matrix(e.tolist()))
            return v * mpmath.diag([mpmath.log(a) for a in w]) * v.T

        h = mpmath.mpf(10) ** -20
        quotient = (log(h) - log(-h)) / (2 * h)
    expected = torch.tensor([[float(quotient[i, j]) for j in range(3)] for i in range(3)], dtype=torch.float64)
    (found,) = torch.autograd.grad(M.log(x.detach(), y), y, e)
    close(found, expected, 1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("length", [0.0, 0.8])
def test_derivatives(length):
    x, u, v = (a.requires_grad_() for a in matrices(2, 3, 3, count=3))
    step = (length * u).detach().requires_grad_()
    y = M.exp(x, step).detach().requires_grad_()
    for function, args in [
        (M.exp, (x, step)),
        (M.log, (x, y)),
        (M.retract, (x, step)),
        (M.inverse_retract, (x, y)),
        (M.transport, (x, step, v)),
        (M.inner, (x, u, v)),
        (M.egrad_to_rgrad, (x, v)),
    ]:
        assert gradcheck(function, args, fast_mode=True)
        assert gradgradcheck(function, args, fast_mode=True)
    indefinite = (x - 2 * v).detach().requires_grad_()
    assert gradcheck(M.project_point, (indefinite,), fast_mode=True)
    if length > 0:
        assert gradcheck(M.dist, (x, y), fast_mode=True)
        assert gradgradcheck(M.dist, (x, y), fast_mode=True)


def test_points_and_projection():
    a = torch.diag(torch.tensor([2.0, -1.0], dtype=torch.float64))
    projected = M.project_point(a)
    close(projected, torch.diag(torch.tensor([2.0, 0], dtype=torch.float64)), 1e-14)
    M.check_point(projected)
    M.check_point(M.project_point(torch.zeros(3, 3)))
    x, _ = matrices(3, 3)
    assert torch.equal(M.project_point(x), x)  # a point stays as it is, to the last bit
    skewed = torch.tensor([[0.0, 1], [-1, 0]])
    close(M.project_point(torch.eye(2) + skewed), torch.eye(2))
    assert M.point_error(a) == 1
    assert M.point_error(torch.eye(2) + skewed) == 2
    assert M.tangent_error(torch.eye(2), skewed) == 2
    with pytest.raises(NotOnManifoldError, match="positive definite"):
        M.exp(a, a)
    with pytest.raises(NotOnManifoldError, match="y is not positive definite"):
        M.log(x, -x)
    with pytest.raises(NotOnManifoldError, match="nan"):
        M.check_point(torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match="NaN"):
        M.project_point(torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match="square"):
        M.dim((2, 3))


def test_law_of_random_points(generator):
    """Invariant under inversion and rotation: log x has mean 0, and its entries the covariance of a GOE."""
    x = M.random_point(4000, 3, 3, dtype=torch.float64, generator=generator)
    logs = M.log(torch.eye(3, dtype=torch.float64), x) * 3**0.5
    close(logs.mean(0), torch.zeros(3, 3, dtype=torch.float64), 0.06)
    close((logs**2).mean(0), (torch.ones(3, 3) + torch.eye(3)).double() / 2, 0.06)


def test_random_tangents_are_isotropic_and_basis_orthonormal(generator):
    x = conditioned(1e4, 3, 0)
    u = M.random_tangent(x.expand(4000, 3, 3), generator)
    basis = M.tangent_basis(x)
    close(M.inner(x, basis.unsqueeze(0), basis.unsqueeze(1)), torch.eye(6, dtype=torch.float64), 1e-12)
    coordinates = M.inner(x, u.unsqueeze(1), basis)
    close(coordinates.mT @ coordinates / 4000, torch.eye(6, dtype=torch.float64) / 6, 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions(dtype, generator):
    x = M.random_point(2, 4, 4, dtype=dtype, generator=generator)
    u = M.random_tangent(x, generator)
    y = M.exp(x, u)
    for point in (x, y, M.retract(x, u)):
        assert point.dtype == dtype
        M.check_point(point)
    # storing y costs its rounding times the condition number of x
    eps = torch.finfo(dtype).eps * 20
    assert float((M.log(x, y) - u).abs().max()) < eps
    assert float((M.dist(x, y) - 1).abs().max()) < eps


@pytest.mark.parametrize("batch", [(0,), (1, 0, 2)])
def test_empty_batches(batch):
    x = torch.zeros(*batch, 3, 3)
    for result in (M.exp(x, x), M.log(x, x), M.retract(x, x), M.inverse_retract(x, x), M.transport(x, x, x)):
        assert result.shape == x.shape
    assert M.project_point(M.random_tangent(M.random_point(*batch, 3, 3))).shape == x.shape
    assert M.dist(x, x).shape == M.inner(x, x, x).shape == M.point_error(x).shape == batch


def test_batches_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, u, v = matrices(3, 192, 192, count=3)
        y = M.exp(x, 3 * u)
        close(M.log(x, y), 3 * u, 1e-12)
        z, (w,) = M.retract_transport(x, u, v)
        close(M.inverse_retract(x, z), u, 1e-12)
        close(M.norm(z, w), torch.ones(3, dtype=torch.float64), 1e-12)
    finally:
        torch.set_num_threads(threads)


def test_value_object():
    assert pickle.loads(pickle.dumps(M)) == M
    assert repr(M) == "SymmetricPositiveDefinite()"
    assert hash(M) == hash(SymmetricPositiveDefinite())
