"""Which values to keep, for a budget of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from ..errors import OptionError, check_positive
from ..tape.operators import name_of
from ..tape.tape import OpCall, Place, recomputed
from .policies import Chooser, Decision, is_dot, is_product

T = TypeVar("T")


def budget(*, bytes: int | None = None, fraction: float | None = None) -> Budget:
    """Keep the values that save the most recomputation for their bytes.

    The first call of a function with inputs of some shapes measures all operators, and chooses the best set
    that fits. It keeps all values while it runs. Later calls keep only the chosen ones.

    Parameters
    ----------
    bytes : int
        The bytes that each call may keep beside its inputs. Under `torch.func.vmap` the batched size counts.
    fraction : float
        The same, as a fraction of all that the backward reads: 0 keeps nothing, 1 all.

    Notes
    -----
    It recomputes no more than `dots_saveable`, `dots_with_no_batch_dims_saveable` and `everything_saveable`
    where these fit. A larger budget never recomputes more FLOPs.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin().sum(), policy=policies.budget(fraction=0.5))
    """
    if (bytes is None) == (fraction is None):
        raise OptionError("budget takes either bytes=... or fraction=..., and needs one.")
    check_positive("budget", Real, or_none=True, or_zero=True, bytes=bytes)
    if fraction is not None and not (isinstance(fraction, Real) and 0 <= fraction <= 1):
        raise OptionError(f"budget: fraction={fraction!r} is not between 0 and 1.")
    return Budget(bytes, fraction)


class Budget(Chooser):
    """A policy that chooses among all values; see :func:`budget`."""

    def __init__(self, limit: int | None, fraction: float | None) -> None:
        self._limit = limit
        self._fraction = fraction

    def __repr__(self) -> str:
        given = f"bytes={self._limit}" if self._fraction is None else f"fraction={self._fraction}"
        return f"budget({given})"

    @property
    def known(self) -> Any:
        return Budget, self._limit, self._fraction

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        return Decision(name_of(func) != "alias")  # of a name

    def choose(self, calls: Sequence[OpCall], read: frozenset[Place]) -> frozenset[Place]:
        sets, everything = _frontier(calls, read)
        limit = int((self._fraction or 0) * everything) if self._limit is None else self._limit
        return [s for s in sets if s.bytes <= limit][-1].places


# The most sets that are compared at a time, and the most values that are tried.
_SETS = 128
_VALUES = 64


class _Set(NamedTuple):
    """A set of values, their bytes, and the cost of recomputing the rest (FLOPs, and bytes written)."""

    bytes: int
    cost: tuple[int, int]
    places: frozenset[Place]


def _frontier(calls: Sequence[OpCall], read: frozenset[Place]) -> tuple[list[_Set], int]:
    """The Pareto front of sets of values (bytes against recomputation), and the bytes of all values.

    Sets grow value by value, as in Nemhauser and Ullmann, "Discrete dynamic programming and capital
    allocation" (1969): a set that is worse than another in both respects is dropped. What a value saves may
    depend on others, so the recomputation of each set is counted, not added up from its values.
    """

    written = [sum([call.outputs[i].nbytes for i in call.values]) for call in calls]

    def of(places: Iterable[Place]) -> _Set:
        used, again = recomputed(calls, read, frozenset(places))
        size = sum([calls[call].outputs[i].nbytes for call, i in used])
        cost = sum([calls[call].flops for call in again]), sum([written[call] for call in again])
        return _Set(size, cost, frozenset(used))

    nothing = of(())
    everything = of([(index, i) for index, call in enumerate(calls) for i in call.values])
    # For each call that is recomputed if nothing is kept: those of its outputs that are needed.
    asked: dict[int, set[Place]] = defaultdict(set)
    for place in read.union(*[calls[call].needs for call in recomputed(calls, read)[1]]):
        asked[place[0]].add(place)
    values = {call: p for call, p in asked.items() if all(i in calls[call].values for _, i in p)}

    def worth(call: int) -> float:
        # The recomputation saved for each byte. To write 16 bytes is taken to cost as much as one FLOP.
        size, cost, _ = of(values[call])
        return (nothing.cost[0] - cost[0] + (nothing.cost[1] - cost[1]) / 16) / max(size, 1)

    found = [nothing]
    for call in sorted(values, key=worth, reverse=True)[:_VALUES]:
        front = pareto([*found, *[of(s.places | values[call]) for s in found]], itemgetter(0, 1))
        step = max((len(front) - 1) / (_SETS - 1), 1)
        found = [front[round(i * step)] for i in range(min(len(front), _SETS))]
    for kind in (is_dot, is_product):
        found.append(of([place for call, p in values.items() if kind(calls[call].func) for place in p]))
    return pareto([*found, everything], itemgetter(0, 1)), everything.bytes


def pareto(items: Iterable[T], costs: Callable[[T], tuple[Any, Any]]) -> list[T]:
    """The items on the Pareto front of two costs: no other is better in one and as good in the other."""
    front: list[T] = []
    for item in sorted(items, key=costs):
        if not front or costs(item)[1] < costs(front[-1])[1]:
            front.append(item)
    return front
