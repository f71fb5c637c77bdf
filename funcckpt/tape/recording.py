"""The first run of a function with a policy: what is kept of it.

Under `Record` the values of the forward are numbered, and those that the policy says to save are held. At
the end the graph shows what the backward reads; of what is held, that is kept which is read, or needed to
compute what is read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch, world
from ..policies.budget import recomputed
from ..policies.chooser import Chooser, Place
from ..policies.names import current_name
from ..policies.offload import Offloaded, is_far
from .flops import flops_of
from .numbering import Numbers
from .operators import (
    READ_NO_VALUES,
    WRITE,
    StorageTable,
    TensorMeta,
    address_of,
    fills_storage,
    is_plain,
    is_subclass_first,
    kind_of_call,
    makes_nothing,
    reshapes,
    run_operator,
    tensors_of,
    written,
)


class _Active(threading.local):
    watch: Watch | None = None


_active = _Active()


class Watch(TorchDispatchMode):
    """A mode that watches one function, in its first run or in another, and whatever it calls."""

    supports_higher_order_operators = True
    sees_names = True

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def __enter__(self) -> Any:
        super().__enter__()
        self._before, _active.watch = _active.watch, self
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.watch = self._before
        super().__exit__(*exception)

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """The inputs of f, with what tells them from each other in every run."""

    def note_graph(self, outputs: Sequence[Tensor], first_node: int = 0) -> None:
        """The outputs of f, where they are recorded."""


def watch_of(source: Any) -> Watch | None:
    """The mode that watches a function, if any."""
    watch = _active.watch
    return watch if watch is not None and watch.source is source else None


class Call:
    """A call of an operator.

    Attributes
    ----------
    func
        The operator.
    needs : frozenset of Place
        The results that it reads.
    outputs : dict[int, TensorMeta]
        Of its results those in memory of its own.
    count : int or None
        How many results it returns; None for one tensor alone.
    may_skip : bool
        Whether it does nothing but to make its results, and nobody shares their memory unseen.
    flops : int
        What it costs to run it again; counted where somebody asks.
    """

    __slots__ = (
        "chosen",
        "count",
        "flops",
        "func",
        "key",
        "may_skip",
        "needs",
        "offloads",
        "outputs",
        "signature",
        "sizes",
        "streams",
        "values",
    )

    def __init__(self, func: Any, needs: frozenset[Place], count: int | None) -> None:
        self.func, self.needs, self.count = func, needs, count
        self.outputs: dict[int, TensorMeta] = {}
        self.may_skip = True
        self.flops = 0
        # For a policy: its value number, the outputs that are held, their bytes, and which are chosen.
        self.key: tuple[int, int] = -1, 0
        self.values: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.offloads = False
        self.streams: tuple[world.States, world.States] = [], []
        # For skipping: what decides what its results look like.
        self.signature: tuple[Any, ...] = ()

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(self.func, "tags", ())


class Tape:
    """The operators of a run, and which of them have made what is in memory."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # What is known to be read, beside what other calls read.
        self.read: set[Place] = set()
        self._makers: StorageTable[frozenset[Place]] = StorageTable()

    def makers(self, x: Tensor) -> frozenset[Place]:
        """The results that are in the memory of `x`."""
        return self._makers.get(x) or frozenset()

    def note_read(self, kind: str, args: Any, kwargs: dict[str, Any]) -> None:
        """An operator reads, and is none of those that may be skipped."""
        self.read |= self._needs(kind, tensors_of(args, kwargs))

    def _needs(self, kind: str, tensors: Sequence[Tensor]) -> frozenset[Place]:
        if kind in READ_NO_VALUES or not tensors:
            return frozenset()
        return frozenset().union(*map(self.makers, tensors))

    def note(self, func: Any, kind: str, args: Any, kwargs: dict[str, Any], out: Any) -> Call | None:
        """Note what an operator has done. None if what it returns is the memory that it was given."""
        if makes_nothing(func, kind):
            return None
        given = tensors_of(args, kwargs)
        needs = self._needs(kind, given)
        index, addresses = len(self.calls), set(map(address_of, given))
        outs = out if isinstance(out, (list, tuple)) else (out,)
        call = Call(func, needs, len(out) if isinstance(out, (list, tuple)) else None)
        self.calls.append(call)
        if kind in WRITE:
            call.may_skip = False
            for i, (x, all_of_it) in enumerate(written(func, args, kwargs)):
                if x.layout is torch.strided:
                    before = self.makers(x)
                    self._must_run(before)
                    before = frozenset() if all_of_it and fills_storage(x) else before
                    self._makers.set(x, before | {(index, i)})
        if kind == "writes":
            return call
        call.may_skip = kind == "pure" and bool(given)
        shares = False
        for i, y in enumerate(outs):
            if not isinstance(y, Tensor) or not is_plain(y):
                call.may_skip = False
            elif address_of(y) in addresses or self._makers.get(y) is not None:
                # Shared memory, of which the schema does not say a word (`aten.unsafe_split`).
                shares = True
                call.may_skip = False
                self._must_run(self.makers(y))
            else:
                call.outputs[i] = TensorMeta.of(y)
                self._makers.set(y, frozenset(((index, i),)))
        return None if shares else call

    def _must_run(self, places: Iterable[Place]) -> None:
        for index, _ in places:
            self.calls[index].may_skip = False

    def unread(self) -> dict[int, Call]:
        """The calls of which nobody has read a result, and whose results are gone."""
        read = self.read.union(*self._makers.alive(), *[c.needs for c in self.calls if not c.may_skip])
        _, again = recomputed(self.calls, read)
        return {i: c for i, c in enumerate(self.calls) if c.may_skip and i not in again}


class Kept:
    """What a policy keeps of one run of f: the tensors belong to the graph, this says which is which."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.entries: dict[tuple[int, int], Entry] = {}
        self.tensors: list[Tensor] = []
        # For each of them where it was, if it was moved elsewhere.
        self.places: list[Offloaded | None] = []


def split(kept: Kept | None, saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What a node has saved: its inputs, and what is kept."""
    arity = len(saved) if kept is None else len(saved) - len(kept.places)
    return saved[:arity], saved[arity:]


class Entry(NamedTuple):
    """What is kept of the results of a call that is not run again."""

    # For each output its index among the tensors; or what it looks like, if the backward does not read it.
    slots: tuple[int | TensorMeta | None, ...]
    is_alone: bool
    streams: tuple[world.States, world.States]

    def misses(self) -> bool:
        """Whether there is a result that is not kept."""
        return any([isinstance(slot, TensorMeta) for slot in self.slots])


class Record(Watch):
    """Numbers the values of the forward, and holds what the policy says to keep."""

    def __init__(self, source: Any, chooser: Chooser) -> None:
        super().__init__(source)
        self._chooser = chooser
        self._numbers = Numbers()
        self._tape = Tape()
        self._reads_unseen = False

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        looks = tuple([(_torch.below_wrappers(x).shape, x.dtype, x.requires_grad) for x in inputs])
        self._chooser = self._chooser.for_call((self.source.code, looks))
        self._numbers.label(labels, inputs)

    @contextmanager
    def of(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> Iterator[None]:
        """In plain eager code, where what is saved can be seen if no hook takes it away."""
        self.label(labels, inputs)
        with self, _torch.hooks_asleep():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_subclass_first(types):
            return NotImplemented
        kind = kind_of_call(func, args, kwargs)
        if kind == "asks":
            return run_operator(func, args, kwargs)
        key = self._numbers.of_call(func, kind, args, kwargs)
        if kind in WRITE and not reshapes(func):
            for x, _ in written(func, args, kwargs):
                for index, i in self._tape.makers(x):
                    self._tape.calls[index].values.pop(i, None)
        before = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        self._numbers.made(func, kind, key[0], args, kwargs, out)
        call = self._tape.note(func, kind, args, kwargs, out)
        if call is None:
            if func is torch.ops.aten.alias.default and current_name() is not None:
                self._name_given(func, args, kwargs, out)
        elif kind in ("pure", "custom", "random"):
            call.key = key
            self._hold(call, args, kwargs, out)
            call.streams = before, world.states_drawn_from(func, args, kwargs) if before else []
        return out

    def _hold(self, call: Call, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Hold the results of a call, if they are to be kept or may be."""
        decision = self._chooser.decides(call.func, args, kwargs, out)
        if decision is None:
            sizes = {i: meta.nbytes for i, meta in call.outputs.items()}
            if not self._chooser.wants(len(self._tape.calls) - 1, call.func, sizes):
                return
            call.flops = flops_of(call.func, args, kwargs, out)
        elif decision.keep:
            call.offloads = decision.offload
            call.chosen.update(call.outputs)
        else:
            return
        held = {i: _alias(out if call.count is None else out[i]) for i in call.outputs}
        call.values.update({i: x for i, x in held.items() if x is not None})

    def _name_given(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        decision = self._chooser.decides(func, args, kwargs, out)
        makers = self._tape.makers(args[0])
        if decision is None or len(makers) != 1:
            return  # an input has no operator to be saved, and what is written to in place no single one
        ((index, i),) = makers
        call = self._tape.calls[index]
        if decision.forbid:
            call.chosen.discard(i)
        elif decision.keep and i in call.outputs and not call.is_random:
            if i not in call.values:
                size, strides, offset, dtype, _ = call.outputs[i]
                if dtype != out.dtype:
                    return
                call.values[i] = _torch.alias(out.as_strided(size, strides, offset))
            call.chosen.add(i)
            call.offloads = decision.offload

    def note_graph(self, outputs: Sequence[Tensor], first_node: int = 0) -> None:
        """See which values the graph of the outputs has saved."""
        with _torch.no_dispatch():
            for x in _saved([y.grad_fn for y in outputs if y.grad_fn is not None], first_node):
                if x is None:
                    self._reads_unseen = True
                else:
                    for y in _torch.everything_below(x):
                        self._tape.read |= self._tape.makers(y)

    def finish(self) -> Kept | None:
        """What is kept: of what was chosen, that which the backward reads or computes from."""
        calls = self._tape.calls
        read = frozenset(self._tape.read)
        if self._reads_unseen:
            read = frozenset([(index, i) for index, call in enumerate(calls) for i in call.outputs])
        for call in calls:
            call.sizes = {i: call.outputs[i].nbytes for i in call.values}
        chosen = {(index, i) for index, call in enumerate(calls) for i in call.chosen & call.values.keys()}
        chosen |= self._chooser.choose(calls, read)
        used, again = recomputed(calls, read, chosen)
        kept = Kept(self._numbers)
        for index, call in enumerate(calls):
            of_use = [i for i in call.values if (index, i) in used]
            if index in again or not (of_use or call.may_skip):
                continue
            slots: list[int | TensorMeta | None] = [None] * (1 if call.count is None else call.count)
            for i, meta in call.outputs.items():
                slots[i] = meta
            for i in of_use:
                slots[i] = len(kept.tensors)
                value, place = _placed(call.values[i], call.offloads)
                kept.tensors.append(value)
                kept.places.append(place)
            kept.entries[call.key] = Entry(tuple(slots), call.count is None, call.streams)
        self._tape = Tape()
        for away in kept.places:
            if away is not None:
                away.is_about_to_be_written()  # by the caller, if it is an output
        return kept if kept.tensors else None


def _alias(x: Tensor) -> Tensor | None:
    try:
        return _torch.alias(x)
    except RuntimeError:
        if x.dim() > 0:
            raise
        return None  # a number that only looks like a tensor


def _placed(x: Tensor, offloaded: bool) -> tuple[Tensor, Offloaded | None]:
    if offloaded and is_far(x):
        away = Offloaded(x)
        return away.host, away
    return x, None


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple([name for name in dir(kind) if name.startswith("_saved_")])


def _saved(roots: Sequence[Any], first_node: int) -> Iterator[Tensor | None]:
    """The tensors that a graph has saved; None for those that cannot be seen."""
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad" or node._sequence_nr() < first_node:
            continue
        pending.extend([n for n, _ in node.next_functions if n is not None])
        if node.name().startswith("torch::autograd::CppNode"):
            yield None
        try:
            values = list(getattr(node, "saved_tensors", ()))
            kind: Any = type(node)
            for name in _fields(kind):
                value = getattr(node, name)
                values.extend(value if isinstance(value, (list, tuple)) else (value,))
        except RuntimeError:  # written to since
            yield None
            continue
        yield from [x for x in values if isinstance(x, Tensor)]
