import copy
import io

import pytest
import torch
from geodescent.attention import StiefelLinear
from geodescent.manifolds import CanonicalMetric, ManifoldParameter, NotOnManifoldError, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn

SIZES = [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)]


@pytest.mark.parametrize(("inside", "outside"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_nn_linear_with_its_weight(inside, outside, bias, generator):
    layer = StiefelLinear(inside, outside, bias, scale=0.7, dtype=torch.float64)
    twin = nn.Linear(inside, outside, bias, dtype=torch.float64)
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
        if layer.bias is not None:
            twin.bias.copy_(layer.bias)
    x = torch.randn(2, 4, inside, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(layer(x), twin(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("inside", "outside"), SIZES)
def test_orthonormal_the_way_round_that_it_says(inside, outside, generator):
    layer = StiefelLinear(inside, outside, bias=False, dtype=torch.float64)
    w = layer.weight.detach()
    assert w.shape == (outside, inside)
    assert layer.frame.shape == (1, max(inside, outside), min(inside, outside))
    torch.testing.assert_close(torch.linalg.svdvals(w), torch.ones(min(inside, outside), dtype=torch.float64))
    x = torch.randn(6, inside, dtype=torch.float64, generator=generator)
    if outside >= inside:
        assert layer.orientation.kind == "tall"
        torch.testing.assert_close(layer(x).norm(dim=1), x.norm(dim=1))
    else:
        assert layer.orientation.kind == "wide"
        assert (layer(x).norm(dim=1) <= x.norm(dim=1)).all()
        torch.testing.assert_close(layer(x @ w.T @ w), layer(x))


@pytest.mark.parametrize(("inside", "outside"), [(6, 4), (4, 6)])
def test_trains_with_riemannian_adam_and_stays_on_the_manifold(inside, outside):
    torch.manual_seed(0)
    layer = StiefelLinear(inside, outside, scale="learned", manifold=Stiefel(CanonicalMetric()))
    target = StiefelLinear(inside, outside, scale=2.0)
    optimizer = RiemannianAdam(layer.parameters(), lr=0.05)
    x = torch.randn(64, inside)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - target(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert Stiefel().point_error(layer.frame.detach()) < 1e-5


@pytest.mark.parametrize(("inside", "outside"), [(6, 4), (4, 6)])
def test_from_linear_is_the_nearest(inside, outside, generator):
    torch.manual_seed(0)
    linear = nn.Linear(inside, outside, dtype=torch.float64).eval()
    layer = StiefelLinear.from_linear(linear)
    assert not layer.training
    assert layer.bias is not None
    assert torch.equal(layer.bias, linear.bias)
    left, s, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    torch.testing.assert_close(layer.weight.detach(), s.mean() * left @ right)
    fixed = StiefelLinear.from_linear(linear, scale=1.0)
    torch.testing.assert_close(fixed.weight.detach(), left @ right)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    layer, other = (StiefelLinear(5, 3, scale="learned") for _ in range(2))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert sorted(state) == ["bias", "frame", "scale"]
    other.load_state_dict(state, assign=assign)
    assert type(other.frame) is ManifoldParameter
    x = torch.randn(2, 5)
    assert torch.equal(layer(x), other(x))
    state["frame"] = 2 * state["frame"]
    with pytest.raises(RuntimeError, match="point error is 3"):
        other.load_state_dict(state, assign=assign)
    assert torch.equal(layer(x), other(x))


def test_deepcopy_conversion_and_meta_keep_the_constraint():
    layer = copy.deepcopy(StiefelLinear(5, 3)).double()
    assert type(layer.frame) is ManifoldParameter
    assert Stiefel().point_error(layer.frame.detach()) < 1e-14
    meta = StiefelLinear(5, 3, device="meta").to_empty(device="cpu")
    assert type(meta.frame) is ManifoldParameter
    with torch.no_grad():
        meta.frame.detach().zero_()
    with pytest.raises(NotOnManifoldError):
        RiemannianAdam(meta.parameters())
    meta.reset_parameters(torch.Generator().manual_seed(0))
    RiemannianAdam(meta.parameters())


def test_compiles_whole():
    layer = StiefelLinear(5, 3, scale="learned")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5)
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.frame.grad is not None


def test_repr_names_the_orientation():
    assert "in_features=5, out_features=3, bias=True, orientation='wide'" in repr(StiefelLinear(5, 3))
    assert "scale='learned'" in repr(StiefelLinear(5, 3, scale="learned"))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="in_features and out_features must be positive"):
        StiefelLinear(0, 3)
    for scale in ("large", float("inf"), True):
        with pytest.raises(ValueError, match='scale must be "learned" or a finite number'):
            StiefelLinear(2, 3, scale=scale)
    with pytest.raises(TypeError, match=r"linear must be an nn.Linear, found Conv2d"):
        StiefelLinear.from_linear(nn.Conv2d(1, 1, 1))  # pyright: ignore[reportArgumentType]
