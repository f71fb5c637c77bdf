"""Schedules against the definitions: a dynamic programme for the optimum, and a machine that carries
them out and lets nothing be read that was not kept.
"""

from functools import cache

import pytest

from funcckpt.loops.schedules import PLAIN, Schedule, choose, evaluations, fewest, fit, parts, repetitions


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
    kept, run, most, reversed_steps = set(), 0, 0, []

    def reverse(a, schedule, steps):
        """From step a on: forward through the parts, and back, last part first."""
        nonlocal run, most
        pending = []
        for part in parts(schedule, steps):
            assert part.steps >= 1
            if part.schedule is not None:
                assert part.steps < steps or part.schedule == PLAIN, "a part as long as the loop"
            pending.append((a, part, part.schedule is not None and a not in kept))
            kept.update({a} if part.schedule is not None else ())
            most = max(most, len(kept))
            run += part.steps
            a += part.steps
        for a, part, is_new in reversed(pending):
            if part.schedule is None:
                reversed_steps.extend(range(a + part.steps - 1, a - 1, -1))
            else:
                assert a in kept
                reverse(a, part.schedule, part.steps)
                kept.difference_update({a} if is_new else ())

    reverse(0, schedule, n)
    assert reversed_steps == list(range(n - 1, -1, -1)) and not kept
    return run, most


def test_binomial_schedules_are_optimal_for_all_loops_and_checkpoints():
    for k in range(1, 21):
        for n in range(1, 201):
            assert evaluations(Schedule("binomial", k), n) == n + fewest_advances(n, k), (n, k)
        for n in range(1, 201, 9):
            assert carry_out(Schedule("binomial", k), n) == (n + fewest_advances(n, k), min(k, n - 1))


@pytest.mark.parametrize(
    "schedule",
    [PLAIN, Schedule("recursive")]
    + [Schedule("segments", s) for s in (1, 4, 10, 200)]
    + [Schedule("binomial", k, unit) for k in (1, 2, 3, 7, 100) for unit in (1, 4, 101)],
    ids=str,
)
def test_counts_are_those_of_a_machine_that_carries_the_schedule_out(schedule):
    for n in (1, 2, 3, 7, 16, 60, 101):
        lengths = [part.steps for part in parts(schedule, n)]
        assert sum(lengths) == n and carry_out(schedule, n)[0] == evaluations(schedule, n)
        if schedule.rule == "segments":
            assert len(lengths) == min(n, schedule.number) and max(lengths) - min(lengths) <= 1


def test_what_the_table_says():
    n = 1024
    every, sqrt, binomial = (choose(rule, None, None, n, "") for rule in ("every", "sqrt", "binomial"))
    assert carry_out(every, n) == (evaluations(every, n), n) == (2 * n, n)
    assert carry_out(sqrt, n) == (evaluations(sqrt, n), 32) == (2 * n, 32)
    assert carry_out(Schedule("recursive"), n) == (n + n * 10 // 2, 10)
    units = -(-n // binomial.unit)
    assert binomial.unit == 5 and binomial.number == fewest(units, 2)
    assert [repetitions(units, binomial.number - i) for i in (0, 1)] == [2, 3]
    assert evaluations(binomial, n) <= 3 * n and carry_out(binomial, n)[1] == binomial.number


@pytest.mark.parametrize("stays", [0, 25])
@pytest.mark.parametrize(("carry", "step", "peak"), [(10, 30, 50), (10, 10, 10), (0, 7, 9), (10, 0, 20)])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_no_schedule_for_so_many_bytes_runs_fewer_steps(n, carry, step, peak, stays):
    def takes(schedule):
        if schedule.unit >= n:
            return (n - 1) * max(step, stays) + peak
        cotangents = max(0, repetitions(-(-n // schedule.unit), schedule.number) - 2)
        carries = carry_out(schedule, n)[1] + cotangents
        return carries * carry + (schedule.unit - 1) * step + peak + schedule.unit * stays

    schedules = [Schedule("binomial", k, u) for u in range(1, n + 1) for k in range(1, -(-n // u) + 1)]
    for bytes in range(0, n * (carry + step) + peak + 20, 7):
        run = [evaluations(s, n) for s in schedules if takes(s) <= bytes]
        found = fit(n, bytes, carry, step, peak, stays)
        assert (found is None) == (not run)
        if found is not None:
            assert takes(found) <= bytes
            assert evaluations(found, n) <= min(run) + n // 10  # the last unit may be shorter
