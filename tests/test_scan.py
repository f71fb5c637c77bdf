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

from funcckpt import CheckpointError, InputError, MutationError, fori_loop, remat, scan, while_loop
from funcckpt.dispatch import using
from funcckpt.schedules import Schedule, advances, evaluations, kept

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
}


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform, options):
    run = TRANSFORMS[transform]
    checkpointed = run(lambda *args: rnn(scan, *args, **options))
    assert_same(checkpointed, run(lambda *args: rnn(plain_scan, *args)))


@pytest.mark.parametrize("spelling", ["function", "generated"])
@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "hvp", "grad of grad"])
def test_transforms_in_the_other_spellings(transform, spelling):
    if spelling == "generated" and transform == "hvp":
        return  # it has no forward mode
    run = TRANSFORMS[transform]
    with using(spelling):
        checkpointed = run(lambda *args: rnn(scan, *args, checkpoints=3))
    assert_same(checkpointed, run(lambda *args: rnn(plain_scan, *args)))


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_eager_backward_and_double_backward(options, reverse):
    def run(loop):
        leaves = [t.clone().requires_grad_() for t in (W, X, XS)]
        out = rnn(loop, *leaves, reverse=reverse, **options)
        first = torch.autograd.grad(out, leaves, create_graph=True)
        sum((g * g).sum() for g in first).backward()
        return out.detach(), [g.detach() for g in first], [leaf.grad for leaf in leaves]

    assert_same(run(scan), run(plain_scan))


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


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, w: grad(f)(w),
        lambda f, w: grad(grad(f))(w),
        lambda f, w: vmap(grad(f))(torch.stack([w, 2 * w])),
        lambda f, w: jvp(grad(f), (w,), (w,)),
    ],
    ids=["grad", "grad of grad", "vmap of grad", "hvp"],
)
def test_scan_in_scan_in_remat(transform):
    def outer(loop, wrap, w):
        def inner(x, s):
            return loop(lambda x, t: (torch.sin(w * x + t), x), x, s, checkpoints=2)

        def all_of_it(x):
            x, ys = loop(lambda x, s: inner(x, s), x, XS, checkpoints=3)
            return x + ys.sum()

        return wrap(all_of_it)(X.sum())

    w = torch.tensor(0.7, dtype=F64)
    got = transform(lambda w: outer(scan, remat, w), w)
    assert_same(got, transform(lambda w: outer(plain_scan, lambda f: f, w), w))


# -- counts -----------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """How often an operator ran, seen from below all transforms."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def sines(loop):
    with Count(torch.ops.aten.sin.default) as count:
        loop()
    return count.count


@pytest.mark.parametrize("n", [1, 2, 9, 40])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("how", ["grad", "backward", "vmap of grad"])
def test_each_step_is_run_as_often_as_the_schedule_says(n, options, how):
    if n == 40 and options.get("checkpoints") == 1:
        return  # refused, see below

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
    if options == {"checkpoint": "binomial"}:
        want = {1: 1, 2: 3, 9: 9 + advances(9, 3), 40: 40 + advances(40, 8)}[n]
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
    assert kept(Schedule("binomial", k), n) == k
    # Two are in work: what a step is given, and what it gives. `torch.func.grad` holds on to its graph
    # until it returns, and with it to the last step, which is no part of any checkpoint.
    assert carries.most == k + 2 + (how == "grad")


# -- randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_each_step_draws_its_numbers_again(options):
    def f(loop, x):
        return loop(
            lambda x, _: (torch.nn.functional.dropout(torch.sin(x + 1), 0.3), x), x, length=N, **options
        )

    def total(loop):
        return lambda x: f(loop, x)[0].sum() + (f(loop, x)[1] ** 2).sum()

    x = tensor(20)
    for run in (
        lambda loop: grad(total(loop))(x),
        lambda loop: vmap(grad(total(loop)), randomness="different")(torch.stack([x, x])),
        lambda loop: vmap(grad(total(loop)), randomness="same")(torch.stack([x, x])),
        lambda loop: jacrev(lambda x: f(loop, x)[0])(x),
    ):
        torch.manual_seed(3)
        got, after = run(scan), torch.rand(1)
        torch.manual_seed(3)
        want, after_plain = run(plain_scan), torch.rand(1)
        assert_same(got, want)
        assert torch.equal(after, after_plain)


# -- fori_loop and while_loop -----------------------------------------------------------------------


def test_fori_loop():
    def run(w, loop):
        if loop is None:
            y = X
            for i in range(2, 13):
                y = torch.tanh(w @ y) * i
        else:
            y = loop(2, 13, lambda i, y: torch.tanh(w @ y) * i, X, checkpoints=3)
        return y.sum()

    assert_same(hessian(run)(W, fori_loop), hessian(run)(W, None))
    assert_same(grad(run)(W, fori_loop), grad(run)(W, None))
    x = torch.ones(2)
    assert fori_loop(3, 3, lambda i, y: y + 1, x) is x and fori_loop(3, 1, lambda i, y: y + 1, x) is x


def newton(a, loop):
    cond = lambda x: (x * x - a).abs() > 1e-12
    body = lambda x: (x + a / x) / 2
    if loop is not None:
        return loop(cond, body, a, checkpoints=2)
    x = a
    while cond(x):
        x = body(x)
    return x


def test_while_loop():
    a = torch.tensor(77.0, dtype=F64)
    for run in (
        lambda f: f(a),
        lambda f: grad(f)(a),
        lambda f: jvp(f, (a,), (a,)),
        lambda f: grad(grad(f))(a),
        lambda f: torch.autograd.grad(f(leaf := a.clone().requires_grad_()), leaf),
        lambda f: torch.autograd.functional.hessian(f, a),
    ):
        assert_same(run(lambda a: newton(a, while_loop)), run(lambda a: newton(a, None)))


def test_while_loop_under_vmap_where_cond_is_not_batched():
    def run(x, loop):
        body = lambda c: (c[0] + 1, torch.sin(c[1]))
        if loop:
            return while_loop(lambda c: c[0] < 9, body, (0, x), checkpoints=2)[1].sum()
        for _ in range(9):
            x = torch.sin(x)
        return x.sum()

    assert_same(vmap(grad(run), (0, None))(XS, True), vmap(grad(run), (0, None))(XS, False))
    with pytest.raises(InputError, match="cond depends on what vmap has batched"):
        vmap(lambda a: newton(a, while_loop))(torch.ones(3, dtype=F64) * 7)


def test_while_loop_counts_and_gives_random_numbers_back():
    def f(x):
        body = lambda c: (c[0] + 1, torch.sin(c[1]) * torch.rand(()))
        return while_loop(lambda c: c[0] < 9, body, (0, x), checkpoints=3)[1]

    x = torch.tensor(1.0)
    assert sines(lambda: grad(f)(x)) == 9 + 9 + advances(9, 3)
    with torch.no_grad():
        assert sines(lambda: f(x)) == 9
    torch.manual_seed(1)
    f(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    for _ in range(9):
        torch.rand(())
    assert torch.equal(after, torch.rand(1))


def test_while_loop_stops_at_max_steps_and_at_none():
    x = torch.ones(2)
    assert while_loop(lambda x: False, lambda x: x + 1, x) is x
    assert while_loop(lambda x: True, lambda x: x + 1, x, max_steps=4).tolist() == [5, 5]


hidden_calls = []


def test_while_loop_that_ends_elsewhere_the_second_time():
    def cond(c):
        calls = sys.modules[__name__].__dict__["hidden" + "_calls"]  # by a name that no search sees
        calls.append(None)
        return c[0] < (5 if len(calls) <= 6 else 7)

    with pytest.raises(CheckpointError, match="ended after 5 steps when they were counted"):
        grad(lambda x: while_loop(cond, lambda c: (c[0] + 1, torch.sin(c[1])), (0, x))[1])(torch.tensor(1.0))


def test_while_loop_refuses_what_would_not_be_the_same_again():
    class Counter:
        n = 0

        def body(self, x):
            self.n += 1
            return x * self.n

    seen = []
    for body in (Counter().body, lambda x: (seen.append(1), x * len(seen))[1]):
        with pytest.raises(MutationError, match="put what changes into the carry"):
            grad(lambda x, body=body: while_loop(lambda x: x < 9, body, x))(torch.tensor(1.0))


def test_while_loop_updates_the_statistics_of_a_module_once():
    def run(loop):
        norm = torch.nn.BatchNorm1d(D).to(F64)
        body = lambda c: (c[0] + 1, torch.sin(norm(c[1])))
        x = XS.clone().requires_grad_()
        _, out = while_loop(lambda c: c[0] < 4, body, (0, x)) if loop else body(body(body(body((0, x)))))
        (out**3).sum().backward()
        return x.grad, dict(norm.named_buffers()), [p.grad for p in norm.parameters()]

    assert_same(run(True), run(False))


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


def test_integer_and_number_carries():
    def f(x):
        (_, _, x), _ = scan(
            lambda c, _: ((c[0] + 1, c[1] + 1, x * c[2] * c[1]), None),
            (torch.tensor(0), 1, x),
            length=5,
            checkpoints=2,
        )
        return x

    x = torch.tensor(1.5, dtype=F64)
    torch.testing.assert_close(grad(f)(x), 120 * 6 * x**5)


def two(c, x):
    return c, c


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scan(two, X), r"scan\(two\): without xs, say how many steps"),
        (lambda: scan(two, X, length=-1), r"length=-1 is not a number of steps"),
        (lambda: scan(two, X, length=2.0), r"length=2.0 is not a number of steps"),
        (lambda: scan(two, X, XS, 4), r"xs \(float64\[11, 3\]\) has 11 slices, and length says 4"),
        (
            lambda: scan(two, X, {"a": XS, "b": XS[:4]}),
            r"xs\['b'\] \(float64\[4, 3\]\) has 4 slices, and xs\['a'\] says 11",
        ),
        (lambda: scan(two, X, torch.tensor(1.0)), r"xs \(float32\[\]\) has no dimension"),
        (lambda: scan(lambda c, x: c, X, XS), r"step 0 returned a Tensor, not the pair"),
        (lambda: scan(lambda c, x: (c, c, c), X, XS), r"step 0 returned 3 values, not the pair"),
        (
            lambda: scan(lambda c, x: (c.float(), None), X, XS),
            r"step 0 returned carry as float32\[3\] on cpu, and was given float64\[3\] on cpu",
        ),
        (
            lambda: scan(lambda c, x: ({"a": c["a"], "b": c["b"][:1]}, None), {"a": X, "b": X}, XS),
            r"step 0 returned carry\['b'\] as float64\[1\] on cpu",
        ),
        (
            lambda: scan(lambda c, x: ((c[0], c[1] + 1 if c[1] < 6 else 7.0), None), (X, 0), XS),
            r"step 6 returned carry\[1\] as a float, and was given a int",
        ),
        (
            lambda: scan(lambda c, x: (c[:1], None), [X, X], XS),
            r"step 0 returned a carry with the structure",
        ),
        (lambda: scan(X, X, XS), r"takes a function, not Tensor"),
        (lambda: scan(two, X, XS, checkpoint="log"), r"checkpoint='log' is none of"),
        (lambda: scan(two, X, length=60, checkpoints=1), r"Take at least checkpoints=2"),
        (
            lambda: fori_loop(0, 3, lambda i, c: c[None], X),
            r"fori_loop\(.*\): step 0 returned carry as float64\[1, 3\]",
        ),
        (
            lambda: while_loop(lambda c: c > 0, lambda c: c, X),
            r"cond returned bool\[3\] at step 0, not one truth value",
        ),
        (lambda: scan(two, X, XS, progress=True), "progress=True needs tqdm"),
    ],
)
def test_wrong_input(call, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(InputError, match=says):
        call()


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


def test_progress(monkeypatch):
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

    def f(x):
        return scan(lambda x, _: (torch.sin(x), None), x, length=20, checkpoints=3, progress=True)[0]

    grad(f)(torch.tensor(1.0))
    assert [(bar.total, bar.n, bar.closed) for bar in bars] == [
        (20, 20, True),
        (advances(20, 3), advances(20, 3), True),
    ]
    assert bars[0].desc.startswith("scan(") and bars[1].desc.endswith("backward")


def test_the_examples():
    assert doctest.testmod(sys.modules["funcckpt.scan"]).failed == 0
