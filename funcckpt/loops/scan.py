"""Loops whose backward needs bounded memory: `scan`, `fori_loop` and `while_loop`.

A loop is cut into parts by a schedule (`schedules`), and each part is a `remat` of the loop over its
steps, cut again by the same schedule. That is all: reverse sweep, forward mode, batching, random
numbers and captured tensors are those of `remat`, and when the cuts are Griewank and Walther's, nested
`remat` keeps the carries and runs the steps that their algorithm `revolve` does. Only the forward of a part,
whose history nobody will ask for, is the plain loop, with its history cut where the schedule cuts.

Underneath are plain Python loops, so the body may branch on values where no `vmap` is around it.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..closure import Closure
from ..errors import CheckpointError, InputError, MutationError, OptionError, describe
from ..meter import Meter
from ..nodes import may_be_statistics
from ..offload import Stored, check_place, fetch, store
from ..policies import Budget, Policy, chooser_of
from ..program import is_differentiable
from ..remat import _Checkpointed, remat
from . import online
from .alike import check_carry, check_y, in_words, looks
from .progress import advance, close_bar, open_bar
from .schedules import (
    PLAIN,
    Online,
    Part,
    Schedule,
    beta,
    choose,
    evaluations,
    fewest,
    fit,
    parts,
    repetitions,
    unit_for,
)

__all__ = ["fori_loop", "scan", "while_loop"]

# Each repetition is a recomputation inside of a recomputation: at most so many Python frames, half of them
# under grad alone.
_FRAMES_OF_A_REPETITION = 35


def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    checkpoint: str | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: str | None = None,
    progress: bool = False,
) -> tuple[Any, Any]:
    """Apply f to a carry and to one slice of xs after another, keeping few carries.

    The same as this loop, under every transform and in plain autograd::

        carry, ys = init, []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    Parameters
    ----------
    f : callable
        ``f(carry, x) -> (carry, y)``. The carry keeps its structure and the shapes and dtypes of its
        tensors, and so does y from step to step, which may be any pytree of tensors and numbers, or None.
        What `remat` asks of a function holds for f: pure up to random numbers.
    init : pytree
        The first carry.
    xs : pytree of tensors of shape ``(n, ...)``, optional
        f gets the slices, of shape ``(...)``; None if there are no xs.
    length : int, optional
        The number of steps; needed if there are no xs.
    reverse : bool
        Go from the last slice to the first. ys are in the order of xs all the same.
    checkpoint : {"binomial", "sqrt", "recursive", "every"}, int or None
        Which carries are kept. "binomial": at most `checkpoints` of them, and the steps are run as
        seldom as that allows. "sqrt": √n, with all that the √n steps between two of them
        save. An integer: so many. "recursive": log2 n. "every": each. None: no checkpoint, as
        the loop above. See `funcckpt.loops.schedules`.
    checkpoints : int, optional
        For "binomial". By default the fewest with which no step is run more than three times, where
        the inside of u = ∛(n/8) steps is kept together: about 2∛n carries.
    bytes : int, optional
        For "binomial", instead of `checkpoints`: what the carries that are kept and the inside of the
        steps that are recorded together may take. The schedule that runs the fewest steps is chosen, which
        is to record all of them if they fit. For that the first step is run once more, or twice, forward and
        backward, and measured. xs, ys, gradients of what f captures, and the first and the last carry come
        on top.
    policy : callable or list of operators, optional
        What is kept of each step beside the carries, as `remat` takes it: with `policies.dots_saveable` no
        step computes its products again. Not a budget, and not with `bytes`.
    offload : {"host", "disk"}, optional
        Where the carries are kept: in the memory of the host, if they are on a device; or in files
        without a name in the directory for temporary files, which go when they are no longer needed.
    progress : bool
        Show a bar of the steps, forward and backward. Needs tqdm.

    Returns
    -------
    (carry, ys)
        The last carry, and the stacked y of all steps, of shape ``(n, ...)``.

    Raises
    ------
    InputError
        The lengths of xs differ, or f changes what the carry or y looks like. The message names the
        leaf and the step.
    OptionError
        An option is wrong; or so few checkpoints nest recomputations deeper than Python's recursion limit.
    FuncckptError
        What `remat` raises.

    Notes
    -----
    The signature is `jax.lax.scan`'s. Where there are no steps, f is called once, to learn the
    shapes of ys, on zeros for x, and its random numbers are given back.

    The schedule "binomial" is that of Griewank and Walther, "Algorithm 799: revolve" (2000).

    Examples
    --------
    Differentiate the end of 1000 steps with five carries alive:

    >>> import torch
    >>> from funcckpt import scan
    >>> def end(w):
    ...     step = lambda x, _: (torch.sin(w * x), None)
    ...     x, _ = scan(step, torch.ones(()), length=1000, checkpoints=5)
    ...     return x
    >>> torch.func.grad(end)(torch.tensor(1.0))
    tensor(27.3996)
    >>> total, sums = scan(lambda s, x: (s + x, s + x), torch.tensor(0), torch.arange(5))
    >>> total, sums
    (tensor(10), tensor([ 0,  1,  3,  6, 10]))
    """
    name = f"scan({_name(f)})"
    _check_callable(f, name)
    xs = pytree.tree_map_with_path(lambda path, x: _as_tensor(x, f"xs{pytree.keystr(path)}", name), xs)
    steps = _steps(xs, length, name)
    check_place(offload, name)
    schedule = choose(checkpoint, checkpoints, bytes, steps, name)
    policy = _policy(policy, checkpoint, bytes, name)
    if steps == 0:
        return init, _no_ys(f, name, init, xs)
    body = _Body("scan", name, reverse, (0, 0), offload, policy)
    schedule = _within(schedule, bytes, f, body, 0, steps, init, xs)
    body = body._replace(progress=_progress(progress, name, schedule, steps))
    return _run(f, body, schedule, 0, steps, init, xs)


def fori_loop(
    lower: int,
    upper: int,
    body: Callable[..., Any],
    init: Any,
    *,
    checkpoint: str | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: str | None = None,
    progress: bool = False,
) -> Any:
    """``carry = body(i, carry)`` for i from `lower` up to, and without, `upper`.

    The errors and the memory are those of `scan`. The signature is `jax.lax.fori_loop`'s.

    Parameters
    ----------
    lower, upper : int
        The first i, and the one after the last.
    body : callable
        ``body(i, carry) -> carry``; i is a Python integer.
    init : pytree
        The first carry.
    checkpoint, checkpoints, bytes, policy, offload, progress
        As in `scan`.

    Returns
    -------
    pytree
        The last carry.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import fori_loop
    >>> torch.func.grad(lambda x: fori_loop(1, 4, lambda i, y: y * x / i, x))(torch.tensor(2.0))
    tensor(5.3333)
    """
    name = f"fori_loop({_name(body)})"
    _check_callable(body, name)
    check_place(offload, name)
    lower, upper = _whole(lower, "lower", name), _whole(upper, "upper", name)
    policy = _policy(policy, checkpoint, bytes, name)
    steps = max(0, upper - lower)
    schedule = choose(checkpoint, checkpoints, bytes, steps, name)
    if steps == 0:
        return init
    loop = _Body("fori", name, False, (0, 0), offload, policy)
    schedule = _within(schedule, bytes, body, loop, lower, steps, init, None)
    loop = loop._replace(progress=_progress(progress, name, schedule, steps))
    return _run(body, loop, schedule, lower, steps, init, None)[0]


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
    """``carry = body(carry)`` for as long as ``cond(carry)``.

    How long the loop is shows only as it runs. With checkpoint="binomial" it runs once, and
    `schedules.Online` decides which carries to keep: never more than `checkpoints` of them, and so that
    no step is run more often than in a loop whose length is known, but for the last ones. By default
    there are some 3∛n.

    The other schedules and policies need to know the length: the loop runs twice then, first to count its
    steps, without keeping anything. It does so, too, where forward and reverse mode are used together,
    where the body updates buffers, or captures tensors in a way that shows only as it runs. The errors and
    the memory are those of `scan`.

    Parameters
    ----------
    cond : callable
        ``cond(carry) -> bool``, or a tensor of one element.
    body : callable
        ``body(carry) -> carry``.
    init : pytree
        The first carry.
    checkpoint, checkpoints, bytes, policy, offload, progress
        As in `scan`.
    max_steps : int, optional
        Stop after so many steps, whatever `cond` says.

    Raises
    ------
    InputError
        `cond` depends on what a `vmap` has batched: the samples would need loops of different lengths; or
        it draws random numbers.
    CheckpointError
        The second time the loop did not end where it did the first time.
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
    name = f"while_loop({_name(body)})"
    _check_callable(cond, name)
    _check_callable(body, name)
    check_place(offload, name)
    choose(checkpoint, checkpoints, bytes, 1, name)
    policy = _policy(policy, checkpoint, bytes, name)
    if max_steps is not None:
        max_steps = _number_of_steps(max_steps, "max_steps", name)
    loop = _Body("while", name, False, (0, 0), offload, policy)
    if checkpoint is None or _keeps_nothing((cond, body), init):
        return _while(cond, body, loop, init, max_steps, progress)
    if bytes is not None:
        checkpoints = _as_many_as_fit(bytes, body, loop, 0, init, None, None).number
    before = _Before(Closure((cond, body)))
    cond = _drawing_nothing(cond, before.streams, name)
    if checkpoint == "binomial" and policy is None:
        try:
            if online.is_possible(_tensors_of(init)):
                return _while_online(cond, body, loop, init, max_steps, checkpoints, progress, before.streams)
        except online.Unknown:
            before.restore()
    steps = _count(cond, body, loop, init, max_steps, before)
    if steps == 0:
        return init
    schedule = choose(checkpoint, checkpoints, None, steps, name)
    schedule = _within(schedule, None, body, loop, 0, steps, init, None)
    loop = loop._replace(progress=_progress(progress, name, schedule, steps))
    carry, _ = _run(body, loop, schedule, 0, steps, init, None)
    if steps != max_steps:
        with torch.no_grad(), _torch._set_fwd_grad_enabled(False):
            if _holds(cond, carry, name, steps):
                raise CheckpointError(
                    f"{name}: ended after {steps} steps when they were counted, and goes on after as many "
                    "when they were recorded. cond and body have to do the same each time."
                )
    return carry


def _keeps_nothing(functions: Any, arguments: Any) -> bool:
    """Whether nothing is differentiated in reverse mode, so that a loop keeps nothing anyway."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return not _torch.differentiates_in_inference_mode()  # where that is so, `remat` has to refuse it
    if torch.compiler.is_compiling() or any(layer.kind == "grad" for layer in _torch.active_layers()):
        return False
    tensors = _tensors_of(arguments) + list(Closure(functions).tensors)
    return not any(_torch.below_wrappers(x).requires_grad for x in tensors)


def _tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


# -- the loop ---------------------------------------------------------------------------------------


class _Body(NamedTuple):
    """What a part has to know of its loop."""

    kind: str
    name: str
    reverse: bool
    progress: tuple[int, int]
    offload: str | None
    policy: Policy | None = None


def _run(
    f: Callable[..., Any], body: _Body, schedule: Schedule, first: int, steps: int, carry: Any, xs: Any
) -> tuple[Any, Any]:
    """Steps `first` up to `first + steps`, cut by a schedule: the last carry, and ys."""
    cut = list(parts(schedule, steps))
    # xs lie as they were given, and `first` counts in their order.
    ends = list(itertools.accumulate((part.steps for part in cut), initial=0))
    starts = [steps - end for end in ends[1:]] if body.reverse else ends[:-1]
    run_part = _part if body.policy is None else _as_part(body.policy)
    stacks = []
    try:
        for part, start, x in zip(cut, starts, _split(xs, cut, body.reverse), strict=True):
            if part.schedule is None:
                carry, ys = _record(f, body, first + start, part.steps, fetch(carry), x)
            else:
                # The first carry of a part that is run again is kept already.
                if body.offload is not None and not isinstance(carry, Stored):
                    carry = store(carry, body.offload)
                carry, ys = run_part(f, body, part.schedule, first + start, part.steps, carry, x)
            stacks.append(ys)
    except RecursionError as error:
        if schedule.rule in ("plain", "segments"):
            raise
        raise _too_deep(body.name) from error
    if body.reverse:
        starts, stacks = starts[::-1], stacks[::-1]
    return carry, _concatenate(stacks, body.name, [first + start for start in starts])


# Messages call it by the name of what users call.
_run.__qualname__ = "scan"


def _values(
    f: Callable[..., Any], body: _Body, schedule: Schedule, first: int, steps: int, carry: Any, xs: Any
) -> tuple[Any, Any]:
    """What `_run` returns, where its history is of no use: no carry is kept, and no step a checkpoint."""
    if schedule == PLAIN or not online.can_restart(_tensors_of((carry, xs))):
        return _run(f, body, schedule, first, steps, carry, xs)
    return _record(f, body, first, steps, fetch(carry), xs, schedule.unit)


def _as_part(policy: Policy | None) -> _Checkpointed:
    part: Any = remat(_run, static_argnums=(0, 1, 2), policy=policy)
    f, name, options = part._made_of
    # A policy has to see what the history keeps.
    return _Checkpointed(f, name, options._replace(forward=_values)) if policy is None else part


_part = _as_part(None)


def _record(
    f: Callable[..., Any], body: _Body, first: int, steps: int, carry: Any, xs: Any, unit: int = 0
) -> tuple[Any, Any]:
    """Some steps, one after another. Each `unit` of them, if there is one, forgets those before it."""
    slices = _unbind(xs, steps)
    order = range(steps)
    ys = []
    for done, i in enumerate(reversed(order) if body.reverse else order, 1):
        new, y = _step(f, body, first + i, carry, slices[i])
        check_carry(carry, new, body.name, first + i)
        if unit:
            y = online.restart(y)
            new = new if done % unit else online.restart(new)
        carry = new
        ys.append(y)
        if body.progress[0]:
            advance(*body.progress, body.name)
    return carry, _stack(ys[::-1] if body.reverse else ys, body.name, first)


def _step(f: Callable[..., Any], body: _Body, i: int, carry: Any, x: Any) -> tuple[Any, Any]:
    try:
        if body.kind == "fori":
            return f(i, carry), None
        if body.kind == "while":
            return f(carry), None
        out = f(carry, x)
    except Exception as error:
        note = f"in step {i} of {body.name}"
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
            error.add_note(note)
        raise
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"{len(out)} values" if isinstance(out, (tuple, list)) else f"a {type(out).__name__}"
        raise InputError(f"{body.name}: step {i} returned {what}, not the pair (carry, y).")
    return out[0], out[1]


def _while(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop: _Body,
    carry: Any,
    max_steps: int | None,
    progress: bool = False,
) -> Any:
    loop = loop._replace(progress=(open_bar(progress, loop.name), 0))
    for step in _going_on(max_steps):
        if not _holds(cond, carry, loop.name, step):
            break
        carry, _ = _record(body, loop, step, 1, carry, None)
    close_bar(loop.progress[0])
    return carry


def _going_on(max_steps: int | None) -> Iterable[int]:
    return itertools.count() if max_steps is None else range(max_steps)


class _Held(NamedTuple):
    """A carry, the step that it was given to, and the random streams as that step found them."""

    start: int
    carry: Any
    states: world.States


def _while_online(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop: _Body,
    init: Any,
    max_steps: int | None,
    checkpoints: int | None,
    progress: bool,
    streams: Sequence[world.Stream],
) -> Any:
    """The loop in one sweep: first the values, with few carries kept, and then their history."""
    schedule = Online(checkpoints)
    limit = None if checkpoints is None else beta(checkpoints, _most_repetitions())
    # By default some steps at a time are one of the schedule.
    unit_at = unit_for if checkpoints is None else lambda steps: 1
    loop = loop._replace(progress=(open_bar(progress, loop.name), 0))
    held: dict[int, _Held] = {}
    carry, steps, units, random, ended = init, 0, 0, False, False
    while not ended and steps != max_steps and _holds(cond, carry, loop.name, steps):
        if steps == limit:
            _refuse_repetitions(loop.name, schedule.checkpoints, steps + 1)
        last = _Held(steps, carry, world.states(streams))
        if units == 0:
            held[0] = last
        elif (given_up := schedule.offer(units)) != units:
            if given_up is not None:
                del held[given_up]
            stored = carry if loop.offload is None else online.restart(store(carry, loop.offload))
            held[units] = last._replace(carry=stored)
        most = unit_at(steps) if max_steps is None else min(unit_at(steps), max_steps - steps)
        (carry, done), has_drawn = online.first_run(
            _some_steps, loop.name, (body, cond, loop, steps, most, carry)
        )
        carry = online.restart(carry)
        random |= has_drawn
        steps, units, ended = steps + done, units + 1, done < most
    close_bar(loop.progress[0])
    if steps == 0:
        return init

    # A schedule for a known length would have recorded the last steps: their carry is kept as well.
    held.setdefault(units - 1, last)
    kept = [held[unit] for unit in sorted(held)]
    ends = [*[one.start for one in kept[1:]], steps]
    schedules = [Schedule("binomial", schedule.checkpoints - i, unit_at(end)) for i, end in enumerate(ends)]
    schedules[-1] = PLAIN
    lengths = [end - one.start for end, one in zip(ends, kept, strict=True)]
    again = sum(map(evaluations, schedules, lengths))
    loop = loop._replace(progress=(loop.progress[0], again))
    values = [*[one.carry for one in kept[1:]], carry]
    states = [*[one.states for one in kept], world.states(streams)] if random else [[]] * (len(kept) + 1)
    carry = init
    for i, (one, value, part, length) in enumerate(zip(kept, values, schedules, lengths, strict=True)):
        arguments = body, loop, part, one.start, length, carry, isinstance(value, Stored)
        carry = online.known(_segment, loop.name, arguments, value, states[i], states[i + 1], random)
    return carry


def _some_steps(
    f: Callable[..., Any], cond: Callable[..., Any], body: _Body, first: int, most: int, carry: Any
) -> tuple[Any, int]:
    """At least one step, and more while cond holds; the carry, and how many."""
    for done in range(most):
        if done > 0 and not _holds(cond, carry, body.name, first + done):
            return carry, done
        carry, _ = _record(f, body, first + done, 1, fetch(carry), None)
    return carry, most


def _segment(
    f: Callable[..., Any], body: _Body, schedule: Schedule, first: int, steps: int, carry: Any, stored: bool
) -> Any:
    carry, _ = _run(f, body, schedule, first, steps, carry, None)
    return store(carry, body.offload) if stored and body.offload is not None else carry


_segment.__qualname__ = "while_loop"


class _Before:
    """What a loop may change that has to run again: random streams, and buffers."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.streams = world.random_streams(closure.generators, closure.reaches_packages)
        self._states = world.states(self.streams)
        self._buffers = [(x, x.clone()) for x in closure.constants if may_be_statistics(x) or x.numel() == 1]

    def restore(self) -> None:
        with torch.no_grad():
            for x, before in self._buffers:
                if not torch.equal(x, before):
                    x.copy_(before)
        world.set_streams(self._states)


def _count(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop: _Body,
    init: Any,
    max_steps: int | None,
    before: _Before,
) -> int:
    """How many steps the loop has. It will run again, and has to find everything as it was."""
    steps = 0

    def counted(carry: Any) -> Any:
        nonlocal steps
        steps += 1
        return body(carry)

    # Values alone: nothing that is computed here is looked at by a transform.
    with torch.no_grad(), _torch._set_fwd_grad_enabled(False):
        _while(cond, counted, loop, init, max_steps)
    before.restore()
    before.closure.settle(loop.name)
    if not before.closure.is_pure:
        raise MutationError(
            f"{loop.name}: cond or body assigns something outside of itself, or draws from an iterator or "
            "from random numbers that are not torch's. The loop runs once to count its steps, and a second "
            "time: put what changes into the carry."
        )
    return steps


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


# -- xs and ys --------------------------------------------------------------------------------------


def _split(xs: Any, cut: list[Part], reverse: bool) -> list[Any]:
    """What each part takes of xs; one operator, whose pullback is one as well."""
    if len(cut) == 1 or xs is None:
        return [xs] * len(cut)
    lengths = [part.steps for part in cut]
    leaves, structure = pytree.tree_flatten(xs)
    pieces = [
        [None] * len(cut) if x is None else x.split(lengths[::-1])[::-1] if reverse else x.split(lengths)
        for x in leaves
    ]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def _unbind(xs: Any, steps: int) -> list[Any]:
    if xs is None:
        return [None] * steps
    leaves, structure = pytree.tree_flatten(xs)
    pieces = [[x] * steps if x is None else x.unbind() for x in leaves]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def _stack(ys: list[Any], name: str, first: int) -> Any:
    if all(y is None for y in ys):
        return None
    for i, y in enumerate(ys):
        check_y(ys[0], y, name, first, first + i)

    def stack(path: Any, *leaves: Any) -> Tensor | None:
        where = f"y{pytree.keystr(path)}"
        return None if leaves[0] is None else torch.stack([_as_tensor(y, where, name) for y in leaves])

    return pytree.tree_map_with_path(stack, *ys)


def _concatenate(stacks: list[Any], name: str, starts: list[int]) -> Any:
    """The ys of the parts, which begin with so many steps, as one stack."""
    if len(stacks) == 1 or all(ys is None for ys in stacks):
        return stacks[0]
    for start, ys in zip(starts, stacks, strict=True):
        if looks(ys) != looks(stacks[0]):
            one, other = (
                pytree.tree_map(lambda y: None if y is None else y[0], stack) for stack in (stacks[0], ys)
            )
            check_y(one, other, name, starts[0], start)
    return pytree.tree_map(lambda *leaves: None if leaves[0] is None else torch.cat(leaves), *stacks)


def _no_ys(f: Callable[..., Any], name: str, init: Any, xs: Any) -> Any:
    x = pytree.tree_map(lambda x: x if x is None else x.new_zeros(x.shape[1:]), xs)
    streams = world.states(world.random_streams(()))
    with torch.no_grad():
        carry, y = _step(f, _Body("scan", name, False, (0, 0), None), 0, init, x)
        check_carry(init, carry, name, 0)
        ys = _stack([y], name, 0)
    world.set_streams(streams)
    return pytree.tree_map(lambda y: None if y is None else y[:0], ys)


# -- what may be wrong ------------------------------------------------------------------------------


def _name(f: Any) -> str:
    name: str = getattr(f, "__qualname__", None) or type(f).__qualname__
    return name


def _check_callable(f: Any, name: str) -> None:
    if not callable(f):
        raise InputError(f"{name}: takes a function, not {type(f).__name__}.")
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        raise InputError(f"{name}: a generator or coroutine function is no step of a loop.")


def _as_tensor(x: Any, where: str, name: str) -> Any:
    try:
        return None if x is None else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: {where} is {in_words(x)}, and no tensor can be made of it.") from error


def _whole(x: Any, option: str, name: str) -> int:
    try:
        return operator.index(x)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{name}: {option}={x!r} is not a whole number.") from error


def _number_of_steps(x: Any, option: str, name: str) -> int:
    if isinstance(x, bool) or (number := _whole(x, option, name)) < 0:
        raise InputError(f"{name}: {option}={x!r} is not a number of steps.")
    return number


def _policy(policy: Policy | None, checkpoint: Any, bytes: int | None, name: str) -> Policy | None:
    if chooser_of(policy, name) is None:
        return None
    if checkpoint is None:
        raise OptionError(f"{name}: without a checkpoint all of each step is kept: policy= has no say.")
    if bytes is not None:
        raise OptionError(f"{name}: bytes= counts carries, and not what a policy keeps. Give checkpoints=.")
    if isinstance(policy, Budget):
        raise OptionError(f"{name}: {policy!r} is that of one call. The budget of a loop is bytes=.")
    return policy


def _steps(xs: Any, length: int | None, name: str) -> int:
    if length is not None:
        length = _number_of_steps(length, "length", name)
    first = None if length is None else ("length", length)
    for path, x in pytree.tree_flatten_with_path(xs)[0]:
        if x is None:
            continue
        where = f"xs{pytree.keystr(path)}"
        if x.ndim == 0:
            raise InputError(f"{name}: {where} ({describe(x)}) has no dimension to go along.")
        if first is None:
            first = where, x.shape[0]
        if x.shape[0] != first[1]:
            raise InputError(
                f"{name}: {where} ({describe(x)}) has {x.shape[0]} slices, and {first[0]} says {first[1]}."
            )
    if first is None:
        raise InputError(f"{name}: without xs, say how many steps there are: length=.")
    return first[1]


def _within(
    schedule: Schedule,
    bytes: int | None,
    f: Callable[..., Any],
    body: _Body,
    first: int,
    steps: int,
    init: Any,
    xs: Any,
) -> Schedule:
    """A schedule that has been chosen, or the one for so many bytes, or none where it would save nothing."""
    if _keeps_nothing(f, (init, xs)):
        return PLAIN
    if bytes is not None:
        return _as_many_as_fit(bytes, f, body, first, init, xs, steps)
    if (
        schedule.rule == "binomial"
        and repetitions(-(-steps // schedule.unit), schedule.number) > _most_repetitions()
    ):
        _refuse_repetitions(body.name, schedule.number, steps)
    return schedule


def _most_repetitions() -> int:
    return sys.getrecursionlimit() // _FRAMES_OF_A_REPETITION


def _refuse_repetitions(name: str, checkpoints: int, steps: int) -> NoReturn:
    most = _most_repetitions()
    raise OptionError(
        f"{name}: with {checkpoints} checkpoints some of {steps} steps would be run more than {most} times, "
        f"nested as deep. Take at least checkpoints={fewest(steps, most)}, or let Python nest deeper: "
        f"sys.setrecursionlimit({_FRAMES_OF_A_REPETITION * (repetitions(steps, checkpoints) + 1)})."
    )


def _too_deep(name: str) -> OptionError:
    limit = sys.getrecursionlimit()
    return OptionError(
        f"{name}: its schedule nests recomputations deeper than the {limit} calls that Python allows. Take "
        'more checkpoints=, or checkpoint="sqrt", which do not nest as deep; or allow more: '
        f"sys.setrecursionlimit({3 * limit})."
    )


def _as_many_as_fit(
    bytes: int,
    f: Callable[..., Any],
    body: _Body,
    first: int,
    init: Any,
    xs: Any,
    steps: int | None,
) -> Schedule:
    """The schedule for so many bytes. Without `steps`, the loop's length is not known."""
    name = body.name
    carry = sum(_torch.physical(x)[0].nbytes for x in _tensors_of(init))
    step, peak, stays = _measure_step(f, body, first, init, xs)
    if steps is not None:
        found = fit(steps, bytes, carry, step, peak, stays)
        most = _most_repetitions()
        if found is not None and repetitions(-(-steps // found.unit), found.number) <= most:
            return found
        least = fewest(steps, most)
    else:
        stays = 0  # its last step is run again as well
        number = (bytes - peak) // carry if carry else 2**20  # of nothing there may be many
        if number > 0:
            return Schedule("binomial", number)
        least = 1
    raise OptionError(
        f"{name}: a carry takes {carry} bytes, and a step with its backward {peak}: bytes={bytes} is less "
        f"than what {least} carr{'y' if least == 1 else 'ies'} and a step take, "
        f"{least * carry + peak + stays}."
    )


def _measure_step(f: Callable[..., Any], body: _Body, first: int, init: Any, xs: Any) -> tuple[int, int, int]:
    """What the first step saves when it is recorded, the most bytes of its forward and backward, and what
    `torch.func.grad` holds on to after them.
    """
    before = _Before(Closure(f))
    x = pytree.tree_map(lambda x: None if x is None else x[-1 if body.reverse else 0], xs)
    leaves, structure = pytree.tree_flatten(init)
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_differentiable(leaf)]

    def step(*given: Tensor) -> list[Tensor]:
        new = list(leaves)
        for i, leaf in zip(chosen, given, strict=True):
            new[i] = leaf
        out = _step(f, body, first, pytree.tree_unflatten(new, structure), x)
        return [y for y in pytree.tree_leaves(out) if isinstance(y, Tensor) and is_differentiable(y)]

    given = [leaves[i].detach() for i in chosen]
    plain = _torch.peek_interpreter_stack() is None
    with Meter() as meter:
        if plain:
            given = [x.requires_grad_() for x in given]
            outputs: Any = [y for y in step(*given) if y.requires_grad]
        else:
            recorded: Any = torch.func.vjp(step, *given)
            outputs, pull = recorded[0], recorded[1]
            del recorded
        saved = meter.live_bytes
        ones = [torch.ones_like(y) for y in outputs]
        if plain and ones:
            torch.autograd.grad(outputs, given, ones, allow_unused=True)
        elif ones and given:
            pull(ones)
    before.restore()
    stays = 0
    if given and any(layer.kind == "grad" for layer in _torch.active_layers()):
        with Meter() as whole:
            torch.func.grad(
                lambda *given: sum((y.real.sum() for y in step(*given)), torch.zeros(())),
                tuple(range(len(given))),
            )(*given)
        stays = whole.peak_bytes
        before.restore()
    return saved, meter.peak_bytes, stays


def _progress(progress: bool, name: str, schedule: Schedule, steps: int) -> tuple[int, int]:
    """The number of the bar, and how many steps the backward will run; zeros if there is none."""
    return open_bar(progress, name, steps), evaluations(schedule, steps) - steps
