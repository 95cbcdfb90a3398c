import pytest
from geodescent.benchmarks.attention import HEADS, measure_attention


def test_memory_grows_with_tokens_and_not_with_their_square_but_for_weights():
    peaks = measure_attention([256, 1024]).data["peaks"]
    for name, found in peaks.items():
        growth = found["1024"] / found["256"]
        if name.endswith("with weights"):
            assert growth > 8
            assert found["1024"] > HEADS * 1024**2 * 4  # at least one matrix of queries by keys
        else:
            assert growth == pytest.approx(4, rel=0.25)
            assert found["1024"] < HEADS * 1024**2 * 4
