import math

import geoopt
import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
import torch
from geodescent.manifolds import QR, AlphaMetric, CanonicalMetric, Cayley, EuclideanMetric, Polar, Stiefel
from geodescent.manifolds.linalg import skew
from torch.autograd import gradcheck, gradgradcheck

SHAPES = [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3)]
RETRACTIONS = [Polar(), QR(), Cayley()]
J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)


def frame_and_tangent(shape, length=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = Stiefel().random_point(*shape, dtype=dtype, generator=generator)
    return x, length * Stiefel().random_tangent(x, generator)


@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_a_retraction(retraction, shape):
    x, u = frame_and_tangent(shape)
    torch.testing.assert_close(retraction.retract(x, 0 * u), x, rtol=0, atol=1e-15)
    assert Stiefel().point_error(retraction.retract(x, u)).max() < 1e-14
    for t in (1e-4, 1e-6):
        slope = (retraction.retract(x, t * u) - x) / t
        torch.testing.assert_close(slope, u, rtol=0, atol=2 * t + 1e-9)


@pytest.mark.parametrize("metric", [EuclideanMetric(), CanonicalMetric(), AlphaMetric(0.7)], ids=repr)
@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
def test_measured_order_is_the_claimed_one(retraction, metric):
    m = Stiefel(metric)
    x, u = frame_and_tangent((9, 4))
    errors = [float((retraction.retract(x, t * u) - m.exp(x, t * u)).norm()) for t in (2e-2, 1e-2)]
    slope = math.log2(errors[0] / errors[1])
    assert slope == pytest.approx(retraction.order(metric) + 1, abs=0.05)


@pytest.mark.parametrize("metric", [EuclideanMetric(), CanonicalMetric(), AlphaMetric(0.7)], ids=repr)
@pytest.mark.parametrize(("retraction", "shape"), [(Polar(), (4, 4)), (Cayley(), (4, 4)), (QR(), (5, 1))])
def test_order_is_higher_at_the_corner_shapes(retraction, shape, metric):
    m = Stiefel(metric)
    x, u = frame_and_tangent(shape)
    errors = [float((retraction.retract(x, t * u) - m.exp(x, t * u)).norm()) for t in (2e-2, 1e-2)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_inverse_gives_the_tangent_vector_back(retraction, shape):
    x, u = frame_and_tangent(shape, 0.6)
    v = retraction.inverse_retract(x, retraction.retract(x, u))
    torch.testing.assert_close(v, u, rtol=0, atol=1e-13)
    assert Stiefel().tangent_error(x, v).max() < 1e-13


@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
@pytest.mark.parametrize("shape", [(3, 1), (6, 4), (4, 4)])
def test_inverse_refuses_the_antipode_and_a_reflection(retraction, shape):
    x, _ = frame_and_tangent(shape)
    first = x[:, :1]
    for y in (-x, x - 2 * first @ (first.mT @ x)):
        with pytest.raises(ValueError, match="not in the range"):
            retraction.inverse_retract(x, y)


@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (2, 5, 2)])
def test_gradients_also_at_zero(retraction, shape):
    m = Stiefel(retraction=retraction)
    x, u = frame_and_tangent(shape)

    def step(u):
        return m.retract(x, m.project(x, u))

    for v in (u, 0 * u):
        v = v.clone().requires_grad_()
        assert gradcheck(step, (v,))
        assert gradgradcheck(step, (v,))


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (16, 4)])
def test_agrees_with_geoopt_pymanopt_and_definitions(shape):
    x, u = frame_and_tangent(shape)
    torch.testing.assert_close(QR().retract(x, u), geoopt.EuclideanStiefel().retr(x, u), rtol=0, atol=1e-12)
    for retraction, kind in ((Polar(), "polar"), (QR(), "qr")):
        peer = pymanopt.manifolds.Stiefel(*shape, retraction=kind)
        ours = retraction.retract(x, u).numpy()
        np.testing.assert_allclose(ours, peer.retraction(x.numpy(), u.numpy()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(Polar().retract(x, u).numpy(), scipy.linalg.polar((x + u).numpy())[0], atol=1e-13)

    # The n×n definition of the Cayley retraction.
    n = shape[0]
    identity = torch.eye(n, dtype=torch.float64)
    pu = u - x @ (x.mT @ u) / 2
    w = pu @ x.mT - x @ pu.mT
    y = Cayley().retract(x, u)
    torch.testing.assert_close((identity - w / 2) @ y, (identity + w / 2) @ x, rtol=0, atol=1e-13)
    # geoopt 0.5.1's canonical retraction leaves out the P above and turns twice as fast about vertical directions
    # (its derivative at 0 is u + xxᵀu); corrected by half the vertical part it is the Cayley retraction.
    theirs = geoopt.CanonicalStiefel().retr(x, pu)
    torch.testing.assert_close(y, theirs, rtol=0, atol=1e-12)


def test_cayley_has_the_right_speed_about_a_vertical_direction():
    x = torch.eye(2, dtype=torch.float64)
    y = Cayley().retract(x, J)
    assert math.atan2(float(y[1, 0]), float(y[0, 0])) == pytest.approx(2 * math.atan(0.5), abs=1e-12)
    assert 2 * math.atan(0.5) == pytest.approx(0.927295, abs=1e-6)


@pytest.mark.parametrize("t", [0.5, 1.0, 2.0, 4.0, 100.0])
def test_cayley_holds_for_long_steps(t):
    x, _ = frame_and_tangent((16, 4))
    w = skew(torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    u = t * w @ x / torch.linalg.matrix_norm(w, 2)
    assert Stiefel().point_error(Cayley().retract(x, u)) < 1e-12


@pytest.mark.parametrize("retraction", [Polar(), QR()], ids=repr)
@pytest.mark.parametrize("length", [1e9, 1e16])
def test_huge_steps_stay_on_the_manifold(retraction, length):
    x, u = frame_and_tangent((6, 4), length)
    assert Stiefel().point_error(retraction.retract(x, u)) < 1e-14


@pytest.mark.parametrize("retraction", RETRACTIONS, ids=repr)
def test_rounding_in_the_point_is_damped(retraction):
    m = Stiefel(retraction=retraction)
    generator = torch.Generator().manual_seed(0)
    x = m.random_point(24, 8, dtype=torch.float32, generator=generator)
    for _ in range(500):
        x = m.retract(x, 0.1 * m.random_tangent(x, generator))
    assert m.point_error(x) < 2e-6
