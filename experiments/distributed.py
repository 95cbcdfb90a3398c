"""One cell on several processes: each takes its share of every batch, and the gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Processes", "torchrun"]


class Processes:
    """The processes of the default group, or this one alone."""

    def __init__(self) -> None:
        self.count, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    def backward(self, model: nn.Module, zero_grad: Callable[[], None], inputs: Tensor, targets: Tensor) -> float:
        """The gradient of the mean loss of the whole batch, the same in every process; returns that loss."""
        own_inputs, own_targets = inputs[self.rank :: self.count], targets[self.rank :: self.count]
        # by sums, since shares differ in size where the batch does not divide
        loss = nn.functional.cross_entropy(
            model(own_inputs), own_targets, reduction="sum" if self.count > 1 else "mean"
        )
        zero_grad()
        if self.count == 1:
            if torch.isfinite(loss):
                loss.backward()
            return loss.item()
        loss = loss / targets.numel()
        loss.backward()
        total = loss.detach().clone()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensor in (total, *gradients):
            dist.all_reduce(tensor)
        return total.item()

    def broadcast(self, value: Any) -> Any:
        """What the first process passes, in every process."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def torchrun() -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    dist.init_process_group("gloo")
    try:
        yield Processes()
    finally:
        dist.destroy_process_group()
