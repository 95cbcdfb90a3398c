import pytest
import torch
from geodescent.manifolds import (
    QR,
    AlphaMetric,
    CanonicalMetric,
    Cayley,
    CayleyTransport,
    DifferentiatedTransport,
    Euclidean,
    EuclideanMetric,
    Exponential,
    ParallelTransport,
    Polar,
    Stiefel,
)
from geodescent.manifolds.testing import (
    GeodesicConformance,
    ManifoldConformance,
    PointConformance,
    StepConformance,
    check_inverse_retraction,
    check_pushforward,
    check_retraction_first_order,
    check_transport,
    measure_order,
)
from hypothesis import strategies as st

SHAPES = [(1, 1), (3, 1), (3, 2), (4, 4), (5, 3), (16, 4), (2, 6, 3)]
FAMILY = [AlphaMetric(alpha) for alpha in (-0.75, -0.25, 0.5, 2)]
METRICS = [EuclideanMetric(), CanonicalMetric(), *FAMILY]
RETRACTIONS = [Polar(), QR(), Cayley(), Exponential()]
WIDE = [(2, 3), (4, 1, 2)]


@st.composite
def tall(draw):
    p = draw(st.integers(1, 5))
    return (*draw(st.lists(st.integers(1, 2), max_size=1)), draw(st.integers(p, 9)), p)


class TestEuclidean(ManifoldConformance):
    @pytest.fixture(params=[0, 1, 2])
    def manifold(self, request):
        return Euclidean(request.param)

    @pytest.fixture
    def shape(self):
        return (2, 3)


class TestStiefel(ManifoldConformance):
    """The defaults, at every shape."""

    bad_shapes = WIDE

    @pytest.fixture
    def manifold(self):
        return Stiefel()

    @pytest.fixture(params=SHAPES, ids=str)
    def shape(self, request):
        return request.param


class TestStiefelOfAnyShape(PointConformance, StepConformance):
    examples = 20

    @pytest.fixture
    def manifold(self):
        return Stiefel(AlphaMetric(0.5), Cayley(), CayleyTransport())

    @pytest.fixture
    def shape(self):
        return tall()


class TestStiefelWhole(ManifoldConformance):
    """Everything at once for one manifold with each of the other retractions and transports."""

    bad_shapes = WIDE
    examples = 3

    @pytest.fixture(
        params=[
            Stiefel(CanonicalMetric(), Cayley(), CayleyTransport()),
            Stiefel(AlphaMetric(-0.75), QR(), DifferentiatedTransport()),
            Stiefel(AlphaMetric(0.5), Exponential(), ParallelTransport()),
        ],
        ids=repr,
    )
    def manifold(self, request):
        return request.param

    @pytest.fixture
    def shape(self):
        return (4, 2)


class TestStiefelInSinglePrecision(PointConformance, StepConformance, GeodesicConformance):
    examples = 3

    @pytest.fixture(params=[Stiefel(), Stiefel(CanonicalMetric(), Cayley(), CayleyTransport())], ids=repr)
    def manifold(self, request):
        return request.param

    @pytest.fixture
    def shape(self):
        return (5, 3)

    @pytest.fixture
    def dtype(self):
        return torch.float32


class TestMetricsAtAPoint(PointConformance):
    examples = 15

    @pytest.fixture(params=METRICS[1:], ids=repr)
    def manifold(self, request):
        return Stiefel(request.param)

    @pytest.fixture
    def shape(self):
        return st.sampled_from(SHAPES) | tall()


class TestGeodesics(GeodesicConformance):
    examples = 2

    @pytest.fixture(params=METRICS[1:], ids=repr)
    def manifold(self, request):
        return Stiefel(request.param)

    @pytest.fixture(params=SHAPES, ids=str)
    def shape(self, request):
        return request.param


class TestRetractions(StepConformance):
    examples = 2

    @pytest.fixture(params=METRICS, ids=repr)
    def metric(self, request):
        return request.param

    @pytest.fixture(params=RETRACTIONS, ids=repr)
    def manifold(self, request, metric):
        return Stiefel(metric, request.param)

    @pytest.fixture
    def shape(self):
        return (5, 3)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize(
    ("retraction", "transport"),
    [
        (Polar(), DifferentiatedTransport()),
        (QR(), DifferentiatedTransport()),
        (Cayley(), CayleyTransport()),
        (Exponential(), ParallelTransport()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_of_every_shape(retraction, transport, metric, shape, generator):
    m = Stiefel(metric, retraction, transport)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    for check in (check_retraction_first_order, check_pushforward, check_inverse_retraction, check_transport):
        result = check(m, x)
        assert result.passed, repr(result)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley()], ids=repr)
def test_the_measured_order_is_the_claimed_one(retraction, metric, generator):
    m = Stiefel(metric, retraction)
    slope = measure_order(m, m.random_point(9, 4, dtype=torch.float64, generator=generator))
    assert slope.order == pytest.approx(retraction.order(metric), abs=0.02)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
def test_the_exponential_retraction_is_exact(metric, generator):
    m = Stiefel(metric, Exponential())
    slope = measure_order(m, m.random_point(9, 4, dtype=torch.float64, generator=generator))
    assert slope.exact


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize(("retraction", "shape"), [(Polar(), (4, 4)), (Cayley(), (4, 4)), (QR(), (5, 1))], ids=repr)
def test_the_order_is_higher_at_the_corner_shapes(retraction, shape, metric, generator):
    m = Stiefel(metric, retraction)
    slope = measure_order(m, m.random_point(*shape, dtype=torch.float64, generator=generator))
    assert slope.order == pytest.approx(2, abs=0.02)
    assert slope.order > retraction.order(metric) - 0.02
