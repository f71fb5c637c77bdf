"""A run, call by call: what each operator reads, and which of them has made what is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import world
from .._torch import functorch
from . import operators
from .operators import TensorMeta, kind_of, results, tensors_of

# A result of a call: (call index, output index). What a call has written to has numbers below 0.
Place = tuple[int, int]


@dataclass(eq=False)
class Call:
    """A call of an operator."""

    func: Any
    # The results that it reads, and how many it returns; None for one tensor alone.
    needs: Set[Place] = frozenset()
    count: int | None = None
    # Of its results those in memory of its own: a `TensorMeta`; of what is kept after the run, its index.
    outputs: dict[int, Any] = field(default_factory=dict)
    # Whether it does nothing but to make its results, and nobody shares their memory unseen.
    may_skip: bool = False
    # What was called before it, as a hash; what decides what its results look like; what it costs.
    number: int = 0
    signature: tuple[Any, ...] = ()
    flops: int = 0
    # For a policy: the results that it may keep, and whether in the memory of the host; the random streams
    # from which it draws, before and after it.
    values: dict[int, Any] = field(default_factory=dict)
    offloads: bool = False
    streams: tuple[world.States, world.States] = ([], [])


class Tape:
    """The operators of a run, and which of them have made what is in memory."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # What is known to be read, beside what other calls read.
        self.read: set[Place] = set()
        # Which result is in which memory.
        self.makers: WeakKeyDictionary[torch.UntypedStorage, Place] = WeakKeyDictionary()

    def made(self, tensors: Iterable[Tensor]) -> set[Place]:
        """The results that are in the memory of some tensors."""
        storages = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
        return {self.makers[storage] for storage in storages if storage in self.makers}

    def note_read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Something reads that is none of the calls."""
        if kind_of(func) not in operators.READ_NO_VALUES:
            self.read |= self.made(tensors_of(args, kwargs))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        """Run an operator, and note it: no call if what it returns is the memory that it was given."""
        if kind_of(func) != "view":
            for index, _ in self.made(operators.written(func, args, kwargs)):
                self.calls[index].values.clear()  # to be run again, and written to again
        before = world.states_drawn_from(func, args, kwargs)
        out = operators.run_operator(func, args, kwargs)
        call = self._note(func, args, kwargs, out)
        if call is not None:
            call.streams = before, world.states_drawn_from(func, args, kwargs)
        return out, call

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Call | None:
        kind = kind_of(func)
        if kind == "view":
            return None
        given, index = tensors_of(args, kwargs), len(self.calls)
        storages = {x.untyped_storage()._cdata for x in given if x.layout is torch.strided}
        needs = self.made(given) if kind != "like" else set()
        call = Call(func, needs, len(out) if isinstance(out, (list, tuple)) else None)
        self.calls.append(call)
        for i, x in enumerate(operators.written(func, args, kwargs)):
            self._must_run(x)
            if x.layout is torch.strided:
                self.makers[x.untyped_storage()] = index, -1 - i
        if kind == "writes":
            return call
        is_pure = kind == "pure" or (kind == "random" and not operators.draws(func, args, kwargs))
        call.may_skip, shares = is_pure and bool(given), False
        for i, y in enumerate(results(out)):
            if not isinstance(y, Tensor) or not operators.is_plain(y):
                call.may_skip = False
            elif y.untyped_storage()._cdata in storages or y.untyped_storage() in self.makers:
                # Shared memory, of which the schema does not say a word (`aten.unsafe_split`).
                call.may_skip, shares = False, True
                self._must_run(y)
            else:
                call.outputs[i] = TensorMeta.of(y)
                self.makers[y.untyped_storage()] = index, i
        return None if shares else call

    def _must_run(self, x: Tensor) -> None:
        for index, _ in self.made((x,)):
            self.calls[index].may_skip = False

    def unread(self) -> list[Call]:
        """The calls of which nobody has read a result, and whose results are gone."""
        read = self.read.union(self.makers.values(), *[c.needs for c in self.calls if not c.may_skip])
        _, again = recomputed(self.calls, read)
        return [call for i, call in enumerate(self.calls) if call.may_skip and i not in again]


def recomputed(
    calls: Sequence[Call], read: Set[Place], kept: Set[Place] = frozenset()
) -> tuple[set[Place], set[int]]:
    """Which of the kept values are of use to a backward that reads `read`, and which calls it runs again."""
    used: set[Place] = set()
    again: set[int] = set()
    pending = list(read)
    while pending:
        place = pending.pop()
        if place in kept:
            used.add(place)
        elif place[0] not in again:
            again.add(place[0])
            pending.extend(calls[place[0]].needs)
    return used, again


class Plans(dict[Any, Any]):
    """What was learned of earlier runs, by what tells them apart; forgotten where it becomes too much."""

    def __setitem__(self, key: Any, plan: Any) -> None:
        if len(self) >= 4096:
            self.clear()
        super().__setitem__(key, plan)


def steps_of(program: Any) -> list[Any]:
    """The code of the function at the root of a program, and what decides what is computed of it."""
    steps, source = [program.source.code], program.source
    while program is not source:
        steps += (type(program), *[getattr(program, name, None) for name in _SHAPES])
        program = program.inner
    return steps


_SHAPES = ("wrt", "of", "along", "in_dims", "at_level", "differentiated")


class Watch(functorch.UnguardedMode):
    """A mode that watches one function, in its first run or in another, and whatever it calls.

    `number` stands for all operators since f began. Where it is that of an earlier run, both have gone the
    same way.
    """

    supports_higher_order_operators = True
    sees_names = True

    # Whether it is f that runs, and not what is done before it, nor the pullback of what was recorded of it.
    in_f = False
    number = 0
    # Calls of an earlier run, by their numbers.
    known: Mapping[int, Call] = {}

    def __init__(self, source: Any, tape: Tape | None) -> None:
        super().__init__()
        self.source = source
        self.tape = tape

    def begin(self, inputs: Sequence[Tensor] = ()) -> None:
        """f begins."""
        self.in_f = True

    def note_graph(self, outputs: Sequence[Tensor], first_node: int = 0) -> None:
        """The outputs of f, where they are recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Each operator of a recomputation comes by: this one frame is all that it costs, if it is run.
        kwargs = kwargs or {}
        if types and operators.is_subclass_first(types):
            return NotImplemented
        shapes, has_zeros = [], False
        for a in (*args, *kwargs.values()):
            for x in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(x, Tensor):
                    shapes.append(x.shape)
                    has_zeros = has_zeros or x._is_zerotensor()
        kind = kind_of(func)
        if self.in_f and kind != "view":
            if kind in ("writes", "other"):
                self.note_write(func, args, kwargs)
            self.number = hash((self.number, func, *shapes))
            if self.number in self.known:
                found = self.hand_out(func, args, kwargs)
                if found is not None:
                    return found
        if self.tape is not None:
            if self.in_f:
                return self.call(self.tape, func, args, kwargs)[0]
            self.tape.note_read(func, args, kwargs)
        return operators.run_operator(func, args, kwargs) if has_zeros else func(*args, **kwargs)

    def note_write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operator of f is about to run that may write."""

    def hand_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of an operator of f that is known by its number, if they are at hand."""

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        """Run an operator of f, and note it."""
        out, call = tape.run(func, args, kwargs)
        if call is not None:
            call.number, call.signature = self.number, operators.signature(func, args, kwargs)
            call.flops = operators.flops_of(func, args, kwargs, out)
        return out, call


def watch_of(source: Any) -> Watch | None:
    """The mode that watches a function, if any."""
    watch = None
    for mode in functorch.dispatch_modes():
        watch = mode if isinstance(mode, Watch) else watch
    return watch if watch is not None and watch.source is source else None
