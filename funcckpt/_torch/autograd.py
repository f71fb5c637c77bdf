"""The engine of plain autograd, its hooks, versions and modes, and torch's own checkpoint."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.utils import parametrize

from . import unknown
from .functorch import (
    DispatchKey,
    _SetExcludeDispatchKeyGuard,
    has_function_modes,
    maybe_current_level,
    number_of_dispatch_modes,
)

try:
    from torch._C import (  # type: ignore[attr-defined]
        DisableTorchFunction as plain,  # no `__torch_function__`, of modes or subclasses, is asked inside
        DisableTorchFunctionSubclass as subclasses_asleep,  # none of a subclass
        _current_graph_task_id as graph_task,  # the number of the backward of this thread, or -1
        _DisableAutocast as without_autocast,  # no operator inside is cast
        _dispatch_tls_is_dispatch_key_excluded,
        _get_graph_exec_group,
    )

    # What a graph node holds for a tensor that is saved, and hooks, which public torch can push, and not see.
    from torch._C._autograd import (  # type: ignore[attr-defined]
        SavedTensor,
        _pop_saved_tensors_default_hooks,
        _push_saved_tensors_default_hooks,
        _saved_tensors_hooks_is_enabled,
        _top_saved_tensors_default_hooks,
    )

    # Whether Dynamo watches the frames of this thread.
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._functorch.eager_transforms import _autograd_grad, grad_and_value_impl

    # What a list of operators may hold: aten's, and those that take functions.
    from torch._ops import HigherOrderOperator, OpOverload

    # What is written to a tensor inside of the context does not count as a change.
    from torch.autograd import _unsafe_preserve_version_counter as version_kept  # type: ignore[attr-defined]

    # `torch.autograd.grad` without checks of its arguments, which take as long as a small backward.
    from torch.autograd.graph import _engine_run_backward
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as error:
    raise unknown(error) from error


OPERATORS = OpOverload, HigherOrderOperator
# Part of what autograd says when something is written to a leaf or to a view of one, and functorch
# when it is written to what comes from outside of a level.
WRITES_TO_INPUT = (
    "leaf Variable that requires grad is being used in an in-place operation",
    "that would mutate a captured Tensor",
)
# What torch.func says when it is entered while a saved-tensor hook is active.
REFUSES_HOOKS = "support saved tensor hooks"


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` of what is known to fit; None where an input is not used."""
    retain_graph, allow_unused = create_graph, True
    arguments = (*outputs,), (*cotangents,), retain_graph, create_graph, (*inputs,), allow_unused
    return _engine_run_backward(*arguments, accumulate_grad=False)


def nodes_of(tensors: Sequence[Tensor], first_node: int = 0) -> Iterator[Any]:
    """The nodes of the graph of some tensors, from `first_node` on."""
    pending: list[Any] = [y.grad_fn for y in tensors]
    seen = {None}
    while pending:
        node = pending.pop()
        if node not in seen and node._sequence_nr() >= first_node:
            seen.add(node)
            pending.extend([following for following, _ in node.next_functions])
            yield node


# A place in the graph: a node and the number of one of its outputs, or the id of a leaf and LEAF.
Edge = tuple[Any, int]
LEAF = -1


def entering(
    outputs: Sequence[Tensor], own: Collection[Edge] = (), first_node: int = 0
) -> dict[Edge, Tensor | None]:
    """The edges at which a graph begins: own ones, leaves (with the tensor), and results of older nodes."""
    found: dict[Edge, Tensor | None] = {}
    pending: list[Edge] = []
    for y in outputs:
        if y.grad_fn is not None:
            pending.append((y.grad_fn, y.output_nr))
        elif y.requires_grad:
            found[id(y), LEAF] = y
    seen = {None}
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node in seen:
            continue
        if node._sequence_nr() < first_node or edge in own:
            found[edge] = None
            continue
        seen.add(node)
        following = node.next_functions
        pending.extend(following)
        if not following and node.name() == "torch::autograd::AccumulateGrad":
            found[id(node.variable), LEAF] = node.variable
    return found


@functools.cache
def references_of_private_leaf() -> int:
    """How many there are to a leaf that only the graph holds, in a loop over the items of `entering`."""
    with torch.enable_grad():
        outputs = [torch.zeros((), requires_grad=True).sin()]  # which hold the graph
    return next(sys.getrefcount(leaf) for edge, leaf in entering(outputs).items() if edge)


_ENGINE = _engine_run_backward.__code__
_AUTOGRAD_GRAD, _GRAD_TRANSFORM = _autograd_grad.__code__, inspect.unwrap(grad_and_value_impl).__code__
# Between them and the engine. A mode of somebody else might differentiate what it is handed; those of torch
# (a default device, for one) and of ours do not.
_PASSED, _OURS = ("grad", "handle_torch_function", "__torch_function__"), ("torch.", "funcckpt.")


def is_final_backward(level: int, thread: int) -> bool:
    """Whether the backward that is running is the last that level `level` will ever see.

    `thread` is the one in which the forward ran. The engine works off what is on a device in threads of
    its own, below which there is no caller: that one waits there.

    `torch.func.grad` runs one backward and leaves its level: what is recorded at that level while it runs is
    dead weight (pytorch#134612). A pullback of `torch.func.vjp`, or a `torch.autograd.grad` inside of the
    function, may still be differentiated. Which of them is running shows only in the frames of the caller.
    """
    engine = _call_of_engine(sys._getframe(1))
    frame = engine or _call_of_engine(sys._current_frames().get(thread))
    frame = frame and frame.f_back
    while frame and frame.f_code.co_name in _PASSED and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None or frame.f_code is not _AUTOGRAD_GRAD or frame.f_back is None:
        return False
    caller = frame.f_back
    # In this thread the level is the one that is active.
    return caller.f_code is _GRAD_TRANSFORM and (engine is not None or caller.f_locals.get("level") == level)


def _call_of_engine(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return frame


def parametrizations_anew() -> AbstractContextManager[None] | None:
    """Parametrized weights are computed in the block, and not found in a cache, if there is one.

    One that was cached belongs to the inside or to the outside of a checkpoint, like a cast; and it is known
    by the id of its module, of which a recomputation makes copies. The cache is that of the process.
    """
    return _without_cached_parametrizations() if parametrize._cache_enabled else None


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled += enabled


_VERSIONS = DispatchKey.ADInplaceOrView
_PLAIN = (Tensor, torch.nn.Parameter)


def alias(x: Tensor) -> Tensor:
    """`x.detach()`, with the version counter of `x` also where operators arrive below autograd."""
    if type(x) in _PLAIN and not (_dispatch_tls_is_dispatch_key_excluded(_VERSIONS) or has_function_modes()):
        return x.detach()
    with _SetExcludeDispatchKeyGuard(_VERSIONS, False), plain():
        return x.detach()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """What is done in the block, the modes that are active do not see."""
    return _disable_current_modes() if number_of_dispatch_modes() else nullcontext()


# -- for the hook path -----------------------------------------------------------------------------

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


# The saved-tensor hooks that are active, if any.
top_saved_tensors_hooks = functools.partial(_top_saved_tensors_default_hooks, False)


def saved_tensors_hooks() -> list[Hooks]:
    """All that are active, innermost first: taken off and put back."""
    found: list[Hooks] = []
    while (top := top_saved_tensors_hooks()) is not None:
        _pop_saved_tensors_default_hooks()
        found.append(top)
    for hooks in reversed(found):
        _push_saved_tensors_default_hooks(*hooks)
    return found


def hooks_asleep() -> AbstractContextManager[Any]:
    """What is saved inside stays where it is, whatever hooks are active."""
    if top_saved_tensors_hooks() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)


def may_push_hooks() -> bool:
    """Whether saved-tensor hooks are allowed here; a transform forbids them."""
    return maybe_current_level() is None and _saved_tensors_hooks_is_enabled()


def is_torch_checkpoint(hooks: Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of torch's own checkpoint."""
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nothing: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nothing.clone()


class Saved:
    """A tensor saved as if by an operator: seen by the hooks that are active, its version checked."""

    def __init__(self, x: Tensor) -> None:
        with torch.enable_grad():
            # The node lives as long as its output.
            self._output: Any = _Saving.apply(torch.empty(0, requires_grad=True), x)

    def unpack(self) -> Tensor:
        (x,) = self._output.grad_fn.saved_tensors
        return x


save: Callable[[Tensor], Any] = Saved
if (_make := getattr(torch._C._autograd, "_make_saved_tensor", None)) is not None:  # not in torch 2.11
    Saved, save = SavedTensor, functools.partial(_make, is_output=False)  # type: ignore[misc, assignment]


def backward_id() -> Any:
    """What tells one backward from another: the group it belongs to, its number, or something unique."""
    number = graph_task()
    return _get_graph_exec_group() or (object() if number == -1 else number)


# Has a function called when the backward that runs in this thread is over.
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


def without_dynamo(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, hidden from Dynamo if that watches the frames of this thread."""
    return f if get_eval_frame_callback() is None else torch.compiler.disable(f)


def checkpoint_settings() -> tuple[bool | None, bool | None]:
    """What `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` have set."""
    module = torch.utils.checkpoint
    return module._enable_checkpoint_early_stop, module._checkpoint_debug_enabled


# `torch.utils.checkpoint.checkpoint` is made by `torch._disable_dynamo`, which keeps what it calls in an
# attribute of the function that it wraps, and makes it in the first call.
_REDIRECTED = "__dynamo_disable"
_CHECKPOINT: Any = torch.utils.checkpoint.checkpoint
_checkpoint_before: Any = None


def original_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Torch's own checkpoint, whether it is redirected or not."""
    return (_checkpoint_before or _CHECKPOINT)(*args, **kwargs)


def redirect_checkpoint(target: Callable[..., Any]) -> None:
    """Let `torch.utils.checkpoint.checkpoint` call `target`, from now on."""
    global _checkpoint_before
    wrapped = _CHECKPOINT.__wrapped__
    before = getattr(wrapped, _REDIRECTED, None) or torch.compiler.disable(wrapped)
    if before is not target:
        _checkpoint_before = before
        setattr(wrapped, _REDIRECTED, target)
