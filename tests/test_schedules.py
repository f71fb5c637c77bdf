"""Schedules against the definitions: a dynamic programme for the optimum, and a machine that carries
them out and lets nothing be read that was not kept.
"""

import doctest
import math
import sys
from functools import cache

import pytest

from funcckpt.errors import OptionError
from funcckpt.loops.schedules import (
    PLAIN,
    Part,
    Schedule,
    advances,
    beta,
    choose,
    evaluations,
    fewest,
    fit,
    parts,
    repetitions,
    split,
)

STEPS, CHECKPOINTS = 200, 20


@cache
def fewest_advances(n, k):
    """Bellman's equation: go m steps, keep the carry, reverse what is right of it, then what is left."""
    if n <= 1:
        return 0
    if k == 1:
        return n * (n - 1) // 2
    return min(m + fewest_advances(n - m, k - 1) + fewest_advances(m, k) for m in range(1, n))


@cache
def carry_out(schedule, n):
    """Reverse n steps as `scan` does it: (steps run, most carries kept at a time)."""
    kept_now, run, most = set(), 0, 0
    reversed_steps = []

    def forward(a, schedule, steps):
        """From step a on; returns what the backward does, last part first."""
        nonlocal run, most
        pending = []
        for part in parts(schedule, steps):
            assert part.steps >= 1
            if part.schedule is not None:
                assert part.steps < steps or part.schedule == PLAIN, "a part as long as the loop"
                added = a not in kept_now
                kept_now.add(a)
                most = max(most, len(kept_now))
                pending.append((a, part, added))
            else:
                pending.append((a, part, False))
            run += part.steps
            a += part.steps
        return pending

    def backward(pending):
        for a, part, added in reversed(pending):
            if part.schedule is None:
                reversed_steps.extend(range(a + part.steps - 1, a - 1, -1))
            else:
                assert a in kept_now
                backward(forward(a, part.schedule, part.steps))
                if added:
                    kept_now.remove(a)

    backward(forward(0, schedule, n))
    assert reversed_steps == list(range(n - 1, -1, -1))
    assert not kept_now
    return run, most


def test_binomial_schedules_are_optimal_for_all_loops_and_checkpoints():
    for k in range(1, CHECKPOINTS + 1):
        for n in range(1, STEPS + 1):
            r = repetitions(n, k)
            assert beta(k, r) >= n and (r == 0 or beta(k, r - 1) < n)
            assert advances(n, k) == fewest_advances(n, k), (n, k)
            assert evaluations(Schedule("binomial", k), n) == n + fewest_advances(n, k), (n, k)
        for n in range(1, STEPS + 1, 9):
            assert carry_out(Schedule("binomial", k), n) == (n + fewest_advances(n, k), min(k, n - 1))


def test_beta_steps_take_exactly_r_repetitions():
    for k in range(1, CHECKPOINTS + 1):
        for r in range(1, 6):
            assert repetitions(math.comb(k + r, k), k) == r
            assert repetitions(math.comb(k + r, k) + 1, k) == r + 1


def test_splits_leave_two_loops_that_are_optimal_together():
    for k in range(2, CHECKPOINTS + 1):
        for n in range(2, STEPS + 1):
            m = split(n, k)
            assert 1 <= m < n
            assert m + advances(n - m, k - 1) + advances(m, k) == advances(n, k), (n, k)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 60, 101])
@pytest.mark.parametrize(
    "schedule",
    [PLAIN, Schedule("recursive")]
    + [Schedule("segments", s) for s in (1, 4, 10, 200)]
    + [Schedule("binomial", k, unit) for k in (1, 2, 3, 7, 100) for unit in (1, 4, 101)],
    ids=str,
)
def test_counts_are_those_of_a_machine_that_carries_the_schedule_out(schedule, n):
    assert sum(part.steps for part in parts(schedule, n)) == n
    assert carry_out(schedule, n)[0] == evaluations(schedule, n)


def test_what_the_table_says():
    n = 1024
    every, sqrt = choose("every", None, None, n, ""), choose("sqrt", None, None, n, "")
    assert carry_out(every, n) == (evaluations(every, n), n) == (2 * n, n)
    assert carry_out(sqrt, n) == (evaluations(sqrt, n), 32) == (2 * n, 32)
    assert {part.steps for part in parts(sqrt, n)} == {32}
    assert evaluations(Schedule("recursive"), n) == n + n * 10 // 2
    assert carry_out(Schedule("recursive"), n)[1] == 10
    binomial = choose("binomial", None, None, n, "")
    units = -(-n // binomial.unit)
    assert binomial.unit == 5
    assert binomial.number == fewest(units, 2) and repetitions(units, binomial.number) == 2
    assert repetitions(units, binomial.number - 1) == 3
    assert evaluations(binomial, n) <= 3 * n and carry_out(binomial, n)[1] == binomial.number
    assert evaluations(PLAIN, n) == n and list(parts(PLAIN, n)) == [Part(n, None)]


def test_segments_differ_by_one_step_at_most():
    lengths = [part.steps for part in parts(Schedule("segments", 7), 100)]
    assert len(lengths) == 7 and sum(lengths) == 100 and max(lengths) - min(lengths) == 1


@pytest.mark.parametrize("stays", [0, 25])
@pytest.mark.parametrize(("carry", "step", "peak"), [(10, 30, 50), (10, 10, 10), (0, 7, 9), (10, 0, 20)])
@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_no_schedule_for_so_many_bytes_runs_fewer_steps(n, carry, step, peak, stays):
    def takes(schedule):
        if schedule.unit >= n:
            return (n - 1) * max(step, stays) + peak
        return carry_out(schedule, n)[1] * carry + (schedule.unit - 1) * step + peak + schedule.unit * stays

    schedules = [Schedule("binomial", k, u) for u in range(1, n + 1) for k in range(1, -(-n // u) + 1)]
    for bytes in range(0, n * (carry + step) + peak + 20, 7):
        run = [evaluations(s, n) for s in schedules if takes(s) <= bytes]
        found = fit(n, bytes, carry, step, peak, stays)
        if found is None:
            assert not run
        else:
            assert takes(found) <= bytes
            assert evaluations(found, n) <= min(run) + n // 10  # the last unit may be shorter


@pytest.mark.parametrize(
    ("checkpoint", "checkpoints", "says"),
    [
        ("log", None, "'log' is not None, a number"),
        (0, None, "checkpoint=0 is not a positive number"),
        (True, None, "checkpoint=True is not a positive number"),
        ("binomial", 0, "checkpoints=0 is not a positive number"),
        ("binomial", 2.5, "checkpoints=2.5 is not a positive number"),
        ("sqrt", 4, 'checkpoints=4 needs checkpoint="binomial"'),
    ],
)
def test_wrong_options_are_refused(checkpoint, checkpoints, says):
    with pytest.raises(OptionError, match=says):
        choose(checkpoint, checkpoints, None, 10, "scan(f)")


def test_the_examples():
    assert doctest.testmod(sys.modules["funcckpt.loops.schedules"]).failed == 0
