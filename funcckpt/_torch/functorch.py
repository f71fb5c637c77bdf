"""The stack of functorch's levels: which are active, and how one is left, entered and put back.

Public torch does not tell which transforms are active, and cannot apply a rule to the innermost of them.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import (  # type: ignore[attr-defined]
    DispatchKey,
    DispatchKeySet,
    _disabled_torch_function_impl as no_torch_function,  # only `__torch_dispatch__` sees the operators
    _DisableTorchDispatch as no_dispatch,  # no mode or subclass sees the operators
    _dispatch_key_parse,
    _dispatch_tls_is_dispatch_key_included,
    _ExcludeDispatchKeyGuard,
    _get_torch_function_state,
    _len_torch_dispatch_stack as number_of_dispatch_modes,
    _len_torch_function_stack as has_function_modes,  # their number
    _set_grad_enabled as set_grad_enabled,
    _set_torch_function_state,
    _SetExcludeDispatchKeyGuard,
)

# The stack of functorch's interpreters (one a level, innermost last), and how a tensor is
# wrapped and unwrapped at one level.
from torch._C._functorch import (  # type: ignore[attr-defined]
    CFunctionalizeInterpreterPtr,
    CGradInterpreterPtr,
    CJvpInterpreterPtr,
    CVmapInterpreterPtr,
    RandomnessType,
    TransformType,
    _add_batch_dim,
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _unwrap_batched,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_interpreter_stack,
    maybe_current_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    set_single_level_autograd_function_allowed,
)

# torch.func's own bookkeeping: how many jvp levels are open (only the outermost opens a dual level), and
# the code of `torch.func.grad`, to recognize its frames.
from torch._functorch import eager_transforms
from torch._functorch.eager_transforms import grad_increment_nesting, jvp_increment_nesting
from torch._functorch.pyfunctorch import (
    coerce_cinterpreter,
    temporarily_clear_interpreter_stack as without_levels,
)

# Tensors without values, and the mode for them.
from torch._subclasses import FakeTensor

# Graph nodes are numbered in the order in which a thread makes them: this separates nodes that were made
# inside of a call from older ones.
from torch.autograd import _get_sequence_nr as next_sequence_number  # type: ignore[attr-defined]
from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_mode

# The one kind of autograd.Function that functorch lets record at a single level.
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Hooks on all modules, with which a module tracker (as in FlopCounterMode) changes their inputs.
from torch.nn.modules.module import _has_any_global_hook as has_global_module_hook

# The active function modes, and the one of them that is the default device.
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack as dispatch_modes

T = TypeVar("T")
Interpreter = Any  # torch._C._functorch.CInterpreter
Dims = tuple[int | None, ...]

# As numbers: to compare the enum members takes as long as a small operator, and so does their name.
GRAD, VMAP = TransformType.Grad.value, TransformType.Vmap.value
JVP, FUNCTIONALIZE = TransformType.Jvp.value, TransformType.Functionalize.value
_NAMES = {GRAD: "grad", VMAP: "vmap", JVP: "jvp", FUNCTIONALIZE: "functionalize"}
_RANDOMNESS = {kind.value: name.lower() for name, kind in RandomnessType.__members__.items()}
# While the vmap of `is_grads_batched` is active, random operators see this key and may raise. In a
# recomputation they must not: the forward has decided about randomness.
_VMAP_MODE = _dispatch_key_parse("VmapMode")
in_vmap_mode = partial(_dispatch_tls_is_dispatch_key_included, _VMAP_MODE)
without_vmap_mode = partial(_ExcludeDispatchKeyGuard, DispatchKeySet(_VMAP_MODE))


class Layer(NamedTuple):
    """One level of functorch's stack, in a form that can be put back as a shadow."""

    dynamic: Any
    kind: str
    batch_size: int = 0  # of a vmap, as the next
    randomness: str = ""


kind_of_layer = operator.attrgetter("kind")


def current_level() -> int:
    """The number of active functorch levels."""
    return maybe_current_level() or 0


def options_of_vmap(interpreter: Interpreter) -> tuple[int, str]:
    """The batch size of a vmap level, and its randomness."""
    vmap = CVmapInterpreterPtr(interpreter)
    return vmap.batchSize(), _RANDOMNESS[vmap.randomness().value]


def vmapped(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], in_dims: Dims, size: int, randomness: str
) -> tuple[tuple[Tensor, ...], Dims]:
    """Run a function of flat tensors at a new vmap level: its outputs, and their batch dimensions."""
    level = _vmap_increment_nesting(size, randomness)
    try:
        return unbatched(run(*batched(inputs, in_dims, level)), level)
    finally:
        _vmap_decrement_nesting()


def batched(tensors: Sequence[Tensor], dims: Dims, level: int) -> tuple[Tensor, ...]:
    """Tensors batched at a level, along the given dimensions; unchanged where that is None."""
    pairs = zip(tensors, dims, strict=True)
    return tuple([x if dim is None else _add_batch_dim(x, dim, level) for x, dim in pairs])


def unbatched(tensors: Sequence[Tensor], level: int) -> tuple[tuple[Tensor, ...], Dims]:
    """Tensors without their wrappers of a vmap level, and their batch dimensions there."""
    pairs = [*map(_unwrap_batched, tensors, repeat(level))]
    found, dims = zip(*pairs, strict=True) if pairs else ((), ())
    return found, dims


# Makes a tensor of a subclass that has a shape and no memory, by no operator, which a mode would see.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass


def without_memory(cls: Any, size: Any, strides: Any, offset: int, dtype: Any, device: Any) -> Any:
    """Such a tensor, of which to ask for its address is an error."""
    x = make_wrapper(cls, size, strides, offset, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(x)
    return x


class UnguardedMode(TorchDispatchMode):
    """A dispatch mode whose operators torch does not guard against Dynamo: a guard costs more than they do.

    Its method is `dynamo.hidden`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Blocks in which operators handle zero tensors of autograd, conjugates and negatives below the key of modes.
handling_zeros = partial(_SetExcludeDispatchKeyGuard, DispatchKey.ZeroTensor, False)
handling_conjugates = partial(_SetExcludeDispatchKeyGuard, DispatchKey.Conjugate, False)
handling_negatives = partial(_SetExcludeDispatchKeyGuard, DispatchKey.Negative, False)


def uses_accelerator() -> bool:
    """Whether this process has used an accelerator, whose backwards run in threads of their own."""
    return (module := _accelerator()) is not None and getattr(module, "is_initialized", lambda: True)()


def is_behind(device: torch.device) -> bool:
    """Whether an accelerator still computes what it was given, so that the host need not hurry.

    True if that cannot be asked: while a CUDA graph is captured, or of a device without streams.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    try:
        return not torch.accelerator.current_stream(device).query()
    except RuntimeError:
        return True


@functools.cache
def _accelerator() -> Any:
    return torch.get_device_module() if torch.accelerator.is_available() else None


def has_compiled() -> bool:
    """Whether anything was compiled in this process: compiled code does not run under a dispatch mode.

    After `torch._dynamo.reset()` torch does not tell; then `calls_compiled` of a function does.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and len(eval_frame.cached_backends) > 1


def below(interpreter: Interpreter, run: Callable[..., T], *args: Any) -> T:
    """Call `run` outside of the innermost level, as functorch does when it redispatches.

    Below a level that was entered under `no_grad`, nothing may be recorded.
    """
    with coerce_cinterpreter(interpreter).lower():
        return run(*args)


def active_layers() -> list[Layer]:
    """The active levels, outermost first."""
    layers: list[Layer] = []
    try:
        while (interpreter := peek_interpreter_stack()) is not None:
            kind = _NAMES[interpreter.key().value]
            options = options_of_vmap(interpreter) if kind == "vmap" else ()
            layers.append(Layer(pop_dynamic_layer_stack(), kind, *options))
    finally:
        layers.reverse()
        for layer in layers:
            push_dynamic_layer_stack(layer.dynamic)
    return layers


def active_kinds() -> list[str]:
    """The kinds of the active levels, outermost first."""
    return [_NAMES[interpreter.key().value] for interpreter in get_interpreter_stack() or ()]


# Parts of the errors of an operator that gets a tensor of a vmap level where no vmap has that number.
ESCAPED = "may have escaped", "batched == nullptr INTERNAL ASSERT FAILED"
# Of a formula that asks a batched tensor whether it is channels-last.
ASKS_FOR_FORMAT = "inside of vmap for memory_format"
# What it says of some tensors of a level that is over.
ASSERTS = "INTERNAL ASSERT FAILED"


@contextmanager
def shadows(layers: Sequence[Layer]) -> Iterator[bool]:
    """Put levels back, below those that are entered next. Gives whether vmap levels are replaced.

    A vmap level comes back with randomness "same": it must only recognize its own batched tensors, and not
    decide about random numbers again. A functionalize level would wrap all tensors, so it is replaced by a
    grad level, which only has the same number. So is a vmap level, if f may draw on an accelerator: it has a
    kernel for dropout, which no vmap level with "same" takes. But if all levels are of vmap, f may do what a
    grad level refuses, and none comes back. The others are themselves: what f stores lives as long as they
    do.
    """
    leave: list[Callable[[], Any]] = []
    lets_draw = any([layer.kind == "vmap" and layer.randomness != "error" for layer in layers])
    if replaced := lets_draw and uses_accelerator():
        layers = layers if any([layer.kind != "vmap" for layer in layers]) else ()
    try:
        for layer in layers:
            if layer.kind == "vmap" and not replaced:
                _vmap_increment_nesting(layer.batch_size, "same")
                leave.append(_vmap_decrement_nesting)
            elif layer.kind in ("vmap", "functionalize"):
                _grad_increment_nesting()
                leave.append(_grad_decrement_nesting)
            else:
                push_dynamic_layer_stack(layer.dynamic)
                leave.append(pop_dynamic_layer_stack)
        yield replaced
    finally:
        while leave:
            leave.pop()()


# The open dual level of plain forward mode, or -1. Not a function of Python, which costs a frame.
current_dual_level = partial(getattr, forward_ad, "_current_level")


@contextmanager
def jvp_level() -> Iterator[int]:
    """A jvp level, and the dual level that it needs if none is open."""
    with jvp_increment_nesting() as level, set_forward_mode(True), _dual_level():
        yield level


# Reentrant: the collector may close an interrupted `_dual_level` at any time.
_lock = threading.RLock()
# One for each user of `_dual_level`; and the level that was opened for them, if none was open.
_users: list[None] = []
_opened: list[int] = []


@contextmanager
def _dual_level() -> Iterator[None]:
    """A dual level, if none is open. Torch has one for all threads, so the last that needs it closes it."""
    with _lock:
        if not _users:
            with suppress(RuntimeError):  # one is open; by a graph of Dynamo, unknown to forward_ad
                torch._C._exit_dual_level(level=torch._C._enter_dual_level())
                _opened.append(forward_ad.enter_dual_level())
        _users.append(None)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users and _opened:
                forward_ad.exit_dual_level(level=_opened.pop())


# Whether torch traces above its dispatcher, where no mode is seen.
is_before_dispatch = partial(_dispatch_tls_is_dispatch_key_included, DispatchKey.PreDispatch)


def is_tracing() -> bool:
    """Whether `make_fx` traces now."""
    # It is faster to find first that no mode is active.
    return (number_of_dispatch_modes() > 0 or is_before_dispatch()) and get_proxy_mode() is not None
