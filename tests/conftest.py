import os
import warnings

# Threads that spin while they wait stall one another where test workers outnumber cores; read when torch starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

# Small matrices: threads only get in the way of two test workers. Tests of the threaded paths set their own number.
torch.set_num_threads(1)

# print_blob helps to repeat a failure; derandomize makes every run draw the same examples
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True, max_examples=40)
settings.load_profile("fixed")

with warnings.catch_warnings():
    # geoopt 0.5.1 decorates its maths with the deprecated torch.jit.script at import, and nowhere else
    warnings.simplefilter("ignore", DeprecationWarning)
    import geoopt  # noqa: F401


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261201)
