"""A parameter that knows its manifold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .linalg import default_atol
from .manifold import Manifold

__all__ = ["ManifoldParameter"]


class ManifoldParameter(nn.Parameter):
    """An ``nn.Parameter`` whose values are points of ``manifold``.

    It survives ``deepcopy``, ``pickle``, ``torch.save``, ``.to()`` and sharing between layers. Copying values in, as
    ``load_state_dict`` does, is checked like the constructor is.

    Where that ends: conversion keeps the values, so a float32 frame turned to float64 is orthonormal to about 2e-7
    until it is projected again, and ``load_state_dict(assign=True)`` and ``to_empty()`` put a plain parameter in its
    place. The layers of :mod:`geodescent.attention` mend both; a module of your own wraps or projects again, or names
    the manifold in the optimizer's group, which checks every frame it is given. Averages of frames, as
    ``torch.optim.swa_utils.AveragedModel`` takes them, are off the manifold: project them.

    Args:
        data: points in the trailing ``manifold.ndim`` dimensions; its storage is shared, as by ``nn.Parameter``.
        manifold: the manifold.
        requires_grad: as for ``nn.Parameter``.
        project: replace ``data`` by the nearest points first.

    Raises:
        NotOnManifoldError: ``data`` is off the manifold and ``project`` is false.
        ValueError: the shape of ``data`` cannot hold a point, as for a wide Stiefel frame.
    """

    manifold: Manifold

    def __new__(cls, data: Tensor, manifold: Manifold, requires_grad: bool = True, project: bool = False):
        if not isinstance(manifold, Manifold):
            raise TypeError(f"manifold must be a Manifold object, found {manifold!r}")
        data = data.detach()
        if project:
            data = manifold.project_point(data)
        else:
            manifold.check_point(data, name="data")
        return rebuild(data, requires_grad, manifold)

    def __init__(self, data: Tensor, manifold: Manifold, requires_grad: bool = True, project: bool = False) -> None:
        # nn.Parameter has no __init__; this one only shows type checkers the signature
        pass

    def __deepcopy__(self, memo: dict) -> ManifoldParameter:
        if id(self) in memo:
            return memo[id(self)]
        data = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = result = rebuild(data, self.requires_grad, self.manifold)
        return result

    def __reduce_ex__(self, protocol):
        return rebuild, (self.detach(), self.requires_grad, self.manifold)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ManifoldParameter on {self.manifold!r} containing:\n{self.detach()!r}"

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy values in, as ``load_state_dict`` does, and refuse values that are off the manifold."""
        if isinstance(other, Tensor) and other.shape == self.shape:
            atol = max(default_atol(self.dtype), default_atol(other.dtype))
            self.manifold.check_point(other.detach(), atol, name="the value to copy")
        return super().copy_(other, non_blocking)


def rebuild(data: Tensor, requires_grad: bool, manifold: Manifold) -> ManifoldParameter:
    """Build without a check, for data that comes from such a parameter, as in unpickling and conversions."""
    parameter = torch.Tensor._make_subclass(ManifoldParameter, data, requires_grad)
    parameter.manifold = manifold
    return parameter
