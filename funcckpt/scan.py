"""Loops whose backward needs bounded memory: `scan`, `fori_loop` and `while_loop`.

A loop is cut into parts by a schedule (`schedules`), and each part is a `remat` of the loop over its
steps, cut again by the same schedule. That is all: reverse sweep, forward mode, batching, random
numbers and captured tensors are those of `remat`, and when the cuts are Griewank and Walther's, nested
`remat` keeps the carries and runs the steps that their algorithm `revolve` does.

Underneath are plain Python loops, so the body may branch on values where no `vmap` is around it.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _torch, world
from .closure import Closure, may_be_statistics
from .errors import CheckpointError, InputError, MutationError, OptionError, describe
from .offload import Stored, check_place, fetch, store
from .remat import remat
from .schedules import Part, Schedule, choose, evaluations, parts, repetitions

__all__ = ["fori_loop", "scan", "while_loop"]

# Each repetition is a recomputation inside of a recomputation, some twenty Python frames deep.
_MAX_REPETITIONS = 16


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
        tensors. What `remat` asks of a function holds for f: pure up to random numbers. y may be any
        pytree of tensors and numbers, or None.
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
        the loop above. See `funcckpt.schedules`.
    checkpoints : int, optional
        For "binomial". By default the fewest with which no step is run more than three times, about
        √(2n).
    bytes : int, optional
        For "binomial", instead of `checkpoints`: as many as fit. What one step saves comes on top.
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
        The lengths of xs differ, or f changes what the carry looks like. The message names the leaf
        and the step.
    OptionError
        An option is wrong.
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
    xs = pytree.tree_map(lambda x: x if x is None else torch.as_tensor(x), xs)
    steps = _steps(xs, length, name)
    check_place(offload, name)
    if steps == 0:
        return init, _no_ys(f, name, init, xs)
    schedule = _schedule(checkpoint, checkpoints, bytes, init, steps, name)
    body = _Body("scan", name, reverse, _progress(progress, name, schedule, steps), offload)
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
    checkpoint, checkpoints, bytes, offload, progress
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
    steps = max(0, upper - lower)
    if steps == 0:
        return init
    schedule = _schedule(checkpoint, checkpoints, bytes, init, steps, name)
    loop = _Body("fori", name, False, _progress(progress, name, schedule, steps), offload)
    return _run(body, loop, schedule, lower, steps, init, None)[0]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    init: Any,
    *,
    checkpoint: str | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    offload: str | None = None,
    max_steps: int | None = None,
    progress: bool = False,
) -> Any:
    """``carry = body(carry)`` for as long as ``cond(carry)``.

    Where a derivative is recorded, the loop runs twice: first to count its steps, without keeping
    anything, and then as a `scan` of so many. That is one sweep more than the optimum of a loop whose
    length is known. The other errors and the memory are those of `scan`.

    Parameters
    ----------
    cond : callable
        ``cond(carry) -> bool``, or a tensor of one element.
    body : callable
        ``body(carry) -> carry``.
    init : pytree
        The first carry.
    checkpoint, checkpoints, bytes, offload, progress
        As in `scan`.
    max_steps : int, optional
        Stop after so many steps, whatever `cond` says.

    Raises
    ------
    InputError
        `cond` depends on what a `vmap` has batched: the samples would need loops of different lengths.
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
    loop = _Body("while", name, False, (0, 0), offload)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _while(cond, body, loop, init, max_steps)[0]
    steps = _count(cond, body, loop, init, max_steps)
    if steps == 0:
        return init
    schedule = _schedule(checkpoint, checkpoints, bytes, init, steps, name)
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


# -- the loop ---------------------------------------------------------------------------------------


class _Body(NamedTuple):
    """What a part has to know of its loop; numbers and strings, in which no tensor is searched."""

    kind: str
    name: str
    reverse: bool
    progress: tuple[int, int]
    offload: str | None


def _run(
    f: Callable[..., Any], body: _Body, schedule: Schedule, first: int, steps: int, carry: Any, xs: Any
) -> tuple[Any, Any]:
    """Steps `first` up to `first + steps`, cut by a schedule: the last carry, and ys."""
    cut = list(parts(schedule, steps))
    # xs lie as they were given, and `first` counts in their order.
    ends = list(itertools.accumulate((part.steps for part in cut), initial=0))
    starts = [steps - end for end in ends[1:]] if body.reverse else ends[:-1]
    stacks = []
    for part, start, x in zip(cut, starts, _split(xs, cut, body.reverse), strict=True):
        if part.schedule is None:
            carry, ys = _record(f, body, first + start, part.steps, fetch(carry), x)
        else:
            # The first carry of a part that is run again is kept already.
            if body.offload is not None and not isinstance(carry, Stored):
                carry = store(carry, body.offload)
            carry, ys = _part(f, body, part.schedule, first + start, part.steps, carry, x)
        stacks.append(ys)
    return carry, _concatenate(stacks[::-1] if body.reverse else stacks)


# Messages call it by the name of what users call.
_run.__qualname__ = "scan"
_part = remat(_run, static_argnums=(0, 1, 2))


def _record(
    f: Callable[..., Any], body: _Body, first: int, steps: int, carry: Any, xs: Any
) -> tuple[Any, Any]:
    """Some steps, one after another."""
    slices = _unbind(xs, steps)
    order = range(steps)
    ys = []
    for i in reversed(order) if body.reverse else order:
        new, y = _step(f, body, first + i, carry, slices[i])
        _check_carry(carry, new, body.name, first + i)
        carry = new
        ys.append(y)
        if body.progress[0]:
            _advance(*body.progress, body.name)
    return carry, _stack(ys[::-1] if body.reverse else ys)


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
    cond: Callable[..., Any], body: Callable[..., Any], loop: _Body, carry: Any, max_steps: int | None
) -> tuple[Any, int]:
    steps = 0
    while steps != max_steps and _holds(cond, carry, loop.name, steps):
        new, _ = _step(body, loop, steps, carry, None)
        _check_carry(carry, new, loop.name, steps)
        carry = new
        steps += 1
    return carry, steps


def _count(
    cond: Callable[..., Any], body: Callable[..., Any], loop: _Body, init: Any, max_steps: int | None
) -> int:
    """How many steps the loop has. It will run again, and has to find everything as it was."""
    closure = Closure((cond, body))
    streams = world.states(world.random_streams(closure.generators))
    buffers = [(x, x.clone()) for x in closure.constants if may_be_statistics(x) or x.numel() == 1]
    # Values alone: nothing that is computed here is looked at by a transform.
    with torch.no_grad(), _torch._set_fwd_grad_enabled(False):
        steps = _while(cond, body, loop, init, max_steps)[1]
        for x, before in buffers:
            if not torch.equal(x, before):
                x.copy_(before)
    closure.settle(loop.name)
    if not closure.is_pure:
        raise MutationError(
            f"{loop.name}: cond or body assigns something outside of itself, or draws from an iterator or "
            "from random numbers that are not torch's. The loop runs once to count its steps, and a second "
            "time: put what changes into the carry."
        )
    world.set_streams(streams)
    return steps


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
    return bool(holds)


# -- xs and ys --------------------------------------------------------------------------------------


def _split(xs: Any, cut: list[Part], reverse: bool) -> list[Any]:
    """What each part takes of xs; one operator, whose pullback is one as well."""
    if len(cut) == 1:
        return [xs]
    lengths = [part.steps for part in cut]
    leaves, structure = pytree.tree_flatten(xs)
    pieces = [
        [None] * len(cut) if x is None else x.split(lengths[::-1])[::-1] if reverse else x.split(lengths)
        for x in leaves
    ]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def _unbind(xs: Any, steps: int) -> list[Any]:
    leaves, structure = pytree.tree_flatten(xs)
    pieces = [[x] * steps if x is None else x.unbind() for x in leaves]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def _stack(ys: list[Any]) -> Any:
    def stack(*leaves: Any) -> Tensor | None:
        if all(y is None for y in leaves):
            return None
        return torch.stack([torch.as_tensor(y) for y in leaves])

    return pytree.tree_map(stack, *ys)


def _concatenate(stacks: list[Any]) -> Any:
    if len(stacks) == 1:
        return stacks[0]
    return pytree.tree_map(lambda *leaves: None if leaves[0] is None else torch.cat(leaves), *stacks)


def _no_ys(f: Callable[..., Any], name: str, init: Any, xs: Any) -> Any:
    x = pytree.tree_map(lambda x: x if x is None else x.new_zeros(x.shape[1:]), xs)
    streams = world.states(world.random_streams(()))
    with torch.no_grad():
        _, y = _step(f, _Body("scan", name, False, (0, 0), None), 0, init, x)
    world.set_streams(streams)
    return pytree.tree_map(
        lambda y: y if y is None else torch.as_tensor(y).new_empty((0, *torch.as_tensor(y).shape)), y
    )


# -- what may be wrong ------------------------------------------------------------------------------


def _name(f: Any) -> str:
    name: str = getattr(f, "__qualname__", None) or type(f).__qualname__
    return name


def _check_callable(f: Any, name: str) -> None:
    if not callable(f):
        raise InputError(f"{name}: takes a function, not {type(f).__name__}.")
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        raise InputError(f"{name}: a generator or coroutine function is no step of a loop.")


def _steps(xs: Any, length: int | None, name: str) -> int:
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
        raise InputError(f"{name}: length={length!r} is not a number of steps.")
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


def _schedule(
    checkpoint: Any, checkpoints: int | None, bytes: int | None, init: Any, steps: int, name: str
) -> Schedule:
    if bytes is not None:
        if checkpoint != "binomial" or checkpoints is not None:
            raise OptionError(f'{name}: bytes= goes with checkpoint="binomial", and without checkpoints=.')
        leaves = [x for x in pytree.tree_leaves(init) if isinstance(x, Tensor)]
        each = sum(_torch.physical(x)[0].nbytes for x in leaves)
        checkpoints = steps if each == 0 else min(steps, bytes // each)
        if checkpoints < 1:
            raise OptionError(f"{name}: one carry takes {each} bytes, and bytes={bytes} is less.")
    schedule = choose(checkpoint, checkpoints, steps, name)
    if schedule.rule == "binomial" and repetitions(steps, schedule.number) > _MAX_REPETITIONS:
        least = schedule.number
        while repetitions(steps, least) > _MAX_REPETITIONS:
            least += 1
        raise OptionError(
            f"{name}: with {schedule.number} checkpoints some of {steps} steps would be run more than "
            f"{_MAX_REPETITIONS} times, nested as deep. Take at least checkpoints={least}."
        )
    return schedule


def _check_carry(before: Any, after: Any, name: str, step: int) -> None:
    old, old_structure = pytree.tree_flatten(before)
    new, new_structure = pytree.tree_flatten(after)
    if old_structure != new_structure:
        raise InputError(
            f"{name}: step {step} returned a carry with the structure {new_structure}, and was given "
            f"{old_structure}."
        )
    if [_look(x) for x in old] == [_look(x) for x in new]:
        return
    paths = [path for path, _ in pytree.tree_flatten_with_path(before)[0]]
    for path, a, b in zip(paths, old, new, strict=True):
        if _look(a) != _look(b):
            cast = "" if not isinstance(b, Tensor) else " Cast or broadcast the first carry to what f makes."
            raise InputError(
                f"{name}: step {step} returned carry{pytree.keystr(path)} as {_in_words(b)}, and was "
                f"given {_in_words(a)}.{cast}"
            )


def _look(x: Any) -> Any:
    return (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x)


def _in_words(x: Any) -> str:
    return f"{describe(x)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


# -- progress ---------------------------------------------------------------------------------------

# The bars that are shown. A part knows its bar by number: an object would be searched for tensors.
_bars: dict[int, Any] = {}
_numbers = itertools.count(1)


def _progress(progress: bool, name: str, schedule: Schedule, steps: int) -> tuple[int, int]:
    """The number of the bar, and how many steps the backward will run; zeros if there is none."""
    if not progress:
        return 0, 0
    number = next(_numbers)
    _bars[number] = _bar(steps, name)
    return number, evaluations(schedule, steps) - steps


def _advance(number: int, again: int, name: str) -> None:
    bar = _bars.get(number)
    if bar is None:  # The forward is over.
        bar = _bars[number] = _bar(again, f"{name}, backward")
    bar.update()
    if bar.n >= bar.total:
        _bars.pop(number).close()


def _bar(total: int, name: str) -> Any:
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise OptionError(f"{name}: progress=True needs tqdm: pip install 'funcckpt[progress]'") from error
    return tqdm(total=total, desc=name)
