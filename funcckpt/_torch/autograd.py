"""The engine of plain autograd, its hooks, versions and modes, and torch's own checkpoint."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import (  # type: ignore[attr-defined]
    DisableTorchFunction as plain,  # no `__torch_function__` of modes or subclasses inside
    DisableTorchFunctionSubclass as subclasses_asleep,  # no `__torch_function__` of subclasses
    _current_graph_task_id as graph_task,  # the number of the backward of this thread, or -1
    _DisableAutocast as without_autocast,  # no operator inside is cast
    _dispatch_tls_is_dispatch_key_excluded as _is_excluded,
    _get_graph_exec_group,
    _will_engine_execute_node,
)

# What a graph node holds for a saved tensor; and the active hooks, which public torch does not show.
from torch._C._autograd import (  # type: ignore[attr-defined]
    SavedTensor,
    _pop_saved_tensors_default_hooks as pop_hooks,
    _push_saved_tensors_default_hooks as push_hooks,
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable as allow_hooks,
    _saved_tensors_hooks_get_disabled_error_message,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._functorch.eager_transforms import _autograd_grad, grad_and_value_impl

# The members of a list of operators: those of aten, and higher-order ones.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# A write to the tensor inside of this context does not count as a change.
from torch.autograd import _unsafe_preserve_version_counter as version_kept  # type: ignore[attr-defined]

# `torch.autograd.grad` without its checks of arguments, which take as long as a small backward.
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from . import functorch

OPERATORS = OpOverload, HigherOrderOperator
Packet = OpOverloadPacket  # operators of one name, as `torch.ops.aten.mm`
# Before torch 2.13, only its tensor keeps a node of the graph alive that is written in Python.
NODES_STAY = torch.__version__ >= "2.13"  # compared as a version
# Parts of the errors of autograd for a write to a leaf or a view of one, and of functorch for a write to a
# tensor from outside of a level.
_WRITES_TO_LEAF = "leaf Variable that requires grad is being used in an in-place operation"
WRITES_TO_CAPTURED = "that would mutate a captured Tensor"
# Part of the error of torch.func if a saved-tensor hook is active.
REFUSES_HOOKS = "support saved tensor hooks"


# The dispatch keys of kernels that make of a composite operator one that is not taken apart.
_OWN_KERNELS = ("CPU", "CUDA", "MPS", "XPU", "PrivateUse1", "CompositeExplicitAutograd")


def is_composite(func: Any) -> bool:
    """Whether an operator consists of other ones alone, into which autograd takes it apart."""
    # (The dispatcher does not know those of `prim`, nor what asks a nested tensor for its size.)
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel("CompositeImplicitAutograd") and not any(map(has_kernel, _OWN_KERNELS))


def taken_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of a composite operator, by what autograd calls in its place."""
    # (`func.decompose` takes a decomposition in Python instead, if there is one.)
    return func._op_dk(functorch.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_about_writes(error: Exception) -> bool:
    """Whether torch refuses a write to a leaf, or to a tensor from outside of a level."""
    return any([words in str(error) for words in (_WRITES_TO_LEAF, WRITES_TO_CAPTURED)])


def gradients(
    outputs: Sequence[Any],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    create_graph: bool,
    retain_graph: bool,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` without checks; None for an input that is not used."""
    allow_unused = True
    arguments = (*outputs,), (*cotangents,), retain_graph, create_graph, (*inputs,), allow_unused
    return _engine_run_backward(*arguments, accumulate_grad=False)


def used_gradients(edges: Sequence[Any], needed: Sequence[bool]) -> Sequence[bool]:
    """Which gradients the running backward may use: torch tells a Function only which inputs require grad.

    `edges` are those of the inputs. At a leaf with respect to which `autograd.grad` differentiates, the
    question is an error, which takes some 10 microseconds: after the second, all other inputs count as used.
    """
    used, first, errors = [*needed], needed.index(True), 0
    for i in reversed(range(len(used))):
        if used[i] and (i > first or used.count(True) > 1):  # if no other one is used, the first one is
            try:
                used[i] = _will_engine_execute_node(edges[i][0])
            except RuntimeError:
                if (errors := errors + 1) > 1:
                    break
    return used


# An edge of the graph: (node, number of its output), or (id of a leaf, LEAF).
Edge = tuple[Any, int]
LEAF = -1
edge_of: Callable[[Tensor], Edge] = operator.attrgetter("grad_fn", "output_nr")


def nodes_of(tensors: Sequence[Tensor], own: Collection[Edge] = (), first_node: int = 0) -> Iterator[Any]:
    """The nodes of the graph of some tensors, from `first_node` on, and up to the edges in `own`."""
    pending: list[Edge] = [*map(edge_of, tensors)]
    seen = {None}
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node not in seen and node._sequence_nr() >= first_node and edge not in own:
            seen.add(node)
            pending.extend(node.next_functions)
            yield node


def in_order(nodes: Iterable[Any]) -> list[Any]:
    """The nodes of a graph, each after those that it leads to: if this list goes last, it frees them singly.

    Since torch 2.13, a node that Python has looked at frees the next one inside of its own end, and a long
    chain overflows the stack (4,000 nodes one of 512 KiB).
    """
    return sorted(nodes, key=lambda node: node._sequence_nr())


# From so many nodes on, they are freed singly.
MANY_NODES = 2_000


@functools.cache
def _fields_of(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def is_node_of(node: Any, function: Any) -> bool:
    """Whether a node of the graph is that of a custom function."""
    return isinstance(node, function._backward_cls)


def saved_by(node: Any) -> list[Any]:
    """The `SavedTensor`s of a node of the graph, and other values that it has saved."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        try:
            return [*node._raw_saved_tensors]  # type: ignore[attr-defined]
        except RuntimeError:  # a backward has freed them
            return []
    kind: Any = type(node)
    fields = [getattr(node, name) for name in _fields_of(kind)]
    return [x for field in fields for x in (field if isinstance(field, (list, tuple)) else (field,))]


# The node of a leaf is told by its type: to ask each node for its name takes as long as the rest of the walk.
_LEAF_NODE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


grad_fn_of = operator.attrgetter("grad_fn")


def edges_of(tensors: Iterable[Tensor]) -> set[Edge]:
    """The edges at which the graphs of some tensors end."""
    return {*map(edge_of, filter(grad_fn_of, tensors))}


def entering(
    outputs: Sequence[Tensor],
    own: Collection[Edge] = (),
    first_node: int = 0,
    doubtful: list[Any] | None = None,
) -> dict[Edge, Tensor | None]:
    """The edges at which a graph begins: those in `own`, leaves (with the tensor), results of older nodes.

    With `doubtful`, the last are followed, too, and their nodes are put there: another thread may have made
    them, which counts by itself.
    """
    found: dict[Edge, Tensor | None] = {}
    pending: list[Edge] = []
    for y in outputs:
        if y.grad_fn is not None:
            pending.append(edge_of(y))
        elif y.requires_grad:
            found[id(y), LEAF] = y
    seen = {None}
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node in seen:
            continue
        if type(node) is _LEAF_NODE:
            found[id(node.variable), LEAF] = node.variable
        elif ((is_older := node._sequence_nr() < first_node) and doubtful is None) or edge in own:
            found[edge] = None
            continue
        else:
            pending += node.next_functions
            if is_older and doubtful is not None:
                doubtful.append(node)
        seen.add(node)
    return found


@functools.cache
def references_of_private_leaf() -> int:
    """The reference count of a leaf that only the graph holds, in a loop over the items of `entering`."""
    # Neither a checkpoint nor a mode around the first call may see this.
    with torch.enable_grad(), hooks_asleep(), without_dispatch_modes():
        outputs = [torch.zeros((), requires_grad=True).sin()]  # which hold the graph
    return next(sys.getrefcount(leaf) for edge, leaf in entering(outputs).items() if edge)


_ENGINE = _engine_run_backward.__code__
_AUTOGRAD_GRAD, _GRAD_TRANSFORM = _autograd_grad.__code__, inspect.unwrap(grad_and_value_impl).__code__
# Frames that may be between `grad` and the engine. Modes of torch (a default device) and of this package are
# fine; another mode might differentiate what it is given.
_PASSED, _OURS = ("grad", "handle_torch_function", "__torch_function__"), ("torch.", "funcckpt.")


def is_final_backward(level: int, thread: int) -> bool:
    """Whether the running backward is the last one of level `level`.

    `torch.func.grad` runs one backward and leaves its level, so a recording of it at that level is dead
    weight (pytorch#134612). A pullback of `torch.func.vjp`, or a `torch.autograd.grad` inside of the
    function, may still be differentiated. Only the frames of the caller show which of them is running.

    `thread` is the thread of the forward. On an accelerator the engine runs the backward in its own threads,
    and the caller waits in that one.
    """
    engine = _call_of_engine(sys._getframe(1))
    frame = engine or _call_of_engine(sys._current_frames().get(thread))
    frame = frame and frame.f_back
    while frame and frame.f_code.co_name in _PASSED and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None or frame.f_code is not _AUTOGRAD_GRAD or (caller := frame.f_back) is None:
        return False
    # In the caller's thread, the active level is the one in question.
    return caller.f_code is _GRAD_TRANSFORM and (engine is not None or caller.f_locals.get("level") == level)


def _call_of_engine(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return frame


def parametrizations_anew() -> AbstractContextManager[None] | None:
    """A context without the cache of parametrized weights, if that is active: they are computed in the block.

    A cached weight belongs either to the inside or to the outside of a checkpoint, like a cast. And its key
    is the id of its module, which a recomputation copies. There is one cache for the process.
    """
    return _without_cached_parametrizations() if parametrize._cache_enabled else None


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled += enabled


_VERSIONS = functorch.DispatchKey.ADInplaceOrView
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def alias(x: Tensor) -> Tensor:
    """`x.detach()` that shares the version counter of `x`, even below autograd."""
    if type(x) in _PLAIN_TYPES and not (_is_excluded(_VERSIONS) or functorch.has_function_modes()):
        return x.detach()
    with functorch._SetExcludeDispatchKeyGuard(_VERSIONS, False), plain():
        return x.detach()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A block of code that the active dispatch modes do not see."""
    return _disable_current_modes() if functorch.number_of_dispatch_modes() else nullcontext()


# -- for the hook path -----------------------------------------------------------------------------

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


# The saved-tensor hooks that are active, if any.
top_saved_tensors_hooks = functools.partial(_top_saved_tensors_default_hooks, False)


def saved_tensors_hooks() -> list[Hooks]:
    """All active hooks, innermost first. To see them, they are popped and pushed again."""
    with _without_hooks() as hooks:
        return hooks


def hooks_asleep() -> AbstractContextManager[Any]:
    """A block in which tensors are saved without the active hooks."""
    return nullcontext() if top_saved_tensors_hooks() is None else _without_hooks()


@contextmanager
def _without_hooks() -> Iterator[list[Hooks]]:
    hooks: list[Hooks] = []
    while (top := top_saved_tensors_hooks()) is not None:
        hooks.append(top)
        pop_hooks()
    try:
        yield hooks
    finally:
        for pair in reversed(hooks):
            push_hooks(*pair)


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """A block in which no transform is active, so that saved-tensor hooks are allowed."""
    refused = _saved_tensors_hooks_get_disabled_error_message()
    with functorch.without_levels():
        if refused is not None:
            allow_hooks()
        try:
            yield
        finally:
            if refused is not None:
                _saved_tensors_hooks_disable(refused)


def may_push_hooks() -> bool:
    """Whether saved-tensor hooks are allowed here: a transform forbids them."""
    return functorch.maybe_current_level() is None and _saved_tensors_hooks_is_enabled()


def is_torch_checkpoint(hooks: Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of torch's own checkpoint."""
    return _module_of(hooks) == torch.utils.checkpoint.__name__


def _module_of(hooks: Hooks | None) -> Any:
    return None if hooks is None else getattr(hooks[0], "__module__", None)  # a method in C has none


def is_checkpoint(hooks: Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of a checkpoint, ours or torch's."""
    # By name: the functional path asks this, and does not import the hook path.
    return _module_of(hooks) == "funcckpt.eager.region" or is_torch_checkpoint(hooks)


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nothing: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nothing.clone()


class Saved:
    """A tensor that is saved as by an operator: through the active hooks, with a check of its version."""

    def __init__(self, x: Tensor) -> None:
        with torch.enable_grad(), functorch.without_levels():
            # The node lives as long as its output.
            self._output: Any = _Saving.apply(torch.empty(0, requires_grad=True), x)

    def unpack(self) -> Tensor:
        (x,) = self._output.grad_fn.saved_tensors
        return x


save: Callable[[Tensor], Any] = Saved
if (_make := getattr(torch._C._autograd, "_make_saved_tensor", None)) is not None:  # not in torch 2.11
    Saved, save = SavedTensor, functools.partial(_make, is_output=False)  # type: ignore[misc, assignment]


def backward_id() -> Any:
    """A key for the running backward: its group, its number, or a unique object outside of a backward."""
    number = graph_task()
    return _get_graph_exec_group() or (object() if number == -1 else number)


# Takes a function to call at the end of the backward that runs in this thread.
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


# The settings of `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled`.
_settings_of = operator.attrgetter("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")
checkpoint_settings = functools.partial(_settings_of, torch.utils.checkpoint)


# `torch._disable_dynamo` wraps `torch.utils.checkpoint.checkpoint`. The wrapper makes the function that it
# calls in the first call, and keeps it in this attribute of the wrapped function.
_REDIRECTED = "__dynamo_disable"
_CHECKPOINT: Any = torch.utils.checkpoint.checkpoint
_checkpoint_before: Any = None


def original_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Torch's own checkpoint, whether it is redirected or not."""
    return (_checkpoint_before or _CHECKPOINT)(*args, **kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined]  # imports Dynamo only when it is called
def redirect_checkpoint(target: Callable[..., Any]) -> None:
    """Let `torch.utils.checkpoint.checkpoint` call `target`, from now on."""
    global _checkpoint_before
    wrapped = _CHECKPOINT.__wrapped__
    before = getattr(wrapped, _REDIRECTED, None) or torch.compiler.disable(wrapped)
    if before is not target:
        _checkpoint_before = before
        setattr(wrapped, _REDIRECTED, target)
