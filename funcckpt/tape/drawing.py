"""Random numbers where no stream moves: in a graph that is being recorded.

What is traced by `make_fx` or `torch.compile` draws when the graph runs. A graph cannot say that two of its
operators draw the same numbers, so what the first run has drawn is kept as a value, and given to the
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch
from ..errors import CheckpointError
from .operators import kind_of_call, written


class Drawn(TorchDispatchMode):
    """What the random operators of a run have given, in their order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._results: list[_Result] = []

    @property
    def seen(self) -> bool:
        """Whether there were any."""
        return bool(self._results)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _draws(func, args, kwargs):
            targets = [x for x, _ in written(func, args, kwargs)]
            # By their values: the tensors may be written to.
            values, fresh = pytree.tree_map_only(
                Tensor, _torch.traced_value, (targets, None if _is_one_of(out, targets) else out)
            )
            self._results.append(_Result(func, values, fresh))
        return out

    def replayed(self) -> AbstractContextManager[Any]:
        """Random operators give the same again."""
        return _Replayed(self._name, self._results)


class _Result(NamedTuple):
    """What an operator has written, and what it has returned if that is something else."""

    func: Any
    written: list[Tensor]
    returned: Any


class _Replayed(TorchDispatchMode):
    def __init__(self, name: str, results: Sequence[_Result]) -> None:
        super().__init__()
        self._name = name
        self._results = iter(results)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        known = next(self._results, None)
        if known is None or known.func is not func:
            raise CheckpointError(
                f"remat({self._name}): the recomputation draws random numbers by {func}, and the forward did "
                f"by {'nothing' if known is None else known.func}. Draw them outside of the function, and "
                "pass them as arguments."
            )
        targets = [x for x, _ in written(func, args, kwargs)]
        for x, value in zip(targets, known.written, strict=True):
            x.copy_(_torch.of_traced_value(value))
        if known.returned is None:
            return targets[0]
        return pytree.tree_map_only(Tensor, _torch.of_traced_value, known.returned)


def _is_one_of(out: Any, targets: Sequence[Tensor]) -> bool:
    return any(out is x for x in targets)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in func.tags
        # Attention may say so and draw nothing.
        and kind_of_call(func, args, kwargs) != "pure"
    )
