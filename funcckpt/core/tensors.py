"""What a call asks of single tensors."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..errors import MutationError, describe

# Elements up to which a buffer of a module that is training is copied before the forward.
MAX_BUFFER = 1 << 20


def at_active_levels(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of captured tensors that belong to a functorch level that is active, or are dual."""
    found, level, dual = set(), functorch.maybe_current_level() or 0, wrappers.has_dual_level()
    for x in tensors:
        if not wrappers.is_functorch_wrapped_tensor(x):
            if dual and wrappers.is_plain_dual(x):
                found.add(id(x))
        elif wrappers.is_functorch_wrapped_tensor(y := wrappers.unwrap_if_dead(x)):
            y = wrappers.alive(y) if wrappers.is_dead_tensor_wrapper(y) else y
            if wrappers.maybe_get_level(y) <= level:
                found.add(id(x))
    return found


def requires_grad(x: Tensor) -> bool:
    while True:
        if x.requires_grad:
            return True
        if not wrappers.is_functorch_wrapped_tensor(x):
            return False
        x = wrappers.get_unwrapped(x)


@functools.cache
def references_of_private_leaf() -> int:
    """How many there are to a leaf that one local variable holds, and the graph."""
    with torch.enable_grad():
        y = torch.zeros((), requires_grad=True).sin()
    leaf = next(iter(wrappers.leaves_of([y])))
    return sys.getrefcount(leaf)


def may_be_buffer(x: Tensor) -> bool:
    """Whether a tensor looks like running statistics, or a count of batches."""
    if (
        requires_grad(x)
        or x.numel() > MAX_BUFFER
        or (wrappers.has_dual_level() and wrappers.is_plain_dual(wrappers.below_wrappers(x)))
    ):
        return False
    return x.dim() == (1 if x.is_floating_point() else 0)


def version_of(x: Tensor) -> int | None:
    """How often `x` was changed in place; inference tensors do not count."""
    return None if x.is_inference() else x._version


def gradient_of(x: Tensor) -> Any:
    """What tells whether the gradient of a leaf was assigned, or added to."""
    return None if x.grad is None else (id(x.grad), x.grad._version)


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # inference tensors
        return [*map(version_of, tensors)]


_version = operator.attrgetter("_version")


def attributes_of(tensors: Iterable[Tensor]) -> list[dict[str, Any] | None]:
    """What code can tell of tensors beside their values: one may be a parameter, and carry marks."""
    found: list[dict[str, Any] | None] = []
    for x in tensors:
        # A copy: marks may be changed before the recomputation.
        attributes = x.__dict__.copy() or None
        if isinstance(x, nn.Parameter):
            attributes = {**x.__dict__, "_is_param": True}
        found.append(attributes)
    return found


def dress(x: Tensor, attributes: dict[str, Any]) -> None:
    """Give the attributes of a tensor to one that stands for it."""
    for name, value in attributes.items():
        if name not in x.__dict__:
            setattr(x, name, value)


def is_same(x: Tensor, before: Tensor) -> bool:
    """Whether a buffer is what it was. Where it has no value yet, or to look would be to wait: no."""
    if functorch.is_tracing() or x.is_meta or x.device.type != "cpu":
        return False
    with autograd.without_dispatch_modes():  # a selective checkpoint around it would count the operator
        return torch.equal(wrappers.physical(x.detach())[0], before)


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether values agree, up to the rounding of their dtype; where there are values."""
    if a.is_meta or b.is_meta:
        return True
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def check_gradients(before: Iterable[tuple[Tensor, Any]], name: str, where: Callable[[int], str]) -> None:
    """Raise if f, by a name in words, has accumulated the gradient of a leaf, which was another `before`."""
    for x, gradient in before:
        if gradient_of(x) != gradient:
            raise MutationError(
                f"{name}: the function calls backward(), which accumulates the gradient of {where(id(x))} "
                f"({describe(x)}), and would do so again in the recomputation. Use torch.autograd.grad there."
            )


class Refusing(world.Mode):
    """Raises where an operator is given a tensor that was changed in place, and not for its shape."""

    def __init__(self, changed: Iterable[Tensor], error: Callable[[Tensor], Exception]) -> None:
        super().__init__()
        self._changed, self._error = {*map(id, changed)}, error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) or getattr(func, "__name__", "") != "__get__":
            for x in pytree.tree_leaves((args, kwargs)):
                if id(x) in self._changed:
                    raise self._error(x)
        return out
