"""Random numbers while a graph is traced, when no random stream moves.

A graph that `make_fx` or `torch.compile` traces draws its numbers when it runs. It cannot say that two of its
operators draw the same numbers. So the numbers of the first run are kept, and given to the recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import dynamo
from ..errors import CheckpointError
from .operators import draws, run_operator, written

_Result = tuple[Any, list[Tensor], Any]


class Drawn(TorchDispatchMode):
    """The results of the random operators of a run, in their order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        # For each: the operator, the values that it wrote to arguments, and its other results.
        self.results: list[_Result] = []
        self._again: Iterator[_Result] | None = None

    def replayed(self) -> Drawn:
        """The mode in which random operators give these results again."""
        self._again = iter(self.results)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return run_operator(func, args, kwargs)
        targets = written(func, args, kwargs)
        if self._again is None:
            out = func(*args, **kwargs)
            other = None if any([out is x for x in targets]) else out
            # Their values, since the tensors may be written to.
            values = pytree.tree_map_only(Tensor, dynamo.traced_value, (targets, other))
            self.results.append((func, *values))
            return out
        known, values, other = next(self._again, (None, [], None))
        if known is not func:
            raise CheckpointError(
                f"remat({self._name}): the recomputation draws random numbers by {func}, but the forward by "
                f"{known}. Draw them outside of the function, and pass them as arguments."
            )
        for x, value in zip(targets, values, strict=True):
            x.copy_(dynamo.of_traced_value(value))
        return targets[0] if other is None else pytree.tree_map_only(Tensor, dynamo.of_traced_value, other)
