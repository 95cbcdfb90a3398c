import math
import pickle

import numpy as np
import pymanopt.manifolds
import pytest
import torch
from geodescent.manifolds import LogNotConvergedError
from geodescent.manifolds.oblique import Oblique
from geodescent.manifolds.sphere import Sphere
from torch.autograd import gradcheck

M, S = Oblique(), Sphere()
SHAPES = [(1, 1), (3, 1), (4, 3), (2, 5), (2, 4, 3)]


def point_and_tangents(*shape, count=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = M.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count))


def close(a, b, atol=1e-14):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_column_is_on_its_sphere(shape):
    x, u, v = point_and_tangents(*shape, count=2)
    y = M.exp(x, u)
    columns = [t.mT for t in (x, u, v, y)]
    for ours, theirs in [
        (M.exp(x, u), S.exp(columns[0], columns[1])),
        (M.log(x, y), S.log(columns[0], columns[3])),
        (M.retract(x, u), S.retract(columns[0], columns[1])),
        (M.inverse_retract(x, y), S.inverse_retract(columns[0], columns[3])),
        (M.transport(x, u, v), S.transport(columns[0], columns[1], columns[2])),
        (M.project(x, v + x), S.project(columns[0], columns[2] + columns[0])),
        (M.ehess_to_rhess(x, v, x + v, u), S.ehess_to_rhess(columns[0], columns[2], columns[0] + columns[2], u.mT)),
    ]:
        close(ours, theirs.mT)
    close(M.dist(x, y) ** 2, (S.dist(columns[0], columns[3]) ** 2).sum(-1))
    close(M.inner(x, u, v), S.inner(columns[0], columns[1], columns[2]).sum(-1))
    close((x * x).sum(-2), torch.ones_like(x[..., 0, :]))
    assert M.dim(shape) == (shape[-2] - 1) * shape[-1]


def test_worked_values():
    x = torch.eye(2, dtype=torch.float64)
    y = torch.tensor([[0.0, 0], [1, 1]], dtype=torch.float64)
    assert float(M.dist(x, y)) == pytest.approx(math.pi / 2, abs=1e-15)
    close(M.log(x, y), torch.tensor([[0, 0], [math.pi / 2, 0]], dtype=torch.float64))
    assert M.point_error(torch.tensor([[1.0, 0], [0, 2]])) == 3
    assert M.injectivity_radius == math.pi


def test_agrees_with_pymanopt():
    peer = pymanopt.manifolds.Oblique(5, 3)
    x, u, v = point_and_tangents(5, 3, count=2)
    y = M.exp(x, 0.9 * v)
    np.testing.assert_allclose(M.exp(x, u).numpy(), peer.exp(x.numpy(), u.numpy()), atol=1e-13)
    np.testing.assert_allclose(M.log(x, y).numpy(), peer.log(x.numpy(), y.numpy()), atol=1e-12)
    np.testing.assert_allclose(M.dist(x, y).numpy(), peer.dist(x.numpy(), y.numpy()), atol=1e-12)
    np.testing.assert_allclose(M.retract(x, u).numpy(), peer.retraction(x.numpy(), u.numpy()), atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 1), (4, 3), (2, 4, 3)])
def test_round_trip_unit_tangents_and_isometry(shape):
    x, u, v = point_and_tangents(*shape, count=2)
    length = 0.85 * M.injectivity_radius
    close(M.norm(x, u), torch.ones(shape[:-2], dtype=torch.float64))
    close(M.log(x, M.exp(x, length * u)), length * u, 1e-13)
    close(M.dist(x, M.exp(x, 1e-9 * u)), torch.full(shape[:-2], 1e-9, dtype=torch.float64), 1e-15)
    y, (a, b) = M.retract_transport(x, u, u, v)
    close(M.inner(y, a, b), M.inner(x, u, v))
    assert M.tangent_error(y, a).max() < 1e-15


def test_one_antipodal_column():
    x, _ = point_and_tangents(4, 3)
    y = x * torch.tensor([1.0, -1, 1], dtype=torch.float64)
    with pytest.raises(LogNotConvergedError, match="not unique"):
        M.log(x, y)
    assert float(M.dist(x, y)) == pytest.approx(math.pi)


def test_coincident_points():
    a, b = (point_and_tangents(4, 3)[0].requires_grad_() for _ in range(2))
    distance = M.dist(a, b)
    assert distance.detach() == 0
    assert torch.equal(M.log(a, b).detach(), torch.zeros_like(a))
    assert all(torch.equal(g, torch.zeros_like(a)) for g in torch.autograd.grad(distance, (a, b)))


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_derivatives(length):
    x, u, v = (a.requires_grad_() for a in point_and_tangents(3, 2, count=2))
    step = (length * u).detach().requires_grad_()
    y = M.exp(x, step).detach().requires_grad_()
    for function, args in [(M.exp, (x, step)), (M.log, (x, y)), (M.transport, (x, step, v)), (M.dist, (x, y + v))]:
        assert gradcheck(function, args, fast_mode=True)


def test_columns_are_uniform_and_independent(generator):
    x = M.random_point(20000, 2, 2, dtype=torch.float64, generator=generator)
    angles = torch.atan2(x[:, 1], x[:, 0])
    close(torch.quantile(angles, 0.25, 0), torch.full((2,), -math.pi / 2, dtype=torch.float64), 0.05)
    close((x[:, :, 0] * x[:, :, 1]).sum(-1).mean(), torch.zeros((), dtype=torch.float64), 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4, 3), (1, 0, 2, 4, 3), (2, 4, 3), (4, 0)])
def test_shapes_and_types(shape, dtype, generator):
    x = M.random_point(*shape, dtype=dtype, generator=generator)
    u = M.random_tangent(x, generator)
    for result in (M.exp(x, u), M.log(x, x), M.retract(x, u), M.transport(x, u, u)):
        assert result.shape == shape
        assert result.dtype == dtype
    M.check_point(M.exp(x, u))
    assert M.dist(x, x).shape == M.point_error(x).shape == M.inner(x, u, u).shape == shape[:-2]


def test_value_object():
    assert M == Oblique() != S
    assert pickle.loads(pickle.dumps(M)) == M
    assert repr(M) == "Oblique()"
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        M.dim((3,))
