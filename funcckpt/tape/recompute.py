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

Where a policy has seen the forward (`recording`), that has shown what nobody reads, and what was kept is
handed out. From the first operator on that is not the one of the forward (a matmul folds otherwise where
gradients are required), all is run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..policies.offload import Returning
from .operators import (
    PLAIN,
    READ_NO_VALUES,
    TensorMeta,
    kind_of,
    signature,
    tensors_of,
)
from .recording import Entry, Kept
from .tape import Tape, Watch

if TYPE_CHECKING:
    from ..core.program import Program

Tensors = tuple[Tensor, ...]


class Redo(Exception):
    """The recomputation has to be run again, in full."""

    def __init__(self, replay: Replay) -> None:
        super().__init__("something was read that the recomputation has skipped")
        self.replay = replay
        replay.was_read = True


class Placeholder(Tensor):
    """The result of a skipped operator. It has no memory: to read it raises `Redo`."""

    meta: Tensor
    replay: Replay

    @staticmethod
    def __new__(cls, like: TensorMeta, replay: Replay, meta: Tensor | None = None) -> Placeholder:
        x: Placeholder = functorch.without_memory(cls, *like)
        x.replay = replay
        if meta is None:
            meta = torch.empty_strided(like.size, like.strides, dtype=like.dtype, device="meta")
        x.meta = meta
        replay.placeholders.append(weakref.ref(x))
        return x

    __torch_function__ = functorch.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Views, and operators that read no values, need none."""
        kwargs = kwargs or {}
        kind, x = kind_of(func), args[0] if args else None
        if not isinstance(x, Placeholder) or kind not in READ_NO_VALUES or func._schema.is_mutable:
            raise Redo(next(y for y in tensors_of(args, kwargs) if isinstance(y, Placeholder)).replay)
        args = pytree.tree_map_only(Placeholder, lambda y: y.meta, args)
        if kind == "like":
            return func(*args, **{**kwargs, "device": kwargs.get("device") or x.device})
        return pytree.tree_map_only(
            Tensor,
            lambda y: Placeholder(TensorMeta.of(y)._replace(device=x.device), x.replay, y),
            func(*args, **kwargs),
        )


PLAIN.add(Placeholder)


class Replay(Watch):
    """Hands out what was kept, or skips what is planned; and learns what to skip if there is neither."""

    def __init__(
        self, source: Any, entries: Mapping[int, Entry] | None, coming: Sequence[Returning] = ()
    ) -> None:
        super().__init__(source, Tape() if entries is None else None)
        self.entries = entries or {}
        self._coming = coming
        self._recordings = self._found = 0
        self._has_left = False
        self.placeholders: list[weakref.ref[Placeholder]] = []
        # Whether a placeholder was read, maybe by somebody who has caught the error, and whether anything
        # was handed out at all.
        self.was_read = self.has_interfered = False

    def hand_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        entry = self.entries[self.number]
        self._found += 1
        if entry.signature != signature(func, args, kwargs):
            return None
        self.has_interfered = True
        before, after = entry.streams
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        found: list[Tensor | None] = []
        for slot in entry.slots:
            x = self._coming[slot].get().detach() if isinstance(slot, int) else None
            found.append(Placeholder(slot, self) if isinstance(slot, TensorMeta) else x)
        return found[0] if entry.is_alone else tuple(found)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While a program is recorded, to be pulled back. The pullback of the outermost reads."""
        self._recordings += 1
        try:
            yield
        finally:
            self._recordings -= 1
        if self._recordings:
            return
        self.in_f = False
        if self.tape is None and functorch.dispatch_modes()[-1:] == [self]:
            self.__exit__(None, None, None)  # a placeholder says itself that it is read
            self._has_left = True

    def __exit__(self, *exception: Any) -> None:
        if not self._has_left:
            super().__exit__(*exception)

    def finish(self) -> None:
        """Raise if a placeholder was read, or is where others may find it."""
        if self.was_read or any([x() is not None for x in self.placeholders]):
            raise Redo(self)

    def learned(self) -> Mapping[int, Entry] | None:
        """What to skip the next time; None if that is to be learned anew."""
        if self.tape is None:
            return self.entries if self._found == len(self.entries) else None
        unread = self.tape.unread()
        # An operator that passes by costs some microseconds.
        if sum([call.flops for call in unread]) <= FLOPS_WORTH_A_CALL * len(self.tape.calls):
            return {}
        return {call.number: Entry.of(call, {}) for call in unread}


# In the time that it takes to watch an operator, more than this could be computed.
FLOPS_WORTH_A_CALL = 10_000
# What recomputations skip, by their number. Nothing, if something was read that had seemed not to be.
_plans: dict[Any, Mapping[int, Entry] | None] = {}


# -- around the run of a program --------------------------------------------------------------------------


class _Current(threading.local):
    # Of the node whose backward is running: its function, what a policy has kept, and the tensors.
    given: tuple[Any, Kept | None, Sequence[Tensor]] = (None, None, ())


_current = _Current()


@contextmanager
def handing_out(source: Any, kept: Kept | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """What the recomputations of a program below may use."""
    before, _current.given = _current.given, (source, kept, wrappers.all_below_wrappers(tensors))
    try:
        yield
    finally:
        _current.given = before


def kept_for(program: Program) -> tuple[Kept | None, Sequence[Tensor]]:
    """What a node for a program has to keep."""
    source, kept, tensors = _current.given
    if not program.is_pullback:
        kept = program.source.kept
        tensors = () if kept is None else kept.tensors
    elif source is not program.source:
        return None, ()
    if kept is not None and autograd.top_saved_tensors_hooks() is not None:
        for away in kept.places:
            if away is not None:
                away.wait()  # the hooks will read it
    return kept, tensors


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program whose function has run before."""
    source = program.source
    inputs = source.received(inputs)
    # What nobody reads is eliminated from a graph that is traced.
    if not program.is_pullback or source.is_compiled or functorch.is_tracing():
        return program.run(*inputs)
    around = [mode for mode in functorch.dispatch_modes() if isinstance(mode, Watch)]
    for watch in around:
        watch.inside += 1
    try:
        return _recompute(program, inputs)
    finally:
        for watch in around:
            watch.inside -= 1


def _recompute(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    of, kept, tensors = _current.given
    key = None
    if kept is not None and of is program.source:
        places = zip(tensors, kept.places, strict=True)
        coming = [Returning(x) if place is None else place.back(x) for x, place in places]
        replay = Replay(program.source, kept.entries, coming)
        del coming
    elif not _is_worth_a_watch(inputs):
        return program.run(*inputs)
    else:
        key = _key(program, inputs)
        entries = _plans.get(key)
        if entries is not None and not entries:
            return program.run(*inputs)
        replay = Replay(program.source, entries)
    try:
        with replay, autograd.hooks_asleep():
            outputs = program.run(*inputs)
        replay.finish()
    except Exception as raised:
        # Ours to blame, or f's: without us it will show.
        if not replay.has_interfered or (isinstance(raised, Redo) and raised.replay is not replay):
            raise
        error = raised.with_traceback(None)  # whose frames hold what was computed
    else:
        if key is not None:
            _plans[key] = replay.learned()
        return outputs
    if key is not None:
        _plans[key] = {}
    outputs = program.run(*inputs)
    if not replay.was_read:
        _blame(error)
    return outputs


def _is_worth_a_watch(inputs: Sequence[Tensor]) -> bool:
    # No product of some of the inputs takes more FLOPs than half of them times the other half.
    elements = sum(map(Tensor.numel, inputs))
    if elements * elements < 2 * FLOPS_WORTH_A_CALL or functorch.has_compiled():
        return False
    # Below any dispatch mode torch 2.13 differentiates complex `linalg.lstsq` and `pinv` wrongly.
    return not any(map(Tensor.is_complex, inputs))


def _blame(error: Exception) -> None:
    """Is told why a recomputation has run again, in full, and without an error. For tests, which raise it."""


def _key(program: Program, inputs: Sequence[Tensor]) -> Any:
    """What tells recomputations apart: the function, what is computed of it, what its inputs look like."""
    source = program.source
    steps: list[Any] = [source.code]
    while program is not source:
        steps += (type(program), *[getattr(program, name, None) for name in _SHAPES])
        program = program.inner  # type: ignore[attr-defined]
    if len(_plans) >= 4096:
        _plans.clear()
    return *steps, signature(None, inputs, {})


# What decides, beside its type, what a program computes of another.
_SHAPES = ("wrt", "of", "along", "in_dims", "at_level")
