"""Runs of a loop that leave nothing behind: to measure a step, or to count steps."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..closures import Found
from ..core.program import is_differentiable
from ..errors import OptionError
from ..meter import Meter
from .history import tensors_of
from .schedules import Schedule, fewest, fit, repetitions
from .steps import Loop, step

__all__ = ["Before", "as_many_as_fit", "check_depth"]

# Each repetition is a recomputation inside of a recomputation: at most so many Python frames, half of them
# under grad alone.
_FRAMES_OF_A_REPETITION = 35


class Before:
    """What functions may change that have to run again: random streams, and buffers."""

    def __init__(self, functions: Any) -> None:
        self._found = found = Found(functions)
        self.streams = world.random_streams(found.streams, found.draws_elsewhere)
        self._states = world.states(self.streams)
        self._buffers = [(x, x.clone()) for x in found.buffers_in_training()]

    def restore(self) -> None:
        with torch.no_grad():
            for x, before in self._buffers:
                if not torch.equal(x, before):
                    x.copy_(before)
        world.set_streams(self._states)

    def has_assigned(self) -> bool:
        """Whether the functions have assigned something outside of themselves."""
        return bool(self._found.changed())


def most_repetitions() -> int:
    return sys.getrecursionlimit() // _FRAMES_OF_A_REPETITION


def check_depth(name: str, checkpoints: int, steps: int) -> None:
    """Raise if a binomial schedule nests recomputations deeper than Python allows."""
    most, needed = most_repetitions(), repetitions(steps, checkpoints)
    if needed > most:
        raise OptionError(
            f"{name}: with {checkpoints} checkpoints some of {steps} steps would be run more than {most} "
            f"times, nested as deep. Take at least checkpoints={fewest(steps, most)}, or let Python nest "
            f"deeper: sys.setrecursionlimit({_FRAMES_OF_A_REPETITION * (needed + 1)})."
        )


def as_many_as_fit(loop: Loop, bytes: int, first: int, steps: int | None, init: Any, xs: Any) -> Schedule:
    """The schedule for so many bytes. Without `steps`, the loop's length is not known."""
    carry = sum([_torch.physical(x)[0].nbytes for x in tensors_of(init)])
    saved, peak, stays = _measure_step(loop, first, init, xs)
    least = 1
    if steps is None:
        stays = 0  # its last step is run again as well
        number = (bytes - peak) // carry if carry else 2**20  # of nothing there may be many
        if number > 0:
            return Schedule("binomial", number)
    else:
        found, most = fit(steps, bytes, carry, saved, peak, stays), most_repetitions()
        if found is not None and repetitions(-(-steps // found.unit), found.number) <= most:
            return found
        least = fewest(steps, most)
    raise OptionError(
        f"{loop.name}: a carry takes {carry} bytes, and a step with its backward {peak}: bytes={bytes} is "
        f"less than what {least} carr{'y' if least == 1 else 'ies'} and a step take, "
        f"{least * carry + peak + stays}."
    )


def _measure_step(loop: Loop, first: int, init: Any, xs: Any) -> tuple[int, int, int]:
    """What the first step saves when it is recorded, the most bytes of its forward and backward, and what
    `torch.func.grad` holds on to after them.
    """
    before = Before(loop.f)
    x = pytree.tree_map(lambda x: None if x is None else x[-1 if loop.reverse else 0], xs)
    leaves, structure = pytree.tree_flatten(init)
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_differentiable(leaf)]

    def run(*given: Tensor) -> list[Tensor]:
        new = list(leaves)
        for i, leaf in zip(chosen, given, strict=True):
            new[i] = leaf
        out = step(loop, first, pytree.tree_unflatten(new, structure), x)
        return [y for y in tensors_of(out) if is_differentiable(y)]

    given = [leaves[i].detach() for i in chosen]
    plain = _torch.peek_interpreter_stack() is None
    with Meter() as meter:
        if plain:
            given = [x.requires_grad_() for x in given]
            outputs: Any = [y for y in run(*given) if y.requires_grad]
        else:
            outputs, pull = torch.func.vjp(run, *given)  # type: ignore[misc]
        saved = meter.live_bytes
        ones = [torch.ones_like(y) for y in outputs]
        if plain and ones:
            torch.autograd.grad(outputs, given, ones, allow_unused=True)
        elif ones and given:
            pull(ones)
    before.restore()
    if not given or all([layer.kind != "grad" for layer in _torch.active_layers()]):
        return saved, meter.peak_bytes, 0
    with Meter() as whole:
        total = lambda *given: sum([y.real.sum() for y in run(*given)], torch.zeros(()))  # noqa: E731
        torch.func.grad(total, tuple(range(len(given))))(*given)
    before.restore()
    return saved, meter.peak_bytes, whole.peak_bytes
