"""The first run of a program, under a net.

A program runs with all functorch levels moved into it. If f uses a tensor of such a level that is not an
input, the tensor would be a constant: a wrong gradient, without an error. So in the first run the levels of
the caller are put back below the program as shadows, over inputs that belong to none of them. If an output
belongs to a shadow, a captured tensor was missed, which is an error.

Captured tensors of plain autograd need no shadow: the graph of the first run leads to them. Only those at
which this graph begins are inputs of R. A parameter that `functional_call` has replaced is not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from .._torch import autograd, dynamo, functorch, wrappers
from ..errors import CheckpointError, ClosureError, describe
from ..tape import recompute, recording
from .program import Program, Recording, UserProgram, here
from .tensors import Tensors, changed_inside, versions_of


def run(program: Program, inputs: Sequence[Tensor], records: bool = False) -> Tensors:
    """Run a program after the first run of its function. Nothing is recorded, unless `records`."""
    if autograd.top_saved_tensors_hooks() is not None:
        # The hooks of the caller need not see what is dropped at the end. They would take tensors out of
        # their levels, and transforms inside of f refuse them.
        with autograd.hooks_asleep():
            return run(program, inputs, records)
    try:
        if records or not torch.is_grad_enabled():
            return recompute.run(program, inputs)
        with torch.no_grad():
            return recompute.run(program, inputs)
    except RuntimeError as error:
        if functorch.ASSERTS not in str(error):
            raise
        if program.source.has_pullbacks:
            raise not_given(program.source, "of a level that is over") from error
        raise CheckpointError(
            f"remat({program.source.name}): torch fails in the recomputation, as it does with tensors of a "
            "transform that is over. Store none of those outside of the function. And if the backward of an "
            "autograd.Function in it calls torch.func.vjp, give that views of what is saved: x.view_as(x)."
        ) from error


def run_first(
    program: Program, source: UserProgram, inputs: Sequence[Tensor], layers: list[functorch.Layer]
) -> tuple[Tensors, Sequence[bool], Sequence[Tensor]]:
    """Run a program for the first time, with no level active.

    Gives the outputs; for each whether it depends on an input that requires grad in plain autograd, or on a
    captured tensor; and those captured tensors. The source learns which captured inputs no output depends on.
    """
    if (hooks := autograd.top_saved_tensors_hooks()) is not None:  # as in `run`
        # A checkpoint counts what is saved, and another run may keep something else. A scope keeps nothing.
        if autograd.is_checkpoint(hooks) or getattr(hooks[0], "keeps_nothing", False):
            source.chooser = None
        with autograd.hooks_asleep():
            return run_first(program, source, inputs, layers)
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    versions = versions_of(inputs)
    differentiated = (*compress(range(len(inputs)), map(wrappers.require_grad, inputs)),)
    given: list[Tensor] = [*inputs]
    if source.is_compiled and differentiated:
        program = Recording(program, program.call_level, differentiated)
    own: dict[autograd.Edge, int] = {}
    detach = wrappers.how_to_detach(inputs)
    for i in differentiated:
        x = given[i] = detach(inputs[i])
        if records and not source.is_compiled:
            wrappers.requires_grad_(x)
        own[(id(x), autograd.LEAF) if x.grad_fn is None else autograd.edge_of(x)] = i
    first_node = functorch.next_sequence_number()
    record: recording.Record | None = None
    # Compiled code does not run in a dispatch mode, and Dynamo would never again compile it.
    if source.chooser is not None and not (source.calls_compiled or dynamo.is_traced()):
        if records or "grad" in map(functorch.kind_of_layer, layers):
            record = recording.Record(program, source.chooser)
    shadows = functorch.shadows(layers) if layers else nullcontext(False)
    with shadows as is_replaced, record or nullcontext():
        source.replaces_levels = is_replaced
        try:
            outputs = program.run(*given)
        except RuntimeError as error:
            if not (is_replaced and any([words in str(error) for words in functorch.ESCAPED])):
                raise
            raise not_given(source, "that belongs to an outer vmap") from error
        if layers:
            outputs = (*map(_below_shadows, outputs, repeat(layers), repeat(source)),)
        if record is not None:
            older = {*own, *source.history()}
            record.note_graph(outputs, older, 0 if functorch.uses_accelerator() else first_node)
    if isinstance(program, Recording) and source.is_compiled:
        return outputs, program.active, ()
    active = [*map(wrappers.require_grad, outputs)]
    captured: Sequence[Tensor] = ()
    reached: set[int] = set()
    if (layers or any(active)) and versions != (now := versions_of(inputs)):
        i = [*map(operator.ne, versions, now)].index(True)
        raise changed_inside(f"remat({source.name})", inputs[i], source.where(i))
    if any(active):
        captured, reached = _look_at_graph(source, outputs, own, first_node)
        outputs = (*map(wrappers.how_to_detach(outputs), outputs),)
    if records and len(inputs) > source.arity:
        # Those after `count` are tangents. Arguments do not count, which an autograd.Function may use in its
        # backward alone.
        source.unused = [i for i in differentiated if source.arity <= i < source.count and i not in reached]
    if record is not None:
        with torch.no_grad():
            source.kept = record.finish([*map(wrappers.below_wrappers, outputs)])
    return outputs, active, captured


def _look_at_graph(
    source: UserProgram, outputs: Tensors, own: dict[autograd.Edge, int], first_node: int
) -> tuple[Sequence[Tensor], set[int]]:
    """The captured tensors, and the numbers of the inputs, at which the graph of the outputs begins."""
    # An accelerator may have been used for the first time in f.
    doubtful: list[Any] | None = [] if functorch.uses_accelerator() else None
    edges = autograd.entering(outputs, {*own, *source.history()}, first_node, doubtful)
    if doubtful:
        source.doubt(doubtful)
    reached = own.keys() & edges
    for edge in reached:
        del edges[edge]
    captured = source.captured_at(edges) if edges else ()
    if functorch.next_sequence_number() - first_node > autograd.MANY_NODES:
        here.hold([*autograd.nodes_of(outputs, first_node=first_node)])
    return captured, {*map(own.__getitem__, reached)}


def _below_shadows(y: Tensor, layers: Sequence[functorch.Layer], source: UserProgram) -> Tensor:
    # A tensor that is_grads_batched has batched supports few operators, and has no tangent.
    is_legacy = wrappers.is_legacy_batchedtensor(wrappers.below_wrappers(y))
    while layers:
        level, (*layers, layer) = len(layers), layers
        if layer.kind == "vmap":
            y, dim = functorch._unwrap_batched(y, level)
            captured = dim is not None
        else:
            is_dual = layer.kind == "jvp" and not is_legacy and wrappers.tangent_of(y) is not None
            # (A tangent of an outer level, which f has handed on, requires grad there.)
            is_of_level = layer.kind != "jvp" and wrappers.maybe_get_level(y) == level
            captured = is_dual or (is_of_level and y.requires_grad)
        y = wrappers._unwrap_for_grad(y, level)
        if captured:
            depends = f": an output ({describe(y)}) depends on it"
            raise not_given(source, f"that belongs to {layer.kind} at level {level}", depends)
        if "jvp" in map(functorch.kind_of_layer, layers):  # tangents are seen only from their own level
            interpreter = functorch.peek_interpreter_stack()
            assert interpreter is not None
            return functorch.below(interpreter, _below_shadows, y, layers, source)
    return y


# The key in the metadata of a graph node.
MARK = "funcckpt"


class Replaced:
    """What a recomputation replaces, and must not find all the same.

    Made before the run. The leaves are by id, with a description each; the results are edges. With a mark,
    the graph nodes that have it are looked for, too: f makes its own nodes anew.
    """

    def __init__(
        self,
        source: UserProgram,
        given: Sequence[Tensor],
        leaves: dict[int, str],
        results: set[autograd.Edge],
        mark: object,
    ) -> None:
        """`given` are the tensors that the run gets instead."""
        self._source, self._leaves, self._results, self._mark = source, leaves, results, mark
        self._began = functorch.next_sequence_number()
        self._own = autograd.edges_of(map(wrappers.below_wrappers, given))

    def check(self, outputs: Sequence[Tensor]) -> None:
        """Raise if the graph of the outputs leads to any of it."""
        values, own = [*map(wrappers.below_wrappers, outputs)], self._own
        first_node = 0 if functorch.uses_accelerator() else self._began
        for edge in autograd.entering(values, own | self._results, first_node):
            # A leaf that f makes itself is now another one.
            if edge[0] in self._leaves:
                raise not_given(self._source, f"that requires grad ({self._leaves[edge[0]]})")
            if edge in self._results - own:
                raise not_given(self._source, f"that requires grad ({result_of(*edge)})")
        are_many = functorch.next_sequence_number() - self._began > autograd.MANY_NODES
        nodes = [*autograd.nodes_of(values, own, first_node)] if are_many or self._mark else []
        for node in nodes if self._mark else ():
            if node.metadata.get(MARK) is self._mark:
                raise not_given(self._source, f"that requires grad ({result_of(node, 0)})")
        here.hold(nodes)


def result_of(node: Any, number: int) -> str:
    """A result of a graph node, in words."""
    return f"{describe(node._input_metadata[number])}, a result of {node.name()}"


def not_given(source: UserProgram, what: str, then: str = "") -> ClosureError:
    way = "Call torch.func.vjp inside of the function" if source.has_pullbacks else "Pass it as an argument"
    return ClosureError(
        f"remat({source.name}) uses a tensor {what}, which is not an argument (or in a list, tuple or dict "
        f"that is one), and which the search for captured tensors did not find{then}. {way}."
    )
