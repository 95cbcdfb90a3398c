from collections.abc import Callable, Sequence

import pytest
import torch
from geodescent.analysis import (
    equivariance_certificate,
    gauge_certificate,
    scale_free_certificate,
    weight_decay_certificate,
)
from geodescent.manifolds import CanonicalMetric, Euclidean, Stiefel
from torch import Tensor

ST = Stiefel()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def start(*shape, steps=4):
    generator = seeded()
    x = ST.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, list(torch.randn(steps, *shape, dtype=torch.float64, generator=generator))


def follow(direction: Callable[..., Tensor]) -> Callable[[Tensor, Sequence[Tensor]], list[Tensor]]:
    """A step_fn from a rule ``direction(x, g, state) -> tangent step``."""

    def step_fn(x, gradients):
        state, steps = {}, []
        for g in gradients:
            steps.append(direction(x, g, state))
            x = ST.retract(x, steps[-1])
        return steps

    return step_fn


def rgrad(x, g):
    return ST.egrad_to_rgrad(x, g)


@follow
def rsgd(x, g, state):
    return -0.05 * rgrad(x, g)


@follow
def normalized(x, g, state):
    xi = rgrad(x, g)
    return -0.05 * xi / torch.linalg.matrix_norm(xi, keepdim=True)


@follow
def scalar_adam(x, g, state):
    xi = rgrad(x, g)
    state["m"] = 0.9 * ST.project(x, state.get("m", torch.zeros_like(x))) + 0.1 * xi
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * (xi * xi).sum((-2, -1), keepdim=True)
    return -0.05 * state["m"] / state["v"].sqrt()


@follow
def elementwise_adam(x, g, state):
    xi = rgrad(x, g)
    state["m"] = 0.9 * ST.project(x, state.get("m", torch.zeros_like(x))) + 0.1 * xi
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * xi * xi
    return -0.05 * ST.project(x, state["m"] / state["v"].sqrt())


@follow
def column_adam(x, g, state):
    xi = rgrad(x, g)
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * (xi * xi).sum(-2, keepdim=True)
    return -0.05 * ST.project(x, xi / state["v"].sqrt())


@follow
def whitened(x, g, state):
    xi = rgrad(x, g)
    values, vectors = torch.linalg.eigh(xi.mT @ xi)
    return -0.05 * ST.project(x, xi @ (vectors / (values + 1e-3).sqrt().unsqueeze(-2)) @ vectors.mT)


@follow
def ambient_second_moment(x, g, state):
    # equivariant and scale-free, but the second moment sees the normal part of the gradient
    state["v"] = 0.99 * state.get("v", 0) + 0.01 * (g * g).sum((-2, -1), keepdim=True)
    return -0.05 * rgrad(x, g) / state["v"].sqrt()


@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 5), (4, 1)])
class TestWhoHoldsWhat:
    def test_scale_free(self, shape):
        x, gradients = start(*shape)
        for rule in (normalized, scalar_adam, elementwise_adam, ambient_second_moment):
            certificate = scale_free_certificate(rule, x, gradients)
            assert certificate.passed
            assert certificate.degree == pytest.approx(0, abs=1e-12)
        certificate = scale_free_certificate(rsgd, x, gradients)
        assert not certificate.passed
        assert certificate.degree == pytest.approx(1, abs=1e-12)
        # from the first step on: ‖η_c − η_1‖/‖η_1‖ = |c − 1|
        assert certificate.deviation >= 998

    def test_equivariance(self, shape):
        x, gradients = start(*shape)
        for rule in (rsgd, normalized, scalar_adam, ambient_second_moment):
            assert equivariance_certificate(rule, x, gradients).passed
        certificate = equivariance_certificate(elementwise_adam, x, gradients)
        assert not certificate.passed
        assert certificate.deviation > 0.05
        assert len(certificate.deviations) == len(gradients)

    def test_gauge_covariance(self, shape):
        x, gradients = start(*shape)
        for rule in (rsgd, normalized, scalar_adam, ambient_second_moment, whitened):
            for independent in (False, True):
                assert gauge_certificate(rule, x, gradients, independent=independent).passed
        for rule in (column_adam, elementwise_adam):
            certificate = gauge_certificate(rule, x, gradients)
            if shape[-1] == 1:  # R = ±1
                assert certificate.passed
                continue
            assert not certificate.passed
            assert certificate.deviation > 0.05
            assert len(certificate.deviations) == len(gradients)
            assert certificate.deviation == max(certificate.deviations)

    def test_weight_decay(self, shape):
        x, gradients = start(*shape)
        for rule in (rsgd, normalized, scalar_adam, elementwise_adam):
            assert weight_decay_certificate(ST, x, 10.0, step_fn=rule, gradients=gradients).passed
        certificate = weight_decay_certificate(ST, x, 10.0, step_fn=ambient_second_moment, gradients=gradients)
        assert not certificate.passed
        assert certificate.projected_decay < 1e-14
        assert certificate.step_deviation is not None
        assert certificate.step_deviation > 0.1


def test_epsilon_breaks_scale_freeness_by_a_little():
    @follow
    def with_epsilon(x, g, state):
        xi = rgrad(x, g)
        return -0.05 * xi / (xi.norm() + 1e-8)

    x, gradients = start(7, 3)
    certificate = scale_free_certificate(with_epsilon, x, gradients)
    assert not certificate.passed
    assert 1e-7 < certificate.deviation < 1e-4


def test_only_one_scale_is_enough_to_fail():
    x, gradients = start(7, 3)
    certificate = scale_free_certificate(rsgd, x, gradients, scales=(2.0,))
    assert certificate.deviation >= 1 - 1e-12
    assert certificate.degree == pytest.approx(1)


def test_standing_still_shows_in_the_smallest_step():
    x, gradients = start(7, 3)
    certificate = scale_free_certificate(lambda x, gs: [torch.zeros_like(x) for _ in gs], x, gradients)
    assert certificate.passed
    assert certificate.smallest_step == 0


def test_steps_are_compared_after_rotating_back():
    # a rule that ignores its input takes the same step in every gauge, and so is not covariant: ‖ηRᵀ − η‖
    x, gradients = start(7, 3, steps=1)
    fixed = ST.random_tangent(x, seeded(1))
    r = Stiefel().random_point(3, 3, dtype=torch.float64, generator=seeded(0))
    certificate = gauge_certificate(lambda x, gs: [fixed], x, gradients, generator=seeded(0))
    assert certificate.deviation == pytest.approx(float((fixed @ r.mT - fixed).norm() / fixed.norm()), rel=1e-12)


def test_pooling_over_the_batch_is_covariant_in_a_common_gauge_only():
    @follow
    def pooled(x, g, state):
        xi = rgrad(x, g)
        values, vectors = torch.linalg.eigh((xi.mT @ xi).sum(0))
        return -0.05 * ST.project(x, xi @ (vectors / values.sqrt()) @ vectors.mT)

    x, gradients = start(2, 7, 3)
    assert gauge_certificate(pooled, x, gradients).passed
    assert not gauge_certificate(pooled, x, gradients, independent=True).passed


def test_gauge_draws_from_the_generator_given_and_is_reproducible_without():
    x, gradients = start(7, 3)
    default = [gauge_certificate(elementwise_adam, x, gradients).deviation for _ in range(2)]
    other = gauge_certificate(elementwise_adam, x, gradients, generator=seeded(5)).deviation
    assert default[0] == default[1] != other


def test_equivariance_draws_from_the_generator_given_and_is_reproducible_without():
    x, gradients = start(7, 3)
    default = [equivariance_certificate(elementwise_adam, x, gradients).deviation for _ in range(2)]
    other = equivariance_certificate(elementwise_adam, x, gradients, generator=seeded(5)).deviation
    assert default[0] == default[1] != other


def test_a_step_fn_that_writes_into_its_arguments_changes_nothing_outside():
    def careless(x, gradients):
        steps = [-0.1 * rgrad(x, g) / rgrad(x, g).norm() for g in gradients]
        x.zero_()
        for g in gradients:
            g.zero_()
        return steps

    x, gradients = start(7, 3)
    copies = x.clone(), [g.clone() for g in gradients]
    assert scale_free_certificate(careless, x, gradients).passed
    assert equivariance_certificate(careless, x, gradients).passed
    assert torch.equal(x, copies[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients, copies[1], strict=True))


class TestWeightDecayOfTheManifold:
    @pytest.mark.parametrize("manifold", [Stiefel(), Stiefel(CanonicalMetric())])
    @pytest.mark.parametrize("weight_decay", [1e-4, 1.0, 1e4])
    def test_void_on_stiefel(self, manifold, weight_decay):
        x, _ = start(3, 6, 4)
        certificate = weight_decay_certificate(manifold, x, weight_decay)
        assert certificate.passed
        assert certificate.step_deviation is None

    def test_not_void_in_euclidean_space(self):
        certificate = weight_decay_certificate(Euclidean(2), torch.ones(3, 2), 0.1)
        assert not certificate.passed
        assert certificate.projected_decay == pytest.approx(1)

    def test_errors(self):
        x, _ = start(6, 4)
        with pytest.raises(ValueError, match=r"positive number, found 0"):
            weight_decay_certificate(ST, x, 0)
        with pytest.raises(ValueError, match="step_fn needs gradients"):
            weight_decay_certificate(ST, x, 1.0, step_fn=rsgd)


def test_errors_of_step_rules():
    x, gradients = start(6, 4)
    with pytest.raises(ValueError, match="one step a gradient, 4, found 3"):
        scale_free_certificate(lambda x, gs: [x] * 3, x, gradients)
    with pytest.raises(ValueError, match="shape of x"):
        equivariance_certificate(lambda x, gs: [x[:3]] * 4, x, gradients)
    with pytest.raises(ValueError, match="at least one gradient"):
        scale_free_certificate(rsgd, x, [])
    for scales in ((), (1.0,), (0.0, 1.0), (-1.0,), (float("inf"),)):
        with pytest.raises(ValueError, match="scales must be positive"):
            scale_free_certificate(rsgd, x, gradients, scales=scales)
    with pytest.raises(ValueError, match="must be a matrix"):
        equivariance_certificate(rsgd, x[0], [g[0] for g in gradients])
    with pytest.raises(ValueError, match="must be a matrix"):
        gauge_certificate(rsgd, x[0], [g[0] for g in gradients])
