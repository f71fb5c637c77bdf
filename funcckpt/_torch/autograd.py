"""The engine of plain autograd, its hooks, versions and modes, and torch's own checkpoint."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.utils import parametrize

from . import unknown
from .functorch import (
    _get_current_dispatch_mode_stack,
    eager_transforms,
    has_compiled,
    has_function_modes,
    is_tracing,
    maybe_current_level,
)

try:
    # Whether Dynamo watches the frames of this thread.
    from torch._C._dynamo.eval_frame import (
        get_eval_frame_callback,
    )

    # The stack of dispatch modes, from the middle of which one may have to be taken.
    from torch.utils._python_dispatch import (
        _pop_mode,
        _push_mode,
    )
except ImportError as error:
    raise unknown(error) from error


def without_detour(function: Any) -> Any:
    """Let the engine call the backward of a Function, instead of what looks it up each time."""
    function._backward_cls.apply = function.backward
    return function


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` of what is known to fit: its checks take as long as a small backward."""
    # What torch puts around it is for logs, and for compiled code that runs in other threads.
    may_be_compiled = "torch._dynamo.eval_frame" in sys.modules and has_compiled()
    run = torch.autograd.graph._engine_run_backward if may_be_compiled else _run_backward
    retain_graph, allow_unused = create_graph, True
    found: Sequence[Tensor | None] = run(
        (*outputs,),
        (*cotangents,),
        retain_graph,
        create_graph,
        (*inputs,),
        allow_unused,
        accumulate_grad=False,
    )
    return found


_run_backward = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_OURS = gradients.__code__
_GRAD = torch.autograd.grad.__code__
_HANDLE = torch.overrides.handle_torch_function.__code__
_AUTOGRAD_GRAD = eager_transforms._autograd_grad.__code__
_GRAD_TRANSFORM = getattr(
    eager_transforms.grad_and_value_impl, "__wrapped__", eager_transforms.grad_and_value_impl
).__code__


def is_final_backward(level: int, thread: int) -> bool:
    """Whether the backward that is running is the last that level `level` will ever see.

    `thread` is the one in which the forward ran. The engine works off what is on a device in threads of
    its own, below which there is no caller: that one waits there.

    `torch.func.grad` runs one backward and leaves its level: what is recorded at that level while
    it runs is dead weight (pytorch#134612). A pullback of `torch.func.vjp`, or a
    `torch.autograd.grad(create_graph=True)` inside of the function, may still be differentiated.
    Which of them is running shows only in the frames of the caller: the engine, called by
    `torch.autograd.grad`, called by `_autograd_grad`, called by the transform.
    """
    engine = _call_of_engine(sys._getframe(2))
    frame = engine or _call_of_engine(sys._current_frames().get(thread))
    frame = frame and frame.f_back
    while frame is not None and (frame.f_code is _GRAD or _is_on_the_way(frame)):
        frame = frame.f_back
    if frame is None or frame.f_code is not _AUTOGRAD_GRAD or frame.f_back is None:
        return False
    caller = frame.f_back
    # In this thread the level is the one that is active.
    return caller.f_code is _GRAD_TRANSFORM and (engine is not None or caller.f_locals.get("level") == level)


def _is_on_the_way(frame: FrameType) -> bool:
    """Whether a frame below `_autograd_grad` is that of `torch.autograd.grad`, called through modes or not.

    A mode of somebody else might differentiate what it is handed; those of torch (a default device, for
    one) and of ours do not.
    """
    if frame.f_code is _AUTOGRAD_GRAD:
        return False
    if frame.f_code in (_GRAD, _HANDLE):
        return True
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return frame.f_code.co_name == "__torch_function__" and package in ("torch", "funcckpt")


def _call_of_engine(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE and frame.f_code is not _OURS:
        frame = frame.f_back
    return frame


class accumulation:
    """Sees whether a backward that is called in a block accumulates the gradient of one of some leaves.

    Another thread may do so meanwhile. A thread of the engine, below which there is no caller, works for
    whoever waits.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.seen: set[int] = set()
        self._thread = threading.get_ident()
        self._leaves = [x for x in leaves if x.is_leaf and x.requires_grad]

    def __enter__(self) -> accumulation:
        self._handles = [x.register_post_accumulate_grad_hook(self._see) for x in self._leaves]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, x: Tensor) -> None:
        if threading.get_ident() != self._thread and (
            _call_of_engine(sys._getframe(1)) or not _call_of_engine(sys._current_frames().get(self._thread))
        ):
            return
        self.seen.add(id(x))


class _ParametrizationsAnew:
    """Parametrized weights are computed anew inside of a checkpoint, also under `parametrize.cached`.

    One that was cached belongs to the inside or to the outside of a checkpoint, like a cast; and it is known
    by the id of its module, of which a recomputation makes copies. The cache is that of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.runs = self._enabled = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self.runs:
                self._enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
            self.runs += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self.runs -= 1
            if not self.runs:
                parametrize._cache_enabled += self._enabled


_parametrizations_anew = _ParametrizationsAnew()


def parametrizations_anew() -> AbstractContextManager[None] | None:
    """Parametrized weights are computed in the block, and not found in a cache, if there is one."""
    is_needed = _parametrizations_anew.runs or parametrize._cache_enabled
    return _parametrizations_anew if is_needed else None


# Part of what autograd says when something is written to a leaf or to a view of one, and functorch
# when it is written to what comes from outside of a level.
WRITES_TO_INPUT = (
    "leaf Variable that requires grad is being used in an in-place operation",
    "that would mutate a captured Tensor",
)
# -- for the hook path -----------------------------------------------------------------------------

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def top_saved_tensors_hooks() -> Hooks | None:
    """The saved-tensor hooks that are active: public torch can push them, and not look."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


try:
    # A tensor saved as if by an operator: seen by the hooks that are active, its version checked.
    from torch._C._autograd import SavedTensor as Saved
    from torch._C._autograd import _make_saved_tensor

    def save(x: Tensor) -> Saved:
        return _make_saved_tensor(x, is_output=False)

except ImportError:  # torch 2.11

    class Saved:  # type: ignore[no-redef]
        """A tensor that a graph node of its own has saved."""

        def __init__(self, x: Tensor) -> None:
            with torch.enable_grad():
                # The node lives as long as its output.
                self._output: Any = _Saving.apply(torch.empty(0, requires_grad=True), x)

        def unpack(self) -> Tensor:
            (x,) = self._output.grad_fn.saved_tensors
            return x

    save = Saved  # type: ignore[assignment]


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nothing: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nothing.clone()


def version_kept(x: Tensor) -> Any:
    """What is written to `x` inside of the context does not count as a change."""
    return torch.autograd._unsafe_preserve_version_counter(x)  # type: ignore[attr-defined]


def backward_id() -> Any:
    """What tells one backward from another: the group it belongs to, its number, or something unique."""
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return group
    number = torch._C._current_graph_task_id()
    return object() if number == -1 else number


def at_end_of_backward(f: Callable[[], None]) -> None:
    """Call `f` when the backward that runs in this thread is over; public torch can tell of leaves alone."""
    torch.autograd.Variable._execution_engine.queue_callback(f)  # type: ignore[attr-defined]


def is_tracing_plain() -> bool:
    """Whether `make_fx` records what is done, and no transform is active."""
    return torch._C._len_torch_dispatch_stack() > 0 and maybe_current_level() is None and is_tracing()


def without_dynamo(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, hidden from Dynamo if that watches the frames of this thread."""
    return f if get_eval_frame_callback() is None else torch.compiler.disable(f)


def checkpoint_early_stop() -> bool | None:
    """What `set_checkpoint_early_stop` has set, which has no getter."""
    return torch.utils.checkpoint._enable_checkpoint_early_stop


def checkpoint_debug_enabled() -> bool | None:
    """What `set_checkpoint_debug_enabled` has set, which has no getter."""
    return torch.utils.checkpoint._checkpoint_debug_enabled


# What torch.func says when it is entered while a saved-tensor hook is active.
REFUSES_HOOKS = "support saved tensor hooks"


def may_push_hooks() -> bool:
    """Whether saved-tensor hooks are allowed here; a transform forbids them."""
    return maybe_current_level() is None and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


@contextmanager
def hooks_asleep() -> Iterator[None]:
    """What is saved inside stays where it is, whatever hooks are active."""
    if top_saved_tensors_hooks() is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        yield


def saved_tensors_hooks() -> list[Hooks]:
    """All that are active, innermost first: taken off and put back."""
    found: list[Hooks] = []
    while (top := top_saved_tensors_hooks()) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.append(top)
    for hooks in reversed(found):
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return found


def without_dispatch_modes() -> AbstractContextManager[None]:
    """What is done in the block, the modes that are active do not see."""
    return _dispatch_modes_left() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _dispatch_modes_left() -> Iterator[None]:
    modes = _get_current_dispatch_mode_stack()
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_mode(mode)


def without_autocast() -> Any:
    """No operator inside is cast."""
    return torch._C._DisableAutocast()


def graph_task() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_PLAIN = (Tensor, torch.nn.Parameter)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def alias(x: Tensor) -> Tensor:
    """`x.detach()`, with the version counter of `x` also where operators arrive below autograd."""
    if type(x) in _PLAIN and not (_is_excluded(_VERSIONS) or has_function_modes()):
        return x.detach()
    with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False), plain():
        return x.detach()


def subclasses_asleep() -> Any:
    """No `__torch_function__` of a subclass is asked inside."""
    return torch._C.DisableTorchFunctionSubclass()


def plain() -> Any:
    """No `__torch_function__`, of modes or subclasses, is asked inside."""
    return torch._C.DisableTorchFunction()


def is_torch_checkpoint(hooks: Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of torch's own checkpoint."""
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


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
    # Torch would make it in its first call.
    before = getattr(wrapped, _REDIRECTED, None) or torch.compiler.disable(wrapped)
    if before is not target:
        _checkpoint_before = before
        setattr(wrapped, _REDIRECTED, target)


# Operators, as a list of them is checked: aten's, and those that take functions.
HigherOrderOperator = torch._ops.HigherOrderOperator
OPERATORS = (torch._ops.OpOverload, HigherOrderOperator)
