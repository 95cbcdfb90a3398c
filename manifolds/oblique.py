"""Matrices of unit columns."""

from __future__ import annotations

from dataclasses import dataclass

from .sphere import UnitVectors

__all__ = ["Oblique"]


@dataclass(frozen=True)
class Oblique(UnitVectors):
    """OB(n, p) = {X ∈ ℝⁿˣᵖ : diag XᵀX = 1}: n×p matrices whose columns have length 1.

    The product of p spheres Sⁿ⁻¹ with the metric tr UᵀV; every map acts on the columns as :class:`Sphere` does, and
    ``dist`` is the root of the sum of the squared angles. Any n ≥ 1 and p: p may exceed n. ``transport`` is parallel
    transport, exact and isometric. Absil & Gallivan, "Joint diagonalization on the oblique manifold for independent
    component analysis" (2006).
    """

    ndim = 2
    _axis = -2
