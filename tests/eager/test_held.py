"""What f finds elsewhere than among its arguments: in the recomputation as in the forward, or an error.

Torch's checkpoint gives other gradients in these cases, without a word, where not said otherwise.
"""

import functools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn

from funcckpt import checkpoint
from funcckpt.errors import MutationError

from .implementations import D, leaf, plain

# -- changed in place before the backward ----------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=D)
        self.position = nn.Parameter(torch.zeros(2, 3, dtype=D))
        self.frozen = nn.Parameter(torch.zeros(2, 3, dtype=D), requires_grad=False)
        self.table = torch.zeros(2, 3, dtype=D)
        self.register_buffer("large", torch.zeros(2, 3, dtype=D).repeat(1, 2**15)[:, :70_000])

    def forward(self, x, what):
        part = getattr(self, what)
        part = part(x) - x if what == "linear" else part[:, :3]
        return (x + part).tanh().exp()


class Plain:
    pass


@pytest.mark.parametrize("what", ["position", "frozen", "table", "large"])
@pytest.mark.parametrize("way", ["module", "method", "lambda", "partial", "list", "object", "argument"])
def test_what_autograd_does_not_save_is_looked_after(way, what):
    model, x = Model(), leaf(2, 3)
    there = Plain()
    there.parts = {"m": [model]}
    f, args = {
        "module": (model, (x, what)),
        "method": (model.forward, (x, what)),
        "lambda": (lambda x: model(x, what), (x,)),
        "partial": (functools.partial(model, what=what), (x,)),
        "list": (lambda x, ms=[model]: ms[0](x, what), (x,)),
        "object": (lambda x: there.parts["m"][0](x, what), (x,)),
        "argument": (lambda m, x: m(x, what), (model, x)),
    }[way]
    y = checkpoint(f, *args)
    with torch.no_grad():
        getattr(model, what).add_(1)
    with pytest.raises(MutationError, match="in place since the forward"):
        y.sum().backward()
    assert checkpoint(f, *args).sum().backward() is None


BIAS = nn.Parameter(torch.zeros(3, dtype=D))


def of_a_class(bias):
    class OfClass(nn.Module):
        own = bias

        def forward(self, x):
            return (x + self.own).tanh().exp()

    return OfClass()


def of_a_hook(bias):
    linear = nn.Linear(3, 3, dtype=D)
    linear.register_forward_hook(lambda module, args, out: (out + bias).tanh().exp())
    return nn.Sequential(linear)


def of_a_hook_of_all(bias, request):
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: (out + bias).tanh().exp())
    request.addfinalizer(hook.remove)
    return nn.Tanh()


HIDDEN = {
    "global": lambda bias: lambda x: (x + BIAS).tanh().exp(),
    "closure": lambda bias: lambda x: (x + bias).tanh().exp(),
    "class": of_a_class,
    "hook": of_a_hook,
    "looked up": lambda bias: lambda x: (x + globals()["BIAS"]).tanh().exp(),
}


@pytest.mark.parametrize("way", [*HIDDEN, "global hook"])
def test_a_hidden_leaf_that_was_changed(way, request):
    f = of_a_hook_of_all(BIAS, request) if way == "global hook" else HIDDEN[way](BIAS)
    y = checkpoint(f, leaf(2, 3))
    with torch.no_grad():
        BIAS.add_(1)
    with pytest.raises(MutationError, match="in place since the forward"):
        y.sum().backward()


def test_changed_and_not_needed_is_no_error():
    w, b, x = leaf(3, 3), leaf(3), leaf(2, 3)
    y = checkpoint(lambda x: (x @ w).tanh() @ w + b + b.numel(), x)
    expected = torch.autograd.grad(((x @ w).tanh() @ w).sum(), [x, w])
    with torch.no_grad():
        b.add_(1)
    assert_same(torch.autograd.grad(y.sum(), [x, w]), expected)


def test_the_check_can_be_switched_off():
    p, x = leaf(3), leaf(3)
    y = checkpoint(lambda x: (x + p).tanh().exp(), x, determinism_check="none")
    with torch.no_grad():
        p.add_(1)
    y.sum().backward()


# -- put back ----------------------------------------------------------------------------------------


def test_a_state_that_f_replaces():
    """Whose graph leads from call to call. Under `remat` it would have to be returned."""

    def run(call):
        torch.manual_seed(0)
        cell, x = nn.GRUCell(4, 4, dtype=D), leaf(2, 4)
        cell.h = x * 0.5

        def step(x):
            cell.h = cell(x, cell.h)
            return cell.h * 2

        y = call(step, call(step, call(step, x)))
        return torch.autograd.grad(y.sum(), x, retain_graph=True), torch.autograd.grad(y.sum(), x)

    assert_same(run(checkpoint), run(plain))


def test_a_result_that_was_replaced():
    """What is not part of the graph of f is kept without its own graph."""
    x = leaf(3)
    state = {"h": x.sin()}
    owned = Plain()  # by its node
    node, state["h"].grad_fn.metadata["owned"] = weakref.ref(owned), owned
    del owned
    y = checkpoint(lambda x: (x * state["h"].detach()).exp(), x)
    state["h"] = x.cos()
    assert node() is None
    assert_same(torch.autograd.grad(y.sum(), x)[0], (y * x.sin()).detach())


# -- started anew -------------------------------------------------------------------------------------


def test_statistics_where_f_uses_a_transform():
    """Under hooks torch.func refuses, so that f is run again, as remat."""

    def run(call):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(3, dtype=D), leaf(8, 3)

        def f(x):
            return norm(x) * torch.func.grad(lambda z: z.sin().sum())(x)

        y = call(f, x)
        y.sum().backward()
        return [x.grad, *norm.buffers()]

    assert_same(run(checkpoint), run(plain))


def test_what_cannot_be_put_back_before_f_is_started_anew():
    state, x = torch.zeros(3, dtype=D), leaf(3)

    def f(x):
        state.add_(1)
        return torch.func.grad(lambda z: z.sin().sum())(x + state)

    with pytest.raises(MutationError, match="Use funcckpt"):
        checkpoint(f, x)


# -- what a recomputation would do a second time ------------------------------------------------------


def test_a_backward_inside_of_what_f_has_made():
    def f(x):
        inner = x.detach().requires_grad_()
        (inner.sin() ** 2).sum().backward()
        return x.sin() * inner.grad

    x = leaf(2, 3)
    assert_same(torch.autograd.grad(checkpoint(f, x).sum(), x), torch.autograd.grad(f(x).sum(), x))


# -- made by f itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_that_f_makes(requires_grad):
    """Right with torch's."""

    def f(x):
        w = nn.Parameter(torch.eye(3, dtype=D) * 2, requires_grad=requires_grad)
        return F.linear(x, w).sin()

    x = leaf(2, 3)
    assert_same(torch.autograd.grad(checkpoint(f, x).sum(), x), torch.autograd.grad((x * 2).sin().sum(), x))


# -- random streams ------------------------------------------------------------------------------------


def test_a_region_that_draws_nothing_leaves_the_streams_alone(monkeypatch):
    from funcckpt import world

    touched = []
    set_streams = world.set_streams
    monkeypatch.setattr(world, "set_streams", lambda states: (touched.extend(states), set_streams(states)))
    x = leaf(3)
    checkpoint(lambda x: x.sin().exp(), x).sum().backward()
    assert not touched
    checkpoint(lambda x: F.dropout(x).exp(), x).sum().backward()
    assert len(touched) == 2


def test_backwards_in_threads_replay_their_own_numbers():
    x = leaf(50, 50)
    inner = lambda x: F.dropout(x.sin()).exp()
    ys = [checkpoint(lambda x: checkpoint(inner, x).cos() * x, x) for _ in range(4)]
    expected = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in ys]
    different = []

    def run(i):
        for _ in range(15):
            (g,) = torch.autograd.grad(ys[i].sum(), x, retain_graph=True)
            if not torch.equal(g, expected[i]):
                different.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not different
