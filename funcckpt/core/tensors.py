"""What a call asks of tensors: levels, versions, marks; and buffers among them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..errors import MutationError, describe

# Elements up to which a buffer of a module that is training is copied before the forward.
MAX_BUFFER = 1 << 20
Tensors = tuple[Tensor, ...]


def at_active_levels(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of captured tensors that belong to a functorch level that is active, or are dual."""
    found, level, dual = set(), functorch.maybe_current_level() or 0, wrappers.has_dual_level()
    for x in tensors:
        if not wrappers.is_functorch_wrapped_tensor(x):
            if dual and wrappers.is_plain_dual(x):
                found.add(id(x))
        elif wrappers.is_functorch_wrapped_tensor(y := wrappers.alive(x)):
            if wrappers.maybe_get_level(y) <= level:
                found.add(id(x))
    return found


def requires_grad(x: Tensor) -> bool:
    """Whether `x` does, or what is inside of it."""
    return x.requires_grad or (
        wrappers.is_functorch_wrapped_tensor(x) and requires_grad(wrappers.get_unwrapped(x))
    )


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
                f"{name}: the function calls backward(), which would accumulate the gradient of "
                f"{where(id(x))} ({describe(x)}) again in the recomputation. Use torch.autograd.grad there."
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


# -- buffers: what f may update without being told so ------------------------------------------------------
#
# Running statistics, a count of batches. They are read as of the call, and updated once: by the first run.


def may_be_buffer(x: Tensor) -> bool:
    """Whether a tensor looks like running statistics, or a count of batches."""
    tracked = requires_grad(x) or wrappers.is_plain_dual(wrappers.below_wrappers(x))
    return not tracked and x.numel() <= MAX_BUFFER and x.dim() == (1 if x.is_floating_point() else 0)


def copies_of(buffers: Iterable[Tensor]) -> dict[int, Tensor]:
    """What captured buffers are before the first run, by their ids."""
    return {
        id(x): wrappers.physical(x.clone())[0]
        for x in buffers
        if not x.requires_grad and x.numel() <= MAX_BUFFER
    }


class GivenBuffers:
    """Inputs that may be buffers, such as `functional_call` is given.

    One of no level is updated by f itself. One of a level is updated through one more output, since f runs
    below all levels.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        # Until they are updated.
        self._originals: dict[int, Any] = {i: x for i, x in enumerate(inputs) if may_be_buffer(x)}
        # Those of levels; after the first run, those that it has updated.
        self._at_levels = [i for i, x in self._originals.items() if wrappers.is_functorch_wrapped_tensor(x)]

    def __contains__(self, i: int) -> bool:
        return i in self._originals

    def saved(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as the graph saves them: with the buffers of the call."""
        saved = [*inputs]
        for i, x in self._originals.items():
            with nullcontext() if i in self._at_levels else functorch.without_levels():
                saved[i] = x.clone()
        return saved

    def given(self, inputs: Tensors) -> Tensors:
        """The inputs as f is given them: in its first run it may update a buffer of no level itself."""
        given = [*inputs]
        for i, x in self._originals.items():
            given[i] = inputs[i].clone() if x is None or i in self._at_levels else x
        return (*given,)

    def note(self, inputs: Tensors, before: Tensors) -> None:
        """See which buffers of levels the first run has updated."""
        for i in [*self._at_levels]:
            if not inputs[i]._version and is_same(inputs[i], wrappers.physical(before[i])[0]):
                self._at_levels.remove(i)

    def outputs(self, inputs: Tensors) -> list[Tensor]:
        """What is returned beside the outputs of f."""
        return [inputs[i] for i in self._at_levels]

    def settle(self, outputs: Tensors) -> Tensors:
        """Update the buffers of levels, after the first run; the outputs of f alone."""
        count = len(outputs) - len(self._at_levels)
        with torch.no_grad():
            for i, updated in zip(self._at_levels, outputs[count:], strict=True):
                self._originals[i].copy_(updated)
        self._originals = dict.fromkeys(self._originals)
        return outputs[:count]
