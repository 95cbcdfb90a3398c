"""Layers made by constrain() under FSDP2, in a group of one process, where tensors are sharded as in a larger one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from geodescent.attention.constrain import constrain, frame_state_dict, parameter_groups
from geodescent.attention.projection_layouts import ProjectionLayout
from geodescent.attention.sharding import is_sharded, placed_like, whole
from geodescent.manifolds import CanonicalMetric, ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim, self.scaling = 4, 0.5
        self.qkv = nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return torch.softmax(0.5 * q @ k.mT, -1) @ v


class Separate(Fused):
    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))
        del self.qkv

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), self.k(x), x))
        return torch.softmax(0.5 * q @ k.mT, -1) @ v


LAYOUTS = {Fused: ProjectionLayout(fused="qkv"), Separate: ProjectionLayout(query="q", key="k")}


def build(kind, seed=0) -> Any:
    torch.manual_seed(seed)
    if kind == "multihead":
        return nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    return {"fused": Fused, "separate": Separate}[kind]()


def run(model, kind):
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return model(x, x, x)[0] if kind == "multihead" else model(x)


def train(model, kind, steps=3):
    optimizer = RiemannianAdam(parameter_groups(model), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (run(model, kind) - 1).square().mean().backward()
        optimizer.step()


# nn.MultiheadAttention returns a transposed view with batch_first, and nothing is written to it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("kind", ["multihead", "fused", "separate"])
def test_sharded_layers_train_save_and_load_like_whole_ones(mesh, kind):
    from torch.distributed.fsdp import fully_shard

    model, reference = build(kind), build(kind)
    for m in (model, reference):
        constrain(m, layouts=LAYOUTS)
    fully_shard(model, mesh=mesh)
    assert not any(isinstance(p, ManifoldParameter) for p in model.parameters())  # what parameter_groups is for
    groups = parameter_groups(model)
    assert groups[0]["manifold"] == Stiefel()
    assert {p.ndim for p in groups[0]["params"]} == {3}
    train(model, kind)
    train(reference, kind)
    torch.testing.assert_close(run(model, kind), run(reference, kind), rtol=0, atol=1e-13)

    state = model.state_dict()
    assert [(k, v.shape) for k, v in state.items()] == [(k, v.shape) for k, v in build(kind).state_dict().items()]
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(whole(state[key]), value, rtol=0, atol=1e-13)
    frames = frame_state_dict(model)
    assert any(is_sharded(t) for t in frames.values())
    expected = run(reference, kind)
    for saved in (state, frames):
        other = build(kind, seed=1)
        constrain(other, layouts=LAYOUTS)
        fully_shard(other, mesh=mesh)
        other.load_state_dict(saved)
        assert all(is_sharded(p) for p in other.parameters())
        torch.testing.assert_close(run(other, kind), expected, rtol=0, atol=1e-12)


def test_full_state_dicts_are_distributed_and_converted(mesh):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model, plain = build("fused"), build("fused", seed=1)
    constrain(model, layouts=LAYOUTS)
    fully_shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    torch.testing.assert_close(run(model, "fused"), run(plain, "fused"), rtol=0, atol=1e-12)
    assert set(get_model_state_dict(model, options=options)) == set(plain.state_dict())


def test_what_is_sharded_already_is_named(mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.ModuleList([build("multihead"), build("multihead")])
    fully_shard(model[1], mesh=mesh)
    report = constrain(model)
    assert [a.name for a in report.layers] == ["0"]
    assert [(s.name, s.reason) for s in report.skipped] == [("1", "is sharded: constrain before sharding")]


def test_placed_like_keeps_values_and_layout(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    values = torch.arange(6.0).view(3, 2)
    target = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    placed = placed_like(values, target)
    assert is_sharded(placed)
    assert torch.equal(whole(placed), values)
    assert placed_like(values, torch.zeros(3, 2)) is values


def test_parameter_groups_without_sharding():
    model = nn.ModuleList([build("multihead"), build("multihead"), nn.Linear(3, 3)])
    other = Stiefel(CanonicalMetric())
    constrain(model, "0")
    constrain(model, "1", manifold=other)
    groups = parameter_groups(model)
    assert [g.get("manifold") for g in groups] == [Stiefel(), other, None]
    assert [len(g["params"]) for g in groups] == [2, 2, 14]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert parameter_groups(nn.Linear(3, 3, bias=False))[0].keys() == {"params"}
