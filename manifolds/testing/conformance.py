"""The conformance suite as pytest classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..manifold import Manifold
from ._cases import Invariant, radius
from .runner import CHECKS, takes

try:
    import pytest
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ImportError as error:  # they serve tests alone
    raise ImportError(
        "the test classes of geodescent.manifolds.testing need pytest and hypothesis: pip install 'geodescent[test]'. "
        "The checks themselves (check_all and the others) need neither"
    ) from error

__all__ = [
    "BehaviourConformance",
    "GeodesicConformance",
    "ManifoldConformance",
    "PointConformance",
    "StepConformance",
]

_SEEDS = st.integers(0, 2**31 - 1)
_SPREADS = st.floats(0, 6)


def _powers_of_ten(low: float, high: float) -> SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


class _Conformance:
    """Fixtures, options and the rule for what is skipped; see :class:`ManifoldConformance`."""

    not_applicable: ClassVar[Mapping[str, str]] = {}
    bad_shapes: ClassVar[Sequence[tuple[int, ...]]] = ()
    invariant: ClassVar[Invariant | None] = None
    rtol: ClassVar[float | None] = None
    noise: ClassVar[float] = 0.1
    examples: ClassVar[int] = 5

    @pytest.fixture
    def manifold(self) -> Manifold:
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `manifold`")

    @pytest.fixture
    def shape(self) -> tuple[int, ...] | SearchStrategy[tuple[int, ...]]:
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `shape`")

    @pytest.fixture
    def dtype(self) -> torch.dtype:
        return torch.float64

    def test_not_applicable_is_in_order(self):
        """Every test listed as not applicable exists and has a reason; that it does not pass is seen when it runs."""
        for name, reason in self.not_applicable.items():
            assert hasattr(self, name), f"not_applicable names {name!r}, which is not a test of {type(self).__name__}"
            assert name.removeprefix("test_") in CHECKS, f"{name} cannot be left out"
            assert reason.strip(), f"not_applicable gives no reason for {name}"

    def examine(
        self,
        name: str,
        manifold: Manifold,
        shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]],
        dtype: torch.dtype = torch.float64,
        *,
        examples: int | None = None,
        **options: SearchStrategy[Any],
    ) -> None:
        """Run ``check_<name>`` at random points with options drawn from strategies, and assert that it passes."""
        check = CHECKS[name]
        fixed = {
            "invariant": type(self).invariant,
            "bad_shapes": self.bad_shapes,
            "rtol": self.rtol,
            "noise": self.noise,
        }
        fixed = {option: value for option, value in fixed.items() if takes(check, option)}
        shapes = shape if isinstance(shape, SearchStrategy) else st.just(tuple(shape))
        seeded = takes(check, "seed")
        missing: list[NotImplementedError] = []
        # what is listed as not applicable is expected to fail, and needs no smaller example of it
        phases = settings().phases if f"test_{name}" not in self.not_applicable else (Phase.generate,)

        @settings(max_examples=min(self.examples, examples or self.examples), deadline=None, phases=phases)
        @given(shape=shapes, seed=_SEEDS, drawn=st.fixed_dictionaries(dict(options)))
        def examples_pass(shape: tuple[int, ...], seed: int, drawn: dict[str, Any]) -> None:
            x = manifold.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
            if missing:
                return
            try:
                result = check(manifold, x, **({"seed": seed} if seeded else {}), **fixed, **drawn)
            except NotImplementedError as error:  # not a property of the example
                missing.append(error)
            else:
                assert result.passed, repr(result)

        def run() -> None:
            examples_pass()
            if missing:
                raise missing[0]

        self._hold_to_list(f"test_{name}", run)

    def _hold_to_list(self, test: str, run: Callable[[], None]) -> None:
        reason = self.not_applicable.get(test)
        if reason is None:
            try:
                run()
            except NotImplementedError as error:
                pytest.fail(f"{error}; implement it, or give the reason in not_applicable[{test!r}]", pytrace=False)
            return
        try:
            run()
        except Exception as error:
            pytest.skip(f"{reason} ({type(error).__name__})")
        pytest.fail(f"{test} passes: remove it from not_applicable", pytrace=False)


class PointConformance(_Conformance):
    """The part of :class:`ManifoldConformance` that is about one point: projection, metric, gradient, basis."""

    def test_random(self, manifold, shape, dtype):
        self.examine("random", manifold, shape, dtype)

    def test_metric(self, manifold, shape, dtype):
        self.examine("metric", manifold, shape, dtype)

    def test_projection(self, manifold, shape, dtype):
        self.examine("projection", manifold, shape, dtype, spread=_SPREADS)

    def test_project_point(self, manifold, shape, dtype):
        self.examine("project_point", manifold, shape, dtype)

    def test_riesz(self, manifold, shape, dtype):
        self.examine("riesz", manifold, shape, dtype, spread=_SPREADS)

    def test_tangent_basis(self, manifold, shape, dtype):
        self.examine("tangent_basis", manifold, shape, dtype, examples=1)


class StepConformance(_Conformance):
    """The part of :class:`ManifoldConformance` that is about retraction and transport."""

    def test_retraction_first_order(self, manifold, shape):
        self.examine("retraction_first_order", manifold, shape, length=_powers_of_ten(-6, 2))

    def test_inverse_retraction(self, manifold, shape, dtype):
        # no farther than a retraction can be asked to be one to one
        reach = math.log10(min(0.8, 0.5 * radius(manifold)))
        self.examine("inverse_retraction", manifold, shape, dtype, length=_powers_of_ten(-6, reach))

    def test_pushforward(self, manifold, shape):
        self.examine("pushforward", manifold, shape, length=_powers_of_ten(-6, 0))

    def test_order(self, manifold, shape):
        self.examine("order", manifold, shape, examples=1)

    def test_transport(self, manifold, shape, dtype):
        self.examine("transport", manifold, shape, dtype, length=_powers_of_ten(-6, 0))


class GeodesicConformance(_Conformance):
    """The part of :class:`ManifoldConformance` that is about geodesics: exp, log, dist and the Hessian."""

    def test_geodesic(self, manifold, shape):
        self.examine("geodesic", manifold, shape, examples=2, fraction=_powers_of_ten(-2, math.log10(0.85)))

    def test_exp_log(self, manifold, shape, dtype):
        self.examine("exp_log", manifold, shape, dtype, examples=3, fraction=_powers_of_ten(-6, math.log10(0.85)))

    def test_dist(self, manifold, shape, dtype):
        self.examine("dist", manifold, shape, dtype, examples=1, fraction=_powers_of_ten(-2, math.log10(0.5)))

    def test_hessian(self, manifold, shape):
        self.examine("hessian", manifold, shape, examples=1)


class BehaviourConformance(_Conformance):
    """The part of :class:`ManifoldConformance` that is about inputs: gradients, batches, dtypes, strides, errors."""

    def test_gradients(self, manifold, shape):
        self.examine("gradients", manifold, shape, examples=1)

    def test_batch(self, manifold, shape, dtype):
        self.examine("batch", manifold, shape, dtype, examples=1)

    def test_dtype(self, manifold, shape):
        self.examine("dtype", manifold, shape, examples=1)

    def test_device(self, manifold, shape, dtype):
        self.examine("device", manifold, shape, dtype, examples=1)

    def test_strides(self, manifold, shape, dtype):
        self.examine("strides", manifold, shape, dtype, examples=1)

    def test_values(self, manifold, shape):
        self.examine("values", manifold, shape, examples=1)

    def test_errors(self, manifold, shape, dtype):
        self.examine("errors", manifold, shape, dtype, examples=1)


class ManifoldConformance(PointConformance, StepConformance, GeodesicConformance, BehaviourConformance):
    """Every property that a manifold, a metric, a retraction or a transport of this package has, as tests.

    Subclass it, give the fixtures, and pytest runs them all::

        class TestMySpace(ManifoldConformance):
            @pytest.fixture
            def manifold(self):
                return MySpace()

            @pytest.fixture(params=[(3,), (2, 5)], ids=str)
            def shape(self, request):
                return request.param

    The four base classes are its parts, for spaces that share code with one that runs the whole.

    Fixtures:
        manifold: the object to test. A new metric or retraction is tested inside the manifold it belongs to, as in
            ``Stiefel(MyMetric(), MyRetraction())``.
        shape: the shape of a point, batch dimensions first; or a Hypothesis strategy of such shapes.
        dtype: float64 unless overridden. Checks that take difference quotients use float64 in any case.

    Hypothesis draws seeds, step lengths, how far apart the sizes of entries are, and shapes where ``shape`` is a
    strategy.

    Attributes:
        not_applicable: test name → why it does not apply. Such a test is skipped with the reason, as long as it does
            not pass: a listed test that passes is a failure, and so is a name that is not a test. A method that is
            missing (``NotImplementedError``) is a failure unless it is listed.
        bad_shapes: shapes that cannot hold a point, besides those with too few dimensions.
        invariant: for quotient spaces, sends all representatives of a point to one tensor, as
            ``staticmethod(lambda x: x @ x.mT)``.
        rtol: the relative error allowed where rounding is the only source of error, if not the default of 10⁴ ulp.
        noise: how far from the space a tensor may be thrown that ``project_point`` is to bring back; an open set needs
            less than the default of 0.1 an entry.
        examples: how many examples Hypothesis draws at most in a test.
    """
