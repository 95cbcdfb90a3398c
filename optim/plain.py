"""Plain parameters, stepped by torch's own arithmetic."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

__all__ = ["adamw_step", "found_inf_adamw_step", "sgd_step"]


def adamw_step(states: MutableMapping[Tensor, dict[str, Any]], params: Sequence[Tensor], group: dict[str, Any]) -> None:
    """The step of :class:`torch.optim.AdamW`, to the last bit, with the options of ``group``."""
    keys = _begin_adamw(states, params, group)
    columns = {key: [states[p][key] for p in params] for key in keys}
    columns |= {"param": list(params), "grad": [p.grad for p in params if p.grad is not None]}
    has_complex = any(torch.is_complex(p) for p in params)
    _adamw(states, params, group, columns, foreach=group["foreach"], has_complex=has_complex)


def found_inf_adamw_step(
    states: MutableMapping[Tensor, dict[str, Any]], params: Sequence[Tensor], group: dict[str, Any], found_inf: Tensor
) -> None:
    """:func:`adamw_step` without a look at any value, by torch's fused kernel; equal to it to rounding.

    Args:
        found_inf: a float32 tensor of no dimension on the device of the parameters. Where it is 1, nothing changes.
    """
    keys = _begin_adamw(states, params, group)
    columns: dict[str, list[Tensor]] = {key: [] for key in ("param", "grad", *keys)}
    copied: list[tuple[Tensor, Tensor]] = []
    for p in params:
        row = {"param": p, "grad": p.grad, **{key: states[p][key] for key in keys}}
        # the kernel reads memory as it lies, whatever the strides
        straight = all(t.is_contiguous() for t in row.values())
        for key, t in row.items():
            columns[key].append(t if straight else t.contiguous())
            if key != "grad" and columns[key][-1] is not t:
                copied.append((t, columns[key][-1]))
    _adamw(states, params, group, columns, fused=True, foreach=False, capturable=True, found_inf=found_inf)
    for t, copy in copied:
        t.copy_(copy)


def _begin_adamw(
    states: MutableMapping[Tensor, dict[str, Any]], params: Sequence[Tensor], group: dict[str, Any]
) -> list[str]:
    """Begin the state of parameters that have none; the keys of its moments."""
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    for p in params:
        state = states[p]
        if not state:
            # a captured step counts on the device
            state["step"] = torch.zeros((), device=p.device if group.get("capturable") else "cpu")
            for key in keys:
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return keys


def _adamw(
    states: MutableMapping[Tensor, dict[str, Any]],
    params: Sequence[Tensor],
    group: dict[str, Any],
    columns: dict[str, list[Tensor]],
    **how: Any,
) -> None:
    """torch's arithmetic on parameters, gradients and moments, with the options of ``group``."""
    adamw(
        columns["param"],
        columns["grad"],
        columns["exp_avg"],
        columns["exp_avg_sq"],
        columns.get("max_exp_avg_sq", []),
        [states[p]["step"] for p in params],
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        **how,
    )


def sgd_step(states: MutableMapping[Tensor, dict[str, Any]], params: Sequence[Tensor], group: dict[str, Any]) -> None:
    """The step of :class:`torch.optim.SGD`, to the last bit, with the options of ``group``."""
    buffers = [states[p].get("momentum_buffer") for p in params]
    sgd(
        list(params),
        [p.grad for p in params if p.grad is not None],
        buffers,
        foreach=group["foreach"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    if group["momentum"] != 0:
        for p, buffer in zip(params, buffers, strict=True):
            states[p]["momentum_buffer"] = buffer
