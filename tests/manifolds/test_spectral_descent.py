import math

import numpy as np
import pytest
import scipy.optimize
import torch
from geodescent.manifolds import Stiefel, spectral_descent, spectral_steepest_descent
from geodescent.manifolds.linalg import skew, sym
from geodescent.manifolds.spectral_descent import SpectralDescentResult
from torch import Tensor

STIEFEL = Stiefel()
# horizontal, square, odd and even, a corner of one row, and n on either side of 2p
SHAPES = [
    (1, 1),
    (5, 1),
    (2, 2),
    (5, 5),
    (6, 6),
    (6, 5),
    (7, 6),
    (12, 8),
    (15, 8),
    (16, 8),
    (32, 8),
    (33, 32),
    (64, 16),
]
KINDS = ["gaussian", "rank 1", "rank 2", "rank p/2", "κ 1e4", "κ 1e8", "κ 1e12", "normal", "tangent", "horizontal"]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def frame(*shape: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(gaussian(*shape, seed=seed))[0]


def gradient(kind: str, x: Tensor, seed: int = 0) -> Tensor:
    """Gradients that are ordinary, or at an edge: see the names."""
    *batch, n, p = x.shape
    g = gaussian(*batch, n, p, seed=seed)
    name, _, number = kind.partition(" ")
    if name == "rank":
        rank = max(1, p // 2) if number == "p/2" else min(p, int(number))
        return g[..., :rank] @ gaussian(*batch, rank, p, seed=seed + 1)
    if name == "κ":
        singular = torch.logspace(0, -math.log10(float(number)), p, dtype=torch.float64)
        return frame(*batch, n, p, seed=seed + 1) * singular @ frame(*batch, p, p, seed=seed + 2)
    if name == "normal":  # a tangent part of 1e-5
        return x @ sym(gaussian(*batch, p, p, seed=seed + 1)) + 1e-5 * g
    if name == "tangent":  # to the orbit of XO(p), but for 1e-8
        return x @ skew(gaussian(*batch, p, p, seed=seed + 1)) + 1e-8 * g
    if name == "horizontal":  # but for 1e-8
        return g - x @ (x.mT @ g) + 1e-8 * gaussian(*batch, n, p, seed=seed + 1)
    return g


def nuclear(a: Tensor) -> Tensor:
    return torch.linalg.svdvals(a).sum(-1)


def spectral(a: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(a, 2)


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def msign(a: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(a, full_matrices=False)
    return left @ right


def tangency(x: Tensor, delta: Tensor) -> float:
    return 2 * sym(x.mT @ delta).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_the_step_is_feasible_and_the_multiplier_proves_it_optimal(n, p, kind):
    x = frame(3, n, p)
    g = gradient(kind, x, seed=1)
    result = spectral_steepest_descent(x, g)
    assert tangency(x, result.step) < 1e-12
    assert spectral(result.step).max() < 1 + 1e-12
    assert torch.equal(result.multiplier, result.multiplier.mT)
    assert result.relative_gap.max() < 1e-9
    # the two sides of weak duality at full size, from the definition; the rounding is that of ‖G‖, which is 1e5 times
    # the tangent part for "normal"
    tangent = g - x @ sym(x.mT @ g)
    rounding = 1e-14 * torch.linalg.matrix_norm(g)
    dual, primal = nuclear(g + x @ result.multiplier), -inner(g, result.step)
    assert ((dual - result.dual).abs() <= rounding + 1e-13 * dual).all()
    assert ((primal - result.primal).abs() <= rounding + 1e-13 * dual).all()
    # nothing that is feasible beats the multiplier's bound, and no multiplier's bound is below the step
    for seed in range(5):
        other = STIEFEL.project(x, gaussian(3, n, p, seed=10 + seed))
        assert (-inner(g, other) / spectral(other).clamp_min(1e-300) <= dual + rounding).all()
        multiplier = sym(gaussian(3, p, p, seed=20 + seed)) * torch.linalg.matrix_norm(tangent)[:, None, None]
        assert (nuclear(tangent + x @ multiplier) >= primal - rounding).all()
        assert (nuclear(g + x @ (result.multiplier + 1e-3 * multiplier)) >= primal - rounding).all()


@pytest.mark.parametrize(("n", "p"), [(7, 3), (20, 5), (12, 8), (9, 8), (6, 6), (5, 5)])
def test_the_value_is_the_nuclear_norm_of_the_skew_lift(n, p):
    x, g = frame(4, n, p), gaussian(4, n, p, seed=1)
    lifted = nuclear(skew(g @ x.mT))  # n×n
    torch.testing.assert_close(spectral_steepest_descent(x, g).primal, lifted, rtol=1e-12, atol=0)


def test_one_column_and_horizontal_gradients_have_known_steps():
    x, g = frame(9, 1), gaussian(9, 1, seed=1)
    tangent = g - x @ (x.mT @ g)
    result = spectral_steepest_descent(x, g)
    torch.testing.assert_close(result.step, -tangent / tangent.norm(), rtol=0, atol=1e-15)
    torch.testing.assert_close(result.dual, tangent.norm(), rtol=1e-14, atol=0)

    # with no component along X the constraint does not bind: the unconstrained answer, minus the polar factor
    x, g = frame(20, 4), gaussian(20, 4, seed=1)
    normal = g - x @ (x.mT @ g)
    torch.testing.assert_close(spectral_steepest_descent(x, normal).step, -msign(normal), rtol=0, atol=1e-13)

    # a rotation of the plane, and the third axis of an odd square, which no gradient determines
    turn = torch.tensor([[0.0, -3.0], [3.0, 0.0]], dtype=torch.float64)
    step = spectral_steepest_descent(torch.eye(2, dtype=torch.float64), turn).step
    torch.testing.assert_close(step, -turn / 3, rtol=0, atol=1e-15)
    turn = torch.nn.functional.pad(turn, (0, 1, 0, 1))
    step = spectral_steepest_descent(torch.eye(3, dtype=torch.float64), turn).step
    torch.testing.assert_close(step, -turn / 3, rtol=0, atol=1e-15)


def dual_ascent(x: Tensor, g: Tensor, steps: int) -> Tensor:
    """The smallest ‖G + XΛ‖_* that descent along its gradient sym(Xᵀ msign(G + XΛ)) sees, at full size."""
    multiplier, best = -sym(x.mT @ g), nuclear(g)
    for k in range(steps):
        c = g + x @ multiplier
        best = torch.minimum(best, nuclear(c))
        rate = 0.3 * torch.linalg.svdvals(c)[-1] + 0.3 * torch.linalg.matrix_norm(g) / (1 + k) ** 1.5
        multiplier = multiplier - rate * sym(x.mT @ msign(c))
    return best


@pytest.mark.parametrize(("n", "p", "tolerance"), [(7, 3, 1e-6), (24, 6, 1e-9), (64, 16, 1e-6)])
def test_agrees_with_full_size_dual_ascent(n, p, tolerance):
    x, g = frame(n, p, seed=3), gaussian(n, p, seed=4)
    result = spectral_steepest_descent(x, g)
    ascent = dual_ascent(x, g, 1500)
    assert result.dual <= ascent * (1 + 1e-13)
    torch.testing.assert_close(result.dual, ascent, rtol=tolerance, atol=0)


@pytest.mark.parametrize(("n", "p"), [(2, 2), (3, 2), (4, 2), (6, 2)])
def test_agrees_with_general_convex_solvers(n, p):
    x, g = frame(n, p, seed=5), gaussian(n, p, seed=6)
    result = spectral_steepest_descent(x, g)
    # primal: the largest descent with I − ΔᵀΔ ⪰ 0, two smooth inequalities for p = 2, over coordinates of the tangents
    basis = torch.linalg.svd(
        torch.stack([STIEFEL.project(x, e.reshape(n, p)).flatten() for e in torch.eye(n * p, dtype=torch.float64)])
    )[2][: n * p - p * (p + 1) // 2].numpy()
    cost = basis @ g.flatten().numpy()

    def slack(c: np.ndarray) -> np.ndarray:
        delta = (c @ basis).reshape(n, p)
        s = np.eye(p) - delta.T @ delta
        return np.array([np.trace(s), np.linalg.det(s)])

    primal = scipy.optimize.minimize(
        lambda c: c @ cost,
        -cost / np.linalg.norm(cost) / 2,
        jac=lambda c: cost,
        constraints={"type": "ineq", "fun": slack},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert slack(primal.x).min() > -1e-7
    assert -primal.fun == pytest.approx(result.primal.item(), rel=1e-4)

    # dual: three numbers, without derivatives
    def bound(v: np.ndarray) -> float:
        return nuclear(g + x @ torch.tensor([[v[0], v[1]], [v[1], v[2]]])).item()

    options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 4000, "maxfev": 4000}
    dual = scipy.optimize.minimize(bound, np.zeros(3), method="Nelder-Mead", options=options)
    assert dual.fun >= result.dual.item() * (1 - 1e-13)
    assert dual.fun == pytest.approx(result.dual.item(), rel=1e-6)


def test_other_directions_score_less():
    x, g = frame(8, 7, 3), gaussian(8, 7, 3, seed=1)
    best = spectral_steepest_descent(x, g).primal
    riemannian = STIEFEL.project(x, g)
    frobenius = inner(g, riemannian) / spectral(riemannian)
    assert (frobenius < 0.99 * best).all()
    assert (frobenius > 0.5 * best).all()

    # the one-loop heuristic: the polar factor of the tangent gradient is not tangent, and made so, is not steepest
    x, g = frame(8, 96, 16), gaussian(8, 96, 16, seed=1)
    best = spectral_steepest_descent(x, g)
    heuristic = -msign(STIEFEL.project(x, g))
    assert tangency(x, heuristic) > 1e-2
    feasible = STIEFEL.project(x, heuristic)
    feasible = feasible / spectral(feasible)[:, None, None]
    suboptimality = 1 + inner(g, feasible) / best.dual
    assert (suboptimality > 1e-3).all()
    assert (suboptimality < 0.2).all()


@pytest.mark.parametrize("kind", ["gaussian", "rank 2", "κ 1e4", "normal"])
@pytest.mark.parametrize(("n", "p"), [(32, 8), (12, 8), (8, 8), (7, 7)])
def test_goes_along_with_rotations_on_either_side(n, p, kind):
    x = frame(2, n, p)
    g = gradient(kind, x, seed=1)
    step = spectral_steepest_descent(x, g).step
    left, right = frame(n, n, seed=5), frame(p, p, seed=6)
    # κ 1e4: the step turns by 1e-16·κ(Γ), and κ(Γ) can be κ²
    tolerance = 1e-7 if kind == "κ 1e4" else 1e-9
    torch.testing.assert_close(spectral_steepest_descent(left @ x, left @ g).step, left @ step, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        spectral_steepest_descent(x @ right, g @ right).step, step @ right, rtol=0, atol=tolerance
    )
    normal = x @ sym(gaussian(2, p, p, seed=7)) * torch.linalg.matrix_norm(g)[:, None, None]
    torch.testing.assert_close(spectral_steepest_descent(x, g + normal).step, step, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize(("n", "p"), [(32, 8), (9, 8)])
def test_does_not_depend_on_scale(n, p, scale):
    x, g = frame(2, n, p), gaussian(2, n, p, seed=1)
    one, scaled = spectral_steepest_descent(x, g), spectral_steepest_descent(x, scale * g)
    torch.testing.assert_close(scaled.step, one.step, rtol=0, atol=1e-12)
    torch.testing.assert_close(scaled.dual / scale, one.dual, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled.multiplier / scale, one.multiplier, rtol=0, atol=1e-10)
    assert scaled.relative_gap.max() < 1e-12


@pytest.mark.parametrize(("n", "p"), [(32, 8), (12, 8), (8, 8)])
def test_a_batch_is_its_frames_one_by_one(n, p):
    x, kinds = frame(len(KINDS) + 2, n, p), [*KINDS, "zero", "gaussian"]
    g = torch.stack([gradient(k, x[i], seed=i) if k != "zero" else 0 * x[i] for i, k in enumerate(kinds)])
    scales = torch.logspace(-20, 20, len(kinds), dtype=torch.float64)[:, None, None]
    batch = spectral_steepest_descent(x[None], (scales * g)[None])
    assert [tuple(part.shape) for part in batch] == [(1, *x.shape), (1, len(kinds), p, p), *[(1, len(kinds))] * 3]
    for i, kind in enumerate(kinds):
        one = spectral_steepest_descent(x[i], scales[i] * g[i])
        # where nearly nothing determines the step, rounding does
        tolerance = 1e-2 if kind == "κ 1e12" else 1e-6
        torch.testing.assert_close(batch.step[0, i], one.step, rtol=0, atol=tolerance)
        torch.testing.assert_close(batch.dual[0, i], one.dual, rtol=1e-11, atol=0)
        assert batch.relative_gap[0, i] < 1e-9


@pytest.mark.parametrize("shape", [(16, 4), (6, 4), (4, 4)])
def test_nothing_to_descend_is_a_zero_step(shape):
    x = frame(3, *shape)
    g = gaussian(3, *shape, seed=1)
    g[0] = 0
    g[1] = x[1] @ sym(g[1, :4])  # normal
    result = spectral_steepest_descent(x, g)
    assert not result.step[:2].any()
    for part in result[2:]:
        assert not part[:2].any()
    assert result.relative_gap[2] < 1e-12
    assert spectral(result.step[2]) > 1 - 1e-12
    # and the certificate of the normal gradient is its own: G + XΛ = 0
    torch.testing.assert_close(g[1] + x[1] @ result.multiplier[1], torch.zeros_like(g[1]), rtol=0, atol=1e-14)


def test_frames_are_grouped_without_a_trace(monkeypatch):
    x, g = frame(5, 24, 4), gaussian(5, 24, 4, seed=1)
    whole = spectral_steepest_descent(x, g)
    monkeypatch.setattr(spectral_descent, "_GROUP_ENTRIES", 2 * 24 * 4)
    for one, other in zip(whole, spectral_steepest_descent(x, g), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str
)
@pytest.mark.parametrize(("n", "p"), [(32, 8), (12, 8), (8, 8)])
def test_low_precision_frames_are_solved_in_float64(n, p, dtype, atol):
    x, g = frame(3, n, p).to(dtype), gaussian(3, n, p, seed=1).to(dtype)
    result = spectral_steepest_descent(x, g)
    assert result.step.dtype == dtype
    assert {part.dtype for part in result[1:]} == {torch.float64}
    assert result.relative_gap.max() < 1e-9
    # the problem is that of the nearest frame
    nearest = msign(x.double())
    step = spectral_steepest_descent(nearest, g.double()).step
    torch.testing.assert_close(result.step.double(), step, rtol=0, atol=atol)
    assert tangency(nearest, result.step.double()) < 8 * atol
    assert spectral(result.step.double()).max() < 1 + 4 * atol


@pytest.mark.parametrize("factor", [1e2, 1e3, 1e4, 1e6])
def test_float32_gradients_of_any_condition_keep_their_certificate(factor):
    x = frame(4, 48, 12).float()
    g = gradient(f"κ {factor}", x.double(), seed=1).float()
    result = spectral_steepest_descent(x, g)
    nearest = msign(x.double())
    dual = nuclear(g.double() + nearest @ result.multiplier)
    torch.testing.assert_close(result.dual, dual, rtol=1e-11, atol=0)
    assert result.relative_gap.max() < 1e-9
    # the bound is met by the rounded step up to its rounding
    assert ((dual + inner(g.double(), result.step.double())) / dual).abs().max() < 1e-6


def test_inputs_are_left_alone_and_no_graph_is_kept():
    x, g = frame(10, 3).requires_grad_(), gaussian(10, 3, seed=1).requires_grad_()
    before = x.detach().clone(), g.detach().clone()
    result = spectral_steepest_descent(x, g)
    assert isinstance(result, SpectralDescentResult)
    assert not any(part.requires_grad for part in result)
    assert torch.equal(x, before[0])
    assert torch.equal(g, before[1])


@pytest.mark.parametrize("shape", [(0, 5, 2), (3, 4, 0), (0, 0)])
def test_empty_batches_and_frames(shape):
    x = torch.zeros(shape, dtype=torch.float64)
    result = spectral_steepest_descent(x, x)
    assert result.step.shape == shape
    assert result.multiplier.shape == (*shape[:-2], shape[-1], shape[-1])
    assert result.dual.shape == result.relative_gap.shape == shape[:-2]


def test_errors_name_what_is_wrong():
    x, g = frame(2, 5, 3), gaussian(2, 5, 3)
    for value in (math.nan, math.inf, -math.inf):
        bad = g.clone()
        bad[1, 2, 0] = value
        with pytest.raises(ValueError, match="g has NaN or infinite"):
            spectral_steepest_descent(x, bad)
        bad = x.clone()
        bad[1, 2, 0] = value
        with pytest.raises(ValueError, match="x must have orthonormal columns"):
            spectral_steepest_descent(bad, g)
    with pytest.raises(ValueError, match=r"x must have orthonormal columns.* = 3"):
        spectral_steepest_descent(2 * x, g)
    with pytest.raises(ValueError, match=r"n ≥ p, found \(2, 3, 5\)"):
        spectral_steepest_descent(x.mT, g.mT)
    with pytest.raises(ValueError, match=r"g must have the shape of x, \(2, 5, 3\), found \(5, 3\)"):
        spectral_steepest_descent(x, g[0])
    with pytest.raises(TypeError, match=r"g must be a real floating-point tensor, found torch\.int64"):
        spectral_steepest_descent(x, torch.ones(2, 5, 3, dtype=torch.int64))
