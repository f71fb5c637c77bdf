"""A run, call by call: what each operator reads, and which call made which storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import world
from .._torch import autograd, dynamo, functorch, kernels, wrappers
from . import operators
from .operators import TensorMeta, kind_of, results, tensors_in, tensors_of

# A result of a call: (call index, output index). Tensors that a call has written to have negative indices.
Place = tuple[int, int]


@dataclass(eq=False)
class OpCall:
    """A call of an operator."""

    func: Any
    # The results that it reads; and how many it returns, or None for a single tensor.
    needs: Set[Place] = frozenset()
    count: int | None = None
    # By output index, for results in new memory: a `TensorMeta`; for a kept result, its index among the kept.
    outputs: dict[int, Any] = field(default_factory=dict)
    # By output index: results that are no tensors, as of fused attention.
    others: dict[int, Any] = field(default_factory=dict)
    # Whether it may be skipped: it has no side effects, and no hidden alias shares memory with its results.
    may_skip: bool = False
    # A hash of all calls up to it; what decides shapes and dtypes of its results; its cost.
    number: int = 0
    signature: tuple[Any, ...] = ()
    flops: int = 0
    # For a policy: the results to keep; whether they are offloaded; and the random streams from which it
    # draws, before and after it.
    values: dict[int, Any] = field(default_factory=dict)
    offloads: bool = False
    # Whether copies of its results are kept, since f writes to them where no mode sees it.
    copies: bool = False
    streams: tuple[world.States, world.States] = ([], [])

    def move_streams(self) -> None:
        """Called where the results are handed out: as if the operator had drawn again."""
        before, after = self.streams
        if after and not world.moved(before):
            world.set_streams(after)


class Tape:
    """The calls of a run, and which of them made which storage."""

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        # Results that are read by something other than the calls.
        self.read: set[Place] = set()
        # The result in each storage.
        self.makers: WeakKeyDictionary[torch.UntypedStorage, Place] = WeakKeyDictionary()

    def made(self, tensors: Iterable[Tensor]) -> set[Place]:
        """The results that share memory with these tensors."""
        storages = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
        return {self.makers[storage] for storage in storages if storage in self.makers}

    def named(self, x: Tensor) -> Iterator[tuple[OpCall, int, Tensor]]:
        """The results that get a name as `x`: call, output index and tensor."""
        for index, i in self.made((x,)):
            meta = self.calls[index].outputs.get(i)
            if meta is not None and meta.dtype == x.dtype:
                yield self.calls[index], i, x.as_strided(meta.size, meta.strides, meta.offset)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, OpCall | None]:
        """Run an operator, and record the call; None if it returns memory of others, or no strided tensor."""
        kind = kind_of(func)
        if kind == "view":
            return operators.run_operator(func, args, kwargs), None
        inner = operators.inner_tensors
        changed = [y for x in operators.written(func, args, kwargs) for y in (x, *inner(x))]
        changed = [x for x in changed if x.layout is torch.strided]
        for index, _ in self.made(changed):
            self.calls[index].values.clear()  # it must run again, since it is written to
        before = world.states_drawn_from(func, args, kwargs)
        out = operators.run_operator(func, args, kwargs)
        streams = world.drawn_since(before)
        # (Collectives take lists of lists.)
        given = tensors_in((args, kwargs)) if kind == "writes" else tensors_of(args, kwargs)
        index = len(self.calls)
        storages = {x.untyped_storage()._cdata for x in given if x.layout is torch.strided}
        needs = self.made(given) if kind != "like" else set()
        call = OpCall(func, needs, len(out) if isinstance(out, (list, tuple)) else None, streams=streams)
        self.calls.append(call)
        for i, x in enumerate(changed):
            self.makers[x.untyped_storage()] = index, -1 - i
        if kind == "writes":
            return out, call
        is_pure = kind == "pure" or (kind == "random" and not operators.draws(func, args, kwargs))
        call.may_skip, is_known = is_pure and bool(given), True
        for i, y in enumerate(results(out)):
            if not isinstance(y, Tensor):
                call.may_skip, call.others[i] = False, y
            elif not operators.is_plain(y):
                call.may_skip = is_known = False
            elif y.untyped_storage()._cdata in storages or y.untyped_storage() in self.makers:
                # Shared memory that the schema does not mention (`aten.unsafe_split`).
                call.may_skip = is_known = False
            else:
                call.outputs[i] = TensorMeta.of(y)
                self.makers[y.untyped_storage()] = index, i
        return out, call if is_known else None

    def unread(self) -> list[OpCall]:
        """The calls whose results nobody has read, and whose results are freed."""
        read = self.read.union(self.makers.values(), *[c.needs for c in self.calls if not c.may_skip])
        _, again = recomputed(self.calls, read)
        return [call for i, call in enumerate(self.calls) if call.may_skip and i not in again]


def recomputed(
    calls: Sequence[OpCall], read: Set[Place], kept: Set[Place] = frozenset()
) -> tuple[set[Place], set[int]]:
    """For a backward that reads `read`: which of the kept values it uses, and which calls it runs again."""
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
    """What was learned from earlier runs, by a key for each. Cleared when it becomes too large."""

    _size = 0  # how many calls it has, and how many keys

    def __setitem__(self, key: Any, plan: Any) -> None:
        if key not in self:
            parts = plan if isinstance(plan, tuple) else (plan,)
            self._size += 1 + sum([len(part) for part in parts if isinstance(part, dict)])
            if self._size > MOST_CALLS:
                self.clear()
                self._size = 0
        super().__setitem__(key, plan)


# A call takes some 4 kilobytes.
MOST_CALLS = 10_000


def steps_of(program: Any) -> list[Any]:
    """A key for what a program computes: the code of the user's function, and each program made from it."""
    steps, source = [program.source.code], program.source
    while program is not source:
        steps += (type(program), *[getattr(program, name, None) for name in _SHAPES])
        program = program.inner
    return steps


_SHAPES = ("wrt", "of", "along", "in_dims", "at_level", "differentiated")


class Watchlist(NamedTuple):
    """The operators of which some calls are known, where to see these operators alone is enough.

    A call is known by its position: a hash of the calls of these operators since f began.
    """

    funcs: frozenset[int]  # their ids
    numbers: Mapping[int, int]  # by position: the number of the call among all calls
    end: int  # the position at the end of f
    nodes: int  # how many graph nodes f has made
    written: frozenset[int] = frozenset()  # the numbers of calls to whose results f writes later


class Watch(functorch.UnguardedMode):
    """A mode that watches a run of one function, and all operators in it.

    `number` is a hash of all operators since f began. If an earlier run had the same number, both have run
    the same operators. Shapes are compared only for operators whose results are kept or skipped.

    Where earlier runs have shown which calls are known, a run sees only the operators of `watchlists`, by
    `kernels`.
    """

    supports_higher_order_operators = True
    sees_names = True

    # Whether f runs now: not the code before it, and not its pullback.
    in_f = False
    # How many dispatch modes were active when f began.
    modes = 0
    number = 0
    # By number: calls of an earlier run.
    known: Mapping[int, OpCall] = {}
    # The operators that are enough; whether only these are seen; and the positions in each of them.
    watchlists: Sequence[Watchlist] = ()
    without_mode = False
    # How many graph nodes f has made, and the first of them.
    nodes = first_node = 0

    def __init__(self, source: Any, tape: Tape | None) -> None:
        super().__init__()
        self.source = source
        self.tape = tape
        self.log: list[tuple[Any, int]] = []  # all calls, if all are seen
        # The storages of kept values that were handed out, or kept without a tape.
        self.storages: set[int] = set()
        # Without a mode: tensors with this memory, which count writes, with their versions.
        self.held: list[tuple[Tensor, int]] = []

    def begin(self, inputs: Sequence[Tensor] = ()) -> None:
        """Called when f begins."""
        self.in_f, self.modes = True, functorch.number_of_dispatch_modes()
        self.first_node = functorch.next_sequence_number()

    def count_nodes(self) -> None:
        """Called when f ends."""
        self.nodes = functorch.next_sequence_number() - self.first_node

    def watchlist_of(self, numbers: Collection[int], *others: Any) -> Watchlist | None:
        """The operators of the calls with some numbers, after a run in which all were seen.

        None if torch does not show them, and `others`, alone; or if f has collectives, which all processes
        must run alike: a recomputation without a mode may begin again in one of them.
        """
        if any([func.namespace in operators.COLLECTIVES for func, _ in self.log]):
            return None
        funcs = {id(func): func for func, number in self.log if number in numbers}
        if not kernels.watch((*funcs.values(), *others)):
            return None
        position, known = 0, {}
        for func, number in self.log:
            if id(func) in funcs:
                position = hash((position, id(func)))
                if number in numbers:
                    known[position] = number
        return Watchlist(frozenset(funcs), known, position, self.nodes)

    def leave_mode(self) -> None:
        """From now on see only the operators of `watchlists`, if nothing else watches or traces.

        Kernels of compiled code write to memory where nothing sees it, and no mode keeps torch from running
        them here.
        """
        if functorch.dispatch_modes() != [self] or torch.is_inference_mode_enabled():
            return
        if not (functorch.is_tracing() or functorch.has_compiled()):
            super().__exit__(None, None, None)
            self.without_mode, self.positions = True, [0] * len(self.watchlists)
            kernels.begin(self)

    def __exit__(self, *error: Any) -> None:
        if self.without_mode:
            kernels.end(self)
        else:
            super().__exit__(*error)

    @dynamo.hidden
    def see(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of an operator that has a kernel."""
        call = self.known_call(func, args, kwargs)
        return func(*args, **kwargs) if call is None else self.hand_out(call, func, args, kwargs)

    def known_call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> OpCall | None:
        """The known call that an operator of `watchlists` makes now, if it is one."""
        found = None
        if self.in_f:
            for i, watchlist in enumerate(self.watchlists):
                if id(func) in watchlist.funcs:
                    position = self.positions[i] = hash((self.positions[i], id(func)))
                    call = self.known.get(watchlist.numbers.get(position, 0))
                    if call is not None and call.signature == operators.signature(func, args, kwargs):
                        found = call
        return None if torch.is_inference_mode_enabled() else found

    def hold(self, x: Tensor) -> None:
        """Called with a kept value, to which f must not write."""
        self.storages.add(x.untyped_storage()._cdata)
        if self.without_mode:
            self.held.append((x, x._version))

    def went_elsewhere(self) -> bool:
        """Whether f, run without a mode, has run other operators than in the earlier run.

        Operators that others call are seen, too, and no mode has seen them, so then it has.
        """
        ends = [(position, self.nodes) for position in self.positions]
        return ends != [(watchlist.end, watchlist.nodes) for watchlist in self.watchlists]

    def has_written(self) -> bool:
        """Whether f, run without a mode, may have written to kept values."""
        return functorch.has_compiled() or bool(self.written())

    def written(self) -> set[int]:
        """The storages of kept values to which f has written."""
        return {x.untyped_storage()._cdata for x, version in self.held if x._version != version}

    def note_graph(self, outputs: Sequence[Tensor], own: Any = (), first_node: int = 0) -> None:
        """Called with the outputs of f, if autograd has recorded them."""

    @dynamo.hidden
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and operators.is_subclass_first(types):
            return NotImplemented
        of = operators.about(func)
        if of.is_composite and operators.comes_whole(func, args, kwargs):
            with self:
                return autograd.taken_apart(func, args, kwargs)
        kind = of.kind
        if self.in_f:
            # (Inside of this method, it is no active mode itself.)
            if functorch.number_of_dispatch_modes() >= self.modes and functorch.is_tracing():
                return operators.run_operator(func, args, kwargs)  # a kept value would be a constant
            if kind != "view":
                if self.storages and kind in ("writes", "other"):
                    written = wrappers.storages_of(operators.written(func, args, kwargs))
                    if not self.storages.isdisjoint(written):
                        self.note_write()
                self.number = hash((self.number, id(func)))
                self.log.append((func, self.number))
                known = self.known.get(self.number)
                if known is not None and known.signature == operators.signature(func, args, kwargs):
                    return self.hand_out(known, func, args, kwargs)
            if self.tape is not None:
                return self.call(self.tape, func, args, kwargs)[0]
        elif self.tape is not None and kind not in operators.READ_NO_VALUES:
            # A read by something other than the calls.
            self.tape.read |= self.tape.made(tensors_of(args, kwargs))
        return operators.run_operator(func, args, kwargs)

    def note_write(self) -> None:
        """Called before an operator of f that writes to a kept value."""

    def hand_out(self, call: OpCall, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of a known call of f."""

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, OpCall | None]:
        """Run an operator of f, and record the call."""
        given = tensors_of(args, kwargs)
        if any([x.is_nested for x in given]):  # such a tensor has no shape
            tape.read |= tape.made(given)
            return operators.run_operator(func, args, kwargs), None
        out, call = tape.run(func, args, kwargs)
        if call is not None:
            call.number, call.signature = self.number, operators.signature(func, args, kwargs)
            call.flops = operators.flops_of(func, args, kwargs, out)
        return out, call


def watch_of(source: Any) -> Watch | None:
    """The active mode that watches a function, if any."""
    watch = next((mode for mode in reversed(functorch.dispatch_modes()) if isinstance(mode, Watch)), None)
    return watch if watch is not None and watch.source is source else None


def copy_of(x: Tensor) -> Tensor:
    """A copy that no watch sees."""
    with unwatched():
        return x.clone()


@contextmanager
def unwatched() -> Iterator[None]:
    """A block of operators that are not those of f: copies of buffers, recomputations by hooks.

    Another run may have others.
    """
    seen: list[Any] = [*functorch.dispatch_modes(), *kernels.here.watchers]
    watches = [watch for watch in seen if getattr(watch, "in_f", False)]
    for watch in watches:
        watch.in_f = False
    try:
        yield
    finally:
        for watch in watches:
            watch.in_f = True
