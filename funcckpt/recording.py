"""The first run of a function with a policy: what is kept of it.

Under `Record` the values of the forward are numbered, and those that the policy says to save are held. At
the end the graph shows what the backward reads; of what is held, that is kept which is read, or needed to
compute what is read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch, world
from .flops import flops_of
from .lazy import Look, is_subclass_first, look_of
from .numbering import Numbers, Place
from .offload import Offloaded, is_far
from .operators import WRITE, kind_of_call, reshapes, returns_argument, tensors_of, written


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


class Operator(NamedTuple):
    """A call of an operator in the forward, for a policy that chooses among all of them.

    Attributes
    ----------
    func
        The operator.
    flops : int
        What it costs to run it again.
    outputs : dict[int, int]
        The bytes of each of its outputs that can be kept.
    needs : frozenset of (int, int)
        What it computes from: calls by their index, and which of their outputs.
    """

    func: Any
    flops: int
    outputs: dict[int, int]
    needs: frozenset[Place]


class _Made:
    """A call of the forward."""

    __slots__ = (
        "chosen",
        "count",
        "flops",
        "func",
        "key",
        "looks",
        "needs",
        "offloads",
        "sizes",
        "streams",
        "values",
    )

    def __init__(self, key: tuple[int, int], func: Any, needs: frozenset[Place], count: int | None) -> None:
        self.key, self.func, self.needs, self.count = key, func, needs, count
        self.flops = 0
        # The outputs that could be kept, their bytes, those that are held, and those of them that are to be.
        self.looks: dict[int, Look] = {}
        self.sizes: dict[int, int] = {}
        self.values: dict[int, Tensor] = {}
        self.chosen: set[int] = set()
        self.offloads = False
        self.streams: tuple[world.States, world.States] = [], []

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(self.func, "tags", ())

    def operator(self) -> Operator:
        return Operator(self.func, self.flops, {i: self.sizes[i] for i in self.values}, self.needs)


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
    # For each output its index among the tensors, or None; and how many there are, if not one alone.
    slots: tuple[int | None, ...]
    is_alone: bool
    streams: tuple[world.States, world.States]


class Chooser(Protocol):
    """A policy as the forward asks it."""

    def for_call(self, signature: Any) -> Chooser:
        """The policy for one call of a function, known by its code and by what its inputs look like."""

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        """What to do with what an operator returned; for `aten.alias` with a name, with what is named.

        None where that is left to `wants` and `choose`.
        """

    def wants(self, call: int, func: Any, sizes: dict[int, int]) -> bool:
        """Whether the results of a call, of so many bytes, may be chosen in the end."""

    def choose(self, operators: Sequence[Operator], read: frozenset[Place]) -> frozenset[Place]:
        """What to keep, given all operators and the values that the backward reads."""


class Decision(NamedTuple):
    keep: bool
    offload: bool = False
    # Whether a name that is not to be kept forbids to keep the value on any other grounds.
    forbid: bool = False


class Record(Watch):
    """Numbers the values of the forward, and holds what the policy says to keep."""

    def __init__(self, source: Any, chooser: Chooser, name: Callable[[], str | None]) -> None:
        super().__init__(source)
        self._chooser = chooser
        self._name = name
        self._numbers = Numbers()
        self._made: list[_Made] = []
        self._read: set[Place] = set()
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
            return func(*args, **kwargs)
        number, times = self._numbers.of_call(func, kind, args, kwargs)
        places = [self._numbers.places(x) for x in tensors_of(args, kwargs)]
        needs: frozenset[Place] = frozenset().union(*places)
        if kind in WRITE and not reshapes(func):
            for x, _ in written(func, args, kwargs):
                for call, i in self._numbers.places(x):
                    self._made[call].values.pop(i, None)
        before = world.states_drawn_from(func, args, kwargs)
        out = func(*args, **kwargs)
        call = len(self._made)
        self._numbers.made(func, kind, call, number, args, kwargs, out)
        if kind == "view" or (kind != "writes" and returns_argument(args, kwargs, out)):
            if func is torch.ops.aten.alias.default and self._name() is not None:
                self._name_given(func, args, kwargs, out, needs)
            return out
        made = _Made((number, times), func, needs, None if isinstance(out, Tensor) else _length(out))
        self._made.append(made)
        if kind not in ("pure", "custom", "random"):
            return out
        outs = [out] if isinstance(out, Tensor) else out
        for i, y in enumerate(outs):
            if isinstance(y, Tensor) and _can_be_kept(y):
                made.looks[i], made.sizes[i] = look_of(y, y.device), y.numel() * y.element_size()
        decision = self._chooser.decides(func, args, kwargs, out)
        if decision is None and self._chooser.wants(call, func, made.sizes):
            made.flops = flops_of(func, args, kwargs, out)
        elif decision is None or not decision.keep:
            return out
        else:
            made.offloads = decision.offload
            made.chosen.update(made.looks)
        held = {i: _alias(outs[i]) for i in made.looks}
        made.values.update({i: x for i, x in held.items() if x is not None})
        made.streams = before, world.states_drawn_from(func, args, kwargs) if before else []
        return out

    def _name_given(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, needs: frozenset[Place]
    ) -> None:
        decision = self._chooser.decides(func, args, kwargs, out)
        if decision is None or len(needs) != 1:
            return  # an input has no operator to be saved, and what is written to in place no single one
        ((call, i),) = needs
        made = self._made[call]
        if decision.forbid:
            made.chosen.discard(i)
        elif decision.keep and i in made.looks and not made.is_random:
            if i not in made.values:
                size, strides, offset, dtype, _ = made.looks[i]
                if dtype != out.dtype:
                    return
                made.values[i] = _torch.alias(out.as_strided(size, strides, offset))
            made.chosen.add(i)
            made.offloads = decision.offload

    def note_graph(self, outputs: Sequence[Tensor], first_node: int = 0) -> None:
        """See which values the graph of the outputs has saved."""
        with _torch.no_dispatch():
            for x in _saved([y.grad_fn for y in outputs if y.grad_fn is not None], first_node):
                if x is None:
                    self._reads_unseen = True
                else:
                    for y in _torch.everything_below(x):
                        self._read |= self._numbers.places(y)

    def finish(self) -> Kept | None:
        """What is kept: of what was chosen, that which the backward reads or computes from."""
        read = frozenset(self._read)
        if self._reads_unseen:
            read = frozenset([(call, i) for call, made in enumerate(self._made) for i in made.looks])
        operators = [made.operator() for made in self._made]
        chosen = {(call, i) for call, made in enumerate(self._made) for i in made.chosen & made.values.keys()}
        chosen |= self._chooser.choose(operators, read)
        used, _ = recomputed(operators, read, chosen)
        kept = Kept(self._numbers)
        for call, made in enumerate(self._made):
            slots: list[int | None] = [None] * (1 if made.count is None else made.count)
            for i in range(len(slots)):
                if (call, i) in used and i in made.values:
                    slots[i] = len(kept.tensors)
                    value, place = _placed(made.values[i], made.offloads)
                    kept.tensors.append(value)
                    kept.places.append(place)
            if any(slot is not None for slot in slots):
                kept.entries[made.key] = Entry(tuple(slots), made.count is None, made.streams)
        self._made = []
        for away in kept.places:
            if away is not None:
                away.is_about_to_be_written()  # by the caller, if it is an output
        return kept if kept.entries else None


def _length(out: Any) -> int:
    return len(out) if isinstance(out, (list, tuple)) else 1


def _alias(x: Tensor) -> Tensor | None:
    try:
        return _torch.alias(x)
    except RuntimeError:
        if x.dim() > 0:
            raise
        return None  # a number that only looks like a tensor


def _can_be_kept(x: Tensor) -> bool:
    return x.layout is torch.strided and not x._is_zerotensor()


def _placed(x: Tensor, offloaded: bool) -> tuple[Tensor, Offloaded | None]:
    if offloaded and is_far(x):
        away = Offloaded(x)
        return away.host, away
    return x, None


def recomputed(
    operators: Sequence[Operator],
    read: set[Place] | frozenset[Place],
    kept: set[Place] | frozenset[Place],
) -> tuple[set[Place], set[int]]:
    """Which of the kept values are of use to a backward that reads `read`, and which calls it runs again."""
    used: set[Place] = set()
    again: set[int] = set()
    pending = list(read)
    seen = set(pending)
    while pending:
        place = pending.pop()
        if place in kept:
            used.add(place)
        elif place[0] not in again:
            again.add(place[0])
            for other in operators[place[0]].needs:
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
    return used, again


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
