"""The first run of a function with a policy: what is kept of it.

`Record` writes a tape of the forward, and holds the values that the policy says to save. At the end the graph
shows what the backward reads; of what is held, that is kept which is read, or needed to compute what is read.

That is learned once for a function, a policy and inputs that look alike: the next run writes no tape, and
keeps what has the same numbers. Where it turns out to have gone another way, it keeps nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import world
from .._torch import autograd, functorch, wrappers
from ..policies.offload import Offloaded, is_far
from ..policies.policies import Chooser, current_name
from . import operators
from .operators import kind_of, results, run_operator, signature
from .tape import Call, Plans, Tape, Watch, recomputed, steps_of


class Kept:
    """What a policy keeps of one run of f: the tensors belong to the graph, this says which is which."""

    def __init__(self) -> None:
        # The calls that are not run again, by their numbers.
        self.calls: dict[int, Call] = {}
        self.tensors: list[Tensor] = []
        # For each of them where it was, if it was moved elsewhere.
        self.places: list[Offloaded | None] = []

    def keep(self, call: Call, values: Mapping[int, Tensor]) -> None:
        """Keep results of a call, which is not run again."""
        self.calls[call.number] = call
        for i, x in values.items():
            away = Offloaded(x) if call.offloads and is_far(x) else None
            call.outputs[i] = len(self.tensors)
            self.tensors.append(x if away is None else away.host)
            self.places.append(away)


# What was kept of earlier runs: the calls that are not run again, and the number at the end. None where runs
# that look alike have gone different ways.
_plans = Plans()


class Record(Watch):
    """Holds what the policy says to keep: by a tape of the forward, or as was learned from one."""

    # The number at the end of the run from which was learned.
    _last: int | None = None

    def __init__(self, program: Any, chooser: Chooser) -> None:
        super().__init__(program.source, Tape())
        self._chooser, self._kept = chooser, Kept()
        # Of what is held without a tape: numbers do not tell which tensors an operator has written to.
        self._storages: set[int] = set()
        self._key: Any = (chooser.known, program.source.codes, *steps_of(program))

    def begin(self, inputs: Sequence[Tensor] = ()) -> None:
        super().begin()
        looks = [(wrappers.below_wrappers(x).shape, x.dtype, x.requires_grad) for x in inputs]
        self._key = *self._key, *looks
        if self._chooser.known is not None and (plan := _plans.get(self._key)) is not None:
            self.tape, (self.known, self._last) = None, plan

    def hand_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that is known, and hold what is to be kept of it."""
        call = self.known[self.number]
        if call.signature != signature(func, args, kwargs):
            return None
        before = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        streams = before, world.states_drawn_from(func, args, kwargs)
        slots = [i for i, slot in call.outputs.items() if isinstance(slot, int)]
        values = {i: autograd.alias(out if call.count is None else out[i]) for i in slots}
        self._storages |= {x.untyped_storage()._cdata for x in values.values()}
        self._kept.keep(replace(call, outputs={**call.outputs}, streams=streams), values)
        return out

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        out, call = super().call(tape, func, args, kwargs)
        if call is not None and kind_of(func) in ("pure", "custom", "random"):
            decision = self._chooser.decides(func, args, kwargs, out)
            if decision.keep:
                self._hold(call, out)
            call.offloads = decision.offload
        elif func is torch.ops.aten.alias.default and current_name() is not None:
            self._name_given(tape, func, args, kwargs, out)
        return out, call

    def note_write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        written = [x for x in operators.written(func, args, kwargs) if x.layout is torch.strided]
        if not self._storages.isdisjoint([x.untyped_storage()._cdata for x in written]):
            self._last = None  # another way than was learned

    def _hold(self, call: Call, out: Any) -> None:
        for i in call.outputs:
            x = out if call.count is None else out[i]
            try:
                call.values[i] = autograd.alias(x)
            except RuntimeError:
                if x.dim() > 0:
                    raise  # not a number that only looks like a tensor

    def _name_given(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        decision = self._chooser.decides(func, args, kwargs, out)
        for index, i in tape.made(args):
            call = tape.calls[index]
            meta = call.outputs.get(i)
            if decision.forbid:
                call.values.pop(i, None)
            elif decision.keep and meta is not None and meta.dtype == out.dtype:
                if i not in call.values:
                    call.values[i] = autograd.alias(out.as_strided(meta.size, meta.strides, meta.offset))
                call.offloads = decision.offload

    def note_graph(self, outputs: Sequence[Tensor], first_node: int = 0) -> None:
        """See which values the graph of the outputs has saved."""
        if self.tape is None:
            return
        with functorch.no_dispatch():
            for x in _saved(outputs, first_node):
                self.tape.read |= self.tape.made(wrappers.everything_below(x))

    def finish(self) -> Kept | None:
        """What is kept of the run: of what was chosen, that which the backward reads or computes from."""
        kept, key = self._kept, self._key
        if self.tape is None:
            if kept.calls.keys() != self.known.keys() or self.number != self._last:
                _plans[key] = None
                return None
        else:
            calls, read = self.tape.calls, frozenset(self.tape.read)
            self.tape = Tape()
            used, again = recomputed(calls, read, self._chooser.choose(calls, read))
            for index, call in enumerate(calls):
                values, call.values = {i: x for i, x in call.values.items() if (index, i) in used}, {}
                if index not in again and (values or call.may_skip):
                    kept.keep(call, values)
            if self._chooser.known is not None and key not in _plans:
                _plans[key] = kept.calls, self.number
        for away in filter(None, kept.places):
            away.is_about_to_be_written()  # by the caller, if it is an output
        return kept if kept.tensors else None


@functools.cache
def _fields(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _saved(outputs: Sequence[Tensor], first_node: int) -> Iterator[Tensor]:
    """The tensors that the graph of some tensors has saved."""
    for node in autograd.nodes_of(outputs, first_node):
        kind: Any = type(node)
        for name in _fields(kind):
            for saved in results(getattr(node, name)):
                if isinstance(saved.data, Tensor):
                    yield saved.data
