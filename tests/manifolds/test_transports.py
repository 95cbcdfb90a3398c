import pytest
import torch
from geodescent.manifolds import (
    QR,
    AlphaMetric,
    CanonicalMetric,
    Cayley,
    CayleyTransport,
    DifferentiatedTransport,
    EuclideanMetric,
    Exponential,
    ParallelTransport,
    Polar,
    ProjectionTransport,
    Stiefel,
)
from torch.autograd import gradcheck

PAIRS = [
    *((retraction, ProjectionTransport()) for retraction in (Polar(), QR(), Cayley(), Exponential())),
    *((retraction, DifferentiatedTransport()) for retraction in (Polar(), QR(), Cayley(), Exponential())),
    (Cayley(), CayleyTransport()),
    (Exponential(), ParallelTransport()),
]
METRICS = [EuclideanMetric(), CanonicalMetric(), AlphaMetric(-0.75), AlphaMetric(2.0)]


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize(("retraction", "transport"), PAIRS, ids=repr)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (2, 6, 3), (0, 4, 2)])
def test_transports_are_linear_tangent_and_isometric_where_they_say_so(metric, retraction, transport, shape, generator):
    m = Stiefel(metric, retraction, transport)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    u, v, w = (m.random_tangent(x, generator) for _ in range(3))
    y = m.retract(x, u)
    tv, tw = m.transport(x, u, v), m.transport(x, u, w)
    torch.testing.assert_close(m.tangent_error(y, tv), torch.zeros(shape[:-2]).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(m.transport(x, u, v + 2 * w), tv + 2 * tw, rtol=0, atol=1e-13)
    torch.testing.assert_close(m.transport(x, 0 * u, v), v, rtol=0, atol=1e-14)
    if transport.isometric:
        torch.testing.assert_close(m.inner(y, tv, tw), m.inner(x, v, w), rtol=0, atol=1e-13)
    z, (a, b) = m.retract_transport(x, u, v, w)
    torch.testing.assert_close(z, y, rtol=0, atol=0)
    torch.testing.assert_close(torch.stack([a, b]), torch.stack([tv, tw]), rtol=0, atol=0)


@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley(), Exponential()], ids=repr)
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (4, 4), (5, 3), (2, 6, 3)])
def test_differentiated_transport_is_the_derivative_of_the_retraction(retraction, shape, generator):
    m = Stiefel(CanonicalMetric(), retraction, DifferentiatedTransport())
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    h = 1e-3
    values = [m.retract(x, u + k * h * v) for k in (-2, -1, 1, 2)]
    expected = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    torch.testing.assert_close(m.transport(x, u, v), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (3, 1)])
def test_cayley_transport_is_the_orthogonal_matrix_of_the_retraction(shape, generator):
    m = Stiefel(EuclideanMetric(), Cayley(), CayleyTransport())
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    identity = torch.eye(shape[0], dtype=torch.float64)
    pu = u - x @ (x.mT @ u) / 2
    w = pu @ x.mT - x @ pu.mT
    torch.testing.assert_close((identity - w / 2) @ m.transport(x, u, v), (identity + w / 2) @ v, rtol=0, atol=1e-13)


def test_projection_takes_the_nearest_tangent_vector(generator):
    m = Stiefel()
    x = m.random_point(2, 6, 3, dtype=torch.float64, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    y, (tv,) = m.retract_transport(x, u, v)
    t = m.random_tangent(y, generator)
    assert ((v - tv) * t).sum((-2, -1)).abs().max() < 1e-14
    assert not ProjectionTransport.isometric
    assert (m.norm(y, m.transport(x, u, u)) < 0.99).all()


@pytest.mark.parametrize(
    ("transport", "retraction", "message"),
    [
        (CayleyTransport(), Polar(), r"use retraction=Cayley\(\)"),
        (ParallelTransport(), Cayley(), r"use retraction=Exponential\(\)"),
        (ParallelTransport(), Exponential(AlphaMetric(0.3)), r"use retraction=Exponential\(\)"),
    ],
)
def test_a_transport_that_ends_elsewhere_than_the_retraction_is_refused(transport, retraction, message):
    with pytest.raises(ValueError, match=message):
        Stiefel(retraction=retraction, vector_transport=transport)


def test_exponential_needs_a_metric_by_itself():
    x = torch.eye(3, 2)
    with pytest.raises(ValueError, match="use it through one, or name a metric"):
        Exponential().retract(x, 0 * x)
    assert torch.equal(Exponential(CanonicalMetric()).retract(x, 0 * x), x)
    assert Stiefel(retraction=Exponential()).retraction == Exponential()
    assert Exponential().order(CanonicalMetric()) == Exponential(CanonicalMetric()).order(CanonicalMetric()) == 2
    assert Exponential(CanonicalMetric()).order(EuclideanMetric()) == 1


@pytest.mark.parametrize(("retraction", "transport"), PAIRS, ids=repr)
@pytest.mark.parametrize("length", [0.0, 0.8])
def test_gradients_of_transports_and_inverses_also_at_zero(retraction, transport, length, generator):
    m = Stiefel(AlphaMetric(0.3), retraction, transport)
    x = m.random_point(4, 2, dtype=torch.float64, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    u = (length * u).requires_grad_()
    assert gradcheck(lambda u, v: m.transport(x, m.project(x, u), m.project(x, v)), (u, v.requires_grad_()))
    assert gradcheck(lambda u: m.inverse_retract(x, m.retract(x, m.project(x, u))), (u,))
    assert gradcheck(lambda u: m.pushforward(x, m.project(x, u), m.project(x, v.detach())), (u,))


@pytest.mark.parametrize("metric", METRICS, ids=repr)
def test_gradients_of_metric_and_hessian(metric, generator):
    m = Stiefel(metric)
    x = m.random_point(4, 2, dtype=torch.float64, generator=generator).requires_grad_()
    g, h, u = (torch.randn(4, 2, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    assert gradcheck(m.inner, (x, g, h))
    assert gradcheck(m.egrad_to_rgrad, (x, g))
    assert gradcheck(m.ehess_to_rhess, (x, g, h, u))
    assert gradcheck(m.project, (x, g))
    assert gradcheck(m.project_point, (x,))
