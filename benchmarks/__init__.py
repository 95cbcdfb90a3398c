"""Speed, memory and drift against peers: ``python -m geodescent.benchmarks``.

Absolute times mean little on shared machines, so every figure is a ratio of things measured in turn in one run, given
with its quartiles. Nothing is imported here: the command sets up numpy's threads before numpy is loaded.
"""
