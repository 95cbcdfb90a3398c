"""Singular spectra, condition numbers, and distances between subspaces and between frames.

Every function takes torch tensors or numpy arrays, batched in the leading dimensions, computes in float64, and gives
back what it was given: a numpy array when every argument is one, else a tensor of the arguments' dtype and device.
A matrix with a non-finite entry has a NaN result of its own; the rest of the batch is measured all the same.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ._arrays import ArrayLike, as_tensor, ratio


def condition_number(a: ArrayLike) -> Any:
    """κ₂ = σmax / σmin of ``(*batch, n, p)``: batch-shaped, at least 1.

    ``inf`` for a singular matrix, and for the zero matrix, which is singular too. A wide matrix has the condition
    number of its transpose. The rank decision is the usual one of numerical linear algebra (LAPACK's,
    ``numpy.linalg.matrix_rank``'s): σmin ≤ eps·max(n, p)·σmax counts as zero, with ``eps`` of the *input's* dtype. An
    empty batch gives an empty result.

    Raises:
        ValueError: fewer than two dimensions, or a matrix without rows or columns.

    Example:
        >>> condition_number(torch.stack([torch.diag(torch.tensor([3.0, 2.0])), torch.zeros(2, 2)]))
        tensor([1.5000,    inf])
    """
    tensor = _matrices(a, "a")
    return _like(condition_from(_singular_values(tensor), max(tensor.shape[-2:]), torch.finfo(tensor.dtype).eps), a)


def condition_from(sigma: Tensor, size: int, eps: float) -> Tensor:
    """σmax / σmin of descending singular values ``(*batch, k)``; at most ``eps·size·σmax`` counts as zero."""
    largest, smallest = sigma[..., 0], sigma[..., -1]
    singular = smallest <= eps * size * largest
    kappa = ratio(largest, torch.where(singular, torch.zeros_like(smallest), smallest))
    # ratio() reads 0/0 as 0: right for a residual, wrong for a zero matrix
    return torch.where(singular, torch.full_like(kappa, torch.inf), kappa)


def singular_spectrum(a: ArrayLike) -> Any:
    """Singular values of ``(*batch, n, p)``, largest first: ``(*batch, min(n, p))``.

    Example:
        >>> singular_spectrum(np.array([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])).tolist()
        [2.0, 1.0]
    """
    return _like(_singular_values(_matrices(a, "a")), a)


def principal_angles(a: ArrayLike, b: ArrayLike) -> Any:
    """Principal angles between the column spaces of ``(*batch, n, p)`` and ``(*batch, n, q)``, smallest first.

    Any full-rank bases will do: they are orthonormalized inside. The result is ``(*batch, min(p, q))``, in [0, π/2].
    Each angle is taken from its sine or its cosine, whichever is accurate there (Björck & Golub 1973, Knyazev &
    Argentati 2002): 1e-9 comes out as 1e-9, where an arccosine alone gives 0 or 1.5e-8.

    Raises:
        ValueError: different n, a wide matrix, or a basis whose columns are linearly dependent (rank decision of
            :func:`condition_number`).

    Example:
        >>> principal_angles(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [1.0]]))      # 45 degrees
        tensor([0.7854])
    """
    return _like(angles_between(a, b), a, b)


def subspace_distance(a: ArrayLike, b: ArrayLike) -> Any:
    """Geodesic distance of two subspaces: the 2-norm of their principal angles, batch-shaped.

    For subspaces of one dimension this is the arc length on the Grassmann manifold; for different dimensions, the
    distance from the smaller one to the nearest subspace of its dimension inside the larger (Ye & Lim 2016).

    Example:
        >>> subspace_distance(torch.eye(4, 2), torch.eye(4).flip(0)[:, :2])       # orthogonal planes: √2 · π/2
        tensor(2.2214)
    """
    return _like(torch.linalg.vector_norm(angles_between(a, b), dim=-1), a, b)


def procrustes_distance(a: ArrayLike, b: ArrayLike) -> Any:
    """min over R ∈ O(p) of ‖a − bR‖_F for ``(*batch, n, p)``, batch-shaped (Schönemann 1966).

    The minimizer is the orthogonal polar factor of bᵀa. The distance is measured on the difference itself, not through
    ‖a‖² + ‖b‖² − 2‖aᵀb‖_*, which cannot tell distances below 1e-8 from zero.

    Raises:
        ValueError: shapes whose trailing two dimensions differ.

    Example:
        >>> turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]])
        >>> procrustes_distance(turned, torch.eye(3, 2)), procrustes_distance(2 * turned, torch.eye(3, 2))
        (tensor(0.), tensor(1.4142))
    """
    first, second = _matrices(a, "a"), _matrices(b, "b")
    if first.shape[-2:] != second.shape[-2:]:
        raise ValueError(f"a and b must have the same rows and columns, found {_shape(first)} and {_shape(second)}")
    return _like(_procrustes(first.to(torch.float64), second.to(torch.float64)), a, b)


def angles_between(a: ArrayLike, b: ArrayLike, dependent: Literal["raise", "nan"] = "raise") -> Tensor:
    """:func:`principal_angles` as float64; ``dependent="nan"`` marks a rank-deficient basis instead of raising."""
    first, second = _matrices(a, "a"), _matrices(b, "b")
    if first.shape[-2] != second.shape[-2]:
        raise ValueError(f"a and b must have the same number of rows, found {_shape(first)} and {_shape(second)}")
    if min(first.shape[-1], second.shape[-1]) < 1 or max(first.shape[-1], second.shape[-1]) > first.shape[-2]:
        raise ValueError(
            f"a basis has at most as many columns as rows, found {_shape(first)} and {_shape(second)}: transpose"
        )
    unfit = []
    for name, basis in (("a", first), ("b", second)):
        kappa = condition_number(basis)
        if dependent == "raise" and bool(torch.isinf(kappa).any()):
            raise ValueError(
                f"the columns of {name} are linearly dependent, so they are not a basis of a {basis.shape[-1]}-plane"
            )
        unfit.append(~torch.isfinite(kappa))
    if first.shape[-1] < second.shape[-1]:
        first, second = second, first
    q1, q2 = _orthonormal(first), _orthonormal(second)
    overlap = q1.mT @ q2
    cosines = torch.linalg.svdvals(overlap).clamp(max=1.0)
    # what of the smaller basis the larger one does not reach; its singular values, read upwards, are the sines
    sines = torch.linalg.svdvals(q2 - q1 @ overlap).clamp(max=1.0).flip(-1)
    angles = torch.where(cosines**2 > 0.5, torch.asin(sines), torch.acos(cosines))
    return torch.where(torch.logical_or(*unfit).unsqueeze(-1), torch.full_like(angles, torch.nan), angles)


def stable_rank(sigma: Tensor) -> Tensor:
    """‖·‖_F²/‖·‖₂² = Σσ²/σmax² of singular values ``(*batch, k)``: from 1 to k, and 0 for all zeros.

    Example:
        >>> stable_rank(torch.tensor([2.0, 2.0, 0.0]))
        tensor(2.)
    """
    largest = sigma.amax(-1, keepdim=True)
    scaled = sigma / torch.where(largest == 0, torch.ones_like(largest), largest)
    return scaled.square().sum(-1)


def effective_rank(sigma: Tensor) -> Tensor:
    """exp of the Shannon entropy of σ/Σσ (Roy & Vetterli 2007), ``(*batch, k)``: from 1 to k, and 0 for all zeros.

    Example:
        >>> round(float(effective_rank(torch.tensor([2.0, 2.0, 0.0]))), 6)
        2.0
    """
    total = sigma.sum(-1, keepdim=True)
    share = sigma / torch.where(total == 0, torch.ones_like(total), total)
    rank = torch.exp(-torch.xlogy(share, share).sum(-1))
    return torch.where(total.squeeze(-1) == 0, torch.zeros_like(rank), rank)


def _matrices(value: ArrayLike, name: str) -> Tensor:
    tensor = as_tensor(value, name)
    if tensor.ndim < 2:
        raise ValueError(f"{name} must be a matrix or a batch of matrices, found shape {_shape(tensor)}")
    if 0 in tensor.shape[-2:]:
        raise ValueError(f"{name} has matrices without rows or columns, found shape {_shape(tensor)}")
    return tensor


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(tensor).all(-1).all(-1)


def _singular_values(tensor: Tensor) -> Tensor:
    """Descending singular values in float64; NaN for a matrix with a non-finite entry, which LAPACK would reject."""
    good = _finite(tensor)
    safe = torch.where(good[..., None, None], tensor, torch.zeros_like(tensor)).to(torch.float64)
    if safe.numel() == 0:
        return safe.new_zeros(*safe.shape[:-2], min(safe.shape[-2:]))
    sigma = torch.linalg.svdvals(safe)
    return torch.where(good.unsqueeze(-1), sigma, torch.full_like(sigma, torch.nan))


def _orthonormal(basis: Tensor) -> Tensor:
    """An orthonormal basis of the same column space. Columns are first brought to length 1: QR then loses no digits to
    scale, and float64 cannot overflow."""
    safe = torch.where(_finite(basis)[..., None, None], basis, torch.zeros_like(basis)).to(torch.float64)
    largest = safe.abs().amax(-2, keepdim=True)
    return torch.linalg.qr(safe / torch.where(largest == 0, torch.ones_like(largest), largest)).Q


def _procrustes(a: Tensor, b: Tensor) -> Tensor:
    good = (_finite(a) & _finite(b))[..., None, None]
    a, b = torch.where(good, a, 0.0), torch.where(good, b, 0.0)
    u, _, vh = torch.linalg.svd(b.mT @ a, full_matrices=False)
    distance = torch.linalg.matrix_norm(a - b @ (u @ vh))
    return torch.where(good[..., 0, 0], distance, math.nan)


def _like(result: Tensor, *arguments: ArrayLike) -> Any:
    """``result`` in the arguments' kind and widest dtype."""
    dtype = as_tensor(arguments[0], "a").dtype
    for other in arguments[1:]:
        dtype = torch.promote_types(dtype, as_tensor(other, "b").dtype)
    result = result.to(dtype)
    return result.numpy() if all(isinstance(value, np.ndarray) for value in arguments) else result
