import numpy as np
import pytest
import torch
from geodescent.manifolds import Polar, Stiefel
from geodescent.manifolds.linalg import polar_factor
from geodescent.manifolds.polynomial import inverse_sqrt_polynomial, spectral_interval
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(-0.5, 2.0), st.floats(0.0, 2.0), st.sampled_from([1e-2, 1e-5, 1e-8, 1e-12]))
def test_the_error_bound_holds_on_the_interval(low, width, tolerance):
    polynomial = inverse_sqrt_polynomial(low, low + width, tolerance)
    if polynomial is None:
        assert width > 0.5
        return
    assert polynomial.interval[0] <= low
    assert polynomial.interval[1] >= low + width
    assert polynomial.error_bound <= tolerance
    t = torch.linspace(*polynomial.interval, 999, dtype=torch.float64)
    values = polynomial(t[:, None, None]).flatten()
    error = float((values - 1 / (1 + t).sqrt()).abs().max())
    assert error <= polynomial.error_bound + 2e-14
    # and the bound is not idle
    assert error >= 1e-4 * polynomial.error_bound or polynomial.error_bound < 1e-9


def degree(bound: float, tolerance: float) -> int:
    polynomial = Polar.polynomial(bound, tolerance)
    assert polynomial is not None
    return polynomial.degree


def test_degree_follows_from_the_bound_on_the_step():
    degrees = [degree(bound, 1e-7) for bound in (0.0, 0.01, 0.1, 0.3, 1.0)]
    assert degrees == sorted(degrees)
    assert degrees[0] == 0
    assert degrees[-1] <= 12
    assert Polar.polynomial(100.0, 1e-7) is None
    assert Polar.polynomial(float("inf"), 1e-7) is None
    assert degree(0.1, 1e-3) < degree(0.1, 1e-12)


@pytest.mark.parametrize("length", [0.0, 0.01, 0.3, 1.0])
def test_a_step_of_the_bound_is_retracted_to_the_stated_error(length):
    m, generator = Stiefel(), torch.Generator().manual_seed(0)
    x = m.random_point(30, 6, dtype=torch.float64, generator=generator)
    u = m.random_tangent(x, generator)
    u = length * u / torch.linalg.matrix_norm(u, 2)
    polynomial = Polar.polynomial(length, 1e-6)
    assert polynomial is not None
    y = (x + u) @ polynomial(u.mT @ u)
    error = torch.linalg.matrix_norm(y - Polar("exact").retract(x, u), 2)
    assert error <= polynomial.error_bound * (1 + length**2) ** 0.5 + 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1e-8, 1e-3, 0.1, 1.0, 3.0, 1e3])
def test_methods_agree_to_rounding(dtype, length):
    m, generator = Stiefel(), torch.Generator().manual_seed(0)
    x = m.random_point(3, 40, 12, dtype=dtype, generator=generator)
    u = length * m.random_tangent(x, generator)
    exact = Polar("exact").retract(x, u)
    for method in ("auto", "polynomial"):
        y = Polar(method).retract(x, u)
        assert (y - exact).abs().max() < 30 * torch.finfo(dtype).eps
        assert m.point_error(y).max() < 30 * torch.finfo(dtype).eps


def test_the_polynomial_is_really_taken_for_large_batches_and_not_where_it_would_be_wrong(monkeypatch):
    taken = []
    original = inverse_sqrt_polynomial

    def spy(*args):
        taken.append(args)
        return original(*args)

    monkeypatch.setattr("geodescent.manifolds.linalg.inverse_sqrt_polynomial", spy)
    m, generator = Stiefel(), torch.Generator().manual_seed(0)
    x = m.random_point(8, 128, 32, generator=generator)
    u = m.random_tangent(x, generator)
    Polar().retract(x, u)
    assert len(taken) == 1
    Polar("exact").retract(x, u)
    Polar().retract(x[0, :8, :4].clone(), u[0, :8, :4])
    Polar().retract(x, 100 * u)
    Polar().retract(2 * x, u)
    assert len(taken) == 1


def test_an_off_manifold_point_is_still_retracted_to_the_manifold():
    a = 1.2 * Stiefel().random_point(8, 128, 32, generator=torch.Generator().manual_seed(0))
    assert Stiefel().point_error(Polar().retract(a, 0 * a)).max() < 5e-6


def test_spectral_interval_holds_the_spectrum():
    a = torch.randn(50, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = np.linalg.eigvalsh((a + a.mT).numpy())
    low, high = spectral_interval(a + a.mT)
    assert low <= values.min()
    assert high >= values.max()
    one, other = spectral_interval(0.3 * torch.eye(5, dtype=torch.float64))
    assert one == pytest.approx(0.3, abs=1e-12)
    assert other == pytest.approx(0.3, abs=1e-12)


def test_unknown_method():
    with pytest.raises(ValueError, match="method must be 'auto', 'exact' or 'polynomial'"):
        Polar("taylor")
    assert repr(Polar()) == "Polar()"
    assert repr(Polar("exact")) == "Polar(method='exact')"


def test_gradients_do_not_depend_on_the_method():
    generator = torch.Generator().manual_seed(0)
    a = torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64, generator=generator)).Q * 1.1
    g = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    grads = []
    for method in ("exact", "polynomial"):
        b = a.clone().requires_grad_()
        grads.append(torch.autograd.grad((polar_factor(b, method) * g).sum(), b)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-14)
