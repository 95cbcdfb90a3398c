"""One attention layer's geometry: query, key, value and output frames a head, and the QK and OV circuits they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._result import Result
from .head_weights import HeadWeights
from .model_config import QK_NORM, ROPE_FACTOR
from .spectra import condition_from, effective_rank, stable_rank


@dataclass(frozen=True, repr=False, eq=False)
class LayerGeometry(Result):
    """One attention layer, in float64: a number or a row of numbers a head.

    **Frames.** ``query_frames`` (heads, d, d_h), ``key_frames`` (groups, kdim, d_h), ``value_frames`` (groups, vdim,
    d_v) and ``output_frames`` (heads, d_out, d_v) are W_Q, W_K, W_V and W_Oᵀ a head, tall. In grouped-query attention
    ``num_key_value_heads`` key and value heads are each shared by consecutive query heads, and what is measured of a
    key is repeated for its heads. Frames and biases stay out of ``to_dict()``; they are None if they were not kept.
    ``*_norm`` are Frobenius norms, ``*_condition`` condition numbers (inf for a singular or zero frame),
    ``*_orthonormality`` max |WᵀW − I|, ``query_spectrum`` and ``key_spectrum`` singular values.

    **QK circuit.** ``spectrum`` are the singular values of W_Q diag(scale) W_Kᵀ, the bilinear form whose values are
    the logits, largest first; ``logit_scale`` is (heads,) or (heads, d_h), 1/√d_h in ordinary attention.
    ``circuit_norm`` is its Frobenius norm, ``circuit_condition`` σ₁/σ_k over its at most d_h values,
    ``effective_rank`` exp(−Σ pᵢ log pᵢ) with pᵢ = σᵢ/Σσ (Roy & Vetterli 2007), and ``stable_rank`` Σσ²/σ₁².

    **OV circuit.** ``ov_*`` say the same of W_V W_O, through which a value reaches the output. None where a layer's
    value or output projection is not there, or was not asked for.

    **Biases.** A query bias adds b_Q W_Kᵀ, a logit that depends on the key alone: its gain, ‖W_K diag(scale) b_Q‖, is
    ``query_bias_gain``. A key bias adds a constant along the keys, which the softmax cancels, so it is no part of
    anything here, except under rotary positions, where it is not constant. Value biases add a constant to the output.

    **Positions.** ``rotary`` is whether queries and keys are rotated by position, None if nothing says. The circuit is
    then that of a query and a key at the same position; between others a rotation stands between W_Q and W_Kᵀ.
    ``notes`` names what else lies between the projections and the softmax and is not in the circuit.

    ``logit_bound`` is :meth:`max_logit` for inputs of norm √d, which is what a norm layer without gain puts out.
    NaN marks a head with non-finite weights; the others are measured.
    """

    name: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    query_frames: Tensor | None
    key_frames: Tensor | None
    value_frames: Tensor | None
    output_frames: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    logit_scale: Tensor
    rotary: bool | None
    notes: tuple[str, ...]
    query_norm: Tensor
    key_norm: Tensor
    query_condition: Tensor
    key_condition: Tensor
    query_orthonormality: Tensor
    key_orthonormality: Tensor
    query_spectrum: Tensor
    key_spectrum: Tensor
    spectrum: Tensor
    effective_rank: Tensor
    stable_rank: Tensor
    circuit_norm: Tensor
    circuit_condition: Tensor
    query_bias_gain: Tensor
    logit_bound: Tensor
    value_norm: Tensor | None
    output_norm: Tensor | None
    value_condition: Tensor | None
    output_condition: Tensor | None
    ov_spectrum: Tensor | None
    ov_effective_rank: Tensor | None
    ov_stable_rank: Tensor | None
    ov_norm: Tensor | None
    ov_condition: Tensor | None

    _omitted: ClassVar = frozenset(
        {"query_frames", "key_frames", "value_frames", "output_frames", "query_bias", "key_bias"}
    )
    #: the quantities with one number a head
    PER_HEAD: ClassVar = (
        "query_norm",
        "key_norm",
        "query_condition",
        "key_condition",
        "effective_rank",
        "stable_rank",
        "circuit_norm",
        "logit_bound",
    )
    #: those of the OV circuit, None where there is none
    PER_HEAD_OV: ClassVar = ("ov_effective_rank", "ov_stable_rank", "ov_norm")

    def max_logit(self, query_norm: float, key_norm: float | None = None) -> Tensor:
        """A bound on |logit| a head, for inputs of these Euclidean norms, the scale in force included.

        The logit of x and y is (x W_Q + b_Q) diag(s) (y W_K)ᵀ, so that |logit| ≤ ‖y‖ (‖x‖ σ₁ + ‖W_K diag(s) b_Q‖):
        attained where there is no query bias. A constant along the keys, a key bias's, is not counted: the softmax
        does not see it. With rotary positions, or where nothing says that there are none, the bound is
        s (‖x‖ σ₁(W_Q) + ‖b_Q‖) (‖y‖ σ₁(W_K) + ‖b_K‖), which holds for every pair of positions. Additive masks and
        position biases come on top. NaN where queries and keys are normalized, or a rotary factor scales them: the
        bound then is not the circuit's.

        Args:
            query_norm: ‖x‖ of the input that queries are made of.
            key_norm: ‖y‖, by default the same.

        Returns:
            ``(heads,)``, float64.

        Example:
            >>> import torch
            >>> from geodescent.analysis import attention_geometry
            >>> state = {f"{part}_proj.weight": torch.eye(4) for part in "qk"}
            >>> layer = attention_geometry(state, num_heads=1).layers[0]
            >>> layer.max_logit(query_norm=2.0, key_norm=3.0)       # 2 · 3 / √4
            tensor([3.], dtype=torch.float64)
        """
        key_norm = query_norm if key_norm is None else key_norm
        if {QK_NORM, ROPE_FACTOR} & set(self.notes):
            return torch.full((self.num_heads,), math.nan, dtype=torch.float64)
        if self.rotary is False:
            return key_norm * (query_norm * self.spectrum[:, 0] + self.query_bias_gain)
        scale = self.logit_scale.abs() if self.logit_scale.ndim == 1 else self.logit_scale.abs().amax(-1)
        query = query_norm * self.query_spectrum[:, 0] + _bias_norm(self.query_bias, self.num_heads)
        key = key_norm * self.key_spectrum[:, 0] + _bias_norm(self.key_bias, self.num_heads)
        return scale * query * key

    def to_dict(self) -> dict[str, Any]:
        """Every number, without the frames."""
        return {key: value for key, value in super().to_dict().items() if key not in self._omitted}

    def _title(self) -> str:
        return f"LayerGeometry of {self.name}"

    def _columns(self) -> dict[str, list[Any]]:
        every = {name: getattr(self, name) for name in (*self.PER_HEAD, *self.PER_HEAD_OV)}
        return {k: [None] * self.num_heads if v is None else v.tolist() for k, v in every.items()}

    def _header(self) -> Sequence[str]:
        return ("layer", "head", *self.PER_HEAD, *self.PER_HEAD_OV)

    def _rows(self) -> list[Sequence[Any]]:
        columns = self._columns().values()
        return [(self.name, head, *(column[head] for column in columns)) for head in range(self.num_heads)]


def measure(w: HeadWeights, keep_frames: bool = True, ov: bool = True) -> LayerGeometry:
    """The geometry of one layer.

    Raises:
        ValueError: queries and keys have other numbers of columns.
    """
    heads, groups = w.query_frames.shape[0], w.key_frames.shape[0]
    if w.query_frames.shape[-1] != w.key_frames.shape[-1] or heads % groups:
        raise ValueError(
            f"layer {w.name!r}: queries have (heads, d_h) = {tuple(w.query_frames.shape[::2])} and keys "
            f"{tuple(w.key_frames.shape[::2])}"
        )
    share = heads // groups
    query, key = _Factor(w.query_frames), _Factor(w.key_frames).repeat(share)
    spectrum = _svdvals(query.r * _per_direction(w.logit_scale)[:, None, :] @ key.r.mT)
    bias = None if w.query_bias is None else w.query_bias * _per_direction(w.logit_scale)
    gain = torch.zeros(heads, dtype=torch.float64)
    if bias is not None:
        gain = torch.linalg.vector_norm((key.r @ bias[..., None])[..., 0], dim=-1)
    value = output = through = None
    if ov and w.value_frames is not None and w.output_frames is not None:
        value, output = _Factor(w.value_frames).repeat(share), _Factor(w.output_frames)
        through = _svdvals(value.r @ output.r.mT)
    size = max(w.query_frames.shape[-2], w.key_frames.shape[-2])
    layer = LayerGeometry(
        name=w.name,
        num_heads=heads,
        num_key_value_heads=groups,
        head_dim=w.query_frames.shape[-1],
        query_frames=w.query_frames if keep_frames else None,
        key_frames=w.key_frames if keep_frames else None,
        value_frames=w.value_frames if keep_frames and ov else None,
        output_frames=w.output_frames if keep_frames and ov else None,
        query_bias=w.query_bias,
        key_bias=w.key_bias,
        logit_scale=w.logit_scale,
        rotary=w.rotary,
        notes=w.notes,
        query_norm=query.norm,
        key_norm=key.norm,
        query_condition=query.condition,
        key_condition=key.condition,
        query_orthonormality=query.orthonormality(),
        key_orthonormality=key.orthonormality(),
        query_spectrum=query.sigma,
        key_spectrum=key.sigma,
        spectrum=spectrum,
        effective_rank=effective_rank(spectrum),
        stable_rank=stable_rank(spectrum),
        circuit_norm=torch.linalg.vector_norm(spectrum, dim=-1),
        circuit_condition=condition_from(spectrum, size, _EPS),
        query_bias_gain=gain,
        logit_bound=gain,  # in its place until the rest is known
        value_norm=value and value.norm,
        output_norm=output and output.norm,
        value_condition=value and value.condition,
        output_condition=output and output.condition,
        ov_spectrum=through,
        ov_effective_rank=None if through is None else effective_rank(through),
        ov_stable_rank=None if through is None else stable_rank(through),
        ov_norm=None if through is None else torch.linalg.vector_norm(through, dim=-1),
        ov_condition=None if through is None else condition_from(through, size, _EPS),
    )
    bound = layer.max_logit(math.sqrt(w.query_frames.shape[-2]), math.sqrt(w.key_frames.shape[-2]))
    return replace(layer, logit_bound=bound)


def circuit_spectrum(left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    """Singular values (H, min(n, m, p)) of A diag(scale) Bᵀ for A (H, n, p), B (G, m, p), each B for H/G heads."""
    rows = torch.linalg.qr(right, mode="r").R.repeat_interleave(left.shape[0] // right.shape[0], 0)
    core = torch.linalg.qr(left, mode="r").R
    return _svdvals((core if scale is None else core * _per_direction(scale)[:, None, :]) @ rows.mT)


_EPS = torch.finfo(torch.float64).eps


class _Factor:
    """What is measured of (batch, n, p) frames, all of it from the p × p factor R of W = QR."""

    def __init__(self, frames: Tensor) -> None:
        self.r = torch.linalg.qr(frames, mode="r").R
        self.norm = torch.linalg.vector_norm(frames, dim=(-2, -1))
        self.sigma = _svdvals(self.r)
        self.condition = condition_from(self.sigma, max(frames.shape[-2:]), _EPS)

    def repeat(self, share: int) -> _Factor:
        """The same for each of the ``share`` heads that a frame serves."""
        if share > 1:
            for name, value in list(vars(self).items()):
                setattr(self, name, value.repeat_interleave(share, 0))
        return self

    def orthonormality(self) -> Tensor:
        return (self.r.mT @ self.r - torch.eye(self.r.shape[-1], dtype=torch.float64)).abs().amax((-2, -1))


def _svdvals(a: Tensor) -> Tensor:
    """Singular values, NaN for a matrix with a non-finite entry."""
    good = torch.isfinite(a).all(-1).all(-1)
    return torch.where(good[:, None], torch.linalg.svdvals(torch.where(good[:, None, None], a, 0.0)), math.nan)


def _per_direction(scale: Tensor) -> Tensor:
    return scale if scale.ndim == 2 else scale[:, None]


def _bias_norm(bias: Tensor | None, heads: int) -> Tensor:
    if bias is None:
        return torch.zeros(heads, dtype=torch.float64)
    return torch.linalg.vector_norm(bias, dim=-1).repeat_interleave(heads // bias.shape[0])
