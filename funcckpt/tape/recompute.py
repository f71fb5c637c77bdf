"""Recomputation: it skips operators whose results nobody reads, or that a policy has kept.

The pullback of a checkpoint records f again and then runs backward. Some results of the recording are never
read, such as the last matrix product of a block, and the sum of which it is a term. The first recomputation
of a function runs in full under `Replay`, with a tape that finds these results: no operator that must run has
read them, the pullback has not, and their memory is free at the end. Later recomputations skip the operators
that make them. A skipped operator returns a `Placeholder`, which has a shape, a dtype and a device, but no
memory. If it is read, the recomputation runs again, in full. So what was learned may be wrong, but no
gradient is.

With a policy, the tape of the forward (`recording`) has shown what nobody reads. Kept values are handed out
up to the first operator that differs from the forward. After a recomputation that has seen all of them, later
ones see only the operators that are kept or skipped, without a mode. One that ends at another position among
these runs again, in full.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import autograd, dynamo, functorch, wrappers
from ..errors import CheckpointError, FuncckptError
from ..policies.offload import Returning
from .operators import PLAIN_TYPES, READ_NO_VALUES, TensorMeta, kind_of, meta_of, tensors_of
from .recording import Kept, has_kept
from .tape import OpCall, Plans, Tape, Watch, Watchlist, copy_of, steps_of

if TYPE_CHECKING:
    from ..core.program import Program

Tensors = tuple[Tensor, ...]


class Redo(CheckpointError):
    """The recomputation must run again, in full."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(
            f"A value is read that a recomputation of {replay.name} has skipped, and has stored all "
            "the same, as in a list to which it appends. Return such a value from the function."
        )
        self.replay = replay
        replay.was_read = True


class Placeholder(Tensor):
    """The result of a skipped operator. It has no memory; reading it raises `Redo`."""

    meta: Tensor
    replay: Replay

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, replay: Replay) -> Placeholder:
        x: Placeholder = functorch.without_memory(cls, *TensorMeta.of(meta)._replace(device=device))
        x.meta, x.replay = meta, replay
        replay.placeholders.append(weakref.ref(x))
        return x

    __torch_function__ = functorch.no_torch_function  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        # Printing is no read: no tape sees it, and after an error in torch's keys of functorch stay excluded.
        return f"<not computed again, {str(self.dtype).removeprefix('torch.')}{[*self.shape]}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Views, and operators that read no values, need no memory."""
        kwargs = kwargs or {}
        kind, x = kind_of(func), next(y for y in tensors_of(args, kwargs) if isinstance(y, Placeholder))
        changes = func._schema.is_mutable  # as `squeeze_`, in a product with a vector
        if kind not in READ_NO_VALUES or (changes and not (kind == "view" and x is args[0])):
            # A mode would have seen the operator before.
            call = x.replay.known_call(func, args, kwargs) if x.replay.without_mode else None
            if call is None:
                raise Redo(x.replay)
            return x.replay.hand_out(call, func, args, kwargs)
        if changes:
            func(x.meta, *args[1:], **kwargs)
            with functorch.no_dispatch():
                return func(*args, **kwargs)
        args = [y.meta if isinstance(y, Placeholder) else y for y in args]
        if kind == "like":
            return func(*args, **{**kwargs, "device": kwargs.get("device") or x.device})
        with functorch.no_dispatch():  # a meter would take what has no memory for memory
            views = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda y: Placeholder(y, x.device, x.replay), views)


PLAIN_TYPES.add(Placeholder)


class Plan(NamedTuple):
    """What a recomputation skips beside what a policy has kept: calls by their numbers.

    `watchlists` are enough for it to see: first those of kept values.
    """

    dead: Mapping[int, OpCall]
    watchlists: Sequence[Watchlist] = ()


_NOTHING = Plan({})


class Replay(Watch):
    """Hands out the results of an earlier run; or learns, from a tape, what to skip the next time."""

    # The key for what is learned; and the kept values.
    key: Any = None
    coming: Sequence[Returning] = ()
    # How many FLOPs must be skipped for each call that is seen.
    worth_a_call: int
    # Whether a placeholder was read, even if the error was caught.
    was_read = False
    # Closing it leaves the mode; and how many nested programs are being recorded.
    active: ExitStack
    _recordings = 0

    def __init__(self, source: Any, kept: Mapping[int, OpCall], plan: Plan | None, learns: bool) -> None:
        super().__init__(source, Tape() if learns else None)
        self.name, self.plan, self.kept, self.worth_a_call = source.name, plan, kept, FLOPS_WORTH_A_CALL
        self.known = {**plan.dead, **kept} if plan else kept
        self.watchlists = plan.watchlists if plan else ()
        self.seen: set[int] = set()
        self.placeholders: list[weakref.ref[Placeholder]] = []

    def begin(self, inputs: Sequence[Tensor] = ()) -> None:
        super().begin()
        if self.watchlists and not self.without_mode:
            self.leave_mode()

    def hand_out(self, call: OpCall, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.seen.add(call.number)
        call.move_streams()
        found = []
        for i in range(1 if call.count is None else call.count):
            x = slot = call.outputs.get(i)
            if isinstance(slot, int):
                x = self.coming[slot].get().detach()
                if call.copies:
                    x = copy_of(x)
                else:
                    self.hold(x)
            elif slot is not None:
                with functorch.no_dispatch():
                    meta = torch.empty_strided(slot.size, slot.strides, dtype=slot.dtype, device="meta")
                x = Placeholder(meta, slot.device, self)
            else:
                x = call.others.get(i)
            found.append(x)
        return found[0] if call.count is None else tuple(found)

    def note_write(self) -> None:
        # The forward did not write to it. (Torch's linear adds the bias in place, but not under a transform.)
        raise Redo(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the recording of a program. After the outermost recording, its pullback begins to read."""
        self._recordings += 1
        try:
            yield
        finally:
            self._recordings -= 1
        if self.was_read:  # f has caught the error. Its pullback would tell which gradients there are
            raise Redo(self)
        if self._recordings:
            return
        self.in_f = False
        self.count_nodes()
        if self.without_mode and (self.went_elsewhere() or self.has_written()):
            raise Redo(self)
        if self.without_mode or (self.tape is None and functorch.dispatch_modes()[-1:] == [self]):
            self.active.close()  # a placeholder reports itself that it is read

    def learned(self) -> Plan | None:
        """What to skip the next time; None if that must be learned again."""
        if (plan := self.plan) is not None:
            numbers = [*plan.dead]
            if self.without_mode:
                numbers = [number for watchlist in self.watchlists for number in watchlist.numbers.values()]
            return plan if self.seen.issuperset(numbers) else self.later()
        values = {number for number, call in self.kept.items() if has_kept(call)}
        if not self.seen >= values or (watchlist := self.watchlist_of(values)) is None:
            return _NOTHING
        dead = {call.number: call for call in (self.tape.unread() if self.tape is not None else ())}
        may_skip = {n: call for n, call in {**self.kept, **dead}.items() if n not in values}
        # From the first that costs something on: those before it need no kernel.
        in_order = [may_skip[number] for _, number in self.log if number in may_skip]
        skipped = {call.number for call in dropwhile(lambda call: not call.flops, in_order)}
        funcs = {id(func) for func, number in self.log if number in skipped}
        seen = sum([id(func) in funcs for func, _ in self.log]) + (0 if values else A_RUN)
        if sum([call.flops for call in in_order]) > self.worth_a_call * seen:
            if (without := self.watchlist_of(skipped)) is not None:
                return Plan(dead, [watchlist, without])
        return Plan({}, [watchlist] if values else [])

    def later(self) -> Plan | None:
        """What to skip after a recomputation that went another way; None if that must be learned again."""
        if not self.without_mode:
            return None
        keeps = len(self.watchlists) > 1 and self.watchlists[0].numbers
        return Plan({}, self.watchlists[:1]) if keeps else _NOTHING


# To skip some operators, all calls of their kind must be seen, which takes torch some microseconds for each.
# What stands for a skipped result takes some 20, and a recomputation that has nothing else to do as much as
# 30 calls. In a block of a transformer (12 calls are seen) the time was the same at 30 million FLOPs.
FLOPS_WORTH_A_CALL, A_RUN = 1_000_000, 30
# An accelerator computes so much in that time.
FLOPS_ON_ACCELERATOR = 170_000_000
# To learn a plan takes as long as so many recomputations save by it.
LEARNED_AT_LEAST, USED_FOR_EACH = 8, 10


@dataclass(slots=True)
class Counts:
    """How many plans were learned, and how often one was used."""

    learned: int = 0
    used: int = 0


# By key without the shapes of inputs.
_counts: dict[Any, Counts] = Plans()
# What recomputations skip. Nothing after a skipped result was read.
_plans = Plans()


# -- around the run of a program --------------------------------------------------------------------------


# Of the graph node whose backward runs: its function, what a policy has kept, and the kept tensors.
_given: ContextVar[tuple[Any, Kept | None, Sequence[Tensor]]] = ContextVar(
    "funcckpt_given", default=(None, None, ())
)


@contextmanager
def handing_out(source: Any, kept: Kept | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let recomputations inside of the block use what a policy has kept."""
    before = _given.set((source, kept, [*map(wrappers.below_wrappers, tensors)]))
    try:
        yield
    finally:
        _given.reset(before)


def kept_for(program: Program, source: Any) -> tuple[Kept | None, Sequence[Tensor]]:
    """What a policy has kept that the graph node of a program must save, and the tensors."""
    given, kept, tensors = _given.get()
    if not program.is_pullback:
        kept = source.kept
        tensors = () if kept is None else kept.tensors
    elif given is not source:
        return None, ()
    if kept is not None and autograd.top_saved_tensors_hooks() is not None:
        for away in kept.places:
            if away is not None:
                away.wait()  # the hooks will read it
    return kept, tensors


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program after the first run of its function."""
    if program.source.is_compiled:
        inputs = program.source.received(inputs)
    replay = _replay_of(program, inputs)
    if replay is None:
        return program.run(*inputs)
    try:
        with ExitStack() as replay.active:
            replay.active.enter_context(replay)
            outputs = program.run(*inputs)
        if replay.was_read or any([x() is not None for x in replay.placeholders]):
            raise Redo(replay)
        if replay.key is not None:
            _plans[replay.key] = replay.learned()
        return outputs
    except Exception as raised:
        # The error is ours or that of f: a run without the mode will show. (In a mode, autocast does not cast
        # in kernels that call other operators, as of `cdist`. So even a run that learns may differ.)
        replay.was_read |= _WITHOUT_MEMORY in str(raised)
        if not _may_be_ours(raised, replay):
            raise
        error = raised.with_traceback(None)  # its frames would keep tensors alive
        later = replay.later() or _NOTHING
    finally:
        # f may store a result that was skipped: it refers to the replay, which then holds nothing else.
        replay.coming, replay.known, replay.kept, replay.plan, replay.source = (), {}, {}, None, None
        replay.log, replay.held = [], []
    if replay.key is not None:
        _plans[replay.key] = later
    if (replay.was_read or replay.placeholders) and (kept := _given.get()[1]) is not None:
        kept.skip_less()
    outputs = program.run(*inputs)
    if not replay.was_read:
        _blame(error)
    return outputs


# What torch says where a kernel reads a placeholder without a dispatch: `tensor_split` with indices.
_WITHOUT_MEMORY = "its data is not allocated yet"


def _may_be_ours(error: Exception, replay: Replay) -> bool:
    """Whether f may raise an error since something was skipped or handed out."""
    if isinstance(error, Redo):
        return error.replay is replay  # or that of a checkpoint around this one
    if not (replay.seen or isinstance(error, CheckpointError)):
        return False  # nothing was
    if replay.was_read:
        return True
    # Not that memory or time is over.
    is_of_torch = type(error) in (RuntimeError, TypeError, NotImplementedError)
    return isinstance(error, FuncckptError) or (is_of_torch and "allocate memory" not in str(error))


def _replay_of(program: Program, inputs: Sequence[Tensor]) -> Replay | None:
    """The mode for a recomputation, if there is anything to hand out, to skip or to learn."""
    # A compiler removes unused operators from a traced graph.
    if not program.is_pullback or program.source.is_compiled or dynamo.is_traced():
        return None
    source, kept, tensors = _given.get()
    if source is not program.source:
        kept = None
    calls: Mapping[int, OpCall] = {} if kept is None else kept.calls
    # A product of inputs takes the most FLOPs if each factor has half of their elements.
    elements = sum(map(Tensor.numel, inputs))
    key: Any = None
    plan: Plan | None = _NOTHING
    # (Fake tensors may have sizes that are no numbers.)
    are_numbers = type(elements) is int
    is_large = are_numbers and elements * elements >= 2 * FLOPS_WORTH_A_CALL * A_RUN
    if (is_large or (are_numbers and calls)) and not (
        program.source.calls_compiled or functorch.has_compiled()
    ):
        key = *steps_of(program), frozenset(calls), *map(meta_of, inputs)
        plan = _plans.get(key)
        if (counts := _counts.get(key[: -len(inputs)])) is None:
            counts = _counts[key[: -len(inputs)]] = Counts()
        if plan is not None:
            counts.used += 1
        elif counts.learned < LEARNED_AT_LEAST or counts.used >= USED_FOR_EACH * counts.learned:
            counts.learned += 1
        else:
            plan, key = _NOTHING, None  # the inputs have other shapes in nearly each call
    if plan is not None and not (plan.dead or calls):
        return None
    device = next((x.device for x in inputs if x.device.type not in ("cpu", "meta")), None)
    if plan is not None and not calls and device is not None and not functorch.is_behind(device):
        return None  # the device waits for the host, and what is skipped would take it no time
    replay = Replay(program.source, calls, plan, plan is None and is_large)
    replay.key = key
    if kept is not None:
        replay.watchlists = replay.watchlists if kept.without_mode else ()
        places = zip(tensors, kept.places, strict=True)
        replay.coming = [Returning(x) if away is None else away.back(x) for x, away in places]
    if device is not None:
        replay.worth_a_call = FLOPS_ON_ACCELERATOR
    return replay


def _blame(error: Exception) -> None:
    """Called with the error of a recomputation that then ran in full without one. Tests make it raise."""
