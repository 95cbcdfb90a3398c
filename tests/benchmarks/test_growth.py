import math
from typing import Any

import numpy as np
import pytest
from geodescent.benchmarks.growth import SERIES, Series, fit_power_law, measure_growth
from scipy import stats


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_power_law_is_found_exactly(exponent):
    sizes = [16, 32, 64, 128]
    law = fit_power_law(sizes, [3e-4 * s**exponent for s in sizes])
    assert law.exponent == pytest.approx(exponent, abs=1e-12)
    assert law.standard_error < 1e-12


def test_slope_and_standard_error_are_those_of_scipy():
    rng = np.random.default_rng(0)
    sizes = np.array([16, 32, 64, 128, 256])
    seconds = 1e-3 * sizes**1.3 * np.exp(0.2 * rng.standard_normal(5))
    law = fit_power_law(list(sizes), list(seconds))
    expected: Any = stats.linregress(np.log(sizes), np.log(seconds))
    assert law.exponent == pytest.approx(expected.slope, rel=1e-12)
    assert law.standard_error == pytest.approx(expected.stderr, rel=1e-9)


def test_two_points_have_no_error():
    law = fit_power_law([1, 2], [1, 4])
    assert law.exponent == pytest.approx(2)
    assert math.isnan(law.standard_error)


@pytest.mark.parametrize(("sizes", "seconds"), [([4], [1.0]), ([4, 4], [1.0, 2.0]), ([1, 2, 4], [1.0, 2.0])])
def test_what_cannot_be_fitted_is_an_error(sizes, seconds):
    with pytest.raises(ValueError, match="two or more, different, and as many"):
        fit_power_law(sizes, seconds)


@pytest.mark.parametrize("series", SERIES, ids=lambda s: s.name)
def test_a_series_varies_one_size_geometrically(series):
    others = {tuple(s for i, s in enumerate(shape) if i != series.axis) for shape in series.shapes}
    assert len(others) == 1
    ratios = {b / a for a, b in zip(series.sizes, series.sizes[1:], strict=False)}
    assert ratios == {2.0}
    assert all(n >= p for _, n, p in series.shapes)


def test_measurement():
    series = Series("frames", 0, ((1, 6, 2), (2, 6, 2), (4, 6, 2)), 1.0)
    outcome = measure_growth([series], rounds=2, warmup=1)
    (numbers,) = outcome.data["series"]
    assert numbers["sizes"] == [1, 2, 4]
    for who in ("ours", "floor"):
        medians = [s["median"] for s in numbers[who]["seconds"]]
        slope = np.polyfit(np.log([1, 2, 4]), np.log(medians), 1)[0]
        assert numbers[who]["exponent"] == pytest.approx(slope)
    (row,) = outcome.tables[0].rows
    assert row[:3] == ("frames", "·×6×2", "1, 2, 4")
