"""Eight threads at once: their own transforms, streams and modules, and one module for all."""

import itertools
import sys
import threading
import time

import pytest
import torch
from oracles import F64, assert_same, plain, state, tensor, total, weight
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from funcckpt import CheckpointError, remat

THREADS = 8
ROUNDS = 5


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns every few bytecodes, so that what can be interrupted is."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def own_state():
    """Without the random streams and the level of forward AD: torch has one for all threads."""
    return {k: v for k, v in state().items() if "random" not in k and k != "forward AD level"}


def together(*jobs):
    """Results of the jobs, each run in its own thread, all started at once. An error in one is
    raised.
    """
    barrier = threading.Barrier(len(jobs))
    results, errors = [None] * len(jobs), []

    def run(i, job):
        try:
            torch.set_num_threads(1)
            barrier.wait()
            before = own_state()
            results[i] = job()
            assert own_state() == before
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i, job)) for i, job in enumerate(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def act(w, x):
    time.sleep(0)  # let another thread in, in the forward and in the recomputation
    return torch.tanh(w @ x) * x


def _backward(f, w, x):
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    total(f(w, x)).backward()
    return w.grad, x.grad


def _double_backward(f, w, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(total(f(w, x)), x, create_graph=True)
    return torch.autograd.grad(total(g), x)


# Without forward mode: torch counts its levels once for all threads, and two threads in jvp break
# each other
# with no remat in sight.
TRANSFORMS = {
    "backward": _backward,
    "double_backward": _double_backward,
    "grad": lambda f, w, x: grad(lambda w, x: total(f(w, x)), argnums=(0, 1))(w, x),
    "vmap_grad": lambda f, w, x: vmap(grad(lambda w, x: total(f(w, x))), (None, 0))(
        w, torch.stack([x, x * 2])
    ),
    "grad_grad": lambda f, w, x: grad(lambda x: total(grad(lambda x: total(f(w, x)))(x)))(x),
    "jacrev": lambda f, w, x: jacrev(f)(w, x),
    "vjp_later": lambda f, w, x: [pull(weight(y)) for y, pull in [vjp(f, w, x)]],
}


def inputs(i):
    return tensor(3, 3, seed=i), tensor(3, seed=100 + i)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_one_transform_in_each_thread(transform):
    """The same remat object, other arguments."""
    f = remat(act)
    run = TRANSFORMS[transform]
    want = [[run(act, *inputs(i))] * ROUNDS for i in range(THREADS)]
    got = together(*[lambda i=i: [run(f, *inputs(i)) for _ in range(ROUNDS)] for i in range(THREADS)])
    assert_same(got, want)


@pytest.mark.parametrize("transform", ["jvp", "hessian", "forward_mode"])
def test_forward_mode_in_one_thread_and_reverse_in_the_others(transform):
    """The level of forward AD that one thread has open is visible to all; the others must not be
    led astray.
    """
    forward = {
        "jvp": lambda f, w, x: jvp(f, (w, x), (w, x)),
        "hessian": lambda f, w, x: hessian(lambda x: total(f(w, x)))(x),
        "forward_mode": _forward_mode,
    }[transform]
    runs = [forward, *list(TRANSFORMS.values())[: THREADS - 1]]
    f = remat(act)
    want = [[run(act, *inputs(i))] * ROUNDS for i, run in enumerate(runs)]
    got = together(
        *[lambda i=i, run=run: [run(f, *inputs(i)) for _ in range(ROUNDS)] for i, run in enumerate(runs)]
    )
    assert_same(got, want)


def _forward_mode(f, w, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(
            f(w, torch.autograd.forward_ad.make_dual(x, x))
        ).tangent.clone()


def test_closures_in_each_thread():
    def job(wrap, i):
        w, x = inputs(i)

        def loss(w, x):
            return total(wrap(lambda x: wrap(lambda z: act(w, z))(x) * w[0])(x))

        out = []
        for _ in range(ROUNDS):
            leaf = w.clone().requires_grad_()
            loss(leaf, x).backward()
            out.append(
                (
                    leaf.grad,
                    grad(loss)(w, x),
                    vmap(grad(loss), (0, None))(torch.stack([w, w * 2]), x),
                )
            )
        return out

    want = [job(plain, i) for i in range(THREADS)]
    assert_same(together(*[lambda i=i: job(remat, i) for i in range(THREADS)]), want)


def test_random_streams_of_their_own():
    """A generator for each thread, given or closed over."""

    def job(wrap, i):
        gen = torch.Generator().manual_seed(i)

        def noisy(x, gen):
            time.sleep(0)
            return torch.tanh(x * torch.randn(3, generator=gen, dtype=F64))

        given = wrap(noisy)
        closed = wrap(lambda x: noisy(x, gen))
        _, x = inputs(i)
        out = []
        for _ in range(ROUNDS):
            leaf = x.clone().requires_grad_()
            y = closed(given(leaf, gen))
            torch.rand(2, generator=gen)
            total(y).backward()
            out.append(leaf.grad)
            out.append(grad(lambda x: total(closed(given(x, gen))))(x))
            out.append(
                vmap(grad(lambda x: total(given(x, gen))), randomness="different")(torch.stack([x, x]))
            )
        return out, torch.rand(3, generator=gen)

    want = [job(plain, i) for i in range(THREADS)]
    assert_same(together(*[lambda i=i: job(remat, i) for i in range(THREADS)]), want)


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


class Slow(nn.Module):
    """Gives other threads a chance between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        time.sleep(0)
        return self.second(h) * self.scale


def build(i=0):
    torch.manual_seed(i)
    return Slow().double()


def train(wrap, model, i):
    """Gradients of all parameters, in all the ways, without touching `.grad`."""
    x = tensor(2, 3, seed=i)
    params = {k: v.detach() for k, v in model.named_parameters()}
    f = wrap(model)
    out = []
    for _ in range(ROUNDS):
        out.append(torch.autograd.grad(total(f(x)), list(model.parameters())))
        out.append(grad(lambda x: total(f(x)))(x))
        out.append(vmap(grad(lambda x: total(f(x))))(x))
    return out, params


def test_one_module_for_all():
    model = build()
    want = [train(plain, model, i) for i in range(THREADS)]
    assert_same(together(*[lambda i=i: train(remat, model, i) for i in range(THREADS)]), want)


def test_one_module_while_others_use_it_without_remat():
    """remat must not put its stand-ins where others look."""
    model = build()
    x = tensor(2, 3)
    want = model(x).detach()

    def watch():
        for _ in range(150):
            assert torch.equal(model(x).detach(), want)
            assert all(type(p) is nn.Parameter for p in model.parameters())
            time.sleep(0)

    jobs = [lambda i=i: train(remat, model, i) for i in range(THREADS - 2)]
    together(*jobs, watch, watch)


def test_accumulating_into_the_parameters_of_one_module():
    """`.grad` summed up over the threads: each contribution once."""
    model = build()
    x = [tensor(2, 3, seed=i) for i in range(THREADS)]
    lock = threading.Lock()

    def job(i):
        y = total(remat(model)(x[i]))
        with lock:  # autograd does not promise atomic accumulation
            y.backward()

    together(*[lambda i=i: job(i) for i in range(THREADS)])
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(total(model(v)) for v in x).backward()
    assert_same(got, [p.grad for p in model.parameters()])


def test_forward_in_one_thread_and_backward_in_another():
    def make(wrap, i):
        w, x = inputs(i)
        w.requires_grad_()
        return w, total(wrap(lambda x: act(w, x))(x))

    want = []
    for i in range(THREADS):
        w, y = make(plain, i)
        y.backward()
        want.append(w.grad)
    made = together(*[lambda i=i: make(remat, i) for i in range(THREADS)])
    made = made[1:] + made[:1]
    got = together(*[lambda w=w, y=y: torch.autograd.grad(y, w)[0] for w, y in made])
    assert_same(got[-1:] + got[:-1], want)


def test_worlds_of_their_own():
    """Autocast and grad mode belong to a thread: each recomputation has that of its own."""
    dtypes = [torch.bfloat16, torch.float16, None, torch.bfloat16]

    def job(wrap, dtype):
        w, x = tensor(3, 3, dtype=torch.float32), tensor(3, seed=1, dtype=torch.float32)
        out = []
        for _ in range(ROUNDS):
            leaf = w.clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                y = wrap(act)(leaf, x)
            time.sleep(0)
            total(y).backward()
            out.append((y.detach(), leaf.grad))
        return out

    want = [job(plain, d) for d in dtypes]
    assert_same(together(*[lambda d=d: job(remat, d) for d in dtypes]), want)


def test_errors_stay_in_their_thread():
    class Boom(Exception):
        pass

    def job(i):
        runs = itertools.count(1)  # which no recomputation puts back

        def f(w, x):
            if next(runs) % 2 == 0 and i % 2:
                raise Boom
            return act(w, x)

        out = []
        for _ in range(ROUNDS):
            try:
                out.append(TRANSFORMS["vmap_grad"](remat(f), *inputs(i)))
            except Boom:
                out.append(None)
        return out

    want = [[None if i % 2 else TRANSFORMS["vmap_grad"](act, *inputs(i))] * ROUNDS for i in range(THREADS)]
    assert_same(together(*[lambda i=i: job(i) for i in range(THREADS)]), want)
