"""The suite has to catch faults: each class below has one, and exactly the checks named beside it must fail."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from geodescent.manifolds import (
    AlphaMetric,
    CanonicalMetric,
    Cayley,
    DifferentiatedTransport,
    Polar,
    ProjectionTransport,
    Retraction,
    Stiefel,
    testing,
)
from geodescent.manifolds.linalg import working_precision
from geodescent.manifolds.testing import (
    CHECKS,
    check_all,
    check_order,
    check_projection,
    check_riesz,
    check_transport,
    claimed_order,
    measure_order,
    plot_slopes,
)
from geodescent.manifolds.testing.slopes import fit_slope
from hypothesis import strategies as st

SHAPE = (4, 2)


# --- faults of retractions and transports ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CayleyWithoutP(Retraction):
    """Turns twice as fast about vertical directions: geoopt's canonical retraction."""

    @working_precision
    def retract(self, x, u):
        return Cayley().retract(x, u + x @ (x.mT @ u))

    def order(self, metric):
        return 1


@dataclass(frozen=True)
class QRWithLapacksSigns(Retraction):
    @working_precision
    def retract(self, x, u):
        return torch.linalg.qr(x + u)[0]

    def order(self, metric):
        return 1


@dataclass(frozen=True)
class PolarThatBoastsOfItsOrder(Polar):
    def order(self, metric):
        return 2


@dataclass(frozen=True)
class PolarWithWrongPushforward(Polar):
    def pushforward(self, x, u, v):
        y = self.retract(x, u)
        return v - y @ ((y.mT @ v) + (y.mT @ v).mT) / 2


@dataclass(frozen=True)
class PolarWithWrongInverse(Polar):
    @working_precision
    def inverse_retract(self, x, y):
        return Stiefel().project(x, y - x)


@dataclass(frozen=True)
class PolarOfADifferentiatedSVD(Polar):
    """Its backward pass is NaN where singular values coincide, as they do at u = 0."""

    @working_precision
    def retract(self, x, u):
        left, _, right = torch.linalg.svd(x + u, full_matrices=False)
        return left @ right


@dataclass(frozen=True)
class PolarThatCutsTheGraph(Polar):
    def retract(self, x, u):
        return super().retract(x, u).detach()


@dataclass(frozen=True)
class ProjectionSaidToBeIsometric(ProjectionTransport):
    isometric: ClassVar[bool] = True


@dataclass(frozen=True)
class TransportThatIsNotLinear(ProjectionTransport):
    def transport(self, manifold, x, u, v, y=None):
        return super().transport(manifold, x, u, v, y) * (1 + (v * v).sum((-2, -1), keepdim=True))


# --- faults of the manifold -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientFormulaAsProjection(Stiefel):
    @working_precision
    def project(self, x, z):
        self.check_shape(x.shape)
        return z - x @ z.mT @ x


@dataclass(frozen=True)
class GradientOfTheOtherMetric(Stiefel):
    def egrad_to_rgrad(self, x, g):
        return self.project(x, g)


@dataclass(frozen=True)
class NormOfTheOtherMetric(Stiefel):
    def norm(self, x, u):
        return Stiefel().norm(x, u)


@dataclass(frozen=True)
class BasisOfTheOtherMetric(Stiefel):
    def tangent_basis(self, x):
        return Stiefel().tangent_basis(x)


@dataclass(frozen=True)
class HessianOfTheOtherMetric(Stiefel):
    @working_precision
    def ehess_to_rhess(self, x, egrad, ehess_u, u):
        self.check_shape(x.shape)
        return self.egrad_to_rgrad(x, ehess_u - u @ ((x.mT @ egrad) + (x.mT @ egrad).mT) / 2)


@dataclass(frozen=True)
class ExpOfTheOtherMetric(Stiefel):
    """A curve of constant speed in either metric: only the Gauss lemma tells."""

    def exp(self, x, u):
        return Stiefel(CanonicalMetric()).exp(x, u)

    def log(self, x, y):
        return Stiefel(CanonicalMetric()).log(x, y)


@dataclass(frozen=True)
class ExpIsARetraction(Stiefel):
    def exp(self, x, u):
        return self.retract(x, u)

    def log(self, x, y):
        return self.inverse_retract(x, y)


@dataclass(frozen=True)
class ExpLeavesForVectorsThatAreNotTangent(Stiefel):
    @working_precision
    def exp(self, x, u):
        return super().exp(x, u) + (u - self.project(x, u))


@dataclass(frozen=True)
class LogIsAProjectedDifference(Stiefel):
    @working_precision
    def log(self, x, y):
        return self.project(x, y - x)

    def dist(self, x, y):
        return self.norm(x, Stiefel(self.metric).log(x, y))


@dataclass(frozen=True)
class DistByArccosine(Stiefel):
    def dist(self, x, y):
        self.check_shape(x.shape)
        return torch.acos((x * y).sum((-2, -1)).clamp(-1, 1))


@dataclass(frozen=True)
class NearestPointByQR(Stiefel):
    @working_precision
    def project_point(self, a):
        self.check_shape(a.shape)
        q, r = torch.linalg.qr(a)
        return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


@dataclass(frozen=True)
class TangentVectorsNotOfUnitNorm(Stiefel):
    def random_tangent(self, x, generator=None):
        return 2 * super().random_tangent(x, generator)


@dataclass(frozen=True)
class UsesTheFirstPointOfABatch(Stiefel):
    def exp(self, x, u):
        return super().exp(x[(0,) * (x.ndim - 2)].expand_as(x), u) if x.numel() else x


@dataclass(frozen=True)
class ForgetsEmptyBatches(Stiefel):
    def inner(self, x, u, v):
        return super().inner(x, u, v) if x.numel() else x.new_zeros(())


@dataclass(frozen=True)
class ComputesInHalves(Stiefel):
    def project(self, x, z):
        self.check_shape(x.shape)
        return z - x @ ((x.mT @ z) + (x.mT @ z).mT) / 2


@dataclass(frozen=True)
class AnswersInTheDefaultDtype(Stiefel):
    def point_error(self, x):
        return super().point_error(x).to(torch.get_default_dtype())


@dataclass(frozen=True)
class WritesToItsInput(Stiefel):
    def project_point(self, a):
        return a.copy_(super().project_point(a))


@dataclass(frozen=True)
class ReadsMemoryAsIfContiguous(Stiefel):
    def project_point(self, a):
        self.check_shape(a.shape)
        plain = a.as_strided(a.shape, torch.empty(a.shape).stride()) if a.stride(-1) != 1 else a
        return super().project_point(plain)


@dataclass(frozen=True, repr=False)
class ReprThatLies(Stiefel):
    def __repr__(self):
        return "ReprThatLies()"


@dataclass(frozen=True)
class AcceptsAnyShape(Stiefel):
    def check_shape(self, shape):
        return


@dataclass(frozen=True)
class AcceptsAnyPoint(Stiefel):
    def check_point(self, x, atol=None, *, name="x"):
        self.check_shape(x.shape)


CANONICAL = CanonicalMetric()

FAULTS: list[tuple[Stiefel, set[str]]] = [
    (Stiefel(retraction=CayleyWithoutP()), {"retraction_first_order", "order"}),
    (Stiefel(retraction=QRWithLapacksSigns()), {"retraction_first_order", "order"}),
    (Stiefel(CANONICAL, PolarThatBoastsOfItsOrder()), {"order"}),
    (Stiefel(retraction=PolarWithWrongPushforward()), {"pushforward"}),
    (Stiefel(retraction=PolarWithWrongInverse()), {"inverse_retraction"}),
    (Stiefel(retraction=PolarOfADifferentiatedSVD()), {"gradients"}),
    (Stiefel(retraction=PolarThatCutsTheGraph()), {"gradients"}),
    (Stiefel(vector_transport=ProjectionSaidToBeIsometric()), {"transport"}),
    (Stiefel(vector_transport=TransportThatIsNotLinear()), {"transport"}),
    (GradientFormulaAsProjection(vector_transport=DifferentiatedTransport()), {"projection"}),
    (GradientOfTheOtherMetric(CANONICAL), {"riesz"}),
    (NormOfTheOtherMetric(CANONICAL), {"metric"}),
    (BasisOfTheOtherMetric(CANONICAL), {"tangent_basis"}),
    (HessianOfTheOtherMetric(CANONICAL), {"hessian"}),
    (ExpOfTheOtherMetric(), {"geodesic", "order", "hessian"}),
    (ExpIsARetraction(), {"geodesic", "dist"}),
    (ExpLeavesForVectorsThatAreNotTangent(), {"geodesic"}),
    (LogIsAProjectedDifference(), {"exp_log"}),
    (NearestPointByQR(), {"project_point"}),
    (TangentVectorsNotOfUnitNorm(), {"random"}),
    (UsesTheFirstPointOfABatch(), {"batch"}),
    (ForgetsEmptyBatches(), {"batch"}),
    (ComputesInHalves(), {"dtype"}),
    (AnswersInTheDefaultDtype(), {"dtype"}),
    (WritesToItsInput(), {"strides", "gradients"}),
    (ReadsMemoryAsIfContiguous(), {"strides"}),
    (ReprThatLies(CANONICAL), {"values"}),
    (AcceptsAnyShape(), {"errors"}),
    (AcceptsAnyPoint(), {"errors"}),
]


@pytest.fixture(scope="module", autouse=True)
def remembered_logarithms():
    """Logarithms are the slow part, and manifolds whose fault is elsewhere ask for the same ones."""
    log, known = AlphaMetric.log, {}

    def remembered(self, x, y):
        if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
            return log(self, x, y)
        key = (self.alpha, x.dtype, x.shape, y.shape, x.numpy().tobytes(), y.numpy().tobytes())
        if key not in known:
            known[key] = log(self, x, y)
        return known[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlphaMetric, "log", remembered)
        yield


@pytest.mark.parametrize(("manifold", "expected"), FAULTS, ids=[f"{m!r}"[:90] for m, _ in FAULTS])
def test_a_fault_fails_exactly_its_checks(manifold, expected):
    report = check_all(manifold, SHAPE, bad_shapes=[(2, 3)])
    assert set(report.failed) == expected, "\n".join(repr(report[name]) for name in report.failed)
    assert not report.passed


def test_a_distance_by_arccosine_is_caught():
    # a distance for one column only
    report = check_all(DistByArccosine(), (4, 1))
    assert report.failed == ("dist",)
    assert report["dist"]["relative error at a distance of 1e-09"] == pytest.approx(1)


def test_every_check_catches_something():
    caught = set().union(*(expected for _, expected in FAULTS))
    # a result on the wrong device needs a second device to be right on
    assert caught == set(CHECKS) - {"device"}


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 3), (1, 1)], ids=str)
def test_a_right_manifold_passes(shape):
    report = check_all(Stiefel(AlphaMetric(0.3), Cayley()), shape, bad_shapes=[(2, 3)])
    assert report.passed, repr(report)
    assert not report.missing
    assert [r.name for r in report.results] == list(CHECKS)


# --- slopes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "slope"),
    [
        (lambda t: t, 1),
        (lambda t: t**2, 2),
        (lambda t: 5 * t**3 + 40 * t**4, 3),
        (lambda t: 1e-3 * t**2 + t**3, 2),
        (lambda t: t**3 + 1e-16 * abs(math.sin(1e6 * t)), 3),
        (lambda t: abs(t**2 - 0.1 * t), 1),  # dips to 0 at t = 0.1
    ],
)
def test_fit_slope_finds_the_leading_power(error, slope):
    assert fit_slope(error, 1e-16).slope == pytest.approx(slope, abs=0.05)


def test_fit_slope_of_nothing_and_of_nan():
    exact = fit_slope(lambda t: 1e-16 * math.sin(t), 1e-16)
    assert exact.exact
    assert "exact" in repr(exact)
    broken = fit_slope(lambda t: math.nan, 1e-16)
    assert math.isnan(broken.slope)
    assert not broken.exact


def test_a_nan_passes_no_check():
    class Broken(Stiefel):
        def project(self, x, z):
            return z * math.nan

    m, x = Stiefel(), Stiefel().random_point(*SHAPE, dtype=torch.float64)
    assert check_projection(m, x).passed
    result = check_projection(Broken(), x)
    assert len(result.failures) == len(result.measurements)


def test_measure_order_takes_a_direction_and_a_retraction():
    m = Stiefel()
    x = torch.eye(4, 2, dtype=torch.float64)
    vertical = torch.zeros(4, 2, dtype=torch.float64)
    vertical[0, 1], vertical[1, 0] = -1, 1
    # about a vertical direction the polar retraction turns by arctan t, and the exponential map by t
    slope = measure_order(m, x, vertical)
    assert slope.slope == pytest.approx(3, abs=0.01)
    # |exp(iθ) − exp(i·arctan θ)| ≈ θ³/3 in each of two columns, and the direction is scaled to length 1, θ = t/√2
    assert 10**slope.intercept == pytest.approx(2**0.5 * 2**-1.5 / 3, rel=0.05)
    assert measure_order(m, x, retraction=CayleyWithoutP()).slope == pytest.approx(1, abs=0.01)
    assert claimed_order(m) == 2
    result = check_order(Stiefel(CANONICAL), x)
    assert result["slope of |R(tu) - exp(tu)|"] == pytest.approx(2, abs=0.01)


def test_what_is_not_claimed_is_reported():
    m = Stiefel()
    result = check_transport(m, m.random_point(*SHAPE, dtype=torch.float64))
    assert result.passed
    assert 1e-3 < result["isometry (not claimed), |<Tv, Tw> - <v, w>|"] < 1
    assert result["ambient length of T(v) over that of v"] < 1


def test_a_quotient_space_is_judged_by_its_invariant():
    @dataclass(frozen=True)
    class TurnsTheFrame(Stiefel):
        """Right for subspaces: exp returns another frame of the same one. The frames themselves are wrong."""

        def exp(self, x, u):
            return -super().exp(x, u)

    x = Stiefel().random_point(4, 1, dtype=torch.float64)
    m = TurnsTheFrame()
    assert check_order(m, x, invariant=lambda x: x @ x.mT).passed
    assert not check_order(m, x).passed


def test_plot_slopes_draws_each_retraction():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = plt.figure().subplots()
    assert plot_slopes(Stiefel(CANONICAL), ax=ax, retractions=[Polar(), Cayley()]) is ax
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["Polar(): slope 2.00", "Cayley(): slope 3.00", "t^2", "t^3"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    alone = plot_slopes(Stiefel(), torch.eye(3, 2, dtype=torch.float64))
    assert alone is not ax
    assert "Polar(): slope 3.00" in alone.get_legend_handles_labels()[1]
    plt.close("all")


# --- results --------------------------------------------------------------------------------------------------------


def test_results_read_well_and_are_plain_data():
    class Odd(GradientOfTheOtherMetric):
        def __repr__(self):
            return "Odd('<script>')"

    m = Odd(CANONICAL)
    result = check_riesz(m, m.random_point(*SHAPE, dtype=torch.float64))
    assert not result.passed
    assert [f.name for f in result.failures] == ["|<grad, u> - tr g'u|"]
    assert "riesz of Odd('<script>'): FAILED" in repr(result)
    assert "|<grad, u> - tr g'u|" in repr(result)
    assert "&lt;script&gt;" in result._repr_html_()
    assert json.loads(json.dumps(result.to_dict()))["passed"] is False
    with pytest.raises(KeyError, match=r"no measurement .*slope.* in riesz"):
        result["slope"]
    with pytest.raises(AttributeError):
        result.name = "other"  # type: ignore[misc]


def test_a_report_lists_failed_and_missing_checks():
    class Lacking(GradientOfTheOtherMetric):
        def log(self, x, y):
            raise NotImplementedError("Lacking has no log")

    report = check_all(Lacking(CANONICAL), (3, 2))
    assert "riesz" in report.failed
    assert report.missing == {"exp_log": "Lacking has no log", "dist": "Lacking has no log"}
    lines = repr(report).splitlines()
    assert any(line.split()[:2] == ["riesz", "FAILED"] for line in lines)
    assert any(line.split()[:2] == ["exp_log", "missing"] for line in lines)
    assert "<td" in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["missing"] == report.missing
    assert any("log, dist" in note for note in report["batch"].notes)
    with pytest.raises(KeyError, match="Lacking has no log"):
        report["dist"]


def test_an_exception_is_a_failed_check():
    class Crashes(Stiefel):
        def tangent_basis(self, x):
            raise ZeroDivisionError("oops")

    report = check_all(Crashes(), (3, 2))
    assert "tangent_basis" in report.failed
    assert "ZeroDivisionError: oops" in repr(report["tangent_basis"])


# --- the pytest class -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithoutLog(Stiefel):
    def log(self, x, y):
        raise NotImplementedError("WithoutLog has no log")


def run(manifold, test, not_applicable, shape=(3, 2)):
    # a class of the caller's, not collected here
    suite = type("Suite", (testing.ManifoldConformance,), {"not_applicable": not_applicable, "bad_shapes": [(2, 3)]})()
    if test == "test_not_applicable_is_in_order":
        return suite.test_not_applicable_is_in_order()
    return getattr(suite, test)(manifold, shape, torch.float64)


def test_what_is_missing_fails_unless_it_is_listed():
    with pytest.raises(pytest.fail.Exception, match=r"WithoutLog has no log; implement it.*'test_exp_log'"):
        run(WithoutLog(), "test_exp_log", {})
    with pytest.raises(pytest.skip.Exception, match=r"nobody knows one \(NotImplementedError\)"):
        run(WithoutLog(), "test_exp_log", {"test_exp_log": "nobody knows one"})


def test_what_fails_fails_unless_it_is_listed():
    with pytest.raises(AssertionError, match="riesz of GradientOfTheOtherMetric"):
        run(GradientOfTheOtherMetric(CANONICAL), "test_riesz", {})
    with pytest.raises(pytest.skip.Exception, match="known to be wrong"):
        run(GradientOfTheOtherMetric(CANONICAL), "test_riesz", {"test_riesz": "known to be wrong"})


def test_what_is_listed_and_works_fails():
    with pytest.raises(pytest.fail.Exception, match="test_riesz passes: remove it from not_applicable"):
        run(Stiefel(), "test_riesz", {"test_riesz": "was broken once"})


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"test_logarithm": "no"}, "'test_logarithm', which is not a test of Suite"),
        ({"test_exp_log": " "}, "no reason for test_exp_log"),
        ({"test_not_applicable_is_in_order": "a nuisance"}, "cannot be left out"),
    ],
)
def test_the_list_is_checked(listed, message):
    with pytest.raises(AssertionError, match=message):
        run(Stiefel(), "test_not_applicable_is_in_order", listed)
    run(Stiefel(), "test_not_applicable_is_in_order", {"test_exp_log": "no"})


def test_shapes_may_be_drawn():
    seen = []

    @dataclass(frozen=True)
    class Records(Stiefel):
        def check_shape(self, shape):
            seen.append(tuple(shape))
            super().check_shape(shape)

    run(Records(), "test_projection", {}, st.sampled_from([(3, 2), (2, 5, 1)]))
    assert {(3, 2), (2, 5, 1)} == set(seen)


def test_every_check_is_a_test():
    tests = {name.removeprefix("test_") for name in dir(testing.ManifoldConformance) if name.startswith("test_")}
    assert tests == set(CHECKS) | {"not_applicable_is_in_order"}


def test_only_the_pytest_class_needs_pytest():
    code = """
import sys
sys.modules.update(dict.fromkeys(["pytest", "hypothesis", "matplotlib"]))  # None: not to be imported
from geodescent.manifolds import Stiefel
from geodescent.manifolds import testing
assert testing.check_values(Stiefel()).passed
try:
    testing.ManifoldConformance
except ImportError as error:
    assert "geodescent[test]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
