"""The spectral problem against weak duality, dual ascent at full size, and rules that are not optimal."""

import pytest
import torch
from geodescent.manifolds import Stiefel, spectral_steepest_descent

M = Stiefel()
SHAPES = [(7, 3), (8, 4), (24, 6), (5, 5), (6, 6), (5, 4), (7, 5), (5, 1), (2, 2), (64, 16)]


def draw(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(shape, kind, batch=3):
    n, p = shape
    x = M.random_point(batch, n, p, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = draw(batch, n, p, seed=2)
    if kind == "low rank":
        g = draw(batch, n, 1, seed=3) @ draw(batch, 1, p, seed=4)
    elif kind == "ill conditioned":
        g = g * torch.logspace(0, -8, p, dtype=torch.float64)
    elif kind == "nearly normal":
        g = 1e-4 * g + x @ draw(p, p, seed=5)
    return x, g


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["gaussian", "low rank", "ill conditioned", "nearly normal"])
def test_the_step_is_feasible_and_the_gap_rigorous_and_small(shape, kind):
    x, g = problem(shape, kind)
    result = spectral_steepest_descent(x, g)
    assert M.tangent_error(x, result.step).max() < 1e-12
    assert torch.linalg.matrix_norm(result.step, 2).max() < 1 + 1e-12
    symmetric = result.multiplier - result.multiplier.mT
    assert symmetric.abs().max() <= 1e-12 * g.abs().max()
    dual = torch.linalg.svdvals(g + x @ result.multiplier).sum(-1)
    primal = -(g * result.step).sum((-2, -1))
    # ‖G‖ is the scale of rounding, where G is nearly normal much more than the dual
    assert ((dual - primal) / dual).max() < 1e-9
    torch.testing.assert_close(result.relative_gap, (dual - primal) / dual, rtol=0, atol=1e-9)


def test_dual_ascent_at_full_size_finds_no_better():
    """Subgradient descent of ‖G + XΛ‖_* over Λ, by SVDs of n×p: an upper bound that comes down to the same value."""
    x, g = (a[0] for a in problem((7, 3), "gaussian"))
    multiplier = torch.zeros(3, 3, dtype=torch.float64)
    best = float("inf")
    for step in range(4000):
        u, s, vh = torch.linalg.svd(g + x @ multiplier, full_matrices=False)
        best = min(best, float(s.sum()))
        subgradient = x.mT @ (u @ vh)
        multiplier = multiplier - 0.5 / (1 + step) ** 0.75 * (subgradient + subgradient.mT) / 2
    result = spectral_steepest_descent(x, g)
    assert float(result.dual) == pytest.approx(best, rel=1e-4)
    assert float(result.primal) <= best + 1e-12


def test_no_feasible_direction_descends_faster():
    x, g = (a[0] for a in problem((8, 3), "gaussian"))
    optimum = float(spectral_steepest_descent(x, g).primal)
    for seed in range(200):
        other = M.project(x, draw(8, 3, seed=100 + seed) - g)
        assert -float((g * other).sum()) / float(torch.linalg.matrix_norm(other, 2)) < optimum


def test_the_polar_heuristic_is_worse_and_leaves_the_tangent_space():
    x, g = (a[0] for a in problem((12, 6), "gaussian"))
    u, _, vh = torch.linalg.svd(M.project(x, g), full_matrices=False)
    heuristic = -u @ vh
    assert M.tangent_error(x, heuristic) > 1e-3
    projected = M.project(x, heuristic)
    reached = -float((g * projected).sum()) / float(torch.linalg.matrix_norm(projected, 2))
    assert reached < (1 - 1e-3) * float(spectral_steepest_descent(x, g).primal)


@pytest.mark.parametrize("shape", [(9, 4), (5, 5), (5, 4)])
def test_it_goes_along_with_orthogonal_matrices_and_scale(shape):
    n, p = shape
    x, g = problem(shape, "gaussian")
    step = spectral_steepest_descent(x, g).step
    q = M.random_point(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    r = M.random_point(p, p, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    turned = spectral_steepest_descent(q @ x @ r, q @ g @ r).step
    torch.testing.assert_close(turned, q @ step @ r, rtol=0, atol=1e-9)
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(spectral_steepest_descent(x, scale * g).step, step, rtol=0, atol=1e-10)


def test_a_frame_without_gradient_stays_and_spoils_no_other():
    x, g = problem((6, 3), "gaussian")
    g[1] = 0
    g[2] = x[2] @ (draw(3, 3, seed=1) + draw(3, 3, seed=1).mT)  # normal
    result = spectral_steepest_descent(x, g)
    alone = spectral_steepest_descent(x[0], g[0])
    torch.testing.assert_close(result.step[0], alone.step, rtol=0, atol=1e-12)
    assert not result.step[1:].any()
    assert not result.relative_gap[1:].any()


def test_bad_input_is_named():
    x, g = problem((6, 3), "gaussian")
    g[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        spectral_steepest_descent(x, g)
