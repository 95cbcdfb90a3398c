"""Query or key projections made of frames, gains and a bias, which save and load as the matrix they replace."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, ManifoldParameter
from ..manifolds.linalg import default_atol
from .frame_module import FrameModule
from .sharding import is_sharded, whole

__all__ = ["HeadProjection"]


class HeadProjection(FrameModule):
    """x ↦ [x U₁ diag(g₁), …, x U_h diag(g_h)] + b, in the place of an ``nn.Linear`` of a model.

    :func:`~geodescent.attention.constrain` makes them. ``weight`` is the (out, in) matrix that ``nn.Linear`` would
    have, computed anew from ``frames`` and ``gain`` whenever it is read, and ``state_dict()`` holds that matrix and
    the bias under the names ``weight`` and ``bias``, with a bias of zeros where the conversion dropped one; where
    ``saved_above`` is set, the module above saves them as a part of a fused matrix. That module knows queries and keys
    and converts such a state dict when it is loaded. In a :func:`~geodescent.attention.frame_state_dict` are the frames
    and gains themselves, which load here.

    Args:
        frames: points of ``manifold``, (h, n, d_h), or (1, n, h·d_h) for one frame over all heads.
        gain: (h, d_h), (h, 1), or None for ones.
        bias: (h·d_h,), or None.
        manifold: where the frames live.
        learn_gain: the gain is a parameter; else a buffer.
        dropped_bias: save a bias of zeros though there is none.
        requires_grad, bias_requires_grad: as for ``nn.Parameter``.

    Raises:
        NotOnManifoldError: the frames are off the manifold.

    Example:
        >>> from geodescent.manifolds import Stiefel
        >>> frames = Stiefel().random_point(3, 8, 2)
        >>> project = HeadProjection(frames, torch.ones(3, 2), torch.zeros(6), manifold=Stiefel())
        >>> project(torch.zeros(5, 8)).shape, project.weight.shape
        (torch.Size([5, 6]), torch.Size([6, 8]))
        >>> list(project.state_dict()), [name for name, _ in project.named_parameters()]
        (['weight', 'bias'], ['frames', 'gain', 'bias'])
    """

    frame_names = ("frames",)
    frames: ManifoldParameter
    gain: Tensor | None
    bias: nn.Parameter | None
    #: set for a while by frame_state_dict
    saves_frames = False

    def __init__(
        self,
        frames: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        *,
        manifold: Manifold,
        learn_gain: bool = True,
        dropped_bias: bool = False,
        requires_grad: bool = True,
        bias_requires_grad: bool = True,
    ) -> None:
        super().__init__()
        self.manifold = manifold
        self.dropped_bias = dropped_bias
        self.saved_above = False
        self.in_features = frames.shape[-2]
        self.out_features = frames.shape[0] * frames.shape[-1]
        self.frames = ManifoldParameter(frames.contiguous(), manifold, requires_grad)
        if gain is not None and learn_gain:
            self.gain = nn.Parameter(gain, requires_grad)
        else:
            self.register_buffer("gain", gain)
        self.bias = None if bias is None else nn.Parameter(bias, bias_requires_grad)

    @property
    def weight(self) -> Tensor:
        """The effective matrix, (out, in)."""
        columns = self.frames.mT.reshape(-1, self.in_features)
        if self.gain is None:
            return columns
        gain = self.gain
        per_row = gain.expand(-1, self.out_features // gain.shape[0]).reshape(-1, 1)
        return columns * per_row

    @property
    def saved_bias(self) -> Tensor | None:
        """The bias that the original layout has a place for."""
        if self.bias is None and self.dropped_bias:
            return self.frames.new_zeros(self.out_features)
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return nn.functional.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def reproject(self) -> float:
        """Replace the frames by the nearest ones; returns the point error that they had."""
        frames = self.frames.detach()
        error = float(self.manifold.point_error(frames).max())
        frames.copy_(self.manifold.project_point(frames))
        return error

    def extra_repr(self) -> str:
        shape = "x".join(map(str, self.frames.shape))
        gain = None if self.gain is None else "x".join(map(str, self.gain.shape))
        return f"frames={shape}, gain={gain}, bias={self.bias is not None}, manifold={self.manifold!r}"

    # --- state ----------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        if self.saves_frames:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saves_frames or self.saved_above:
            return
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        bias = self.saved_bias
        if bias is not None:
            destination[prefix + "bias"] = bias if keep_vars else bias.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if prefix + "weight" in state_dict:
            error_msgs.append(
                f'"{prefix}weight" cannot be loaded alone: frames come from queries and keys together; load through '
                "the attention module or a module above it"
            )
            return
        if prefix + "frames" not in state_dict:
            if self.saved_above:
                return
            missing_keys.append(prefix + "weight")
            if self.saved_bias is not None:
                missing_keys.append(prefix + "bias")
            return
        # fully_shard has replaced the parameter already: there is no class to restore
        load = nn.Module._load_from_state_dict if is_sharded(self.frames) else FrameModule._load_from_state_dict
        load(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        error = float(self.manifold.point_error(whole(self.frames.detach())).max())
        if error > default_atol(self.frames.dtype):
            # the frames passed the check at the precision of the checkpoint, not at that of this layer
            warnings.warn(
                f'"{prefix}frames" was saved in lower precision and is off {self.manifold!r} by {error:.1e}; '
                "geodescent.attention.reproject(model) takes it to the nearest frames",
                stacklevel=2,
            )
