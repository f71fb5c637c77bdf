"""`checkpoint_sequential`: a chain of functions in checkpointed segments, and where best to cut it.

If n layers keep the same number of bytes, √n segments keep about 2√n times that instead of n times, for one
more forward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). If layers
differ, `plan_segments` measures each one and finds the cuts with the lowest peak.

Its model of the peak: during the backward of layer l in segment k, these are alive: the inputs of segments 1
to k, what the layers of segment k up to l keep, what the backward of l allocates, and the gradients of the
parameters of all later layers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .._torch import functorch
from ..core.program import is_differentiable
from ..core.tensors import versions_of
from ..errors import InputError, OptionError, TransformError
from ..loops.measure import leaving_nothing
from ..meter import Meter, storages
from ..remat import is_module_class
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
    """Run a chain of functions in checkpointed segments. Returns the result of the last function.

    All segments are recomputed except the last, whose backward comes first.

    Parameters
    ----------
    functions : nn.Sequential or sequence of callables
        Each takes one argument, the result of the one before it: a pytree of tensors.
    segments : int, sequence of int, or None
        The number of segments; or the number of functions in each segment, as :func:`plan_segments` returns;
        or None, for the square root of the number of functions. An OptionError if the functions cannot be
        divided so. With a number or None, a segment that would start with activations with ``inplace=True``
        starts behind them, except the last.
    input
        The argument of the first function.
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
    layers = _layers("checkpoint_sequential", functions)
    lengths = _lengths("checkpoint_sequential", len(layers), segments)
    if not isinstance(segments, Sequence):
        lengths = _behind_writers(layers, lengths)
    *starts, _ = accumulate(lengths, initial=0)
    for start, end in pairwise(starts):
        input = checkpoint(use_reentrant=use_reentrant, **options)(chain(layers[start:end]))(input)
    return chain(layers[starts[-1] :])(input)


def chain(layers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The composition of the layers, as one function."""

    def segment(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return segment


def _layers(title: str, functions: Any) -> list[Callable[[Any], Any]]:
    layers: list[Any] = [*functions] if isinstance(functions, Iterable) else [None]
    if wrong := [f for f in layers if not callable(f) or is_module_class(f)]:
        what = "" if wrong[0] is None else f" that holds {wrong[0]!r}"
        raise InputError(
            f"{title} takes an nn.Sequential or a list of functions, not a {type(functions).__name__}{what}."
        )
    return layers


def _lengths(title: str, count: int, segments: int | Sequence[int] | None) -> list[int]:
    if segments is None:
        segments = max(1, round(math.sqrt(count)))
    if isinstance(segments, Sequence):
        lengths = list(segments)
    else:
        # Longer segments first: towards the end more inputs of segments are alive.
        number = 0
        with suppress(TypeError):
            number = operator.index(segments)  # an int, maybe of numpy
        size, rest = divmod(count, max(number, 1))
        lengths = [size + 1] * rest + [size] * (number - rest)
    if (
        not lengths
        or not all(isinstance(n, Integral) and (n > 0 or not count) for n in lengths)
        or sum(lengths) != count
    ):
        raise OptionError(
            f"{title}: {count} functions cannot be divided by segments={segments!r}. Pass a number up to "
            f"{count}, or lengths whose sum is {count}."
        )
    return lengths


def writes_to_input(layer: Any) -> bool:
    """Whether a layer is an activation that says so."""
    return isinstance(layer, nn.Module) and not layer._modules and bool(getattr(layer, "inplace", False))


def start_behind_writers(layers: Sequence[Any], start: int) -> int:
    """The number of the first layer from `start` on that is no such activation."""
    while start < len(layers) and writes_to_input(layers[start]):
        start += 1
    return start


def _behind_writers(layers: Sequence[Any], lengths: list[int]) -> list[int]:
    """Lengths of segments of which none starts with such layers, but for the first and the last."""
    _, *starts, end = accumulate(lengths, initial=0)
    for k, start in enumerate(starts[:-1]):
        starts[k] = min(start_behind_writers(layers, start), starts[-1])
    return [b - a for a, b in pairwise(sorted({0, *starts, end}))] or lengths


# -- where to cut -----------------------------------------------------------------------------------


_NEVER = 1 << 60  # more bytes than any plan takes


class Cost(NamedTuple):
    """What one layer costs, in bytes."""

    output: int  # its result, which is kept if a segment starts after this layer
    kept: int  # between its forward and its backward, with the result if that is needed
    backward: int  # the most that its backward allocates beyond that
    gradients: int  # of its parameters, alive from its backward on
    writes: bool = False  # whether it writes to its input, so that no segment may start with it


def plan_segments(functions: Functions, input: Any, segments: int | None = None) -> list[int]:
    """Measure each layer, and find the segments with the lowest peak of live bytes in the backward.

    The peak is computed from what they take, without a loss, and as if the last segment kept its input.

    The layers run one after another, each followed by its backward. Random streams and buffers are restored,
    and no gradient is accumulated. Plan once, for the largest input.

    Parameters
    ----------
    functions, input
        As for :func:`checkpoint_sequential`. Of functions that are modules, the parameters are counted.
    segments : int or None
        The number of segments; None for any number.

    Returns
    -------
    list of int
        The number of functions in each segment, for :func:`checkpoint_sequential`.

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
    if functorch.maybe_current_level() is not None:
        raise TransformError("plan_segments: under a transform no layer can be measured. Plan before it.")
    layers = _layers("plan_segments", functions)
    if not layers:
        return [0]
    if isinstance(segments, Sequence):
        raise OptionError(f"plan_segments finds the lengths. segments= is their number, not {segments!r}.")
    if segments is not None:
        segments = len(_lengths("plan_segments", len(layers), segments))
    return best_segments(measure_layers(layers, input), segments)


def measure_layers(layers: Sequence[Callable[[Any], Any]], input: Any) -> list[Cost]:
    """The cost of each layer of a chain, measured in a forward and backward of its own."""
    costs: list[Cost] = []
    saved: set[Any] = set()
    # The layer that made the input of the next one, and how many bytes of it no layer has saved so far.
    owner, unsaved = -1, 0

    def see(t: Tensor) -> Tensor:
        saved.update([storage._cdata for storage in storages(t)])
        return t.detach()

    alone = leaving_nothing("plan_segments", (*layers,), ())
    with alone, torch.enable_grad(), saved_tensors_hooks(see, lambda t: t):
        for i, layer in enumerate(layers):
            leaves = tensors_in(input)
            x = pytree.tree_map_only(Tensor, torch.clone, input)  # the layer may write to it
            given = {storage._cdata for storage in storages(x)}
            versions = versions_of(tensors_in(x))
            saved.clear()
            module = layer if isinstance(layer, nn.Module) else nn.Module()
            parameters = [p for p in module.parameters() if p.requires_grad]
            wrt = [t for t in leaves if t.requires_grad] + parameters
            with Meter() as meter:
                y = layer(x)
                writes = versions != versions_of(tensors_in(x))
                alive = meter.peak_bytes = meter.live_bytes
                roots = [t for t in tensors_in(y) if t.requires_grad]
                if roots and wrt:
                    torch.autograd.grad(roots, wrt, [torch.ones_like(t) for t in roots], allow_unused=True)
                backward = meter.peak_bytes - alive
            if not saved.isdisjoint(given) and owner >= 0:
                costs[owner] = costs[owner]._replace(kept=costs[owner].kept + unsaved)
                unsaved = 0
            sizes = {storage._cdata: storage.nbytes() for storage in storages(y)}
            made = sizes.keys() - given
            rest = sum([sizes[key] for key in made - saved])
            gradients = sum([p.nbytes for p in parameters])
            # Layers in front of it that only hand on their input would have the same memory written to.
            for j in range(owner + 1, i) if writes else ():
                costs[j] = costs[j]._replace(writes=True)
            costs.append(Cost(sum(sizes.values()), alive - rest, backward, gradients, writes))
            if made:  # else the layer returned its input
                owner, unsaved = i, rest
            # Gradients flow through all layers, except perhaps the first.
            input = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(is_differentiable(t)), y)
            del x, y, roots, leaves, wrt
    return costs


def best_segments(costs: Sequence[Cost], segments: int | None = None) -> list[int]:
    """The lengths of the segments with the lowest peak, by the model above."""
    n = len(costs)
    # after[i]: the gradients of the parameters of all layers behind i.
    after = [*accumulate([c.gradients for c in reversed(costs[1:])], initial=0)][::-1]
    # Bytes of the input of a segment that starts at i.
    entry = [0, *[_NEVER if c.writes else before.output for before, c in pairwise(costs)]]
    # For the layers from i on: the peak, the bytes of the segments' inputs, and the segments' lengths.
    best: dict[int, tuple[int, int, list[int]]] = {n: (0, 0, [])}

    def with_segment_from(i: int) -> tuple[int, int, list[int]]:
        kept = inside = 0
        found = []
        for j in range(i + 1, n + 1):
            kept += costs[j - 1].kept
            inside = max(inside, kept + costs[j - 1].backward + after[j - 1])
            if j in best:
                peak, inputs, lengths = best[j]
                # As the only segment it is not recomputed.
                first = _NEVER if i == 0 and costs[0].writes and j < n else entry[i]
                found.append((first + max(inside, peak), first + inputs, [j - i, *lengths]))
        return min(found)

    if segments is None:
        for i in reversed(range(n)):
            best[i] = with_segment_from(i)
    else:
        for _ in range(segments):
            best = {i: with_segment_from(i) for i in range(max(best))}
    return best[0][2]
