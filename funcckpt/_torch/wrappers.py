"""How a tensor is wrapped and unwrapped at one level, and what belongs to which.

Public torch has no such question, and without it nobody can tell what a function has captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import unknown
from .functorch import (
    _set_fwd_grad_enabled,
    below,
    current_level,
    eager_transforms,
    is_tracing,
    kind_of,
    no_torch_function,
    peek_interpreter_stack,
)

try:
    from torch._C._functorch import (  # type: ignore[attr-defined]
        _unwrap_for_grad,
        _wrap_for_grad,
        get_unwrapped,
        is_batchedtensor,
        is_dead_tensor_wrapper,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        maybe_get_bdim,
        maybe_get_level,
        set_inplace_requires_grad_allowed,
        unwrap_if_dead,
    )
except ImportError as error:
    raise unknown(error) from error


def has_dual_level() -> bool:
    """Whether a dual level of plain forward mode is open (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def in_dual_level() -> bool:
    """Whether plain forward mode is active: a dual level is open, and looked at."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of `x` at the level on top; both dual levels of torch use number 0."""
    if not (x.is_floating_point() or x.is_complex()) or is_legacy_batchedtensor(x):
        return None
    if x.is_inference() and not is_functorch_wrapped_tensor(x):
        return None  # it has none, and some levels cannot even be asked
    return forward_ad.unpack_dual(x, level=0).tangent


def without_forward_views(inputs: Sequence[Tensor], record: bool = True) -> Sequence[Tensor]:
    """In a dual level, the primal of a dual tensor is a view of it: a further view is dual again.

    Without `record` nothing requires grad any more: forward mode switches grad mode on.
    """
    if forward_ad._current_level < 0:
        return inputs
    return [
        x if is_legacy_batchedtensor(x) else detached(x).requires_grad_(record and x.requires_grad)
        for x in inputs
    ]


def is_plain_dual(x: Tensor) -> bool:
    """Whether a tensor of no functorch level has a tangent in plain forward mode."""
    # Inside of a transform the question would be answered by its level: ask below all of them.
    if not has_dual_level() or eager_transforms.JVP_NESTING > 0:
        return False
    interpreter = peek_interpreter_stack()
    return tangent_of(x) is not None if interpreter is None else below(interpreter, is_plain_dual, x)


def is_tracked(x: Tensor) -> bool:
    """Whether some transform looks at `x`: it requires grad, belongs to a level, or is dual."""
    x = alive(x)
    if is_functorch_wrapped_tensor(x):  # by a vmap that is over, maybe: no operator could take it
        return maybe_get_level(x) <= current_level()
    return x.requires_grad or is_plain_dual(x)


def alive(x: Tensor) -> Tensor:
    """`x` without the wrappers of grad and jvp levels that are over, as operators see it."""
    while is_dead_tensor_wrapper(x):
        x = unwrap_if_dead(x)
    return x


def unwrap_legacy(x: Tensor) -> tuple[Tensor, int | None]:
    """What `torch.autograd.grad(is_grads_batched=True)` has batched, and its dimension.

    It does so with a vmap of its own, older than functorch, whose level is the innermost.
    """
    if not is_legacy_batchedtensor(x):
        return x, None
    return torch._remove_batch_dim(x, _legacy_level(), 1, 0), 0  # type: ignore[attr-defined]


def wrap_legacy(x: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return x
    x = x.resolve_conj().resolve_neg()  # views that it has no rules for
    batched: Tensor = torch._add_batch_dim(x, dim, _legacy_level())  # type: ignore[attr-defined]
    return batched


def _legacy_level() -> int:
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


def detached(x: Tensor) -> Tensor:
    """Another tensor with the value of `x`, that no one else holds and no graph knows.

    What the vmap of `is_grads_batched` has batched cannot be detached, and is nobody else's. make_fx
    would record a `detach`, and cut the gradient of what it has recorded.
    """
    if is_legacy_batchedtensor(x):
        return x
    if is_tracing() and not (x.requires_grad and x.is_leaf):  # a parameter is recorded as a constant
        with torch.no_grad():
            view = x.view_as(x)
        if not view.requires_grad:
            return view
        # What make_fx records requires grad also under no_grad.
        if view.is_leaf and peek_interpreter_stack() is None:
            return view.requires_grad_(False)
    return x.detach()


def how_to_detach(tensors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """`detached`, or `detach` where that is the same."""
    return detached if is_tracing() or any(map(is_legacy_batchedtensor, tensors)) else Tensor.detach


def wrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_wrap_for_grad, tensors, repeat(level))]


def unwrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_unwrap_for_grad, tensors, repeat(level))]


# Asked of many tensors at once, without a frame of Python's.
require_grad = operator.attrgetter("requires_grad")


def require_grad_at_this_level(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Tensor]:
    """`x.requires_grad_()` of some, which functorch otherwise forbids inside of a transform."""
    set_inplace_requires_grad_allowed(True)
    try:
        return [tensors[i].requires_grad_() for i in indices]
    finally:
        set_inplace_requires_grad_allowed(False)


def has_torch_function(x: Tensor) -> bool:
    """Whether `x` is of a subclass that takes part in what operators do."""
    return type(x) not in (Tensor, torch.nn.Parameter) and not (
        getattr(type(x).__torch_function__, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
        or type(x).__torch_function__ is no_torch_function
    )


def with_memory_for_each(x: Tensor) -> Tensor:
    """A tensor with memory of its own for each element: `x`, or a copy.

    A tangent is stored as its primal is. One that comes from a second evaluation, or is zero, may have
    another layout, and could not be written to where elements share memory, or have none (torch's
    symbolic zeros).
    """
    value = below_wrappers(x)
    if value.layout is not torch.strided or is_legacy_batchedtensor(value):
        return x
    shared = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if shared or value._is_zerotensor() else x


def below_wrappers(x: Tensor) -> Tensor:
    """`x` below all wrappers of functorch."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def everything_below(x: Tensor, nodes: list[Any] | None = None) -> list[Tensor]:
    """What is inside of `x` below all wrappers: its value, and its tangents at whatever levels.

    To `nodes` come the graph nodes that made these, at all levels.
    """
    is_dual = has_dual_level() or eager_transforms.JVP_NESTING
    if nodes is None and not is_dual:
        return [below_wrappers(x)]
    # A pullback may be called after its level has closed; the wrapper still leads to its graph.
    dead = []
    while is_dead_tensor_wrapper(x):
        dead.append(x)
        x = unwrap_if_dead(x)
    found = [x]
    # A tangent can be read only if its level is the innermost.
    interpreter = peek_interpreter_stack()
    if is_dual and (interpreter is None or kind_of(interpreter) == "jvp"):
        with _set_fwd_grad_enabled(True):
            if (tangent := tangent_of(x)) is not None:
                found.append(tangent)
    if nodes is not None:
        nodes += [y.grad_fn for y in (*dead, *found)]
    if interpreter is None:
        return found
    level = interpreter.level()
    found = [get_unwrapped(y) if maybe_get_level(y) == level else y for y in found]
    return [z for y in found for z in below(interpreter, everything_below, y, nodes)]


def is_constant(x: Tensor) -> bool:
    """Whether no active transform looks at what is inside of `x`."""
    x = alive(x)
    if len(everything_below(x)) > 1:
        return False
    while not (x.requires_grad or is_batchedtensor(x) or is_legacy_batchedtensor(x)):
        if not is_functorch_wrapped_tensor(x):
            return True
        x = get_unwrapped(x)
    return False


def storages_of(tensors: Iterable[Tensor]) -> list[int | None]:
    """What tells the memory of tensors from that of others, where there is any."""
    found: list[int | None] = []
    for x in tensors:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        try:
            found.append(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or opaque
            found.append(None)
    return found


def storage_of(x: Tensor) -> int | None:
    return storages_of((x,))[0]


def physical(x: Tensor) -> tuple[Tensor, int]:
    """`x` below all wrappers, batch dimensions moved to the front, and how many there are."""
    batched = 0
    while is_functorch_wrapped_tensor(x):
        dim = maybe_get_bdim(x) if is_batchedtensor(x) else -1
        x = get_unwrapped(x)
        if dim >= 0:
            x = x.movedim(dim, 0)
            batched += 1
    return x, batched
