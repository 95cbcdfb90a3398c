from typing import Any

import pytest
import torch
from geodescent.attention import Rotary, StiefelAttention
from geodescent.attention.kernels import attend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


def operators(layer, *inputs, **call):
    """Names of the operators that ran, forward and backward, and the largest single allocation in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        layer(*inputs, **call)[0].sum().backward()
    events = record.events()
    assert events is not None
    return {event.key for event in record.key_averages()}, max(event.self_cpu_memory_usage for event in events)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logit_scale": "spectrum"},
    {"frames": "whole", "constrain": "qkvo"},
    {"num_kv_heads": 2},
    {"rotary": Rotary()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_fused_kernel_runs_and_nothing_has_a_row_a_query_and_a_column_a_key(options):
    layer = StiefelAttention(16, 4, **options)
    length = 2048  # beyond the kernel's workspace, which does not grow with it
    x = torch.randn(1, length, 16, requires_grad=True)
    for call in ({}, {"is_causal": True}):
        names, largest = operators(layer, x, x, x, **call)
        assert FUSED in names
        assert FUSED + "_backward" in names
        assert MATH not in names
        assert largest < length * length  # not even one head's boolean mask
    names, largest = operators(layer, x, x, x, need_weights=True)
    assert FUSED not in names
    assert largest >= 4 * 4 * length * length  # so the measurement sees what it should


@pytest.mark.parametrize(
    "call",
    [
        {"attn_mask": torch.zeros(32, 32)},
        {"attn_mask": torch.ones(32, 32, dtype=torch.bool).triu(1)},
        {"key_padding_mask": torch.zeros(2, 32, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(2, 32), "is_causal": True},
    ],
    ids=["float", "bool", "padding", "padding and causal"],
)
def test_the_fused_kernel_runs_with_masks(call):
    x = torch.randn(2, 32, 16, requires_grad=True)
    names, _ = operators(StiefelAttention(16, 4), x, x, x, **call)
    assert FUSED in names
    assert MATH not in names


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float64])
def test_the_backends_and_the_explicit_path_agree(kv_heads, mask):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, 6, 3, dtype=torch.float64, generator=generator)
    given = None if mask is None else torch.randn(2, 1, 5, 6, dtype=torch.float64, generator=generator)
    if mask == torch.bool:
        assert given is not None
        given = given > 1
    explicit, weights = attend(q, k, v, given, need_weights=True)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            heads, none = attend(q, k, v, given)
        assert none is None
        torch.testing.assert_close(heads, explicit, rtol=0, atol=1e-12)
