"""Eight threads at once: their own transforms and streams, and one module for all."""

import contextlib
import functools
import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compositions.stacks import stack
from oracles import F64, assert_same, plain, state_of_thread, tensor, total
from torch import nn
from torch.func import grad, vmap

from funcckpt import CheckpointError, checkpoint, checkpoint_name, inner_grad, policies, remat, scan
from funcckpt.meter import measure
from funcckpt.nn import fit

THREADS = 8
ROUNDS = 5


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns every few bytecodes, so that what can be interrupted is."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs):
    """Results of the jobs, each run in its own thread, all started at once. An error in one is raised."""
    barrier = threading.Barrier(len(jobs))

    def run(job):
        torch.set_num_threads(1)
        barrier.wait()
        before = state_of_thread()
        result = job()
        assert state_of_thread() == before
        return result

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def act(x, w):
    time.sleep(0)  # let another thread in, in the forward and in the recomputation
    return torch.tanh(w @ x) * x


def inputs(i):
    return tensor(3, seed=100 + i), tensor(3, 3, seed=i)


REVERSE = "double_backward", "vmap_x grad_both", "grad_x grad_x", "jacrev_x", "vjp_twice"


@pytest.mark.parametrize("first", ["jvp_both", "hessian_x", "dual"])
def test_one_remat_under_another_transform_in_each_thread(first):
    """Forward mode is in the first: torch counts its levels once for all threads."""
    stacks = [first, *itertools.islice(itertools.cycle(REVERSE), THREADS - 1)]
    rounds = lambda f, i: [stack(*stacks[i].split())(f)(*inputs(i)) for _ in range(ROUNDS)]
    want = [rounds(act, i) for i in range(THREADS)]
    f = remat(act)
    assert_same(together(*[functools.partial(rounds, f, i) for i in range(THREADS)]), want)


def test_loops_and_steps_are_measured_while_another_thread_draws():
    def draw():
        remat(lambda x: nn.functional.dropout(x).exp())(tensor(3).requires_grad_()).sum().backward()

    def step(carry, x):
        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return carry * x, None

    carry, _ = scan(step, tensor(3).requires_grad_(), tensor(2, 3), bytes=1000)
    carry.sum().backward()
    train = lambda model, x: model(step(x, x)[0]).sum().backward()
    fit(nn.Linear(3, 3).double(), train, tensor(2, 3), bytes=10**6, select="Linear", measure_on="cpu")


def test_inner_gradients_in_each_thread():
    def meta(gradient, wrap, i):
        x, w = inputs(i)
        loss = lambda w: total(wrap(act)(wrap(act)(x, w), w))
        return grad(lambda w: loss(w - 0.1 * gradient(loss)(w)))(w)

    rounds = lambda *args: [meta(*args) for _ in range(ROUNDS)]
    want = [rounds(grad, plain, i) for i in range(THREADS)]
    assert_same(together(*[functools.partial(rounds, inner_grad, remat, i) for i in range(THREADS)]), want)


class Slow(nn.Tanh):
    def forward(self, x):
        time.sleep(0)
        return super().forward(x)


def test_one_module_in_all_threads():
    """Two use it without remat, which must not put its stand-ins where others look."""
    model = nn.Sequential(nn.Linear(3, 4), Slow(), nn.Linear(4, 3)).double()

    def job(wrap, i):
        x, f = tensor(2, 3, seed=i), wrap(model) if i > 1 else model
        y = f(x)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        own = torch.autograd.grad(total(y), [*model.parameters()])
        return own, vmap(grad(lambda x: total(f(x))))(x)

    rounds = lambda wrap, i: [job(wrap, i) for _ in range(ROUNDS)]
    want = [rounds(plain, i) for i in range(THREADS)]
    assert_same(together(*[functools.partial(rounds, remat, i) for i in range(THREADS)]), want)


def test_a_thread_that_draws_meanwhile_is_noticed():
    """From the stream of the process: the recomputation cannot have the same numbers."""

    def other():
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()

    def forward(interrupted):
        runs = itertools.count(1)  # which no recomputation puts back

        def f(x):
            y = x.sin() * torch.randn(3, dtype=F64)
            if next(runs) == interrupted:
                other()
            return y + x.sin() * torch.randn(3, dtype=F64)

        x = torch.zeros(3, dtype=F64, requires_grad=True)  # the outputs do not tell
        return remat(f)(x).sum()

    forward(None).backward()
    for interrupted in (1, 2):
        y = forward(interrupted)
        with pytest.raises(CheckpointError, match="another thread"):
            y.backward()


def test_forward_in_one_thread_and_backward_in_another():
    def make(wrap, i):
        x, w = inputs(i)
        w.requires_grad_()
        return total(wrap(lambda x: act(x, w))(x)), w

    want = [torch.autograd.grad(*make(plain, i)) for i in range(THREADS)]
    made = together(*[functools.partial(make, remat, i) for i in range(THREADS)])
    got = together(*[functools.partial(torch.autograd.grad, *pair) for pair in made[1:] + made[:1]])
    assert_same(got[-1:] + got[:-1], want)


def test_a_backward_in_another_thread_leaves_no_value_there():
    own = threading.local()
    f = lambda x: (x.sin() * vars(own).setdefault("mean", x.detach())).sum()
    with ThreadPoolExecutor(1) as other:
        other.submit(remat(f)(torch.ones(3, requires_grad=True)).backward).result()
        assert other.submit(lambda: vars(own)).result() == {}


def test_what_another_thread_gives_to_a_class_during_a_recomputation_stays():
    class Run:
        scale, stop = 2.0, False

    def f(x):
        if next(runs):
            together(functools.partial(setattr, Run, "stop", True))
        return (x.sin() * Run.scale).sum()

    runs, x = itertools.count(), torch.ones(3, requires_grad=True)
    y = remat(f)(x)
    Run.scale = 3.0
    y.backward()
    assert (Run.scale, Run.stop) == (3.0, True)
    assert_same(x.grad, 2 * x.cos())


def test_autocast_of_each_thread():
    def job(wrap, dtype):
        found = []
        for _ in range(ROUNDS):
            x, w = (t.float().requires_grad_() for t in inputs(0))
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                y = wrap(act)(x, w)
            time.sleep(0)
            found.append((y, torch.autograd.grad(total(y), (x, w))))
        return found

    dtypes = [torch.bfloat16, torch.float16, None, torch.bfloat16]
    want = [job(plain, dtype) for dtype in dtypes]
    assert_same(together(*[functools.partial(job, remat, dtype) for dtype in dtypes]), want)


def test_an_error_stays_in_its_thread():
    def job(i):
        f = lambda x, w: act(x, w) * (1 / (1 - next(runs) % 2 * (i % 2)))
        runs = itertools.count()  # which no recomputation puts back
        for _ in range(ROUNDS):
            with pytest.raises(ZeroDivisionError) if i % 2 else contextlib.nullcontext():
                assert_same(stack("vmap_x", "grad_both")(remat(f))(*inputs(i)), want[i])

    want = [stack("vmap_x", "grad_both")(act)(*inputs(i)) for i in range(THREADS)]
    together(*[functools.partial(job, i) for i in range(THREADS)])


def test_a_history_of_another_thread():
    """Each thread numbers its graph nodes by itself."""

    def job(wrap):
        w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        h = w * 1.5
        x = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
        together(lambda: wrap(lambda x: (x * h).sin())(x).sum().backward())
        return w.grad, x.grad

    assert_same(job(remat), job(plain))


WHILE_IT_COLLECTS = """
import gc, threading, time
import torch
from funcckpt import remat

def run():
    for _ in range(300):
        f(torch.ones(3, requires_grad=True))

f = remat(torch.sin)
gc.callbacks.append(lambda *_: time.sleep(1e-6))  # lets another thread in
gc.set_threshold(1)
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_collector_runs_while_torch_reads_a_random_stream():
    """Torch holds a lock then, and a thread that waits for it with the interpreter's would wait forever."""
    subprocess.run([sys.executable, "-c", WHILE_IT_COLLECTS], check=True, timeout=120)


def test_another_thread_compiles():
    """Torch tells of the whole process that it compiles."""
    started, ends = threading.Event(), threading.Event()

    def backend(graph, inputs):
        started.set()
        assert ends.wait(60)
        return graph.forward

    w = tensor(3).requires_grad_()
    values = policies.save_only_these_names("sine")

    def results():
        total = 0
        for i in (1.0, 2.0):
            total = total + checkpoint(lambda x: (x.sin() * i).exp(), w).sum()  # noqa: B023
        named = remat(lambda x: checkpoint_name(x.sin(), "sine").exp(), policy=values)
        kept = measure(lambda: torch.autograd.grad(named(w).sum(), w)).ops["aten.sin.default"] == 1
        at_level = grad(lambda x: checkpoint(torch.sin, x).sum())(w.detach())
        return torch.autograd.grad(total, w)[0], at_level, torch.tensor(kept)

    expected = results()
    assert expected[-1]
    # Torch 2.11 crashes later, if the thread of the first compilation has ended.
    torch.compile(torch.cos, backend="eager")(torch.ones(3))
    thread = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert started.wait(60)
        assert_same(results(), expected)
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize(
    "wrap", [remat, lambda f: functools.partial(checkpoint, f)], ids=["remat", "checkpoint"]
)
def test_two_recomputations_that_wait_for_each_other(wrap):
    """Each draws from a stream of its own."""
    barrier, w = threading.Barrier(2), tensor(3, 3).requires_grad_()

    def job(i, wrap=plain):
        own = torch.Generator().manual_seed(i)

        def f(x):
            y = torch.tanh(x @ w) * torch.rand(3, generator=own, dtype=F64)
            if wrap is not plain:
                barrier.wait(timeout=60)
            return y.sin() @ w

        return torch.autograd.grad(wrap(f)(tensor(2, 3)).sum(), w)

    found = together(*[functools.partial(job, i, wrap) for i in (0, 1)])
    assert_same(found, [job(0), job(1)])
