"""Geodesics of the α-metrics on the Stiefel manifold, in p-sized factors.

Write a tangent vector as u = xA + B with A = xᵀu skew and xᵀB = 0, κ = 1/(α+1) and φ = α/(α+1) = 1 − κ. The geodesic
with that velocity is

    γ(t) = G(t) x H(t),   G(t) = expm(tΩ),   Ω = κ xAxᵀ + Bxᵀ − xBᵀ,   H(t) = expm(tφA)

(Hüper, Markina & Silva Leite 2021; Zimmermann & Hüper 2022), and left and right multiplication by orthogonal matrices
are isometries. So v ↦ Gᵀ v Hᵀ identifies the tangent spaces along γ with the one at x isometrically, and in that
moving frame the differential of exp and parallel transport are constant-coefficient linear maps: everything here
is built on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import LogNotConvergedError
from .linalg import expm, frobenius_norm, polar_factor, project_tangent, skew, solve_right, sym

__all__ = ["acceleration", "acceleration_adjoint", "exp", "exp_differential", "log", "parallel_transport", "split"]

_MAX_ITERATIONS = 100
# The curve that the shooting method follows to y moves at most this far an iteration.
_STRIDE = 0.5


def split(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A = skew(xᵀu) and B = u − x xᵀu: the parts of the tangent vector u = xA + B. A normal part of u is dropped."""
    inner = x.mT @ u
    return skew(inner), u - x @ inner


def acceleration(x: Tensor, u: Tensor, v: Tensor, alpha: float) -> Tensor:
    """The symmetric bilinear form S(u, v) whose diagonal S(u, u) is the acceleration γ''(0) of the geodesic along u.

    With M = Ω and N = φA, γ''(0) = M²x + 2MxN + xN² collects to x(A² − BᵀB) + (2α+1)/(α+1)·BA. −S is the Christoffel
    form of the metric in ambient coordinates, so the Riemannian Hessian of f is ∇²f[u, v] + ⟨∇f, S(u, v)⟩.
    """
    (a1, b1), (a2, b2) = split(x, u), split(x, v)
    c = (2 * alpha + 1) / (alpha + 1)
    tangent = (a1 @ a2 + a2 @ a1 - b1.mT @ b2 - b2.mT @ b1) / 2
    return x @ tangent + c / 2 * (b1 @ a2 + b2 @ a1)


def acceleration_adjoint(x: Tensor, u: Tensor, g: Tensor, alpha: float) -> Tensor:
    """The ambient Z with tr ZᵀV = tr gᵀS(u, V) for every tangent V; S as in :func:`acceleration`."""
    a, b = split(x, u)
    inner = x.mT @ g
    outer = g - x @ inner
    c = (2 * alpha + 1) / (alpha + 1)
    along = -(a @ inner + inner @ a) / 2 + c / 2 * b.mT @ outer
    return x @ along - b @ sym(inner) - c / 2 * outer @ a


def exp(x: Tensor, u: Tensor, alpha: float) -> Tensor:
    """Exp_x(u), with one 2p×2p exponential in the (not orthonormal) basis [x, B].

    Ω[x, B] = [x, B][[κA, −BᵀB], [I, 0]], so no QR factorization is needed and the derivative exists also where B
    loses rank, as it does at u = 0.
    """
    a, b = split(x, u)
    scale = _column_scale(b)
    block = expm(_generator(a, b, scale, alpha))[..., : x.shape[-1]]
    y = _combine(x, b / scale, block)
    if alpha != 0:
        y = y @ expm(alpha / (alpha + 1) * a)
    # also for steps so long that rounding leaves nothing of the direction, the result is a frame
    return polar_factor(y)


def _column_scale(b: Tensor) -> Tensor:
    """The size that B is divided by to balance the blocks of the generator, or scaling would cost digits."""
    gram_diagonal = b.detach().square().sum((-2, -1), keepdim=True)
    return (gram_diagonal / max(1, b.shape[-1])).sqrt().clamp_min(1e-3)


def _generator(a: Tensor, b: Tensor, scale: Tensor, alpha: float) -> Tensor:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    top = torch.cat([a / (alpha + 1), -(b.mT @ b) / scale], -1)
    return torch.cat([top, torch.cat([scale * identity, torch.zeros_like(a)], -1)], -2)


def _combine(x: Tensor, b: Tensor, block: Tensor) -> Tensor:
    p = x.shape[-1]
    return x @ block[..., :p, :] + b @ block[..., p:, :]


def exp_differential(x: Tensor, u: Tensor, v: Tensor, alpha: float) -> Tensor:
    """The derivative of s ↦ Exp_x(u + s·v) at 0, through the Fréchet derivatives of the exponentials in :func:`exp`."""
    (a, b), (da, db) = split(x, u), split(x, v)
    a, b, da, db = torch.broadcast_tensors(a, a, da, da)[0], b, da, db
    p, scale = x.shape[-1], _column_scale(b)
    m = _generator(a, b, scale, alpha)
    dm = torch.zeros_like(m.expand(torch.broadcast_shapes(m.shape, da.shape[:-2] + m.shape[-2:]))).clone()
    dm[..., :p, :p] = da / (alpha + 1)
    dm[..., :p, p:] = -(db.mT @ b + b.mT @ db) / scale
    block, dblock = _frechet_exp(m, dm)
    y = _combine(x, b / scale, block[..., :p])
    dy = _combine(x, b / scale, dblock[..., :p]) + (db / scale) @ block[..., p:, :p]
    if alpha == 0:
        return dy
    h, dh = _frechet_exp(alpha / (alpha + 1) * a, alpha / (alpha + 1) * da)
    return dy @ h + y @ dh


def _frechet_exp(m: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """expm(M) and its derivative along E, from one exponential of [[M, E], [0, M]] (Mathias 1996)."""
    k = m.shape[-1]
    m, e = torch.broadcast_tensors(m, e)
    top = torch.cat([m, e], -1)
    both = expm(torch.cat([top, torch.cat([torch.zeros_like(m), m], -1)], -2))
    return both[..., :k, :k], both[..., :k, k:]


# --- parallel transport ---------------------------------------------------------------------------------------------


def parallel_transport(x: Tensor, u: Tensor, v: Tensor, alpha: float) -> Tensor:
    """Carry v along the geodesic from x with velocity u to its end, by the Levi-Civita connection of the metric.

    In the moving frame, v(t) = G(t) w(t) H(t), the equation v' = S(γ', v) becomes w' = 𝓛w with the constant map

        𝓛(A₂, B₂) = ((½ − φ)[A₂, A] + ½(BᵀB₂ − B₂ᵀB),  ½κ(B₂A − BA₂)),

    skew-adjoint in the metric, so v(1) = G·(exp(𝓛)w)·H exactly. Both exponentials are applied, not formed, by Taylor
    series over substeps.
    """
    (a, b), (a2, b2) = split(x, u), split(x, v)
    kappa, phi = 1 / (alpha + 1), alpha / (alpha + 1)
    size = float(frobenius_norm(u.detach()).max()) if u.numel() else 0.0

    def connection(w: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a2, b2 = w
        return (
            (0.5 - phi) * (a2 @ a - a @ a2) + (b.mT @ b2 - b2.mT @ b) / 2,
            kappa / 2 * (b2 @ a - b @ a2),
        )

    def rotation(w: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # Ω(xA₂ + B₂), by its parts along x and off it
        a2, b2 = w
        return kappa * a @ a2 - b.mT @ b2, b @ a2

    w = _exp_action(connection, (a2, b2), size * (2 + abs(0.5 - phi) * 2 + kappa))
    w = _exp_action(rotation, w, size * (1 + kappa))
    y = x @ w[0] + w[1]
    return y if alpha == 0 else y @ expm(phi * a)


def _exp_action(
    operator: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]], w: tuple[Tensor, Tensor], bound: float
) -> tuple[Tensor, Tensor]:
    """exp(operator) w by Taylor series over substeps of norm at most 1; ``bound`` is a bound on the operator's norm."""
    substeps = max(1, math.ceil(bound))
    terms = 20 if w[0].dtype == torch.float64 else 12  # 1/20! = 4e-19
    for _ in range(substeps):
        term = w
        for k in range(1, terms + 1):
            first, second = operator(term)
            term = (first / (k * substeps), second / (k * substeps))
            w = (w[0] + term[0], w[1] + term[1])
    return w


# --- logarithm ------------------------------------------------------------------------------------------------------


class _SkewExponential:
    """Functions of a real skew-symmetric matrix through the eigenvectors of the Hermitian −iΩ."""

    def __init__(self, omega: Tensor) -> None:
        self.angles, self.vectors = torch.linalg.eigh(-1j * omega)

    def expm(self) -> Tensor:
        return ((self.vectors * torch.exp(1j * self.angles).unsqueeze(-2)) @ self.vectors.mH).real

    def mean(self) -> Tensor:
        """∫₀¹ expm(sΩ) ds."""
        weights = torch.exp(0.5j * self.angles) * torch.sinc(self.angles / (2 * math.pi))
        return ((self.vectors * weights.unsqueeze(-2)) @ self.vectors.mH).real

    def psi(self, e: Tensor, sign: float = 1.0) -> Tensor:
        """∫₀¹ expm(−sσΩ) E expm(sσΩ) ds, σ = ``sign``: the left-trivialized derivative of expm at σΩ."""
        x = sign * (self.angles.unsqueeze(-1) - self.angles.unsqueeze(-2))
        weights = torch.exp(-0.5j * x) * torch.sinc(x / (2 * math.pi))
        inner = self.vectors.mH @ e.to(self.vectors.dtype) @ self.vectors
        return (self.vectors @ (weights * inner) @ self.vectors.mH).real


class _Differential:
    """L(δ) = Gᵀ D exp_x(u)[δ] Hᵀ at x = [I; 0] of size m×p, with its adjoint and inverse. No autograd.

    L(δ) = ψ(Ω)[Ω(δ)] x + x ψ(−φA)[φ δA], with ψ as in :class:`_SkewExponential`. It is the identity at u = 0 and
    singular at conjugate points only.
    """

    def __init__(self, u: Tensor, alpha: float) -> None:
        self.p = u.shape[-1]
        self.kappa, self.phi = 1 / (alpha + 1), alpha / (alpha + 1)
        self.left = _SkewExponential(self._omega(u))
        self.right = _SkewExponential(self.phi * u[..., : self.p, :])

    def _omega(self, u: Tensor) -> Tensor:
        m, p = u.shape[-2], self.p
        omega = u.new_zeros(*u.shape[:-2], m, m)
        omega[..., :p, :p] = self.kappa * u[..., :p, :]
        omega[..., p:, :p] = u[..., p:, :]
        omega[..., :p, p:] = -u[..., p:, :].mT
        return omega

    def end(self) -> Tensor:
        """exp_x(u)."""
        return self.left.expm()[..., : self.p] @ self.right.expm()

    def pull_back(self, v: Tensor) -> Tensor:
        """Gᵀ v Hᵀ for v tangent at the end, made exactly tangent at x."""
        w = self.left.expm().mT @ v @ self.right.expm().mT
        return torch.cat([skew(w[..., : self.p, :]), w[..., self.p :, :]], -2)

    def apply(self, delta: Tensor) -> Tensor:
        result = self.left.psi(self._omega(delta))[..., : self.p].clone()
        result[..., : self.p, :] += self.phi * self.right.psi(delta[..., : self.p, :], -1.0)
        return result

    def adjoint(self, d: Tensor) -> Tensor:
        p = self.p
        full = torch.zeros_like(self.left.vectors.real)
        full[..., :, :p] = d
        s = self.left.psi(skew(full), -1.0)
        top = self.kappa * s[..., :p, :p] + self.phi * self.right.psi(skew(d[..., :p, :]))
        return torch.cat([top, 2 * s[..., p:, :p]], -2)

    def solve(self, d: Tensor, transpose: bool = False) -> Tensor:
        """L⁻¹d or L⁻ᵀd (least-norm where singular) by conjugate gradients on the normal equations."""
        forward, backward = (self.adjoint, self.apply) if transpose else (self.apply, self.adjoint)
        result = torch.zeros_like(d)
        residual = d
        direction = gradient = backward(residual)
        size = start = gradient.square().sum((-2, -1), keepdim=True)
        tiny = torch.finfo(d.dtype).tiny
        for _ in range(200):
            if not bool((size > 1e-28 * start + tiny).any()):
                break
            image = forward(direction)
            step = size / image.square().sum((-2, -1), keepdim=True).clamp_min(tiny)
            result = result + step * direction
            residual = residual - step * image
            gradient = backward(residual)
            previous, size = size, gradient.square().sum((-2, -1), keepdim=True)
            direction = gradient + size / previous.clamp_min(tiny) * direction
        return result


def _shoot(y: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """u with exp(u) = y from x = [I; 0], both m×p, and the residuals ‖exp(u) − y‖. Newton's method on a path to y.

    Each iteration moves the end ỹ of the geodesic a bounded way towards y, along P_ỹ(y), by solving
    D exp[δ] = that. Near y it is Newton's method.
    """
    p = y.shape[-1]
    u = torch.zeros_like(y)
    best, best_residual = u, torch.full(y.shape[:-2], math.inf, dtype=y.dtype, device=y.device)
    tolerance = 20 * torch.finfo(y.dtype).eps * math.sqrt(y.shape[-2] * max(1, p))
    generator = torch.Generator().manual_seed(0)
    for _ in range(_MAX_ITERATIONS):
        differential = _Differential(u, alpha)
        end = differential.end()
        residual = frobenius_norm(end - y)
        better = residual < best_residual
        best = torch.where(better[..., None, None], u, best)
        # one step of Newton's method beyond the tolerance costs little and polishes; then nothing improves any more
        if bool(((best_residual <= tolerance) | (~better & (best_residual < 1e-9))).all()):
            break
        best_residual = torch.where(better, residual, best_residual)
        error = project_tangent(end, y)
        length = frobenius_norm(error)
        # y opposite to ỹ: every direction leads there, so take one, the same each time
        stuck = (length < 1e-8 * residual) & (residual > 1e-3)
        if bool(stuck.any()):
            kick = torch.randn(y.shape, dtype=y.dtype, generator=generator).to(y.device)
            error = torch.where(stuck[..., None, None], project_tangent(end, kick), error)
            length = frobenius_norm(error)
        error = error * (_STRIDE / length.clamp_min(_STRIDE))[..., None, None]
        delta = differential.solve(differential.pull_back(error))
        # near a conjugate point the solution can be huge: the path is then lost in any case
        size = frobenius_norm(delta)
        u = u + delta * (4 * _STRIDE / size.clamp_min(4 * _STRIDE))[..., None, None]
    return best, best_residual


class _InverseDifferential(torch.autograd.Function):
    """r ↦ the δ with D exp_x(u)[δ] = P(r), for constant x and u: the linear map that makes :func:`log` differentiable.

    In the basis q of span[x, y] (whose first p columns are x), r has the part qᵀr, where :class:`_Differential`
    inverts, and a part r⊥ off that span, on which D exp acts as Z ↦ Z·K, K = ∫₀¹ xᵀexpm(sΩ)x ds, before H.
    """

    @staticmethod
    def forward(r: Tensor, q: Tensor, u: Tensor, end: Tensor, alpha: float) -> Tensor:
        return _invert(r, q, u, end, alpha, transpose=False)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, q, u, end, ctx.alpha = inputs
        ctx.save_for_backward(q, u, end)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, u, end = ctx.saved_tensors
        return _invert(grad_outputs[0], q, u, end, ctx.alpha, transpose=True), None, None, None, None


def _invert(r: Tensor, q: Tensor, u: Tensor, end: Tensor, alpha: float, transpose: bool) -> Tensor:
    p = u.shape[-1]
    differential = _Differential(u, alpha)
    inside, h = q.mT @ r, differential.right.expm()
    outside = r - q @ inside
    k = differential.left.mean()[..., :p, :p]

    def tangent(w: Tensor) -> Tensor:  # the orthogonal projection at x = [I; 0]
        return torch.cat([skew(w[..., :p, :]), w[..., p:, :]], -2)

    g = differential.left.expm()
    if transpose:
        w = g @ differential.solve(tangent(inside), transpose=True) @ h
        return q @ project_tangent(end, w) + solve_right(outside, k.mT) @ h
    solved = differential.solve(tangent(g.mT @ project_tangent(end, inside) @ h.mT))
    return q @ solved + solve_right(outside @ h.mT, k)


def log(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """The tangent vector u at x with Exp_x(u) = y, by shooting in span[x, y], in float64. Once differentiable.

    The geodesic between points within the injectivity radius stays in the span of both frames (it is fixed by the
    isometries that fix both), so everything happens in min(n, 2p) dimensions. Unlike p-shooting (Zimmermann & Hüper
    2022), whose steps approximate the differential of exp by a transport, the steps are Newton's, with the exact
    differential. Within the injectivity radius the result is the logarithm; beyond it, it is the velocity of a
    geodesic that joins the points, not necessarily the shortest.

    Raises:
        LogNotConvergedError: no such geodesic was found, for one of the pairs of the batch.
    """
    dtype = x.dtype
    x, y = torch.broadcast_tensors(x, y)
    if dtype == torch.float64:
        x64, y64 = x, y
    else:  # the exactly orthonormal frames nearest to what float32 can hold
        x64, y64 = polar_factor(x.double()), polar_factor(y.double())
    if x.numel() == 0:
        return torch.zeros_like(x)
    p = x.shape[-1]
    with torch.no_grad():
        # Householder QR makes the later columns orthogonal to x also where y adds no new direction
        q = torch.linalg.qr(torch.cat([x64, y64], -1)).Q
        q = torch.cat([x64, q[..., p:]], -1)
        reduced = q.mT @ y64
        same = (x64 == y64).flatten(-2).all(-1)
        u, residual = _shoot(reduced, alpha)
        u = torch.where(same[..., None, None], torch.zeros_like(u), u)
        worst = float(torch.where(same, 0.0, residual).max())
        if not worst <= 1e-9:
            raise LogNotConvergedError(
                f"no geodesic from x to y was found: the best one ends {worst:.2g} from y; the points are beyond the "
                "injectivity radius, at each other's cut locus, or in different components",
                worst,
            )
        end = _Differential(u, alpha).end()
        full = q @ u
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        # one more Newton step, zero in value, carries the derivative: see _InverseDifferential
        a, b = split(x64, full)
        start = x64 @ a + b
        delta = _InverseDifferential.apply(y64 - exp(x64, start, alpha), q, u, end, alpha)
        assert isinstance(delta, Tensor)
        full = start + (delta - delta.detach())
    return full.to(dtype)
