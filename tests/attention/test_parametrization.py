import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from geodescent.attention import PolarParametrization, StiefelLinear, parametrize_stiefel
from geodescent.manifolds import NotOnManifoldError, Stiefel
from torch import nn
from torch.nn.utils import parametrize

MODULES: dict[str, Callable[[], Any]] = {
    "tall": lambda: nn.Linear(3, 5, dtype=torch.float64),
    "wide": lambda: nn.Linear(5, 3, dtype=torch.float64),
    "convolution": lambda: nn.Conv2d(2, 4, (2, 3), dtype=torch.float64),
    "grouped": lambda: nn.Conv2d(4, 6, 2, groups=2, dtype=torch.float64),
    "one dimension": lambda: nn.Conv1d(2, 12, 3, dtype=torch.float64),
}


SHAPES = {
    "tall": (9, 3),
    "wide": (9, 5),
    "convolution": (2, 2, 5, 5),
    "grouped": (2, 4, 5, 5),
    "one dimension": (2, 2, 7),
}


def original_of(module: Any) -> torch.Tensor:
    """What the optimizer trains."""
    return module.parametrizations.weight.original


def matrices(module: Any) -> tuple[torch.Tensor, ...]:
    return module.weight.detach().flatten(1).chunk(getattr(module, "groups", 1))


@pytest.mark.parametrize("kind", MODULES)
def test_starts_at_the_nearest_weight(kind):
    torch.manual_seed(0)
    module = MODULES[kind]()
    expected = []
    for matrix in matrices(module):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        expected.append(left @ right)
    assert parametrize_stiefel(module) is module
    for ours, theirs in zip(matrices(module), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (4, 4), (4, 2, 2)])
@pytest.mark.parametrize("spectrum", ["distinct", "equal", "pairs", "close"])
def test_gradient_is_right_also_at_repeated_singular_values(shape, spectrum, generator):
    polar = PolarParametrization(shape)
    orientation = polar.orientation
    _, n, p = orientation.frame_shape
    left = Stiefel().random_point(n, p, dtype=torch.float64, generator=generator)
    right = Stiefel().random_point(p, p, dtype=torch.float64, generator=generator)
    values = torch.linspace(0.5, 2.0, p, dtype=torch.float64)
    if spectrum == "equal":
        values = torch.full_like(values, 1.5)
    elif spectrum == "pairs":
        values[1] = values[0]
    elif spectrum == "close":
        values[1] = values[0] * (1 + 1e-13)
    a = orientation.to_weight((left * values @ right.T)[None]).detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(polar, a)
    assert torch.autograd.gradgradcheck(polar, a)


def test_gradient_at_the_values_known_in_closed_form():
    """Of polar(A)[1, 0] at I and at diag(2, 1); the derivative by the SVD is NaN at the first."""
    polar = PolarParametrization((2, 2))
    for diagonal, slope in (((1.0, 1.0), 0.5), ((2.0, 1.0), 1 / 3)):
        a = torch.diag(torch.tensor(diagonal, dtype=torch.float64)).requires_grad_()
        polar(a)[1, 0].backward()
        expected = torch.tensor([[0.0, -slope], [slope, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(a.grad, expected)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", MODULES)
def test_trains_with_a_plain_optimizer_and_stays_on_the_manifold(kind, optimizer, generator):
    torch.manual_seed(0)
    module: Any = parametrize_stiefel(MODULES[kind]())
    step = optimizer(module.parameters(), lr=0.05)
    shape = SHAPES[kind]
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    target = torch.randn_like(module(x))
    losses, start = [], module.weight.detach().clone()
    for _ in range(20):
        step.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert (module.weight - start).abs().max() > 1e-3
    for matrix in matrices(module):
        torch.testing.assert_close(torch.linalg.svdvals(matrix), torch.ones(min(matrix.shape), dtype=torch.float64))


def test_the_gradient_is_orthogonal_to_the_matrix():
    module: Any = parametrize_stiefel(MODULES["wide"]())
    with torch.no_grad():
        original_of(module).mul_(1.7)
    module(torch.randn(9, 5, dtype=torch.float64)).exp().sum().backward()
    original = original_of(module)
    assert original.grad is not None
    assert abs((original.grad * original.detach()).sum()) < 1e-12 * original.grad.norm()


def test_assigning_an_orthonormal_weight_works_and_another_is_refused():
    module: Any = parametrize_stiefel(MODULES["wide"]())
    before = module.weight.detach().clone()
    with pytest.raises(NotOnManifoldError, match="the weight to assign"):
        module.weight = 2 * before
    torch.testing.assert_close(module.weight.detach(), before)
    new = StiefelLinear(5, 3, dtype=torch.float64).weight.detach()
    module.weight = new
    torch.testing.assert_close(module.weight.detach(), new)


def test_state_dict_deepcopy_and_removal():
    torch.manual_seed(0)
    module: Any = parametrize_stiefel(MODULES["grouped"]())
    other: Any = parametrize_stiefel(MODULES["grouped"]())
    assert sorted(module.state_dict()) == ["bias", "parametrizations.weight.original"]
    other.load_state_dict(module.state_dict())
    twin = copy.deepcopy(module)
    weight = module.weight.detach()
    torch.testing.assert_close(other.weight.detach(), weight, rtol=0, atol=0)
    torch.testing.assert_close(twin.weight.detach(), weight, rtol=0, atol=0)
    assert "PolarParametrization((6, 2, 2, 2), groups=2, orientation='wide')" in repr(module)
    parametrize.remove_parametrizations(module, "weight")
    assert isinstance(module.weight, nn.Parameter)
    torch.testing.assert_close(module.weight.detach(), weight, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    module: Any = parametrize_stiefel(nn.Linear(16, 8).to(dtype))
    assert module.weight.dtype == dtype
    eps = torch.finfo(dtype).eps
    w = module.weight.detach().float()
    assert (w @ w.T - torch.eye(8)).abs().max() < 16 * eps
    module(torch.randn(3, 16, dtype=dtype)).float().square().sum().backward()
    grad = original_of(module).grad
    assert grad is not None
    assert grad.dtype == dtype
    assert grad.isfinite().all()


def test_compiles_and_exports_whole():
    module = parametrize_stiefel(nn.Linear(5, 3))
    x = torch.randn(2, 5)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    original = original_of(module)
    (expected,) = torch.autograd.grad(module(x).exp().sum(), original)
    (found,) = torch.autograd.grad(compiled(x).exp().sum(), original)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


def test_the_operator_keeps_the_rules_of_torch():
    for a in (torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, 90).mT):
        torch.library.opcheck(torch.ops.geodescent.polar_factor.default, (a.requires_grad_(),))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"name must be that of a real parameter.*'weights' of Linear is NoneType"):
        parametrize_stiefel(nn.Linear(2, 2), "weights")
    with pytest.raises(ValueError, match=r"'bias' of Linear is torch.float32 \(2,\)"):
        parametrize_stiefel(nn.Linear(2, 2), "bias")
    with pytest.raises(ValueError, match="parametrized already"):
        parametrize_stiefel(parametrize_stiefel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="'frame' of StiefelLinear is a ManifoldParameter"):
        parametrize_stiefel(StiefelLinear(2, 2), "frame")
