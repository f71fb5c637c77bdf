"""One checkpointed region of plain eager code: what is kept of it, and how it is computed again.

The algorithm is that of torch's non-reentrant checkpoint: while f runs in the forward, a saved-tensor
hook puts a *slot* into the graph in place of each tensor that autograd saves. The first slot that is
read in a backward runs f again, and the n-th tensor saved then goes to the n-th slot; the run stops
when the last slot has its tensor. A tensor is given away when its slot is read, and dies with its slot
otherwise.

Regions nest: the slots of an inner region are its own affair, and its inputs are tensors saved in the
outer one. So what is read from an inner region runs the outer region first, once.

It is written anew for what torch's does not do, and cannot be made to do from outside:

* What f refers to (`held`) is as it was in the forward: other variables of the enclosing function, a
  module that is called through `functional_call`, or in another mode, would give the gradient at those.
* Captured tensors that were changed in place between the forward and the recomputation (a parameter
  that an optimizer has stepped), and saved tensors that the recomputation itself has overwritten, are
  noticed, where torch gives a wrong gradient without a word.
* Tensors inside of containers and in keyword arguments are inputs like all others: they are looked
  after by autograd's version check, and an outer region does not keep them.
* The random streams of all devices are replayed, not those of the CPU and one other kind of device.
* Running statistics of batch_norm, its count of batches and other small buffers are not updated again.
* A call costs less: what does not differ from the forward's world is not entered again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch, world
from ..errors import CheckpointError, MutationError, describe
from ..nodes import may_be_statistics
from . import patched
from .contents import assign, is_as_before, snapshot
from .held import Held

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Slot(dict[Any, tuple[Tensor, int] | None]):
    """What the graph keeps in place of a tensor: a place for it, for each backward that needs it.

    By backward: the tensor and its version, or None once it was read.
    """

    __slots__ = ("__weakref__",)


# Metadata of a saved tensor.
Look = tuple[torch.Size, torch.dtype, torch.device]


class Title:
    """A call of checkpoint in words, for errors: a module is slow to say that it has no name."""

    __slots__ = ("_f",)

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f

    def __str__(self) -> str:
        return f"checkpoint({getattr(self._f, '__qualname__', None) or type(self._f).__qualname__})"


class Log(TorchDispatchMode):
    """The operators that were run, one a line. Started anew each time that it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Any:
        self.lines.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results, given = (
            ", ".join([describe(x) if isinstance(x, Tensor) else repr(x) for x in pytree.tree_leaves(tree)])
            for tree in (out, (args, kwargs or {}))
        )
        self.lines.append(f"{results} = {func}({given})")
        return out


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
        again_as_before: bool = False,
    ) -> None:
        self._f = f
        self._name = Title(f)
        self._check = check
        self._early_stop = early_stop
        self._contexts = contexts
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._inputs = [_torch.save(x) if isinstance(x, Tensor) else x for x in leaves]
        self._world = world.World()
        self._torch_function = _torch._get_torch_function_state()
        self._patched = patched.is_active()
        self._held = Held(f, leaves, again_as_before)
        self._streams = world.random_streams(self._held.streams) if preserve_rng_state else []
        self._states = world.states(self._streams)
        self._slots: list[weakref.ref[Slot]] = []
        self._looks: list[Look] = []
        # What looks like the statistics of a batch_norm that was not found, and was, by its id.
        self._statistics: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        for x in self._held.statistics(leaves):
            self._take_statistics(x)
        self._complete = False
        self._given: Any = None
        # The backwards for which f was run again.
        self._done: set[Any] = set()
        self._lock = threading.RLock()

    # -- the forward --------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first_node = _torch.next_sequence_number()
        self._given = args, kwargs
        with saved_tensors_hooks(self._pack, self.unpack):
            if self._contexts is None:
                out = self._f(*args, **kwargs)
            else:
                out = missing = object()
                with self._contexts[0]:
                    out = self._f(*args, **kwargs)
                if out is missing:
                    raise CheckpointError(
                        f"{self._name}: the forward context provided by context_fn suppressed an exception "
                        "of the function, which therefore has no result. Let it pass."
                    )
        self._complete = True
        if len(world.autocast_devices()) > 1 and self._streams and self._has_new_streams():
            raise CheckpointError(
                f"{self._name}: a device was initialized in the forward, so that the state of its random "
                "stream before is not known. Initialize the device before (torch.empty(0, device=...))."
            )
        # Others are not touched: another thread may be drawing from them.
        self._states = world.moved(self._states)
        self._held.forward_is_done(self._name, out, first_node)
        self._given = None
        if self._statistics:
            self._forget_unchanged()
        return out

    def _has_new_streams(self) -> bool:
        return len(world.random_streams(self._held.streams)) != len(self._streams)

    def _forget_unchanged(self) -> None:
        self._statistics = {
            key: (ref, copy)
            for key, (ref, copy) in self._statistics.items()
            if (x := ref()) is not None and not is_as_before(x, copy)
        }

    def undo(self) -> None:
        """After an exception: as if the forward had not begun."""
        world.set_streams(self._states)
        self._held.undo(self._name)

    def _pack(self, x: Tensor) -> Slot:
        slot = Slot()
        self._slots.append(weakref.ref(slot))
        if self._check:
            self._looks.append(_look(x))
        if type(x) is Tensor and x.dim() == 1 and not self._held.has_all_statistics and may_be_statistics(x):
            self._take_statistics(x)
        return slot

    def _take_statistics(self, x: Tensor) -> None:
        """Autograd saves the arguments of batch_norm before it has updated them."""
        known = self._statistics.get(id(x))
        if id(x) in self._held.running:
            return
        if (known is None or known[0]() is not x) and not x._is_view() and not x.is_inference():
            self._statistics[id(x)] = weakref.ref(x), snapshot(x)

    # -- the backward -------------------------------------------------------------------------------

    def unpack(self, slot: Slot) -> Tensor:
        return self._read(slot, again=False)

    def unpack_again(self, slot: Slot) -> Tensor:
        """A slot that may be read more than once in a backward."""
        return self._read(slot, again=True)

    def _read(self, slot: Slot, again: bool) -> Tensor:
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
        if _version(x) != version:
            raise MutationError(
                f"{self._name}: the function saves a tensor ({describe(x)}) for the backward, and changes "
                "it in place afterwards. Work on a copy (x.clone())."
            )
        return x

    def _fill(self, key: Any, slot: Slot) -> None:
        """Run f again for a backward; or for one slot, outside of one, or if it is read a second time."""
        if not self._complete:
            self._held.gradient_begins(self._given)
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
        leaves = [x.unpack() if isinstance(x, _torch.Saved) else x for x in self._inputs]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        del leaves
        with (
            self._held.here(self._name, self._check),
            self._as_in_forward(),
            # Random numbers are those of the forward, of which a vmap of the backward has no say.
            _torch.without_vmap_mode(),
            _torch.grad_mode(True),
        ):
            run = _Again(self, key, only)
            with suppress(_Stop), saved_tensors_hooks(run.pack, _itself):
                _torch.without_dynamo(self._run_again)(args, kwargs)
        run.check()

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """The world of the forward, where it is not here."""
        with ExitStack() as stack:
            if self._statistics:
                stack.enter_context(_statistics_as_before(list(self._statistics.values())))
            if not self._world.is_here():
                stack.enter_context(self._world.replayed())
            if self._torch_function != _torch._get_torch_function_state():
                stack.enter_context(_torch.torch_function_as(self._torch_function))
            if self._patched != patched.is_active():
                stack.enter_context(patched.active(self._patched))
            if self._states:
                stack.enter_context(world.streams_at(self._states))
            yield

    def _run_again(self, args: Any, kwargs: dict[str, Any]) -> None:
        if self._contexts is None:
            self._f(*args, **kwargs)
        else:
            with self._contexts[1]:
                self._f(*args, **kwargs)

    def _differ(self, there: str, here: str) -> CheckpointError:
        return self._error(
            "A different number of tensors was saved during the original forward and recomputation: "
            f"{there}, and {here}."
        )

    def _error(self, what: str) -> CheckpointError:
        hint = "The function has to do the same each time"
        logs = [context for context in self._contexts or () if isinstance(context, Log)]
        if not logs:
            return CheckpointError(
                f"{self._name}: {what} {hint}; pass debug=True to see the operators of both runs."
            )
        forward, recompute = ("\n".join(log.lines) for log in logs)
        return CheckpointError(
            f"{self._name}: {what} {hint}.\n\nYou are seeing this error because you passed `debug=True` to "
            "checkpoint; these are the operators of both runs.\n\n"
            f"Operations executed during the original forward:\n\n{forward}\n\n"
            f"Operations executed during recomputation:\n\n{recompute}"
        )


@contextmanager
def _statistics_as_before(statistics: Sequence[tuple[weakref.ref[Tensor], Any]]) -> Iterator[None]:
    """What batch_norm updates without a word to the version counter starts from what it was."""
    before = [(x, snapshot(x), was) for ref, was in statistics if (x := ref()) is not None]
    for x, _, was in before:
        assign(x, was)
    try:
        yield
    finally:
        for x, now, _ in before:
            assign(x, now)


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
            if region._check:
                self._compare(i, x)
            slot[self._key] = kept, _version(kept)
        if i == self._last:
            raise _Stop
        return kept

    def _compare(self, i: int, x: Tensor) -> None:
        there, here = self._region._looks[i], _look(x)
        if there != here:
            self._different.append(
                f"tensor at position {i}:\nsaved metadata: {there}\nrecomputed metadata: {here}"
            )

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


def _version(x: Tensor) -> int:
    try:
        return x._version
    except RuntimeError:  # of inference mode
        return 0


def _look(x: Tensor) -> Look:
    return x.shape, x.dtype, x.device
