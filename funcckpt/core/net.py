"""The first run of a program, under a net.

A program runs with all functorch levels moved into it. A tensor that f uses without having been given it, and
that belongs to one of those levels, would there be a constant: a wrong gradient with no error. So in the
first run the levels of the caller are put back below it as shadows, over inputs that belong to none of them.
If an output then belongs to one, a captured tensor was missed: an error.

What f has captured of plain autograd needs no shadow: the graph that the first run leaves behind leads there.
The edges at which it enters are inputs of R, and all others are none: a parameter that `functional_call` has
replaced, for one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import autograd, functorch, wrappers
from ..errors import ClosureError, describe
from ..tape import recompute
from .program import Leaf, Program, Recording, Tensors
from .tensors import versions_of

_HOW = {
    "grad": "that is being differentiated",
    "vmap": "that is batched",
    "jvp": "that has a tangent",
}


class Run(NamedTuple):
    """What the first run of a program gave.

    `active` says for each output whether it depends on an input that requires grad in plain autograd, or on
    one of `captured`; `reached`, which inputs do so.
    """

    outputs: Tensors
    active: Sequence[bool] = ()
    captured: Sequence[Tensor] = ()
    reached: Collection[int] = ()


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program whose function has run before, and record nothing."""
    if not torch.is_grad_enabled():
        return recompute.run(program, inputs)
    functorch.set_grad_enabled(False)
    try:
        return recompute.run(program, inputs)
    finally:
        functorch.set_grad_enabled(True)


def run_in_function(program: Program, inputs: Sequence[Tensor]) -> tuple[Tensors, Sequence[bool] | None]:
    """Run a program inside of an autograd.Function; in its first run, which outputs depend on an input that
    requires grad.
    """
    layers = program.source.take_layers()
    if layers is None:
        return run(program, inputs), None
    with functorch.recording():
        outputs, active, captured, reached = run_first(program, program.source, inputs, layers)
    if captured:
        raise _captured(program.source, captured[0], "that requires grad")
    source = program.source
    source.unused = [
        i for i, x in enumerate(inputs) if i >= source.arity and x.requires_grad and i not in reached
    ]
    return outputs, active


def run_first(program: Program, source: Leaf, inputs: Sequence[Tensor], layers: list[functorch.Layer]) -> Run:
    """Run a program for the first time, with no level active."""
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    versions = versions_of(inputs)
    differentiated = (*compress(range(len(inputs)), map(wrappers.require_grad, inputs)),)
    given: list[Tensor] = [*inputs]
    if source.is_compiled and differentiated:
        program = Recording(program, differentiated)
    own: dict[Edge, int] = {}
    detach = wrappers.how_to_detach(inputs)
    for i in differentiated:
        x = given[i] = detach(inputs[i])
        if records and not source.is_compiled:
            x.requires_grad_()
        own[(id(x), LEAF) if x.grad_fn is None else (x.grad_fn, x.output_nr)] = i
        del x
    first_node = functorch.next_sequence_number()
    record = source.recorder() if records or functorch.any_grad(layers) else None
    if record is None and not layers:
        outputs = program.run(*given)
    else:
        with (
            functorch.shadows(layers) as levels,
            _NOWHERE if record is None or layers else autograd.hooks_asleep(),
            record or _NOWHERE,
        ):
            outputs = program.run(*given)
            if layers:
                outputs = _below_shadows(outputs, layers, levels, source)
            elif record is not None:
                record.note_graph(outputs, first_node)
    if wrappers.has_dual_level():
        for y in outputs:
            if wrappers.tangent_of(y) is not None:
                raise _captured(source, y, "that is dual")
    if isinstance(program, Recording) and source.is_compiled:
        return Run(outputs, program.active, (), differentiated)
    active = [*map(wrappers.require_grad, outputs)]
    if not any(active):
        if layers and versions != versions_of(inputs):
            source.check_versions(versions, inputs)
        if record is not None:
            source.finish(record)
        return Run(outputs, active)
    if versions != versions_of(inputs):
        source.check_versions(versions, inputs)
    reached: set[int] = set()
    others: list[Edge] = []
    for edge in entering(outputs, own, first_node):
        if edge in own:
            reached.add(own[edge])
        else:
            others.append(edge)
    captured = source.captured_at(others, outputs) if others else ()
    del given, others
    own.clear()
    outputs = (*map(wrappers.how_to_detach(outputs), outputs),)
    if record is not None:
        source.finish(record)
    return Run(outputs, active, captured, reached)


_NOWHERE = nullcontext()


def _below_shadows(
    outputs: Tensors, layers: Sequence[functorch.Layer], levels: Sequence[int], source: Leaf
) -> Tensors:
    found = []
    for y in outputs:
        if wrappers.is_legacy_batchedtensor(wrappers.below_wrappers(y)):
            found.append(wrappers.unwrapped_at(y, levels))  # it has hardly any operators, least of all these
            continue
        for layer, level in zip(reversed(layers), reversed(levels), strict=True):
            if layer.kind == "vmap":
                y, dim = functorch._unwrap_batched(y, level)
                captured = dim is not None
            else:
                captured = wrappers.tangent_of(y) is not None if layer.kind == "jvp" else y.requires_grad
                y = wrappers._unwrap_for_grad(y, level)
            if captured:
                raise _captured(source, y, f"{_HOW[layer.kind]} by {layer.kind} at level {level}")
        found.append(y)
    return (*found,)


def _captured(source: Leaf, y: Tensor, how: str) -> ClosureError:
    return ClosureError(
        f"remat({source.name}) uses a tensor {how} and that it was not given, in a way that could not "
        f"be traced: an output ({describe(y)}) depends on it. Pass it as an argument."
    )


# -- the graph of plain autograd --------------------------------------------------------------------------

# A place in the graph: a node and the number of one of its outputs, or the id of a leaf and _LEAF.
Edge = tuple[Any, int]
LEAF = -1
# The number of the nodes that accumulate in a leaf, whenever they were made.
_LAST = (1 << 64) - 1


def entering(outputs: Sequence[Tensor], own: Collection[Edge], first_node: int) -> list[Edge]:
    """The edges at which the graph of some tensors begins: own ones, leaves, and results of older nodes."""
    found: dict[Edge, None] = {}
    pending: list[Edge] = []
    for y in outputs:
        if y.grad_fn is not None:
            pending.append((y.grad_fn, y.output_nr))
        elif y.requires_grad:
            found[id(y), LEAF] = None
    seen = set()
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node is None or node in seen:
            continue
        order = node._sequence_nr()
        if order < first_node or edge in own:
            found[edge] = None
            continue
        seen.add(node)
        # Other nodes may have an attribute `variable`.
        if order == _LAST and node.name() == "torch::autograd::AccumulateGrad":
            found[id(node.variable), LEAF] = None
        else:
            pending.extend(node.next_functions)
    return list(found)
