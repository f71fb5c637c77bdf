"""Programs that users wrote, and that once were wrong, each compared with itself without remat."""

import functools
import subprocess
import sys
import types

import pytest
import torch
from oracles import F64, tensor
from support import assert_same, no_remat
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vmap,
)

import funcckpt
from funcckpt import ClosureError, inner_grad, policies, scan
from funcckpt.nn import Remat


def same(run, times=1):
    """`run(remat)` is as `run(no_remat)`: values, and whether results require grad."""
    for _ in range(times):
        torch.manual_seed(0)
        expected = run(no_remat)
        torch.manual_seed(0)
        assert_same(run(funcckpt.remat), expected)


def made(kind, *args, **kwargs):
    torch.manual_seed(3)
    return kind(*args, **kwargs, dtype=F64)


def alone(program):
    """Run a program in a process of its own: one that fails may crash, or never end."""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# -- recurrent cells write in place into what `unsafe_split` gave ------------------------------------


PENALTY = """
import torch
from torch import nn
from torch.func import functional_call
from funcckpt import policies, remat

torch.manual_seed(0)
cell = nn.LSTMCell(4, 4, dtype=torch.float64)
xs = torch.randn(2, 2, 4, dtype=torch.float64)

def run(remat):
    step = remat(lambda p, x, h: functional_call(cell, p, (x, h)), policy=policies.dots_saveable)

    def segment(p, xs, h):
        for x in xs:
            h = step(p, x, h)
        return h

    p = {name: x.detach().clone().requires_grad_() for name, x in cell.named_parameters()}
    leaf = xs.clone().requires_grad_()
    out = remat(segment)(p, leaf, (torch.zeros_like(xs[0]), torch.zeros_like(xs[0])))
    (g,) = torch.autograd.grad(sum(y.sin().sum() for y in out), leaf, create_graph=True)
    return torch.autograd.grad(g.pow(2).sum(), list(p.values()))

for actual, expected in zip(run(remat), run(lambda f, policy=None: f)):
    torch.testing.assert_close(actual, expected)
"""


def test_gradient_penalty_through_a_recurrent_cell_ends():
    alone(PENALTY)


def test_gradient_penalty_through_unsafe_chunk():
    w = tensor(4, 6, requires_grad=True)

    def run(remat):
        def gates(x):
            a, b, c = torch.mm(x, w).unsafe_chunk(3, 1)
            return torch.cat([a.sigmoid_(), b.tanh_()], 1) * c.sigmoid_().repeat(1, 2)

        step = remat(gates, policy=policies.dots_saveable)
        leaf = tensor(2, 4, requires_grad=True)
        out = remat(lambda x: step(step(x)))(leaf)
        (g,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), w)

    same(run)


# -- a module that is called again -------------------------------------------------------------------


# -- a captured tensor that f does not use is no input -------------------------------------------------


NET = made(nn.Linear, 2, 1)
X = tensor(5, 2)


def _loss(remat):
    return remat(lambda p: functional_call(NET, p, (X,)).pow(2).sum())


def _scanned(remat):
    def f(p):
        step = lambda h, _: (h + functional_call(NET, p, (X,)).pow(2).sum(), None)
        if remat is not no_remat:
            return scan(step, torch.zeros((), dtype=F64), length=3)[0]
        return 3 * functional_call(NET, p, (X,)).pow(2).sum()

    return grad(f)


def _inner(remat):
    gradient = grad if remat is no_remat else inner_grad
    return grad(lambda p: gradient(_loss(no_remat))(p)["weight"].pow(2).sum())


def _checkpointed(remat):
    f = _loss(no_remat)
    return grad(f if remat is no_remat else lambda p: funcckpt.checkpoint(f, p))


REPLACED = {
    "grad": lambda remat: grad(_loss(remat)),
    "grad_grad": lambda remat: grad(lambda p: grad(_loss(remat))(p)["weight"].pow(2).sum()),
    "hessian": lambda remat: hessian(_loss(remat)),
    "nested": lambda remat: grad(remat(_loss(remat))),
    "policy": lambda remat: grad(_loss(functools.partial(remat, policy=policies.dots_saveable))),
    "net_as_argument": lambda remat: grad(
        lambda p: remat(lambda net, p: functional_call(net, p, (X,)).pow(2).sum())(NET, p)
    ),
    "vmap_grad": lambda remat: (
        lambda p: vmap(grad(_loss(remat)))({k: torch.stack([x, x]) for k, x in p.items()})
    ),
    "checkpoint": _checkpointed,
    "scan": _scanned,
    "inner_grad": _inner,
}


@pytest.mark.parametrize("way", REPLACED)
def test_replaced_parameters_are_no_inputs(way):
    """`functional_call` replaces the parameters, which require grad, before anything uses them."""
    same(lambda remat: REPLACED[way](remat)(parameters(NET)))


@pytest.mark.parametrize("way", ["grad", "scan", "inner_grad"])
def test_a_training_loop_holds_no_history(way):
    """No result has a graph, so that none is kept alive."""
    p = parameters(NET)
    for _ in range(3):
        g = REPLACED[way](funcckpt.remat)(p)
        p = {name: x - 0.1 * g[name] for name, x in p.items()}
    assert all(x.grad_fn is None for x in p.values())


def test_a_captured_tensor_that_is_used_is_an_input():
    def run(remat):
        loss = remat(lambda p: functional_call(NET, p, (X,)).pow(2).sum() * NET.weight.sum())
        g = grad(loss)(parameters(NET))
        return g, torch.autograd.grad(g["bias"].sum(), NET.weight)

    same(run)


# -- an instance with its own forward --------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = made(nn.Linear, 3, 3)

    def forward(self, x):
        return self.linear(x).tanh()


def _by_lambda(block):
    old = block.forward
    block.forward = lambda x: old(x) * 2


def _by_partial(block):
    old = block.forward

    def new_forward(module, *args):
        return old(*args) * 2

    block.forward = functools.update_wrapper(functools.partial(new_forward, block), old)


def _by_method(block):
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, block)


@pytest.mark.parametrize("patch", [_by_lambda, _by_partial, _by_method])
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_forward_of_an_instance(patch, transform):
    block = Block()
    patch(block)
    x = tensor(2, 3)

    def run(remat):
        f = remat(block)
        if transform == "grad":
            return grad(lambda p: remat(lambda p: functional_call(block, p, (x,)).sum())(p))(
                parameters(block)
            )
        block.zero_grad()
        out = f(x)
        out.sum().backward()
        return out, [p.grad for p in block.parameters()]

    same(run, times=2)


# -- what torch's modules do in their first call, and where they return nothing ----------------------------


def test_lstm_in_float32():
    net, x = nn.LSTM(3, 3), torch.randn(2, 4, 3)
    p = parameters(net)

    def g(remat):
        return grad(lambda p: remat(lambda p: functional_call(net, p, (x,)))(p)[0].sum())(p)

    expected, actual = g(no_remat), g(funcckpt.remat)
    for name in p:
        torch.testing.assert_close(actual[name], expected[name])


@pytest.mark.parametrize("by", ["remat", "nn.Remat", "checkpoint"])
def test_lazy_module(by):
    x = tensor(2, 3)

    def run(remat):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LazyLinear(4, dtype=F64), nn.Tanh(), nn.LazyLinear(2, dtype=F64))
        if remat is no_remat:
            f = net
        else:
            f = {
                "remat": funcckpt.remat,
                "nn.Remat": Remat,
                "checkpoint": lambda net: functools.partial(funcckpt.checkpoint, net),
            }[by](net)
        results = []
        for _ in range(3):
            net.zero_grad()
            out = f(x)
            out.sum().backward()
            results.append((out, [p.grad for p in net.parameters()]))
        return results

    same(run)


# -- a graph made outside ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    ["plain", "vmap", "vmap_jvp"],
)
def test_gradient_of_a_graph_made_outside(transform):
    """Right, or an error that says what to do."""
    w = tensor(3, 3, requires_grad=True)
    unused = tensor(2, requires_grad=True)

    def run(remat):
        out = (w @ w).sin().sum(0)
        f = remat(lambda v: torch.autograd.grad(out, [w, unused], v, allow_unused=True, retain_graph=True))
        vs = torch.eye(3, dtype=F64)
        if transform == "plain":
            return f(vs[0])
        if transform == "vmap":
            return vmap(lambda v: f(v)[:1])(vs)
        return vmap(lambda v: jvp(lambda v: f(v)[:1], (v,), (v,)))(vs)

    try:
        same(run)
    except ClosureError as error:
        assert "outside" in str(error)


# -- zeros that autograd makes without memory ----------------------------------------------------------------


ZEROS = """
import torch
from torch.func import jvp, vmap
from funcckpt import remat

def f(p, x):
    h = torch.sigmoid(p["w"] @ x * 0.5)
    return h, 2 * h

def run(remat):
    torch.manual_seed(0)
    w = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    g = vmap(remat(f), (0, None))
    def once(p, x, g):
        return jvp(lambda p: g(p, x), (p,), ({"w": torch.cos(p["w"])},))[1]
    twice = once({"w": w}, x, lambda p, x: once(p, x, g))
    out = sum(y.tanh().sum() for y in torch.utils._pytree.tree_leaves(twice))
    first = torch.autograd.grad(out, (w, x), create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), (w, x))

for actual, expected in zip(run(remat), run(lambda f: f)):
    torch.testing.assert_close(actual, expected)
"""


def test_tangents_that_are_zero_below_a_double_backward():
    alone(ZEROS)


# -- small ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: funcckpt.remat(f),
        lambda f: funcckpt.remat(funcckpt.remat(f)),
        lambda f: funcckpt.remat(f, policy=policies.dots_saveable),
    ],
    ids=["remat", "nested", "policy"],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_captured_tensor_that_is_returned(wrap, requires_grad):
    c, w = tensor(3, requires_grad=requires_grad), tensor(3, requires_grad=True)
    returned, _ = wrap(lambda w: (c, w * c))(w)
    assert returned is c


@pytest.mark.parametrize("transform", [lambda f: hessian(lambda x: f(x).sum()), jacrev])
def test_a_write_to_what_no_output_depends_on(transform):
    """It has its tangents: torch takes what has none for zeros, which cannot be written to."""

    def run(wrap):
        def f(x):
            def g(p):
                t = x * p
                t.sin_()
                t[1:].tanh_()
                return p * 2.0

            return jvp(wrap(g), (x,), (x,))[0]

        return jacfwd(transform(f))(tensor(3))

    same(run)
