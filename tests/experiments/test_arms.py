import pytest
import torch
from geodescent.experiments.arms import ARMS, build_model, build_optimizer, qk_names, select_arms
from geodescent.experiments.models import ModularTransformer, PatchTransformer
from geodescent.experiments.studies import Cifar10Study
from geodescent.manifolds import ManifoldParameter, Stiefel


def _models(study, seed=0):
    return {name: build_model(arm, study.build, seed) for name, arm in ARMS.items()}


@pytest.mark.parametrize("which", ["modular", "cifar10"])
def test_starts_are_paired(which, tiny_study):
    study = tiny_study if which == "modular" else Cifar10Study(width=16, heads=2, layers=2)
    models = _models(study)
    state = {name: dict(model.named_parameters()) for name, model in models.items()}
    other = dict(build_model(ARMS["frozen"], study.build, 1).named_parameters())
    shared = set(state["adamw"]) - qk_names(models["frozen"])
    assert len(shared) > 5
    for name in shared:
        assert torch.equal(state["adamw"][name], state["frozen"][name])
        assert torch.equal(state["adamw"][name], state["riemannian-adam"][name])
    frames = [name for name, p in state["frozen"].items() if isinstance(p, ManifoldParameter)]
    assert len(frames) == (2 if which == "modular" else 4)
    for name in frames:
        assert torch.equal(state["frozen"][name], state["riemannian-adam"][name])
        assert not torch.equal(state["frozen"][name], other[name])
        assert Stiefel().point_error(state["frozen"][name].detach()).max() < 1e-5
    assert [p.requires_grad for n, p in state["frozen"].items() if n in frames] == [False] * len(frames)


def test_building_draws_nothing_from_the_callers_generator(tiny_study):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(ARMS["riemannian-adam"], tiny_study.build, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", list(ARMS))
def test_decay_reaches_only_matrices_that_are_not_frames(name):
    study = Cifar10Study(width=16, heads=2, layers=1)
    model = build_model(ARMS[name], study.build, 0)
    optimizer, report = build_optimizer(ARMS[name], model, study.hyperparameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for parameter_name, parameter in model.named_parameters():
        exempt = (
            isinstance(parameter, ManifoldParameter) or parameter.ndim < 2 or parameter_name.endswith("logit_scale")
        )
        if not parameter.requires_grad:
            assert id(parameter) not in decay
        else:
            assert decay[id(parameter)] == (0.0 if exempt else study.weight_decay), parameter_name
    assert sum(group["numbers"] for group in report.values()) == sum(p.numel() for p in model.parameters())
    assert report["frames"]["weight_decay"] == "none"
    assert report["frames"]["stepped_by"] == ("RiemannianAdam" if name == "riemannian-adam" else "none")
    assert report["matrices"]["weight_decay"] == study.weight_decay


def test_every_trained_parameter_is_stepped_once(tiny_study):
    for name, model in _models(tiny_study).items():
        optimizer, _ = build_optimizer(ARMS[name], model, tiny_study.hyperparameters())
        stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(stepped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_an_unknown_arm_is_an_error_that_lists_the_arms():
    with pytest.raises(ValueError, match="unknown arm 'sgd': the arms are adamw, frozen, riemannian-adam"):
        select_arms(["adamw", "sgd"])
    assert [arm.name for arm in select_arms(["frozen", "adamw", "frozen"])] == ["adamw", "frozen"]
    assert len(select_arms()) == len(ARMS)


# --- models -------------------------------------------------------------------------------------------------------


def test_the_modular_model_reads_at_the_last_position():
    torch.manual_seed(0)
    model = ModularTransformer(5, width=16, heads=2).double()
    tokens = torch.tensor([[0, 1, 5], [3, 3, 5]])
    assert model(tokens).shape == (2, 5)
    # the long way: self-attention of all positions, of which the last is read
    x = model.embedding[tokens] + model.positions
    x = x + model.attention(x, x, x)[0]
    x = x + model.mlp(x)
    torch.testing.assert_close(model.unembedding(x)[:, -1], model(tokens))


def test_the_patch_model_sees_patches_in_order():
    torch.manual_seed(0)
    model = PatchTransformer(width=16, layers=1, heads=2).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert model(images).shape == (2, 10)
    # with positions gone, moving whole patches about changes nothing; moving pixels does
    with torch.no_grad():
        model.positions.zero_()
    patches = images.unflatten(2, (8, 4)).unflatten(4, (8, 4))
    flipped = patches.flip(2).flatten(4, 5).flatten(2, 3)
    torch.testing.assert_close(model(flipped), model(images))
    assert not torch.allclose(model(images.flip(2)), model(images))


def test_the_patch_must_divide_the_side():
    with pytest.raises(ValueError, match="patch must divide"):
        PatchTransformer(patch=5)
