"""Recomputation: what it does not run, because nobody reads it or because a policy has kept it.

The pullback of a checkpoint records f again and then goes backward. Some results of the recording are
never read: the last matrix product of a block, the sum that it goes into. The first recomputation of a
function runs in full under `Replay`, with a tape that shows which those are: no operator that has to run
has read them, the pullback did not, and their memory is gone at the end. The next recomputations skip
them. A skipped operator returns a `Placeholder`, which has a shape, a dtype and a device, and no memory.
Whoever reads it has the recomputation run again, in full: what was learned may be wrong, and no gradient is.

Where a policy has seen the forward (`recording`), that has shown what nobody reads, and what was kept is
handed out: up to the first operator that is not the one of the forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..policies.offload import Returning
from .operators import PLAIN, READ_NO_VALUES, TensorMeta, kind_of, look, signature, tensors_of
from .recording import Kept
from .tape import Call, Plans, Tape, Watch, steps_of

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
        if meta is None:
            meta = torch.empty_strided(like.size, like.strides, dtype=like.dtype, device="meta")
        x.meta, x.replay = meta, replay
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

        def placeholder(y: Tensor) -> Placeholder:
            return Placeholder(TensorMeta.of(y)._replace(device=x.device), x.replay, y)

        return pytree.tree_map_only(Tensor, placeholder, func(*args, **kwargs))


PLAIN.add(Placeholder)


class Replay(Watch):
    """Hands out what is known of an earlier run; or learns, from a tape, what to skip the next time."""

    # By which what is learned will be found, and what is kept; how many known calls were met.
    key: Any = None
    coming: Sequence[Returning] = ()
    met = 0
    # Whether a placeholder was read, maybe by somebody who has caught the error.
    was_read = False
    # What leaves the mode, and how many programs are being recorded, one inside of the other.
    active: ExitStack
    _recordings = 0

    def __init__(self, source: Any, known: Mapping[int, Call] | None) -> None:
        super().__init__(source, Tape() if known is None else None)
        self.known = known or {}
        self.placeholders: list[weakref.ref[Placeholder]] = []

    def hand_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        call = self.known[self.number]
        self.met += 1
        if call.signature != signature(func, args, kwargs):
            return None
        before, after = call.streams
        if after and not world.moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        found = []
        for i in range(1 if call.count is None else call.count):
            slot = call.outputs.get(i)
            x = self.coming[slot].get().detach() if isinstance(slot, int) else None
            found.append(Placeholder(slot, self) if isinstance(slot, TensorMeta) else x)
        return found[0] if call.count is None else tuple(found)

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
            self.active.close()  # a placeholder says itself that it is read

    def learned(self) -> Mapping[int, Call] | None:
        """What to skip the next time; None if that is to be learned anew."""
        if self.tape is None:
            return self.known if self.met == len(self.known) else None
        unread = self.tape.unread()
        # An operator that passes by costs some microseconds.
        worth_it = sum([call.flops for call in unread]) > FLOPS_WORTH_A_CALL * len(self.tape.calls)
        return {call.number: call for call in unread} if worth_it else {}


# What a core computes in the time that it takes to watch an operator, measured: 7 microseconds.
FLOPS_WORTH_A_CALL = 500_000
# What recomputations skip, by their number. Nothing, if something was read that had seemed not to be.
_plans = Plans()


# -- around the run of a program --------------------------------------------------------------------------


class _Current(threading.local):
    # Of the node whose backward is running: its function, what a policy has kept, and the tensors.
    given: tuple[Any, Kept | None, Sequence[Tensor]] = (None, None, ())


_current = _Current()


@contextmanager
def handing_out(source: Any, kept: Kept | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """What the recomputations of a program below may use."""
    before, _current.given = _current.given, (source, kept, [*map(wrappers.below_wrappers, tensors)])
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
    if program.source.is_compiled:
        inputs = program.source.received(inputs)
    replay = _replay_of(program, inputs)
    if replay is None:
        return program.run(*inputs)
    try:
        with ExitStack() as replay.active, autograd.hooks_asleep():
            replay.active.enter_context(replay)
            outputs = program.run(*inputs)
        if replay.was_read or any([x() is not None for x in replay.placeholders]):
            raise Redo(replay)
        if replay.key is not None:
            _plans[replay.key] = replay.learned()
        return outputs
    except Exception as raised:
        # Ours to blame, or f's: without us it will show.
        if not replay.met or (isinstance(raised, Redo) and raised.replay is not replay):
            raise
        error = raised.with_traceback(None)  # whose frames hold what was computed
    if replay.key is not None:
        _plans[replay.key] = {}
    outputs = program.run(*inputs)
    if not replay.was_read:
        _blame(error)
    return outputs


def _replay_of(program: Program, inputs: Sequence[Tensor]) -> Replay | None:
    """What a recomputation is run under, if there is anything to hand out, to skip or to learn."""
    # What nobody reads is eliminated from a graph that is traced.
    if not program.is_pullback or program.source.is_compiled or functorch.is_tracing():
        return None
    source, kept, tensors = _current.given
    if kept is not None and source is program.source:
        places = zip(tensors, kept.places, strict=True)
        replay = Replay(source, kept.calls)
        replay.coming = [Returning(x) if away is None else away.back(x) for x, away in places]
        return replay
    # No product of some of the inputs takes more FLOPs than half of them times the other half.
    elements = sum(map(Tensor.numel, inputs))
    if elements * elements < 2 * FLOPS_WORTH_A_CALL or functorch.has_compiled():
        return None
    # Below any dispatch mode torch 2.13 differentiates complex `linalg.lstsq` and `pinv` wrongly.
    if any(map(Tensor.is_complex, inputs)):
        return None
    # The function, what is computed of it, and what its inputs look like.
    key = *steps_of(program), *map(look, inputs)
    plan = _plans.get(key)
    if plan is not None and not plan:
        return None
    replay = Replay(program.source, plan)
    replay.key = key
    return replay


def _blame(error: Exception) -> None:
    """Is told why a recomputation has run again, in full, and without an error. For tests, which raise it."""
