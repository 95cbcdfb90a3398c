"""The options of a group, checked once for all optimizers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..manifolds import Manifold

__all__ = ["check_options"]


def check_options(group: dict[str, Any], choices: dict[str, tuple[str, ...]]) -> None:
    """Raise a ``ValueError`` that names the option of ``group`` that is out of its range.

    Args:
        choices: the options that are one of a few words, beside those that all optimizers have.
    """

    def need(ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise ValueError(f"{name} must be {wanted}, found {group[name]!r}")

    lr = group["lr"]
    if isinstance(lr, Tensor):
        need(lr.numel() == 1, "lr", "a number or a tensor of one element")
    need(0 <= float(lr) < math.inf, "lr", "a finite number of at least 0")
    if "betas" in group:
        betas = group["betas"]
        need(len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)")
    for name in ("eps", "weight_decay"):
        need(0 <= group.get(name, 0) < math.inf, name, "a finite number of at least 0")
    for name in ("momentum", "dampening"):
        need(0 <= group.get(name, 0) <= 1, name, "a number in [0, 1]")
    radius = group["trust_radius"]
    need(radius is None or radius > 0, "trust_radius", "a positive number, or None for no bound")
    for name, words in {"nonfinite": ("raise", "skip"), **choices}.items():
        need(group[name] in words, name, "one of " + ", ".join(map(repr, words)))
    need(group["manifold"] is None or isinstance(group["manifold"], Manifold), "manifold", "a Manifold object, or None")
    if group.get("decay") == "fused" and float(lr) * group["weight_decay"] >= 1:
        raise ValueError(
            f'weight_decay must be below 1/lr with decay="fused", found lr = {float(lr):g} and weight_decay = '
            f"{group['weight_decay']:g}: the decayed point passes the origin"
        )
