"""The world in which f ran: random streams, autocast, default device and dtype.

A recomputation has to see it as the forward did, and to leave it as it was.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.random import BitGenerator, Generator, RandomState
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._torch import functorch
from .errors import CheckpointError


class PythonStream:
    """A stream of Python's or numpy's random numbers, with the methods of a `torch.Generator`."""

    def __init__(self, source: random.Random | RandomState | BitGenerator) -> None:
        self._source = source

    @staticmethod
    def of(value: Any) -> PythonStream | None:
        """The stream that an object is, if any."""
        if isinstance(value, Generator):
            value = value.bit_generator
        if isinstance(value, random.Random | RandomState | BitGenerator):
            return None if isinstance(value, random.SystemRandom) else PythonStream(value)
        return None

    def get_state(self) -> Any:
        source = self._source
        if isinstance(source, random.Random):
            return source.getstate()
        return pickle.dumps(source.state if isinstance(source, BitGenerator) else source.get_state())

    def set_state(self, state: Any) -> None:
        source = self._source
        if isinstance(source, random.Random):
            source.setstate(state)
        elif isinstance(source, BitGenerator):
            source.state = pickle.loads(state)
        else:
            source.set_state(pickle.loads(state))


Stream = torch.Generator | PythonStream
States = list[tuple[Stream, Any]]


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


# Whether casts are cached, and for each of the devices whether there are any, and to which dtype.
_Autocast = tuple[bool, tuple[bool, ...], tuple[torch.dtype, ...]]


def _state() -> tuple[torch.device, torch.dtype, _Autocast]:
    devices = autocast_devices()
    enabled, dtypes = map(torch.is_autocast_enabled, devices), map(torch.get_autocast_dtype, devices)
    return (
        functorch.default_device() if functorch.has_function_modes() else _CPU,
        torch.get_default_dtype(),
        (torch.is_autocast_cache_enabled(), (*enabled,), (*dtypes,)),
    )


_CPU = torch.device("cpu")


class Mode(TorchFunctionMode):
    """A mode of ours, which is no part of the world of f."""


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
        self.casts = any(self._state[2][1])

    def is_here(self) -> bool:
        """Whether it is as it was."""
        return not self._modes and self._state == _state()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Put it back for the time of a block."""
        device, dtype, autocast = self._state
        with ExitStack() as stack:
            if self._modes:
                active = functorch.function_modes()
                for mode in self._modes:
                    if mode not in active:
                        stack.enter_context(mode)
            if autocast != (now := _state()[2]):
                cache, *states = autocast
                for kind, enabled, cast, *current in zip(autocast_devices(), *states, *now[1:], strict=True):
                    if current != [enabled, cast]:
                        stack.enter_context(torch.autocast(kind, cast, enabled=enabled, cache_enabled=cache))
                stack.callback(torch.set_autocast_cache_enabled, now[0])
                torch.set_autocast_cache_enabled(cache)
            if device != functorch.default_device():
                stack.enter_context(device)
            if dtype != (before := torch.get_default_dtype()):
                stack.callback(torch.set_default_dtype, before)
                torch.set_default_dtype(dtype)
            yield


def own_autocast_cache() -> AbstractContextManager[None]:
    """Casts of a parameter are not shared between the inside of a checkpoint and the outside.

    A cached cast is a graph node that belongs to whoever asked for it first: found by a checkpoint, it
    would be a captured tensor; left behind by one, it would have lost its gradient.
    """
    if any([torch.is_autocast_enabled(device) for device in autocast_devices()]):
        return cleared_autocast_cache()
    return nullcontext()


@contextmanager
def cleared_autocast_cache() -> Iterator[None]:
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


# From which Python and numpy draw for whoever asks: the objects behind the functions of their modules.
OF_THE_PROCESS = {module: PythonStream(vars(module)["random"].__self__) for module in (random, np.random)}


def random_streams(explicit: Sequence[Any], of_the_process: bool = False) -> list[Stream]:
    """The generators from which f may draw: those of each device in use, and those it was given.

    Those of Python and numpy are slow to ask. They are among what code is given that says that it draws.
    """
    streams: list[Stream] = [torch.default_generator]
    for device in autocast_devices()[1:]:
        module = torch.get_device_module(device)
        if getattr(module, "is_initialized", lambda: True)():
            streams.extend(getattr(module, "default_generators", ()))
    for x in explicit:
        streams.append(PythonStream.of(x) or x)
    if of_the_process:
        streams.extend(OF_THE_PROCESS.values())
    return streams


def states(streams: Sequence[Stream]) -> States:
    found: States = []
    for stream in streams:
        found.append((stream, stream.get_state()))
    return found


def states_drawn_from(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> States:
    """The streams from which an operator may draw, as they are now."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return []
    explicit = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    return states(random_streams(explicit))


def moved(before: States) -> States:
    """Those of the streams from which random numbers were drawn since."""
    found: States = []
    for stream, state in before:
        if not _same_bytes(state, stream.get_state()):
            found.append((stream, state))
    return found


def marks(streams: Iterable[Stream]) -> list[int]:
    """What tells where streams are, in less room than a state."""
    return [hash(_bytes(stream.get_state())) for stream in streams]


def ended_elsewhere(before: States, ends: Sequence[int]) -> bool:
    """Whether a run that has drawn from streams has left one of them where another run has not."""
    streams = [stream for stream, _ in before]
    return any(
        [
            now != end and now != hash(_bytes(start))
            for (_, start), now, end in zip(before, marks(streams), ends, strict=True)
        ]
    )


def set_streams(recorded: States) -> None:
    for stream, state in recorded:
        stream.set_state(state)


# A process has one stream a device, and may go backward in several threads.
_rewound = threading.RLock()
# Seconds. A backward may wait for that of another device, which has a thread of its own.
_PATIENCE = 600


@contextmanager
def streams_at(recorded: States) -> Iterator[None]:
    """Random streams as they were recorded for the time of a block, and then as they are now."""
    if not recorded:
        yield
        return
    if not _rewound.acquire(timeout=_PATIENCE):
        raise CheckpointError(
            f"a recomputation has waited {_PATIENCE} seconds for one in another thread to be done with the "
            "random streams: they may wait for each other. Run the backwards one after the other, or draw "
            "the random numbers outside of the checkpoint."
        )
    try:
        now = states([stream for stream, _ in recorded])
        try:
            set_streams(recorded)
            yield
        finally:
            set_streams(now)
    finally:
        _rewound.release()


# Of the C library: states are compared where they are.
_memcmp: Any = (ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.PyDLL(None)).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


def _same_bytes(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.nbytes == b.nbytes and _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0
    return bool(a == b)


def _bytes(state: Any) -> bytes:
    # Read from memory: an operator would be seen by the modes and transforms that are active.
    return ctypes.string_at(state.data_ptr(), state.nbytes) if isinstance(state, Tensor) else state
