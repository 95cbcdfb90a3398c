"""Layers whose weights live on manifolds."""

from .projections import FrameProjection
from .stiefel_attention import StiefelAttention

__all__ = ["FrameProjection", "StiefelAttention"]
