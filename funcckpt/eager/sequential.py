"""`checkpoint_sequential`: a chain of functions in checkpointed segments, and where best to cut it.

With n layers that keep the same, √n segments keep about 2√n layers' worth instead of n, for one more
forward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). For layers
that differ, `plan_segments` measures each one and finds the cuts with the lowest peak of all.

Its model: while layer l of segment k goes backward, there are alive the inputs of segments 1 to k, what
the layers of k up to l keep, what the backward of l needs itself, and the gradients of the parameters
of all later layers. A bisection on the peak asks whether some cuts stay below it. The fewest bytes of
segment inputs with which a cut at layer j can be reached are found from those for the layers before,
since fewer are always better: O(n²) a question, and O(n² · segments) if their number is given.
Not in the model: what a forward allocates and frees within one layer.
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
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..closures import Found, Rebuilt
from ..errors import InputError, OptionError
from ..meter import Meter
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

    All segments but the last are recomputed in the backward: the last is needed first, so that what it
    keeps is alive at the peak in any case.

    Parameters
    ----------
    functions : nn.Sequential or sequence of callables
        Each takes one argument, the result of the one before it, as in `nn.Sequential`. That may be a
        tuple or any other nesting of tensors of any shape.
    segments : int, sequence of int, or None
        How many segments, of as equal numbers of functions as can be; or the number of functions of
        each segment, such as :func:`plan_segments` gives; or None, for the square root of the number of
        functions.
    input
        What the first function takes.
    use_reentrant, **options
        Those of :func:`checkpoint`.

    Returns
    -------
    Any
        The result of the last function.

    Raises
    ------
    OptionError
        There is no such division.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt import checkpoint_sequential
    >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(7)])
    >>> checkpoint_sequential(model, 3, torch.ones(2, 4)).shape     # 3, 2 and 2 layers
    torch.Size([2, 4])
    """
    layers = _layers(functions)
    *recomputed, last = _lengths(len(layers), segments)
    start = 0
    for length in recomputed:
        segment = _chain(layers[start : start + length])
        input = checkpoint(use_reentrant=use_reentrant, **options)(segment)(input)
        start += length
    return _chain(layers[start : start + last])(input)


def _layers(functions: Functions) -> list[Callable[[Any], Any]]:
    layers: list[Any] = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    for layer in layers:
        if not callable(layer):
            raise InputError(f"checkpoint_sequential runs callables, not {type(layer).__name__}.")
    return layers


def _chain(layers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def segment(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return segment


def _lengths(count: int, segments: int | Sequence[int] | None) -> list[int]:
    if segments is None:
        segments = max(1, round(math.sqrt(count)))
    if not isinstance(segments, Sequence):
        try:
            segments = operator.index(segments)  # an int, or one of numpy's
        except TypeError:
            raise OptionError(
                "checkpoint_sequential: segments is a number, a sequence of numbers, or None, and not "
                f"{segments!r}."
            ) from None
        if not 1 <= segments <= max(1, count):
            raise OptionError(
                f"checkpoint_sequential: {count} functions cannot be divided into {segments} segments."
            )
        # The longer ones first: towards the end there are more segment inputs alive.
        size, rest = divmod(count, segments)
        return [size + 1] * rest + [size] * (segments - rest)
    lengths = list(segments)
    if sum(lengths) != count or not all(isinstance(n, int) and n > 0 for n in lengths):
        raise OptionError(
            f"checkpoint_sequential: segments of {lengths} functions do not add up to the {count} functions."
        )
    return lengths


# -- where to cut -----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one layer costs, in bytes and FLOPs."""

    output: int
    """The result, which is kept as such if a segment starts behind it."""
    kept: int
    """What is kept between its forward and its backward, the result included if it is needed."""
    backward: int
    """What its backward allocates beyond that, at most."""
    gradients: int
    """Of its parameters, alive from then on."""
    flops: int
    """Of its forward."""


def plan_segments(functions: Functions, input: Any, segments: int | None = None) -> list[int]:
    """Measure each layer, and find the segments with the lowest peak of live bytes.

    Among several with the same peak, those that recompute the fewest FLOPs are taken. Layers are run
    one after the other, each with a backward of its own, so that this needs no more memory than the
    greediest layer; random streams and buffers are left as they were, and no gradient is accumulated.

    Parameters
    ----------
    functions, input
        As for :func:`checkpoint_sequential`. Parameters are those of the functions that are modules.
    segments : int or None
        How many; None for any number.

    Returns
    -------
    list of int
        The number of functions of each segment, for :func:`checkpoint_sequential`. Plan once, for the
        largest input.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt import checkpoint_sequential, plan_segments
    >>> wide = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
    >>> narrow = [nn.Tanh() for _ in range(9)]
    >>> model = nn.Sequential(*narrow, wide)
    >>> x = torch.ones(32, 8)
    >>> plan = plan_segments(model, x)
    >>> plan[-1]    # the wide one by itself
    1
    >>> checkpoint_sequential(model, plan, x).shape
    torch.Size([32, 8])
    """
    layers = _layers(functions)
    if not layers:
        return [0]
    if any(is_lazy(x) for f in layers if isinstance(f, nn.Module) for x in (*f.parameters(), *f.buffers())):
        raise InputError(
            "plan_segments measures layers: call the model once, so that lazy modules have a shape."
        )
    if segments is not None:
        _lengths(len(layers), segments)
    return best_segments(measure_layers(layers, input), segments)


def measure_layers(layers: Sequence[Callable[[Any], Any]], input: Any) -> list[Cost]:
    """The cost of each layer of a chain, in a forward and backward of its own."""
    costs: list[Cost] = []
    with world.streams_at(world.states(world.random_streams(()))), torch.enable_grad():
        x, owner, unsaved = input, -1, 0
        for layer in layers:
            # Gradients flow through all layers but, maybe, the first.
            x, cost, made, saves_input = _measure(layer, _fresh(x, force=bool(costs)))
            if saves_input and owner >= 0:
                costs[owner] = costs[owner]._replace(kept=costs[owner].kept + unsaved)
                unsaved = 0
            costs.append(cost)
            if made is not None:  # else it has handed on what it was given
                owner, unsaved = len(costs) - 1, made
    return costs


def _fresh(x: Any, force: bool) -> Any:
    def leaf(x: Tensor) -> Tensor:
        needed = x.requires_grad or (force and (x.is_floating_point() or x.is_complex()))
        return x.detach().requires_grad_(needed)

    return pytree.tree_map_only(Tensor, leaf, x)


def _measure(layer: Callable[[Any], Any], x: Any) -> tuple[Any, Cost, int | None, bool]:
    """The result, the cost, bytes of the result that it does not keep itself, if it is new, and whether
    it keeps what it is given.
    """
    leaves = _tensors(x)
    x = pytree.tree_map_only(Tensor, torch.clone, x)  # it may write to it
    given = {_torch.storage_of(t) for t in _tensors(x)}
    saved = set()

    def see(t: Tensor) -> Tensor:
        saved.add(_torch.storage_of(t))
        return t.detach()

    module = layer if isinstance(layer, nn.Module) else nn.Module()
    parameters = [p for p in module.parameters() if p.requires_grad]
    wrt = [t for t in leaves if t.requires_grad] + parameters
    # A copy of the layer updates copies of its buffers.
    copies = {id(b): b.clone() for b in module.buffers()}
    with Rebuilt(Found(layer), copies) as run, Meter() as meter:
        with saved_tensors_hooks(see, lambda t: t):
            y = run(x)
        flops, alive = meter.flops, meter.live_bytes
        outputs = _tensors(y)
        sizes = {_torch.storage_of(t): t.untyped_storage().nbytes() for t in outputs}
        roots = [t for t in outputs if t.requires_grad]
        backward = 0
        if roots and wrt:
            meter.peak_bytes = alive
            torch.autograd.grad(roots, wrt, [torch.ones_like(t) for t in roots], allow_unused=True)
            backward = meter.peak_bytes - alive
    made = {key: size for key, size in sizes.items() if key not in given}
    unsaved = sum(size for key, size in made.items() if key not in saved)
    gradients = sum(p.nbytes for p in parameters)
    cost = Cost(sum(sizes.values()), alive - unsaved, backward, gradients, flops)
    return y, cost, unsaved if made else None, not saved.isdisjoint(given)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def best_segments(costs: Sequence[Cost], segments: int | None = None) -> list[int]:
    """The lengths of the segments with the lowest peak, by the model above."""
    n = len(costs)
    # after[i]: the gradients of the parameters of all layers behind i.
    after = [*accumulate([c.gradients for c in reversed(costs[1:])], initial=0)][::-1]
    # inside[i][j - i - 1]: the most that the backward of layers i to j - 1 as one segment needs.
    inside = []
    for i in range(n):
        kept = 0
        needs = []
        for j in range(i, n):
            kept += costs[j].kept
            needs.append(kept + costs[j].backward + after[j])
        inside.append(list(accumulate(needs, max)))
    entry = [0, *[c.output for c in costs]]  # bytes of the input of a segment that starts at i

    def cuts(limit: int) -> list[int] | None:
        # held[j]: the fewest bytes of segment inputs with which layers 0 to j - 1 can be done, and where
        # the segment that ends there starts. One such row for each number of segments, if that is given.
        held: list[tuple[float, int]] = [(0, -1)] + [(math.inf, -1)] * n
        rows = []
        for _ in range(segments or 1):
            source = held
            if segments is not None:
                held = [(math.inf, -1)] * (n + 1)
            for j in range(1, n + 1):
                for i in range(j):
                    total = source[i][0] + entry[i]
                    # The last segment is not recomputed: the longest that fits.
                    better = total < held[j][0] if j < n else held[j][1] < 0
                    if better and total + inside[i][j - i - 1] <= limit:
                        held[j] = (total, i)
            rows.append(held)
        lengths, j = [], n
        while j > 0:
            row = rows.pop() if segments is not None else rows[0]
            i = row[j][1]
            if i < 0:
                return None
            lengths.append(j - i)
            j = i
        return lengths[::-1]

    low, high = 0, sum(entry) + max(max(row) for row in inside)
    while low < high:
        middle = (low + high) // 2
        if cuts(middle) is None:
            low = middle + 1
        else:
            high = middle
    found = cuts(low)
    assert found is not None
    return found
