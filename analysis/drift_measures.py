"""What a drift is made of: how far one side's frames moved, and how far a circuit moved modulo its gauge."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ._arrays import ratio
from .random_subspaces import haar_sample, random_gauge, random_procrustes
from .spectra import angles_between, procrustes_distance, singular_spectrum


class Pair:
    """The frames (k, n, p) of one side before and after, in coordinates of the space that the two span.

    Every distance here is unchanged by one rotation of both frames, so one QR of the two side by side, (k, n, 2p),
    leaves 2p rows to work with. ``rows`` remembers n, ``movement`` is ‖new − old‖/‖old‖, exactly 0 for equal frames.
    """

    def __init__(self, old: Tensor, new: Tensor) -> None:
        self.rows, p = old.shape[-2:]
        self.old, self.new = old, new
        self.movement = relative_change(old, new)
        if self.rows > 2 * p:
            self.old, self.new = torch.linalg.qr(torch.cat([old, new], -1), mode="r").R.split(p, -1)


class SideDrift:
    """How far one side's frames moved: numbers a head, each repeated for the heads that share a frame.

    ``movement``, ``procrustes``, ``angles`` and ``distance`` are those of :class:`LayerDrift`, ``random_*`` what they
    are for random subspaces.
    """

    random_procrustes: Tensor | None = None
    random_distance: float | None = None

    def __init__(self, pair: Pair, heads: int, samples: int, seed: int) -> None:
        spread = functools.partial(per_head, heads=heads)
        old, new = pair.old, pair.new
        self.movement = spread(pair.movement)
        before, after = (torch.linalg.vector_norm(frames, dim=(-2, -1)) for frames in (old, new))
        # ‖W' − W‖² = ‖W‖² + ‖W'‖² − 2⟨W, W'⟩, and the last vanishes in the mean
        self.random_movement = spread((1 + ratio(after, before) ** 2).sqrt())
        self.procrustes = spread(procrustes_distance(new, old))
        self.angles = spread(_angles(old, new))
        self.distance = torch.linalg.vector_norm(self.angles, dim=-1)
        if samples:
            overlap, self.random_distance = haar_sample(pair.rows, min(pair.rows, old.shape[-1]), samples, seed)
            self.random_procrustes = spread(random_procrustes(singular_spectrum(old), singular_spectrum(new), overlap))


class CircuitDrift:
    """How far the circuits A diag(s) Bᵀ of ``left`` and ``right`` frames moved, modulo the gauge they share.

    Where ``left`` has more heads than ``right``, as queries have in grouped-query attention, one rotation acts on all
    heads of a group, and the left factor is the stack of them. ``scales`` are those before and after, or None.
    """

    random_distance: Tensor | None = None

    def __init__(
        self, left: Pair, right: Pair, scales: tuple[Tensor | None, Tensor | None], samples: int, seed: int
    ) -> None:
        heads, groups, p = left.old.shape[0], right.old.shape[0], left.old.shape[-1]
        first, second = balanced(left.old, right.old, scales[0]), balanced(left.new, right.new, scales[1])
        distance = procrustes_distance(torch.cat(second[:2], -2), torch.cat(first[:2], -2))
        self.distance = per_head(distance, heads)
        self.movement = per_head(ratio(distance, (2 * first[2].sum(-1)).sqrt()), heads)
        if samples:
            # different seeds for the two sides: their subspaces are independent
            overlaps = (
                haar_sample(rows, min(rows, p), samples, 2 * seed + i)[0]
                for i, rows in enumerate((left.rows * (heads // groups), right.rows))
            )
            self.random_distance = per_head(random_gauge(first[2], second[2], *overlaps), heads)


def balanced(left: Tensor, right: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(UΣ^½, VΣ^½, Σ) of the circuits A diag(scale) Bᵀ, by QR of both factors; NaN for one with non-finite weights."""
    if scale is not None:
        left = left * (scale[:, None, :] if scale.ndim == 2 else scale[:, None, None])
    groups, share = right.shape[0], left.shape[0] // right.shape[0]
    if share > 1:
        left = left.reshape(groups, share * left.shape[-2], left.shape[-1])
    (qa, ra), (qb, rb) = torch.linalg.qr(left), torch.linalg.qr(right)
    core = ra @ rb.mT
    good = torch.isfinite(core).all(-1).all(-1)[:, None, None]
    u, sigma, vh = torch.linalg.svd(torch.where(good, core, 0.0), full_matrices=False)
    sigma = torch.where(good[..., 0], sigma, torch.nan)
    root = sigma.sqrt().unsqueeze(-2)
    return qa @ u * root, qb @ vh.mT * root, sigma


def relative_change(old: Tensor, new: Tensor) -> Tensor:
    """‖new − old‖/‖old‖ over all but the first dimension."""
    norm = functools.partial(torch.linalg.vector_norm, dim=tuple(range(1, old.ndim)))
    return ratio(norm(new - old), norm(old))


def subspace_distances(pair: Pair, heads: int) -> Tensor:
    """The 2-norm of the principal angles of one side's frames, a head."""
    return torch.linalg.vector_norm(per_head(_angles(pair.old, pair.new), heads), dim=-1)


def _angles(old: Tensor, new: Tensor) -> Tensor:
    if old.shape[-2] < old.shape[-1]:
        # fewer input features than columns: the column space is not a plane of dimension d_h
        return torch.full((old.shape[0], old.shape[-2]), torch.nan, dtype=torch.float64)
    return angles_between(old, new, dependent="nan")


def per_head(numbers: Tensor, heads: int) -> Tensor:
    """Numbers a frame, each repeated for the heads that share it."""
    return numbers.repeat_interleave(heads // numbers.shape[0], 0)
