from typing import Any

import pytest
import torch
from geodescent.attention.masks import merge_masks

OPTIONS: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_no_mask_is_none():
    assert merge_masks((2, 3, 4, 4), extra_keys=2, **OPTIONS) is None


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("floats", [(), ("attn",), ("padding",), ("attn", "padding")], ids=str)
def test_forbids_what_any_mask_forbids(per_head, causal, extra, floats, generator):
    batch, heads, length, keys = shape = (2, 3, 4, 5)
    attn = torch.rand(*((6,) if per_head else ()), length, keys, generator=generator) < 0.4
    padding = torch.rand(batch, keys, generator=generator) < 0.4

    def given(mask, name):
        return torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if name in floats else mask

    merged = merge_masks(
        shape, given(attn, "attn"), given(padding, "padding"), causal=causal, extra_keys=extra, **OPTIONS
    )
    assert merged is not None
    assert (merged.dtype == torch.bool) is (not floats)
    forbidden = merged if merged.dtype == torch.bool else merged == -torch.inf
    forbidden = forbidden.expand(batch, heads, length, keys + extra)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                for j in range(keys):
                    here = (attn[b * heads + h] if per_head else attn)[i, j]
                    assert bool(forbidden[b, h, i, j]) is bool(here or padding[b, j] or (causal and j > i))
    assert not forbidden[..., keys:].any()


def test_float_masks_add_up(generator):
    a, b = torch.randn(4, 5, generator=generator), torch.randn(2, 5, generator=generator)
    merged = merge_masks((2, 3, 4, 5), a, b.double(), **OPTIONS)
    assert merged is not None
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged[1, 0], a + b[1])


def test_bad_masks_are_named():
    shape = (2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"attn_mask must be of shape \(4, 5\) or \(6, 4, 5\), found \(5, 4\)"):
        merge_masks(shape, torch.zeros(5, 4), **OPTIONS)
    with pytest.raises(ValueError, match=r"key_padding_mask must be of shape \(2, 5\), found \(5,\)"):
        merge_masks(shape, None, torch.zeros(5), **OPTIONS)
    with pytest.raises(TypeError, match=r"key_padding_mask must be boolean or floating point, found torch.int64"):
        merge_masks(shape, None, torch.zeros(2, 5, dtype=torch.int64), **OPTIONS)
