"""All checks at once, for a notebook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch

from ..manifold import Manifold
from ._cases import Invariant
from ._result import CheckResult, ConformanceReport, Recorder
from .algebra import check_metric, check_project_point, check_projection, check_random, check_riesz, check_tangent_basis
from .behaviour import check_batch, check_device, check_dtype, check_strides
from .contract import check_errors, check_values
from .geodesics import check_dist, check_exp_log, check_geodesic
from .gradients import check_gradients
from .hessian import check_hessian
from .slopes import check_order
from .steps import check_inverse_retraction, check_pushforward, check_retraction_first_order, check_transport

__all__ = ["CHECKS", "check_all", "takes"]

CHECKS: dict[str, Callable[..., CheckResult]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_random,
        check_metric,
        check_projection,
        check_project_point,
        check_riesz,
        check_tangent_basis,
        check_retraction_first_order,
        check_inverse_retraction,
        check_pushforward,
        check_order,
        check_transport,
        check_geodesic,
        check_exp_log,
        check_dist,
        check_hessian,
        check_gradients,
        check_batch,
        check_dtype,
        check_device,
        check_strides,
        check_values,
        check_errors,
    )
}
"""Every check by its name, in the order in which they are worth reading."""


def takes(check: Callable[..., CheckResult], option: str) -> bool:
    """Whether a check has an argument of that name."""
    return option in inspect.signature(check).parameters


def check_all(
    manifold: Manifold,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    seed: int = 0,
    invariant: Invariant | None = None,
    bad_shapes: Sequence[tuple[int, ...]] = (),
) -> ConformanceReport:
    """Run every check once, at a random point.

    The result is a table where it is displayed or printed. An exception in a method fails the check it happened in;
    ``NotImplementedError`` lists the check as missing.

    Args:
        shape: of a point, with batch dimensions if any.
        invariant: for quotient spaces, sends all representatives of a point to one tensor; as X ↦ XXᵀ.
        bad_shapes: see :func:`check_errors`.

    Example:
        >>> from geodescent.manifolds import Stiefel
        >>> check_all(Stiefel(), (5, 3)).failed
        ()
    """
    generator = torch.Generator(device=device or "cpu").manual_seed(seed)
    x = manifold.random_point(*shape, dtype=dtype, device=device, generator=generator)
    results, missing = [], {}
    for name, check in CHECKS.items():
        fixed = {"seed": seed, "invariant": invariant, "bad_shapes": bad_shapes}
        options = {option: value for option, value in fixed.items() if takes(check, option)}
        try:
            results.append(check(manifold, x, **options))
        except NotImplementedError as error:
            missing[name] = str(error)
        except Exception as error:  # whatever it is, it is the finding
            results.append(_crashed(name, manifold, error))
    return ConformanceReport(repr(manifold), tuple(shape), tuple(results), missing)


def _crashed(name: str, manifold: Manifold, error: Exception) -> CheckResult:
    recorder = Recorder(name, manifold)
    recorder.holds("no exception", False, f"{type(error).__name__}: {error}")
    return recorder.result()
