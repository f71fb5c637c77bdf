"""`while_loop`: loops whose length is not known, in one sweep, by online checkpointing.

The loop runs step by step, each step a `remat` whose history is dropped as soon as it is done, and
`schedules.Online` says which carries to keep. When the loop has ended, its length is known. Then each
part between two carries that are kept becomes a checkpoint as it would be in `scan`, but for one thing:
what it computes is known, and is not computed again. `dispatch.bind` gives known values the history of
R[part], at every level.

That is not possible everywhere. Then the steps are counted first, and the loop is a `scan`:

* schedules other than the binomial one, and policies, need to know the length;
* forward and reverse mode together, and what `make_fx` and `functionalize` trace;
* a step that captures a tensor which only its run shows, or that updates buffers;
* the other spellings of `dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch, world
from ..core import dispatch
from ..core.call import Call, Options
from ..errors import InputError, MutationError, describe
from ..policies.chooser import Policy
from ..policies.offload import Stored, fetch, store
from .history import can_restart, restart
from .measure import Before, as_many_as_fit, check_depth
from .progress import close_bar, open_bar
from .scan import keeps_nothing, loop_of, number_of_steps, run, start
from .schedules import PLAIN, Online, Schedule, choose, evaluations, unit_for
from .steps import Loop, in_words, record

__all__ = ["while_loop"]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    init: Any,
    *,
    checkpoint: str | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: str | None = None,
    max_steps: int | None = None,
    progress: bool = False,
) -> Any:
    """``carry = body(carry)``, for as long as ``cond(carry)``, a truth value or a tensor of one element.

    How long the loop is shows only as it runs. With checkpoint="binomial" it runs once, and
    `schedules.Online` decides which carries to keep: never more than `checkpoints` of them, and so that
    no step is run more often than in a loop whose length is known, but for the last ones. By default
    there are some 3∛n.

    The other schedules and policies need to know the length: the loop runs twice then, first to count its
    steps, without keeping anything. It does so, too, where forward and reverse mode are used together,
    where the body updates buffers, or captures tensors in a way that shows only as it runs.

    `init` is the first carry. `checkpoint`, `checkpoints`, `bytes`, `policy`, `offload` and `progress`, the
    errors and the memory are those of `scan`. After `max_steps` steps, if given, the loop stops whatever
    `cond` says.

    Raises
    ------
    InputError
        `cond` depends on what a `vmap` has batched: the samples would need loops of different lengths; or
        it draws random numbers.
    MutationError
        cond or body assigns something outside of itself.

    Examples
    --------
    Newton's method, until it has converged:

    >>> import torch
    >>> from funcckpt import while_loop
    >>> def sqrt(a):
    ...     return while_loop(lambda x: (x * x - a).abs() > 1e-6, lambda x: (x + a / x) / 2, a)
    >>> torch.func.grad(sqrt)(torch.tensor(4.0))
    tensor(0.2500)
    """
    loop = loop_of("while_loop", body, checkpoint, bytes, policy, offload)
    if not callable(cond):
        raise InputError(f"{loop.name}: takes a function, not {type(cond).__name__}.")
    choose(checkpoint, checkpoints, bytes, 1, loop.name)
    if max_steps is not None:
        max_steps = number_of_steps(max_steps, "max_steps", loop.name)
    if checkpoint is None or keeps_nothing((cond, body), init):
        return _sweep(cond, _shown(loop, progress), init, max_steps)[0]
    if bytes is not None:
        checkpoints = as_many_as_fit(loop, bytes, 0, None, init, None).number
    before = Before((cond, body))
    cond = _drawing_nothing(cond, before.streams, loop.name)
    if checkpoint == "binomial" and loop.policy is None and can_restart(init) and not _torch.has_dual_level():
        try:
            return _online(cond, _shown(loop, progress), init, max_steps, checkpoints, before.streams)
        except _Unknown:
            before.restore()
    # Values alone: nothing that is computed here is looked at by a transform.
    with torch.no_grad(), _torch._set_fwd_grad_enabled(False):
        steps = _sweep(cond, loop, init, max_steps)[1]  # and no carry
    before.restore()
    if before.has_assigned():
        raise _impure(loop.name)
    if steps == 0:
        return init
    schedule = choose(checkpoint, checkpoints, None, steps, loop.name)
    return start(loop, schedule, None, progress, 0, steps, init, None)[0]


def _shown(loop: Loop, progress: bool) -> Loop:
    """The loop with a bar, whose length shows at its end."""
    return loop._replace(progress=(open_bar(progress, loop.name), 0))


def _sweep(cond: Callable[..., Any], loop: Loop, carry: Any, max_steps: int | None) -> tuple[Any, int]:
    """The plain loop: its last carry, and how many steps it had."""
    steps = 0
    while steps != max_steps and _holds(cond, carry, loop.name, steps):
        carry, _ = record(loop, steps, 1, carry, None)
        steps += 1
    close_bar(loop.progress[0])
    return carry, steps


def _holds(cond: Callable[..., Any], carry: Any, name: str, step: int) -> bool:
    holds = cond(carry)
    if isinstance(holds, Tensor):
        if holds.numel() != 1:
            raise InputError(f"{name}: cond returned {describe(holds)} at step {step}, not one truth value.")
        if _torch.physical(holds)[1]:
            raise InputError(
                f"{name}: cond depends on what vmap has batched, so that each sample would need a loop "
                "of its own length. Loop for as long as any sample needs, with torch.where in the body "
                "for those that are done, and reduce over the samples by hand instead of with vmap."
            )
    elif holds is None or not hasattr(holds, "__bool__"):
        raise InputError(f"{name}: cond returned {in_words(holds)} at step {step}, not a truth value.")
    return bool(holds)


def _drawing_nothing(
    cond: Callable[..., Any], streams: Sequence[world.Stream], name: str
) -> Callable[..., Any]:
    """The condition is not asked again when the steps are run again, and must not move their streams."""

    def checked(carry: Any) -> Any:
        before = world.states(streams)
        with torch.no_grad(), _torch._set_fwd_grad_enabled(False):
            holds = cond(carry)
        if world.have_moved(before):
            raise InputError(
                f"{name}: cond draws random numbers. Draw them in the body, and put what cond compares "
                "with into the carry."
            )
        return holds

    return checked


def _impure(name: str) -> MutationError:
    return MutationError(
        f"{name}: cond or body assigns something outside of itself. "
        "The steps run a second time: put what changes into the carry."
    )


# -- in one sweep -----------------------------------------------------------------------------------


class _Unknown(Exception):
    """The history of these values has to be recorded as they are computed."""


class _Kept(NamedTuple):
    """A carry, the step that it was given to, and the random streams as that step found them."""

    start: int
    carry: Any
    states: world.States


def _online(
    cond: Callable[..., Any],
    loop: Loop,
    init: Any,
    max_steps: int | None,
    checkpoints: int | None,
    streams: Sequence[world.Stream],
) -> Any:
    """First the values, with few carries kept, and then their history."""
    schedule = Online(checkpoints)
    # By default some steps at a time are one of the schedule.
    unit_at = unit_for if checkpoints is None else lambda steps: 1
    kept: dict[int, _Kept] = {}
    carry, steps, units, random, ended = init, 0, 0, False, False
    while not ended and steps != max_steps and _holds(cond, carry, loop.name, steps):
        check_depth(loop.name, schedule.checkpoints, units + 1)
        last = _Kept(steps, carry, world.states(streams))
        if units == 0:
            kept[0] = last
        elif (given_up := schedule.offer(units)) != units:
            if given_up is not None:
                del kept[given_up]
            stored = carry if loop.offload is None else restart(store(carry, loop.offload))
            kept[units] = last._replace(carry=stored)
        most = unit_at(steps) if max_steps is None else min(unit_at(steps), max_steps - steps)
        (carry, done), has_drawn = _first_run(_some_steps, loop.name, (loop, cond, steps, most, carry))
        carry = restart(carry)
        random |= has_drawn
        steps, units, ended = steps + done, units + 1, done < most
    close_bar(loop.progress[0])
    if steps == 0:
        return init

    # A schedule for a known length would have recorded the last steps: their carry is kept as well.
    kept.setdefault(units - 1, last)
    begins = [kept[unit] for unit in sorted(kept)]
    ends = [*begins[1:], _Kept(steps, carry, world.states(streams))]
    lengths = [end.start - begin.start for begin, end in zip(begins, ends, strict=True)]
    schedules = [
        Schedule("binomial", schedule.checkpoints - i, unit_at(end.start)) for i, end in enumerate(ends)
    ]
    schedules[-1] = PLAIN
    loop = loop._replace(progress=(loop.progress[0], sum(map(evaluations, schedules, lengths))))
    carry = init
    for begin, end, part, length in zip(begins, ends, schedules, lengths, strict=True):
        arguments = loop, part, begin.start, length, carry, isinstance(end.carry, Stored)
        carry = _known(_segment, loop.name, arguments, end.carry, begin.states, end.states, random)
    return carry


def _some_steps(loop: Loop, cond: Callable[..., Any], first: int, most: int, carry: Any) -> tuple[Any, int]:
    """At least one step, and more while cond holds; the carry, and how many."""
    for done in range(most):
        if done > 0 and not _holds(cond, carry, loop.name, first + done):
            return carry, done
        carry, _ = record(loop, first + done, 1, fetch(carry), None)
    return carry, most


def _segment(loop: Loop, schedule: Schedule, first: int, steps: int, carry: Any, stored: bool) -> Any:
    carry, _ = run(loop, schedule, first, steps, carry, None)
    return store(carry, loop.offload) if stored and loop.offload is not None else carry


_segment.__qualname__ = "while_loop"

# -- what `remat` does in two halves --------------------------------------------------------------------

_STATIC = frozenset({0, 1}), frozenset[str]()
_OPTIONS = Options(*_STATIC)


def _first_run(f: Callable[..., Any], name: str, args: tuple[Any, ...]) -> tuple[Any, bool]:
    """What ``f(*args)`` returns, as a checkpoint, and whether it has drawn random numbers.

    Raises
    ------
    _Unknown
        The checkpoint needs to know more than its inputs.
    MutationError
        f would not do the same again.
    """
    call = Call(f, name, _OPTIONS, args, {})
    out = call.call()
    if call.has_updated:
        raise _Unknown
    if call.has_assigned:
        raise _impure(name)
    return out, bool(call.random)


def _known(
    f: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    out: Any,
    states: world.States,
    ends: world.States,
    random: bool,
) -> Any:
    """``remat(f)(*args)``, which is known to be `out`: values of which `restart` has dropped the history.

    `states` and `ends` are those of the random streams before and after f ran, if it is random.
    """
    call = Call(f, name, _OPTIONS, args, {}, lifts_all=True)
    inputs = call.take_inputs()
    outputs = call.is_known(out, states, [hash(world._bytes(state)) for _, state in ends], random)
    attached = dispatch.bind(call, inputs, known=outputs)
    call.seal()
    return call.assemble(attached, inputs)
