"""Transforms as combinators, so that stacks of them are generated and not typed.

Each takes fn(x, w), x and w: in the compositions of shape (3,) and (3, 3). What it gives is any pytree. So
those of `INNER` may stand in any place of a stack. Those of `OUTER` need plain tensors (backward, duals of
plain forward mode, tracing), and can only be the last.
"""

import functools

import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functionalize, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def stack(*names):
    """A stack named from the outside in: stack("vmap_x", "grad_x")(f) is vmap(grad(f))."""

    def apply(fn):
        for name in reversed(names):
            fn = functools.partial(INNER.get(name) or OUTER[name], fn)
        return fn

    return apply


def is_differentiable(leaf):
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def split(out):
    """(differentiable leaves as real tensors, everything else)"""
    leaves = pytree.tree_leaves(out)
    real = [t for t in leaves if is_differentiable(t)]
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in real]
    return real, [t for t in leaves if not is_differentiable(t)]


def scalar(out):
    """One number out of any tree of outputs, with derivatives of every order."""
    return sum([leaf.sin().sum() for leaf in split(out)[0]], 0.0)


cost = lambda fn: lambda *args: scalar(fn(*args))
real = lambda fn: lambda *args: split(fn(*args))[0]
rows = lambda t: torch.stack([t, t * 0.5 + 0.1])
direction = lambda t: t.cos()


SCALES = torch.tensor([1.0, 0.5])


def scaled(fn, x, w):
    """A function of one number, which alone is batched."""
    return lambda s: [t * s for t in split(fn(x, w))[0]]


def vjp_pull(fn, x, w):
    out, pull = vjp(real(fn), x, w)
    return out, pull([direction(o) for o in out])


def vjp_twice(fn, x, w):
    """The pullback is called twice, with other cotangents."""
    out, pull = vjp(lambda x: split(fn(x, w))[0], x)
    return *pull([direction(o) for o in out]), *pull([o * 0.5 for o in out])


def vjp_vmap(fn, x, w):
    """Only cotangents are batched."""
    out, pull = vjp(real(fn), x, w)
    return vmap(pull)([rows(o) for o in out])


def dual_inside(fn, x, w):
    """Plain forward mode, inside of whatever there is."""
    with forward_ad.dual_level():
        return unpack(fn(forward_ad.make_dual(x, direction(x)), w))


def linearize_x(fn, x, w):
    out, push = linearize(lambda x: split(fn(x, w))[0], x)
    return out, push(direction(x)), push(x)


def vmap_dims(fn, x, w):
    """Other dimensions than the first. (All outputs are made batched: torch 2.13 gives an output that is not
    batched the shape [34359738369, 3] under out_dims=-1, and raises under out_dims=1.)
    """
    sample = lambda x, w, s: scaled(fn, x, w)(s)
    return vmap(sample, (-1, 1, 0), out_dims=-1)(rows(x).t(), rows(w).transpose(0, 1), SCALES.to(x.dtype))


INNER = {
    # Reverse
    "grad_x": lambda fn, x, w: grad(cost(fn))(x, w),
    "grad_both": lambda fn, x, w: grad(cost(fn), (0, 1))(x, w),
    "grad_tree": lambda fn, x, w: grad(lambda p: scalar(fn(p["x"], p["w"])))({"x": x, "w": w}),
    "grad_aux": lambda fn, x, w: grad(lambda x, w: (scalar(out := fn(x, w)), out), has_aux=True)(x, w),
    "value_and_grad": lambda fn, x, w: grad_and_value(cost(fn), argnums=1)(x, w),
    "vjp_pull": vjp_pull,
    "vjp_twice": vjp_twice,
    "vjp_vmap": vjp_vmap,
    "jacrev_x": lambda fn, x, w: jacrev(lambda x: split(fn(x, w)), has_aux=True)(x),
    "jacrev_both": lambda fn, x, w: jacrev(real(fn), (0, 1))(x, w),
    "hessian_x": lambda fn, x, w: hessian(cost(fn))(x, w),
    # torch.autograd.grad called inside; plain torch allows it where x requires grad there.
    "autograd_grad": lambda fn, x, w: torch.autograd.grad(scalar(fn(x, w)), x, create_graph=True)[0],
    # Forward
    "jvp_x": lambda fn, x, w: jvp(lambda x: split(fn(x, w)), (x,), (direction(x),), has_aux=True),
    "jvp_both": lambda fn, x, w: jvp(real(fn), (x, w), (direction(x), w * 0.5)),
    # Linear in the tangent, which here is the input of the outer levels.
    "jvp_tangent": lambda fn, x, w: jvp(
        lambda y: split(fn(y, w))[0], (torch.linspace(0.2, 0.8, 3, dtype=x.dtype),), (x,)
    )[1],
    "jacfwd_x": lambda fn, x, w: jacfwd(lambda x: split(fn(x, w)), has_aux=True)(x),
    "jacfwd_same": lambda fn, x, w: jacfwd(real(fn), argnums=(0, 1), randomness="same")(x, w),
    "jacfwd_different": lambda fn, x, w: jacfwd(real(fn), randomness="different")(x, w),
    "linearize_x": linearize_x,
    "dual_inside": dual_inside,
    # Batching
    "vmap_x": lambda fn, x, w: vmap(fn, (0, None))(rows(x), w),
    "vmap_w": lambda fn, x, w: vmap(fn, (None, 0))(x, rows(w)),
    "vmap_both": lambda fn, x, w: vmap(fn, randomness="different")(rows(x), rows(w)),
    "vmap_nested": lambda fn, x, w: vmap(vmap(fn, (0, None)), (None, 0))(rows(x), rows(w)),
    "vmap_chunk": lambda fn, x, w: vmap(fn, (0, None), chunk_size=1)(rows(x), w),
    "vmap_different": lambda fn, x, w: vmap(fn, (0, None), randomness="different")(rows(x), w),
    "vmap_same": lambda fn, x, w: vmap(fn, (0, None), randomness="same")(rows(x), w),
    "vmap_dims": vmap_dims,
    # Nothing that fn sees is batched: it is drawn anew for each sample all the same.
    "vmap_different_unbatched": lambda fn, x, w: vmap(scaled(fn, x, w), randomness="different")(SCALES),
    "vmap_same_unbatched": lambda fn, x, w: vmap(scaled(fn, x, w), randomness="same")(SCALES),
    "functionalized": lambda fn, x, w: functionalize(fn)(x, w),
    "functionalized_views": lambda fn, x, w: functionalize(fn, remove="mutations_and_views")(x, w),
}


# Plain eager, around everything


OUTER = {}


def outer(run):
    OUTER[run.__name__] = run
    return run


def eager(run):
    """Of x and w that require grad."""
    OUTER[run.__name__] = lambda fn, x, w: run(fn, *[t.detach().clone().requires_grad_() for t in (x, w)])
    return run


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
    """Grads accumulate."""
    loss = scalar(fn(x, w))
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, w.grad


@eager
def backward_after_free(fn, x, w):
    """torch's own error, if the graph held anything."""
    loss = scalar(fn(x, w))
    loss.backward()
    loss.backward()


@eager
def backward_through_non_leaves(fn, x, w):
    scalar(fn(x * 1.5, w.exp() * 0.3)).backward()
    return x.grad, w.grad


def gradients(out, inputs, cotangents=None, **options):
    return torch.autograd.grad(out, inputs, cotangents, allow_unused=True, **options)


def cotangents_of(fn, x, w):
    """The outputs that require grad, and a batch of cotangents."""
    out = [o for o in split(fn(x, w))[0] if o.requires_grad]
    return out, [rows(direction(o.detach())) for o in out]


@eager
def eager_grad(fn, x, w):
    out = split(fn(x, w))[0]
    return gradients(out, (x, w), [direction(o.detach()) for o in out])


@eager
def double_backward(fn, x, w):
    first = gradients(scalar(fn(x, w)), (x, w), create_graph=True)
    return [t.detach() for t in first if t is not None], gradients(scalar(first), (x, w))


@eager
def grads_batched(fn, x, w):
    out, cts = cotangents_of(fn, x, w)
    return gradients(out, (x, w), cts, is_grads_batched=True)


def unpack(out):
    return [tuple(forward_ad.unpack_dual(t)) if is_differentiable(t) else t for t in pytree.tree_leaves(out)]


dual_of = lambda x: forward_ad.make_dual(x, direction(x.detach()))


@outer
def dual(fn, x, w):
    with forward_ad.dual_level():
        return unpack(fn(dual_of(x), w))


@outer
def dual_both(fn, x, w):
    with forward_ad.dual_level():
        return unpack(fn(dual_of(x), forward_ad.make_dual(w, w * 0.5)))


@eager
def dual_over_backward(fn, x, w):
    """Forward over reverse in plain eager: a Hessian-vector product."""
    with forward_ad.dual_level():
        dx = dual_of(x)
        return unpack(gradients(scalar(fn(dx, w)), (dx, w)))


@eager
def backward_over_dual(fn, x, w):
    """Reverse over forward in plain eager."""
    with forward_ad.dual_level():
        return gradients(scalar(unpack(fn(dual_of(x), w))), (x, w))


def traced(fn, x, w, **options):
    """make_fx, and the graph then run on other values."""
    return make_fx(fn, **options)(x, w)(x * 0.9, w * 1.1)


outputs = lambda fn: lambda *args: tuple(split(fn(*args))[0])


OUTER |= {
    "forward_without_grad": lambda fn, x, w: fn(x, w),
    "jacobian": lambda fn, x, w: jacobian(outputs(fn), (x, w)),
    "jacobian_vectorized": lambda fn, x, w: jacobian(outputs(fn), (x, w), create_graph=True, vectorize=True),
    "traced": traced,
    # The graph is a function like another: its gradient must not end at a detach.
    "traced_then_differentiated": lambda fn, x, w: grad(cost(make_fx(fn)(x, w)), (0, 1))(x, w),
    "traced_symbolically": functools.partial(traced, tracing_mode="symbolic"),
    "traced_functionalized": lambda fn, x, w: traced(functionalize(fn), x, w),
}
