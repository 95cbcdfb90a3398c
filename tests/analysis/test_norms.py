import pytest
import torch
from geodescent.analysis.norms import ONE_TO_TWO, SPECTRAL, TWO_TO_INF, Norm, find_norm

NORMS = [SPECTRAL, ONE_TO_TWO, TWO_TO_INF]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit_ball(norm, vectors):
    """Operator norms by their definition: the largest ‖Δv‖ over many v of the unit ball of the domain."""
    return {
        "spectral": lambda d: (d @ vectors).norm(dim=-2).amax(-1),
        "1->2": lambda d: (d @ torch.eye(d.shape[-1], dtype=d.dtype)).norm(dim=-2).amax(-1),
        "2->inf": lambda d: (d @ vectors).abs().amax((-2, -1)),
    }[norm.name]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
class TestOperatorNorms:
    def test_is_the_largest_image_of_the_unit_ball(self, norm):
        vectors = gaussian(3, 20_000, seed=1)
        vectors = vectors / vectors.norm(dim=0)
        for seed in range(5):
            d = gaussian(6, 3, seed=seed)
            reached = float(unit_ball(norm, vectors)(d))
            assert 0.999 * float(norm.norm(d)) <= reached <= float(norm.norm(d)) * (1 + 1e-12)

    def test_the_oracle_attains_the_dual_norm_in_the_unit_ball(self, norm):
        for shape in ((6, 3), (3, 3), (2, 5), (4, 1)):
            g = gaussian(*shape)
            answer = norm.lmo(g)
            assert float(norm.norm(answer)) == pytest.approx(1, abs=1e-12)
            assert float((g * answer).sum()) == pytest.approx(-float(norm.dual_norm(g)), rel=1e-12)
            # and nothing else in the ball does better
            others = gaussian(500, *shape, seed=1)
            lengths = torch.stack([norm.norm(other) for other in others])
            assert float((g * others).sum((-2, -1)).div(lengths).min()) >= -float(norm.dual_norm(g))

    def test_a_zero_matrix_and_zero_parts_have_zero_answers(self, norm):
        assert not norm.lmo(torch.zeros(4, 2, dtype=torch.float64)).any()
        g = torch.zeros(4, 2, dtype=torch.float64)
        g[0, 0] = 3.0
        want = torch.zeros_like(g)
        want[0, 0] = -1.0
        assert torch.equal(norm.lmo(g), want)


def test_names():
    assert find_norm("metric") is None
    assert find_norm("frobenius") is None
    assert find_norm("one_to_two") is find_norm("1->2") is ONE_TO_TWO
    assert find_norm("two_to_inf") is find_norm("2->inf") is TWO_TO_INF
    own = Norm("own", SPECTRAL.norm, SPECTRAL.dual_norm, SPECTRAL.lmo)
    assert find_norm(own) is own
    with pytest.raises(ValueError, match=r"'spectral', '1->2', '2->inf' \('one_to_two' and 'two_to_inf'.* found 'op'"):
        find_norm("op")
    with pytest.raises(TypeError, match="a name or a Norm object, found 2"):
        find_norm(2)  # type: ignore[arg-type]
