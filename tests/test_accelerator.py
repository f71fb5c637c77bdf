"""On an accelerator the engine runs a backward in threads of its own, and torch has other kernels.

The first tests pretend to have one; the rest need a GPU. The reference is the same program without a checkpoint.
"""

import functools
import itertools
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from support import WRAPS, assert_same
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from funcckpt import ClosureError, policies, remat, scan
from funcckpt._torch import functorch
from funcckpt.meter import measure

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F64 = torch.float64
ALL = {
    **WRAPS,
    "remat, dots_saveable": functools.partial(remat, policy=policies.dots_saveable),
    "remat, offload": functools.partial(remat, policy=policies.offload_dot_with_no_batch_dims()),
}
FUNCTIONAL = [way for way in ALL if way != "checkpoint"]


def plain(f):
    return f


@pytest.fixture
def pretended(monkeypatch):
    module = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(functorch, "_accelerator", lambda: module)


def in_a_thread(f, *args):
    """Run f where the numbers of graph nodes begin anew, as in a thread of the engine."""
    found = []
    thread = threading.Thread(target=lambda: found.append(f(*args)))
    thread.start()
    thread.join()
    return found[0]


def adapted(w, x, gradient):
    """A step of an inner loop, with a decay that depends on w alone."""
    loss = (x @ w).tanh().square().sum()
    (g,) = gradient(loss, w)
    (decay,) = gradient(w.square().sum(), w)
    return (x @ (w - 0.1 * g - 0.01 * decay)).tanh()


def meta_gradient(wrap, gradient, device):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 3, dtype=F64, generator=generator).to(device).requires_grad_()
    x = torch.randn(5, 3, dtype=F64, generator=generator).to(device).requires_grad_()
    before = (w * 2).sum() * x.exp()  # with a graph of its own, which is not that of f
    y = wrap(lambda x: adapted(w, x, gradient) * before)(x)
    y = y * wrap(lambda w, x: adapted(w, x, gradient))(w, x)
    return y.detach(), *torch.autograd.grad(y.square().sum(), [w, x])


differentiated = functools.partial(torch.autograd.grad, create_graph=True)


@pytest.mark.parametrize("way", ALL)
def test_nodes_that_another_thread_has_made(pretended, way):
    in_thread = functools.partial(in_a_thread, differentiated)
    assert_same(meta_gradient(ALL[way], in_thread, "cpu"), meta_gradient(plain, differentiated, "cpu"))


class Drawn(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.by = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.by.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("way", FUNCTIONAL)
def test_dropout_draws_by_the_same_operator_again(pretended, way, randomness):
    """Under vmap there are two ways to draw, which on a GPU give different numbers."""
    x, f = torch.ones(4, 3, dtype=F64), ALL[way](lambda x: torch.native_dropout(x * 2, 0.5, True)[0].sin())
    with Drawn() as drawn:
        vmap(grad(lambda x: f(x).sum()), randomness=randomness)(x)
    assert len(drawn.by) > 1 and len({*drawn.by}) == 1, drawn.by


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_vmap_that_lets_f_draw_under_plain_autograd(pretended, randomness):
    """f may do there what no level of grad allows: change what it captures, differentiate, look at flags."""
    w, x, counter = (
        torch.ones(3, dtype=F64, requires_grad=True),
        torch.ones(4, 3, dtype=F64),
        nn.BatchNorm1d(3),
    )

    def f(x):
        h = w * 2
        counter.num_batches_tracked.add_(1)
        (g,) = torch.autograd.grad(h.sum(), w, create_graph=True)
        y = x * h * (3 if h.requires_grad else 1) * g * w.detach().numpy().sum()
        return torch.native_dropout(y.sin(), 0.5, True)[0] * y

    def run(wrap):
        torch.manual_seed(0)
        counter.num_batches_tracked.zero_()
        with Drawn() as drawn:
            y = vmap(wrap(f), randomness=randomness)(x)
            found = y.detach(), *torch.autograd.grad(y.sum(), w), counter.num_batches_tracked.clone()
        assert len({*drawn.by}) == 1
        return found

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_counter_of_calls_under_vmap(pretended, randomness):
    """It is used again in the next call, so no level that stands for that of vmap may stay around it."""

    def run(wrap):
        module, table = nn.Module(), torch.ones(3)
        module.count, module.last = torch.zeros((), dtype=F64), None

        def f(x):
            module.count = module.count + 1
            module.last = table  # an object of the user stays itself
            return x.sin() * module.count

        g = wrap(f)
        loss = lambda x: g(g(x)).sum()
        found = [vmap(grad(loss), randomness=randomness)(torch.ones(2, 3, dtype=F64)) for _ in range(3)]
        assert module.last is table
        return *found, module.count + 0

    assert_same(run(remat), run(plain))


HIDDEN = {
    "beside a captured one": lambda w, h: h * 2,
    "of a leaf": lambda w, h: w.exp(),
    "the captured one": lambda w, h: h.clone(),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_tensors_with_a_graph(pretended, kind):
    w, x = (
        torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True),
        torch.ones(2, dtype=F64, requires_grad=True),
    )
    h = w * 3
    table = type("Own", (tuple,), {})((HIDDEN[kind](w, h),))
    y = remat(lambda x: (x * h * table[0]).sin())(x).sum()
    with pytest.raises(ClosureError, match="not an argument"):
        torch.autograd.grad(y, [w, x])


@pytest.mark.parametrize("way", ALL)
def test_what_stands_for_a_parameter_is_no_hidden_tensor(pretended, way):
    """A module tracker has the recomputation get views, whose graphs lead to the parameters."""
    module, x = nn.Linear(3, 3, dtype=F64), torch.ones(2, 3, dtype=F64, requires_grad=True)

    def run(wrap):
        module.zero_grad()
        f = wrap(lambda x: module(x).tanh())
        with FlopCounterMode(display=False):
            f(f(x)).square().sum().backward()
        return [p.grad for p in module.parameters()]

    assert_same(run(ALL[way]), run(plain))


def test_errors_of_f_stay_as_they_are(pretended):
    def f(x):
        raise RuntimeError("the prisoner may have escaped")

    for transform in (grad, vmap, lambda f: lambda x: f(x.requires_grad_())):
        with pytest.raises(RuntimeError, match="prisoner"):
            transform(lambda x: remat(f)(x).sum())(torch.ones(3))


def test_an_accelerator_whose_module_tells_little(monkeypatch):
    monkeypatch.setattr(functorch, "_accelerator", types.SimpleNamespace)
    x = torch.ones(3, dtype=F64, requires_grad=True)
    for wrap in WRAPS.values():
        assert torch.equal(torch.autograd.grad(wrap(torch.sin)(x).sum(), x)[0], x.detach().cos())


def test_a_hidden_tensor_of_a_vmap_that_lets_f_draw(pretended):
    x = torch.ones(4, 3, dtype=F64)

    def run(x):
        hidden = iter([x * 2])
        return remat(lambda y: y * next(hidden))(x.sin()).sum()

    with pytest.raises(ClosureError, match="outer vmap"):
        vmap(grad(run), randomness="different")(x)


# -- on a GPU ------------------------------------------------------------------------------------------


def random_tensor(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).cuda()


def check(program, ways=ALL, **tolerance):
    """`program(wrap)`: results, and where it leaves the random stream of the GPU."""

    def run(wrap):
        torch.manual_seed(3)
        return program(wrap), torch.cuda.get_rng_state().double()

    expected = run(plain)
    for way in ways:
        actual = run(ALL[way])
        if tolerance:
            torch.testing.assert_close(actual, expected, **tolerance)
        else:
            assert_same(actual, expected)


def in_eager(loss, *args):
    leaves = [x.clone().requires_grad_() for x in args]
    return torch.autograd.grad(loss(*leaves), leaves)


@on_a_gpu
@pytest.mark.parametrize("transform", ["backward", "grad", "same", "different", "jvp", "hessian"])
def test_dropout(transform):
    w, x = random_tensor(8, 8), random_tensor(6, 8, seed=1)
    transforms = {
        "backward": in_eager,
        "grad": lambda f, w, x: grad(f)(w, x),
        "same": lambda f, w, x: vmap(grad(f), (None, 0), randomness="same")(w, x),
        "different": lambda f, w, x: vmap(grad(f), (None, 0), randomness="different")(w, x),
        "jvp": lambda f, w, x: jvp(f, (w, x), (w, x)),
        "hessian": lambda f, w, x: grad(lambda w: grad(f)(w, x).square().sum())(w),
    }

    def program(wrap):
        f = wrap(lambda w, x: F.dropout((x @ w).tanh(), 0.5))
        return transforms[transform](lambda w, x: f(w, f(w, x)).square().sum(), w, x)

    check(program, ALL if transform == "backward" else FUNCTIONAL)


@on_a_gpu
def test_the_mask_of_the_backward_is_that_of_the_forward():
    x = random_tensor(6, 8)

    def loss(x):
        y = remat(lambda x: F.dropout(x, 0.5))(x)
        return y.sum(), y

    gradients, y = vmap(grad(loss, has_aux=True), randomness="different")(x)
    assert torch.equal(gradients == 0, y == 0) and 0 < (y == 0).sum() < y.numel()


@on_a_gpu
@pytest.mark.parametrize("way", ALL)
def test_inner_gradients(way):
    assert_same(meta_gradient(ALL[way], differentiated, "cuda"), meta_gradient(plain, differentiated, "cuda"))
    w, x = random_tensor(3, 3), random_tensor(4, 3, seed=1)

    def program(wrap):
        step = lambda w, x: w - 0.1 * grad(lambda w: (x @ w).tanh().square().sum() + w.square().sum())(w)
        return in_eager(lambda w, x: (x @ wrap(step)(wrap(step)(w, x), x)).square().sum(), w, x)

    check(program, [way])


@on_a_gpu
@pytest.mark.parametrize("way", ALL)
def test_batched_backwards(way):
    w, x = random_tensor(4, 4), random_tensor(4, seed=1)

    def program(wrap):
        f = lambda x: wrap(lambda w, x: (x @ w).tanh())(w, x).square()
        found = torch.autograd.functional.jacobian(f, x, vectorize=True)
        return found, torch.autograd.functional.hessian(lambda x: f(x).sum(), x, vectorize=True)

    check(program, [way])


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, dtype=F64), nn.BatchNorm1d(4, dtype=F64)

    def forward(self, x, scale):
        return self.norm(self.linear(x)).tanh() * scale


@on_a_gpu
@pytest.mark.parametrize("transform", ["backward", "grad", "jvp", "jvp of grad"])
def test_statistics_of_batches(transform):
    """A vector that an outer transform differentiates is no buffer because it looks like one."""
    torch.manual_seed(0)
    model, x, scale = Normed().cuda(), random_tensor(5, 4), random_tensor(4, seed=1)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: v.detach().clone() for name, v in values.items()}

    def program(wrap):
        own = {name: v.clone() for name, v in values.items()}
        buffers = {name: own.pop(name) for name, _ in model.named_buffers()}
        f = wrap(model)

        def loss(p, scale):
            state = p | {name: v.clone() for name, v in buffers.items()}
            call = lambda x: functional_call(model, state, (x, scale))
            return wrap(call)(wrap(call)(x)).square().sum(), {name: state[name] for name in buffers}

        if transform == "backward":
            eager = model.train()
            eager.load_state_dict(values)
            y = f(f(x, scale), scale).square().sum()
            return torch.autograd.grad(y, [*eager.parameters()]), [b.clone() for b in eager.buffers()]
        gradient = lambda scale: grad(loss, has_aux=True)(own, scale)
        if transform == "grad":
            return gradient(scale)
        inner = gradient if transform == "jvp of grad" else lambda scale: loss(own, scale)
        return jvp(inner, (scale,), (scale,), has_aux=True)

    check(program, ALL if transform == "backward" else FUNCTIONAL)


@on_a_gpu
@pytest.mark.parametrize("way", WRAPS)
def test_large_buffers_of_a_module_in_training_are_not_copied(way):
    """Such as the mask of an attention."""
    module = nn.Linear(4, 4).cuda()
    module.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool, device="cuda"))
    module.norm = nn.BatchNorm1d(4).cuda()
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    f = WRAPS[way](lambda x: module.norm(module(x)) * module.mask[0, 0])
    f(x).sum().backward()  # what kernels need for themselves
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = f(x)
    assert torch.cuda.memory_allocated() - before < module.mask.nbytes
    y.sum().backward()


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_autocast(dtype, place):
    w, x = random_tensor(16, 16, dtype=torch.float32), random_tensor(4, 16, seed=1, dtype=torch.float32)

    def program(wrap, way):
        def loss(w, x):
            with torch.autocast("cuda", dtype, enabled=place == "inside"):
                f = wrap(lambda w, x: F.linear(x, w).tanh())
                return f(w, f(w, x)).float().square().mean()

        with torch.autocast("cuda", dtype, enabled=place == "outside"):
            return in_eager(loss, w, x) if way == "checkpoint" else vmap(grad(loss), (None, 0))(w, x)

    for way in ALL:
        check(lambda wrap, way=way: program(wrap, way), [way], rtol=1e-3, atol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize("way", ALL)
def test_in_a_cuda_graph(way, probability):
    w, x = random_tensor(8, 8).requires_grad_(), random_tensor(6, 8, seed=1)

    def gradient(wrap):
        f = wrap(lambda w, x: F.dropout((x @ w).tanh(), probability))
        return torch.autograd.grad(f(w, f(w, x)).square().sum(), w)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradient(ALL[way])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(ALL[way])
    x.copy_(random_tensor(6, 8, seed=2))
    graph.replay()
    torch.cuda.synchronize()
    if probability:
        first = found.clone()
        graph.replay()
        assert not torch.equal(found, first)
    else:
        assert_same(found, gradient(plain))


@on_a_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # without remat, too
def test_streams_and_devices():
    x = random_tensor(5)
    draws = lambda x: F.dropout(x, 0.3) + F.dropout(x.cpu(), 0.3).cuda() * x.cpu().sin().cuda()

    def program(wrap):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            leaf = x.clone().requires_grad_()
            y = wrap(draws)(wrap(draws)(leaf))
        torch.cuda.current_stream().wait_stream(stream)
        generator = torch.Generator("cuda").manual_seed(1)
        z = wrap(lambda x: x * torch.rand(5, device="cuda", dtype=F64, generator=generator).sin())
        z = in_eager(lambda x: z(x).square().sum(), x)
        torch.rand(3, device="cuda", generator=generator)
        return torch.autograd.grad(y.sum(), leaf), z, generator.get_state().double(), torch.rand(2)

    check(program)


@on_a_gpu
@pytest.mark.parametrize("options", [{}, {"checkpoints": 4}, {"offload": "host"}, {"offload": "disk"}])
def test_loops(options):
    w, xs = random_tensor(4, 4), random_tensor(20, 4, seed=1)

    def loss(w, loop):
        h, ys = loop(lambda h, x: ((h @ w + x).tanh(), F.dropout(h, 0.5)), torch.zeros_like(xs[0]), xs)
        return h.sum() + ys.square().sum()

    def unrolled(step, h, xs):
        ys = []
        for x in xs:
            h, y = step(h, x)
            ys.append(y)
        return h, torch.stack(ys)

    found = []
    for loop in (unrolled, functools.partial(scan, **options)):
        torch.manual_seed(0)
        found.append([grad(loss)(w, loop), *in_eager(lambda w, loop=loop: loss(w, loop), w)])
    assert_same(found[1], found[0])


@on_a_gpu
def test_what_nobody_reads_is_skipped_while_the_gpu_is_behind(monkeypatch):
    """To watch a block takes the host time, and there is none to win where the GPU waits for the host."""
    x, w, v = random_tensor(1200, 1200), random_tensor(1200, 1200, seed=1), random_tensor(1200, 1200, seed=2)
    loss = lambda wrap: lambda w: wrap(lambda w: (x @ w).tanh() @ v)(w).sum()
    product, expected = 2 * 1200**3, grad(loss(plain))(w)
    for is_behind, again in [(True, 2), (True, 1), (False, 2), (True, 1)]:  # the first call learns it
        monkeypatch.setattr(functorch, "is_behind", lambda _, found=is_behind: found)
        measured = measure(grad(loss(remat)), w)
        assert_same(measured.result, expected)
        assert measured.flops == (4 + again) * product


@on_a_gpu
def test_whether_a_gpu_is_behind():
    x = random_tensor(4)
    torch.cuda.synchronize()
    assert not functorch.is_behind(x.device)
    torch.cuda._sleep(10**9)  # cycles
    assert functorch.is_behind(x.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        (x * 2).sin()
        assert functorch.is_behind(x.device)


@on_a_gpu
def test_errors_leave_nothing_behind():
    x = random_tensor(4)
    for way in ALL:
        turns = itertools.chain([False, True], itertools.repeat(False))

        def f(x, turns=turns):
            y = x.sin()
            if next(turns):
                torch.empty(2**40, device="cuda")
            return y.cos() * y

        run = lambda wrap, f=f: in_eager(lambda x: wrap(f)(x).sum(), x)
        with pytest.raises(torch.OutOfMemoryError):
            run(ALL[way])
        check(run, [way])
