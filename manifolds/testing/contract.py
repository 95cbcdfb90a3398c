"""Checks of value semantics, and of the errors that wrong input gets."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import NotOnManifoldError
from ..manifold import Manifold
from ._cases import METHODS, ambient, call, generator_like, worst
from ._result import CheckResult, Recorder

__all__ = ["check_errors", "check_values"]


def check_values(
    manifold: Manifold, x: Tensor | None = None, *, namespace: dict[str, object] | None = None
) -> CheckResult:
    """The manifold is a value: immutable, equal and of equal hash to its copies, and its ``repr`` evaluates back.

    Args:
        x: not used; taken so that all checks are called alike.
        namespace: names for evaluating the ``repr``, besides those of ``geodescent.manifolds`` and of the modules
            where the classes of the manifold and its parts are defined.
    """
    recorder = Recorder("values", manifold)
    names: dict[str, object] = {}
    for part in _parts(manifold):
        names.update(vars(sys.modules[type(part).__module__]))
    names.update(vars(sys.modules[__name__.rsplit(".", 2)[0]]))  # the package that this one is in
    names.update({type(part).__name__: type(part) for part in _parts(manifold)})
    names.update(namespace or {})
    copies: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy(manifold),
        "deepcopy": lambda: copy.deepcopy(manifold),
        "pickle": lambda: pickle.loads(pickle.dumps(manifold)),
        "repr": lambda: eval(repr(manifold), names),
    }
    for kind, make in copies.items():
        try:
            twin = make()
        except Exception as error:  # whatever it is, it is the finding
            recorder.holds(f"{kind}: can be made", False, f"{type(error).__name__}: {error}")
            continue
        recorder.holds(f"{kind}: of the same class", type(twin) is type(manifold))
        recorder.holds(f"{kind}: equal", bool(twin == manifold))
        recorder.holds(f"{kind}: same hash", hash(twin) == hash(manifold))
        recorder.holds(f"{kind}: same repr", repr(twin) == repr(manifold))
    recorder.holds("differs from another object", manifold != object())
    try:
        object_changed = True
        manifold.conformance_probe = None  # type: ignore[attr-defined]
        del manifold.conformance_probe  # type: ignore[attr-defined]
    except AttributeError:
        object_changed = False
    recorder.holds("immutable", not object_changed)
    tensors = [type(p).__name__ for p in _parts(manifold) if isinstance(p, Tensor)]
    recorder.holds("holds no tensors", not tensors)
    return recorder.result()


def _parts(value: object) -> Iterator[object]:
    """A value object and the values it holds, and theirs."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item)


def check_errors(
    manifold: Manifold, x: Tensor, seed: int = 0, *, bad_shapes: Sequence[tuple[int, ...]] = ()
) -> CheckResult:
    """Wrong shapes are a ``ValueError``, and points and vectors that are off are a ``NotOnManifoldError``.

    Args:
        bad_shapes: shapes that cannot hold a point, besides those with too few dimensions.
    """
    recorder = Recorder("errors", manifold)
    short = [tuple(x.shape[-k:]) if k else () for k in range(manifold.ndim)]
    for shape in (*short, *bad_shapes):
        a = torch.zeros(shape, dtype=x.dtype, device=x.device)
        wrong: dict[str, Tensor] = dict.fromkeys("xuvyzwa", a)
        attempts: dict[str, Callable[[], object]] = {
            "check_shape": lambda shape=shape: manifold.check_shape(shape),
            "dim": lambda shape=shape: manifold.dim(shape),
            "random_point": lambda shape=shape: manifold.random_point(*shape),
            "check_point": lambda a=a: manifold.check_point(a),
            **{m: lambda m=m, wrong=wrong: call(manifold, m, wrong) for m in METHODS},
        }
        for method, attempt in attempts.items():
            fact, explanation = _raises(attempt, ValueError)
            if not isinstance(explanation, NotImplementedError):
                recorder.holds(f"{method}: ValueError for shape {shape}", fact, _tell(explanation))

    off = torch.full_like(x, float("nan"))
    recorder.holds("check_point: NaN is refused", *_told(lambda: manifold.check_point(off)))
    recorder.holds("check_tangent: NaN is refused", *_told(lambda: manifold.check_tangent(x, off)))
    generator = generator_like(x, seed)
    recorder.holds("check_point: points are accepted", *_accepts(lambda: manifold.check_point(x)))
    u = manifold.random_tangent(x, generator)
    recorder.holds("check_tangent: tangent vectors are accepted", *_accepts(lambda: manifold.check_tangent(x, u)))
    # whatever the diagnostics call off has to be refused; in a linear space they call nothing off
    a = 3 * x + ambient(x, generator)
    if worst(manifold.point_error(a)) > 0.1:
        recorder.holds("check_point: other tensors are refused", *_told(lambda: manifold.check_point(a)))
    if worst(manifold.tangent_error(x, a)) > 0.1:
        recorder.holds("check_tangent: other tensors are refused", *_told(lambda: manifold.check_tangent(x, a)))
    return recorder.result()


def _raises(attempt: Callable[[], object], kind: type[Exception]) -> tuple[bool, Exception | None]:
    try:
        attempt()
    except kind as error:
        return True, error
    except Exception as error:
        return False, error
    return False, None


def _tell(error: Exception | None) -> str:
    return (
        "no error" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


def _told(attempt: Callable[[], object]) -> tuple[bool, str]:
    fact, error = _raises(attempt, NotOnManifoldError)
    return fact, _tell(error)


def _accepts(attempt: Callable[[], object]) -> tuple[bool, str]:
    error = _raises(attempt, Exception)[1]
    return error is None, _tell(error)
