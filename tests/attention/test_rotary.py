import itertools

import pytest
import torch
from geodescent.attention import Rotary, StiefelAttention
from geodescent.manifolds import Stiefel


def complex_rotation(x, positions, base, interleaved):
    """Pairs as complex numbers times e^(i t θ): the definition of Su et al. (2021), eq. 12."""
    half = x.shape[-1] // 2
    theta = torch.tensor([base ** (-2 * j / x.shape[-1]) for j in range(half)], dtype=torch.float64)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = torch.complex(a.double(), b.double()) * torch.exp(1j * positions.double()[:, None] * theta)
    if interleaved:
        return torch.view_as_real(z).flatten(-2)
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [None, 6])
def test_equals_multiplication_by_complex_phases(interleaved, dim, generator):
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=generator)
    positions = torch.tensor([0, 1, 2, 5, 100, 4096, 3])
    out = Rotary(500.0, dim, interleaved).rotate(x, positions)
    rotated = 8 if dim is None else dim
    expected = complex_rotation(x[..., :rotated], positions, 500.0, interleaved)
    torch.testing.assert_close(out[..., :rotated], expected, rtol=0, atol=1e-11)
    assert torch.equal(out[..., rotated:], x[..., rotated:])


def test_positions_may_differ_within_a_batch(generator):
    x = torch.randn(2, 3, 4, 8, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    out = Rotary().rotate(x, positions)
    for i in range(2):
        torch.testing.assert_close(out[i : i + 1], Rotary().rotate(x[i : i + 1], positions[i]))


def test_half_precision_loses_only_the_rounding_of_the_result(generator):
    """Angles of thousands of radians computed in bfloat16 would be noise."""
    x = torch.randn(1, 1, 8192, 8, generator=generator).bfloat16()
    positions = torch.arange(8192)
    exact = Rotary().rotate(x.double(), positions)
    torch.testing.assert_close(Rotary().rotate(x, positions).double(), exact, rtol=2**-8, atol=4e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [None, 4])
def test_the_gauge_is_all_that_commutes(interleaved, dim, generator):
    """A null space says how many skew generators commute with the rotations, and the gauge has that many angles."""
    rotary, size = Rotary(100.0, dim, interleaved), 8
    rotated = rotary.rotated(size)
    identity = torch.eye(size, dtype=torch.float64)
    # rows of x are turned, so R_t is the transpose of the rotated identity
    turns = [rotary.rotate(identity.expand(1, 1, -1, -1), torch.full((size,), t))[0, 0].T for t in (1, 2)]
    angles = torch.randn(rotated // 2, dtype=torch.float64, generator=generator)
    a = rotary.gauge(angles, size)
    torch.testing.assert_close(a.T @ a, identity)
    for turn in turns:
        torch.testing.assert_close(a @ turn, turn @ a)
    skew = []
    for i, j in itertools.combinations(range(size), 2):
        s = torch.zeros(size, size, dtype=torch.float64)
        s[i, j], s[j, i] = 1.0, -1.0
        skew.append(s)
    commutators = torch.stack([torch.stack([s @ t - t @ s for t in turns]).flatten() for s in skew])
    free = len(skew) - int(torch.linalg.matrix_rank(commutators))
    rest = size - rotated
    assert free == rotated // 2 + rest * (rest - 1) // 2


def test_attention_sees_frames_up_to_the_gauge_only(generator):
    torch.manual_seed(0)
    layer = StiefelAttention(16, 2, rotary=Rotary(), bias=False, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=generator)
    before = layer(x, x, x)[0]
    frames = [layer.q_proj.weight, layer.k_proj.weight]
    old = [f.detach().clone() for f in frames]
    angles = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    other = Stiefel().random_point(2, 8, 8, dtype=torch.float64, generator=generator)
    for turn, same in ((Rotary().gauge(angles, 8), True), (other, False)):
        with torch.no_grad():
            for f, start in zip(frames, old, strict=True):
                f.copy_(start @ turn)
        change = (layer(x, x, x)[0] - before).abs().max().item()
        assert (change < 1e-12) is same
    # without rotary embedding any orthogonal matrix would do
    layer.rotary = None
    after = layer(x, x, x)[0]
    with torch.no_grad():
        for f, start in zip(frames, old, strict=True):
            f.copy_(start)
    torch.testing.assert_close(layer(x, x, x)[0], after, rtol=0, atol=1e-12)


def test_is_a_value():
    assert Rotary(10.0) == Rotary(10.0)
    assert hash(Rotary(dim=4)) == hash(Rotary(dim=4))
    assert eval(repr(Rotary(20.0, 4, True))) == Rotary(20.0, 4, True)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="base must be greater than 1"):
        Rotary(1.0)
    with pytest.raises(ValueError, match="dim must be positive and even, found 3"):
        Rotary(dim=3)
    with pytest.raises(ValueError, match="head_dim = 5"):
        Rotary().frequencies(5)
    with pytest.raises(ValueError, match="angles must end in a dimension of 2"):
        Rotary().gauge(torch.zeros(3), 4)
