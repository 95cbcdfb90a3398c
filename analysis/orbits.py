"""The continuous symmetries of a transformer's weights, each as an :class:`Orbit`. What for: :mod:`.symmetry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..manifolds.linalg import skew
from ._arrays import ArrayLike, as_float64
from ._symmetry_solvers import (
    complex_basis,
    solve_in_basis,
    solve_skew,
    solve_sylvester,
)

Arrays = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class Orbit:
    """A symmetry at given weights: its name, the weights it moves, and the maps that :mod:`.symmetry` needs of it.

    ``vertical(a)`` is the vertical vector V(a), by the names of the weights; ``adjoint(G)`` is V*(G), zero for the
    gradient of an invariant loss; ``solve(c)`` the a of least squares, V*V a = c. All keep ``batch`` dimensions first.
    """

    name: str
    weights: Mapping[str, Tensor]
    batch: tuple[int, ...]
    vertical: Callable[[Tensor], dict[str, Tensor]]
    adjoint: Callable[[Mapping[str, Tensor]], Tensor]
    solve: Callable[[Tensor], Tensor]

    def read(self, values: Arrays, what: str) -> dict[str, Tensor]:
        """``values`` as float64 tensors, one of each weight's shape, or an error that names the weight."""
        if set(values) != set(self.weights):
            raise ValueError(f"{what} must have the keys {sorted(self.weights)}, found {sorted(values)}")
        tensors = {}
        for key, weight in self.weights.items():
            tensors[key] = as_float64(values[key], f"{what}[{key!r}]")
            if tensors[key].shape != weight.shape:
                raise ValueError(
                    f"{what}[{key!r}] must have the shape of its weight, {tuple(weight.shape)}, "
                    f"found {tuple(tensors[key].shape)}"
                )
        return tensors

    def squares(self, values: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares over all weights, batch-shaped."""
        k = len(self.batch)
        return sum((v.flatten(k).square().sum(-1) for v in values.values()), start=torch.zeros(self.batch).double())


# --- heads --------------------------------------------------------------------------------------------------------


def qk_orbit(w_q: ArrayLike, w_k: ArrayLike, group: str = "gl", rope: str | None = None) -> Orbit:
    """(W_Q, W_K) → (W_Q R, W_K R⁻ᵀ), which leaves W_Q W_Kᵀ alone: V(A) = (W_Q A, −W_K Aᵀ).

    V*(G) = W_QᵀG_Q − (W_KᵀG_K)ᵀ, and its skew part for O(d_h), where W_QᵀG_Q + W_KᵀG_K is symmetric.

    Args:
        w_q, w_k: ``(*batch, d, d_h)`` and ``(*batch, d', d_h)``. Biases are rows more: append b_Q to W_Q and b_K to
            W_K. Query heads that share a key head turn together: stack their W_Q along the rows.
        group: "gl", every invertible R; "orthogonal", R ∈ O(d_h), A skew, which is what is left on Stiefel.
        rope: with rotary embeddings only what commutes with them is left, one rotation (and for "gl" one scale) a pair
            of coordinates: "half" pairs i with i + d_h/2 (GPT-NeoX, Llama), "interleaved" 2i with 2i + 1 (GPT-J).
            None: no rotary embeddings.

    The weights are named "w_q" and "w_k" in what :func:`.noether_residual` and :func:`.vertical_part` take.

    Raises:
        ValueError: different d_h or batch; an unknown group or pairing; an odd d_h with rotary embeddings.

    Example:
        >>> import torch
        >>> from geodescent.analysis import vertical_part
        >>> w = torch.eye(4, 2)
        >>> turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> orbit = qk_orbit(w, w, group="orthogonal")
        >>> round(vertical_part(orbit, {"w_q": w @ turned, "w_k": w @ turned}).fraction, 12)
        1.0
    """
    return _head_orbit("Q/K", "w_q", as_float64(w_q, "w_q"), "w_k", as_float64(w_k, "w_k"), False, group, rope)


def vo_orbit(w_v: ArrayLike, w_o: ArrayLike, group: str = "gl") -> Orbit:
    """(W_V, W_O) → (W_V R, R⁻¹ W_O), which leaves W_V W_O alone: V(A) = (W_V A, −A W_O), V*(G) = W_VᵀG_V − G_O W_Oᵀ.

    Args:
        w_v, w_o: ``(*batch, d, d_h)`` and ``(*batch, d_h, d')``. A bias of V is a row more. group: as in
            :func:`qk_orbit`.

    The weights are named "w_v" and "w_o".

    Raises:
        ValueError: different d_h or batch; an unknown group.

    Example:
        >>> import torch
        >>> from geodescent.analysis import vertical_part
        >>> w_v, w_o = torch.eye(4, 2), torch.eye(2, 4)
        >>> round(vertical_part(vo_orbit(w_v, w_o), {"w_v": w_v, "w_o": -w_o}).fraction, 12)
        1.0
    """
    return _head_orbit("V/O", "w_v", as_float64(w_v, "w_v"), "w_o", as_float64(w_o, "w_o"), True, group, None)


def _head_orbit(
    title: str, left: str, a: Tensor, right: str, b: Tensor, transposed: bool, group: str, rope: str | None
) -> Orbit:
    for name, w in ((left, a), (right, b)):
        if w.ndim < 2:
            raise ValueError(f"{name} must be a matrix or a batch of matrices, found shape {tuple(w.shape)}")

    def turn(w: Tensor) -> Tensor:
        # W_O is the transpose of what W_K is: −A W_O = (−W_Oᵀ Aᵀ)ᵀ
        return w.mT if transposed else w

    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != turn(b).shape[-1]:
        raise ValueError(
            f"{left} and {right} must have the same heads and head dimension, found shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if group not in ("gl", "orthogonal"):
        raise ValueError(f"group must be 'gl' or 'orthogonal', found {group!r}")
    first, second = a.mT @ a, turn(b).mT @ turn(b)
    orthogonal = group == "orthogonal"
    basis = None if rope is None else complex_basis(a.shape[-1], rope, scales=not orthogonal)

    def solve(c: Tensor) -> Tensor:
        if basis is not None:
            return solve_in_basis(first, second, basis, c)
        return solve_skew(first + second, c) if orthogonal else solve_sylvester(first, second, c)

    def adjoint(g: Mapping[str, Tensor]) -> Tensor:
        c = a.mT @ g[left] - (turn(b).mT @ turn(g[right])).mT
        if basis is not None:
            return torch.einsum("kij,...ij,klm->...lm", basis, c, basis)
        return skew(c) if orthogonal else c

    def vertical(m: Tensor) -> dict[str, Tensor]:
        return {left: a @ m, right: turn(-turn(b) @ m.mT)}

    kind = {"gl": "GL", "orthogonal": "O"}[group] + f"({a.shape[-1]})"
    suffix = "" if rope is None else f", commuting with RoPE ({rope})"
    return Orbit(f"{title}, {kind}{suffix}", {left: a, right: b}, tuple(a.shape[:-2]), vertical, adjoint, solve)


# --- scales -------------------------------------------------------------------------------------------------------


def rescaling_orbit(
    up: Mapping[str, tuple[ArrayLike, int]], down: Mapping[str, tuple[ArrayLike, int]], name: str = "rescaling"
) -> Orbit:
    """Slice i of every weight of ``up`` → λᵢ·, of ``down`` → λᵢ⁻¹·: V(a) scales them by aᵢ and −aᵢ.

    V*(G)ᵢ = Σ_up ⟨Wᵢ, Gᵢ⟩ − Σ_down ⟨Wᵢ, Gᵢ⟩. A slice whose weights are all zero has no orbit.

    Args:
        up, down: each weight by name, with the axis that i runs along.

    Raises:
        ValueError: slices of different numbers, no weight, or a name in both.

    Example:
        >>> import torch
        >>> from geodescent.analysis import noether_residual
        >>> orbit = rescaling_orbit({"a": (torch.ones(3), 0)}, {"b": (torch.ones(2, 3), 1)})
        >>> noether_residual(orbit, {"a": torch.full((3,), 2.0), "b": torch.ones(2, 3)}).passed
        True
    """
    if repeated := set(up) & set(down):
        raise ValueError(f"a weight is scaled up or down, found {sorted(repeated)} in both")
    weights: dict[str, Tensor] = {}
    axes: dict[str, int] = {}
    for key, (value, axis) in {**up, **down}.items():
        weights[key], axes[key] = as_float64(value, key), axis
    counts = {key: w.shape[axes[key]] for key, w in weights.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every weight must have the same number of slices, found {counts}")
    signs = {key: 1.0 if key in up else -1.0 for key in weights}

    def sliced(values: Mapping[str, Tensor], key: str) -> Tensor:
        return (values[key] * weights[key]).movedim(axes[key], 0).flatten(1 if weights[key].ndim > 1 else 0)

    def per_slice(values: Mapping[str, Tensor], key: str) -> Tensor:
        products = sliced(values, key)
        return products.sum(-1) if products.ndim > 1 else products

    square = torch.stack([per_slice(weights, key) for key in weights]).sum(0)

    def vertical(a: Tensor) -> dict[str, Tensor]:
        return {key: signs[key] * (w.movedim(axes[key], -1) * a).movedim(-1, axes[key]) for key, w in weights.items()}

    def adjoint(g: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([signs[key] * per_slice(g, key) for key in weights]).sum(0)

    def solve(c: Tensor) -> Tensor:
        return torch.where(square == 0, 0.0, c / torch.where(square == 0, 1.0, square))

    return Orbit(name, weights, (), vertical, adjoint, solve)


def relu_orbit(w_in: ArrayLike, w_out: ArrayLike, b_in: ArrayLike | None = None) -> Orbit:
    """Hidden unit i of w_out·relu(w_in x + b_in): row i of w_in and b_in → λᵢ·, column i of w_out → λᵢ⁻¹·, λᵢ > 0.

    Exact for units that are positively homogeneous, such as ReLU and leaky ReLU. For SwiGLU pass the up projection as
    ``w_in``: the gate is not homogeneous.

    Args:
        w_in: ``(hidden, d)`` and w_out: ``(d', hidden)``, as ``nn.Linear`` keeps them; b_in: ``(hidden,)``.

    The weights are named "w_in", "w_out" and, if given, "b_in".

    Example:
        >>> import torch
        >>> from geodescent.analysis import vertical_part
        >>> w_in, w_out = torch.ones(3, 2), torch.ones(2, 3)
        >>> vertical_part(relu_orbit(w_in, w_out), {"w_in": w_in, "w_out": -w_out}).fraction
        1.0
    """
    bias = {} if b_in is None else {"b_in": (b_in, 0)}
    return rescaling_orbit({"w_in": (w_in, 0), **bias}, {"w_out": (w_out, 1)}, "ReLU rescaling")


def norm_scale_orbit(
    gamma: ArrayLike, readers: Sequence[ArrayLike] | Mapping[str, ArrayLike], beta: ArrayLike | None = None
) -> Orbit:
    """γⱼ (and βⱼ) of a LayerNorm or RMSNorm → λⱼ·, column j of every reader → λⱼ⁻¹·.

    All readers must be given: Q, K and V alike. Readers that are constrained, as frames are, have no such symmetry.

    Args:
        gamma, beta: ``(d,)``. readers: ``(out, d)`` each, as ``nn.Linear`` and ``in_proj_weight`` keep them; by name,
            or a sequence, whose names are then "reader0", "reader1", …

    The weights are named "gamma", "beta" if given, and as the readers are.

    Example:
        >>> import torch
        >>> from geodescent.analysis import vertical_part
        >>> gamma, reader = torch.ones(3), torch.ones(2, 3)
        >>> vertical_part(norm_scale_orbit(gamma, [reader]), {"gamma": gamma, "reader0": -reader}).fraction
        1.0
    """
    named = readers if isinstance(readers, Mapping) else {f"reader{i}": w for i, w in enumerate(readers)}
    shift = {} if beta is None else {"beta": (beta, 0)}
    return rescaling_orbit({"gamma": (gamma, 0), **shift}, {k: (w, 1) for k, w in named.items()}, "norm scale")


# --- shifts -------------------------------------------------------------------------------------------------------


def logit_shift_orbit(w_u: ArrayLike, bias: ArrayLike | None = None) -> Orbit:
    """W_U → W_U + 1cᵀ (and bias → bias + c₀1): all logits move alike. V*(G) is the sum of G over the vocabulary.

    Args:
        w_u: ``(vocabulary, d)``, as ``nn.Linear`` keeps it; bias: ``(vocabulary,)``.

    The weights are named "w_u" and, if given, "bias".

    Raises:
        ValueError: another shape.

    Example:
        >>> import torch
        >>> from geodescent.analysis import noether_residual
        >>> g = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
        >>> noether_residual(logit_shift_orbit(torch.zeros(2, 2)), {"w_u": g}).relative
        0.0
    """
    weights: dict[str, Tensor] = {"w_u": as_float64(w_u, "w_u")}
    if weights["w_u"].ndim != 2:
        raise ValueError(f"w_u must be (vocabulary, d), found shape {tuple(weights['w_u'].shape)}")
    size = len(weights["w_u"])
    if bias is not None:
        weights["bias"] = as_float64(bias, "bias")
        if weights["bias"].shape != (size,):
            raise ValueError(f"bias must have shape ({size},), found {tuple(weights['bias'].shape)}")

    def vertical(c: Tensor) -> dict[str, Tensor]:
        parts = {"w_u": c[: weights["w_u"].shape[1]].expand(size, -1)}
        return parts if bias is None else {**parts, "bias": c[-1:].expand(size)}

    def adjoint(g: Mapping[str, Tensor]) -> Tensor:
        sums = [g["w_u"].sum(0)]
        return torch.cat(sums if bias is None else [*sums, g["bias"].sum(0, keepdim=True)])

    return Orbit("logit shift", weights, (), vertical, adjoint, lambda c: c / size)


def key_bias_orbit(b_k: ArrayLike, w_k: ArrayLike) -> Orbit:
    """b_K → b_K + c: a constant along the keys, which the softmax does not see. V*(G) is the gradient of b_K itself.

    All of b_K is vertical; w_k, which does not move, is there so that fractions are of the key projection as a whole.

    Args:
        b_k: ``(d_h,)`` or ``(heads·d_h,)``; w_k of any shape. With rotary embeddings, which turn a bias by position,
            this is no symmetry.

    The weights are named "b_k" and "w_k".

    Example:
        >>> import torch
        >>> from geodescent.analysis import noether_residual
        >>> orbit = key_bias_orbit(torch.zeros(2), torch.eye(2))
        >>> noether_residual(orbit, {"b_k": torch.zeros(2), "w_k": torch.ones(2, 2)}).passed
        True
    """
    weights = {"b_k": as_float64(b_k, "b_k"), "w_k": as_float64(w_k, "w_k")}
    still: Any = torch.zeros_like(weights["w_k"])
    return Orbit("key bias", weights, (), lambda c: {"b_k": c, "w_k": still}, lambda g: g["b_k"], lambda c: c)
