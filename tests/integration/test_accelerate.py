"""RiemannianAdam in accelerate's loop: training, accumulation, clipping, saving and resuming."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from geodescent.attention import StiefelAttention
from geodescent.manifolds import ManifoldParameter
from geodescent.optim import RiemannianAdam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's own


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def loader(batch: int) -> DataLoader:
    x = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=batch)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x, x, x)[0] - x.roll(1, 1)).square().mean()


class Run:
    """A prepared model, optimizer, scheduler and data, and its loop."""

    def __init__(self, batch: int = 4, accumulate: int = 1, precision: str = "no") -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
        model = StiefelAttention(8, 2)
        optimizer = RiemannianAdam(model.named_parameters(), lr=0.03)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        prepared = self.accelerator.prepare(model, optimizer, loader(batch), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.losses: list[float] = []
        self.steps = 0

    def train(self, epochs: int, clip: float | None = None) -> "Run":
        for _ in range(epochs):
            for (x,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = loss_of(self.model, x)
                    self.accelerator.backward(loss)
                    if clip is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.steps += self.accelerator.sync_gradients
                self.losses.append(float(loss.detach()))
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.accelerator.unwrap_model(self.model).named_parameters()}


@pytest.mark.parametrize(
    ("options", "clip"), [({}, None), ({}, 0.1), ({"accumulate": 2}, None), ({"precision": "bf16"}, None)], ids=str
)
def test_training_lowers_the_loss_and_stays_on_the_manifold(options, clip):
    run = Run(**options)
    before = run.weights()
    run.train(8, clip)
    assert sum(run.losses[-4:]) < 0.9 * sum(run.losses[:4])
    frames = [p for p in run.model.parameters() if isinstance(p, ManifoldParameter)]
    assert len(frames) == 2
    for p in frames:
        assert p.manifold.point_error(p.detach()).max() < 2e-6
    assert all(not torch.equal(p, before[name]) for name, p in run.weights().items())


def test_accumulation_is_one_big_batch():
    small = Run(batch=2, accumulate=4).train(2)
    weights = small.weights()
    big = Run(batch=8).train(2)
    assert small.steps == big.steps == 4
    for name, p in big.weights().items():
        torch.testing.assert_close(weights[name], p, rtol=0, atol=2e-5)


def test_the_loop_does_what_a_plain_loop_does():
    run = Run().train(2)
    torch.manual_seed(0)
    model = StiefelAttention(8, 2)
    optimizer = RiemannianAdam(model.named_parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for _ in range(2):
        for (x,) in loader(4):
            loss_of(model, x).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(run.weights()[name], p.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("safe", [True, False])
def test_a_saved_state_resumes_to_the_same_weights(tmp_path: Path, safe: bool):
    run = Run().train(2)
    run.accelerator.save_state(str(tmp_path), safe_serialization=safe)
    halfway = run.weights()
    run.train(2)
    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path))
    for name, p in resumed.weights().items():
        assert torch.equal(p, halfway[name])
    resumed.train(2)
    for name, p in resumed.weights().items():
        assert torch.equal(p, run.weights()[name])
        assert not torch.equal(p, halfway[name])
