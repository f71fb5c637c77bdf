"""Contents of lists, dicts, attributes, arrays and tensors: what they were, and how they are put back."""

from __future__ import annotations

import ctypes
import dis
import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CellType, CodeType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch
from ..errors import MutationError

# Arrays of numpy of up to so many elements are copied.
_SMALL = 2**16

EMPTY = object()


class Weak(weakref.ref[Tensor]):
    """A result that is not in the graph of f: to hold it would keep another graph alive."""


class _Gone:
    """Stands where such a result has stood, which is not there any more."""

    def __init__(self, name: object) -> None:
        self.error = MutationError(
            f"{name}: a tensor that the function has found in a list, a dict or an attribute was replaced "
            "there since, and is gone: the recomputation cannot find it. Pass it as an argument."
        )

    def __getattr__(self, name: str) -> Any:
        raise self.error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(x.error for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))


def _value(x: Any, name: object = "") -> Any:
    if type(x) is not Weak:
        return x
    return _Gone(name) if (tensor := x()) is None else tensor


Counts = Callable[[str], bool]


class Contents(NamedTuple):
    """What was in a list or dict, by index or key."""

    there: Any
    was: dict[Any, Any]
    # How many there were in all, of which these are some; None where others come and go.
    size: int | None
    # Whether their order counts, as that of attributes does not.
    in_order: bool = False

    def is_here(self) -> bool:
        """Quickly; for results of something, which are held by a weak reference, not."""
        there, was = self.there, self.was
        if self.size is not None and len(there) != self.size:
            return False
        now: Iterable[Any] = there
        if isinstance(there, dict):
            now = there.values() if self.size == len(was) else map(there.get, was)
        return all(map(operator.is_, now, was.values()))

    def put_back(self, name: object, counts: Counts) -> Callable[[], None]:
        """Returns what undoes it."""
        now = None
        if not self.is_here():
            now = self._take()
            self._give(
                {
                    key: now[key] if self.in_order and is_count(x, now.get(key), counts) else _value(x, name)
                    for key, x in self.was.items()
                }
            )
        return functools.partial(self.leave, now, counts)

    def leave(self, now: dict[Any, Any] | None, counts: Counts) -> None:
        """As it was before the recomputation, which may have counted or added something."""
        if now is None and self.is_here():
            return
        was, then = self.was, self._take()
        left = dict(was if now is None else now)
        for key, x in then.items():
            if key in was:
                if key in left:
                    left[key] = _left(was[key], left[key], x, "" if self.in_order else key, counts)
            elif isinstance(self.there, list):
                left[len(left)] = x
            elif self.in_order:
                left.setdefault(key, x)
        self._give(left)

    def _take(self) -> dict[Any, Any]:
        there = self.there
        if isinstance(there, list):
            return dict(enumerate(there))
        if self.size is None:
            return {key: there[key] for key in self.was if key in there}
        return dict(zip(there, there.values(), strict=True))

    def _give(self, content: dict[Any, Any]) -> None:
        there = self.there
        if isinstance(there, list):
            there[:] = content.values()
        elif self.in_order:  # which may be that of the layers of a module
            there.clear()
            there.update(content)
        else:
            for key in [key for key in (self.was if self.size is None else there) if key not in content]:
                there.pop(key, None)
            for key, x in content.items():
                if there.get(key, EMPTY) is not x:
                    there[key] = x


def is_count(was: Any, now: Any, counts: Counts) -> bool:
    return type(was) is int and type(now) is int and counts("")


def _left(was: Any, now: Any, then: Any, name: str, counts: Counts) -> Any:
    """What a variable is after a recomputation, which has begun with `was` and left `then`."""
    if type(was) is int and type(now) is int and type(then) is int and counts(name):
        return then if name == "" else now + then - was
    return now


def leave_cell(cell: CellType, now: Any) -> None:
    if now is EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = now


@functools.lru_cache(maxsize=4096)
def added_to(code: CodeType) -> frozenset[str]:
    """The names of attributes and globals to which code adds, or none for items and closure variables."""
    names, adds = set(), False
    for instruction in dis.get_instructions(code):
        adds |= instruction.opname == "INPLACE_ADD" or instruction.argrepr == "+="
        if adds and instruction.opname.startswith("STORE_"):
            kind, name, adds = instruction.opname, instruction.argval, False
            if kind in ("STORE_ATTR", "STORE_GLOBAL"):
                names.add(name)
            elif kind == "STORE_SUBSCR" or (kind == "STORE_DEREF" and name in code.co_freevars):
                names.add("")
    return frozenset(names).union(*[added_to(c) for c in code.co_consts if isinstance(c, CodeType)])


class Attributes(dict[str, Any]):
    """Those of a class, or of an object with slots, as if they stood in a dict."""

    def __init__(self, of: Any, now: dict[str, Any]) -> None:
        super().__init__(now)
        self._of = of

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._of, name, default)

    def values(self) -> Any:
        return [getattr(self._of, name, EMPTY) for name in self]

    def __setitem__(self, name: str, x: Any) -> None:
        setattr(self._of, name, x)

    def pop(self, name: str, default: Any = None) -> Any:
        with suppress(AttributeError):
            delattr(self._of, name)


def changed(name: object, what: str) -> MutationError:
    return MutationError(
        f"{name}: a tensor that it uses ({what}) was changed in place since the forward, like a parameter by "
        "an optimizer: the recomputation would start from the changed values. Run the backward before, or "
        "change a copy (x.clone()). If the function itself does so, and you know better, pass "
        'determinism_check="none".'
    )


class Array:
    """One of numpy's, which has no version, and what was in it: all, or so much of one that is large."""

    def __init__(self, x: numpy.ndarray[Any, Any]) -> None:
        self._x = x
        self._was = self._now()

    def _now(self) -> bytes:
        x = self._x
        return x.tobytes() if x.size <= _SMALL else bytes(x.flat[:: x.size // _SMALL].data)

    def put_back(self, name: object, check: bool) -> Callable[[], None] | None:
        x, now = self._x, self._now()
        if now == self._was:
            return None
        if x.size > _SMALL or not x.flags.writeable:
            if check:
                raise changed(name, f"an array of numpy, {x.dtype}{list(x.shape)}")
            return None
        x[...] = numpy.frombuffer(self._was, x.dtype).reshape(x.shape)

        def undo() -> None:
            x[...] = numpy.frombuffer(now, x.dtype).reshape(x.shape)

        return undo


# -- tensors ----------------------------------------------------------------------------------------


def version(x: Tensor) -> int | None:
    """None for those that have no version: of inference mode, and not initialized."""
    try:
        return x._version
    except (RuntimeError, ValueError):
        return None


def layout_of(x: Any) -> Any:
    """How a distributed tensor is laid out; None for all others."""
    return getattr(x, "device_mesh", None), getattr(x, "placements", None)


def snapshot(x: Tensor) -> bytes | Tensor:
    """A copy, which no mode and no graph sees; or the content of its memory, which is quicker."""
    memory = _memory(x)
    if memory is not None:
        return memory
    with _torch.without_dispatch_modes(), _torch.plain():
        return x.detach().clone()


def from_snapshot(copy: bytes | Tensor, like: Tensor) -> Tensor:
    """A new tensor with what a snapshot of `like` holds."""
    with _torch.without_dispatch_modes(), _torch.plain():
        if isinstance(copy, bytes):
            return torch.frombuffer(bytearray(copy), dtype=like.dtype).view(like.shape)
        return copy.clone()


def is_as_before(x: Tensor, copy: bytes | Tensor) -> bool:
    """Whether `x` is what it was; no, where to look would be to wait for a device."""
    if isinstance(copy, bytes):
        return _memory(x) == copy
    with _torch.without_dispatch_modes(), _torch.plain():
        return type(x) in _PLAIN and x.device.type == "cpu" and torch.equal(x, copy)


def assign(x: Tensor, copy: bytes | Tensor) -> None:
    """Let `x` be what it was, without a word to its version counter."""
    value = from_snapshot(copy, x)
    with torch.no_grad(), _torch.version_kept(x):
        x.copy_(value)


_PLAIN = (Tensor, nn.Parameter)
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NUMBERS = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def _memory(x: Tensor) -> bytes | None:
    """What is in the memory of `x`, where that is all there is to know of its values, and at hand."""
    if (
        type(x) in _PLAIN
        and x.is_cpu
        and x.layout is torch.strided
        and x.dtype in _NUMBERS
        and x.is_contiguous()
        and x.numel()
        and not (x.is_neg() or _torch.is_functorch_wrapped_tensor(x))
    ):
        return ctypes.string_at(x.data_ptr(), x.nbytes)
    return None
