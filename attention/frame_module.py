"""Modules that hold frames, and keep them frames through loading, assigning, moving and conversion."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, ManifoldParameter
from ..manifolds.parameter import rebuild
from .sharding import is_sharded, whole

__all__ = ["FrameModule"]


class FrameModule(nn.Module):
    """A module whose parameters named in ``frame_names`` are points of ``manifold``.

    ``load_state_dict(assign=True)`` and ``to_empty()`` replace a ``ManifoldParameter`` by a plain one, unchecked, and
    ``.double()`` keeps float32's rounding errors. Here an assigned frame is checked and wrapped again, an off-manifold
    one is an error that leaves the old frame in place, and a gain in precision projects.

    A frame that ``fully_shard`` has made a DTensor is no ``ManifoldParameter`` any more, and the optimizer's group must
    name its manifold. What is loaded into it is gathered and checked all the same, on every process; ``.double()``
    does not project it.

    Subclasses set ``manifold`` and register the parameters that they name.

    Example:
        >>> from geodescent.manifolds import Stiefel
        >>> class Rotation(FrameModule):
        ...     frame_names = ("matrix",)
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.manifold = Stiefel()
        ...         self.matrix = ManifoldParameter(self.manifold.random_point(size, size), self.manifold)
        >>> layer = Rotation(4)
        >>> _ = layer.load_state_dict({"matrix": torch.eye(4)}, assign=True)
        >>> type(layer.matrix).__name__
        'ManifoldParameter'
        >>> _ = layer.load_state_dict({"matrix": 2 * torch.eye(4)}, assign=True)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: ...its point error is 3, allowed is 1e-05...
    """

    frame_names: ClassVar[tuple[str, ...]] = ("weight",)
    manifold: Manifold

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        before = {name: getattr(self, name) for name in self.frame_names}
        backup = {name: old.detach().clone() for name, old in before.items() if is_sharded(old)}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, old in before.items():
            loaded = getattr(self, name)
            if isinstance(loaded, ManifoldParameter):
                continue  # which has checked what was copied into it
            try:
                if is_sharded(loaded):
                    self.manifold.check_point(whole(loaded.detach()), name="the frame to load")
                else:
                    setattr(self, name, ManifoldParameter(loaded, self.manifold, old.requires_grad))
            except ValueError as error:
                setattr(self, name, old)
                if name in backup:
                    old.detach().copy_(backup[name])
                error_msgs.append(f'While loading "{prefix}{name}": {error}')

    @torch.no_grad()
    def _redraw_frames(self, generator: torch.Generator | None = None) -> None:
        """Put random points, Haar-distributed on Stiefel, in the place of the frames."""
        for name in self.frame_names:
            x = getattr(self, name).detach()
            x.copy_(self.manifold.random_point(*x.shape, dtype=x.dtype, device=x.device, generator=generator))

    def _apply(self, fn, recurse: bool = True):
        before = {name: getattr(self, name).dtype for name in self.frame_names}
        super()._apply(fn, recurse)
        for name, dtype in before.items():
            moved: Tensor = getattr(self, name)
            if is_sharded(moved):
                continue
            # moves that cannot keep the tensor, such as to_empty() from the meta device, make a plain parameter of it
            if not isinstance(moved, ManifoldParameter):
                setattr(self, name, rebuild(moved, moved.requires_grad, self.manifold))
            # .double() of a float32 frame would be orthonormal to float32's rounding only
            if torch.finfo(moved.dtype).eps < torch.finfo(dtype).eps and not moved.is_meta:
                moved.detach().copy_(self.manifold.project_point(moved.detach()))
        return self
