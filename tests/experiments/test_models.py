import pytest
import torch
from geodescent.experiments.models import CharTransformer, ModularTransformer, PatchTransformer


def test_the_modular_model_reads_at_the_last_position():
    torch.manual_seed(0)
    model = ModularTransformer(5, width=16, heads=2).double()
    tokens = torch.tensor([[0, 1, 5], [3, 3, 5]])
    assert model(tokens).shape == (2, 5)
    # the long way: self-attention of all positions, of which the last is read
    x = model.embedding[tokens] + model.positions
    x = x + model.attention(x, x, x)[0]
    x = x + model.mlp(x)
    torch.testing.assert_close(model.unembedding(x)[:, -1], model(tokens))


def test_the_patch_model_sees_patches_in_order():
    torch.manual_seed(0)
    model = PatchTransformer(width=16, layers=1, heads=2).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert model(images).shape == (2, 10)
    # with positions gone, moving whole patches about changes nothing; moving pixels does
    with torch.no_grad():
        model.positions.zero_()
    patches = images.unflatten(2, (8, 4)).unflatten(4, (8, 4))
    flipped = patches.flip(2).flatten(4, 5).flatten(2, 3)
    torch.testing.assert_close(model(flipped), model(images))
    assert not torch.allclose(model(images.flip(2)), model(images))


def test_the_patch_must_divide_the_side():
    with pytest.raises(ValueError, match="patch must divide"):
        PatchTransformer(patch=5)


def test_the_character_model_looks_at_the_past_only():
    torch.manual_seed(0)
    model = CharTransformer(11, context=6, width=16, layers=2, heads=2).double()
    indices = torch.randint(11, (3, 6))
    logits = model(indices)
    assert logits.shape == (3, 11, 6)
    changed = indices.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    torch.testing.assert_close(model(changed)[:, :, :4], logits[:, :, :4])
    assert not torch.allclose(model(changed)[:, :, 4:], logits[:, :, 4:])
    torch.testing.assert_close(model(indices[:, :3]), logits[:, :, :3])
