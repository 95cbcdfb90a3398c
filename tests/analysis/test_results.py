"""Every result: to plain values, to pandas and back, one screen, HTML."""

import dataclasses
import html
import math

import pandas as pd
import pytest
import torch
from geodescent import analysis
from geodescent.analysis._result import Result
from geodescent.manifolds import ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from torch import nn

MANIFOLD = Stiefel()


def draw(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = MANIFOLD.random_point(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
G = draw(7, 3)
STEP = -0.1 * MANIFOLD.egrad_to_rgrad(X, G)
GRADIENTS = [draw(7, 3, seed=s) for s in (2, 3)]


def adam(params):
    return RiemannianAdam(params, lr=1e-2, eps=0.0)


def attention(seed=0):
    torch.manual_seed(seed)
    return nn.MultiheadAttention(8, 2)


def audited(steps=2):
    p, plain = ManifoldParameter(X.clone(), MANIFOLD), nn.Parameter(draw(4, 4))
    model = nn.ParameterDict({"<frame>": p, "plain": plain})
    optimizer = adam(model.parameters())
    with analysis.audit(optimizer, model) as watched:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.stack([(q.sin() ** 2).sum() for q in model.values()]).sum().backward()
            optimizer.step()
    return watched.report()


def noether(gradient):
    w_q, w_k = draw(6, 3, seed=4), draw(6, 3, seed=5)
    return analysis.noether_residual(analysis.qk_orbit(w_q, w_k), {"w_q": gradient, "w_k": gradient})


def step_fn(x, gradients):
    return [-0.1 * g for g in gradients]


RESULTS = {
    "audit": audited,
    "audit row": lambda: audited().rows[0],
    "audit of nothing": lambda: audited(steps=0),
    "score": lambda: analysis.score_breakdown(MANIFOLD, X, G, STEP),
    "stationarity": lambda: analysis.stationarity_certificate(MANIFOLD, X, G),
    "conditioning": lambda: analysis.conditioning_certificate(MANIFOLD, X, STEP),
    "conditioning, capped": lambda: analysis.conditioning_certificate(MANIFOLD, X, STEP, trust_radius=1.0),
    "steepest": lambda: analysis.steepest_descent_certificate(MANIFOLD, X, G, STEP),
    "steepest, spectral": lambda: analysis.steepest_descent_certificate(MANIFOLD, X, G, STEP, norm="spectral"),
    "certify": lambda: analysis.certify(adam, MANIFOLD, (6, 2), steps=2),
    "certify row": lambda: analysis.certify(adam, MANIFOLD, (6, 2), steps=2).rows[0],
    "Hessian": lambda: analysis.hessian_condition_number(MANIFOLD, lambda x: (G * x).sin().sum(), X),
    "scale-free": lambda: analysis.scale_free_certificate(step_fn, X, GRADIENTS),
    "equivariance": lambda: analysis.equivariance_certificate(step_fn, X, GRADIENTS),
    "gauge": lambda: analysis.gauge_certificate(step_fn, X, GRADIENTS),
    "decay": lambda: analysis.weight_decay_certificate(MANIFOLD, X, 0.1),
    "Noether": lambda: noether(draw(6, 3)),
    "conditioning, NaN": lambda: dataclasses.replace(RESULTS["conditioning"](), condition_number=math.nan),
    "decay drift": lambda: analysis.weight_decay_drift(attention(), lr=0.1, weight_decay=0.5, steps=3),
    "decay arm": lambda: analysis.weight_decay_drift(attention(), lr=0.1, weight_decay=0.5, steps=3).arms[0],
    "vertical": lambda: analysis.vertical_part(analysis.logit_shift_orbit(draw(5, 2)), {"w_u": draw(5, 2, seed=2)}),
    "geometry": lambda: analysis.attention_geometry(attention()),
    "geometry layer": lambda: analysis.attention_geometry(attention()).layers[0],
    "drift": lambda: analysis.drift(attention(), attention(1), samples=3),
    "drift layer": lambda: analysis.drift(attention(), attention(1), samples=3).layers[0],
}


def same(a, b):
    """Equality in which NaN equals NaN, and 1 is not 1.0 nor True."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture(scope="module")
def results():
    return {name: make() for name, make in RESULTS.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_plain_values_and_back(results, name):
    result = results[name]
    values = result.to_dict()
    back = type(result).from_dict(values)
    assert same(back.to_dict(), values)
    assert repr(back) == repr(result)


@pytest.mark.parametrize("name", RESULTS)
def test_pandas_and_back(results, name):
    result = results[name]
    frame = result.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert same(type(result).from_pandas(frame).to_dict(), result.to_dict())


@pytest.mark.parametrize("name", RESULTS)
def test_one_screen_and_a_notebook(results, name):
    result = results[name]
    assert 2 <= len(repr(result).splitlines()) <= 45
    page = result._repr_html_()
    assert page.startswith("<table>")
    assert page.endswith("</table>")
    assert "<frame>" not in page
    if name == "audit":
        assert html.escape("<frame>") in page


def test_every_kind_of_result_is_here(results):
    found, kinds = set(), set()

    def walk(kind):
        for child in kind.__subclasses__():
            kinds.add(child)
            walk(child)

    walk(Result)
    assert kinds
    for result in results.values():
        found.add(type(result))
    mine = {
        kind
        for kind in kinds
        if kind.__module__.startswith("geodescent.analysis") and "<locals>" not in kind.__qualname__
    }
    assert {k.__name__ for k in mine} <= {k.__name__ for k in found}


def test_values_that_do_not_fit_are_named():
    values = RESULTS["conditioning"]().to_dict()
    values["colour"] = values.pop("bound")
    with pytest.raises(ValueError, match=r"missing \['bound'\], left over \['colour'\]"):
        analysis.ConditioningCertificate.from_dict(values)
    with pytest.raises(ValueError, match="one line"):
        analysis.ConditioningCertificate.from_pandas(pd.DataFrame({"bound": [1.0, 2.0]}))
