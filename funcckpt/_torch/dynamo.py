"""Graphs that torch.compile traces. The compiler takes seconds to import, so it is imported when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from .functorch import (
    T,
    current_level,
    dispatch_modes,
    get_proxy_mode,
    is_before_dispatch,
    number_of_dispatch_modes,
)


def known_to_dynamo(f: T) -> T:
    """`torch.compiler.assume_constant_result`, without importing the compiler."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


@known_to_dynamo
def is_exporting() -> bool:
    """Whether torch.export traces. (In code that Dynamo of torch 2.11 traces, torch's own is always true.)"""
    return torch.compiler.is_exporting()


_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # of the function, and of what it calls


def hidden(f: T) -> T:
    """f, hidden from Dynamo with what it calls, without importing the compiler, and at no cost in a call.

    After a graph break, and in a compiled function that it cannot trace, Dynamo watches all frames. It would
    compile parts of this package that enter levels, and hooks that autograd calls.
    """
    set_code_exec_strategy(f.__code__, _SKIP)  # type: ignore[attr-defined]
    return f


def call_with_graph(how: Callable[..., Any], f: Callable[[], Any]) -> Any:
    """`how(f)()`. Dynamo makes a graph of f, and `how` gets this graph when AOTAutograd traces it."""
    from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper

    return dynamo_bypassing_wrapper(how, f)


def torch_checkpoint_of_graph(graph: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
    """Torch's own checkpoint of a graph: nodes with tags for the partitioner."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return tag_activation_checkpoint(graph, *args, use_reentrant=False)


def is_traced_by_aot_autograd() -> bool:
    """Whether AOTAutograd traces now, below Dynamo. (The eager backend has no AOTAutograd.)"""
    return any([type(mode).__name__ == "FunctionalTensorMode" for mode in dispatch_modes()])


def is_traced() -> bool:
    """Whether make_fx or AOTAutograd traces now: their tensors are for their own modes alone."""
    if number_of_dispatch_modes() > 0:
        return get_proxy_mode() is not None or is_traced_by_aot_autograd()
    return is_before_dispatch() and get_proxy_mode() is not None


def traced_value(x: Any) -> Any:
    """The value of `x` now in the graph that is being traced, independent of later writes to `x`."""
    return x.from_functional() if hasattr(x, "from_functional") else x.clone()


def of_traced_value(x: Tensor) -> Any:
    """A new tensor with a value from `traced_value`."""
    if not is_traced_by_aot_autograd():
        return x.clone()
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(x)


def number_of_traced() -> int:
    """How many operators have been traced: a number for this place in the graph."""
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def tagged(tags: dict[str, Any]) -> AbstractContextManager[Any]:
    """Annotate the nodes that are traced in the block. There is no public way."""
    node = torch.fx.Graph().placeholder("funcckpt")
    node.meta = tags
    return fx_traceback.set_current_meta(node)


# The functions that Dynamo records for transforms, and which of their arguments is the level.
_LEVEL_AT = {"_add_batch_dim": 2, "_remove_batch_dim": 1, "_unwrap_for_grad": 1, "_wrap_for_grad": 1}


def has_transforms(graph: torch.fx.GraphModule) -> bool:
    """Whether transforms are entered inside of a graph of Dynamo."""
    return any(
        getattr(node.target, "__name__", "").endswith("_increment_nesting")
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph of Dynamo at another level than the one at which it was made."""

    def __init__(self, graph: torch.fx.GraphModule, level: int, tags: dict[str, Any]) -> None:
        super().__init__(graph)
        self._shift, self._tags = current_level() - level, tags

    def run_node(self, node: torch.fx.Node) -> Any:
        before, node.meta = node.meta, {**node.meta, **self._tags}
        try:
            return super().run_node(node)
        finally:
            node.meta = before

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._shift and (i := _LEVEL_AT.get(getattr(target, "__name__", ""))) is not None:
            args = (*args[:i], args[i] + self._shift, *args[i + 1 :])
        return super().call_function(target, args, kwargs)


def interpret(graph: torch.fx.GraphModule, level: int, *args: Any, **tags: Any) -> Any:
    """Run a graph that was made at `level`, and annotate its nodes as they are traced."""
    with fx_traceback.preserve_node_meta():
        return _Interpreter(graph, level, tags).run(*args)
