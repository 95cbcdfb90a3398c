import pytest
import torch
from geodescent.manifolds import QR, CanonicalMetric, Cayley, Polar, ProjectionTransport, Stiefel


@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley()], ids=repr)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 4), (5, 3), (2, 6, 3)])
def test_projection_transport(retraction, shape, generator):
    m = Stiefel(CanonicalMetric(), retraction)
    x = m.random_point(*shape, dtype=torch.float64, generator=generator)
    u, v, w = (m.random_tangent(x, generator) for _ in range(3))
    y = m.retract(x, u)
    tv = m.transport(x, u, v)
    assert m.tangent_error(y, tv).max() < 1e-14
    # the nearest tangent vector there: what is left over is orthogonal to every tangent vector
    t = m.random_tangent(y, generator)
    assert ((v - tv) * t).sum((-2, -1)).abs().max() < 1e-14
    torch.testing.assert_close(m.transport(x, u, v + 2 * w), tv + 2 * m.transport(x, u, w), rtol=0, atol=1e-14)
    torch.testing.assert_close(m.transport(x, 0 * u, v), v, rtol=0, atol=1e-14)
    z, (a, b) = m.retract_transport(x, u, v, w)
    torch.testing.assert_close(z, y, rtol=0, atol=0)
    torch.testing.assert_close(torch.stack([a, b]), torch.stack([tv, m.transport(x, u, w)]), rtol=0, atol=0)


def test_projection_transport_says_that_it_is_not_isometric(generator):
    m = Stiefel()
    x = m.random_point(5, 3, dtype=torch.float64, generator=generator)
    u = m.random_tangent(x, generator)
    assert not ProjectionTransport.isometric
    assert m.norm(m.retract(x, u), m.transport(x, u, u)) < 0.99
