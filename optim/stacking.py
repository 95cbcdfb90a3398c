"""Parameters of one shape, stepped as one batch of frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..manifolds import Manifold
from ..manifolds.linalg import compute_dtype

__all__ = ["Chunk", "Stack", "local"]


class Chunk(NamedTuple):
    """Frames start to stop of a stack; each piece is frames first to last of parameter i."""

    start: int
    stop: int
    pieces: list[tuple[int, int, int]]


class Stack:
    """The frames of several parameters of one group, manifold, shape, dtype, device and step count.

    The optimizer's state of the parameters lives in arrays of the whole stack; what ``optimizer.state[p]`` holds are
    views of them, so a step updates all of it at once. Parameters and gradients stay where they are: they are gathered
    into a batch of shape (frames, n, p), and the new points are copied back.
    """

    def __init__(self, manifold: Manifold, group: dict[str, Any], params: Sequence[Tensor], indices: Sequence[int]):
        self.manifold, self.group = manifold, group
        self.params, self.indices = list(params), list(indices)
        # detach(): writing through a ManifoldParameter itself would check the point again
        self.locals = [local(p.detach()) for p in params]
        n, p = self.locals[0].shape[-2:]
        self.shape = (n, p)
        self.counts = [t.numel() // (n * p) if n * p else 0 for t in self.locals]
        self.frames = sum(self.counts)
        self.dtype = compute_dtype(self.locals[0].dtype)  # of the arithmetic and the state
        self.device = self.locals[0].device
        self.arrays: dict[str, Tensor] = {}
        self.step = 0
        self._chunks: dict[int, list[Chunk]] = {}

    @property
    def is_half(self) -> bool:
        return self.locals[0].dtype != self.dtype

    def chunks(self, size: int) -> list[Chunk]:
        """The frames in runs of at most ``size``, or in one run where two would not pay or cannot be viewed."""
        in_pieces = self.frames >= 2 * size and all(t.is_contiguous() for t in self.locals)
        size = max(1, size) if in_pieces else self.frames
        if size not in self._chunks:
            self._chunks[size] = list(_cut(self.counts, size))
        return self._chunks[size]

    def gather(self, tensors: Sequence[Tensor], chunk: Chunk | None = None) -> Tensor:
        """A copy of one tensor a parameter, each (*batch, n, p), as (frames, n, p) in the precision of the arithmetic.

        With a chunk, of its frames alone.
        """
        if chunk is None:
            flat = [t.reshape(-1, *self.shape) for t in tensors]
        else:
            flat = [tensors[i].reshape(-1, *self.shape)[first:last] for i, first, last in chunk.pieces]
        if any(t.dtype != self.dtype for t in flat):
            flat = [t.to(self.dtype) for t in flat]
        return torch.cat(flat) if flat else torch.zeros(0, *self.shape, dtype=self.dtype, device=self.device)

    def gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.params if p.grad is not None]

    def follow_parameters(self) -> None:
        """Project half-precision frames anew that somebody else has written to since their last step."""
        if self.is_half:
            stored = torch.cat([t.reshape(-1, *self.shape) for t in self.locals])
            master = self.arrays["master"]
            moved = (master.to(stored.dtype) != stored).any(-1).any(-1)
            if bool(moved.any()):
                master[moved] = self.manifold.project_point(stored[moved].to(self.dtype))

    def points(self, chunk: Chunk | None = None) -> Tensor:
        """A copy of the points that are stepped: the float32 copies of half-precision frames, else the parameters."""
        if not self.is_half:
            return self.gather(self.locals, chunk)
        master = self.arrays["master"]
        return (master if chunk is None else master[chunk.start : chunk.stop]).clone()

    def write(self, x: Tensor, chunk: Chunk | None = None) -> None:
        """Copy new points (frames, n, p) into the parameters; their storage and strides stay as they are."""
        if self.is_half:
            master = self.arrays["master"]
            (master if chunk is None else master[chunk.start : chunk.stop]).copy_(x)
        if chunk is None:
            targets, sizes = self.locals, self.counts
        else:
            whole = [last - first == self.counts[i] for i, first, last in chunk.pieces]
            targets = [
                self.locals[i] if entire else self._frames_of(i)[first:last]
                for (i, first, last), entire in zip(chunk.pieces, whole, strict=True)
            ]
            sizes = [last - first for _, first, last in chunk.pieces]
        parts = [part.view(t.shape) for part, t in zip(x.split(sizes), targets, strict=True)]
        torch._foreach_copy_(targets, parts)

    def _frames_of(self, i: int) -> Tensor:
        return self.locals[i].view(-1, *self.shape)

    # --- state --------------------------------------------------------------------------------------------------

    def attach(self, states: Sequence[dict[str, Any]], trailing: dict[str, tuple[int, ...]]) -> None:
        """Take over the state of the parameters, or begin it at zero, as arrays of which the states become views.

        Args:
            states: of each parameter.
            trailing: the trailing shape of each array that is kept a frame.
        """
        for key, shape in trailing.items():
            array = torch.zeros(self.frames, *shape, dtype=self.dtype, device=self.device)
            for part, t, state in zip(array.split(self.counts), self.locals, states, strict=True):
                view = part.view(*t.shape[:-2], *shape)
                if key in state:
                    view.copy_(state[key])
                elif key == "master":
                    view.copy_(self.manifold.project_point(t.detach().to(self.dtype)))
                state[key] = view
            self.arrays[key] = array
        for key in ("step", "capped"):
            array = torch.tensor([float(state.get(key, 0.0)) for state in states])
            self.arrays[key] = array
            for state, view in zip(states, array.unbind(), strict=True):
                state[key] = view
        self.step = int(self.arrays["step"][0]) if self.params else 0

    def owns(self, state: dict[str, Any], index: int) -> bool:
        """Whether ``state`` still holds this stack's views, and not values that somebody put in their place."""
        step = state.get("step")
        return step is not None and step.data_ptr() == self.arrays["step"].data_ptr() + 4 * index

    def advance(self) -> None:
        self.step += 1
        self.arrays["step"] += 1

    def count_capped(self, capped: Tensor) -> None:
        """Add the number of shortened frames to each parameter's count; ``capped`` is (frames,) and boolean."""
        per_parameter = [part.sum() for part in capped.split(self.counts)]
        self.arrays["capped"] += torch.stack(per_parameter).to(self.arrays["capped"])


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds; any other tensor itself."""
    return t.to_local() if hasattr(t, "to_local") else t  # pyright: ignore[reportAttributeAccessIssue]


def _cut(counts: Sequence[int], size: int) -> Iterator[Chunk]:
    start, filled = 0, 0
    pieces: list[tuple[int, int, int]] = []
    for i, count in enumerate(counts):
        first = 0
        while first < count:
            last = min(count, first + size - filled)
            pieces.append((i, first, last))
            filled += last - first
            first = last
            if filled == size:
                yield Chunk(start, start + filled, pieces)
                start, filled, pieces = start + filled, 0, []
    if pieces:
        yield Chunk(start, start + filled, pieces)
