"""`while_loop`: loops of unknown length. The steps are counted first; then the loop is a `scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import world
from .._torch import functorch, wrappers
from ..errors import InputError, MutationError, describe
from ..policies.policies import Policy
from .measure import leaving_nothing
from .scan import keeps_nothing, loop_of, number_of_steps, start
from .schedules import choose
from .steps import C, Loop, Offload, Rule, bars_of, in_words, record


def while_loop(
    cond_fun: Callable[[C], Any],
    body_fun: Callable[[C], C],
    init_val: C,
    *,
    checkpoint: Rule | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: Offload | None = None,
    max_steps: int | None = None,
    progress: bool = False,
) -> C:
    """Repeat ``carry = body_fun(carry)`` while ``cond_fun(carry)`` is true, and return the last carry.

    `cond_fun` returns a truth value or a tensor of one element. The length of the loop is not known before it
    has run. So the loop runs once to count its steps, keeping nothing, and then again as a `scan` of this
    length. With checkpoint=None, or if reverse mode differentiates nothing, it runs only once.

    `init_val` is the first carry. The options `checkpoint`, `checkpoints`, `bytes`, `policy`, `offload` and
    `progress`, the errors and the memory are those of :func:`scan`. `max_steps` is the most steps that the
    loop takes.

    Raises
    ------
    InputError
        `cond_fun` draws random numbers, or depends on a tensor that a `vmap` has batched: then the samples
        would need loops of different lengths.
    MutationError
        `cond_fun` or `body_fun` assigns something outside of itself.

    Examples
    --------
    Newton's method, run until it converges:

    >>> import torch
    >>> from funcckpt import while_loop
    >>> def sqrt(a):
    ...     return while_loop(lambda x: (x * x - a).abs() > 1e-6, lambda x: (x + a / x) / 2, a)
    >>> torch.func.grad(sqrt)(torch.tensor(4.0))
    tensor(0.2500)
    """
    loop = loop_of("while_loop", body_fun, (checkpoint, checkpoints, bytes), policy, offload, progress, False)
    if not callable(cond_fun):
        raise InputError(f"{loop.name}: cond_fun must be a function, not {type(cond_fun).__name__}.")
    choose(*loop.asked, 1, loop.name)
    if max_steps is not None:
        max_steps = number_of_steps(max_steps, "max_steps", loop.name)
    if checkpoint is None or keeps_nothing((cond_fun, body_fun), init_val):
        bars = bars_of(loop.name, None) if progress else None
        return _sweep(cond_fun, loop._replace(bars=bars), init_val, max_steps, ())[0]
    # Only values are computed here: no transform looks at them.
    with leaving_nothing((cond_fun, body_fun)) as (streams, has_assigned):
        with torch.no_grad(), functorch._set_fwd_grad_enabled(False):
            steps = _sweep(cond_fun, loop, init_val, max_steps, streams)[1]  # and no carry
        if has_assigned():
            raise MutationError(
                f"{loop.name}: cond_fun or body_fun assigns something outside of itself, but the steps run "
                "twice. Put what changes into the carry."
            )
    return start(loop, 0, steps, init_val, None)[0]


def _sweep(
    cond: Callable[..., Any], loop: Loop, carry: Any, max_steps: int | None, streams: Sequence[world.Stream]
) -> tuple[Any, int]:
    """Run the plain loop: its last carry and number of steps. `cond` must not draw from `streams`."""
    steps = 0
    while steps != max_steps:
        before = world.states(streams)
        holds = _holds(cond, carry, loop.name, steps)
        if world.moved(before):
            raise InputError(
                f"{loop.name}: cond_fun draws random numbers. Draw them in body_fun, and put them into the "
                "carry for cond_fun."
            )
        if not holds:
            break
        carry, _ = record(loop, steps, 1, carry, None)
        steps += 1
    return carry, steps


def _holds(cond: Callable[..., Any], carry: Any, name: str, step: int) -> bool:
    holds = cond(carry)
    if isinstance(holds, Tensor):
        if holds.numel() != 1:
            raise InputError(f"{name}: cond_fun returned {describe(holds)} at step {step}, not one value.")
        if wrappers.physical(holds)[1]:
            raise InputError(
                f"{name}: cond_fun depends on a tensor that vmap has batched, so the samples need loops of "
                "different lengths. Loop over the whole batch without vmap, until the last sample is done."
            )
    elif holds is None or not hasattr(holds, "__bool__"):
        raise InputError(f"{name}: cond_fun returned {in_words(holds)} at step {step}, not a truth value.")
    return bool(holds)
