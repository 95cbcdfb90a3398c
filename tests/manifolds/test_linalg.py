import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from geodescent.manifolds import linalg
from torch.autograd import gradcheck, gradgradcheck

J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (5, 3), (4, 4), (2, 3, 6, 2)])
def test_polar_factor_agrees_with_scipy(shape):
    a = gaussian(*shape)
    ours = linalg.polar_factor(a).reshape(-1, *shape[-2:])
    for q, matrix in zip(ours, a.reshape(-1, *shape[-2:]), strict=True):
        np.testing.assert_allclose(q.numpy(), scipy.linalg.polar(matrix.numpy())[0], rtol=0, atol=1e-13)


def test_polar_factor_to_fifty_digits():
    a = [[3, 1], [1, 2], [0, -1]]
    with mpmath.workdps(50):
        m = mpmath.matrix(a)
        values, vectors = mpmath.eigsy(m.T * m)
        root = vectors * mpmath.diag([1 / mpmath.sqrt(v) for v in values]) * vectors.T
        expected = np.array((m * root).tolist(), dtype=float)
    q = linalg.polar_factor(torch.tensor(a, dtype=torch.float64))
    np.testing.assert_allclose(q.numpy(), expected, rtol=0, atol=2e-16)


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1.0, 1e9, 1e300])
def test_polar_factor_does_not_depend_on_scale(scale):
    a = gaussian(8, 5)
    torch.testing.assert_close(linalg.polar_factor(scale * a), linalg.polar_factor(a), rtol=0, atol=1e-14)


@pytest.mark.parametrize("condition", [1e1, 1e4, 1e8, 1e12, 1e16, float("inf")])
def test_polar_factor_is_orthonormal_at_any_condition(condition):
    left, right = torch.linalg.qr(gaussian(9, 4))[0], torch.linalg.qr(gaussian(4, 4, seed=1))[0]
    singular = torch.tensor([1.0, 0.7, 0.1, 1 / condition], dtype=torch.float64)
    q = linalg.polar_factor(left * singular @ right.mT)
    assert (q.mT @ q - torch.eye(4)).abs().max() < 1e-14
    if condition <= 1e8:
        assert (q - left @ right.mT).abs().max() < 1e-15 * condition + 1e-13


def test_polar_factor_mixes_good_and_bad_matrices_of_a_batch():
    batch = gaussian(6, 5, 3)
    batch[2] = 0
    batch[4] *= torch.tensor([1.0, 1e-9, 1.0])
    torch.testing.assert_close(
        linalg.polar_factor(batch), torch.stack([linalg.polar_factor(a) for a in batch]), rtol=0, atol=1e-14
    )


def test_polar_factor_names_nan_input():
    with pytest.raises(ValueError, match="NaN or infinite"):
        linalg.polar_factor(torch.full((3, 2), float("nan")))


@pytest.mark.parametrize(
    ("a", "entry", "expected"),
    [
        (J, (0, 1), [[0, 0], [0, 0]]),
        (torch.eye(2, dtype=torch.float64), (1, 0), [[0, -0.5], [0.5, 0]]),
        (torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)), (1, 0), [[0, -1 / 3], [1 / 3, 0]]),
    ],
)
def test_polar_factor_derivative_at_equal_singular_values(a, entry, expected):
    # differentiating an SVD gives NaN at the first two
    a = a.clone().requires_grad_()
    (grad,) = torch.autograd.grad(linalg.polar_factor(a)[entry], a)
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (2, 5, 2)])
def test_polar_factor_gradients(shape):
    a = gaussian(*shape).requires_grad_()
    assert gradcheck(linalg.polar_factor, (a,))
    assert gradgradcheck(linalg.polar_factor, (a,))


def test_lyapunov_solve_against_scipy_and_its_gradients():
    root, c = gaussian(4, 4), gaussian(4, 4, seed=1)
    s = root @ root.mT + torch.eye(4)
    expected = scipy.linalg.solve_continuous_lyapunov(s.numpy(), c.numpy())
    np.testing.assert_allclose(linalg.lyapunov_solve(s, c).numpy(), expected, atol=1e-13)

    def of_root(root, c):
        return linalg.lyapunov_solve(root @ root.mT + torch.eye(4), c)

    inputs = (root.requires_grad_(), c.requires_grad_())
    assert gradcheck(of_root, inputs)
    assert gradgradcheck(of_root, inputs)


@pytest.mark.parametrize("rotation", [0.0, 0.3, 3.0])
def test_stein_lyapunov_solve_against_scipy(rotation):
    m = torch.eye(5) * 0.7 + rotation * linalg.skew(gaussian(5, 5)) + 0.05 * linalg.sym(gaussian(5, 5, seed=1))
    c = linalg.sym(gaussian(5, 5, seed=2))
    expected = scipy.linalg.solve_continuous_lyapunov(m.numpy(), c.numpy())
    np.testing.assert_allclose(linalg.stein_lyapunov_solve(m, c).numpy(), expected, atol=1e-11)


def test_stein_lyapunov_solve_refuses_what_does_not_converge():
    with pytest.raises(ValueError, match="not positive"):
        linalg.stein_lyapunov_solve(-torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("p", [128, 192])
def test_solve_right_is_right_in_batches_on_two_threads(p):
    # batched LU of 160 rows and more is silently wrong here with torch 2.13.0 on some processors
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        k = torch.eye(p) + 0.3 * gaussian(16, p, p, dtype=torch.float32) / p**0.5
        b = gaussian(16, 3, p, seed=1, dtype=torch.float32)
        assert (linalg.solve_right(b, k) @ k - b).abs().max() < 1e-4
    finally:
        torch.set_num_threads(threads)


def test_qr_positive_is_the_unique_factorization():
    a = gaussian(3, 6, 4)
    q, r = linalg.qr_positive(a)
    torch.testing.assert_close(q @ r, a)
    assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()
    # uniqueness: the QR factorization of an orthonormal Q times a triangle with positive diagonal gives both back
    q2, r2 = linalg.qr_positive(q @ (r + torch.eye(4)))
    torch.testing.assert_close(q2, q, rtol=0, atol=1e-13)
    torch.testing.assert_close(r2, r + torch.eye(4), rtol=0, atol=1e-13)


def test_working_precision_computes_in_float32_and_returns_the_points_dtype():
    seen = []

    @linalg.working_precision
    def pair(x, u, *, flag=None):
        seen.append((x.dtype, u.dtype))
        return x + u, (u.isnan(), flag)

    x, u = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.float32)
    total, (mask, flag) = pair(x, u, flag="kept")
    assert seen == [(torch.float32, torch.float32)]
    assert (total.dtype, mask.dtype, flag) == (torch.bfloat16, torch.bool, "kept")


def test_default_atol_refuses_integers():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        linalg.default_atol(torch.int64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
@pytest.mark.parametrize("norm", [0.0, 1e-12, 1e-4, 1e-3, 0.04, 0.06, 0.099, 0.101, 0.3, 0.5, 0.58, 0.61, 1.0, 4.0])
def test_expm_to_working_precision(dtype, batch, norm):
    # torch's matrix_exp loses half the digits between 3e-4 and 5e-2 in float64, 5e-2 and 0.58 in float32
    a = gaussian(*batch, 3, 3)
    a = (norm * a / a.abs().sum(-2).amax(-1)[..., None, None]).to(dtype)
    expected = np.stack([scipy.linalg.expm(m.double().numpy()) for m in a.reshape(-1, 3, 3)]).reshape(a.shape)
    np.testing.assert_allclose(
        linalg.expm(a).double().numpy(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps * np.exp(norm)
    )


@pytest.mark.parametrize("norm", [1e-3, 0.04, 0.5])
def test_expm_backward_to_working_precision(norm):
    a, g = gaussian(3, 3), 0.01 * gaussian(3, 3, seed=1)
    a = (norm * a / a.abs().sum(-2).amax()).requires_grad_()
    (grad,) = torch.autograd.grad((linalg.expm(a) * g).sum(), a)
    expected = scipy.linalg.expm_frechet(a.detach().numpy().T, g.numpy(), compute_expm=False)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=0, atol=1e-16)


def test_lu_unpivoted_is_a_factorization():
    m = gaussian(2, 5, 5) + 5 * torch.eye(5)
    lower, upper = linalg.lu_unpivoted(m)
    torch.testing.assert_close(lower @ upper, m)
    torch.testing.assert_close(lower.triu(), torch.eye(5, dtype=torch.float64).expand(2, 5, 5))
    torch.testing.assert_close(upper.tril(-1), torch.zeros(2, 5, 5, dtype=torch.float64))
