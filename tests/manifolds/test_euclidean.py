import math

import pytest
import torch
from geodescent.manifolds import Euclidean, NotOnManifoldError


@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_euclidean_is_flat(ndim, generator):
    m = Euclidean(ndim)
    shape = (2, 3, 4)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    u = m.random_tangent(x, generator)
    batch = shape[: len(shape) - ndim]
    assert m.dim(shape) == math.prod(shape[len(shape) - ndim :])
    assert m.inner(x, u, u).shape == m.point_error(x).shape == m.tangent_error(x, u).shape == batch
    torch.testing.assert_close(m.norm(x, u), torch.ones(batch, dtype=torch.float64))
    torch.testing.assert_close(m.log(x, m.exp(x, u)), u)
    torch.testing.assert_close(m.inverse_retract(x, m.retract(x, u)), u)
    torch.testing.assert_close(m.dist(x, x + u), m.norm(x, u))
    assert m.transport(x, u, x) is x
    assert m.egrad_to_rgrad(x, u) is u
    assert m.ehess_to_rhess(x, u, x, u) is x
    assert m.injectivity_radius == math.inf
    m.check_point(x)


def test_nan_is_not_a_point():
    with pytest.raises(NotOnManifoldError, match="nan"):
        Euclidean().check_point(torch.tensor([0.0, float("nan")]))


def test_too_few_dimensions():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        Euclidean(2).dim((3,))
