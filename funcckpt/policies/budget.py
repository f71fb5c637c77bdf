"""Which values to keep, for a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

from torch.utils.checkpoint import CheckpointPolicy

from ..errors import OptionError
from .chooser import Call, Chooser, Decision, Place
from .policies import is_dot, is_product


def budget(*, bytes: int | None = None, fraction: float | None = None) -> Budget:
    """Keep the values that save the most recomputation for their bytes.

    The first call of a function, for what its inputs look like, measures the FLOPs and the bytes of every
    operator whose result the backward reads, or needs to compute what it reads. The set that is kept is
    then the best that fits. The call keeps all of them while it runs; those that follow only what was
    chosen.

    Parameters
    ----------
    bytes : int
        How much each call may keep beside its inputs. Under `torch.func.vmap` the batched size counts.
    fraction : float
        The same as a part of all that the backward reads: 0 keeps nothing, 1 recomputes nothing.

    Returns
    -------
    Budget
        A policy, for `remat`.

    Raises
    ------
    OptionError
        Neither or both are given, or one is out of its range.

    Notes
    -----
    The sets considered are those of the Pareto frontier of bytes against FLOPs, found as Nemhauser and
    Ullmann (1969) find that of a knapsack: exact where what two values save adds up, and never worse than
    `dots_saveable`, `dots_with_no_batch_dims_saveable` and `everything_saveable` where these fit. More
    budget never means more FLOPs.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin().sum(), policy=policies.budget(fraction=0.5))
    >>> torch.func.grad(f)(torch.zeros(2, 2)).shape
    torch.Size([2, 2])
    """
    if (bytes is None) == (fraction is None):
        raise OptionError("budget takes bytes=... or fraction=..., one of the two.")
    if bytes is not None and bytes < 0:
        raise OptionError(f"budget: bytes={bytes} is less than nothing.")
    if fraction is not None and not 0 <= fraction <= 1:
        raise OptionError(f"budget: fraction={fraction} is not between 0 and 1.")
    return Budget(bytes, fraction)


class Budget(Chooser):
    """A policy that chooses among all values; see :func:`budget`."""

    def __init__(self, limit: int | None, fraction: float | None) -> None:
        self._limit = limit
        self._fraction = fraction
        # What was chosen for a function and what its inputs look like.
        self.plans: dict[Any, _Plan] = {}

    def __repr__(self) -> str:
        given = f"bytes={self._limit}" if self._fraction is None else f"fraction={self._fraction}"
        return f"budget({given})"

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        raise OptionError(
            f"{self!r} chooses when it has seen all operators, which only remat(f, policy=...) can wait for."
        )

    def for_call(self, signature: Any) -> Chooser:
        return _BudgetOfCall(self, signature)

    def limit(self, everything: int) -> int:
        if self._limit is not None:
            return self._limit
        assert self._fraction is not None
        return int(self._fraction * everything)


class _Plan(NamedTuple):
    """What is kept of a function: of which operators, with the bytes of their results."""

    kept: frozenset[Place]
    calls: dict[int, tuple[Any, dict[int, int]]]


class _BudgetOfCall(Chooser):
    def __init__(self, budget: Budget, signature: Any) -> None:
        self._budget = budget
        self._signature = signature
        self._plan = budget.plans.get(signature)

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        return None

    def wants(self, index: int, func: Any, sizes: dict[int, int]) -> bool:
        if self._plan is None:
            return True
        if index not in self._plan.calls:
            return False
        planned, planned_sizes = self._plan.calls[index]
        as_planned = planned is func and planned_sizes.items() <= sizes.items()
        if not as_planned:
            # Something else decides what f does (an argument that is no tensor): measure again next time.
            self._budget.plans.pop(self._signature, None)
        return as_planned

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        if self._plan is not None:
            return self._plan.kept
        frontier = Frontier(calls, read, [is_dot, is_product])
        chosen = frontier.best(self._budget.limit(frontier.everything))
        if len(self._budget.plans) >= _MANY:
            self._budget.plans.clear()
        planned = {index: (calls[index].func, calls[index].sizes) for index, _ in chosen}
        self._budget.plans[self._signature] = _Plan(chosen, planned)
        return chosen


_MANY = 1024
# So many sets are compared, and each of them with so many more values.
_SETS = 128
_VALUES = 64


def recomputed(
    calls: Sequence[Call], read: Set[Place], kept: Set[Place] = frozenset()
) -> tuple[set[Place], set[int]]:
    """Which of the kept values are of use to a backward that reads `read`, and which calls it runs again."""
    used: set[Place] = set()
    again: set[int] = set()
    pending = list(read)
    seen = set(pending)
    while pending:
        place = pending.pop()
        if place in kept:
            used.add(place)
        elif place[0] not in again:
            again.add(place[0])
            for other in calls[place[0]].needs:
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
    return used, again


class _Set(NamedTuple):
    """A set of values, the bytes they take, and what is left to be computed again."""

    bytes: int
    cost: tuple[int, int]
    places: frozenset[Place]


class Frontier:
    """The sets of values of which none is better both in bytes and in recomputation.

    Found value by value, after Nemhauser and Ullmann, "Discrete dynamic programming and capital
    allocation" (1969): a set that is worse than another in both is not pursued. That is exact where what
    values save adds up. What one saves may depend on another (if a product and its sine are kept, the
    product is of no use), so the recomputation of each set is counted, and not added up.

    Parameters
    ----------
    calls : sequence of Call
        The forward.
    read : frozenset of places
        What the backward reads.
    named : sequence of callables
        Kinds of operators; the set of the results of each is considered as well.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        read: frozenset[Place],
        named: Sequence[Callable[[Any], bool]] = (),
    ) -> None:
        self._calls = calls
        self._read = read
        _, again = recomputed(calls, read)
        # All that is computed again if nothing is kept, by call: its outputs that are asked for.
        asked: dict[int, set[Place]] = {call: set() for call in again}
        for place in {*read, *[p for call in again for p in calls[call].needs]}:
            asked.setdefault(place[0], set()).add(place)
        values = {
            call: frozenset(places)
            for call, places in asked.items()
            if all(i in calls[call].sizes for _, i in places)
        }
        everything = self._set(frozenset(p for p in read if p[1] in calls[p[0]].sizes))
        self.everything = everything.bytes
        found = [self._set(frozenset())]
        single = {call: self._set(places) for call, places in values.items() if places}
        nothing = found[0].cost
        # Those first that save most for a byte.
        order = sorted(
            single,
            key=lambda call: _saves(nothing, single[call].cost) / max(single[call].bytes, 1),
            reverse=True,
        )
        for call in order[:_VALUES]:
            found += [self._set(s.places | values[call]) for s in found]
            found = _best(found)
        fixed = [
            self._set(frozenset().union(*[values[c] for c in values if kind(calls[c].func)]))
            for kind in named
        ]
        self._sets = _pareto([*found, everything, *fixed])

    def _set(self, places: frozenset[Place]) -> _Set:
        used, again = recomputed(self._calls, self._read, places)
        size = sum(self._calls[call].sizes[i] for call, i in used)
        flops = sum(self._calls[call].flops for call in again)
        moved = sum(sum(self._calls[call].sizes.values()) for call in again)
        return _Set(size, (flops, moved), frozenset(used))

    def best(self, limit: int) -> frozenset[Place]:
        """The set with the least recomputation that takes no more than so many bytes."""
        return min([s for s in self._sets if s.bytes <= limit], key=lambda s: (s.cost, s.bytes)).places


def _saves(nothing: tuple[int, int], cost: tuple[int, int]) -> float:
    # A byte that is written costs about as much as some FLOPs.
    return nothing[0] - cost[0] + (nothing[1] - cost[1]) / 16


def _pareto(sets: Iterable[_Set]) -> list[_Set]:
    front: list[_Set] = []
    for s in sorted(sets, key=lambda s: (s.bytes, s.cost)):
        if not front or s.cost < front[-1].cost:
            front.append(s)
    return front


def _best(sets: Iterable[_Set]) -> list[_Set]:
    """The frontier; if it is long, sets all along it."""
    front = _pareto(sets)
    if len(front) <= _SETS:
        return front
    step = (len(front) - 1) / (_SETS - 1)
    return [front[round(i * step)] for i in range(_SETS)]
