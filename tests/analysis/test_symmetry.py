"""On a small transformer block by autograd: gradients of its loss are horizontal, preconditioned ones are not."""

import json

import pytest
import torch
from geodescent.analysis import (
    key_bias_orbit,
    logit_shift_orbit,
    noether_residual,
    norm_scale_orbit,
    qk_orbit,
    relu_orbit,
    rescaling_orbit,
    vertical_part,
    vo_orbit,
)
from geodescent.manifolds import Stiefel

D, HEADS, D_H, HIDDEN, VOCABULARY = 12, 3, 4, 10, 7


def gaussian(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(seed=0):
    shapes = {
        "gamma": (D,),
        "beta": (D,),
        "w_q": (HEADS, D, D_H),
        "w_k": (HEADS, D, D_H),
        "w_v": (HEADS, D, D_H),
        "w_o": (HEADS, D_H, D),
        "b_k": (HEADS, D_H),
        "w_in": (HIDDEN, D),
        "b_in": (HIDDEN,),
        "w_gate": (HIDDEN, D),
        "w_out": (D, HIDDEN),
        "w_u": (VOCABULARY, D),
        "b_u": (VOCABULARY,),
    }
    return {
        name: (gaussian(*shape, seed=seed + i) / (D**0.5 if len(shape) > 1 else 1)).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }


def rotate(x, pairing):
    """Rotary embeddings along the positions of (heads, positions, d_h)."""
    half = D_H // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype).outer(0.1 ** torch.arange(half, dtype=x.dtype))
    a, b = (x[..., :half], x[..., half:]) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.cat(turned, -1) if pairing == "half" else torch.stack(turned, -1).flatten(-2)


def loss(w, rope=None, swiglu=False):
    """Cross entropy of one pre-norm block on eight tokens."""
    x = gaussian(8, D, seed=100)
    normed = torch.nn.functional.layer_norm(x, (D,), w["gamma"], w["beta"])
    q, k, v = normed @ w["w_q"], normed @ w["w_k"] + w["b_k"].unsqueeze(-2), normed @ w["w_v"]
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    x = x + ((q @ k.mT).softmax(-1) @ v @ w["w_o"]).sum(0)
    if swiglu:
        x = x + (torch.nn.functional.silu(x @ w["w_gate"].mT) * (x @ w["w_in"].mT)) @ w["w_out"].mT
    else:
        x = x + torch.relu(x @ w["w_in"].mT + w["b_in"]) @ w["w_out"].mT
    return torch.nn.functional.cross_entropy(x @ w["w_u"].mT + w["b_u"], torch.arange(8) % VOCABULARY)


def gradients(w, **options):
    value = loss(w, **options)
    found = torch.autograd.grad(value, list(w.values()), allow_unused=True)
    return {name: torch.zeros_like(w[name]) if g is None else g for name, g in zip(w, found, strict=True)}


def readers(w):
    """What reads the norm, as (out, d)."""
    return {name: w[name].mT.reshape(-1, D) for name in ("w_q", "w_k", "w_v")}


def orbits(w):
    return {
        "qk": qk_orbit(w["w_q"], w["w_k"]),
        "qk orthogonal": qk_orbit(w["w_q"], w["w_k"], group="orthogonal"),
        "vo": vo_orbit(w["w_v"], w["w_o"]),
        "vo orthogonal": vo_orbit(w["w_v"], w["w_o"], group="orthogonal"),
        "relu": relu_orbit(w["w_in"], w["w_out"], w["b_in"]),
        "norm": norm_scale_orbit(w["gamma"], readers(w), w["beta"]),
        "logits": logit_shift_orbit(w["w_u"], w["b_u"]),
        "key bias": key_bias_orbit(w["b_k"], w["w_k"]),
    }


NAMES = list(orbits(weights()))


def of_orbit(orbit, values):
    """The gradients or steps that belong to an orbit's weights, in its shapes."""
    names = {"bias": "b_u"}
    return {
        key: values[names.get(key, key)].mT.reshape(-1, D)
        if orbit.name == "norm scale" and key.startswith("w_")
        else values[names.get(key, key)]
        for key in orbit.weights
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
class TestBlock:
    def test_gradients_are_horizontal_and_elementwise_preconditioned_ones_are_not(self, name, seed):
        w = weights(seed)
        orbit, g = orbits(w)[name], gradients(w)
        certificate = noether_residual(orbit, of_orbit(orbit, g))
        assert certificate.passed
        assert certificate.relative < 1e-12
        # Adam's first step is the sign, also of b_K's gradient, which is rounding
        signs = {key: value.sign() for key, value in g.items()}
        spoiled = noether_residual(orbit, of_orbit(orbit, signs))
        assert not spoiled.passed
        assert spoiled.relative > 0.01

    def test_the_loss_does_not_move_along_the_orbit(self, name, seed):
        w = weights(seed)
        orbit = orbits(w)[name]
        step = vertical_part(
            orbit, {key: gaussian(*v.shape, seed=7 + i) for i, (key, v) in enumerate(orbit.weights.items())}
        )
        h = 1e-5

        def moved(t):
            values = dict(w)
            for key, part in step.part.items():
                target = {"bias": "b_u"}.get(key, key)
                if orbit.name == "norm scale" and key.startswith("w_"):
                    part = part.reshape(HEADS, D_H, D).mT
                values[target] = w[target] + t * part
            return loss(values).item()

        length = max(float(part.abs().max()) for part in step.part.values())
        assert length > 1e-3
        assert abs(moved(h) - moved(-h)) / (2 * h) < 1e-9

    def test_a_vertical_step_is_all_vertical_and_the_rest_of_a_step_not_at_all(self, name, seed):
        w = weights(seed)
        orbit = orbits(w)[name]
        step = {key: gaussian(*v.shape, seed=20 + i) for i, (key, v) in enumerate(orbit.weights.items())}
        found = vertical_part(orbit, step)
        assert 0 < found.fraction < 1
        again = vertical_part(orbit, found.part)
        assert again.fraction == pytest.approx(1, abs=1e-12)
        assert torch.allclose(again.generator, found.generator, atol=1e-10)
        rest = {key: step[key] - found.part[key] for key in step}
        assert vertical_part(orbit, rest).fraction < 1e-12
        # Pythagoras: the projection is orthogonal
        whole, vertical, horizontal = (
            sum(float(v.square().sum()) for v in values.values()) for values in (step, found.part, rest)
        )
        assert whole == pytest.approx(vertical + horizontal, rel=1e-12)
        assert found.fraction == pytest.approx((vertical / whole) ** 0.5, rel=1e-12)


class TestHeads:
    def test_the_formulas_of_the_residuals(self):
        w_q, w_k, g_q, g_k = gaussian(4, 6, 3)
        full = noether_residual(qk_orbit(w_q, w_k), {"w_q": g_q, "w_k": g_k})
        want = w_q.mT @ g_q - (w_k.mT @ g_k).mT
        assert torch.allclose(full.residual, want, atol=1e-14)
        assert full.absolute == pytest.approx(float(want.norm()))
        # on O(d_h): how far W_QᵀG_Q + W_KᵀG_K is from symmetric
        joint = w_q.mT @ g_q + w_k.mT @ g_k
        skew = noether_residual(qk_orbit(w_q, w_k, group="orthogonal"), {"w_q": g_q, "w_k": g_k}).residual
        assert torch.allclose(skew, (joint - joint.mT) / 2, atol=1e-14)

    @pytest.mark.parametrize("make", [qk_orbit, vo_orbit])
    def test_finite_elements_of_the_group_leave_the_product_alone(self, make):
        w_a = gaussian(6, 3)
        w_b = gaussian(6, 3, seed=1) if make is qk_orbit else gaussian(3, 6, seed=1)
        generator = gaussian(3, 3, seed=2)
        orbit = make(w_a, w_b)
        vectors = list(orbit.vertical(generator).values())
        h = 1e-6
        r = torch.linalg.matrix_exp(h * generator)
        other = torch.linalg.matrix_exp(-h * generator)
        ends = (w_a @ r, w_b @ other.mT) if make is qk_orbit else (w_a @ r, other @ w_b)
        for start, end, vector in zip((w_a, w_b), ends, vectors, strict=True):
            assert torch.allclose((end - start) / h, vector, atol=1e-5)

    def test_a_random_step_has_the_fraction_of_the_orbits_dimension(self):
        w_q, w_k = gaussian(2, 200, 20, 5)
        for group, dimension in (("gl", 25), ("orthogonal", 10)):
            orbit = qk_orbit(w_q, w_k, group=group)
            found = vertical_part(orbit, {"w_q": gaussian(200, 20, 5, seed=8), "w_k": gaussian(200, 20, 5, seed=9)})
            assert found.batch.shape == (200,)
            assert found.fraction == pytest.approx((dimension / 200) ** 0.5, rel=0.05)

    def test_frames_have_the_orthogonal_gauge_alone(self):
        # a loss of Q and K frames that is invariant under O(d_h), and is not under GL: the step must stay on the frames
        x = Stiefel().random_point(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        w_q, w_k = (a.clone().requires_grad_() for a in x)
        value = (w_q @ w_k.mT).sin().sum() + 0.1 * (w_q.mT @ w_q).square().sum()
        g_q, g_k = torch.autograd.grad(value, (w_q, w_k))
        g: dict[str, torch.Tensor] = {"w_q": g_q, "w_k": g_k}
        assert noether_residual(qk_orbit(w_q, w_k, group="orthogonal"), g).passed
        assert not noether_residual(qk_orbit(w_q, w_k), g).passed
        rgrad = {k: Stiefel().egrad_to_rgrad(w.detach(), g[k]) for k, w in (("w_q", w_q), ("w_k", w_k))}
        assert vertical_part(qk_orbit(w_q, w_k, group="orthogonal"), rgrad).fraction < 1e-13

    @pytest.mark.parametrize("pairing", ["half", "interleaved"])
    def test_rotary_embeddings_leave_what_commutes_with_them(self, pairing):
        w = weights()
        with torch.no_grad():
            w["b_k"].zero_()
        g = gradients(w, rope=pairing)
        own = of_orbit(qk_orbit(w["w_q"], w["w_k"]), g)
        assert not noether_residual(qk_orbit(w["w_q"], w["w_k"]), own).passed
        assert not noether_residual(qk_orbit(w["w_q"], w["w_k"], group="orthogonal"), own).passed
        other = {"half": "interleaved", "interleaved": "half"}[pairing]
        for group in ("gl", "orthogonal"):
            orbit = qk_orbit(w["w_q"], w["w_k"], group=group, rope=pairing)
            assert noether_residual(orbit, own).passed
            assert not noether_residual(orbit, {k: v.sign() for k, v in own.items()}).passed
            assert not noether_residual(qk_orbit(w["w_q"], w["w_k"], group=group, rope=other), own).passed
            step = {k: gaussian(*v.shape, seed=5) for k, v in own.items()}
            found = vertical_part(orbit, step)
            assert vertical_part(orbit, found.part).fraction == pytest.approx(1, abs=1e-12)

    def test_grouped_queries_turn_together_and_biases_are_rows(self):
        w_q, w_k = gaussian(2, 6, 3).requires_grad_(), gaussian(6, 3, seed=1).requires_grad_()
        b_q, b_k = gaussian(2, 1, 3, seed=2).requires_grad_(), gaussian(1, 3, seed=3).requires_grad_()
        x = gaussian(5, 6, seed=4)
        value = ((x @ w_q + b_q) @ (x @ w_k + b_k).mT).tanh().square().sum()
        g_q, g_k, gb_q, gb_k = torch.autograd.grad(value, (w_q, w_k, b_q, b_k))
        orbit = qk_orbit(torch.cat([w_q, b_q], 1).reshape(-1, 3), torch.cat([w_k, b_k]))
        certificate = noether_residual(
            orbit, {"w_q": torch.cat([g_q, gb_q], 1).reshape(-1, 3), "w_k": torch.cat([g_k, gb_k])}
        )
        assert certificate.passed
        without = qk_orbit(w_q.reshape(-1, 3), w_k)
        assert not noether_residual(without, {"w_q": g_q.reshape(-1, 3), "w_k": g_k}).passed

    def test_zero_weights_have_no_orbit(self):
        zero = torch.zeros(6, 3)
        found = vertical_part(qk_orbit(zero, zero), {"w_q": torch.ones(6, 3), "w_k": torch.ones(6, 3)})
        assert found.fraction == 0
        assert torch.isfinite(found.generator).all()


class TestScales:
    def test_swiglu_rescales_by_the_up_projection_alone(self):
        w = weights()
        g = gradients(w, swiglu=True)
        assert noether_residual(relu_orbit(w["w_in"], w["w_out"]), {"w_in": g["w_in"], "w_out": g["w_out"]}).passed
        gated = relu_orbit(w["w_gate"], w["w_out"])
        assert not noether_residual(gated, {"w_in": g["w_gate"], "w_out": g["w_out"]}).passed

    def test_all_readers_are_needed(self):
        w = weights()
        g = gradients(w)
        some = {name: value for name, value in readers(w).items() if name != "w_v"}
        orbit = norm_scale_orbit(w["gamma"], some, w["beta"])
        assert not noether_residual(orbit, of_orbit(orbit, g)).passed

    def test_dead_units_have_no_orbit_and_readers_may_be_a_list(self):
        w_in, w_out = gaussian(3, 2), gaussian(2, 3, seed=1)
        w_in[1], w_out[:, 1] = 0, 0
        found = vertical_part(relu_orbit(w_in, w_out), {"w_in": w_in + 1, "w_out": -w_out})
        assert found.generator[1] == 0
        assert set(norm_scale_orbit(torch.ones(2), [torch.ones(3, 2), torch.ones(1, 2)]).weights) == {
            "gamma",
            "reader0",
            "reader1",
        }

    def test_axes_of_tensors_of_any_shape(self):
        # a convolution's channels: (out, in, k) scaled by in, (out, in, k) of the layer before by out
        up, down = gaussian(4, 2, 3), gaussian(5, 4, 3, seed=1)
        orbit = rescaling_orbit({"before": (up, 0)}, {"after": (down, -2)})
        a = gaussian(4, seed=2)
        part = orbit.vertical(a)
        assert torch.allclose(part["before"], up * a[:, None, None])
        assert torch.allclose(part["after"], -down * a[:, None])
        assert vertical_part(orbit, part).fraction == pytest.approx(1)


def test_results_read_well_and_serialise():
    w = weights()
    orbit, g = orbits(w)["qk"], gradients(w)
    certificate, part = noether_residual(orbit, of_orbit(orbit, g)), vertical_part(orbit, of_orbit(orbit, g))
    assert "Q/K, GL(4)" in repr(certificate)
    assert "residual" not in repr(certificate)
    assert "<td>passed</td><td>yes</td>" in certificate._repr_html_()
    assert json.loads(json.dumps(certificate.to_dict()))["passed"] is True
    assert set(part.to_dict()["part"]) == {"w_q", "w_k"}
    assert "part" not in repr(part).replace("VerticalPart", "")


def test_errors():
    w = torch.eye(4, 2)
    with pytest.raises(ValueError, match=r"same heads and head dimension, found shapes \(4, 2\) and \(4, 3\)"):
        qk_orbit(w, torch.eye(4, 3))
    with pytest.raises(ValueError, match="same heads and head dimension"):
        vo_orbit(w, w)
    with pytest.raises(ValueError, match="group must be 'gl' or 'orthogonal', found 'so'"):
        qk_orbit(w, w, group="so")
    with pytest.raises(ValueError, match="rope must be 'half', 'interleaved' or None, found 'full'"):
        qk_orbit(w, w, rope="full")
    with pytest.raises(ValueError, match="even head dimension, found 3"):
        qk_orbit(torch.eye(4, 3), torch.eye(4, 3), rope="half")
    with pytest.raises(ValueError, match="w_q must be a matrix"):
        qk_orbit(w[0], w)
    with pytest.raises(ValueError, match=r"gradients must have the keys \['w_k', 'w_q'\], found \['w_q'\]"):
        noether_residual(qk_orbit(w, w), {"w_q": w})
    with pytest.raises(ValueError, match=r"step\['w_k'\] must have the shape of its weight, \(4, 2\), found \(2, 4\)"):
        vertical_part(qk_orbit(w, w), {"w_q": w, "w_k": w.T})
    with pytest.raises(ValueError, match=r"same number of slices, found \{'w_in': 3, 'w_out': 2\}"):
        relu_orbit(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"found \['a'\] in both"):
        rescaling_orbit({"a": (w, 0)}, {"a": (w, 0)})
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\)"):
        logit_shift_orbit(w, torch.ones(3))
    with pytest.raises(ValueError, match=r"w_u must be \(vocabulary, d\)"):
        logit_shift_orbit(torch.ones(3))
