"""The geometry of attention: query and key frames a head, and the spectrum of the QK circuit they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ._arrays import as_tensor
from ._result import Result, axes
from .spectra import condition_number, effective_rank, singular_spectrum


@dataclass(frozen=True, repr=False, eq=False)
class LayerGeometry(Result):
    """One attention layer: float64 copies of its frames, and a number or a row of numbers a head.

    ``query_frames`` (heads, d, d_h) and ``key_frames`` (heads, kdim, d_h) are W_Q and W_K a head, tall; they stay out
    of ``to_dict()``. ``logit_scale`` is (heads,) or (heads, d_h), 1/√d_h in ordinary attention. ``spectrum`` are the
    singular values of the QK circuit W_Q diag(scale) W_Kᵀ, the bilinear form whose values are the logits (biases
    aside), largest first; ``effective_rank`` is their exp-entropy (Roy & Vetterli 2007), ``circuit_norm`` its Frobenius
    norm. ``*_norm`` are Frobenius norms, ``*_condition`` condition numbers, ``*_orthonormality`` is max |WᵀW − I|.
    """

    name: str
    num_heads: int
    head_dim: int
    query_frames: Tensor
    key_frames: Tensor
    logit_scale: Tensor
    query_norm: Tensor
    key_norm: Tensor
    query_condition: Tensor
    key_condition: Tensor
    query_orthonormality: Tensor
    key_orthonormality: Tensor
    spectrum: Tensor
    effective_rank: Tensor
    circuit_norm: Tensor

    _omitted: ClassVar = frozenset({"query_frames", "key_frames"})
    #: the quantities with one number a head
    PER_HEAD: ClassVar = (
        "query_norm",
        "key_norm",
        "query_condition",
        "key_condition",
        "effective_rank",
        "circuit_norm",
    )

    def to_dict(self) -> dict[str, Any]:
        """Every number, without the frames."""
        return {key: value for key, value in super().to_dict().items() if key not in self._omitted}

    def _title(self) -> str:
        return f"LayerGeometry of {self.name}"

    def _header(self) -> Sequence[str]:
        return ("layer", "head", *self.PER_HEAD)

    def _rows(self) -> list[Sequence[Any]]:
        columns = [getattr(self, name).tolist() for name in self.PER_HEAD]
        return [(self.name, head, *(column[head] for column in columns)) for head in range(self.num_heads)]


@dataclass(frozen=True, repr=False, eq=False)
class AttentionGeometry(Result):
    """The attention layers of a model, in the model's order; see :class:`LayerGeometry`."""

    layers: tuple[LayerGeometry, ...]

    def __getitem__(self, name: str) -> LayerGeometry:
        """The layer of this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}, there are {[layer.name for layer in self.layers]}")

    def _title(self) -> str:
        return f"AttentionGeometry of {len(self.layers)} layers"

    def _header(self) -> Sequence[str]:
        return self.layers[0]._header()

    def _rows(self) -> list[Sequence[Any]]:
        return [row for layer in self.layers for row in layer._rows()]

    def plot(self, ax: Any = None) -> Any:
        """The circuit's singular values against their index, a line a head. Returns the matplotlib axes."""
        ax = axes(ax)
        for i, layer in enumerate(self.layers):
            for head, values in enumerate(layer.spectrum):
                label = layer.name if head == 0 else None
                ax.plot(range(1, len(values) + 1), values.tolist(), color=f"C{i % 10}", alpha=0.7, label=label)
        ax.set_xlabel("index")
        ax.set_ylabel("singular value of the QK circuit")
        ax.legend()
        return ax


def attention_geometry(
    model_or_state: nn.Module | Mapping[str, Any] | AttentionGeometry, num_heads: int | Mapping[str, int] | None = None
) -> AttentionGeometry:
    """Measure the query and key side of every attention layer. Nothing of the model is changed or kept.

    Args:
        model_or_state: a module in which attention layers are ``nn.MultiheadAttention``, or any module with methods
            ``query_frames()`` and ``key_frames()`` that give (heads, d_in, d_h) and a tensor ``logit_scale``, as
            ``geodescent.attention.StiefelAttention`` has. Or a state dict, where layers are recognised by
            ``in_proj_weight``, by ``q_proj_weight`` and ``k_proj_weight``, or by ``q_proj.weight`` and
            ``k_proj.weight``.
        num_heads: heads of the layers of a state dict that does not say (one without ``logit_scale``): a number for all
            of them, or a mapping by layer name. Not needed for modules.

    Raises:
        ValueError: no attention layer was found; queries and keys of a layer have other numbers of heads or columns; a
            state dict's layer whose number of heads is neither stored nor given, or does not divide its width.
        TypeError: neither a module nor a mapping.
    """
    if isinstance(model_or_state, AttentionGeometry):
        return model_or_state
    if isinstance(model_or_state, nn.Module):
        found = list(_from_modules(model_or_state))
        looked_for = "nn.MultiheadAttention or modules with query_frames() and key_frames()"
    elif isinstance(model_or_state, Mapping):
        found = list(_from_state(model_or_state, num_heads))
        looked_for = "in_proj_weight, q_proj_weight or q_proj.weight among its keys"
    else:
        raise TypeError(f"model_or_state must be a module or a state dict, found {type(model_or_state).__name__}")
    if not found:
        raise ValueError(f"no attention layer found in {type(model_or_state).__name__}; looked for {looked_for}")
    return AttentionGeometry(tuple(_measure(*layer) for layer in found))


Layer = tuple[str, Tensor, Tensor, Tensor]


def _from_modules(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        name = name or "(root)"
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                wq, wk, _ = module.in_proj_weight.chunk(3)
            else:
                wq, wk = module.q_proj_weight, module.k_proj_weight
            yield (
                name,
                _heads(wq, module.num_heads, name),
                _heads(wk, module.num_heads, name),
                _ordinary(module.num_heads, wq),
            )
        elif callable(getattr(module, "query_frames", None)) and callable(getattr(module, "key_frames", None)):
            with torch.no_grad():
                query = cast("Callable[[], Tensor]", module.query_frames)()
                key = cast("Callable[[], Tensor]", module.key_frames)()
            yield name, _copy(query), _copy(key), _copy(cast(Tensor, module.logit_scale))


def _from_state(state: Mapping[str, Any], num_heads: int | Mapping[str, int] | None) -> Iterator[Layer]:
    for key in state:
        if key.endswith("in_proj_weight"):
            prefix, (wq, wk, _) = key.removesuffix("in_proj_weight"), as_tensor(state[key], key).chunk(3)
        elif key.endswith(("q_proj_weight", "q_proj.weight")):
            stem = key[: -len("q_proj_weight")]
            other = f"{stem}k{key[len(stem) + 1 :]}"
            if other not in state:
                raise ValueError(f"the state has {key!r} but no {other!r}")
            prefix, wq, wk = stem, as_tensor(state[key], key), as_tensor(state[other], other)
        else:
            continue
        name = prefix.removesuffix(".") or "(root)"
        scale = state.get(f"{prefix}logit_scale")
        if scale is not None:
            scale = _copy(as_tensor(scale, f"{prefix}logit_scale"))
            heads = scale.shape[0]
        else:
            given = num_heads.get(name) if isinstance(num_heads, Mapping) else num_heads
            if given is None:
                raise ValueError(f"the state dict does not say how many heads layer {name!r} has: give num_heads")
            heads, scale = given, _ordinary(given, wq)
        yield name, _heads(wq, heads, name), _heads(wk, heads, name), scale


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).to("cpu", torch.float64, copy=True)


def _heads(weight: Tensor, heads: int, name: str) -> Tensor:
    """(d_out, d_in), head h in rows h·d_h to (h+1)·d_h, or stored frames (k, d_in, d_out/k), as (heads, d_in, d_h)."""
    rows = weight.mT.reshape(-1, weight.shape[-2]) if weight.ndim == 3 else weight
    if heads < 1 or rows.shape[0] % heads:
        raise ValueError(f"layer {name!r}: num_heads = {heads} does not divide the width {rows.shape[0]}")
    return _copy(rows.unflatten(0, (heads, -1)).mT)


def _ordinary(heads: int, query_weight: Tensor) -> Tensor:
    width = query_weight.shape[0] if query_weight.ndim == 2 else query_weight.shape[0] * query_weight.shape[-1]
    return torch.full((heads,), 1 / math.sqrt(width / heads), dtype=torch.float64)


def _measure(name: str, query: Tensor, key: Tensor, scale: Tensor) -> LayerGeometry:
    if query.shape[::2] != key.shape[::2]:
        raise ValueError(
            f"layer {name!r}: queries have (heads, d_h) = {tuple(query.shape[::2])} and keys {tuple(key.shape[::2])}; "
            "grouped or multi-query attention is not supported"
        )
    # σ(W_Q diag(s) W_Kᵀ) = σ(R_Q diag(s) R_Kᵀ): a d_h×d_h problem, never an n×n one
    spectrum = singular_spectrum(circuit_core(query, key, scale)[1])
    identity = torch.eye(query.shape[-1], dtype=torch.float64)
    return LayerGeometry(
        name=name,
        num_heads=query.shape[0],
        head_dim=query.shape[-1],
        query_frames=query,
        key_frames=key,
        logit_scale=scale,
        query_norm=torch.linalg.vector_norm(query, dim=(-2, -1)),
        key_norm=torch.linalg.vector_norm(key, dim=(-2, -1)),
        query_condition=condition_number(query),
        key_condition=condition_number(key),
        query_orthonormality=(query.mT @ query - identity).abs().amax((-2, -1)),
        key_orthonormality=(key.mT @ key - identity).abs().amax((-2, -1)),
        spectrum=spectrum,
        effective_rank=effective_rank(spectrum),
        circuit_norm=torch.linalg.vector_norm(spectrum, dim=-1),
    )


def circuit_core(query: Tensor, key: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(Q_Q, C, Q_K) with W_Q diag(scale) W_Kᵀ = Q_Q C Q_Kᵀ, Q_Q and Q_K orthonormal: QR of both factors."""
    (qq, rq), (qk, rk) = torch.linalg.qr(query), torch.linalg.qr(key)
    if scale is not None:
        rq = rq * (scale[:, None, :] if scale.ndim == 2 else scale[:, None, None])
    return qq, rq @ rk.mT, qk
