import json
import math

import geoopt
import pandas as pd
import pytest
import torch
from geodescent.analysis import Norm, audit
from geodescent.analysis.norms import SPECTRAL
from geodescent.manifolds import CanonicalMetric, Euclidean, ManifoldParameter, Stiefel, from_geoopt
from geodescent.optim import RiemannianAdam
from torch import nn

N, P, OUT = 10, 4, 3


class Model(nn.Module):
    """tanh(xW) and a linear layer, on data of its own; W is a frame or any matrix."""

    def __init__(self, frame, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.frame = frame
        self.head = nn.Linear(P, OUT, dtype=dtype)
        with torch.no_grad():
            self.head.weight.normal_(generator=generator)
            self.head.bias.zero_()
        self.x = torch.randn(32, N, generator=generator, dtype=dtype)
        self.y = torch.randn(32, OUT, generator=generator, dtype=dtype)

    def loss(self):
        return (self.head(torch.tanh(self.x @ self.frame)) - self.y).square().mean()


def start(n=N, p=P, dtype=torch.float64):
    return Stiefel().random_point(n, p, dtype=dtype, generator=torch.Generator().manual_seed(0))


def geoopt_parameter(data, manifold):
    return geoopt.ManifoldParameter(data, manifold=manifold)  # type: ignore[call-arg]


def number(value):
    assert value is not None
    return value


def train(model, optimizer, steps=4, closure=False):
    def evaluate():
        optimizer.zero_grad()
        value = model.loss()
        value.backward()
        return value

    for _ in range(steps):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


def watch(model, optimizer, steps=4, **options):
    with audit(optimizer, model, **options) as watched:
        train(model, optimizer, steps)
    return watched.report()


class Spectral(torch.optim.Optimizer):
    """x ← polar(x − lr·D) with D the minimizer of ⟨G, D⟩, σmax(D) ≤ 1, over all matrices, or over tangent ones."""

    def __init__(self, params, lr, tangent, retract=True):
        super().__init__(params, {"lr": lr, "tangent": tangent, "retract": retract})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x = p.detach()
                g = p.grad
                if group["tangent"]:  # the closed form of square frames
                    inner = x.mT @ g
                    g = x @ (inner - inner.mT) / 2
                left, _, right = torch.linalg.svd(g, full_matrices=False)
                moved = x - group["lr"] * left @ right
                x.copy_(Stiefel().project_point(moved) if group["retract"] else moved)


OPTIMIZERS = {
    "RiemannianAdam": (
        lambda: ManifoldParameter(start(), Stiefel()),
        lambda params: RiemannianAdam(params, lr=1e-2),
    ),
    "AdamW": (lambda: nn.Parameter(start()), lambda params: torch.optim.AdamW(params, lr=1e-2)),
    "SGD with momentum": (
        lambda: nn.Parameter(start()),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    ),
    "geoopt": (
        lambda: geoopt_parameter(start(), geoopt.EuclideanStiefel()),
        lambda params: geoopt.optim.RiemannianAdam(params, lr=1e-2, weight_decay=0.1),
    ),
    "noisy": (lambda: nn.Parameter(start()), lambda params: Noisy(params)),
}


class Noisy(torch.optim.Optimizer):
    """Draws from the global generator, and spoils the gradient it was given."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])
                p.grad.zero_()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_training_is_the_same_to_the_bit(name, dtype):
    make, factory = OPTIMIZERS[name]
    results = []
    for audited in (False, True):
        torch.manual_seed(3)
        model = Model(make(), torch.float64)
        if dtype == torch.float32:
            frame = make().detach().float()
            if name == "RiemannianAdam":
                model.frame = ManifoldParameter(frame, Stiefel())
            elif name == "geoopt":
                model.frame = geoopt_parameter(frame, geoopt.EuclideanStiefel())
            else:
                model.frame = nn.Parameter(frame)
            model.head.float()
            model.x, model.y = model.x.float(), model.y.float()
        optimizer = factory(model.parameters())
        if audited:
            report = watch(model, optimizer, steps=6, norm="spectral", factory=factory)
            assert len(report.rows) == 12
        else:
            train(model, optimizer, steps=6)
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        results.append([p.detach().clone() for p in model.parameters()] + state + [torch.rand(3)])
    plain, watched = results
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


class TestWhatIsMeasured:
    def test_riemannian_descent_is_steepest_tangent_and_on_the_manifold(self):
        frame = geoopt_parameter(start(), geoopt.EuclideanStiefel())
        model = Model(frame)

        def factory(params):
            return geoopt.optim.RiemannianSGD(params, lr=1e-2)

        report = watch(model, factory(model.parameters()), factory=factory)
        assert [row.step for row in report["frame"]] == [1, 2, 3, 4]
        for row in report["frame"]:
            assert row.efficiency == pytest.approx(1, abs=1e-4)  # QR retraction: a second-order difference
            assert number(row.tangency) < 1e-9
            assert number(row.point_error) < 1e-14
            assert number(row.retraction_error) < 1e-9
            assert number(row.equivariance_defect) < 1e-9
            assert row.condition_number == pytest.approx(1, abs=1e-12)
            assert 1 <= number(row.step_condition) < 1.001
            assert row.manifold == repr(from_geoopt(frame.manifold))

    def test_plain_gradient_descent(self):
        model = Model(nn.Parameter(start()))
        report = watch(model, torch.optim.SGD(model.parameters(), lr=0.05))
        assert report.parameters() == ["frame", "head.weight"]  # a bias is no matrix
        for row in report.rows:
            assert row.efficiency == pytest.approx(1, abs=1e-12)
            assert row.tangency == 0
            assert row.lr == 0.05
            assert row.manifold == "Euclidean(ndim=2)"
            assert row.retraction_error is None
            assert row.equivariance_defect is None
            assert row.step_condition is None

    def test_the_step_in_adamw_units(self):
        model = Model(nn.Parameter(start()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        before = model.frame.detach().clone()
        report = watch(model, optimizer, steps=1)
        row = report["frame"][0]
        # the first step is lr·sign(G)
        assert row.effective_step == pytest.approx(1, rel=1e-3)
        assert row.rms_step == pytest.approx(float((model.frame.detach() - before).square().mean().sqrt()), rel=1e-12)
        frame = Model(ManifoldParameter(start(), Stiefel()))
        rows = watch(frame, RiemannianAdam(frame.parameters(), lr=1e-3), steps=1)["frame"]
        assert rows[0].effective_step == pytest.approx(1, rel=1e-3)

    def test_elementwise_preconditioning_is_neither_steepest_nor_equivariant(self):
        model = Model(nn.Parameter(start()))

        def factory(params):
            return torch.optim.AdamW(params, lr=1e-2)

        row = watch(model, factory(model.parameters()), steps=1, factory=factory)["frame"][0]
        sign = row.efficiency
        assert 0.6 < number(sign) < 0.95
        assert number(row.equivariance_defect) > 0.3
        # the sign is steepest where the largest entry is the length
        largest = Norm("largest entry", lambda d: d.abs().max(), lambda g: g.abs().sum(), lambda g: -g.sign())
        model = Model(nn.Parameter(start()))
        rows = watch(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0, eps=0), 1, norm=largest).rows
        assert [row.efficiency for row in rows] == pytest.approx([1, 1], abs=1e-10)

    def test_an_optimizer_that_leaves_the_manifold(self):
        model = Model(nn.Parameter(start()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        first = model.frame.detach().clone()
        report = watch(model, optimizer, steps=3, manifolds={"frame": Stiefel()})
        rows = report["frame"]
        errors = [number(row.point_error) for row in rows]
        assert errors[0] > 1e-5
        assert errors == sorted(errors)
        # the first displacement is −lr·G at a point of the manifold: its normal part, straight from the gradient
        model.frame.data.copy_(first)
        model = Model(model.frame)
        model.loss().backward()
        optimizer.zero_grad()
        gradient = torch.autograd.grad(model.loss(), model.frame)[0]
        normal = gradient - Stiefel().project(first, gradient)
        assert rows[0].tangency == pytest.approx(float(normal.norm() / gradient.norm()), rel=1e-2)
        assert rows[0].retraction_error is None

    def test_momentum_lowers_efficiency_and_its_absence_does_not(self):
        efficiencies = []
        for momentum in (0.0, 0.9):
            model = Model(nn.Parameter(start()))
            report = watch(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum), steps=6)
            efficiencies.append(report["frame"][-1].efficiency)
        assert efficiencies[0] == pytest.approx(1, abs=1e-12)
        assert number(efficiencies[1]) < 0.99

    def test_closures_are_scored_by_the_gradient_of_their_first_call(self):
        results = []
        for closure in (False, True):
            model = Model(nn.Parameter(start()))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
            with audit(optimizer, model) as watched:
                train(model, optimizer, steps=3, closure=closure)
            results.append([row.efficiency for row in watched.report().rows])
        assert results[0] == results[1]
        model = Model(nn.Parameter(start()))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        with audit(optimizer, model) as watched:
            optimizer.step(closure=lambda: (optimizer.zero_grad(), model.loss(), model.loss().backward())[1])
        row = watched.report().rows[0]
        assert 0 < number(row.efficiency) < 1

    def test_kernels_of_convolutions_are_one_matrix(self):
        model = nn.Conv2d(2, 3, 2, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with audit(optimizer, model, norm="spectral") as watched:
            model(torch.ones(1, 2, 4, 4, dtype=torch.float64)).square().sum().backward()
            assert model.weight.grad is not None
            g = model.weight.grad.flatten(1).clone()
            optimizer.step()
        s = torch.linalg.svdvals(g)
        want = g.square().sum() / s[0] / s.sum()
        assert watched.report().rows[0].efficiency == pytest.approx(float(want), rel=1e-9)
        assert watched.report().rows[0].shape == (3, 2, 2, 2)

    def test_group_manifolds_frozen_and_unused_parameters(self):
        frame, frozen, unused = (nn.Parameter(start()) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = RiemannianAdam([{"params": [frame, frozen, unused], "manifold": Stiefel()}], lr=1e-2)
        with audit(optimizer, {"frame": frame}) as watched:
            frame.grad = torch.ones_like(frame)
            optimizer.step()  # type: ignore[misc]
        (row,) = watched.report().rows
        assert row.manifold == repr(Stiefel())
        assert row.efficiency == pytest.approx(1, abs=1e-9)
        assert row.retraction_error is not None

    def test_a_step_that_is_not_finite_is_reported_and_the_run_goes_on(self):
        p = nn.Parameter(torch.eye(3, 2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        with audit(optimizer) as watched:
            for value in (math.nan, 1.0):
                p.grad = torch.full_like(p, value)
                optimizer.step()
        first, second = watched.report().rows
        assert first.name == "parameter 0"
        assert (first.efficiency, first.tangency) == (None, None)
        assert math.isnan(first.rms_step)
        assert second.efficiency is None  # the parameter is NaN by now
        assert "parameter 0" in repr(watched.report())


class TestWhatItCatches:
    def test_a_spectral_optimizer_that_forgets_the_tangent_projection(self):
        rows = {}
        for tangent in (True, False):
            p = ManifoldParameter(start(6, 6), Stiefel())
            a = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
            optimizer = Spectral([p], lr=0.05, tangent=tangent)
            with audit(optimizer, {"w": p}, norm="spectral") as watched:
                for _ in range(3):
                    optimizer.zero_grad()
                    (a * p).sum().backward()
                    optimizer.step()
            rows[tangent] = watched.report()["w"]
        assert all(row.efficiency == pytest.approx(1, abs=1e-8) for row in rows[True])
        # it stays on the manifold all the same: only the score gives it away
        assert all(number(row.tangency) < 1e-12 for row in rows[False])
        assert all(0.3 < number(row.efficiency) < 0.98 for row in rows[False])

    def test_one_that_does_not_retract_either(self):
        p = nn.Parameter(start())
        a = torch.randn(N, P, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        optimizer = Spectral([p], lr=0.05, tangent=False, retract=False)
        with audit(optimizer, {"w": p}, norm="spectral", manifolds={"w": Stiefel()}) as watched:
            (a * p).sum().backward()
            optimizer.step()
        (row,) = watched.report().rows
        d = SPECTRAL.lmo(a)
        normal = d - Stiefel().project(start(), d)
        assert row.tangency == pytest.approx(float(normal.norm() / d.norm()), rel=0.05)
        assert number(row.tangency) > 0.2
        assert number(row.efficiency) < 0.98

    def test_a_canonical_retraction_of_the_wrong_speed(self):
        canonical = Stiefel(CanonicalMetric())
        reports = {}
        for theirs, manifold in (
            (True, geoopt.CanonicalStiefel()),
            (False, geoopt.EuclideanStiefel()),
        ):
            model = Model(geoopt_parameter(start(), manifold))
            optimizer = geoopt.optim.RiemannianSGD(model.parameters(), lr=1e-3)
            reports[theirs] = watch(model, optimizer, steps=2)["frame"]
        assert all(number(row.retraction_error) < 1e-9 for row in reports[False])
        for row in reports[True]:
            # DR(0)[u] = u + XXᵀu
            assert number(row.retraction_error) > 0.3
            # steepest descent in the canonical metric, had the rotation not been twice what was asked for
            assert number(row.efficiency) < 0.99
            assert row.manifold == repr(from_geoopt(geoopt.CanonicalStiefel()))
        model = Model(geoopt_parameter(start(), geoopt.CanonicalStiefel()))
        x = start()
        g = torch.autograd.grad(model.loss(), model.frame)[0]
        u = -canonical.egrad_to_rgrad(x, g)
        velocity = u + x @ (x.mT @ u)
        rotation = x @ (x.mT @ velocity)
        want = float(rotation.norm() / velocity.norm())
        assert reports[True][0].retraction_error == pytest.approx(want, rel=1e-2)


class TestReport:
    def report(self):
        model = Model(ManifoldParameter(start(), Stiefel()))
        return watch(model, RiemannianAdam(model.parameters(), lr=1e-2))

    def test_reads_well_and_converts(self):
        report = self.report()
        text = repr(report)
        assert "Audit of RiemannianAdam: 4 steps" in text
        assert len(text.splitlines()) == 5
        frame = report.to_pandas()
        assert isinstance(frame, pd.DataFrame)
        assert list(frame["name"]) == ["frame", "head.weight"] * 4
        assert frame["efficiency"].tolist() == [row.efficiency for row in report.rows]
        assert json.loads(json.dumps(report.to_dict()))["rows"][0]["name"] == "frame"
        with pytest.raises(KeyError, match="no parameter 'bias' was audited, there are"):
            report["bias"]

    def test_names_are_escaped_and_many_parameters_fit_a_screen(self):
        params = {f"<b>{i}</b>": nn.Parameter(torch.eye(2)) for i in range(40)}
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        with audit(optimizer, params) as watched:
            for p in params.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        html = watched.report()._repr_html_()
        assert "<b>" not in html
        assert "&lt;b&gt;0" in html
        assert len(repr(watched.report()).splitlines()) <= 27
        assert "17 more" in repr(watched.report())

    def test_every_so_many_steps_and_only_inside_the_with(self):
        model = Model(nn.Parameter(start()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = audit(optimizer, model, every=3)
        assert watched.report().rows == ()
        train(model, optimizer, steps=2)
        with watched:
            train(model, optimizer, steps=7)
        train(model, optimizer, steps=2)
        assert [row.step for row in watched.report()["frame"]] == [1, 4, 7]
        assert watched.report().steps == 7
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def test_errors():
    model = Model(nn.Parameter(start()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, found Model"):
        audit(model, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be at least 1, found 0"):
        audit(optimizer, model, every=0)
    with pytest.raises(ValueError, match="norm must be one of"):
        audit(optimizer, model, norm="L7")
    with pytest.raises(ValueError, match=r"manifolds names \['w'\]"):
        audit(optimizer, model, manifolds={"w": Euclidean(2)})
    with pytest.raises(ValueError, match="a frame on Stiefel must be tall"):
        audit(optimizer, model, manifolds={"head.weight": Stiefel()})
    with audit(optimizer, model) as watched, pytest.raises(RuntimeError, match="recording already"), watched:
        pass
