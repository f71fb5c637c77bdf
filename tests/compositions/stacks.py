"""Transforms as combinators, so that stacks of them are generated and not typed.

`INNER[name](fn)` takes fn(x, w) with x of shape (3,), w of shape (3, 3) and any pytree out, and
returns a function of the same kind. Hence any of them may stand in any place of a stack.
`OUTER[name](fn)` are those that need plain tensors (backward, duals of plain forward mode,
tracing): they can only be the last.
"""

import torch
from torch.autograd import forward_ad
from torch.func import (
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

INNER = {}
OUTER = {}


def leaves(x, w):
    return x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()


def inner(run):
    """Registers what is done with fn, x and w."""
    INNER[run.__name__] = lambda fn: lambda x, w: run(fn, x, w)
    return run


def outer(run):
    OUTER[run.__name__] = lambda fn: lambda x, w: run(fn, x, w)
    return run


def eager(run):
    """The same, of x and w that require grad."""
    OUTER[run.__name__] = lambda fn: lambda x, w: run(fn, *leaves(x, w))
    return run


def stack(*names):
    """A stack named from the outside in: stack("vmap", "grad")(f) is vmap(grad(f))."""

    def apply(fn):
        for name in reversed(names):
            fn = (INNER.get(name) or OUTER[name])(fn)
        return fn

    return apply


def is_differentiable(leaf):
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def scalar(out):
    """One number out of any tree of outputs, with derivatives of every order."""
    total = 0.0
    for leaf in pytree.tree_leaves(out):
        if is_differentiable(leaf):
            leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + leaf.sin().sum()
    return total


def split(out):
    """(differentiable leaves as real tensors, everything else)"""
    leaves = pytree.tree_leaves(out)
    real = [
        torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in leaves if is_differentiable(t)
    ]
    return real, [t for t in leaves if not is_differentiable(t)]


def rows(t):
    return torch.stack([t, t * 0.5 + 0.1])


def direction(t):
    return t.cos()


# Reverse


@inner
def grad_both(fn, x, w):
    gx, gw = grad(lambda x, w: scalar(fn(x, w)), argnums=(0, 1))(x, w)
    return gx, gw


@inner
def grad_aux(fn, x, w):
    def with_aux(x, w):
        out = fn(x, w)
        return scalar(out), out

    return grad(with_aux, has_aux=True)(x, w)


@inner
def vjp_pull(fn, x, w):
    out, pull = vjp(lambda x, w: split(fn(x, w))[0], x, w)
    return out, pull([direction(o) for o in out])


@inner
def vjp_twice(fn, x, w):
    """The pullback is called twice, with other cotangents."""
    out, pull = vjp(lambda x: split(fn(x, w))[0], x)
    (a,) = pull([direction(o) for o in out])
    (b,) = pull([o * 0.5 for o in out])
    return a, b


@inner
def vjp_vmap(fn, x, w):
    """Only cotangents are batched."""
    out, pull = vjp(lambda x, w: split(fn(x, w))[0], x, w)
    return vmap(pull)([rows(o) for o in out])


@inner
def jacrev_both(fn, x, w):
    return jacrev(lambda x, w: split(fn(x, w))[0], argnums=(0, 1))(x, w)


@inner
def autograd_grad(fn, x, w):
    """torch.autograd.grad called inside; plain torch allows it where x requires grad there."""
    (gx,) = torch.autograd.grad(scalar(fn(x, w)), (x,), create_graph=True)
    return gx


# Forward


@inner
def jvp_tangent(fn, x, w):
    """Linear in the tangent, which here is the input of the outer levels."""
    return jvp(lambda y: split(fn(y, w))[0], (torch.linspace(0.2, 0.8, 3),), (x,))[1]


@inner
def linearize_x(fn, x, w):
    out, push = linearize(lambda x: split(fn(x, w))[0], x)
    return out, push(direction(x)), push(x)


# Batching


@inner
def vmap_dims(fn, x, w):
    """Other dimensions than the first. (All outputs are made batched: torch 2.13 gives an output
    that is not batched the shape [34359738369, 3] under out_dims=-1, and raises under out_dims=1.)
    """

    def sample(x, w, s):
        return [t * s for t in split(fn(x, w))[0]]

    return vmap(sample, (-1, 1, 0), out_dims=-1)(
        rows(x).t(), rows(w).transpose(0, 1), torch.tensor([1.0, 0.5])
    )


@inner
def vmap_different_unbatched(fn, x, w):
    """Nothing that fn sees is batched: it is drawn anew for each sample all the same."""

    def sample(s):
        real, other = split(fn(x, w))
        return [t * s for t in real], other

    return vmap(sample, randomness="different")(torch.tensor([1.0, 0.5]))


@inner
def vmap_same_unbatched(fn, x, w):
    return vmap(lambda s: [t * s for t in split(fn(x, w))[0]], randomness="same")(torch.tensor([1.0, 0.5]))


@inner
def vmap_out_none(fn, x, w):
    """out_dims=None: torch refuses it for what is batched, and allows it for what is not."""
    return vmap(lambda s: (fn(x, w), s), out_dims=(None, 0), randomness="same")(torch.tensor([1.0, 0.5]))


INNER |= {
    "grad_x": lambda fn: grad(lambda x, w: scalar(fn(x, w))),
    "grad_tree": lambda fn: lambda x, w: grad(lambda p: scalar(fn(p["x"], p["w"])))({"x": x, "w": w}),
    "value_and_grad": lambda fn: grad_and_value(lambda x, w: scalar(fn(x, w)), argnums=1),
    "jacrev_x": lambda fn: jacrev(lambda x, w: split(fn(x, w)), has_aux=True),
    "jacrev_chunk": lambda fn: jacrev(lambda x, w: split(fn(x, w))[0], chunk_size=1),
    "jvp_x": lambda fn: lambda x, w: jvp(lambda x: split(fn(x, w)), (x,), (direction(x),), has_aux=True),
    "jvp_both": lambda fn: lambda x, w: jvp(lambda x, w: split(fn(x, w))[0], (x, w), (direction(x), w * 0.5)),
    "jacfwd_x": lambda fn: jacfwd(lambda x, w: split(fn(x, w)), has_aux=True),
    "jacfwd_same": lambda fn: jacfwd(lambda x, w: split(fn(x, w))[0], argnums=(0, 1), randomness="same"),
    "jacfwd_different": lambda fn: jacfwd(lambda x, w: split(fn(x, w))[0], randomness="different"),
    "hessian_x": lambda fn: hessian(lambda x, w: scalar(fn(x, w))),
    "vmap_x": lambda fn: lambda x, w: vmap(fn, (0, None))(rows(x), w),
    "vmap_w": lambda fn: lambda x, w: vmap(fn, (None, 0))(x, rows(w)),
    "vmap_nested": lambda fn: lambda x, w: vmap(vmap(fn, (0, None)), (None, 0))(rows(x), rows(w)),
    "vmap_chunk": lambda fn: lambda x, w: vmap(fn, (0, None), chunk_size=1)(rows(x), w),
    "vmap_different": lambda fn: lambda x, w: vmap(fn, (0, None), randomness="different")(rows(x), w),
    "vmap_same": lambda fn: lambda x, w: vmap(fn, (0, None), randomness="same")(rows(x), w),
    "functionalized": lambda fn: functionalize(fn),
    "functionalized_views": lambda fn: functionalize(fn, remove="mutations_and_views"),
}


# Plain eager, around everything


@eager
def forward(fn, x, w):
    """No transform; inputs that require grad. Also compares requires_grad of every output."""
    return fn(x, w)


@eager
def no_grad(fn, x, w):
    with torch.no_grad():
        return fn(x, w)


@outer
def inference_mode(fn, x, w):
    with torch.inference_mode():
        return fn(x.clone(), w.clone())


@eager
def backward(fn, x, w):
    scalar(fn(x, w)).backward()
    return x.grad, w.grad


@outer
def backward_one_input(fn, x, w):
    w = w.detach().clone().requires_grad_()
    scalar(fn(x, w)).backward()
    return w.grad


@eager
def backward_twice(fn, x, w):
    """retain_graph=True, then again: grads accumulate."""
    loss = scalar(fn(x, w))
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, w.grad


@eager
def backward_after_free(fn, x, w):
    """A second backward without retain_graph: torch's own error, if the graph held anything."""
    loss = scalar(fn(x, w))
    loss.backward()
    loss.backward()


@eager
def backward_through_non_leaves(fn, x, w):
    scalar(fn(x * 1.5, w.exp() * 0.3)).backward()
    return x.grad, w.grad


@eager
def eager_grad(fn, x, w):
    out = split(fn(x, w))[0]
    return torch.autograd.grad(out, (x, w), [direction(o.detach()) for o in out], allow_unused=True)


@eager
def double_backward(fn, x, w):
    first = torch.autograd.grad(scalar(fn(x, w)), (x, w), create_graph=True, allow_unused=True)
    second = torch.autograd.grad(scalar(first), (x, w), allow_unused=True)
    return [t.detach() for t in first if t is not None], second


@eager
def triple_backward(fn, x, w):
    first = torch.autograd.grad(scalar(fn(x, w)), (x, w), create_graph=True, allow_unused=True)
    (second,) = torch.autograd.grad(scalar(first), (x,), create_graph=True)
    return torch.autograd.grad(scalar(second), (x, w), allow_unused=True)


@eager
def double_backward_in_cotangent(fn, x, w):
    """The linear part alone: gradients of the pullback with regard to the cotangent."""
    out = [o for o in split(fn(x, w))[0] if o.requires_grad]
    cts = [torch.ones_like(o).requires_grad_() for o in out]
    (gx,) = torch.autograd.grad(out, (x,), cts, create_graph=True)
    return torch.autograd.grad(scalar(gx), cts, allow_unused=True)


@eager
def grads_batched(fn, x, w):
    out = [o for o in split(fn(x, w))[0] if o.requires_grad]
    cts = [rows(direction(o.detach())) for o in out]
    return torch.autograd.grad(out, (x, w), cts, is_grads_batched=True, allow_unused=True)


@eager
def grads_batched_then_backward(fn, x, w):
    out = [o for o in split(fn(x, w))[0] if o.requires_grad]
    cts = [rows(direction(o.detach())) for o in out]
    first = torch.autograd.grad(out, (x, w), cts, is_grads_batched=True, create_graph=True, allow_unused=True)
    return torch.autograd.grad(scalar(first), (x, w), allow_unused=True)


@outer
def jacobian_vectorized(fn, x, w):
    return torch.autograd.functional.jacobian(
        lambda x, w: tuple(split(fn(x, w))[0]), (x, w), create_graph=True, vectorize=True
    )


def unpack(out):
    return [tuple(forward_ad.unpack_dual(t)) if is_differentiable(t) else t for t in pytree.tree_leaves(out)]


@outer
def dual(fn, x, w):
    with forward_ad.dual_level():
        out = unpack(fn(forward_ad.make_dual(x, direction(x)), w))
    return out


@outer
def dual_both(fn, x, w):
    with forward_ad.dual_level():
        out = unpack(fn(forward_ad.make_dual(x, direction(x)), forward_ad.make_dual(w, w * 0.5)))
    return out


@eager
def dual_over_backward(fn, x, w):
    """Forward over reverse in plain eager: a Hessian-vector product."""
    with forward_ad.dual_level():
        dx = forward_ad.make_dual(x, direction(x.detach()))
        grads = torch.autograd.grad(scalar(fn(dx, w)), (dx, w), allow_unused=True)
        return unpack(grads)


@eager
def backward_over_dual(fn, x, w):
    """Reverse over forward in plain eager."""
    with forward_ad.dual_level():
        out = unpack(fn(forward_ad.make_dual(x, direction(x.detach())), w))
        return torch.autograd.grad(scalar(out), (x, w), allow_unused=True)


@outer
def traced(fn, x, w):
    """make_fx, and the graph then run on other values."""
    return make_fx(fn)(x, w)(x * 0.9, w * 1.1)


@outer
def traced_then_differentiated(fn, x, w):
    """The graph that make_fx gives is a function like another: its gradient must not end at a
    detach.
    """
    graph = make_fx(fn)(x, w)
    return grad(lambda x, w: scalar(graph(x, w)), (0, 1))(x, w)


OUTER |= {
    "forward_without_grad": lambda fn: fn,
    "jacobian": lambda fn: (
        lambda x, w: torch.autograd.functional.jacobian(lambda x, w: tuple(split(fn(x, w))[0]), (x, w))
    ),
    "jacobian_forward": lambda fn: (
        lambda x, w: torch.autograd.functional.jacobian(
            lambda x, w: tuple(split(fn(x, w))[0]), (x, w), vectorize=True, strategy="forward-mode"
        )
    ),
    "hessian_vectorized": lambda fn: (
        lambda x, w: torch.autograd.functional.hessian(lambda x, w: scalar(fn(x, w)), (x, w), vectorize=True)
    ),
    "hessian_forward_over_reverse": lambda fn: (
        lambda x, w: torch.autograd.functional.hessian(
            lambda x, w: scalar(fn(x, w)),
            (x, w),
            vectorize=True,
            outer_jacobian_strategy="forward-mode",
        )
    ),
    "traced_symbolically": lambda fn: (
        lambda x, w: make_fx(fn, tracing_mode="symbolic")(x, w)(x * 0.9, w * 1.1)
    ),
    "traced_functionalized": lambda fn: lambda x, w: make_fx(functionalize(fn))(x, w)(x * 0.9, w * 1.1),
}
