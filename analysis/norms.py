"""Norms in which a step can be steepest: the operator norms by name, and any other as a :class:`Norm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Lengths = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Norm:
    """A norm on the ambient space, by what weak duality asks of it.

    The three functions take one float64 point-shaped tensor, without batch dimensions.

    Args:
        name: how results call it.
        norm: ‖Δ‖, a tensor of one element.
        dual_norm: ‖G‖_* = max of ⟨G, Δ⟩ over ‖Δ‖ ≤ 1, a tensor of one element.
        lmo: the linear minimization oracle: a minimizer of ⟨G, Δ⟩ over ‖Δ‖ ≤ 1, of the shape of G.

    A certificate is as good as these: it checks at every point that it visits that the oracle's answer has
    ``norm`` ≤ 1 and attains −``dual_norm``, and raises a ``ValueError`` where they contradict one another.

    Example:
        The largest entry, whose dual is the sum of absolute values:

        >>> import torch
        >>> largest = Norm("largest entry", lambda d: d.abs().max(), lambda g: g.abs().sum(), lambda g: -g.sign())
        >>> g = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
        >>> float((g * largest.lmo(g)).sum()), float(-largest.dual_norm(g))
        (-7.0, -7.0)
    """

    name: str
    norm: Lengths
    dual_norm: Lengths
    lmo: Callable[[Tensor], Tensor]


def spectral_norm(delta: Tensor) -> Tensor:
    """σmax of ``(*batch, n, p)``."""
    return torch.linalg.svdvals(delta)[..., 0]


def nuclear_norm(g: Tensor) -> Tensor:
    """The sum of singular values of ``(*batch, n, p)``."""
    return torch.linalg.svdvals(g).sum(-1)


def _spectral_lmo(g: Tensor) -> Tensor:
    left, sigma, right = torch.linalg.svd(g, full_matrices=False)
    # directions that G does not see stay out: they would only spoil the tangency of what is made of this
    seen = sigma > torch.finfo(g.dtype).eps * max(g.shape[-2:]) * sigma[..., :1]
    return -(left * seen.unsqueeze(-2)) @ right


def _columns(delta: Tensor) -> Tensor:
    return torch.linalg.vector_norm(delta, dim=-2)


def _rows(delta: Tensor) -> Tensor:
    return torch.linalg.vector_norm(delta, dim=-1)


def _over(g: Tensor, length: Tensor) -> Tensor:
    return torch.where(length == 0, 0.0, -g / torch.where(length == 0, 1.0, length))


SPECTRAL = Norm("spectral", spectral_norm, nuclear_norm, _spectral_lmo)
ONE_TO_TWO = Norm(
    "1->2",
    lambda delta: _columns(delta).amax(-1),
    lambda g: _columns(g).sum(-1),
    lambda g: _over(g, _columns(g).unsqueeze(-2)),
)
TWO_TO_INF = Norm(
    "2->inf",
    lambda delta: _rows(delta).amax(-1),
    lambda g: _rows(g).sum(-1),
    lambda g: _over(g, _rows(g).unsqueeze(-1)),
)

_OPERATOR_NORMS = {norm.name: norm for norm in (SPECTRAL, ONE_TO_TWO, TWO_TO_INF)}
_OTHER_NAMES = {"one_to_two": ONE_TO_TWO, "two_to_inf": TWO_TO_INF}


def find_norm(norm: str | Norm) -> Norm | None:
    """The norm of this name; None for those of an inner product, "metric" and "frobenius".

    Raises:
        ValueError: an unknown name. TypeError: neither a name nor a :class:`Norm`.
    """
    if isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str):
        raise TypeError(f"norm must be a name or a Norm object, found {norm!r}")
    if norm in ("metric", "frobenius"):
        return None
    found = _OPERATOR_NORMS.get(norm) or _OTHER_NAMES.get(norm)
    if found is None:
        names = ", ".join(map(repr, ("metric", "frobenius", *_OPERATOR_NORMS)))
        raise ValueError(
            f"norm must be one of {names} ('one_to_two' and 'two_to_inf' are the last two) or a Norm object, "
            f"found {norm!r}"
        )
    return found
