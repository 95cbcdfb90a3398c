"""Speed, memory and drift against peers: ``python -m geodescent.benchmarks``.

Absolute times mean little on shared machines, so every figure is a ratio of things measured in turn in one run, given
with its quartiles.
"""

from .drift import measure_drift
from .growth import fit_power_law, measure_growth
from .memory import measure_memory
from .report import Outcome, Table
from .steps import measure_steps
from .targets import Target
from .timing import Spread, Timings, interleave
from .training import measure_training

__all__ = [
    "Outcome",
    "Spread",
    "Table",
    "Target",
    "Timings",
    "fit_power_law",
    "interleave",
    "measure_drift",
    "measure_growth",
    "measure_memory",
    "measure_steps",
    "measure_training",
]
