import copy
import io
import math
import pickle

import pytest
import torch
from geodescent.manifolds import (
    AlphaMetric,
    CanonicalMetric,
    Cayley,
    CayleyTransport,
    Euclidean,
    LogNotConvergedError,
    Manifold,
    ManifoldParameter,
    NotOnManifoldError,
    Polar,
    Stiefel,
)
from geodescent.manifolds.grassmann import Grassmann
from geodescent.manifolds.product import Product
from geodescent.manifolds.spd import SymmetricPositiveDefinite
from geodescent.manifolds.special_orthogonal import SpecialOrthogonal
from geodescent.manifolds.sphere import Sphere

FACTORS = ((Grassmann(), (5, 2)), (Sphere(), (4,)), (SymmetricPositiveDefinite(), (2, 2)), (Euclidean(0), ()))
M = Product(*FACTORS)


def close(a, b, atol=1e-13):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def second_derivative(f):
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(f(t), t, create_graph=True)
    return torch.autograd.grad(first, t)[0]


def gradient_and_hessian(f, x, u):
    x = x.detach().clone().requires_grad_()
    (egrad,) = torch.autograd.grad(f(x), x, create_graph=True)
    return egrad.detach(), torch.autograd.grad(egrad, x, u)[0]


def point_and_tangents(*batch, count=1):
    generator = torch.Generator().manual_seed(0)
    x = M.random_point(*batch, M.size, dtype=torch.float64, generator=generator)
    return x, *(M.random_tangent(x, generator) for _ in range(count))


def test_pack_and_unpack():
    x, _ = point_and_tangents(3)
    parts = M.unpack(x)
    assert M.size == 10 + 4 + 4 + 1
    assert [tuple(part.shape) for part in parts] == [(3, 5, 2), (3, 4), (3, 2, 2), (3,)]
    assert torch.equal(M.pack(*parts), x)
    for (manifold, _), part in zip(FACTORS, parts, strict=True):
        manifold.check_point(part)
    # batches of the parts broadcast
    assert M.pack(parts[0], parts[1][0], parts[2], parts[3]).shape == (3, 19)
    with pytest.raises(ValueError, match="each of the 4 factors, found 2"):
        M.pack(*parts[:2])
    with pytest.raises(ValueError, match=r"part on Sphere\(\)"):
        M.pack(parts[0], parts[0], parts[2], parts[3])
    with pytest.raises(ValueError, match="vector of 19 entries"):
        M.unpack(x[:, 1:])


def test_parts_are_views_of_a_contiguous_point():
    x, _ = point_and_tangents()
    M.unpack(x)[1].zero_()
    assert x[10:14].abs().max() == 0


def test_distance_between_points_that_differ_in_known_ways():
    """A right angle on the sphere, a factor e in one eigenvalue, and 3 on the line."""
    x = M.pack(torch.eye(5, 2), torch.eye(4)[0], torch.eye(2), torch.tensor(1.0)).double()
    y = M.pack(torch.eye(5, 2), torch.eye(4)[1], torch.diag(torch.tensor([math.e, 1])), torch.tensor(4.0)).double()
    assert float(M.dist(x, y)) == pytest.approx(math.sqrt((math.pi / 2) ** 2 + 1 + 9), rel=1e-7)
    assert M.dim((19,)) == 6 + 3 + 3 + 1
    assert M.injectivity_radius == math.pi / 2


def test_geodesics_and_steps():
    x, u, v = point_and_tangents(2, count=2)
    close(M.norm(x, u), torch.ones(2, dtype=torch.float64))
    y = M.exp(x, 1.3 * u)
    M.check_point(y)
    close(M.log(x, y), 1.3 * u)
    close(M.dist(x, y), torch.full((2,), 1.3, dtype=torch.float64))
    assert torch.equal(M.dist(x, x), torch.zeros(2, dtype=torch.float64))
    z, (tv, tu) = M.retract_transport(x, u, v, u)
    close(M.inner(z, tv, tu), M.inner(x, v, u))
    close(M.transport(x, u, v), tv)
    close(M.inverse_retract(x, M.retract(x, u)), u)
    errors = [float((M.retract(x, t * u) - M.exp(x, t * u)).norm()) for t in (1e-2, 1e-3)]
    assert math.log10(errors[0] / errors[1]) == pytest.approx(3, abs=0.05)
    basis = M.tangent_basis(x[0])
    close(M.inner(x[0], basis.unsqueeze(0), basis.unsqueeze(1)), torch.eye(13, dtype=torch.float64))


def test_riesz_identity_and_hessian():
    x, u = point_and_tangents()
    a = torch.randn(19, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def f(y):  # couples the factors, and depends on the subspace alone
        frame, unit, spd, number = M.unpack(y)
        z = torch.cat([(frame @ frame.mT).flatten(), unit, spd.flatten(), number.reshape(1)])[-19:]
        return (z @ a @ z) ** 2

    egrad, ehess_u = gradient_and_hessian(f, x, u)
    close(M.inner(x, M.egrad_to_rgrad(x, egrad), u), egrad @ u, 1e-10)
    second = second_derivative(lambda s: f(M.exp(x, s * u)))
    close(M.inner(x, M.ehess_to_rhess(x, egrad, ehess_u, u), u), second, 1e-8)


def test_distance_has_a_finite_gradient_where_points_coincide():
    x, _ = point_and_tangents()
    y = M.pack(*M.unpack(x)[:3], torch.tensor(0.0, dtype=torch.float64))  # in all factors but one, and in all
    for end in (y, x):
        a, b = x.clone().requires_grad_(), end.clone().requires_grad_()
        for grad in torch.autograd.grad(M.dist(a, b), (a, b)):
            assert bool(torch.isfinite(grad).all())


def test_differential_of_the_retraction():
    m = Product((Stiefel(), (4, 2)), (SymmetricPositiveDefinite(), (2, 2)), (Euclidean(), (3,)))
    generator = torch.Generator().manual_seed(0)
    x = m.random_point(m.size, dtype=torch.float64, generator=generator)
    u, v = (m.random_tangent(x, generator) for _ in range(2))
    close(m.pushforward(x, u, v), (m.retract(x, u + 1e-5 * v) - m.retract(x, u - 1e-5 * v)) / 2e-5, 1e-9)


def test_what_it_says_of_itself():
    assert M.transport_is_isometric
    assert M.retraction_order == 2
    projected = Product((Sphere(), (3,)), (Stiefel(), (4, 2)))
    assert not projected.transport_is_isometric
    assert projected.retraction_order == 2
    assert Product((Stiefel(AlphaMetric(1), Polar()), (4, 2))).retraction_order == 1
    cayley = Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())
    assert Product((cayley, (4, 2)), (Euclidean(), (2,))).transport_is_isometric


def test_errors_name_the_factor():
    x, _ = point_and_tangents(2)
    frame, unit, spd, number = M.unpack(x)
    with pytest.raises(LogNotConvergedError, match="antipode"):
        M.log(x, M.pack(frame, -unit, spd, number))
    with pytest.raises(NotOnManifoldError, match="point error"):
        M.check_point(M.pack(frame, 2 * unit, spd, number))
    M.check_point(M.project_point(M.pack(2 * frame, 2 * unit, spd, number)))
    u = M.project(x, torch.ones_like(x))
    M.check_tangent(x, u)
    with pytest.raises(NotOnManifoldError, match="tangent error"):
        M.check_tangent(x, torch.ones_like(x))


@pytest.mark.parametrize(
    ("factors", "error"),
    [
        ((), ValueError),
        ((Sphere(),), TypeError),
        (((3, Sphere()),), TypeError),
        (((Sphere(), (2, 3)),), ValueError),
        (((Stiefel(), (2, 3)),), ValueError),
    ],
)
def test_wrong_factors(factors, error):
    with pytest.raises(error):
        Product(*factors)


def test_value_object():
    assert Product(*FACTORS) == M
    assert Product(*((m, list(shape)) for m, shape in FACTORS)) == M
    assert hash(M) == hash(Product(*FACTORS))
    assert Product(*FACTORS[::-1]) != M
    names = {m.__class__.__name__: m.__class__ for m, _ in FACTORS}
    assert eval(repr(M), {"Product": Product, **names}) == M
    assert pickle.loads(pickle.dumps(M)) == M
    assert copy.deepcopy(M) == M
    nested = Product((M, (M.size,)), (SpecialOrthogonal(), (3, 3)))
    x = nested.random_point(2, nested.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nested.check_point(x)
    assert nested.dim(x.shape) == 13 + 3
    assert isinstance(nested, Manifold)


def test_parameter_is_saved_and_loaded_without_unpickling_code():
    x, _ = point_and_tangents()
    p = ManifoldParameter(x, M)
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    with torch.serialization.safe_globals([Product, *(type(m) for m, _ in FACTORS)]):
        loaded = torch.load(file, weights_only=True)
    assert loaded.manifold == M
    assert torch.equal(loaded.detach(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(0,), (1, 0, 2), (3,)])
def test_shapes_and_types(batch, dtype, generator):
    x = M.random_point(*batch, M.size, dtype=dtype, generator=generator)
    u = M.random_tangent(x, generator)
    for result in (M.exp(x, u), M.log(x, x), M.retract(x, u), M.transport(x, u, u), M.project(x, u)):
        assert result.shape == x.shape
        assert result.dtype == dtype
    M.check_point(M.exp(x, u))
    assert M.dist(x, x).shape == M.point_error(x).shape == M.inner(x, u, u).shape == batch
    assert M.tangent_basis(x).shape == (*batch, 13, 19)


def test_a_product_of_points_is_a_point():
    m = Product((SpecialOrthogonal(), (1, 1)), (Sphere(), (1,)))
    x = torch.ones(2, 2)
    assert m.dim(x.shape) == 0
    assert m.tangent_basis(x).shape == (2, 0, 2)
    assert m.random_tangent(x).abs().max() == 0
