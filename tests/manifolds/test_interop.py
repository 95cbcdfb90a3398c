import copy
import pickle
import sys

import geoopt
import pytest
import torch
from geodescent.manifolds import (
    QR,
    CanonicalMetric,
    Cayley,
    CayleyTransport,
    Euclidean,
    Exponential,
    ManifoldParameter,
    Stiefel,
)
from geodescent.manifolds.grassmann import Grassmann
from geodescent.manifolds.interop import GeooptManifold, from_geoopt, to_geoopt
from geodescent.manifolds.oblique import Oblique
from geodescent.manifolds.product import Product
from geodescent.manifolds.spd import SymmetricPositiveDefinite
from geodescent.manifolds.special_orthogonal import SpecialOrthogonal
from geodescent.manifolds.sphere import Sphere
from geodescent.optim import RiemannianAdam

PRODUCT = Product((Stiefel(), (4, 2)), (Sphere(), (3,)))
OURS = [
    (Stiefel(), (5, 3)),
    (Stiefel(CanonicalMetric(), Cayley(), CayleyTransport()), (5, 3)),
    (Sphere(), (4,)),
    (Oblique(), (4, 3)),
    (Grassmann(), (6, 2)),
    (SpecialOrthogonal(), (4, 4)),
    (SymmetricPositiveDefinite(), (3, 3)),
    (PRODUCT, (PRODUCT.size,)),
]
IDS = [repr(m)[:40] for m, _ in OURS]
SCALED = geoopt.Scaled(geoopt.EuclideanStiefel(), 2.0)


def points(manifold, shape, count=2):
    generator = torch.Generator().manual_seed(3)
    return [manifold.random_point(*shape, dtype=torch.float64, generator=generator) for _ in range(count)]


def parameter(data, manifold):
    return geoopt.ManifoldParameter(data, manifold=manifold)  # type: ignore[call-arg]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("manifold", "shape"), OURS, ids=IDS)
def test_geoopt_optimizers_run_on_our_spaces(manifold, shape, optimizer):
    """They get to a nearby target point, and every iterate stays on the manifold."""
    x, _ = points(manifold, shape)
    target = manifold.exp(x, 0.4 * manifold.random_tangent(x, torch.Generator().manual_seed(4)))
    p = parameter(x.clone(), to_geoopt(manifold))
    if optimizer == "adam":
        steps = geoopt.optim.RiemannianAdam([p], lr=0.04, stabilize=10)
    else:
        steps = geoopt.optim.RiemannianSGD([p], lr=0.2, momentum=0.5)  # type: ignore[arg-type]

    def loss():  # between subspaces, or between tensors
        embed = (lambda y: y @ y.mT) if isinstance(manifold, Grassmann) else (lambda y: y)
        return (embed(p) - embed(target)).square().sum() / 2

    first = float(loss().detach())
    for _ in range(30):
        steps.zero_grad()
        loss().backward()
        steps.step()
        assert manifold.point_error(p.detach()) < 1e-12
    assert float(loss().detach()) < 0.05 * first


@pytest.mark.parametrize(("manifold", "shape"), OURS, ids=IDS)
def test_wrapped_maps_are_ours(manifold, shape):
    wrapped = to_geoopt(manifold)
    x, _ = points(manifold, (2, *shape))
    u, v = (0.1 * manifold.random_tangent(x, torch.Generator().manual_seed(i)) for i in (1, 2))
    y = wrapped.retr(x, u)
    assert torch.equal(y, manifold.retract(x, u))
    torch.testing.assert_close(wrapped.transp(x, y, v), manifold.transport(x, u, v), rtol=0, atol=1e-13)
    assert torch.equal(wrapped.retr_transp(x, u, v)[1], wrapped.transp_follow_retr(x, u, v))
    assert torch.equal(wrapped.expmap(x, u), manifold.exp(x, u))
    assert torch.equal(wrapped.logmap(x, y), manifold.log(x, y))
    assert wrapped.dist(x, y).shape == wrapped.norm(x, u).shape == (2,)
    assert wrapped.dist(x, y, keepdim=True).shape == wrapped.component_inner(x, u).shape == (2,) + (1,) * len(shape)
    torch.testing.assert_close(wrapped.inner(x, u), wrapped.inner(x, u, u))
    torch.testing.assert_close(wrapped.dist2(x, y), manifold.dist(x, y) ** 2)
    assert wrapped.check_point_on_manifold(x)
    assert wrapped.check_vector_on_tangent(x, u)
    off = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    assert not wrapped.check_point_on_manifold(x + off)
    assert not wrapped.check_vector_on_tangent(x, u + off)
    y, w = wrapped.expmap_transp(x, u, v)
    assert manifold.tangent_error(y, w).max() < 1e-12
    assert torch.equal(wrapped.transp_follow_expmap(x, u, v), w)
    assert wrapped.random(*shape).manifold is wrapped
    assert torch.equal(wrapped.origin(*shape), wrapped.origin(shape))


@pytest.mark.parametrize(("manifold", "shape"), OURS, ids=IDS)
def test_there_and_back(manifold, shape):
    wrapped = to_geoopt(manifold)
    assert from_geoopt(wrapped) == manifold
    assert wrapped == to_geoopt(manifold)
    assert hash(wrapped) == hash(to_geoopt(manifold))
    assert wrapped != to_geoopt(Stiefel(CanonicalMetric()))
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):  # ours, not a file's
        assert again == wrapped
    assert repr(manifold) in repr(wrapped)
    p = parameter(points(manifold, shape)[0], wrapped)
    assert copy.deepcopy(p).manifold == wrapped


def test_classes_of_the_same_space():
    assert isinstance(to_geoopt(Stiefel()), geoopt.EuclideanStiefel)
    assert isinstance(to_geoopt(Stiefel(CanonicalMetric())), geoopt.CanonicalStiefel)
    assert isinstance(to_geoopt(Sphere()), geoopt.Sphere)
    assert isinstance(to_geoopt(SymmetricPositiveDefinite()), geoopt.SymmetricPositiveDefinite)
    assert type(to_geoopt(Euclidean(2))) is geoopt.Euclidean
    assert from_geoopt(to_geoopt(Euclidean(2))) == Euclidean(2)
    assert from_geoopt(geoopt.EuclideanStiefel()) == Stiefel(retraction=QR())
    assert from_geoopt(geoopt.EuclideanStiefelExact()) == Stiefel(retraction=Exponential())
    assert from_geoopt(geoopt.CanonicalStiefel()) == Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())
    assert from_geoopt(geoopt.Sphere()) == Sphere()
    assert from_geoopt(geoopt.SymmetricPositiveDefinite()) == SymmetricPositiveDefinite()
    assert to_geoopt(from_geoopt(SCALED)) is SCALED


@pytest.mark.parametrize("theirs", [geoopt.EuclideanStiefel(), geoopt.EuclideanStiefelExact(), geoopt.Sphere()])
def test_translated_spaces_step_as_theirs(theirs):
    ours = from_geoopt(theirs)
    x, _ = points(ours, (2, 5, 3))
    u, v = (0.3 * ours.random_tangent(x, torch.Generator().manual_seed(i)) for i in (1, 2))
    torch.testing.assert_close(ours.retract(x, u), theirs.retr(x, u), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.exp(x, u), theirs.expmap(x, u), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.inner(x, u, v), theirs.inner(x, u, v), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.egrad_to_rgrad(x, x + v), theirs.egrad2rgrad(x, x + v), rtol=0, atol=1e-12)


def test_what_of_theirs_is_not_right_is_ours_instead():
    """The definition of a retraction, of a projection and of a distance, on both."""
    x, _ = points(Stiefel(), (5, 3))
    u = Stiefel(CanonicalMetric()).random_tangent(x, torch.Generator().manual_seed(1))
    theirs, ours = geoopt.CanonicalStiefel(), to_geoopt(from_geoopt(geoopt.CanonicalStiefel()))
    t = 1e-6

    def slope_error(manifold):
        return float(((manifold.retr(x, t * u) - x) / t - u).abs().max())

    assert slope_error(ours) < 1e-5
    assert slope_error(theirs) > 0.1
    torch.testing.assert_close(ours.proju(x, u), u, rtol=0, atol=1e-14)
    assert float((theirs.proju(x, u) - u).abs().max()) > 0.1
    north = torch.tensor([0.0, 0, 1], dtype=torch.float64)
    assert float(geoopt.Sphere().dist(north, north)) > 4e-4
    assert float(to_geoopt(from_geoopt(geoopt.Sphere())).dist(north, north)) == 0


def test_our_optimizer_runs_on_a_geoopt_space():
    """On the scaled Stiefel manifold, which we do not have: f(x) = −tr xᵀax has its least value −(3 + 2)."""
    manifold = from_geoopt(SCALED)
    assert isinstance(manifold, GeooptManifold)
    a = torch.diag(torch.tensor([3.0, 2, 1, 0.5], dtype=torch.float64))
    x, _ = points(manifold, (4, 2))
    p = ManifoldParameter(x, manifold)
    optimizer = RiemannianAdam([p], lr=0.05)
    loss = torch.tensor(0.0)
    for _ in range(150):
        optimizer.zero_grad()
        loss = -(p.mT @ a @ p).diagonal().sum()
        loss.backward()
        optimizer.step()
    assert manifold.point_error(p.detach()) < 1e-12
    assert manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"]) < 1e-12
    assert float(loss.detach()) == pytest.approx(-5, abs=1e-2)


def test_wrapped_geoopt_space():
    ball = from_geoopt(geoopt.PoincareBall(c=1.0).double())
    assert isinstance(ball, GeooptManifold)
    assert ball.ndim == 1
    assert ball.dim((2, 4)) == 4
    assert from_geoopt(SCALED).dim((7, 4, 2)) == 5
    x, y = points(ball, (3, 4))
    assert torch.equal(x, points(ball, (3, 4))[0])
    assert type(x) is torch.Tensor
    ball.check_point(x)
    u = ball.random_tangent(x)
    torch.testing.assert_close(ball.norm(x, u), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(ball.dist(x, ball.exp(x, 0.3 * u)), torch.full((3,), 0.3, dtype=torch.float64))
    torch.testing.assert_close(ball.exp(x, ball.log(x, y)), y)
    # the Riesz identity, for a metric that is not the ambient one
    g, w = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ball.inner(x, ball.egrad_to_rgrad(x, g), w), (g * w).sum(-1))
    y, (carried,) = ball.retract_transport(x, 0.1 * u, w)
    assert y.shape == carried.shape == x.shape
    assert ball == from_geoopt(geoopt.PoincareBall(c=1.0).double())
    assert hash(ball) == hash(from_geoopt(geoopt.PoincareBall(c=1.0).double()))
    assert ball != from_geoopt(geoopt.PoincareBall(c=2.0).double())
    assert ball != Sphere()
    assert pickle.loads(pickle.dumps(ball)) == ball
    assert ball.random_point(4, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(NotImplementedError, match="GeooptManifold has no inverse_retract"):
        ball.inverse_retract(x, x)


def test_spaces_with_other_maps_are_wrapped():
    assert isinstance(from_geoopt(geoopt.SphereExact()), GeooptManifold)
    span = geoopt.Sphere(intersection=torch.eye(4, 2))
    assert isinstance(from_geoopt(span), GeooptManifold)
    assert from_geoopt(span) != from_geoopt(geoopt.Sphere(intersection=torch.eye(4, 3)))
    assert from_geoopt(geoopt.Euclidean(0)) == Euclidean(0)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="geodescent"):
        to_geoopt(geoopt.Sphere())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="geoopt"):
        from_geoopt(Sphere())
    assert "x" in to_geoopt(Stiefel()).check_point(torch.eye(2, 3), explain=True)[1]


def test_without_geoopt(monkeypatch):
    monkeypatch.setitem(sys.modules, "geoopt", None)
    with pytest.raises(ImportError, match="pip install geoopt"):
        to_geoopt(Sphere())
    with pytest.raises(ImportError, match="pip install geoopt"):
        from_geoopt(object())
