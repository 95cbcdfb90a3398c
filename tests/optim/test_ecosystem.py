"""RiemannianAdam where a training script puts torch.optim.Adam: torch's own tools around it."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from geodescent.attention import StiefelAttention
from geodescent.manifolds import CanonicalMetric, Grassmann, ManifoldParameter, SpecialOrthogonal, Stiefel
from geodescent.optim import RiemannianAdam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

EACH = {
    "fused": {},
    "column": {"second_moment": "column"},
    "gram": {"second_moment": "gram"},
    "amsgrad": {"amsgrad": True},
}


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def frame(*shape, seed=0, manifold=None, dtype=torch.float64):
    manifold = Stiefel() if manifold is None else manifold
    x = manifold.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return ManifoldParameter(x, manifold)


class Net(nn.Module):
    """x ↦ tanh(x W) A + b with two frames W and plain A, b."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.w = frame(2, 6, 3, dtype=dtype)
        self.a = nn.Parameter(draw(6, 2, seed=5, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, x):
        return torch.tanh(torch.einsum("bd,hde->bhe", x, self.w).flatten(1)) @ self.a + self.b


def loss_of(net, step, rows=slice(None), dtype=torch.float64):
    x = draw(8, 6, seed=100 + step, dtype=dtype)[rows]
    return (net(x) - x[:, :2]).square().mean()


def train(net, optimizer, steps, around=lambda: None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        around()


def snapshot(net, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    return [p.detach().clone() for p in net.parameters()], state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def close(net, other, atol=1e-12):
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# --- schedulers, clipping, closures, accumulation -----------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "warm-up and decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    # also writes betas, through cycle_momentum
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_length_of_the_step(name):
    """With betas of 0 a frame's step has length lr·√(np) whatever its gradient, so lr can be read off it."""
    p = frame(6, 3)
    plain, twin = nn.Parameter(draw(4)), nn.Parameter(draw(4))
    optimizer = RiemannianAdam([p, plain], lr=0.05, eps=0.0, trust_radius=None, betas=(0.0, 0.0))
    adamw = torch.optim.AdamW([twin], lr=0.05, eps=0.0, betas=(0.0, 0.0), weight_decay=0.0)
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, adamw)]
    rates = []
    for step in range(8):
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["betas"] = (0.0, 0.0)
        before = p.detach().clone()
        p.grad = draw(6, 3, seed=step)
        plain.grad, twin.grad = draw(4, seed=step), draw(4, seed=step)
        optimizer.step()
        adamw.step()
        length = Stiefel().norm(before, Stiefel().inverse_retract(before, p.detach())) / 18**0.5
        rate = adamw.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == rate
        assert float(length) == pytest.approx(rate, rel=1e-9, abs=1e-12)
        assert torch.equal(plain, twin)
        rates.append(rate)
        for scheduler in schedulers:
            scheduler.step()
    assert len(set(rates)) >= 3


def test_one_cycle_drives_the_betas_too():
    p = frame(6, 3)
    optimizer = RiemannianAdam([p], lr=0.05)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    first = []
    for step in range(9):
        p.grad = draw(6, 3, seed=step)
        first.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        scheduler.step()
    assert max(first) == pytest.approx(0.95)
    assert min(first) < 0.86
    assert p.manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"]) < 1e-14


def test_plateau_scheduler_and_its_state():
    net = Net()
    optimizer = RiemannianAdam(net.parameters(), lr=0.05)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(3):
        train(net, optimizer, [step])
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
    other = RiemannianAdam(copy.deepcopy(net).parameters(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == pytest.approx(0.0125)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_norm_scales_the_gradients_before_the_step(foreach):
    net, twin = Net(), Net()
    optimizer, other = (RiemannianAdam(n.parameters(), lr=0.05, eps=0.1) for n in (net, twin))
    loss_of(net, 0).backward()
    loss_of(twin, 0).backward()
    norm = torch.stack([p.grad.square().sum() for p in twin.parameters() if p.grad is not None]).sum().sqrt()
    reported = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3, foreach=foreach)
    torch.testing.assert_close(reported, norm, rtol=1e-14, atol=0)
    for p in twin.parameters():
        assert p.grad is not None
        p.grad = p.grad * (1e-3 / (norm + 1e-6))
    optimizer.step()
    other.step()
    close(net, twin)


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_accumulated_gradients_are_one_big_batch(options):
    net, twin = Net(), Net()
    optimizer, other = (RiemannianAdam(n.parameters(), lr=0.05, **options) for n in (net, twin))
    for step in range(4):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(net, step, slice(2 * part, 2 * part + 2)) / 4).backward()
        optimizer.step()
    train(twin, other, range(4))
    close(net, twin)


def test_a_closure_is_the_same_as_backward_and_step():
    net, twin = Net(), Net()
    optimizer, other = (RiemannianAdam(n.parameters(), lr=0.05) for n in (net, twin))
    train(twin, other, range(4))
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
    close(net, twin, atol=0)


# --- mixed precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_a_step_that_the_scaler_skips_changes_nothing(options):
    net = Net(torch.float32)
    optimizer = RiemannianAdam(net.parameters(), lr=0.05, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(number, spoil=False):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number, dtype=torch.float32)).backward()
        if spoil:
            assert net.w.grad is not None
            net.w.grad[1, 0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()

    step(0)
    before = snapshot(net, optimizer)
    step(1, spoil=True)
    assert same(before, snapshot(net, optimizer))
    assert scaler.get_scale() == 2.0**9
    step(2)
    assert not same(before, snapshot(net, optimizer))


def test_the_scale_of_the_scaler_does_not_matter():
    net, twin = Net(torch.float32), Net(torch.float32)
    optimizer, other = (RiemannianAdam(n.parameters(), lr=0.05) for n in (net, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step, dtype=torch.float32)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        loss_of(twin, step, dtype=torch.float32).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        other.step()
    close(net, twin, atol=1e-6)


def test_training_under_bfloat16_autocast_keeps_frames_in_float32():
    torch.manual_seed(0)
    model = StiefelAttention(16, 4)
    optimizer = RiemannianAdam(model.parameters(), lr=0.02)
    x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, x, x)[0]
            loss = (out - x.roll(1, 1)).square().mean()
            assert out.dtype == torch.bfloat16
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    frames = [p for p in model.parameters() if isinstance(p, ManifoldParameter)]
    assert len(frames) == 2
    for p in frames:
        assert p.dtype == optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert p.manifold.point_error(p.detach()).max() < 2e-6


# --- compilation --------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_dynamo():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("clean_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, tracing a closure
@pytest.mark.parametrize("what", ["model", "step", "both", "closure"])
def test_compiled_trains_as_eager_does(what):
    net, twin = Net(), Net()
    optimizer, other = (RiemannianAdam(n.parameters(), lr=0.05) for n in (net, twin))
    forward = torch.compile(net, backend="aot_eager") if what in ("model", "both") else net
    calls = []

    def step(number):
        if what == "closure":

            def closure():
                optimizer.zero_grad()
                loss = loss_of(net, number)
                loss.backward()
                calls.append(number)
                return loss

            return optimizer.step(closure)
        return optimizer.step()

    taken = torch.compile(step, backend="aot_eager") if what != "model" else step
    for number in range(3):
        if what != "closure":
            optimizer.zero_grad()
            loss_of(forward, number).backward()
        taken(number)
    train(twin, other, range(3))
    close(net, twin, atol=1e-12 if what in ("model", "both") else 0)
    assert calls in ([], [0, 1, 2])
    assert float(optimizer.state[net.w]["step"]) == 3


# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_copies_of_model_and_optimizer_go_on_alike_and_apart(how, options):
    net = Net()
    optimizer = RiemannianAdam(net.parameters(), lr=0.05, **options)
    train(net, optimizer, range(3))
    if how == "deepcopy":
        twin, other = copy.deepcopy((net, optimizer))
    elif how == "pickle":
        twin, other = pickle.loads(pickle.dumps((net, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((net, optimizer), file)
        file.seek(0)
        twin, other = torch.load(file, weights_only=False)
    assert other.param_groups[0]["params"][0] is twin.w
    before = snapshot(twin, other)
    train(net, optimizer, range(3, 6))
    assert same(before, snapshot(twin, other))
    train(twin, other, range(3, 6))
    assert same(snapshot(net, optimizer), snapshot(twin, other))


# --- stacks -------------------------------------------------------------------------------------------------------

SHAPES = [(6, 3), (2, 6, 3), (4, 4), (3, 2, 5, 2), (5, 1)]
MANIFOLDS = {
    "stiefel": Stiefel(),
    "canonical": Stiefel(CanonicalMetric()),
    "grassmann": Grassmann(),
    "rotations": SpecialOrthogonal(),
}


@st.composite
def companies(draw_):
    """Parameters of several shapes, dtypes and manifolds, in an order, with the options of their group."""
    count = draw_(st.integers(2, 6))
    members = []
    for _ in range(count):
        manifold = draw_(st.sampled_from(sorted(MANIFOLDS)))
        shape = draw_(st.sampled_from([(4, 4), (2, 3, 3)] if manifold == "rotations" else SHAPES))
        dtype = draw_(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
        members.append((manifold, shape, dtype, draw_(st.booleans())))
    options = draw_(
        st.fixed_dictionaries(
            {
                "second_moment": st.sampled_from(["frame", "column", "element", "gram"]),
                "step_scale": st.sampled_from(["rms", "frobenius"]),
                "trust_radius": st.sampled_from([None, 1.0, 0.01]),
                "maximize": st.booleans(),
                "amsgrad": st.booleans(),
            }
        )
    )
    if options["second_moment"] == "gram":
        options["amsgrad"] = False
    return members, draw_(st.permutations(range(count))), options


@settings(max_examples=25)
@given(companies())
def test_company_and_order_do_not_matter(company):
    members, order, options = company

    def build():
        return [
            frame(*shape, seed=i, manifold=MANIFOLDS[manifold], dtype=dtype)
            for i, (manifold, shape, dtype, _) in enumerate(members)
        ]

    def gradients(params, step):
        for i, (p, member) in enumerate(zip(params, members, strict=True)):
            # some parameters have no gradient on some steps, so that their counts differ
            present = member[3] or step % 2 == 0
            p.grad = draw(*p.shape, seed=100 * step + i, dtype=p.dtype) if present else None

    alone, together = build(), build()
    single = [RiemannianAdam([p], lr=0.05, **options) for p in alone]
    joint = RiemannianAdam([together[i] for i in order], lr=0.05, **options)
    for step in range(4):
        gradients(alone, step)
        gradients(together, step)
        for optimizer in single:
            optimizer.step()
        joint.step()
    for p, q, optimizer in zip(alone, together, single, strict=True):
        # rounding of the dtype that is stepped in; a half-precision copy may round to its other neighbour
        eps = torch.finfo(torch.float32 if p.dtype == torch.bfloat16 else p.dtype).eps
        one, other = optimizer.state[p], joint.state[q]
        assert one.keys() == other.keys()
        if p.dtype == torch.bfloat16:
            torch.testing.assert_close(one["master"], other["master"], rtol=0, atol=300 * eps)
            torch.testing.assert_close(p.detach(), q.detach(), rtol=2**-7, atol=300 * eps)
        else:
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=300 * eps)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[key], other[key], rtol=300 * eps, atol=300 * eps)
        assert torch.equal(one["step"], other["step"])


def odd_storage(kind, x):
    """The values of x (4, 6, 3) in storage of another layout, with the tensor that owns it."""
    if kind == "transposed":
        owner = x.mT.contiguous()
        return owner, owner.mT
    if kind == "strided":
        owner = torch.zeros(8, 6, 6, dtype=x.dtype)
        view = owner[::2, :, 1::2]
    elif kind == "offset":
        owner = torch.zeros(100, dtype=x.dtype)
        view = owner[7:79].view(4, 6, 3)
    else:  # heads side by side in one matrix
        owner = torch.zeros(6, 12, dtype=x.dtype)
        view = owner.view(6, 4, 3).transpose(0, 1)
    view.copy_(x)
    return owner, view


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
@pytest.mark.parametrize("kind", ["transposed", "strided", "offset", "columns"])
def test_storage_layout_views_and_hooks_survive(kind, options):
    p = frame(4, 6, 3)
    owner, view = odd_storage(kind, p.detach())
    q = ManifoldParameter(view, Stiefel())
    outside = owner.clone()
    outside_mask = torch.ones_like(owner, dtype=torch.bool)
    torch.as_strided(outside_mask, view.shape, view.stride(), view.storage_offset()).fill_(False)
    window = q.detach()[1]
    seen = []
    q.register_hook(lambda g: seen.append("backward"))
    q.register_post_accumulate_grad_hook(lambda t: seen.append("accumulated"))
    version, pointer, strides = q._version, q.data_ptr(), q.stride()
    one, other = RiemannianAdam([p], lr=0.05, **options), RiemannianAdam([q], lr=0.05, **options)
    for step in range(3):
        for parameter, optimizer in ((p, one), (q, other)):
            optimizer.zero_grad()
            (parameter * draw(4, 6, 3, seed=step)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-14)
    assert (q.data_ptr(), q.stride()) == (pointer, strides)
    assert q._version > version  # autograd knows of the writes
    assert torch.equal(window, q.detach()[1])
    assert torch.equal(owner[outside_mask], outside[outside_mask])
    assert seen == ["backward", "accumulated"] * 3


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_strided_gradients_are_read_and_not_written(options):
    p, q = frame(4, 6, 3), frame(4, 6, 3)
    plain = nn.Parameter(draw(3))
    one = RiemannianAdam([p], lr=0.05, maximize=True, weight_decay=0.0, **options)
    other = RiemannianAdam([q, plain], lr=0.05, maximize=True, weight_decay=0.1, **options)
    for step in range(3):
        g = draw(4, 6, 3, seed=step)
        p.grad, plain.grad = g.clone(), draw(3, seed=step)
        q.grad = g.mT.contiguous().mT
        held, version = q.grad, q.grad._version
        one.step()
        other.step()
        assert q.grad is held
        assert held._version == version
        assert torch.equal(held, g)
        assert torch.equal(p.grad, g)
        assert torch.equal(plain.grad, draw(3, seed=step))
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-14)


def test_tied_frames_take_one_step_with_the_sum_of_their_gradients():
    model, twin = nn.Module(), nn.Module()
    model.q = model.k = frame(6, 3)
    twin.q = frame(6, 3)
    a, b = draw(6, 3, seed=1), draw(6, 3, seed=2)
    one, other = RiemannianAdam(model.parameters(), lr=0.05), RiemannianAdam(twin.parameters(), lr=0.05)
    for _ in range(3):
        one.zero_grad()
        ((model.q * a).sum() + (model.k * b).sum()).backward()
        one.step()
        twin.q.grad = a + b
        other.step()
    assert model.q is model.k
    assert len(one.state) == 1
    torch.testing.assert_close(model.q.detach(), twin.q.detach(), rtol=0, atol=1e-15)


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_state_moves_to_a_float64_model_in_another_order(options):
    net = Net(torch.float32)
    optimizer = RiemannianAdam(net.named_parameters(), lr=0.05, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step, dtype=torch.float32).backward()
        optimizer.step()
    wide = Net()
    with torch.no_grad():
        for p, q in zip(wide.parameters(), net.parameters(), strict=True):
            p.detach().copy_(p.manifold.project_point(q.double()) if isinstance(p, ManifoldParameter) else q)
    other = RiemannianAdam(list(wide.named_parameters())[::-1], lr=0.05, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for (name, p), q in zip(wide.named_parameters(), net.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert other.state[p][key].dtype == torch.float64, name
            assert torch.equal(other.state[p][key], optimizer.state[q][key].double()), name
    train(wide, other, [3])
    optimizer.zero_grad()
    loss_of(net, 3, dtype=torch.float32).backward()
    optimizer.step()
    for p, q in zip(wide.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach().double(), rtol=0, atol=1e-5)
    assert Stiefel().point_error(wide.w.detach()).max() < 1e-14


def test_frozen_and_new_parameters_are_listed_by_name():
    net = Net()
    optimizer = RiemannianAdam(net.named_parameters())
    train(net, optimizer, range(2))
    other = Net()
    other.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    other.a.requires_grad_(False)
    target = RiemannianAdam([(n, p) for n, p in other.named_parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        target.load_state_dict(optimizer.state_dict())
    assert "'extra' has no saved state" in str(caught.value)
    assert "'a' is saved" in str(caught.value)
    assert "frozen" in str(caught.value)
    assert not target.state


def test_a_parameter_frozen_midway_keeps_its_state_and_place():
    net = Net()
    optimizer = RiemannianAdam(net.parameters(), lr=0.05)
    train(net, optimizer, range(2))
    net.w.requires_grad_(False)
    before, moment = net.w.detach().clone(), optimizer.state[net.w]["exp_avg"].clone()
    train(net, optimizer, range(2, 4))
    assert torch.equal(net.w, before)
    assert torch.equal(optimizer.state[net.w]["exp_avg"], moment)
    net.w.requires_grad_(True)
    train(net, optimizer, [4])
    assert not torch.equal(net.w, before)
    assert [float(optimizer.state[p]["step"]) for p in net.parameters()] == [3, 5, 5]


@pytest.mark.parametrize(("second_moment", "share"), [("frame", 0.5), ("column", 0.51)])
def test_state_in_bytes_is_half_of_adams(second_moment, share):
    shape = (4, 128, 32)
    p, q = frame(*shape, dtype=torch.float32), nn.Parameter(torch.zeros(shape))
    optimizers = [RiemannianAdam([p], second_moment=second_moment), torch.optim.Adam([q])]
    sizes = []
    for parameter, optimizer in zip((p, q), optimizers, strict=True):
        parameter.grad = draw(*shape, dtype=torch.float32)
        optimizer.step()
        # storage, not elements: a view of something larger would hold all of it
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage() for v in optimizer.state[parameter].values()}
        sizes.append(sum(s.nbytes() for s in storages.values()))
    assert sizes[0] <= share * sizes[1] + 64


# --- gradients that are not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nonfinite_gradient_in_one_frame_changes_nothing(options, bad, policy):
    params = [frame(2, 6, 3), frame(6, 3, seed=1), frame(4, 2, seed=2), nn.Parameter(draw(3))]
    net = nn.ParameterList(params)
    optimizer = RiemannianAdam(net.parameters(), lr=0.05, nonfinite=policy, **options)

    def step(seed, spoil=False):
        for i, p in enumerate(params):
            p.grad = draw(*p.shape, seed=10 * seed + i)
        if spoil:
            params[0].grad[1, 3, 2] = bad
        optimizer.step()

    step(0)
    before = snapshot(net, optimizer)
    if policy == "raise":
        with pytest.raises(ValueError, match="nothing was stepped"):
            step(1, spoil=True)
    else:
        step(1, spoil=True)
    assert same(before, snapshot(net, optimizer))
    step(2)
    for p in params[:3]:
        assert p.manifold.point_error(p.detach()).max() < 1e-13


@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["zero", "denormal", "1e30", "1e-30"])
def test_an_extreme_gradient_in_one_frame_leaves_the_others_alone(options, dtype, kind):
    """The other frames of the stack do what they do in ordinary company, or nothing is stepped and that is said."""
    tiny = float(torch.finfo(dtype).tiny)
    size = {"zero": 0.0, "denormal": tiny / 8, "1e30": 1e30, "1e-30": 1e-30}[kind]
    p, q = frame(3, 6, 3, dtype=dtype), frame(3, 6, 3, dtype=dtype)
    spoiled, other = (RiemannianAdam([x], lr=0.05, **options) for x in (p, q))
    for step in range(4):
        g = draw(3, 6, 3, seed=step, dtype=dtype)
        q.grad, p.grad = g.clone(), g.clone()
        if step == 1:
            p.grad[1] *= size
        before = [x.clone() for x in (p.detach(), spoiled.state.get(p, {}).get("exp_avg", torch.zeros(3)))]
        try:
            spoiled.step()
        except ValueError as error:
            assert kind == "1e30"
            assert dtype == torch.float32
            assert "nothing was stepped" in str(error)  # noqa: PT017
            assert torch.equal(p.detach(), before[0])
            assert torch.equal(spoiled.state[p]["exp_avg"], before[1])
            return
        other.step()
        tolerance = 50 * torch.finfo(dtype).eps
        for i in (0, 2):
            torch.testing.assert_close(p.detach()[i], q.detach()[i], rtol=0, atol=tolerance)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    spoiled.state[p][key][i], other.state[q][key][i], rtol=tolerance, atol=tolerance
                )
        assert Stiefel().point_error(p.detach()).max() < tolerance
        assert all(bool(torch.isfinite(v).all()) for v in spoiled.state[p].values())
        relative = spoiled.state[p]["exp_avg"].abs().amax((-2, -1)).clamp(min=1)
        assert (Stiefel().tangent_error(p.detach(), spoiled.state[p]["exp_avg"]) / relative).max() < tolerance
