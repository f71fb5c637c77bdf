"""The stack of functorch's levels: which are active, how one is left, entered and put back.

Public torch has no way to ask which transforms are active, or to apply a rule to the innermost of them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from torch import Tensor

from . import unknown

try:
    # The stack of functorch's interpreters (one a level, innermost last), and how a tensor is
    # wrapped and unwrapped at one level.
    from torch._C import (  # type: ignore[attr-defined]
        DispatchKeySet,
        _dispatch_key_parse,
        _ExcludeDispatchKeyGuard,
        _get_torch_function_state,
        _set_torch_function_state,
    )

    # What a graph node holds for a tensor that is saved, to be looked at without unpacking it.
    from torch._C._autograd import (
        SavedTensor,
    )
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
        _jvp_decrement_nesting,
        _jvp_increment_nesting,
        _unwrap_batched,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
        maybe_current_level,
        peek_interpreter_stack,
        pop_dynamic_layer_stack,
        push_dynamic_layer_stack,
        set_single_level_autograd_function_allowed,
    )

    # torch.func's own bookkeeping, with which ours has to agree: how many jvp levels are open (only
    # the outermost opens a dual level), and which Python frames belong to `torch.func.grad`.
    from torch._functorch import (
        eager_transforms,
    )
    from torch._functorch.eager_transforms import (
        jvp_increment_nesting,
    )

    # Tensors without values, and the mode under which operators take no others.
    from torch._subclasses import (
        FakeTensor,
    )

    # Graph nodes are numbered in the order of their making: this tells those that were made inside
    # a call from those that it found.
    from torch.autograd import (  # type: ignore[attr-defined]
        _get_sequence_nr as next_sequence_number,
    )
    from torch.autograd.forward_ad import (
        _set_fwd_grad_enabled,
    )

    # The one kind of autograd.Function that functorch lets record at a single level.
    from torch.autograd.function import (
        _SingleLevelFunction as SingleLevelFunction,
    )
    from torch.fx.experimental.proxy_tensor import (
        get_proxy_mode,
    )

    # Hooks on all modules, by which a module tracker (that of FlopCounterMode, say) holds their inputs.
    from torch.nn.modules.module import (
        _has_any_global_hook as has_global_module_hook,
    )

    # The function modes under which f runs, and the one of them that stands for the default device.
    from torch.overrides import (
        _get_current_function_mode_stack as function_modes,
    )
    from torch.utils._device import (
        DeviceContext,
    )

    # The stack of dispatch modes, from the middle of which one may have to be taken.
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _get_current_dispatch_mode_stack,
    )
except ImportError as error:
    raise unknown(error) from error


T = TypeVar("T")
Interpreter = Any  # torch._C._functorch.CInterpreter

_RANDOMNESS = {
    RandomnessType.Error: "error",
    RandomnessType.Same: "same",
    RandomnessType.Different: "different",
}
# By their numbers: to compare the values themselves takes as long as a small operator.
GRAD, VMAP, JVP, FUNCTIONALIZE = (
    getattr(TransformType, name).value for name in ("Grad", "Vmap", "Jvp", "Functionalize")
)
_NAMES = {GRAD: "grad", VMAP: "vmap", JVP: "jvp", FUNCTIONALIZE: "functionalize"}
# Set while any vmap is active; random operators look for it and refuse. A recomputation whose
# randomness was settled by the forward is not theirs to refuse.
_VMAP_MODE = DispatchKeySet(_dispatch_key_parse("VmapMode"))


class Layer(NamedTuple):
    """One level of functorch's stack, kept so that it can be put back as a shadow."""

    dynamic: Any
    kind: str
    # Of a vmap.
    batch_size: int
    randomness: str


def any_grad(layers: Sequence[Layer]) -> bool:
    """Whether one of some levels is that of a `torch.func.grad`, `vjp` or the like."""
    return "grad" in map(operator.attrgetter("kind"), layers)


def current_level() -> int:
    """The number of active functorch levels."""
    return maybe_current_level() or 0


def kind_of(interpreter: Interpreter) -> str:
    return _NAMES[interpreter.key().value]


def options_of_vmap(interpreter: Interpreter) -> tuple[int, str]:
    """The batch size of a vmap level, and its randomness."""
    vmap = CVmapInterpreterPtr(interpreter)
    return vmap.batchSize(), _RANDOMNESS[vmap.randomness()]


Dims = tuple[int | None, ...]


def vmapped(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    in_dims: Dims,
    batch_size: int,
    randomness: str,
) -> tuple[tuple[Tensor, ...], Dims]:
    """A function of flat tensors at a vmap level; its outputs, and the dimensions that are batched."""
    level = _vmap_increment_nesting(batch_size, randomness)
    try:
        return unbatched(run(*batched(inputs, in_dims, level)), level)
    finally:
        _vmap_decrement_nesting()


def batched(tensors: Sequence[Tensor], dims: Dims, level: int) -> tuple[Tensor, ...]:
    """Tensors batched at a level, along some dimensions; where that is None, as they are."""
    found = [*tensors]
    for i, dim in enumerate(dims):
        if dim is not None:
            found[i] = _add_batch_dim(tensors[i], dim, level)
    return (*found,)


def unbatched(tensors: Sequence[Tensor], level: int) -> tuple[tuple[Tensor, ...], Dims]:
    """Tensors without what wraps them at a vmap level, and the dimensions that were batched there."""
    pairs = [*map(_unwrap_batched, tensors, repeat(level))]
    if not pairs:
        return (), ()
    found, dims = zip(*pairs, strict=True)
    return found, dims


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are active, innermost last."""
    return _get_current_dispatch_mode_stack() if number_of_dispatch_modes() else []


number_of_dispatch_modes = torch._C._len_torch_dispatch_stack


# A subclass whose operators only `__torch_dispatch__` sees.
no_torch_function = torch._C._disabled_torch_function_impl


def without_memory(
    cls: Any,
    size: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor of a subclass that has a look and no memory. Who asks for its address is told."""
    x = Tensor._make_wrapper_subclass(
        cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(x)
    return x


def no_dispatch() -> Any:
    """Operators run as they are: no mode or subclass sees them."""
    return torch._C._DisableTorchDispatch()


def zero_tensors_told() -> Any:
    """Below the key of modes, operators tell tensors that are known to be zero."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ZeroTensor, False)


def has_compiled() -> bool:
    """Whether anything was compiled in this process. It refuses to run as such under a dispatch mode."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and len(eval_frame.cached_backends) > 1


def adds_back_views(interpreter: Interpreter) -> bool:
    views: bool = CFunctionalizeInterpreterPtr(interpreter).functionalizeAddBackViews()
    return views


def below(interpreter: Interpreter, run: Callable[..., T], *args: Any) -> T:
    """Call `run` with the innermost level left, as functorch does when it redispatches.

    A level that was entered under `no_grad` must not let anything below it record: this mirrors
    `GradInterpreter.lower` and `JvpInterpreter.lower`, without the cost of a generator.
    """
    kind, restore = interpreter.key().value, None
    if kind == GRAD:
        if torch.is_grad_enabled() and not CGradInterpreterPtr(interpreter).prevGradMode():
            restore = set_grad_enabled
    elif kind == JVP:
        if torch._C._is_fwd_grad_enabled() and not CJvpInterpreterPtr(interpreter).prevFwdGradMode():
            restore = torch._C._set_fwd_grad_enabled
    if restore is not None:
        restore(False)
    layer = pop_dynamic_layer_stack()
    try:
        return run(*args)
    finally:
        push_dynamic_layer_stack(layer)
        if restore is not None:
            restore(True)


def active_layers() -> list[Layer]:
    """The active levels, outermost first."""
    layers: list[Layer] = []
    if peek_interpreter_stack() is None:
        return layers
    try:
        while (interpreter := peek_interpreter_stack()) is not None:
            kind = _NAMES[interpreter.key().value]
            size, randomness = options_of_vmap(interpreter) if kind == "vmap" else (0, "")
            layers.append(Layer(pop_dynamic_layer_stack(), kind, size, randomness))
    finally:
        for layer in reversed(layers):
            push_dynamic_layer_stack(layer.dynamic)
    layers.reverse()
    return layers


@contextmanager
def without_levels() -> Iterator[None]:
    """As if no transform were active."""
    popped = []
    try:
        while peek_interpreter_stack() is not None:
            popped.append(pop_dynamic_layer_stack())
        yield
    finally:
        for layer in reversed(popped):
            push_dynamic_layer_stack(layer)


def number_of_vmaps() -> int:
    return sum([layer.kind == "vmap" for layer in active_layers()])


def batched_nothing() -> list[Tensor]:
    """For each active vmap level that does not draw the same numbers for every sample, a tensor without
    elements that is batched there, and only there.
    """
    sizes = {
        level: layer.batch_size
        for level, layer in enumerate(active_layers(), 1)
        if layer.kind == "vmap" and layer.randomness != "same"
    }
    with without_levels():
        return [_add_batch_dim(torch.empty(size, 0), 0, level) for level, size in sizes.items()]


class shadows:
    """Put levels back below whatever is entered next; gives their numbers, outermost first.

    A vmap level comes back with randomness "same": it only has to recognise its own batched
    tensors, and must not decide about random numbers a second time. In place of functionalize, which
    would wrap whatever passes, comes a level that only keeps its number.
    """

    __slots__ = ("_layers",)

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers

    def __enter__(self) -> list[int]:
        levels: list[int] = []
        try:
            for layer in self._layers:
                if layer.kind == "vmap":
                    levels.append(_vmap_increment_nesting(layer.batch_size, "same"))
                elif layer.kind == "functionalize":
                    levels.append(_grad_increment_nesting())
                else:
                    push_dynamic_layer_stack(layer.dynamic)
                    levels.append(maybe_current_level() or 0)
        except BaseException:
            self._layers = self._layers[: len(levels)]
            self.__exit__()
            raise
        return levels

    def __exit__(self, *exception: object) -> None:
        for layer in reversed(self._layers):
            if layer.kind == "vmap":
                _vmap_decrement_nesting()
            elif layer.kind == "functionalize":
                _grad_decrement_nesting()
            else:
                pop_dynamic_layer_stack()


class recording:
    """Reverse and forward mode switched on for the time of a block, by one context instead of two."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        torch._C._set_grad_enabled(True)
        torch._C._set_fwd_grad_enabled(True)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._before[0])
        torch._C._set_fwd_grad_enabled(self._before[1])


set_grad_enabled = torch._C._set_grad_enabled


class grad_mode:
    """`torch.set_grad_enabled`, which takes as long as a small operator."""

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._mode)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._before)


@contextmanager
def jvp_level() -> Iterator[int]:
    """A jvp level, and the dual level that it needs if none is open."""
    if forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0:
        # Inside plain forward mode, where torch refuses `torch.func.jvp`: ours is not one that it
        # should count, or it would not refuse one inside of f.
        level = _jvp_increment_nesting()
        try:
            with _set_fwd_grad_enabled(True):
                yield level
        finally:
            _jvp_decrement_nesting()
        return
    with jvp_increment_nesting() as level, _set_fwd_grad_enabled(True):
        if forward_ad._current_level >= 0 or _has_unnamed_dual_level():
            yield level
        else:
            with forward_ad.dual_level():
                yield level


def _has_unnamed_dual_level() -> bool:
    """Whether a graph of Dynamo has opened a dual level, which it does without torch's bookkeeping."""
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:
        return True
    return False


def differentiates_in_inference_mode() -> bool:
    """Whether a derivative is taken where nothing is recorded, so that torch finds zeros.

    The transforms of torch 2.11 do so silently (pytorch#177318); those of newer releases leave inference
    mode. Where f enters it inside of a transform, recording is off, and the zeros are meant.
    """
    if not torch.is_inference_mode_enabled():
        return False
    grad, jvp = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    return any((layer.kind == "grad" and grad) or (layer.kind == "jvp" and jvp) for layer in active_layers())


_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_tracing() -> bool:
    """Whether `make_fx` records what is done."""
    # That no mode is active, above autograd or below it, takes less time to find out.
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    ) and get_proxy_mode() is not None


# The number of the function modes that are active.
has_function_modes = torch._C._len_torch_function_stack


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """What `torch.get_default_device` says, which takes its time: it is a function mode, if it is set.

    Of a device without an index it asks a tensor that it makes, which it cannot at a grad level.
    """
    if not torch._C._len_torch_function_stack():
        return _CPU
    with without_levels():
        return torch.get_default_device()


@contextmanager
def torch_function_as(state: Any) -> Iterator[None]:
    """Subclasses of Tensor and function modes have their say, or not, as at another time."""
    now = _get_torch_function_state()
    _set_torch_function_state(state)
    try:
        yield
    finally:
        _set_torch_function_state(now)


def without_vmap_mode() -> Any:
    return _ExcludeDispatchKeyGuard(_VMAP_MODE)
