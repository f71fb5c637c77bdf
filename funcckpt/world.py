"""The world in which f ran: random streams, autocast, default device and dtype.

A recomputation has to see it as the forward did, and to leave it as it was.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.random import BitGenerator, Generator, RandomState
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ._torch import functorch


class PythonStream:
    """A stream of Python's or numpy's random numbers, with the methods of a `torch.Generator`."""

    def __init__(self, source: random.Random | RandomState | BitGenerator | Generator) -> None:
        self._source: Any = source.bit_generator if isinstance(source, Generator) else source

    def get_state(self) -> bytes:
        return pickle.dumps(self._source.__getstate__())

    def set_state(self, state: bytes) -> None:
        self._source.__setstate__(pickle.loads(state))


Stream = torch.Generator | PythonStream
States = list[tuple[Stream, Any]]


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocasts() -> bool:
    """Whether autocast is on, for the CPU or the accelerator."""
    return any(map(torch.is_autocast_enabled, autocast_devices()))


_CPU = torch.device("cpu")

# Kernels of `scaled_dot_product_attention`, in the order in which `_state` tells whether they may be chosen.
_KERNELS = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"


def _state() -> tuple[Any, ...]:
    """Default device and dtype; autocast's switches, dtypes and cache; which kernels attention may choose;
    and whether `__torch_function__` of subclasses is on.
    """
    device = _CPU
    if functorch.has_function_modes():  # the default device is one
        with functorch.without_levels():  # torch may make a tensor to find out
            device = torch.get_default_device()
    kinds = autocast_devices()
    enabled, dtypes = map(torch.is_autocast_enabled, kinds), map(torch.get_autocast_dtype, kinds)
    casts = (*enabled,), (*dtypes,), torch.is_autocast_cache_enabled()
    of = torch.backends.cuda
    flash, efficient = of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled()
    attention = flash, efficient, of.math_sdp_enabled(), of.cudnn_sdp_enabled()
    overrides = functorch._get_torch_function_state().value
    return device, torch.get_default_dtype(), casts, attention, overrides


class Mode(TorchFunctionMode):
    """A mode of this package, which is not part of the world of f."""


class World:
    """What f may read of torch's global state, as it is now."""

    __slots__ = ("_modes", "_state", "casts")

    def __init__(self) -> None:
        # Tensor.backward runs below the function modes that are active, if any.
        self._modes: Sequence[Any] = ()
        if functorch.has_function_modes():
            modes = functorch.function_modes()
            self._modes = [m for m in modes if not isinstance(m, (Mode, functorch.DeviceContext))]
        self._state = _state()
        # Whether autocast is enabled.
        self.casts = any(self._state[2][0])

    def is_here(self) -> bool:
        """Whether the world is still the same."""
        return not self._modes and self._state == _state()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Put this world back for a block of code."""
        device, dtype, (enabled, dtypes, cache), attention, overrides = self._state
        now = _state()
        with ExitStack() as stack:
            active = functorch.function_modes() if self._modes else ()
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
            if self._state[2] != now[2]:
                for kind, is_on, cast in zip(autocast_devices(), enabled, dtypes, strict=True):
                    stack.enter_context(torch.autocast(kind, cast, enabled=is_on, cache_enabled=cache))
            if attention != now[3]:
                allowed = [getattr(SDPBackend, name) for name in compress(_KERNELS, attention)]
                stack.enter_context(sdpa_kernel(allowed))
            if device != now[0]:
                stack.enter_context(device)
            if dtype != now[1]:
                stack.callback(torch.set_default_dtype, now[1])
                torch.set_default_dtype(dtype)
            if overrides != now[4]:
                before = functorch._get_torch_function_state()
                stack.callback(functorch._set_torch_function_state, before)
                functorch._set_torch_function_state(type(before)(overrides))
            yield


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Casts of a parameter are not shared between the inside of a checkpoint and the outside.

    A cached cast is a graph node that belongs to whoever asked for it first: found by a checkpoint, it
    would be a captured tensor; left behind by one, it would have lost its gradient.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


# The global streams of Python and numpy: the objects behind the functions of their modules.
OF_THE_PROCESS = [PythonStream(vars(module)["random"].__self__) for module in (random, np.random)]


def random_streams(explicit: Sequence[Any], of_the_process: bool = False) -> list[Stream]:
    """The streams from which f may draw: those of each device in use, and `explicit` ones.

    The global ones of Python and numpy are slow to read: they are added only if `of_the_process`.
    """
    streams: list[Stream] = [torch.default_generator]
    for device in autocast_devices()[1:]:
        module = torch.get_device_module(device)
        if getattr(module, "is_initialized", lambda: True)():
            streams.extend(getattr(module, "default_generators", ()))
    for x in explicit:
        streams.append(x if isinstance(x, torch.Generator) else PythonStream(x))
    if of_the_process:
        streams.extend(OF_THE_PROCESS)
    return streams


# Torch makes the tensor of a state while it holds the lock of the generator. The collector may run then, and
# let another thread go on, which must not wait for that lock: it would not let go of the interpreter.
_one_at_a_time = threading.RLock()


def states(streams: Sequence[Stream]) -> States:
    with _one_at_a_time:
        return [*zip(streams, map(_state_of, streams), strict=True)]


_state_of = operator.methodcaller("get_state")


_TAG = torch.Tag.nondeterministic_seeded


def states_drawn_from(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> States:
    """The streams from which an operator may draw, as they are now."""
    # Whether an operator of somebody else draws, only its author could say.
    if getattr(func, "namespace", "aten") == "aten" and _TAG not in getattr(func, "tags", ()):
        return []
    explicit = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    return states(random_streams(explicit))


def moved(before: States) -> States:
    """The streams, with their old states, from which random numbers were drawn since."""
    found: States = []
    with _one_at_a_time:
        for stream, state in before:
            if _bytes(state) != _bytes(stream.get_state()):
                found.append((stream, state))
    return found


def drawn_since(before: States) -> tuple[States, States]:
    """The streams from which random numbers were drawn since: with their old states, and as they are now."""
    if not before:
        return [], []
    old = moved(before)
    return old, states([stream for stream, _ in old])


def hashes(recorded: States) -> list[int]:
    """Hashes of the states of streams, which take less memory than the states."""
    return [hash(_bytes(state)) for _, state in recorded]


def ended_elsewhere(before: States, ends: Sequence[int]) -> bool:
    """Whether a stream is now neither at its state `before`, nor where the other run ended (`ends`)."""
    now = hashes(states([stream for stream, _ in before]))
    return any([here not in (start, end) for here, start, end in zip(now, hashes(before), ends, strict=True)])


def set_streams(recorded: States) -> None:
    with _one_at_a_time:
        for stream, state in recorded:
            stream.set_state(state)


# A process has one stream for each device, and may run backwards in several threads.
_rewound = threading.RLock()


@contextmanager
def streams_at(recorded: States) -> Iterator[None]:
    """Set random streams to recorded states for a block of code, and put them back afterwards."""
    streams, shared = [stream for stream, _ in recorded], random_streams((), of_the_process=True)
    # A thread with streams of its own need not wait: f may wait for another thread itself.
    with _rewound if any(map(shared.__contains__, streams)) else nullcontext():
        now = states(streams)
        try:
            set_streams(recorded)
            yield
        except GeneratorExit:  # an interrupt has left the block: the collector closes it at any time
            now = []
            raise
        finally:
            set_streams(now)


def _bytes(state: Any) -> bytes:
    # Read from memory: an operator would be seen by the modes and transforms that are active.
    return ctypes.string_at(state.data_ptr(), state.nbytes) if isinstance(state, Tensor) else state
