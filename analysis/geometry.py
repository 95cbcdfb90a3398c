"""The geometry of attention: what each head's QK and OV circuits are, from a model, a state dict or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._result import Result
from ._screen import bands, fits, median
from .layer_geometry import LayerGeometry, measure
from .sources import Given, Heads, Layouts, open_layers

__all__ = ["AttentionGeometry", "LayerGeometry", "attention_geometry"]


@dataclass(frozen=True, repr=False, eq=False)
class AttentionGeometry(Result):
    """The attention layers of a model, in the model's order; see :class:`LayerGeometry`.

    ``skipped`` names what is attention by its name but could not be read, each with the reason. Where the heads do not
    fit a screen, ``repr`` shows the median over the heads of a layer, or of a run of layers.
    """

    layers: tuple[LayerGeometry, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerGeometry:
        """The layer of this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}, there are {[layer.name for layer in self.layers]}")

    def _title(self) -> str:
        left = "".join(f"\nleft out: {name}: {why}" for name, why in list(self.skipped.items())[:3])
        more = f"\nleft out: {len(self.skipped) - 3} more, see .skipped" if len(self.skipped) > 3 else ""
        return f"AttentionGeometry of {len(self.layers)} layers{left}{more}"

    def _header(self) -> Sequence[str]:
        return self.layers[0]._header()

    def _rows(self) -> list[Sequence[Any]]:
        if fits(sum(layer.num_heads for layer in self.layers)):
            return [row for layer in self.layers for row in layer._rows()]
        rows: list[Sequence[Any]] = []
        for label, run in bands(self.layers):
            columns = [layer._columns() for layer in run]
            values = (median([x for c in columns for x in c[name]]) for name in columns[0])
            rows.append((label, f"median of {sum(layer.num_heads for layer in run)}", *values))
        return rows

    def plot(self, ax: Any = None) -> Any:
        """The circuits' singular values; see :func:`~geodescent.analysis.pictures.plot_spectra`."""
        from .pictures import plot_spectra

        return plot_spectra(self, ax)


def attention_geometry(
    model_or_state: nn.Module | Mapping[str, Any] | str | os.PathLike[str] | AttentionGeometry,
    num_heads: Heads = None,
    *,
    num_key_value_heads: Heads = None,
    head_dim: int | None = None,
    layout: Layouts = None,
    config: Mapping[str, Any] | None = None,
    keep_frames: bool = True,
    ov: bool = True,
) -> AttentionGeometry:
    """Measure every attention layer. Nothing of the model is changed or kept, and nothing larger than d_h × d_h is
    decomposed: σ(W_Q diag(s) W_Kᵀ) = σ(R_Q diag(s) R_Kᵀ) with the QR factors of W_Q and W_K.

    Args:
        model_or_state: a module; a state dict of torch tensors or numpy arrays; or the path of a checkpoint, read as
            :class:`Checkpoint` says, a layer at a time. Layers are ``nn.MultiheadAttention``, modules with methods
            ``query_frames()`` and ``key_frames()`` that give (heads, d_in, d_h) and a tensor ``logit_scale``, as
            ``geodescent.attention.StiefelAttention`` has, and whatever has the keys of one of :data:`LAYOUTS`: GPT-2,
            BERT, ViT, DistilBERT, T5, BART, CLIP, Llama, Mistral, Qwen, Phi, GPT-NeoX, Falcon, BLOOM, MPT, ModernBERT,
            timm and their relatives.
        num_heads: heads of layers that do not say; a number for all of them, or a mapping by layer name. A module
            says, so does a state dict with ``logit_scale``, and the ``config.json`` beside a checkpoint.
        num_key_value_heads: key-value heads; the widths say so already, and are checked against it.
        head_dim: d_h where it is not width / heads.
        layout: where the projections are, for a kind of layer not known here: an :class:`AttentionLayout`, a name of
            :data:`LAYOUTS`, or several. Only these are then tried.
        config: what ``config.json`` would say: a mapping with Hugging Face's names.
        keep_frames: keep float64 copies of the weights in the result, as drift from it and entropies need.
        ov: measure the OV circuit too; without it the work is half.

    Raises:
        ValueError: no attention layer was found, or none could be read; the number of heads of one is neither stored
            nor given, or does not divide its width; a file cannot be read.
        TypeError: neither a module, nor a mapping, nor a path.

    Example:
        >>> import torch
        >>> from geodescent.analysis import attention_geometry
        >>> layer = attention_geometry(torch.nn.MultiheadAttention(16, 4))["(root)"]
        >>> layer.spectrum.shape, layer.ov_spectrum.shape
        (torch.Size([4, 4]), torch.Size([4, 4]))
    """
    if isinstance(model_or_state, AttentionGeometry):
        return model_or_state
    given = Given(num_heads, num_key_value_heads, head_dim, layout, config)
    measured = []
    with open_layers(model_or_state, given) as layers:
        for name in layers.names:
            weights = layers.read(name)
            if weights is not None:
                measured.append(measure(weights, keep_frames, ov))
        if not measured:
            raise layers.nothing()
    return AttentionGeometry(tuple(measured), layers.skipped)
