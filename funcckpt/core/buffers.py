"""What f may update without being told so: running statistics, a count of batches.

They are read as of the call, and updated once: by the first run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import functorch, wrappers
from .program import Tensors
from .tensors import MAX_BUFFER, is_same, may_be_buffer, version_of


class Update(NamedTuple):
    """What a captured buffer was before the first run."""

    version: int | None
    before: Tensor


def before_updates(buffers: Iterable[Tensor]) -> dict[int, Update]:
    """Captured buffers as they are, by their ids."""
    return {
        id(x): Update(version_of(x), wrappers.physical(x.clone())[0])
        for x in buffers
        if not x.requires_grad and x.numel() <= MAX_BUFFER
    }


class GivenBuffers:
    """Inputs that may be buffers, such as `functional_call` is given.

    One of no level is updated by f itself. One of a level is updated through one more output, since f runs
    below all levels.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._originals = {i: x for i, x in enumerate(inputs) if may_be_buffer(x)}
        self._numbers = {*self._originals}
        self._at_levels = [i for i, x in self._originals.items() if wrappers.is_functorch_wrapped_tensor(x)]
        self._updated: set[int] = set()

    def __contains__(self, i: int) -> bool:
        return i in self._numbers

    def saved(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as the graph saves them: with the buffers of the call."""
        saved = [*inputs]
        for i in self._numbers:
            if i in self._at_levels:
                saved[i] = inputs[i].clone()
            else:
                with functorch.without_levels():
                    saved[i] = inputs[i].clone()
        return saved

    def of_first_run(self, inputs: Tensors) -> Tensors:
        """The inputs that f is given: it may update a buffer of no level itself."""
        given = [*inputs]
        for i in self._numbers:
            given[i] = inputs[i].clone() if i in self._at_levels else self._originals.pop(i)
        return tuple(given)

    def of_recomputation(self, inputs: Tensors) -> Tensors:
        return tuple([x.clone() if i in self._numbers else x for i, x in enumerate(inputs)])

    def note(self, inputs: Tensors, before: Tensors) -> None:
        """See which buffers of levels the first run has updated."""
        for i in self._at_levels:
            if inputs[i]._version or not is_same(inputs[i], wrappers.physical(before[i])[0]):
                self._updated.add(i)

    def outputs(self, inputs: Tensors) -> list[Tensor]:
        """What is returned beside the outputs of f."""
        return [inputs[i] for i in self._at_levels]

    def settle(self, outputs: Tensors) -> Tensors:
        """Update the buffers of levels, after the first run; the outputs of f alone."""
        count = len(outputs) - len(self._at_levels)
        for i, updated in zip(self._at_levels, outputs[count:], strict=True):
            if i in self._updated:
                with torch.no_grad():
                    self._originals[i].copy_(updated)
        self._originals.clear()
        return outputs[:count]
