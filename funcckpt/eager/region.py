"""One checkpointed region of plain eager code: what is kept of it, and how it is computed again.

The algorithm is that of torch's non-reentrant checkpoint: while f runs in the forward, a saved-tensor
hook puts a *slot* into the graph in place of each tensor that autograd saves. The first slot that is
read in a backward runs f again, and the n-th tensor saved then goes to the n-th slot; the run stops
when the last slot has its tensor. A tensor is given away when its slot is read, and dies with its slot
otherwise.

Regions nest: the slots of an inner region are its own affair, and its inputs are tensors saved in the
outer one. So what is read from an inner region runs the outer region first, once.

It is written anew for what torch's does not do, and cannot be made to do from outside:

* What f refers to (`closures`) is in the recomputation what it was at the call. Where something else has
  taken its place, f is made anew around what was there: another variable of the enclosing function, a
  module that is called through `functional_call`, or in another mode, would give the gradient at those.
* Captured tensors that were changed in place between the forward and the recomputation (a parameter
  that an optimizer has stepped), and saved tensors that the recomputation itself has overwritten, are
  noticed, where torch gives a wrong gradient without a word.
* Buffers that a module updates while it trains are read as they were, and updated once.
* Tensors inside of containers and in keyword arguments are inputs like all others: they are looked
  after by autograd's version check, and an outer region does not keep them.
* The random streams of all devices are replayed, not those of the CPU and one other kind of device.
* A call costs less: what does not differ from the forward's world is not entered again.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..closures import Found, Rebuilt
from ..errors import CheckpointError, MutationError, describe
from . import patched

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Arguments that refer to nothing.
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str}
# Elements up to which a buffer of a module that is training is copied before the forward.
_MAX_BUFFER = 1 << 20


class Slot(dict[Any, tuple[Tensor, int] | None]):
    """What the graph keeps in place of a tensor: a place for it, for each backward that needs it.

    By backward: the tensor and its version, or None once it was read.
    """

    __slots__ = ("__weakref__",)


def title(f: Callable[..., Any]) -> str:
    """A call of checkpoint in words, for errors."""
    return f"checkpoint({getattr(f, '__qualname__', None) or type(f).__qualname__})"


class _Stop(BaseException):
    """All slots have their tensor. No exception that f could mean to catch."""


class Region:
    """A call of f, from its forward to its last recomputation."""

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool,
        check: bool,
        early_stop: bool,
        contexts: Contexts | None,
    ) -> None:
        self._check = check
        self._early_stop = early_stop
        self._contexts = contexts
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._inputs = [_torch.save(x) if isinstance(x, Tensor) else x for x in leaves]
        # Arguments that refer to something, by their positions.
        others = {i: x for i, x in enumerate(leaves) if type(x) not in _PLAIN and not isinstance(x, Tensor)}
        self._has_others = bool(others)
        self._found = found = Found((f, others) if others else f)
        # Whether there are modules that get their tensors in their first call.
        self.is_lazy = any(map(is_lazy, found.tensors.values()))
        self._given = leaves
        # Tensors that the recomputation finds as they are.
        self._constants = [*found.tensors.values()]
        self._versions = _versions(self._constants)
        # What the recomputation finds in place of tensors, by their ids.
        self._instead: dict[int, Tensor] = {}
        # Buffers, and copies of what they are.
        self._buffers = [] if self.is_lazy else [(x, _copy(x)) for x in self._may_be_updated()]
        self._world = world.World()
        self._torch_function = _torch._get_torch_function_state()
        self._patched = patched.is_active()
        self._preserves = preserve_rng_state
        self._states = world.states(self._streams())
        self._slots: list[weakref.ref[Slot]] = []
        self._looks: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._complete = False
        # Leaves, and their gradients, when one is asked for inside of f.
        self._gradients: list[tuple[Tensor, Any]] = []
        # The backwards for which f was run again.
        self._done: set[Any] = set()
        self._lock = threading.RLock()

    def _may_be_updated(self) -> list[Tensor]:
        """Buffers of modules that are training, and what `functional_call` may put in their places."""
        buffers = self._found.buffers_in_training()
        if not buffers:
            return []
        looks = {(x.shape, x.dtype) for x in buffers}
        candidates = [x for x in (*self._found.tensors.values(), *self._given) if isinstance(x, Tensor)]
        return [
            x
            for x in {id(x): x for x in candidates}.values()
            if not x.requires_grad and x.numel() <= _MAX_BUFFER and (x.shape, x.dtype) in looks
        ]

    def _streams(self) -> list[world.Stream]:
        if not self._preserves:
            return []
        return world.random_streams(self._found.streams, self._found.draws_elsewhere)

    # -- the forward --------------------------------------------------------------------------------

    def run(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first_node = _torch.next_sequence_number()
        with saved_tensors_hooks(self._pack, self.unpack):
            if self._contexts is None:
                out = f(*args, **kwargs)
            else:
                out = missing = object()
                with self._contexts[0]:
                    out = f(*args, **kwargs)
                if out is missing:
                    raise CheckpointError(
                        f"{self._name}: the forward context provided by context_fn suppressed an exception "
                        "of the function, which therefore has no result. Let it pass."
                    )
        self._complete = True
        if len(world.autocast_devices()) > 1 and len(self._streams()) != len(self._states):
            raise CheckpointError(
                f"{self._name}: a device was initialized in the forward, so that the state of its random "
                "stream before is not known. Initialize the device before (torch.empty(0, device=...))."
            )
        # Others are not touched: another thread may be drawing from them.
        self._states = world.moved(self._states)
        if self._gradients:
            self._check_gradients()
        if self._buffers:
            self._take_updated()
        self._look_at_graph(out, first_node)
        self._given = []
        return out

    def undo(self) -> None:
        """After an exception: as if the forward had not begun."""
        world.set_streams(self._states)
        for x, before in self._buffers:
            with torch.no_grad(), _torch.version_kept(x):
                x.copy_(before)
        updated = {id(x) for x, _ in self._buffers}
        for x in self._changed():
            if id(x) not in updated:
                raise MutationError(
                    f"{self._name}: the function uses a torch.func transform, so that its forward has to be "
                    f"started anew, and has changed {self._found.where(id(x))} ({describe(x)}) in place "
                    "before. Use funcckpt.remat, or change it outside of the function."
                )

    def _pack(self, x: Tensor) -> Slot:
        slot = Slot()
        self._slots.append(weakref.ref(slot))
        if self._check:
            self._looks.append((x.shape, x.dtype, x.device))
        return slot

    def _check_gradients(self) -> None:
        for x, gradient in self._gradients:
            if _gradient(x) != gradient:
                raise MutationError(
                    f"{self._name}: the function calls backward(), which accumulates the gradient of a "
                    f"tensor that it has from outside ({describe(x)}), and would do so again in the "
                    "recomputation. Use torch.autograd.grad inside of it."
                )
        self._gradients = []

    def _take_updated(self) -> None:
        """Of the buffers, those matter that f has updated."""
        updated = {id(x): before for x, before in self._buffers if not _is(x, before)}
        for i, x in enumerate(self._given):
            if id(x) in updated:
                self._inputs[i] = _Updated(id(x))
        self._instead.update(updated)
        self._buffers = []

    def _look_at_graph(self, out: Any, first_node: int) -> None:
        """Find the leaves to which the graph leads, and captured tensors to whose graph it does not lead.

        To hold those would keep another graph alive.
        """
        found = self._found
        leaves, sources = _edges(out, first_node)
        known = {*found.tensors, *map(id, self._given)}
        if hidden := [x for x in leaves if id(x) not in known]:
            self._constants += hidden
            self._versions += _versions(hidden)
        unused = [x for x in found.tensors.values() if x.grad_fn is not None and x.grad_fn not in sources]
        if unused:
            self._instead.update({id(x): x.detach().requires_grad_() for x in unused})
            found.weaken(unused)
        if self._instead:
            kept = [i for i, x in enumerate(self._constants) if id(x) not in self._instead]
            self._constants = [self._constants[i] for i in kept]
            self._versions = [self._versions[i] for i in kept]

    def _changed(self) -> list[Tensor]:
        """The constants that were changed in place since."""
        now = _versions(self._constants)
        if now == self._versions:
            return []
        return [x for x, a, b in zip(self._constants, self._versions, now, strict=True) if a != b]

    # -- the backward -------------------------------------------------------------------------------

    def unpack(self, slot: Slot, again: bool = False) -> Tensor:
        key = _torch.backward_id()
        if key not in self._done or (again and slot.get(key) is None):
            self._fill(key, slot)
        if key not in slot:
            raise self._differ(f"{len(self._slots)} tensors", "fewer")
        value = slot[key]
        if value is None:
            raise CheckpointError(
                f"{self._name}: Unpack is being triggered for a tensor that was already unpacked once. A "
                "backward that reads ctx.saved_tensors has to do so only once"
                + (
                    ". Performing two backward calls that overlap (that need the same saved tensor) is not "
                    "allowed under one GraphExecGroup."
                    if isinstance(key, torch.utils.checkpoint.GraphExecGroup)
                    else "."
                )
            )
        if type(key) is object:  # outside of a backward
            del slot[key]
        else:
            slot[key] = None
        x, version = value
        if x._version != version:
            raise MutationError(
                f"{self._name}: the function saves a tensor ({describe(x)}) for the backward, and changes "
                "it in place afterwards. Work on a copy (x.clone())."
            )
        return x

    def unpack_again(self, slot: Slot) -> Tensor:
        """A slot that may be read more than once in a backward."""
        return self.unpack(slot, again=True)

    def _fill(self, key: Any, slot: Slot) -> None:
        """Run f again for a backward; or for one slot, outside of one, or if it is read a second time."""
        if not (self._complete or self._gradients):
            # Inside of f, someone asks for a gradient: of `backward`, leaves would have it twice.
            tensors = (*self._found.tensors.values(), *self._given)
            self._gradients = [(x, _gradient(x)) for x in tensors if isinstance(x, Tensor) and x.is_leaf]
        with self._lock:
            if type(key) is object or (key in self._done and slot.get(key) is None):
                self._recompute(key, only=slot)
            elif key not in self._done:
                self._recompute(key)
                self._done.add(key)
                if isinstance(key, int):
                    forget = weakref.WeakMethod(self._forget)
                    _torch.at_end_of_backward(lambda: (method := forget()) and method(key))

    def _forget(self, key: int) -> None:
        """A backward is over: drop what it has recomputed and not read."""
        with self._lock:
            self._done.discard(key)
            for ref in self._slots:
                if (slot := ref()) is not None:
                    slot.pop(key, None)

    def _recompute(self, key: Any, only: Slot | None = None) -> None:
        found = self._found
        changed = found.changed()
        instead = {number: x if x.requires_grad else _copy(x) for number, x in self._instead.items()}
        leaves = [x.unpack() if isinstance(x, _torch.Saved) else x for x in self._inputs]
        with ExitStack() as stack:
            f = found.root
            if changed or instead:
                rebuilt = Rebuilt(found, instead, changed)
                f = stack.enter_context(rebuilt)
                stack.callback(rebuilt.repeat_effects)
            if self._has_others:
                f, others = f
                for i, x in others.items():
                    leaves[i] = x
            for i, x in enumerate(self._inputs):
                if type(x) is _Updated:
                    leaves[i] = instead[x]
            args, kwargs = pytree.tree_unflatten(leaves, self._structure)
            del leaves, instead
            self._enter_world(stack)
            run = _Again(self, key, only)
            with suppress(_Stop), saved_tensors_hooks(run.pack, _itself):
                if self._contexts is not None:
                    stack.enter_context(self._contexts[1])
                _torch.without_dynamo(f)(*args, **kwargs)
        run.check()

    def _enter_world(self, stack: ExitStack) -> None:
        """The world of the forward, where it is not here."""
        if self._check:
            if changed := self._changed():
                stack.enter_context(_Refusing(self._name, self._found, changed))
        if not self._world.is_here():
            stack.enter_context(self._world.replayed())
        if self._torch_function != _torch._get_torch_function_state():
            stack.enter_context(_torch.torch_function_as(self._torch_function))
        if self._patched != patched.is_active():
            stack.enter_context(patched.active(self._patched))
        if self._states:
            stack.enter_context(world.streams_at(self._states))
        # Random numbers are those of the forward, of which a vmap of the backward has no say.
        stack.enter_context(_torch.without_vmap_mode())
        stack.enter_context(torch.enable_grad())

    # -- errors -------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return title(self._found.root[0] if self._has_others else self._found.root)

    def _differ(self, there: str, here: str) -> CheckpointError:
        return self._error(
            "A different number of tensors was saved during the original forward and recomputation: "
            f"{there}, and {here}."
        )

    def _error(self, what: str) -> CheckpointError:
        hint = "The function has to do the same each time"
        logs = [context.lines for context in self._contexts or () if hasattr(context, "lines")]
        if not logs:
            return CheckpointError(
                f"{self._name}: {what} {hint}; pass debug=True to see the operators of both runs."
            )
        forward, recompute = map("\n".join, logs)
        return CheckpointError(
            f"{self._name}: {what} {hint}.\n\nYou are seeing this error because you passed `debug=True` to "
            "checkpoint; these are the operators of both runs.\n\n"
            f"Operations executed during the original forward:\n\n{forward}\n\n"
            f"Operations executed during recomputation:\n\n{recompute}"
        )


class _Updated(int):
    """Stands for an argument that f has updated: its id."""


class _Again:
    """One recomputation: what is saved goes to the slots of the forward."""

    def __init__(self, region: Region, key: Any, only: Slot | None) -> None:
        self._region = region
        self._key = key
        self._only = only
        # After which of them to stop.
        self._last = len(region._slots) - 1 if region._early_stop else -1
        self._count = 0
        self._different: list[str] = []

    def pack(self, x: Tensor) -> Tensor:
        region, i = self._region, self._count
        self._count = i + 1
        # The graph of the recomputation would hold itself.
        kept = _torch.alias(x) if x.requires_grad else x
        if i >= len(region._slots):
            if region._complete:
                raise region._error(
                    "trying to save more tensors during recomputation than during the original forward pass "
                    f"({len(region._slots)})."
                )
            return kept  # the forward asks for a gradient of its own part, and goes on
        slot = region._slots[i]()
        # None if someone has run a backward that needs it no more.
        if slot is not None and (self._only is None or self._only is slot):
            if region._check and (here := (x.shape, x.dtype, x.device)) != region._looks[i]:
                there = region._looks[i]
                self._different.append(
                    f"tensor at position {i}:\nsaved metadata: {there}\nrecomputed metadata: {here}"
                )
            slot[self._key] = kept, kept._version
        if i == self._last:
            raise _Stop
        return kept

    def check(self) -> None:
        region = self._region
        if region._complete and self._count != len(region._slots):
            raise region._differ(
                f"{len(region._slots)} tensors saved during forward", f"{self._count} during recomputation"
            )
        if self._different:
            raise region._error(
                "Recomputed values for the following tensors have different metadata than during the forward "
                "pass.\n" + "\n".join(self._different) + "\n"
            )


class _Refusing(world.Mode):
    """Raises where an operator is given a tensor that was changed in place, also where none is saved."""

    def __init__(self, name: str, found: Found, changed: list[Tensor]) -> None:
        super().__init__()
        self._name, self._found, self._changed = name, found, {id(x): x for x in changed}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(y, Tensor) for y in pytree.tree_leaves(out)):  # and not, say, its shape
            for x in pytree.tree_leaves((args, kwargs)):
                if id(x) in self._changed:
                    where = self._found.where(id(x))
                    raise MutationError(
                        f"{self._name}: {where} ({describe(x)}) was changed in place since the forward, "
                        "like a parameter by an optimizer: the recomputation would start from "
                        "the changed values. Run the backward before, or change a copy (x.clone()). If f "
                        'itself does so, and you know better, pass determinism_check="none".'
                    )
        return out


def readable_again(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """An unpack hook, or what reads the same more than once if it is one of a region."""
    region = getattr(unpack, "__self__", None)
    return region.unpack_again if isinstance(region, Region) else unpack


def is_of_checkpoint(hooks: _torch.Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of a checkpoint, ours or torch's."""
    owner = getattr(hooks[0], "__self__", None) if hooks else None
    return isinstance(owner, (Region, _Again)) or _torch.is_torch_checkpoint(hooks)


def in_checkpoint() -> bool:
    """Whether a checkpoint is running f, in the forward or again."""
    return any(map(is_of_checkpoint, _torch.saved_tensors_hooks()))


def _itself(x: Tensor) -> Tensor:
    return x


_version_of = operator.attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_version_of, tensors)]
    except (RuntimeError, ValueError):  # those of inference mode have none, nor those without values
        return [0 if x.is_inference() or is_lazy(x) else x._version for x in tensors]


def _gradient(x: Tensor) -> Any:
    """What tells whether the gradient of a leaf was assigned, or added to."""
    return None if x.grad is None else (id(x.grad), x.grad._version)


def _copy(x: Tensor) -> Tensor:
    """A copy, which no mode and no graph sees."""
    with _torch.without_dispatch_modes(), _torch.plain():
        return x.detach().clone()


def _is(x: Tensor, before: Tensor) -> bool:
    """Whether a buffer is what it was; no, where to look would be to wait for a device."""
    with _torch.without_dispatch_modes(), _torch.plain():
        return x.device.type == "cpu" and torch.equal(x, before)


def _edges(out: Any, first: int) -> tuple[Sequence[Tensor], set[Any]]:
    """The leaves that are used by what was recorded since node number `first`, and the nodes of before."""
    outputs = (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out)
    nodes: list[Any] = [*{y.grad_fn for y in outputs if isinstance(y, Tensor)} - {None}]
    seen: set[Any] = {None, *nodes}
    leaves, sources = [], set()
    for node in nodes:
        following = node.next_functions
        if not following:
            if (x := getattr(node, "variable", None)) is not None:
                leaves.append(x)
        elif node._sequence_nr() >= first:
            for other, _ in following:
                if other not in seen:
                    seen.add(other)
                    nodes.append(other)
        else:
            sources.add(node)
    return leaves, sources
