"""The conformance suite: the checks that every space of this package passes, for anyone's manifold.

:class:`ManifoldConformance` is a pytest class to inherit from. The checks behind it are functions that return numbers,
and :func:`check_all` runs them all on one manifold::

    from geodescent.manifolds.testing import check_all, plot_slopes

    check_all(Stiefel(MyMetric(), MyRetraction()), (5, 3))
    plot_slopes(Stiefel(MyMetric(), MyRetraction()))
"""

from typing import TYPE_CHECKING

from ._result import CheckResult, ConformanceReport, Measurement
from .algebra import check_metric, check_project_point, check_projection, check_random, check_riesz, check_tangent_basis
from .behaviour import check_batch, check_device, check_dtype, check_strides
from .contract import check_errors, check_values
from .geodesics import check_dist, check_exp_log, check_geodesic
from .gradients import check_gradients
from .hessian import check_hessian
from .runner import CHECKS, check_all
from .slopes import Slope, check_order, claimed_order, measure_order, plot_slopes
from .steps import (
    check_inverse_retraction,
    check_pushforward,
    check_retraction_first_order,
    check_transport,
    claims_isometry,
)

if TYPE_CHECKING:
    from .conformance import (
        BehaviourConformance,
        GeodesicConformance,
        ManifoldConformance,
        PointConformance,
        StepConformance,
    )

__all__ = [
    "CHECKS",
    "BehaviourConformance",
    "CheckResult",
    "ConformanceReport",
    "GeodesicConformance",
    "ManifoldConformance",
    "Measurement",
    "PointConformance",
    "Slope",
    "StepConformance",
    "check_all",
    "check_batch",
    "check_device",
    "check_dist",
    "check_dtype",
    "check_errors",
    "check_exp_log",
    "check_geodesic",
    "check_gradients",
    "check_hessian",
    "check_inverse_retraction",
    "check_metric",
    "check_order",
    "check_project_point",
    "check_projection",
    "check_pushforward",
    "check_random",
    "check_retraction_first_order",
    "check_riesz",
    "check_strides",
    "check_tangent_basis",
    "check_transport",
    "check_values",
    "claimed_order",
    "claims_isometry",
    "measure_order",
    "plot_slopes",
]


def __getattr__(name: str) -> object:
    # pytest and hypothesis are wanted by these classes alone, and only when one is asked for
    if name.endswith("Conformance") and name in __all__:
        from . import conformance

        return getattr(conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
