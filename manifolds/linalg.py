"""Matrix functions that the manifolds share, and the one place that decides the precision of a factorization.

float64 stays float64, float32 stays float32, and float16 and bfloat16 are computed in float32 (torch has no
factorizations for them) and rounded back at the end. Every function takes batches in the leading dimensions and is
differentiable, also where eigenvalues or singular values coincide: the backward passes solve the Sylvester equation
of the result instead of differentiating a decomposition.

Nothing here calls a batched LU (``torch.linalg.solve``, ``inv``, ``lu``): with torch 2.13.0 on two threads it is
silently wrong for batches of matrices of 160 rows and more on some processors. General systems go through QR, which
was right there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from .polynomial import MAX_DEGREE, inverse_sqrt_polynomial, spectral_interval

__all__ = [
    "compute_dtype",
    "cross_gram",
    "default_atol",
    "expm",
    "frobenius_inner",
    "frobenius_norm",
    "full_float32_products",
    "lu_unpivoted",
    "lyapunov_solve",
    "max_entry",
    "newton_schulz_polish",
    "orthonormality_error",
    "polar_differential",
    "polar_factor",
    "project_tangent",
    "qr_positive",
    "safe_sqrt",
    "skew",
    "solve_left",
    "solve_right",
    "stein_lyapunov_solve",
    "sym",
    "working_precision",
]

F = TypeVar("F", bound=Callable)

_HALF = (torch.float16, torch.bfloat16)

# What rounding an orthonormal matrix to the storage type alone costs in max|XᵀX − I|, with room for the arithmetic
# that led there: measured 1.6e-3 for bfloat16, 2.3e-4 for float16 and 3e-8 for float32 on a 64×64 matrix.
_ATOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# A Gram matrix squares the condition number. Up to this κ(AᵀA) its eigendecomposition is as good as an SVD of A
# after one Newton–Schulz step; beyond it the SVD is taken.
_GRAM_CONDITION_LIMIT = 100.0

# Where the spectrum of AᵀA − I lies in this interval, a polynomial of moderate degree replaces the decomposition.
_NEAR = (-0.5, 2.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that a factorization of ``dtype`` data is computed in."""
    return torch.float32 if dtype in _HALF else dtype


def default_atol(dtype: torch.dtype) -> float:
    """The default tolerance of point and tangent checks for data stored in ``dtype``."""
    try:
        return _ATOL[dtype]
    except KeyError:
        raise TypeError(f"manifolds need real floating-point tensors, found {dtype}; convert with .to(...)") from None


@contextlib.contextmanager
def full_float32_products() -> Iterator[None]:
    """Matrix products of float32 in float32, whatever autocast and ``torch.set_float32_matmul_precision`` say.

    At "medium", on GPUs at "high", and under autocast, products keep 8 to 11 bits: frames would be orthonormal to 1e-3.
    """
    before = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def working_precision(function: F) -> F:
    """Compute ``function`` in float32 or better: the decorator of every map on a manifold.

    float16 and bfloat16 tensors are cast up and the results rounded back, to the type of the first tensor argument,
    which by the argument order of this package is the base point; and see :func:`full_float32_products`.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with full_float32_products():
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if not any(t.dtype in _HALF for t in tensors):
                return function(*args, **kwargs)
            out_dtype = tensors[0].dtype

            def up(a):
                return a.float() if isinstance(a, Tensor) and a.dtype in _HALF else a

            def down(a):
                if isinstance(a, Tensor):
                    return a.to(out_dtype) if a.is_floating_point() else a
                return type(a)(down(b) for b in a) if isinstance(a, tuple) else a

            return down(function(*map(up, args), **{k: up(v) for k, v in kwargs.items()}))

    return wrapper  # type: ignore[return-value]


def max_entry(a: Tensor) -> Tensor:
    """max |aᵢⱼ| over the last two dimensions, 0 for an empty matrix; NaN propagates."""
    return a.abs().amax((-2, -1)) if a.shape[-1] else a.new_zeros(a.shape[:-2])


@full_float32_products()
def orthonormality_error(x: Tensor) -> Tensor:
    """max |XᵀX − I|, computed in float32 or better."""
    x = x.to(compute_dtype(x.dtype))
    return max_entry(x.mT @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))


@full_float32_products()
def cross_gram(x: Tensor, u: Tensor) -> Tensor:
    """XᵀU, computed in float32 or better."""
    return x.to(compute_dtype(x.dtype)).mT @ u.to(compute_dtype(u.dtype))


def sym(a: Tensor) -> Tensor:
    """Symmetric part (A + Aᵀ)/2."""
    return (a + a.mT) / 2


def project_tangent(x: Tensor, z: Tensor) -> Tensor:
    """Z − X sym(XᵀZ), the orthogonal projection to the tangent space of the Stiefel manifold at X."""
    return z - x @ sym(x.mT @ z)


def skew(a: Tensor) -> Tensor:
    """Skew-symmetric part (A − Aᵀ)/2."""
    return (a - a.mT) / 2


def safe_sqrt(a: Tensor) -> Tensor:
    """Square root of a non-negative tensor whose derivative at 0 is 0 instead of infinite."""
    zero = a <= 0
    return torch.where(zero, torch.zeros_like(a), torch.where(zero, torch.ones_like(a), a).sqrt())


def frobenius_inner(u: Tensor, v: Tensor) -> Tensor:
    """tr UᵀV over the last two dimensions."""
    return (u * v).sum((-2, -1))


def frobenius_norm(u: Tensor) -> Tensor:
    """Frobenius norm over the last two dimensions; its derivative at 0 is 0."""
    return safe_sqrt(frobenius_inner(u, u))


def qr_positive(a: Tensor) -> tuple[Tensor, Tensor]:
    """The QR factorization A = QR with diag R ≥ 0, which is unique and continuous for A of full column rank.

    LAPACK leaves the signs to chance, so the Q of a plain QR is neither continuous nor, for Gaussian A, Haar.
    """
    q, r = torch.linalg.qr(a)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(a.dtype)
    return q * signs.unsqueeze(-2), r * signs.unsqueeze(-1)


def solve_right(b: Tensor, k: Tensor) -> Tensor:
    """B K⁻¹ for general square K (well conditioned in all uses here), through QR rather than LU: see the module."""
    q, r = torch.linalg.qr(k)
    return torch.linalg.solve_triangular(r, b, upper=True, left=False) @ q.mT


def solve_left(k: Tensor, b: Tensor) -> Tensor:
    """K⁻¹ B for general square K, through QR."""
    q, r = torch.linalg.qr(k)
    return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)


def lu_unpivoted(m: Tensor) -> tuple[Tensor, Tensor]:
    """M = LU with unit lower triangular L, without pivoting: for M whose leading minors are not zero.

    Elimination in tensor operations, since torch has no such factorization on the CPU.
    """
    columns, rows = [], []
    p = m.shape[-1]
    for j in range(p):
        row = m[..., :1, :]
        column = m[..., :, :1] / m[..., :1, :1]
        rows.append(torch.nn.functional.pad(row, (j, 0)))
        columns.append(torch.nn.functional.pad(column, (0, 0, j, 0)))
        m = m[..., 1:, 1:] - column[..., 1:, :] * row[..., :, 1:]
    return torch.cat(columns, -1), torch.cat(rows, -2)


def polar_differential(a: Tensor, q: Tensor, da: Tensor) -> Tensor:
    """The derivative along dA of the polar factor Q of A = QH.

    dQ = QΩ + (I − QQᵀ) dA H⁻¹ with HΩ + ΩH = QᵀdA − dAᵀQ.
    """
    h = sym(q.mT @ a)
    inner = q.mT @ da
    result = 2 * q @ lyapunov_solve(h, skew(inner))
    if a.shape[-2] > a.shape[-1]:
        normal = da - q @ inner
        result = result + torch.cholesky_solve(normal.mT, torch.linalg.cholesky(h)).mT
    return result


def expm(m: Tensor) -> Tensor:
    """The matrix exponential of (..., k, k), to working precision.

    ``torch.linalg.matrix_exp`` of torch 2.13.0 and 2.14.0 loses half the digits (8e-11 in float64, 2e-5 in float32)
    on a matrix that is alone in the range of its Taylor polynomial of degree 8, which has a wrong coefficient
    (https://github.com/pytorch/pytorch/issues/196592):

        a = torch.tensor([[0.0, 0.04], [-0.04, 0.0]], dtype=torch.float64)
        print(torch.linalg.matrix_exp(a)[0, 1].item() - math.sin(0.04))  # -8e-11

    That range is 1-norms of 3e-4 to 5e-2 in float64 and 5e-2 to 0.58 in float32; expm(M) = e^(−s) expm(M + sI) takes
    small matrices out of it, and those that the backward pass builds of them as well.
    """
    limit, size = (0.1, 0.5) if m.dtype == torch.float64 else (0.6, 1.5)
    norm = m.detach().abs().sum(-2).amax(-1)[..., None, None] if m.shape[-1] else m.new_zeros(())
    shift = torch.where(norm < limit, size, 0.0).to(m.dtype)
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    return torch.linalg.matrix_exp(m + shift * identity) * torch.exp(-shift)


def newton_schulz_polish(y: Tensor) -> Tensor:
    """One Newton–Schulz step Y(3I − YᵀY)/2: an error e in YᵀY = I becomes (3/4)e²; exact points stay put."""
    gram = y.mT @ y
    identity = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    return y + y @ ((identity - gram) / 2)


class _Lyapunov(torch.autograd.Function):
    @staticmethod
    def forward(s: Tensor, c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        return vectors @ ((vectors.mT @ c @ vectors) / sums) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        # dZ = L(dC − dS Z − Z dS), and L is self-adjoint.
        s, z = ctx.saved_tensors
        w = lyapunov_solve(s, grad_outputs[0])
        return -(w @ z.mT + z.mT @ w), w


def lyapunov_solve(s: Tensor, c: Tensor) -> Tensor:
    """The solution Z of SZ + ZS = C for symmetric positive definite S, both (..., p, p). Twice differentiable."""
    result = _Lyapunov.apply(s, c)
    assert isinstance(result, Tensor)
    return result


def stein_lyapunov_solve(m: Tensor, c: Tensor) -> Tensor:
    """The solution S of MS + SMᵀ = C for M whose symmetric part is positive definite; both (..., p, p).

    The Cayley transform K = (M − I)(M + I)⁻¹ turns it into the Stein equation S − KSKᵀ = 2(M+I)⁻¹C(M+I)⁻ᵀ with
    ‖K‖₂ < 1, and squared Smith doubling (Smith 1968) sums its series with quadratic convergence: a few products for M
    near I, which is where retractions are inverted.

    Raises:
        ValueError: the series does not converge, as when the symmetric part of M is not positive definite.
    """
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    shifted = m + identity
    left = solve_right(identity.expand_as(m), shifted)  # (M+I)⁻¹, with which M − I commutes
    k = (m - identity) @ left
    s = 2 * left @ c @ left.mT
    tiny = torch.finfo(m.dtype).eps
    for _ in range(64):
        s = s + k @ s @ k.mT
        k = k @ k
        size = k.detach().abs().amax() if k.numel() else k.new_zeros(())
        if size <= tiny:
            return s
        if not torch.isfinite(size) or size > 1e6:
            break
    raise ValueError("the Lyapunov equation MS + SMᵀ = C did not converge: the symmetric part of M is not positive")


def _polar_by_gram(a: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factor by the eigenvectors of AᵀA, and which matrices of the batch it is good for."""
    values, vectors = torch.linalg.eigh(gram)
    good = (values[..., 0] > 0) & (values[..., 0] * _GRAM_CONDITION_LIMIT >= values[..., -1])
    values = torch.where(good.unsqueeze(-1), values, torch.ones_like(values))
    return newton_schulz_polish(a @ (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT), good


def _polar_by_polynomial(a: Tensor, max_degree: int) -> Tensor | None:
    """Polar factor of A with AᵀA near I by a polynomial as accurate as rounding; None where A is not near enough."""
    e = a.mT @ a - torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    low, high = spectral_interval(e)
    if not (low > _NEAR[0] and high < _NEAR[1]):  # NaN compares false
        return None
    polynomial = inverse_sqrt_polynomial(low, high, torch.finfo(a.dtype).eps / 4)
    return None if polynomial is None or polynomial.degree > max_degree else a @ polynomial(e)


def _polar_forward(a: Tensor, method: str) -> Tensor:
    if a.numel() == 0:
        return a.clone()
    # small matrices are bound by calls, not by arithmetic, and a decomposition is one call
    max_degree = {"exact": -1, "polynomial": MAX_DEGREE, "auto": 16 if a.numel() >= 2**14 else -1}[method]
    if max_degree >= 0 and (near := _polar_by_polynomial(a, max_degree)) is not None:
        return near
    # scaling by the largest entry makes the result the same for 1e-12·A, A and 1e30·A
    largest = a.abs().amax((-2, -1), keepdim=True)
    a = a / torch.where(largest > 0, largest, torch.ones_like(largest))
    try:
        result, good = _polar_by_gram(a, a.mT @ a)
        if not bool(good.all()):
            bad = a[~good]
            left, _, right = torch.linalg.svd(bad, full_matrices=False)
            result[~good] = left @ right
    except RuntimeError as error:  # torch.linalg.LinAlgError
        if bool(torch.isfinite(a).all()):
            raise
        raise ValueError("cannot take the polar factor of a matrix with NaN or infinite entries") from error
    return result


class _PolarFactor(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, method: str) -> Tensor:
        return _polar_forward(a, method)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        # the differential of the polar factor is self-adjoint
        a, q = ctx.saved_tensors
        return polar_differential(a, q, grad_outputs[0]), None


def polar_factor(a: Tensor, method: str = "auto") -> Tensor:
    """The orthonormal polar factor A(AᵀA)^(−1/2) of (..., n, p) with n ≥ p: the nearest orthonormal matrix to A.

    Args:
        method: "exact", by the eigenvectors of AᵀA, or by an SVD where A is ill conditioned; "polynomial", by a
            polynomial in AᵀA as accurate as rounding wherever A is near enough to orthonormal; "auto", whichever is
            faster of the two.

    Rank-deficient A, whose polar factor is not unique, gives one of them; there is no derivative there. float16 and
    bfloat16 must be cast by the caller.

    Raises:
        ValueError: A has NaN or infinite entries.
    """
    result = _PolarFactor.apply(a, method)
    assert isinstance(result, Tensor)
    return result
