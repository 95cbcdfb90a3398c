"""Hessian spectra against second differences along geodesics, known spectra, and dense eigenvalues."""

import math

import numpy as np
import pytest
import torch
from geodescent.analysis import hessian_condition_number, model_hessian
from geodescent.analysis.lanczos import lanczos
from geodescent.attention import StiefelAttention
from geodescent.manifolds import AlphaMetric, CanonicalMetric, ManifoldParameter, Sphere, Stiefel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def draw(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def symmetric(n, seed=1):
    a = draw(n, n, seed=seed)
    return a + a.mT


def dense_spectrum(manifold, f, x, h=1e-3):
    """Eigenvalues from f along geodesics only: d²/dt² f(Exp(tu)) by fourth-order differences, and polarization."""
    basis = manifold.tangent_basis(x).unbind(0)

    def second(u):
        values = [float(f(manifold.exp(x, t * h * u))) for t in (-2, -1, 0, 1, 2)]
        return (-values[0] + 16 * values[1] - 30 * values[2] + 16 * values[3] - values[4]) / (12 * h * h)

    diagonal = [second(u) for u in basis]
    form = np.diag(diagonal)
    for i in range(len(basis)):
        for j in range(i):
            form[i, j] = form[j, i] = (second(basis[i] + basis[j]) - diagonal[i] - diagonal[j]) / 2
    gram = np.array([[float(manifold.inner(x, u, v)) for v in basis] for u in basis])
    lower = np.linalg.inv(np.linalg.cholesky(gram))
    return np.linalg.eigvalsh(lower @ form @ lower.T)


@pytest.mark.parametrize("manifold", [Stiefel(), Stiefel(CanonicalMetric()), Stiefel(AlphaMetric(0.7))], ids=repr)
@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (4, 1)])
def test_the_spectrum_is_that_of_second_differences_along_geodesics(manifold, shape):
    x = manifold.random_point(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = symmetric(shape[0]), draw(*shape, seed=2)

    def f(x):
        return (x.mT @ a @ x).trace() + (b * x).sin().sum()

    found = hessian_condition_number(manifold, f, x, tolerance=0.0)
    expected = dense_spectrum(manifold, f, x)
    assert found.dimension == len(expected)
    assert found.smallest == pytest.approx(expected[0], abs=2e-6)
    assert found.largest == pytest.approx(expected[-1], abs=2e-6)
    assert found.ritz.numpy() == pytest.approx(expected, abs=2e-6)  # eigenvalues differ here, so all are found
    assert found.missed == 0
    assert found.definite is bool(expected[0] > 0)
    assert found.gradient_norm > 0.1


def test_a_product_of_frames_and_plain_parameters_has_the_union_of_spectra():
    manifold = Stiefel()
    x = manifold.random_point(2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.ParameterDict(
        {"x": ManifoldParameter(x, manifold), "w": nn.Parameter(draw(3)), "idle": nn.Parameter(draw(2))}
    )
    a, d = [symmetric(4, seed=s) for s in (3, 4)], torch.tensor([0.5, 20.0, -30.0], dtype=torch.float64)

    def loss():
        parts = [(model["x"][i].mT @ a[i] @ model["x"][i]).trace() for i in range(2)]
        return parts[0] + parts[1] + (d * model["w"].square()).sum() / 2

    found = model_hessian(model, loss, names=["x", "w"], tolerance=0.0)
    singles = [dense_spectrum(manifold, lambda y, i=i: (y.mT @ a[i] @ y).trace(), x[i]) for i in range(2)]
    expected = np.unique(np.concatenate([*singles, d.numpy()]).round(5))
    assert found.ritz.numpy()[[0, -1]] == pytest.approx(expected[[0, -1]], abs=1e-4)
    with_idle = model_hessian(model, loss, tolerance=0.0)
    assert with_idle.dimension == found.dimension + 2
    assert all(p.grad is None for p in model.values())
    assert torch.equal(model["x"].detach(), x)


def test_the_brockett_function_at_its_minimum():
    """−½tr(XᵀAXN): at eigenvectors the second derivatives are (λᵢ−λₖ)νᵢ for the normal directions (k outside) and
    (λᵢ−λⱼ)(νᵢ−νⱼ)/2 for the rotation of two columns, in the Euclidean metric (Absil, Mahony & Sepulchre 2008, §4.8)."""
    values, nu = torch.tensor([9.0, 7.0, 4.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([3.0, 2.0]).double()
    a, x = torch.diag(values), torch.eye(5, 2, dtype=torch.float64)
    found = hessian_condition_number(
        Stiefel(), lambda x: -(x.mT @ a @ x @ torch.diag(nu)).trace() / 2, x, tolerance=0.0
    )
    expected = [float((values[i] - values[k]) * nu[i]) for i in range(2) for k in range(2, 5)]
    expected.append(float((values[0] - values[1]) * (nu[0] - nu[1]) / 2))
    assert found.ritz.numpy() == pytest.approx(sorted(expected), abs=1e-9)
    assert found.condition_number == pytest.approx(max(expected) / min(expected), rel=1e-9)
    assert found.definite
    assert found.gradient_norm < 1e-12


def test_gauge_directions_are_zero_modes_and_can_be_left_out():
    """tr(XᵀAX) is the same at XR: at its minimum XA, A skew, costs nothing."""
    a, x = torch.diag(torch.tensor([1.0, 2.0, 5.0, 9.0], dtype=torch.float64)), torch.eye(4, 2, dtype=torch.float64)

    def f(x):
        return (x.mT @ a @ x).trace() / 2

    found = hessian_condition_number(Stiefel(), f, x)
    assert found.smallest == pytest.approx(0, abs=1e-10)
    assert found.condition_number == math.inf
    assert found.definite is not True
    rotation = x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    rest = hessian_condition_number(Stiefel(), f, x, deflate=[rotation, 2 * rotation])
    assert rest.dimension == found.dimension - 1
    assert rest.ritz.numpy() == pytest.approx([3, 4, 7, 8], abs=1e-9)  # λₖ − λᵢ, k outside
    assert rest.condition_number == pytest.approx(8 / 3)
    assert rest.definite


def test_constrained_and_plain_attention_on_one_loss():
    torch.manual_seed(0)
    layer = StiefelAttention(8, 2, dtype=torch.float64)
    x = draw(3, 5, 8)
    frames = ["q_proj.weight", "k_proj.weight"]

    def loss():
        return layer(x, x, x, need_weights=False)[0].sin().square().mean()

    constrained = model_hessian(layer, loss, names=frames, tolerance=1e-8)
    plain = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters() if name in frames}

    def plain_loss(q, k):
        # nn.Parameters that are no ManifoldParameters: the same function without the constraint
        return (
            torch.func.functional_call(
                layer, dict(zip(frames, (q, k), strict=True)), (x, x, x), {"need_weights": False}
            )[0]
            .sin()
            .square()
            .mean()
        )

    with sdpa_kernel(SDPBackend.MATH):
        dense = torch.autograd.functional.hessian(plain_loss, tuple(plain.values()))
    rows = [
        torch.cat([block.reshape(p.numel(), -1) for block in row], 1)
        for p, row in zip(plain.values(), dense, strict=True)
    ]
    expected = torch.linalg.eigvalsh(torch.cat(rows))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = (nn.Parameter(p.detach().clone()) for p in plain.values())

    model = Plain()
    found = model_hessian(model, lambda: plain_loss(model.q, model.k), tolerance=1e-10, steps=130)
    assert found.dimension == sum(p.numel() for p in plain.values())
    assert constrained.dimension == 4 * Stiefel().dim((8, 4))
    assert found.largest == pytest.approx(float(expected[-1]), rel=1e-8)
    assert found.smallest == pytest.approx(float(expected[0]), rel=1e-6)


@pytest.mark.parametrize("count", [3, 8, 20, 60])
def test_bounds_hold_at_any_number_of_products(count):
    n, outside = 200, 0
    values = torch.cat([torch.linspace(-1, 1, n - 2, dtype=torch.float64), torch.tensor([-3.0, 40.0]).double()])
    for seed in range(20):
        found = lanczos(lambda v: values * v, draw(n, seed=seed), lambda u, v: u @ v, dimension=n, steps=count)
        for value, error in zip(found.values, found.errors, strict=True):
            assert float((values - value).abs().min()) <= error + 1e-12
        outside += bool(values.max() > found.values[-1] + found.missed or values.min() < found.values[0] - found.missed)
        assert found.values[-1] <= 40 + 1e-12
    assert outside == 0


def test_single_precision_models_are_measured_to_their_rounding():
    layer = nn.Linear(6, 1, bias=False)
    x = torch.linalg.qr(draw(6, 6))[0] @ torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    found = model_hessian(layer, lambda: layer(x.float()).square().sum() / 2)
    assert found.condition_number == pytest.approx(36, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_an_error(value):
    x = Sphere().random_point(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite"):
        hessian_condition_number(Sphere(), lambda x: x.sum() * value, x)
    with pytest.raises(ValueError, match="finite"):  # the value is, its derivatives are not
        hessian_condition_number(Sphere(), lambda x: (x - x.detach()).abs().sum().sqrt() * value, x)


def test_bad_arguments_are_named():
    layer = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"names must be parameters.*'weights'"):
        model_hessian(layer, lambda: layer.weight.sum(), names=["weights"])
    with pytest.raises(ValueError, match="does not depend"):
        model_hessian(layer, lambda: torch.zeros((), requires_grad=True) * 1.0)
    with pytest.raises(ValueError, match="one finite number"):
        model_hessian(layer, lambda: layer.weight)
    with pytest.raises(ValueError, match="dimension 0"):
        hessian_condition_number(Sphere(), lambda x: x.sum(), torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="steps"):
        hessian_condition_number(Sphere(), lambda x: x.square().sum(), torch.eye(3, dtype=torch.float64)[0], steps=0)
