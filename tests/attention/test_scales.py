import pytest
import torch
from geodescent.attention.scales import matched_scale, reset_linear, set_logit_scale, xavier_sigma
from torch import nn


@pytest.mark.parametrize("sizes", [(256, None), (256, 100)], ids=str)
def test_xavier_sigma_is_the_deviation_of_torch_s_weights(sizes):
    torch.manual_seed(0)
    width, kdim = sizes
    module = nn.MultiheadAttention(width, 4, kdim=kdim)
    weight = module.in_proj_weight if kdim is None else module.k_proj_weight
    sigma = xavier_sigma(weight.shape[1], width, fused=kdim is None)
    assert weight.std().item() == pytest.approx(sigma, rel=0.02)


def test_matched_scale_of_two_frames_is_half_of_the_usual_one():
    sigma = xavier_sigma(64, 64, fused=True)
    assert matched_scale(16, [(64, sigma), (64, sigma)]) == pytest.approx(1 / (2 * 16**0.5))


def test_reset_linear_keeps_an_output_projection_s_weight():
    linear = nn.Linear(6, 5)
    before = linear.weight.detach().clone()
    reset_linear(linear, None)
    assert torch.equal(linear.weight, before)
    assert not linear.bias.any()
    torch.manual_seed(0)
    wide = nn.Linear(300, 300, bias=False)
    reset_linear(wide, 2.0)
    assert wide.weight.std().item() == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "shape", "learned", "value"),
    [
        ("learned", (3,), True, 0.5),
        ("spectrum", (3, 4), True, 0.5),
        ("matched", (3,), False, 0.5),
        (2, (3,), False, 2.0),
    ],
)
def test_what_is_registered(kind, shape, learned, value):
    module = nn.Module()
    set_logit_scale(module, kind, 0.5, 3, 4, dtype=torch.float64)
    scale = module.logit_scale
    assert isinstance(scale, torch.Tensor)
    assert torch.equal(scale.detach(), torch.full(shape, value, dtype=torch.float64))
    assert ("logit_scale" in dict(module.named_parameters())) is learned
    assert ("logit_scale" in dict(module.named_buffers())) is not learned
