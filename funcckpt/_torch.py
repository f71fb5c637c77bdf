"""Every private name of torch that funcckpt touches, and why.

Public torch has no way to ask which transforms are active, to apply a rule to the innermost of
them, or to wrap and unwrap a tensor at one level. All three are needed: to dispatch without building
a class per call (`dispatch`), to see what a function captured (`closure`, `net`), and to be lean in
a backward that nobody can differentiate (`dispatch`). `tests/test_private_torch.py` fails loudly when
a release of torch moves one of these names.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.utils import parametrize

try:
    # The stack of functorch's interpreters (one a level, innermost last), and how a tensor is
    # wrapped and unwrapped at one level.
    from torch._C import (  # type: ignore[attr-defined]
        DispatchKeySet,
        _dispatch_key_parse,
        _ExcludeDispatchKeyGuard,
        # Whether subclasses of Tensor have their say: not below `backward` of one, where f runs again.
        _get_torch_function_state,
        _set_torch_function_state,
    )

    # What a graph node holds for a tensor that is saved, to be looked at without unpacking it.
    from torch._C._autograd import SavedTensor

    # Whether Dynamo watches the frames of this thread.
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
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
        _unwrap_for_grad,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
        _wrap_for_grad,
        get_unwrapped,
        is_batchedtensor,
        is_dead_tensor_wrapper,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        maybe_current_level,
        maybe_get_bdim,
        maybe_get_level,
        peek_interpreter_stack,
        pop_dynamic_layer_stack,
        push_dynamic_layer_stack,
        set_inplace_requires_grad_allowed,
        set_single_level_autograd_function_allowed,
        unwrap_if_dead,
    )

    # torch.func's own bookkeeping, with which ours has to agree: how many jvp levels are open (only
    # the outermost opens a dual level), and which Python frames belong to `torch.func.grad`.
    from torch._functorch import eager_transforms
    from torch._functorch.eager_transforms import jvp_increment_nesting

    # Tensors without values, and the mode under which operators take no others.
    from torch._subclasses import FakeTensor, FakeTensorMode

    # Graph nodes are numbered in the order of their making: this tells those that were made inside
    # a call from those that it found.
    from torch.autograd import (  # type: ignore[attr-defined]
        _get_sequence_nr as next_sequence_number,
    )
    from torch.autograd.forward_ad import _set_fwd_grad_enabled

    # The one kind of autograd.Function that functorch lets record at a single level.
    from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    # Hooks on all modules, by which a module tracker (that of FlopCounterMode, say) holds their inputs.
    from torch.nn.modules.module import _has_any_global_hook as has_global_module_hook

    # The function modes under which f runs, and the one of them that stands for the default device.
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._device import DeviceContext

    # The stack of dispatch modes, from the middle of which one may have to be taken.
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )
except ImportError as error:
    raise ImportError(
        f"funcckpt does not know torch {torch.__version__}: {error}. Install a newer funcckpt, or a "
        "torch from 2.11 to 2.15."
    ) from error

T = TypeVar("T")
Interpreter = Any  # torch._C._functorch.CInterpreter

_RANDOMNESS = {
    RandomnessType.Error: "error",
    RandomnessType.Same: "same",
    RandomnessType.Different: "different",
}
# By their numbers: to compare the values themselves takes as long as a small operator.
_NAMES = {
    kind.value: name
    for kind, name in (
        (TransformType.Grad, "grad"),
        (TransformType.Vmap, "vmap"),
        (TransformType.Jvp, "jvp"),
        (TransformType.Functionalize, "functionalize"),
    )
}
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


def current_level() -> int:
    """The number of active functorch levels."""
    level = maybe_current_level()
    return 0 if level is None else level


def kind_of(interpreter: Interpreter) -> str:
    return _NAMES[interpreter.key().value]


def randomness_of(interpreter: Interpreter) -> str:
    return _RANDOMNESS[CVmapInterpreterPtr(interpreter).randomness()]


def batch_size_of(interpreter: Interpreter) -> int:
    size: int = CVmapInterpreterPtr(interpreter).batchSize()
    return size


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are active, innermost last."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


# A subclass whose operators only `__torch_dispatch__` sees.
no_torch_function = torch._C._disabled_torch_function_impl
# What a subclass has that leaves operators as they are.
no_torch_dispatch = torch._C._disabled_torch_dispatch_impl


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


class lower:
    """Leave the innermost level for the time of a block, as functorch does when it redispatches.

    A level that was entered under `no_grad` must not let anything below it record: this mirrors
    `GradInterpreter.lower` and `JvpInterpreter.lower`, without the cost of a generator.
    """

    __slots__ = ("_interpreter", "_kind", "_layer", "_restore")

    def __init__(self, interpreter: Interpreter, kind: str) -> None:
        self._interpreter, self._kind = interpreter, kind

    def __enter__(self) -> None:
        self._restore = None
        if self._kind == "grad":
            if torch.is_grad_enabled() and not CGradInterpreterPtr(self._interpreter).prevGradMode():
                self._restore = torch._C._set_grad_enabled
        elif self._kind == "jvp":
            enabled = torch._C._is_fwd_grad_enabled()
            if enabled and not CJvpInterpreterPtr(self._interpreter).prevFwdGradMode():
                self._restore = torch._C._set_fwd_grad_enabled
        if self._restore is not None:
            self._restore(False)
        self._layer = pop_dynamic_layer_stack()

    def __exit__(self, *exception: object) -> None:
        push_dynamic_layer_stack(self._layer)
        if self._restore is not None:
            self._restore(True)


def active_layers() -> list[Layer]:
    """The active levels, outermost first."""
    layers: list[Layer] = []
    if peek_interpreter_stack() is None:
        return layers
    try:
        while (interpreter := peek_interpreter_stack()) is not None:
            kind = kind_of(interpreter)
            size, randomness = 0, ""
            if kind == "vmap":
                size, randomness = batch_size_of(interpreter), randomness_of(interpreter)
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
                    levels.append(current_level())
        except BaseException:
            self._leave(len(levels))
            raise
        return levels

    def __exit__(self, *exception: object) -> None:
        self._leave(len(self._layers))

    def _leave(self, entered: int) -> None:
        for layer in reversed(self._layers[:entered]):
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


class vmap_level:
    """A vmap level for the time of a block, which is given its number."""

    __slots__ = ("_options",)

    def __init__(self, batch_size: int, randomness: str) -> None:
        self._options = batch_size, randomness

    def __enter__(self) -> int:
        return _vmap_increment_nesting(*self._options)

    def __exit__(self, *exception: object) -> None:
        _vmap_decrement_nesting()


class grad_level:
    __slots__ = ()

    def __enter__(self) -> int:
        return _grad_increment_nesting()

    def __exit__(self, *exception: object) -> None:
        _grad_decrement_nesting()


class recording_level:
    """A grad level, and grad mode switched on."""

    __slots__ = ("_mode",)

    def __enter__(self) -> int:
        self._mode = torch.is_grad_enabled()
        level: int = _grad_increment_nesting()
        torch._C._set_grad_enabled(True)
        return level

    def __exit__(self, *exception: object) -> None:
        _grad_decrement_nesting()
        torch._C._set_grad_enabled(self._mode)


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


def has_dual_level() -> bool:
    """Whether a dual level of plain forward mode is open (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def in_dual_level() -> bool:
    """Whether plain forward mode is active: a dual level is open, and looked at."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def unpack_dual(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The primal and tangent of `x` at the level on top, without what public torch does for exports."""
    primal, tangent = torch._VF._unpack_dual(x, level=0)  # type: ignore[attr-defined]
    return primal, tangent


def tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of `x` at the level on top; both dual levels of torch use number 0."""
    if not (x.is_floating_point() or x.is_complex()) or is_legacy_batchedtensor(x):
        return None
    if x.is_inference() and not is_functorch_wrapped_tensor(x):
        return None  # it has none, and some levels cannot even be asked
    return unpack_dual(x)[1]


def without_forward_views(inputs: Sequence[Tensor], record: bool = True) -> Sequence[Tensor]:
    """In a dual level, the primal of a dual tensor is a view of it: a further view is dual again.

    Without `record` nothing requires grad any more: forward mode switches grad mode on.
    """
    if not has_dual_level():
        return inputs
    return [
        x if is_legacy_batchedtensor(x) else fresh(x).requires_grad_(record and x.requires_grad)
        for x in inputs
    ]


def is_plain_dual(x: Tensor) -> bool:
    """Whether a tensor of no functorch level has a tangent in plain forward mode."""
    # Inside of a transform the question would be answered by its level: ask below all of them.
    if not has_dual_level() or eager_transforms.JVP_NESTING > 0:
        return False
    if peek_interpreter_stack() is None:
        return tangent_of(x) is not None
    layer = pop_dynamic_layer_stack()
    try:
        return is_plain_dual(x)
    finally:
        push_dynamic_layer_stack(layer)


def is_tracked(x: Tensor) -> bool:
    """Whether some transform looks at `x`: it requires grad, belongs to a level, or is dual."""
    x = alive(x)
    if is_functorch_wrapped_tensor(x):
        return not is_left_over(x)
    return x.requires_grad or is_plain_dual(x)


def is_left_over(x: Tensor) -> bool:
    """Whether `x` was stored somewhere by a transform that is over: no operator could take it."""
    level = maybe_get_level(alive(x))
    return level is not None and level > current_level()


def all_alive(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [*map(alive, inputs)] if any(map(is_dead_tensor_wrapper, inputs)) else [*inputs]


def alive(x: Tensor) -> Tensor:
    """`x` without the wrappers of grad and jvp levels that are over, as operators see it."""
    while is_dead_tensor_wrapper(x):
        x = unwrap_if_dead(x)
    return x


def unwrap_legacy(x: Tensor) -> tuple[Tensor, int | None]:
    """What `torch.autograd.grad(is_grads_batched=True)` has batched, and its dimension.

    It does so with a vmap of its own, older than functorch, whose level is the innermost.
    """
    if not is_legacy_batchedtensor(x):
        return x, None
    return torch._remove_batch_dim(x, _legacy_level(), 1, 0), 0  # type: ignore[attr-defined]


def wrap_legacy(x: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return x
    x = x.resolve_conj().resolve_neg()  # views that it has no rules for
    batched: Tensor = torch._add_batch_dim(x, dim, _legacy_level())  # type: ignore[attr-defined]
    return batched


def _legacy_level() -> int:
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


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


def fresh(x: Tensor) -> Tensor:
    """Another tensor with the value of `x`, that no one else holds and no graph knows.

    What the vmap of `is_grads_batched` has batched cannot be detached, and is nobody else's. make_fx
    would record a `detach`, and cut the gradient of what it has recorded.
    """
    if is_legacy_batchedtensor(x):
        return x
    if is_tracing() and not (x.requires_grad and x.is_leaf):  # a parameter is recorded as a constant
        with torch.no_grad():
            view = x.view_as(x)
        if not view.requires_grad:
            return view
    return x.detach()


def wrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_wrap_for_grad, tensors, repeat(level))]


def unwrapped_for_grad(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    return [*map(_unwrap_for_grad, tensors, repeat(level))]


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves to which the graph of some tensors leads."""
    pending, seen = [y.grad_fn for y in outputs], set()
    yield from [y for y in outputs if y.grad_fn is None]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Other nodes may have an attribute of this name.
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        else:
            pending.extend([n for n, _ in node.next_functions])


# Asked of many tensors at once, without a frame of Python's.
require_grad = operator.attrgetter("requires_grad")


def without_detour(function: Any) -> Any:
    """Let the engine call the backward of a Function, instead of what looks it up each time."""
    function._backward_cls.apply = function.backward
    return function


def require_grad_at_this_level(tensors: Sequence[Tensor], indices: Iterable[int]) -> list[Tensor]:
    """`x.requires_grad_()` of some, which functorch otherwise forbids inside of a transform."""
    chosen = []
    set_inplace_requires_grad_allowed(True)
    try:
        for i in indices:
            chosen.append(tensors[i].requires_grad_())
    finally:
        set_inplace_requires_grad_allowed(False)
    return chosen


@contextmanager
def torch_function_as(state: Any) -> Iterator[None]:
    """Subclasses of Tensor and function modes have their say, or not, as at another time."""
    now = _get_torch_function_state()
    _set_torch_function_state(state)
    try:
        yield
    finally:
        _set_torch_function_state(now)


def has_torch_function(x: Tensor) -> bool:
    """Whether `x` is of a subclass that takes part in what operators do."""
    return type(x) not in (Tensor, torch.nn.Parameter) and not (
        getattr(type(x).__torch_function__, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
        or type(x).__torch_function__ is torch._C._disabled_torch_function_impl
    )


def without_vmap_mode() -> Any:
    return _ExcludeDispatchKeyGuard(_VMAP_MODE)


def with_memory_for_each(x: Tensor) -> Tensor:
    """A tensor with memory of its own for each element: `x`, or a copy.

    A tangent is stored as its primal is. One that comes from a second evaluation, or is zero, may have
    another layout, and could not be written to where elements share memory, or have none (torch's
    symbolic zeros).
    """
    value = below_wrappers(x)
    if value.layout is not torch.strided or is_legacy_batchedtensor(value):
        return x
    shared = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if shared or value._is_zerotensor() else x


def below_wrappers(x: Tensor) -> Tensor:
    """`x` below all wrappers of functorch."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def all_below_wrappers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*map(below_wrappers, tensors)]


def everything_below(x: Tensor) -> list[Tensor]:
    """What is inside of `x` below all wrappers: its value, and its tangents at whatever levels."""
    if not has_dual_level() and not (eager_transforms.JVP_NESTING > 0):
        return [below_wrappers(x)]
    with _set_fwd_grad_enabled(True):
        return _everything_below(x)


def _everything_below(x: Tensor) -> list[Tensor]:
    x = alive(x)
    found = [x]
    interpreter = peek_interpreter_stack()
    if (interpreter is None or kind_of(interpreter) == "jvp") and (tangent := tangent_of(x)) is not None:
        found.append(tangent)
    if interpreter is None:
        return found
    level = interpreter.level()
    found = [get_unwrapped(y) if maybe_get_level(y) == level else y for y in found]
    layer = pop_dynamic_layer_stack()
    try:
        return [z for y in found for z in _everything_below(y)]
    finally:
        push_dynamic_layer_stack(layer)


def constant_of(x: Tensor) -> Tensor | None:
    """What is inside of a tensor that no active transform looks at; None if one does."""
    with _set_fwd_grad_enabled(True):
        return _constant_of(x)


def _constant_of(x: Tensor) -> Tensor | None:
    x = alive(x)
    if x.requires_grad or is_batchedtensor(x) or is_legacy_batchedtensor(x):
        return None
    # Whether it has a tangent at a level shows only where that level is the innermost.
    interpreter = peek_interpreter_stack()
    if (interpreter is None or kind_of(interpreter) == "jvp") and tangent_of(x) is not None:
        return None
    if interpreter is None:
        return x
    if maybe_get_level(x) == interpreter.level():
        x = get_unwrapped(x)
    layer = pop_dynamic_layer_stack()
    try:
        return _constant_of(x)
    finally:
        push_dynamic_layer_stack(layer)


def storage_of(x: Tensor) -> int | None:
    """What tells the memory of `x` from that of others, where there is any."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    try:
        cdata: int = x.untyped_storage()._cdata
        return cdata
    except (NotImplementedError, RuntimeError):  # sparse, or opaque
        return None


def unwrapped_at(x: Tensor, levels: Sequence[int]) -> Tensor:
    """`x` without the wrappers of some grad and jvp levels."""
    for level in reversed(levels):
        x = _unwrap_for_grad(x, level)
    return x


def physical(x: Tensor) -> tuple[Tensor, int]:
    """`x` below all wrappers, batch dimensions moved to the front, and how many there are."""
    batched = 0
    while is_functorch_wrapped_tensor(x):
        dim = maybe_get_bdim(x) if is_batchedtensor(x) else -1
        x = get_unwrapped(x)
        if dim >= 0:
            x = x.movedim(dim, 0)
            batched += 1
    return x, batched


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` of what is known to fit: its checks take as long as a small backward."""
    # What torch puts around it is for logs, and for compiled code that runs in other threads.
    run = torch.autograd.graph._engine_run_backward if has_compiled() else _run_backward
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


def parametrizations_cached() -> int:
    """How many blocks of `parametrize.cached` are open, which torch tells nobody."""
    return int(parametrize._cache_enabled)


def add_to_parametrizations_cached(blocks: int) -> None:
    parametrize._cache_enabled += blocks


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
