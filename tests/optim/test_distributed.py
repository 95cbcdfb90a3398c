"""Two processes under gloo: DDP, and FSDP2 with frames that are sharded whole.

One pair of workers, this file run as a script, goes through all scenarios and saves what it found; the tests compare
that with what one process does. A scenario that fails is saved as its traceback, so the others still count.
"""

# modules are read by attribute, which type checkers take for Tensor | Module
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from geodescent.attention import StiefelAttention
from geodescent.manifolds import ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn

WORLD = 2
STEPS = 4
OPTIONS = {
    "default": {},
    "capped": {"trust_radius": 0.02, "amsgrad": True},
    "gram": {"second_moment": "gram"},
    "column": {"second_moment": "column", "step_scale": "frobenius"},
}
HEADS = (4, 3, 1)  # evenly sharded, unevenly, and with a process that holds none


class Heads(nn.Module):
    """x ↦ Σ_h tanh(x W_h) A over frames W of shape (heads, d, d_h), and a plain bias."""

    def __init__(self, heads: int, manifold=None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(heads)
        manifold = Stiefel() if manifold is None else manifold
        frames = manifold.random_point(heads, 6, 4, dtype=torch.float64, generator=generator)
        self.frames = ManifoldParameter(frames, manifold)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("bd,hde->bhe", x, self.frames)).sum((1, 2))[:, None] + self.bias


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :4]).square().mean()


def attention() -> nn.Module:
    torch.manual_seed(0)
    return StiefelAttention(6, 2, dtype=torch.float64)


def attention_loss(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    x = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))[part]
    return (model(x, x, x)[0] - x.roll(1, 1)).square().mean()


def groups_of(model: nn.Module) -> list[dict]:
    """Groups that name the manifold, since fully_shard drops the parameter's class."""
    return [{"params": [model.frames], "manifold": Stiefel()}, {"params": [model.bias]}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, world: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step)[rank::world]).backward()
        optimizer.step()


# --- what the workers do ------------------------------------------------------------------------------------------


def sharded(heads: int, placement=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    return fully_shard(Heads(heads), mesh=mesh, shard_placement_fn=lambda p: placement if p.ndim == 3 else Shard(0))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # pyright: ignore


def ddp(rank: int) -> dict[str, torch.Tensor]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(attention())
    optimizer = RiemannianAdam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        attention_loss(model, step, slice(2 * rank, 2 * rank + 2)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.module.named_parameters()}


def fsdp_trajectory(rank: int, heads: int, name: str) -> dict[str, torch.Tensor]:
    model = sharded(heads)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05, **OPTIONS[name])
    train(model, optimizer, range(STEPS), rank, WORLD)
    state = optimizer.state[model.frames]
    held = torch.tensor(model.frames.to_local().shape[0])  # pyright: ignore[reportCallIssue]
    capped = torch.tensor(optimizer.capped_fraction())
    return {**whole(model), "held": held, "moment": torch.as_tensor(local(state["exp_avg"])), "fraction": capped}


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t  # pyright: ignore[reportAttributeAccessIssue]


def fsdp_resumed(rank: int) -> dict[str, torch.Tensor]:
    model = sharded(3)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05)
    train(model, optimizer, range(2), rank, WORLD)
    other = RiemannianAdam(groups_of(model), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    train(model, other, range(2, STEPS), rank, WORLD)
    return whole(model)


def fsdp_gathered(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = sharded(3)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05)
    train(model, optimizer, range(STEPS), rank, WORLD)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return {key: value.clone() for key, value in state.get("frames", {}).items()}  # all on the first process


def fsdp_clipped(rank: int) -> dict[str, torch.Tensor]:
    model = sharded(3)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)[rank::WORLD]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return whole(model)


def cut(rank: int, placement: str) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    if placement == "matrix":
        model = nn.Module()
        model.x = nn.Parameter(Heads(1).frames.detach()[0].clone())
        model = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        params = [model.x]
    else:
        params = [sharded(4, Shard(1 if placement == "rows" else 2)).frames]
    try:
        RiemannianAdam([{"params": params, "manifold": Stiefel()}])
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


def spoiled(rank: int, culprit: str, value: float, policy: str, frames: bool = True) -> dict:
    """A gradient is spoiled in the part that the second process holds."""
    model = sharded(4)
    groups = groups_of(model) if frames else [{"params": [model.bias]}]
    optimizer = RiemannianAdam(groups, lr=0.05, nonfinite=policy)
    train(model, optimizer, range(1), rank, WORLD)
    before = whole(model)
    moment = local(optimizer.state[model.frames]["exp_avg"]).clone() if frames else torch.zeros(1)
    optimizer.zero_grad()
    loss_of(model, batch(1)[rank::WORLD]).backward()
    if rank == 1:
        local(model.get_parameter(culprit).grad).view(-1)[0] = value  # pyright: ignore[reportArgumentType]
    error = ""
    try:
        optimizer.step()
    except ValueError as raised:
        error = str(raised)
    after = whole(model)
    same = all(torch.equal(before[key], after[key]) for key in before)
    if frames:
        same = same and torch.equal(moment, local(optimizer.state[model.frames]["exp_avg"]))
    return {"error": error, "same": torch.tensor(same)}


SPOILED = {
    f"{culprit} {value} {policy}{'' if frames else ' plain only'}": (culprit, value, policy, frames)
    for culprit, value, policy, frames in (
        ("frames", float("nan"), "raise", True),
        ("frames", float("nan"), "skip", True),
        ("bias", float("inf"), "raise", True),
        ("bias", float("inf"), "skip", True),
        ("frames", 1e300, "raise", True),
        ("frames", 1e300, "skip", True),
        ("bias", float("nan"), "raise", False),
        ("bias", float("nan"), "skip", False),
    )
}
SCENARIOS = {
    "ddp": ddp,
    **{
        f"fsdp {heads} {name}": lambda rank, h=heads, n=name: fsdp_trajectory(rank, h, n)
        for heads in HEADS
        for name in OPTIONS
    },
    "fsdp resumed": fsdp_resumed,
    "fsdp gathered": fsdp_gathered,
    "fsdp clipped": fsdp_clipped,
    **{f"cut {where}": lambda rank, w=where: cut(rank, w) for where in ("rows", "columns", "matrix")},
    **{f"spoiled {key}": lambda rank, a=args: spoiled(rank, *a) for key, args in SPOILED.items()},
}


def worker(rank: int, folder: Path) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=10)
    )
    for name, scenario in SCENARIOS.items():
        try:
            found = scenario(rank)
        except Exception:
            found = {"traceback": traceback.format_exc()}
        torch.save(found, folder / f"{name} {rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


# --- what the tests compare ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [(folder / f"log {rank}").open("w") for rank in range(WORLD)]
    command = [sys.executable, __file__, str(folder)]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env=environment)
        for rank, log in enumerate(logs)
    ]
    try:
        for process in workers:
            process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        pass  # the scenarios that are missing say so
    finally:
        for process, log in zip(workers, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    return folder


def results(folder: Path, name: str) -> list[dict]:
    found = []
    for rank in range(WORLD):
        path = folder / f"{name} {rank}.pt"
        if not path.exists():
            pytest.fail(f"process {rank} did not get through {name!r}:\n{(folder / f'log {rank}').read_text()}")
        found.append(torch.load(path, weights_only=True))
        if "traceback" in found[-1]:
            pytest.fail(f"process {rank} failed in {name!r}:\n{found[-1]['traceback']}")
    return found


def check_equal(found: dict, model: nn.Module, start: nn.Module) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-12)
        assert (p - start.get_parameter(name)).abs().max() > 1e-3


def test_ddp_trains_to_the_weights_of_one_process(folder):
    model = attention()
    optimizer = RiemannianAdam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        attention_loss(model, step, slice(None)).backward()
        optimizer.step()
    first, second = results(folder, "ddp")
    moved = 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(first[name], p.detach(), rtol=0, atol=1e-12)
        assert torch.equal(first[name], second[name])  # replicas do not drift apart
        moved += int(not torch.equal(p, attention().get_parameter(name)))
    assert moved >= 5


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_frames_sharded_whole_step_as_they_do_unsharded(folder, heads, name):
    model = Heads(heads)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05, **OPTIONS[name])
    train(model, optimizer, range(STEPS))
    both = results(folder, f"fsdp {heads} {name}")
    held = [int(found["held"]) for found in both]
    assert held == [-(-heads // 2), heads - -(-heads // 2)]
    for found in both:
        check_equal(found, model, Heads(heads))
        assert Stiefel().point_error(found["frames"]).max() < 1e-13
    moments = torch.cat([found["moment"].reshape(-1, 6, 4) for found in both])
    torch.testing.assert_close(moments, optimizer.state[model.frames]["exp_avg"], rtol=0, atol=1e-12)
    if name == "capped":
        fractions = [float(found["fraction"]) for found, count in zip(both, held, strict=True) if count]
        assert sum(f * count for f, count in zip(fractions, held, strict=False)) / heads == pytest.approx(
            optimizer.capped_fraction()
        )
        assert optimizer.capped_fraction() > 0


def test_sharded_state_is_saved_and_loaded(folder):
    model = Heads(3)
    train(model, RiemannianAdam(groups_of(model), lr=0.05), range(STEPS))
    for found in results(folder, "fsdp resumed"):
        check_equal(found, model, Heads(3))


def test_distributed_checkpoints_gather_the_state(folder):
    model = Heads(3)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05)
    train(model, optimizer, range(STEPS))
    first, _ = results(folder, "fsdp gathered")
    for key in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(first[key], optimizer.state[model.frames][key], rtol=0, atol=1e-12)


def test_clipping_takes_the_norm_over_all_shards(folder):
    model = Heads(3)
    optimizer = RiemannianAdam(groups_of(model), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2) > 1e-2
        optimizer.step()
    for found in results(folder, "fsdp clipped"):
        check_equal(found, model, Heads(3))


@pytest.mark.parametrize(("where", "placement"), [("rows", "dim=1"), ("columns", "dim=2"), ("matrix", "dim=0")])
def test_a_shard_that_cuts_through_frames_is_an_error_that_names_it(folder, where, placement):
    for found in results(folder, f"cut {where}"):
        assert f"Shard({placement})" in found["error"]
        assert "cuts through its frames" in found["error"]


@pytest.mark.parametrize("key", SPOILED)
def test_all_processes_raise_or_skip_alike(folder, key):
    """Also the process that holds none of the spoiled gradient, which otherwise would step alone, or wait forever."""
    for rank, found in enumerate(results(folder, f"spoiled {key}")):
        assert bool(found["same"]), f"process {rank} changed something"
        assert bool(found["error"]) == ("raise" in key), f"process {rank}"
        if "raise" in key:
            assert "nothing was stepped" in found["error"]


if __name__ == "__main__":
    worker(int(sys.argv[2]), Path(sys.argv[1]))
