"""RiemannianAdam in lightning's trainer: training, accumulation, clipping, schedulers, checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning

from geodescent.attention import StiefelAttention
from geodescent.manifolds import ManifoldParameter
from geodescent.optim import RiemannianAdam
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # lightning's own, about workers and loggers


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = StiefelAttention(8, 2)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.attention(x, x, x)[0] - x.roll(1, 1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = RiemannianAdam(self.named_parameters(), lr=0.03)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def data() -> DataLoader:
    x = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=4)


def trainer(folder: Path, epochs: int, **options) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )


def frames_of(module: torch.nn.Module) -> list[ManifoldParameter]:
    return [p for p in module.parameters() if isinstance(p, ManifoldParameter)]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str
)
def test_training_lowers_the_loss_and_stays_on_the_manifold(tmp_path, options):
    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    trainer(tmp_path, 8, **options).fit(module, data())
    assert sum(module.losses[-4:]) < 0.9 * sum(module.losses[:4])
    frames = frames_of(module)
    assert len(frames) == 2
    for p in frames:
        assert p.manifold.point_error(p.detach()).max() < 2e-6
    assert all(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_the_trainer_does_what_a_plain_loop_does(tmp_path):
    module, twin = Module(), Module()
    trainer(tmp_path, 2).fit(module, data())
    settings = twin.configure_optimizers()
    for _ in range(2):
        for batch in data():
            settings["optimizer"].zero_grad()
            twin.training_step(batch, 0).backward()
            settings["optimizer"].step()
        settings["lr_scheduler"].step()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-6)


def test_a_checkpoint_resumes_to_the_same_weights(tmp_path):
    whole, first, resumed = Module(), Module(), Module()
    trainer(tmp_path, 4).fit(whole, data())
    half = trainer(tmp_path, 2)
    half.fit(first, data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer(tmp_path, 4).fit(resumed, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert len(resumed.losses) == 8
    assert len(whole.losses) == 16
    for p, q, r in zip(whole.parameters(), resumed.parameters(), first.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)
