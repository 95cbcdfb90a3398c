"""The optimum that certificates are held against, by a convex solver that knows nothing of duality on manifolds."""

import warnings

import pytest
import torch
from geodescent.analysis import Norm, score_breakdown, steepest_descent_certificate
from geodescent.manifolds import CanonicalMetric, Oblique, Stiefel

cp = pytest.importorskip("cvxpy")

LENGTHS = {
    "frobenius": lambda d: cp.norm(d, "fro"),
    "spectral": lambda d: cp.norm(d, 2),
    "1->2": lambda d: cp.max(cp.norm(d, 2, axis=0)),
    "2->inf": lambda d: cp.max(cp.norm(d, 2, axis=1)),
    "nuclear": lambda d: cp.norm(d, "nuc"),
    "sum of entries": lambda d: cp.sum(cp.abs(d)),
}


def _nuclear_lmo(g):
    left, _, right = torch.linalg.svd(g, full_matrices=False)
    return -left[:, :1] @ right[:1]


def _largest_entry(g):
    answer = torch.zeros_like(g)
    i = g.abs().argmax()
    answer.view(-1)[i] = -g.flatten()[i].sign()
    return answer


USERS = {
    "nuclear": Norm(
        "nuclear", lambda d: torch.linalg.svdvals(d).sum(), lambda g: torch.linalg.svdvals(g)[0], _nuclear_lmo
    ),
    "sum of entries": Norm("sum of entries", lambda d: d.abs().sum(), lambda g: g.abs().max(), _largest_entry),
}


def problem(manifold, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, torch.randn(*shape, dtype=torch.float64, generator=generator)


def solve(x, g, norm, tangent):
    """The best rate max −⟨G, Δ⟩ over tangent Δ of length at most 1, and a Δ that has it."""
    delta = cp.Variable(tuple(x.shape))
    constraints = [*tangent(x.numpy(), delta), LENGTHS[norm](delta) <= 1]
    found = cp.Problem(cp.Maximize(-cp.sum(cp.multiply(g.numpy(), delta))), constraints)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        found.solve(solver=cp.CLARABEL)
    if found.status != "optimal":  # an interior-point method can stall where the optimum is degenerate
        found.solve(solver=cp.SCS, eps_abs=1e-9, eps_rel=1e-9, max_iters=200_000)
    assert found.status == "optimal"
    return found.value, torch.from_numpy(delta.value)


def stiefel(x, delta):
    # each equation once: the two triangles are the same, and interior points do not like what is redundant
    p = x.shape[1]
    return [x[:, i] @ delta[:, j] + x[:, j] @ delta[:, i] == 0 for i in range(p) for j in range(i, p)]


@pytest.mark.parametrize("norm", LENGTHS)
@pytest.mark.parametrize("shape", [(7, 3), (9, 4), (5, 2), (4, 4), (5, 5), (6, 1), (4, 3)])
def test_the_optimum_on_stiefel(norm, shape):
    chosen: str | Norm = USERS[norm] if norm in USERS else norm  # noqa: SIM401 (typed)
    for seed in range(2):
        x, g = problem(Stiefel(), *shape, seed=seed)
        want, best = solve(x, g, norm, stiefel)
        certificate = steepest_descent_certificate(Stiefel(), x, g, best, norm=chosen, atol=1e-6)
        assert certificate.dual == pytest.approx(want, rel=1e-6)
        assert certificate.attained == pytest.approx(want, rel=1e-6)
        # the solver's own direction is certified, by a bound that it had no part in
        assert certificate.passed, repr(certificate)


@pytest.mark.parametrize("norm", ["spectral", "1->2", "2->inf"])
def test_the_optimum_on_another_manifold(norm):
    x, g = problem(Oblique(), 5, 3)
    want, best = solve(x, g, norm, lambda x, delta: [cp.sum(cp.multiply(x, delta), axis=0) == 0])
    certificate = steepest_descent_certificate(Oblique(), x, g, best, norm=norm, atol=1e-6)
    assert certificate.dual == pytest.approx(want, rel=1e-6)
    assert certificate.passed, repr(certificate)


@pytest.mark.parametrize("norm", ["spectral", "1->2", "2->inf"])
def test_the_score_of_a_step_in_another_norm(norm):
    manifold = Stiefel(CanonicalMetric())
    x, g = problem(manifold, 8, 3)
    want, _ = solve(x, g, norm, stiefel)
    step = -manifold.egrad_to_rgrad(x, g)
    length = float(LENGTHS[norm](step.numpy()).value)
    score = score_breakdown(manifold, x, g, step, norm=norm, rule_norm="metric")
    assert score.efficiency == pytest.approx(-float((g * step).sum()) / length / want, rel=1e-6)
    assert score.norm_mismatch == pytest.approx(score.loss, rel=1e-9)
