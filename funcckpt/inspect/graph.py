"""The graphs of autograd, walked for what they keep."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import functorch, wrappers
from ..core.program import Program


class Walk:
    """What the graphs of some outputs keep: plain tensors, each with the node that does.

    A tensor that is saved is kept. So is one that is held by a Python object on which the graph has a hold:
    the context of a custom function, a saved-tensor hook, what that has put in the place of a tensor.

    Attributes
    ----------
    saved : list of (Tensor, str)
        As autograd saves tensors.
    held : list of (Tensor, str)
        By Python objects.
    """

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        self.saved: list[tuple[Tensor, str]] = []
        self.held: list[tuple[Tensor, str]] = []
        # By id, with the object, so that no other one takes its id.
        self._seen: dict[int, Any] = {}
        self._pending: list[Any] = []
        for y in outputs:
            self._pending += _levels_of(y)[0]
        while self._pending:
            node = self._pending.pop()
            if self._is_new(node):
                self._pending += [n for n, _ in node.next_functions if n is not None]
                self._visit(node)

    def _is_new(self, item: Any) -> bool:
        if id(item) in self._seen:
            return False
        self._seen[id(item)] = item
        return True

    def _add(self, found: list[tuple[Tensor, str]], x: Any, by: str) -> None:
        if isinstance(x, Tensor):
            nodes, plain = _levels_of(x)
            self._pending += nodes
            found += [(part, by) for part in plain]

    def _visit(self, node: Any) -> None:
        by = node.name()
        if isinstance(program := getattr(node, "program", None), Program):
            by = f"remat({program.source.name})"
            for x in program.source.held():
                self._add(self.saved, x, by)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            self._search(vars(node), by)
        for attribute in dir(type(node)):
            if attribute.startswith("_raw_saved_"):
                for raw in pytree.tree_leaves(getattr(node, attribute)):
                    self._unpack(raw, by)

    def _unpack(self, raw: Any, by: str) -> None:
        """What stands in the graph for a tensor that is saved; to unpack it might be to recompute it."""
        if raw.unpack_hook is None:
            self._add(self.saved, raw.data, by)
        else:
            owner = getattr(raw.unpack_hook, "__self__", None)
            self._search((raw.data, raw.unpack_hook), getattr(owner, "title", by))

    def _search(self, root: Any, by: str) -> None:
        """All that an object holds."""
        pending = [root]
        while pending:
            item = pending.pop()
            if isinstance(item, _LEAVES) or not self._is_new(item):
                continue
            if isinstance(item, Tensor):
                self._add(self.held, item, by)
            elif isinstance(item, functorch.SavedTensor):
                self._unpack(item, by)
            elif isinstance(item, torch.autograd.graph.Node):
                del self._seen[id(item)]
                self._pending.append(item)
            elif isinstance(item, FunctionType):  # and not its globals
                pending += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
            else:
                pending += gc.get_referents(item)


# What holds no tensors, or those of the whole program.
_ATOMS = (str, bytes, int, float, type(None), torch.dtype, torch.device)
_LEAVES = (type, ModuleType, CodeType, FrameType, *_ATOMS)


def _levels_of(x: Tensor) -> tuple[list[Any], list[Tensor]]:
    """The graph nodes on which `x` and its tangents hang at all levels, and the plain tensors below."""
    nodes: list[Any] = []
    plain: list[Tensor] = []
    with functorch._set_fwd_grad_enabled(True):
        _descend(x, nodes, plain)
    return nodes, plain


def _descend(x: Tensor, nodes: list[Any], plain: list[Tensor]) -> None:
    # A pullback is called when its level is over, and its graph is still that of the wrapper.
    while wrappers.is_dead_tensor_wrapper(x):
        nodes += [x.grad_fn] if x.grad_fn is not None else []
        x = wrappers.unwrap_if_dead(x)
    nodes += [x.grad_fn] if x.grad_fn is not None else []
    interpreter = functorch.peek_interpreter_stack()
    # A tangent shows only where its level is the innermost.
    if wrappers.has_dual_level() and (interpreter is None or functorch.kind_of(interpreter) == "jvp"):
        if (tangent := wrappers.tangent_of(x)) is not None:
            _descend(tangent, nodes, plain)
    if interpreter is None:
        plain.append(x)
        return
    if wrappers.maybe_get_level(x) == interpreter.level():
        x = wrappers.get_unwrapped(x)
    layer = functorch.pop_dynamic_layer_stack()
    try:
        _descend(x, nodes, plain)
    finally:
        functorch.push_dynamic_layer_stack(layer)
