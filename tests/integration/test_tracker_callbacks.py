"""GeometryTracker in real training loops: Lightning's trainer, Hugging Face's Trainer, TensorBoard's event files."""

import math
import warnings
from typing import Any

import pytest
import torch
from geodescent.analysis import GeometryTracker, lightning_callback, read_track, transformers_callback
from geodescent.attention import StiefelAttention
from geodescent.optim import RiemannianAdam
from torch.utils.data import DataLoader, Dataset, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    import transformers
    from lightning.pytorch.loggers.logger import DummyLogger


class Plain(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = StiefelAttention(8, 2)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.attention(x, x, x)[0] - x.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> Any:
        return RiemannianAdam(self.parameters(), lr=0.02)


class Logged(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


def fit(callback, folder, *, steps=-1, logger: Any = False, resume=None, **options):
    x = torch.randn(40, 5, 8, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=logger,
            callbacks=[callback],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            log_every_n_steps=1,
            **options,
        )
        module = Plain()
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4), ckpt_path=resume)
    return trainer, module


def test_lightning_records_every_so_many_steps_and_logs_the_means(tmp_path):
    logger = Logged()
    callback = lightning_callback(tmp_path / "run.jsonl", every=3)
    fit(callback, tmp_path, steps=10, logger=logger)
    rows = read_track(tmp_path / "run.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 6, 9]
    assert "loss" not in rows[0]
    assert all(math.isfinite(row["loss"]) for row in rows[1:])
    assert rows[0]["mean/query_movement"] == 0
    assert rows[-1]["mean/query_movement"] > rows[1]["mean/query_movement"] > 0
    logged = [(step, values) for step, values in logger.rows if "geometry/query_movement" in values]
    assert [step for step, _ in logged] == [0, 3, 6, 9]
    assert logged[-1][1]["geometry/query_movement"] == rows[-1]["mean/query_movement"]
    assert callback.tracker.rows == rows


def test_lightning_with_accumulated_gradients_records_a_step_once(tmp_path):
    callback = lightning_callback(every=2)
    fit(callback, tmp_path, steps=4, accumulate_grad_batches=2)
    assert [row["step"] for row in callback.tracker.rows] == [0, 2, 4]


def test_lightning_resumes_on_the_same_file(tmp_path):
    path = tmp_path / "run.jsonl"
    trainer, _ = fit(lightning_callback(path, every=5), tmp_path, max_epochs=1)  # of 10 steps
    trainer.save_checkpoint(tmp_path / "ten.ckpt")
    fit(lightning_callback(path, every=5), tmp_path, max_epochs=2, resume=tmp_path / "ten.ckpt")
    whole = lightning_callback(every=5)
    fit(whole, tmp_path, max_epochs=2)
    rows = read_track(path)
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20]
    # drift of the resumed half is measured from the first start
    assert rows[-1]["mean/query_movement"] == pytest.approx(whole.tracker.rows[-1]["mean/query_movement"], rel=1e-5)


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(callback, folder, steps):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[callback]
    )


def test_transformers_records_logs_and_resumes(tmp_path):
    path = tmp_path / "run.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = trainer(transformers_callback(path, every=2), tmp_path, 4)
        first.train()
        rows = read_track(path)
        assert [row["step"] for row in rows] == [0, 2, 4]
        assert {key.split("/")[0] for key in rows[0] if key.endswith("/0/query_condition")} == {
            "transformer.h.0.attn",
            "transformer.h.1.attn",
        }
        history = [entry for entry in first.state.log_history if "geometry/query_movement" in entry]
        assert history
        assert history[0]["geometry/query_movement"] > 0
        trainer(transformers_callback(path, every=2), tmp_path, 8).train(resume_from_checkpoint=True)
    rows = read_track(path)
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8]
    assert rows[-1]["mean/query_movement"] > rows[2]["mean/query_movement"]


@pytest.mark.parametrize("make", [lightning_callback, transformers_callback])
def test_an_interval_below_one_is_an_error(make):
    with pytest.raises(ValueError, match="every must be at least 1"):
        make(every=0)


def test_tensorboard_files_hold_the_rows(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = GeometryTracker(StiefelAttention(8, 2))
    tracker.record(0, loss=2.0)
    tracker.record(5, loss=1.0)
    tracker.to_tensorboard(tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 2.0), (5, 1.0)]
