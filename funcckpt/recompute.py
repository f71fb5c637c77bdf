"""What a recomputation does not run: what nobody reads, and what a policy has kept.

A recomputation runs under `Replay`, a dispatch mode below autograd and all transforms. An operator that
takes time (`flops.has_flops`) is not run when it is called: what it returns is `lazy`, and so is all that
depends on it, until something needs the values. The pullback needs some of them, and what it does not need
is never computed: dead-code elimination with nothing to be learned first, whatever way f takes this time.
What was of use the last time is not put off the next time, so that a function in which all is needed pays
nothing. Random operators are never put off, and what is written to is computed before. Torch takes other
formulas for some derivatives where a dispatch mode watches (cumprod), so that the first recomputation of such
a function may differ from the next in the last bits.

What a policy has kept (`recording`) is handed out where a value with the same number (`numbering`) is asked
for. So a recomputation that takes another way (a matmul folds otherwise where gradients are required) finds
less, and never the wrong thing.
"""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _torch, world
from .flops import flops_of, has_flops
from .lazy import (
    PLAIN,
    Calls,
    Deferred,
    Lazy,
    Look,
    Redo,
    forced,
    is_plain,
    is_subclass_first,
    looks_of,
    run_deferred,
    run_forced,
    stream_of,
    write_later,
)
from .numbering import Numbers
from .offload import Returning
from .operators import WRITE, address_of, kind_of, kind_of_call, reshapes, tensors_of, written
from .recording import Entry, Kept, Watch, watch_of

if TYPE_CHECKING:
    from .program import Program

Tensors = tuple[Tensor, ...]


class Replay(Watch):
    """Puts off what takes time, and hands out what was kept."""

    def __init__(
        self, source: Any, kept: Kept | None, coming: Sequence[Returning], plan: _Plan | None, lazy: bool
    ) -> None:
        super().__init__(source)
        self._entries = {} if kept is None else kept.entries
        self._numbers = None if kept is None else Numbers(kept.numbers)
        self._kept = coming
        self._kept_storages = {x.untyped_storage()._cdata for x, _ in coming}
        self._plan = plan
        self._lazy = lazy
        self._calls = 0
        self._depth = 0
        # Whether one recording is part of another.
        self._nests = False
        self._pulling = False
        # Whether the pullback is nobody's business who has to be told what is lazy.
        self._may_leave = False
        self._has_left = False
        self._deferred: list[weakref.ref[Deferred]] = []
        # The calls that take time: all, those put off with their FLOPs, and those of them that were run.
        self._heavy: list[Any] = []
        self._put_off: dict[int, int] = {}
        self._ran = Calls()
        self._stream: Any = None
        self._hooks = _torch.top_saved_tensors_hooks()
        self.has_interfered = False

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        if self._numbers is not None:
            self._numbers.label(labels, inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_subclass_first(types):
            return NotImplemented
        kind = kind_of_call(func, args, kwargs)
        self._calls += not (self._pulling and self._may_leave)
        tensors = tensors_of(args, kwargs)
        if self._pulling:
            return self._run(func, kind, args, kwargs, tensors)
        if self._numbers is None or kind == "asks":
            return self._put_off_or_run(func, kind, args, kwargs, tensors)
        number, times = self._numbers.of_call(func, kind, args, kwargs)
        out: Any = _NOT_KNOWN
        if (entry := self._entries.get((number, times))) is not None:
            out = self._hand_out(entry, func, args, kwargs)
        if out is _NOT_KNOWN:
            out = self._put_off_or_run(func, kind, args, kwargs, tensors)
        self._numbers.made(func, kind, self._calls, number, args, kwargs, out)
        return out

    def _hand_out(self, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        outs: Any = None
        if None in entry.slots:  # an output that the backward does not read
            outs = self._defer(func, args, kwargs, -1)
            if outs is None or not isinstance(outs, tuple) or len(outs) != len(entry.slots):
                return _NOT_KNOWN
        self.has_interfered = True
        before, after = entry.streams
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        found = [
            outs[i] if slot is None else self._kept[slot].get().detach() for i, slot in enumerate(entry.slots)
        ]
        return found[0] if entry.is_alone else tuple(found)

    def _put_off_or_run(
        self, func: Any, kind: str, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        is_lazy = Lazy in map(type, tensors)
        number = -1
        if kind == "pure" and self._lazy and has_flops(func):
            number = len(self._heavy)
            self._heavy.append((func, *[x.shape for x in tensors]))
        if (kind == "pure" or (kind == "view" and is_lazy)) and (
            is_lazy or (number >= 0 and (self._plan is None or self._plan.puts_off(self._heavy)))
        ):
            out = self._defer(func, args, kwargs, number)
            if out is not None:
                return out
        return self._run(func, kind, args, kwargs, tensors)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any], number: int) -> Any:
        if any(type(x) not in PLAIN for x in tensors_of(args, kwargs)):
            return None
        # A checkpoint inside of f counts what is saved: some operators save other tensors of those put off.
        if _torch.top_saved_tensors_hooks() != self._hooks:
            return None
        looks = looks_of(func, args, kwargs)
        if looks is None or not self._is_home(args, kwargs):
            return None
        if kind_of(func) == "view" and (start := tensors_of(args, kwargs)[0].storage_offset()):
            moved = [
                x._replace(offset=x.offset + start) for x in ([looks] if isinstance(looks, Look) else looks)
            ]
            looks = moved[0] if isinstance(looks, Look) else tuple(moved)
        self.has_interfered = True
        deferred = Deferred(func, args, kwargs, number, self._ran, self._stream)
        alone = isinstance(looks, Look)
        outs = [deferred.give(look) for look in ((looks,) if alone else looks)]
        self._deferred.append(weakref.ref(deferred))
        out = outs[0] if alone else tuple(outs)
        if number >= 0:
            known = None if self._plan is None else self._plan.unread.get(number)
            self._put_off[number] = flops_of(func, args, kwargs, out) if known is None else known
        return out

    def _is_home(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether we are on the stream of an accelerator on which all is put off and run."""
        stream = stream_of(next(iter(tensors_of(args, kwargs))))
        self._stream = self._stream or stream
        return bool(stream is None or stream == self._stream)

    def _run(self, func: Any, kind: str, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Run an operator now, on values that are there."""
        if kind in WRITE and self._write_later(func, kind, args, kwargs):
            return args[0]
        if Lazy in map(type, tensors) and not self._is_home(args, kwargs):
            raise Redo
        return run_forced(func, args, kwargs, tensors)

    def _write_later(self, func: Any, kind: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Before something is written to, compute what waits to read it; put it off if possible."""
        targets = [x for x, _ in written(func, args, kwargs)]
        if not targets:
            return False
        addresses = {address_of(x) for x in targets}
        if addresses & self._kept_storages and not reshapes(func):
            raise Redo  # what is kept may be asked for again
        waiting = [d for reference in self._deferred if (d := reference()) is not None and not d.is_done]
        if kind == "writes" and isinstance(args[0], Lazy) and len(targets) == 1 and targets[0] is args[0]:
            for d in waiting:
                if args[0].cell in d.waits_for:
                    run_deferred(d)  # it reads what was there before
            if torch.Tag.nondeterministic_seeded not in func.tags and self._are_plain(args, kwargs):
                deferred = write_later(func, args, kwargs, self._ran, self._stream)
                if deferred is not None:
                    self._deferred.append(weakref.ref(deferred))
                if deferred is not None or torch.Tag.inplace_view in func.tags:
                    return True
        if any(isinstance(x, Lazy) for x in targets) or any(
            address_of(x) in addresses for d in waiting for x in d.reads
        ):
            for d in waiting:
                run_deferred(d)
        return False

    def _are_plain(self, args: Any, kwargs: dict[str, Any]) -> bool:
        tensors = tensors_of(args, kwargs)
        return all([type(x) in PLAIN and is_plain(x) for x in tensors]) and self._is_home(args, kwargs)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While a program is recorded, to be pulled back. The pullback of the outermost reads."""
        self._depth += 1
        self._nests |= self._depth > 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._pulling = True
            is_simple = self._numbers is None and not self._nests and not _is_differentiated()
            self._may_leave = is_simple and _torch.dispatch_modes() == [self]
            if self._may_leave and self._plan is not None and self._plan.calls == (*self._heavy,):
                self._leave()

    def _leave(self) -> None:
        """Watch no more: what is put off was not needed the last time.

        Code of Python in a pullback may write, unseen, to what is still to be read. So if something is needed
        after all, the recomputation has to be run again.
        """
        self.__exit__(None, None, None)
        self._has_left = self._ran.is_over = True

    def __exit__(self, *exception: Any) -> None:
        if not self._has_left:
            super().__exit__(*exception)

    def finish(self, outputs: Tensors) -> Tensors:
        """Outputs that are there, and nothing else that is not."""
        outputs = tuple([forced(y) for y in outputs])
        if self._ran.late:
            raise Redo  # which somebody has caught
        for collect in (False, True):
            if collect:
                gc.collect()
            if not any(lazy.is_wanted() for reference in self._deferred if (lazy := reference()) is not None):
                break
        else:
            raise Redo  # f has put it somewhere, where others may look
        return outputs

    @property
    def is_late(self) -> bool:
        """Whether something was needed that was not the last time, when it was too late."""
        return bool(self._ran.late)

    def plan(self) -> _Plan:
        """What to put off the next time."""
        needed = self._ran | self._ran.late
        unread = {number: flops for number, flops in self._put_off.items() if number not in needed}
        if self._numbers is None and not _pays(sum(unread.values()), self._calls):
            unread = {}
        return _Plan(tuple(self._heavy), unread)


class _Unguarded(Replay):
    """Where nothing in the process is compiled: then Dynamo need not be kept out of each operator."""


_Unguarded.__torch_dispatch__ = inspect.unwrap(Replay.__torch_dispatch__)  # type: ignore[method-assign]


class _Plan(NamedTuple):
    """Which of the calls that take time were not needed the last time."""

    calls: tuple[Any, ...]
    # With their FLOPs.
    unread: Mapping[int, int]

    def puts_off(self, calls: list[Any]) -> bool:
        """Whether to put off the last of the calls so far."""
        number = len(calls) - 1
        if number < len(self.calls) and self.calls[number] == calls[number]:
            return number in self.unread
        return True  # another way than the last time


# An operator that passes by costs some microseconds, in which more than this could be computed.
FLOPS_WORTH_A_CALL = 10_000
_NOT_KNOWN: Any = object()
_plans: dict[Any, _Plan | None] = {}


def _is_differentiated() -> bool:
    """Whether more than one vmap is around a pullback: its own derivative may be taken there."""
    interpreter = _torch.peek_interpreter_stack()
    is_below = interpreter is None or (interpreter.level() == 1 and _torch.kind_of(interpreter) == "vmap")
    return not is_below or _torch.has_dual_level() or torch.is_grad_enabled()


# -- around the run of a program --------------------------------------------------------------------------


class _Current(threading.local):
    # What the node that is running has kept, and of what.
    source: Any = None
    kept: Kept | None = None
    tensors: tuple[Tensor, ...] = ()


_current = _Current()


def replay_of(source: Any) -> Replay | None:
    """What puts off values of a function that is recomputed, and is to know which part only runs that."""
    watch = watch_of(source)
    return watch if isinstance(watch, Replay) else None


@contextmanager
def handing_out(source: Any, kept: Kept | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """What the recomputations of a program below may use."""
    before = _current.source, _current.kept, _current.tensors
    _current.source, _current.kept, _current.tensors = (
        source,
        kept,
        tuple([_torch.below_wrappers(x) for x in tensors]),
    )
    try:
        yield
    finally:
        _current.source, _current.kept, _current.tensors = before


def kept_for(program: Program) -> tuple[Kept | None, Sequence[Tensor]]:
    """What a node for a program has to keep."""
    source = program.source
    kept: Kept | None
    tensors: Sequence[Tensor]
    if program.is_pullback:
        kept, tensors = (_current.kept, _current.tensors) if _current.source is source else (None, ())
    else:
        kept = source.kept
        tensors = () if kept is None else kept.tensors
    if kept is not None and _torch.top_saved_tensors_hooks() is not None:
        for away in kept.places:
            if away is not None:
                away.wait()  # the hooks will read it
    return kept, tensors


def puts_off(source: Any, inputs: Iterable[Tensor]) -> bool:
    """Whether a pullback of inputs may take so long that it is worth to put off what nobody may read."""
    return _most_flops(inputs) >= FLOPS_WORTH_A_CALL and source.may_put_off and not _torch.has_compiled()


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program whose function has run before."""
    source = program.source
    inputs = source.received(inputs)
    if not program.is_pullback:
        return program.run(*inputs)
    kept, tensors = (_current.kept, _current.tensors) if _current.source is source else (None, ())
    lazy = puts_off(source, inputs)
    # What nobody reads is eliminated from a graph that is traced.
    if (not lazy and kept is None) or source.is_compiled or _torch.is_tracing():
        return program.run(*inputs)
    key: Any = source.code, *[x.shape for x in inputs], () if kept is None else tuple(kept.entries)
    plan = _plans.get(key)
    lazy = lazy and (plan is None or bool(plan.unread))
    if not lazy and kept is None:
        return program.run(*inputs)
    coming: list[Returning] = []
    if kept is not None:
        coming = [
            Returning(x) if place is None else place.back(x)
            for x, place in zip(tensors, kept.places, strict=True)
        ]
    replay = (_Unguarded if kept is None else Replay)(source, kept, coming, plan, lazy)
    # What is lazy around us is not computed as part of this.
    inputs = [forced(x) for x in inputs]
    ours: Exception | None = None
    try:
        with replay:
            outputs = program.run(*inputs)
            with torch.no_grad():
                outputs = replay.finish(outputs)
    except Exception as error:
        # Ours to blame, or f's: without us it will show.
        if not replay.has_interfered:
            raise
        ours = None if replay.is_late else error.with_traceback(None)  # whose frames hold what was computed
        _remember(key, replay.plan() if replay.is_late else _Plan((), {}))
    else:
        if lazy:
            _remember(key, replay.plan())
        return outputs
    outputs = program.run(*inputs)
    if ours is not None:
        _blame(ours)
    return outputs


def _blame(error: Exception) -> None:
    """Is told why a recomputation has run again, in full, and without an error. For tests, which raise it."""


def _pays(flops: int, calls: int) -> bool:
    """Whether it is worth to watch so many operators pass by, to be spared so many FLOPs."""
    return flops >= FLOPS_WORTH_A_CALL * calls


def _most_flops(inputs: Iterable[Tensor]) -> int:
    """No product of some of the inputs takes more: half of them times the other half."""
    elements = sum(map(Tensor.numel, inputs))
    return elements * elements // 2


def _remember(key: Any, plan: _Plan) -> None:
    if len(_plans) >= 4096:
        _plans.clear()
    _plans[key] = plan
