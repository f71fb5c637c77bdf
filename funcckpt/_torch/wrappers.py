"""How a tensor is wrapped and unwrapped at a level, and to which level it belongs.

Public torch does not tell. Without it, one cannot find what a function has captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import (  # type: ignore[attr-defined]
    _unwrap_for_grad,
    _wrap_for_grad,
    get_unwrapped,
    is_batchedtensor,
    is_dead_tensor_wrapper,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
    set_inplace_requires_grad_allowed,
    unwrap_if_dead,
)

from . import autograd, functorch


def in_dual_level() -> bool:
    """Whether plain forward mode is active (`torch.autograd.forward_ad.dual_level`), and enabled."""
    # Inside of `torch.func.jvp` and of a `Jvp`, such a level is theirs.
    is_open = forward_ad._current_level >= 0 and functorch.eager_transforms.JVP_NESTING == 0
    return is_open and torch._C._is_fwd_grad_enabled()


def tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of `x` at the level on top; both dual levels of torch use number 0."""
    if not (x.is_floating_point() or x.is_complex()) or is_legacy_batchedtensor(x):
        return None
    if x.is_inference() and not is_functorch_wrapped_tensor(x):
        return None  # it has none, and at some levels the question is an error
    return forward_ad.unpack_dual(x, level=0).tangent


def without_forward_views(inputs: Sequence[Tensor], record: bool) -> Sequence[Tensor]:
    """Inputs that are not views of dual tensors. In a dual level, a view of a primal would be dual again.

    Without `record`, no result requires grad, even if forward mode switches grad mode on.
    """
    if forward_ad._current_level < 0:
        return inputs
    return [detached(x).requires_grad_(record and x.requires_grad) for x in inputs]


def is_tracked(x: Tensor) -> bool:
    """Whether a transform tracks `x`: it requires grad, or belongs to a level."""
    x = alive(x)
    if is_functorch_wrapped_tensor(x):  # maybe by a vmap that has ended: no operator takes it
        return maybe_get_level(x) <= functorch.current_level()
    return x.requires_grad


def alive(x: Tensor) -> Tensor:
    """`x` without the wrappers of grad and jvp levels that have closed, as operators see it."""
    while is_dead_tensor_wrapper(x):
        x = unwrap_if_dead(x)
    return x


def detached(x: Tensor) -> Tensor:
    """A new tensor with the value of `x`, outside of any graph.

    A tensor that the vmap of `is_grads_batched` has batched cannot be detached, and is returned as it is.
    make_fx would trace a `detach`, which cuts the gradient of the traced graph.
    """
    if is_legacy_batchedtensor(x):
        return x
    if functorch.is_tracing():
        with torch.no_grad():
            view = x.view_as(x)
        if not view.requires_grad:
            return view
        # Under make_fx, results require grad even under no_grad.
        if view.is_leaf and functorch.peek_interpreter_stack() is None:
            return view.requires_grad_(False)
    return x.detach()


def viewed(x: Tensor) -> Tensor:
    """Another tensor for `x`, with its history. (`view_as` is for strided tensors with strided gradients.)"""
    if x.is_nested:
        return x.view_as(x)
    return torch.ops.aten.alias(x) if x.layout is torch.strided else x.clone()


def how_to_detach(tensors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """`detached`, or the faster `detach` where that is the same."""
    return detached if functorch.is_tracing() or any(map(is_legacy_batchedtensor, tensors)) else Tensor.detach


def wrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_wrap_for_grad, tensors, repeat(level))]


def unwrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_unwrap_for_grad, tensors, repeat(level))]


# For many tensors at once, without a Python frame for each.
require_grad = operator.attrgetter("requires_grad")
# A subclass may have a method of its own, which reads attributes that a detached tensor does not have.
requires_grad_: Callable[..., Tensor] = Tensor.requires_grad_


def require_grad_at_this_level(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Tensor]:
    """`x.requires_grad_()` for some of the tensors, which functorch forbids inside of a transform."""
    set_inplace_requires_grad_allowed(True)
    try:
        return [tensors[i].requires_grad_() for i in indices]
    finally:
        set_inplace_requires_grad_allowed(False)


# The number of references to a tensor below Python. A graph holds its leaves: one that was made here has more
# than one if it is used. To search the graph instead takes as long as to make it.
uses_of: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def has_torch_function(x: Tensor) -> bool:
    """Whether `x` is of a subclass with a `__torch_function__` of its own."""
    own: Any = type(x).__torch_function__
    of_tensor: Any = Tensor.__torch_function__
    return own is not functorch.no_torch_function and getattr(own, "__func__", own) is not of_tensor.__func__


def below_wrappers(x: Tensor) -> Tensor:
    """`x` below all wrappers of functorch."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def layers_of(x: Tensor) -> list[Tensor]:
    """`x`, and the tensors inside of its wrappers of functorch, one level after the other."""
    layers = [x]
    while is_functorch_wrapped_tensor(layers[-1]):
        layers.append(get_unwrapped(layers[-1]))
    return layers


def everything_below(x: Tensor, nodes: list[Any] | None = None) -> list[Tensor]:
    """The tensors inside of `x`, below all wrappers: its value, and its tangents at all levels.

    The graph nodes that made these, at all levels, are appended to `nodes`.
    """
    is_dual = forward_ad._current_level >= 0 or functorch.eager_transforms.JVP_NESTING
    if nodes is None and not is_dual:
        return [below_wrappers(x)]
    # A pullback may be called after its level has closed; the wrapper still leads to its graph.
    dead = []
    while is_dead_tensor_wrapper(x):
        dead.append(x)
        x = unwrap_if_dead(x)
    found = [x]
    # A tangent can be read only if its level is the innermost.
    interpreter = functorch.peek_interpreter_stack()
    if is_dual and (interpreter is None or interpreter.key().value == functorch.JVP):
        # (A mode would ask for the primal of an inference tensor, which is an error of torch.)
        with functorch.set_forward_mode(True), autograd.without_dispatch_modes():
            if (tangent := tangent_of(x)) is not None:
                found.append(tangent)
    if nodes is not None:
        nodes += [y.grad_fn for y in (*dead, *found)]
    if interpreter is None:
        return found
    level = interpreter.level()
    found = [get_unwrapped(y) if maybe_get_level(y) == level else y for y in found]
    return [z for y in found for z in functorch.below(interpreter, everything_below, y, nodes)]


def is_constant(x: Tensor) -> bool:
    """Whether no active transform differentiates a tensor inside of `x`."""
    x = alive(x)
    return len(everything_below(x)) == 1 and not any(
        [y.requires_grad or is_legacy_batchedtensor(y) for y in layers_of(x)]
    )


def is_over(x: Tensor) -> bool:
    """Whether `x` belongs to a level that is over, as a transform inside of f leaves it behind."""
    return is_functorch_wrapped_tensor(x := alive(x)) and maybe_get_level(x) > functorch.current_level()


def is_bound(x: Tensor) -> bool:
    """Whether `x` is of no use after its level, since a vmap or `functionalize` has wrapped it."""
    while is_functorch_wrapped_tensor(x) and not (is_batchedtensor(x) or torch._is_functional_tensor(x)):
        x = get_unwrapped(x)
    return is_functorch_wrapped_tensor(x)


def storages_of(tensors: Iterable[Tensor]) -> list[int | None]:
    """A key for the storage of each tensor; None if it has no storage."""
    found: list[int | None] = []
    for x in tensors:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        try:
            found.append(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or opaque
            found.append(None)
    return found


def physical(x: Tensor) -> tuple[Tensor, int]:
    """`x` below all wrappers, with its batch dimensions in front, and their number."""
    batched = 0
    while is_functorch_wrapped_tensor(x):
        dim = maybe_get_bdim(x) if is_batchedtensor(x) else -1
        x = get_unwrapped(x)
        if dim >= 0:
            x = x.movedim(dim, 0)
            batched += 1
    return x, batched
