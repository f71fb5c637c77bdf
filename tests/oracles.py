"""What a function shows of itself under the transforms: the references of the tests of `remat(f)`.

`observe(name, f, args, kwargs)` runs f under one transform and returns everything that can be seen
of it as a flat list of tensors plus the structure of its output. A test observes `remat(f)` and `f`
and compares. A derivative that is None and one that is zero are the same here; where the difference
matters a test says so.
"""

import gc
import random
import weakref
from contextlib import contextmanager

import pytest
import support
import torch
from support import no_remat as plain
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

F64 = torch.float64


def tensor(*shape, seed=0, dtype=F64, requires_grad=False):
    """A random tensor that does not touch the global random stream."""
    out = torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=dtype)
    return out.requires_grad_() if requires_grad else out


def differentiable(t):
    return isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())


def weight(t):
    """A fixed tensor of t's shape and dtype with distinct entries, to weigh outputs and tangents
    with.
    """
    n = t.numel()
    w = torch.linspace(0.5, 1.5, n + 1, dtype=F64, device=t.device)[:n].reshape(t.shape)
    return (w * (1 + 0.5j)).to(t.dtype) if t.is_complex() else w.to(t.dtype)


def total(tree):
    """A real scalar to which every entry of every differentiable leaf contributes with its own
    weight.
    """
    terms = []
    for i, t in enumerate(pytree.tree_leaves(tree)):
        if differentiable(t):
            term = (weight(t) * t).sum() * (1 + 0.25 * i)
            terms.append((term.real if term.is_complex() else term).to(F64))
    return sum(terms) if terms else None


def assert_same(got, want, what=""):
    """The same, whether or not a leaf requires grad."""
    got, want = pytree.tree_map_only(torch.Tensor, torch.detach, (got, want))
    support.assert_same(got, want, what)


def compare(run, remat, allowed=()):
    """run(remat) gives what run(plain) gives; where plain torch refuses, it raises the same type of
    error.

    With `allowed`, an error of that type is as good as the right value. Returns it, or None.
    """
    try:
        want = run(plain)
    except Exception as error:
        with pytest.raises((type(error), *allowed)):
            run(remat)
        return None
    try:
        got = run(remat)
    except allowed as error:
        return error
    assert_same(got, want)
    return None


class Flat:
    """f as a function of its tensor leaves alone; what is not a tensor in its output is left in
    `.rest`.
    """

    def __init__(self, f, args, kwargs):
        self.f = f
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs or {}))
        self.where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i].detach() for i in self.where]
        self.diff = [i for i, t in enumerate(self.tensors) if differentiable(t)]
        self.rest = None

    def __call__(self, tensors):
        leaves = list(self.leaves)
        for i, t in zip(self.where, tensors):
            leaves[i] = t
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out_leaves, spec = pytree.tree_flatten(self.f(*args, **kwargs))
        outs = [leaf for leaf in out_leaves if isinstance(leaf, torch.Tensor)]
        self.rest = (
            str(spec),
            [None if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves],
        )
        return outs

    def of(self, tensors):
        """(call, values): the same function of a leading scalar and of the differentiable tensors
        alone.
        """

        def call(one, *values):
            full = list(tensors)
            for i, v in zip(self.diff, values):
                full[i] = v
            outs = self(full)
            total_ = total(outs)
            return one * one + (0 if total_ is None else total_), outs

        return call, [tensors[i] for i in self.diff]

    def batched(self, size=3):
        """Every tensor with a leading batch dimension; differentiable samples differ."""
        scale = torch.linspace(0.8, 1.2, size, dtype=F64)
        return [
            torch.stack([(t * s).to(t.dtype) for s in scale])
            if differentiable(t)
            else torch.stack([t] * size)
            for t in self.tensors
        ]


def _one():
    return torch.ones((), dtype=F64)


def _eager(flat):
    with torch.no_grad():
        return flat(flat.tensors)


def _zeros_for_none(grads, leaves):
    return [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, leaves)]


def _leaves(flat):
    return [t.clone().requires_grad_() if differentiable(t) else t for t in flat.tensors]


def _backward(flat):
    leaves = _leaves(flat)
    outs = flat(leaves)
    loss = total(outs)
    if loss is not None and loss.requires_grad:
        loss.backward()
    xs = [leaves[i] for i in flat.diff]
    return [o.detach() for o in outs], _zeros_for_none([x.grad for x in xs], xs)


def _double_backward(flat):
    leaves = _leaves(flat)
    loss = total(flat(leaves))
    xs = [leaves[i] for i in flat.diff]
    if loss is None or not loss.requires_grad or not xs:
        return _zeros_for_none([None] * len(xs), xs), _zeros_for_none([None] * len(xs), xs)
    first = torch.autograd.grad(loss, xs, create_graph=True, allow_unused=True)
    # None in place of what is dropped: the weights go by position, and whether a constant gradient
    # requires grad is nobody's promise.
    penalty = total([g if g is not None and g.requires_grad else None for g in first])
    second = [None] * len(xs)
    if penalty is not None:
        second = torch.autograd.grad(penalty, xs, allow_unused=True)
    return _zeros_for_none(first, xs), _zeros_for_none(second, xs)


def _grad(flat):
    call, xs = flat.of(flat.tensors)
    return grad(call, argnums=tuple(range(len(xs) + 1)), has_aux=True)(_one(), *xs)


def _grad_grad(flat):
    call, xs = flat.of(flat.tensors)
    argnums = tuple(range(len(xs) + 1))

    def inner(*args):
        return total(grad(call, argnums=argnums, has_aux=True)(*args)[0])

    return grad(inner, argnums=argnums)(_one(), *xs)


def _vmap(flat):
    def call(one, tensors):
        return one * 2, flat(tensors)

    return vmap(call)(torch.ones(3, dtype=F64), flat.batched())


def _jvp(flat):
    call, xs = flat.of(flat.tensors)
    xs = [x.contiguous() for x in xs]  # torch gives an expanded tensor no tangent
    one = _one()

    def both(*args):
        value, outs = call(*args)
        return (value, [o for o in outs if differentiable(o)]), [o for o in outs if not differentiable(o)]

    return jvp(both, (one, *xs), (one, *[weight(x) for x in xs]), has_aux=True)


def _vmap_grad(flat):
    def per_sample(one, tensors):
        call, xs = flat.of(tensors)
        return grad(call, argnums=tuple(range(len(xs) + 1)), has_aux=True)(one, *xs)

    return vmap(per_sample)(torch.ones(3, dtype=F64), flat.batched())


def _grad_vmap(flat):
    batched = flat.batched()
    xs = [batched[i] for i in flat.diff]

    def loss(one, *xs):
        full = list(batched)
        for i, x in zip(flat.diff, xs):
            full[i] = x
        outs = vmap(lambda one, tensors: (one * 2, flat(tensors)))(one, full)
        return total(outs)

    return grad(loss, argnums=tuple(range(len(xs) + 1)))(torch.ones(3, dtype=F64), *xs)


OBSERVATIONS = {
    "eager": _eager,
    "backward": _backward,
    "double_backward": _double_backward,
    "grad": _grad,
    "grad_grad": _grad_grad,
    "vmap": _vmap,
    "jvp": _jvp,
    "vmap_grad": _vmap_grad,
    "grad_vmap": _grad_vmap,
}


def observe(name, f, args=(), kwargs=None):
    """All that shows of f(*args, **kwargs) under the transform: (tensors, structure and other
    leaves).
    """
    flat = Flat(f, args, kwargs)
    return OBSERVATIONS[name](flat), flat.rest


# ---------------------------------------------------------------- h(w, x): where w is captured, x
# is an argument


def _leaf(t):
    return t.detach().clone().requires_grad_()


def _w_leaf_backward(h, w, x):
    w, x = _leaf(w), _leaf(x)
    total(h(w, x)).backward()
    return w.grad, x.grad


def _w_leaf_only(h, w, x):
    w = _leaf(w)
    total(h(w, x)).backward()
    return w.grad


def _w_nonleaf_backward(h, w, x):
    v = _leaf(w)
    total(h(v * 2, x)).backward()
    return v.grad


def _w_double_backward(h, w, x):
    w, x = _leaf(w), _leaf(x)
    first = torch.autograd.grad(total(h(w, x)), (w, x), create_graph=True)
    second = torch.autograd.grad(total(first), (w, x))
    return [g.detach() for g in first], second


def _w_forward_mode(h, w, x):
    with torch.autograd.forward_ad.dual_level():
        out = h(torch.autograd.forward_ad.make_dual(w, weight(w)), x)
        return tuple(torch.autograd.forward_ad.unpack_dual(out))


def _w_leaf_beside_a_dual(h, w, x):
    """The gradient has a tangent."""
    w = _leaf(w)
    with torch.autograd.forward_ad.dual_level():
        out = h(w, torch.autograd.forward_ad.make_dual(x, weight(x)))
        (g,) = torch.autograd.grad(total(out), w)
        return tuple(torch.autograd.forward_ad.unpack_dual(g))


def _w_grad_inside_plain(h, w, x):
    w = _leaf(w)
    return torch.autograd.grad(total(grad(lambda x: total(h(w, x)))(x)), w)


def _wx_vjp_later(h, w, x):
    out, pull = vjp(h, w, x)
    return out, pull(weight(out))


def _batch(t, size=2):
    return torch.stack([t * (1 + 0.5 * i) for i in range(size)])


CAPTURES = {
    "backward_leaf": _w_leaf_backward,
    "backward_captured_only": _w_leaf_only,
    "backward_nonleaf": _w_nonleaf_backward,
    "double_backward": _w_double_backward,
    "forward_mode": _w_forward_mode,
    "leaf_beside_a_dual": _w_leaf_beside_a_dual,
    "grad": lambda h, w, x: grad(lambda w, x: total(h(w, x)))(w, x),
    "grad_both": lambda h, w, x: grad(lambda w, x: total(h(w, x)), argnums=(0, 1))(w, x),
    "vjp_later": _wx_vjp_later,
    "jvp": lambda h, w, x: jvp(lambda w: h(w, x), (w,), (weight(w),)),
    "jvp_both": lambda h, w, x: jvp(h, (w, x), (weight(w), weight(x))),
    "vmap_captured": lambda h, w, x: vmap(h, (0, None))(_batch(w), x),
    "vmap_argument": lambda h, w, x: vmap(h, (None, 0))(w, _batch(x)),
    "vmap_both": lambda h, w, x: vmap(h, (1, 0))(_batch(w).movedim(0, 1), _batch(x)),
    "vmap_grad": lambda h, w, x: vmap(grad(lambda w, x: total(h(w, x)), argnums=(0, 1)))(
        _batch(w), _batch(x)
    ),
    "vmap_grad_captured": lambda h, w, x: vmap(grad(lambda w: total(h(w, x))))(_batch(w)),
    "grad_vmap": lambda h, w, x: grad(lambda w: total(vmap(h, (None, 0))(w, _batch(x))))(w),
    "hessian_mixed": lambda h, w, x: hessian(lambda w, x: total(h(w, x)), argnums=(0, 1))(w, x),
    "jacrev": lambda h, w, x: jacrev(h, argnums=(0, 1))(w, x),
    "jacfwd": lambda h, w, x: jacfwd(h, argnums=(0, 1))(w, x),
    "outer_of_two_grads": lambda h, w, x: grad(lambda w: total(grad(lambda x: total(h(w, x)))(x)))(w),
    "inner_of_two_grads": lambda h, w, x: grad(lambda x: total(grad(lambda w: total(h(w, x)))(w)))(x),
    "grad_inside_plain": _w_grad_inside_plain,
}


# ---------------------------------------------------------------- the state of torch


def world():
    """What a piece of code can see of torch's state, in values that compare."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
    }


def state():
    """`world` and everything below it that an exception could leave behind."""
    functorch = torch._C._functorch
    return {
        **world(),
        "random stream": tuple(torch.get_rng_state().tolist()),
        "python random": random.getstate(),
        "functorch level": functorch.maybe_current_level(),
        "single level functions": functorch.get_single_level_autograd_function_allowed(),
        "inplace requires_grad": functorch.get_inplace_requires_grad_allowed(),
        "forward AD": torch._C._is_fwd_grad_enabled(),
        "forward AD level": torch.autograd.forward_ad._current_level,
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "VmapMode excluded": torch._C._dispatch_tls_is_dispatch_key_excluded("VmapMode"),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }


# ---------------------------------------------------------------- lifetimes


class Births(TorchDispatchMode):
    """Weak references to all tensors that ops give back below functorch, with the op's name."""

    def __init__(self):
        super().__init__()
        self.refs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.refs.extend(
            (str(func), weakref.ref(t)) for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
        )
        return out

    def alive(self):
        return [name for name, ref in self.refs if ref() is not None]


@contextmanager
def frozen_heap():
    """What lives before is out of the collector's sight, from here on: it sees what is made in here alone, and
    is fast.
    """
    gc.collect()
    gc.freeze()
    yield


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
