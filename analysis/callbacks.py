"""The tracker in other people's training loops: callbacks for Lightning and for Hugging Face's Trainer."""

from __future__ import annotations

import os
from typing import Any

from .tracker import GeometryTracker

__all__ = ["lightning_callback", "transformers_callback"]


def lightning_callback(path: str | os.PathLike[str] | None = None, *, every: int = 50) -> Any:
    """A ``lightning.Callback`` that tracks the attention geometry of the module it trains, as its ``tracker``.

    At the start of training, and after every ``every``-th optimizer step, the first process records a row with the loss
    and passes the means over heads on to the trainer's logger.

    Args:
        path: as for :class:`~geodescent.analysis.GeometryTracker`; a run that is resumed goes on there.
        every: optimizer steps between rows.

    Raises:
        ImportError: neither ``lightning`` nor ``pytorch_lightning`` is installed.
        ValueError: ``every`` is below 1.

    Example:
        ::

            trainer = lightning.Trainer(callbacks=[lightning_callback("runs/geometry.jsonl")])

        >>> lightning_callback(every=0)
        Traceback (most recent call last):
        ...
        ValueError: every must be at least 1, found 0
    """
    _check(every)
    try:
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
    except ImportError:
        try:
            from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("lightning_callback() needs lightning: pip install lightning") from error

    class GeometryCallback(Callback):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        tracker: GeometryTracker | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                self.tracker = GeometryTracker(pl_module, path)
                self.record(trainer, None)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            # with accumulated gradients several batches end at one step
            if self.tracker is not None and trainer.global_step % every == 0 and trainer.global_step != self.last:
                loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                self.record(trainer, loss)

        def record(self, trainer: Any, loss: Any) -> None:
            assert self.tracker is not None
            self.last = trainer.global_step
            row = self.tracker.record(self.last, **({} if loss is None else {"loss": loss}))
            for logger in trainer.loggers:
                logger.log_metrics(_means(row), step=self.last)

    return GeometryCallback()


def transformers_callback(path: str | os.PathLike[str] | None = None, *, every: int = 50) -> Any:
    """A ``transformers.TrainerCallback`` that tracks the attention geometry of the model it trains, as its ``tracker``.

    At the start of training, and after every ``every``-th optimizer step, the first process records a row; the means
    over heads of the latest row join each of the trainer's logs.

    Args:
        path: as for :class:`~geodescent.analysis.GeometryTracker`; a run that is resumed goes on there.
        every: optimizer steps between rows.

    Raises:
        ImportError: ``transformers`` is not installed.
        ValueError: ``every`` is below 1.

    Example:
        ::

            trainer = transformers.Trainer(model, args, callbacks=[transformers_callback("runs/geometry.jsonl")], ...)

        >>> transformers_callback(every=0)
        Traceback (most recent call last):
        ...
        ValueError: every must be at least 1, found 0
    """
    _check(every)
    try:
        from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("transformers_callback() needs transformers: pip install transformers") from error

    class GeometryCallback(TrainerCallback):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        tracker: GeometryTracker | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                self.tracker = GeometryTracker(kwargs["model"], path)
                self.tracker.record(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.tracker is not None and state.global_step % every == 0:
                self.tracker.record(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if self.tracker is not None and self.tracker.rows and logs is not None:
                means = _means(self.tracker.rows[-1])
                logs.update(means)
                state.log_history[-1].update(means)

    return GeometryCallback()


def _check(every: int) -> None:
    if every < 1:
        raise ValueError(f"every must be at least 1, found {every}")


def _means(row: dict[str, float]) -> dict[str, float]:
    return {f"geometry/{name.removeprefix('mean/')}": v for name, v in row.items() if name.startswith("mean/")}
