"""Nothing is kept that nobody needs: not by calls, not by graphs that are dropped, not in reference
cycles.
"""

import collections
import contextlib
import gc
import inspect
import itertools
import weakref

import pytest
import torch
from oracles import (
    Births,
    cyclic_garbage,
    frozen_heap,
    no_gc,
    plain,
    population,
    tensor,
    total,
)
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from funcckpt import FuncckptError, remat

W = tensor(3, seed=1)


def body(x):
    h = torch.tanh(x * 2)
    return (h * h).sin() * x


def backward(f):
    x = tensor(3, requires_grad=True)
    total(f(x)).backward()


def dropped(f):
    f(tensor(3, requires_grad=True))


def double_backward(f):
    x = tensor(3, requires_grad=True)
    (g,) = torch.autograd.grad(total(f(x)), x, create_graph=True)
    torch.autograd.grad(total(g), x)


def pullback_dropped(f):
    vjp(f, tensor(3))


CALLS = {
    "no_grad": lambda f: f(tensor(3)),
    "dropped": dropped,
    "backward": backward,
    "double_backward": double_backward,
    "grad": lambda f: grad(lambda x: total(f(x)))(tensor(3)),
    "vmap": lambda f: vmap(f)(tensor(2, 3)),
    "jvp": lambda f: jvp(f, (tensor(3),), (tensor(3),)),
    "vmap_grad": lambda f: vmap(grad(lambda x: total(f(x))))(tensor(2, 3)),
    "grad_grad": lambda f: grad(lambda x: total(grad(lambda x: total(f(x)))(x)))(tensor(3)),
    "vjp": lambda f: vjp(f, tensor(3))[1](tensor(3)),
    "pullback_dropped": pullback_dropped,
    "jacrev": lambda f: jacrev(f)(tensor(3)),
    "hessian": lambda f: hessian(lambda x: total(f(x)))(tensor(3)),
}


def closing_over(wrap):
    w = W.clone().requires_grad_()
    return lambda x: wrap(lambda x: body(x * w))(x)


def in_module(wrap):
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())


def functional(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    params = {k: v.detach() for k, v in model.named_parameters()}
    return lambda x: wrap(lambda p, x: functional_call(model, p, (x,)))(params, x)


FUNCTIONS = {
    "plain": lambda wrap: wrap(body),
    "new_each_time": lambda wrap: lambda x: wrap(lambda x: body(x))(x),
    "closure": closing_over,
    "module": in_module,
    "functional_call": functional,
    "nested": lambda wrap: wrap(lambda x: wrap(body)(x) * x),
    "values": lambda wrap: wrap(body, determinism_check="values"),
}


@pytest.fixture(scope="module", autouse=True)
def fast_collector():
    for call in CALLS.values():  # torch imports much when it is first used
        call(remat(body))
    with frozen_heap():
        yield


# ---------------------------------------------------------------- many calls


def growth(run, calls):
    """By how much (tensors, objects) grew over the later nine tenths of the calls.

    The collector is off while tensors are counted. It may then free what remains: cycles of torch's
    own functions, which all of torch.func leaves behind, and which hold no tensor.
    """
    with no_gc():
        for n in range(calls):
            run()
            if n == calls // 10:
                tensors, _ = population()
                gc.collect()
                _, objects = population()
        tensors_later, _ = population()
        gc.collect()
        _, objects_later = population()
    return tensors_later - tensors, objects_later - objects


@pytest.mark.parametrize(
    ("call", "calls"), [("backward", 5000), ("grad", 2500), ("vmap_grad", 1250), ("jvp", 1250)]
)
def test_ten_thousand_calls(call, calls):
    """Ten thousand together."""
    f = remat(body)
    tensors, objects = growth(lambda: CALLS[call](f), calls)
    assert tensors <= 0
    assert objects < 100  # caches of the interpreter, not one object a call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_leave_nothing(function, call):
    """A remat made anew for each of 30 calls."""
    CALLS[call](FUNCTIONS[function](remat))
    tensors, objects = growth(lambda: CALLS[call](FUNCTIONS[function](remat)), 30)
    assert tensors <= 0
    assert objects < 20


def test_errors_leave_nothing():
    def fails(x):
        y = body(x)
        raise ValueError(y.shape)

    def changes(x):
        return x[: next(lengths)].sin()

    def run():
        nonlocal lengths
        for transform in (backward, CALLS["grad"], CALLS["vmap_grad"], CALLS["jvp"]):
            lengths = itertools.chain([3, 2, 1])
            for f in (fails, changes):
                with contextlib.suppress(ValueError, FuncckptError):
                    transform(remat(f))
        gc.collect()  # a traceback is a cycle with its frames, in plain torch as well

    lengths = None
    tensors, objects = growth(run, 30)
    assert tensors <= 0
    assert objects < 20


# ---------------------------------------------------------------- what lives between forward and
# backward


def test_input_is_freed_by_the_backward():
    with no_gc():
        x = tensor(3, requires_grad=True)
        h = x * 2
        ref = weakref.ref(h)
        y = remat(body)(h)
        del h
        assert ref() is not None
        total(y).backward()
        assert ref() is None


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


def test_a_call_under_no_grad_keeps_nothing():
    with no_gc(), torch.no_grad():
        x = tensor(3)
        ref = weakref.ref(x)
        y = remat(body)(x)
        del x
        assert ref() is None
        del y


# ---------------------------------------------------------------- graphs dropped without a backward


def graph_eager(wrap, f, x):
    return wrap(f)(x.requires_grad_() * 1)


def graph_captured(wrap, f, x):
    w = x.requires_grad_() * 1
    return wrap(lambda: f(w))()


def graph_double(wrap, f, x):
    x.requires_grad_()
    return torch.autograd.grad(total(wrap(f)(x * 1)), x, create_graph=True)


def graph_chain(wrap, f, x):
    y = x.requires_grad_() * 1
    for _ in range(3):
        y = wrap(f)(y)
    return y


def graph_nested(wrap, f, x):
    return wrap(lambda x: wrap(f)(f(x)))(x.requires_grad_() * 1)


def graph_of_transform(wrap, f, x):
    return grad(lambda x: total(wrap(f)(x)))(x.requires_grad_() * 1)


def graph_of_vmap(wrap, f, x):
    return vmap(wrap(f))(torch.stack([x.requires_grad_(), x]))


def graph_of_values(wrap, f, x):
    return wrap(f, determinism_check="values")(x.requires_grad_() * 1)


GRAPHS = {
    f.__name__: f
    for f in (
        graph_eager, graph_captured, graph_double, graph_chain, graph_nested, graph_of_transform,
        graph_of_vmap, graph_of_values,
    )
}  # fmt: skip


@pytest.mark.parametrize("graph", GRAPHS)
def test_dropped_graph_frees_everything(graph):
    """By reference counts alone: the collector is off. What plain torch leaves to the collector is
    not asked for.
    """

    def left(wrap):
        with no_gc():
            with Births() as births:
                out = GRAPHS[graph](wrap, body, tensor(3))
                assert births.alive()
                del out
            return births.alive()

    left(remat)  # caches of torch
    assert len(left(remat)) <= len(left(plain))


@pytest.mark.parametrize("graph", GRAPHS)
def test_dropped_graph_frees_its_input(graph):
    with no_gc():
        x = tensor(3)
        ref = weakref.ref(x)
        out = GRAPHS[graph](remat, body, x)
        del x
        assert ref() is not None
        del out
        assert ref() is None


def test_remat_object_holds_no_argument():
    """The decorated function may live as long as the program; its arguments must not."""
    f = remat(body)
    with no_gc():
        x = tensor(3, requires_grad=True)
        ref = weakref.ref(x)
        y = f(x)
        total(y).backward()
        del x, y
        assert ref() is None


# ---------------------------------------------------------------- cycles


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
def test_no_reference_cycles(function, call):
    """No object that plain torch does not leave to the collector as well."""

    def garbage(wrap):
        f = FUNCTIONS[function](wrap)
        CALLS[call](f)
        return cyclic_garbage(lambda: CALLS[call](f))

    got, want = garbage(remat), garbage(plain)
    assert not ours(got), ours(got)
    # torch's own tree_flatten leaves a function that refers to itself; it holds nothing of the
    # call.
    functions = collections.Counter(o.__qualname__ for o in got if inspect.isfunction(o))
    functions -= collections.Counter(o.__qualname__ for o in want if inspect.isfunction(o))
    assert functions.keys() <= {"tree_flatten.<locals>.helper"}, functions


def test_no_reference_cycle_after_an_error():
    """An exception that was handled: its traceback holds frames, and the frames must not hold the
    exception.
    """

    def fails(x):
        raise ValueError("in f")

    def run(f):
        for transform in (backward, CALLS["grad"], CALLS["vmap_grad"]):
            with contextlib.suppress(ValueError):
                transform(f)

    tensors = lambda items: sum(issubclass(type(o), torch.Tensor) for o in items)
    got, want = cyclic_garbage(lambda: run(remat(fails))), cyclic_garbage(lambda: run(fails))
    assert tensors(got) <= tensors(want), ours(got)


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("how", ["last", "grad_sample"])
def test_attributes_of_a_weight_hold_no_calls_before(how, kind, is_argument):
    """As without remat, the attribute holds the graph of one step, and that none of the step before."""
    w, x, made = tensor(3, requires_grad=True), tensor(3, requires_grad=True), []
    w = w if kind is torch.Tensor else kind(w)
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
