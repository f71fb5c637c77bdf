"""Questions about tensors: levels, versions, gradients; and which of them are buffers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..errors import MutationError, describe
from ..tape.recompute import Placeholder
from ..tape.tape import unwatched

# Elements up to which a buffer of a module that is training is copied before the forward. Larger ones are
# nearly always tables that nobody updates: causal masks, angles of positions.
MAX_BUFFER = 1 << 18
# Elements up to which a copy is worth less than to ask an accelerator whether it is needed.
SMALL_BUFFER = 1 << 12
Tensors = tuple[Tensor, ...]
PLAIN_TYPES = frozenset({Tensor, nn.Parameter})


def with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Any, Any]]:
    """The leaves of a pytree, with their paths; with numbers, if a node of the user has no keys."""
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf)[0]
    except ValueError:
        return [((pytree.SequenceKey(i),), x) for i, x in enumerate(pytree.tree_leaves(tree, is_leaf))]


def has_lazy(tensors: Collection[Tensor]) -> bool:
    """Whether some tensors are parameters of lazy modules, which get a shape in their first call."""
    return not PLAIN_TYPES.issuperset(map(type, tensors)) and any(map(is_lazy, tensors))


def drop_stale(found: dict[int, Tensor], layers: Sequence[functorch.Layer]) -> None:
    """Remove tensors of levels that are over, which a function has stored. No operator takes them."""
    for key, x in [*compress(found.items(), map(wrappers.is_functorch_wrapped_tensor, found.values()))]:
        while wrappers.is_functorch_wrapped_tensor(x):
            outer, x, level = x, wrappers.get_unwrapped(x), wrappers.maybe_get_level(x)
            if wrappers.is_dead_tensor_wrapper(outer):
                continue
            is_over = level > len(layers)
            if not is_over and wrappers.is_batchedtensor(outer):
                size = x.size(wrappers.maybe_get_bdim(outer))  # a strided nested tensor tells no shape
                is_over = layers[level - 1][1:3] != ("vmap", size)
            if is_over:
                del found[key]
                break


def requires_grad(x: Tensor) -> bool:
    """Whether `x`, or a tensor inside of it, requires grad."""
    return x.requires_grad or (
        wrappers.is_functorch_wrapped_tensor(x) and requires_grad(wrappers.get_unwrapped(x))
    )


attributes_of = operator.attrgetter("__dict__")


def version_of(x: Tensor) -> int | None:
    """How often `x` was changed in place; None for an inference tensor, which does not count."""
    return None if x.is_inference() else x._version


def gradient_of(x: Tensor) -> Any:
    """A key that changes when the gradient of a leaf is assigned or added to."""
    return None if x.grad is None else (id(x.grad), x.grad._version)


def gradients_behind(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Any]]:
    """The leaves from which some tensors were computed, with `gradient_of` each."""
    return [(x, gradient_of(x)) for x in autograd.entering(tensors).values() if x is not None]


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # inference tensors
        return [*map(version_of, tensors)]


_version = operator.attrgetter("_version")


def is_same(x: Tensor, before: Tensor, may_wait: bool = False) -> bool:
    """Whether a buffer that has its old version has its old value, too. False if that cannot be told.

    Without `may_wait`, no accelerator is made to wait: what is like statistics there, or small, counts as
    updated.
    """
    if functorch.is_tracing() or x.layout is not torch.strided:
        return False
    if x.is_meta or (x.device.type != "cpu" and not may_wait):
        return x.numel() > SMALL_BUFFER and not _is_like_statistics(x)
    # A selective checkpoint would count the operator, and an outer checkpoint may refuse it.
    with autograd.without_dispatch_modes(), autograd.plain():
        now = wrappers.physical(wrappers.alive(x).detach())[0]
        return type(now) in PLAIN_TYPES and torch.equal(now, before)  # a fake tensor has no values


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether values agree, up to the rounding of their dtype. True if there are no values."""
    if any([x.is_meta or isinstance(x, (functorch.FakeTensor, Placeholder)) for x in (a, b)]):
        return True
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def check_gradients(
    before: Iterable[tuple[Tensor, Any]], name: str, arguments: dict[int, str], where: Callable[[int], str]
) -> None:
    """Raise if f has accumulated the gradient of a leaf. `before` is from `gradients_behind`.

    `arguments` are names by id, and `where` gives those of captured tensors.
    """
    for x, gradient in before:
        if gradient_of(x) != gradient:
            place = arguments.get(id(x)) or where(id(x))
            raise MutationError(
                f"{name}: the function calls backward(), which would accumulate the gradient of {place} "
                f"({describe(x)}) again in the recomputation. Use torch.autograd.grad there."
            )


def changed_inside(name: str, x: Tensor, where: str, hint: str = "") -> MutationError:
    if "attribute '_forward_hooks'" in where or "attribute '_forward_pre_hooks'" in where:
        hint = " A hook inside of a checkpoint runs in each recomputation, too: wrap single layers."
    return MutationError(
        f"{name} changed {where} ({describe(x)}) in place. Work on a copy (x.clone()) inside the function, "
        "or return the new value. Only buffers of a module that is in training at the call may be updated, "
        f"of at most {MAX_BUFFER} elements.{hint}"
    )


def changed_between(name: str, x: Tensor, where: str, hint: str = "") -> MutationError:
    return MutationError(
        f"{name}: {where} ({describe(x)}) was changed in place since the forward, as an optimizer changes a "
        f"parameter. Change it after the backward, or pass a copy of it.{hint}"
    )


# Questions to a tensor, as modes see them, whose answers do not depend on its values.
_ABOUT_SHAPES = {"__get__", "size", "dim", "numel", "stride", "__len__", "is_contiguous", "is_inference"}
_ABOUT_SHAPES |= {"ndimension", "nelement", "element_size", "is_floating_point", "is_complex", "get_device"}


class Refusing(world.Mode):
    """Raises if an operator gets a tensor that was changed in place. To read its shape is allowed."""

    def __init__(self, changed: Iterable[Tensor], error: Callable[[Tensor], Exception]) -> None:
        super().__init__()
        self._changed, self._error = {*map(id, changed)}, error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _ABOUT_SHAPES:
            # Before it runs, since the last operator of a recomputation does not come back.
            self.look_at((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.look_at((args, kwargs))
        return out

    def look_at(self, given: Any) -> None:
        for x in pytree.tree_leaves(given):
            if id(x) in self._changed:
                raise self._error(x)


# -- buffers: tensors that f may update --------------------------------------------------------------------
#
# Running statistics, a count of batches. They are read as of the call, and updated once: by the first run.


def buffers_among(candidates: Iterable[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `functional_call` may have been given as buffers.

    They look like one of `own`, the buffers of modules in training, or like running statistics (a vector) or
    a count of batches (a whole number).
    """
    looks = {(x.shape, x.dtype) for x in own}
    return [
        x
        for x in candidates
        if not requires_grad(x)
        and not x.is_nested
        and x.numel() <= MAX_BUFFER
        and (_is_like_statistics(x) or (x.shape, x.dtype) in looks)
    ]


def copies_of(buffers: Iterable[Tensor]) -> dict[int, Tensor]:
    """By id: the values of captured buffers before the first run."""
    with unwatched(), autograd.plain():
        return {
            id(x): wrappers.physical(wrappers.alive(x).clone())[0]
            for x in buffers
            if not x.requires_grad and x.numel() <= MAX_BUFFER
        }


def updated(buffers: Sequence[tuple[Tensor, Tensor, int | None]]) -> dict[int, Tensor]:
    """By id: the old values of buffers that the first run has updated.

    `buffers` are candidates, with their values and versions before that run.
    """
    ids = {id(x) for x, _, version in buffers if version_of(x) != version}
    # Batch normalization updates statistics without a new version. If the version of one is new, all count as
    # updated, and their values need no comparison.
    rest = [(x, old) for x, old, _ in buffers if not (ids and (id(x) in ids or _is_like_statistics(x)))]
    ids |= {id(x) for x, old in rest if not is_same(x, old)}
    return {id(x): old for x, old, _ in buffers if id(x) in ids or (ids and _is_like_statistics(x))}


def _is_like_statistics(x: Tensor) -> bool:
    return x.dim() == (1 if x.is_floating_point() else 0)


def refill(buffer: Tensor, value: Tensor) -> None:
    """Write to a buffer as batch normalization does: no version tells. An earlier call may have saved it."""
    with torch.no_grad(), autograd.version_kept((*wrappers.layers_of(buffer),)):
        buffer.copy_(value)


class GivenBuffers:
    """Inputs that may be buffers, as `functional_call` gets them.

    A buffer of no level is updated by f itself. f runs below all levels, so the new value of a buffer of a
    level is one more output.
    """

    def __init__(self, inputs: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """`own` are the buffers of modules in training."""
        found = {*map(id, buffers_among(inputs, own))}
        # By input number; the values become None once the buffers are updated.
        self._originals: dict[int, Any] = {i: x for i, x in enumerate(inputs) if id(x) in found}
        # The numbers of buffers of levels; after the first run, only of those that it has updated.
        self._at_levels = [i for i, x in self._originals.items() if wrappers.is_functorch_wrapped_tensor(x)]
        # Of these, those whose versions do not tell of the update.
        self._untold: set[int] = set()
        # The versions of the copies that f gets.
        self._versions: dict[int, int | None] = {}

    def __contains__(self, i: int) -> bool:
        return i in self._originals

    def saved(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that the graph saves: with copies of the buffers."""
        saved = [*inputs]
        for i, x in self._originals.items():
            with unwatched(), nullcontext() if i in self._at_levels else functorch.without_levels():
                saved[i] = wrappers.alive(x).clone()
        return saved

    def given(self, inputs: Tensors) -> Tensors:
        """The inputs that f gets: in the first run the original buffers of no level, otherwise copies."""
        given = [*inputs]
        with unwatched():
            for i, x in self._originals.items():
                y = inputs[i]
                if x is None or i in self._at_levels or requires_grad(y):
                    given[i] = y.clone()
                    # (In inference mode, to fill it counts.)
                    self._versions[i] = version_of(wrappers.physical(given[i])[0])
                else:  # at the level at which a pullback records
                    level = wrappers.maybe_get_level(y) if wrappers.is_gradtrackingtensor(y) else None
                    given[i] = x if level is None else wrappers._wrap_for_grad(x, level)
        return (*given,)

    def updated(self, inputs: Tensors, before: Tensors) -> list[Tensor]:
        """The buffers of levels that the first run has updated. They are returned beside the outputs of f."""
        for i in [*self._at_levels]:
            old = wrappers.physical(before[i])[0]
            if version_of(wrappers.physical(inputs[i])[0]) == self._versions[i]:
                self._untold.add(i)
                if is_same(inputs[i], old, may_wait=True):
                    self._at_levels.remove(i)
        return [inputs[i] for i in self._at_levels]

    def settle(self, updated: Sequence[Tensor]) -> None:
        """After the first run: update the buffers of levels with the last of what f returned."""
        with torch.no_grad():
            for i, x in zip(reversed(self._at_levels), reversed(updated), strict=False):
                refill(self._originals[i], x) if i in self._untold else self._originals[i].copy_(x)
        self._originals = dict.fromkeys(self._originals)
