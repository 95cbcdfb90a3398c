import dataclasses

import pytest
import torch
from geodescent.experiments.arms import ARMS, Arm, select_arms
from geodescent.experiments.scalar_adam import ScalarAdam
from geodescent.experiments.starts import attentions, build_model, qk_parameters
from geodescent.experiments.steppers import Hyperparameters, build_stepper
from geodescent.experiments.study_charlm import CharlmStudy
from geodescent.experiments.study_cifar10 import Cifar10Study
from geodescent.manifolds import ManifoldParameter, Stiefel
from torch import Tensor

STARTS_ORTHONORMAL = {name for name, arm in ARMS.items() if arm.frames or arm.orthonormal_start}


def _study(which, tiny_study):
    return {
        "modular": tiny_study,
        "cifar10": Cifar10Study(width=16, heads=2, layers=2),
        "charlm": CharlmStudy(width=16, heads=2, layers=2, vocabulary=20, context=8),
    }[which]


def _model(name, study, seed=0):
    return build_model(ARMS[name], study.build, seed, study.input_square_norm)


def _frames(layer):
    return [layer.query_frames().detach().as_subclass(Tensor), layer.key_frames().detach().as_subclass(Tensor)]


@pytest.mark.parametrize("which", ["modular", "cifar10", "charlm"])
def test_starts_are_paired(which, tiny_study):
    study = _study(which, tiny_study)
    models = {name: _model(name, study) for name in ARMS}
    qk = {id(p) for model in models.values() for layer in attentions(model) for p in qk_parameters(layer)}
    reference = {n: p for n, p in models["adamw"].named_parameters() if id(p) not in qk and "logit_scale" not in n}
    assert len(reference) > 5
    for model in models.values():
        own = dict(model.named_parameters())
        for name, parameter in reference.items():
            assert torch.equal(own[name], parameter)
    for name, model in models.items():
        other = models["frozen" if name in STARTS_ORTHONORMAL else "adamw"]
        for layer, expected in zip(attentions(model), attentions(other), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(_frames(layer), _frames(expected), strict=True))
            if not ARMS[name].normalize:
                assert torch.equal(layer.logit_scale, expected.logit_scale)
            orthonormal = all(Stiefel().point_error(frame).max() < 1e-5 for frame in _frames(layer))
            assert orthonormal == (name in STARTS_ORTHONORMAL)
    again, another = _model("frozen", study), _model("frozen", study, seed=1)
    for layer, same, differs in zip(*map(attentions, (models["frozen"], again, another)), strict=True):
        assert torch.equal(_frames(layer)[0], _frames(same)[0])
        assert not torch.equal(_frames(layer)[0], _frames(differs)[0])


@pytest.mark.parametrize("which", ["cifar10", "modular"])
def test_the_logits_of_all_arms_start_with_one_variance(which, tiny_study):
    """Over initializations, for inputs of the size that the model has: what "matched logit scale" means."""
    study = Cifar10Study(width=64) if which == "cifar10" else dataclasses.replace(tiny_study, width=64, heads=4)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=1, keepdim=True) * study.input_square_norm**0.5
    deviations = {}
    for name in ("adamw", "adamw-orth", "riemannian-adam", "adamw-qk-norm"):
        logits = []
        for seed in range(12):
            layer = attentions(_model(name, study, seed))[0]
            q, k = layer._split(layer.q_proj(x)[None]), layer._split(layer.k_proj(x)[None])
            logits.append((layer.logit_scale[:, None, None] * (q @ k.mT)[0]).detach())
        deviations[name] = float(torch.stack(logits).std())
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(deviations["adamw"], rel=0.1), name


def test_building_draws_nothing_from_the_callers_generator(tiny_study):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _model("riemannian-adam", tiny_study)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", list(ARMS))
def test_decay_reaches_what_the_record_says_and_every_parameter_is_stepped_once(name):
    study = Cifar10Study(width=16, heads=2, layers=1)
    model = _model(name, study)
    stepper = build_stepper(ARMS[name], model, study.hyperparameters())
    groups = [group for optimizer in stepper.optimizers for group in optimizer.param_groups]
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"] if "weight_decay" in group}
    stepped = [id(p) for group in groups for p in group["params"]]
    assert sorted(stepped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert sum(group["numbers"] for group in stepper.groups.values()) == sum(p.numel() for p in model.parameters())
    qk = {id(p) for layer in attentions(model) for p in qk_parameters(layer)}
    free = not ARMS[name].frames and ARMS[name].decay
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name == "frozen"
            continue
        matrix = parameter.ndim >= 2 and not parameter_name.endswith("logit_scale")
        exempt = not free if id(parameter) in qk else not matrix
        assert decay[id(parameter)] == (0.0 if exempt else study.weight_decay), parameter_name
    assert stepper.groups["Q and K"]["weight_decay"] == (study.weight_decay if free else "none")
    assert (stepper.groups["Q and K"]["stepped_by"] == "none") == (name == "frozen")


@pytest.mark.parametrize("name", list(ARMS))
def test_a_step_keeps_what_the_arm_promises(name):
    """Three steps on real gradients: frames stay frames, frozen ones stay where they are, and Q's and K's learning rate
    is theirs alone."""
    study = Cifar10Study(width=16, heads=2, layers=1, lr=1e-2)

    def trained(qk_scale):
        model = _model(name, study)
        hyper = dataclasses.replace(study.hyperparameters(), qk_scale=qk_scale)
        stepper = build_stepper(ARMS[name], model, hyper)
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for step in range(3 if qk_scale == 1 else 1):
            stepper.zero_grad()
            torch.nn.functional.cross_entropy(model(images), torch.arange(8) + step % 2).backward()
            stepper.step()
        return model

    start, model = _model(name, study), trained(1.0)
    (before,), (after,) = attentions(start), attentions(model)
    moved = [float((a - b).norm()) for a, b in zip(_frames(after), _frames(before), strict=True)]
    assert all(length == 0 for length in moved) if name == "frozen" else all(length > 0 for length in moved)
    if ARMS[name].frames:
        assert all(Stiefel().point_error(frame).max() < 1e-5 for frame in _frames(after))
    assert not torch.equal(model.get_parameter("head.weight"), start.get_parameter("head.weight"))
    slow, fast = (attentions(trained(scale))[0] for scale in (0.1, 0.9))
    if name != "frozen":
        ratio = float((_frames(fast)[0] - _frames(before)[0]).norm() / (_frames(slow)[0] - _frames(before)[0]).norm())
        assert ratio == pytest.approx(9, rel=0.1)
    assert torch.equal(fast.v_proj.weight, slow.v_proj.weight)


def test_normalized_queries_and_keys_have_norm_one(tiny_study):
    layer = attentions(_model("adamw-qk-norm", tiny_study))[0]
    x = torch.randn(3, 16)
    for projection in (layer.q_proj, layer.k_proj):
        torch.testing.assert_close(projection(x).unflatten(-1, (2, -1)).norm(dim=-1), torch.ones(3, 2))


# --- Adam with one second moment a head -----------------------------------------------------------------------------


def _stepped(grads, **options):
    p = torch.nn.Parameter(torch.zeros(grads[0].shape, dtype=torch.float64))
    optimizer = ScalarAdam([p], lr=0.1, eps=0.0, **options)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def test_scalar_adam_is_adam_where_a_head_is_one_number():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, 1, dtype=torch.float64, generator=generator) for _ in range(5)]
    ours = _stepped(grads, heads=4, betas=(0.8, 0.9), weight_decay=0.3)
    p = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
    adamw = torch.optim.AdamW([p], lr=0.1, eps=0.0, betas=(0.8, 0.9), weight_decay=0.3)
    for grad in grads:
        p.grad = grad.clone()
        adamw.step()
    torch.testing.assert_close(ours, p.detach(), rtol=1e-12, atol=1e-12)


def test_scalar_adam_is_scale_free_equivariant_and_keeps_heads_apart():
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(2, 6, 3, dtype=torch.float64, generator=generator) for _ in range(4)]
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))[0]
    step = _stepped(grads, heads=2)
    torch.testing.assert_close(_stepped([1e6 * g for g in grads], heads=2), step)
    torch.testing.assert_close(_stepped([rotation @ g for g in grads], heads=2), rotation @ step)
    loud = [torch.cat((g[:1], 1e3 * g[1:])) for g in grads]
    torch.testing.assert_close(_stepped(loud, heads=2), step)
    # nn.Linear's storage, heads stacked along the rows, is the same numbers in another order
    rows = _stepped([g.mT.reshape(6, 6) for g in grads], heads=2)
    torch.testing.assert_close(rows, step.mT.reshape(6, 6))


# --- the registry ---------------------------------------------------------------------------------------------------


def test_an_unknown_arm_is_an_error_that_lists_the_arms():
    with pytest.raises(ValueError, match="unknown arm 'sgd': the arms are adamw, frozen, riemannian-adam"):
        select_arms(["adamw", "sgd"])
    assert [arm.name for arm in select_arms(["frozen", "adamw", "frozen"])] == ["adamw", "frozen"]
    assert len(select_arms()) == len(ARMS)


@pytest.mark.parametrize(("changes", "name"), [({"rule": "sgd"}, "rule"), ({"project": True}, "project")])
def test_an_arm_is_checked(changes, name):
    with pytest.raises(ValueError, match=name):
        Arm("mine", "text", **changes)


def test_a_hyperparameter_of_queries_and_keys_is_relative():
    assert Hyperparameters(1e-3, (0.9, 0.99), 0.1).qk_scale == 1.0


def test_frames_are_manifold_parameters_exactly_in_the_constrained_arms(tiny_study):
    for name, arm in ARMS.items():
        kinds = {
            isinstance(p, ManifoldParameter) for la in attentions(_model(name, tiny_study)) for p in qk_parameters(la)
        }
        assert kinds == {arm.frames}
