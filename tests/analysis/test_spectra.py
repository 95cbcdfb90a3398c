import math

import numpy as np
import pytest
import scipy.linalg
import torch
from geodescent.analysis import (
    condition_number,
    principal_angles,
    procrustes_distance,
    singular_spectrum,
    subspace_distance,
)
from geodescent.analysis.spectra import effective_rank, stable_rank


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestConditionNumber:
    def test_known_values(self):
        assert condition_number(torch.diag(torch.tensor([4.0, 2.0, 0.5]))).item() == 8.0
        assert condition_number(torch.eye(3)).item() == 1.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
    def test_singular_is_infinite(self, dtype):
        assert condition_number(torch.zeros(3, 3, dtype=dtype)).item() == math.inf
        assert condition_number(torch.ones(2, 2, dtype=dtype)).item() == math.inf

    def test_batch_with_a_singular_and_a_zero_matrix(self):
        batch = torch.stack([torch.eye(2), torch.ones(2, 2), torch.zeros(2, 2)])
        assert condition_number(batch).tolist() == [1.0, math.inf, math.inf]

    def test_nan_spoils_only_its_own_matrix(self):
        batch = torch.stack([torch.eye(2), torch.full((2, 2), math.nan), torch.diag(torch.tensor([3.0, 1.0]))])
        kappa = condition_number(batch)
        assert kappa[0] == 1.0
        assert torch.isnan(kappa[1])
        assert kappa[2] == 3.0
        assert torch.isnan(condition_number(torch.tensor([[math.inf, 0.0], [0.0, 1.0]])))

    def test_wide_equals_transposed(self):
        a = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
        assert condition_number(a) == pytest.approx(condition_number(a.mT).item(), rel=1e-14)
        assert condition_number(a) == pytest.approx(np.linalg.cond(a.numpy()), rel=1e-13)

    def test_empty_batch(self):
        assert condition_number(torch.zeros(0, 4, 2)).shape == (0,)
        assert singular_spectrum(torch.zeros(3, 0, 4, 2)).shape == (3, 0, 2)

    def test_rank_decision_uses_the_dtype_of_the_input(self):
        a = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))
        assert condition_number(a).item() == pytest.approx(1e9)
        assert condition_number(a.float()).item() == math.inf

    def test_errors_say_what_was_found(self):
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            condition_number(torch.zeros(3))
        with pytest.raises(ValueError, match="without rows or columns"):
            condition_number(torch.zeros(3, 0))
        with pytest.raises(TypeError, match="must be real"):
            condition_number(torch.zeros(2, 2, dtype=torch.complex64))
        with pytest.raises(TypeError, match="must be a tensor"):
            condition_number(["a"])  # type: ignore[arg-type]


def test_numpy_in_numpy_out():
    a = gaussian(3, 5, 2).numpy()
    for result in (condition_number(a), singular_spectrum(a), principal_angles(a, a), procrustes_distance(a, a)):
        assert isinstance(result, np.ndarray)
    assert isinstance(principal_angles(a, torch.from_numpy(a)), torch.Tensor)
    assert condition_number(a.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(singular_spectrum(a), np.linalg.svd(a, compute_uv=False), rtol=1e-13)


class TestPrincipalAngles:
    @pytest.mark.parametrize(("n", "p", "q"), [(9, 4, 4), (9, 4, 2), (9, 2, 5), (5, 4, 3), (4, 4, 4), (3, 1, 1)])
    def test_against_scipy(self, n, p, q):
        a, b = gaussian(2, n, p, seed=1), gaussian(2, n, q, seed=2)
        got = principal_angles(a, b)
        assert got.shape == (2, min(p, q))
        for i in range(2):
            want = scipy.linalg.subspace_angles(a[i].numpy(), b[i].numpy())[::-1]
            # subspaces that must meet have angles of 0, which scipy may give as arccos(1 − ε) = 1.5e-8
            meet = max(0, p + q - n)
            assert bool((got[i, :meet] < 1e-13).all())
            np.testing.assert_allclose(got[i][meet:], want[meet:], atol=1e-13)

    @pytest.mark.parametrize("angle", [1e-9, 1e-12, 1e-4, 0.3, math.pi / 4, math.pi / 2 - 1e-9, math.pi / 2])
    def test_known_angles_survive_any_bases(self, angle):
        rotate = torch.linalg.qr(gaussian(7, 7)).Q
        a, b = torch.zeros(7, 2, dtype=torch.float64), torch.zeros(7, 2, dtype=torch.float64)
        a[0, 0] = a[1, 1] = b[1, 1] = 1
        b[0, 0], b[2, 0] = math.cos(angle), math.sin(angle)
        mix = torch.tensor([[2.0, 1.0], [-1.0, 3.0]], dtype=torch.float64)
        got = principal_angles(rotate @ a @ mix, rotate @ b @ mix.mT * 1e200)
        assert got[0].item() == pytest.approx(0.0, abs=1e-15)
        assert got[1].item() == pytest.approx(angle, abs=1e-15, rel=1e-6)

    def test_subspace_distance_is_the_arc_length(self):
        angle = 0.4
        a = torch.eye(4, 2, dtype=torch.float64)
        b = torch.zeros(4, 2, dtype=torch.float64)
        b[0, 0] = b[1, 1] = math.cos(angle)
        b[2, 0] = b[3, 1] = math.sin(angle)
        assert subspace_distance(a, b).item() == pytest.approx(angle * math.sqrt(2), rel=1e-14)
        assert subspace_distance(a, a @ torch.tensor([[1.0, 5.0], [0.0, 2.0]], dtype=torch.float64)) < 1e-15

    def test_errors(self):
        with pytest.raises(ValueError, match="columns of b are linearly dependent"):
            principal_angles(torch.eye(4, 2), torch.ones(4, 2))
        with pytest.raises(ValueError, match="same number of rows"):
            principal_angles(torch.eye(4, 2), torch.eye(3, 2))
        with pytest.raises(ValueError, match="transpose"):
            principal_angles(torch.ones(2, 4), torch.ones(2, 4))

    def test_nan_spoils_only_its_own_pair(self):
        a, b = gaussian(2, 5, 2, seed=3), gaussian(2, 5, 2, seed=4)
        b[0, 0, 0] = math.nan
        got = principal_angles(a, b)
        assert torch.isnan(got[0]).all()
        np.testing.assert_allclose(got[1], scipy.linalg.subspace_angles(a[1].numpy(), b[1].numpy())[::-1], atol=1e-13)


class TestProcrustes:
    def test_against_scipy(self):
        a, b = gaussian(6, 3, seed=5), gaussian(6, 3, seed=6)
        rotation, _ = scipy.linalg.orthogonal_procrustes(b.numpy(), a.numpy())
        want = np.linalg.norm(a.numpy() - b.numpy() @ rotation)
        assert procrustes_distance(a, b).item() == pytest.approx(want, rel=1e-13)

    def test_zero_modulo_rotation_and_exact_when_tiny(self):
        b = torch.linalg.qr(gaussian(8, 3, seed=7)).Q
        rotation = torch.linalg.qr(gaussian(3, 3, seed=8)).Q
        assert procrustes_distance(b @ rotation, b) < 1e-14
        # scaling by 1 + t is symmetric, so no rotation shortens it: the distance is t‖b‖
        assert procrustes_distance((1 + 1e-10) * b @ rotation, b).item() == pytest.approx(
            1e-10 * math.sqrt(3), rel=1e-4
        )

    def test_shapes_must_agree(self):
        with pytest.raises(ValueError, match="same rows and columns"):
            procrustes_distance(torch.eye(4, 2), torch.eye(4, 3))


def test_effective_rank_of_flat_and_of_vanishing_spectra():
    spectra = torch.tensor([[2.0, 2.0, 2.0, 2.0], [5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0]])
    assert effective_rank(spectra).tolist() == pytest.approx([4.0, 1.0, 0.0, 2.0])


class TestRanks:
    def test_values_at_the_ends_and_between(self):
        sigma = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]], dtype=torch.float64)
        torch.testing.assert_close(stable_rank(sigma), torch.tensor([3.0, 1.0, 0.0, 1.5], dtype=torch.float64))
        # entropy of (1/2, 1/4, 1/4) is 1.5 log 2
        want = torch.tensor([3.0, 1.0, 0.0, 2**1.5], dtype=torch.float64)
        torch.testing.assert_close(effective_rank(sigma), want)

    def test_scale_free_even_at_the_ends_of_the_range(self):
        sigma = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
        for scale in (1e-200, 1e200):
            assert stable_rank(scale * sigma).item() == pytest.approx(1.5)
            assert effective_rank(scale * sigma).item() == pytest.approx(2**1.5)

    def test_nan_stays_in_its_row(self):
        sigma = torch.tensor([[torch.nan, torch.nan], [1.0, 1.0]])
        for rank in (stable_rank(sigma), effective_rank(sigma)):
            assert torch.isnan(rank[0])
            assert rank[1].item() == pytest.approx(2.0)
