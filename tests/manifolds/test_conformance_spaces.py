from typing import ClassVar

import pytest
import torch
from geodescent.manifolds import (
    Cayley,
    CayleyTransport,
    Grassmann,
    Oblique,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
)
from geodescent.manifolds.testing import ManifoldConformance, PointConformance, StepConformance


class TestSphere(ManifoldConformance):
    examples = 3

    @pytest.fixture
    def manifold(self):
        return Sphere()

    @pytest.fixture(params=[(1,), (2,), (5,), (2, 3, 4)], ids=str)
    def shape(self, request):
        return request.param


class TestOblique(ManifoldConformance):
    examples = 3

    @pytest.fixture
    def manifold(self):
        return Oblique()

    @pytest.fixture(params=[(1, 1), (3, 1), (4, 4), (2, 3, 5)], ids=str)
    def shape(self, request):
        return request.param


class TestGrassmann(ManifoldConformance):
    examples = 3
    bad_shapes: ClassVar = [(2, 3)]
    # a point is the span of the frame
    invariant = staticmethod(lambda x: x @ x.mT)

    @pytest.fixture
    def manifold(self):
        return Grassmann()

    @pytest.fixture(params=[(1, 1), (3, 1), (4, 4), (5, 3), (2, 7, 2)], ids=str)
    def shape(self, request):
        return request.param


class TestSpecialOrthogonal(ManifoldConformance):
    examples = 3
    bad_shapes: ClassVar = [(3, 2)]

    @pytest.fixture
    def manifold(self):
        return SpecialOrthogonal()

    @pytest.fixture(params=[(1, 1), (2, 2), (5, 5), (2, 3, 3)], ids=str)
    def shape(self, request):
        return request.param


class TestSymmetricPositiveDefinite(ManifoldConformance):
    examples = 3
    noise = 1e-3  # the space is open: farther out there is no nearest point
    bad_shapes: ClassVar = [(3, 2)]

    @pytest.fixture
    def manifold(self):
        return SymmetricPositiveDefinite()

    @pytest.fixture(params=[(1, 1), (2, 2), (4, 4), (2, 3, 3)], ids=str)
    def shape(self, request):
        return request.param


class TestProduct(ManifoldConformance):
    examples = 3

    @pytest.fixture
    def manifold(self):
        return Product((Stiefel(retraction=Cayley(), vector_transport=CayleyTransport()), (4, 2)), (Sphere(), (3,)))

    @pytest.fixture(params=[(11,), (2, 11)], ids=str)
    def shape(self, request):
        return request.param


class TestInSinglePrecision(PointConformance, StepConformance):
    examples = 2

    @pytest.fixture(
        params=[
            (Sphere(), (5,)),
            (Oblique(), (4, 3)),
            (SpecialOrthogonal(), (3, 3)),
            (SymmetricPositiveDefinite(), (3, 3)),
        ],
        ids=str,
    )
    def pair(self, request):
        return request.param

    @pytest.fixture
    def manifold(self, pair):
        return pair[0]

    @pytest.fixture
    def shape(self, pair):
        return pair[1]

    @pytest.fixture
    def dtype(self):
        return torch.float32
