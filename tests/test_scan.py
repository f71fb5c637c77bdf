"""Loops against the plain Python loop: values and derivatives in float64, steps counted exactly, live
carries counted exactly, and what is said of wrong input.
"""

import contextvars
import copy
import functools
import sys
import types
from collections import OrderedDict, defaultdict

import pytest
import torch
from oracles import F64, tensor
from support import assert_same
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree

from funcckpt import checkpoint_name, fori_loop, policies, scan, while_loop
from funcckpt.errors import InputError, MutationError, OptionError
from funcckpt.loops.schedules import Schedule, advances, choose, evaluations, parts
from funcckpt.meter import mark, measure
from funcckpt.tape import recompute

N, D = 11, 3
SCHEDULES = [
    {"checkpoint": None},
    {"checkpoint": "every"},
    {"checkpoint": 3},
    {"checkpoint": "sqrt"},
    {"checkpoint": "recursive"},
    {"checkpoint": "binomial"},
    {"checkpoints": 1},
    {"checkpoints": 3},
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


def plain_while(cond, body, carry, **_):
    while cond(carry):
        carry = body(carry)
    return carry


W, X, XS, V = tensor(D, D, seed=1) / 2, tensor(D, seed=2), tensor(N, D, seed=3), tensor(D, D, seed=4)
TWO_X, TWO_XS, ONE = torch.stack([X, 2 * X]), torch.stack([XS, XS * XS]), torch.ones((), dtype=F64)


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
    "vmap of grad": lambda f: vmap(grad(f), (None, 0, 0))(W, TWO_X, TWO_XS),
    "vmap, closure batched": lambda f: vmap(grad(f), (0, None, None))(torch.stack([W, W.T]), X, XS),
    "vmap, xs batched at 1": lambda f: vmap(f, (None, None, 1))(W, X, torch.stack([XS, 2 * XS], 1)),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, (None, 0, None))(w, TWO_X, XS).sum())(W),
    "jvp": lambda f: jvp(lambda w: f(w, X, XS), (W,), (V,)),
    "vjp": lambda f: vjp(f, W, X, XS)[1](2 * ONE),
    "hvp": lambda f: jvp(grad(lambda w: f(w, X, XS)), (W,), (V,)),
    "grad of grad": lambda f: grad(lambda w: (grad(f)(w, X, XS) * V).sum())(W),
    "hessian": lambda f: hessian(f, 1)(W, X, XS),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, 1), 1)(W, X, XS),
    "grad of jvp of jvp": lambda f: grad(
        lambda w: jvp(lambda w: jvp(lambda x: f(w, x, XS), (X,), (X,))[1], (w,), (V,))[1]
    )(W),
}


@pytest.mark.parametrize("number", range(len(TRANSFORMS)))
def test_transforms(number):
    """With one schedule each. All pairs are drawn in test_random_loops.py."""
    run, options = [*TRANSFORMS.values()][number], SCHEDULES[number % len(SCHEDULES)]
    assert_same(run(lambda *args: rnn(scan, *args, **options)), run(lambda *args: rnn(plain_scan, *args)))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("options", [{"checkpoints": 3}, {"checkpoint": "sqrt"}], ids=str)
def test_what_a_policy_keeps_of_a_loop(options, samples, monkeypatch):
    """No step computes its product again, however often the schedule runs it; each keeps one vector."""
    monkeypatch.setattr(recompute, "FLOPS_WORTH_A_CALL", 0)

    def run(loop, **options):
        def f(w, x, xs):
            def step(h, x):
                h = torch.tanh(checkpoint_name(w @ h, "h") + x)
                return h * h.cos(), h.sin()

            h, ys = loop(step, x, xs, **options)
            mark("forward")
            return h.exp().sum() + ys.square().sum()

        return TRANSFORMS["vmap of grad" if samples == 2 else "grad"](f)

    without, alone = measure(run, plain_scan), measure(run, scan, **options)
    schedule = choose(options.get("checkpoint", "binomial"), options.get("checkpoints"), None, N, "")
    recorded = sum(part.steps for part in parts(schedule, N) if part.schedule is not None)
    for policy in (policies.dots_saveable, policies.save_only_these_names("h")):
        kept = measure(run, scan, policy=policy, **options)
        assert_same(kept.result, without.result)
        assert kept.flops == without.flops < alone.flops
        assert kept.marks["forward"] - alone.marks["forward"] == recorded * samples * X.nbytes


@pytest.mark.parametrize("options", [{"checkpoint": "every"}, {}], ids=str)
def test_under_autocast_a_loop_is_the_plain_one_that_casts_in_each_step(options):
    linear = torch.nn.Linear(D, D)

    def run(loop, anew=False, **options):
        def step(c, x):
            if anew:
                torch.clear_autocast_cache()
            return torch.tanh(linear(c)).float() + x, torch.sin(linear(c))

        linear.zero_grad()
        x = X.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            end, ys = loop(step, x, XS.float(), **options)
            (end.square().sum() + ys.float().sum()).backward()
        return end.detach(), ys.detach(), x.grad, linear.weight.grad.clone(), linear.bias.grad.clone()

    assert_same(run(scan, **options), run(plain_scan, anew=True))


sines = lambda loop, *args: measure(loop, *args).ops["aten.sin.default"]
backward = lambda f: lambda x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)[0]


HOW = {"grad": grad, "backward": backward, "vmap of grad": lambda f: lambda x: vmap(grad(f))(x[None])}
# Loops of n steps: (what a step does to its carry, the first one, n) -> the last one.
LOOPS = {
    "scan": lambda f, x, n, **o: scan(lambda c, _: (f(c), None), x, length=n, **o)[0],
    "scan, reverse": lambda f, x, n, **o: scan(
        lambda c, y: (f(c + y), None), x, torch.zeros(n, dtype=F64), reverse=True, **o
    )[0],
    "fori": lambda f, x, n, **o: fori_loop(3, n + 3, lambda i, c: f(c), x, **o),
    "while": lambda f, x, n, **o: while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1])), (0, x), **o)[
        1
    ],
}


@pytest.mark.parametrize("n", [1, 2, 9, 40])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_each_step_is_run_as_often_as_the_schedule_says(n, options, how):
    if n == 40 and options.get("checkpoints") == 1:
        return  # nests deeper than Python's stack
    want = {
        None: n,
        "every": 2 * n,
        3: 2 * n,
        "sqrt": 2 * n,
        "recursive": evaluations(Schedule("recursive"), n),
        # The steps are recorded in twos from n = 28 on.
        "binomial": {1: 1, 2: 3, 9: 9 + advances(9, 3), 40: 40 + 2 * advances(20, 5)}[n],
    }[options.get("checkpoint", "binomial")]
    if "checkpoints" in options:
        want = n + advances(n, options["checkpoints"])
    assert sines(HOW[how](lambda x: LOOPS["scan"](torch.sin, x, n, **options)), ONE) == want


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("how", HOW)
def test_while_loop_runs_each_step_once_more_than_the_schedule_says(how, k):
    for n in (1, 2, 12) if k == 1 else (1, 6, 10, 60):
        run = HOW[how](lambda x, n=n: LOOPS["while"](torch.sin, x, n, checkpoints=k))
        assert sines(run, ONE) == n + evaluations(Schedule("binomial", k), n)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_where_nothing_is_kept_no_step_is_a_checkpoint(loop):
    """Values and forward mode alone: any schedule will do, also one that would nest too deep."""
    f = lambda x: LOOPS[loop](torch.sin, x, 60, checkpoints=1)
    for run in (f, lambda x: jvp(f, (x,), (x,)), lambda x: vmap(jacfwd(f))(x[None])):
        assert sines(run, ONE) == 60
    with torch.no_grad():
        assert sines(f, ONE.clone().requires_grad_()) == 60


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_as_many_carries_live_as_there_are_checkpoints(k, how, loop):
    """Those of integers, which have no gradients."""

    def f(x):
        step = lambda c: (c[0] + 1, torch.sin(c[1] * c[0][0]))
        carry = torch.ones(1000, dtype=torch.int64), x
        return LOOPS[loop](step, carry, 15 if k == 1 else 60, checkpoints=k)[1]

    # Two are in work: what a step is given, and what it gives. `torch.func.grad` holds on to its graph
    # until it returns, and with it to the last step, which is no part of any checkpoint.
    assert measure(HOW[how](f), ONE).peak_bytes // 8000 == k + 2 + (how == "grad")


def test_memory_of_a_while_loop_grows_as_the_cube_root():
    x = torch.ones(1000, dtype=F64)
    loss = lambda x, n: LOOPS["while"](torch.sin, x, n).sum()
    long, short = (measure(grad(loss), x, n).peak_bytes / x.nbytes for n in (1000, 64))
    assert long < 60 and long < 2.6 * short


def deep_step(x):
    """A step whose inside takes several times what its carry does."""
    for _ in range(4):
        x = torch.sin(x) * torch.cos(x)
    return x


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_keeps_to_its_bytes_and_uses_them(loop, how):
    n, x = 50, torch.ones(1000, dtype=F64)
    run = lambda n=n, **options: HOW[how](lambda x: LOOPS[loop](deep_step, x, n, **options).sum())(x)
    besides = 4 * x.nbytes  # the first carry and the last, and their gradients
    counts = []
    for carries in (60, 70, 100, 250, 1700):
        found = measure(run, bytes=carries * x.nbytes)
        assert found.peak_bytes <= carries * x.nbytes + besides
        counts.append(found.ops["aten.cos.default"])
    assert counts == sorted(counts, reverse=True)
    # All of it fits: nothing is run again, but the first step to be measured, and to count the steps.
    besides = (8 if how == "backward" else 16) + (4 * n if loop == "while" else 0)
    assert counts[-1] == measure(run, checkpoint=None).ops["aten.cos.default"] + besides < counts[0]
    with pytest.raises(
        OptionError, match=r"A carry takes 8000 bytes.*its backward \d+: pass at least"
    ) as said:
        run(bytes=x.nbytes)
    run(4, bytes=int(str(said.value).split()[-1].rstrip(".")))


@pytest.mark.parametrize("options", [{"bytes": 10**6}, {"length": 0}], ids=str)
def test_a_step_that_is_run_beside_the_loop_assigns_nothing(options):
    """To measure it, or to see what its y look like."""
    counts = types.SimpleNamespace(steps=0)

    def step(carry, x):
        counts.steps += 1
        return carry * W[0, 0] + counts.steps, carry

    options = {"length": 3, **options}

    def run(x, loop):
        counts.steps = 0
        return sum([y.sum() for y in loop(step, x, **options)])

    for transform in (lambda f: f, grad):
        found = transform(lambda x: run(x, scan))(ONE)
        assert counts.steps == options["length"]
        if options["length"]:
            assert_same(found, transform(lambda x: run(x, plain_scan))(ONE))


def test_what_a_measured_step_has_made_for_good_stays():
    """A lazy module cannot be as before, nor a context variable without a value. One with a default can."""
    lazy, log = nn.LazyLinear(D, dtype=F64), contextvars.ContextVar("log")
    steps = contextvars.ContextVar("steps", default=None)

    def step(x, _, layer=torch.sin):
        log.set([*log.get([]), 1])
        steps.set((steps.get() or 0) + 1)
        return torch.tanh(layer(x)), None

    x = X.clone().requires_grad_()
    scan(step, x, length=3, bytes=10**6)[0].sum().backward()
    assert steps.get() == 3 and len(log.get()) >= 3
    scan(lambda x, y: step(x, y, lazy), x, length=3, bytes=10**6)[0].sum().backward()
    norm = nn.LazyBatchNorm1d(dtype=F64)
    scan(lambda x, _: (norm(x), None), XS * x, length=3, bytes=10**6)[0].sum().backward()
    assert type(norm) is nn.BatchNorm1d
    assert type(lazy) is nn.Linear and x.grad.any()


@pytest.mark.parametrize("transform", [lambda f: f, grad], ids=["plain", "grad"])
@pytest.mark.parametrize("start", [0, 0.0])
def test_a_step_that_is_run_beside_the_loop_writes_nothing(start, transform):
    """To the carry, or to a captured tensor. (Without such a step, a checkpoint refuses it, too.)"""
    captured, x = torch.tensor(start), X.clone().requires_grad_(transform is not grad)

    def of_carry(c, _=None):
        c[0].add_(1)
        return c[0].clone(), torch.tanh(c[1] * c[0].detach())

    def of_captured(c, _=None):
        captured.add_(1)
        return c[0], torch.tanh(c[1] * captured.detach())

    for step in (of_carry, of_captured):
        for loop in (
            lambda f, c: scan(lambda c, x: (f(c), None), c, length=3, bytes=10**6)[0],
            lambda f, c: while_loop(lambda c: c[1].sum() < 5, f, c, max_steps=3),
        ):
            count = torch.tensor(start)
            with pytest.raises(RuntimeError, match=r"in.place"):  # ours, or torch's for the plain loop
                transform(lambda x, loop=loop, step=step, count=count: loop(step, (count, x))[1].sum())(x)
    carry = (torch.tensor(start), X)
    scan(lambda c, x: (of_carry(c), None), carry, length=0)
    assert carry[0] == start


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_bytes_of_a_carry_that_is_batched_after_the_first_steps(how):
    """It begins with zeros, which no vmap has batched."""
    samples, w = tensor(64, 40, 1), tensor(32, 32) / 8

    def total(w, bytes=None):
        def step(c, x):
            return (torch.tanh(c[0] @ w + x), c[0] * 2), None

        zeros = torch.zeros(2, 32, dtype=F64)
        return vmap(lambda x: scan(step, (*zeros,), x, bytes=bytes)[0][1].sum())(samples).sum()

    def run(bytes):
        v = w.clone().requires_grad_(how == "backward")
        return torch.autograd.grad(total(v, bytes), v)[0] if how == "backward" else grad(total)(w, bytes)

    with pytest.raises(OptionError, match="A carry takes 32768 bytes") as said:
        run(1000)
    least = int(str(said.value).split()[-1].rstrip("."))
    for bytes in (least, 2 * least):
        found = measure(run, bytes)
        assert found.peak_bytes <= bytes + 4 * 32768 + 4 * w.nbytes
        torch.testing.assert_close(found.result, grad(total)(w))


def test_dicts_are_one_type_of_carry_and_y():
    """As the parameters of a module, which the first step of an inner loop makes a plain dict."""

    def step(p, x, loop=None):
        g = grad(lambda p: torch.tanh(p["w"] @ x + p["b"]).square().sum())(p)
        new = {name: p[name] - 0.1 * g[name] for name in reversed([*p])}
        return new, OrderedDict(new) if x[0] > 0 else new

    def run(w, loop):
        p, ys = loop(step, defaultdict(list, OrderedDict(b=X, w=w)), XS)
        return sum([x.square().sum() for x in (*p.values(), *ys.values())])

    assert_same(grad(run)(W, scan), grad(run)(W, plain_scan))


def test_a_carry_that_grows_is_refused_at_once():
    def run(w):
        step = lambda c, _: (torch.cat([c, c]), None)
        return scan(step, torch.ones(4) * w.detach().sum(), length=60, bytes=10**6)[0].sum() * w

    with pytest.raises(InputError, match=r"step 0 returned carry as float32\[8\]"):
        vmap(grad(lambda w: run(w)))(torch.ones(3))
    with pytest.raises(InputError, match=r"step 0 returned carry as float32\[8\]"):
        step = lambda c, _: (torch.cat([c, c]), None)
        vmap(grad(lambda w: scan(step, torch.ones(4), length=60, bytes=10**6)[0].sum() * w))(torch.ones(3))


def test_bytes_with_running_statistics_in_the_carry():
    norm = nn.BatchNorm1d(D, dtype=F64)
    statistics = {name: x.clone() for name, x in norm.named_buffers()}

    def step(carry, x):
        h, buffers = carry
        buffers = {name: b.clone() for name, b in buffers.items()}
        return (torch.func.functional_call(norm, buffers, (h * x,)), buffers), None

    run = lambda w, **options: scan(step, (V * w, statistics), XS, **options)[0][0].square().sum()
    torch.testing.assert_close(
        grad(lambda w: run(w, checkpoint="every"))(W), grad(lambda w: run(w, checkpoint=None))(W)
    )
    with pytest.raises(MutationError, match="pass checkpoints= instead"):
        grad(lambda w: run(w, bytes=10**6))(W)


class Norms(nn.Module):
    """Calls a block in training by itself, and then in loops that run more steps than they count."""

    def __init__(self, loop):
        super().__init__()
        self.norm, self.loop = nn.BatchNorm1d(D, dtype=F64), loop

    def step(self, x):
        return torch.tanh(self.norm(x)) + x

    def forward(self, x):
        return self.loop(self.step, self.loop(self.step, self.step(x)))


NORM_LOOPS = {
    "while_loop": lambda f, x: while_loop(lambda c: c[1] < 3, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0],
    "bytes": lambda f, x: scan(lambda x, _: (f(x), None), x, length=3, bytes=10**6)[0],
    "no steps": lambda f, x: f(f(f(x))) + 0 * scan(lambda x, _: (f(x), x), x, length=0)[1].sum(),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch, of a plain module too
@pytest.mark.parametrize("loop", ["bytes", "while", "length 0"])
def test_buffers_where_linearize_traces_a_step_beside_the_loop(loop):
    """The copies of them are no part of the graph."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    step = lambda carry, x: (module(carry), carry)

    def f(x):
        if loop == "while":
            return while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, module(c[1])), (0, x))[1]
        return scan(step, x, length=0 if loop == "length 0" else 3, bytes=2**20)[0] * 1

    def run(f):
        module[1].reset_running_stats()
        value, push = linearize(f, tensor(3, 4))
        return value, push(tensor(3, 4, seed=1)), copy.deepcopy(module.state_dict())

    steps = 0 if loop == "length 0" else 3
    assert_same(run(f), run(lambda x: functools.reduce(lambda c, _: module(c), range(steps), x) * 1))


@pytest.mark.parametrize("loop", NORM_LOOPS)
@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_statistics_that_were_saved_before_an_extra_step(loop, transform):
    def run(loop):
        net = Norms(loop)
        p, b = (
            {k: x.detach().clone() for k, x in at} for at in (net.named_parameters(), net.named_buffers())
        )

        def loss(p, b):
            b = {k: x.clone() for k, x in b.items()}
            return torch.func.functional_call(net, (p, b), (XS,)).pow(2).sum(), b

        if transform == "backward":
            p = {k: x.requires_grad_() for k, x in p.items()}
            out, b = loss(p, b)
            return torch.autograd.grad(out, [*p.values()]), b
        if transform == "vmap_grad":
            p, b = ({k: torch.stack([x, x * 2]) for k, x in each.items()} for each in (p, b))
            return vmap(grad(loss, has_aux=True))(p, b)
        return grad(loss, has_aux=True)(p, b)

    if loop == "bytes" and transform != "backward":
        with pytest.raises(MutationError, match="pass checkpoints= instead"):
            run(NORM_LOOPS[loop])
    else:
        torch.testing.assert_close(run(NORM_LOOPS[loop]), run(lambda f, x: f(f(f(x)))))


class Unkeyed(types.SimpleNamespace):
    """A node of a pytree that gives no keys to its items."""

    def __init__(self, x):
        self.x = x


pytree.register_pytree_node(Unkeyed, lambda node: ([node.x], None), lambda items, _: Unkeyed(*items))


def test_nodes_without_keys():
    def run(x, loop):
        carry, ys = loop(lambda c, x: (Unkeyed(c.x @ W + x.x), Unkeyed(c.x)), Unkeyed(x), Unkeyed(XS))
        return (carry.x * ys.x).sum()

    assert_same(grad(run)(X, scan), grad(run)(X, plain_scan))


@pytest.mark.parametrize(("n", "carries"), [(30, 50), (30, 70), (100, 70), (100, 120)])
def test_what_grad_keeps_of_light_steps(n, carries):
    """It holds the last unit, with the inputs of its steps, until it returns."""
    x = torch.ones(1000, dtype=F64)
    run = lambda x: LOOPS["scan"](torch.sin, x, n, bytes=carries * x.nbytes).sum()
    assert measure(grad(run), x).peak_bytes <= (carries + 4) * x.nbytes


@pytest.mark.parametrize("how", HOW)
def test_the_fewest_bytes_of_a_long_loop(how):
    """Each repetition inside of another one holds a cotangent, which takes as much as a carry."""
    n, x = 97, torch.ones(1000, dtype=F64)
    run = lambda **options: HOW[how](lambda x: LOOPS["scan"](torch.sin, x, n, **options).sum())(x)
    with pytest.raises(OptionError, match="pass at least") as said:
        run(bytes=x.nbytes)
    least = int(str(said.value).split()[-1].rstrip("."))
    for more in range(6):
        bytes = least + more * x.nbytes
        assert measure(run, bytes=bytes).peak_bytes <= bytes + 4 * x.nbytes


WHILE = [{"checkpoint": None}, {"checkpoint": "sqrt"}, {"checkpoints": 2}, {"bytes": 10**9}]


def newton(a, loop, **options):
    return loop(lambda x: (x * x - a).abs() > 1e-12, lambda x: (x + a / x) / 2, a, **options)


@pytest.mark.parametrize("options", WHILE, ids=str)
def test_while_loop(options):
    a = torch.tensor(77.0, dtype=F64)
    for run in (grad, lambda f: lambda a: jvp(f, (a,), (a,)), lambda f: grad(grad(f)), backward):
        assert_same(*(run(lambda a, f=f: newton(a, f, **options))(a) for f in (while_loop, plain_while)))
    for transform in (lambda f: f, grad, jacfwd):
        with pytest.raises(InputError, match="cond_fun depends on a tensor that vmap has batched"):
            vmap(transform(lambda a: newton(a, while_loop, **options)))(a[None])


def test_while_loop_stops_at_max_steps_and_at_none():
    x = torch.ones(2)
    assert while_loop(lambda x: False, lambda x: x + 1, x) is x
    assert fori_loop(3, 3, lambda i, y: y + 1, x) is x and fori_loop(3, 1, lambda i, y: y + 1, x) is x
    for options in WHILE:
        f = lambda x, options=options: while_loop(lambda x: True, torch.sin, x, max_steps=9, **options).sum()
        plain = lambda x: LOOPS["fori"](torch.sin, x, 9, checkpoint=None).sum()
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
        with pytest.raises(MutationError, match="Return what changes in the carry"):
            grad(lambda x, body=body: while_loop(lambda x: x < 9, body, x, **options))(ONE)
    with pytest.raises(InputError, match="cond_fun draws random numbers"):
        grad(lambda x: while_loop(lambda x: torch.rand(()) < 0.9, torch.sin, x, **options))(ONE)


@pytest.mark.parametrize("options", WHILE, ids=str)
def test_a_carry_with_a_state_of_its_own(options):
    """A step that is counted, measured or only looked at leaves it as it was."""

    class World:
        t = 0

        def act(self, x):
            self.t += 1
            return x * self.t

    def updated(carry):
        carry["x"], carry["n"] = (carry["x"] * carry["x"].cos()).sin(), carry["n"] + 1
        return carry

    def run(loop, body, first, steps, **options):
        w = (1.0 * X).requires_grad_()
        carry = loop(lambda carry: carry["n"] < steps, body, {"x": 1.3 * w, "n": 0, **first}, **options)
        return torch.autograd.grad(carry["x"].sum(), w), carry["n"]

    def drawn(loop, steps, **options):
        stream = torch.Generator().manual_seed(1)
        numbers = lambda c: c["x"].sin() + torch.rand(3, generator=c["stream"])
        body = lambda c: {"x": numbers(c), "n": c["n"] + 1, "stream": c["stream"]}
        return run(loop, body, {"stream": stream}, steps, **options), stream.get_state()

    for steps in (1, 5):
        assert_same(drawn(while_loop, steps, **options), drawn(plain_while, steps))
    if options.get("checkpoint", "default") != "sqrt":  # which checkpoints a single step, too
        assert_same(run(while_loop, updated, {}, 1, **options), run(plain_while, updated, {}, 1))
    if options.get("checkpoint", "default"):
        acts = lambda c: {"x": c["world"].act(c["x"]), "n": c["n"] + 1, "world": c["world"]}
        with pytest.raises(MutationError, match="or to an object in the carry"):
            run(while_loop, acts, {"world": World()}, 5, **options)

    def measured(**options):
        world, stream = World(), torch.Generator().manual_seed(1)
        act = lambda c: c[0].act(c[2]).sin() + torch.rand(3, generator=c[1])
        (world, _, x), _ = scan(
            lambda c, _: ((c[0], c[1], act(c)), None), (world, stream, X), length=5, **options
        )
        return x, world.t, stream.get_state()

    assert_same(measured(bytes=10**6), measured(checkpoint=None))
    stream = torch.Generator().manual_seed(1)
    before = stream.get_state()
    scan(
        lambda c, x: ((c[0], c[1] + torch.rand(3, generator=c[0])), None),
        (stream, X[..., :3]),
        torch.ones(0, 3),
    )
    assert torch.equal(stream.get_state(), before)


class Counting(torch.nn.Module):
    """Counts in a buffer that it uses, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=F64))
        self.weight = torch.nn.Parameter(0.7 * ONE)

    def forward(self, x):
        self.n += 1
        return torch.nn.functional.dropout(torch.sin(x * self.n.clone()), 0.2) * self.weight


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"bytes": 10**4}], ids=str)
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_buffers_and_streams_are_left_where_the_plain_loop_leaves_them(loop, options):
    def run(**options):
        torch.manual_seed(0)
        module = Counting()
        LOOPS[loop](module, X, 9, **options).sum().backward()  # X is no leaf to be differentiated
        return module.n, module.weight.grad, torch.rand(1)

    assert_same(run(**options), run(checkpoint=None))
    if "bytes" not in options:
        again = (9 if loop == "while" else 0) + advances(9, 2)
        assert measure(run, **options).ops["aten.sin.default"] == 9 + again


def test_no_steps():
    state = torch.get_rng_state()
    carry, ys = scan(lambda c, x: (c * x, {"a": torch.rand(2, 3), "b": None}), X, XS[:0])
    assert carry is X and ys["a"].shape == (0, 2, 3) and ys["b"] is None
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(grad(lambda x: scan(lambda c, x: (c, c), x, length=0)[0].sum())(X), torch.ones_like(X))


def two(c, x):
    return c, c


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scan(two, X), r"scan\(two\): without xs, pass length="),
        (lambda: scan(two, X, length=True), r"length=True is not a number of steps"),
        (lambda: scan(two, X, length=2.0), r"length=2.0 is not a whole number"),
        (lambda: scan(two, X, XS, 4), r"xs \(float64\[11, 3\]\) has 11 slices, not 4 like length"),
        (lambda: scan(two, X, {"a": XS, "b": XS[:4]}), r"xs\['b'\] .* has 4 slices, not 11 like xs\['a'\]"),
        (lambda: scan(two, X, [XS, XS[:4]]), r"like xs\[0\]\. A list is one pytree: to loop"),
        (
            lambda: scan(two, X, {"a": XS, "b": object()}),
            r"xs\['b'\] is an object, which cannot become a ten",
        ),
        (lambda: scan(lambda c, x: (c, c, c), X, XS), r"step 0 returned 3 values, not the pair"),
        (
            lambda: scan(lambda c, x: (c.float(), None), X, XS),
            r"step 0 returned carry as float32\[3\] on cpu, but was given float64\[3\] on cpu",
        ),
        (lambda: scan(lambda c, x: (c.float(), None), X, length=0), r"step 0 returned carry as float32\[3\]"),
        (
            lambda: scan(lambda c, x: ((c[0], c[1] + 1 if c[1] < 6 else 7.0), None), (X, 0), XS),
            r"step 6 returned carry\[1\] as a float, but was given an int",
        ),
        (lambda: scan(lambda c, x: (c + x.sum(), None), 0.0, XS), r"given a float. Begin with a tensor"),
        (lambda: scan(lambda c, x: ([*c], None), (X, X), XS), r"carry as a list, but was given a tuple"),
        (lambda: scan(lambda c, x: ({"a": [c["a"][0]]}, None), {"a": (X,)}, XS), r"carry\['a'\] as a list"),
        (lambda: scan(lambda c, x: ((c, c), None), X, XS), r"carry as a tuple, but was given float64\[3\]"),
        (lambda: scan(lambda c, x: (Unkeyed(c.x.float()), None), Unkeyed(X), XS), r"carry\[0\] as float32"),
        (lambda: scan(lambda c, x: (c, None), X, Unkeyed(object())), r"xs\[0\] is an object"),
        (lambda: fori_loop(0, 3, lambda i, c: c[None], X), r"fori_loop\(.*\): step 0 returned carry as"),
        (lambda: scan(two, X, length=0, checkpoint="log"), r"checkpoint='log' is not None, a"),
        (lambda: fori_loop(0, 2.5, lambda i, c: c, X), r"upper=2.5 is not a whole number"),
        (
            lambda: vmap(lambda n: fori_loop(0, n, lambda i, c: c, X))(torch.tensor([1, 2])),
            r"upper=int64\[\] is not a whole number\. A vmap has batched it.*torch\.where",
        ),
        (lambda: while_loop(lambda c: None, two, X), r"cond_fun returned None at step 0, not a truth value"),
        (lambda: while_loop(lambda c: c > 0, two, X), r"returned bool\[3\] at step 0, not one value"),
        (lambda: scan(two, X, XS, progress=True), "progress=True needs tqdm"),
        *[
            (
                lambda o=o: scan(lambda c, i: (c[:2] if i == 3 else c, None), X, torch.arange(8), **o),
                r"step 3 returned carry as float64\[2\]",  # counted along xs, whatever part it is in
            )
            for o in ({"checkpoint": 3}, {"reverse": True}, {"reverse": True, "checkpoint": 3})
        ],
        *[
            (lambda loop=loop, options=options: LOOPS[loop](torch.sin, X, 5, **options), says)
            for options, says in [
                ({"bytes": 8000, "checkpoint": "sqrt"}, "bytes= needs checkpoint="),
                ({"bytes": "8e3"}, "bytes='8e3' is not a positive number"),
                ({"checkpoint": True}, "checkpoint=True is not a positive integer"),
                ({"checkpoints": 0}, "checkpoints=0 is not a positive integer"),
                ({"checkpoint": "sqrt", "checkpoints": 4}, 'checkpoints=4 needs checkpoint="binomial"'),
                ({"offload": "tape"}, "offload='tape' is not None, 'host' or 'disk'"),
                ({"policy": policies.dots_saveable, "checkpoint": None}, "keeps all values of each step"),
                ({"policy": policies.dots_saveable, "bytes": 2**20}, "cannot count what a policy keeps"),
                ({"policy": policies.budget(bytes=1)}, "For a loop, pass bytes="),
                ({"policy": [torch.ops.aten.mm]}, r"(scan|while_loop)\(.*aten.mm.default"),
            ]
            for loop in ("scan", "while")
        ],
    ],
)
def test_wrong_input(call, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(InputError, match=says):
        grad(lambda x: call() or x)(ONE)  # where carries are kept


@pytest.mark.parametrize("options", [{"checkpoint": None}, {"checkpoint": 3}, {"checkpoints": 2}], ids=str)
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda c: {"a": c, "b": c}, r"returned y\['b'\] as float64\[3\] on cpu, but step \d+ as None"),
        (lambda c: {"a": c.float(), "b": None}, r"returned y\['a'\] as float32\[3\] on cpu, but step \d+ as"),
        (lambda c: {"a": c}, r"returned y\['b'\] as nothing, but step \d+ as None"),
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


def test_keywords_of_jax():
    total, xs = lambda c, x: (c + x, None), torch.arange(5)
    assert scan(f=total, init=torch.tensor(1), xs=xs, length=5, reverse=True, unroll=4)[0] == 11
    assert fori_loop(0, 3, body_fun=lambda i, c: c + i, init_val=3, unroll=True) == 6
    assert while_loop(cond_fun=lambda c: c < 5, body_fun=lambda c: c + 2, init_val=0) == 6


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs notes on exceptions")
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_an_error_in_the_body_names_the_step(loop):
    def step(c):
        if c > 4:
            raise ValueError("too much")
        return c + 1

    with pytest.raises(ValueError, match="too much") as caught:
        grad(lambda c: LOOPS[loop](step, c, 9, checkpoints=2))(0 * ONE)
    assert any(f"in step 5 of {loop}" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="list indices") as caught:
        scan(lambda c, x: (c + x["a"].sum(), None), X, [{"a": torch.ones(2)}, {"a": torch.ones(2)}])
    (note,) = caught.value.__notes__
    assert "in step 0 of scan(" in note and "<lambda>) (xs is a list" in note


@pytest.mark.parametrize("loop", ["scan", "fori", "while"])
def test_progress(loop, monkeypatch):
    bars = []

    class Bar:
        n, closed = 0, False

        def __init__(self, total, desc):
            self.total, self.desc = total, desc
            bars.append(self)

        def update(self):
            self.n += 1

        def close(self):
            self.closed = True

    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    run = lambda x: LOOPS[loop](torch.sin, x, 20, checkpoints=3, progress=True)
    grad(run)(ONE)
    again = advances(20, 3)
    assert [(bar.total, bar.n, bar.closed) for bar in bars] == [(20, 20, True), (again, again, True)]
    assert bars[0].desc.startswith(f"{loop}") and bars[1].desc.endswith("backward")
    run(ONE)
    total = None if loop == "while" else 20  # how long it is shows at its end
    assert [(bar.total, bar.n, bar.closed) for bar in bars[2:]] == [(total, 20, True)]


@pytest.mark.parametrize("length", [0, 3])
def test_xs_without_leaves(length):
    carry, ys = scan(
        lambda carry, _: (carry.sin(), carry), torch.ones(2, dtype=torch.float64), {}, length=length
    )
    assert carry.shape == (2,) and ys.shape == (length, 2)
