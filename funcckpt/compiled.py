"""remat inside of a function that `torch.compile` compiles.

Dynamo traces what it is given into a graph, and makes everything that f has captured an input of it: so
f comes here as a `GraphModule` that is a function of tensors alone, and a program needs no search.
While AOTAutograd traces that graph, functorch's levels are active as they are in eager code, and
`dispatch` applies the same rules. What it recomputes is written to the graph a second time.

Three things are different in a graph:

* Without a level that differentiates, the backward is not in the graph yet: torch's partitioner makes
  it, and recomputes what is tagged. There torch's own checkpoint does it.
* Where plain autograd is around such a level, the partitioner sees the forward and the recomputation side
  by side. It would merge what is equal, and keep what is expensive: the inputs of a recomputation go
  through an operator that it cannot look into, and its nodes are tagged.
* No random stream moves. What random operators have given is kept for the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from . import _torch, dispatch, world
from .errors import CheckpointError, MutationError, describe
from .program import Leaf, Tensors


@_torch.known_to_dynamo
def differentiates() -> bool:
    """Whether some functorch level takes a derivative; Dynamo, too, may ask."""
    return any(layer.kind != "vmap" for layer in _torch.active_layers())


def call(
    untraced: Callable[..., Any],
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`f(*args, **kwargs)`, checkpointed, in code that Dynamo traces.

    Parameters
    ----------
    untraced : callable
        `untraced(f, args=args)` does it where there is nothing to trace: the backend is an eager one, or
        Dynamo gave up and runs what it could not read.
    name : str
        What f is called in messages.
    f, args, kwargs
        The call. Tensors that f has captured become inputs of a graph, as the arguments do.

    Returns
    -------
    object
        What f returns.

    Raises
    ------
    MutationError
        f changes an input or a captured tensor in place, under a transform that differentiates.
    CheckpointError
        The recomputation draws other random numbers than the forward.
    """
    how = functools.partial(_from_dynamo, untraced=untraced, name=name)
    return _torch.call_with_graph(how, lambda: f(*args, **kwargs))


def _from_dynamo(f: Callable[..., Any], untraced: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not isinstance(f, torch.fx.GraphModule) or not _torch.is_traced_by_aot_autograd():
            return untraced(f, args=args)
        layers = _torch.active_layers()
        if all(layer.kind == "vmap" for layer in layers):
            return _torch.torch_checkpoint_of_graph(f, args)
        program = _Graph(f, name, args, layers)
        return program.assemble(dispatch.call(program, [x for x in args if isinstance(x, Tensor)]))

    return run


class _Graph(Leaf):
    """A call of a graph, as a program over its tensors."""

    is_compiled = True

    def __init__(
        self, graph: torch.fx.GraphModule, name: str, args: Sequence[Any], layers: list[_torch.Layer]
    ) -> None:
        super().__init__()
        self._graph = graph
        self._name = name
        self._others = [None if isinstance(x, Tensor) else x for x in args]
        self._positions = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        self._layers: list[_torch.Layer] | None = layers
        self._world = world.World()
        self._drawn = _Drawn(name)
        self._out: list[Any] | None = None
        # Whether plain autograd is below all levels, so that there will be a partition.
        self._in_joint_graph = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and _torch.below_wrappers(x).requires_grad for x in args
        )

    @property
    def name(self) -> str:
        return self._name

    def take_layers(self) -> list[_torch.Layer] | None:
        layers, self._layers = self._layers, None
        return layers

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._in_joint_graph or self._out is None:
            return inputs
        number = _torch.number_of_traced()
        with _torch.tagged(_RECOMPUTED):
            return [torch.ops.funcckpt.barrier(x, number) for x in inputs]

    def run(self, *inputs: Tensor) -> Tensors:
        args = list(self._others)
        for i, x in zip(self._positions, inputs, strict=True):
            args[i] = x
        again = self._out is not None
        with ExitStack() as stack:
            if again and not self._world.is_here():
                stack.enter_context(self._world.replayed())
            stack.enter_context(world.own_autocast_cache())
            stack.enter_context(self._drawn.replayed() if again else self._drawn)
            tags = _RECOMPUTED if again and self._in_joint_graph else {}
            out = list(_torch.interpret(self._graph, args, tags))
        tensors = tuple([y for y in out if isinstance(y, Tensor)])
        if not again:
            self.random = self._drawn.seen
            self._out = [None if isinstance(y, Tensor) else y for y in out]
            self._outputs = [i for i, y in enumerate(out) if isinstance(y, Tensor)]
        return tensors

    def assemble(self, outputs: Tensors) -> tuple[Any, ...]:
        assert self._out is not None
        out = list(self._out)
        for i, y in zip(self._outputs, outputs, strict=True):
            out[i] = y
        return tuple(out)

    @staticmethod
    def versions(inputs: Sequence[Tensor]) -> list[int | None]:
        return [x._version for x in inputs]

    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        for version, x in zip(before, inputs, strict=True):
            if x._version != version:
                raise MutationError(
                    f"remat({self._name}) changes a tensor ({describe(x)}) in place that it was given or has "
                    "captured. The recomputation would start from the changed values: work on a copy "
                    "(x.clone()) inside the function, or return the new value."
                )


_RECOMPUTED = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}


_library = torch.library.Library("funcckpt", "FRAGMENT")
_library.define("barrier(Tensor x, int number) -> Tensor")
# The value of x: what a compiler cannot know, nor that it is the same for another number.
_library.impl("barrier", lambda x, number: x.clone(), "CompositeExplicitAutograd")


class _Drawn(world.Drawing):
    """What the random operators of a run have given, in their order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._results: list[tuple[Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._results.append((func, pytree.tree_map_only(Tensor, _torch.traced_value, out)))
        return out

    def replayed(self) -> AbstractContextManager[Any]:
        return _Replayed(self._name, self._results)


class _Replayed(TorchDispatchMode):
    """Gives what random operators have given before."""

    def __init__(self, name: str, results: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self._name = name
        self._results = iter(results)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        known, result = next(self._results, (None, None))
        if known is None or known is not func:
            raise CheckpointError(
                f"remat({self._name}): the recomputation draws random numbers by {func}, and the forward "
                f"did by {known or 'nothing'}. Draw them outside of the function, and pass them as arguments."
            )
        fresh = pytree.tree_map_only(Tensor, _torch.of_traced_value, result)
        if func._schema.is_mutable:
            return args[0].copy_(fresh)
        return fresh
