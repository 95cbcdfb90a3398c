"""Optimizers on manifolds."""

from .radam import RiemannianAdam
from .report import ParameterReport, ParameterRow, parameter_report

__all__ = ["ParameterReport", "ParameterRow", "RiemannianAdam", "parameter_report"]
