"""remat inside of a function that `torch.compile` compiles.

Dynamo makes each captured tensor an input of its graph, so f arrives here as a `GraphModule`, a function of
tensors alone. While AOTAutograd traces that graph, functorch's levels are active as in eager code, and
`dispatch` applies the same rules. Three things are different in a graph:

* If no level differentiates, the graph has no backward yet. Then torch's own checkpoint tags the nodes that
  torch's partitioner shall recompute.
* The partitioner would merge the forward with the recomputation, and inductor would recompute too early. So
  the inputs of a recomputation pass through an operator that waits for the cotangent, and nodes are tagged.
* Random streams do not move. The results of random operators are kept for the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, set_checkpoint_early_stop

from . import world
from ._torch import autograd, dynamo, functorch, wrappers
from .core import dispatch
from .core.flat import Outputs
from .core.program import Tensors, UserProgram
from .errors import FuncckptError, OptionError
from .tape import drawing
from .tape.operators import tensors_in


@dynamo.known_to_dynamo
def differentiates() -> bool:
    """Whether a functorch level takes a derivative. May be called in code that Dynamo traces."""
    return any(kind != "vmap" for kind in functorch.active_kinds())


@dynamo.known_to_dynamo
def refuse(what: str) -> None:
    """Raise, from code that Dynamo traces."""
    raise OptionError(f"{what} cannot be honoured in a compiled graph. Leave it out there.")


def call(untraced: Callable[..., Any], name: str, f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`f(*args, **kwargs)` in code that Dynamo traces. If it does not trace f, `untraced` makes the call."""
    if not torch.is_grad_enabled() or dynamo.is_exporting():
        return f(*args, **kwargs)
    how = functools.partial(_from_dynamo, untraced=untraced, name=name, level=_level())
    return dynamo.call_with_graph(how, lambda: f(*args, **kwargs))


_level = dynamo.known_to_dynamo(functorch.current_level)


def _from_dynamo(f: Any, untraced: Callable[..., Any], name: str, level: int) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not isinstance(f, torch.fx.GraphModule):
            return untraced(f, args=args, kwargs={})
        if not dynamo.is_traced_by_aot_autograd():
            # To stop early would leave levels open that the graph has entered.
            with set_checkpoint_early_stop(False) if dynamo.has_transforms(f) else nullcontext():
                return untraced(functools.partial(dynamo.interpret, f, level), args=args, kwargs={})
        if not differentiates() and functorch.current_level() == level and not dynamo.has_transforms(f):
            return dynamo.torch_checkpoint_of_graph(f, args)
        try:
            return _Graph(f, name, level, args).call()
        except FuncckptError:
            autograd.allow_hooks()  # the node of the graph that allows them again will not run
            raise

    return run


class _Graph(UserProgram):
    """A call of a graph, as a program whose inputs are the tracked ones. It holds the others itself."""

    is_compiled = True

    def __init__(self, graph: torch.fx.GraphModule, name: str, level: int, args: Sequence[Any]) -> None:
        super().__init__(name)
        self._graph, self._level = graph, level
        self._args = list(args)
        self._inputs = [i for i, x in enumerate(args) if isinstance(x, Tensor) and wrappers.is_tracked(x)]
        self._constants = {
            i: dynamo.traced_value(x)
            for i, x in enumerate(args)
            if isinstance(x, Tensor) and i not in self._inputs
        }
        # With plain autograd below all levels, the partitioner will cut the graph.
        inputs = [wrappers.below_wrappers(args[i]) for i in self._inputs]
        will_be_cut = torch.is_grad_enabled() and any([x.requires_grad for x in inputs])
        self._tags = {"recompute": CheckpointPolicy.MUST_RECOMPUTE} if will_be_cut else {}
        self._gates = _gates(graph, args)
        self._world = world.World()
        self._drawn = drawing.Drawn(name)
        self._outputs: Any = None

    def call(self) -> tuple[Any, ...]:
        """Run it under whatever transforms are active."""
        args = list(self._args)
        inputs = [args[i] for i in self._inputs]
        for i in self._inputs:
            self._args[i] = None
        outputs = dispatch.bind(self, inputs)
        # Where f returns an input, Dynamo expects the same tensor.
        return self._outputs.assemble(outputs, tensors_in(args))  # type: ignore[no-any-return]

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of a recomputation; some pass an operator that waits for the newest cotangent."""
        number = dynamo.number_of_traced()

        def behind(i: int, x: Tensor) -> Tensor:
            return torch.ops.funcckpt.barrier(x, inputs[-1], number) if i in self._gates else x

        with dynamo.tagged(self._tags):
            for i, value in self._constants.items():
                self._args[i] = behind(i, dynamo.of_traced_value(value))
            found = [behind(i, x) for i, x in zip(self._inputs, inputs, strict=False)]
        return [*found, *inputs[len(found) :]]

    def run(self, *inputs: Tensor) -> Tensors:
        args = list(self._args)
        for i, x in zip(self._inputs, inputs, strict=True):
            args[i] = x
        if self._outputs is None:
            return self._run_first(args)
        with (
            self._world.replayed(),
            world.own_autocast_cache(),
            functorch.without_vmap_mode(),
            self._drawn.replayed(),
        ):
            out = dynamo.interpret(self._graph, self._level, *args, **self._tags)
        return Outputs(self.name, out).as_in(self._outputs)

    def _run_first(self, args: list[Any]) -> Tensors:
        with world.own_autocast_cache(), self._drawn:
            try:
                out = dynamo.interpret(self._graph, self._level, *args)
            except RuntimeError as error:
                self.check_error(error, [args[i] for i in self._inputs])
                raise
        self.random = bool(self._drawn.results)
        self._outputs = Outputs(self.name, out, tensors_in(args))
        outputs, self._outputs.tensors = (*self._outputs.tensors,), []
        return outputs


def _gates(graph: torch.fx.GraphModule, args: Sequence[Any]) -> set[int]:
    """A set of inputs, small ones if possible, of which each operator of a graph needs at least one."""
    depends: dict[torch.fx.Node, frozenset[int]] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            i = len(depends)
            depends[node] = frozenset([i] if isinstance(args[i], Tensor) else [])
        elif node.op != "get_attr":
            depends[node] = frozenset().union(*[depends.get(n, ()) for n in node.all_input_nodes])
    needed = {inputs for node, inputs in depends.items() if node.op != "placeholder" and inputs}
    gates = set().union(*needed)
    # An input of symbolic size is an activation, which counts as small; a parameter's size is known.
    sizes = {i: size if isinstance(size := args[i].numel(), int) else 0 for i in gates}
    for i in sorted(gates, key=sizes.__getitem__, reverse=True):
        if all(inputs & gates - {i} for inputs in needed):
            gates.remove(i)
    return gates


_library = torch.library.Library("funcckpt", "FRAGMENT")
_library.define("barrier(Tensor x, Tensor after, int number) -> Tensor")
# The value of x. A compiler does not know that, nor that another number gives the same.
_library.impl("barrier", lambda x, after, number: x.clone(), "CompositeExplicitAutograd")
