"""Continuous symmetries of a transformer's weights: what gradients must satisfy, and what steps lose on them.

A symmetry moves some weights W together, W → W + tV(a) + O(t²) for a generator a, and leaves the loss alone. So the
gradient G is orthogonal to every vertical vector V(a), V*(G) = 0 (Noether; Kunin et al. 2021, "Neural mechanics"),
while a step D may have a vertical part, the orthogonal projection of D to {V(a)}, that does nothing to first order.
Plain gradient steps have none; elementwise preconditioning does.

An :class:`Orbit` is made from the weights by one of the functions of :mod:`.orbits` and then asked with
:func:`noether_residual` and :func:`vertical_part`. Weights are given as matrices that act on row vectors from the
right, (d, d_h) a head for W_Q, W_K and W_V and (d_h, d) for W_O; leading dimensions are batch (heads). ``nn.Linear``
and ``nn.MultiheadAttention`` keep the transposes: pass ``weight.T``. All arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._arrays import ratio
from ._result import Result
from .orbits import Arrays, Orbit


@dataclass(frozen=True, repr=False, eq=False)
class NoetherResidual(Result):
    """See :func:`noether_residual`. ``residual`` is V*(G); ``relative`` the worst of the batch, and ``batch`` all."""

    orbit: str
    relative: float
    absolute: float
    atol: float
    passed: bool
    batch: Tensor
    residual: Tensor

    _hidden: ClassVar = frozenset({"batch", "residual"})


@dataclass(frozen=True, repr=False, eq=False)
class VerticalPart(Result):
    """See :func:`vertical_part`. ``fraction`` is of the whole batch, ``batch`` of each element; ``part`` the vertical
    vectors by name, and ``generator`` the a with V(a) = part."""

    orbit: str
    fraction: float
    batch: Tensor
    part: Mapping[str, Tensor]
    generator: Tensor

    _hidden: ClassVar = frozenset({"batch", "part", "generator"})


def noether_residual(orbit: Orbit, gradients: Arrays, atol: float = 1e-8) -> NoetherResidual:
    """Is the gradient horizontal: how far is V*(G) from 0?

    ``relative`` is the vertical fraction ‖vertical part of G‖/‖G‖ over the weights of the orbit, from 0 for the
    gradient of an invariant loss to 1; ``absolute`` is ‖V*(G)‖_F, for comparison with formulas. A gradient of zero
    passes.

    Args:
        gradients: one a weight of the orbit, by the names of its weights and of their shapes. What a preconditioner
            made of them may be passed too, to see whether it keeps them horizontal.
        atol: bound on ``relative``.

    Raises:
        ValueError: keys or shapes that are not those of the weights; non-finite entries.

    Example:
        A loss of W_Q W_Kᵀ alone:

        >>> import torch
        >>> from geodescent.analysis import qk_orbit
        >>> generator = torch.Generator().manual_seed(0)
        >>> w_q, w_k = torch.randn(2, 6, 3, dtype=torch.float64, generator=generator).requires_grad_()
        >>> loss = (w_q @ w_k.T).sin().sum()
        >>> g_q, g_k = torch.autograd.grad(loss, (w_q, w_k))
        >>> orbit = qk_orbit(w_q, w_k)
        >>> noether_residual(orbit, {"w_q": g_q, "w_k": g_k}).passed
        True
        >>> noether_residual(orbit, {"w_q": g_q.sign(), "w_k": g_k.sign()}).passed
        False
    """
    given = orbit.read(gradients, "gradients")
    residual = orbit.adjoint(given)
    part = orbit.squares(orbit.vertical(orbit.solve(residual)))
    batch = ratio(part.sqrt(), orbit.squares(given).sqrt())
    relative = float(batch.max()) if batch.numel() else 0.0
    absolute = float(torch.linalg.vector_norm(residual))
    return NoetherResidual(orbit.name, relative, absolute, atol, relative <= atol, batch, residual)


def vertical_part(orbit: Orbit, step: Arrays) -> VerticalPart:
    """The share of a step that lies along the orbit, ‖vertical part‖/‖step‖ in the Frobenius norm over its weights.

    1 for a step that changes nothing to first order, 0 for a horizontal one. Random directions give about the square
    root of (dimension of the orbit)/(number of weights).

    Args:
        step: one a weight of the orbit, such as the difference of two checkpoints.

    Raises:
        ValueError: keys or shapes that are not those of the weights; non-finite entries.

    Example:
        >>> import torch
        >>> from geodescent.analysis import logit_shift_orbit
        >>> w_u = torch.zeros(5, 2)
        >>> vertical_part(logit_shift_orbit(w_u), {"w_u": torch.ones(5, 2)}).fraction
        1.0
    """
    given = orbit.read(step, "step")
    generator = orbit.solve(orbit.adjoint(given))
    part = orbit.vertical(generator)
    vertical, whole = orbit.squares(part), orbit.squares(given)
    fraction = float(ratio(vertical.sum().sqrt(), whole.sum().sqrt()))
    return VerticalPart(orbit.name, fraction, ratio(vertical.sqrt(), whole.sqrt()), part, generator)
