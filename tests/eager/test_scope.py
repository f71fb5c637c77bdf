"""checkpoint_scope: gradients, what is kept, what is recomputed when, and who else is around."""

import ctypes
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import Counter, Storages, assert_same
from torch import nn
from torch.ao import quantization
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from funcckpt import checkpoint, checkpoint_scope, policies, remat
from funcckpt.eager import scope as scope_module
from funcckpt.errors import MutationError, TransformError
from funcckpt.meter import measure

from .implementations import D, Ops, in_a_thread, leaf, plain


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    assert scope_module._current() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.fixture(autouse=True, scope="module")
def no_block_left():
    yield
    assert recordings() == 0


def recordings():
    gc.collect()
    return sum(type(x) is scope_module._Block and len(x._operations) > 0 for x in gc.get_objects())


def own_generator(scope, a):
    generator = torch.Generator().manual_seed(3)
    with scope():
        x = a * torch.rand(4, dtype=D, generator=generator)
    return x.exp() * torch.rand(4, dtype=D, generator=generator)


def conditional(scope, x):
    # Not torch.cond, which compiles them first: Dynamo does so under some dispatch modes only.
    cond = torch.ops.higher_order.cond
    with scope():
        y = x.exp()
        (z,) = cond(y.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (y,))
        w = z * y
    return w * z


def inner_gradient(scope, x):
    """What is saved in a region must not depend on which tensors of a block happen to be alive."""
    with scope():
        x = x.sin().exp()
    with scope():
        (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
        return x + g.tanh()


def parts(scope, x):
    with scope():
        chunks = x.sin().unsafe_chunk(2, 0)
        z = (chunks[0].clone() if scope is nullcontext else chunks[0]) * x.chunk(2)[0]
        chunks[0].mul_(2)
    return (z * chunks[0] * chunks[1]).sum()


def overwritten(scope, a):
    """Plain autograd refuses it; here the value at the time of saving is recomputed."""
    with scope():
        x = a.sin()
        y = x * (x.clone() if scope is nullcontext else x)
        x = x.mul(2) if scope is nullcontext else x.mul_(2)
        z = y * x
    return z * x


def without_grad(scope, a):
    with torch.no_grad(), scope():
        x = a.sin()
    with torch.inference_mode(), scope():
        y = a.sin() * 2
    return x * x * a * y.clone()


INSIDE = [own_generator, conditional, inner_gradient, without_grad]


@pytest.mark.parametrize(
    ("f", "around"),
    [*[(f, plain) for f in [*INSIDE, overwritten, parts]], *[(f, checkpoint) for f in INSIDE]],
    ids=lambda f: f.__name__,
)
def test_as_without(f, around):
    """Value, gradients, and where the random stream ends."""

    def run(scope, call):
        torch.manual_seed(1)
        x = leaf(4, 4)
        y = call(lambda x: f(scope, x), x)
        after = torch.rand(2)
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.detach().clone(), g, torch.autograd.grad(y.sum(), x), after, torch.rand(2)

    assert_same(run(checkpoint_scope, around), run(nullcontext, plain))


def test_batched_gradients_with_dropout():
    a = leaf(16)

    def f(scope):
        torch.manual_seed(0)
        with scope():
            x = F.dropout(a, 0.5).exp()
        return torch.autograd.grad(x * x, a, torch.eye(16, dtype=D), is_grads_batched=True)[0]

    assert_same(f(checkpoint_scope), f(nullcontext))


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("draw", [torch.rand_like, F.dropout, lambda x: torch.empty_like(x).normal_()])
def test_random_numbers_under_a_vmap_of_the_backward(draw, randomness):
    a = leaf(4, 4)

    def f(scope):
        torch.manual_seed(0)
        with scope():
            x = torch.tanh(a) * draw(torch.ones(4, 4, dtype=D))
        pull = lambda ct: torch.autograd.grad(x, a, ct, retain_graph=True)[0]
        return torch.func.vmap(pull, randomness=randomness)(torch.eye(16, dtype=D).view(16, 4, 4))

    assert_same(f(checkpoint_scope), f(nullcontext))


@pytest.mark.parametrize("around", [plain, checkpoint, lambda f, x: remat(f)(x)])
@pytest.mark.parametrize("call", [plain, lambda f, x: remat(f)(x)])
def test_statistics_that_are_read_before_they_are_updated(call, around):
    def run(scope, call, around):
        torch.manual_seed(0)
        m, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), torch.randn(5, 4, dtype=D)

        def f(x):
            with scope():
                return call(m, x - m[1].running_mean)

        around(f, x).square().sum().backward()
        return [p.grad for p in m.parameters()], [*m.buffers()]

    assert_same(run(checkpoint_scope, call, around), run(nullcontext, plain, plain))


def test_statistics_that_somebody_resets_between_two_scopes():
    norm, x = nn.BatchNorm1d(4).double(), leaf(5, 4)

    def run():
        with checkpoint_scope():
            y = torch.tanh(x - norm.running_mean)
        norm.reset_running_stats()
        with checkpoint_scope():
            z = norm(y * 1.0)
        z.pow(3).sum().backward()

    with pytest.raises(MutationError, match="modified by an inplace operation"):
        run()


def test_scopes_inside_of_a_remat_keep_nothing_in_its_recomputation():
    ws, x = [(leaf(4, 64), leaf(64, 4)) for _ in range(8)], leaf(16, 4)

    def group(scope, x):
        for a, b in ws:
            with scope():
                h = torch.tanh(x @ a)
            x = x + h @ b
        return x

    run = lambda scope: torch.autograd.grad(remat(lambda x: group(scope, x))(x).square().sum(), x)
    with_scopes, without = measure(run, checkpoint_scope), measure(run, nullcontext)
    assert_same(with_scopes.result, without.result)
    assert with_scopes.peak_bytes < 0.5 * without.peak_bytes


def test_a_policy_in_a_scope_keeps_nothing():
    def run(scope, policy):
        torch.manual_seed(0)
        m, x = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).double(), leaf(5, 4)
        with scope():
            y = remat(m, policy=policy)(x)
        y.square().sum().backward()
        return x.grad, [p.grad for p in m.parameters()], [*m.buffers()]

    assert_same(run(checkpoint_scope, policies.dots_saveable), run(nullcontext, None))


def test_a_remat_in_each_of_several_scopes_takes_its_input_as_it_is():
    n = 6
    ws, start = [leaf(8, 8) for _ in range(n)], leaf(8, 8).detach()

    def run(scope, call):
        x = start
        for w in ws:
            with scope():
                x = call(lambda w, x: (x @ w).tanh() @ w, w, x)
        return torch.autograd.grad(x.square().sum(), ws)

    outside, inside = measure(run, nullcontext, remat_of), measure(run, checkpoint_scope, remat_of)
    assert_same(inside.result, outside.result)
    # The last scope is replayed: the loss reads what it has made.
    assert inside.flops == outside.flops + 2 * 2 * 8**3


remat_of = lambda f, *args: remat(f)(*args)


def test_the_peak():
    """One scope: all of it is alive at the peak, and each goes with its last use."""
    a = leaf(64)
    n = a.nbytes
    with Storages().known(a) as storages:
        with checkpoint_scope():
            x = a.sin()
            y = x.exp()
            z = y.tanh()
        loss = (x * y * z).sum()
        del x, y, z
        assert (storages.live, storages.peak) == (n + 8, 5 * n + 8)  # x * y and the loss; all five
        storages.peak = 0
        loss.backward()
        assert (storages.live, storages.peak) == (n + 8, 7 * n + 16)


def test_what_was_left_by_a_partial_backward_and_what_nobody_waits_for():
    a = leaf(3)
    with checkpoint_scope():
        x, y, z = a.sin(), a.cos(), a.erf()
    u, v, w = x.exp() * x, y.exp() * y, z.square()
    del x, y, z, w
    with Ops() as first:
        torch.autograd.grad(u.sum(), a)
    with Ops() as second:
        torch.autograd.grad(v.sum(), a)
    assert "erf" not in first.names
    assert "cos" not in second.names  # was recomputed with the other one


@pytest.mark.parametrize("how", ["hooks", "thread", "checkpoint"])
def test_nothing_of_the_block_is_kept(how):
    """Wherever it is used: under hooks of others, in another thread, in a checkpoint inside of the block."""
    a, c, packed = leaf(64), leaf(64), []
    with checkpoint_scope():
        x = a.sin() if how != "checkpoint" else checkpoint(lambda a: a.sin().exp().log().sin().asin(), a)
    gone, made = weakref.ref(x.untyped_storage()), [x]
    del x

    def use():
        made[0] = made[0] * c

    if how == "hooks":
        with saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            use()
        assert [p.data_ptr() for p in packed] == [c.data_ptr()]  # theirs gets what we do not know
    else:
        in_a_thread(use)
    assert gone() is None
    in_a_thread(made[0].sum().backward)
    assert_same([a.grad, c.grad], [(a.cos() * c).detach(), a.sin().detach()])


def test_scope_inside_of_a_checkpoint_keeps_nothing():
    a, calls = leaf(64), Counter(torch.tanh)

    def body(a):
        with checkpoint_scope():
            x = calls(a).exp()
        return x.sin()

    with Storages().known(a) as storages:
        y = checkpoint(lambda a: body(body(a).exp()), a)
        assert storages.live == y.nbytes
        y.sum().backward()
    assert calls.calls == 4


def test_validation_and_detached_results_keep_no_blocks():
    kept, w = [], leaf(3, 3)
    average = torch.zeros((), dtype=D)
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled), checkpoint_scope():
            h = torch.tanh(torch.ones(3, dtype=D) @ w)
            loss = h.sum()
            average = average * 0.9 + loss.detach() * 0.1
        kept.append(h.detach())
        del h, loss
    assert recordings() == 0
    assert_same(torch.autograd.grad((kept[0] * w).sum(), w)[0], kept[0].expand(3, 3))


@pytest.mark.parametrize("detached", [False, True])
def test_a_logged_loss_keeps_no_block(detached):
    """A graph that has saved nothing of a block is not freed by its backward."""
    a = leaf(3)
    with checkpoint_scope():
        loss = (a * 1).mean() if detached else a.exp().mean()
    loss.backward()
    logged = loss.detach() if detached else loss
    del loss
    assert recordings() == 0 and logged.numel() == 1


class OwnParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("around", [lambda f, *args: f(*args), checkpoint])
def test_a_parameter_of_another_class(around):
    p = OwnParameter(leaf(3, 3).detach())

    def f(x):
        with checkpoint_scope():
            y = p.view(9).view(3, 3) @ x
            y = y.sin() * p
        return y.exp()

    x = leaf(3, 3)
    found = torch.autograd.grad(around(f, x).sum(), [x, p])
    assert_same(found, torch.autograd.grad(((p @ x).sin() * p).exp().sum(), [x, p]))


@pytest.mark.parametrize("around", [lambda f, *args: f(*args), checkpoint])
def test_the_default_dtype_is_that_of_the_block(around):
    def noisy(a):
        with checkpoint_scope():
            return a * (torch.rand(3) + 1)

    a = leaf(3)
    try:
        torch.set_default_dtype(torch.float32)
        y = around(noisy, a)
        y = y * y
    finally:
        torch.set_default_dtype(torch.float64)
    try:
        found = torch.autograd.grad(y.sum(), a)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, (2 * y / a).detach())


def test_casts_of_autocast_are_those_of_a_block():
    """Two blocks cast the same weight. In the recomputation of the second the first is not there."""
    w, x = leaf(3, 3).detach().float().requires_grad_(), leaf(2, 3).detach().float().requires_grad_()

    def run(around, scope):
        def body(x):
            with scope():
                h = (x @ w).tanh()
            return h * 2

        with torch.autocast("cpu", torch.bfloat16):
            loss = around(body, x).sum() + around(body, x).sum()
        return torch.autograd.grad(loss, [w, x])

    assert_same(run(checkpoint, checkpoint_scope), run(lambda f, x: f(x), nullcontext))


@pytest.mark.parametrize("step", [lambda x: x.sin(), lambda x: x.sin().mul_(2)], ids=["pure", "writes"])
def test_the_looks_of_a_replay_at_slots_are_linear(step, monkeypatch):
    class Slots(list):
        looks = 0

        def __iter__(self):
            Slots.looks += len(self)
            return super().__iter__()

    replay = scope_module._Block._replay
    monkeypatch.setattr(scope_module._Block, "_replay", lambda self, slots: replay(self, Slots(slots)))
    counts = []
    for operators in (10, 40):
        x, Slots.looks = leaf(3), 0
        with checkpoint_scope():
            for _ in range(operators):
                x = step(x)
        x.sum().backward()
        counts.append(Slots.looks)
    assert 0 < counts[1] < 5 * counts[0]


def test_libraries_take_it_for_a_tensor():
    """Some tell tensors from arrays by the module of their class."""
    with checkpoint_scope():
        x = torch.ones(3)
    assert type(x) is not torch.Tensor and type(x).__module__ == "torch"


def test_changed_after_the_block():
    a, c = leaf(3), leaf(3)
    with checkpoint_scope():
        x = a.sin()
    before = x * c
    x.mul_(2)
    after = x * c
    assert_same(
        list(torch.autograd.grad(after.sum(), [a, c])), [(2 * a.cos() * c).detach(), (2 * a.sin()).detach()]
    )
    # Plain autograd refuses this one; the value at the time of saving is recomputed.
    assert_same(torch.autograd.grad(before.sum(), c)[0], a.sin().detach())


@pytest.mark.parametrize("change", ["add", "tanh"])
def test_a_result_of_a_second_block_is_changed(change):
    v, w, x = leaf(4, 4), leaf(4, 4), torch.ones(3, 4, dtype=D)

    def run(scope):
        with scope():
            y = x @ w
        with scope():
            z = y @ v
        z = z.add_(y) if change == "add" else z.tanh_()
        return torch.autograd.grad(z.square().mean(), (v, w))

    assert_same(run(checkpoint_scope), run(nullcontext))


def test_observers_of_quantization():
    w, on = leaf(8, 8), torch.ones(1, dtype=torch.long)

    def run(scope):
        lo, hi = torch.zeros(1), torch.zeros(1)
        scale, zero, gradients = torch.ones(1), torch.zeros(1, dtype=torch.int), []
        for k in (1, 5):
            x = torch.linspace(-k, k, 40).view(5, 8)
            with scope():
                y = torch.fused_moving_avg_obs_fake_quant(
                    x @ w.float(), on, on, lo, hi, scale, zero, 0.1, 0, 255, -1
                )
            gradients += torch.autograd.grad(y.square().sum(), w)
        return gradients, lo, hi, scale

    assert_same(run(checkpoint_scope), run(nullcontext))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min:UserWarning")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("call", [checkpoint, lambda f, x: remat(f)(x)], ids=["checkpoint", "remat"])
def test_observers_of_a_model_in_evaluation(call, is_fused):
    """They observe all the same."""

    def run(call):
        torch.manual_seed(0)
        if is_fused:
            quantize = quantization.FusedMovingAvgObsFakeQuantize()
        else:
            quantize = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver)
        model = nn.Sequential(nn.Linear(4, 4), quantize, nn.Tanh())
        model(torch.randn(8, 4))
        x = (torch.randn(8, 4) * 4).requires_grad_()
        gradients = torch.autograd.grad(call(model.eval(), x).square().sum(), (x, *model.parameters()))
        return gradients, model.state_dict()

    assert_same(run(call), run(plain))


def test_a_parameter_of_what_a_scope_has_left():
    w = leaf(3)
    with checkpoint_scope():
        x = w.exp() * 2
    x = x.detach()
    assert_same(nn.Parameter(x), nn.Parameter(w.detach().exp() * 2))


@pytest.mark.parametrize("changed", ["input", "kept"])
def test_what_was_changed_is_noticed(changed):
    """An input of the recomputation; or what is kept, which has its version checked."""
    a, base, c = leaf(3), torch.ones(3, dtype=D), torch.ones(3, dtype=D)
    with checkpoint_scope():
        x = (a * base).sin()
        y = x * c
    z = y * x
    (base if changed == "input" else c).mul_(2)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_under_transforms(transform):
    def f(a):
        with checkpoint_scope():
            x = a.sin()
        return x.sum()

    refused = r"remat\(lambda a, b: a \+ b\)"
    with pytest.raises(TransformError, match=refused):
        transform(f)(torch.ones(3))
    with pytest.raises(TransformError, match=refused), checkpoint_scope():
        torch.func.grad(torch.sin)(torch.ones(()))


def test_forward_mode_in_a_batch():
    def f(x, scope):
        with scope():
            y = x.sin() * x
        return y.exp()

    x, how = leaf(3).detach(), {"strategy": "forward-mode", "vectorize": True}
    jacobians = [
        torch.autograd.functional.jacobian(lambda x, s=s: f(x, s), x, **how)
        for s in (checkpoint_scope, nullcontext)
    ]
    assert_same(*jacobians)


def test_forward_mode():
    one = torch.ones(3, dtype=D)
    with forward_ad.dual_level():
        with checkpoint_scope():
            x = forward_ad.make_dual(one, one).sin()
        assert_same(forward_ad.unpack_dual(x * x).tangent, 2 * one.sin() * one.cos())


class Marked(torch.Tensor):
    """Does nothing of its own."""


def through_a_conjugate(scope, x, call):
    with scope():
        y = x * (1 + 2j)
        y.mH.add_(torch.ones(3, 3, dtype=torch.complex128))
        y.conj().imag.mul_(-3)
        return (y * x).abs()


def as_another_class(scope, x, call):
    with scope():
        y = x.detach() * 2
        y.as_subclass(Marked).clamp_(0, 1)
        return y * x


def in_a_scope_of_a_checkpoint(scope, x, call):
    def f(x):
        y = x * 2
        with scope():
            y += torch.ones(3, 3)
        return y

    with scope():
        return call(f, x) * x


def by_a_hook_in_a_backward(scope, x, call):
    with scope():
        seen = torch.zeros(3, 3, dtype=D)
        y = x * 2
        y.register_hook(lambda g: (seen.add_(g), None)[1])
        torch.autograd.grad((y * y).sum(), x)
        return seen * x


def into_a_gradient(scope, x, call):
    p = leaf(3, 3)
    with scope():
        p.grad = torch.zeros_like(p)
        (p * p).sum().backward()
    return p.grad * x


class Kernel(torch.autograd.Function):
    """Stands for a kernel that torch does not dispatch: Triton, or a C extension."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        values = (ctypes.c_double * x.numel()).from_address(out.data_ptr())
        values[:] = [3 * value for value in x.flatten().tolist()]
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, g):
        return 3 * g + 0 * ctx.saved_tensors[0]


def by_a_kernel(scope, x, call):
    with scope():
        return Kernel.apply(x.detach()) * x + Kernel.apply(x)


def in_parts(scope, x, call):
    """An operator fills it bit by bit, and each part is read before the next is there."""
    y = x
    with scope():
        own = torch.empty(3, 3, dtype=D)
        for i in range(3):
            own[i] = y.detach()[i].sin()
            y = y * own[: i + 1].sum(0).exp()
        own[torch.tensor([2, 0, 1])] = torch.ones(3, 3, dtype=D)
        return y * own.exp()


def by_a_generator_of_points(scope, x, call):
    engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    with scope():
        return engine.draw(3, dtype=D) * x


@pytest.mark.parametrize(
    "call", [plain, checkpoint, lambda f, x: remat(f)(x)], ids=["plain", "hooks", "remat"]
)
@pytest.mark.parametrize(
    "f",
    [
        *(through_a_conjugate, as_another_class, in_a_scope_of_a_checkpoint, by_a_hook_in_a_backward),
        *(into_a_gradient, by_a_kernel, in_parts, by_a_generator_of_points),
    ],
    ids=lambda f: f.__name__,
)
def test_what_no_operator_of_the_block_has_written_is_kept(f, call):
    def run(scope, call):
        torch.manual_seed(0)
        x = leaf(3, 3)
        y = f(scope, x, call)
        return y.detach().as_subclass(torch.Tensor), torch.autograd.grad(y.sum(), x)

    assert_same(run(checkpoint_scope, call), run(nullcontext, plain))


@pytest.mark.parametrize(
    "fill", [torch.Tensor.uniform_, torch.Tensor.zero_, lambda x: torch.mul(2, leaf(64), out=x)]
)
def test_what_is_allocated_and_then_filled_is_not_kept(fill):
    a = leaf(64)
    with Storages().known(a) as storages:
        with checkpoint_scope():
            x = torch.empty(64, dtype=D)
            with torch.no_grad():
                fill(x)
        y = x * a
        del x
        assert storages.live == y.nbytes


def test_a_kernel_that_reads_the_grad_mode():
    lstm, x = torch.nn.LSTM(8, 8), torch.randn(5, 2, 8, requires_grad=True)

    def run(scope):
        with scope():
            y = lstm(x.sin())[0]
        return torch.autograd.grad(y.square().sum(), [x, *lstm.parameters()])

    torch.testing.assert_close(run(checkpoint_scope), run(nullcontext))


@pytest.mark.filterwarnings("ignore::UserWarning")  # a layout in beta state
def test_a_sparse_product_that_reads_the_grad_mode():
    a, x = torch.tensor([[1.0, 0, 2], [0, 3, 0]]).to_sparse_csr(), torch.randn(3, 4, requires_grad=True)

    def run(scope):
        with scope():
            y = torch.sparse.mm(a, x.sin(), "amax")
        return torch.autograd.grad(y.square().sum(), x)

    torch.testing.assert_close(run(checkpoint_scope), run(nullcontext))


def test_a_write_by_foreach_is_noticed():
    x, a = leaf(3), torch.ones(3, dtype=D)
    with checkpoint_scope():
        b = a.exp()
        torch._foreach_add_([a], 1.0)
        y = x * b
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        y.sum().backward()
