"""Checks of how methods treat their inputs: batches, dtypes, devices, strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..manifold import Manifold
from ._cases import METHODS, call, gap, inputs, tolerance, worst
from ._result import CheckResult, Recorder

__all__ = ["check_batch", "check_device", "check_dtype", "check_strides"]

# Iterative solvers stop at a tolerance, and stop elsewhere in a batch than alone.
_ITERATIVE = frozenset({"log", "dist", "inverse_retract"})
# By default these are made of other methods, each of which rounds its own result to a half.
_COMPOSED = frozenset({"norm", "dist", "transport", "retract_transport"})


def _present(manifold: Manifold, given: dict[str, Tensor], recorder: Recorder) -> dict[str, tuple[Tensor, ...]]:
    """What each method returns; those that are not implemented are named in a note."""
    results, missing = {}, []
    for method in METHODS:
        try:
            results[method] = call(manifold, method, given)
        except NotImplementedError:
            missing.append(method)
    if missing:
        recorder.note(f"not implemented, so not measured: {', '.join(missing)}")
    return results


def _largest_gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(gap(a, b) for a, b in zip(found, expected, strict=True))


def check_batch(manifold: Manifold, x: Tensor, seed: int = 0, *, rtol: float | None = None) -> CheckResult:
    """Every method gives for a batch what a loop over it gives; points broadcast; empty batches are batches."""
    recorder, tol = Recorder("batch", manifold), tolerance(x.dtype, rtol)
    batch = (2, 2)
    given = inputs(manifold, x, seed, batch)
    results = _present(manifold, given, recorder)
    size = batch[0] * batch[1]
    for method, found in results.items():
        rows = [
            call(manifold, method, {name: t.reshape(size, *x.shape)[i] for name, t in given.items()})
            for i in range(size)
        ]
        looped = [torch.stack(part).reshape(*batch, *part[0].shape) for part in zip(*rows, strict=True)]
        limit = 100 * tol if method in _ITERATIVE else tol
        recorder.at_most(f"{method}: batch against loop", _largest_gap(found, looped), limit)

    # one point, many vectors
    one = {name: t[0, 0] if name == "x" else t[0] for name, t in given.items()}
    one["y"] = manifold.retract(one["x"].expand_as(one["u"]), one["u"])
    alike = {**one, "x": one["x"].expand_as(one["u"])}
    for method in results:
        if "x" in METHODS[method] and len(METHODS[method]) > 1:
            limit = 100 * tol if method in _ITERATIVE else tol
            error = _largest_gap(call(manifold, method, one), call(manifold, method, alike))
            recorder.at_most(f"{method}: one point for many vectors", error, limit)

    for empty in ((0,), (2, 0)):
        nothing = {name: t[0, 0].expand(*empty, *x.shape) for name, t in given.items()}
        for method, found in results.items():
            expected = [(*empty, *part.shape[len(batch) :]) for part in found]
            shapes = [tuple(part.shape) for part in call(manifold, method, nothing)]
            recorder.holds(f"{method}: empty batch {empty}", shapes == expected, f"{shapes} instead of {expected}")
    return recorder.result()


def check_dtype(manifold: Manifold, x: Tensor, seed: int = 0, *, rtol: float | None = None) -> CheckResult:
    """float32 and float64 are computed in themselves, whatever torch's default; halves in float32 and rounded back."""
    recorder = Recorder("dtype", manifold)
    exact = inputs(manifold, x.detach().to(torch.float64), seed)
    reference = _present(manifold, exact, recorder)
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            given = {name: t.to(dtype) for name, t in exact.items()}
            tol = tolerance(dtype, rtol) * max(1.0, worst(x))
            # under the other default, a constant that was made without naming its dtype shows
            other = torch.float32 if dtype == torch.float64 else torch.float64
            torch.set_default_dtype(other)
            for method, expected in reference.items():
                found = call(manifold, method, given)
                label = f"{method}: {dtype} with default {other}"
                recorder.holds(f"{label}, dtype kept", all(t.dtype == dtype for t in found))
                error = _largest_gap([t.double() for t in found], expected)
                recorder.at_most(f"{label}, error", error, 100 * tol if method in _ITERATIVE else tol)
    finally:
        torch.set_default_dtype(default)

    for dtype in (torch.float16, torch.bfloat16):
        # enough entries for the share of those that are rounded right to mean something
        halves = {name: t.to(dtype) for name, t in inputs(manifold, exact["x"], seed, (16,)).items()}
        floats = {name: t.float() for name, t in halves.items()}
        for method in reference:
            _check_half(manifold, recorder, method, dtype, halves, floats)
    return recorder.result()


def _check_half(
    manifold: Manifold,
    recorder: Recorder,
    method: str,
    dtype: torch.dtype,
    halves: dict[str, Tensor],
    floats: dict[str, Tensor],
) -> None:
    try:
        expected = call(manifold, method, floats)
    except ValueError:
        return  # points rounded to a half may be too far off for a solver; then there is nothing to agree with
    label = f"{method}: {dtype}"
    try:
        found = call(manifold, method, halves)
    except RuntimeError as error:  # torch has no factorizations for halves
        recorder.holds(f"{label} is computed", False, str(error).splitlines()[0])
        return
    if method in ("point_error", "tangent_error"):
        # diagnostics: they say how far off the rounded data is, and may answer in float32
        recorder.at_most(f"{label}, error", _largest_gap([t.float() for t in found], expected), torch.finfo(dtype).eps)
        return
    recorder.holds(f"{label}, dtype kept", all(t.dtype == dtype for t in found))
    eps = torch.finfo(dtype).eps
    if method in _COMPOSED:
        recorder.at_most(f"{label}, error", _largest_gap([t.float() for t in found], expected), 4 * eps)
        return
    # computed in float32 and rounded once, nearly every entry is the float32 result rounded; where arithmetic in
    # halves comes in, a third of them are not
    for part, right in zip(found, expected, strict=True):
        rounded = right.to(dtype)
        scale = max(worst(rounded), eps)
        differs = (part.float() - rounded.float()).abs() > 1e-3 * eps * scale
        share = float(differs.float().mean()) if differs.numel() else 0.0
        error = worst(part.float() - rounded.float()) / scale
        recorder.at_most(f"{label}, share of entries that are not the float32 result rounded", share, 0.1)
        recorder.at_most(f"{label}, error", error, 2 * eps)


def check_device(
    manifold: Manifold,
    x: Tensor,
    device: torch.device | str | None = None,
    seed: int = 0,
    *,
    rtol: float | None = None,
) -> CheckResult:
    """Results live on the device of the point, and are those of the CPU.

    Args:
        device: by default CUDA where there is one, and the CPU otherwise.
    """
    recorder, tol = Recorder("device", manifold), tolerance(x.dtype, rtol)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = inputs(manifold, x.cpu(), seed)
    reference = _present(manifold, given, recorder)
    moved = {name: t.to(device) for name, t in given.items()}
    for method, expected in reference.items():
        found = call(manifold, method, moved)
        recorder.holds(f"{method}: on {device.type}", all(t.device.type == device.type for t in found))
        error = _largest_gap([t.cpu() for t in found], expected)
        recorder.at_most(f"{method}: error", error, 100 * tol if method in _ITERATIVE else tol)
    y = manifold.random_point(*x.shape, dtype=x.dtype, device=device)
    recorder.holds("random_point: on the device asked for", y.device.type == device.type)
    recorder.holds("random_tangent: on the device of x", manifold.random_tangent(y).device.type == device.type)
    return recorder.result()


def check_strides(manifold: Manifold, x: Tensor, seed: int = 0, *, rtol: float | None = None) -> CheckResult:
    """Memory layout does not matter, and no method writes to its inputs."""
    recorder, tol = Recorder("strides", manifold), tolerance(x.dtype, rtol)
    given = inputs(manifold, x, seed)
    results = {}
    for method, arguments in METHODS.items():
        fresh = {name: given[name].clone() for name in arguments}
        try:
            results[method] = call(manifold, method, fresh)
        except NotImplementedError:
            continue
        touched = [name for name, t in fresh.items() if t._version or not torch.equal(t, given[name])]
        recorder.holds(f"{method}: inputs unchanged", not touched, f"{', '.join(touched)} was written to")
        # a result may be an input; its values are kept apart from what a faulty method writes there later
        results[method] = tuple(part.clone() for part in results[method])
    for kind, layout in _LAYOUTS.items():
        for method, expected in results.items():
            strided = {name: layout(given[name]) for name in METHODS[method]}
            error = _largest_gap(call(manifold, method, strided), expected)
            recorder.at_most(f"{method}: {kind}", error, 100 * tol if method in _ITERATIVE else tol)
    return recorder.result()


def _transposed(a: Tensor) -> Tensor:
    return a.mT.contiguous().mT if a.ndim > 1 else a.clone()


def _every_other(a: Tensor) -> Tensor:
    if not a.ndim:
        return a.clone()
    wide = a.new_full((*a.shape[:-1], 2 * a.shape[-1]), float("nan"))
    wide[..., ::2] = a
    return wide[..., ::2]


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"transposed storage": _transposed, "every other entry": _every_other}
