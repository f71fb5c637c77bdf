"""Values that are not there yet: results of operators that were put off."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _torch
from .operators import WRITE, kind_of, map_tensors, tensors_of, written


class Redo(Exception):
    """The recomputation has to be run again, in full."""


class Calls(set[int]):
    """The numbers of the calls of one recomputation that were put off and then run."""

    def __init__(self) -> None:
        # Whether nobody watches any more what is written to, so that none may be run from here on.
        self.is_over = False
        # Those that were asked for then.
        self.late: set[int] = set()

    def add(self, number: int) -> None:
        if self.is_over:
            self.late.add(number)
            raise Redo
        super().add(number)


class Cell:
    """A value that is there, or the call that will give it."""

    __slots__ = ("__weakref__", "deferred", "real")

    def __init__(self, deferred: Deferred) -> None:
        self.real: Tensor | None = None
        self.deferred: Deferred | None = deferred


class Lazy(Tensor):
    """What an operator will return, once somebody needs it. Without memory, which nobody can read."""

    cell: Cell

    @staticmethod
    def __new__(cls, look: Look, cell: Cell) -> Lazy:
        lazy: Lazy = _torch.without_memory(cls, *look)
        lazy.cell = cell
        return lazy

    __torch_function__ = _torch.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Where `Replay` is not the innermost mode, or has left.
        kwargs = kwargs or {}
        if kind_of(func) in WRITE and any([isinstance(x, Lazy) for x, _ in written(func, args, kwargs)]):
            raise Redo  # others may wait for what was there
        return run_forced(func, args, kwargs, tensors_of(args, kwargs))


class Look(NamedTuple):
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


class Deferred:
    """A call of an operator that was put off.

    Attributes
    ----------
    waits_for : list of Cell
        What it reads that may not be there yet.
    reads : list of Tensor
        What it reads that is.
    number : int
        Of the calls that take time, the how manieth; -1 for those that only depend on one.
    is_view : bool
        Whether what it returns shares the memory of another lazy tensor.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_func",
        "_kwargs",
        "_outputs",
        "_ran",
        "_stream",
        "_versions",
        "is_done",
        "is_view",
        "number",
        "reads",
        "waits_for",
    )

    def __init__(
        self, func: Any, args: Any, kwargs: dict[str, Any], number: int, ran: Calls, stream: Any
    ) -> None:
        self.waits_for: list[Cell] = []
        self.reads: list[Tensor] = []
        self._versions: list[int | None] = []
        self._func = func
        self._args = [map_tensors(self._hold, a) for a in args]
        self._kwargs = {k: map_tensors(self._hold, a) for k, a in kwargs.items()}
        self._outputs: list[weakref.ref[Cell] | None] = []
        self._ran = ran
        # Of an accelerator: the one on which its arguments are made.
        self._stream = stream
        self.number = number
        self.is_done = False
        self.is_view = kind_of(func) == "view"

    def _hold(self, x: Tensor) -> Any:
        if isinstance(x, Lazy):
            self.waits_for.append(x.cell)
            return x.cell
        self._versions.append(None if x.is_inference() else x._version)
        # Without the graph that it may be part of: nobody should see that it is held.
        x = _torch.alias_unseen(x) if x.requires_grad else x
        self.reads.append(x)
        return x

    def give(self, look: Any) -> Any:
        """The next output: lazy, if it is a tensor."""
        if not isinstance(look, Look):
            self._outputs.append(None)
            return look
        cell = Cell(self)
        self._outputs.append(weakref.ref(cell))
        return Lazy(look, cell)

    def give_to(self, cell: Cell) -> None:
        """What it returns belongs into a cell, where something else was."""
        before = cell.deferred
        assert before is not None
        new = Cell(before)
        self._args[0] = new
        self.waits_for = [new if c is cell else c for c in self.waits_for]
        before._outputs = [weakref.ref(new) if r is not None and r() is cell else r for r in before._outputs]
        self._outputs = [weakref.ref(cell)]
        self.is_view = before.is_view
        cell.deferred = self

    def is_wanted(self) -> bool:
        return not self.is_done and any([r is not None and r() is not None for r in self._outputs])

    def run(self) -> None:
        if self.is_done:
            return
        self._ran.add(self.number)
        if self._versions != [None if x.is_inference() else x._version for x in self.reads]:
            raise Redo  # written to since, unseen
        if self._stream is not None and torch.accelerator.current_stream(self._stream.device) != self._stream:
            raise Redo
        args = [_filled(a) for a in self._args]
        kwargs = {k: _filled(a) for k, a in self._kwargs.items()}
        self._args, self._kwargs, self.waits_for, self.reads, self.is_done = [], {}, [], [], True
        out = self._func(*args, **kwargs)
        del args, kwargs
        outs = out if isinstance(out, (list, tuple)) else (out,)
        for y, reference in zip(outs, self._outputs, strict=True):
            cell = None if reference is None else reference()
            if cell is not None:
                cell.real, cell.deferred = y, None


def _filled(a: Any) -> Any:
    if isinstance(a, Cell):
        assert a.real is not None
        return a.real
    return [_filled(x) for x in a] if isinstance(a, (list, tuple)) else a


def stream_of(x: Tensor) -> Any:
    """The stream of an accelerator on which we are, for a tensor that is on one."""
    return None if x.device.type in ("cpu", "meta") else torch.accelerator.current_stream(x.device)


def write_later(func: Any, args: Any, kwargs: dict[str, Any], ran: Calls, stream: Any) -> Deferred | None:
    """Put off an in-place operator on a lazy tensor for which nobody waits, if nobody shares its memory."""
    target: Lazy = args[0]
    cell = target.cell
    in_place_view = torch.Tag.inplace_view in func.tags
    deferred = None
    if cell.deferred is not None and (in_place_view or not cell.deferred.is_view):
        deferred = Deferred(func, args, kwargs, -1, ran, stream)
        deferred.give_to(cell)
    elif in_place_view:
        assert cell.real is not None
        cell.real = func(cell.real.detach(), *args[1:], **kwargs)
    if in_place_view:
        with _torch.no_dispatch():
            func(target, *args[1:], **kwargs)
    return deferred


def version_of(x: Tensor) -> int | None:
    return None if isinstance(x, Lazy) or x.is_inference() else x._version


def forced(x: Tensor) -> Tensor:
    """`x`, or what it stands for, which is computed now if it was not."""
    if not isinstance(x, Lazy):
        return x
    if x.cell.deferred is not None:
        run_deferred(x.cell.deferred)
    assert x.cell.real is not None
    return x.cell.real


def run_deferred(deferred: Deferred) -> None:
    pending = [deferred]  # no recursion: a chain may be long
    while pending:
        waits_for = [cell.deferred for cell in pending[-1].waits_for if cell.deferred is not None]
        if waits_for:
            pending.extend(waits_for)
        else:
            pending.pop().run()


def run_forced(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Run an operator, on values that are there, or on no more than their looks."""
    if Lazy not in map(type, tensors):
        return func(*args, **kwargs)
    kind = kind_of(func)
    if kind == "asks" or (kind == "like" and isinstance(args[0], Lazy)):
        return _by_look(func, kind, args, kwargs)
    real = [map_tensors(forced, a) for a in args]
    out = func(*real, **{key: map_tensors(forced, a) for key, a in kwargs.items()})
    return as_given(func, args, kwargs, out)


def _by_look(func: Any, kind: str, args: Any, kwargs: dict[str, Any]) -> Any:
    device = args[0].device
    with _torch.no_dispatch():
        args = [map_tensors(lambda x: on_meta(x) if isinstance(x, Lazy) else x, a) for a in args]
    if kind == "like":
        return func(*args, **{**kwargs, "device": kwargs.get("device") or device})
    with _torch.no_dispatch():
        return func(*args, **kwargs)


def as_given(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What an operator has returned: in place of an argument that it wrote to, the one that it was given."""
    if kind_of(func) != "writes":
        return out
    given = {id(x.cell.real): x for x, _ in written(func, args, kwargs) if isinstance(x, Lazy)}
    if not given:
        return out
    if isinstance(out, Tensor):
        return given.get(id(out), out)
    if isinstance(out, (list, tuple)):
        return type(out)([given.get(id(y), y) for y in out])
    return out


PLAIN: set[type] = {Tensor, nn.Parameter, nn.Buffer, Lazy, _torch.FakeTensor}


def is_subclass_first(types: Iterable[Any]) -> bool:
    """Whether a subclass among `types` acts on an operator itself, and its inner tensors come by later."""
    return not PLAIN.issuperset(types) and any(
        t not in PLAIN and t.__torch_dispatch__ is not _torch.no_torch_dispatch for t in types
    )


_looks: dict[Any, Any] = {}
_MANY = 4096


def looks_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """How the results of an operator will look, in a tuple or alone; None if that cannot be told."""
    tensors = tensors_of(args, kwargs)
    device = tensors[0].device
    if any([x.device != device or not is_plain(x) for x in tensors]):
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


def is_plain(x: Tensor) -> bool:
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
