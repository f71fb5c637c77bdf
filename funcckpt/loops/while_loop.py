"""`while_loop`: loops whose length is not known. Its steps are counted first; then it is a `scan`."""

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
    """``carry = body_fun(carry)`` while ``cond_fun(carry)``, a truth value or a tensor of one element.

    How long the loop is shows only as it runs. So it runs once to count its steps, without keeping anything,
    and then as a `scan` of that length: each step is run once more than there. It runs once in all with
    checkpoint=None, and where reverse mode differentiates nothing.

    `init_val` is the first carry. `checkpoint`, `checkpoints`, `bytes`, `policy`, `offload` and `progress`,
    the errors and the memory are those of `scan`. After `max_steps` steps, if given, the loop stops whatever
    `cond_fun` says.

    Raises
    ------
    InputError
        `cond_fun` depends on what a `vmap` has batched: the samples would need loops of different lengths; or
        it draws random numbers.
    MutationError
        `cond_fun` or `body_fun` assigns something outside of itself.

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
    loop = loop_of("while_loop", body_fun, (checkpoint, checkpoints, bytes), policy, offload, progress)
    if not callable(cond_fun):
        raise InputError(f"{loop.name}: takes a function, not {type(cond_fun).__name__}.")
    choose(*loop.asked, 1, loop.name)
    if max_steps is not None:
        max_steps = number_of_steps(max_steps, "max_steps", loop.name)
    if checkpoint is None or keeps_nothing((cond_fun, body_fun), init_val):
        bars = bars_of(loop.name, None) if progress else None
        carry, _ = _sweep(cond_fun, loop._replace(bars=bars), init_val, max_steps)
        if bars is not None:
            bars.close()
        return carry
    # Values alone: nothing that is computed here is looked at by a transform.
    with leaving_nothing((cond_fun, body_fun)) as (streams, has_assigned):
        with torch.no_grad(), functorch._set_fwd_grad_enabled(False):
            steps = _sweep(cond_fun, loop, init_val, max_steps, streams)[1]  # and no carry
        if has_assigned():
            raise MutationError(
                f"{loop.name}: cond or body assigns something outside of itself. "
                "The steps run a second time: put what changes into the carry."
            )
    return start(loop, 0, steps, init_val, None)[0]


def _sweep(
    cond: Callable[..., Any],
    loop: Loop,
    carry: Any,
    max_steps: int | None,
    streams: Sequence[world.Stream] = (),
) -> tuple[Any, int]:
    """The plain loop: its last carry, and how many steps it had. `cond` must not move `streams`."""
    steps = 0
    while steps != max_steps:
        before = world.states(streams)
        holds = _holds(cond, carry, loop.name, steps)
        if world.moved(before):
            raise InputError(
                f"{loop.name}: cond draws random numbers. Draw them in the body, and put what cond compares "
                "with into the carry."
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
            raise InputError(f"{name}: cond returned {describe(holds)} at step {step}, not one truth value.")
        if wrappers.physical(holds)[1]:
            raise InputError(
                f"{name}: cond depends on what vmap has batched: each sample needs a loop of its own length. "
                "Loop without vmap, over all samples, for as long as any needs it."
            )
    elif holds is None or not hasattr(holds, "__bool__"):
        raise InputError(f"{name}: cond returned {in_words(holds)} at step {step}, not a truth value.")
    return bool(holds)
