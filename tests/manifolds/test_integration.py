"""Metrics that a user writes: an inner product and its Riesz map, nothing else."""

import pytest
import torch
from geodescent.manifolds import (
    AlphaMetric,
    Exponential,
    LogNotConvergedError,
    Metric,
    ParallelTransport,
    Stiefel,
)
from geodescent.manifolds.linalg import frobenius_inner, sym
from torch.autograd import gradcheck


class Copied(Metric):
    """An α-metric that hides its closed forms."""

    def __init__(self, alpha: float) -> None:
        self.known = AlphaMetric(alpha)

    def inner(self, x, u, v):
        return self.known.inner(x, u, v)

    def egrad_to_rgrad(self, x, g):
        return self.known.egrad_to_rgrad(x, g)


class Conformal(Metric):
    """e^(2φ(x)) tr uᵀv with φ = x₁₁/2: not homogeneous, and of no closed form."""

    def inner(self, x, u, v):
        return torch.exp(x[..., 0, 0]) * frobenius_inner(u, v)

    def egrad_to_rgrad(self, x, g):
        return torch.exp(-x[..., 0, 0])[..., None, None] * (g - x @ sym(x.mT @ g))


def manifold(metric: Metric) -> Stiefel:
    return Stiefel(metric, Exponential(), ParallelTransport())


def points_and_tangents(m, shape, count=1):
    generator = torch.Generator().manual_seed(0)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(m.random_tangent(x, generator) for _ in range(count))


@pytest.mark.parametrize("alpha", [-0.5, 2.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 3), (2, 4, 2), (0, 4, 2)])
def test_integrated_geometry_is_the_closed_form(alpha, shape):
    ours, closed = manifold(Copied(alpha)), manifold(AlphaMetric(alpha))
    x, u, v = points_and_tangents(closed, shape, 2)
    torch.testing.assert_close(ours.exp(x, u), closed.exp(x, u), rtol=0, atol=5e-9)
    torch.testing.assert_close(ours.transport(x, u, v), closed.transport(x, u, v), rtol=0, atol=5e-9)
    torch.testing.assert_close(ours.log(x, closed.exp(x, u)), u, rtol=0, atol=2e-8)
    torch.testing.assert_close(ours.metric.acceleration(x, u, v), closed.metric.acceleration(x, u, v))
    args = (x, v + x, u, u)
    torch.testing.assert_close(ours.ehess_to_rhess(*args), closed.ehess_to_rhess(*args), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.tangent_basis(x), closed.tangent_basis(x))


@pytest.mark.parametrize("shape", [(3, 1), (4, 2)])
def test_a_metric_without_closed_forms(shape):
    m = manifold(Conformal())
    x, u, v, w = points_and_tangents(m, shape, 3)
    y, tv, tw = m.exp(x, u), m.transport(x, u, v), m.transport(x, u, w)
    assert m.point_error(y) < 1e-14
    h = 1e-3
    ends = [m.exp(x, (1 + k * h) * u) for k in (-2, -1, 1, 2)]
    velocity = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)
    torch.testing.assert_close(m.norm(y, velocity), m.norm(x, u), rtol=0, atol=1e-6)  # constant speed
    torch.testing.assert_close(m.transport(x, u, u), velocity, rtol=0, atol=1e-6)
    torch.testing.assert_close(m.inner(y, tv, tw), m.inner(x, v, w), rtol=0, atol=1e-8)
    torch.testing.assert_close(m.log(x, y), u, rtol=0, atol=1e-7)

    def f(x):
        return (x[..., 0, :] ** 3).sum(-1) + x[..., 1, 0]

    def hessian(d):
        at = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(at).sum(), at, create_graph=True)
        (product,) = torch.autograd.grad((grad * d).sum(), at)
        return m.ehess_to_rhess(x, grad.detach(), product, d)

    h = 2e-2
    values = [f(m.exp(x, k * h * u)) for k in range(-3, 4)]
    second = sum(c * value for c, value in zip([2, -27, 270, -490, 270, -27, 2], values, strict=True)) / (180 * h * h)
    torch.testing.assert_close(m.inner(x, hessian(u), u), second, rtol=0, atol=1e-5)
    torch.testing.assert_close(m.inner(x, hessian(u), v), m.inner(x, u, hessian(v)), rtol=0, atol=1e-12)


def test_integrated_exp_is_differentiable_also_at_zero():
    m = manifold(Conformal())
    x, u = points_and_tangents(m, (3, 2))
    for start in (u, 0 * u):
        assert gradcheck(lambda v: m.exp(x, m.project(x, v)), (start.clone().requires_grad_(),), atol=1e-5)


def test_no_geodesic_is_an_error_with_the_residual():
    m, x = manifold(Copied(0.0)), torch.eye(3, dtype=torch.float64)
    with pytest.raises(LogNotConvergedError, match="no geodesic of") as caught:
        m.log(x, x * torch.tensor([-1.0, 1.0, 1.0]))
    assert caught.value.residual > 0.1


def test_a_rough_metric_is_an_error():
    class Rough(Conformal):
        def inner(self, x, u, v):
            return torch.exp(400 * torch.sin(50 * x[..., 0, 0])) * frobenius_inner(u, v)

        def egrad_to_rgrad(self, x, g):
            return torch.exp(-400 * torch.sin(50 * x[..., 0, 0]))[..., None, None] * (g - x @ sym(x.mT @ g))

    m = manifold(Rough())
    x, u = points_and_tangents(Stiefel(), (3, 1))
    with pytest.raises(RuntimeError, match="not smooth enough"):
        m.exp(x, u)
