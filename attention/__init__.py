"""Layers whose weights live on manifolds."""

from .constrain import constrain, frame_state_dict, parameter_groups, release, reproject
from .constraint_report import ConstrainedLayer, ConstraintReport, SkippedLayer
from .conv import StiefelConv2d
from .linear import StiefelLinear
from .lora import StiefelLoRA
from .orientation import Orientation
from .parametrization import PolarParametrization, parametrize_stiefel
from .projection_layouts import ProjectionLayout
from .projections import FrameProjection
from .rotary import Rotary
from .stiefel_attention import StiefelAttention

__all__ = [
    "ConstrainedLayer",
    "ConstraintReport",
    "FrameProjection",
    "Orientation",
    "PolarParametrization",
    "ProjectionLayout",
    "Rotary",
    "SkippedLayer",
    "StiefelAttention",
    "StiefelConv2d",
    "StiefelLinear",
    "StiefelLoRA",
    "constrain",
    "frame_state_dict",
    "parameter_groups",
    "parametrize_stiefel",
    "release",
    "reproject",
]
