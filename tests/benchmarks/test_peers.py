import os
from importlib import metadata

import pytest
import torch
from geodescent.benchmarks.peers import PEERS, describe_machine, missing, peer


def test_a_missing_peer_says_how_to_get_it():
    assert missing("no_such_library") == "no_such_library is not installed"
    with pytest.raises(ImportError, match=r'no_such_library is not installed: pip install "geodescent\[benchmarks\]"'):
        peer("no_such_library")


def test_an_installed_peer_is_imported():
    assert missing("geoopt") is None
    assert peer("geoopt").__name__ == "geoopt"


def test_the_machine_is_described():
    facts = describe_machine(date="2026-01-31")
    assert facts["date"] == "2026-01-31"
    assert facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == metadata.version("torch")
    assert 1 <= facts["cores"] <= (os.cpu_count() or 1)
    assert facts["processor"]
    assert set(PEERS) <= set(facts)


def test_no_date_is_made_up():
    assert "date" not in describe_machine()
