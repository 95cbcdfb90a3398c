import json

import pytest
import torch
from geodescent.analysis import CERTIFICATES, black_box_step_fn, certify
from geodescent.manifolds import QR, CanonicalMetric, Cayley, Euclidean, Sphere, Stiefel
from geodescent.optim import RiemannianAdam


class RSGD(torch.optim.Optimizer):
    """Riemannian gradient descent, x ← R_x(−lr·grad), on the parameter's manifold or on another that is given."""

    def __init__(self, params, lr, manifold=None):
        super().__init__(params, {"lr": lr})
        self.manifold = manifold

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x, manifold = p.detach(), self.manifold or p.manifold
                x.copy_(manifold.retract(x, -group["lr"] * manifold.egrad_to_rgrad(x, p.grad)))


def radam(**options):
    return lambda params: RiemannianAdam(params, **{"lr": 0.01, "eps": 0.0, **options})


#: what one scalar second moment a frame holds: all but steepest descent in another norm
FRAME = set(CERTIFICATES) - {"spectral steepest descent"}


class Spectral(torch.optim.Optimizer):
    """Steepest descent in the spectral norm where it has a closed form: on square frames, x ← R_x(−lr·X msign(Ω))."""

    def __init__(self, params, lr, tangent=True):
        super().__init__(params, {"lr": lr, "tangent": tangent})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x = p.detach()
                inner = x.mT @ p.grad
                if group["tangent"]:
                    inner = (inner - inner.mT) / 2
                left, _, right = torch.linalg.svd(inner)
                x.copy_(p.manifold.project_point(x - group["lr"] * x @ left @ right))


def holds(report):
    return {row.name for row in report.rows if row.holds}


class TestRiemannianAdam:
    @pytest.mark.parametrize(
        "manifold",
        [Stiefel(), Stiefel(CanonicalMetric()), Stiefel(CanonicalMetric(), retraction=Cayley())],
    )
    @pytest.mark.parametrize("shape", [(12, 4), (3, 8, 4)])
    def test_holds_all_of_a_frames_at_1e_12(self, manifold, shape):
        report = certify(radam(), manifold, shape, claims=FRAME)
        assert report.passed, repr(report)
        assert report.consistent
        assert [row.name for row in report.rows] == list(CERTIFICATES)
        assert not report.left_manifold
        assert holds(report) == FRAME

    def test_the_qr_retraction_is_not_gauge_covariant(self):
        # qf((X + U)R) ≠ qf(X + U)R: the rule is covariant, and so is its first step, but not where that leads
        report = certify(radam(), Stiefel(retraction=QR()), (12, 4), claims=FRAME - {"gauge covariance"})
        assert report.consistent, repr(report)
        gauge = report.certificates["gauge covariance"].to_dict()
        assert gauge["deviations"][0] < 1e-12
        assert gauge["deviations"][-1] > 1e-6
        first = certify(radam(), Stiefel(retraction=QR()), (12, 4), claims=FRAME, steps=1)
        assert first.consistent

    @pytest.mark.parametrize(
        ("options", "missing"),
        [
            ({"second_moment": "column"}, {"steepest descent", "gauge covariance"}),
            ({"second_moment": "element"}, {"steepest descent", "equivariance", "gauge covariance"}),
            ({"step_scale": "frobenius", "lr": 0.1}, set()),
            ({"lr": 10.0, "trust_radius": 0.5}, set()),
        ],
    )
    def test_holds_exactly_what_it_claims(self, options, missing):
        report = certify(radam(**options), Stiefel(), (12, 4), claims=FRAME - missing)
        assert holds(report) == FRAME - missing
        assert report.consistent
        assert report.passed is (not missing)

    def test_a_trust_radius_that_it_exceeds_is_found(self):
        factory = radam(lr=10.0, trust_radius=0.5)
        assert "conditioning" in holds(certify(factory, Stiefel(), (12, 4), trust_radius=0.5))
        assert "conditioning" not in holds(certify(factory, Stiefel(), (12, 4), trust_radius=0.49))

    def test_tiny_steps_are_held_to_what_can_be_recovered_of_them(self):
        report = certify(radam(lr=1e-7), Stiefel(), (12, 4), claims=FRAME)
        assert report.consistent, repr(report)
        assert 1e-10 < report.rows[0].bound < 1e-6
        claims = FRAME - {"steepest descent", "gauge covariance"}
        column = certify(radam(lr=1e-7, second_moment="column"), Stiefel(), (12, 4), claims=claims)
        assert column.consistent, repr(column)
        assert certify(radam(lr=1e-2), Stiefel(), (12, 4)).rows[0].bound == 1e-12

    def test_epsilon_is_seen(self):
        report = certify(radam(eps=1e-3), Stiefel(), (12, 4), claims=FRAME)
        assert FRAME - holds(report) == {"scale-free"}
        assert report.consistent is False

    def test_momentum_lag_is_reported_not_judged(self):
        report = certify(radam(), Stiefel(), (12, 4), steps=4)
        assert len(report.momentum_lag) == 4
        assert report.momentum_lag[0] == pytest.approx(1, abs=1e-12)
        assert 0 < report.momentum_lag[-1] < 0.999
        without = certify(radam(betas=(0.0, 0.999)), Stiefel(), (12, 4), steps=4)
        assert without.momentum_lag == pytest.approx([1] * 4, abs=1e-12)

    def test_same_seed_same_report(self):
        first, second, other = (certify(radam(), Stiefel(), (12, 4), seed=seed) for seed in (3, 3, 4))
        assert first.to_dict() == second.to_dict()
        assert first.momentum_lag != other.momentum_lag


class TestOthers:
    def test_gradient_descent_is_all_but_scale_free(self):
        claims = FRAME - {"scale-free"}
        report = certify(lambda params: RSGD(params, lr=1e-2), Stiefel(), (12, 4), claims=claims)
        assert holds(report) == claims
        assert report.consistent
        assert not report.passed
        assert report.momentum_lag == pytest.approx([1] * 5, abs=1e-12)

    def test_a_step_in_another_metric_is_not_steepest(self):
        canonical = Stiefel(CanonicalMetric())

        def factory(params):
            return RSGD(params, lr=1e-2, manifold=canonical)

        assert "steepest descent" not in holds(certify(factory, Stiefel(), (12, 4)))
        assert "steepest descent" in holds(certify(factory, canonical, (12, 4)))

    def test_an_optimizer_that_leaves_the_manifold_is_not_steepest_nor_equivariant_nor_decay_free(self):
        report = certify(lambda params: torch.optim.AdamW(params, lr=1e-2, eps=0.0), Stiefel(), (12, 4))
        assert report.left_manifold
        assert "LEFT" in repr(report)
        assert holds(report) == {"scale-free"}
        assert report.consistent is None
        assert len(report.momentum_lag) == 1

    def test_euclidean_space_has_no_conditioning_bound_and_does_decay(self):
        report = certify(lambda params: torch.optim.SGD(params, lr=1e-2), Euclidean(2), (5, 3), claims=["scale-free"])
        assert holds(report) == {"steepest descent", "equivariance", "gauge covariance"}
        assert report.consistent is False

    def test_spectral_steepest_descent_is_held_to_the_spectral_norm(self):
        claims = {"spectral steepest descent", "scale-free", "conditioning", "equivariance", "weight decay"}
        report = certify(lambda params: Spectral(params, lr=0.1), Stiefel(), (6, 6))
        assert {"spectral steepest descent", "gauge covariance"} <= holds(report)
        assert "steepest descent" not in holds(report)
        row = next(row for row in report.rows if row.name == "spectral steepest descent")
        assert row.value <= row.bound == 1e-8
        # steepest in one of the two norms is enough to pass
        assert claims <= holds(report)
        assert report.passed

    def test_a_spectral_optimizer_that_forgets_the_projection_is_found(self):
        report = certify(lambda params: Spectral(params, lr=0.1, tangent=False), Stiefel(), (6, 6))
        assert not holds(report) & {"spectral steepest descent", "steepest descent"}
        assert not report.passed
        assert report.certificates["spectral steepest descent"].to_dict()["relative_gap"] > 1e-3

    def test_points_that_are_not_matrices_have_no_gauge_nor_spectral_norm(self):
        report = certify(lambda params: RSGD(params, lr=1e-2), Sphere(), (7,))
        assert not holds(report) & {"equivariance", "gauge covariance", "spectral steepest descent"}
        assert "steepest descent" in holds(report)

    def test_standing_still_is_not_steepest(self):
        assert "steepest descent" not in holds(certify(lambda params: RSGD(params, lr=0.0), Stiefel(), (6, 2)))


def test_black_box_recovers_the_steps_taken():
    manifold = Stiefel()
    generator = torch.Generator().manual_seed(0)
    x = manifold.random_point(7, 3, dtype=torch.float64, generator=generator)
    gradients = list(torch.randn(3, 7, 3, dtype=torch.float64, generator=generator))
    steps = black_box_step_fn(lambda params: RSGD(params, lr=0.1), manifold)(x, gradients)
    at = x
    for g, step in zip(gradients, steps, strict=True):
        want = -0.1 * (g - at @ (at.mT @ g + g.mT @ at) / 2)
        assert (step - want).abs().max() < 1e-14
        at = manifold.retract(at, want)


def test_report_reads_well_is_escaped_and_serialises():
    report = certify(radam(), Stiefel(), (6, 2), name="<b>radam</b>", claims=FRAME)
    text = repr(report)
    assert all(name in text for name in CERTIFICATES)
    assert "every claim holds" in text
    html = report._repr_html_()
    assert "&lt;b&gt;radam&lt;/b&gt;" in html
    assert "<b>" not in html
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert as_dict["passed"] is True
    assert as_dict["rows"][0]["name"] == "steepest descent"
    assert as_dict["certificates"]["equivariance"]["passed"] is True


def test_errors():
    with pytest.raises(ValueError, match=r"unknown claims \['speed'\]"):
        certify(radam(), Stiefel(), (6, 2), claims={"speed"})
    with pytest.raises(ValueError, match="steps must be at least 1, found 0"):
        certify(radam(), Stiefel(), (6, 2), steps=0)


class DecaysBeforeRetracting(torch.optim.Optimizer):
    """Riemannian descent with decoupled decay fused into the retraction, which shortens X and so lengthens the step."""

    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x = p.detach()
                step = 0.3 * Stiefel().egrad_to_rgrad(x, p.grad)
                step = step / step.norm()
                x.copy_(Stiefel().project_point((1 - group["weight_decay"]) * x - step))


def test_the_optimizers_own_decay_is_asked_too():
    report = certify(lambda params: DecaysBeforeRetracting(params), Stiefel(), (24, 6))
    holds = {row.name: row.holds for row in report.rows}
    assert not holds["weight decay"]
    assert holds["steepest descent"]
    assert "against its own length" in next(row.quantity for row in report.rows if row.name == "conditioning")
