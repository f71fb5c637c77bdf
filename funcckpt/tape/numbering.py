"""Numbers for values: two have the same only if they were made in the same way.

Value numbering (Cocke and Schwartz, "Programming Languages and Their Compilers", 1970), of the operators
that run. A number stands for an operator, its arguments that are no tensors, and the numbers of those that
are; for an input of f; for a tensor that was there before, as long as it lives and is not written to. Memory
that nothing was written to has a number that never comes again, for somebody may write to it unseen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .operators import (
    ALLOCATES,
    WRITE,
    StorageTable,
    address_of,
    fills_storage,
    name_of,
    tensors_of,
    written,
)


class _Origin(NamedTuple):
    """The number of what is in a storage, and where in it that begins."""

    number: int
    offset: Any = 0


class Numbers:
    """Value numbering. Two tensors have the same number only if they were made in the same way."""

    def __init__(self, known: Numbers | None = None) -> None:
        self._numbers: dict[Any, int] = {} if known is None else dict(known._numbers)
        # Tensors that were there before.
        self._constants: StorageTable[int] = StorageTable() if known is None else known._constants
        self._is_again = known is not None
        self._labels: frozenset[int] | None = None if known is None else known._labels or frozenset()
        self._origins: StorageTable[_Origin] = StorageTable()
        self._draws = 0
        self._times: dict[int, int] = {}

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """The inputs of f, which are the same in each run, wherever they are."""
        physical = [(_torch.below_wrappers(x), _wrapping(x)) for x in inputs]
        addresses = [address_of(x) for x, _ in physical]
        usable = frozenset(
            [
                label
                for label, address in zip(labels, addresses, strict=True)
                if address and addresses.count(address) == 1
            ]
        )
        if self._labels is not None:
            usable &= self._labels
        self._labels = usable
        for label, (x, wrapping) in zip(labels, physical, strict=True):
            if label in usable:
                number = self._number(("input", label, wrapping))
                self._origins.set(x, _Origin(number, x.storage_offset()))

    def _origin(self, x: Tensor) -> _Origin:
        origin = self._origins.get(x)
        if origin is None:
            origin = _Origin(self._constant(x))
            self._origins.set(x, origin)
        return origin

    def _constant(self, x: Tensor) -> int:
        known = self._constants.get(x)
        if known is None:
            known = self._number(object())
            if self._is_again:
                return known
            self._constants.set(x, known)
        return self._number(("constant", known, None if x.is_inference() else x._version))

    def _of(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                return object()
            number, offset = self._origin(a)
            return number, a.storage_offset() - offset, a.shape, a.stride(), a.dtype, a.is_conj(), a.is_neg()
        if isinstance(a, (list, tuple)):
            return tuple([self._of(x) for x in a])
        if isinstance(a, float):
            return "float", a.hex()
        try:
            hash(a)
        except TypeError:
            return object()
        return type(a), a

    def of_call(self, func: Any, kind: str, args: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
        """The number of what a call returns, and how often that was called before."""
        if name_of(func) in ALLOCATES or kind == "other":
            return self._number(object()), 0
        if func is torch.ops.aten.lift_fresh.default:
            self._lift(args[0])
        if kind == "writes":
            args, kwargs = self._without_overwritten(func, args, kwargs)
        key: tuple[Any, ...] = (func, self._of(args), *[(k, self._of(a)) for k, a in kwargs.items()])
        if torch.Tag.nondeterministic_seeded in func.tags and kind != "pure":
            self._draws = self._number(("draw", self._draws, *key))
            key = (self._draws, *key)
        number = self._number(key)
        times = self._times.get(number, 0)
        self._times[number] = times + 1
        return number, times

    def _lift(self, x: Tensor) -> None:
        """A small tensor that was made out of numbers is known by its values."""
        storage = x.untyped_storage()
        known = self._origins.get(x) is not None or self._constants.get(x) is not None
        if not known and type(x) is Tensor and x.device.type == "cpu" and 0 < storage.nbytes() <= 4096:
            values = ctypes.string_at(storage.data_ptr(), storage.nbytes())
            self._origins.set(x, _Origin(self._number(("values", values))))

    def _without_overwritten(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        lost = {id(x) for x, all_of_it in written(func, args, kwargs) if all_of_it and fills_storage(x)}

        def look(a: Any) -> Any:
            return (a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) and id(a) in lost else a

        return [look(a) for a in args], {k: look(a) for k, a in kwargs.items()}

    def made(self, func: Any, kind: str, number: int, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note what a call has returned, or written to."""
        if kind in WRITE:
            for i, (x, _) in enumerate(written(func, args, kwargs)):
                if x.layout is torch.strided:
                    self._origins.set(x, _Origin(self._number((number, "written", i))))
        if kind == "writes":
            return
        given = tensors_of(args, kwargs)
        for i, y in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if not isinstance(y, Tensor) or y.layout is not torch.strided:
                continue
            if any(address_of(x) == address_of(y) for x in given):
                continue  # a view, whatever the schema says
            if kind == "view" and given:  # of what was not computed
                self._origins.set(y, self._origin(given[0]))
                continue
            self._origins.set(y, _Origin(self._number((number, i)), y.storage_offset()))


def _wrapping(x: Tensor) -> tuple[Any, ...]:
    """The dimensions in which `x` is batched, innermost level first."""
    found = []
    while _torch.is_functorch_wrapped_tensor(x):
        if _torch.is_batchedtensor(x):
            found.append(_torch.maybe_get_bdim(x))
        x = _torch.get_unwrapped(x)
    return tuple(found)
