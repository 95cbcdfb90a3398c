"""Memory of attention on long inputs: fused kernels make no matrix of queries by keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..attention import Rotary, StiefelAttention
from .memory import allocations
from .report import Outcome, Table

__all__ = ["TOKENS", "measure_attention"]

TOKENS = (2048, 4096)
WIDTH, HEADS = 512, 8

NOTES = (
    f"Most memory in use during a forward and a backward pass, of width {WIDTH} with {HEADS} heads and one sequence, "
    "in MiB, besides parameters and input; float32. One matrix of queries by keys for every head would be 128 MiB at "
    "2048 tokens, 512 MiB at 4096.",
    "Counted by torch's allocator; workspaces inside the kernels are not.",
)


def measure_attention(
    tokens: Sequence[int] = TOKENS,
    *,
    device: str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Peak memory of :class:`~geodescent.attention.StiefelAttention` and of torch's attention.

    Example:
        >>> outcome = measure_attention([16])
        >>> outcome.data["peaks"]["StiefelAttention"]["16"] > 0
        True
    """
    torch.manual_seed(seed)
    plain = StiefelAttention(WIDTH, HEADS, device=device)
    rotary = StiefelAttention(WIDTH, HEADS, num_kv_heads=2, rotary=Rotary(), device=device)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "StiefelAttention": lambda x: plain(x, x, x, need_weights=False)[0],
        "StiefelAttention, causal": lambda x: plain(x, x, x, need_weights=False, is_causal=True)[0],
        "StiefelAttention, rotary, grouped, causal": lambda x: rotary(x, x, x, need_weights=False, is_causal=True)[0],
        "nn.MultiheadAttention": lambda x: theirs(x, x, x, need_weights=False)[0],
        "StiefelAttention, with weights": lambda x: plain(x, x, x, need_weights=True)[0],
    }
    peaks: dict[str, dict[str, int]] = {name: {} for name in runs}
    for count in tokens:
        progress(f"attention: {count} tokens")
        x = torch.randn(1, count, WIDTH, device=device)
        for name, forward in runs.items():
            peaks[name][str(count)] = allocations(lambda f=forward, x=x: f(x).sum().backward(), device).peak
    rows = tuple((name, *(f"{peaks[name][str(count)] / 2**20:.0f}" for count in tokens)) for name in runs)
    header = ("layer", *(f"{count} tokens" for count in tokens))
    table = Table("Peak memory of attention, MiB", header, rows, NOTES)
    return Outcome("attention", (table,), {"width": WIDTH, "heads": HEADS, "peaks": peaks})
