"""Optimizers on manifolds."""

from .averaging import AveragedModel
from .radam import RiemannianAdam
from .report import ParameterReport, ParameterRow, parameter_report
from .rsgd import RiemannianSGD
from .spectral import SpectralDescent

__all__ = [
    "AveragedModel",
    "ParameterReport",
    "ParameterRow",
    "RiemannianAdam",
    "RiemannianSGD",
    "SpectralDescent",
    "parameter_report",
]
