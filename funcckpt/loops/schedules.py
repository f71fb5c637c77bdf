"""Which carries of a loop are kept, and how often its steps are run: checkpointing schedules.

A loop of n steps is cut into parts that run one after another. Each part is checkpointed: its first
carry is kept, and when the backward arrives there the part is run again, cut by the same rule. Only
the last part of a schedule that halves or is binomial is recorded at once. Everything that `scan` does
follows from `parts`, and `evaluations` counts what it costs.

=========== ====================================== ================== =========================
name        parts                                  carries kept       times that a step is run
=========== ====================================== ================== =========================
`None`      none                                   all, and insides   1
"every"     n of one step                          n                  2
an integer  so many, of equal length               so many, and the   2
                                                   inside of one part
"sqrt"      √n                                     √n, and √n insides 2
"recursive" n/2, n/4, ..., 1 steps                 log2 n             1 + log2(n)/2 on average
"binomial"  Griewank and Walther's, for k          k                  at most r + 1, where
            checkpoints                                               C(k + r, k) ≥ n
=========== ====================================== ================== =========================

No schedule with k checkpoints runs fewer steps than the binomial one (Griewank, "Achieving logarithmic growth
of temporal and spatial complexity", 1992; Griewank and Walther, "Algorithm 799: revolve", 2000).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..errors import OptionError


class Schedule(NamedTuple):
    """A rule by which a loop is cut; `number` is what it needs to know: parts, or checkpoints.

    A binomial schedule may count in units of several steps. The steps of one are recorded together.
    """

    rule: str
    number: int = 0
    unit: int = 1


class Part(NamedTuple):
    """Some successive steps: checkpointed and cut by `schedule`, or recorded (`None`)."""

    steps: int
    schedule: Schedule | None


PLAIN = Schedule("plain")


def beta(checkpoints: int, repeats: int) -> int:
    """The most steps that can be reversed with so many checkpoints if no step is repeated more often."""
    return math.comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def repetitions(steps: int, checkpoints: int) -> int:
    """The least number r of repetitions with which C(checkpoints + r, checkpoints) >= steps."""
    if checkpoints == 1:
        return max(steps - 1, 0)
    r = 0
    while beta(checkpoints, r) < steps:
        r += 1
    return r


def advances(steps: int, checkpoints: int) -> int:
    """How many steps must be run, besides recording each once, to reverse a loop (2000, equation 3).

    The optimum, r n - C(k + r, k + 1) with n steps, k checkpoints (the first carry is one of them)
    and r repetitions.

    >>> from funcckpt.loops.schedules import advances
    >>> advances(10, 3), advances(10, 9), advances(10, 1)
    (15, 9, 45)
    """
    r = repetitions(steps, checkpoints)
    return r * steps - beta(checkpoints + 1, r - 1)


def split(steps: int, checkpoints: int) -> int:
    """How many steps to go before the next carry is kept: the shortest way of those that are optimal."""
    r = repetitions(steps, checkpoints)
    return max(1, beta(checkpoints, r - 2), steps - beta(checkpoints - 1, r))


def fewest(steps: int, repeats: int) -> int:
    """The fewest checkpoints with which no step is repeated more often than `repeats` times."""
    k = 1
    while beta(k, repeats) < steps:
        k += 1
    return k


def parts(schedule: Schedule, steps: int) -> Iterator[Part]:
    """The parts into which a schedule cuts so many steps, first one first."""
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
    """How many steps are run in all by a forward and a backward through the loop.

    >>> from funcckpt.loops.schedules import Schedule, evaluations
    >>> evaluations(Schedule("binomial", 3), 10)      # advances(10, 3) and each step once
    25
    """
    if steps == 0 or schedule == PLAIN:
        return steps
    again = [evaluations(part.schedule, part.steps) for part in parts(schedule, steps) if part.schedule]
    return steps + sum(again)


def fit(steps: int, bytes: int, carry: int, step: int, peak: int, stays: int = 0) -> Schedule | None:
    """The schedule that runs the fewest steps within so many bytes, or None if there is none.

    Binomial schedules with k checkpoints and units of u steps are compared. They keep k carries, what
    u - 1 recorded steps save (`step`), and what is alive at most as one more is recorded and reversed
    (`peak`). Under `torch.func.grad` each step of the last unit `stays` to the end, with its graph.

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
        number = min(units, left // carry if carry else units)
        if left >= 0 and (units == 1 or number > 0):
            again = advances(units, max(1, number)) * unit
            if found is None or again < found[0]:
                found = again, Schedule("binomial", max(1, number), unit)
        # The next number of units that makes them shorter.
        units = -(-steps // (unit - 1)) if unit > 1 else steps + 1
    return None if found is None else found[1]


def choose(
    checkpoint: str | int | None, checkpoints: int | None, bytes: int | None, steps: int, name: str
) -> Schedule:
    """The schedule that a user has asked for, or `OptionError`. What `bytes` means, `fit` knows."""
    if bytes is not None and (checkpoint != "binomial" or checkpoints is not None):
        raise OptionError(f'{name}: bytes= goes with checkpoint="binomial", and without checkpoints=.')
    if checkpoints is not None and checkpoint != "binomial":
        raise OptionError(f'{name}: checkpoints={checkpoints!r} goes with checkpoint="binomial".')
    number = None if isinstance(checkpoint, str) else checkpoint
    for option, value in (("checkpoint", number), ("checkpoints", checkpoints), ("bytes", bytes)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptionError(f"{name}: {option}={value!r} is not a positive number.")
    if checkpoints is not None:
        return Schedule("binomial", checkpoints)
    if checkpoint == "binomial":
        # No step is run more than three times. √(2n/u) carries and the inside of u steps take the least where
        # u is the cube root of n/8, if the inside of a step takes twice as much as a carry.
        unit = max(1, round((steps / 8) ** (1 / 3)))
        return Schedule("binomial", fewest(-(-steps // unit), 2), unit)
    if checkpoint == "recursive":
        return Schedule("recursive")
    segments = {"every": steps, "sqrt": round(math.sqrt(steps))}.get(str(checkpoint), number)
    if checkpoint is not None and segments is None:
        raise OptionError(
            f"{name}: checkpoint={checkpoint!r} is none of None, a number of segments, 'every', 'sqrt', "
            "'recursive' and 'binomial'."
        )
    return PLAIN if segments is None else Schedule("segments", max(1, segments))
