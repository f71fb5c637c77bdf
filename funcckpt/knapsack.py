"""Which values to keep, for a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .recording import Call, Place, recomputed

# So many sets are compared, and each of them with so many more values.
_SETS = 128
_VALUES = 64


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
        _, again = recomputed(calls, read, set())
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
