"""One checkpointed region of plain eager code: what is kept of it, and how it is computed again.

The algorithm is that of torch's non-reentrant checkpoint: while f runs in the forward, a saved-tensor
hook puts a *slot* into the graph in place of each tensor that autograd saves. The first slot that is
read in a backward runs f again, and the n-th tensor saved then goes to the n-th slot; the run stops
when the last slot has its tensor. A tensor is given away when its slot is read, and dies with its slot
otherwise.

Regions nest: the slots of an inner region are its own affair, and its inputs are tensors saved in the
outer one. So what is read from an inner region runs the outer region first, once.

It is written anew for what torch's does not do, and cannot be made to do from outside:

* Captured tensors that were changed in place between the forward and the recomputation (a parameter
  that an optimizer has stepped), and saved tensors that the recomputation itself has overwritten, are
  noticed, where torch gives a wrong gradient without a word.
* Tensors inside of containers and in keyword arguments are inputs like all others: they are looked
  after by autograd's version check, and an outer region does not keep them.
* The random streams of all devices are replayed, not those of the CPU and one other kind of device.
* What f refers to (`held`) is as it was in the forward: other variables of the enclosing function, a
  module that is called through `functional_call`, or in another mode, would give the gradient at those.
* Running statistics of batch_norm, its count of batches and other small buffers are not updated again.
* A call costs less: what does not differ from the forward's world is not entered again.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..errors import CheckpointError, MutationError, describe
from ..nodes import may_be_statistics
from . import redirect
from .contents import assign, changed, is_as_before, snapshot
from .held import Held, Watch, another

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_SIMPLE = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str}


class Slot(dict[Any, tuple[Tensor, int] | None]):
    """What the graph keeps in place of a tensor: a place for it, for each backward that needs it.

    By backward: the tensor and its version, or None once it was read.
    """

    __slots__ = ("__weakref__",)


# How a saved tensor looks; and what it is or is a view of, if that is a parameter.
Look = tuple[tuple[torch.Size, torch.dtype, torch.device, int], weakref.ref[torch.nn.Parameter] | None]


class Title:
    """A call of checkpoint in words, for errors: a module is slow to say that it has no name."""

    __slots__ = ("_f",)

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f

    def __str__(self) -> str:
        return f"checkpoint({getattr(self._f, '__qualname__', None) or type(self._f).__qualname__})"


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
        log: Callable[[], str] | None,
        again_as_before: bool = False,
    ) -> None:
        self._f = f
        self._name = Title(f)
        self._check = check
        self._early_stop = early_stop
        self._contexts = contexts
        self._log = log
        self._hint = "The function has to do the same each time" + (
            "." if log else "; pass debug=True to see the operators of both runs."
        )
        self._structure: Any = None
        leaves: Any = args
        if kwargs or not _SIMPLE.issuperset(map(type, args)):
            leaves = []
            self._structure = _take_leaves((args, kwargs), leaves)
        self._inputs = [_torch.save(x) if isinstance(x, Tensor) else x for x in leaves]
        # Whoever keeps the inputs may hand out copies, whose versions mean nothing.
        self._under_hooks = _torch.top_saved_tensors_hooks() is not None
        self._world = world.World()
        self._torch_function = _torch._get_torch_function_state()
        self._redirected = redirect.is_active()
        self._replaced = _replaced() if check else []
        self._held = Held(f, leaves, again_as_before)
        self._streams = world.random_streams(self._held.streams) if preserve_rng_state else []
        self._states = world.states(self._streams)
        self._slots: list[weakref.ref[Slot]] = []
        self._looks: list[Look] = []
        # Sums of what is saved, if f may tell its recomputation from the forward.
        self._sums: list[Tensor | None] | None = [] if check and self._held.may_count else None
        # What looks like the statistics of a batch_norm that was not found, and was, by its id.
        self._statistics: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        for x in self._held.statistics(leaves):
            self._take_statistics(x)
        self._complete = False
        self._given: Any = None
        # The recomputation that was run for each backward.
        self._done: set[Any] = set()
        self._lock = threading.RLock()

    # -- the forward --------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first_node = _torch.next_sequence_number()
        self._given = args, kwargs
        with saved_tensors_hooks(self._pack, self._unpack):
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
        if len(world.autocast_devices()) > 1 and self._streams and self._new_streams():
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

    def _new_streams(self) -> bool:
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
        if self._sums is not None:
            self._sums.append(_sum(x))
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

    def _unpack(self, slot: Slot, again: bool = False) -> Tensor:
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
        try:
            with self._lock:
                if type(key) is object or (key in self._done and slot.get(key) is None):
                    self._recompute(key, only=slot)
                elif key not in self._done:
                    self._recompute(key)
                    self._done.add(key)
                    if isinstance(key, int):
                        _torch.at_end_of_backward(_forgetting(self, key))
        except CheckpointError as error:
            if self._log is None:
                raise
            raise CheckpointError(
                f"{error}\n\nYou are seeing this error because you passed `debug=True` to checkpoint; these "
                f"are the operators of both runs.\n\n{self._log()}"
            ) from error

    def _forget(self, key: int) -> None:
        """A backward is over: drop what it has recomputed and not read."""
        with self._lock:
            self._done.discard(key)
            for ref in self._slots:
                if (slot := ref()) is not None:
                    slot.pop(key, None)

    # -- the recomputation --------------------------------------------------------------------------

    def unpack_again(self, slot: Slot) -> Tensor:
        """A slot that may be read more than once in a backward."""
        return self._unpack(slot, again=True)

    def _recompute(self, key: Any, only: Slot | None = None) -> None:
        leaves = [x.unpack() if isinstance(x, _torch.Saved) else x for x in self._inputs]
        copies: set[int | None] = set()
        if self._under_hooks:
            copies.update([_torch.storage_of(x) for x in leaves if isinstance(x, Tensor)])
        args, kwargs = leaves, {}
        if self._structure is not None:
            args, kwargs = _with_leaves(self._structure, iter(leaves))
        del leaves
        with (
            self._held.here(self._name, self._check) as held,
            self._as_in_forward(held.copies),
            # Random numbers are those of the forward, of which a vmap of the backward has no say.
            _torch.without_vmap_mode(),
            _torch.grad_mode(True),
        ):
            run = _Again(self, key, only, copies | held.copies)
            with suppress(_Stop), saved_tensors_hooks(run.pack, _itself):
                _torch.without_dynamo(self._run_again)(args, kwargs)
        run.check()

    def _as_in_forward(self, copies: set[int]) -> AbstractContextManager[Any]:
        """The world of the forward, where it is not here."""
        contexts: list[AbstractContextManager[Any]] = []
        if self._replaced:
            contexts.append(self._watching_replaced(copies))
        if self._statistics:
            statistics = [(x, was) for ref, was in self._statistics.values() if (x := ref()) is not None]
            contexts.append(_Unchanged(statistics))
        if not self._world.is_here():
            contexts.append(self._world.replayed())
        if self._torch_function != _torch._get_torch_function_state():
            contexts.append(_torch.torch_function_as(self._torch_function))
        if self._redirected != redirect.is_active():
            contexts.append(redirect.active(self._redirected))
        if self._states:
            contexts.append(world.streams_at(self._states))
        return _all_of(contexts) if contexts else _NOTHING

    def _watching_replaced(self, copies: set[int]) -> AbstractContextManager[Any]:
        if not self._replaced:
            return nullcontext()
        own = _put_back(self._replaced).values()
        errors: dict[int, Callable[[], Exception]] = {
            id(x): functools.partial(another, self._name, x)
            for x in own
            if _torch.storage_of(x) not in copies
        }
        return Watch(errors) if errors else nullcontext()

    def _run_again(self, args: Any, kwargs: dict[str, Any]) -> None:
        if self._contexts is None:
            self._f(*args, **kwargs)
        else:
            with self._contexts[1]:
                self._f(*args, **kwargs)

    def _differ(self, there: str, here: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: A different number of tensors was saved during the original forward and "
            f"recomputation: {there}, and {here}. {self._hint}"
        )


_NOTHING = nullcontext()


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _forgetting(region: Region, key: int) -> Callable[[], None]:
    ref = weakref.ref(region)

    def forget() -> None:
        if (region := ref()) is not None:
            region._forget(key)

    return forget


class _Unchanged(TorchFunctionMode):
    """Puts back what batch_norm updates, without a word to the version counter: its running statistics,
    which start from what they were, and the number of batches, which no autograd node saves.
    """

    def __init__(self, statistics: Sequence[tuple[Tensor, Any]]) -> None:
        super().__init__()
        self._before = [(x, snapshot(x)) for x, _ in statistics]
        for x, was in statistics:
            assign(x, was)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.add_ and args[0].dtype is torch.int64 and args[0].dim() == 0:
            self._before.append((args[0], snapshot(args[0])))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for x, value in reversed(self._before):
            assign(x, value)


# A module that is called with other tensors than its own: their names, and which they are.
Replaced = tuple[weakref.ref[torch.nn.Module], list[tuple[str, int]]]


_FUNCTIONAL_CALL = torch.func.functional_call.__code__


def _replaced() -> list[Replaced]:
    """What `functional_call` has replaced, where one is on the stack."""
    found: list[Replaced] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            there = frame.f_locals
            tensors = there["parameters_and_buffers"]
            found.append((weakref.ref(there["module"]), [(name, id(x)) for name, x in tensors.items()]))
        frame = frame.f_back
    return found


def _put_back(replaced: list[Replaced]) -> dict[int, Tensor]:
    """The modules' own tensors, where those of the forward are gone, by their id."""
    own: dict[int, Tensor] = {}
    for ref, names in replaced:
        if (module := ref()) is None:
            continue
        for name, before in names:
            parent, _, attribute = name.rpartition(".")
            with suppress(AttributeError):
                x = getattr(module.get_submodule(parent), attribute)
                if isinstance(x, Tensor) and id(x) != before:
                    own[id(x)] = x
    return own


class _Again:
    """One recomputation: what is saved goes to the slots of the forward."""

    def __init__(self, region: Region, key: Any, only: Slot | None, copies: set[int | None]) -> None:
        self._only = only
        self._region = region
        self._key = key
        self._copies = copies
        self._slots, self._looks = region._slots, region._looks
        # After which of them to stop.
        self._last = len(self._slots) - 1 if region._early_stop else -1
        self._count = 0
        self._more = False
        self._different: list[str] = []
        # Parameters that the forward did not have: of a module, unless f has made them itself.
        self._others: list[weakref.ref[torch.nn.Parameter]] = []

    def pack(self, x: Tensor) -> Tensor:
        i = self._count
        self._count = i + 1
        # The graph of the recomputation would hold itself.
        kept = _torch.alias(x) if x.requires_grad else x
        if i >= len(self._slots):
            self._no_slot_left()
            return kept
        slot = self._slots[i]()
        # None if someone has run a backward that needs it no more.
        if slot is not None and (self._only is None or self._only is slot):
            if self._looks:
                (look, parameter), there = self._looks[i], _look(x)
                is_same = look == there[0] and parameter is there[1] and self._region._sums is None
                if not is_same and self._is_another(i, (look, parameter), there, x):
                    kept = _torch.same_memory(kept)  # which does not keep alive what it is a view of
            slot[self._key] = kept, _version(kept)
        if i == self._last:
            raise _Stop
        return kept

    def _no_slot_left(self) -> None:
        region = self._region
        if region._complete:
            raise CheckpointError(
                f"{region._name}: trying to save more tensors during recomputation than during the "
                f"original forward pass ({len(self._slots)}). {region._hint}"
            )
        self._more = True  # the forward asks for a backward of its own part, and goes on

    def _is_another(self, i: int, here: Look, there: Look, x: Tensor) -> bool:
        """Whether `x` is of another parameter than in the forward; an error if it was changed."""
        region = self._region
        (look_here, parameter_here), (look_there, parameter) = here, there
        if look_here[:3] != look_there[:3]:
            self._different.append(
                f"tensor at position {i}:\nsaved metadata: {look_here}\nrecomputed metadata: {look_there}"
            )
            return False
        if region._sums is not None and not _is_near(region._sums[i], _sum(x)):
            raise CheckpointError(
                f"{region._name}: the recomputation saves other values than the forward ({describe(x)}). The "
                "function counts in a list or in a variable of the enclosing function, and does another "
                "thing each time: pass the number as an argument."
            )
        if parameter is not None and (parameter_here is None or parameter_here() is not parameter()):
            self._others.append(parameter)
            return True
        if look_here != look_there and not (self._copies and _torch.storage_of(x) in self._copies):
            raise changed(region._name, describe(x))
        return False

    def _alive(self) -> list[Tensor]:
        return [x for ref in self._others if (x := ref()) is not None]

    def check(self) -> None:
        region = self._region
        if self._alive():
            gc.collect()
            for x in self._alive():
                raise another(region._name, x)
        if self._more:
            return
        if self._count != len(region._slots):
            raise region._differ(
                f"{len(region._slots)} tensors saved during forward", f"{self._count} during recomputation"
            )
        if self._different:
            raise CheckpointError(
                f"{region._name}: Recomputed values for the following tensors have different metadata than "
                f"during the forward pass. {region._hint}\n" + "\n".join(self._different)
            )


def _take_leaves(x: Any, leaves: list[Any]) -> Any:
    """Containers without their leaves. Quicker than pytree, which does what is not so common."""
    kind = type(x)
    if kind in _SIMPLE:
        leaves.append(x)
        return None
    if kind is tuple or kind is list:
        return kind([_take_leaves(y, leaves) for y in x])
    if kind is dict:
        return {key: _take_leaves(y, leaves) for key, y in x.items()}
    flat, structure = pytree.tree_flatten(x)
    leaves.extend(flat)
    return structure


def _with_leaves(structure: Any, leaves: Iterator[Any]) -> Any:
    kind = type(structure)
    if structure is None:
        return next(leaves)
    if kind is tuple or kind is list:
        return kind([_with_leaves(part, leaves) for part in structure])
    if kind is dict:
        return {key: _with_leaves(part, leaves) for key, part in structure.items()}
    return pytree.tree_unflatten([next(leaves) for _ in range(structure.num_leaves)], structure)


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


_metadata_of = operator.attrgetter("shape", "dtype", "device", "_version")


def _look(x: Tensor) -> Look:
    if (base := x._base) is None:
        base = x
    parameter = weakref.ref(base) if type(base) is Parameter else None
    try:
        return _metadata_of(x), parameter
    except RuntimeError:  # of inference mode
        return (x.shape, x.dtype, x.device, 0), parameter


def _sum(x: Tensor) -> Tensor | None:
    """By which the values of two tensors are compared, where a sum can be had."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_complex() or x.is_meta:
        return None
    with _torch.without_dispatch_modes(), _torch.plain(), torch.no_grad():
        return x.detach().double().abs().sum()


def _is_near(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or bool(torch.isclose(a, b, rtol=1e-3, equal_nan=True))
