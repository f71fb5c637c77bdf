"""Nothing is kept that nobody needs: not by calls, not by graphs that are dropped, not in reference cycles."""

import collections
import contextlib
import gc
import inspect
import os
import subprocess
import sys
import tracemalloc
import weakref
from contextlib import contextmanager

import pytest
import torch
from oracles import FORWARD, REVERSE, plain, tensor, total
from support import Storages
from torch import nn
from torch.func import functional_call, grad, vjp, vmap

from funcckpt import checkpoint, policies, remat
from funcckpt.core.call import Call
from funcckpt.meter import Meter


@contextmanager
def no_gc():
    """A clean heap and no collector: what dies in here died by its reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cyclic_garbage(thunk):
    """What only the collector could free of a run of thunk."""
    with no_gc():
        thunk()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return list(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def population():
    """(tensors, objects) that Python's collector tracks and has not frozen."""
    objects = gc.get_objects()
    return sum(issubclass(type(o), torch.Tensor) for o in objects), len(objects)


def body(x):
    h = torch.tanh(x * 2)
    return (h * h).sin() * x


CALLS = {
    **{name: lambda f, run=run: run(f, tensor(3)) for name, run in (REVERSE | FORWARD).items()},
    "no_grad": lambda f: f(tensor(3)),
    "dropped": lambda f: f(tensor(3, requires_grad=True)),
    "pullback_dropped": lambda f: vjp(f, tensor(3)),
}


def closing_over(wrap):
    w = tensor(3, seed=1, requires_grad=True)
    return lambda x: wrap(lambda x: body(x * w))(x)


def functional(wrap):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    params = {k: v.detach() for k, v in net.named_parameters()}
    return lambda x: wrap(lambda p, x: functional_call(net, p, (x,)))(params, x)


FUNCTIONS = {
    "new_each_time": lambda wrap: lambda x: wrap(lambda x: body(x))(x),
    "closure": closing_over,
    "functional_call": functional,
    "nested": lambda wrap: wrap(lambda x: wrap(body)(x) * x),
    "values": lambda wrap: wrap(body, determinism_check="values"),
}


@pytest.fixture(scope="module", autouse=True)
def fast_collector():
    for call in CALLS.values():  # torch imports much when it is first used
        call(remat(body))
    gc.collect()
    gc.freeze()  # the collector sees what is made from here on alone, and is fast


def growth(run, calls=30):
    """By how many tensors and objects there are more after the later nine tenths of the calls.

    The collector is off while tensors are counted. It may then free what remains: cycles of torch's own
    functions, which all of torch.func leaves behind, and which hold no tensor.
    """
    counts = []
    with no_gc():
        for n in range(calls):
            run()
            if n in (calls // 10, calls - 1):
                tensors, _ = population()
                gc.collect()
                counts.append((tensors, population()[1]))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def test_inputs_are_freed_as_the_backward_goes():
    """While block i recomputes, the inputs of the blocks after it are gone."""
    refs, alive = [], []

    def block(x):
        alive.append(sum(r() is not None for r in refs))
        return body(x)

    with no_gc():
        x = tensor(3, requires_grad=True) * 1
        for _ in range(5):
            refs.append(weakref.ref(x))
            x = remat(block)(x)
        loss = total(x)
        del x
        loss.backward()
        assert not any(r() is not None for r in refs)
    assert alive == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]


def test_captured_tensors_are_freed_with_the_graph():
    with no_gc():
        v = tensor(3, requires_grad=True)
        w = v * 2
        f = lambda x: body(x * w)  # noqa: F821
        ref = weakref.ref(w)
        y = remat(f)(tensor(3))
        del f, w
        assert ref() is not None  # the graph owns it
        total(y).backward()
        assert ref() is None


# Of x that requires grad.
GRAPHS = {
    "eager": lambda wrap, x: wrap(body)(x * 1),
    "captured": lambda wrap, x: wrap(lambda w=x * 1: body(w))(),
    "double": lambda wrap, x: torch.autograd.grad(total(wrap(body)(x * 1)), x, create_graph=True),
    "chain": lambda wrap, x: wrap(body)(wrap(body)(wrap(body)(x))),
    "nested": lambda wrap, x: wrap(lambda x: wrap(body)(body(x)))(x * 1),
    "of_transform": lambda wrap, x: grad(lambda x: total(wrap(body)(x)))(x * 1),
    "of_vmap": lambda wrap, x: vmap(wrap(body))(torch.stack([x, x])),
    "of_values": lambda wrap, x: wrap(body, determinism_check="values")(x * 1),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_dropped_graph_frees_everything(graph):
    """By reference counts alone. What plain torch leaves to the collector is not asked for."""

    def left(wrap):
        with no_gc():
            x = tensor(3, requires_grad=True)
            ref = weakref.ref(x)
            with Storages() as storages:
                out = GRAPHS[graph](wrap, x)
                del x
                assert storages.live and ref() is not None
                del out
            assert ref() is None
            return storages.live

    left(remat)  # caches of torch
    assert left(remat) <= left(plain)


def ours(garbage):
    """Tensors, and objects and functions of funcckpt, among what only the collector could free."""
    return [
        (type(o).__name__, getattr(o, "__qualname__", ""))
        for o in garbage
        if issubclass(type(o), torch.Tensor)
        or (getattr(o, "__module__", None) or type(o).__module__ or "").startswith("funcckpt")
        or type(o).__module__.startswith("funcckpt")
    ]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_leave_nothing_and_no_reference_cycles(function, call):
    """Also a remat made anew for each call; no object that plain torch does not leave to the collector as well."""

    def garbage(wrap):
        f = FUNCTIONS[function](wrap)
        CALLS[call](f)
        return cyclic_garbage(lambda: CALLS[call](f))

    got, want = garbage(remat), garbage(plain)
    assert not ours(got), ours(got)
    # torch's own tree_flatten leaves a function that refers to itself; it holds nothing of the call.
    functions = collections.Counter(o.__qualname__ for o in got if inspect.isfunction(o))
    functions -= collections.Counter(o.__qualname__ for o in want if inspect.isfunction(o))
    # (From Python 3.14 on, its annotations are a second function.)
    assert {name.removesuffix(".__annotate__") for name in functions} <= {"tree_flatten.<locals>.helper"}
    tensors, objects = growth(lambda: CALLS[call](FUNCTIONS[function](remat)))
    assert tensors <= 0 and objects < 20


class Cyclic(nn.Module):
    """Refers to itself by a method, a hook and a part; each run stores something in it."""

    def __init__(self):
        super().__init__()
        self.linear, self.parts, self.calls, self.last = nn.Linear(3, 3), [{"owner": self}], 0, None
        self.act, self.also = self.act_, lambda x: self.act_(x)
        self.register_forward_hook(self.hook)

    def act_(self, x):
        return x.sin()

    def hook(self, module, args, out):
        self.last = out.detach()

    def forward(self, x):
        self.calls += 1
        return self.act(self.linear(x)) * self.also(x) / self.parts[0]["owner"].calls


@pytest.mark.parametrize("wrap", ["remat", "policy", "checkpoint"])
@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_copies_of_what_refers_to_itself_do_not_wait_for_the_collector(wrap, transform):
    module, x = Cyclic(), torch.randn(2, 3)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    loss = lambda p, x: WRAP[wrap](lambda x: functional_call(module, p, (x,)))(x).sum()

    def step():
        if transform == "backward":
            WRAP[wrap](module)(x).sum().backward()
            module.zero_grad()
        elif transform == "grad":
            grad(loss)(parameters, x)
        else:
            vmap(grad(loss), (None, 0))(parameters, x)

    step()
    assert not ours(cyclic_garbage(step))


def test_copies_of_a_recursive_function_do_not_wait_for_the_collector():
    def loss(w):
        def f(x, depth=2):
            return (f(x, depth - 1) * w).sin() if depth else x

        return remat(f)(w.exp()).sum()

    step = lambda: grad(loss)(torch.randn(3))
    step()
    functions = [o.__name__ for o in cyclic_garbage(step) if inspect.isfunction(o)]
    assert functions.count("f") == 1  # the user's own


MAIN = """
def body(w, x):
    return (x * w).tanh()

for w in ws:
    x = wrap(lambda x: body(w, x))(x)
loss = x.sum()
loss.backward(retain_graph=True)
"""


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda *args: checkpoint(f, *args)])
def test_copies_of_globals_do_not_wait_for_the_collector(wrap):
    """As of a script or a notebook: a loop variable is a global, beside everything else."""
    with no_gc():
        space = {"wrap": wrap, "ws": [torch.ones(3).requires_grad_() for _ in range(3)]}
        space |= {"x": torch.zeros(3), "other": torch.zeros(3), "__builtins__": __builtins__}
        exec(MAIN, space)
        left = [weakref.ref(space[name]) for name in ("x", "loss", "other")]
        del space["x"], space["loss"], space["other"]
        assert [ref() for ref in left] == [None] * 3
        space.clear()


def test_copies_that_f_has_stored_stay_whole():
    """They refer to each other, and would be emptied if nothing else referred to them."""
    seen = []
    module = Cyclic()
    module.register_forward_hook(lambda module, args, out: seen.append(module))
    remat(module)(torch.randn(2, 3)).sum().backward()
    assert len(seen) == 2 and seen[0] is module
    assert all(x.parts[0]["owner"] is x for x in seen)


def test_copies_do_not_pile_up_with_exceptions(monkeypatch):
    """Of recomputations that raise."""

    class Fails(Cyclic):
        def forward(self, x):
            if "FUNCCKPT_FAILS" in os.environ:
                raise ValueError("in f")
            return super().forward(x)

    module = Fails()
    y = remat(module)(torch.randn(2, 3)).sum()
    monkeypatch.setenv("FUNCCKPT_FAILS", "1")
    for _ in range(5):
        with contextlib.suppress(ValueError):
            y.backward(retain_graph=True)
    gc.collect()
    assert sum(type(x) is Fails for x in gc.get_objects()) == 1


WRAP = {
    "remat": remat,
    "policy": lambda f: remat(f, policy=policies.dots_saveable),
    "checkpoint": lambda f: lambda *args: checkpoint(f, *args),
}


def test_calls_share_what_they_have_found():
    """Of a long list each search has a copy."""
    history = [*map(float, range(10_000))]
    f = remat(lambda x: x.sin() + len(history))
    held = []
    for calls in (1, 20):
        x = torch.ones(2, requires_grad=True)
        tracemalloc.start()
        for _ in range(calls):
            x = f(x)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert held[1] < 3 * held[0]


def test_no_reference_cycle_after_an_error():
    """An exception that was handled: its traceback holds frames, which must not hold the exception."""

    def fails(x):
        raise ValueError("in f")

    def run(f):
        for name in ("backward", "grad", "vmap_grad"):
            with contextlib.suppress(ValueError):
                CALLS[name](f)

    tensors = lambda f: sum(issubclass(type(o), torch.Tensor) for o in cyclic_garbage(lambda: run(f)))
    assert tensors(remat(fails)) <= tensors(fails)


@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.everything_saveable])
def test_a_logged_statistic_keeps_nothing_that_a_policy_kept(policy):
    layer, log, live = nn.Linear(64, 64), [], []

    def f(x):
        y = layer(x)
        log.append(y.detach().norm())
        return y.exp().sin()

    with Meter() as meter:
        for _ in range(4):
            remat(f, policy=policy)(torch.ones(100, 64)).sum().backward()
            live.append(meter.live_bytes)
    assert live[-1] - live[0] < 1000, live
    gc.collect()
    assert not any(type(x) is Call for x in gc.get_objects())


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("how", ["last", "grad_sample"])
def test_attributes_of_a_weight_hold_no_calls_before(how, is_argument):
    """As without remat, the attribute holds the graph of one step, and that none of the step before."""
    w, x, made = nn.Parameter(tensor(3)), tensor(3, requires_grad=True), []
    for _ in range(5):
        y = remat(lambda x, w: (x * w).sin())(x, w) if is_argument else remat(lambda x: (x * w).sin())(x)
        kept = y * 1
        if how == "grad_sample":
            (kept,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        setattr(w, how, kept)
        made.append(weakref.ref(kept))
    del y, kept
    gc.collect()
    assert sum(ref() is not None for ref in made) == 1


def refers_to_its_loss(wrap, holder):
    """A step after which `holder` refers to a loss, and the function to `holder`."""
    w = nn.Parameter(tensor(3))
    holder.w = w

    def f(x):
        return torch.tanh(x * holder.w) if holder.__dict__.get("loss") is None else x

    holder.loss = wrap(f)(tensor(3)).square().sum()
    holder.loss.backward()


def collects_activations(wrap, holder):
    """A list in which a forward hook collects what an auxiliary loss needs."""
    net, holder.found = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), []
    net[0].register_forward_hook(lambda module, args, out: holder.found.append(out))
    y = wrap(net)(tensor(3))
    (y.square().sum() + holder.found[0].abs().sum()).backward()


def of_a_class_of_its_own(wrap, holder):
    class Block(nn.Module):
        def forward(self, x):
            return torch.tanh(x * holder.w)

    holder.w = nn.Parameter(tensor(3))
    wrap(Block())(tensor(3)).sum().backward()


def of_a_function_of_its_own(wrap, holder):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * holder.w.detach()

        @staticmethod
        def backward(ctx, g):
            return g * holder.w.detach()

    holder.w = nn.Parameter(tensor(3))
    wrap(lambda x: Scale.apply(x).exp())(tensor(3, requires_grad=True)).sum().backward()


BY_HOOKS = lambda f: lambda *args: checkpoint(f, *args)
LEFT = {
    "refers_to_its_loss-remat": (refers_to_its_loss, remat),
    "refers_to_its_loss-policy": (refers_to_its_loss, lambda f: remat(f, policy=policies.dots_saveable)),
    "refers_to_its_loss-hooks": (refers_to_its_loss, BY_HOOKS),
    "collects_activations-hooks": (collects_activations, BY_HOOKS),
    "of_a_class_of_its_own-remat": (of_a_class_of_its_own, remat),
    "of_a_class_of_its_own-policy": (
        of_a_class_of_its_own,
        lambda f: remat(f, policy=policies.dots_saveable),
    ),
    "of_a_function_of_its_own-policy": (
        of_a_function_of_its_own,
        lambda f: remat(f, policy=policies.dots_saveable),
    ),
    "of_a_class_of_its_own-hooks": (of_a_class_of_its_own, BY_HOOKS),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_f_refers_to_is_freed_after_the_backward(name):
    program, wrap = LEFT[name]

    def ended():
        holder = nn.Module()
        program(wrap, holder)
        return weakref.ref(holder)

    ref = ended()
    gc.collect()
    assert ref() is None


def test_what_a_graph_saves_can_be_looked_at():
    y = remat(torch.sin)(tensor(3, requires_grad=True))
    assert sorted(x.clone().numel() for x in y.grad_fn.saved_tensors) == [0, 3]
    y.sum().backward()


# In a thread with a small stack. (A chain of nodes that free each other inside of their ends overflows it.)
DEEP = """
import threading, torch
from torch.autograd import grad
from funcckpt import checkpoint, remat

def many(x):
    for _ in range(8_000):
        x = x.sin()
    return x.sum()

def steps(x):
    for _ in range(3_000):
        x = checkpoint(torch.sin, x)
    return x.sum()

def of(f, order=1):
    x = torch.ones(2, requires_grad=True)
    y = f(x)
    for _ in range(order - 1):
        y = grad(y, x, create_graph=True)[0].sum()
    done.append(grad(y, x))

def run():
    PROGRAM

done = []

threading.stack_size(512 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert done
"""


@pytest.mark.parametrize(
    "program", ["of(remat(many))", "of(remat(many), 2)", "of(steps)", "of(lambda x: checkpoint(many, x))"]
)
def test_deep_graphs_are_freed(program):
    subprocess.run([sys.executable, "-c", DEEP.replace("PROGRAM", program)], check=True)
