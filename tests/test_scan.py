"""Loops against the plain Python loop: values and derivatives in float64, steps counted exactly, live
carries counted exactly, and what is said of wrong input.
"""

import doctest
import sys
import types
import weakref

import pytest
import torch
from support import assert_same
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import (
    ClosureError,
    EscapeError,
    InputError,
    MutationError,
    OptionError,
    checkpoint_name,
    fori_loop,
    policies,
    scan,
    while_loop,
)
from funcckpt._torch import functorch
from funcckpt.loops.schedules import Schedule, advances, choose, evaluations, parts
from funcckpt.meter import mark, measure
from funcckpt.tape import recompute

F64 = torch.float64
N, D = 11, 3
SCHEDULES = [
    {"checkpoint": None},
    {"checkpoint": "every"},
    {"checkpoint": 3},
    {"checkpoint": "sqrt"},
    {"checkpoint": "recursive"},
    {"checkpoint": "binomial"},
    {"checkpoint": "binomial", "checkpoints": 1},
    {"checkpoint": "binomial", "checkpoints": 3},
]


def plain_scan(f, init, xs=None, length=None, *, reverse=False, **_):
    """The loop of the documentation."""
    carry, ys = init, []
    leaves, structure = pytree.tree_flatten(xs)
    n = length if length is not None else leaves[0].shape[0]
    for i in reversed(range(n)) if reverse else range(n):
        x = pytree.tree_unflatten([None if leaf is None else leaf[i] for leaf in leaves], structure)
        carry, y = f(carry, x)
        ys.append(y)
    if reverse:
        ys.reverse()
    stack = lambda *y: None if y[0] is None else torch.stack([torch.as_tensor(z) for z in y])
    return carry, pytree.tree_map(stack, *ys)


def tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


W, X, XS, V = tensor(D, D, seed=1) / 2, tensor(D, seed=2), tensor(N, D, seed=3), tensor(D, D, seed=4)


def rnn(loop, w, x, xs, **options):
    """A recurrence whose weight is captured, and whose branch depends on the step."""

    def step(carry, x):
        h, count = carry
        h = torch.tanh(w @ h + x)
        if count % 3 == 1:
            h = h * torch.sin(h)
        return (h, count + 1), {"h": h.cos(), "norm": (h * h).sum()}

    (h, count), ys = loop(step, (x, 0), xs, **options)
    assert count == xs.shape[0]
    return (h.exp().sum() + (ys["h"] * torch.arange(N * D, dtype=F64).reshape(N, D)).sum()) * ys["norm"].sum()


TRANSFORMS = {
    "value": lambda f: f(W, X, XS),
    "grad": lambda f: grad(f, (0, 1, 2))(W, X, XS),
    "vmap of grad": lambda f: vmap(grad(f), (None, 0, 0))(
        W, torch.stack([X, 2 * X]), torch.stack([XS, XS * XS])
    ),
    "vmap, closure batched": lambda f: vmap(grad(f), (0, None, None))(torch.stack([W, W.T]), X, XS),
    "vmap, xs batched at 1": lambda f: vmap(f, (None, None, 1))(W, X, torch.stack([XS, 2 * XS], 1)),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, (None, 0, None))(w, torch.stack([X, 2 * X]), XS).sum())(
        W
    ),
    "jvp": lambda f: jvp(lambda w: f(w, X, XS), (W,), (V,)),
    "vjp": lambda f: vjp(f, W, X, XS)[1](torch.tensor(2.0, dtype=F64)),
    "hvp": lambda f: jvp(grad(lambda w: f(w, X, XS)), (W,), (V,)),
    "grad of grad": lambda f: grad(lambda w: (grad(f)(w, X, XS) * V).sum())(W),
    "hessian": lambda f: hessian(f, 1)(W, X, XS),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, 1), 1)(W, X, XS),
    "grad of jvp of jvp": lambda f: grad(
        lambda w: jvp(lambda w: jvp(lambda x: f(w, x, XS), (X,), (X,))[1], (w,), (V,))[1]
    )(W),
}


def pairs(firsts, seconds):
    """Each of both, with the others in turn. All pairs are drawn in test_random_loops.py."""
    firsts, seconds = list(firsts), list(seconds)
    found = [(a, seconds[i % len(seconds)]) for i, a in enumerate(firsts)]
    return found + [(firsts[-i % len(firsts)], b) for i, b in enumerate(seconds, 1)]


@pytest.mark.parametrize(("transform", "options"), pairs(TRANSFORMS, SCHEDULES), ids=str)
def test_transforms(transform, options):
    run = TRANSFORMS[transform]
    checkpointed = run(lambda *args: rnn(scan, *args, **options))
    assert_same(checkpointed, run(lambda *args: rnn(plain_scan, *args)))


# -- policies for the body -----------------------------------------------------------------------------


def named_rnn(loop, w, x, xs, **options):
    def step(h, x):
        h = torch.tanh(checkpoint_name(w @ h, "h") + x)
        return h * h.cos(), h.sin()

    h, ys = loop(step, x, xs, **options)
    return h.exp().sum() + ys.square().sum()


def per_sample(f):
    return vmap(grad(f), (None, 0, 0))(W, torch.stack([X, 2 * X]), torch.stack([XS, XS * XS]))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("options", [{"checkpoints": 1}, {"checkpoints": 3}, {"checkpoint": "sqrt"}], ids=str)
def test_what_a_policy_keeps_of_a_loop(options, samples, monkeypatch):
    """No step computes its product again, however often the schedule runs it; each keeps one vector."""
    monkeypatch.setattr(recompute, "FLOPS_WORTH_A_CALL", 0)

    def run(loop, **options):
        def f(w, x, xs):
            y = named_rnn(loop, w, x, xs, **options)
            mark("forward")
            return y

        return per_sample(f) if samples == 2 else grad(f, (0, 1, 2))(W, X, XS)

    without = measure(run, plain_scan)
    alone = measure(run, scan, **options)
    for policy in (policies.dots_saveable, policies.save_only_these_names("h")):
        kept = measure(run, scan, policy=policy, **options)
        assert_same(kept.result, without.result)
        assert kept.flops == without.flops < alone.flops
        schedule = _schedule(**options)
        recorded = sum(part.steps for part in parts(schedule, N) if part.schedule is not None)
        assert kept.marks["forward"] - alone.marks["forward"] == recorded * samples * X.nbytes


def _schedule(checkpoint="binomial", checkpoints=None):
    return choose(checkpoint, checkpoints, None, N, "")


def test_a_policy_that_has_no_say():
    step = lambda h, x: (h * x, None)
    dots = policies.dots_saveable
    for options, words in (
        ({"policy": dots, "checkpoint": None}, "keeps all values of each step"),
        ({"policy": dots, "bytes": 2**20}, "cannot count what a policy keeps"),
        ({"policy": policies.budget(bytes=1)}, "For a loop, pass bytes="),
        ({"policy": [torch.ops.aten.mm]}, r"scan\(.*aten.mm.default"),
    ):
        with pytest.raises(OptionError, match=words):
            scan(step, X, XS, **options)
    scan(step, X, XS, policy=policies.nothing_saveable, bytes=2**20)  # the same as none


def test_gradients_of_parameters_of_a_module():
    cell = torch.nn.GRUCell(D, D).to(F64)

    def run(loop, cell_of):
        h, hs = loop(lambda h, x: (cell_of(x, h), h), torch.zeros(2, D, dtype=F64), tensor(N, 2, D))
        return (h * h).sum() + hs.sum()

    def eager(loop):
        cell.zero_grad()
        run(loop, cell).backward()
        return {name: p.grad.clone() for name, p in cell.named_parameters()}

    assert_same(eager(scan), eager(plain_scan))
    parameters = {name: p.detach() for name, p in cell.named_parameters()}
    functional = lambda loop: grad(lambda p: run(loop, lambda *args: functional_call(cell, p, args)))(
        parameters
    )
    cell.requires_grad_(False)  # remat says of a gradient that it requires grad if any captured tensor does
    assert_same(functional(scan), functional(plain_scan))


# -- counts -----------------------------------------------------------------------------------------


def sines(loop):
    return measure(loop).ops["aten.sin.default"]


@pytest.mark.parametrize("n", [1, 2, 9, 40])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("how", ["grad", "backward", "vmap of grad"])
def test_each_step_is_run_as_often_as_the_schedule_says(n, options, how):
    if n == 40 and options.get("checkpoints") == 1:
        return  # nests deeper than Python's stack

    def f(x):
        return scan(lambda x, _: (torch.sin(x), None), x, length=n, **options)[0]

    x = torch.ones((), dtype=F64)
    run = {
        "grad": lambda: grad(f)(x),
        "backward": lambda: f(x.clone().requires_grad_()).backward(),
        "vmap of grad": lambda: vmap(grad(f))(x.expand(4)),
    }[how]
    want = {
        None: n,
        "every": 2 * n,
        3: 2 * n,
        "sqrt": 2 * n,
        "recursive": evaluations(Schedule("recursive"), n),
        "binomial": n + advances(n, options.get("checkpoints") or 20),
    }[options["checkpoint"]]
    if options == {"checkpoint": "binomial"}:  # the steps are recorded in twos from n = 28 on
        want = {1: 1, 2: 3, 9: 9 + advances(9, 3), 40: 40 + 2 * advances(20, 5)}[n]
    assert sines(run) == want


class LiveCarries(TorchDispatchMode):
    """The most storages of integer carries alive at a time: those have no gradients."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.live, self.most = shape, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64 and out.shape[-1:] == self.shape:
            storage = out.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live[key] = weakref.finalize(storage, self.live.pop, key, None)
        self.most = max(self.most, len(self.live))
        return out


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_as_many_carries_live_as_there_are_checkpoints(k, how):
    n = 15 if k == 1 else 60

    def f(x):
        step = lambda carry, _: ((carry[0] + 1, torch.sin(carry[1] * carry[0][0])), None)
        first = torch.ones(7, dtype=torch.int64)
        return scan(step, (first, x), length=n, checkpoints=k)[0][1]

    x = torch.ones((), dtype=F64)
    with LiveCarries((7,)) as carries:
        grad(f)(x) if how == "grad" else f(x.clone().requires_grad_()).backward()
    # Two are in work: what a step is given, and what it gives. `torch.func.grad` holds on to its graph
    # until it returns, and with it to the last step, which is no part of any checkpoint.
    assert carries.most == k + 2 + (how == "grad")


# -- bytes ------------------------------------------------------------------------------------------


def deep_step(x):
    """A step whose inside takes several times what its carry does."""
    for _ in range(4):
        x = torch.sin(x) * torch.cos(x)
    return x


LOOPS = {
    "scan": lambda x, n, **o: scan(lambda c, _: (deep_step(c), None), x, length=n, **o)[0],
    "scan, reverse": lambda x, n, **o: scan(
        lambda c, y: (deep_step(c + y), None), x, torch.ones(n, 1, dtype=F64), reverse=True, **o
    )[0],
    "fori": lambda x, n, **o: fori_loop(3, n + 3, lambda i, c: deep_step(c), x, **o),
    "while": lambda x, n, **o: while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, deep_step(c[1])), (0, x), **o
    )[1],
}


@pytest.mark.parametrize("how", ["grad", "backward", "vmap of grad"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_keeps_to_its_bytes_and_uses_them(loop, how):
    n, x = 50, torch.ones(1000, dtype=F64)
    f = lambda x, **options: LOOPS[loop](x, n, **options).sum()

    def run(**options):
        if how == "backward":
            return f(x.clone().requires_grad_(), **options).backward()
        return grad(f)(x, **options) if how == "grad" else vmap(grad(lambda x: f(x, **options)))(x[None])

    besides = 4 * x.nbytes  # the first carry and the last, and their gradients
    counts = []
    for carries in (60, 70, 100, 250, 1600):
        bytes = carries * x.nbytes
        assert measure(run, bytes=bytes).peak_bytes <= bytes + besides
        counts.append(measure(run, bytes=bytes).ops["aten.cos.default"])
    assert counts == sorted(counts, reverse=True)
    # All of it fits: nothing is run again, but the first step to be measured, and to count the steps.
    besides = (8 if how == "backward" else 16) + (4 * n if loop == "while" else 0)
    assert counts[-1] == measure(run, checkpoint=None).ops["aten.cos.default"] + besides < counts[0]
    with pytest.raises(
        InputError, match=r"A carry takes 8000 bytes, and a step with its backward \d+: pass at least"
    ):
        run(bytes=x.nbytes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bytes": 8000, "checkpoint": "sqrt"}, "bytes= needs checkpoint="),
        ({"bytes": 8000, "checkpoints": 3}, "bytes= needs checkpoint="),
        ({"bytes": 8e3}, "bytes=8000.0 is not a positive number"),
        ({"bytes": True}, "bytes=True is not a positive number"),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_wrong_bytes(loop, options, says):
    with pytest.raises(InputError, match=says):
        LOOPS[loop](X, 5, **options)


def test_measuring_a_step_leaves_nothing_behind():
    norm = torch.nn.BatchNorm1d(D).to(F64)

    def run(**options):
        torch.manual_seed(0)
        norm.reset_parameters()
        x = XS.clone().requires_grad_()
        step = lambda c, _: (torch.nn.functional.dropout(norm(c), 0.2), None)
        y, _ = scan(step, x, length=7, **options)
        (y**3).sum().backward()
        return x.grad, {name: b.clone() for name, b in norm.named_buffers()}, torch.rand(1)

    assert_same(run(bytes=10**4), run(checkpoint=None))


# -- randomness -------------------------------------------------------------------------------------


# -- autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"checkpoint": "every"}, {"checkpoints": 2}, {}], ids=str)
def test_under_autocast_a_loop_is_the_plain_one_that_casts_in_each_step(options):
    """The plain loop casts a weight once for all steps, and sums its gradients in bfloat16: so they differ
    from those of checkpointed steps, which cast it again, and sum in float32. Those are the better ones.
    """
    linear = torch.nn.Linear(D, D)

    def run(loop, dtype=torch.bfloat16, anew=False, **options):
        def step(c, x):
            if anew:
                torch.clear_autocast_cache()
            return torch.tanh(linear(c)).float() + x, torch.sin(linear(c))

        linear.zero_grad()
        x = X.float().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            end, ys = loop(step, x, XS.float(), **options)
            (end.square().sum() + ys.float().sum()).backward()
        return end.detach(), ys.detach(), x.grad, linear.weight.grad.clone(), linear.bias.grad.clone()

    got, plain = run(scan, **options), run(plain_scan)
    assert_same(got[:3], plain[:3])
    assert_same(got, run(plain_scan, anew=True))
    exact = run(plain_scan, None)[3]
    assert (got[3] - exact).norm() < (plain[3] - exact).norm()


# -- fori_loop and while_loop -----------------------------------------------------------------------


WHILE = [
    {"checkpoint": None},
    {"checkpoint": "every"},
    {"checkpoint": "sqrt"},
    {"checkpoint": "binomial"},
    {"checkpoints": 1},
    {"checkpoints": 2},
    {"checkpoints": 30},
    {"checkpoints": 2, "offload": "disk"},
    {"bytes": 10**9},
]


def newton(a, loop, **options):
    cond = lambda x: (x * x - a).abs() > 1e-12
    body = lambda x: (x + a / x) / 2
    if loop is not None:
        return loop(cond, body, a, **options)
    x = a
    while cond(x):
        x = body(x)
    return x


@pytest.mark.parametrize("options", WHILE, ids=str)
def test_while_loop(options):
    a = torch.tensor(77.0, dtype=F64)
    for run in (
        lambda f: f(a),
        lambda f: grad(f)(a),
        lambda f: jvp(f, (a,), (a,)),
        lambda f: grad(grad(f))(a),
        lambda f: torch.autograd.grad(f(leaf := a.clone().requires_grad_()), leaf),
        lambda f: torch.autograd.functional.hessian(f, a),
    ):
        assert_same(run(lambda a: newton(a, while_loop, **options)), run(lambda a: newton(a, None)))


def sine_loop(x, n, **options):
    body = lambda c: (c[0] + 1, torch.sin(c[1]))
    return while_loop(lambda c: c[0] < n, body, (0, x), **options)[1]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("how", ["grad", "backward", "vmap of grad"])
def test_while_loop_runs_each_step_once_more_than_the_schedule_says(how, k):
    x = torch.ones((), dtype=F64)
    for n in (1, 2, 7, 12) if k == 1 else (1, 3, 6, 10, 30, 60):
        run = {
            "grad": lambda n=n: grad(lambda x: sine_loop(x, n, checkpoints=k))(x),
            "backward": lambda n=n: sine_loop(x.clone().requires_grad_(), n, checkpoints=k).backward(),
            "vmap of grad": lambda n=n: vmap(grad(lambda x: sine_loop(x, n, checkpoints=k)))(x.expand(4)),
        }[how]
        assert sines(run) == n + evaluations(Schedule("binomial", k), n)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 4}], ids=str)
def test_while_loop_runs_once_where_nothing_is_kept(options):
    x = torch.ones((), dtype=F64)
    assert sines(lambda: jvp(lambda x: sine_loop(x, 30, **options), (x,), (x,))) == 30
    assert sines(lambda: vmap(jacfwd(lambda x: sine_loop(x, 30, **options)))(x.expand(3))) == 30
    with torch.no_grad():
        assert sines(lambda: sine_loop(x, 30, **options)) == 30


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_as_many_carries_live_in_a_while_loop_as_there_are_checkpoints(k, how):
    n = 15 if k == 1 else 60

    def f(x):
        body = lambda c: (c[0] + 1, c[1] + 1, torch.sin(c[2] * c[1][0]))
        first = torch.ones(7, dtype=torch.int64)
        return while_loop(lambda c: c[0] < n, body, (0, first, x), checkpoints=k)[2]

    x = torch.ones((), dtype=F64)
    with LiveCarries((7,)) as carries:
        grad(f)(x) if how == "grad" else f(x.clone().requires_grad_()).backward()
    # As in `scan`: two are in work, and `torch.func.grad` holds on to its graph.
    assert carries.most <= k + 2 + (how == "grad")


def test_memory_of_a_while_loop_grows_as_the_cube_root():
    def peak(n):
        x = torch.ones(1000, dtype=F64)
        return measure(grad(lambda x: sine_loop(x, n).sum()), x).peak_bytes / x.nbytes

    assert peak(1000) < 60 and peak(1000) < 2.6 * peak(64)


@pytest.mark.parametrize("options", WHILE, ids=str)
@pytest.mark.parametrize("transform", [lambda f: f, grad, jacfwd], ids=["value", "grad", "jacfwd"])
def test_while_loop_whose_cond_is_batched(transform, options):
    for samples in (torch.tensor([7.0, 5.0], dtype=F64), torch.tensor([7.0], dtype=F64)):
        with pytest.raises(InputError, match="cond_fun depends on a tensor that vmap has batched"):
            vmap(transform(lambda a: newton(a, while_loop, **options)))(samples)


def test_while_loop_whose_carry_becomes_batched():
    def f(loop, x):
        body = lambda c: (c[0] + 1, torch.sin(c[1]) * x)
        c = (0, torch.ones(2, dtype=F64))
        for _ in range(7 if loop is None else 0):
            c = body(c)
        return (loop(lambda c: c[0] < 7, body, c, checkpoints=2) if loop else c)[1].sum()

    xs = torch.tensor([0.3, 2.0, 1.5], dtype=F64)
    for run in (vmap, lambda f: vmap(grad(f)), lambda f: grad(lambda x: vmap(f)(x).prod())):
        assert_same(run(lambda x: f(while_loop, x))(xs), run(lambda x: f(None, x))(xs))


def test_while_loop_stops_at_max_steps_and_at_none():
    x = torch.ones(2)
    assert while_loop(lambda x: False, lambda x: x + 1, x) is x
    assert fori_loop(3, 3, lambda i, y: y + 1, x) is x and fori_loop(3, 1, lambda i, y: y + 1, x) is x
    assert while_loop(lambda x: True, lambda x: x + 1, x, max_steps=4).tolist() == [5, 5]
    for n in (0, 1, 16):
        plain = lambda x, n=n: fori_loop(0, n, lambda i, x: x.sin(), x, checkpoint=None).sum()
        for options in WHILE:
            f = lambda x, n=n, options=options: while_loop(
                lambda x: True, torch.sin, x, max_steps=n, **options
            ).sum()
            assert_same((f(X), grad(f)(X)), (plain(X), grad(plain)(X)))


@pytest.mark.parametrize("options", WHILE[1:], ids=str)
def test_while_loop_refuses_what_would_not_be_the_same_again(options):
    class Counter:
        n = 0

        def body(self, x):
            self.n += 1
            return x * self.n

    seen = []
    for body in (Counter().body, lambda x: (seen.append(1), x * len(seen))[1]):
        with pytest.raises(MutationError, match="Put what changes into the carry"):
            grad(lambda x, body=body: while_loop(lambda x: x < 9, body, x, **options))(torch.tensor(1.0))
    with pytest.raises(InputError, match="cond_fun draws random numbers"):
        grad(lambda x: while_loop(lambda x: torch.rand(()) < 0.9, torch.sin, x, **options))(torch.tensor(1.0))


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_buffer_that_the_body_counts_in_and_uses(loop):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=F64))
            self.weight = torch.nn.Parameter(torch.ones((), dtype=F64) * 0.7)

        def forward(self, x):
            self.n += 1
            return torch.sin(x * self.n.clone()) * self.weight

    def run(checkpointed):
        module = Counting()
        x = X.clone().requires_grad_()
        if not checkpointed:
            y = x
            for _ in range(9):
                y = module(y)
        elif loop == "scan":
            y, _ = scan(lambda c, _: (module(c), None), x, length=9, checkpoints=2)
        else:
            y = while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, module(c[1])), (0, x), checkpoints=2)[1]
        y.sum().backward()
        return x.grad, module.n, module.weight.grad

    assert_same(run(True), run(False))


unseen = []


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("how", ["grad", "backward", "vmap of grad", "hessian", "jvp"])
def test_a_loop_that_captures_what_no_search_finds(how, loop):
    """In one step alone, so that all others forget it."""

    def f(x, loop=loop):
        unseen[:] = [x]

        def body(c):
            # By a name that no search sees.
            w = sys.modules[__name__].__dict__["un" + "seen"][0] if c[0] == 4 else 1.0
            return c[0] + 1, torch.sin(c[1]) * w

        c = (0, torch.ones(D, dtype=F64))
        if loop == "while":
            c = while_loop(lambda c: c[0] < 9, body, c, checkpoints=3)
        elif loop == "scan":
            c, _ = scan(lambda c, _: (body(c), None), c, length=9, checkpoints=3)
        else:
            for _ in range(9):
                c = body(c)
        return c[1].sum()

    run = {
        "grad": lambda f: grad(f)(X),
        "backward": lambda f: torch.autograd.grad(f(x := X.clone().requires_grad_()), x)[0],
        "vmap of grad": lambda f: vmap(grad(f))(torch.stack([X, 2 * X])),
        "hessian": lambda f: hessian(f)(X),
        "jvp": lambda f: jvp(f, (X,), (X,)),
    }[how]
    want = run(lambda x: f(x, None))
    try:
        got = run(f)
    except (ClosureError, EscapeError) as error:
        assert "as an argument" in str(error) or "return it" in str(error)
    else:
        assert_same(got, want)


@pytest.mark.parametrize("options", WHILE[:-1], ids=str)
def test_an_error_in_the_body_of_a_while_loop_names_the_step_and_leaves_nothing_behind(options):
    def body(c):
        if c[0] == 5:
            raise ValueError("too much")
        return c[0] + 1, torch.sin(c[1]) + torch.rand(())

    run = lambda: grad(lambda x: while_loop(lambda c: True, body, (0, x), **options)[1])(torch.tensor(0.0))
    for _ in range(2):
        with pytest.raises(ValueError, match="too much") as caught:
            run()
        if sys.version_info >= (3, 11):
            assert any("in step 5 of while_loop(" in note for note in caught.value.__notes__)
    assert torch.is_grad_enabled() and functorch.current_level() == 0


# -- edges ------------------------------------------------------------------------------------------


def test_ys_of_any_kind():
    def step(c, x):
        return c + x["a"], {"t": c * x["a"], "n": 2, "none": None, "f": [0.5, (c > 0).sum()]}

    xs = {"a": XS, "b": None}
    for reverse in (False, True):
        got = scan(step, X, xs, reverse=reverse, checkpoints=2)
        assert_same(got, plain_scan(step, X, xs, reverse=reverse))
    assert scan(lambda c, x: (c, None), X, XS)[1] is None


def test_no_steps():
    xs = torch.ones(0, D, dtype=F64)
    state = torch.get_rng_state()
    carry, ys = scan(lambda c, x: (c * x, {"a": torch.rand(2, 3), "b": None}), X, xs)
    assert carry is X and ys["a"].shape == (0, 2, 3) and ys["b"] is None
    assert torch.equal(state, torch.get_rng_state())
    assert scan(lambda c, x: (c, c), X, length=0)[1].shape == (0, D)
    assert torch.equal(grad(lambda x: scan(lambda c, x: (c, c), x, length=0)[0].sum())(X), torch.ones_like(X))


def two(c, x):
    return c, c


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scan(two, X), r"scan\(two\): without xs, pass length="),
        (lambda: scan(two, X, length=-1), r"length=-1 is not a number of steps"),
        (lambda: scan(two, X, length=2.0), r"length=2.0 is not a whole number"),
        (lambda: scan(two, X, XS, 4), r"xs \(float64\[11, 3\]\) has 11 slices, not 4 like length"),
        (
            lambda: scan(two, X, {"a": XS, "b": XS[:4]}),
            r"xs\['b'\] \(float64\[4, 3\]\) has 4 slices, not 11 like xs\['a'\]",
        ),
        (lambda: scan(two, X, torch.tensor(1.0)), r"xs \(float32\[\]\) has no dimension"),
        (lambda: scan(lambda c, x: c, X, XS), r"step 0 returned a Tensor, not the pair"),
        (lambda: scan(lambda c, x: (c, c, c), X, XS), r"step 0 returned 3 values, not the pair"),
        (
            lambda: scan(lambda c, x: (c.float(), None), X, XS),
            r"step 0 returned carry as float32\[3\] on cpu, but was given float64\[3\] on cpu",
        ),
        (
            lambda: scan(lambda c, x: ({"a": c["a"], "b": c["b"][:1]}, None), {"a": X, "b": X}, XS),
            r"step 0 returned carry\['b'\] as float64\[1\] on cpu",
        ),
        (
            lambda: scan(lambda c, x: ((c[0], c[1] + 1 if c[1] < 6 else 7.0), None), (X, 0), XS),
            r"step 6 returned carry\[1\] as a float, but was given an int",
        ),
        (
            lambda: scan(lambda c, x: (c[:1], None), [X, X], XS),
            r"step 0 returned carry\[1\] as nothing, but was given float64\[3\] on cpu",
        ),
        (lambda: scan(X, X, XS), r"takes a function, not Tensor"),
        (lambda: scan(two, X, XS, checkpoint="log"), r"checkpoint='log' is not None, a"),
        (lambda: scan(two, X, length=0, checkpoint="log"), r"checkpoint='log' is not None, a"),
        (
            lambda: scan(lambda c, x: (c.float(), None), X, length=0),
            r"step 0 returned carry as float32\[3\] on cpu",
        ),
        (lambda: scan(two, X, "abc"), r"xs is a str, which cannot become a tensor"),
        (lambda: scan(two, X, {"a": XS, "b": object()}), r"xs\['b'\] is an object, which cannot"),
        (lambda: scan(lambda c, x: (c, {"a": "z"}), X, XS), r"y\['a'\] is a str, which cannot"),
        (lambda: fori_loop(0, 2.5, lambda i, c: c, X), r"upper=2.5 is not a whole number"),
        (
            lambda: vmap(lambda n: fori_loop(0, n, lambda i, c: c, X))(torch.tensor([1, 2])),
            r"upper=int64\[\] is not a whole number\. A vmap has batched it.*torch\.where",
        ),
        (lambda: scan(lambda c, x: (c + x.sum(), None), 0.0, XS), r"given a float. Begin with a tensor"),
        (lambda: scan(two, X, [XS, XS[:4]]), r"like xs\[0\]\. A list is one pytree: to loop"),
        (lambda: while_loop(lambda c: True, two, X, max_steps=-1), r"max_steps=-1 is not a number of steps"),
        (lambda: while_loop(lambda c: None, two, X), r"cond_fun returned None at step 0, not a truth value"),
        (
            lambda: scan(lambda c, x: ({**c, "z": X}, None), {"a": X}, XS),
            r"step 0 returned carry\['z'\] as float64\[3\] on cpu, but was given nothing",
        ),
        (
            lambda: fori_loop(0, 3, lambda i, c: c[None], X),
            r"fori_loop\(.*\): step 0 returned carry as float64\[1, 3\]",
        ),
        (
            lambda: while_loop(lambda c: c > 0, lambda c: c, X),
            r"cond_fun returned bool\[3\] at step 0, not one value",
        ),
        (lambda: scan(two, X, XS, progress=True), "progress=True needs tqdm"),
    ],
)
def test_wrong_input(call, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("options", [{"checkpoint": None}, {"checkpoint": 3}, {"checkpoints": 2}], ids=str)
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda c: {"a": c, "b": c}, r"returned y\['b'\] as float64\[3\] on cpu, but step \d+ as None"),
        (
            lambda c: {"a": c[:1], "b": None},
            r"returned y\['a'\] as float64\[1\] on cpu, but step \d+ as float64",
        ),
        (lambda c: {"a": c.float(), "b": None}, r"returned y\['a'\] as float32\[3\] on cpu, but step \d+ as"),
        (lambda c: {"a": c}, r"returned y\['b'\] as nothing, but step \d+ as None"),
        (lambda c: None, r"returned y\['a'\] as nothing, but step \d+ as float64\[3\] on cpu"),
    ],
)
@pytest.mark.parametrize("first_other", [4, 8])
def test_ys_look_the_same_in_all_steps(first_other, other, says, options):
    """In one part of a schedule (8 to 11 are recorded together in three segments) and in different ones."""

    def step(carry, _):
        c, i = carry
        return (c.sin(), i + 1), other(c) if i >= first_other else {"a": c, "b": None}

    with pytest.raises(InputError, match=rf"step {first_other} {says}"):
        grad(lambda x: scan(step, (x, 0), length=12, **options)[0][0].sum())(X)


def test_keys_of_a_dict_may_change_places():
    def step(c, x):
        new = {"h": torch.tanh(W @ c["h"] + x * c["k"]), "k": c["k"] + 1}
        flip = c["k"] % 2 == 0
        pairs = lambda tree: dict(reversed(tree.items())) if flip else tree
        return pairs(new), pairs({"p": c["h"], "q": x})

    def run(loop, **options):
        c, ys = loop(step, {"h": X, "k": 0}, XS, **options)
        return c["h"], ys["p"], ys["q"]

    for options in ({"checkpoint": None}, {"checkpoint": "every"}, {"checkpoints": 2}):
        assert_same(run(scan, **options), run(plain_scan))


def test_where_nothing_is_kept_no_step_is_a_checkpoint():
    """Values and forward mode alone: any schedule will do, also one that would nest too deep."""
    f = lambda x: scan(lambda c, _: (torch.sin(c), None), x, length=60, checkpoints=1)[0]
    x = torch.ones((), dtype=F64)
    for run in (lambda: f(x), lambda: jvp(f, (x,), (x,)), lambda: vmap(jacfwd(f))(x[None])):
        assert sines(run) == 60
    with torch.no_grad():
        assert sines(lambda: f(x.clone().requires_grad_())) == 60


def test_keywords_of_jax():
    total, xs = lambda c, x: (c + x, None), torch.arange(5)
    assert scan(f=total, init=torch.tensor(1), xs=xs, length=5, reverse=True, unroll=4)[0] == 11
    assert fori_loop(0, 3, body_fun=lambda i, c: c + i, init_val=3, unroll=True) == 6
    assert while_loop(cond_fun=lambda c: c < 5, body_fun=lambda c: c + 2, init_val=0) == 6


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs notes on exceptions")
def test_a_list_of_batches():
    def my_step(c, x):
        return c + x["a"].sum(), None

    with pytest.raises(TypeError, match="list indices") as caught:
        scan(my_step, torch.tensor(0.0), [{"a": torch.ones(2)}, {"a": torch.ones(2)}])
    (note,) = caught.value.__notes__
    assert "in step 0 of scan(" in note and "my_step) (xs is a list" in note


def test_an_error_in_the_body_names_the_step():
    def step(c, x):
        if c > 4:
            raise ValueError("too much")
        return c + 1, None

    with pytest.raises(ValueError, match="too much") as caught:
        grad(lambda c: scan(step, c, length=9, checkpoints=2)[0])(torch.tensor(0.0))
    if sys.version_info >= (3, 11):
        assert any("in step 5 of scan(" in note for note in caught.value.__notes__)


def test_a_body_that_writes_to_its_carry():
    with pytest.raises(MutationError, match=r"remat\(scan\)"):
        grad(lambda x: scan(lambda c, _: (c.mul_(2), None), x * 1, length=9, checkpoint="every")[0].sum())(X)


@pytest.mark.parametrize("loop", ["scan", "fori", "while"])
def test_progress(loop, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, desc):
            self.total, self.desc, self.n, self.closed = total, desc, 0, False
            bars.append(self)

        def update(self):
            self.n += 1

        def close(self):
            self.closed = True

    module = types.ModuleType("tqdm.auto")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    x = torch.tensor(1.0)
    grad(lambda x: LOOPS[loop](x, 20, checkpoints=3, progress=True))(x)
    again = advances(20, 3)
    assert [(bar.total, bar.n, bar.closed) for bar in bars] == [(20, 20, True), (again, again, True)]
    assert bars[0].desc.startswith(f"{loop}") and bars[1].desc.endswith("backward")
    LOOPS[loop](x, 20, checkpoints=3, progress=True)
    total = None if loop == "while" else 20  # how long it is shows at its end
    assert [(bar.total, bar.n, bar.closed) for bar in bars[2:]] == [(total, 20, True)]


def test_the_examples():
    assert doctest.testmod(sys.modules["funcckpt.loops.scan"]).failed == 0
    assert doctest.testmod(sys.modules["funcckpt.loops.while_loop"]).failed == 0
