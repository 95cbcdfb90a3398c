"""Averaged models: frames are the nearest points to the true averages, everything else is torch's."""

# modules are read by attribute, which type checkers take for Tensor | Module
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import copy
import io

import pytest
import torch
from geodescent.attention import StiefelAttention
from geodescent.manifolds import ManifoldParameter, SpecialOrthogonal, Sphere, Stiefel
from geodescent.optim import AveragedModel, RiemannianAdam
from torch import nn
from torch.optim import swa_utils

EMA = swa_utils.get_ema_multi_avg_fn(0.8)


class Frames(nn.Module):
    """Frames of several kinds, a tied one, a plain parameter and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, manifold, shape in (
            ("q", Stiefel(), (2, 6, 3)),
            ("rotation", SpecialOrthogonal(), (3, 3)),
            ("unit", Sphere(), (4, 5)),
        ):
            x = manifold.random_point(*shape, dtype=torch.float64, generator=generator)
            setattr(self, name, ManifoldParameter(x, manifold))
        self.tied = self.q
        self.plain = nn.Parameter(torch.randn(4, 3, dtype=torch.float64, generator=generator))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))


def trajectory(model, steps=6, size=0.3):
    """The model's own weights along a walk; the model is moved as it goes on."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                noise = size * torch.randn(p.shape, dtype=p.dtype, generator=generator)
                if isinstance(p, ManifoldParameter):
                    p.detach().copy_(p.manifold.project_point(p.detach() + noise))
                else:
                    p.add_(noise)
            for b in model.buffers():
                b.add_(1)
        yield {name: p.detach().clone() for name, p in model.named_parameters()}


def weights_of(kind, count):
    if kind == "swa":
        return torch.full((count,), 1 / count, dtype=torch.float64)
    w = 0.2 * 0.8 ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    w[0] /= 0.2
    return w


OPTIONS = {
    "swa": {},
    "ema": {"multi_avg_fn": EMA},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_frames_minimize_the_weighted_sum_of_squared_distances(kind):
    """The definition: no nearby point of the manifold has a smaller sum, and the gradient of the sum is normal."""
    model = Frames()
    averaged = AveragedModel(model, **OPTIONS[kind])
    history = []
    for weights in trajectory(model):
        history.append(weights)
        averaged.update_parameters(model)
    w = weights_of(kind, len(history))
    assert w.sum() == pytest.approx(1)
    generator = torch.Generator().manual_seed(2)
    for name, p in averaged.module.named_parameters():
        points = torch.stack([weights[name] for weights in history])
        mean = torch.einsum("i,i...->...", w, points)
        x = p.detach()
        if not isinstance(p, ManifoldParameter):
            torch.testing.assert_close(x, mean, rtol=0, atol=1e-14)
            continue
        manifold = p.manifold
        assert manifold.point_error(x).max() < 1e-14
        assert manifold.point_error(mean).min() > 1e-3  # so there was something to project

        def cost(y, points=points):
            return torch.einsum("i,i->", w, (points - y).square().flatten(1).sum(1))

        assert manifold.project(x, mean - x).abs().max() < 1e-13
        for scale in (1e-3, 1e-1, 1.0):
            u = manifold.random_tangent(x, generator=generator)
            assert cost(x) < cost(manifold.exp(x, scale * u))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_rest_is_torchs(kind, use_buffers):
    model, plain_averages = Frames(), []
    twin = nn.Module()
    twin.plain = nn.Parameter(model.plain.detach().clone())
    twin.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
    ours = AveragedModel(model, use_buffers=use_buffers, **OPTIONS[kind])
    theirs = swa_utils.AveragedModel(twin, use_buffers=use_buffers, **OPTIONS[kind])
    for weights in trajectory(model):
        with torch.no_grad():
            twin.plain.copy_(weights["plain"])
            twin.seen.copy_(model.seen)
        ours.update_parameters(model)
        theirs.update_parameters(twin)
        plain_averages.append(theirs.module.plain.detach().clone())
        assert torch.equal(ours.module.plain, theirs.module.plain)
        assert torch.equal(ours.module.seen, theirs.module.seen)
        assert torch.equal(ours.n_averaged, theirs.n_averaged)
    assert not torch.equal(plain_averages[0], plain_averages[-1])


def test_the_first_update_is_a_copy_and_tied_frames_stay_tied():
    model = Frames()
    averaged = AveragedModel(model)
    for _ in trajectory(model, steps=1):
        averaged.update_parameters(model)
    for name, p in averaged.module.named_parameters():
        torch.testing.assert_close(p.detach(), model.get_parameter(name).detach(), rtol=0, atol=1e-15)
    assert averaged.module.tied is averaged.module.q
    assert isinstance(averaged.module.q, ManifoldParameter)
    assert averaged.module.q.manifold == Stiefel()
    assert averaged.module.q is not model.q


def test_averaging_leaves_the_model_alone():
    model = Frames()
    averaged = AveragedModel(model, multi_avg_fn=EMA)
    for weights in trajectory(model):
        averaged.update_parameters(model)
        for name, p in model.named_parameters():
            assert torch.equal(p.detach(), weights[name])


def test_the_average_commutes_with_rotations():
    rotation = SpecialOrthogonal().random_point(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    points = [
        Stiefel().random_point(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (4, 5)
    ]

    def average(frames):
        model = nn.Module()
        model.x = ManifoldParameter(frames[0], Stiefel())
        averaged = AveragedModel(model)
        for x in frames:
            model.x.detach().copy_(x)
            averaged.update_parameters(model)
        return averaged.module.x.detach()

    torch.testing.assert_close(average([rotation @ x for x in points]), rotation @ average(points), rtol=0, atol=1e-13)


def test_saving_and_resuming_is_bitwise_the_same():
    model = Frames()
    whole = AveragedModel(model, multi_avg_fn=EMA)
    resumed = AveragedModel(copy.deepcopy(model), multi_avg_fn=EMA)
    for step, _ in enumerate(trajectory(model)):
        whole.update_parameters(model)
        if step == 2:
            file = io.BytesIO()
            torch.save(whole.state_dict(), file)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        elif step > 2:
            resumed.update_parameters(model)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_conversions_follow():
    model = Frames()
    averaged = AveragedModel(model).float()
    for _ in trajectory(model, steps=3):
        averaged.update_parameters(model)
    q = averaged.module.q
    assert q.dtype == torch.float32
    assert Stiefel().point_error(q.detach()).max() < 1e-6
    twin = copy.deepcopy(averaged)
    twin.update_parameters(model)
    averaged.update_parameters(model)
    assert torch.equal(twin.module.q, averaged.module.q)


def test_a_frame_that_is_not_finite_is_refused_whole():
    model = Frames()
    averaged = AveragedModel(model)
    for _ in trajectory(model, steps=2):
        averaged.update_parameters(model)
    before = {key: value.clone() for key, value in averaged.state_dict().items()}
    model.rotation.detach()[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the frame 'rotation' has NaN"):
        averaged.update_parameters(model)
    for key, value in averaged.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_opposite_frames_average_to_a_frame():
    model = nn.Module()
    model.x = ManifoldParameter(Stiefel().random_point(5, 2, dtype=torch.float64), Stiefel())
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    model.x.detach().neg_()
    averaged.update_parameters(model)
    assert Stiefel().point_error(averaged.module.x.detach()) < 1e-13


def test_an_average_of_a_training_run_can_be_trained_on():
    torch.manual_seed(0)
    model = StiefelAttention(8, 2)
    averaged = AveragedModel(model, multi_avg_fn=EMA)
    optimizer = RiemannianAdam(model.parameters(), lr=0.05)
    x = torch.randn(4, 3, 8)
    for _ in range(10):
        optimizer.zero_grad()
        model(x, x, x)[0].square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    RiemannianAdam(averaged.module.parameters())  # refuses frames that are off their manifold
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=EMA)
    for _ in range(3):
        optimizer.step()
        theirs.update_parameters(model)
    with pytest.raises(ValueError, match="not on"):
        RiemannianAdam(theirs.module.parameters())
