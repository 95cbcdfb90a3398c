"""Parameters of one shape, stepped as one batch of frames."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..manifolds import Manifold
from ..manifolds.linalg import compute_dtype

__all__ = ["Chunk", "Stack", "local"]


class Chunk(NamedTuple):
    """Frames start to stop of a stack.

    Each piece is frames first to last of parameter i, and ``targets`` are views of those frames in the parameters: one
    matrix each where ``single``, else (frames, n, p).
    """

    start: int
    stop: int
    pieces: list[tuple[int, int, int]]
    targets: list[Tensor]
    single: bool


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
        self.grads: list[Tensor] = []  # of each parameter, while a step is taken
        self.step = 0
        self._chunks: dict[int, list[Chunk]] = {}
        self._scratch: dict[str, Tensor] = {}
        self._frames: dict[tuple[str, int], tuple[Tensor, list[Tensor]]] = {}
        self._versions: list[int] | None = None
        self._states: list[dict[str, Any]] = []
        self._steps: list[Tensor] = []

    @property
    def is_half(self) -> bool:
        return self.locals[0].dtype != self.dtype

    def chunks(self, size: int) -> list[Chunk]:
        """The frames in runs of at most ``size``, or in one run where two would not pay or cannot be viewed."""
        in_pieces = self.frames >= 2 * size and all(t.is_contiguous() for t in self.locals)
        size = max(1, size) if in_pieces else self.frames
        if size not in self._chunks:
            self._chunks[size] = [self._chunk(*run) for run in _cut(self.counts, size)]
        return self._chunks[size]

    def _chunk(self, start: int, stop: int, pieces: list[tuple[int, int, int]]) -> Chunk:
        single = all(self.locals[i].ndim == 2 for i, _, _ in pieces)
        if single or all(last - first == self.counts[i] for i, first, last in pieces):
            targets = [self.locals[i] for i, _, _ in pieces]
        else:
            targets = [self.locals[i].view(-1, *self.shape)[first:last] for i, first, last in pieces]
        return Chunk(start, stop, pieces, targets, single)

    def gather(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """A copy of tensors (*batch, n, p) as (frames, n, p), in the precision of the arithmetic."""
        if {t.dtype for t in tensors} != {self.dtype}:
            tensors = [t.to(self.dtype) for t in tensors]
        if {t.ndim for t in tensors} == {2}:
            return torch.stack(tensors, out=out)  # pyright: ignore[reportCallIssue, reportArgumentType]
        flat = [t.reshape(-1, *self.shape) for t in tensors]
        return torch.cat(flat, out=out) if flat else torch.zeros(0, *self.shape, dtype=self.dtype, device=self.device)

    def gather_gradients(self, chunk: Chunk) -> Tensor:
        """The gradients of a chunk's frames."""
        if chunk.single:
            return self.gather([self.grads[i] for i, _, _ in chunk.pieces])
        return self.gather([self.grads[i].reshape(-1, *self.shape)[first:last] for i, first, last in chunk.pieces])

    def mix_gradients(self, name: str, chunk: Chunk, weight: float) -> None:
        """m ← m + weight·(G − m) for the array ``name`` and the frames of a chunk, without a copy of G."""
        m = self.arrays[name][chunk.start : chunk.stop]
        if {g.dtype for g in self.grads} != {self.dtype}:
            m.lerp_(self.gather_gradients(chunk), weight)
        elif chunk.single:
            grads = [self.grads[i] for i, _, _ in chunk.pieces]
            torch._foreach_lerp_(list(m.unbind(0)), grads, weight)  # pyright: ignore[reportPrivateImportUsage]
        else:
            for i, first, last in chunk.pieces:
                here, m = m[: last - first], m[last - first :]
                here.lerp_(self.grads[i].reshape(-1, *self.shape)[first:last], weight)

    def gradient_norms(self) -> Tensor:
        """The Frobenius norms (frames,) of the gradients."""
        if {g.ndim for g in self.grads} == {2}:
            norms = torch._foreach_norm(self.grads, 2, self.dtype)  # pyright: ignore[reportPrivateImportUsage]
            return torch.stack(norms)
        flat = [g.reshape(-1, *self.shape) for g in self.grads]
        return torch.cat([torch.linalg.vector_norm(t, dim=(-2, -1), dtype=self.dtype) for t in flat])

    def follow_parameters(self) -> None:
        """Project half-precision frames anew that somebody else has written to since their last step."""
        if self.is_half:
            stored = torch.cat([t.reshape(-1, *self.shape) for t in self.locals])
            master = self.arrays["master"]
            moved = (master.to(stored.dtype) != stored).any(-1).any(-1)
            if bool(moved.any()):
                master[moved] = self.manifold.project_point(stored[moved].to(self.dtype))

    def points(self, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """A copy of the points that are stepped: the float32 copies of half-precision frames, else the parameters."""
        if self.is_half:
            return self.arrays["master"][chunk.start : chunk.stop].clone()
        if chunk.single:
            return torch.stack(chunk.targets, out=out)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return self.gather(chunk.targets, out)

    def all_points(self) -> Tensor:
        """:meth:`points` of the whole stack."""
        return self.arrays["master"].clone() if self.is_half else self.gather(self.locals)

    def write(self, x: Tensor, chunk: Chunk) -> None:
        """Take over new points of a chunk, into the float32 copies of half-precision frames too."""
        if self.is_half:
            self.arrays["master"][chunk.start : chunk.stop].copy_(x)
        self.scatter(x, chunk)

    def scatter(self, x: Tensor, chunk: Chunk) -> None:
        """Copy new points of a chunk into the parameters; their storage and strides stay as they are."""
        if chunk.single:
            kept, parts = self._frames.get(("spare", len(x)), (None, []))
            parts = parts if kept is x else list(x.unbind(0))
        else:
            sizes = [last - first for _, first, last in chunk.pieces]
            parts = [part.view(t.shape) for part, t in zip(x.split(sizes), chunk.targets, strict=True)]
        torch._foreach_copy_(chunk.targets, parts)  # pyright: ignore[reportPrivateImportUsage]

    def scratch(self, name: str, frames: int) -> Tensor:
        """A work array (frames, n, p) that is kept from step to step: fresh memory costs more than arithmetic here."""
        if (name, frames) not in self._frames:
            found = self._scratch.get(name)
            if found is None or found.shape[0] < frames:
                found = self._scratch[name] = torch.empty(frames, *self.shape, dtype=self.dtype, device=self.device)
            part = found[:frames]
            # views of single frames, which are written one by one, cost as much as writing small ones
            self._frames[name, frames] = part, list(part.unbind(0))
        return self._frames[name, frames][0]

    # --- state --------------------------------------------------------------------------------------------------

    def attach(self, states: Sequence[dict[str, Any]], trailing: dict[str, tuple[int, ...]]) -> None:
        """Take over the state of the parameters, or begin it at zero, as arrays of which the states become views.

        Args:
            states: of each parameter.
            trailing: the trailing shape of each array that is kept a frame.
        """
        for key, shape in trailing.items():
            array = torch.zeros(self.frames, *shape, dtype=self.dtype, device=self.device)
            parts = zip(self.params, self.locals, array.split(self.counts), states, strict=True)
            for p, t, part, state in parts:
                view = part.view(*t.shape[:-2], *shape)
                if key in state:
                    view.copy_(local(state[key]))
                elif key == "master":
                    view.copy_(self.manifold.project_point(t.detach().to(self.dtype)))
                state[key] = _placed_as(p, view, shape)
            self.arrays[key] = array
        # a step that looks at no value counts on the device
        device = self.device if self.group.get("capturable") else None
        for key in ("capped", "step"):
            array = torch.tensor([float(state.get(key, 0.0)) for state in states], device=device)
            self.arrays[key] = array
            self._steps = list(array.unbind())
            for state, view in zip(states, self._steps, strict=True):
                state[key] = view
        self._states = list(states)
        self.step = int(self.arrays["step"][0]) if self.params else 0

    def owns_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the states still are this stack's views, and not values that somebody put in their place."""
        if not self.params or states.get(self.params[0]) is not self._states[0]:
            return False
        return all(map(operator.is_, [state.get("step") for state in self._states], self._steps))

    def were_written_to(self) -> bool:
        """Whether somebody has written to a parameter since the last step."""
        return self._versions is not None and self._versions != [t._version for t in self.locals]

    def advance(self) -> None:
        self.step += 1
        self.arrays["step"] += 1
        # detach() shares the counter of writes with the parameter
        self._versions = [t._version for t in self.locals]

    def count_capped(self, capped: Tensor) -> None:
        """Add the number of shortened frames to each parameter's count; ``capped`` is (frames,) and boolean."""
        per_parameter = [part.sum() for part in capped.split(self.counts)]
        self.arrays["capped"] += torch.stack(per_parameter).to(self.arrays["capped"])


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds; any other tensor itself."""
    if type(t) is Tensor:
        return t
    return t.to_local() if hasattr(t, "to_local") else t  # pyright: ignore[reportAttributeAccessIssue]


def _placed_as(p: Tensor, view: Tensor, trailing: tuple[int, ...]) -> Tensor:
    """``view``, or where ``p`` is sharded the whole of which it is this process's part, for distributed checkpoints."""
    if not hasattr(p, "placements"):
        return view
    from torch.distributed.tensor import DTensor

    whole = torch.empty(*p.shape[:-2], *trailing, device="meta")
    return DTensor.from_local(
        view,
        p.device_mesh,  # pyright: ignore[reportAttributeAccessIssue]
        p.placements,  # pyright: ignore[reportAttributeAccessIssue]
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _cut(counts: Sequence[int], size: int) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Runs of ``size`` frames: start, stop and the pieces of parameters that they are."""
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
                yield start, start + filled, pieces
                start, filled, pieces = start + filled, 0, []
    if pieces:
        yield start, start + filled, pieces
