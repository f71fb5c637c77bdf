"""What a block of `checkpoint_scope` has made, and how it is made again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..errors import MutationError, describe
from ..tape.operators import written
from .region import readable_again

# Classes of tensors that are no more than a window on their storage.
PLAIN = {Tensor, torch.nn.Parameter}


class Made:
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
    made: Made


# By the address of the storage.
_entries: dict[int, _Entry] = {}


def find(x: Tensor) -> _Entry | None:
    storage = _storage(x)
    return None if storage is None else _entries.get(storage._cdata)


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of `x`, if `x` is no more than a window on it."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or type(x) not in PLAIN:
        return None
    try:
        return x.untyped_storage()
    except NotImplementedError:  # an opaque tensor
        return None


class View(NamedTuple):
    """A part of a storage that a block has made."""

    made: Made
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    @classmethod
    def of(cls, made: Made, x: Tensor) -> View:
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


class Kept:
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
    makes: list[tuple[Made, int]]
    writes: list[Made]
    streams: world.States

    def run(self, bases: dict[Made, Tensor], kept: dict[Kept, Tensor]) -> None:
        leaves = [kept[x] if isinstance(x, Kept) else x for x in self.leaves]
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


class Recording:
    """The operators of a block."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._kept: dict[tuple[int, int], tuple[weakref.ref[Tensor], Kept]] = {}
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
        targets = {id(x) for x, _ in written(func, args, kwargs)}
        changed = {i for i in entries if id(leaves[i]) in targets}
        for i in changed:
            storage, entry = storages[i], entries[i]
            if storage is not None and entry is not None and storage.nbytes() != entry.made.nbytes:
                del _entries[storage._cdata]  # resized: from now on it is kept
                return
        writes = {entry.made: None for i, entry in entries.items() if entry is not None and i in changed}
        if not makes and not writes:
            return
        copied = [i for i in changed if entries[i] is None]
        for i, entry in entries.items():
            leaves[i] = self.keep(leaves[i], below) if entry is None else View.of(entry.made, leaves[i])
            if entry is not None and i in changed:
                entry.made.writes.append(leaves[i])
        self._operations.append(_Operation(func, leaves, structure, copied, makes, list(writes), streams))

    def _take_made(self, out: Any, given: set[int]) -> list[tuple[Made, int]]:
        """The new storages among some results, and their positions."""
        makes: list[tuple[Made, int]] = []
        for position, y in enumerate(pytree.tree_leaves(out)):
            if isinstance(y, Tensor):
                self._tensors.append(weakref.ref(y))
                storage = _storage(y)
                # (Another block may have made it: a selective checkpoint hands out results of the forward.)
                if storage is None or storage._cdata in given or self._own(storage) is not None:
                    continue
                made = Made(storage.nbytes())
                _remember(storage, self, made)
                self._made.append(storage._cdata)
                makes.append((made, position))
        return makes

    def _own(self, storage: torch.UntypedStorage | None) -> _Entry | None:
        entry = None if storage is None else _entries.get(storage._cdata)
        return entry if entry is not None and entry.recording is self else None

    def keep(self, x: Tensor, below: _torch.Hooks | None) -> Kept:
        key = id(x), -1 if x.is_inference() else x._version
        known = self._kept.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        kept = Kept(x, below)
        self._kept[key] = weakref.ref(x), kept
        return kept

    def close(self) -> list[Tensor]:
        """The end of the block. Returns the tensors that it has made."""
        self._kept.clear()
        self._is_open = False
        made = []
        for ref in self._tensors:
            x = ref()
            if x is not None and type(x) is Tensor and (entry := self._own(_storage(x))) is not None:
                if not x.is_inference():
                    entry.made.version = x._version
                made.append(x)
        self._tensors.clear()
        return made

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
        needed: set[Made | Kept] = set(wanted)
        operations: list[tuple[_Operation, list[Made | Kept]]] = []
        for operation in reversed(self._operations):
            makes = [made for made, _ in operation.makes]
            if needed.isdisjoint(makes) and needed.isdisjoint(operation.writes):
                continue
            uses: set[Made | Kept] = {x for x in operation.leaves if isinstance(x, Kept)}
            uses.update(makes, [x.made for x in operation.leaves if isinstance(x, View)])
            # Seen from the end: the first to use something is the last.
            operations.append((operation, [x for x in uses - wanted if x not in needed]))
            needed |= uses
        bases: dict[Made, Tensor] = {}
        kept: dict[Kept, Tensor] = {}
        for operation, last in reversed(operations):
            for x in operation.leaves:
                if isinstance(x, Kept) and x not in kept:
                    kept[x] = x.unpack()  # others may have to recompute it, in a world of their own
            operation.run(bases, kept)
            for used in last:
                if isinstance(used, Kept):
                    del kept[used]
                else:
                    del bases[used]
        with torch.no_grad(), _torch.plain():
            for slot in slots:
                slot.value = slot.view.on(bases[slot.view.made])


def _remember(storage: torch.UntypedStorage, recording: Recording, made: Made) -> None:
    key = storage._cdata

    def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
        if key in _entries and _entries[key].storage is ref:
            del _entries[key]

    _entries[key] = _Entry(weakref.ref(storage, forget), recording, made)


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
