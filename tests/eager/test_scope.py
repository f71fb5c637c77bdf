"""checkpoint_scope: gradients, what is kept, what is recomputed when, and who else is around."""

import gc
import random
import threading
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import Counter, Storages, assert_same, seeds
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import checkpoint, checkpoint_scope, world
from funcckpt.eager import scope as scope_module
from funcckpt.errors import MutationError, TransformError
from funcckpt.meter import Meter

from .implementations import D, Ops, both, draw, leaf


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


def dead(*xs):
    """What tells whether the storages of tensors are gone."""
    refs = [weakref.ref(x.untyped_storage()) for x in xs]
    return lambda: [ref() is None for ref in refs]


def same(f, *shapes, backward=None):
    """f(scope, *leaves), with a scope and without: value, gradients, and where the random stream ends."""

    def run(scope):
        torch.manual_seed(1)
        leaves = [leaf(*shape) for shape in shapes]
        y = f(scope, *leaves)
        after = torch.rand(2)
        gradients = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
        return y.detach().clone(), gradients, after, torch.rand(2)

    assert_same(run(checkpoint_scope), run(nullcontext))


# -- gradients --------------------------------------------------------------------------------------


def test_random_streams_are_recorded_for_each_device_and_on_first_use(other_device, monkeypatch):
    recorded, states = [], world.states
    monkeypatch.setattr(world, "states", lambda streams: (recorded.append(streams), states(streams))[1])
    a = leaf(4)
    with checkpoint_scope():
        x = a.sin()
        assert not recorded
        scale = draw(x)
        assert recorded == [[torch.default_generator, other_device]]
        y = x * scale
    z, end = (y * y).sum(), other_device.get_state()
    scale = scale.detach().clone()
    assert_same(torch.autograd.grad(z, a)[0], (2 * a.sin() * a.cos() * scale**2).detach())
    assert torch.equal(other_device.get_state(), end)


def test_a_generator_of_ones_own():
    def f(scope, a):
        generator = torch.Generator().manual_seed(3)
        with scope():
            x = a * torch.rand(8, dtype=D, generator=generator)
        return x.exp() * torch.rand(8, dtype=D, generator=generator)

    same(f, (8,))


def test_autocast():
    def run(scope):
        torch.manual_seed(0)
        a, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), scope():
            x = (a @ w).exp()
        y = (x * x.float()).sum()
        return y.detach(), *torch.autograd.grad(y, [a, w])

    for a, e in zip(run(checkpoint_scope), run(nullcontext)):
        assert torch.equal(a, e)


def test_double_backward():
    def f(x):
        with checkpoint_scope():
            y = x.sin() * x
        return y.exp() * x

    assert torch.autograd.gradcheck(f, leaf(3)) and torch.autograd.gradgradcheck(f, leaf(3))


def test_custom_functions_inside():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * x
            ctx.save_for_backward(x, y)
            return y * x

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            x, y = ctx.saved_tensors  # may be read twice
            return g * (2 * y + x * x)

    def f(scope, a):
        with scope():
            x = Cube.apply(a.sin())
        return Cube.apply(x).exp() + x * x

    same(f, (3,))
    a = leaf(64)
    with checkpoint_scope():
        x = Cube.apply(a.sin())
    gone = dead(x)
    y = x.sum()
    with Ops() as ops:
        del x
        assert gone() == [True]
        y.backward()
    assert "sin" in ops.names


def test_made_in_one_thread_used_in_another():
    a, c = leaf(64), leaf(64)
    with checkpoint_scope():
        x = a.sin()
    gone = dead(x)
    made = [x]
    del x

    def work():
        made[0] = made[0] * c

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert gone() == [True]
    thread = threading.Thread(target=made[0].sum().backward)
    thread.start()
    thread.join()
    assert_same([a.grad, c.grad], [(a.cos() * c).detach(), a.sin().detach()])


# -- what is kept -----------------------------------------------------------------------------------


class Timeline(TorchDispatchMode):
    """What operators allocate ("+sin") and when it is released ("-sin"), scalars left out."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() > 1 and out.untyped_storage()._cdata not in given:
            name = func.overloadpacket.__name__
            self.events.append(f"+{name}")
            weakref.finalize(out.untyped_storage(), self.events.append, f"-{name}")
        return out

    def take(self):
        taken, self.events[:] = " ".join(self.events), []
        return taken


def test_order_of_allocation_and_release_and_the_peak():
    """One scope: all of it is alive at the peak, and each goes with its last use."""
    a = leaf(64)
    n, scalars = a.nbytes, 16
    with Timeline() as timeline, Meter() as meter:
        with checkpoint_scope():
            x = a.sin()
            y = x.exp()
            z = y.tanh()
        assert timeline.take() == "+sin +exp +tanh"
        loss = (x * y * z).sum()
        assert timeline.take() == "+mul +mul -mul"
        del x, y, z
        assert timeline.take() == "-sin -exp -tanh"
        assert (meter.live_bytes, meter.peak_bytes) == (n + 8, 5 * n + 8)  # x * y and the loss; all five
        meter.peak_bytes = 0
        loss.backward()
        gradients = (
            "+mul +mul -sin -mul",
            "+tanh_backward -tanh -mul +add -mul -tanh_backward",
            "+mul -exp -add",
        )
        rest = "+add -mul -mul +cos +mul -cos -add"
        # (The first two products are the gradients of z and of x * y.)
        assert timeline.take() == " ".join(["+sin +exp +tanh +mul +mul -mul", *gradients, rest])
        assert (meter.live_bytes, meter.peak_bytes) == (n + 8, 7 * n + scalars)


def test_leftovers_of_a_partial_backward_serve_the_next():
    a = leaf(3)
    with checkpoint_scope():
        x, y = a.sin(), a.cos()
    u, v = x.exp() * x, y.exp() * y
    del x, y
    torch.autograd.grad(u.sum(), a)
    with Ops() as ops:
        torch.autograd.grad(v.sum(), a)
    assert "cos" not in ops.names  # was recomputed with the other one


def test_only_what_is_waited_for_is_recomputed():
    a = leaf(3)
    with checkpoint_scope():
        x, y = a.sin(), a.erf()
    u, v = x.square(), y.square()
    del v, x, y
    with Ops() as ops:
        u.sum().backward()
    assert "sin" in ops.names and ops.names.count("erf") == 0


def test_nothing_is_left_when_the_graph_dies():
    a = leaf(3)
    inner = a * 2
    ref = weakref.ref(inner)
    with checkpoint_scope():
        x = inner.sin()
    y = x * x
    del inner, x
    y.sum().backward()
    del y
    assert ref() is None


# -- nesting, order, and hooks of others -------------------------------------------------------------


def test_hooks_of_others_around_the_use():
    packed = []

    def pack(x):
        packed.append(x)
        return x

    a, c = leaf(64), leaf(64)
    with checkpoint_scope():
        x = a.sin()
    gone = dead(x)
    with saved_tensors_hooks(pack, lambda x: x):
        y = x * c
    del x
    assert gone() == [True]
    assert [p.data_ptr() for p in packed] == [c.data_ptr()]  # theirs gets what we do not know
    y.sum().backward()
    assert_same(c.grad, a.sin().detach())


def test_checkpoint_inside():
    a = leaf(64)
    with checkpoint_scope():
        h = a.tanh()
        x = checkpoint(lambda a: a.sin().exp(), h)
    gone = dead(h, x)
    y = x.square()
    del h, x
    assert gone() == [True, True]
    y.sum().backward()


def test_what_a_scope_inside_of_a_checkpoint_reads_twice():
    calls = Counter(torch.tanh)

    def body(a, c):
        h = calls(a)
        with checkpoint_scope():
            x = h.sin() * c
            y = h.cos() * c
        return x * y * h

    a, c = leaf(3), leaf(3)
    actual = torch.autograd.grad(checkpoint(body, a, c).sum(), [a, c])
    assert calls.calls == 2
    assert_same(actual, torch.autograd.grad(body(a, c).sum(), [a, c]))


def test_scope_inside_of_a_checkpoint_keeps_nothing():
    a = leaf(64)

    def body(a):
        with checkpoint_scope():
            x = a.tanh().exp()
        return x.sin()

    def two(a):
        return body(body(a).exp())

    with Storages().known(a) as storages:
        y = checkpoint(two, a)
        assert storages.live == y.nbytes
        y.sum().backward()
    assert_same(a.grad, torch.autograd.grad(two(a).sum(), a)[0])


def test_garbage_collection_in_the_middle():
    a, c = leaf(3), leaf(3)
    with checkpoint_scope():
        x = a.sin()
    y = x * c

    def collect(g):
        gc.collect()

    y.register_hook(collect)
    cycle = [x]
    cycle.append(cycle)
    del x, cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    y.sum().backward()
    assert_same(c.grad, a.sin().detach())


# -- exceptions and changes in place ------------------------------------------------------------------


def test_exceptions_inside_of_the_block():
    a, c = leaf(3), leaf(3)
    with pytest.raises(ValueError, match="mine"), checkpoint_scope():
        x = a.sin()
        raise ValueError("mine")
    (x * c).sum().backward()
    assert_same(c.grad, a.sin().detach())


def test_overwritten_after_it_was_saved():
    """Plain autograd refuses it; here the value at the time of saving is recomputed."""

    def f(scope, a):
        with scope():
            x = a.sin()
            y = x * x
            x.mul_(2)
            z = y * x
        return z * x

    a = leaf(3)
    g = torch.autograd.grad(f(checkpoint_scope, a).sum(), a)[0]
    # y = s * s, z = 2 * s**3, and what is returned is 4 * s**4.
    assert_same(g, (16 * a.sin() ** 3 * a.cos()).detach())


def test_changed_after_the_block():
    a, c = leaf(3), leaf(3)
    with checkpoint_scope():
        x = a.sin()
    before = x * c
    x.mul_(2)
    after = x * c
    ga, gc_ = torch.autograd.grad(after.sum(), [a, c])
    assert_same([ga, gc_], [(2 * a.cos() * c).detach(), (2 * a.sin()).detach()])
    # Plain autograd refuses this one; the value at the time of saving is recomputed.
    assert_same(torch.autograd.grad(before.sum(), c)[0], a.sin().detach())


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


def test_writes_to_what_comes_from_outside_happen_once():
    counter = torch.zeros(3, dtype=D)

    a = leaf(3)
    with checkpoint_scope():
        counter.add_(1)
        x = (a * counter).sin()
    x.exp().sum().backward()
    assert torch.equal(counter, torch.ones(3, dtype=D))
    assert_same(a.grad, (a.cos() * a.sin().exp()).detach())


# -- transforms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_under_transforms(transform):
    def f(a):
        with checkpoint_scope():
            x = a.sin()
        return x.sum()

    with pytest.raises(TransformError, match=r"remat\(lambda a, b: a \+ b\)"):
        transform(f)(torch.ones(3))


def test_transforms_inside_of_the_block():
    with pytest.raises(TransformError, match=r"remat\(lambda a, b: a \+ b\)"), checkpoint_scope():
        torch.func.grad(torch.sin)(torch.ones(()))


def test_transforms_of_what_was_made():
    a = leaf(3)
    with checkpoint_scope():
        x = a.sin()
    g = torch.func.grad(lambda w: (w * x).sum())(torch.ones(3, dtype=D))
    assert_same(g.detach(), a.sin().detach())
    y = torch.func.vmap(lambda x: x * x)(x)
    assert_same(torch.autograd.grad(y.sum(), a)[0], (2 * a.sin() * a.cos()).detach())


def test_forward_mode():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        a = forward_ad.make_dual(torch.ones(3, dtype=D), torch.ones(3, dtype=D))
        with checkpoint_scope():
            x = a.sin()
        y = forward_ad.unpack_dual(x * x)
        assert_same(y.tangent, (2 * torch.ones(3, dtype=D).sin() * torch.ones(3, dtype=D).cos()))


# -- the tensors ----------------------------------------------------------------------------------------


def test_without_grad_mode():
    a = leaf(3)
    with torch.no_grad(), checkpoint_scope():
        x = a.sin()
    assert_same((x * x).detach(), (a.sin() ** 2).detach())
    with torch.inference_mode(), checkpoint_scope():
        x = a.sin() * 2
    assert_same(x.clone(), (a.sin() * 2).detach())


def test_sparse_tensors_are_kept():
    a = leaf(3)
    with checkpoint_scope():
        s = torch.diag(a.sin()).to_sparse()
        y = torch.sparse.mm(s, torch.ones(3, 2, dtype=D))
    (y * y).sum().backward()
    assert_same(a.grad, (4 * a.sin() * a.cos()).detach())


def test_batched_gradients_with_dropout():
    a = leaf(16)

    def f(scope):
        torch.manual_seed(0)
        with scope():
            x = F.dropout(a, 0.5).exp()
        y = x * x
        return torch.autograd.grad(y, a, torch.eye(16, dtype=D), is_grads_batched=True)[0]

    assert_same(f(checkpoint_scope), f(nullcontext))


# -- random programs ------------------------------------------------------------------------------------


def copying():
    """Hooks as `save_on_cpu` has on a GPU; on a CPU it keeps the tensor itself, in a cycle (torch 2.13)."""
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


def random_program(seed, scope, call, leaves):
    """A few dozen random steps; every choice is drawn before it is known who runs them."""
    draw = random.Random(seed)
    alive, opened = list(leaves), []
    try:
        take_steps(draw, scope, call, leaves, alive, opened)
    finally:  # a checkpoint around it may stop early
        while opened:
            opened.pop().__exit__(None, None, None)
    return sum(x.tanh().sum() for x in alive)


def take_steps(draw, scope, call, leaves, alive, opened):
    for _ in range(30):
        x, y = draw.choice(alive), draw.choice(alive)
        step = draw.randrange(13)
        if step == 0:
            opened.append(scope())
            opened[-1].__enter__()
        elif step == 1 and opened:
            opened.pop().__exit__(None, None, None)
        elif step == 2:
            alive.append(x * y.sin())
        elif step == 3:
            alive.append((x @ y.t()).tanh() @ y)
        elif step == 4:
            alive.append(F.dropout(x, 0.3).exp().clamp(max=2))
        elif step == 5:
            alive.append(x.t().reshape(4, 4).softmax(0))
        elif step == 6:
            alive.append(call(lambda x, y: (x * y).tanh().sin(), x, y))
        elif step == 7:
            z = x.clone()
            z[1:].mul_(2)
            z.add_(y)
            alive.append(z)
        elif step == 8:
            with copying():
                alive.append((x.exp() + y).tanh())
        elif step == 9:
            alive.append(F.layer_norm(x, (4,)) + torch.rand_like(y))
        elif step == 10 and len(alive) > 3:
            del alive[draw.randrange(len(alive))]
        elif step == 11:
            alive.append(torch.cat([x[:2], y[2:]]).square().tanh())
        elif step == 12:
            (g,) = torch.autograd.grad(
                x.sum(), leaves[0], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            alive.append(x * g.detach().tanh())


@pytest.mark.parametrize("seed", seeds(60, 100))
def test_random_programs(seed):
    def run(scope, call):
        torch.manual_seed(seed)
        leaves = [leaf(4, 4) for _ in range(2)]
        loss = random_program(seed, scope, call, leaves)
        first = torch.autograd.grad(
            loss, leaves, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        again = torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)
        return loss.detach(), first, again, torch.rand(2)

    plain = run(nullcontext, lambda f, *args: f(*args))
    assert_same(run(checkpoint_scope, checkpoint), plain)
    assert_same(run(checkpoint_scope, lambda f, *args: f(*args)), plain)
    assert_same(run(nullcontext, checkpoint), plain)


@pytest.mark.parametrize("seed", seeds(20, 30))
def test_random_programs_inside_of_a_checkpoint(seed):
    def run(scope, call, outer):
        torch.manual_seed(seed)
        leaves = [leaf(4, 4) for _ in range(2)]
        loss = outer(lambda a, b: random_program(seed, scope, call, [a, b]), *leaves)
        return loss.detach(), torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)

    just = lambda f, *args: f(*args)
    assert_same(run(checkpoint_scope, checkpoint, checkpoint), run(nullcontext, just, just))
    whole = lambda *args: checkpoint(*args, early_stop=False)
    assert_same(run(checkpoint_scope, whole, whole), run(nullcontext, just, just))


# -- writes to parts of a tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_writes_to_parts(dim, overlap):
    def f(scope, x):
        with scope():
            chunks = x.sin().unsafe_chunk(2, dim)
            z = (chunks[0].clone() if scope is nullcontext else chunks[0]) * x.chunk(2, dim)[0]
            chunks[0 if overlap else 1].mul_(2)
        return (z * chunks[0] * chunks[1]).sum()

    same(f, (6, 6))


# -- left, resized, looked at ------------------------------------------------------------------------


def test_resized_in_the_block():
    def f(scope, x):
        with scope():
            y, z = torch.empty(0, dtype=D), torch.empty(0, dtype=D)
            y.resize_(4, 4)
            torch.sin(x.detach(), out=y)
            torch.cos(x.detach(), out=z)
            w = x * y * z
            v = torch.empty(2, dtype=D)
            v.set_(z.flatten())
            w = w * v[:4]
        return w * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the resized output
        same(f, (4, 4))


def test_operators_that_take_functions():
    def f(scope, x):
        # Not torch.cond, which compiles them first: Dynamo does so under some dispatch modes only.
        cond = torch.ops.higher_order.cond
        with scope():
            y = x.exp()
            (z,) = cond(y.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (y,))
            w = z * y
        return w * z

    same(f, (3,))


@both
def test_an_inner_gradient_between_scopes_of_a_checkpoint(checkpoint):
    """What is saved in the region must not depend on which tensors of a block happen to be alive."""

    def f(x, scope=checkpoint_scope):
        with scope():
            x = x.sin().exp()
        with scope():
            (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
            return x + g.tanh()

    x = leaf(3)
    expected = torch.autograd.grad(f(x, nullcontext).sum(), x)
    assert_same(torch.autograd.grad(checkpoint(f, x).sum(), x), expected)


def recordings():
    gc.collect()
    return sum(type(x) is scope_module._Block and len(x._operations) > 0 for x in gc.get_objects())


def test_validation_keeps_no_blocks():
    average, w = torch.zeros((), dtype=D), leaf(3, 3)
    for _ in range(5):
        with torch.no_grad(), checkpoint_scope():
            loss = torch.tanh(torch.ones(3, dtype=D) @ w).sum()
            average = average * 0.9 + loss * 0.1
    assert recordings() == 0


def test_detached_results_keep_no_blocks():
    kept, w = [], leaf(3, 3)
    for _ in range(5):
        with checkpoint_scope():
            h = torch.tanh(torch.ones(3, dtype=D) @ w)
            loss = h.sum()
        kept.append(h.detach())
        del h, loss
    assert recordings() == 0
    assert_same(torch.autograd.grad((kept[0] * w).sum(), w)[0], kept[0].expand(3, 3))


def test_looking_at_a_saved_tensor_leaves_nothing_else():
    x = leaf(64)
    with Storages().known(x) as storages:
        with checkpoint_scope():
            y = x
            for _ in range(10):
                y = y.sin()
        node = y.grad_fn
        del y
        before = storages.live
        node._saved_self  # noqa: B018
        gc.collect()
        assert storages.live == before
