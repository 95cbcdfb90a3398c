"""What distances between independent random frames come to: the yardstick beside every measured distance.

Sampled, with seeds, from Haar-random frames; only p × p overlaps are kept.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..manifolds import Stiefel
from .spectra import angles_between


@functools.lru_cache(maxsize=64)
def haar_sample(n: int, p: int, samples: int, seed: int) -> tuple[Tensor, float]:
    """Overlaps (samples, p, p) of Haar-random p-frames of ℝⁿ with the first p axes, and the mean subspace distance.

    Example:
        >>> haar_sample(8, 2, samples=16, seed=0)[0].shape
        torch.Size([16, 2, 2])
    """
    frames, distances = _haar_frames(n, p, samples, seed)
    return frames[..., :p, :].clone(), float(distances.mean())


def haar_band(n: int, p: int, samples: int, seed: int, tail: float = 0.05) -> tuple[float, float]:
    """The ``tail`` and 1 − ``tail`` quantiles of the subspace distance of two Haar-random p-frames of ℝⁿ.

    Example:
        >>> low, high = haar_band(8, 2, samples=64, seed=0)
        >>> 0 < low < haar_sample(8, 2, samples=64, seed=0)[1] < high
        True
    """
    _, distances = _haar_frames(n, p, samples, seed)
    low, high = torch.quantile(distances, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def _haar_frames(n: int, p: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Haar-random frames (samples, n, p), and how far their subspaces are from that of the first p axes."""
    generator = torch.Generator().manual_seed(seed)
    frames = Stiefel().random_point(samples, n, p, dtype=torch.float64, generator=generator)
    angles = angles_between(torch.eye(n, p, dtype=torch.float64), frames)
    return frames, torch.linalg.vector_norm(angles, dim=-1)


def random_procrustes(old: Tensor, new: Tensor, overlap: Tensor) -> Tensor:
    """Mean of min over R ∈ O(p) of ‖W' − W R‖, where W and W' have the singular values ``old`` and ``new``
    (*batch, r) and their left singular vectors overlap as ``overlap`` (samples, p, p): d² = Σσ² + Σσ'² − 2‖ΣCΣ'‖_*.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> random_procrustes(one, one, torch.zeros(1, 1, 1, dtype=torch.float64)) ** 2      # orthogonal lines
        tensor(2.0000, dtype=torch.float64)
    """
    r = old.shape[-1]
    core = old[..., None, :, None] * overlap[:, :r, :r] * new[..., None, None, :]
    return _mean_distance(old.square().sum(-1) + new.square().sum(-1), core)


def random_gauge(old: Tensor, new: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Mean gauge distance of circuits with the spectra ``old`` and ``new`` (*batch, r) in random subspaces, of
    balanced factors: d² = 2Σσ + 2Σσ' − 2‖Σ^½(C_Q + C_K)Σ'^½‖_*, C the overlaps (samples, p, p).

    Example:
        >>> one, apart = torch.ones(1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
        >>> random_gauge(one, one, apart, apart)
        tensor(2., dtype=torch.float64)
    """
    r = old.shape[-1]
    overlap = query[:, :r, :r] + key[:, :r, :r]
    core = old.sqrt()[..., None, :, None] * overlap * new.sqrt()[..., None, None, :]
    return _mean_distance(2 * (old.sum(-1) + new.sum(-1)), core)


def _mean_distance(squares: Tensor, core: Tensor) -> Tensor:
    good = torch.isfinite(core).all(-1).all(-1)
    nuclear = torch.linalg.svdvals(torch.where(good[..., None, None], core, 0.0)).sum(-1)
    return (squares[..., None] - 2 * nuclear).clamp_min(0).sqrt().mean(-1)
