"""`checkpoint_scope`: what is made in a block of code is not kept for the backward, wherever it is used.

`checkpoint` says what to run again; a scope says what not to keep. In ``with checkpoint_scope(): x = a + b``
and then ``y = x * c`` it is the product that wants x, after the block and out of reach of any hook that was
active in it. (RETURNN's `gradient_checkpoint_scope` had the idea first, and another answer.) Four parts:

* **What was made.** In the block a dispatch mode sees every operator below autograd and autocast. It records
  those that make a new storage or write to one that the block has made, with the random state before those
  that draw, and tells the storage so.
* **What is saved.** A saved-tensor hook looks up the storage of what autograd wants to save. If a block has
  made it, the graph gets a slot that says which part of which storage: views and the insides of composite
  operators are recognised as well as results. Anything else is kept.
* **Who saves it.** The hook is active in the block. Behind it, torch.func would refuse to run under it. So at
  the end of the block the class of its tensors becomes `ScopedTensor`, whose `__torch_function__` runs any
  operator that is given one of them under the hook. It works in every thread, and ends with the tensors.
* **The recomputation.** The first slot that is read replays, in order, the operators that any slot still
  waits for, and no others; each storage is dropped after its last use there, and each slot gives its
  tensor away when it is read. What a backward did not ask for is there for the next.

What the block reads from outside is kept, once each. That includes what an earlier scope has made, so that a
scope around each layer of a chain keeps the results of the layers, as `checkpoint` does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import world
from .._torch import autograd, functorch
from ..errors import MutationError, TransformError, describe
from ..tape.operators import TensorMeta, is_plain, run_operator, written
from .region import in_checkpoint, is_of_checkpoint

_REFUSED = """checkpoint_scope works by saved-tensor hooks, which torch.func transforms refuse{}. Use \
remat there, with the block as a function: instead of
    with checkpoint_scope():
        x = a + b
write
    x = remat(lambda a, b: a + b)(a, b)"""


@contextmanager
def checkpoint_scope() -> Iterator[None]:
    """Do not keep for the backward what is made in this block; recompute it when it is needed.

    Tensors that are made in the block, of any shape, are not stored by the graph, wherever they are used
    later, also after the block. They are recomputed once, in order, when the first of them is needed in
    a backward, and freed as they are used. What the block reads from outside is kept.

    Scopes may be nested and alive side by side, and a `checkpoint` may stand inside of a scope or around it.

    Raises
    ------
    TransformError
        A `torch.func` transform is active around the block, or used inside of it: use `remat`.
    MutationError
        In the backward: a tensor that the block has read from outside was changed in place afterwards.

    Notes
    -----
    Tensors of the block are of the class `ScopedTensor` after it, a subclass of `torch.Tensor` that is
    saved and copied as a `torch.Tensor`. Until a graph that uses it is gone, a tensor of the block that is
    alive keeps alive what the block has read; from then on it is a tensor like others. What an
    `autograd.Function` is given directly, after the block, it keeps: no operator is called that could tell.
    Where grad mode is off when the scope is entered, nothing is recorded. A dispatch mode of others that
    changes results has to be inside of the block: one around it is not there when the block is replayed.

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

    if functorch.maybe_current_level() is not None:
        kinds = ", ".join(layer.kind for layer in functorch.active_layers())
        raise TransformError(_REFUSED.format(f" ({kinds} is active)"))
    around, top = _current(), autograd.top_saved_tensors_hooks()
    # A scope belongs to the one around it; not so under hooks that came between, a checkpoint's perhaps,
    # whose recomputation is not in that one and has to save the same.
    if not torch.is_grad_enabled() or (around is not None and top is not None and top[0] is around.pack):
        yield
        return
    block, before = _Block(top), _here.block
    _here.block = block
    try:
        with saved_tensors_hooks(block.pack, _unpack), block:
            yield
    except RuntimeError as error:
        if autograd.REFUSES_HOOKS in str(error):
            raise TransformError(_REFUSED.format(" to run inside of")) from error
        raise
    finally:
        _here.block = before
        block.close()


class _Here(threading.local):
    """The innermost block that this thread is in."""

    block: _Block | None = None


_here = _Here()


def _current() -> _Block | None:
    """The block that records; a backward that runs in the middle of it is no part of it."""
    block = _here.block
    return None if block is None or block.task != autograd.graph_task() else block


# -- what was made ----------------------------------------------------------------------------------


class _Made:
    """A storage that a block has made."""

    # The version of its tensors at the end of the block.
    version: int | None = None


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of `x`, if `x` is no more than a window on it."""
    if type(x) not in _PLAIN or not is_plain(x):
        return None
    try:
        return x.untyped_storage()
    except NotImplementedError:  # a tensor of a transform
        return None


def _find(x: Tensor) -> tuple[_Block, _Made] | None:
    """The block that has made the storage of `x`, if it can still replay that."""
    found: tuple[_Block, _Made] | None = getattr(_storage(x), "_funcckpt_made", None)
    return None if found is None or found[0].is_over else found


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


class _View(NamedTuple):
    """A part of a storage that a block has made."""

    made: _Made
    meta: TensorMeta

    def on(self, base: Tensor) -> Tensor:
        size, strides, offset, dtype, device = self.meta
        if base.dtype == dtype:
            return base.as_strided(size, strides, offset)
        return torch.empty(0, dtype=dtype, device=device).set_(base.untyped_storage(), offset, size, strides)


class _Kept:
    """A tensor that is kept: by the hooks that were active below ours, or as it is."""

    def __init__(self, x: Tensor, below: autograd.Hooks | None) -> None:
        self._unpack = None if below is None else below[1]
        self._packed = autograd.alias(x) if below is None else below[0](x)
        self._version = _version(x)

    def unpack(self) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._packed)
        x: Tensor = self._packed
        if _version(x) != self._version:
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
    # What it makes, by the position among the flat results, and what it writes to.
    makes: dict[int, _Made]
    writes: set[_Made]
    streams: world.States

    def run(self, bases: dict[_Made, Tensor], kept: dict[_Kept, Tensor]) -> None:
        leaves = list(self.leaves)
        for i, x in enumerate(leaves):
            if isinstance(x, _View):
                leaves[i] = x.on(bases[x.made])
            elif isinstance(x, _Kept):
                leaves[i] = kept[x].clone() if i in self.copied else kept[x]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        # A vmap of the backward has no say in the random numbers.
        with world.streams_at(self.streams), functorch.without_vmap_mode():
            out = pytree.tree_leaves(self.func(*args, **kwargs))
        for position, made in self.makes.items():
            bases[made] = out[position]


class _Block(TorchDispatchMode):
    """A block: the operators that it records while it is open, and what is replayed of them."""

    supports_higher_order_operators = True

    def __init__(self, below: autograd.Hooks | None) -> None:
        super().__init__()
        self.task = autograd.graph_task()
        self.pack = functools.partial(_pack, below)
        # Whether all graphs that used it are gone.
        self.is_over = False
        self._below = below
        self._operations: list[_Operation] = []
        # What was read from outside, by id and version.
        self._kept: dict[tuple[int, int], tuple[Tensor, _Kept]] = {}
        self._tensors: list[weakref.ref[Tensor]] = []
        self._is_open = True
        self._slots: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self._waiting = 0
        self._lock = threading.RLock()
        # The last backward that has replayed.
        self._replayed = -1

    def close(self) -> None:
        self._is_open = False
        # Hooks of others lead to what they keep, and that perhaps to this block.
        self.pack = self._below = None  # type: ignore[assignment]
        for ref in self._tensors:
            x = ref()
            if x is not None and type(x) is Tensor and (view := self._view(x)) is not None:
                view.made.version = _version(x)
                x.__class__ = ScopedTensor  # type: ignore[assignment]
        self._tensors.clear()
        self._kept.clear()

    def _view(self, x: Tensor) -> _View | None:
        """What `x` is of the storages that this block has made."""
        found = _find(x)
        return _View(found[1], TensorMeta.of(x)) if found is not None and found[0] is self else None

    def _keep(self, x: Tensor) -> _Kept:
        key = id(x), _version(x)
        if key not in self._kept:
            self._kept[key] = x, _Kept(x, self._below)
        return self._kept[key][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass acts first; its inner tensors come by here
        # What an operator makes that takes functions is kept.
        if _current() is not self or isinstance(func, autograd.HigherOrderOperator):
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        given = {storage._cdata for x in tensors.values() if (storage := _storage(x)) is not None}
        # As they are before it: it may exchange or resize their storage.
        views = {i: view for i, x in tensors.items() if (view := self._view(x)) is not None}
        targets = {id(x) for x in written(func, args, kwargs)}
        changed = [i for i, x in tensors.items() if id(x) in targets]
        streams = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        makes = {}
        for position, y in enumerate(pytree.tree_leaves(out)):
            if isinstance(y, Tensor):
                self._tensors.append(weakref.ref(y))
                storage = _storage(y)
                # (It may be known: a selective checkpoint hands out results of the forward.)
                if storage is not None and storage._cdata not in given and self._view(y) is None:
                    makes[position] = _Made()
                    storage._funcckpt_made = self, makes[position]  # type: ignore[attr-defined]
        writes = {views[i].made for i in changed if i in views}
        if makes or writes:
            for i, x in tensors.items():
                leaves[i] = views[i] if i in views else self._keep(x)
            copied = [i for i in changed if i not in views]
            self._operations.append(_Operation(func, leaves, structure, copied, makes, writes, streams))
        return out

    # -- the recomputation -------------------------------------------------------------------------

    def slot(self, view: _View) -> _Slot:
        slot = _Slot(self, view, len(self._operations))
        self._slots.add(slot)
        self._waiting += 1
        return slot

    def forget(self) -> None:
        """A graph was used and is gone. A tensor of the block may be alive: it shall not keep alive what the
        block has read, which an earlier block may have made, and so on.
        """
        self._waiting -= 1
        if not self._is_open and self._waiting == 0:
            self.is_over = True
            self._operations.clear()

    def unpack(self, slot: _Slot) -> Tensor:
        with self._lock:
            if slot.value is None:
                # Outside of a backward one is looked at, and the others are not asked for.
                task = autograd.graph_task()
                again = task in (-1, self._replayed)
                self._replay([slot] if again else [s for s in self._slots if s.value is None])
                self._replayed = task
            x, slot.value = slot.value, None
        assert x is not None
        return x

    def _replay(self, slots: Sequence[_Slot]) -> None:
        wanted = {slot.view.made for slot in slots}
        needed: set[_Made | _Kept] = set(wanted)
        # Operators, last first, and what is not used after each.
        steps: list[tuple[int, list[_Made | _Kept]]] = []
        for i, operation in reversed([*enumerate(self._operations)]):
            changes = {*operation.makes.values(), *operation.writes}
            if needed.isdisjoint(changes):
                continue
            uses: set[_Made | _Kept] = {x for x in operation.leaves if isinstance(x, _Kept)}
            uses.update(changes, [x.made for x in operation.leaves if isinstance(x, _View)])
            steps.append((i, [x for x in uses - wanted if x not in needed]))
            needed |= uses
        bases: dict[_Made, Tensor] = {}
        kept: dict[_Kept, Tensor] = {}
        for i, last in reversed(steps):
            operation = self._operations[i]
            for x in operation.leaves:
                if isinstance(x, _Kept) and x not in kept:
                    kept[x] = x.unpack()  # others may have to recompute it, in a world of their own
            # Casts were recorded as operators.
            with torch.no_grad(), autograd.plain(), autograd.without_autocast():
                for slot in slots:
                    if slot.before <= i and slot.value is None and slot.view.made in operation.writes:
                        slot.value = slot.view.on(bases[slot.view.made]).clone()
                operation.run(bases, kept)
            for used in last:
                del (kept if isinstance(used, _Kept) else bases)[used]  # type: ignore[arg-type]
        with torch.no_grad(), autograd.plain():
            for slot in slots:
                if slot.value is None:
                    slot.value = slot.view.on(bases[slot.view.made])


class _Slot:
    """What the graph keeps in place of a tensor that a block has made."""

    def __init__(self, block: _Block, view: _View, before: int) -> None:
        self._block, self.view = block, view
        # The number of the first operator after it.
        self.before = before
        self.value: Tensor | None = None

    def unpack(self) -> Tensor:
        return self._block.unpack(self)

    def __del__(self) -> None:
        self._block.forget()


# -- what is saved, and who saves it ------------------------------------------------------------------


def _pack(below: autograd.Hooks | None, x: Tensor) -> _Slot | _Kept:
    """A pack hook that knows what blocks have made."""
    found, block = _find(x), _current()
    # What another block has made, this one keeps, and so does a checkpoint: what it counts has to be the same
    # in the recomputation, whichever tensors of other blocks are alive then.
    if found is None or (found[0] is not block and (block is not None or is_of_checkpoint(below))):
        return _Kept(x, below)
    if found[1].version not in (None, _version(x)):
        return _Kept(x, below)  # written to after the block: no recomputation gives that value
    return found[0].slot(_View(found[1], TensorMeta.of(x)))


def _unpack(packed: _Slot | _Kept) -> Tensor:
    return packed.unpack()


class ScopedTensor(Tensor):
    """A tensor that was made in a `checkpoint_scope`, after the end of the block."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_PLAIN_TENSORS or not all(t in _KNOWN for t in types):
            with _unscoped((args, kwargs)):  # for code of others
                return func(*args, **kwargs)
        with autograd.subclasses_asleep():
            hooks: AbstractContextManager[Any] = nullcontext()
            # A checkpoint keeps nothing, and counts what is saved, and what hooks inside of it do: in its
            # recomputation what it was given is a plain tensor.
            may_save = torch.is_grad_enabled() and _current() is None
            if may_save and autograd.may_push_hooks() and not in_checkpoint():
                pack = functools.partial(_pack, autograd.top_saved_tensors_hooks())
                hooks = saved_tensors_hooks(pack, _unpack)
            with hooks:
                out = func(*args, **kwargs)
            for y in out if isinstance(out, (tuple, list)) else (out,):
                if type(y) is Tensor and _find(y) is not None:
                    y.__class__ = cls
        return out


_OF_PLAIN_TENSORS = {
    *(Tensor.backward, torch.autograd.backward, torch.autograd.grad),
    *(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__format__),
}
_PLAIN = {Tensor, torch.nn.Parameter, ScopedTensor}
_KNOWN = {*_PLAIN, torch.nn.Buffer}


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
