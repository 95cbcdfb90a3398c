import copy
import io

import pytest
import torch
from geodescent.attention import StiefelLoRA
from geodescent.manifolds import ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn


def adapted(core="diagonal", dtype=torch.float64, **options) -> StiefelLoRA:
    """A layer whose change is not zero."""
    torch.manual_seed(0)
    layer = StiefelLoRA(nn.Linear(8, 6, dtype=dtype), 3, core=core, **options)
    with torch.no_grad():
        layer.core.normal_()
    return layer


@pytest.mark.parametrize("core", ["diagonal", "full"])
def test_starts_at_zero_change_to_the_last_bit(core):
    base = nn.Linear(8, 6)
    x = torch.randn(2, 5, 8)
    expected = base(x)
    assert torch.equal(StiefelLoRA(base, 4, core=core)(x), expected)


@pytest.mark.parametrize("core", ["diagonal", "full"])
def test_adds_a_matrix_with_the_singular_values_of_the_core(core, generator):
    layer = adapted(core)
    s = torch.diag(layer.core) if core == "diagonal" else layer.core
    change = (layer.left[0] @ s @ layer.right[0].T).detach()
    assert torch.linalg.matrix_rank(change) == 3
    torch.testing.assert_close(torch.linalg.svdvals(change)[:3], torch.linalg.svdvals(s.detach()))
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    expected = x @ (layer.base.weight + change).T + layer.base.bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(layer.change(), change)


@pytest.mark.parametrize("core", ["diagonal", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merging_is_exact_and_unmerging_restores_every_bit(core, dtype, generator):
    layer = adapted(core, dtype)
    before = layer.base.weight.clone()
    x = torch.randn(5, 8, dtype=dtype, generator=generator)
    expected = layer(x)
    assert layer.merge() is layer
    assert layer.merged
    assert not torch.equal(layer.base.weight, before)
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(layer(x), expected, rtol=rounding, atol=rounding)
    merged = layer.base.weight.clone()
    assert torch.equal(layer.merge().base.weight, merged)  # once is enough
    assert torch.equal(layer.unmerge().base.weight, before)
    assert torch.equal(layer.unmerge().base.weight, before)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("core", ["diagonal", "full"])
def test_trains_with_riemannian_adam_and_stays_on_the_manifold(core):
    torch.manual_seed(0)
    base = nn.Linear(8, 6)
    frozen = copy.deepcopy(base)
    layer = StiefelLoRA(base, 2, core=core)
    goal = nn.functional.linear(torch.eye(8), torch.outer(torch.randn(6), torch.randn(8)))
    optimizer = RiemannianAdam([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(64, 8)
    start = layer.left.detach().clone()
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (layer(x) - frozen(x).detach() - x @ goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for frame in (layer.left, layer.right):
        assert Stiefel().point_error(frame.detach()) < 1e-5
    assert (layer.left - start).abs().max() > 1e-2
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), frozen.parameters(), strict=True))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_is_that_of_the_unmerged_layer_and_loading_unmerges(assign):
    layer = adapted()
    plain = {name: t.clone() for name, t in layer.state_dict().items()}
    assert sorted(plain) == ["base.bias", "base.weight", "core", "left", "right"]
    layer.merge()
    file = io.BytesIO()
    torch.save(nn.ModuleDict({"a": layer}).state_dict(), file)
    file.seek(0)
    state = {name.removeprefix("a."): t for name, t in torch.load(file, weights_only=True).items()}
    assert all(torch.equal(plain[name], t) for name, t in state.items())
    other = adapted().merge()
    other.load_state_dict(state, assign=assign)
    assert not other.merged
    assert type(other.left) is ManifoldParameter
    x = torch.randn(2, 8, dtype=torch.float64)
    torch.testing.assert_close(other(x), layer(x))
    with pytest.raises(RuntimeError, match="point error is 3"):
        other.load_state_dict({**state, "left": 2 * state["left"]}, assign=assign)


def test_deepcopy_and_conversion_while_merged():
    layer = copy.deepcopy(adapted(dtype=torch.float32).merge()).double()
    assert type(layer.right) is ManifoldParameter
    assert Stiefel().point_error(layer.right.detach()) < 1e-14
    assert torch.equal(layer.unmerge().base.weight, adapted(dtype=torch.float32).base.weight.double())


def test_dropout_acts_on_the_change_while_training():
    layer = adapted(dropout=0.5)
    x = torch.randn(4, 8, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    with torch.no_grad():
        layer.core.zero_()
    assert torch.equal(layer(x), layer.base(x))


def test_frames_may_be_wider_than_the_base(generator):
    torch.manual_seed(0)
    layer = StiefelLoRA(nn.Linear(8, 6, dtype=torch.bfloat16), 2, dtype=torch.float32)
    with torch.no_grad():
        layer.core.fill_(1.0)
    x = torch.randn(3, 8, generator=generator)
    out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert layer.left.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), out, rtol=0.02, atol=0.02)


def test_compiles_whole():
    layer = adapted(dtype=torch.float32)
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_repr_says_what_it_is():
    assert "rank=3, core='full', manifold=Stiefel(" in repr(adapted("full"))
    assert repr(adapted().merge()).count("merged") == 1


def test_bad_arguments_are_named():
    base = nn.Linear(8, 6)
    for rank in (0, 7):
        with pytest.raises(
            ValueError, match=rf"rank must be from 1 to min\(in_features, out_features\) = 6, found {rank}"
        ):
            StiefelLoRA(base, rank)
    with pytest.raises(ValueError, match='core must be "diagonal" or "full"'):
        StiefelLoRA(base, 2, core="dense")
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\)"):
        StiefelLoRA(base, 2, dropout=1.0)
    assert base.weight.requires_grad  # nothing was frozen by a call that failed
    with pytest.raises(TypeError, match=r"base must be an nn.Linear .* found Conv2d"):
        StiefelLoRA(nn.Conv2d(1, 1, 1), 1)  # pyright: ignore[reportArgumentType]
    base.weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"base must be an nn.Linear .* found Linear of torch.int8"):
        StiefelLoRA(base, 1)
