"""What theory says that weight decay does to queries and keys: from the start, the rule and the schedule alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Setting", "deviations", "held_spectrum", "limits", "predictions"]


@dataclass(frozen=True)
class Setting:
    """One run: what it has, and the decay of each step, counted from 0, up to the last of the ``marks`` measured.

    ``held``: the loss, if any, is ½‖W_Q W_Kᵀ − M‖_F², M the circuit at the start. ``own_rule``: a step is
    W ← (1 − lr·λ)W − lr·G, and not another optimizer's.
    """

    gradient: bool
    constrained: bool
    held: bool
    own_rule: bool
    lr: float
    decay: Callable[[int], float]
    marks: list[int]


def held_spectrum(sigma: Tensor, lr: float, decay: Callable[[int], float], marks: list[int]) -> Tensor:
    """Singular values of a circuit that is held at ``sigma`` (heads, p) while its balanced factors decay, at ``marks``.

    For W_Q = U√S, W_K = V√S the flow of ½‖W_Q W_Kᵀ − UΣVᵀ‖² + ½λ(‖W_Q‖² + ‖W_K‖²) is s' = 2s(σ − λ − s), a logistic
    that ends at max(σ − λ, 0): with c = σ − λ, s(t) = s e^{2ct}/(1 + s(e^{2ct} − 1)/c) (Saxe, McClelland & Ganguli,
    "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks", 2014, here with decay). A
    step lasts lr.

    Example:
        >>> held_spectrum(torch.tensor([[2.0, 0.3]]), 0.1, lambda step: 0.5, [0, 1000])[-1].round(decimals=4)
        tensor([[1.5000, 0.0000]])
    """
    path, now, at = [], sigma, 0
    for mark in marks:
        for step in range(at, mark):
            c = sigma - decay(step)
            grown = torch.special.expm1(2 * lr * c)
            # its limit at c = 0, where decay just cancels the pull
            share = torch.where(c == 0, torch.full_like(c, 2 * lr), grown / torch.where(c == 0, 1.0, c))
            now = now * (grown + 1) / (1 + now * share)
        at = mark
        path.append(now)
    return torch.stack(path)


def predictions(measured: Mapping[str, Tensor], run: Setting) -> dict[str, Tensor]:
    """Of some of the quantities ``measured``, in their shapes; no measurement after the first enters.

    Example:
        >>> start = {"query_norm": torch.ones(3, 1), "balance": torch.full((3, 1), 2.0)}
        >>> rest = {name: torch.ones(3, 1) for name in ("key_norm", "query_condition", "key_condition", "moved")}
        >>> run = Setting(False, False, False, True, lr=0.1, decay=lambda step: 1.0, marks=[0, 1, 2])
        >>> predictions({**start, **rest, "spectrum": torch.ones(3, 1, 1)}, run)["balance"].flatten()
        tensor([2.0000, 1.6200, 1.3122], dtype=torch.float64)
    """
    start = {quantity: values[:1] for quantity, values in measured.items()}
    stays = {quantity: value.expand_as(measured[quantity]) for quantity, value in start.items()}
    if run.constrained:
        kept = ("query_norm", "key_norm", "query_condition", "key_condition", "spectrum")
        if not run.gradient or run.held:  # nothing pulls at the frames: they are where they want to be
            kept = (*kept, "balance", "moved")
        return {quantity: stays[quantity] for quantity in kept}
    if not run.own_rule:
        return {}
    # the share of a factor that the decay up to each mark leaves
    factors = torch.tensor([1 - run.lr * run.decay(step) for step in range(run.marks[-1])], dtype=torch.float64)
    left = torch.cat([torch.ones(1, dtype=torch.float64), factors.cumprod(0)])[run.marks]
    shrink, twice = left[:, None], left[:, None].square()
    if not run.gradient:
        return {
            "query_norm": start["query_norm"] * shrink,
            "key_norm": start["key_norm"] * shrink,
            # a bias decays with its matrix
            "balance": start["balance"] * twice,
            "query_condition": stays["query_condition"],
            "key_condition": stays["key_condition"],
            "spectrum": start["spectrum"] * twice[..., None],
            "moved": (1 - shrink).expand_as(measured["moved"]),
        }
    predicted = {"balance": start["balance"] * twice}
    if run.held:
        predicted["spectrum"] = held_spectrum(start["spectrum"][0], run.lr, run.decay, run.marks)
    return predicted


def limits(measured: Mapping[str, Tensor], run: Setting) -> dict[str, Tensor]:
    """What the predictions tend to: "balance" for small steps, at every mark, and "spectrum" at the end of time.

    Example:
        >>> start = {"balance": torch.full((3, 1), 2.0), "spectrum": torch.tensor([[[3.0, 0.5]]]).expand(3, 1, 2)}
        >>> run = Setting(True, False, True, True, lr=0.1, decay=lambda step: 1.0, marks=[0, 1, 2])
        >>> limits(start, run)["spectrum"]
        tensor([[2., 0.]])
    """
    if run.constrained or not run.own_rule:
        return {}
    decays = [run.decay(step) for step in range(run.marks[-1])]
    time = torch.tensor([0.0, *decays], dtype=torch.float64).cumsum(0)[run.marks] * run.lr
    found = {"balance": measured["balance"][:1] * (-2 * time)[:, None].exp()}
    if run.gradient and run.held and len(set(decays)) == 1:
        found["spectrum"] = (measured["spectrum"][0] - decays[0]).clamp(min=0)
    return found


def deviations(measured: Mapping[str, Tensor], predicted: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference over the largest size of the prediction, of what has a row as of the last measurement.

    Where the prediction is 0, it is held against what the quantity is made of. NaN without a finite number.

    Example:
        >>> deviations({"query_norm": torch.tensor([[2.0], [1.5]])}, {"query_norm": torch.tensor([[2.0], [1.0]])})
        {'query_norm': 0.25}
    """
    natural = {"balance": float(measured["query_norm"].max()) ** 2 if "query_norm" in measured else 0.0, "moved": 1.0}
    found = {}
    for quantity, value in predicted.items():
        seen = measured[quantity] if value.ndim == measured[quantity].ndim else measured[quantity][-1]
        found[quantity] = _deviation(seen, value, natural.get(quantity, 0.0))
    return found


def _deviation(measured: Tensor, predicted: Tensor, natural: float) -> float:
    known = torch.isfinite(predicted) & torch.isfinite(measured)
    if not bool(known.any()):
        return math.nan
    size, off = float(predicted[known].abs().max()), float((measured - predicted)[known].abs().max())
    size = size if size > 1e-12 * natural else natural
    return off / size if size > 0 else off
