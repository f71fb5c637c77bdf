"""Runs of a loop without side effects: to measure a step, or to count steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..closures import Found, put_back
from ..core.program import is_differentiable
from ..core.tensors import changed_inside, has_lazy, is_same, refill, version_of, versions_of
from ..errors import MutationError, OptionError
from ..meter import Meter
from ..tape.operators import tensors_in
from .schedules import Schedule, carries_alive, fewest, fit
from .steps import Loop, check_alike, record, step


@contextmanager
def leaving_nothing(
    name: str, functions: Any, given: Any
) -> Iterator[tuple[list[world.Stream], Callable[[], bool]]]:
    """Restore random streams, buffers and what f assigns after the block: the same steps will run again.

    Gives the streams, and a function that tells whether the block has assigned something. A write to what the
    steps are `given`, or to another captured tensor, is a MutationError.
    """
    if functorch.is_tracing():  # as `torch.func.linearize` does: the block is no part of the graph
        with autograd.without_dispatch_modes(), leaving_nothing(name, functions, given) as inside:
            yield inside
        return
    found = Found((functions, given))
    streams = world.random_streams(found.streams, found.draws_elsewhere)
    states = world.states(streams)
    buffers = [(x, x.clone()) for x in found.buffers_in_training() if not has_lazy((x,))]
    others = {id(x): x for x in (*tensors_in(given), *found.tensors.values())}
    for x, _ in buffers:
        others.pop(id(x), None)
    versions = versions_of([*others.values()])
    try:
        yield streams, lambda: bool(found.changed())
        is_lazy = found.has_other_classes()
        for x, version in zip(others.values(), versions, strict=True):
            if version_of(x) != version and not is_lazy:
                is_given = any([x is y for y in tensors_in(given)])
                where = "the carry or xs" if is_given else found.where(id(x))
                raise changed_inside(name, x, where)
    finally:
        if not found.has_other_classes():  # as a lazy module has after its first call
            put_back(found)
        world.set_streams(states)
        for x, before in buffers:
            if not is_same(x, wrappers.physical(before)[0], may_wait=True):
                refill(x, before)


def no_ys(loop: Loop, init: Any, xs: Any) -> Any:
    """The ys of no step, which look like those of a first one."""
    x = pytree.tree_map(lambda x: x if x is None else x.new_zeros((1, *x.shape[1:])), xs)
    copy = pytree.tree_map_only(Tensor, torch.clone, init)  # to which a step may write
    with leaving_nothing(loop.name, loop.f, init), torch.no_grad():
        _, ys = record(loop, 0, 1, copy, x)
    return pytree.tree_map(lambda y: None if y is None else y[:0], ys)


def as_many_as_fit(loop: Loop, bytes: int, first: int, steps: int, init: Any, xs: Any) -> Schedule:
    """The schedule that runs the fewest steps within `bytes`."""
    x = pytree.tree_map(lambda x: None if x is None else x[-1 if loop.reverse else 0], xs)
    carry, depth = _bytes_of(init), functorch.active_kinds().count("vmap")
    for _ in range(steps):
        if all([wrappers.physical(leaf)[1] == depth for leaf in tensors_in(init)]):
            break
        # After a step, more of the carry may be batched.
        with leaving_nothing(loop.name, loop.f, (init, x)), torch.no_grad():
            after = step(loop, first, init, x)[0]
        check_alike("carry", init, after, f"{loop.name}: step {first}", "was given")
        if _bytes_of(after) <= carry:
            break
        init, carry = after, _bytes_of(after)
    try:
        saved, peak, stays = _measure_step(loop, first, init, x)
    except RuntimeError as error:
        if not autograd.is_about_writes(error) and "is not differentiable with respect to" not in str(error):
            raise
        raise MutationError(
            f"{loop.name}: bytes= cannot measure a step that writes in place to its carry or to what it "
            "captured, or updates running statistics in its carry or under a transform. Work on a copy "
            "(x.clone()) inside of the function; for running statistics, pass checkpoints= instead."
        ) from error
    found = fit(steps, int(min(bytes, sys.maxsize)), carry, saved, peak, stays)
    if found is None:
        carries = min([carries_alive(steps, k) for k in range(1, fewest(steps, 2) + 1)])
        raise OptionError(
            f"{loop.name}: bytes={bytes} is too little. A carry takes {carry} bytes, and a step with its "
            f"backward {peak + stays}: pass at least {carries * carry + peak + stays}."
        )
    return found


def _bytes_of(carry: Any) -> int:
    return sum([wrappers.physical(x)[0].nbytes for x in tensors_in(carry)])


def _measure_step(loop: Loop, first: int, init: Any, x: Any) -> tuple[int, int, int]:
    """In bytes: what the first step saves when it is recorded, the peak of its forward and backward, and what
    `torch.func.grad` still keeps after them, with its input, which is the output of the step before.
    """

    def run(*given: Tensor) -> list[Tensor]:
        new = iter(given)
        carry = pytree.tree_map_only(Tensor, lambda t: next(new) if is_differentiable(t) else t, init)
        return [y for y in tensors_in(step(loop, first, carry, x)) if is_differentiable(y)]

    def total(*given: Tensor) -> Tensor:
        return sum([y.real.sum() for y in run(*given)], torch.zeros(()))

    given = [t.detach() for t in tensors_in(init) if is_differentiable(t)]
    given = [t.clone() if t.is_inference() else t for t in given]  # those cannot require grad
    plain = functorch.peek_interpreter_stack() is None
    with leaving_nothing(loop.name, loop.f, (init, x)), Meter() as meter:
        if plain:
            given = [x.requires_grad_() for x in given]
            outputs: Any = [y for y in run(*given) if y.requires_grad]
        else:
            outputs, pull = torch.func.vjp(run, *given)  # type: ignore[misc]
        saved = meter.live_bytes
        ones = [torch.ones_like(y) for y in outputs]
        if ones and given:
            torch.autograd.grad(outputs, given, ones, allow_unused=True) if plain else pull(ones)
    if not given or "grad" not in functorch.active_kinds():
        return saved, meter.peak_bytes, 0
    with leaving_nothing(loop.name, loop.f, (init, x)), Meter() as whole:
        torch.func.grad(total, tuple(range(len(given))))(*given)
    return saved, meter.peak_bytes, whole.peak_bytes + sum([x.nbytes for x in given])
