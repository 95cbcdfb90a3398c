from typing import Any

import pytest
import torch
from geodescent.attention import StiefelAttention
from geodescent.manifolds import Stiefel
from torch import nn


def random_attention(dtype=torch.float64, **options: Any):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "batch_first": True, "dtype": dtype, **options}
    module = nn.MultiheadAttention(**sizes)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "bias" in name:
                p.normal_()
    return module


def inputs(module, generator):
    shapes = ((2, 5, 12), (2, 6, module.kdim), (2, 6, module.vdim))
    tensors = [torch.randn(s, dtype=module.out_proj.weight.dtype, generator=generator) for s in shapes]
    return tensors if module.batch_first else [t.transpose(0, 1) for t in tensors]


@torch.no_grad()
def largest_difference(module, layer, tensors):
    expected, expected_weights = module(*tensors, average_attn_weights=False)
    out, weights = layer(*tensors, need_weights=True, average_attn_weights=False)
    return float((out - expected).abs().max()), float((weights - expected_weights).abs().max())


MODULES: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 10, "vdim": 7},
    {"batch_first": False, "num_heads": 12},
    {"num_heads": 1},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"add_bias_kv": True, "bias": False},
]


@pytest.mark.parametrize("options", MODULES, ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_spectrum_is_exact(options, dtype, atol, generator):
    module = random_attention(dtype, **options)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    layer = StiefelAttention.from_attention(module)
    assert max(largest_difference(module, layer, inputs(module, generator))) < atol
    assert layer.logit_scale.dtype == dtype
    for projection in (layer.q_proj, layer.k_proj):
        Stiefel().check_point(projection.weight.detach())
    # the gains are the singular values of the circuit, over √d_h
    width = layer.head_dim
    fused = module.in_proj_weight is not None
    q, k = module.in_proj_weight.chunk(3)[:2] if fused else (module.q_proj_weight, module.k_proj_weight)
    for h in range(layer.num_heads):
        rows = slice(h * width, (h + 1) * width)
        circuit = (q[rows].T @ k[rows]).detach()
        singular = torch.linalg.svdvals(circuit)[:width] / width**0.5
        torch.testing.assert_close(layer.logit_scale[h].detach(), singular, rtol=0, atol=10 * atol)
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())


@pytest.mark.parametrize("dead", ["one query direction", "all queries", "all keys", "everything"])
def test_rank_deficient_weights_keep_their_biases(dead, generator):
    """A direction without a gain still carries the query bias, if there is any."""
    module = random_attention()
    with torch.no_grad():
        if dead == "one query direction":
            module.in_proj_weight[1] = 2 * module.in_proj_weight[0]
        if dead in ("all queries", "everything"):
            module.in_proj_weight[:12] = 0
        if dead in ("all keys", "everything"):
            module.in_proj_weight[12:24] = 0
    layer = StiefelAttention.from_attention(module)
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
    assert max(largest_difference(module, layer, inputs(module, generator))) < 1e-11


@pytest.mark.parametrize("constrain", ["", "q", "k", "v", "o", "qv", "ko", "qkv", "qko"])
@pytest.mark.parametrize("options", [MODULES[0], MODULES[2], MODULES[7]], ids=str)
def test_one_factor_of_each_product_absorbs_what_the_other_loses(constrain, options, generator):
    module = random_attention(**options)
    scale = "spectrum" if {"q", "k"} <= set(constrain) else "learned"
    layer = StiefelAttention.from_attention(module, scale, constrain=constrain)
    assert max(largest_difference(module, layer, inputs(module, generator))) < 1e-11


@pytest.mark.parametrize("logit_scale", ["learned", "matched", 0.8])
@pytest.mark.parametrize("frames", ["head", "whole"])
def test_other_scales_take_polar_factors(logit_scale, frames, generator):
    module = random_attention()
    layer = StiefelAttention.from_attention(module, logit_scale, frames=frames)
    count = 1 if frames == "whole" else 3
    for rows, ours in zip(module.in_proj_weight.chunk(3), (layer.q_proj, layer.k_proj), strict=False):
        for matrix, frame in zip(rows.detach().chunk(count), ours.weight.detach(), strict=True):
            left, _, right = torch.linalg.svd(matrix.T, full_matrices=False)
            torch.testing.assert_close(frame, left @ right)
    assert isinstance(layer.logit_scale, nn.Parameter) is (logit_scale == "learned")
    if logit_scale == 0.8:
        torch.testing.assert_close(layer.logit_scale, torch.full((3,), 0.8, dtype=torch.float64))
        return
    # no other scale is nearer: least squares on the circuit of each head, by torch.linalg.lstsq
    u, v = layer.query_frames().detach(), layer.key_frames().detach()
    q, k = (rows.detach().unflatten(0, (3, 4)).mT for rows in module.in_proj_weight.chunk(3)[:2])
    for h in range(3):
        best = torch.linalg.lstsq((u[h] @ v[h].T).reshape(-1, 1), (q[h] @ k[h].T / 2).reshape(-1, 1)).solution
        torch.testing.assert_close(layer.logit_scale[h].detach(), best.squeeze())


@pytest.mark.parametrize("logit_scale", ["spectrum", "learned"])
@pytest.mark.parametrize("frames", ["head", "whole"])
def test_weights_that_are_frames_already_are_kept_exactly(logit_scale, frames, generator):
    """Whole frames and single scales are exact where the module has that form."""
    source = StiefelAttention(12, 3, frames=frames, constrain="qkvo", logit_scale=0.9, dtype=torch.float64)
    module = random_attention()
    with torch.no_grad():
        q, k, v = (f().mT.flatten(0, 1) for f in (source.query_frames, source.key_frames, source.value_frames))
        module.in_proj_weight.copy_(torch.cat([0.9 * 2 * q, k, v]))
        module.out_proj.weight.copy_(source.output_frames().mT.flatten(0, 1).T)
    layer = StiefelAttention.from_attention(module, logit_scale, frames=frames, constrain="qkvo")
    assert max(largest_difference(module, layer, inputs(module, generator))) < 1e-11


def test_options_and_mode_are_carried_over():
    module = random_attention(dropout=0.2, batch_first=False, kdim=10).eval()
    layer = StiefelAttention.from_attention(module)
    assert (layer.dropout, layer.batch_first, layer.kdim, layer.training) == (0.2, False, 10, False)


def test_bad_arguments_are_named():
    module = random_attention(num_heads=1, kdim=10)
    with pytest.raises(ValueError, match=r"the k projection cannot be constrained.*n = 10 rows and p = 12"):
        StiefelAttention.from_attention(module)
    with pytest.raises(ValueError, match="logit_scale must not be 0"):
        StiefelAttention.from_attention(random_attention(), 0.0)
    with pytest.raises(TypeError, match=r"module must be an nn.MultiheadAttention, found Linear"):
        StiefelAttention.from_attention(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
