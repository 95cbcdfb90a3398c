import copy
import pickle

import geoopt
import numpy as np
import pymanopt.manifolds
import pytest
import torch
from geodescent.manifolds import (
    QR,
    AlphaMetric,
    CanonicalMetric,
    Cayley,
    EuclideanMetric,
    Metric,
    NotOnManifoldError,
    Polar,
    ProjectionTransport,
    Stiefel,
)
from hypothesis import given
from hypothesis import strategies as st

J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
SHAPES = [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3)]
EMPTY = [(0, 4, 2), (1, 0, 2, 4, 2)]
METRICS = [EuclideanMetric(), CanonicalMetric(), AlphaMetric(0.7)]


def frame_and_gaussians(shape, count=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = Stiefel().random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *(torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(count))


@st.composite
def shapes(draw):
    p = draw(st.integers(1, 5))
    n = draw(st.integers(p, 9))
    return (*draw(st.lists(st.integers(1, 3), max_size=2)), n, p)


@given(shapes(), st.integers(0, 2**31))
def test_projection_is_idempotent_selfadjoint_and_splits_off_the_normal_space(shape, seed):
    m = Stiefel()
    x, z, w = frame_and_gaussians(shape, 2, seed)
    u, v = m.project(x, z), m.project(x, w)
    assert m.tangent_error(x, u).max() < 1e-13
    torch.testing.assert_close(m.project(x, u), u, rtol=0, atol=1e-13)
    torch.testing.assert_close((u * w).sum((-2, -1)), (z * v).sum((-2, -1)), rtol=0, atol=1e-12)
    # what is left is X times a symmetric matrix
    s = x.mT @ (z - u)
    torch.testing.assert_close(s, s.mT, rtol=0, atol=1e-13)
    torch.testing.assert_close(x @ s, z - u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@given(shape=shapes(), seed=st.integers(0, 2**31))
def test_gradient_represents_the_differential_in_the_metric(metric, shape, seed):
    m = Stiefel(metric)
    x, g, w = frame_and_gaussians(shape, 2, seed)
    u, xi = m.project(x, w), m.egrad_to_rgrad(x, g)
    assert m.tangent_error(x, xi).max() < 1e-12
    torch.testing.assert_close(m.inner(x, xi, u), (g * u).sum((-2, -1)), rtol=0, atol=1e-11)


def test_gradients_of_a_worked_example():
    x = torch.eye(3, 2, dtype=torch.float64)
    g = torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=torch.float64)
    u = torch.tensor([[0.0, -1], [1, 0], [2, 3]], dtype=torch.float64)
    euclidean, canonical = Stiefel(EuclideanMetric()), Stiefel(CanonicalMetric())
    assert euclidean.egrad_to_rgrad(x, g).tolist() == [[0, -0.5], [0.5, 0], [5, 6]]
    assert canonical.egrad_to_rgrad(x, g).tolist() == [[0, -1], [1, 0], [5, 6]]
    assert float(euclidean.inner(x, euclidean.egrad_to_rgrad(x, g), u)) == 29
    assert float(canonical.inner(x, canonical.egrad_to_rgrad(x, g), u)) == 29


def test_norms_of_a_vertical_vector():
    x = torch.eye(3, 2, dtype=torch.float64)
    assert float(Stiefel(EuclideanMetric()).inner(x, x @ J, x @ J)) == 2
    assert float(Stiefel(CanonicalMetric()).inner(x, x @ J, x @ J)) == 1


def test_projection_of_a_tangent_vector_is_itself():
    # a gradient conversion used as projection doubles it, then quadruples it
    x = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(Stiefel(CanonicalMetric()).project(x, J), J)


def test_stationarity_is_judged_by_the_riemannian_gradient():
    a, x = torch.diag(torch.tensor([3.0, 2, 1], dtype=torch.float64)), torch.eye(3, 2, dtype=torch.float64)
    egrad = -2 * a @ x
    assert float(egrad.norm()) == pytest.approx(7.211103, abs=1e-6)
    assert float(Stiefel().norm(x, Stiefel().egrad_to_rgrad(x, egrad))) == 0


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (2, 6, 3)])
def test_agrees_with_geoopt_and_pymanopt(shape):
    x, g, w = frame_and_gaussians(shape, 2)
    ours, theirs = Stiefel(), geoopt.EuclideanStiefel()
    torch.testing.assert_close(ours.project(x, g), theirs.proju(x, g), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.egrad_to_rgrad(x, g), theirs.egrad2rgrad(x, g), rtol=0, atol=1e-12)
    canonical = Stiefel(CanonicalMetric())
    torch.testing.assert_close(
        canonical.egrad_to_rgrad(x, g), geoopt.CanonicalStiefel().egrad2rgrad(x, g), rtol=0, atol=1e-12
    )
    u, v = ours.project(x, g), ours.project(x, w)
    torch.testing.assert_close(canonical.inner(x, u, v), geoopt.CanonicalStiefel().inner(x, u, v), rtol=0, atol=1e-12)
    if len(shape) == 2:
        peer = pymanopt.manifolds.Stiefel(*shape)
        np.testing.assert_allclose(ours.project(x, g).numpy(), peer.projection(x.numpy(), g.numpy()), atol=1e-12)
        np.testing.assert_allclose(ours.exp(x, u).numpy(), peer.exp(x.numpy(), u.numpy()), atol=1e-12)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_exp_is_a_geodesic_of_its_metric(metric, shape):
    """Constant speed, the given start, and critical energy: its derivative along any proper variation vanishes."""
    m = Stiefel(metric)
    x, w = frame_and_gaussians(shape)
    u = 0.7 * m.random_tangent(x, torch.Generator().manual_seed(1))

    def at(t):
        return m.exp(x, t * u)

    h = 1e-4
    torch.testing.assert_close(at(0.0), x, rtol=0, atol=1e-15)
    torch.testing.assert_close((at(h) - at(-h)) / (2 * h), u, rtol=0, atol=1e-7)
    for t in (0.3, 1.0):
        velocity = (at(t + h) - at(t - h)) / (2 * h)
        torch.testing.assert_close(m.norm(at(t), velocity), m.norm(x, u), rtol=0, atol=1e-7)
        assert m.point_error(at(t)).max() < 1e-14

    steps = 200
    curve = torch.stack([at(i / steps) for i in range(steps + 1)])
    bump = torch.sin(torch.pi * torch.arange(steps + 1, dtype=torch.float64) / steps).view(-1, *(1,) * len(shape))

    def energy(s):
        varied = m.project_point(curve + s * bump * m.project(curve, w.expand(curve.shape)))
        middle = m.project_point((varied[1:] + varied[:-1]) / 2)
        difference = m.project(middle, varied[1:] - varied[:-1])
        return float(m.inner(middle, difference, difference).sum() * steps / 2)

    slope = (energy(1e-3) - energy(-1e-3)) / 2e-3
    assert abs(slope) < 1e-3 * max(1.0, energy(0.0))


def test_exp_is_not_a_retraction_in_disguise():
    x, v = torch.tensor([[1.0], [0.0]], dtype=torch.float64), torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for metric in METRICS:
        y = Stiefel(metric).exp(x, v)
        torch.testing.assert_close(y.flatten(), torch.tensor([0.540302305868140, 0.841470984807897]).double())
    assert float(Stiefel().retract(x, v)[0]) == pytest.approx(0.7071067811865476)


def test_exp_ignores_the_normal_part():
    x = torch.tensor([[1.0], [0], [0]], dtype=torch.float64)
    v = torch.tensor([[0.1], [1.0], [0]], dtype=torch.float64)
    y = Stiefel().exp(x, v)
    torch.testing.assert_close(y, torch.tensor([[np.cos(1.0)], [np.sin(1.0)], [0.0]]))


def test_random_point_is_haar():
    points = Stiefel().random_point(4000, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert abs(float((points[:, 0, 0] > 0).double().mean()) - 0.5) < 0.03
    assert abs(float(points.diagonal(dim1=1, dim2=2).sum(1).mean())) < 0.08
    assert abs(float((points[:, 0, 0] ** 2).mean()) - 1 / 3) < 0.02
    assert abs(float((torch.linalg.det(points) < 0).double().mean()) - 0.5) < 0.03


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_tangent_is_tangent_of_unit_norm(metric, shape):
    m = Stiefel(metric)
    x, _ = frame_and_gaussians(shape)
    u = m.random_tangent(x, torch.Generator().manual_seed(0))
    assert m.tangent_error(x, u).max() < 1e-14
    expected = 0.0 if shape == (1, 1) else 1.0
    torch.testing.assert_close(m.norm(x, u), torch.full(shape[:-2], expected, dtype=torch.float64))


@pytest.mark.parametrize(("shape", "dim"), [((1, 1), 0), ((2, 1), 1), ((3, 2), 3), ((4, 4), 6), ((5, 4), 10)])
def test_dim_is_the_rank_of_the_projection(shape, dim):
    x, _ = frame_and_gaussians(shape)
    basis = torch.eye(shape[0] * shape[1], dtype=torch.float64).reshape(-1, *shape)
    images = Stiefel().project(x, basis).flatten(1)
    assert Stiefel().dim(shape) == dim == int(torch.linalg.matrix_rank(images, tol=1e-10))


@pytest.mark.parametrize("shape", EMPTY)
def test_empty_batches(shape):
    m = Stiefel()
    x = m.random_point(*shape)
    for result in (m.project(x, x), m.retract(x, x), m.exp(x, x), m.random_tangent(x), m.project_point(x)):
        assert result.shape == shape
    assert m.inner(x, x, x).shape == shape[:-2]
    m.check_point(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley()], ids=repr)
def test_half_precision_is_computed_in_float32(dtype, retraction):
    m = Stiefel(retraction=retraction)
    x = m.random_point(64, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))
    u = m.random_tangent(x, torch.Generator().manual_seed(1))
    m.check_point(x)
    y, (v,) = m.retract_transport(x, u, u)
    assert (x.dtype, u.dtype, y.dtype, v.dtype, m.norm(x, u).dtype) == (dtype,) * 5
    exact = m.retract(x.float(), u.float())
    assert (y.float() - exact).abs().max() <= torch.finfo(dtype).eps
    m.check_point(y)
    assert m.exp(x, u).dtype == dtype


def test_broadcasts_one_point_against_many_vectors():
    m = Stiefel()
    x, _ = frame_and_gaussians((5, 3))
    z = torch.randn(7, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u = m.project(x, z)
    torch.testing.assert_close(u, torch.stack([m.project(x, a) for a in z]))
    for retraction in (Polar(), QR(), Cayley()):
        many = Stiefel(retraction=retraction).retract(x, u)
        torch.testing.assert_close(many, torch.stack([Stiefel(retraction=retraction).retract(x, a) for a in u]))
    torch.testing.assert_close(m.exp(x, u), torch.stack([m.exp(x, a) for a in u]))


@pytest.mark.parametrize("call", ["random_point", "project_point", "retract", "project", "check_point", "dim"])
def test_wide_shapes_are_refused_by_name(call):
    wide = torch.zeros(4, 6)
    m = Stiefel()
    arguments = {"random_point": (4, 6), "retract": (wide, wide), "project": (wide, wide), "dim": ((4, 6),)}
    with pytest.raises(ValueError, match=r"n >= p.*n = 4.*p = 6.*transpose"):
        getattr(m, call)(*arguments.get(call, (wide,)))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        Stiefel().project(torch.zeros(3), torch.zeros(3))


def test_check_point_says_how_far_off_and_where():
    x, _ = frame_and_gaussians((4, 5, 3))
    x[2] *= 2
    with pytest.raises(NotOnManifoldError, match=r"point error is 3 \(batch index \(2,\)\)") as caught:
        Stiefel().check_point(x)
    assert caught.value.error == pytest.approx(3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.error, again.atol, str(again)) == (caught.value.error, caught.value.atol, str(caught.value))
    x[1, 0, 0] = float("nan")
    with pytest.raises(NotOnManifoldError, match=r"nan \(batch index \(1,\)\)"):
        Stiefel().check_point(x)


def test_check_tangent_says_how_far_off():
    x = torch.tensor([[1.0], [0], [0]], dtype=torch.float64)
    with pytest.raises(NotOnManifoldError, match=r"not tangent .* 0\.2"):
        Stiefel().check_tangent(x, torch.tensor([[0.1], [1.0], [0]], dtype=torch.float64))
    with pytest.raises(NotOnManifoldError):
        Stiefel().check_tangent(x, torch.tensor([[float("inf")], [0], [0]], dtype=torch.float64))
    with pytest.raises(NotOnManifoldError):
        Stiefel().check_tangent(x, torch.tensor([[0.0], [float("inf")], [0]], dtype=torch.float64))
    Stiefel().check_tangent(x, 1e8 * torch.tensor([[1e-12], [1.0], [0]], dtype=torch.float64))


def test_objects_are_values():
    m = Stiefel(AlphaMetric(0.25), Cayley())
    twin = eval(repr(m), {c.__name__: c for c in (Stiefel, AlphaMetric, Cayley, ProjectionTransport)})
    for other in (twin, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other == m
        assert hash(other) == hash(m)
        assert repr(other) == repr(m)
    assert Stiefel(AlphaMetric(-0.5)) == Stiefel(EuclideanMetric())
    assert hash(AlphaMetric(0)) == hash(CanonicalMetric())
    assert Stiefel() != Stiefel(CanonicalMetric())
    assert Stiefel() != Stiefel(retraction=QR())
    with pytest.raises(AttributeError):
        m.metric = EuclideanMetric()  # type: ignore[misc]


@pytest.mark.parametrize("alpha", [-1, -2.0, float("nan"), float("inf")])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match="alpha must be a finite number above -1"):
        AlphaMetric(alpha)


def test_wrong_kind_of_argument():
    with pytest.raises(TypeError, match="metric must be a Metric object, found 'canonical'"):
        Stiefel("canonical")  # type: ignore[arg-type]


def test_what_is_missing_is_named():
    class Bare(Metric):
        def inner(self, x, u, v):
            return (u * v).sum((-2, -1))

        def egrad_to_rgrad(self, x, g):
            return Stiefel().project(x, g)

    with pytest.raises(NotImplementedError, match="Bare has no injectivity_radius"):
        _ = Stiefel(Bare()).injectivity_radius
