"""`checkpoint_sequential`: a chain of functions in checkpointed segments, and where best to cut it.

With n layers that keep the same, √n segments keep about 2√n layers' worth instead of n, for one more
forward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). For layers
that differ, `plan_segments` measures each one and finds the cuts with the lowest peak of all.

Its model: while layer l of segment k goes backward, there are alive the inputs of segments 1 to k, what the
layers of k up to l keep, what the backward of l needs, and the gradients of all later layers' parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .. import world
from .._torch import wrappers
from ..closures import Found, Rebuilt
from ..core.program import is_differentiable
from ..errors import OptionError
from ..meter import Meter
from ..tape.operators import tensors_in
from .checkpoint import checkpoint

Functions = nn.Sequential | Sequence[Callable[[Any], Any]]


def checkpoint_sequential(
    functions: Functions,
    segments: int | Sequence[int] | None,
    input: Any,
    use_reentrant: bool | None = False,
    **options: Any,
) -> Any:
    """Run a chain of functions, each on the result of the one before, in checkpointed segments.

    All segments but the last, whose backward comes first, are recomputed.

    Parameters
    ----------
    functions : nn.Sequential or sequence of callables
        Each takes one argument: the result of the one before it, any nesting of tensors.
    segments : int, sequence of int, or None
        How many segments; or the number of functions of each, such as :func:`plan_segments` gives; or
        None, for the square root of the number of functions.
    input
        What the first function takes.
    use_reentrant, **options
        Those of :func:`checkpoint`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt import checkpoint_sequential
    >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(7)])
    >>> checkpoint_sequential(model, 3, torch.ones(2, 4)).shape     # 3, 2 and 2 layers
    torch.Size([2, 4])
    """
    layers: list[Callable[[Any], Any]] = list(functions)
    *recomputed, _ = _lengths(len(layers), segments)
    start = 0
    for length in recomputed:
        segment = chain(layers[start : start + length])
        input = checkpoint(use_reentrant=use_reentrant, **options)(segment)(input)
        start += length
    return chain(layers[start:])(input)


def chain(layers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One after the other, as one function."""

    def segment(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return segment


def _lengths(count: int, segments: int | Sequence[int] | None) -> list[int]:
    if segments is None:
        segments = max(1, round(math.sqrt(count)))
    if isinstance(segments, Sequence):
        lengths = list(segments)
    else:
        segments = operator.index(segments)  # an int, or one of numpy's
        # The longer ones first: towards the end there are more segment inputs alive.
        size, rest = divmod(count, max(segments, 1))
        lengths = [size + 1] * rest + [size] * (segments - rest)
    if sum(lengths) != count or (count and not all(isinstance(n, int) and n > 0 for n in lengths)):
        raise OptionError(
            f"checkpoint_sequential: {count} functions cannot be divided into segments of {lengths}."
        )
    return lengths


# -- where to cut -----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one layer costs, in bytes."""

    output: int  # the result, which is kept as such if a segment starts behind it
    kept: int  # between its forward and its backward, the result included if it is needed
    backward: int  # what its backward allocates beyond that, at most
    gradients: int  # of its parameters, alive from then on


def plan_segments(functions: Functions, input: Any, segments: int | None = None) -> list[int]:
    """Measure each layer, and find the segments with the lowest peak of live bytes.

    Layers are run one after the other, each with a backward of its own; random streams and buffers are left
    as they were, and no gradient is accumulated. Plan once, for the largest input.

    Parameters
    ----------
    functions, input
        As for :func:`checkpoint_sequential`. Parameters are those of the functions that are modules.
    segments : int or None
        How many; None for any number.

    Returns
    -------
    list of int
        The number of functions of each segment, for :func:`checkpoint_sequential`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt import plan_segments
    >>> wide = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
    >>> model = nn.Sequential(*[nn.Tanh() for _ in range(9)], wide)
    >>> plan_segments(model, torch.ones(32, 8))[-1]    # the wide one by itself
    1
    """
    layers: list[Callable[[Any], Any]] = list(functions)
    if not layers:
        return [0]
    if segments is not None:
        segments = len(_lengths(len(layers), segments))
    return best_segments(measure_layers(layers, input), segments)


def measure_layers(layers: Sequence[Callable[[Any], Any]], input: Any) -> list[Cost]:
    """The cost of each layer of a chain, in a forward and backward of its own."""
    costs: list[Cost] = []
    saved: set[Any] = set()
    # The layer that has made what the next one is given, and the bytes of that which nobody has saved so far.
    owner, unsaved = -1, 0

    def see(t: Tensor) -> Tensor:
        saved.add(wrappers.storage_of(t))
        return t.detach()

    streams = world.states(world.random_streams(()))
    with world.streams_at(streams), torch.enable_grad(), saved_tensors_hooks(see, lambda t: t):
        for i, layer in enumerate(layers):
            leaves = tensors_in(input)
            x = pytree.tree_map_only(Tensor, torch.clone, input)  # it may write to it
            given = {wrappers.storage_of(t) for t in tensors_in(x)}
            saved.clear()
            module = layer if isinstance(layer, nn.Module) else nn.Module()
            parameters = [p for p in module.parameters() if p.requires_grad]
            wrt = [t for t in leaves if t.requires_grad] + parameters
            # A copy of the layer updates copies of its buffers.
            copies = {id(b): b.clone() for b in module.buffers()}
            with Rebuilt(Found(layer), copies) as run, Meter() as meter:
                y = run(x)
                alive = meter.peak_bytes = meter.live_bytes
                roots = [t for t in tensors_in(y) if t.requires_grad]
                if roots and wrt:
                    torch.autograd.grad(roots, wrt, [torch.ones_like(t) for t in roots], allow_unused=True)
                backward = meter.peak_bytes - alive
            if not saved.isdisjoint(given) and owner >= 0:
                costs[owner] = costs[owner]._replace(kept=costs[owner].kept + unsaved)
                unsaved = 0
            sizes = {wrappers.storage_of(t): t.untyped_storage().nbytes() for t in tensors_in(y)}
            made = sizes.keys() - given
            rest = sum([sizes[key] for key in made - saved])
            gradients = sum([p.nbytes for p in parameters])
            costs.append(Cost(sum(sizes.values()), alive - rest, backward, gradients))
            if made:  # else it has handed on what it was given
                owner, unsaved = i, rest
            # Gradients flow through all layers but, maybe, the first.
            input = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(is_differentiable(t)), y)
            del x, y, roots, leaves, wrt
    return costs


def best_segments(costs: Sequence[Cost], segments: int | None = None) -> list[int]:
    """The lengths of the segments with the lowest peak, by the model above."""
    n = len(costs)
    # after[i]: the gradients of the parameters of all layers behind i.
    after = [*accumulate([c.gradients for c in reversed(costs[1:])], initial=0)][::-1]
    entry = [0, *[c.output for c in costs]]  # bytes of the input of a segment that starts at i
    # By the layer that comes first: the peak of all from there on, the bytes of all inputs, and the lengths.
    best: dict[int, tuple[int, int, list[int]]] = {n: (0, 0, [])}

    def with_segment_from(i: int) -> tuple[int, int, list[int]]:
        kept = inside = 0
        found = []
        for j in range(i + 1, n + 1):
            kept += costs[j - 1].kept
            inside = max(inside, kept + costs[j - 1].backward + after[j - 1])
            if j in best:
                peak, inputs, lengths = best[j]
                found.append((entry[i] + max(inside, peak), entry[i] + inputs, [j - i, *lengths]))
        return min(found)

    if segments is None:
        for i in reversed(range(n)):
            best[i] = with_segment_from(i)
    else:
        for _ in range(segments):
            best = {i: with_segment_from(i) for i in range(max(best))}
    return best[0][2]
