"""The step without a look at any value: equal to the ordinary one, recorded and replayed, skipped on the device.

A CUDA graph replays kernels on fixed addresses and runs no Python. ``Recording`` does the same on the CPU: it writes
down every operation of one step with the very tensors it worked on, and replays them in place.
"""

import copy
import io
import math

import pytest
import torch
from geodescent.manifolds import QR, AlphaMetric, CanonicalMetric, Grassmann, ManifoldParameter, Stiefel
from geodescent.optim import RiemannianAdam
from geodescent.optim.capturable import capturable_frame_step, check_capturable, retraction_polynomial
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

LOOKS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "isclose")
SHAPES = [(9, 4), (2, 3, 9, 4), (9, 4), (4, 4), (5, 1)]
ALPHAS = [-0.8, -0.5, 0.0, 0.7]


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def frame(*shape, seed=0, manifold=None, dtype=torch.float64):
    manifold = manifold or Stiefel()
    x = manifold.random_point(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return ManifoldParameter(x, manifold)


def company(alpha=-0.5, dtype=torch.float64):
    """Frames of several shapes and plain parameters, one of them not contiguous."""
    frames = [
        frame(*shape, seed=i, manifold=Stiefel(AlphaMetric(alpha)), dtype=dtype) for i, shape in enumerate(SHAPES)
    ]
    plain = [nn.Parameter(draw(3, seed=20, dtype=dtype)), nn.Parameter(draw(4, 5, seed=21, dtype=dtype).mT)]
    return [*frames, *plain]


def set_gradients(params, step, dtype=None):
    """In place where there is one, as the gradients of a captured backward pass are."""
    for i, p in enumerate(params):
        g = draw(*p.shape, seed=1000 * step + 500 + i).to(p.dtype)
        if p.grad is None:
            p.grad = g
        else:
            p.grad.copy_(g)


def adam(params, capturable, **options):
    return RiemannianAdam(params, **{"nonfinite": "skip", "lr": 1e-2, "capturable": capturable, **options})


def snapshot(params, optimizer):
    """Everything a step may write to, as bytes, so that NaN equals NaN and -0 is not 0."""
    tensors = [p.detach() for p in params]
    tensors += [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [t.contiguous().view(-1).view(torch.uint8).clone() for t in tensors]


def check_close(params, others, optimizer, other, tolerance=1e-10):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance)
        assert optimizer.state[p].keys() == other.state[q].keys()
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(value, other.state[q][key], rtol=tolerance, atol=tolerance)


class NoLooks(TorchDispatchMode):
    """Raises where a value is read on the host, or a shape depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in LOOKS or (name == "index" and any(getattr(t, "dtype", None) is torch.bool for t in args[1])):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Recording(NoLooks):
    """What a step does, as a CUDA graph would hold it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, old in self.calls:
            inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, tuple(kwargs.values())))}
            results = zip(tensors_in(old), tensors_in(func(*args, **kwargs)), strict=True)
            for kept, new in results:
                if kept.numel() and kept.untyped_storage().data_ptr() not in inputs:  # neither a view nor in place
                    kept.copy_(new)


def tensors_in(nested):
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [t for part in nested for t in tensors_in(part)] if isinstance(nested, tuple | list) else []


# --- the same step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
        {"lr": 0.3, "trust_radius": 0.4},
        {"lr": 2.0, "betas": (0.0, 0.9)},  # capped at the default radius, without momentum
        {"step_scale": "frobenius", "eps": 0.0},
        {"decay": "fused", "weight_decay": 0.5},
    ],
    ids=str,
)
def test_equals_the_ordinary_step(alpha, options):
    params, others = company(alpha), company(alpha)
    optimizer, other = adam(params, True, **options), adam(others, False, **options)
    for step in range(20):
        for those in (params, others):
            set_gradients(those, step)
        optimizer.step()
        other.step()
    check_close(params, others, optimizer, other)
    assert optimizer.capped_fraction() == other.capped_fraction()
    assert (optimizer.capped_fraction() > 0.5) == (options.get("lr", 0) > 0.1)


def test_plain_parameters_take_adamws_steps():
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True}
    params = company()[len(SHAPES) :]
    others = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = adam(params, True, **options), torch.optim.AdamW(others, **options)
    for step in range(10):
        for those in (params, others):
            set_gradients(those, step)
        optimizer.step()
        other.step()
    check_close(params, others, optimizer, other, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_frames_are_stepped_in_float32(dtype):
    params = [frame(2, 16, 4, seed=1, dtype=dtype), frame(16, 4, seed=2, dtype=dtype)]
    others = copy.deepcopy(params)
    optimizer, other = adam(params, True, lr=1e-3), adam(others, False, lr=1e-3)
    for step in range(12):
        for those in (params, others):
            set_gradients(those, step)
        optimizer.step()
        other.step()
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(optimizer.state[p]["master"], other.state[q]["master"], rtol=0, atol=2e-6)
            assert torch.equal(p.detach(), optimizer.state[p]["master"].to(dtype))

    # frames that somebody writes to are projected, but not in a step that is skipped
    params[0].data.copy_(params[1].data.flip(0).expand(2, 16, 4))
    optimizer.param_groups[0]["lr"] = 0.0
    params[1].grad = torch.full_like(params[1], math.nan)
    before = snapshot(params, optimizer)
    optimizer.step()
    assert all(map(torch.equal, before, snapshot(params, optimizer)))
    params[1].grad = torch.ones_like(params[1])
    kept = optimizer.state[params[1]]["master"].clone()
    nearest = Stiefel().project_point(params[0].detach().float())
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["master"], nearest, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.state[params[1]]["master"], kept, rtol=0, atol=1e-6)


@pytest.mark.parametrize("manifold", [Stiefel(CanonicalMetric()), Stiefel(AlphaMetric(-0.8))], ids=repr)
def test_rounding_does_not_add_up(manifold):
    p = frame(3, 32, 16, manifold=manifold, dtype=torch.float32)
    optimizer = adam([p], True)
    grads = draw(50, 3, 32, 16, dtype=torch.float32)
    for step in range(2000):
        p.grad = grads[step % 50]
        optimizer.step()
    assert float(manifold.point_error(p.detach()).max()) < 2e-6
    tangent = manifold.tangent_error(p.detach(), optimizer.state[p]["exp_avg"])
    assert float(tangent.max()) < 1e-6 * float(optimizer.state[p]["exp_avg"].norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (64, 16)], ids=str)
def test_normal_gradients_do_not_lead_off_the_manifold(dtype, shape):
    """The Riemannian gradient is rounding alone, and Adam divides by its length."""
    p = frame(*shape, dtype=dtype)
    s = draw(shape[1], shape[1], dtype=dtype)
    optimizer = adam([p], True)
    for _ in range(100):
        p.grad = p.detach() @ (s + s.mT)
        optimizer.step()
    assert float(Stiefel().point_error(p.detach())) < 50 * torch.finfo(dtype).eps


# --- no look at any value -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)], ids=["number", "tensor"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True, "trust_radius": 0.3, "weight_decay": 0.1}])
def test_a_step_reads_no_value(lr, options):
    for dtype in (torch.float64, torch.bfloat16):
        params = company(0.7, torch.float64)
        if dtype is torch.bfloat16:  # frames only: plain parameters of half precision are warned about
            params[:-2] = [frame(16, 4, seed=i, dtype=dtype) for i in range(3)]
        optimizer = adam(params, True, lr=lr, **options)
        for step in range(3):
            set_gradients(params, step)
            if step == 0:
                optimizer.step()
                continue
            with NoLooks():
                optimizer.step()


def test_the_ordinary_step_does():
    """The mode above sees what it is there to see."""
    params = company()
    optimizer = adam(params, False)
    set_gradients(params, 0)
    with NoLooks(), pytest.raises(AssertionError, match="waits for the device"):
        optimizer.step()


def test_recorded_once_and_replayed():
    params, others = company(0.7), company(0.7)
    lr = torch.tensor(0.02, dtype=torch.float64)
    options = {"trust_radius": 0.3, "amsgrad": True, "weight_decay": 0.1}
    optimizer, other = adam(params, True, lr=lr, **options), adam(others, False, lr=0.02, **options)
    recording = Recording()
    rates = [0.02, 0.02, 0.02, 0.1, 0.05, 0.05, 0.01]
    for step, rate in enumerate(rates):
        for those in (params, others):
            set_gradients(those, step)
            if step == 4:  # skipped, within a replay
                those[3].grad[0, 0] = math.inf
        lr.fill_(rate)
        other.param_groups[0]["lr"] = rate
        if step < 2:
            optimizer.step()
        elif step == 2:
            with recording:
                optimizer.step()
        else:
            recording.replay()
        other.step()
        check_close(params, others, optimizer, other)
    assert float(optimizer.state[params[0]]["step"]) == len(rates) - 1
    assert optimizer.capped_fraction() == other.capped_fraction() > 0


def step_arguments(dtype=torch.float64, metric=None, trust_radius=1.0):
    x = frame(3, 6, 4, dtype=dtype).detach()
    moments = (torch.zeros(3, 6, 4, dtype=dtype), torch.zeros(3, 1, 1, dtype=dtype), torch.zeros(3, 1, 1, dtype=dtype))
    metric = metric or AlphaMetric(0.7)
    polynomial = retraction_polynomial(metric, 4, dtype, trust_radius)
    assert polynomial is not None
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "step_scale": "rms", "trust_radius": trust_radius}

    def core(*tensors):
        return capturable_frame_step(*tensors, metric=metric, polynomial=polynomial, **options)

    return core, (x, draw(3, 6, 4, dtype=dtype), *moments, torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize("trust_radius", [0.05, 1.0])
def test_the_core_is_traced_with_fake_tensors(trust_radius):
    core, arguments = step_arguments(trust_radius=trust_radius)
    traced = make_fx(core, tracing_mode="fake")(*arguments)
    # and what was traced does for other data what the function does: nothing depended on the data it was traced with
    others = [a.clone() for a in arguments]
    others[1] = 100 * others[1]
    others[6] = torch.tensor(1e-3)
    torch.testing.assert_close(list(traced(*others)), list(core(*others)), rtol=0, atol=0)
    assert not bool(core(*others).capped.any())
    assert bool(core(*arguments).capped.any())


def test_the_core_compiles_into_one_graph():
    core, arguments = step_arguments()
    torch._dynamo.reset()
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*arguments), core(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    torch._dynamo.reset()


@pytest.mark.parametrize("alpha", [*ALPHAS, 2.0])
def test_the_trust_radius_bounds_the_spectrum(alpha):
    """The steps that stretch most are rotations of two columns and single normal directions, of metric length τ."""
    metric, tau = AlphaMetric(alpha), 0.8
    manifold = Stiefel(metric)
    x = torch.eye(6, 3, dtype=torch.float64)
    turn, normal = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64)
    turn[0, 1], turn[1, 0], normal[4, 0] = 1.0, -1.0, 1.0
    polynomial = retraction_polynomial(metric, 3, torch.float64, tau)
    assert polynomial is not None
    low, high = polynomial.interval
    worst = 0.0
    for u in (turn, normal, *(manifold.random_tangent(x) for _ in range(20))):
        eta = tau * u / manifold.norm(x, u)
        spectrum = torch.linalg.eigvalsh((x + eta).mT @ (x + eta)) - 1
        assert low <= float(spectrum.min())
        assert float(spectrum.max()) <= high
        worst = max(worst, float(spectrum.max()))
    assert worst > 0.85 * high  # the interval is no longer than it must be, but for its rounding to an eighth


# --- skipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("culprit", [1, 4, 5, 6])
def test_one_bad_entry_skips_everything(bad, culprit):
    params, others = company(), company()
    optimizer, other = adam(params, True, weight_decay=0.1), adam(others, False, weight_decay=0.1)
    for step in range(5):
        for those in (params, others):
            set_gradients(those, step)
            if step == 2:
                those[culprit].grad.view_as(those[culprit])[(0,) * those[culprit].ndim] = bad
        before = snapshot(params, optimizer)
        optimizer.step()
        other.step()
        same = [torch.equal(a, b) for a, b in zip(before, snapshot(params, optimizer), strict=step > 0)]
        assert all(same) == (step == 2)
    check_close(params, others, optimizer, other)
    assert float(optimizer.state[params[0]]["step"]) == 4


@pytest.mark.parametrize("size", [1e25, 1e38])
def test_a_step_that_overflows_skips_everything(size):
    params = company(dtype=torch.float32)
    optimizer = adam(params, True)
    set_gradients(params, 0)
    optimizer.step()
    set_gradients(params, 1)
    params[1].grad[1, 2] = size
    before = snapshot(params, optimizer)
    optimizer.step()
    assert all(map(torch.equal, before, snapshot(params, optimizer)))
    params[1].grad[1, 2] = 1e15  # is large, and is taken
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 2
    assert all(bool(torch.isfinite(p).all()) for p in params)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_zero_gradients_and_empty_batches_stay(eps):
    params = [frame(6, 3), frame(0, 6, 3)]
    if eps:  # where AdamW is 0/0
        params += [nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(0))]
    start = [p.detach().clone() for p in params]
    optimizer = adam(params, True, eps=eps)
    for p in params:
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    for p, x in zip(params, start, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=0, atol=1e-14)
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient
    assert all(float(optimizer.state[p]["step"]) == 3 for p in params)


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [(False, True, False), (True, False, True)], ids=str)
def test_state_goes_both_ways(ways):
    params, others = company(0.7), company(0.7)
    straight = adam(others, False, trust_radius=0.2, amsgrad=True)
    policies = {True: "skip", False: "raise"}
    optimizers = [RiemannianAdam(params, capturable=way, nonfinite=policies[way], amsgrad=True) for way in ways]
    optimizers[0].param_groups[0].update(lr=1e-2, trust_radius=0.2)
    saved = io.BytesIO()
    for leg, (optimizer, capturable) in enumerate(zip(optimizers, ways, strict=True)):
        if leg > 0:
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
            group = optimizer.param_groups[0]
            assert (group["capturable"], group["nonfinite"]) == (capturable, policies[capturable])
        for step in range(3 * leg, 3 * leg + 3):
            set_gradients(params, step)
            set_gradients(others, step)
            optimizer.step()
            straight.step()
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
    check_close(params, others, optimizers[-1], straight)
    assert optimizers[-1].capped_fraction() == straight.capped_fraction()


def test_state_saved_without_the_option_is_loaded():
    params = company()
    plain = adam(params, False)
    set_gradients(params, 0)
    plain.step()
    packed = plain.state_dict()
    for group in packed["param_groups"]:
        del group["capturable"]
    optimizer = adam(params, True)
    optimizer.load_state_dict(packed)
    assert optimizer.param_groups[0]["capturable"]
    optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 2 for p in params)


def test_a_copy_goes_on_alike():
    params = company()
    optimizer = adam(params, True)
    set_gradients(params, 0)
    optimizer.step()
    copies, other = copy.deepcopy((params, optimizer))
    for step in (1, 2):
        set_gradients(params, step)
        set_gradients(copies, step)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, snapshot(params, optimizer), snapshot(copies, other)))


def test_state_is_that_of_the_ordinary_step_and_counts_on_the_device():
    params, others = company(dtype=torch.float32), company(dtype=torch.float32)
    optimizer, other = adam(params, True), adam(others, False)
    for those in (params, others):
        set_gradients(those, 0)
    optimizer.step()
    other.step()
    for p, q in zip(params, others, strict=True):
        mine, theirs = optimizer.state[p], other.state[q]
        assert mine["step"].device == p.device
        assert {k: (v.shape, v.dtype) for k, v in mine.items()} == {k: (v.shape, v.dtype) for k, v in theirs.items()}


def test_schedulers_write_into_a_tensor_lr():
    params, others = company(), company()
    lr = torch.tensor(0.05, dtype=torch.float64)
    optimizer, other = adam(params, True, lr=lr), adam(others, False, lr=0.05)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8) for o in (optimizer, other)]
    for step in range(6):
        for those in (params, others):
            set_gradients(those, step)
        optimizer.step()
        other.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(0.05 * (1 + math.cos(math.pi * 6 / 8)) / 2)
    check_close(params, others, optimizer, other)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifold", "options", "message"),
    [
        (None, {"nonfinite": "raise"}, "nonfinite must be \"skip\" with capturable=True, found 'raise'"),
        (None, {"second_moment": "column"}, "second_moment='column', which is not capturable; capturable are"),
        (Stiefel(retraction=QR()), {}, r"parameter 0 .* lies on Stiefel\(.*QR.*, which is not capturable"),
        (Grassmann(), {}, "lies on Grassmann"),
        (None, {"trust_radius": None}, "trust_radius must be a number"),
        (None, {"trust_radius": 5.0}, r"trust_radius=5 is too large .* torch.float64 .* up to about 1\.4"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_named(manifold, options, message):
    with pytest.raises(ValueError, match=message):
        adam([frame(6, 3, manifold=manifold)], True, **options)


def test_a_tensor_lr_is_where_its_parameters_are():
    group = {"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(0.1, device="meta"), "nonfinite": "skip"}
    with pytest.raises(ValueError, match="lr is a tensor on meta and its parameters are on cpu"):
        check_capturable(group, [None], ["w"])


def test_the_radius_that_an_error_names_is_allowed():
    adam([frame(6, 3)], True, trust_radius=1.4)
    adam([frame(6, 3, dtype=torch.float32)], True, trust_radius=2.9)


def test_groups_agree_and_options_are_looked_at_anew():
    p, q = frame(6, 3), frame(6, 3, seed=1)
    with pytest.raises(ValueError, match="capturable must be the same in all groups"):
        adam([{"params": [p]}, {"params": [q], "capturable": False}], True)
    optimizer = adam([p], True)
    p.grad = draw(6, 3)
    optimizer.step()
    optimizer.param_groups[0]["trust_radius"] = None
    before = snapshot([p], optimizer)
    with pytest.raises(ValueError, match="trust_radius must be a number"):
        optimizer.step()
    assert all(map(torch.equal, before, snapshot([p], optimizer)))


def test_complex_and_sparse_are_named():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, of shape .* is complex"):
        adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))], True)
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = adam([p], True)
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
