"""Which carries of a loop are kept, and how often its steps are run: checkpointing schedules.

A loop of n steps is cut into parts that run one after another. Each part is checkpointed: its first carry is
kept, and when the backward gets there, the part runs again, cut by the same rule. Only the last part of a
recursive or binomial schedule is recorded in the forward. Everything that `scan` does follows from `parts`.
`evaluations` counts the steps that it runs.

=========== ====================================== ================== =========================
name        parts                                  carries kept       runs of each step
=========== ====================================== ================== =========================
`None`      none                                   all, and insides   1
"every"     n of one step                          n                  2
an integer  this number, of equal length           this number, and   2
                                                   one part's inside
"sqrt"      √n                                     √n, and √n insides 2
"recursive" n/2, n/4, ..., 1 steps                 log2 n             1 + log2(n)/2 on average
"binomial"  those of Griewank and Walther          k                  at most r + 1, where
            for k checkpoints                                         C(k + r, k) ≥ n
=========== ====================================== ================== =========================

No schedule with k checkpoints runs fewer steps than the binomial one (Griewank, "Achieving logarithmic growth
of temporal and spatial complexity", 1992; Griewank and Walther, "Algorithm 799: revolve", 2000).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

from ..errors import OptionError, check_positive


class Schedule(NamedTuple):
    """A rule that cuts a loop; `number` is the number of parts, or of checkpoints.

    A binomial schedule may count in units of several steps. The steps of a unit are recorded together.
    """

    rule: str
    number: int = 0
    unit: int = 1


class Part(NamedTuple):
    """Successive steps: checkpointed and cut by `schedule`, or recorded if it is None."""

    steps: int
    schedule: Schedule | None


# A policy tells the parts of a loop apart by their numbers alone.
PLAIN = Schedule("plain", unit=0)


def beta(checkpoints: int, repeats: int) -> int:
    """The most steps that can be reversed with this many checkpoints and repeats of each step."""
    return math.comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def repetitions(steps: int, checkpoints: int) -> int:
    """The least number r of repetitions with which C(checkpoints + r, checkpoints) >= steps."""
    if checkpoints == 1:
        return max(steps - 1, 0)
    return next(r for r in itertools.count() if beta(checkpoints, r) >= steps)


def advances(steps: int, checkpoints: int) -> int:
    """How many steps must run to reverse a loop, beside recording each once (2000, equation 3).

    The optimum, r n - C(k + r, k + 1) with n steps, k checkpoints (the first carry is one of them)
    and r repetitions.

    >>> from funcckpt.loops.schedules import advances
    >>> advances(10, 3), advances(10, 9), advances(10, 1)
    (15, 9, 45)
    """
    r = repetitions(steps, checkpoints)
    return r * steps - beta(checkpoints + 1, r - 1)


def split(steps: int, checkpoints: int) -> int:
    """How many steps to run before the next carry is kept: the fewest of the optimal choices."""
    r = repetitions(steps, checkpoints)
    return max(1, beta(checkpoints, r - 2), steps - beta(checkpoints - 1, r))


def carries_alive(steps: int, checkpoints: int) -> int:
    """How many carries are alive at once: the checkpoints, and a cotangent for each nested repetition."""
    return checkpoints + max(0, repetitions(steps, checkpoints) - 2)


def fewest(steps: int, repeats: int) -> int:
    """The fewest checkpoints for which no step is repeated more than `repeats` times."""
    return next(k for k in itertools.count(1) if beta(k, repeats) >= steps)


def parts(schedule: Schedule, steps: int) -> Iterator[Part]:
    """The parts into which a schedule cuts a number of steps, in order."""
    rule, number, unit = schedule
    if rule == "plain":
        yield Part(steps, None)
    elif rule == "segments":
        number = min(number, steps)
        for i in range(number):
            yield Part(steps * (i + 1) // number - steps * i // number, PLAIN)
    elif rule == "recursive":
        while steps > 1:
            yield Part(steps // 2, schedule)
            steps -= steps // 2
        yield Part(steps, None)
    else:
        while steps > unit:
            length = split(-(-steps // unit), number) * unit
            yield Part(length, Schedule(rule, number, unit))
            steps, number = steps - length, number - 1
        yield Part(steps, None)


@lru_cache(maxsize=100_000)
def evaluations(schedule: Schedule, steps: int) -> int:
    """How many steps a forward and a backward through the loop run in all.

    >>> from funcckpt.loops.schedules import Schedule, evaluations
    >>> evaluations(Schedule("binomial", 3), 10)      # advances(10, 3) and each step once
    25
    """
    if steps == 0 or schedule == PLAIN:
        return steps
    again = [evaluations(part.schedule, part.steps) for part in parts(schedule, steps) if part.schedule]
    return steps + sum(again)


def fit(steps: int, bytes: int, carry: int, step: int, peak: int, stays: int = 0) -> Schedule | None:
    """The schedule that runs the fewest steps within `bytes`, or None if there is none.

    It compares binomial schedules with k checkpoints and units of u steps. Such a schedule needs `carry` as
    often as `carries_alive` says, u - 1 times `step` (the bytes that a recorded step saves), and once `peak`
    (the peak of recording and reversing one step). Under `torch.func.grad`, each step of the last unit also
    keeps `stays`.

    >>> from funcckpt.loops.schedules import fit
    >>> fit(100, 1_000, 10, 50, 90)         # 6 carries, and 17 steps
    Schedule(rule='binomial', number=6, unit=17)
    """
    found: tuple[int, Schedule] | None = None
    units = 1
    while units <= steps:
        unit = -(-steps // units)
        left = bytes - peak - (unit - 1) * max(step, stays if units == 1 else 0)
        if units > 1:
            left -= unit * stays
        room = left // carry if carry else 2 * units
        number = next((k for k in range(min(units, room), 0, -1) if carries_alive(units, k) <= room), 0)
        if left >= 0 and (units == 1 or number > 0):
            again = advances(units, max(1, number)) * unit
            if found is None or again < found[0]:
                found = again, Schedule("binomial", max(1, number), unit)
        # The next number of units for which they are shorter.
        units = -(-steps // (unit - 1)) if unit > 1 else steps + 1
    return None if found is None else found[1]


def choose(
    checkpoint: str | int | None, checkpoints: int | None, bytes: int | None, steps: int, name: str
) -> Schedule:
    """The schedule that the options ask for, or `OptionError`. (`fit` finds the one for `bytes`.)"""
    if bytes is not None and (checkpoint != "binomial" or checkpoints is not None):
        raise OptionError(f'{name}: bytes= needs checkpoint="binomial", and no checkpoints=.')
    if checkpoints is not None and checkpoint != "binomial":
        raise OptionError(f'{name}: checkpoints={checkpoints!r} needs checkpoint="binomial".')
    number = None if isinstance(checkpoint, str) else checkpoint
    check_positive(name, or_none=True, checkpoint=number, checkpoints=checkpoints)
    check_positive(name, Real, or_none=True, bytes=bytes)
    if checkpoints is not None:
        return Schedule("binomial", checkpoints)
    if checkpoint == "binomial":
        # No step runs more than three times. √(2n/u) carries and the inside of u steps take the least memory
        # if u is the cube root of n/8, where the inside of a step takes twice as much as a carry.
        unit = max(1, round((steps / 8) ** (1 / 3)))
        return Schedule("binomial", fewest(-(-steps // unit), 2), unit)
    if checkpoint == "recursive":
        return Schedule("recursive")
    segments = {"every": steps, "sqrt": round(math.sqrt(steps))}.get(str(checkpoint), number)
    if checkpoint is not None and segments is None:
        raise OptionError(
            f"{name}: checkpoint={checkpoint!r} is not None, a number of segments, 'every', 'sqrt', "
            "'recursive' or 'binomial'."
        )
    return PLAIN if segments is None else Schedule("segments", max(1, segments))
