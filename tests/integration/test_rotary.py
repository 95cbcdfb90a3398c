import pytest
import torch
from geodescent.attention import Rotary

pytest.importorskip("transformers")

from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


def test_is_llama_s(generator):
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    q, k = torch.randn(2, 2, 4, 9, 8, generator=generator)
    positions = torch.arange(9) + 1000
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    rotary = Rotary(500.0)
    for ours, theirs in zip(
        (rotary.rotate(q, positions), rotary.rotate(k, positions)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_is_gpt_j_s_interleaved_on_a_part_of_the_coordinates(generator):
    x = torch.randn(2, 4, 9, 8, generator=generator)
    sin, cos = create_sinusoidal_positions(9, 6).expand(2, -1, -1).chunk(2, -1)
    theirs = gptj_rotate(x[..., :6].transpose(1, 2), sin, cos).transpose(1, 2)
    ours = Rotary(dim=6, interleaved=True).rotate(x, torch.arange(9))
    torch.testing.assert_close(ours[..., :6], theirs, rtol=0, atol=1e-5)
