"""Saved optimizer state, matched to the parameters it is loaded for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import ManifoldOptimizer

__all__ = ["loadable_state"]


def loadable_state(optimizer: ManifoldOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with the parameters of every group in the optimizer's order, by name where both sides have names.

    Raises:
        ValueError: it does not fit; every reason is listed.
    """
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}")
    problems, ordered = [], []
    for g, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        names, saved_names = group.get("param_names"), saved.get("param_names")
        indices = list(saved["params"])
        if names and saved_names:
            place = dict(zip(saved_names, indices, strict=True))
            problems += [f"{name!r} has no saved state (group {g})" for name in names if name not in place]
            left = [name for name in saved_names if name not in set(names)]
            problems += [f"{name!r} is saved, but is not in group {g}: is it frozen or renamed?" for name in left]
            indices = [place[name] for name in names if name in place]
            saved = {**saved, "params": indices, "param_names": list(names)}
        elif len(indices) != len(group["params"]):
            problems.append(
                f"group {g} was saved with {len(indices)} parameters and has {len(group['params'])}; pass "
                "named parameters to both optimizers to learn which"
            )
        here, there = group["manifold"], saved.get("manifold")
        if repr(here) != str(there):
            problems.append(f"group {g} was saved with manifold {there} and has {here!r}")
        ordered.append({**saved, "manifold": here})
        if len(indices) == len(group["params"]):
            for i, (p, index) in enumerate(zip(group["params"], indices, strict=True)):
                name = repr(names[i]) if names else f"parameter {i} of group {g}"
                problems += _misfits(name, p, state_dict["state"].get(index, {}))
    if problems:
        raise ValueError("this state does not fit the optimizer, nothing was loaded:\n  " + "\n  ".join(problems))
    return {**state_dict, "param_groups": ordered}


def _misfits(name: str, p: Tensor, state: dict[str, Any]) -> list[str]:
    found = []
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim < 1:
            continue
        whole = tuple(value.shape) == tuple(p.shape)
        # arrays that are kept a frame share the batch dimensions alone
        per_frame = value.ndim == p.ndim and value.shape[:-2] == p.shape[:-2] and key != "exp_avg"
        if not whole and not per_frame:
            found.append(f"{name} has shape {tuple(p.shape)}, its saved {key} {tuple(value.shape)}")
        elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
            found.append(f"the saved {key} of {name} has NaN or infinite entries")
    return found
