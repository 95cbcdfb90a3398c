from typing import Any

import pytest
import torch
from geodescent.attention.conversion import HeadWeights, convert_query_key, fit_frames


def weights(heads=3, key_heads=None, d=10, dk=None, width=4, seed=0, dtype=torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    key_heads = heads if key_heads is None else key_heads

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return HeadWeights(
        draw(heads, d, width), draw(key_heads, dk or d, width), draw(heads, width), draw(key_heads, width)
    )


def attention(query, key, query_bias, key_bias, x, y):
    """Softmax of the logits, by the definition: (heads, queries, keys)."""
    group = query.shape[0] // key.shape[0]
    rows = []
    for h in range(query.shape[0]):
        q, k = x @ query[h], y @ key[h // group]
        if query_bias is not None:
            q = q + query_bias[h]
        if key_bias is not None:
            k = k + key_bias[h // group]
        rows.append(torch.softmax(q @ k.T, -1))
    return torch.stack(rows)


def effective(c, width) -> tuple[Any, Any, Any, Any]:
    """Ordinary matrices of the converted form, column by column."""

    def heads(frames, gain):
        wide = torch.cat(list(frames), -1)  # one frame or several side by side
        split = torch.stack(wide.split(width, -1))
        return split if gain is None else split @ torch.diag_embed(gain.expand(split.shape[0], width))

    return heads(c.query, c.query_gain), heads(c.key, c.key_gain), c.query_bias, c.key_bias


def inputs(d=10, dk=None):
    generator = torch.Generator().manual_seed(9)
    return (torch.randn(7, n, generator=generator, dtype=torch.float64) for n in (d, dk or d))


def assert_orthonormal(frames):
    gram = frames.mT @ frames
    torch.testing.assert_close(gram, torch.eye(gram.shape[-1], dtype=gram.dtype).expand_as(gram), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [{}, {"dk": 6}, {"width": 1}, {"width": 10}, {"heads": 1}], ids=str)
def test_exact_conversion_keeps_attention_weights(sizes):
    w = weights(**sizes)
    x, y = inputs(dk=sizes.get("dk"))
    c: Any = convert_query_key(w)
    assert c.exact
    assert c.key_gain is None
    assert c.key_bias is None
    assert_orthonormal(c.query)
    assert_orthonormal(c.key)
    expected = attention(w.query, w.key, w.query_bias, w.key_bias, x, y)
    found = attention(*effective(c, w.query.shape[-1]), x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_gains_are_the_singular_values_of_the_circuit():
    w = weights()
    c: Any = convert_query_key(w)
    expected = torch.linalg.svdvals(w.query @ w.key.mT)[:, :4]
    torch.testing.assert_close(c.query_gain, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("deficient", ["query", "key", "both", "zero query", "zero key", "repeated column"])
def test_a_circuit_without_full_rank_gets_whole_frames_and_zero_gains(deficient):
    w = weights()
    query, key = w.query.clone(), w.key.clone()
    if deficient in ("query", "both"):
        query[..., -1] = query[..., 0] - query[..., 1]
    if deficient in ("key", "both"):
        key[..., -1] = 2 * key[..., 0]
    if deficient == "zero query":
        query.zero_()
    if deficient == "zero key":
        key.zero_()
    if deficient == "repeated column":
        query[...] = query[..., :1]
    w = HeadWeights(query, key, w.query_bias, w.key_bias)
    c: Any = convert_query_key(w)
    assert c.exact
    assert_orthonormal(c.query)
    assert_orthonormal(c.key)
    assert float(c.query_gain[:, -1].abs().max()) < 1e-12
    x, y = inputs()
    # the query bias acts through W_K alone, and must survive a query matrix of zeros
    expected = attention(w.query, w.key, w.query_bias, w.key_bias, x, y)
    torch.testing.assert_close(attention(*effective(c, 4), x, y), expected, rtol=0, atol=1e-12)


def test_badly_scaled_weights_convert_exactly():
    w = weights()
    spread = torch.tensor([1e6, 1.0, 1e-3, 1e-6], dtype=torch.float64)
    w = HeadWeights(w.query * spread, w.key / spread, w.query_bias / spread, w.key_bias)
    c: Any = convert_query_key(w)
    assert_orthonormal(c.query)
    torch.testing.assert_close(
        effective(c, 4)[0] @ effective(c, 4)[1].mT, w.query @ w.key.mT, rtol=0, atol=1e-7
    )  # 1e-7 beside columns of 1e6


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_frames_with_gains_keep_their_basis(sign):
    """Unordered, repeated and zero gains, which a new singular value decomposition would reorder."""
    u, v = (torch.linalg.qr(m)[0] for m in (weights().query, weights(seed=1).key))
    gains = torch.tensor([2.0, 5.0, 2.0, 0.0], dtype=torch.float64).expand(3, 4)
    bias = weights().query_bias
    c: Any = convert_query_key(HeadWeights(sign * u * gains[:, None], v, bias, None))
    torch.testing.assert_close(c.query[..., :3], sign * u[..., :3], rtol=0, atol=1e-14)
    torch.testing.assert_close(c.query_gain, gains, rtol=0, atol=1e-14)
    assert_orthonormal(c.query)
    assert torch.equal(c.key, v)
    torch.testing.assert_close(c.query_bias, bias, rtol=0, atol=0)


def test_heads_that_have_their_form_do_not_decide_for_others():
    w = weights()
    c: Any = convert_query_key(w)
    query, key, bias = w.query.clone(), w.key.clone(), w.query_bias.clone()
    query[0], key[0], bias[0] = c.query[0] * c.query_gain[0], c.key[0], c.query_bias[0]
    again = convert_query_key(HeadWeights(query, key, bias, None))
    torch.testing.assert_close(again.query[0], c.query[0], rtol=0, atol=1e-14)
    x, y = inputs()
    expected = attention(w.query, w.key, w.query_bias, w.key_bias, x, y)
    torch.testing.assert_close(attention(*effective(again, 4), x, y), expected, rtol=0, atol=1e-12)


def test_one_gain_a_head_is_the_best_scaled_frame_pair():
    """Of all s U Vᵀ none is nearer to W_Q W_Kᵀ, with U, V frames: the distance is that of the singular values."""
    w = weights()
    c: Any = convert_query_key(w, gains="head")
    assert not c.exact
    assert c.query_gain.shape == (3, 1)
    q, k, _, _ = effective(c, 4)
    circuit = w.query @ w.key.mT
    distance = (q @ k.mT - circuit).norm(dim=(-2, -1))
    values = torch.linalg.svdvals(circuit)[:, :4]
    # von Neumann: tr(Mᵀ U Vᵀ) ≤ Σσ, so min ‖M − s U Vᵀ‖² = Σσ² − (Σσ)²/d_h
    best = (values.square().sum(-1) - values.sum(-1).square() / 4).sqrt()
    torch.testing.assert_close(distance, best, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(  # the bias has no part in the approximation
        k @ c.query_bias.unsqueeze(-1), w.key @ w.query_bias.unsqueeze(-1), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("gains", ["direction", "head"])
@pytest.mark.parametrize("group", [1, 2])
def test_rotary_takes_each_matrix_apart_and_keeps_its_basis(gains, group):
    w = weights(heads=4, key_heads=4 // group)
    c: Any = convert_query_key(w, gains=gains, rotary=True)
    assert not c.exact
    assert_orthonormal(c.query)
    q, k, query_bias, key_bias = effective(c, 4)
    assert query_bias is not None
    assert key_bias is not None
    # undo what moved between queries and keys, a scale a head, by which products are unchanged
    moved = (query_bias / w.query_bias)[:, :1]
    if gains == "direction":
        torch.testing.assert_close(moved, torch.ones_like(moved))
    torch.testing.assert_close(key_bias.repeat_interleave(group, 0) * moved, w.key_bias.repeat_interleave(group, 0))
    for found, given, scale in ((q, w.query, 1 / moved), (k.repeat_interleave(group, 0), w.key, moved)):
        found = found * scale.unsqueeze(-1)
        given = given.repeat_interleave(found.shape[0] // given.shape[0], 0)
        left, values, right = torch.linalg.svd(given, full_matrices=False)
        polar = values.mean(-1)[:, None, None] * left @ right
        if gains == "head":
            torch.testing.assert_close(found, polar, rtol=1e-10, atol=1e-12)
        else:  # more gains come nearer
            distance = (found - given).norm(dim=(-2, -1))
            assert bool((distance <= (polar - given).norm(dim=(-2, -1)) + 1e-12).all())


def test_rotary_converts_frames_with_gains_to_themselves():
    w = weights(heads=4, key_heads=2)
    c: Any = convert_query_key(w, rotary=True)
    again = convert_query_key(HeadWeights(*effective(c, 4)), rotary=True)
    for name in ("query", "key", "query_gain", "key_gain", "query_bias", "key_bias"):
        torch.testing.assert_close(getattr(again, name), getattr(c, name), rtol=0, atol=1e-9)


def test_shared_keys_that_heads_agree_on_convert_exactly():
    """Two query heads of one key head whose W_Q R_kᵀ have the same right singular vectors: nothing is lost."""
    w = weights(heads=4, key_heads=2)
    upper = torch.linalg.qr(w.key).R
    turn = torch.linalg.qr(weights(heads=2, d=4).query).Q
    u = torch.linalg.qr(weights(heads=4, seed=3).query).Q
    gains = torch.tensor([[4.0, 3, 2, 1], [1.0, 2, 5, 0.5], [3.0, 1, 2, 4], [1.0, 1.5, 2, 3]], dtype=torch.float64)
    target = (u * gains[:, None]).unflatten(0, (2, 2)) @ turn.mT.unsqueeze(1)  # W_Q R_kᵀ
    query = torch.linalg.solve_triangular(upper.unsqueeze(1), target.mT, upper=True).mT.flatten(0, 1)
    w = HeadWeights(query, w.key, w.query_bias, w.key_bias)
    x, y = inputs()
    found = attention(*effective(convert_query_key(w), 4), x, y)
    expected = attention(w.query, w.key, w.query_bias, w.key_bias, x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_shared_keys_keep_their_bias_and_lose_little_more_than_they_must():
    w = weights(heads=4, key_heads=2)
    c: Any = convert_query_key(w)
    assert not c.exact
    assert c.key_gain is None
    q, k, bias, _ = effective(c, 4)
    shared = k.repeat_interleave(2, 0)
    old = w.key.repeat_interleave(2, 0)
    torch.testing.assert_close(shared @ bias.unsqueeze(-1), old @ w.query_bias.unsqueeze(-1), rtol=0, atol=1e-12)
    circuit = w.query @ old.mT
    moved = (q @ shared.mT - circuit).norm() / circuit.norm()
    # taking the polar factors of W_Q and W_K alone, with the best single scale, loses more
    polar = [torch.linalg.svd(m, full_matrices=False) for m in (w.query, old)]
    naive = (polar[0].U @ polar[0].Vh) @ (polar[1].U @ polar[1].Vh).mT
    scale = (naive * circuit).sum((-2, -1), keepdim=True) / 4
    assert moved < 0.7 * (scale * naive - circuit).norm() / circuit.norm()


@pytest.mark.parametrize("gains", ["direction", "head"])
@pytest.mark.parametrize("rotary", [False, True])
def test_one_frame_over_all_heads(gains, rotary):
    w = weights(heads=2, d=10)
    c: Any = convert_query_key(w, frames="whole", gains=gains, rotary=rotary)
    assert not c.exact
    assert c.query.shape == c.key.shape == (1, 10, 8)
    assert_orthonormal(c.query)
    assert_orthonormal(c.key)
    q, k, _, _ = effective(c, 4)
    circuit = w.query @ w.key.mT
    assert (q @ k.mT - circuit).norm() < circuit.norm()
    again = convert_query_key(HeadWeights(*effective(c, 4)), frames="whole", gains=gains, rotary=rotary)
    torch.testing.assert_close(effective(again, 4)[0], q, rtol=0, atol=1e-8)
    torch.testing.assert_close(effective(again, 4)[1], k, rtol=0, atol=1e-8)


def test_whole_frames_convert_exactly_where_heads_are_orthogonal_already():
    basis = torch.linalg.qr(weights(heads=1, width=8).query).Q[0]
    other = torch.linalg.qr(weights(heads=1, width=8, seed=5).query).Q[0]
    query, key = (torch.stack(m.split(4, -1)) for m in (basis * torch.arange(1.0, 9.0), other))
    # an invertible change of basis a head, which the circuit does not see
    turn = torch.linalg.qr(weights(heads=2, d=4).query).Q
    stretch = torch.tensor([3.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    c: Any = convert_query_key(HeadWeights(query @ (turn * stretch), key @ (turn / stretch)), frames="whole")
    q, k, _, _ = effective(c, 4)
    torch.testing.assert_close(q @ k.mT, query @ key.mT, rtol=0, atol=1e-10)


def test_fit_frames_is_stationary_and_no_worse_than_its_start():
    m = weights().query
    frames, gain = fit_frames(m, iterations=2000)
    residual = m - frames * gain[:, None]
    # in g: every residual column is orthogonal to its frame column
    torch.testing.assert_close((residual * frames).sum(-2), torch.zeros(3, 4, dtype=m.dtype), rtol=0, atol=1e-9)
    # in U: UᵀW diag(g) is symmetric (the Lagrange condition of the Procrustes problem) and positive semidefinite
    inner = frames.mT @ m * gain[:, None]
    torch.testing.assert_close(inner, inner.mT, rtol=0, atol=1e-8)
    assert float(torch.linalg.eigvalsh((inner + inner.mT) / 2).min()) > -1e-8
    start = torch.nn.functional.normalize(m, dim=-2)
    left, _, right = torch.linalg.svd(start * m.norm(dim=-2)[:, None] ** 2, full_matrices=False)
    u = left @ right
    assert residual.norm() <= (m - u * (u * m).sum(-2)[:, None]).norm() + 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"w": weights(d=3)}, "query frames of 3 rows and 4 columns"),
        ({"w": weights(dk=3)}, "key frames of 3 rows"),
        ({"w": weights(), "frames": "whole"}, "10 rows and 12 columns"),
        ({"w": HeadWeights(weights().query * float("nan"), weights().key)}, "query weights have NaN"),
    ],
    ids=["wide query", "wide key", "wide whole", "nan"],
)
def test_errors(options, message):
    w = options.pop("w")
    with pytest.raises(ValueError, match=message):
        convert_query_key(w, **options)


def test_float32_is_converted_in_float64():
    w = weights(dtype=torch.float32)
    c: Any = convert_query_key(w)
    assert c.query.dtype == torch.float64
    torch.testing.assert_close(
        (c.query * c.query_gain[:, None]) @ c.key.mT, w.query.double() @ w.key.double().mT, rtol=0, atol=1e-13
    )
