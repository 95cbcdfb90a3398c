import copy
import io
import pickle

import pytest
import torch
from geodescent.manifolds import QR, CanonicalMetric, Euclidean, ManifoldParameter, NotOnManifoldError, Stiefel
from torch import nn

MANIFOLD = Stiefel(CanonicalMetric(), QR())


def make(*shape: int, dtype: torch.dtype = torch.float64) -> ManifoldParameter:
    x = MANIFOLD.random_point(*(shape or (5, 3)), dtype=dtype, generator=torch.Generator().manual_seed(0))
    return ManifoldParameter(x, MANIFOLD)


class Holder(nn.Module):
    def __init__(self, parameter: ManifoldParameter) -> None:
        super().__init__()
        self.weight = parameter


def test_is_a_parameter_of_the_module():
    p = make()
    assert isinstance(p, nn.Parameter)
    assert [name for name, _ in Holder(p).named_parameters()] == ["weight"]
    assert p.requires_grad
    assert not ManifoldParameter(p, MANIFOLD, requires_grad=False).requires_grad
    assert type(p * 2) is torch.Tensor
    assert "ManifoldParameter on Stiefel(metric=CanonicalMetric()" in repr(p)


def save_and_load(p, weights_only):
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


@pytest.mark.parametrize(
    "clone",
    [
        copy.copy,
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: save_and_load(p, True),
        lambda p: save_and_load(p, False),
        lambda p: copy.deepcopy(Holder(p)).weight,
        lambda p: pickle.loads(pickle.dumps(Holder(p))).weight,
        lambda p: Holder(p).to(torch.float64).weight,
    ],
    ids=["copy", "deepcopy", "pickle", "weights_only", "torch.load", "module-deepcopy", "module-pickle", "to"],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_survives(clone, requires_grad):
    p = make().requires_grad_(requires_grad)
    q = clone(p)
    assert type(q) is ManifoldParameter
    assert q.manifold == MANIFOLD
    assert q.requires_grad == requires_grad
    assert torch.equal(p, q)


def test_deepcopy_keeps_tied_parameters_tied():
    p = make()
    module = nn.ModuleList([Holder(p), Holder(p)])
    twin = copy.deepcopy(module)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not p


@pytest.mark.parametrize("convert", [lambda m: m.float(), lambda m: m.half(), lambda m: m.bfloat16()])
def test_conversion_keeps_class_and_manifold(convert):
    module = convert(Holder(make()))
    assert type(module.weight) is ManifoldParameter
    assert module.weight.manifold == MANIFOLD
    MANIFOLD.check_point(module.weight.detach())


def test_functional_call():
    module = Holder(make())
    module.forward = lambda: module.weight.sum()
    replaced = torch.func.functional_call(module, {"weight": torch.ones(5, 3)}, ())
    assert float(replaced) == 15


def test_off_manifold_data_is_an_error_unless_projection_is_asked_for():
    a = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotOnManifoldError, match="data is not on Stiefel"):
        ManifoldParameter(a, MANIFOLD)
    p = ManifoldParameter(a, MANIFOLD, project=True)
    left, _, right = torch.linalg.svd(a, full_matrices=False)
    torch.testing.assert_close(p.detach(), left @ right)


def test_wide_data_is_an_error():
    with pytest.raises(ValueError, match="n >= p"):
        ManifoldParameter(torch.eye(2, 3), MANIFOLD)


def test_the_manifold_must_be_one():
    with pytest.raises(TypeError, match="manifold must be a Manifold object"):
        ManifoldParameter(torch.eye(2), "stiefel")  # type: ignore[arg-type]


def test_loading_off_manifold_values_is_an_error_and_changes_nothing():
    module = Holder(make(3, 3))
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight.*point error is 3"):
        module.load_state_dict({"weight": 2 * torch.eye(3, dtype=torch.float64)})
    assert torch.equal(module.weight, before)
    module.load_state_dict({"weight": torch.eye(3, dtype=torch.float64)})
    assert torch.equal(module.weight, torch.eye(3, dtype=torch.float64))


def test_a_checkpoint_rounded_to_a_coarser_type_loads():
    module = Holder(make(64, 16))
    module.load_state_dict({"weight": module.weight.detach().to(torch.bfloat16)})


def test_shares_storage_like_any_parameter():
    x = MANIFOLD.random_point(4, 2)
    assert ManifoldParameter(x, MANIFOLD).data_ptr() == x.data_ptr()


def test_euclidean_parameter():
    assert ManifoldParameter(torch.ones(2, 5), Euclidean()).manifold == Euclidean()
