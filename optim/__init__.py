"""Optimizers on manifolds."""

from .radam import RiemannianAdam
from .report import ParameterReport, ParameterRow, parameter_report
from .rsgd import RiemannianSGD

__all__ = ["ParameterReport", "ParameterRow", "RiemannianAdam", "RiemannianSGD", "parameter_report"]
