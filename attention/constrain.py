"""Constrain the attention of a model that exists, and undo it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..manifolds import Manifold, Stiefel
from .constrained_multihead_attention import ConstrainedMultiheadAttention
from .constraint import Constraint
from .constraint_report import ConstrainedLayer, ConstraintReport, SkippedLayer
from .frame_module import FrameModule
from .fused_projection import FusedProjection
from .head_projection import HeadProjection
from .places import Place, find_places
from .probes import circuit_change, model_output, weight_change
from .projection_layouts import ProjectionLayout
from .scales import is_finite_number
from .separate_projections import release_separate, separate_pair

__all__ = ["constrain", "frame_state_dict", "parameter_groups", "release", "reproject"]

Select = str | Iterable[str] | Callable[[str, nn.Module], bool] | None


@torch.no_grad()
def constrain(
    model: nn.Module,
    select: Select = None,
    *,
    frames: str = "head",
    manifold: Manifold | None = None,
    logit_scale: str | float = "spectrum",
    layouts: Mapping[type, ProjectionLayout] | None = None,
    inputs: Any = None,
) -> ConstraintReport:
    """Turn the query and key matrices of a model's attention layers into orthonormal frames with gains, in place.

    Known are ``nn.MultiheadAttention``, alone or in ``nn.TransformerEncoderLayer`` and its kind, and the Hugging Face
    attention classes of GPT-2, BERT, RoBERTa, ELECTRA, ViT, DeiT, Llama, Mistral and Qwen2. Their forward passes stay
    as they are; only the projections to queries and keys are exchanged. Constrain before the optimizer is made (the
    parameters are new), and before sharding: ``fully_shard`` makes plain parameters of frames, so give the optimizer
    :func:`parameter_groups` then.

    By default the conversion is exact: with W_Q W_Kᵀ = U Σ Vᵀ a head, queries become x U Σ + c and keys y V, which
    gives the same attention weights for every input (see :mod:`geodescent.attention.conversion`). The key bias, which
    the softmax cancels, is dropped. It is not exact, and the report says why and by how much, with rotary embeddings,
    with keys that several query heads share, with ``frames="whole"`` and with a single scale a head; then each matrix
    gives its polar factor and scales are carried over.

    ``state_dict()`` of the model keeps its keys and shapes: it holds ordinary matrices, U Σ and V in the exact case,
    and loads strictly into a model that is not constrained. Ordinary weights load strictly into a constrained model and
    are converted; those that such a model saved give back its frames and gains, up to rounding, and where a gain is
    negative, its sign goes to the frame. Checkpoints that must come back bit by bit, as to go on with an optimizer's
    state, are made by :func:`frame_state_dict`.

    Args:
        model: the model, changed in place.
        select: which attention modules: a glob of their names ("encoder.*"), several, or a function of name and module;
            by default all.
        frames: "head", a frame (d, d_h) a head; "whole", one frame (d, h·d_h) over all heads.
        manifold: where frames live, :class:`~geodescent.manifolds.Stiefel` with any metric, retraction and transport.
        logit_scale: "spectrum", a learned gain a frame direction (with rotary embeddings, of queries and of keys);
            "learned", one a head; "matched", one a head, fixed where the conversion puts it; or a number, the fixed
            factor of the logits of unit frames.
        layouts: descriptions of attention classes that are not known, or of their subclasses.
        inputs: arguments for the model (a mapping, a tuple or list, or one tensor): its output before and after is
            compared.

    Returns:
        A report: what was constrained and how, how far it moved, what was left alone and why.

    Raises:
        ValueError: an argument is out of its range, ``select`` names nothing, or no layer can be constrained; then
            nothing was changed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> before = layer(x)
        >>> report = constrain(layer)
        >>> [(a.name, a.method, a.frame_shape) for a in report.layers]
        [('self_attn', 'exact', (4, 16, 4))]
        >>> torch.allclose(layer(x), before, atol=1e-5)
        True
    """
    _check_arguments(frames, logit_scale, manifold)
    manifold = Stiefel() if manifold is None else manifold
    places = find_places(model, {} if layouts is None else layouts)
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{module_name}.{name}".lstrip("."))

    chosen, skipped = [], []
    for place in _selected(places, select):
        problem = place.problem(names) or _problem_of_options(place, frames, logit_scale)
        if problem is None:
            chosen.append(place)
        else:
            skipped.append(SkippedLayer(place.name, place.kind, problem))
    if not chosen:
        found = "\n".join(f"  {s.name or '(root)'} ({s.kind}): {s.reason}" for s in skipped)
        raise ValueError(f"no attention layer of the model can be constrained:\n{found or '  none was found'}")

    before = None if inputs is None else model_output(model, inputs)
    layers = tuple(_install(place, manifold, frames, logit_scale) for place in chosen)
    output_change = output_size = None
    if before is not None and before.numel():
        output_change = float((model_output(model, inputs) - before).abs().max())
        output_size = float(before.abs().max())
    return ConstraintReport(layers, tuple(skipped), output_change, output_size)


def _check_arguments(frames: str, logit_scale: str | float, manifold: Manifold | None) -> None:
    if frames not in ("head", "whole"):
        raise ValueError(f'frames must be "head" or "whole", found {frames!r}')
    if logit_scale not in ("spectrum", "learned", "matched") and not is_finite_number(logit_scale):
        raise ValueError(
            f'logit_scale must be "spectrum", "learned", "matched" or a finite number, found {logit_scale!r}'
        )
    if manifold is not None and not isinstance(manifold, Stiefel):
        raise ValueError(f"manifold must be a Stiefel manifold: frames are orthonormal; found {manifold!r}")


def _selected(places: list[Place], select: Select) -> list[Place]:
    if select is None:
        return places
    if callable(select):
        return [p for p in places if select(p.name, p.module)]
    patterns = [select] if isinstance(select, str) else list(select)
    chosen = [p for p in places if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in patterns)]
    unmatched = [x for x in patterns if not any(fnmatch.fnmatchcase(p.name, x) for p in places)]
    if unmatched:
        raise ValueError(
            f"select names no attention layer by {', '.join(map(repr, unmatched))}; there are "
            + (", ".join(repr(p.name) for p in places) or "none")
        )
    return chosen


def _problem_of_options(place: Place, frames: str, logit_scale: str | float) -> str | None:
    if not isinstance(logit_scale, str) and place.scaling is None:
        return "the factor of its logits is not known, so no fixed logit_scale can be set"
    weights = place.weights().by_head(place.head_dim)
    for role, matrix in (("query", weights.query), ("key", weights.key)):
        columns = matrix.shape[-1] * (matrix.shape[0] if frames == "whole" else 1)
        if columns > matrix.shape[-2]:
            return f"{role} frames would be wide: {matrix.shape[-2]} rows and {columns} columns with frames={frames!r}"
    return None


def _install(place: Place, manifold: Manifold, frames: str, logit_scale: str | float) -> ConstrainedLayer:
    kind, width = place.kind, place.head_dim
    scaling = width**-0.5 if place.scaling is None else place.scaling
    before = place.weights().by_head(width).double()  # copies: a layer may be changed in place
    exact = place.install(Constraint(manifold, frames, logit_scale, place.rotary, width, scaling))
    after = place.weights().by_head(width)
    query, key = place.projections()
    heads, key_heads = before.query.shape[0], before.key.shape[0]
    reasons = {
        "rotary embeddings leave no basis to choose": place.rotary,
        "a key head is shared by several query heads": heads != key_heads,
        "one frame over all heads": frames == "whole",
        "one scale a head": logit_scale != "spectrum",
    }
    return ConstrainedLayer(
        name=place.name,
        kind=kind,
        method="exact" if exact else "polar",
        heads=heads,
        key_heads=key_heads,
        frame_shape=tuple(query.frames.shape),
        key_frame_shape=tuple(key.frames.shape),
        logit_scale=logit_scale,
        point_error=max(float(manifold.point_error(p.frames.detach()).max()) for p in (query, key)),
        circuit_change=circuit_change(before, after, rotary=place.rotary),
        weight_change=weight_change(before, after, scaling=scaling, rotary=place.rotary),
        reason="" if exact else "; ".join(reason for reason, holds in reasons.items() if holds),
    )


@torch.no_grad()
def release(model: nn.Module) -> list[str]:
    """Undo :func:`constrain`: ordinary layers again, with the matrices in force, so outputs stay as they are.

    Returns:
        The names of the attention modules that were released.

    Raises:
        ValueError: nothing in the model is constrained.

    Example:
        >>> from torch import nn
        >>> layer = nn.MultiheadAttention(8, 2)
        >>> report = constrain(layer)
        >>> release(layer), type(layer).__name__
        ([''], 'MultiheadAttention')
    """
    released = []
    for name, module in list(model.named_modules()):
        if isinstance(module, ConstrainedMultiheadAttention):
            module.release()
        elif separate_pair(module) is not None:
            release_separate(module)
        else:
            fused = [(n, child) for n, child in module.named_children() if isinstance(child, FusedProjection)]
            for child_name, child in fused:
                setattr(module, child_name, child.release())
            if not fused:
                continue
        released.append(name)
    if not released:
        raise ValueError("nothing in the model was constrained by constrain()")
    return released


def reproject(model: nn.Module) -> dict[str, float]:
    """Take the frames of a constrained model to the nearest ones, as after ``.half()`` or averaging.

    Nothing else does: a model turned to half precision is off the manifold by rounding until this is asked for.

    Returns:
        The point error that each parameter of frames had, by its name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> layer = nn.MultiheadAttention(8, 2)
        >>> report = constrain(layer)
        >>> layer.query.frames.detach().mul_(1.01)[0, 0, 0].isfinite()
        tensor(True)
        >>> errors = reproject(layer)
        >>> round(errors["query.frames"], 3), max(reproject(layer).values()) < 1e-5
        (0.02, True)
    """
    return {f"{n}.frames".lstrip("."): p.reproject() for n, p in model.named_modules() if isinstance(p, HeadProjection)}


def frame_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a constrained model with its frames and gains themselves, in the place of matrices.

    ``model.load_state_dict`` of a model constrained alike takes it as it takes ordinary ones, bit by bit, and refuses
    frames that are off the manifold. A model that is not constrained does not know these keys.

    Example:
        >>> from torch import nn
        >>> layer = nn.MultiheadAttention(8, 2)
        >>> report = constrain(layer)
        >>> sorted(k for k in frame_state_dict(layer) if k.startswith("query"))
        ['query.bias', 'query.frames', 'query.gain']
        >>> layer.load_state_dict(frame_state_dict(layer))
        <All keys matched successfully>
    """
    projections = [m for m in model.modules() if isinstance(m, HeadProjection)]
    for projection in projections:
        projection.saves_frames = True
    try:
        return model.state_dict()
    finally:
        for projection in projections:
            del projection.saves_frames


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model for an optimizer of :mod:`geodescent.optim`, with the manifold of each group named.

    Wrappers that make plain parameters of frames, as ``torch.distributed.fsdp.fully_shard`` does, hide from the
    optimizer what they are; the layers of this package still know. Without such a wrapper ``model.parameters()`` is as
    good.

    Returns:
        A group for each manifold, and one for everything else.

    Example:
        >>> from torch import nn
        >>> layer = nn.MultiheadAttention(8, 2)
        >>> report = constrain(layer)
        >>> [(g.get("manifold"), len(g["params"])) for g in parameter_groups(layer)]  # doctest: +ELLIPSIS
        [(Stiefel(...), 2), (None, 6)]
    """
    known: dict[int, Manifold] = {}
    for module in model.modules():
        if isinstance(module, FrameModule):
            known |= {id(getattr(module, name)): module.manifold for name in module.frame_names}
    groups: dict[Manifold | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(known.get(id(parameter), getattr(parameter, "manifold", None)), []).append(parameter)
    plain = groups.pop(None, [])
    named: list[dict[str, Any]] = [{"params": params, "manifold": manifold} for manifold, params in groups.items()]
    return [*named, {"params": plain}] if plain else named
