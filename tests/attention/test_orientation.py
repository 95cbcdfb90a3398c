import itertools

import pytest
import torch
from geodescent.attention import Orientation

SHAPES = [
    ((5, 3), 1),
    ((3, 5), 1),
    ((4, 4), 1),
    ((8, 2, 3, 3), 1),
    ((8, 2, 3, 3), 4),
    ((12, 1, 2), 2),
    ((20, 2, 1, 3), 2),
]


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_a_frame_is_the_matrix_of_each_group_made_tall(shape, groups, generator):
    weight = torch.randn(shape, generator=generator)
    orientation = Orientation(shape, groups)
    frame = orientation.to_frame(weight)
    assert tuple(frame.shape) == orientation.frame_shape
    assert frame.shape[-2] >= frame.shape[-1]
    rows, columns = shape[0] // groups, weight[0].numel()
    assert orientation.kind == ("tall" if rows >= columns else "wide")
    for g, i, j in itertools.product(range(groups), range(rows), range(columns)):
        expected = weight[g * rows + i].flatten()[j]
        assert frame[g][(i, j) if orientation.kind == "tall" else (j, i)] == expected
    assert torch.equal(orientation.to_weight(frame), weight)


def test_is_a_value():
    assert Orientation((3, 4)) == Orientation(torch.Size((3, 4)))
    assert eval(repr(Orientation((4, 2, 3), 2))) == Orientation((4, 2, 3), 2)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"shape must be \(out, in, ...\)"):
        Orientation((3,))
    with pytest.raises(ValueError, match=r"shape must be \(out, in, ...\)"):
        Orientation((3, 0))
    with pytest.raises(ValueError, match="groups must divide the 4 rows, found 3"):
        Orientation((4, 2), 3)
    with pytest.raises(ValueError, match=r"weight must be of shape \(2, 3\), found \(3, 2\)"):
        Orientation((2, 3)).to_frame(torch.zeros(3, 2))
