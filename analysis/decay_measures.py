"""What is measured of query and key factors while weight decay runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .decay_systems import Circuit, System
from .geometry import attention_geometry
from .spectra import condition_from

__all__ = ["QUANTITIES", "follow", "read_circuits"]

QUANTITIES = ("query_norm", "key_norm", "balance", "query_condition", "key_condition", "spectrum", "moved")


def read_circuits(module: Any, layout: Mapping[str, Any]) -> list[Circuit]:
    """Queries (heads, n, p), keys (heads, n, p) and the query bias (heads, p) of every layer, in float64.

    Example:
        >>> queries, keys, bias = read_circuits(nn.MultiheadAttention(8, 2), {})[0]
        >>> queries.shape, keys.dtype
        (torch.Size([2, 8, 4]), torch.float64)
    """
    circuits = []
    for layer in attention_geometry(module, ov=False, **layout).layers:
        q, k = layer.query_frames, layer.key_frames
        assert q is not None
        assert k is not None
        share = layer.num_heads // k.shape[0]
        bias = None if layer.query_bias is None else layer.query_bias.reshape(layer.num_heads, -1)
        circuits.append((q, k.repeat_interleave(share, 0), bias))
    return circuits


def follow(system: System, lr: float, decay: Callable[[int], float], marks: list[int], label: str) -> dict[str, Tensor]:
    """Step ``system`` with the decay of each step, counted from 0, and measure it at the steps ``marks``.

    Raises:
        ValueError: the weights are no longer finite; ``label`` says of which run.

    Example:
        >>> from geodescent.analysis.decay_systems import CircuitSystem
        >>> start = read_circuits(nn.MultiheadAttention(8, 2), {})
        >>> rows = follow(CircuitSystem(start, None, held=False), 0.5, lambda step: 1.0, [0, 2], "decay")
        >>> torch.allclose(rows["query_norm"][1], rows["query_norm"][0] / 4)
        True
    """
    rows: dict[str, list[Tensor]] = {quantity: [] for quantity in QUANTITIES}
    start = system.circuits()
    at = 0
    for mark in marks:
        for step in range(at, mark):
            system.step(lr, decay(step))
        at, now = mark, system.circuits()
        if not all(bool(torch.isfinite(part).all()) for circuit in now for part in circuit if part is not None):
            raise ValueError(f"{label}: weights are not finite after {mark} steps; lower lr, found {lr:g}")
        for quantity, value in _measure(start, now).items():
            rows[quantity].append(value)
    return {quantity: torch.stack(values) for quantity, values in rows.items()}


def _measure(start: list[Circuit], now: list[Circuit]) -> dict[str, Tensor]:
    columns: dict[str, list[Tensor]] = {quantity: [] for quantity in QUANTITIES}
    for (q0, k0, _), (q, k, bias) in zip(start, now, strict=True):
        gram_q, gram_k = q.mT @ q, k.mT @ k
        with_bias = gram_q if bias is None else gram_q + bias[..., :, None] * bias[..., None, :]
        _, r_q = torch.linalg.qr(q)
        _, r_k = torch.linalg.qr(k)
        moved = (q - q0).square().sum((-2, -1)) + (k - k0).square().sum((-2, -1))
        size = q0.square().sum((-2, -1)) + k0.square().sum((-2, -1))
        for quantity, value in (
            ("query_norm", gram_q.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()),
            ("key_norm", gram_k.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()),
            ("balance", torch.linalg.matrix_norm(with_bias - gram_k)),
            ("query_condition", _condition(r_q, q)),
            ("key_condition", _condition(r_k, k)),
            ("spectrum", torch.linalg.svdvals(r_q @ r_k.mT)),
            ("moved", (moved / size).sqrt()),
        ):
            columns[quantity].append(value)
    widest = max(s.shape[-1] for s in columns["spectrum"])
    columns["spectrum"] = [nn.functional.pad(s, (0, widest - s.shape[-1])) for s in columns["spectrum"]]
    return {quantity: torch.cat(values) for quantity, values in columns.items()}


def _condition(r: Tensor, w: Tensor) -> Tensor:
    """κ₂ of W = QR."""
    return condition_from(torch.linalg.svdvals(r), max(w.shape[-2:]), torch.finfo(w.dtype).eps)
