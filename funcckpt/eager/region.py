"""One checkpointed region of plain eager code: what is kept of it, and how it is computed again.

The algorithm is that of torch's non-reentrant checkpoint. While f runs in the forward, a saved-tensor hook
puts a *slot* into the graph in place of each tensor that autograd saves. When a backward reads the first
slot, f runs again, and the n-th tensor that it saves goes to the n-th slot. The run stops when the last slot
has its tensor. The inputs of a region inside of another region are tensors that the outer one saves.

Two things are new, which cannot be added to torch's from outside:

* In the recomputation, what f refers to (`closures`), the buffers that it updates, and all random streams are
  as they were at the call. Tensors inside of containers and in keyword arguments are inputs like all others.
* Tensors that were changed in place between the two runs, or by the recomputation, are an error. Torch gives
  a wrong gradient.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from .. import world
from .._torch import autograd, dynamo, functorch, kernels, wrappers
from ..closures import Rebuilt, kinds, put_back, put_marks, search
from ..core import tensors
from ..core.call import check_no_opacus
from ..core.flat import Arguments
from ..errors import CheckpointError, MutationError, OptionError, describe
from ..policies import Policy
from ..remat import name_and_check, name_of
from ..tape.operators import run_operator, tensors_in
from ..tape.tape import unwatched
from . import patched

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Options(NamedTuple):
    """The options of `checkpoint`. The first two are also options of `remat`."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    context_fn: Callable[[], Contexts] = noop_context_fn
    debug: bool = False
    early_stop: bool = True
    policy: Policy | None = None


class Slot(dict[Any, tuple[Tensor, int | None]]):
    """What the graph keeps in place of a tensor. Maps each backward to the tensor and its version."""

    __slots__ = ("__weakref__",)


class Versioned:
    """A tensor that is kept as it is, with its version, or that of another one with the same memory.

    `more` writes are still to be counted.
    """

    def __init__(self, x: Tensor, counts: Tensor | None = None, more: int = 0) -> None:
        self._x = autograd.alias(x)
        self._counts = self._x if counts is None else autograd.alias(counts)
        self._version = None if self._counts.is_inference() else self._counts._version + more

    def get(self, allow_mutation: bool = False) -> Tensor:
        if tensors.version_of(self._counts) != self._version and not allow_mutation:
            raise MutationError(
                f"a tensor that is kept for the backward ({describe(self._x)}) has been modified by an "
                "inplace operation. Change a copy (x.clone())."
            )
        if type(self._x) is Tensor and self._x.layout is torch.strided and self._x.numel():
            if not self._x.untyped_storage().nbytes():
                raise MutationError(
                    f"the memory of a tensor that is kept for the backward ({describe(self._x)}) is freed, "
                    "as FSDP frees that of parameters. Use checkpoint or nn.Remat, not checkpoint_scope."
                )
        return self._x


class Log(TorchDispatchMode):
    """A log of the operators that ran. It is cleared each time that the mode is entered."""

    def __enter__(self) -> Any:
        self.operators: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return run_operator(func, args, kwargs or {})


def title(f: Callable[..., Any]) -> str:
    """The name of a call of checkpoint in errors."""
    return f"checkpoint({name_of(f)})"


def _contexts(f: Any, context_fn: Any) -> list[Any]:
    """What `context_fn` returns."""
    made: list[Any] = []
    if callable(context_fn) and isinstance(given := context_fn(), Iterable):
        made = [*given]
    if [hasattr(x, "__exit__") for x in made] != [True, True]:
        raise OptionError(
            f"{title(f)}: context_fn must be a function that returns two contexts, as "
            "functools.partial(create_selective_checkpoint_contexts, policy) does."
        )
    return made


class _Stop(BaseException):
    """All slots have their tensor. A BaseException, so that f does not catch it by accident."""


_NOTHING: Any = nullcontext()
_ON_TENSORS = {"register_hook", "retain_grad"}
_TORCHSCRIPT = torch.jit.ScriptModule, torch.jit.ScriptFunction


class Region:
    """A call of f, from its forward to its last recomputation."""

    def __init__(self, f: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> None:
        if not callable(f) or isinstance(f, type):
            name_and_check(f, "checkpoint")
        stop, debug = autograd.checkpoint_settings()
        self._early_stop = options.early_stop if stop is None else stop
        self._check = options.determinism_check != "none"
        self._logs = [Log(), Log()] if (options.debug if debug is None else debug) else []
        given = [] if options.context_fn is noop_context_fn else _contexts(f, options.context_fn)
        if given and hasattr(given[0], "respect_saved_tensors_hooks"):
            given[0].respect_saved_tensors_hooks = False  # torch 2.15 would warn about our hooks
        # The contexts of the forward, and those of a recomputation.
        self._contexts = [*zip(*filter(None, (given, self._logs)), strict=True)] or [(), ()]
        self._arguments = arguments = Arguments(args, kwargs)
        # The inputs; after the forward, the graph owns them.
        self._given, arguments.tensors = arguments.tensors, []
        for mode in functorch.function_modes() if functorch.has_function_modes() else ():
            # An outer recomputation may stop before anything reads these.
            if isinstance(mode, tensors.Refusing):
                mode.look_at(self._given)
        self._inputs = [*map(autograd.save, self._given)]
        self._marks = [*zip(map(tensors.attributes_of, self._given), map(type, self._given), strict=True)]
        self._found = found = search(f if arguments.are_atoms else (f, arguments.others))
        if found.tensors:
            tensors.drop_stale(found.tensors, ())
        if found.has_hooks_of_opacus:
            check_no_opacus(title(f), f, found)
        # Whether there are lazy modules, which get their tensors in the first call.
        self.is_lazy = tensors.has_lazy(found.tensors.values())
        if self.is_lazy:
            return
        # By id: tensors that the recomputation uses as they are; their versions; whether they require grad.
        # (Tuples of these would take the collector time.)
        self._constants, captured = found.tensors.copy(), [*found.tensors.values()]
        self._versions = dict(zip(found.tensors, tensors.versions_of(captured), strict=True))
        self._differentiated = dict(zip(found.tensors, map(wrappers.require_grad, captured), strict=True))
        self._require_grad = [*map(wrappers.require_grad, self._given)]
        # By id: the numbers of arguments that f has also captured. To f they are one object in each run.
        self._both = {id(x): i for i, x in enumerate(self._given) if id(x) in found.tensors}
        # By id: tensors that the recomputation uses in place of captured ones.
        self._instead: dict[int, Tensor] = {}
        # Buffers of modules in training, and tensors that may replace them in `functional_call`; with copies
        # and versions.
        self._buffers: list[tuple[Tensor, Tensor, int | None]] = []
        if found.updates_statistics:
            own = found.buffers_in_training()
            others = tensors.buffers_among([*self._given, *captured], own)
            buffers = {id(x): x for x in (*own, *others)}
            with autograd.without_dispatch_modes():
                copies = tensors.copies_of(buffers.values())
            self._buffers = [(buffers[n], old, tensors.version_of(buffers[n])) for n, old in copies.items()]
        self._world = world.World()
        self._patched = patched.is_active()
        streams = world.random_streams(found.streams, found.draws_elsewhere)
        self._states = world.states(streams if options.preserve_rng_state else [])
        self._slots: list[weakref.ref[Slot]] = []
        self._metas: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
        self._complete = False
        self._written_by_f: set[int] = set()
        self._lock = threading.RLock()

    # -- the forward --------------------------------------------------------------------------------

    @dynamo.hidden
    def run(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found, first_node = self._found, functorch.next_sequence_number()
        began, older = first_node, set[autograd.Edge]()
        computed = [*filter(autograd.grad_fn_of, found.tensors.values())]
        if (computed or found.opaque) and functorch.uses_accelerator():
            older, first_node = autograd.edges_of((*found.tensors.values(), *self._given)), 0
        gradients = []
        if found.calls_backward:
            gradients = tensors.gradients_behind((*found.tensors.values(), *self._given))
        out = _call(f, args, kwargs, self._pack, self.unpack, self._contexts[0])
        self._complete = True
        # Streams that did not move are left alone: another thread may draw from them. But f may have put back
        # a stream from which it drew.
        if not found.moves_streams:
            self._states = world.moved(self._states)
        if gradients:
            names = {id(x): self._arguments.where(i) for i, x in enumerate(self._given)}
            tensors.check_gradients(gradients, self._name, names, found.where)
        if self._buffers:
            self._settle_updates()
            self._buffers = []
        if self._constants:
            self._written_by_f = {*map(id, self._changed())}
        are_many = functorch.next_sequence_number() - began > autograd.MANY_NODES
        if found.opaque or (computed and not are_many):
            self._look_at_graph(computed, autograd.entering(tensors_in(out), older, first_node))
        for number in (*self._instead, *self._both):
            self._constants.pop(number, None)
        self._given = []
        found.changed()  # notes what f has assigned
        return out

    def _settle_updates(self) -> None:
        """Keep the old values of the buffers that f has updated so far; only these matter."""
        updated = tensors.updated(self._buffers)
        self._inputs = [updated.get(id(x), y) for x, y in zip(self._given, self._inputs, strict=True)]
        self._instead.update(updated)
        for number in updated:
            self._constants.pop(number, None)

    def undo(self) -> None:
        """After an exception: restore the state before the forward."""
        world.set_streams(self._states)
        put_back(self._found)
        for x, before, _ in self._buffers:
            if not x.is_inference():  # which f cannot update
                tensors.refill(x, before)
            self._constants.pop(id(x), None)
        for x in self._changed():
            raise MutationError(
                f"{self._name}: the function changes {self._found.where(id(x))} ({describe(x)}) in place, "
                "and then uses a torch.func transform. Return the new value, or make the change outside."
            )

    @dynamo.hidden
    def _pack(self, x: Tensor) -> Slot:
        slot = Slot()
        self._slots.append(weakref.ref(slot))
        if self._check:
            self._metas.append((() if x.is_nested else x.shape, x.dtype, x.device))
        return slot

    def _look_at_graph(
        self, computed: Sequence[Tensor], edges: Mapping[autograd.Edge, Tensor | None]
    ) -> None:
        """Find the leaves that f uses of what is not searched, and captured results that it does not use.

        The latter are detached: to hold them would keep their own graphs alive. (Graphs without either are
        not looked at: see `autograd.in_order`.)
        """
        known = {*self._found.tensors, *map(id, self._given)}
        private = autograd.references_of_private_leaf()
        for (key, _), leaf in edges.items():
            if leaf is None or key in known or kinds.is_expanded_weight(type(leaf)):
                continue
            # A leaf that only the graph holds was made by f. (But TorchScript holds parameters below Python.)
            if self._found.opaque or sys.getrefcount(leaf) > private:
                self._constants[key], self._versions[key] = leaf, leaf._version
                self._differentiated[key] = True
        nodes = {node for node, _ in edges}
        if unused := [x for x in computed if x.grad_fn not in nodes and id(x) not in self._both]:
            self._instead.update({id(x): wrappers.requires_grad_(x.detach()) for x in unused})
            self._found.weaken(unused)

    def _changed(self) -> list[Tensor]:
        """The constants that were written to since the call."""
        constants = [*self._constants.values()]
        then = map(self._versions.get, self._constants)
        return [*compress(constants, map(operator.ne, tensors.versions_of(constants), then))]

    # -- the backward -------------------------------------------------------------------------------

    @dynamo.hidden
    def unpack(self, slot: Slot) -> Tensor:
        key = autograd.backward_id()
        with self._lock:
            # Some tensors are read twice in a backward: in double backward, what `exp_` saves of a view.
            if key not in slot:
                with (
                    unwatched() if functorch.number_of_dispatch_modes() or kernels.here.watchers else _NOTHING
                ):
                    self._recompute(key)
                if isinstance(key, int):
                    autograd.at_end_of_backward(partial(_forget, weakref.ref(self), key))
            x, version = slot.pop(key)
        if type(key) is object:  # it was read outside of a backward
            _forget(weakref.ref(self), key)
        if version is not None and x._version != version:
            raise MutationError(
                f"{self._name}: the function changes a tensor ({describe(x)}) in place that it has saved for "
                "the backward. Work on a copy (x.clone())."
            )
        return x

    def _recompute(self, key: Any) -> None:
        if torch.is_inference_mode_enabled():  # a backward may be called in it, but nothing is saved
            with torch.inference_mode(False):
                return self._recompute(key)
        if self._buffers:  # f itself calls a backward
            self._settle_updates()
        found = self._found
        changed = found.changed()
        instead = dict(zip(self._instead, map(_copy_of, self._instead.values()), strict=True))
        written = self._changed() if self._check and self._constants else []
        # A model may be frozen for the forward alone.
        constants, then = self._constants.values(), map(self._differentiated.get, self._constants)
        for x in compress(constants, map(operator.ne, map(wrappers.require_grad, constants), then)):
            instead[id(x)] = wrappers.requires_grad_(x.detach(), not x.requires_grad)
            if self._check and x._version != self._versions[id(x)]:
                written.append(instead[id(x)])
        if written and any([isinstance(x, _TORCHSCRIPT) for x in found.opaque]):  # no mode sees what it reads
            raise self._was_changed(written[0])
        given = self._given_again() if self._inputs else []
        for number, i in self._both.items():
            if id(given[i]) != number:
                instead[number] = given[i]
        rebuilt = Rebuilt(found, instead, changed) if changed or instead else None
        # What differs from the world of the forward is put back.
        contexts: Any = [
            # A batched backward may read a slot inside of a vmap, but f ran outside of all transforms.
            functorch.maybe_current_level() is not None and autograd.outside_of_transforms(),
            rebuilt,
            written and tensors.Refusing(written, self._was_changed),
            not self._world.is_here() and self._world.replayed(),
            # In plain forward mode, checkpoints inside of f do nothing.
            functorch.current_dual_level() >= 0 and functorch.set_forward_mode(False),
            self._patched != patched.is_active() and patched.active(self._patched),
            self._states and world.streams_at(self._states),
            # Random numbers are those of the forward: a vmap around the backward must not change them.
            functorch.in_vmap_mode() and functorch.without_vmap_mode(),
        ]
        is_recording = torch.is_grad_enabled()
        with ExitStack() if any(contexts) else _NOTHING as stack:
            for context in filter(None, contexts):
                stack.enter_context(context)
            root, arguments = found.root if rebuilt is None else rebuilt.callable, self._arguments
            f, others = (root, arguments.others) if arguments.are_atoms else root
            args, kwargs = arguments.unflatten(given, others)
            filling = _Filling(self, key)
            try:
                functorch.set_grad_enabled(True)
                release = rebuilt.release if rebuilt is not None and rebuilt.is_cyclic else None
                del given, instead, rebuilt, root, contexts
                _call(f, args, kwargs, filling.pack, lambda x: x, self._contexts[1])
            except (_Stop, Exception):
                # (TorchScript, and code of f that catches everything, raise something else than `_Stop`.)
                if not filling.is_over:
                    raise
            finally:
                functorch.set_grad_enabled(is_recording)
        if release is not None:
            del f, args, kwargs, others
            release()
        if self._complete and not filling.is_over and filling.count != len(self._slots):
            raise self._error(
                "A different number of tensors was saved during the original forward and recomputation: "
                f"{len(self._slots)}, and {filling.count}."
            )

    def _given_again(self) -> list[Tensor]:
        """The arguments of a recomputation, which require grad and look as those of the call did."""
        given = []
        flags = zip(self._inputs, self._require_grad, self._marks, strict=True)
        for kept, requires_grad, (attributes, cls) in flags:
            x = kept.unpack() if isinstance(kept, autograd.Saved) else _copy_of(kept)
            if x.requires_grad != requires_grad:
                x = wrappers.requires_grad_(x.detach(), requires_grad)
            elif requires_grad and not _ON_TENSORS.isdisjoint(self._found.names):
                # Hooks must not act on the tensor of the call again. (Some layouts have no views.)
                with functorch.without_levels(), torch.enable_grad(), suppress(RuntimeError):
                    x = x.view_as(x)
            if attributes or cls is not Tensor:
                put_marks(x, attributes, cls)
            given.append(x)
        return given

    @property
    def _name(self) -> str:
        return title(self._found.root if self._arguments.are_atoms else self._found.root[0])

    def _was_changed(self, x: Tensor) -> MutationError:
        is_inside = id(x) in self._written_by_f
        changed = tensors.changed_inside if is_inside else tensors.changed_between
        hint = ' determinism_check="none" turns this check off.'
        return changed(self._name, x, self._found.where(id(x)), hint)

    def _error(self, what: str) -> CheckpointError:
        text = f"{self._name}: {what} The function must do the same each time"
        if not self._logs:
            return CheckpointError(f"{text}; pass debug=True to see the operators of both runs.")
        forward, recompute = ["\n".join(log.operators) for log in self._logs]
        return CheckpointError(
            f"{text}.\n\nOperations executed during the original forward:\n\n{forward}\n\n"
            f"Operations executed during recomputation:\n\n{recompute}"
        )


class _Filling:
    """One recomputation: the n-th tensor that f saves goes to the n-th slot."""

    def __init__(self, region: Region, key: Any) -> None:
        # What f stores of this run refers to `pack`, and must not keep the region alive.
        self._region, self._key = weakref.ref(region), key
        self.count, self.is_over = 0, False

    @dynamo.hidden
    def pack(self, x: Tensor) -> Tensor:
        i, self.count, region = self.count, self.count + 1, self._region()
        assert region is not None  # it waits for this run
        # An alias: the graph of the recomputation would otherwise refer to itself.
        kept = autograd.alias(x) if x.requires_grad else x
        # None if its graph is gone. (f may also save more, for a gradient that it takes itself.)
        slot = region._slots[i]() if i < len(region._slots) else None
        if slot is not None:
            meta = (() if x.is_nested else x.shape, x.dtype, x.device)
            if region._check and meta != region._metas[i]:
                raise region._error(
                    "Recomputed values for the following tensors have different metadata than during the "
                    f"forward pass: position {i}: {region._metas[i]} saved, {meta} recomputed."
                )
            slot[self._key] = kept, None if kept.is_inference() else kept._version
        if (region._early_stop or not region._complete) and self.count >= len(region._slots):
            self.is_over = True
            raise _Stop
        return kept


def _call(f: Any, args: Any, kwargs: Any, pack: Any, unpack: Any, contexts: Sequence[Any]) -> Any:
    """A call of f with saved-tensor hooks, and with contexts inside of them."""
    autograd.push_hooks(pack, unpack)
    try:
        with ExitStack() if contexts else _NOTHING as stack, autograd.parametrizations_anew() or _NOTHING:
            for context in contexts:
                stack.enter_context(context)
            return f(*args, **kwargs)
    finally:
        autograd.pop_hooks()


def _forget(here: weakref.ref[Region], key: Any) -> None:
    """At the end of a backward: drop recomputed tensors that it has not read."""
    if (region := here()) is not None:
        with region._lock:
            for slot in region._slots:
                (slot() or {}).pop(key, None)


def _copy_of(x: Tensor) -> Tensor:
    """A tensor as one run gets it: the value of a buffer is copied, and no mode sees that."""
    if x.requires_grad:
        return x
    with autograd.without_dispatch_modes(), autograd.plain():
        return x.clone()
