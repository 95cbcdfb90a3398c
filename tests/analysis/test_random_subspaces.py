import math

import numpy as np
import pytest
import scipy.linalg
import torch
from geodescent.analysis.random_subspaces import haar_sample, random_gauge, random_procrustes


def haar(n, p, count, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(count, n, p)))[0]


@pytest.mark.parametrize(("n", "p"), [(12, 3), (5, 4), (4, 4)])
def test_subspace_distance_is_that_of_independent_draws(n, p):
    drawn = [
        np.linalg.norm(scipy.linalg.subspace_angles(a, b))
        for a, b in zip(*haar(n, p, 600, 0).reshape(2, 300, n, p), strict=True)
    ]
    assert haar_sample(n, p, 400, 1)[1] == pytest.approx(np.mean(drawn), rel=0.04, abs=1e-6)


def test_distances_are_those_of_frames_drawn_and_aligned_one_by_one():
    n, p = 10, 3
    old, new = np.array([3.0, 1.0, 0.5]), np.array([2.0, 1.5, 0.1])
    frames = haar(n, p, 400, 2).reshape(2, 2, 100, n, p)

    def aligned(a, b):
        return np.linalg.norm(a - b @ scipy.linalg.orthogonal_procrustes(b, a)[0])

    one = [aligned(a * new, b * old) for a, b in zip(*frames[0], strict=True)]
    pairs = [
        aligned(np.vstack([q2, k2]) * np.sqrt(new), np.vstack([q, k]) * np.sqrt(old))
        for q, q2, k, k2 in zip(*frames[0], *frames[1], strict=True)
    ]
    samples = [haar_sample(n, p, 400, seed)[0] for seed in (3, 4)]
    spectra = torch.from_numpy(old), torch.from_numpy(new)
    assert float(random_procrustes(*spectra, samples[0])) == pytest.approx(np.mean(one), rel=0.03)
    assert float(random_gauge(*spectra, *samples)) == pytest.approx(np.mean(pairs), rel=0.03)


def test_a_broken_spectrum_spoils_only_itself():
    spectra = torch.tensor([[1.0, math.nan], [1.0, 1.0]], dtype=torch.float64)
    sample = haar_sample(6, 2, 8, 0)[0]
    for result in (random_procrustes(spectra, spectra, sample), random_gauge(spectra, spectra, sample, sample)):
        assert torch.isnan(result[0])
        assert torch.isfinite(result[1])
