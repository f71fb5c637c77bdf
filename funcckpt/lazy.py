"""Values that are not there yet: results of operators that were put off."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _torch
from .operators import kind_of, map_tensors, tensors_of, written


class Redo(Exception):
    """The recomputation has to be run again, in full."""


class Lazy(Tensor):
    """What an operator will return, once somebody needs it. Without memory, which nobody can read."""

    _real: Tensor | None
    _deferred: Deferred | None

    @staticmethod
    def __new__(cls, look: Look) -> Lazy:
        return _torch.without_memory(cls, *look)

    __torch_function__ = _torch.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Where `Replay` is not the innermost mode.
        kwargs = kwargs or {}
        out = func(
            *[map_tensors(forced, a) for a in args], **{k: map_tensors(forced, a) for k, a in kwargs.items()}
        )
        return as_given(func, args, kwargs, out)


class Look(NamedTuple):
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


class Deferred:
    """A call of an operator that was put off."""

    __slots__ = ("__weakref__", "_ran", "args", "func", "is_done", "kwargs", "number", "outputs", "versions")

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], number: int, ran: set[int]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        # Of the calls that take time, the how manieth; -1 for those that only depend on one.
        self.number = number
        self._ran = ran
        self.is_done = False
        self.versions = [version_of(x) for x in tensors_of(args, kwargs)]
        self.outputs: list[weakref.ref[Lazy] | None] = []

    def waits_for(self) -> list[Deferred]:
        found = []
        for x in tensors_of(self.args, self.kwargs):
            if isinstance(x, Lazy) and x._deferred is not None:
                found.append(x._deferred)
        return found

    def is_wanted(self) -> bool:
        return not self.is_done and any([r is not None and r() is not None for r in self.outputs])

    def run(self) -> None:
        if self.is_done:
            return
        tensors = tensors_of(self.args, self.kwargs)
        if self.versions != [version_of(x) for x in tensors]:
            raise Redo  # written to since, unseen
        args = [map_tensors(_real, a) for a in self.args]
        kwargs = {k: map_tensors(_real, a) for k, a in self.kwargs.items()}
        del tensors
        self.args, self.kwargs, self.is_done = (), {}, True
        self._ran.add(self.number)
        out = self.func(*args, **kwargs)
        del args, kwargs
        outs = out if isinstance(out, (list, tuple)) else (out,)
        for y, reference in zip(outs, self.outputs, strict=True):
            lazy = None if reference is None else reference()
            if lazy is not None and lazy._real is None:
                lazy._real, lazy._deferred = y, None


def version_of(x: Tensor) -> int | None:
    return None if isinstance(x, Lazy) or x.is_inference() else x._version


def _real(x: Tensor) -> Tensor:
    if isinstance(x, Lazy):
        assert x._real is not None
        return x._real
    return x


def forced(x: Tensor) -> Tensor:
    """`x`, or what it stands for, which is computed now if it was not."""
    if not isinstance(x, Lazy):
        return x
    if x._deferred is not None:
        run_deferred(x._deferred)
    return _real(x)


def run_deferred(deferred: Deferred) -> None:
    pending = [deferred]  # no recursion: a chain may be long
    while pending:
        waits_for = pending[-1].waits_for()
        if waits_for:
            pending.extend(waits_for)
        else:
            pending.pop().run()


def as_given(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What an operator has returned: in place of an argument that it wrote to, the one that it was given."""
    if kind_of(func) != "writes":
        return out
    given = {id(_real(x)): x for x, _ in written(func, args, kwargs) if isinstance(x, Lazy)}
    if not given:
        return out
    if isinstance(out, Tensor):
        return given.get(id(out), out)
    if isinstance(out, (list, tuple)):
        return type(out)([given.get(id(y), y) for y in out])
    return out


PLAIN: set[type] = {Tensor, nn.Parameter, nn.Buffer, Lazy, torch._subclasses.FakeTensor}

_looks: dict[Any, Any] = {}
_MANY = 4096


def looks_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """How the results of an operator will look, in a tuple or alone; None if that cannot be told."""
    tensors = tensors_of(args, kwargs)
    device = tensors[0].device
    if any([x.device != device or not _is_plain(x) for x in tensors]):
        return None
    if (wanted := kwargs.get("device")) is not None and torch.device(wanted) != device:
        return None
    try:
        key = (func, *[_hashable(a) for a in args], *[(k, _hashable(a)) for k, a in kwargs.items()])
        if key in _looks:
            return _looks[key]
    except TypeError:
        return None
    if len(_looks) >= _MANY:
        _looks.clear()
    looks: Any = None
    with _torch.no_dispatch():
        try:
            kwargs = {k: map_tensors(on_meta, a) for k, a in kwargs.items() if k != "device"}
            out = func(*[map_tensors(on_meta, a) for a in args], **kwargs)
        except Exception:  # no rule for it, whatever it raises
            out = None
        if isinstance(out, Tensor):
            looks = look_of(out, device)
        elif isinstance(out, (list, tuple)):
            looks = tuple([look_of(y, device) if isinstance(y, Tensor) else y for y in out])
    _looks[key] = looks
    return looks


def _is_plain(x: Tensor) -> bool:
    # A tensor that is known to be zero has no memory.
    return x.layout is torch.strided and not (x.is_complex() or x.is_neg() or x._is_zerotensor())


def _hashable(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.shape, a.stride(), a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return tuple([_hashable(x) for x in a])
    hash(a)
    return type(a), a


def look_of(x: Tensor, device: torch.device) -> Look:
    return Look(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, device)


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
