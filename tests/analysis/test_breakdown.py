import geoopt
import pytest
import torch
from geodescent.analysis import ScoreBreakdown, score_breakdown, steepest_descent_certificate
from geodescent.analysis.norms import find_norm
from geodescent.manifolds import CanonicalMetric, Cayley, NotOnManifoldError, Stiefel

ST = Stiefel()
CAUSES = ScoreBreakdown.CAUSES


def problem(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = ST.random_point(*shape, dtype=torch.float64, generator=generator)
    return x, *torch.randn(2, *shape, dtype=torch.float64, generator=generator)


def terms(score):
    return {cause: getattr(score, cause) for cause in CAUSES}


def only(score, cause, atol=1e-12):
    """The loss is all this cause's, and there is one."""
    assert score.loss > 1e-3
    assert terms(score).pop(cause) == pytest.approx(score.loss, abs=atol)
    rest = {name: value for name, value in terms(score).items() if name != cause}
    assert rest == pytest.approx(dict.fromkeys(rest, 0.0), abs=atol)
    assert score.shares()[cause] == pytest.approx(1, abs=1e-6)


class TestEachFaultInItsOwnTerm:
    def test_none(self):
        x, g, _ = problem(9, 4)
        step = -0.01 * ST.egrad_to_rgrad(x, g)
        score = score_breakdown(ST, x, g, step, after=ST.retract(x, step))
        assert score.loss == pytest.approx(0, abs=1e-12)
        assert terms(score) == pytest.approx(dict.fromkeys(CAUSES, 0.0), abs=1e-12)
        assert score.speed == pytest.approx(1, rel=1e-10)
        assert score.retraction_error < 1e-10

    @pytest.mark.parametrize("norm", ["frobenius", "spectral", "1->2"])
    def test_norm_mismatch(self, norm):
        manifold = Stiefel(CanonicalMetric())
        x, g, _ = problem(9, 4)
        step = -manifold.egrad_to_rgrad(x, g)
        score = score_breakdown(manifold, x, g, step, norm=norm, rule_norm="metric")
        only(score, "norm_mismatch")
        want = steepest_descent_certificate(manifold, x, g, step, norm=norm)
        assert score.efficiency == pytest.approx(want.cosine, rel=1e-9)
        assert (score.norm, score.rule_norm) == (norm, "metric")
        # without knowing the rule's norm the same loss is one of direction
        only(score_breakdown(manifold, x, g, step, norm=norm), "direction")

    def test_momentum_lag(self):
        x, g, noise = problem(9, 4)
        momentum = g + 0.5 * noise
        only(score_breakdown(ST, x, g, -ST.egrad_to_rgrad(x, momentum), momentum=momentum), "momentum_lag")
        canonical = Stiefel(CanonicalMetric())
        step = -canonical.egrad_to_rgrad(x, momentum)
        only(score_breakdown(canonical, x, g, step, momentum=momentum), "momentum_lag")

    def test_direction(self):
        x, g, _ = problem(9, 4)
        only(score_breakdown(ST, x, g, -ST.project(x, g.sign())), "direction")

    @pytest.mark.parametrize("norm", ["frobenius", "2->inf"])
    def test_tangency(self, norm):
        x, g, _ = problem(9, 4)
        xi = ST.egrad_to_rgrad(x, g)
        normal = x @ (x.mT @ g + g.mT @ x)
        score = score_breakdown(ST, x, g, -xi - normal, norm=norm, rule_norm="frobenius")
        rest = terms(score)
        assert rest.pop("tangency") > 0.05
        clean = terms(score_breakdown(ST, x, g, -xi, norm=norm, rule_norm="frobenius"))
        assert rest == pytest.approx({name: clean[name] for name in rest}, abs=1e-12)
        if norm == "frobenius":
            only(score, "tangency")

    def test_retraction_of_the_wrong_speed(self):
        # geoopt's canonical retraction has the derivative U + XXᵀU
        manifold, theirs = Stiefel(CanonicalMetric(), Cayley()), geoopt.CanonicalStiefel()
        x, g, _ = problem(9, 4)
        step = -1e-5 * manifold.egrad_to_rgrad(x, g)
        score = score_breakdown(manifold, x, g, step, after=theirs.retr(x, step))
        only(score, "retraction", atol=1e-8)
        rotation = x @ (x.mT @ step)
        want = manifold.norm(x, rotation) / manifold.norm(x, step)
        assert score.retraction_error == pytest.approx(float(want), rel=1e-4)
        assert score.speed == pytest.approx(1 + float(want) ** 2, rel=1e-4)
        # the bridge to the Cayley retraction: nothing is lost
        score = score_breakdown(manifold, x, g, step, after=theirs.retr(x, step - rotation / 2))
        assert terms(score) == pytest.approx(dict.fromkeys(CAUSES, 0.0), abs=1e-8)

    def test_a_wrong_speed_along_the_right_direction_shows_in_speed_alone(self):
        x, g, _ = problem(9, 4)
        step = -0.01 * ST.egrad_to_rgrad(x, g)
        score = score_breakdown(ST, x, g, step, after=ST.retract(x, 3 * step))
        assert score.loss == pytest.approx(0, abs=1e-12)
        assert score.speed == pytest.approx(3, rel=1e-10)
        assert score.retraction_error == pytest.approx(2, rel=1e-10)


@pytest.mark.parametrize("norm", ["metric", "spectral", "2->inf"])
@pytest.mark.parametrize("shape", [(9, 4), (2, 8, 3), (5, 4)])
def test_everything_wrong_at_once_adds_up(norm, shape):
    manifold = Stiefel(CanonicalMetric())
    x, g, noise = problem(*shape)
    momentum = g + noise / 3
    step = -0.01 * (momentum + 0.3 * momentum.sign())
    after = Stiefel().retract(x, manifold.project(x, 0.9 * step + 1e-3 * noise))
    score = score_breakdown(manifold, x, g, step, norm=norm, rule_norm="frobenius", momentum=momentum, after=after)
    assert sum(terms(score).values()) == pytest.approx(score.loss, rel=1e-12)
    assert sum(score.shares().values()) == pytest.approx(1, rel=1e-12)
    assert all(abs(value) > 1e-6 for value in terms(score).values())
    # what is left is the efficiency of the realized velocity, with the part of the length that was not tangent counted
    velocity = manifold.inverse_retract(x, after)
    certificate = steepest_descent_certificate(manifold, x, g, velocity, norm=norm)
    chosen = find_norm(norm)
    flat = step.reshape(-1, *shape[-2:])
    tangent = manifold.project(x, step).reshape(flat.shape)
    if chosen is None:
        whole, part = manifold.norm(x, step).flatten(), manifold.norm(x, manifold.project(x, step)).flatten()
    else:
        whole, part = (torch.stack([chosen.norm(each) for each in a]) for a in (flat, tangent))
    want = certificate.batch["cosine"].flatten() * part / torch.maximum(whole, part)
    assert score.batch["efficiency"].flatten().tolist() == pytest.approx(want.tolist(), rel=1e-9)
    assert score.efficiency == pytest.approx(float(want.min()), rel=1e-9)


def test_a_momentum_equal_to_the_gradient_is_no_lag():
    x, g, _ = problem(9, 4)
    step = -ST.egrad_to_rgrad(x, g)
    first = score_breakdown(ST, x, g, step, norm="spectral", rule_norm="1->2")
    second = score_breakdown(ST, x, g, step, norm="spectral", rule_norm="1->2", momentum=g)
    assert terms(first) == pytest.approx(terms(second), abs=1e-12)


def test_stationary_points_and_zero_steps():
    x, g, _ = problem(6, 2)
    score = score_breakdown(ST, x, torch.zeros_like(g), ST.random_tangent(x))
    assert score.loss == 0
    assert set(score.shares().values()) == {0.0}
    score = score_breakdown(ST, x, g, torch.zeros_like(x))
    assert score.loss == 1
    assert score.direction == 1


def test_reads_well_and_serialises():
    x, g, _ = problem(6, 2)
    score = score_breakdown(ST, x, g, -g)
    assert "norm_mismatch" in repr(score)
    assert "<td>tangency</td>" in score._repr_html_()
    assert score.to_dict()["batch"]["loss"] == pytest.approx(score.loss)


def test_errors():
    x, g, _ = problem(6, 2)
    with pytest.raises(ValueError, match="norm must be one of"):
        score_breakdown(ST, x, g, -g, rule_norm="L7")
    with pytest.raises(ValueError, match="momentum must have the shape of x"):
        score_breakdown(ST, x, g, -g, momentum=g[:4])
    with pytest.raises(NotOnManifoldError):
        score_breakdown(ST, x, g, -g, after=x + 1)
    with pytest.raises(ValueError, match="after must have the shape of x"):
        score_breakdown(ST, x, g, -g, after=ST.random_point(7, 2, dtype=torch.float64))
