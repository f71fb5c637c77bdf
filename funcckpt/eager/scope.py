"""`checkpoint_scope`: tensors made in a block of code are not kept for the backward, wherever they are used.

In the block a dispatch mode records the operators that make a storage, or write to one that the block made. A
saved-tensor hook gives the graph a slot in place of a tensor in such a storage; all other tensors are kept.
The first slot that is read replays, in order, the operators for all slots that still wait. Results that this
backward does not read stay for the next.

After the block the hook cannot stay active: torch.func would refuse to run. So the tensors of the block
become `ScopedTensor`s, whose `__torch_function__` activates the hook for each operator that is given one.

What the block reads from outside is kept, once, also if an earlier scope made it: scopes around the layers of
a chain keep the results of the layers. (The idea is from RETURNN's `gradient_checkpoint_scope`.)
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import world
from .._torch import autograd, dynamo, functorch, wrappers
from ..core.tensors import version_of
from ..errors import TransformError
from ..tape import operators
from ..tape.operators import TensorMeta, kind_of, name_of
from ..tape.tape import unwatched
from .region import Versioned

_REFUSED = (
    "checkpoint_scope works by saved-tensor hooks, which torch.func transforms refuse. Use remat there, with "
    "the block as a function: x = remat(lambda a, b: a + b)(a, b)"
)


@contextmanager
def checkpoint_scope() -> Iterator[None]:
    """A ``with`` block whose tensors are not kept for the backward, but recomputed when they are needed.

    The graph does not store tensors that are made in the block, wherever they are used later. When a backward
    needs the first of them, all are recomputed once, in order. They are freed as they are used. Tensors that
    the block reads from outside are kept.

    Scopes may be nested. A `checkpoint` may be inside of a scope or around it. Under a `torch.func`
    transform, or if the block uses one, a TransformError is raised: use `remat`.

    Notes
    -----
    After the block its tensors have the class `ScopedTensor`, a subclass of `torch.Tensor`. One that is
    printed or copied is kept like any other from then on, and so is one that an `autograd.Function` gets
    directly. If grad mode is off when the scope is entered, nothing is recorded. A dispatch mode that changes
    results must be entered inside of the block.

    Examples
    --------
    Neither the noise nor the noisy weight is kept.

    >>> import torch
    >>> from funcckpt import checkpoint_scope
    >>> w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    >>> with checkpoint_scope():
    ...     noisy = w + 0.1 * torch.randn_like(w)
    >>> (x @ noisy).sum().backward()
    >>> torch.allclose(x.grad[0], noisy.sum(1))
    True
    """
    if functorch.maybe_current_level() is not None:
        raise TransformError(_REFUSED)
    around, top = _current(), autograd.top_saved_tensors_hooks()
    # A scope inside of another is part of it, unless a checkpoint lies between: its recomputation runs
    # outside of the outer scope, and must save the same tensors.
    if not torch.is_grad_enabled() or (around is not None and top is not None and top[0] is around.pack):
        yield
        return
    block, before = _Block(top), getattr(_here, "block", None)
    _here.block = block
    try:
        with world.own_autocast_cache(), saved_tensors_hooks(block.pack, _unpack), block:
            yield
    except RuntimeError as error:
        if autograd.REFUSES_HOOKS in str(error):
            raise TransformError(_REFUSED) from error
        raise
    finally:
        _here.block = before
        block.close()


_here = threading.local()


def _current() -> _Block | None:
    """The block that records now. A backward that runs inside of a block is not part of it."""
    block: _Block | None = getattr(_here, "block", None)
    return None if block is None or block.task != autograd.graph_task() else block


# -- what was made ----------------------------------------------------------------------------------


class _Made:
    """A storage that a block has made."""

    version: int | None = None  # at the end of the block
    is_filled = True  # False while it is only allocated: no operator has written to it


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of `x`, if `x` is a plain strided tensor."""
    if type(x) not in _PLAIN_TYPES or not operators.is_plain(x):
        return None
    if wrappers.is_functorch_wrapped_tensor(x) or wrappers.is_legacy_batchedtensor(x):
        return None
    return x.untyped_storage()


def _find(x: Tensor, block: _Block | None = None) -> tuple[_Block, _Made] | None:
    """The block that made the storage of `x` and can still replay it; with `block`, only that block."""
    found: tuple[_Block, _Made] | None = getattr(_storage(x), "_funcckpt_made", None)
    return None if found is None or found[0].is_over or block not in (None, found[0]) else found


def _leave(x: Tensor, block: _Block) -> None:
    """Keep this storage of a block from now on: something else than a recorded operator writes to it."""
    if x.layout is torch.strided and not wrappers.is_functorch_wrapped_tensor(x):
        storage: Any = x.untyped_storage()
        if getattr(storage, "_funcckpt_made", (None,))[0] is block:
            del storage._funcckpt_made


class _Kept:
    """A tensor that is kept: by the hooks around the scope, if any, or as it is."""

    is_copied = False

    def __init__(self, x: Tensor, below: autograd.Hooks | None) -> None:
        self._x, self._version, self._has_hooks = weakref.ref(x), version_of(x), below is not None
        self.unpack: Callable[[], Tensor] = (
            Versioned(x).get if below is None else functools.partial(below[1], below[0](x))
        )

    def copy(self) -> None:
        """Called before an operator writes to it, of which no version tells."""
        if not self.is_copied:
            x = self._x()  # other hooks may be those of a checkpoint, and would recompute it
            if x is None or version_of(x) != self._version:
                if not self._has_hooks:
                    return  # to read it will raise
                x = self.unpack()
            self.unpack, self.is_copied = Versioned(x.clone()).get, True


_Source = _Made | _Kept


class _View(NamedTuple):
    """A view of a storage that a block has made, or a kept tensor."""

    source: _Source
    meta: TensorMeta | None = None

    def on(self, values: dict[_Source, Tensor]) -> Tensor:
        base = values[self.source]
        if self.meta is None:
            return base
        size, strides, offset, dtype, device = self.meta
        if base.dtype == dtype:
            return base.as_strided(size, strides, offset)
        return torch.empty(0, dtype=dtype, device=device).set_(base.untyped_storage(), offset, size, strides)


class _Operation(NamedTuple):
    """An operator of the block, recorded so that it can run again."""

    func: Any
    # Flat arguments: a _View for each tensor, and all other values.
    leaves: list[Any]
    structure: pytree.TreeSpec
    # Positions of kept tensors to which it writes.
    copied: list[int]
    # The storages that it makes, by position among the flat results, and those that it writes to.
    makes: dict[int, _Made]
    writes: set[_Source]
    streams: world.States

    def sources(self) -> list[_Source]:
        return [x.source for x in self.leaves if isinstance(x, _View)]

    def run(self, values: dict[_Source, Tensor]) -> None:
        leaves = [x.on(values) if isinstance(x, _View) else x for x in self.leaves]
        for i in self.copied:
            leaves[i] = leaves[i].clone()
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        # A vmap around the backward must not change the random numbers.
        with world.streams_at(self.streams), functorch.without_vmap_mode():
            out = pytree.tree_leaves(self.func(*args, **kwargs))
        for position, made in self.makes.items():
            values[made] = out[position]


class _Graph:
    """Lives as long as a graph of the block, which may have saved nothing that the block made."""


class _Block(TorchDispatchMode):
    """A block. It records operators while it is open, and replays them in a backward."""

    supports_higher_order_operators = True

    def __init__(self, below: autograd.Hooks | None) -> None:
        super().__init__()
        self.task = autograd.graph_task()
        pack: Any = functools.partial(_pack, below)
        pack.keeps_nothing = True
        self.pack = pack
        # Whether all graphs that refer to the block are gone.
        self.is_over = False
        self._below = below
        self._operations: list[_Operation] = []
        # By id and version: tensors that were read from outside.
        self._kept: dict[tuple[int, int | None], tuple[weakref.ref[Tensor], _Kept]] = {}
        self._tensors: list[weakref.ref[Tensor]] = []
        self._slots: set[weakref.ref[_Slot]] = set()
        self._graphs: set[weakref.ref[_Graph]] = set()
        self._lock = threading.RLock()
        self._replayed = -1
        self._world = world.World()

    def close(self) -> None:
        # Avoids a reference cycle: other hooks refer to what they keep, and that may refer to this block.
        self.pack = self._below = None
        for ref in self._tensors:
            x: Any = ref()
            # (What was computed from a tensor of an earlier block is a ScopedTensor already.)
            if type(x) in (Tensor, ScopedTensor) and (found := _find(x, self)) is not None:
                found[1].version = version_of(x)
                if x.grad_fn is not None:
                    graph = _Graph()
                    x.grad_fn.metadata[graph] = None
                    self._graphs.add(weakref.ref(graph, self._forget))
                x.__class__ = ScopedTensor
        self._tensors.clear()
        self._kept.clear()

    def _keep(self, x: Tensor) -> _View:
        key = id(x), version_of(x)
        if key not in self._kept or self._kept[key][0]() is not x or self._kept[key][1].is_copied:
            # A weak reference: a remat inside counts the others to a leaf that its function makes.
            self._kept[key] = weakref.ref(x), _Kept(x, self._below)
            if not x.requires_grad and (storage := _storage(x)) is not None:
                vars(storage).setdefault("_funcckpt_kept", weakref.WeakSet()).add(self._kept[key][1])
        return _View(self._kept[key][1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operators.is_subclass_first(types):
            return NotImplemented  # this mode sees its inner tensors later
        # Results of a higher-order operator are kept.
        if isinstance(func, autograd.HigherOrderOperator):
            return operators.run_operator(func, args, kwargs)
        # In a block or a backward inside of this one; a collective, which may still run when it returns.
        if _current() is not self or func.namespace in operators.COLLECTIVES:
            for x in operators.written(func, args, kwargs):
                _leave(x, self)
            return operators.run_operator(func, args, kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        # (A view of a tensor of any class is not new.)
        given = {key for key in wrappers.storages_of(tensors.values()) if key is not None}
        changed = {*map(id, operators.written(func, args, kwargs))}
        # `mul_` reads what it writes to; `copy_`, `index_put_` and `mul(out=)` do not.
        reads = torch.Tag.pointwise in func.tags and "out" not in kwargs
        for x in tensors.values():
            if id(x) in changed and _storage(x) is None:
                _leave(x, self)  # it writes to a conjugate, or as another class
            elif (made := _find(x, self)) is not None and not made[1].is_filled and kind_of(func) != "view":
                if reads or id(x) not in changed:
                    _leave(x, self)  # a kernel that torch does not dispatch has filled it
                made[1].is_filled = True
        # Taken before the operator runs: it may exchange or resize a storage.
        views = {
            i: _View(found[1], TensorMeta.of(x))
            for i, x in tensors.items()
            if (found := _find(x, self)) is not None
        }
        copied = [i for i, x in tensors.items() if id(x) in changed and i not in views]
        # Beside what they make, some operators write to buffers, and no version tells (observers of ranges).
        makes_new = copied and any([x.alias_info is None for x in func._schema.returns])
        before = {i: tensors[i].clone() for i in copied} if makes_new else {}
        for i in before:
            for kept in [*getattr(_storage(tensors[i]), "_funcckpt_kept", ())]:
                kept.copy()
        states = world.states_drawn_from(func, args, kwargs)
        with unwatched():  # a policy would hand out what an earlier run has made in a scope
            out = operators.run_operator(func, args, kwargs)
        makes = {}
        for position, y in enumerate(pytree.tree_leaves(out)):
            if isinstance(y, Tensor):
                self._tensors.append(weakref.ref(y))
                storage = _storage(y)
                # (It may be known already: a selective checkpoint hands out results of the forward.)
                is_new = storage is not None and storage._cdata not in given and _find(y, self) is None
                if is_new and name_of(func) not in _READS_GRAD_MODE:
                    makes[position] = _Made()
                    makes[position].is_filled = not name_of(func).startswith(("empty", "new_empty"))
                    storage._funcckpt_made = self, makes[position]  # type: ignore[union-attr]
        writes = {views[i].source for i, x in tensors.items() if id(x) in changed and i in views}
        if makes or writes:
            for i, x in tensors.items():
                leaves[i] = views[i] if i in views else self._keep(before.get(i, x))
            drawn = world.moved(states)
            self._operations.append(_Operation(func, leaves, structure, copied, makes, writes, drawn))
        return out

    # -- the recomputation -------------------------------------------------------------------------

    def slot(self, made: _Made, x: Tensor) -> _Slot:
        slot = _Slot(self, _View(made, TensorMeta.of(x)), len(self._operations))
        self._slots.add(weakref.ref(slot, self._forget))
        return slot

    def _forget(self, gone: weakref.ref[Any]) -> None:
        """What a graph has saved is gone, or a graph that has saved nothing. When all are, a tensor of the
        block must not keep alive what the block read.
        """
        is_slot = gone in self._slots
        self._slots.discard(gone)
        self._graphs.discard(gone)
        if self.pack is None and not self._slots and (is_slot or not self._graphs):
            self.is_over = True
            self._operations.clear()

    @dynamo.hidden
    def unpack(self, slot: _Slot) -> Tensor:
        with self._lock:
            if slot.value is None:
                task = autograd.graph_task()
                # Outside of a backward, only the slot that is read is filled.
                slots = [slot] if task in (-1, self._replayed) else [ref() for ref in [*self._slots]]
                # The block ran outside of all transforms that are around the backward.
                is_inside = functorch.maybe_current_level() is not None
                around = autograd.outside_of_transforms() if is_inside else nullcontext()
                with unwatched(), around, nullcontext() if self._world.is_here() else self._world.replayed():
                    self._replay([s for s in slots if s is not None and s.value is None])
                self._replayed = task
            x, slot.value = slot.value, None
        assert x is not None
        return x

    def _replay(self, slots: Sequence[_Slot]) -> None:
        # By storage, those that were saved first at the end.
        waiting: dict[_Source, list[_Slot]] = defaultdict(list)
        for slot in sorted(slots, key=operator.attrgetter("before"), reverse=True):
            waiting[slot.view.source].append(slot)
        needed = {*waiting}
        # Operators, last first, with the storages that no later operator or slot uses.
        steps: list[tuple[int, _Operation, set[_Source]]] = []
        for i, operation in reversed([*enumerate(self._operations)]):
            uses = {*operation.makes.values(), *operation.writes}
            if not needed.isdisjoint(uses):
                uses.update(operation.sources())
                steps.append((i, operation, uses - needed))
                needed |= uses
        values: dict[_Source, Tensor] = {}
        for i, operation, last in reversed(steps):
            for source in operation.sources():
                if isinstance(source, _Kept) and source not in values:
                    values[source] = source.unpack()  # other hooks may recompute it
            # Autocast is off: casts were recorded as operators.
            with torch.no_grad(), autograd.plain(), autograd.without_autocast():
                for source in waiting.keys() & operation.writes:
                    while waiting[source] and waiting[source][-1].before <= i:
                        slot = waiting[source].pop()
                        slot.value = slot.view.on(values).clone()
                operation.run(values)
            for source in last:
                del values[source]
        with torch.no_grad(), autograd.plain():
            for slot in slots:
                if slot.value is None:
                    slot.value = slot.view.on(values)


@dataclass(eq=False)
class _Slot:
    """What the graph keeps in place of a tensor that a block has made."""

    block: _Block
    view: _View
    # How many operators of the block ran before it was saved.
    before: int
    value: Tensor | None = None

    def unpack(self) -> Tensor:
        return self.block.unpack(self)


# -- what is saved, and who saves it ------------------------------------------------------------------


@dynamo.hidden
def _pack(below: autograd.Hooks | None, x: Tensor) -> _Slot | _Kept:
    """A pack hook: a slot for a tensor that a block has made, the tensor itself for all others."""
    found, block = _find(x), _current()
    # A block keeps tensors of other blocks. So does a checkpoint: its recomputation must save the same number
    # of tensors, whichever blocks can still be replayed then.
    if found is None or (found[0] is not block and (block is not None or autograd.is_checkpoint(below))):
        return _Kept(x, below)
    # The recomputation of a remat has the tensor, which a slot would compute again.
    if found[0].task != autograd.graph_task():
        return _Kept(x, below)
    if found[1].version not in (None, version_of(x)):
        return _Kept(x, below)  # written to after the block: a replay gives the old value
    if not found[1].is_filled:
        _leave(x, found[0])
        return _Kept(x, below)
    return found[0].slot(found[1], x)


_unpack: Callable[[Any], Tensor] = operator.methodcaller("unpack")


class ScopedTensor(Tensor):
    """A tensor that was made in a `checkpoint_scope`, after the end of the block."""

    __module__ = "torch"  # by which libraries (opt_einsum) tell tensors from arrays

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_PLAIN_TENSORS or not _KNOWN.issuperset(types):  # other subclasses: plain from here on
            for x in pytree.tree_leaves((args, kwargs)):
                if type(x) is cls:
                    x.__class__ = Tensor  # type: ignore[assignment]
            return func(*args, **kwargs)
        hooks: AbstractContextManager[Any] = nullcontext()
        # Not inside of a checkpoint: in its recomputation the same tensor is plain, and both runs must save
        # the same.
        in_checkpoint = any(map(autograd.is_checkpoint, autograd.saved_tensors_hooks()))
        if torch.is_grad_enabled() and _current() is None and autograd.may_push_hooks() and not in_checkpoint:
            hooks = saved_tensors_hooks(functools.partial(_pack, autograd.top_saved_tensors_hooks()), _unpack)
        with autograd.subclasses_asleep(), hooks:
            out = func(*args, **kwargs)
        for y in operators.results(out):
            if type(y) is Tensor and _find(y) is not None:
                y.__class__ = cls
            elif func is Tensor.detach:  # nothing can replay it, and `nn.Parameter` wants the same class
                args[0].__class__ = Tensor
        return out


# Without grad mode, as in a replay, it gives less. Its results are kept.
_READS_GRAD_MODE = ("mkldnn_rnn_layer", "_sparse_mm_reduce_impl")
_OF_PLAIN_TENSORS = {
    *(Tensor.backward, torch.autograd.backward, torch.autograd.grad),
    *(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__format__),
}
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, ScopedTensor}
_KNOWN = {*_PLAIN_TYPES, torch.nn.Buffer}
