import math

import numpy as np
import pytest
import torch
from geodescent.analysis import (
    conditioning_certificate,
    stationarity_certificate,
    steepest_descent_certificate,
)
from geodescent.manifolds import (
    AlphaMetric,
    CanonicalMetric,
    Euclidean,
    EuclideanMetric,
    NotOnManifoldError,
    Stiefel,
)

METRICS = [EuclideanMetric(), CanonicalMetric(), AlphaMetric(0.7), AlphaMetric(-0.8)]
SHAPES = [(7, 3), (4, 4), (5, 1), (2, 3, 9, 4)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(manifold, *shape, seed=0):
    generator = seeded(seed)
    x = manifold.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, torch.randn(*shape, dtype=torch.float64, generator=generator)


class TestSteepestDescent:
    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("length", [1e-6, 0.3, 50.0])
    def test_the_riemannian_gradient_passes(self, metric, shape, length):
        manifold = Stiefel(metric)
        x, g = problem(manifold, *shape)
        certificate = steepest_descent_certificate(manifold, x, g, -length * manifold.egrad_to_rgrad(x, g))
        assert certificate.passed
        assert certificate.relative_gap <= 1e-12
        assert certificate.cosine == pytest.approx(1, abs=1e-12)
        assert certificate.primal == pytest.approx(certificate.dual, rel=1e-12)

    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize("norm", ["metric", "frobenius"])
    def test_no_tangent_direction_beats_the_bound_and_one_comes_close(self, metric, norm):
        manifold = Stiefel(metric)
        x, g = problem(manifold, 4, 2)
        generator = seeded(1)
        dual = steepest_descent_certificate(manifold, x, g, manifold.random_tangent(x, generator), norm=norm).dual
        u = manifold.project(x, torch.randn(20_000, 4, 2, dtype=torch.float64, generator=generator))
        squared = (u * u).sum((-2, -1))
        if norm == "metric":
            # the metric's matrix, written out: I − a XXᵀ
            squared = squared - metric.a * ((x.mT @ u) ** 2).sum((-2, -1))
        rates = -(g * u).sum((-2, -1)) / squared.sqrt()
        assert rates.max() <= dual * (1 + 1e-12)
        assert rates.max() >= 0.97 * dual

    def test_primal_is_the_rate_of_decrease_along_the_step(self):
        manifold = Stiefel(CanonicalMetric())
        x, g = problem(manifold, 6, 3)
        u = manifold.random_tangent(x, seeded(2))
        certificate = steepest_descent_certificate(manifold, x, g, 3 * u)
        h = 1e-5
        ahead, behind = manifold.retract(x, h * u), manifold.retract(x, -h * u)
        assert certificate.primal == pytest.approx(-float((g * (ahead - behind)).sum()) / (2 * h), rel=1e-7)
        assert certificate.gap == pytest.approx(certificate.dual - certificate.primal, rel=1e-12)
        assert certificate.relative_gap == pytest.approx(1 - certificate.primal / certificate.dual, rel=1e-12)
        assert certificate.relative_gap > 0.1
        assert certificate.tangency < 1e-14
        assert not certificate.passed

    def test_a_small_gap_is_not_lost_to_cancellation(self):
        manifold = Stiefel()
        x, g = problem(manifold, 6, 3)
        descent = -manifold.egrad_to_rgrad(x, g)
        other = manifold.random_tangent(x, seeded(2))
        other = other - descent * (other * descent).sum() / (descent * descent).sum()
        angle = 1e-9
        step = math.cos(angle) * descent / descent.norm() + math.sin(angle) * other / other.norm()
        got = steepest_descent_certificate(manifold, x, g, step).relative_gap
        assert got == pytest.approx(angle**2 / 2, rel=1e-5)

    def test_a_normal_component_fails_by_tangency_alone(self):
        manifold = Stiefel()
        x, g = problem(manifold, 7, 3)
        step = -manifold.egrad_to_rgrad(x, g)
        normal = x * 1e-9 * step.norm() / math.sqrt(3)
        certificate = steepest_descent_certificate(manifold, x, g, step + normal)
        assert certificate.tangency == pytest.approx(1e-9, rel=1e-5)
        assert certificate.relative_gap <= 1e-12
        assert not certificate.passed
        assert not steepest_descent_certificate(manifold, x, g, -g).passed

    def test_a_canonical_step_is_not_steepest_in_the_euclidean_metric_and_conversely(self):
        euclidean, canonical = Stiefel(), Stiefel(CanonicalMetric())
        x, g = problem(euclidean, 7, 3)
        assert not steepest_descent_certificate(euclidean, x, g, -canonical.egrad_to_rgrad(x, g)).passed
        assert not steepest_descent_certificate(canonical, x, g, -euclidean.egrad_to_rgrad(x, g)).passed
        certificate = steepest_descent_certificate(canonical, x, g, -euclidean.egrad_to_rgrad(x, g), norm="frobenius")
        assert certificate.passed

    def test_ascent_has_cosine_minus_one(self):
        manifold = Stiefel()
        x, g = problem(manifold, 5, 2)
        certificate = steepest_descent_certificate(manifold, x, g, manifold.egrad_to_rgrad(x, g))
        assert certificate.cosine == pytest.approx(-1)
        assert certificate.relative_gap == pytest.approx(2)

    def test_a_wrong_riesz_map_cannot_certify_itself(self):
        class Sloppy(AlphaMetric):
            def egrad_to_rgrad(self, x, g):
                return EuclideanMetric().egrad_to_rgrad(x, g)

        manifold = Stiefel(Sloppy(0.0))
        x, g = problem(manifold, 7, 3)
        certificate = steepest_descent_certificate(manifold, x, g, -manifold.egrad_to_rgrad(x, g))
        assert certificate.relative_gap <= 1e-12
        assert certificate.riesz_error > 0.05
        assert not certificate.passed

    def test_batch_is_the_worst_of_its_points(self):
        manifold = Stiefel()
        x, g = problem(manifold, 3, 6, 2)
        step = -manifold.egrad_to_rgrad(x, g)
        step[1] = manifold.random_tangent(x, seeded(3))[1]
        certificate = steepest_descent_certificate(manifold, x, g, step)
        alone = [steepest_descent_certificate(manifold, x[i], g[i], step[i]) for i in range(3)]
        assert [one.passed for one in alone] == [True, False, True]
        assert not certificate.passed
        for name in ("primal", "dual", "gap", "relative_gap", "cosine"):
            assert getattr(certificate, name) == pytest.approx(getattr(alone[1], name), rel=1e-12)
            want = [getattr(one, name) for one in alone]
            assert certificate.batch[name].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)

    def test_stationary_point_makes_every_tangent_step_optimal(self):
        manifold = Stiefel()
        x, g = problem(manifold, 6, 2)
        symmetric = x.mT @ g + g.mT @ x
        for gradient in (torch.zeros_like(g), x @ symmetric):
            for step in (torch.zeros_like(x), manifold.random_tangent(x, seeded(4))):
                certificate = steepest_descent_certificate(manifold, x, gradient, step)
                assert certificate.stationary
                assert certificate.passed
                assert (certificate.gap, certificate.relative_gap, certificate.cosine) == (0, 0, 1)
            assert not steepest_descent_certificate(manifold, x, gradient, x).passed

    def test_zero_step_away_from_stationarity_fails(self):
        manifold = Stiefel()
        x, g = problem(manifold, 6, 2)
        certificate = steepest_descent_certificate(manifold, x, g, torch.zeros_like(x))
        assert not certificate.passed
        assert (certificate.primal, certificate.cosine, certificate.relative_gap) == (0, 0, 1)

    def test_euclidean_space_of_any_ndim(self):
        for ndim in (0, 1, 3):
            g = torch.randn(2, 3, 4, dtype=torch.float64, generator=seeded())
            certificate = steepest_descent_certificate(Euclidean(ndim), torch.zeros_like(g), g, -0.5 * g)
            assert certificate.passed
            assert certificate.batch["dual"].shape == g.shape[: 3 - ndim]

    def test_float32_and_numpy_input(self):
        manifold = Stiefel()
        x = manifold.random_point(6, 2, dtype=torch.float32, generator=seeded())
        g = torch.randn(6, 2, generator=seeded(1))
        step = -manifold.egrad_to_rgrad(x, g)
        certificate = steepest_descent_certificate(manifold, x.numpy(), g.numpy(), step.numpy(), atol=1e-6)
        assert certificate.passed
        assert 1e-12 < certificate.tangency < 1e-6

    def test_errors(self):
        manifold = Stiefel()
        x, g = problem(manifold, 6, 2)
        with pytest.raises(ValueError, match=r"'metric', 'frobenius', 'spectral', .* found 'nuclear'"):
            steepest_descent_certificate(manifold, x, g, -g, norm="nuclear")
        with pytest.raises(ValueError, match="step must have the shape of x"):
            steepest_descent_certificate(manifold, x, g, g[:5])
        with pytest.raises(ValueError, match="egrad contains 1 non-finite"):
            steepest_descent_certificate(
                manifold, x, g.index_put((torch.tensor(0),) * 2, torch.tensor(math.nan).double()), g
            )
        with pytest.raises(NotOnManifoldError):
            steepest_descent_certificate(manifold, 1.1 * x, g, g)
        with pytest.raises(ValueError, match="no point to certify"):
            steepest_descent_certificate(manifold, torch.zeros(0, 3, 2), torch.zeros(0, 3, 2), torch.zeros(0, 3, 2))


def test_stationarity_is_judged_by_the_riemannian_gradient():
    # f = −tr XᵀAX, A = diag(3, 2, 1), at its minimizer [e1 e2]: ambient gradient −2AX, of norm √(36+16)
    a, x = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)), torch.eye(3, 2, dtype=torch.float64)
    for manifold in (Stiefel(), Stiefel(CanonicalMetric())):
        certificate = stationarity_certificate(manifold, x, -2 * a @ x)
        assert certificate.passed
        assert certificate.riemannian_norm == 0
        assert certificate.ambient_norm == pytest.approx(7.211103, abs=1e-6)
        turned = manifold.retract(x, 1e-3 * manifold.random_tangent(x, seeded()))
        assert not stationarity_certificate(manifold, turned, -2 * a @ turned).passed


class TestConditioning:
    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("length", [1e-8, 0.5, 3.0])
    def test_every_tangent_step_passes(self, metric, shape, length):
        manifold = Stiefel(metric)
        x, _ = problem(manifold, *shape)
        step = length * manifold.random_tangent(x, seeded(1))
        certificate = conditioning_certificate(manifold, x, step)
        assert certificate.passed
        assert 1 - 1e-12 <= certificate.condition_number <= certificate.bound * (1 + 1e-12)
        assert certificate.step_norm == pytest.approx(length, rel=1e-12)
        kappa = (
            [np.linalg.cond(a) for a in (x + step).flatten(0, -3).numpy()]
            if x.ndim > 2
            else [np.linalg.cond((x + step).numpy())]
        )
        np.testing.assert_allclose(certificate.batch["condition_number"].flatten(), kappa, rtol=1e-12)

    @pytest.mark.parametrize("metric", METRICS)
    def test_the_bound_is_attained(self, metric):
        # the longest singular value for a length τ: a rank-one normal direction, or for α > 0 one plane of rotation
        manifold = Stiefel(metric)
        x = torch.eye(6, 3, dtype=torch.float64)
        step = torch.zeros_like(x)
        if metric.alpha > 0:
            step[0, 1], step[1, 0] = 1, -1
        else:
            step[5, 0] = 1
        tau = 0.8
        step = step * tau / manifold.norm(x, step)
        certificate = conditioning_certificate(manifold, x, step, trust_radius=tau)
        assert certificate.passed
        assert certificate.condition_number == pytest.approx(certificate.bound, rel=1e-13)
        assert certificate.bound == pytest.approx(math.sqrt(1 + max(1, 1 + metric.alpha) * 0.64), rel=1e-14)

    def test_longer_than_the_trust_radius_fails(self):
        manifold = Stiefel()
        x, _ = problem(manifold, 6, 3)
        step = manifold.random_tangent(x, seeded(1))
        assert conditioning_certificate(manifold, x, step, trust_radius=1.0).passed
        assert conditioning_certificate(manifold, x, 2 * step, trust_radius=2.0).passed
        assert not conditioning_certificate(manifold, x, 2 * step, trust_radius=1.0).passed

    def test_a_normal_part_fails(self):
        manifold = Stiefel()
        x, _ = problem(manifold, 6, 3)
        step = manifold.random_tangent(x, seeded(1))
        normal = x @ torch.diag(torch.tensor([-0.5, 0.0, 0.0], dtype=torch.float64))
        assert not conditioning_certificate(manifold, x, step + normal).passed
        singular = conditioning_certificate(manifold, x, -x)
        assert not singular.passed
        assert singular.condition_number > 1e12

    def test_errors(self):
        x = torch.zeros(3, 2)
        with pytest.raises(ValueError, match=r"found Euclidean\(ndim=2\)"):
            conditioning_certificate(Euclidean(2), x, x)
        with pytest.raises(ValueError, match="trust_radius must be a number >= 0 or None, found -1"):
            conditioning_certificate(Stiefel(), torch.eye(3, 2), x, trust_radius=-1)


def test_results_read_well_and_serialise():
    manifold = Stiefel()
    x, g = problem(manifold, 6, 2)
    certificate = steepest_descent_certificate(manifold, x, g, -manifold.egrad_to_rgrad(x, g))
    assert "relative_gap" in repr(certificate)
    assert "batch" not in repr(certificate)
    assert "<td>passed</td><td>yes</td>" in certificate._repr_html_()
    as_dict = certificate.to_dict()
    assert as_dict["passed"] is True
    assert as_dict["batch"]["dual"] == pytest.approx(certificate.dual)
    with pytest.raises(AttributeError):
        certificate.passed = False  # type: ignore[misc]
