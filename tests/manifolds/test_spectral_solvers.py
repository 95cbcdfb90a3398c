"""The two solvers against one another: where both apply, they must agree, and each must know where it does not."""

import pytest
import torch
from geodescent.manifolds import spectral_solvers, spectral_steepest_descent
from torch import Tensor


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def conditioned(n: int, p: int, condition: float) -> Tensor:
    left, right = torch.linalg.qr(gaussian(n, p, seed=1))[0], torch.linalg.qr(gaussian(p, p, seed=2))[0]
    return left * torch.linspace(1, 1 / condition, p, dtype=torch.float64) @ right


@pytest.fixture
def visits(monkeypatch):
    """How many problems the robust solver was given."""
    seen: list[int] = []
    robust = spectral_solvers._robust

    def counted(problem):
        seen.append(len(problem.x))
        return robust(problem)

    monkeypatch.setattr(spectral_solvers, "_robust", counted)
    return seen


def test_both_solvers_agree(visits, monkeypatch):
    x, g = torch.linalg.qr(gaussian(4, 64, 8))[0], gaussian(4, 64, 8, seed=1)
    fast = spectral_steepest_descent(x, g)
    assert visits == []
    monkeypatch.setattr(
        spectral_solvers, "_fast", lambda *a: (spectral_solvers._robust(a[0]), torch.tensor([True] * 4))
    )
    robust = spectral_steepest_descent(x, g)
    assert visits == [4]
    for one, other in zip(fast, robust, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_only_hard_problems_are_solved_the_long_way(visits):
    x = torch.linalg.qr(gaussian(5, 64, 8))[0]
    g = torch.stack([conditioned(64, 8, c) for c in (1, 1e6, 2, 1e12, 3)])
    result = spectral_steepest_descent(x, g)
    assert visits == [2]
    assert result.relative_gap.max() < 1e-9
    assert torch.linalg.matrix_norm(result.step, 2).max() < 1 + 1e-12


@pytest.mark.parametrize("condition", [10.0, 30.0, 100.0, 300.0, 1e3, 1e4, 1e5])
def test_the_hand_over_loses_nothing(condition):
    # near the limits of the fast solver, on both sides of them
    x = torch.linalg.qr(gaussian(80, 10))[0]
    g = conditioned(80, 10, condition)
    g = g - x @ (x.mT @ g) + x @ gaussian(10, 10, seed=3) / condition
    result = spectral_steepest_descent(x, g)
    assert torch.linalg.matrix_norm(result.step, 2) < 1 + 1e-13
    assert (x.mT @ result.step + result.step.mT @ x).abs().max() < 1e-12
    assert result.relative_gap < 1e-10
    full = torch.linalg.matrix_norm(g + x @ result.multiplier, "nuc")
    torch.testing.assert_close(result.dual, full, rtol=1e-12, atol=0)
