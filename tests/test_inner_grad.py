"""`inner_grad` against `torch.func.grad`: the same values and derivatives of every order in float64, and
less memory and fewer operations for the first.
"""

import contextlib
import functools
import types
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import Sine, assert_same
from test_scan import LOOPS, tensor
from torch import nn, special
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from funcckpt import ClosureError, InputError, checkpoint, checkpoint_scope, inner_grad, remat
from funcckpt.meter import measure

F64 = torch.float64
W, X, ETA, V = tensor(4, 3, seed=1), tensor(4, seed=2), torch.tensor(0.3, dtype=F64), tensor(4, 3, seed=3)
XS = torch.stack([X, 2 * X])


def same(run, *names):
    assert_same(run(inner_grad, *names), run(grad, *names))


def step(gradient, w, x, eta):
    def loss(p, scale):
        return (torch.tanh(x @ p["w"] * eta * scale) ** 2).sum() + (p["b"] * eta).sin().sum() * x.cos().sum()

    g = gradient(loss)({"w": w, "b": x.cumsum(0), "unused": x}, 1.5)
    return (g["w"] ** 2).sum() + (g["b"] * x).sum() + g["unused"].sum()


def plain_forward_mode(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(W, V), forward_ad.make_dual(X, X), ETA))


def backward(f):
    """Of three orders."""
    leaves, orders = [t.clone().requires_grad_() for t in (W, X, ETA)], []
    out = f(*leaves)
    for _ in range(3):
        orders.append(torch.autograd.grad(out, leaves, create_graph=True))
        out = sum((g * g).sum() for g in orders[-1])
    return [g.detach() for gs in orders for g in gs]


TRANSFORMS = {
    "without grad mode": lambda f: torch.no_grad()(f)(W.clone().requires_grad_(), X, ETA),
    "backward": backward,
    "vmap of grad, captured batched": lambda f: vmap(grad(f, (0, 1, 2)), (None, None, 0))(W, X, XS[:, 0]),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, (None, 0, None))(w, XS, ETA).sum())(W),
    "vmap in vmap": lambda f: vmap(vmap(grad(f), (None, 0, None)), (2, None, None))(
        torch.stack([W, V], 2), XS, ETA
    ),
    "hvp": lambda f: jvp(grad(f), (W, X, ETA), (V, X, ETA)),
    "hessian": lambda f: hessian(f)(W, X, ETA),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 2), 1)(W, X, ETA),
    "linearize": lambda f: linearize(f, W, X, ETA)[1](V, X, ETA),
    "plain forward mode": plain_forward_mode,
    "functionalize of grad": lambda f: functionalize(grad(f))(W, X, ETA),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize itself
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["", "in remat"])
def test_transforms(transform, wrap):
    run = TRANSFORMS[transform]
    assert_same(run(wrap(functools.partial(step, inner_grad))), run(lambda *args: step(grad, *args)))


def in_c():
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone)


@pytest.mark.parametrize("hooks", [checkpoint_scope, torch.autograd.graph.save_on_cpu, in_c])
@pytest.mark.parametrize("around", [lambda f, x: f(x), checkpoint])
def test_hooks_around_the_call_hide_no_tensor(around, hooks):
    """They would give another tensor for one that is saved at a level."""

    def run(gradient, hooks, around):
        x, w = X.clone().requires_grad_(), X.cos().requires_grad_()
        c = w * 1
        with hooks():
            y = around(lambda x: x * gradient(lambda y: torch.sin(c * y).sum())(x) * c, x)
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])

    plain = run(grad, contextlib.nullcontext, lambda f, x: f(x))
    assert_same(run(inner_grad, hooks, around), plain)


@pytest.mark.parametrize("loss", [lambda a, b: a, lambda a, b: b, lambda a, b: a.view(()), lambda a, b: ETA])
def test_a_loss_that_returns_what_it_was_given(loss):
    """Or a constant: the gradient needs a tensor of its own."""
    value = lambda gradient, a, b: gradient(loss)(a.sin(), b.cos()) * a * b

    def run(gradient):
        a = ETA.clone().requires_grad_()
        plain = torch.autograd.grad(value(gradient, a, a * 2), a, create_graph=True)
        return grad(grad(lambda a: value(gradient, a, ETA)))(ETA), plain

    same(run)


def test_argnums_and_the_same_tensor_in_several_places():
    loss = lambda a, b, c: (a * b["x"] ** 2 * c.sin() * W.sum(1)).sum()

    def run(gradient):
        def f(x):
            ga, gb = gradient(loss, (0, 1))(x, {"x": x}, x)
            captured = gradient(lambda a: (a * x * x).sum())(x).sum()
            last = gradient(loss, -1)(x, {"x": x}, x).sin().sum()
            return captured + (ga * x).sum() + last + (gb["x"] ** 2).sum()

        return grad(f)(X), hessian(f)(X), gradient(torch.sum)(X)

    same(run)


def test_containers_of_the_user():
    Weights = type("Weights", (list,), {})
    pytree.register_pytree_node(Weights, lambda tree: (tree[:], None), lambda leaves, _: Weights(leaves))
    loss = lambda weights: (weights[0] * weights[1].sin()).sum()
    same(lambda gradient: grad(lambda w: gradient(loss)(Weights([w, w * w]))[1].square().sum())(W))


def test_aux():
    """Differentiated like the gradient, and from the arguments alone."""

    def deep(w):
        h = W
        for _ in range(6):
            h = torch.tanh(h @ w.T @ w)
        return h.square().mean(), (h.mean(0), {"w": w})

    def meta(gradient, rate):
        w, total = W, 0.0
        for _ in range(3):
            g, (hidden, other) = gradient(lambda w: deep(w), has_aux=True)(w)
            w, total = w - rate * g, total + hidden.sum() + other["w"].square().sum()
        return total

    same(lambda gradient: hessian(functools.partial(meta, gradient))(ETA))
    ours, theirs = (measure(grad(functools.partial(meta, f)), ETA) for f in (inner_grad, grad))
    assert ours.peak_bytes < 0.6 * theirs.peak_bytes


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_of_the_loss_are_drawn_again(randomness):
    x, w = tensor(50), tensor(50, seed=9)

    def run(gradient, transform):
        torch.manual_seed(5)
        inner = gradient(lambda w: (F.dropout(w * x, 0.4) ** 3).sum())
        return transform(lambda w: (inner(w) ** 2).sum()), torch.rand(1)

    same(run, lambda f: vmap(grad(f), randomness=randomness)(torch.stack([w, w])))
    same(run, lambda f: vmap(lambda _: f(w), randomness=randomness)(torch.zeros(3)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: inner_grad(lambda w: w)(X), r"returned float64\[4\] on cpu, not a real scalar"),
        (
            lambda: inner_grad(lambda w: (w.sum(), w))(X),
            "returned a tuple, not a real scalar. .* pass has_aux=True",
        ),
        (lambda: inner_grad(lambda w: w.sum(), 1)(X), r"argnums=1, but there are 1 arguments"),
        (
            lambda: inner_grad(lambda w: w[0].sum())([X.long()]),
            r"argument 0\[0\] is int64\[4\] on cpu, which has no",
        ),
        (lambda: inner_grad(lambda w, b: w.sum(), (0, 1))(X, 2.0), r"argument 1 is a float"),
        (lambda: inner_grad(X), "inner_grad takes a callable, not Tensor"),
        (lambda: inner_grad(lambda w: w.sum(), 1.0), r"argnums=1.0 is not an int or a tuple of ints"),
    ],
)
def test_wrong_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize(
    ("options", "memory", "flops"), [({"checkpoint": None}, 0.2, 1.36), ({"checkpoints": 3}, 0.45, 1.22)]
)
def test_less_memory_than_reverse_over_reverse(options, memory, flops):
    """Of a deep network, of which each layer has a learning rate."""
    x = tensor(128, 16)

    loss = lambda ws: ((functools.reduce(lambda h, w: F.gelu(h @ w), ws, x) - x.cos()) ** 2).mean()

    def trained(gradient, rates):
        one = lambda ws: [w - r * g for w, r, g in zip(ws, rates, gradient(loss)(ws))]
        return loss(LOOPS["scan"](one, [tensor(16, 16, seed=i) / 4 for i in range(8)], 6, **options))

    rates = 0.1 * torch.ones(8, dtype=F64)
    ours, theirs = (measure(grad(functools.partial(trained, f)), rates) for f in (inner_grad, grad))
    assert_same(ours.result, theirs.result)
    assert ours.peak_bytes < theirs.peak_bytes * memory
    assert ours.flops < theirs.flops * flops


def test_inner_gradients_in_inner_gradients():
    def run(gradient):
        inner = lambda rate: gradient(lambda w: (torch.sin(w * rate) ** 2).sum() + (w * rate).cos().sum())(X)
        outer = lambda rate: (
            rate - 0.1 * gradient(lambda rate: ((X - rate * inner(rate)).sin() ** 2).sum())(rate)
        )
        return hessian(lambda rate: inner(outer(rate)).square().sum())(ETA)

    same(run)


CELL = nn.LSTMCell(3, 2).double().requires_grad_(False)
NORM = nn.LayerNorm(3, elementwise_affine=False)


def stopped(y):
    with torch.no_grad():
        norm = y.norm()
    return (y / norm).sin()


# Torch has no forward mode of these, a wrong one, or one that goes through `no_grad`; or no vmap without autograd.
OPERATORS = {
    "layer_norm": NORM,
    "lstm_cell": lambda y: CELL(y, (y[:, 1:], y[:, :2]))[0],
    "solve": lambda y: torch.linalg.solve(y @ y.mT + 1, y),
    "power": lambda y: y.square() ** torch.tensor([2.0, 2, 3], dtype=F64),
    "no_grad": stopped,
    "function": Sine.apply,
    "no_forward_mode": lambda y: special.zeta(2.0, y.square() + 2),
    "scripted": torch.jit.CompilationUnit("def f(y):\n    return torch.layer_norm(y, [3])\n").f,
    "in_a_checkpoint": lambda y: remat(NORM)(y),
    "padding": lambda y: F.embedding(torch.tensor([0, 1, 1]), y, padding_idx=0).exp(),
    "random": lambda y: F.dropout(y, 0.5).exp() * torch.rand(3, dtype=F64),
}


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_operators(op):
    def run(gradient, w):
        torch.manual_seed(0)
        inner = gradient(lambda w: op(torch.stack([X, X.cos(), X * 2]) @ w).tanh().pow(3).sum())(w)
        return (w - 0.1 * inner).pow(3).sum()

    one = lambda gradient: grad(functools.partial(run, gradient))
    same(lambda gradient: one(gradient)(W))
    same(lambda gradient: vmap(one(gradient), randomness="same")(torch.stack([W, W.cos()])))


def test_a_loss_that_branches():
    loss = lambda x, n: (x[:n] ** 3).sum() if x.sum() > 0 else x.sum().item() * x.prod()
    same(lambda gradient: [jacrev(gradient(loss))(x, torch.tensor(2)) for x in (X, -X.abs())])


@pytest.mark.parametrize("calls", [False, True])
def test_buffers_of_a_module_in_training(calls):
    """They are updated once. An argument is none of them, even if it looks like one."""

    def run(gradient):
        norm, x = nn.BatchNorm1d(4, dtype=F64).requires_grad_(False), tensor(5, 4, seed=7)
        p = {name: t.detach() * W.sum() for name, t in norm.named_parameters()}
        buffers = {name: t.clone() for name, t in norm.named_buffers()}

        def loss(p, buffers):
            y = functional_call(norm, (p, buffers), (x,)) if calls else p["bias"] * norm.weight
            return (y + p["weight"]).pow(3).sum()

        first = gradient(loss)(p, buffers)
        copies = {name: t.clone() for name, t in buffers.items()}
        second = grad(lambda p, b: gradient(loss)(p, b)["weight"].pow(2).sum())(p, copies)
        return first, second, buffers

    same(run)


@pytest.mark.parametrize("batched", [False, True])
def test_what_the_loss_assigns(batched):
    def run(gradient):
        net = types.SimpleNamespace(calls=0, average=torch.zeros(4, dtype=F64))

        def loss(w):
            net.calls += 1
            net.average = 0.9 * net.average + 0.1 * w.detach()
            return (w * net.average).pow(3).sum() * net.calls

        f = grad(lambda w: gradient(loss)(w).pow(2).sum())
        return (vmap(f)(XS) if batched else f(X)), net.calls, None if batched else net.average

    same(run)


def test_tangents_that_require_grad():
    """In plain autograd, while no output depends on them: they are no captured tensors."""

    def run(wrap):
        tx, ty = ETA.clone().requires_grad_(), (2 * ETA).requires_grad_()
        h = lambda x, y: grad(grad(lambda y: wrap(lambda x, y: y**3)(x, y) ** 2))(y)
        found = jvp(h, (ETA, ETA), (tx, ty))
        return [y.detach() for y in found], torch.autograd.grad(found[1], [tx, ty], allow_unused=True)

    assert_same(run(remat), run(lambda f: f))


@pytest.mark.parametrize("transform", [jacfwd, hessian, lambda f: lambda x: jvp(f, (x,), (x,))[1]])
def test_parameters_that_functional_call_replaces_give_no_history(transform):
    """Here by a remat in the loss, whose pullback is differentiated."""
    net, x = nn.Linear(3, 1).double(), tensor(4, 3)
    start = {name: p.detach() for name, p in net.named_parameters()}
    gradient = inner_grad(remat(lambda p: functional_call(net, p, (x,)).tanh().square().sum()))

    def after(rate):
        p = {name: w - rate * g for (name, w), g in zip(start.items(), gradient(start).values(), strict=True)}
        return gradient(p)["weight"].sum()

    assert not transform(after)(torch.tensor(0.1, dtype=x.dtype)).requires_grad


def test_a_captured_leaf_that_is_not_used_is_no_input():
    w = X.clone().requires_grad_()
    loss = lambda x: (x**3).sum() + 0 * (w * 2).sum().detach()
    for transform in (hessian, lambda f: jacrev(jacfwd(f)), lambda f: jacfwd(jacrev(f))):
        assert not transform(inner_grad(loss))(X).requires_grad


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize(
    "transform",
    {
        "backward": lambda f: torch.autograd.grad(f(h := X.clone().requires_grad_()).sum(), h),
        "grad": lambda f: grad(lambda h: f(h).sum())(X),
        "jvp": lambda f: jvp(f, (X,), (X,)),
        "vmap": lambda f: vmap(f)(XS),
        "vmap_grad": lambda f: vmap(grad(lambda h: f(h).sum()))(XS),
    }.values(),
    ids=["backward", "grad", "jvp", "vmap", "vmap_grad"],
)
def test_a_hidden_tensor_is_right_or_named(transform, is_linear):
    def run(gradient, h):
        hidden = functools.cache(lambda: h * 2)
        hidden()
        return gradient(lambda w: (w * hidden() if is_linear else (w * hidden()).sin()).sum())(X)

    try:
        found = transform(functools.partial(run, inner_grad))
    except ClosureError as error:
        assert "float64[" in str(error), error
    else:
        assert_same(found, transform(functools.partial(run, grad)))


def penalty(x):
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return (g.square().sum() - 1) ** 2


def looks_at_a_gradient(x):
    y = x.sin()
    y.register_hook(lambda g: None)
    return (y**3).sum()


def policy_gradient(x):
    d = torch.distributions.Laplace(x, 1.0)
    action = d.sample()
    return (d.log_prob(action) * (action - 1) ** 2).sum() + (x * action).sum()


POINTS = torch.tensor([-1.0, 0, 2], dtype=F64)


@pytest.mark.parametrize("loss", [penalty, looks_at_a_gradient, policy_gradient])
def test_gradients_and_samples_inside_of_the_loss(loss):
    def run(gradient):
        torch.manual_seed(0)
        return grad(lambda x: gradient(loss)(x).square().sum())(POINTS)

    same(run)


class Scale(torch.autograd.Function):
    """A learned scale of the gradient, which only the backward uses."""

    @staticmethod
    def forward(x, scale):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1][0]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


def test_what_the_backward_alone_uses():
    def run(gradient):
        w, c = X.clone().requires_grad_(), V[:, 0].clone().requires_grad_()
        g = gradient(lambda w: F.layer_norm(Scale.apply(w, [c]).sin(), (4,)).exp().sum())(w)
        return torch.autograd.grad((g**2).sum(), [w, c])

    same(run)


def test_what_no_gradient_depends_on_is_no_input():
    def run(gradient):
        w, v = X.clone().requires_grad_(), X.clone().requires_grad_()
        c = v.sin()
        ref = weakref.ref(c)
        c.sum().backward()  # frees the graph of c
        g = gradient(lambda w, c=c: w.sin().sum() + (c**2).sum())(w)
        del c
        g.sum().backward()
        return w.grad, v.grad, ref() is None

    same(run)


def test_a_transform_inside_of_inference_mode():
    if torch.__version__ < "2.13":
        pytest.skip("torch takes no derivatives there before 2.13")
    with torch.inference_mode():
        found = grad(lambda x: inner_grad(lambda x: (x**3).sum())(x).sum())(X)
    assert_same(found.clone(), 6 * X)
