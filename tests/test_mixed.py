"""`inner_grad` against `torch.func.grad`: the same values and derivatives of every order in float64, and
less memory and fewer operations for the first.
"""

import doctest
import functools
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import assert_same
from test_scan import tensor
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.nn import functional as F
from torch.nn.functional import dropout

from funcckpt import InputError, inner_grad, remat, scan
from funcckpt.errors import ClosureError
from funcckpt.meter import measure

F64 = torch.float64


W, X, ETA, V = tensor(4, 3, seed=1), tensor(4, seed=2), torch.tensor(0.3, dtype=F64), tensor(4, 3, seed=3)
XS = torch.stack([X, 2 * X])


def step(gradient, w, x, eta):
    """A gradient step whose loss captures x and eta, has an argument that is not differentiated, and
    a parameter on which it does not depend."""

    def loss(p, scale):
        return (torch.tanh(x @ p["w"] * eta * scale) ** 2).sum() + (p["b"] * eta).sin().sum() * x.cos().sum()

    p = {"w": w, "b": x.cumsum(0), "unused": x}
    g = gradient(loss)(p, 1.5)
    return (g["w"] ** 2).sum() + (g["b"] * x).sum() + g["unused"].sum()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_hooks_around_the_call_hide_no_tensor(is_leaf):
    """They give another tensor for one that is saved at a level: right, or an error."""

    def run(gradient):
        x, w = X.clone().requires_grad_(), X.cos().requires_grad_()
        c = w if is_leaf else w * 1
        with torch.autograd.graph.save_on_cpu():
            y = gradient(lambda y: torch.sin(c * y).sum())(x)
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, w], allow_unused=True)

    try:
        found = run(inner_grad)
    except ClosureError:
        return
    x, w = X.clone().requires_grad_(), X.cos().requires_grad_()
    y = torch.cos(w * x) * w
    first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
    assert_same(found, torch.autograd.grad(sum(g.square().sum() for g in first), [x, w]))


def plain_forward_mode(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(W, V), forward_ad.make_dual(X, X), ETA))


TRANSFORMS = {
    "value": lambda f: f(W, X, ETA),
    "grad": lambda f: grad(f, (0, 1, 2))(W, X, ETA),
    "vjp": lambda f: vjp(f, W, X, ETA)[1](ETA),
    "vmap": lambda f: vmap(f, (None, 0, None))(W, XS, ETA),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1, 2)), (None, 0, None))(W, XS, ETA),
    "vmap of grad, captured batched": lambda f: vmap(grad(f, (0, 1, 2)), (None, None, 0))(W, X, XS[:, 0]),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, (None, 0, None))(w, XS, ETA).sum())(W),
    "vmap in vmap": lambda f: vmap(vmap(grad(f), (None, 0, None)), (2, None, None))(
        torch.stack([W, V], 2), XS, ETA
    ),
    "jvp": lambda f: jvp(f, (W, X, ETA), (V, X, ETA)),
    "hvp": lambda f: jvp(grad(f), (W, X, ETA), (V, X, ETA)),
    "grad of grad": lambda f: grad(lambda w: (grad(f, 1)(w, X, ETA) * X).sum())(W),
    "hessian": lambda f: hessian(f)(W, X, ETA),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 1), 1)(W, X, ETA),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 2), 1)(W, X, ETA),
    "linearize": lambda f: linearize(f, W, X, ETA)[1](V, X, ETA),
    "plain forward mode": lambda f: plain_forward_mode(f),
    "functionalize of grad": lambda f: functionalize(grad(f))(W, X, ETA),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize itself
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["", "in remat"])
def test_transforms(transform, wrap):
    run = TRANSFORMS[transform]
    got = run(wrap(lambda *args: step(inner_grad, *args)))
    assert_same(got, run(lambda *args: step(grad, *args)))


def test_eager_backward_of_three_orders():
    def run(gradient):
        leaves = [t.clone().requires_grad_() for t in (W, X, ETA)]
        first = torch.autograd.grad(step(gradient, *leaves), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves, create_graph=True)
        sum((g * g).sum() for g in second).backward()
        return [[g.detach() for g in gs] for gs in (first, second, [leaf.grad for leaf in leaves])]

    assert_same(run(inner_grad), run(grad))


def test_without_grad_mode_and_without_anything_to_differentiate():
    with torch.no_grad():
        assert_same(step(inner_grad, W, X, ETA), step(grad, W, X, ETA))
    assert not step(inner_grad, W, X, ETA).requires_grad


def test_argnums_and_the_same_tensor_in_several_places():
    loss = lambda a, b, c: (a * b["x"] ** 2 * c.sin() * W.sum(1)).sum()

    def run(gradient):
        def f(x):
            ga, gb = gradient(loss, (0, 1))(x, {"x": x}, x)
            return (ga * x).sum() + gradient(loss, -1)(x, {"x": x}, x).sin().sum() + (gb["x"] ** 2).sum()

        return grad(f)(X), hessian(f)(X), gradient(loss, (0, 1))(X, {"x": X}, X)

    assert_same(run(inner_grad), run(grad))


def test_aux():
    """Differentiated like the gradient, and from the arguments alone."""

    def meta(gradient, rate):
        w, total = W, 0.0
        for _ in range(3):
            g, (hidden, other) = gradient(lambda w: deep(w), has_aux=True)(w)
            w, total = w - rate * g, total + hidden.sum() + other["w"].square().sum()
        return total

    def deep(w):
        h = W
        for _ in range(6):
            h = torch.tanh(h @ w.T @ w)
        return h.square().mean(), (h.mean(0), {"w": w})

    ours, theirs = (measure(grad(functools.partial(meta, f)), ETA) for f in (inner_grad, grad))
    assert_same(ours.result, theirs.result)
    assert_same(*(hessian(functools.partial(meta, f))(ETA) for f in (inner_grad, grad)))
    assert ours.peak_bytes < 0.6 * theirs.peak_bytes


def test_an_argument_that_is_captured_as_well_is_constant_there():
    def f(gradient, x):
        return gradient(lambda a: (a * x * x).sum())(x).sum()

    assert_same(grad(lambda x: f(inner_grad, x))(X), grad(lambda x: f(grad, x))(X))
    assert_same(hessian(lambda x: f(inner_grad, x))(X), hessian(lambda x: f(grad, x))(X))


def test_parameters_of_a_module():
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.SiLU(), torch.nn.Linear(5, 1)).to(F64)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    module.requires_grad_(False)
    x = tensor(6, 4)

    def after(gradient, parameters):
        loss = lambda p: functional_call(module, p, (x,)).square().mean()
        gradients = gradient(loss)(parameters)
        return loss({name: p - 0.1 * gradients[name] for name, p in parameters.items()})

    assert_same(grad(lambda p: after(inner_grad, p))(parameters), grad(lambda p: after(grad, p))(parameters))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_of_the_loss_are_drawn_again(randomness):
    x = tensor(50)

    def f(gradient, w):
        return (gradient(lambda w: (dropout(w * x, 0.4) ** 3).sum())(w) ** 2).sum()

    def run(gradient, transform):
        torch.manual_seed(5)
        return transform(lambda w: f(gradient, w)), torch.rand(1)

    w = tensor(50, seed=9)
    for transform in (
        lambda f: grad(f)(w),
        lambda f: jacrev(f)(w),
        lambda f: vmap(grad(f), randomness=randomness)(torch.stack([w, w])),
        lambda f: vmap(lambda _: f(w), randomness=randomness)(torch.zeros(3)),
        lambda f: jvp(f, (w,), (w,)),
    ):
        assert_same(run(inner_grad, transform), run(grad, transform))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: inner_grad(lambda w: w)(X), r"returned float64\[4\] on cpu, not a real scalar"),
        (lambda: inner_grad(lambda w: 1.0)(X), r"returned a float, not a real scalar"),
        (lambda: inner_grad(lambda w: w.sum(), 1)(X), r"argnums=1, but there are 1 arguments"),
        (
            lambda: inner_grad(lambda w: w["a"].sum())({"a": torch.arange(3)}),
            r"argument 0\['a'\] is int64\[3\] on cpu, which has no gradient",
        ),
        (lambda: inner_grad(lambda w, b: w.sum(), (0, 1))(X, 2.0), r"argument 1 is a float"),
        (lambda: inner_grad(X), "inner_grad takes a callable, not Tensor"),
        (lambda: inner_grad(lambda w: w.sum(), 1.0), r"argnums=1.0 is not an int or a tuple of ints"),
    ],
)
def test_wrong_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


def bilevel(gradient, wrap, steps, layers=8, width=16, batch=128):
    """The gradient through some steps, with one rate a layer, of a deep network."""
    p = [tensor(width, width, seed=i) / width**0.5 for i in range(layers)]
    x, y = tensor(batch, width, seed=50), tensor(batch, width, seed=51)

    def loss(p):
        h = x
        for w in p:
            h = torch.nn.functional.gelu(h @ w)
        return ((h - y) ** 2).mean()

    def meta(rates):
        def one(p, _):
            return [w - r * g for w, r, g in zip(p, rates, gradient(loss)(p))], None

        if wrap is None:
            end = p
            for _ in range(steps):
                end, _ = one(end, None)
        else:
            end, _ = scan(one, p, length=steps, **wrap)
        return loss(end)

    return measure(grad(meta), torch.full((layers,), 0.1, dtype=F64))


@pytest.mark.parametrize(
    ("wrap", "memory", "flops"),
    [(None, 0.2, 1.25), ({"checkpoints": 3}, 0.45, 1.2)],
    ids=["unrolled", "binomial"],
)
def test_less_memory_than_reverse_over_reverse(wrap, memory, flops):
    mixed, reverse = bilevel(inner_grad, wrap, 6), bilevel(grad, wrap, 6)
    assert_same(mixed.result, reverse.result)
    assert mixed.peak_bytes < reverse.peak_bytes * memory
    assert mixed.flops < reverse.flops * flops


def test_the_example():
    assert doctest.testmod(sys.modules["funcckpt.loops.mixed"]).failed == 0


def nested(gradient):
    """An inner loop whose learning rate is learned by a loop, through which one differentiates."""

    def middle(rate):
        w = X
        for _ in range(2):
            w = w - rate * gradient(lambda w: (torch.sin(w * rate) ** 2).sum() + (w * rate).cos().sum())(w)
        return (w.sin() ** 2).sum()

    def outer(rate):
        for _ in range(2):
            rate = rate - 0.1 * gradient(middle)(rate)
        return middle(rate)

    return grad(outer)(ETA), hessian(outer)(ETA)


def test_inner_gradients_in_inner_gradients():
    assert_same(nested(inner_grad), nested(grad))


@pytest.mark.parametrize("gradient", [grad, inner_grad])
def test_with_remat_inside_of_the_loss(gradient):
    def after(gradient, wrap, rate):
        block = lambda h, w: torch.tanh(h @ w)

        def loss(ws):
            h = XS
            for w in ws:
                h = wrap(block)(h, w)
            return (h**2).sum()

        step = lambda ws, _: ([w - rate * g for w, g in zip(ws, gradient(loss)(ws))], None)
        ws, _ = scan(step, [W @ W.T, V @ V.T, W @ V.T], length=5, checkpoints=2)
        return loss(ws)

    f = lambda gradient, wrap: lambda rate: after(gradient, wrap, rate)
    want = f(grad, lambda block: block)
    for transform in (lambda f: grad(f)(ETA), lambda f: vmap(grad(f))(XS[:, 0]), lambda f: hessian(f)(ETA)):
        assert_same(transform(f(gradient, remat)), transform(want))


@pytest.mark.parametrize(
    "op",
    [
        lambda y: F.layer_norm(y, (3,)),
        lambda y: F.batch_norm(y, None, None, training=True),
        lambda y: F.instance_norm(y[None])[0],
        lambda y: F.glu(torch.cat([y, y.cos()], 1)),
    ],
    ids=["layer_norm", "batch_norm", "instance_norm", "glu"],
)
def test_operators_of_which_torch_has_no_right_mixed_derivative(op):
    """Reverse over forward mode is wrong for them in torch 2.11 to 2.15; reverse over reverse is not."""

    def run(gradient, w):
        inner = gradient(lambda w: op(torch.stack([X, X.cos(), X * 2]) @ w).tanh().pow(3).sum())(w)
        return (w - 0.1 * inner).pow(3).sum()

    assert_same(grad(functools.partial(run, inner_grad))(W), grad(functools.partial(run, grad))(W))


def test_tangents_that_require_grad():
    """In plain autograd, while no output depends on them: they are no captured tensors."""

    def run(wrap):
        tx, ty = ETA.clone().requires_grad_(), (2 * ETA).requires_grad_()
        h = lambda x, y: grad(grad(lambda y: wrap(lambda x, y: y**3)(x, y) ** 2))(y)
        found = jvp(h, (ETA, ETA), (tx, ty))
        return [y.detach() for y in found], torch.autograd.grad(found[1], [tx, ty], allow_unused=True)

    assert_same(run(remat), run(lambda f: f))


def test_a_captured_leaf_that_is_not_used_is_no_input():
    w = X.clone().requires_grad_()

    def loss(x):
        (w * 2).sum()
        return (x**3).sum()

    for transform in (hessian, lambda f: jacrev(jacfwd(f)), lambda f: jacfwd(jacrev(f))):
        assert not transform(inner_grad(loss))(X).requires_grad
