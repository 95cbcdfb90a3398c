"""Watch any torch optimizer at work: how good is each step, parameter by parameter? See :func:`audit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..manifolds import Euclidean, Manifold, ManifoldParameter, Stiefel, from_geoopt
from ._arrays import frobenius, ratio
from ._audit_report import AuditReport, AuditRow
from .norms import Norm, find_norm
from .spectra import condition_number
from .steepest import steepest_descent_certificate

Factory = Callable[[list[Any]], torch.optim.Optimizer]


def audit(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | Mapping[str, Tensor] | None = None,
    *,
    norm: str | Norm = "metric",
    manifolds: Mapping[str, Manifold] | None = None,
    factory: Factory | None = None,
    every: int = 1,
    max_iter: int = 100,
) -> Audit:
    """Record what each step of ``optimizer`` does to its matrices, while it trains as it always does.

    The optimizer may be anyone's: torch's, geoopt's, this project's or your own, as long as it derives from
    ``torch.optim.Optimizer``. Hooks copy parameters and gradients before a step and measure after it, in float64; no
    parameter, gradient, optimizer state or random generator is touched, so that the training is the same to the bit.

    What is recorded, the worst over the matrices of a parameter, is described at :class:`AuditRow`.

    Args:
        model: names for the parameters: a module, or named tensors; without it they are numbered.
        norm: that steps are scored in, as in :func:`steepest_descent_certificate`.
        manifolds: the manifold of parameters by name, for plain tensors that are meant to stay on one. Other parameters
            are asked for theirs (attribute ``manifold``, of this package or of geoopt), and then their group.
            Parameters without one are audited in Euclidean space, if they have two dimensions or more.
        factory: ``factory(params)`` makes an optimizer of the same kind. With it ``equivariance_defect`` is measured.
        every: audit one step in so many. An audited step costs some SVDs a matrix, and in a norm without a closed form
            a convex problem a matrix.
        max_iter: of that problem.

    Use it as a context manager; outside the ``with`` nothing is recorded. ``report()`` gives what there is so far.

    Raises:
        TypeError: the optimizer does not derive from ``torch.optim.Optimizer``.
        ValueError: an unknown norm; a name in ``manifolds`` that the model lacks or that cannot hold a point; every
            < 1.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(6, 4, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with audit(optimizer, model) as watched:
        ...     model(torch.ones(2, 6)).square().sum().backward()
        ...     optimizer.step()
        >>> row = watched.report().rows[0]
        >>> row.name, round(row.efficiency, 6)
        ('weight', 1.0)
    """
    return Audit(optimizer, model, norm, manifolds or {}, factory, every, max_iter)


class Audit:
    """What :func:`audit` returns: a context manager that records, and :meth:`report`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | Mapping[str, Tensor] | None,
        norm: str | Norm,
        manifolds: Mapping[str, Manifold],
        factory: Factory | None,
        every: int,
        max_iter: int,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}")
        if every < 1:
            raise ValueError(f"every must be at least 1, found {every}")
        find_norm(norm)  # an unknown one is an error now, not at the first step
        named = dict(model.named_parameters() if isinstance(model, nn.Module) else model or {})
        self._names = {id(p): name for name, p in named.items()}
        if unknown := set(manifolds) - set(named):
            raise ValueError(f"manifolds names {sorted(unknown)}, which the model does not have")
        for name, manifold in manifolds.items():
            manifold.check_shape(named[name].shape)  # an error now, not in the middle of the training
        self.optimizer, self.norm, self.factory, self.every, self.max_iter = optimizer, norm, factory, every, max_iter
        self._manifolds = dict(manifolds)
        self._rows: list[AuditRow] = []
        self._steps = 0
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._hooks: list[Any] = []

    # --- recording ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Audit:
        if self._hooks:
            raise RuntimeError("this audit is recording already")
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._pre),
            self.optimizer.register_step_post_hook(self._post),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._before = {}

    def report(self) -> AuditReport:
        """Everything recorded so far."""
        norm = self.norm if isinstance(self.norm, str) else self.norm.name
        return AuditReport(type(self.optimizer).__name__, norm, self._steps, tuple(self._rows))

    def _parameters(self) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
        number = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                yield number, p, group
                number += 1

    @torch.no_grad()
    def _pre(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._steps += 1
        self._before = {}
        if (self._steps - 1) % self.every:
            return None
        for number, p, _group in self._parameters():
            if p.requires_grad and p.ndim >= 2:
                self._before[number] = plain_copy(p), None if p.grad is None else plain_copy(p.grad)
        # a closure makes the gradients inside step(): those of its first call are the ones at the point left
        optimizer, *rest = args
        closure = kwargs.get("closure", rest[0] if rest else None)
        if closure is None:
            return None
        first = True

        def watched() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                for number, p, _group in self._parameters():
                    if number in self._before and p.grad is not None:
                        self._before[number] = self._before[number][0], plain_copy(p.grad)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (optimizer, watched, *rest[1:]), kwargs

    @torch.no_grad()
    def _post(self, *_: Any) -> None:
        before, self._before = self._before, {}
        for number, p, group in self._parameters():
            start, gradient = before.get(number, (None, None))
            if start is None or gradient is None:
                continue
            name = self._names.get(id(p), f"parameter {number}")
            self._rows.append(self._measure(name, p, start, gradient, group))

    # --- measuring ------------------------------------------------------------------------------------------------

    def _measure(self, name: str, p: Tensor, start: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> AuditRow:
        manifold = self._manifolds.get(name) or manifold_of(p, group)
        after = plain_copy(p)
        if isinstance(manifold, Euclidean) and p.ndim > 3:
            # a convolution's kernel is one matrix, (out, in·height·width)
            start, gradient, after = (value.flatten(1) for value in (start, gradient, after))
        displacement = after - start
        lr = float(group["lr"]) if "lr" in group else math.nan
        common: dict[str, Any] = {
            "name": name,
            "step": self._steps,
            "manifold": repr(manifold),
            "shape": tuple(p.shape),
            "lr": lr,
            "rms_step": float(displacement.square().mean().sqrt()),
        }
        common["effective_step"] = common["rms_step"] / lr if lr else math.nan
        if not bool(torch.isfinite(torch.stack([after.sum(), start.sum(), gradient.sum()])).all()):
            return AuditRow(**common)
        k = manifold.ndim
        # an optimizer may have left the manifold steps ago: it is judged at the nearest points
        x, y = manifold.project_point(start), manifold.project_point(after)
        along = y - x
        velocity = manifold.project(x, along)
        with suppress(ValueError, NotImplementedError):
            velocity = manifold.inverse_retract(x, y)
        found = steepest_descent_certificate(manifold, x, gradient, velocity, self.norm, max_iter=self.max_iter)
        common["efficiency"] = found.cosine
        common["tangency"] = float(ratio(frobenius(displacement - along, k), frobenius(displacement, k)).max())
        common["point_error"] = float(manifold.point_error(after).max())
        if k == 2:
            common["condition_number"] = float(condition_number(after).max())
        if isinstance(manifold, Stiefel):
            common["step_condition"] = float(condition_number(x + velocity).max())
        retract = None if isinstance(manifold, Euclidean) else own_retraction(p, group)
        if retract is not None:
            common["retraction_error"] = retraction_error(retract, manifold, x, velocity)
        if self.factory is not None and k == 2:
            common["equivariance_defect"] = equivariance_defect(self.factory, p, manifold, x, gradient, group)
        return AuditRow(**common)


def plain_copy(value: Tensor) -> Tensor:
    """A float64 copy without subclass, hooks or graph; sparse gradients are filled in."""
    plain = value.detach().as_subclass(Tensor)
    return (plain.to_dense() if plain.is_sparse else plain).to(torch.float64, copy=True)


def manifold_of(p: Tensor, group: Mapping[str, Any]) -> Manifold:
    """The parameter's own manifold, else its group's, else Euclidean space of matrices."""
    for found in (getattr(p, "manifold", None), group.get("manifold")):
        if isinstance(found, Manifold):
            # Euclidean parameters of geoopt or ours are stored with any ndim, and their matrices are what is scored
            return Euclidean(2) if isinstance(found, Euclidean) else found
        if found is not None and hasattr(found, "retr"):
            ours = from_geoopt(found)
            return Euclidean(2) if isinstance(ours, Euclidean) else ours
    return Euclidean(2)


def own_retraction(p: Tensor, group: Mapping[str, Any]) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The retraction that goes with the parameter, geoopt's ``retr`` or our ``retract``; None where it has none."""
    for found in (getattr(p, "manifold", None), group.get("manifold")):
        retract = getattr(found, "retr", None) or getattr(found, "retract", None)
        if retract is not None:
            return retract
    return None


def retraction_error(
    retract: Callable[[Tensor, Tensor], Tensor], manifold: Manifold, x: Tensor, u: Tensor, h: float = 1e-5
) -> float:
    """‖DR_x(0)[u] − u‖/‖u‖ by central differences, the worst over the batch; 0 for a retraction, to about 1e-9."""
    length = frobenius(u, manifold.ndim).reshape(*u.shape[: u.ndim - manifold.ndim], *([1] * manifold.ndim))
    unit = torch.where(length == 0, 0.0, u / torch.where(length == 0, 1.0, length))
    derivative = (retract(x, h * unit) - retract(x, -h * unit)) / (2 * h)
    return float(frobenius(derivative.detach().as_subclass(Tensor) - unit, manifold.ndim).max())


def equivariance_defect(
    factory: Factory, p: Tensor, manifold: Manifold, x: Tensor, gradient: Tensor, group: Mapping[str, Any]
) -> float | None:
    """‖D(Qx, QG) − QD(x, G)‖/‖D‖ of one step D of a fresh optimizer, for a fixed Haar-random Q ∈ O(n); None where
    the manifold is not closed under such a Q."""
    generator = torch.Generator().manual_seed(0)
    n = x.shape[-2]
    q = Stiefel().random_point(n, n, dtype=torch.float64, generator=generator).to(x.device)
    if not bool((manifold.point_error(q @ x) <= 1e-8).all()):
        return None
    steps = []
    # whatever the fresh optimizer draws, the training's random numbers stay what they were
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.enable_grad():
        for at, g in ((x, gradient), (q @ x, q @ gradient)):
            parameter = like_parameter(p, at, manifold)
            parameter.grad = g.clone()
            fresh = factory([parameter])
            for settings in fresh.param_groups:
                if "lr" in group and "lr" in settings:
                    settings["lr"] = group["lr"]
            fresh.step()
            steps.append(plain_copy(parameter) - at)
    return float(ratio(frobenius(steps[1] - q @ steps[0], 2), frobenius(steps[0], 2)).max())


def like_parameter(p: Tensor, data: Tensor, manifold: Manifold) -> nn.Parameter:
    """A float64 parameter at ``data`` of the kind of ``p``: plain, of this package, or of geoopt."""
    if isinstance(p, ManifoldParameter):
        return ManifoldParameter(data.clone(), p.manifold, project=True)
    own = getattr(p, "manifold", None)
    if own is not None and hasattr(own, "retr"):
        return type(p)(data.clone(), manifold=own)  # type: ignore[call-arg]
    return nn.Parameter(data.clone())
