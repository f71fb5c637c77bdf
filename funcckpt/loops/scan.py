"""`scan`, `fori_loop` and `while_loop`: loops whose backward needs bounded memory.

A schedule (`schedules`) cuts a loop into parts. Each part is a `remat` of the loop over its steps, which the
same schedule cuts again. That is all: reverse mode, forward mode, batching, random numbers and captured
tensors are those of `remat`. With the cuts of Griewank and Walther, nested `remat` keeps the carries and runs
the steps of their algorithm `revolve`. The steps of a `while_loop` are counted first; then it is a `scan`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import world
from .._torch import functorch, wrappers
from ..closures import Found
from ..core.tensors import with_paths
from ..errors import InputError, MutationError, OptionError, describe
from ..policies.budget import Budget
from ..policies.policies import Policy, chooser_of
from ..remat import is_module_class
from ..tape.operators import tensors_in
from .measure import as_many_as_fit, leaving_nothing, no_ys
from .schedules import PLAIN, choose, evaluations
from .steps import Asked, C, Loop, Offload, Rule, X, Y, as_tensor, bars_of, in_words, record


def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X = None,  # type: ignore[assignment]
    length: int | None = None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    checkpoint: Rule | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: Offload | None = None,
    progress: bool = False,
) -> tuple[C, Y]:
    """Loop over the slices of xs with a carry, as `jax.lax.scan`, and keep only a few carries.

    It computes what this loop does, under every transform and in plain autograd::

        carry, ys = init, []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    Parameters
    ----------
    f : callable
        ``f(carry, x) -> (carry, y)``. The contract of `remat` applies to it. y is a pytree of tensors and
        numbers, or None. The structure, shapes and dtypes of the carry and of y must be the same in each
        step.
    init, xs : pytree
        The first carry; and tensors of shape ``(n, ...)``, of which f gets the slices, or None.
    length : int, optional
        The number of steps n; needed if there are no xs. If it is 0, f is called once, with zeros for x, to
        find the shapes of ys; random streams are restored.
    reverse : bool
        Go from the last slice to the first. ys are in the order of xs.
    unroll : int or bool
        An option of `jax.lax.scan`, without effect here.
    checkpoint : {"binomial", "sqrt", "recursive", "every"}, int or None
        Which carries are kept (`funcckpt.loops.schedules`). "binomial": at most `checkpoints` of them, with
        the fewest steps run again. "sqrt": √n of them, and the inside of √n steps. An integer: this number of
        them. "recursive": log2 n. "every": all. None: no checkpoint, all is kept.
    checkpoints : int, optional
        The number of carries for "binomial". By default about 2∛n, and the inside of ∛(n/8) steps: then no
        step runs more than three times. Under `torch.func.grad`, one (from some 25 steps on) and two (some
        300) meet Python's recursion limit: recomputations nest as deep as steps are repeated.
    bytes : int, optional
        For "binomial", instead of `checkpoints`: how many bytes the kept carries and the inside of recorded
        steps may take. The first step is measured, and the schedule with the fewest steps is chosen. xs, ys,
        the gradients of captured tensors, and the first and last carry come on top.
    policy : callable or list of operators, optional
        What is kept of each step beside the carries, as for `remat`. Not a budget, and not with `bytes`.
    offload : {"host", "disk"}, optional
        Where the carries are kept: in the memory of the host, or in unnamed temporary files.
    progress : bool
        Show progress bars for the forward and the backward. Needs tqdm.

    Returns
    -------
    (carry, ys)
        The last carry, and the stacked y of all steps, of shape ``(n, ...)``.

    Raises
    ------
    InputError
        The lengths of xs differ, or f changes the structure, a shape or a dtype of the carry or y. The
        message names the leaf and the step.
    OptionError
        An option is invalid.
    FuncckptError
        As for `remat`.

    Examples
    --------
    Differentiate the end of 1000 steps, with five carries kept:

    >>> import torch
    >>> from funcckpt import scan
    >>> def end(w):
    ...     step = lambda x, _: (torch.sin(w * x), None)
    ...     x, _ = scan(step, torch.ones(()), length=1000, checkpoints=5)
    ...     return x
    >>> torch.func.grad(end)(torch.tensor(1.0))
    tensor(27.3996)
    >>> scan(lambda s, x: (s + x, s + x), torch.tensor(0), torch.arange(5))
    (tensor(10), tensor([ 0,  1,  3,  6, 10]))
    """
    loop = _loop_of("scan", f, (checkpoint, checkpoints, bytes), policy, offload, progress)
    loop = loop._replace(reverse=reverse)
    leaves = [as_tensor(x, f"xs{pytree.keystr(path)}", loop.name) for path, x in with_paths(xs)]
    xs = pytree.tree_unflatten(leaves, pytree.tree_structure(xs))
    return _start(loop, 0, _steps(xs, length, loop.name), init, xs)


def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[[int, C], C],
    init_val: C,
    *,
    unroll: int | bool | None = None,
    checkpoint: Rule | int | None = "binomial",
    checkpoints: int | None = None,
    bytes: int | None = None,
    policy: Policy | None = None,
    offload: Offload | None = None,
    progress: bool = False,
) -> C:
    """``carry = body_fun(i, carry)`` for i in ``range(lower, upper)``. Returns the last carry.

    `init_val` is the first carry. The signature is that of `jax.lax.fori_loop`. The options `unroll`,
    `checkpoint`, `checkpoints`, `bytes`, `policy`, `offload` and `progress`, the errors and the memory are
    those of :func:`scan`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import fori_loop
    >>> torch.func.grad(lambda x: fori_loop(1, 4, lambda i, y: y * x / i, x))(torch.tensor(2.0))
    tensor(5.3333)
    """
    loop = _loop_of("fori_loop", body_fun, (checkpoint, checkpoints, bytes), policy, offload, progress)
    lower, upper = _whole(lower, "lower", loop.name), _whole(upper, "upper", loop.name)
    return _start(loop, lower, max(0, upper - lower), init_val, None)[0]


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
    loop = _loop_of("while_loop", body_fun, (checkpoint, checkpoints, bytes), policy, offload, progress)
    if not callable(cond_fun):
        raise InputError(f"{loop.name}: cond_fun must be a function, not {type(cond_fun).__name__}.")
    choose(*loop.asked, 1, loop.name)
    if max_steps is not None:
        max_steps = _number_of_steps(max_steps, "max_steps", loop.name)
    if checkpoint is None or _keeps_nothing((cond_fun, body_fun), init_val):
        bars = bars_of(loop.name, None) if progress else None
        return _sweep(cond_fun, loop._replace(bars=bars), init_val, max_steps, ())[0]
    # Only values are computed here: no transform looks at them.
    with leaving_nothing(loop.name, (cond_fun, body_fun), init_val) as (streams, has_assigned):
        with torch.no_grad(), functorch.set_forward_mode(False):
            first = pytree.tree_map(lambda x: x, init_val)  # a step may write to the containers
            steps = _sweep(cond_fun, loop, first, max_steps, streams)[1]  # and no carry
        if has_assigned():
            raise MutationError(
                f"{loop.name}: cond_fun or body_fun assigns something outside of itself, or to an object in "
                "the carry, but the steps run twice. Return what changes in the carry, as a new object."
            )
    return _start(loop, 0, steps, init_val, None)[0]


# -- the loop ---------------------------------------------------------------------------------------


def _start(loop: Loop, first: int, steps: int, init: Any, xs: Any) -> tuple[Any, Any]:
    """A whole loop, by the schedule that the options ask for, or by none if there is nothing to save."""
    schedule, (*_, bytes) = choose(*loop.asked, steps, loop.name), loop.asked
    if steps == 0:
        return init, no_ys(loop, init, xs) if loop.kind == "scan" else None
    # A graph of torch.jit has no checkpoints.
    if torch.jit.is_tracing() or _keeps_nothing(loop.f, (init, xs)):  # type: ignore[attr-defined]
        schedule = PLAIN
    elif bytes is not None:
        schedule = as_many_as_fit(loop, bytes, first, steps, init, xs)
    loop = loop._replace(schedule=schedule, first=first, steps=steps)
    if loop.progress:
        loop = loop._replace(bars=bars_of(loop.name, steps, evaluations(schedule, steps) - steps))
    return loop(init, xs)


def _keeps_nothing(functions: Any, arguments: Any) -> bool:
    """Whether reverse mode differentiates nothing, so that a plain loop keeps nothing, too."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    if "grad" in functorch.active_kinds():
        return False
    tensors = tensors_in(arguments) + list(Found(functions).tensors.values())
    return not any([wrappers.below_wrappers(x).requires_grad for x in tensors])


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


# -- options ----------------------------------------------------------------------------------------


def _loop_of(
    kind: str, f: Callable[..., Any], asked: Asked, policy: Policy | None, offload: str | None, progress: bool
) -> Loop:
    """A loop with checked options; its length is not known yet."""
    name = f"{kind}({getattr(f, '__qualname__', None) or type(f).__qualname__})"
    if not callable(f) or is_module_class(f):
        what = f"the class {f.__name__}" if isinstance(f, type) else type(f).__name__
        raise InputError(f"{kind} takes a function, not {what}.")
    if offload not in (None, "host", "disk"):
        raise OptionError(f"{name}: offload={offload!r} is not None, 'host' or 'disk'.")
    checkpoint, _, bytes = asked
    if (chooser := chooser_of(policy, name)) is not None:
        if checkpoint is None:
            raise OptionError(f"{name}: checkpoint=None keeps all values of each step. Leave out policy=.")
        if bytes is not None:
            raise OptionError(f"{name}: bytes= cannot count what a policy keeps. Pass checkpoints= instead.")
        if isinstance(chooser, Budget):
            raise OptionError(f"{name}: {policy!r} is for a single call. For a loop, pass bytes=.")
    return Loop(f, kind, name, asked, progress, offload, chooser)


def _whole(x: Any, option: str, name: str) -> int:
    try:
        return operator.index(x)
    except (TypeError, RuntimeError) as error:
        what, advice = repr(x), ""
        if isinstance(x, Tensor):
            what = describe(x)
            if wrappers.physical(x)[1]:
                advice = " A vmap has batched it: take the largest bound, and select with torch.where."
        raise InputError(f"{name}: {option}={what} is not a whole number.{advice}") from error


def _number_of_steps(x: Any, option: str, name: str) -> int:
    if isinstance(x, bool) or (number := _whole(x, option, name)) < 0:
        raise InputError(f"{name}: {option}={x!r} is not a number of steps.")
    return number


def _steps(xs: Any, length: int | None, name: str) -> int:
    """The number of steps, on which `length` and all of xs have to agree."""
    found = None if length is None else ("length", _number_of_steps(length, "length", name))
    for path, x in with_paths(xs):
        if x is None:
            continue
        where = f"xs{pytree.keystr(path)}"
        if x.ndim == 0:
            raise InputError(f"{name}: {where} ({describe(x)}) has no dimension to loop over.")
        found = found or (where, x.shape[0])
        if x.shape[0] != found[1]:
            raise InputError(
                f"{name}: {where} ({describe(x)}) has {x.shape[0]} slices, not {found[1]} like {found[0]}."
                + " A list is one pytree: to loop over a list of batches, stack them." * isinstance(xs, list)
            )
    if found is None:
        raise InputError(f"{name}: without xs, pass length=, the number of steps.")
    return int(found[1])  # torch.jit.trace makes a tensor of it
