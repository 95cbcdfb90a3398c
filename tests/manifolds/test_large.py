"""Large frames in batches of 16 on two threads, where batched LU is silently wrong on some processors."""

import pytest
import torch
from geodescent.manifolds import (
    QR,
    CanonicalMetric,
    Cayley,
    CayleyTransport,
    DifferentiatedTransport,
    EuclideanMetric,
    Exponential,
    ParallelTransport,
    Polar,
    Stiefel,
)

MANIFOLDS = [
    Stiefel(EuclideanMetric(), Polar(), DifferentiatedTransport()),
    Stiefel(EuclideanMetric(), QR(), DifferentiatedTransport()),
    Stiefel(CanonicalMetric(), Cayley(), CayleyTransport()),
    Stiefel(CanonicalMetric(), Exponential(), ParallelTransport()),
]


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("m", MANIFOLDS, ids=lambda m: type(m.retraction).__name__)
@pytest.mark.parametrize("p", [128, 192])
def test_every_path(m, p, generator):
    x = m.random_point(16, p + 60, p, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    y, w = m.retract(x, u), m.transport(x, u, v)
    assert m.point_error(y).max() < 5e-6
    assert m.tangent_error(y, w).max() < 1e-5
    # against one matrix at a time in float64, which goes other ways through the libraries
    one, at, along, carried = (t[11].double() for t in (x, x, u, v))
    assert (y[11] - m.retract(one, along)).abs().max() < 5e-6
    assert (w[11] - m.transport(at, along, carried)).abs().max() < 5e-6
    batch = slice(2) if isinstance(m.retraction, Exponential) else slice(None)  # a logarithm takes a second
    assert (m.inverse_retract(x[batch], y[batch]) - u[batch]).abs().max() < 1e-5
    assert (m.project_point(x + 0.1 * v) - Stiefel().retract(x, 0.1 * v)).abs().max() < 1e-5
    if isinstance(m.retraction, Exponential):
        hessian = m.ehess_to_rhess(x, v, u, u)
        assert (hessian[11] - m.ehess_to_rhess(one, carried, along, along)).abs().max() < 5e-6


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("m", MANIFOLDS, ids=lambda m: type(m.retraction).__name__)
def test_reduced_precision_products_do_not_reach_the_geometry(m, precision, generator):
    # "medium" makes oneDNN multiply in bfloat16 on processors that can, and "high" GPUs in TF32: 1e-3 off
    torch.set_float32_matmul_precision(precision)
    try:
        x = m.random_point(768, 256, generator=generator)
        u = m.random_tangent(x, generator)
        y, (v,) = m.retract_transport(x, u, u)
        assert torch.get_float32_matmul_precision() == precision
        assert m.point_error(y) < 5e-6
        assert m.point_error(m.project_point(x + 0.1 * u)) < 5e-6
        assert m.tangent_error(x, u) < 1e-6
        assert m.tangent_error(y, v) < 1e-5
        with pytest.raises(ValueError, match="n >= p"):
            m.project(x.mT, u.mT)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
