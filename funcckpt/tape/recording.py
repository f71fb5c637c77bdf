"""The first run of a function with a policy, and what it keeps.

`Record` writes a tape of the forward, and holds the values that the policy saves. At the end the graph shows
what the backward reads. A value is kept if it is read, or needed to compute a value that is read.

This is learned once for each function, policy, and shapes, strides, dtypes and devices of inputs. The next
run writes no tape, and keeps the values of the same calls. It sees only the operators that make them, without
a mode. If the run took another way, it keeps nothing, and the next one sees all operators. If that takes
another way, too, the policy is asked again in each run from then on.

Inside of a checkpoint by hooks nothing is kept: it counts what is saved, and another run may keep less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import world
from .._torch import autograd, functorch, wrappers
from ..policies.offload import Offloaded, is_far
from ..policies.policies import Chooser, current_name
from . import operators
from .operators import TensorMeta, kind_of, run_operator
from .tape import OpCall, Plans, Tape, Watch, Watchlist, copy_of, recomputed, steps_of


class Kept:
    """What a policy keeps of one run of f: which call made which tensor. The graph owns the tensors."""

    def __init__(self) -> None:
        # By number: the calls that need not run again.
        self.calls: dict[int, OpCall] = {}
        self.tensors: list[Tensor] = []
        # For each tensor: how to bring it back, if it was offloaded.
        self.places: list[Offloaded | None] = []
        # What later runs take over from this one, or this one from an earlier one: the same without values.
        self.learned: dict[int, OpCall] = {}
        # Whether the run was without a mode. Then so is a recomputation.
        self.without_mode = False

    def keep(self, call: OpCall, values: Mapping[int, Tensor]) -> None:
        """Keep results of a call, which need not run again."""
        self.calls[call.number] = call
        for i, x in values.items():
            away = Offloaded(x) if call.offloads and is_far(x) else None
            call.outputs[i] = len(self.tensors)
            self.tensors.append(x if away is None else away.host)
            self.places.append(away)

    def skip_less(self) -> None:
        """After a result was read that is neither kept nor computed again: later runs compute all these."""
        for number, call in [*self.learned.items()]:
            if not has_kept(call):
                del self.learned[number]


def has_kept(call: OpCall) -> bool:
    """Whether results of a call are kept."""
    return any([isinstance(slot, int) for slot in call.outputs.values()])


# What was kept of earlier runs: the calls that need not run again, the number at the end, and the operators
# whose results are kept, if it is enough to see these. None if runs with the same key took different ways.
_plans = Plans()
# Their results share memory, but have version counters of their own.
_aten = torch.ops.aten
_UNSAFE = (
    _aten._unsafe_view.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
)


class Record(Watch):
    """The mode of a first run. It keeps what the policy asks for, or what an earlier run has learned."""

    # The number at the end of that earlier run.
    _last: int | None = None
    # Whether this run is learned.
    _learns = False

    def __init__(self, program: Any, chooser: Chooser) -> None:
        super().__init__(program.source, Tape())
        self._chooser, self._kept = chooser, Kept()
        self._key: Any = (chooser.known, program.source.codes, *steps_of(program))

    def begin(self, inputs: Sequence[Tensor] = ()) -> None:
        super().begin()
        if self._chooser.known is None:
            return
        layers = [*map(wrappers.layers_of, inputs)]
        looks = [(operators.meta_of(of[-1]), *[x.requires_grad for x in of]) for of in layers]
        with suppress(TypeError):  # fake tensors may have sizes that are no numbers
            self._key = *self._key, hash(tuple(looks))  # there may be thousands of them
            self._learns = True
        if self._learns and (plan := _plans.get(self._key)) is not None:
            self.tape, (self.known, self._last, watchlist) = None, plan
            if watchlist is not None:
                self.watchlists = (watchlist,)
                self.leave_mode()

    def see(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = super().see(func, args, kwargs)
        if self.held and func in _UNSAFE:
            for x in operators.results(out):
                if x.untyped_storage()._cdata in self.storages:
                    self.held.append((x, x._version))
        return out

    def hand_out(self, call: OpCall, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of a known call, and hold those of its results that are kept."""
        before = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        streams = world.drawn_since(before)
        results = operators.results(out)
        kept = {i for i, slot in call.outputs.items() if isinstance(slot, int)}
        values = {i: x for i, x in enumerate(results) if i in kept and isinstance(x, Tensor)}
        # Torch gives what a factory makes (`randn`) a version counter of its own later, which is not seen.
        copies = self.without_mode and (
            operators.about(func).is_factory or call.number in self.watchlists[0].written
        )
        if copies:
            values = {i: copy_of(x) for i, x in values.items()}
        else:
            for x in values.values():
                self.hold(x)
            if not self.without_mode:  # below autograd, an alias would have a version counter of its own
                values = {i: autograd.alias(x) for i, x in values.items()}
        # What depends on values is that of this run: how many results there are, numbers, sizes.
        rest = [(i, x) for i, x in enumerate(results) if i not in values]
        metas = {i: TensorMeta.of(x) for i, x in rest if isinstance(x, Tensor) and operators.is_plain(x)}
        others = {i: x for i, x in rest if not isinstance(x, Tensor)}
        count = None if call.count is None else len(results)
        now = replace(call, count=count, outputs=metas, others=others, streams=streams, copies=copies)
        self._kept.keep(now, values)
        return out

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, OpCall | None]:
        out, call = super().call(tape, func, args, kwargs)
        if call is not None and kind_of(func) in ("pure", "custom", "random"):
            decision = self._chooser.decides(func, args, kwargs, out)
            for i in call.outputs if decision.keep else ():
                x = out if call.count is None else out[i]
                if not x.is_inference():  # which the graph refuses to save
                    with suppress(RuntimeError):  # of a wrapped number, which has no alias
                        call.values[i] = autograd.alias(x)
            call.offloads = decision.offload
        elif func is torch.ops.aten.alias.default and current_name() is not None:
            self._name_given(tape, func, args, kwargs, out)
        return out, call

    def note_write(self) -> None:
        self._last = None  # the run takes another way than the earlier one

    def _name_given(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        decision = self._chooser.decides(func, args, kwargs, out)
        if decision.forbid:
            for index, i in tape.made(args):
                tape.calls[index].values.pop(i, None)
        elif decision.keep:
            for call, i, x in tape.named(out):
                if i not in call.values:
                    call.values[i] = autograd.alias(x)
                call.offloads = decision.offload

    def note_graph(
        self, outputs: Sequence[Tensor], own: Collection[autograd.Edge] = (), first_node: int = 0
    ) -> None:
        """Find the values that the graph of the outputs, up to the edges in `own`, has saved."""
        self.count_nodes()
        if self.tape is None:
            return
        with functorch.no_dispatch(), autograd.plain():
            for node in autograd.nodes_of(outputs, own, first_node):
                saved = [x.data for x in autograd.saved_by(node)]
                for x in getattr(node, "__dict__", {}).values():  # `ctx.x = x`
                    with suppress(RecursionError):  # of a container in itself
                        saved += operators.tensors_in(x)
                for x in saved:
                    if isinstance(x, Tensor):
                        below = wrappers.everything_below(x)
                        inner = [z for y in below for z in operators.inner_tensors(y)]
                        self.tape.read |= self.tape.made([*below, *inner])

    def _with_copies(self) -> Watchlist | None:
        """The watchlist, with the calls to whose results f has written. None if it is no use to copy them.

        In plain autograd, `linear` of what is not contiguous adds the bias in place, but not in a mode.
        """
        written, calls = self.written(), self._kept.calls.items()
        at = [x.untyped_storage()._cdata in written for x in self._kept.tensors]
        numbers = {n for n, call in calls if any([at[i] for i in call.outputs.values() if type(i) is int])}
        watchlist = self.watchlists[0]
        return watchlist._replace(written=watchlist.written | numbers) if numbers else None

    def finish(self, outputs: Sequence[Tensor]) -> Kept | None:
        """What is kept of the run: of the chosen values, those that the backward reads or computes from."""
        kept, key = self._kept, self._key
        if self.tape is None:
            if self.without_mode:
                went_elsewhere = self.went_elsewhere() or len(kept.calls) < len(self.watchlists[0].numbers)
                if went_elsewhere or self.has_written():
                    _plans[key] = self.known, self._last, None if went_elsewhere else self._with_copies()
                    return None
                kept.without_mode, kept.calls = True, {**self.known, **kept.calls}
                kept.tensors = [*map(autograd.alias, kept.tensors)]
            elif kept.calls.keys() != self.known.keys() or self.number != self._last:
                _plans[key] = None
                return None
            kept.learned = cast("dict[int, OpCall]", self.known)
        else:
            calls = self.tape.calls
            # f may put a result into a tensor that it captured: `p.data = ...`.
            self.tape.read |= self.tape.made(map(wrappers.below_wrappers, self.source.constants))
            read = frozenset(self.tape.read.union(*[call.needs for call in calls if not call.may_skip]))
            self.tape = Tape()
            used, again = recomputed(calls, read, self._chooser.choose(calls, read))
            for index, call in enumerate(calls):
                values, call.values = {i: x for i, x in call.values.items() if (index, i) in used}, {}
                if index not in again and (values or call.may_skip):
                    kept.keep(call, values)
            if self._learns and key not in _plans:
                calls_with = {number: call for number, call in kept.calls.items() if has_kept(call)}
                watchlist = None
                if calls_with and not any([call.offloads for call in calls_with.values()]):
                    watchlist = self.watchlist_of(calls_with, *_UNSAFE)
                _plans[key] = kept.calls, self.number, watchlist
                kept.learned = kept.calls
        # The caller may write to an output.
        for away in filter(None, kept.places):
            away.is_about_to_be_written()
        # Its version counts that. (`matmul` may give the memory of a product another version counter.)
        given = {y.untyped_storage()._cdata: y for y in outputs if y.layout is torch.strided}
        with autograd.without_dispatch_modes():
            for i, x in enumerate(kept.tensors):
                y = given.get(x.untyped_storage()._cdata)
                if y is not None and y.dtype == x.dtype:
                    y = y.as_strided(x.size(), x.stride(), x.storage_offset())
                    y = y.conj() if y.is_conj() != x.is_conj() else y
                    y = torch._neg_view(y) if y.is_neg() != x.is_neg() else y
                    kept.tensors[i] = autograd.alias(y)
        return kept if kept.tensors else None
