import pytest
import torch
from geodescent.attention.nested import pad_nested, unpad_nested

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_round_trip_with_gradients(layout, generator):
    parts = [torch.randn(n, 3, generator=generator) for n in (2, 0, 4)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    padded, padding = pad_nested(nested)
    assert padded.shape == (3, 4, 3)
    assert padding.tolist() == [[i >= n for i in range(4)] for n in (2, 0, 4)]
    assert not padded[padding].any()
    back = unpad_nested(3 * padded, padding, nested)
    for row, part in zip(back.unbind(), parts, strict=True):
        torch.testing.assert_close(row, 3 * part)
    torch.cat(back.unbind()).square().sum().backward()
    assert nested.grad is not None
    for grad, part in zip(nested.grad.unbind(), parts, strict=True):
        torch.testing.assert_close(grad, 18 * part)


def test_other_ranks_and_holes_are_refused():
    flat = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"must be a batch of \(length, width\) stored without holes"):
        pad_nested(flat)
    start, length = torch.tensor([0, 2]), torch.tensor([1, 2])
    holes = torch.nested.narrow(torch.ones(2, 5, 3), 1, start, length, layout=torch.jagged)
    with pytest.raises(ValueError, match="stored without holes"):
        pad_nested(holes)
