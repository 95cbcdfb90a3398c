"""Orthonormal weights for those who must use a plain optimizer: the polar factor of an unconstrained matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..manifolds import ManifoldParameter, Stiefel
from ..manifolds.linalg import compute_dtype, full_float32_products, polar_differential
from .orientation import Orientation

__all__ = ["PolarParametrization", "parametrize_stiefel"]


# an operator of its own, so that torch.compile and torch.export take the factorization as one node
@torch.library.custom_op("geodescent::polar_factor", mutates_args=())
def _polar(a: Tensor) -> Tensor:
    return Stiefel().project_point(a).contiguous()


@_polar.register_fake
def _(a: Tensor) -> Tensor:
    return a.new_empty(a.shape)


@full_float32_products()
def _polar_backward(ctx, grad: Tensor) -> Tensor:
    a, q = ctx.saved_tensors
    return polar_differential(a, q, grad)  # the differential is self-adjoint


_polar.register_autograd(
    _polar_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output)
)


class PolarParametrization(nn.Module):
    """W = A(AᵀA)^(−½), the polar factor of an unconstrained A: a ``torch.nn.utils.parametrize`` parametrization.

    Its derivative is taken by the Sylvester equation of the factor, HΩ + ΩH = QᵀdA − dAᵀQ for A = QH, in p×p, which
    is defined and well conditioned also where singular values coincide, as they all do at the start; only a nearly
    rank-deficient A makes it large. W does not change with the scale of A, so gradients of A are orthogonal to A, and
    under a plain optimizer A grows, which slows W down, unless weight decay holds it.

    Args:
        shape, groups: of the weight, see :class:`Orientation`.

    Example:
        >>> polar = PolarParametrization((3, 5))
        >>> w = polar(torch.randn(3, 5, dtype=torch.float64))
        >>> torch.allclose(w @ w.T, torch.eye(3, dtype=torch.float64))
        True
    """

    def __init__(self, shape: tuple[int, ...], groups: int = 1) -> None:
        super().__init__()
        self.orientation = Orientation(tuple(shape), groups)
        self.manifold = Stiefel()

    def forward(self, a: Tensor) -> Tensor:
        frame = _polar(self.orientation.to_frame(a).to(compute_dtype(a.dtype)))
        return self.orientation.to_weight(frame.to(a.dtype))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """An A whose polar factor is ``weight``: itself. What makes ``module.weight = w`` work.

        Raises:
            NotOnManifoldError: ``weight`` is not orthonormal.
        """
        self.manifold.check_point(self.orientation.to_frame(weight.detach()), name="the weight to assign")
        return weight

    def extra_repr(self) -> str:
        groups = f", groups={self.orientation.groups}" if self.orientation.groups != 1 else ""
        return f"{self.orientation.shape}{groups}, orientation={self.orientation.kind!r}"


def parametrize_stiefel(module: nn.Module, name: str = "weight") -> nn.Module:
    """Make a weight of ``module`` orthonormal whatever optimizer trains it: it becomes a polar factor.

    At once the weight is replaced by the nearest orthonormal one. ``module.parametrizations[name].original`` is what
    the optimizer must be given, so build it afterwards; assigning an orthonormal weight works, and
    ``torch.nn.utils.parametrize.remove_parametrizations(module, name)`` leaves the weight as it is. Prefer
    :class:`StiefelLinear` with ``RiemannianAdam`` where the optimizer is free: no decomposition in each forward pass,
    and no second matrix whose size matters. A module that shares the parameter is left with A.

    Args:
        module: its weight is (out, in), or the kernel (out, in/groups, *kernel) of a convolution, taken as a matrix
            (out/groups) × (in/groups · kernel) a group.
        name: of the weight.

    Returns:
        ``module``.

    Raises:
        ValueError: ``module`` has no parameter ``name``, or it is no real matrix, or constrained or parametrized
            already.

    Example:
        >>> linear = parametrize_stiefel(nn.Linear(5, 3))
        >>> optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     linear(torch.randn(7, 5)).exp().mean().backward()
        ...     optimizer.step()
        >>> torch.allclose(linear.weight @ linear.weight.T, torch.eye(3), atol=1e-6)
        True
    """
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"name: {name!r} of {type(module).__name__} is parametrized already")
    weight = getattr(module, name, None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim < 2:
        found = type(weight).__name__ if not isinstance(weight, Tensor) else f"{weight.dtype} {tuple(weight.shape)}"
        raise ValueError(
            f"name must be that of a real parameter of at least two dimensions, but {name!r} of "
            f"{type(module).__name__} is {found}"
        )
    if isinstance(weight, ManifoldParameter):
        raise ValueError(
            f"name: {name!r} of {type(module).__name__} is a ManifoldParameter, for a Riemannian optimizer"
        )
    groups = module.groups if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 1
    polar = PolarParametrization(tuple(weight.shape), groups)
    with torch.no_grad():
        weight.copy_(polar(weight))
    parametrize.register_parametrization(module, name, polar)
    return module
