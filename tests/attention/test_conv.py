import copy
import math
from typing import Any

import pytest
import torch
from geodescent.attention import StiefelConv2d
from geodescent.manifolds import ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn

OPTIONS: list[dict[str, Any]] = [
    {},
    {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2), "bias": False},
    {"groups": 2, "dilation": (2, 1)},
    {"padding": "same", "kernel_size": (4, 3), "padding_mode": "circular"},
    {"padding": "same", "kernel_size": (2, 5)},
    {"padding": "valid", "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "reflect", "stride": 2},
    {"padding": (1, 3), "padding_mode": "replicate", "groups": 4},
    {"padding": (3, 1), "padding_mode": "circular", "out_channels": 48},
    {"in_channels": 4, "out_channels": 8, "groups": 4, "kernel_size": 1},
]


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "dtype": torch.float64, **options}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_equals_nn_conv2d_with_its_kernel(options, generator):
    torch.manual_seed(0)
    layer = StiefelConv2d(**arguments(options), scale=0.7)
    twin = nn.Conv2d(**arguments(options))
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
        if twin.bias is not None and layer.bias is not None:
            twin.bias.copy_(layer.bias)
    for shape in ((2, 4, 9, 8), (4, 9, 8)):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(layer(x), twin(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_flattened_kernel_of_a_group_is_orthonormal(options):
    layer = StiefelConv2d(**arguments(options))
    for matrix in layer.weight.detach().flatten(1).chunk(layer.groups):
        torch.testing.assert_close(torch.linalg.svdvals(matrix), torch.ones(min(matrix.shape), dtype=torch.float64))
        assert layer.orientation.kind == ("tall" if matrix.shape[0] >= matrix.shape[1] else "wide")


@pytest.mark.parametrize("sizes", [(2, 3, 3), (2, 20, 3), (3, 3, 2)])
def test_spectral_norm_of_the_convolution_is_at_most_the_root_of_the_kernel_area(sizes):
    """The matrix of a circular convolution, column by column, against the bound of the docstring."""
    torch.manual_seed(0)
    inside, outside, k = sizes
    options: dict[str, Any] = {"padding": "same", "padding_mode": "circular", "bias": False, "dtype": torch.float64}
    layer = StiefelConv2d(inside, outside, k, **options)
    units = torch.eye(inside * 36, dtype=torch.float64).unflatten(1, (inside, 6, 6))
    norm = torch.linalg.matrix_norm(layer(units).flatten(1).detach(), 2)
    assert 1 - 1e-9 <= norm <= k * (1 + 1e-12)


@pytest.mark.parametrize("options", [{}, {"groups": 2, "out_channels": 80}])
def test_trains_with_riemannian_adam_and_stays_on_the_manifold(options):
    torch.manual_seed(0)
    layer = StiefelConv2d(**{**arguments(options), "dtype": torch.float32}, scale="learned")
    optimizer = RiemannianAdam(layer.parameters(), lr=0.02)
    x = torch.randn(2, 4, 6, 6)
    target = torch.randn_like(layer(x))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert Stiefel().point_error(layer.frame.detach()).max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_from_conv_is_the_nearest(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(**arguments(options)).eval()
    layer = StiefelConv2d.from_conv(conv)
    assert (layer.padding, layer.stride, layer.dilation, layer.padding_mode) == (
        conv.padding,
        conv.stride,
        conv.dilation,
        conv.padding_mode,
    )
    assert not layer.training
    pieces = [torch.linalg.svd(m, full_matrices=False) for m in conv.weight.detach().flatten(1).chunk(conv.groups)]
    mean = torch.cat([s for _, s, _ in pieces]).mean()
    expected = mean * torch.cat([u @ vt for u, _, vt in pieces])
    torch.testing.assert_close(layer.weight.detach().flatten(1), expected)


def test_state_dict_deepcopy_and_conversion_keep_the_constraint():
    layer, other = (StiefelConv2d(2, 6, 3, groups=2) for _ in range(2))
    assert sorted(layer.state_dict()) == ["bias", "frame"]
    other.load_state_dict(layer.state_dict(), assign=True)
    assert type(other.frame) is ManifoldParameter
    x = torch.randn(1, 2, 5, 5)
    assert torch.equal(layer(x), other(x))
    double = copy.deepcopy(layer).double()
    assert Stiefel().point_error(double.frame.detach()).max() < 1e-14


def test_compiles_whole():
    layer = StiefelConv2d(2, 6, 3, padding=1, padding_mode="circular")
    x = torch.randn(1, 2, 5, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_bias_starts_as_in_nn_conv2d():
    torch.manual_seed(0)
    layer = StiefelConv2d(4, 4000, 3)
    assert layer.bias is not None
    bound = 1 / math.sqrt(4 * 9)
    assert layer.bias.abs().max().item() == pytest.approx(bound, rel=0.01)


def test_repr_has_what_is_not_the_default():
    text = repr(StiefelConv2d(2, 6, 3, padding=1, groups=2, bias=False))
    assert "2, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=2, bias=False, orientation='wide'" in text
    assert "dilation" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "in_channels must be a positive multiple of groups, found 4 and groups = 3"),
        ({"out_channels": 0}, "out_channels must be a positive multiple"),
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1"),
        ({"stride": (1, 2, 3)}, "stride must be an integer"),
        ({"padding": -1}, "padding must be an integer of at least 0"),
        ({"padding": "half"}, 'padding must be "same", "valid" or a size'),
        ({"padding": "same", "stride": 2}, 'padding must not be "same" with a stride'),
        ({"padding_mode": "wrap"}, "padding_mode must be one of zeros"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StiefelConv2d(**arguments(options))


def test_from_conv_wants_a_convolution():
    with pytest.raises(TypeError, match=r"conv must be an nn.Conv2d, found Linear"):
        StiefelConv2d.from_conv(nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]
