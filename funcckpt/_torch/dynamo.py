"""Graphs that torch.compile traces. Its parts take seconds to import, and are there when they are needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import Tensor

from .functorch import T, _get_current_dispatch_mode_stack, current_level, get_proxy_mode

# -- for torch.compile, whose parts take seconds to import, and are there when they are needed -----------


def known_to_dynamo(f: T) -> T:
    """`torch.compiler.assume_constant_result`, which imports the compiler."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def call_with_graph(how: Callable[..., Any], f: Callable[[], Any]) -> Any:
    """`how(f)()`. Dynamo makes a graph of f, and `how` is given that when AOTAutograd traces it."""
    from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper

    return dynamo_bypassing_wrapper(how, f)


def torch_checkpoint_of_graph(graph: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
    """What torch.compile makes of a checkpoint: nodes with tags for the partitioner."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return tag_activation_checkpoint(graph, *args, use_reentrant=False)


def _functional_tensor() -> Any:
    # Imported as soon as one is made.
    return sys.modules.get("torch._subclasses.functional_tensor")


def is_traced_by_aot_autograd() -> bool:
    """Whether `torch.compile` traces what is done, below Dynamo; the eager backend does not."""
    if (module := _functional_tensor()) is None:
        return False
    return any(isinstance(mode, module.FunctionalTensorMode) for mode in _get_current_dispatch_mode_stack())


def traced_value(x: Tensor) -> Tensor:
    """What a graph that is being recorded knows as the value of `x` now, whatever is written to `x` later."""
    value: Tensor = cast(Any, x).from_functional() if hasattr(x, "from_functional") else x.clone()
    return value


def of_traced_value(x: Tensor) -> Tensor:
    """A new tensor with a value that was known before."""
    if not is_traced_by_aot_autograd():
        return x.clone()
    functional: Tensor = _functional_tensor().FunctionalTensor.to_functional(x)
    return functional


def number_of_traced() -> int:
    """How many operators have been recorded, which tells one place in a graph from all others."""
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def tagged(tags: dict[str, Any]) -> AbstractContextManager[Any]:
    """What is traced inside is annotated, where annotations are kept; there is no public way to say so."""
    node = torch.fx.Graph().placeholder("funcckpt")
    node.meta = tags
    return fx_traceback.set_current_meta(node)


_TRANSFORMS = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting", "_vmap_increment_nesting"})
# Which argument of what Dynamo records for a transform is the number of a level.
_LEVEL_AT = {"_add_batch_dim": 2, "_remove_batch_dim": 1, "_unwrap_for_grad": 1, "_wrap_for_grad": 1}


def has_transforms(graph: torch.fx.GraphModule) -> bool:
    """Whether transforms are entered inside of a graph of Dynamo."""
    return any(
        getattr(node.target, "__name__", None) in _TRANSFORMS
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph of Dynamo at another level than that which was active when the graph was made."""

    def __init__(self, graph: torch.fx.GraphModule, level: int) -> None:
        super().__init__(graph)
        self._shift = current_level() - level

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._shift and (i := _LEVEL_AT.get(getattr(target, "__name__", ""))) is not None:
            args = (*args[:i], args[i] + self._shift, *args[i + 1 :])
        return super().call_function(target, args, kwargs)


def interpret(
    graph: torch.fx.GraphModule, level: int, *args: Any, tags: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Run a graph that was made at a level, and annotate its nodes as they are traced."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    before = [node.meta for node in nodes]
    for node in nodes:
        node.meta = {**node.meta, **tags}
    try:
        with fx_traceback.preserve_node_meta():
            return _Interpreter(graph, level).run(*args)
    finally:
        for node, meta in zip(nodes, before, strict=True):
            node.meta = meta
