import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from geodescent.analysis import AttentionLayout, attention_entropy, attention_geometry, weights_entropy
from geodescent.attention import StiefelAttention
from torch import nn


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def entropies(weights):
    return scipy.stats.entropy(weights.detach().numpy(), axis=-1)


def test_weights():
    weights = torch.softmax(torch.randn(2, 3, 5, 7, dtype=torch.float64), -1)
    np.testing.assert_allclose(weights_entropy(weights), entropies(weights), rtol=1e-12)
    assert weights_entropy(np.full((4,), 0.25)).item() == pytest.approx(math.log(4))
    assert weights_entropy(torch.tensor([0.0, 1.0])).item() == 0
    assert math.isnan(weights_entropy(torch.tensor([math.nan, 1.0])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64),
        lambda: nn.MultiheadAttention(16, 4, kdim=12, bias=False, batch_first=True, dtype=torch.float64),
        lambda: StiefelAttention(16, 4, dtype=torch.float64),
        lambda: StiefelAttention(16, 4, kdim=12, logit_scale="spectrum", dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("masked", ["", "causal", "boolean", "additive"])
def test_it_is_that_of_the_layers_own_weights(make, masked):
    module = make()
    with torch.no_grad():  # biases that matter
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.normal_()
    layer: Any = attention_geometry(module).layers[0]
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    y = x if layer.key_frames.shape[-2] == 16 else torch.randn(2, 6, 12, dtype=torch.float64)
    value = torch.randn(2, 6, module.vdim, dtype=torch.float64)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    mask = {"": None, "causal": later, "boolean": later, "additive": torch.randn(6, 6, dtype=torch.float64)}[masked]
    weights = module(x, y, value, attn_mask=mask, need_weights=True, average_attn_weights=False)[1]
    how: dict[str, Any] = {"causal": True} if masked == "causal" else {"mask": mask}
    got = attention_entropy(layer, x, None if y is x else y, **how)
    np.testing.assert_allclose(got, entropies(weights), rtol=1e-9, atol=1e-12)
    assert got.shape == (2, 4, 6)
    assert got.max() <= math.log(6) + 1e-12


def test_grouped_keys_and_plain_sequences():
    state = {f"{n}_proj.weight": torch.randn(w, 6, dtype=torch.float64) for n, w in (("q", 8), ("k", 4), ("v", 4))}
    layer = attention_geometry(state, 4, layout=AttentionLayout("q_proj.weight", "k_proj.weight", rotary=False)).layers[
        0
    ]
    x = torch.randn(5, 6, dtype=torch.float64)
    q, k = (x @ state[f"{n}_proj.weight"].mT for n in "qk")
    for head in range(4):
        group = head // 2
        logits = q[:, 2 * head : 2 * head + 2] @ k[:, 2 * group : 2 * group + 2].mT / math.sqrt(2)
        np.testing.assert_allclose(attention_entropy(layer, x)[head], entropies(torch.softmax(logits, -1)), rtol=1e-12)


def test_errors():
    module = nn.MultiheadAttention(16, 4)
    layer = attention_geometry(module).layers[0]
    with pytest.raises(ValueError, match=r"hidden must be \(..., length, 16\), found \(3, 8\)"):
        attention_entropy(layer, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="keep_frames=False"):
        attention_entropy(attention_geometry(module, keep_frames=False).layers[0], torch.zeros(3, 16))
    state = {f"{n}_proj.weight": torch.ones(4, 4) for n in "qk"}
    for config, why in (
        ({"num_attention_heads": 2, "rope_theta": 1e4}, "has rotary positions between"),
        ({"num_attention_heads": 2}, "rotary positions for all that is known"),
        ({"num_attention_heads": 2, "model_type": "gpt2", "attn_logit_softcapping": 30.0}, "has soft cap between"),
        ({"n_head": 2, "model_type": "bloom"}, "has additive position bias between"),
    ):
        with pytest.raises(ValueError, match=why):
            attention_entropy(attention_geometry(state, config=config).layers[0], torch.zeros(3, 4))
    # a position bias may be given as a mask
    bloom = attention_geometry(state, config={"n_head": 2, "model_type": "bloom"}).layers[0]
    assert attention_entropy(bloom, torch.zeros(3, 4), mask=torch.zeros(3, 3)).shape == (2, 3)
