"""What a function shows of itself under transforms: the references of the tests of `remat(f)`.

The transforms are those of `compositions.stacks`. A test runs `remat(f)` and f under one of them and compares
all that comes out, with `compare` or `assert_same`.
"""

import random

import pytest
import support
import torch
from compositions.stacks import is_differentiable as differentiable, stack
from support import no_remat as plain
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

F64 = torch.float64


def tensor(*shape, seed=0, dtype=F64, requires_grad=False):
    """A random tensor that does not touch the global random stream."""
    out = torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=dtype)
    return out.requires_grad_() if requires_grad else out


def weight(t):
    """A fixed tensor of t's shape and dtype with distinct entries, to weigh outputs and tangents with."""
    n = t.numel()
    w = torch.linspace(0.5, 1.5, n + 1, dtype=F64, device=t.device)[:n].reshape(t.shape)
    return (w * (1 + 0.5j)).to(t.dtype) if t.is_complex() else w.to(t.dtype)


def total(tree):
    """A real scalar to which every entry of every differentiable leaf contributes with its own weight."""
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
    """run(remat) gives what run(plain) gives; where plain torch refuses, it raises the same type of error.

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


def of_one(*names):
    """A stack of transforms of a function of one tensor."""
    return lambda f, x: stack(*names)(lambda x, w: f(x))(x, torch.ones(3, 3, dtype=x.dtype))


# What runs f again, and what does not. A test calls REVERSE[name](f, x).
REVERSE = {
    "backward": of_one("backward"),
    "double_backward": of_one("double_backward"),
    "grad": of_one("grad_x"),
    "grad_grad": of_one("grad_x", "grad_x"),
    "vmap_grad": of_one("vmap_different", "grad_x"),
    "grad_vmap": of_one("grad_x", "vmap_different"),
    "hessian": of_one("jacfwd_same", "grad_x"),
    "jvp_grad": of_one("jvp_x", "grad_x"),
    "vjp": of_one("vjp_pull"),
    "jacrev": of_one("jacrev_x"),
}
FORWARD = {
    "jvp": of_one("jvp_x"),
    "vmap": of_one("vmap_different"),
    "vmap_jvp": of_one("vmap_different", "jvp_x"),
    "dual": of_one("dual"),
}
OBSERVATIONS = {
    "eager": of_one("no_grad"),
    **{name: REVERSE[name] for name in "backward double_backward grad grad_grad vmap_grad grad_vmap".split()},
    **{name: FORWARD[name] for name in ("vmap", "jvp")},
}


def moving(f, args, kwargs=None, moves=differentiable):
    """f as a function of one vector, with which each tensor that `moves` moves its own way."""
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))

    def function(x):
        moved = [*leaves]
        for i, t in enumerate(leaves):
            if moves(t):
                moved[i] = t.detach() * (1 - (x * x).sum() * 0.1 / (i + 2)).to(t.dtype)
        args, kwargs = pytree.tree_unflatten(moved, spec)
        out, structure = pytree.tree_flatten(f(*args, **kwargs))
        function.rest = str(structure), [None if isinstance(leaf, torch.Tensor) else leaf for leaf in out]
        return x * 2, [leaf for leaf in out if isinstance(leaf, torch.Tensor)]

    function.rest = None
    return function


def observe(name, f, args=(), kwargs=None):
    """What shows of f(*args, **kwargs) under the transform: (tensors, structure and other leaves)."""
    function = moving(f, args, kwargs)
    return OBSERVATIONS[name](function, tensor(3, seed=9)), function.rest


# h(w, x), where w is captured and x is an argument.
CAPTURES = {
    "backward_leaf": ("backward",),
    "backward_captured_only": ("backward_one_input",),
    "backward_nonleaf": ("backward_through_non_leaves",),
    "double_backward": ("double_backward",),
    "forward_mode": ("dual_both",),
    "leaf_beside_a_dual": ("dual_over_backward",),
    "grad": ("value_and_grad",),
    "grad_both": ("grad_both",),
    "vjp_later": ("vjp_pull",),
    "jvp": ("jvp_both",),
    "vmap_captured": ("vmap_w",),
    "vmap_argument": ("vmap_x",),
    "vmap_both": ("vmap_dims",),
    "vmap_grad": ("vmap_both", "grad_both"),
    "vmap_grad_captured": ("vmap_w", "value_and_grad"),
    "grad_vmap": ("value_and_grad", "vmap_x"),
    "hessian_mixed": ("jacfwd_same", "grad_both"),
    "jacrev": ("jacrev_both",),
    "jacfwd": ("jacfwd_same",),
    "outer_of_two_grads": ("value_and_grad", "grad_x"),
    "inner_of_two_grads": ("grad_x", "value_and_grad"),
    "grad_inside_plain": ("backward_one_input", "grad_x"),
}
CAPTURES = {
    name: lambda h, w, x, names=names: stack(*names)(lambda x, w: h(w, x))(x, w)
    for name, names in CAPTURES.items()
}


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
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "overrides": torch._C._get_torch_function_state().value,
    }


def state():
    """`world` and everything below it that an exception could leave behind."""
    return {
        **state_of_thread(),
        "random stream": tuple(torch.get_rng_state().tolist()),
        "python random": random.getstate(),
        "forward AD level": torch.autograd.forward_ad._current_level,
    }


def state_of_thread():
    """Without what torch and Python have once for all threads."""
    functorch = torch._C._functorch
    return {
        **world(),
        "functorch level": functorch.maybe_current_level(),
        "single level functions": functorch.get_single_level_autograd_function_allowed(),
        "inplace requires_grad": functorch.get_inplace_requires_grad_allowed(),
        "forward AD": torch._C._is_fwd_grad_enabled(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "VmapMode excluded": torch._C._dispatch_tls_is_dispatch_key_excluded("VmapMode"),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }
