from typing import Any

import pytest
import torch
import torch.distributed as dist
from geodescent.attention import StiefelAttention, StiefelLinear, StiefelLoRA
from geodescent.attention.frame_module import FrameModule
from geodescent.manifolds import ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn


class Pair(FrameModule):
    frame_names = ("a", "b")

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.manifold = Stiefel()
        self.a, self.b = (ManifoldParameter(Stiefel().random_point(6, 3, dtype=dtype), Stiefel()) for _ in range(2))


def test_an_assigned_frame_is_wrapped_and_keeps_whether_it_is_trained():
    module, other = Pair(), Pair()
    module.a.requires_grad_(False)
    module.load_state_dict(other.state_dict(), assign=True)
    for name in ("a", "b"):
        frame = getattr(module, name)
        assert type(frame) is ManifoldParameter
        assert torch.equal(frame, getattr(other, name))
    assert not module.a.requires_grad
    assert module.b.requires_grad


@pytest.mark.parametrize("assign", [False, True])
def test_one_bad_frame_is_named_and_left_while_the_other_loads(assign):
    module, other = Pair(), Pair()
    before = module.b.detach().clone()
    state = other.state_dict()
    state["b"] = torch.zeros(6, 3)
    with pytest.raises(RuntimeError, match=r'"b".*point error is 1'):
        module.load_state_dict(state, assign=assign)
    assert torch.equal(module.b, before)
    assert torch.equal(module.a, other.a)
    assert type(module.b) is ManifoldParameter


def test_a_gain_of_precision_projects_and_a_loss_does_not():
    module = Pair()
    module.double()
    assert Stiefel().point_error(module.a.detach()) < 1e-14
    exact = module.a.detach().clone()
    module.bfloat16()
    assert torch.equal(module.a, exact.bfloat16())


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore")
def test_sharded_layers_load_only_frames_and_step_where_the_group_names_the_manifold(mesh):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(2, 3, 8)

    def call(module):
        return module(x, x, x)[0] if isinstance(module, StiefelAttention) else module(x)

    options = StateDictOptions(full_state_dict=True)
    for make in (
        lambda: StiefelAttention(8, 2),
        lambda: StiefelLinear(8, 4),
        lambda: StiefelLoRA(nn.Linear(8, 4), 2, core="full"),
    ):
        layer: Any = make()
        other = make()
        state = {name: t.clone() for name, t in other.state_dict().items()}
        frames = [name for name, p in layer.named_parameters() if isinstance(p, ManifoldParameter)]
        fully_shard(layer, mesh=mesh)
        set_model_state_dict(layer, dict(state), options=options)
        torch.testing.assert_close(call(layer), call(other))
        layer.reshard()  # a root module is left whole after a forward pass
        bad = {name: 2 * t if name == frames[0] else t for name, t in state.items()}
        with pytest.raises(RuntimeError, match="point error is 3"):
            set_model_state_dict(layer, dict(bad), options=options)
        torch.testing.assert_close(call(layer), call(other))
        call(layer).square().sum().backward()
        named: dict[str, Any] = dict(layer.named_parameters())
        plain = [p for name, p in named.items() if name not in frames and p.requires_grad]
        groups = [{"params": [named[name] for name in frames], "manifold": Stiefel()}, {"params": plain}]
        RiemannianAdam(groups).step()
        for name in frames:
            whole = named[name].full_tensor()
            assert Stiefel().point_error(whole.detach()).max() < 1e-5
        layer.double()
