import pytest
import torch
from geodescent.benchmarks.gpt import GPT, GPTShape
from geodescent.manifolds import ManifoldParameter
from torch import nn, testing
from torch.nn import functional as F

TINY = GPTShape(layers=2, width=12, heads=3, batch=2, length=6, vocabulary=7)


@pytest.mark.parametrize("constrained", [True, False])
def test_the_model_is_causal(constrained):
    torch.manual_seed(0)
    model = GPT(TINY, constrained)
    tokens = torch.randint(7, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 7
    before, after = model(tokens), model(changed)
    testing.assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax((0, 2)).min() > 1e-4


def test_query_and_key_projections_are_frames_only_if_constrained():
    weights = [projection.weight for projection in GPT(TINY, True).frame_projections()]
    assert len(weights) == 4
    assert all(isinstance(w, ManifoldParameter) and w.shape == (3, 12, 4) for w in weights)
    assert all(isinstance(projection, nn.Linear) for projection in GPT(TINY, False).frame_projections())


def test_both_have_the_same_number_of_elements():
    counts = [sum(p.numel() for p in GPT(TINY, constrained).parameters()) for constrained in (True, False)]
    assert counts[0] == counts[1]


def test_loss_is_of_the_next_token():
    model = GPT(TINY, True)
    tokens = torch.randint(7, (2, 7))
    logits = model(tokens[:, :6])
    terms = [F.cross_entropy(logits[i, t][None], tokens[i, t + 1][None]) for i in range(2) for t in range(6)]
    testing.assert_close(model.loss(tokens), torch.stack(terms).mean())


def test_the_default_is_the_model_that_is_promised():
    with torch.device("meta"):
        model = GPT(GPTShape(), constrained=False)
    assert len(model.blocks) == 6
    blocks = 12 * 6 * 384**2  # attention 4 d², perceptron 8 d²
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(blocks, rel=0.02)
