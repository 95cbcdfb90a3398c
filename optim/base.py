"""What the optimizers here share: groups, stacks of frames, the policy for bad gradients, and the state's life."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..manifolds import QR, Euclidean, Manifold, ManifoldParameter
from .options import check_options
from .stacking import Stack, local
from .state import loadable_state

__all__ = ["ManifoldOptimizer", "manifold_of"]

_HALF = (torch.float16, torch.bfloat16)


class ManifoldOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of this package: frames are stepped in stacks, plain parameters as torch steps them.

    Which parameters are frames: :class:`~geodescent.manifolds.ManifoldParameter`, and every parameter of a group that
    names its manifold, ``{"params": [...], "manifold": Stiefel()}``. Frames of one group, manifold, shape, dtype and
    device are stepped as one batch, in whatever order they come.

    A subclass says what its arrays a frame are (:meth:`_trailing_shapes`), how a stack is stepped
    (:meth:`_stack_step`, :meth:`_fast_step`) and how plain parameters are (:meth:`_step_plain`).
    """

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The options of the subclass that are one of a few words."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._stacks: dict[int, tuple[tuple, list[Stack], list[Tensor]]] = {}
        super().__init__(params, {**defaults, "manifold": None})
        self._warn_of_idle_decay()

    # --- what a subclass defines --------------------------------------------------------------------------------

    @abstractmethod
    def _trailing_shapes(self, n: int, p: int, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The arrays that the state keeps, each with its shape for one n×p frame."""

    @abstractmethod
    def _stack_step(self, stack: Stack, grads: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """New points, new arrays and which frames the trust radius shortened, (frames,); nothing is written."""

    def _has_fast_step(self, stack: Stack) -> bool:
        """Whether :meth:`_fast_step` can step this stack."""
        return False

    def _fast_step(self, stack: Stack, grads: Tensor | None, norms: Tensor) -> None:
        """Step the stack in place, in a faster way that cannot fail for gradients known to be far from overflow.

        Args:
            grads: the gathered gradients; None where they have not been gathered.
            norms: the Frobenius norms of the frames' gradients, (frames,).
        """
        raise NotImplementedError(f"{type(self).__name__} has no _fast_step")

    @abstractmethod
    def _step_plain(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Step plain parameters."""

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its frames are checked to be on their manifold."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group, self._choices)
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for i, p in enumerate(group["params"]):
            manifold = manifold_of(p, group)
            if manifold is None:
                continue
            name = self._name(group, i)
            if p.ndim < 2 or manifold.ndim != 2:
                raise ValueError(
                    f"{name} lies on {manifold!r}; {type(self).__name__} steps points that are matrices (..., n, p), "
                    f"found shape {tuple(p.shape)}"
                )
            _check_sharding(p, name)
            manifold.check_point(local(p.detach()), name=name)
        coarse = [
            p.dtype for p in group["params"] if p.dtype in _HALF and manifold_of(p, group) is None and p.requires_grad
        ]
        if coarse:
            warnings.warn(
                f"{len(coarse)} plain parameters are {coarse[0]} and are stepped in that precision, as torch.optim "
                "does: steps smaller than their rounding are lost. Keep them in float32 and compute in half "
                "precision under torch.autocast (frames have float32 copies here and need nothing)",
                stacklevel=7,
            )

    def _warn_of_idle_decay(self) -> None:
        decayed = [g for g in self.param_groups if g["weight_decay"] != 0 and g.get("decay") != "fused"]
        idle = [all(manifold_of(p, group) is not None for p in group["params"]) for group in decayed]
        if decayed and all(idle):
            warnings.warn(
                f"weight_decay={decayed[0]['weight_decay']:g} is set only where all parameters are frames, and there "
                "it has no effect: the gradient of the decay is normal to the manifold",
                stacklevel=4,  # the caller of the constructor
            )

    def _name(self, group: dict[str, Any], index: int) -> str:
        names = group.get("param_names")
        where = next((g for g, other in enumerate(self.param_groups) if other is group), 0)
        shape = tuple(group["params"][index].shape)
        return f"parameter {names[index]!r}" if names else f"parameter {index} of group {where}, of shape {shape},"

    def _held(self, claims: set[str]) -> frozenset[str]:
        """``claims`` without what the retraction breaks: qf((X + U)O) is not qf(X + U)O for O in O(p)."""
        manifolds = [manifold_of(p, group) for group in self.param_groups for p in group["params"]]
        if any(isinstance(getattr(manifold, "retraction", None), QR) for manifold in manifolds):
            claims = claims - {"gauge covariance"}
        return frozenset(claims)

    def capped_fraction(self) -> float:
        """The share of the frame steps taken so far that the trust radius shortened; NaN where none was taken."""
        capped = taken = 0.0
        for p, state in self.state.items():
            if "capped" in state:
                capped += float(state["capped"])
                taken += float(state["step"]) * math.prod(local(p.detach()).shape[:-2])
        return capped / taken if taken else math.nan

    # --- step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Within ``torch.compile`` it runs uncompiled, with the same result.

        Args:
            closure: reevaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: a gradient is not finite, or a frame's step overflows, and ``nonfinite="raise"``; nothing was
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step_everything()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            for _, stacks, _ in self._stacks.values():
                for stack in stacks:
                    stack.grads = []
        return loss

    @torch.compiler.disable  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    def _step_everything(self) -> None:
        stacks, plain = [], []
        for group in self.param_groups:
            mine, rest = self._sorted(group)
            stacks.extend(mine)
            if rest:
                plain.append((rest, group))
        self._step_sorted(stacks, plain)

    def _step_sorted(self, stacks: list[Stack], plain: list[tuple[list[Tensor], dict[str, Any]]]) -> None:
        """Step stacks, which hold their gradients, and plain parameters with their groups: all of them, or none."""
        gathered, norms, tame = self._gather(stacks, plain)
        if not tame and not self._gradients_are_finite():
            return
        # a step that can fail is computed whole before any is taken, so that an overflow changes nothing
        results = []
        for stack, grads in zip(stacks, gathered, strict=True):
            if tame and self._has_fast_step(stack):
                continue
            result = self._careful_step(stack, stack.gather(stack.grads) if grads is None else grads)
            if result is None:
                return
            results.append((stack, result))
        for stack, (x, arrays, capped) in results:
            self._take(stack, x, arrays, capped)
        done = {id(stack) for stack, _ in results}
        for stack, grads, frame_norms in zip(stacks, gathered, norms, strict=True):
            if id(stack) not in done:
                self._fast_step(stack, grads, frame_norms)
        for params, group in plain:
            self._step_plain(params, group)

    def _sorted(self, group: dict[str, Any]) -> tuple[list[Stack], list[Tensor]]:
        """The stacks of the frames of a group that have gradients, and the plain parameters that have."""
        params = group["params"]
        grads = [p.grad for p in params]
        present = [g is not None for g in grads]
        # what a stack was made for: the same parameters, storage (and with it the type) and options
        signature = (
            present,
            [p.data_ptr() for p in params],
            id(group["manifold"]),
            group.get("capturable"),
            list(self._trailing_shapes(1, 1, group)),
        )
        known = self._stacks.get(id(group))
        if known is None or known[0] != signature or not all(s.owns_state(self.state) for s in known[1]):
            stacks = self._make_stacks(group, present)
            framed = {id(p) for stack in stacks for p in stack.params}
            rest = [p for p, there in zip(params, present, strict=True) if there and id(p) not in framed]
            self._stacks[id(group)] = known = (signature, stacks, rest)
        for stack in known[1]:
            stack.grads = [local(grads[i]) for i in stack.indices]
        return known[1], known[2]

    def _make_stacks(self, group: dict[str, Any], present: list[bool]) -> list[Stack]:
        families: dict[tuple, list[int]] = {}
        for i, p in enumerate(group["params"]):
            manifold = manifold_of(p, group)
            if present[i] and manifold is not None:
                _check_sharding(p, self._name(group, i))
                here = local(p.detach())
                step = float(self.state[p].get("step", 0.0)) if p in self.state else 0.0
                key = (manifold, here.shape[-2:], here.dtype, here.device, step)
                families.setdefault(key, []).append(i)
        stacks = []
        for key, indices in families.items():
            stack = Stack(key[0], group, [group["params"][i] for i in indices], indices)
            shapes = self._trailing_shapes(*stack.shape, group)
            if stack.is_half:
                shapes["master"] = stack.shape
            stack.attach([self.state[p] for p in stack.params], shapes)
            stacks.append(stack)
        return stacks

    def _gather(self, stacks: list[Stack], plain: list[tuple]) -> tuple[list[Tensor | None], list[Tensor], bool]:
        """The gradients of stacks of small frames; all frames' norms; are all gradients finite, far from overflow?"""
        norms, gathered, limit = [], [], math.inf
        rest = [local(p.grad) for params, _ in plain for p in params if p.grad is not None]
        if any(g.layout is not torch.strided for g in [*rest, *(g for stack in stacks for g in stack.grads)]):
            return [None] * len(stacks), norms, False
        for stack in stacks:
            limit = min(limit, math.sqrt(torch.finfo(stack.dtype).max) / 1024)
            small = stack.frames * stack.shape[0] * stack.shape[1] < 2**19
            grads = stack.gather(stack.grads) if small or not self._has_fast_step(stack) else None
            gathered.append(grads)
            norms.append(stack.gradient_norms() if grads is None else torch.linalg.vector_norm(grads, dim=(-2, -1)))
        largest = [t.amax() for t in norms if t.numel()]
        largest += _norms(rest)
        params = [*(p for stack in stacks for p in stack.params), *(p for ps, _ in plain for p in ps)]
        if not params:
            return gathered, norms, True
        largest = [norm.to(params[0].device, torch.float32) for norm in largest]
        # a process that holds no part of anything still takes part in the decision
        worst = torch.stack([*largest, torch.zeros((), device=params[0].device)]).amax()
        worst = _agreed(worst, params)
        return gathered, norms, float(worst) < limit  # NaN compares false

    def _gradients_are_finite(self) -> bool:
        """False if the step is to be skipped. All gradients are looked at before any parameter moves."""
        spoiled = []
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {self._name(group, i)} is sparse, which {type(self).__name__} does not "
                        "support"
                    )
                finite = torch.isfinite(local(p.grad)).all()
                bad = _agreed((~finite).to(torch.float32), [p])
                if bool(bad > 0):
                    spoiled.append((group, i))
        if not spoiled:
            return True
        strict = [(g, i) for g, i in spoiled if g["nonfinite"] == "raise"]
        if not strict:
            return False
        group, i = strict[0]
        bad = int((~torch.isfinite(local(group["params"][i].grad))).sum())
        where = f"has {bad} NaN or infinite entries" if bad else "is not finite in the part of another process"
        raise ValueError(
            f"the gradient of {self._name(group, i)} {where}; nothing was stepped. Pass "
            'nonfinite="skip" to skip such steps'
        )

    def _careful_step(self, stack: Stack, grads: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None] | None:
        """The step of a stack, not taken yet; None if it overflows and such steps are skipped."""
        stack.follow_parameters()
        try:
            x, arrays, capped = self._stack_step(stack, -grads if stack.group["maximize"] else grads)
            finite = [torch.isfinite(part).flatten(1).all(1) for part in (x, *arrays.values())]
            good = torch.stack(finite).all(0)
        except ValueError:  # a retraction does not take NaN
            good = torch.zeros(stack.frames, dtype=torch.bool, device=stack.device)
            x, arrays, capped = grads, {}, None
        if float(_agreed((~good.all()).to(torch.float32), stack.params)) == 0:
            return x, arrays, capped
        if stack.group["nonfinite"] == "skip":
            return None
        sizes = [float(torch.linalg.vector_norm(g, torch.inf)) if g.numel() else 0.0 for g in stack.grads]
        worst = max(range(len(sizes)), key=sizes.__getitem__)
        raise ValueError(
            f"the step of {self._name(stack.group, stack.indices[worst])} overflows {stack.dtype}: its gradient is "
            f"finite, but too large, up to {sizes[worst]:.3g}; nothing was stepped. Clip or scale the gradients, or "
            'pass nonfinite="skip" to skip such steps'
        )

    @staticmethod
    def _take(stack: Stack, x: Tensor, arrays: dict[str, Tensor], capped: Tensor | None) -> None:
        for chunk in stack.chunks(stack.frames):
            stack.write(x[chunk.start : chunk.stop], chunk)
        for key, value in arrays.items():
            stack.arrays[key].copy_(value)
        stack.advance()
        if capped is not None and bool(capped.any()):
            stack.count_capped(capped)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers and words; a group's manifold is its ``repr``, so nothing needs unpickling."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            group["manifold"] = None if group["manifold"] is None else repr(group["manifold"])
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, of the same parameters, in another order if both sides have names.

        State keeps the precision it was saved in where the parameter has half precision, and takes the parameter's
        otherwise; devices follow the parameters.

        Raises:
            ValueError: parameters are missing, left over, or of other shapes, or the state is not finite; all of them
                are listed, and nothing was loaded.
        """
        ordered = loadable_state(self, state_dict)
        self._stacks.clear()
        super().load_state_dict(ordered)
        # torch casts state to the parameter's dtype; half precision is not what moments were saved in
        saved = state_dict["state"]
        packed = [i for group in ordered["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(packed, params, strict=True):
            for key, value in saved.get(i, {}).items():
                if isinstance(value, Tensor) and p.dtype in _HALF and value.is_floating_point():
                    device = value.device if key in ("step", "capped") else p.device
                    self.state[p][key] = value.detach().clone().to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_stacks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}


def manifold_of(p: Tensor, group: dict[str, Any]) -> Manifold | None:
    """The manifold that ``p`` is stepped on: its own, else its group's; None for a plain parameter."""
    manifold = p.manifold if isinstance(p, ManifoldParameter) else group.get("manifold")
    return None if isinstance(manifold, Euclidean) else manifold


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """The Frobenius norm of each; infinite where its square overflows."""
    # torch's norms run on one thread; a dot product reads memory twice as fast
    large = [t.numel() >= 2**15 and t.dtype in (torch.float32, torch.float64) and t.is_contiguous() for t in tensors]
    small = [t for t, is_large in zip(tensors, large, strict=True) if not is_large]
    flat = [t.view(-1) for t, is_large in zip(tensors, large, strict=True) if is_large]
    norms = torch._foreach_norm(small) if small else []  # pyright: ignore[reportPrivateImportUsage]
    return [*norms, *(torch.dot(t, t).sqrt() for t in flat)]


def _check_sharding(p: Tensor, name: str) -> None:
    """Whole frames may lie on different processes; a part of a frame has no polar factor of its own."""
    for placement in getattr(p, "placements", ()):
        if not (placement.is_replicate() or (placement.is_shard() and placement.dim < p.ndim - 2)):
            raise ValueError(
                f"{name} has shape {tuple(p.shape)} and is placed as {placement!r}, which cuts through its frames, the "
                "last two dimensions; shard it along a dimension before those, fully_shard(..., "
                "shard_placement_fn=lambda p: Shard(0)) with frames stored as (heads, n, p), or leave it whole"
            )


def _agreed(value: Tensor, params: list[Tensor]) -> Tensor:
    """The largest ``value`` of all processes that share sharded ``params``, so that all of them decide alike."""
    meshes = {p.device_mesh: None for p in params if hasattr(p, "device_mesh")}  # pyright: ignore
    if not meshes:
        return value
    value = torch.where(torch.isnan(value), torch.full_like(value, math.inf), value)
    for mesh in meshes:
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group)
    return value
