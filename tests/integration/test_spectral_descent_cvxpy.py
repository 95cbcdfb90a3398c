"""The spectral-norm step against a conic solver that is given the problem as it is stated."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from geodescent.manifolds import spectral_steepest_descent

SHAPES = [(1, 1), (5, 1), (3, 3), (4, 4), (5, 4), (6, 4), (8, 4), (12, 5)]


def problem(n: int, p: int, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * n + p)
    x = torch.linalg.qr(torch.randn(n, p, dtype=torch.float64, generator=generator))[0]
    g = torch.randn(n, p, dtype=torch.float64, generator=generator)
    if rank is not None:
        g = g[:, :rank] @ torch.randn(rank, p, dtype=torch.float64, generator=generator)
    return x, g


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_step_agrees_with_clarabel(n, p, rank):
    x, g = problem(n, p, rank)
    result = spectral_steepest_descent(x, g)
    delta = cp.Variable((n, p))
    symmetric = x.numpy().T @ delta
    symmetric = symmetric + symmetric.T
    # each equation once: repeated ones make an interior-point solver's systems singular
    tangent = [symmetric[i, j] == 0 for i in range(p) for j in range(i + 1)]
    stated = cp.Problem(cp.Minimize(cp.sum(cp.multiply(g.numpy(), delta))), [cp.sigma_max(delta) <= 1, *tangent])
    stated.solve(solver=cp.CLARABEL)
    assert stated.status == cp.OPTIMAL
    assert isinstance(stated.value, float)
    assert delta.value is not None
    assert -stated.value == pytest.approx(result.primal.item(), rel=1e-6, abs=1e-6)
    if rank is None and n >= 2 * p:  # where the step is unique
        np.testing.assert_allclose(result.step.numpy(), delta.value, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_dual_agrees_with_scs(n, p):
    x, g = problem(n, p, None)
    result = spectral_steepest_descent(x, g)
    multiplier = cp.Variable((p, p), symmetric=True)
    dual = cp.Problem(cp.Minimize(cp.normNuc(g.numpy() + x.numpy() @ multiplier)))
    dual.solve(solver=cp.SCS, eps=1e-9, max_iters=50_000)
    assert dual.status == cp.OPTIMAL
    assert dual.value == pytest.approx(result.dual.item(), rel=1e-6, abs=1e-6)
