"""Scale-free × equivariant × projected: what each of the three adds, from the arms that have some of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .statistics import PairedDifference, adjust, paired_difference

__all__ = ["Effect", "factorial_effects", "length_ratios"]


@dataclass(frozen=True)
class Effect:
    """What a factor adds, with the others held fixed.

    Attributes:
        difference: with the factor − without, a value a seed, Holm-adjusted over the factors.
    """

    factor: str
    difference: PairedDifference


def factorial_effects(
    values: Mapping[str, Mapping[int, float]], design: Mapping[str, Mapping[str, bool]], higher_is_better: bool
) -> tuple[Effect, ...]:
    """Main effects of an incomplete two-level factorial, within each seed by least squares: the seed is a block.

    Two factors that the arms cross fully have their interaction in the model, in centred coding: without it, what the
    two do together would be read as the effect of a third factor that only some of those arms have. So for `FACTORIAL`
    "scale-free" is riemannian-adam minus rsgd, and each of the other two is the mean of its two differences. A factor
    whose effect the arms cannot tell from the others' is left out, as is a seed that lacks an arm.

    Args:
        values: arm -> seed -> value.
        design: arm -> factor -> whether the arm has it.

    Raises `ValueError` for an arm without a design.

    Example:
        >>> both, one, none = ({"a": a, "b": b} for a, b in ((True, True), (True, False), (False, False)))
        >>> design = {"both": both, "only a": one, "none": none}
        >>> values = {"both": {0: 5.0, 1: 6.5}, "only a": {0: 4.0, 1: 5.0}, "none": {0: 1.0, 1: 1.0}}
        >>> [(effect.factor, effect.difference.mean) for effect in factorial_effects(values, design, True)]
        [('a', 3.5), ('b', 1.25)]
    """
    if unknown := sorted(values.keys() - design.keys()):
        raise ValueError(f"values must be of arms in the design, found {', '.join(unknown)}")
    arms = [arm for arm in design if values.get(arm)]
    if not arms:
        return ()
    factors = list(design[arms[0]])
    seeds = sorted(set.intersection(*(set(values[arm]) for arm in arms)))
    levels = np.array([[float(design[arm][factor]) for factor in factors] for arm in arms])
    centred = 2 * levels - 1
    crossed = [
        centred[:, i] * centred[:, j]
        for i, j in itertools.combinations(range(len(factors)), 2)
        if _fully_crossed(levels, i, j)
    ]
    matrix = np.column_stack([np.ones(len(arms)), levels, *crossed])
    inverse = np.round(np.linalg.pinv(matrix), 12)  # the weights are simple fractions: equal values cancel exactly
    # a coefficient is estimable where it is a row-space functional: pinv·matrix has that unit row
    identity = np.eye(matrix.shape[1])
    estimable = [np.allclose(row, unit, atol=1e-9) for row, unit in zip(inverse @ matrix, identity, strict=True)]
    found = {}
    for row, factor in enumerate(factors, start=1):
        if estimable[row]:
            contrast = {seed: float(inverse[row] @ [values[arm][seed] for arm in arms]) for seed in seeds}
            found[factor] = paired_difference(contrast, dict.fromkeys(seeds, 0.0), higher_is_better)
    return tuple(Effect(factor, difference) for factor, difference in adjust(found).items())


def _fully_crossed(levels: np.ndarray, i: int, j: int) -> bool:
    """Whether at some levels of all other factors there is an arm for each of the four levels of these two."""
    others = np.delete(levels, [i, j], axis=1)
    pairs: dict[tuple[float, ...], set[tuple[float, float]]] = {}
    for own, rest in zip(levels, others, strict=True):
        pairs.setdefault(tuple(rest), set()).add((own[i], own[j]))
    return any(len(found) == 4 for found in pairs.values())


def length_ratios(lengths: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """arm -> geometric mean of its step lengths ÷ that of the reference's; arms that did not move are left out."""
    if not lengths.get(reference):
        return {}
    base = float(np.mean(np.log(lengths[reference])))
    return {arm: float(np.exp(np.mean(np.log(own)) - base)) for arm, own in lengths.items() if own and min(own) > 0}
