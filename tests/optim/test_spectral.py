import copy

import pytest
import torch
from geodescent.analysis import steepest_descent_certificate
from geodescent.manifolds import CanonicalMetric, ManifoldParameter, Stiefel
from geodescent.optim import SpectralDescent
from torch import nn

M = Stiefel()


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def frame(*shape, seed=0, dtype=torch.float64):
    return ManifoldParameter(
        M.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)), Stiefel()
    )


def run(optimizer, parameter, grads):
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("shape", [(9, 4), (3, 8, 4), (5, 5), (5, 4), (6, 1)])
def test_the_first_step_is_steepest_in_the_spectral_norm_and_of_length_lr(shape):
    p, g = frame(*shape), draw(*shape)
    x = p.detach().clone()
    optimizer = SpectralDescent([p], lr=0.1)
    step = M.inverse_retract(x, run(optimizer, p, [g])).reshape(-1, *shape[-2:])
    assert torch.linalg.matrix_norm(step, 2).max() == pytest.approx(0.1, rel=1e-10)
    (gaps,) = optimizer.relative_gaps()
    assert gaps.shape == shape[:-2]
    assert gaps.max() < 1e-9
    for at, egrad, taken in zip(x.reshape(step.shape), g.reshape(step.shape), step, strict=True):
        assert steepest_descent_certificate(M, at, egrad, taken, norm="spectral", atol=1e-9).passed


def test_a_feasible_step_never_descends_more():
    p, g = frame(8, 3), draw(8, 3)
    x = p.detach().clone()
    best = float((g * M.inverse_retract(x, run(SpectralDescent([p], lr=0.1), p, [g]))).sum())
    for seed in range(100, 150):
        other = M.project(x, draw(8, 3, seed=seed) - g)
        other = 0.1 * other / torch.linalg.matrix_norm(other, 2)
        assert float((g * other).sum()) > best


def test_rms_scale_moves_an_element_by_lr():
    p = frame(2, 40, 10)
    x = p.detach().clone()
    step = M.inverse_retract(x, run(SpectralDescent([p], lr=1e-3, step_scale="rms"), p, [draw(2, 40, 10)]))
    torch.testing.assert_close(step.square().mean((-2, -1)).sqrt(), torch.full((2,), 1e-3, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}], ids=str)
def test_the_momentum_is_tangent_and_frames_do_not_touch_one_another(options):
    p, q = frame(2, 6, 3), frame(2, 6, 3)
    a, b = (SpectralDescent([each], lr=0.1, **options) for each in (p, q))
    for seed in range(6):
        g = draw(2, 6, 3, seed=seed)
        run(a, p, [g])
        run(b, q, [g * torch.tensor([1.0, 1e3], dtype=torch.float64)[:, None, None]])
        assert M.tangent_error(p.detach(), a.state[p]["exp_avg"]).max() < 1e-12
        assert M.point_error(p.detach()).max() < 1e-13
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-12)


def test_a_frame_without_gradient_stays_and_float32_works():
    p = frame(2, 6, 3, dtype=torch.float32)
    x, g = p.detach().clone(), draw(2, 6, 3, dtype=torch.float32)
    g[0] = 0
    y = run(SpectralDescent([p], lr=0.1), p, [g])
    torch.testing.assert_close(y[0], x[0], rtol=0, atol=1e-6)
    assert (y[1] - x[1]).abs().max() > 0.01
    assert M.point_error(y).max() < 2e-6


def test_plain_parameters_take_adamws_steps():
    p = nn.Parameter(draw(4))
    q = copy.deepcopy(p)
    ours = SpectralDescent([p, frame(5, 3)], lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.1)
    for seed in range(5):
        p.grad = draw(4, seed=seed)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(p, q)


def test_it_descends_to_the_dominant_subspace():
    a = torch.diag(torch.arange(8.0, 0.0, -1.0, dtype=torch.float64))
    p = frame(8, 2)
    optimizer = SpectralDescent([p], lr=0.1, momentum=0.5)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.95**step
        optimizer.zero_grad()
        (-(p * (a @ p)).sum() / 2).backward()
        optimizer.step()
    assert float((p * (a @ p)).sum().detach()) == pytest.approx(15.0, abs=1e-4)  # the two largest eigenvalues, 8 + 7


def test_frames_of_another_metric_are_refused():
    x = ManifoldParameter(M.random_point(5, 3), Stiefel(CanonicalMetric()))
    with pytest.raises(ValueError, match="SpectralDescent steps frames on Stiefel with"):
        SpectralDescent([x])


def test_a_copy_goes_on_alike():
    p = frame(5, 3)
    optimizer = SpectralDescent([p], lr=0.1)
    run(optimizer, p, [draw(5, 3)])
    twin, q = copy.deepcopy((optimizer, p))
    assert torch.equal(run(optimizer, p, [draw(5, 3, seed=2)]), run(twin, q, [draw(5, 3, seed=2)]))
