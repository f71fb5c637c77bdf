"""Recomputation: what it does not run, because nobody reads it or because a policy has kept it.

The pullback of a checkpoint records f again and then goes backward. Some results of the recording are
never read: the last matrix product of a block, the sum that it goes into. The first recomputation of a
function runs in full under `Replay`, with a tape that shows which those are: no operator that has to run
has read them, the pullback did not, and their memory is gone at the end. The next recomputations skip
them. A skipped operator returns a `Placeholder`, which has a shape, a dtype and a device, and no memory.
Whoever reads it has the recomputation run again, in full: what was learned may be wrong, and no gradient is.

Only operators that make new memory are skipped. One always runs if something else shares its memory in a
way that no schema declares (`aten.unsafe_split`), or if something is written to it, or if it draws random
numbers.

What a policy has kept (`recording`) is handed out where a value with the same number (`numbering`) is asked
for. A recomputation that takes another way (a matmul folds otherwise where gradients are required) finds
less, and never the wrong thing.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch, world
from ..policies.offload import Returning
from .flops import flops_of
from .numbering import Numbers
from .operators import (
    PLAIN,
    READ_NO_VALUES,
    WRITE,
    TensorMeta,
    address_of,
    is_subclass_first,
    kind_of,
    kind_of_call,
    makes_nothing,
    map_tensors,
    reshapes,
    run_operator,
    tensors_of,
    written,
)
from .recording import Entry, Kept, Tape, Watch, watch_of

if TYPE_CHECKING:
    from ..core.program import Program

Tensors = tuple[Tensor, ...]


class Redo(Exception):
    """The recomputation has to be run again, in full."""

    def __init__(self, replay: Replay) -> None:
        super().__init__("something was read that the recomputation has skipped")
        self.replay = replay


class Placeholder(Tensor):
    """The result of a skipped operator. It has no memory: to read it raises `Redo`."""

    replay: Replay

    @staticmethod
    def __new__(cls, meta: TensorMeta, replay: Replay) -> Placeholder:
        x: Placeholder = _torch.without_memory(cls, *meta)
        x.replay = replay
        replay.placeholders.append(weakref.ref(x))
        return x

    __torch_function__ = _torch.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Views, and operators that read no values, need none."""
        kwargs = kwargs or {}
        kind, x = kind_of(func), args[0] if args else None
        if isinstance(x, Placeholder) and reshapes(func):
            with _torch.no_dispatch():
                func(*args, **kwargs)
            return x
        if not isinstance(x, Placeholder) or kind not in READ_NO_VALUES:
            raise next(y for y in tensors_of(args, kwargs) if isinstance(y, Placeholder)).replay.redo()
        args = [map_tensors(_on_meta, a) for a in args]
        if kind == "like":
            return func(*args, **{**kwargs, "device": kwargs.get("device") or x.device})
        with _torch.no_dispatch():
            out = func(*args, **kwargs)
        return map_tensors(lambda y: x.replay.placeholder(TensorMeta.of(y)._replace(device=x.device)), out)


PLAIN.add(Placeholder)


def _on_meta(x: Tensor) -> Tensor:
    if not isinstance(x, Placeholder):
        return x
    with _torch.no_dispatch():
        memory = torch.empty_strided((x.untyped_storage().nbytes(),), (1,), dtype=torch.uint8, device="meta")
        return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _signature(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how the results of an operator look: no values of tensors, and no numbers of a formula."""
    return func, *map(_look, args), *[(name, _look(a)) for name, a in kwargs.items()]


def _look(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.shape, a.stride(), a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return tuple(map(_look, a))
    return float if isinstance(a, float) else (type(a), a)


class Skipped(NamedTuple):
    """A call that is not run."""

    signature: tuple[Any, ...]
    outputs: tuple[TensorMeta, ...]
    is_alone: bool


class Plan(NamedTuple):
    """What recomputations of a function leave out."""

    # By the index of the call in the recording; None if that is still to be learned.
    skipped: Mapping[int, Skipped] | None = None
    # Whether to leave out what the backward did not seem to read in the forward of a function with a policy.
    trusts_forward: bool = True

    def corrected(self) -> Plan:
        """The plan after a recomputation in which something was missing."""
        return Plan(None if self.skipped is None and self.trusts_forward else {}, trusts_forward=False)


class Replay(Watch):
    """Skips what is planned, hands out what was kept, and learns what to skip if there is no plan yet."""

    def __init__(
        self, source: Any, kept: Kept | None, coming: Sequence[Returning], plan: Plan, learns: bool
    ) -> None:
        super().__init__(source)
        self._entries = {} if kept is None else kept.entries
        self._numbers = None if kept is None else Numbers(kept.numbers)
        self._kept = coming
        self._kept_storages = {x.untyped_storage()._cdata for x, _ in coming}
        self._plan = plan
        self._skipped = plan.skipped or {}
        self._tape = Tape() if learns else None
        self._calls = 0
        self._depth = 0
        self._pulling = False
        self._has_left = False
        self.placeholders: list[weakref.ref[Placeholder]] = []
        # Whether a placeholder was read, and whether anything was handed out at all.
        self.was_read = False
        self.has_interfered = False
        # Whether what was recorded here is the same the next time.
        self._is_settled = True

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        if self._numbers is not None:
            self._numbers.label(labels, inputs)

    def redo(self) -> Redo:
        self.was_read = True
        return Redo(self)

    def placeholder(self, meta: TensorMeta) -> Placeholder:
        self.has_interfered = True
        return Placeholder(meta, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_subclass_first(types):
            return NotImplemented
        kind = kind_of_call(func, args, kwargs)
        if kind in WRITE and self._kept_storages and not reshapes(func):
            if any(address_of(x) in self._kept_storages for x, _ in written(func, args, kwargs)):
                raise self.redo()  # what is kept may be asked for again
        if self._pulling:
            if self._tape is not None:
                self._tape.note_read(kind, args, kwargs)
            return run_operator(func, args, kwargs)
        if self._numbers is None or kind == "asks":
            return self._call(func, kind, args, kwargs, None)
        key = self._numbers.of_call(func, kind, args, kwargs)
        out = self._call(func, kind, args, kwargs, self._entries.get(key))
        self._numbers.made(func, kind, key[0], args, kwargs, out)
        return out

    def _call(self, func: Any, kind: str, args: Any, kwargs: dict[str, Any], entry: Entry | None) -> Any:
        if makes_nothing(func, kind):
            return run_operator(func, args, kwargs)
        index, self._calls = self._calls, self._calls + 1
        skipped = self._skipped.get(index)
        if skipped is not None and skipped.signature == _signature(func, args, kwargs):
            outs = tuple(map(self.placeholder, skipped.outputs))
            return outs[0] if skipped.is_alone else outs
        if entry is not None and (self._plan.trusts_forward or not entry.misses()):
            out = self._hand_out(entry)
            if self._tape is not None:
                self._tape.note(func, "handed out", (), {}, out)
            return out
        out = run_operator(func, args, kwargs)
        if self._tape is not None:
            call = self._tape.note(func, kind, args, kwargs, out)
            if call is not None and call.may_skip:
                call.flops = flops_of(func, args, kwargs, out)
                call.signature = _signature(func, args, kwargs)
        return out

    def _hand_out(self, entry: Entry) -> Any:
        self.has_interfered = True
        before, after = entry.streams
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        found = tuple(map(self._result, entry.slots))
        return found[0] if entry.is_alone else found

    def _result(self, slot: int | TensorMeta | None) -> Tensor | None:
        if isinstance(slot, int):
            return self._kept[slot].get().detach()
        return None if slot is None else self.placeholder(slot)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While a program is recorded, to be pulled back. The pullback of the outermost reads."""
        self._depth += 1
        before = _current.learned
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._pulling = True
            # What a checkpoint inside of f learns just now it does in another way the next time.
            self._is_settled = before == _current.learned
            if self._tape is None and self._numbers is None and _torch.dispatch_modes()[-1:] == [self]:
                self.__exit__(None, None, None)  # a placeholder says itself that it is read
                self._has_left = True

    def __exit__(self, *exception: Any) -> None:
        if not self._has_left:
            super().__exit__(*exception)

    def finish(self) -> None:
        """Raise if a placeholder was read, or is where others may find it."""
        if self.was_read:
            raise Redo(self)  # which somebody has caught
        if self._has_placeholders():
            gc.collect()
            if self._has_placeholders():
                raise Redo(self)

    def _has_placeholders(self) -> bool:
        return any([x() is not None for x in self.placeholders])

    def plan(self) -> Plan | None:
        """What to skip the next time, if that was learned."""
        if self._tape is None:
            return None
        _current.learned += 1
        if not self._is_settled:
            return None
        unread = self._tape.unread()
        if not _pays(sum([call.flops for call in unread.values()]), self._calls):
            unread = {}
        return self._plan._replace(
            skipped={
                index: Skipped(call.signature, (*call.outputs.values(),), call.count is None)
                for index, call in unread.items()
            }
        )


# An operator that passes by costs some microseconds, in which more than this could be computed.
FLOPS_WORTH_A_CALL = 10_000
_plans: dict[Any, Plan] = {}


# -- around the run of a program --------------------------------------------------------------------------


class _Current(threading.local):
    # What the node that is running has kept, and of what.
    source: Any = None
    kept: Kept | None = None
    tensors: tuple[Tensor, ...] = ()
    # How many recomputations were run to learn from.
    learned = 0


_current = _Current()


def replay_of(source: Any) -> Replay | None:
    """What skips operators of a function that is recomputed, and is to know which part only runs that."""
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


def may_skip(inputs: Iterable[Tensor]) -> bool:
    """Whether a pullback of inputs may take so long that it is worth to learn what nobody reads."""
    return _most_flops(inputs) >= FLOPS_WORTH_A_CALL and not _torch.has_compiled()


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program whose function has run before."""
    source = program.source
    inputs = source.received(inputs)
    if not program.is_pullback:
        return program.run(*inputs)
    kept, tensors = (_current.kept, _current.tensors) if _current.source is source else (None, ())
    skips = may_skip(inputs)
    # What nobody reads is eliminated from a graph that is traced.
    if (not skips and kept is None) or source.is_compiled or _torch.is_tracing():
        return program.run(*inputs)
    key = _key(program, inputs, kept)
    plan = _plans.get(key) or Plan()
    learns = skips and plan.skipped is None
    if kept is None and not learns and not plan.skipped:
        return program.run(*inputs)
    coming: list[Returning] = []
    if kept is not None:
        coming = [
            Returning(x) if place is None else place.back(x)
            for x, place in zip(tensors, kept.places, strict=True)
        ]
    replay = Replay(source, kept, coming, plan, learns)
    del coming
    ours: Exception | None = None
    try:
        with replay:
            outputs = program.run(*inputs)
        replay.finish()
    except Redo as redo:
        if redo.replay is not replay:
            raise
    except Exception as error:
        # Ours to blame, or f's: without us it will show.
        if not replay.has_interfered:
            raise
        ours = None if replay.was_read else error.with_traceback(None)  # whose frames hold what was computed
    else:
        if (learned := replay.plan()) is not None:
            _remember(key, learned)
        return outputs
    _remember(key, plan.corrected())
    outputs = program.run(*inputs)
    if ours is not None:
        _blame(ours)
    return outputs


def _blame(error: Exception) -> None:
    """Is told why a recomputation has run again, in full, and without an error. For tests, which raise it."""


def _key(program: Program, inputs: Sequence[Tensor], kept: Kept | None) -> Any:
    """What tells recomputations apart: the function, what is computed of it, what its inputs look like."""
    source = program.source
    steps: list[Any] = []
    while program is not source:
        steps.append((type(program), *[getattr(program, name, None) for name in _SHAPES]))
        program = program.inner  # type: ignore[attr-defined]
    looks = [
        (x.shape, x.stride(), x.dtype) if x.layout is torch.strided else x.layout
        for x in _torch.all_below_wrappers(inputs)
    ]
    return source.code, *steps, *looks, () if kept is None else tuple(kept.entries)


# What decides, beside its type, what a program computes of another.
_SHAPES = ("wrt", "of", "along", "in_dims", "at_level")


def _pays(flops: int, calls: int) -> bool:
    """Whether it is worth to watch so many operators pass by, to be spared so many FLOPs."""
    return flops > FLOPS_WORTH_A_CALL * calls


def _most_flops(inputs: Iterable[Tensor]) -> int:
    """No product of some of the inputs takes more: half of them times the other half."""
    elements = sum(map(Tensor.numel, inputs))
    return elements * elements // 2


def _remember(key: Any, plan: Plan) -> None:
    if len(_plans) >= 4096:
        _plans.clear()
    _plans[key] = plan
