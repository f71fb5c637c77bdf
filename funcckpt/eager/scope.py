"""`checkpoint_scope`: what is made in a block of code is not kept for the backward, wherever it is used.

`checkpoint` says what to run again; a scope says what not to keep. The difference is in who uses it:
in ``with checkpoint_scope(): x = a + b`` and then ``y = x * c``, it is the product that wants x, after
the block and out of reach of any hook that was active in it. (RETURNN's `gradient_checkpoint_scope`
had the idea first, and another answer.) Four parts:

* **What was made.** In the block a dispatch mode sees every operator below autograd, and records those
  that make a new storage or write to one that the block has made, with the random state before those
  that draw. Autocast and default devices have done their work above, so that nothing of the world but
  random streams has to be replayed.
* **What is saved.** A saved-tensor hook looks up the storage of what autograd wants to save. If the
  block has made it, the graph gets a slot that says which part of which storage; by storage, views and
  detached aliases and the insides of composite operators are recognised as well as results. Anything
  else is kept as it is, with the version check that autograd would have made.
* **Who saves it.** The hook is active in the block. It cannot be left active behind it: hooks are a
  stack, and torch.func refuses to run under any. So at the end of the block the tensors themselves are
  told: their class becomes `ScopedTensor`, whose `__torch_function__` runs any operator that is given one
  of them under the hook. Nothing global is patched; it works in every thread; it ends with the tensors.
* **The recomputation.** The first slot that is read replays, in order, the operators that any slot still
  waits for, and no others; each storage is dropped after its last use there, and each slot gives its
  tensor away when it is read. What a backward did not ask for is there for the next.

What is kept: what the block reads from outside, once each, and the random states. That includes what an
earlier scope has made, so that a scope around each layer of a chain keeps the results of the layers, as
`checkpoint` does, and not nothing at the price of having everything at once in the end. A scope inside
of another one belongs to it. An `autograd.Function` that is given a tensor of the scope after the block
keeps it: no operator is called on it that could tell.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import _torch, world
from ..errors import FuncckptError, MutationError, TransformError, describe
from ..nodes import may_be_statistics
from .region import in_checkpoint, is_of_checkpoint, readable_again

_REFUSED = """checkpoint_scope works by saved-tensor hooks, which torch.func transforms refuse{}. Use \
remat there, with the block as a function: instead of
    with checkpoint_scope():
        x = a + b
write
    x = remat(lambda a, b: a + b)(a, b)"""


class checkpoint_scope:
    """Do not keep for the backward what is made in this block; recompute it when it is needed.

    Tensors that are made in the block, of any shape, are not stored by the graph, wherever they are used
    later, also after the block. They are recomputed once, in order, when the first of them is needed in
    a backward, and freed as they are used. What the block reads from outside is kept.

    Scopes may be nested and alive side by side; like other contexts, they are left in the order in which
    they were entered. A `checkpoint` may stand inside of a scope or around it. Gradients are those
    without it.

    Raises
    ------
    TransformError
        A `torch.func` transform is active around the block, or used inside of it: use `remat`.
    MutationError
        In the backward: a tensor that the block has read, or one that the block had made and saved,
        was changed in place afterwards.

    Notes
    -----
    Tensors of the block are of the class `ScopedTensor` after it, a subclass of `torch.Tensor` that is
    saved and copied as a `torch.Tensor`. Until a graph that uses it is gone, a tensor of the block that is
    alive keeps alive what the block has read; from then on it is a tensor like others. What an
    `autograd.Function` is given directly, after the block, it keeps. Where grad mode is off when the scope
    is entered, nothing is recorded. A dispatch mode of others that changes results has to be inside of the
    block: one around it is not there when the block is replayed.

    Examples
    --------
    Weight noise: neither the noise nor the noisy weight is kept.

    >>> import torch
    >>> from funcckpt import checkpoint_scope
    >>> w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    >>> with checkpoint_scope():
    ...     noisy = w + 0.1 * torch.randn_like(w)
    >>> (x @ noisy).sum().backward()
    >>> torch.allclose(x.grad[0], noisy.sum(1))
    True
    """

    def __init__(self) -> None:
        # The blocks that it was entered in, innermost last. None: nothing is recorded.
        self._blocks: list[_Block | None] = []

    def __enter__(self) -> checkpoint_scope:
        if _torch.maybe_current_level() is not None:
            kinds = ", ".join(layer.kind for layer in _torch.active_layers())
            raise TransformError(_REFUSED.format(f" ({kinds} is active)"))
        block = None
        if torch.is_grad_enabled():
            block, top = _here.block, _torch.top_saved_tensors_hooks()
            # Under hooks that came later, a checkpoint's perhaps, the scope does not belong to the one around
            # them: the recomputation, which is not in that one, has to save the same.
            if block is None or block.task != _torch.graph_task() or top is None or top[0] is not block.pack:
                block = _Block(top)
            block.depth += 1
        self._blocks.append(block)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._blocks:
            raise FuncckptError("checkpoint_scope is left without having been entered.")
        if (block := self._blocks.pop()) is not None:
            block.depth -= 1
            if block.depth == 0:
                block.close()
        if isinstance(error, RuntimeError) and _torch.REFUSES_HOOKS in str(error):
            raise TransformError(_REFUSED.format(" to run inside of")) from error


class _Here(threading.local):
    """The innermost block that this thread is in."""

    block: _Block | None = None

    def recording(self) -> Recording | None:
        """That of the block; a backward that runs in the middle of it is no part of it."""
        block = self.block
        return None if block is None or block.task != _torch.graph_task() else block.recording


_here = _Here()


class _Block:
    """An open block, and what it has active."""

    def __init__(self, below: _torch.Hooks | None) -> None:
        self.task = _torch.graph_task()
        self.depth = 0
        self.recording = Recording()
        self.pack = _pack_above(below)
        self._around = _here.block
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)
        self._mode = _Recorder(self, below)
        self._hooks.__enter__()
        self._mode.__enter__()
        _here.block = self

    def close(self) -> None:
        top = _torch.top_saved_tensors_hooks()
        if _here.block is not self or top is None or top[0] is not self.pack:
            raise FuncckptError(
                "checkpoint_scope is left in another thread, or before what was entered inside of it."
            )
        self._mode.__exit__(None, None, None)
        self._hooks.__exit__()
        _here.block = self._around
        del self._mode  # which refers to the block
        self.recording.close()


# -- what was made ------------------------------------------------------------------------------------


class _Made:
    """A storage that a block has made."""

    __slots__ = ("nbytes", "version", "writes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # The parts to which the block has written, in order.
        self.writes: list[View] = []
        # The version of its tensors at the end of the block.
        self.version: int | None = None


class _Entry(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    recording: Recording
    made: _Made


# By the address of the storage.
_entries: dict[int, _Entry] = {}


def _find(x: Tensor) -> _Entry | None:
    storage = _storage(x)
    return None if storage is None else _entries.get(storage._cdata)


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of `x`, if `x` is no more than a window on it."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or type(x) not in _PLAIN:
        return None
    try:
        return x.untyped_storage()
    except NotImplementedError:  # an opaque tensor
        return None


class View(NamedTuple):
    """A part of a storage that a block has made."""

    made: _Made
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    @classmethod
    def of(cls, made: _Made, x: Tensor) -> View:
        return cls(made, x.dtype, x.size(), x.stride(), x.storage_offset())

    def may_overlap(self, other: View) -> bool:
        """False if they have no element in common, as the chunks of which a recurrent cell is made."""
        if 0 in self.size or 0 in other.size:
            return False
        if (self.dtype, self.stride) != (other.dtype, other.stride):
            return True
        mine, theirs, inside, apart = int(self.offset), int(other.offset), None, False
        for d in sorted(range(len(self.stride)), key=self.stride.__getitem__, reverse=True):
            size, stride = self.size[d], self.stride[d]
            if stride == 0:
                return True
            # Where they begin in this dimension. If all of them end in it, they are boxes of one grid.
            (i, mine), (j, theirs) = divmod(mine, stride), divmod(theirs, stride)
            if inside is not None and max(i + size, j + other.size[d]) * stride > inside:
                return True
            apart |= i + size <= j or j + other.size[d] <= i
            inside = stride
        return not apart and mine == theirs

    def on(self, base: Tensor) -> Tensor:
        if base.dtype == self.dtype:
            return base.as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)


class _Kept:
    """A tensor that is kept: by the hooks that were active below ours, or as it is."""

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, x: Tensor, below: _torch.Hooks | None) -> None:
        self._unpack = None if below is None else readable_again(below[1])
        self._packed = _torch.alias(x) if below is None else below[0](x)
        self._version = None if below or x.is_inference() else x._version

    def unpack(self) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._packed)
        x: Tensor = self._packed
        if self._version is not None and x._version != self._version:
            raise MutationError(
                f"one of the variables needed for gradient computation ({describe(x)}), which "
                "checkpoint_scope keeps, has been modified by an inplace operation. Change a copy "
                "(x.clone())."
            )
        return x


class _Operation(NamedTuple):
    """An operator of the block, as it can be run again."""

    func: Any
    # Flat arguments: views of what the block has made, tensors that are kept, and other things.
    leaves: list[Any]
    structure: pytree.TreeSpec
    # Positions of kept tensors to which it writes.
    copied: list[int]
    # What it makes, with the position among the flat results, and what it writes to.
    makes: list[tuple[_Made, int]]
    writes: list[_Made]
    streams: world.States

    def run(self, bases: dict[_Made, Tensor], kept: dict[_Kept, Tensor]) -> None:
        leaves = [kept[x] if isinstance(x, _Kept) else x for x in self.leaves]
        # Casts were recorded as operators. A vmap of the backward has no say in the random numbers.
        with torch.no_grad(), _torch.plain(), _torch.without_autocast(), world.streams_at(self.streams):
            for i, x in enumerate(self.leaves):
                if isinstance(x, View):
                    leaves[i] = x.on(bases[x.made])
            for i in self.copied:
                leaves[i] = leaves[i].clone()
            args, kwargs = pytree.tree_unflatten(leaves, self.structure)
            with _torch.without_vmap_mode():
                out = pytree.tree_leaves(self.func(*args, **kwargs))
        for made, position in self.makes:
            bases[made] = out[position]


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, block: _Block, below: _torch.Hooks | None) -> None:
        super().__init__()
        self._recording, self._below = block.recording, below

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass acts first; its inner tensors come by here
        # What an operator makes that takes functions is kept.
        if _here.recording() is not self._recording or isinstance(func, _torch.HigherOrderOperator):
            return func(*args, **kwargs)
        streams = world.states_drawn_from(func, args, kwargs)
        out = func(*args, **kwargs)
        self._recording.add(func, args, kwargs, out, streams, self._below)
        return out


class Recording:
    """The operators of a block."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._kept: dict[tuple[int, int], tuple[weakref.ref[Tensor], _Kept]] = {}
        self._tensors: list[weakref.ref[Tensor]] = []
        self._made: list[int] = []
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._waiting = 0
        self._lock = threading.RLock()
        self._is_open = True
        # The last backward that has replayed.
        self._replayed: Any = None

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        streams: world.States,
        below: _torch.Hooks | None,
    ) -> None:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        storages = {i: _storage(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        makes = self._take_made(out, {s._cdata for s in storages.values() if s is not None})
        entries = {i: self._own(s) for i, s in storages.items()}
        targets = [*map(id, written(func, args, kwargs))]
        changed = {i for i in entries if id(leaves[i]) in targets}
        for i in changed:
            storage, entry = storages[i], entries[i]
            if storage is not None and entry is not None and storage.nbytes() != entry.made.nbytes:
                del _entries[storage._cdata]  # resized: from now on it is kept
                return
        writes = {entry.made: None for i, entry in entries.items() if entry is not None and i in changed}
        if not makes and not writes:
            return
        statistics = "batch_norm" in func.name()
        copied = [
            i
            for i, entry in entries.items()
            if entry is None and (i in changed or (statistics and may_be_statistics(leaves[i])))
        ]
        for i, entry in entries.items():
            leaves[i] = self.keep(leaves[i], below) if entry is None else View.of(entry.made, leaves[i])
            if entry is not None and i in changed:
                entry.made.writes.append(leaves[i])
        self._operations.append(_Operation(func, leaves, structure, copied, makes, list(writes), streams))

    def _take_made(self, out: Any, given: set[int]) -> list[tuple[_Made, int]]:
        """The new storages among some results, and their positions."""
        makes: list[tuple[_Made, int]] = []
        for position, y in enumerate(pytree.tree_leaves(out)):
            if isinstance(y, Tensor):
                self._tensors.append(weakref.ref(y))
                storage = _storage(y)
                # (Another block may have made it: a selective checkpoint hands out results of the forward.)
                if storage is None or storage._cdata in given or self._own(storage) is not None:
                    continue
                made = _Made(storage.nbytes())
                _remember(storage, self, made)
                self._made.append(storage._cdata)
                makes.append((made, position))
        return makes

    def _own(self, storage: torch.UntypedStorage | None) -> _Entry | None:
        entry = None if storage is None else _entries.get(storage._cdata)
        return entry if entry is not None and entry.recording is self else None

    def keep(self, x: Tensor, below: _torch.Hooks | None) -> _Kept:
        key = id(x), -1 if x.is_inference() else x._version
        known = self._kept.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        kept = _Kept(x, below)
        self._kept[key] = weakref.ref(x), kept
        return kept

    def close(self) -> None:
        """The end of the block: its tensors are told."""
        self._kept.clear()
        self._is_open = False
        for ref in self._tensors:
            x = ref()
            if x is not None and type(x) is Tensor and (entry := self._own(_storage(x))) is not None:
                if not x.is_inference():
                    entry.made.version = x._version
                x.__class__ = ScopedTensor
        self._tensors.clear()

    # -- the recomputation -------------------------------------------------------------------------

    def slot(self, view: View) -> Slot:
        slot = Slot(self, view)
        self._slots.add(slot)
        self._waiting += 1
        return slot

    def forget(self) -> None:
        """A graph was used and is gone. A tensor of the block may be alive: it shall not keep alive what the
        block has read, which an earlier block may have made, and so on.
        """
        self._waiting -= 1
        if not self._is_open and self._waiting == 0:
            for key in self._made:
                if key in _entries and _entries[key].recording is self:
                    del _entries[key]

    def unpack(self, slot: Slot) -> Tensor:
        with self._lock:
            if slot.value is None:
                key = _torch.backward_id()
                # Outside of a backward one is looked at, and the others are not asked for.
                again = key == self._replayed or type(key) is object
                self._replay([slot] if again else [s for s in self._slots if s.value is None])
                if type(key) is not object:
                    self._replayed = key
            x, slot.value = slot.value, None
        assert x is not None
        if any(map(slot.view.may_overlap, slot.view.made.writes[slot.writes :])):
            raise MutationError(
                f"one of the variables needed for gradient computation ({describe(x)}) has been modified by "
                "an inplace operation in its checkpoint_scope. Change a copy (x.clone())."
            )
        return x

    def _replay(self, slots: Sequence[Slot]) -> None:
        wanted = {slot.view.made for slot in slots}
        needed: set[_Made | _Kept] = set(wanted)
        operations: list[tuple[_Operation, list[_Made | _Kept]]] = []
        for operation in reversed(self._operations):
            makes = [made for made, _ in operation.makes]
            if needed.isdisjoint(makes) and needed.isdisjoint(operation.writes):
                continue
            uses: set[_Made | _Kept] = {x for x in operation.leaves if isinstance(x, _Kept)}
            uses.update(makes, [x.made for x in operation.leaves if isinstance(x, View)])
            # Seen from the end: the first to use something is the last.
            operations.append((operation, [x for x in uses - wanted if x not in needed]))
            needed |= uses
        bases: dict[_Made, Tensor] = {}
        kept: dict[_Kept, Tensor] = {}
        for operation, last in reversed(operations):
            for x in operation.leaves:
                if isinstance(x, _Kept) and x not in kept:
                    kept[x] = x.unpack()  # others may have to recompute it, in a world of their own
            operation.run(bases, kept)
            for used in last:
                if isinstance(used, _Kept):
                    del kept[used]
                else:
                    del bases[used]
        with torch.no_grad(), _torch.plain():
            for slot in slots:
                slot.value = slot.view.on(bases[slot.view.made])


def _remember(storage: torch.UntypedStorage, recording: Recording, made: _Made) -> None:
    key = storage._cdata

    def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
        if key in _entries and _entries[key].storage is ref:
            del _entries[key]

    _entries[key] = _Entry(weakref.ref(storage, forget), recording, made)


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors to which an operator writes, as its schema says."""
    schema = getattr(func, "_schema", None)  # operators that take functions have none
    if schema is None or not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


# -- what is saved ----------------------------------------------------------------------------------


class Slot:
    """What the graph keeps in place of a tensor that a block has made."""

    __slots__ = ("__weakref__", "recording", "value", "view", "writes")

    def __init__(self, recording: Recording, view: View) -> None:
        self.recording = recording
        self.view = view
        # How many writes there were before.
        self.writes = len(view.made.writes)
        self.value: Tensor | None = None

    def unpack(self) -> Tensor:
        return self.recording.unpack(self)

    def __del__(self) -> None:
        self.recording.forget()


def _pack_above(below: _torch.Hooks | None) -> Any:
    """A pack hook that knows what blocks have made."""
    is_in_checkpoint = is_of_checkpoint(below)

    def pack(x: Tensor) -> Slot | _Kept:
        entry, recording = _find(x), _here.recording()
        if entry is None or entry.recording is not recording:
            # A checkpoint keeps nothing. It counts what is saved: that must be the same in the recomputation,
            # whichever tensors of other blocks are alive then.
            if entry is None or is_in_checkpoint:
                return _Kept(x, below)
            if recording is not None:  # which keeps it in any case
                return _Kept(x, below) if below else recording.keep(x, below)
        # Written to after the block: no recomputation gives that value.
        if entry.made.version not in (None, x._version):
            return _Kept(x, below)
        return entry.recording.slot(View.of(entry.made, x))

    return pack


def _unpack(packed: Slot | _Kept) -> Tensor:
    return packed.unpack()


# -- who saves it -----------------------------------------------------------------------------------

_NEVER_SAVE = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class ScopedTensor(Tensor):
    """A tensor that was made in a `checkpoint_scope`, after the end of the block."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEVER_SAVE or not all(t in _KNOWN for t in types):
            # Code of others is run, which should find plain tensors.
            with _unscoped((args, kwargs)):
                return func(*args, **kwargs)
        with _torch.subclasses_asleep():
            # A checkpoint keeps nothing, and counts what is saved, and what hooks inside of it do: in its
            # recomputation what it was given is a plain tensor.
            if (
                torch.is_grad_enabled()
                and _here.recording() is None
                and _torch.may_push_hooks()
                and not in_checkpoint()
            ):
                with torch.autograd.graph.saved_tensors_hooks(
                    _pack_above(_torch.top_saved_tensors_hooks()), _unpack
                ):
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
            for y in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
                if type(y) is Tensor and _find(y) is not None:
                    y.__class__ = cls
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _torch.subclasses_asleep():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        with _torch.subclasses_asleep():
            return self.detach().as_subclass(Tensor).__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        with _torch.subclasses_asleep():
            copied = (
                self.as_subclass(Tensor).__deepcopy__(memo) if self.is_leaf else super().__deepcopy__(memo)
            )
        memo[id(self)] = copied
        return copied


_PLAIN = {Tensor, torch.nn.Parameter, ScopedTensor}
_KNOWN = {Tensor, torch.nn.Parameter, ScopedTensor, torch.nn.Buffer}


@contextmanager
def _unscoped(tree: Any) -> Iterator[None]:
    scoped = [x for x in pytree.tree_leaves(tree) if type(x) is ScopedTensor]
    for x in scoped:
        x.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for x in scoped:
            x.__class__ = ScopedTensor
