"""Which values to keep, for a budget of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.utils.checkpoint import CheckpointPolicy

from ..errors import OptionError
from ..tape.tape import Call, Place, recomputed
from .policies import Chooser, Decision, is_dot, is_product


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

    Notes
    -----
    Never worse than `dots_saveable`, `dots_with_no_batch_dims_saveable` and `everything_saveable` where these
    fit. More budget never means more FLOPs.

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
        # By function and looks of its inputs: the outputs that were chosen, by the number of the call.
        self.plans: dict[Any, dict[int, list[int]]] = {}

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
        return int((self._fraction or 0) * everything) if self._limit is None else self._limit


class _BudgetOfCall(Chooser):
    def __init__(self, budget: Budget, signature: Any) -> None:
        self._budget = budget
        self._signature = signature
        self._plan = budget.plans.get(signature)

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        return None

    def wants(self, call: Call) -> bool:
        return self._plan is None or call.number in self._plan

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        plans, plan = self._budget.plans, self._plan
        if plan is not None:
            found = {index: call.number for index, call in enumerate(calls) if call.number in plan}
            if len(found) < len(plan):
                # Something else decides what f does (an argument that is no tensor): measure again next time.
                plans.pop(self._signature, None)
            return frozenset([(index, i) for index, number in found.items() for i in plan[number]])
        sets, everything = frontier(calls, read)
        limit = self._budget.limit(everything)
        chosen = min([s for s in sets if s.bytes <= limit], key=lambda s: (s.cost, s.bytes)).places
        if len(plans) >= _MANY:
            plans.clear()
        plan = plans[self._signature] = {}
        for index, i in chosen:
            plan.setdefault(calls[index].number, []).append(i)
        return chosen


_MANY = 1024
# So many sets are compared, and each of them with so many more values.
_SETS = 128
_VALUES = 64


class _Set(NamedTuple):
    """A set of values, the bytes they take, and what is left to be computed again."""

    bytes: int
    cost: tuple[int, int]
    places: frozenset[Place]


def frontier(calls: Sequence[Call], read: frozenset[Place]) -> tuple[list[_Set], int]:
    """The sets of values of which none is better both in bytes and in recomputation, and the bytes of all.

    Found value by value, after Nemhauser and Ullmann, "Discrete dynamic programming and capital
    allocation" (1969): a set that is worse than another in both is not pursued. That is exact where what
    values save adds up. What one saves may depend on another (if a product and its sine are kept, the
    product is of no use), so the recomputation of each set is counted, and not added up.
    """

    def of(places: Iterable[Place]) -> _Set:
        used, again = recomputed(calls, read, frozenset(places))
        size = sum([calls[call].outputs[i].nbytes for call, i in used])
        flops = sum([calls[call].flops for call in again])
        moved = sum([calls[call].outputs[i].nbytes for call in again for i in calls[call].values])
        return _Set(size, (flops, moved), frozenset(used))

    nothing = of(())
    everything = of([(call, i) for call, i in read if i in calls[call].values])
    # What is computed again if nothing is kept, by call: its outputs that are asked for.
    asked: dict[int, set[Place]] = defaultdict(set)
    for place in read.union(*[calls[call].needs for call in recomputed(calls, read)[1]]):
        asked[place[0]].add(place)
    values = {call: p for call, p in asked.items() if all(i in calls[call].values for _, i in p)}

    def worth(call: int) -> float:
        # What is saved for a byte. A byte that is written costs about as much as some FLOPs.
        size, cost, _ = of(values[call])
        return (nothing.cost[0] - cost[0] + (nothing.cost[1] - cost[1]) / 16) / max(size, 1)

    found = [nothing]
    for call in sorted(values, key=worth, reverse=True)[:_VALUES]:
        found = _thinned(_pareto([*found, *[of(s.places | values[call]) for s in found]]))
    for kind in (is_dot, is_product):
        found.append(of([place for call, p in values.items() if kind(calls[call].func) for place in p]))
    return _pareto([*found, everything]), everything.bytes


def _pareto(sets: Iterable[_Set]) -> list[_Set]:
    front: list[_Set] = []
    for s in sorted(sets, key=lambda s: (s.bytes, s.cost)):
        if not front or s.cost < front[-1].cost:
            front.append(s)
    return front


def _thinned(front: list[_Set]) -> list[_Set]:
    """Sets all along a frontier, if it is long."""
    step = max((len(front) - 1) / (_SETS - 1), 1)
    return [front[round(i * step)] for i in range(min(len(front), _SETS))]
