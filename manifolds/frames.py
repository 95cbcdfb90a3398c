"""What spaces whose points are orthonormal frames have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from .linalg import compute_dtype, orthonormality_error, polar_factor, qr_positive, working_precision
from .manifold import Manifold

__all__ = ["OrthonormalFrames"]


class OrthonormalFrames(Manifold):
    """Points are n×p matrices with XᵀX = I, n ≥ p, in the last two dimensions of a tensor."""

    ndim = 2

    def check_shape(self, shape: torch.Size | tuple[int, ...]) -> None:
        super().check_shape(shape)
        n, p = shape[-2:]
        if n < p:
            raise ValueError(
                f"a frame on {type(self).__name__} must be tall, n >= p, found n = {n} rows and p = {p} columns "
                f"in shape {tuple(shape)}; store its transpose, {p} by {n}"
            )

    def random_point(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A Haar-distributed frame, which spans a uniform subspace: QR with positive diagonal of a Gaussian matrix.

        Mezzadri, "How to generate random matrices from the classical compact groups" (2007).
        """
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        gaussian = torch.randn(shape, dtype=compute_dtype(dtype), device=device, generator=generator)
        return qr_positive(gaussian)[0].to(dtype).contiguous()

    @working_precision
    def project_point(self, a: Tensor) -> Tensor:
        """The polar factor of ``a``: the nearest frame, and it spans what ``a`` spans.

        For rank-deficient ``a``, one of the nearest.

        Raises:
            ValueError: ``a`` is wide, or has NaN or infinite entries.
        """
        self.check_shape(a.shape)
        return polar_factor(a)

    def point_error(self, x: Tensor) -> Tensor:
        """max |XᵀX − I|, computed in float32 or better."""
        self.check_shape(x.shape)
        return orthonormality_error(x)
