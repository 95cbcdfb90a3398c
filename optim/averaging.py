"""Averages of weights that stay on the manifold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from ..manifolds import ManifoldParameter

__all__ = ["AveragedModel"]


class AveragedModel(swa_utils.AveragedModel):
    r"""``torch.optim.swa_utils.AveragedModel`` whose frames are on their manifold after every update.

    An average of frames is not a frame. Each :class:`~geodescent.manifolds.ManifoldParameter` of the averaged model is
    therefore the point nearest to the average, which with weights :math:`w_i` that sum to one is

    .. math::
        \arg\min_{X ∈ M} \sum_i w_i ‖X - X_i‖_F^2 = \arg\min_{X ∈ M} ‖X - \sum_i w_i X_i‖_F,

    the projected arithmetic mean: Moakher, "Means and averaging in the group of rotations" (2002); on Stiefel, the
    polar factor of the average (Absil & Malick, "Projection-like retractions on matrix manifolds", 2012). It is not
    the intrinsic (Karcher) mean, but agrees with it to second order in the distance of the points, and commutes with
    rotations of all of them. It is exact for any number of updates: the averages before projection are kept, in buffers
    ``mean_0``, ``mean_1``, …, one for each frame parameter, which is what this costs in memory.

    All other parameters, buffers, arguments and ways to use it are torch's. Where an average has no full rank, as
    midway between X and −X, the nearest point is not unique and one of them is taken. Frames that only an optimizer's
    group knows of (``{"params": [...], "manifold": ...}``) are plain tensors here: wrap them.

    Args:
        model: the model to average; it is copied.
        device: where the average lives; by default where the model does.
        avg_fn: (average, parameter, number averaged) to the new average; by default the mean of all.
        multi_avg_fn: the same for lists in place, such as ``torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)``.
        use_buffers: average the model's buffers too.

    Raises:
        ValueError: in an update, a frame of the model has NaN or infinite entries; nothing was averaged.

    Example:
        >>> import torch
        >>> from geodescent.attention import StiefelAttention
        >>> from geodescent.manifolds import Stiefel
        >>> model = StiefelAttention(8, 2)
        >>> averaged = AveragedModel(model)
        >>> averaged.update_parameters(model)
        >>> model.q_proj.reset_parameters()
        >>> averaged.update_parameters(model)
        >>> bool(Stiefel().point_error(averaged.module.q_proj.weight).max() < 1e-5)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Tensor | int], None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        for i, frame in enumerate(self._frames()):
            self.register_buffer(f"mean_{i}", frame.detach().clone())

    def _frames(self) -> list[ManifoldParameter]:
        return [p for p in self.module.parameters() if isinstance(p, ManifoldParameter)]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the parameters of ``model`` into the averages, and its frames' averages back to their manifolds."""
        for name, p in model.named_parameters():
            if isinstance(p, ManifoldParameter) and not bool(torch.isfinite(p.detach()).all()):
                raise ValueError(f"the frame {name!r} has NaN or infinite entries; nothing was averaged")
        frames = self._frames()
        means = [self.get_buffer(f"mean_{i}") for i in range(len(frames))]
        # detach(): writing through a ManifoldParameter itself would refuse what is off the manifold
        for frame, mean in zip(frames, means, strict=True):
            frame.detach().copy_(mean)
        super().update_parameters(model)
        for frame, mean in zip(frames, means, strict=True):
            mean.copy_(frame.detach())
            frame.detach().copy_(frame.manifold.project_point(mean))
