"""Numbers for values: two have the same only if they were made in the same way.

Value numbering (Cocke and Schwartz, "Programming Languages and Their Compilers", 1970), of the operators
that run. A number stands for an operator, its arguments that are no tensors, and the numbers of those that
are; for an input of f; for a tensor that was there before, as long as it lives and is not written to. Memory
that nothing was written to has a number that never comes again, for somebody may write to it unseen.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch
from .lazy import version_of
from .operators import ALLOCATES, WRITE, address_of, name_of, tensors_of, written

# An output of an operator: the how manieth call it was, and the how manieth of its outputs.
Place = tuple[int, int]


class _Origin(NamedTuple):
    """Where what is in a storage comes from, as long as that lives."""

    storage: weakref.ref[torch.UntypedStorage]
    number: int
    offset: Any
    places: frozenset[Place]


class Numbers:
    """Value numbering. Two tensors have the same number only if they were made in the same way."""

    def __init__(self, known: Numbers | None = None) -> None:
        self._numbers: dict[Any, int] = {} if known is None else dict(known._numbers)
        # Tensors that were there before, by the addresses of their storages.
        self._constants: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = (
            {} if known is None else known._constants
        )
        self._is_again = known is not None
        self._labels: frozenset[int] | None = None if known is None else known._labels or frozenset()
        self._origins: dict[int, _Origin] = {}
        self._draws = 0
        self._times: dict[int, int] = {}

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def label(self, labels: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """The inputs of f, which are the same in each run, wherever they are."""
        physical = [(_torch.below_wrappers(x), _wrapping(x)) for x in inputs]
        storages = [x.untyped_storage() if x.layout is torch.strided else None for x, _ in physical]
        addresses = [None if s is None else s._cdata for s in storages]
        usable = frozenset(
            [
                label
                for label, address in zip(labels, addresses, strict=True)
                if address is not None and addresses.count(address) == 1
            ]
        )
        if self._labels is not None:
            usable &= self._labels
        self._labels = usable
        for label, (x, wrapping), storage in zip(labels, physical, storages, strict=True):
            if label in usable and storage is not None:
                number = self._number(("input", label, wrapping))
                self._origins[storage._cdata] = _Origin(
                    weakref.ref(storage), number, x.storage_offset(), frozenset()
                )

    def origin(self, x: Tensor) -> _Origin:
        storage = x.untyped_storage()
        found = self._origins.get(storage._cdata)
        if found is not None and found.storage() is storage:
            return found
        origin = _Origin(weakref.ref(storage), self._constant(x, storage), 0, frozenset())
        self._origins[storage._cdata] = origin
        return origin

    def _constant(self, x: Tensor, storage: torch.UntypedStorage) -> int:
        known = self._constants.get(storage._cdata)
        if known is None or known[0]() is not storage:
            if self._is_again:
                return self._number(object())
            known = weakref.ref(storage), self._number(object())
            self._constants[storage._cdata] = known
        return self._number(("constant", known[1], version_of(x)))

    def places(self, x: Tensor) -> frozenset[Place]:
        """What has made a tensor, if it was made here."""
        if x.layout is not torch.strided:
            return frozenset()
        storage = x.untyped_storage()
        found = self._origins.get(storage._cdata)
        return found.places if found is not None and found.storage() is storage else frozenset()

    def _of(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                return object()
            origin = self.origin(a)
            look = a.storage_offset() - origin.offset, a.shape, a.stride(), a.dtype, a.is_conj(), a.is_neg()
            return origin.number, *look
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
        known = storage._cdata in self._origins or storage._cdata in self._constants
        if not known and type(x) is Tensor and x.device.type == "cpu" and 0 < storage.nbytes() <= 4096:
            values = ctypes.string_at(storage.data_ptr(), storage.nbytes())
            number = self._number(("values", values))
            self._origins[storage._cdata] = _Origin(weakref.ref(storage), number, 0, frozenset())

    def _without_overwritten(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        lost = {id(x) for x, all_of_it in written(func, args, kwargs) if all_of_it and _fills_storage(x)}

        def look(a: Any) -> Any:
            return (a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) and id(a) in lost else a

        return [look(a) for a in args], {k: look(a) for k, a in kwargs.items()}

    def made(
        self, func: Any, kind: str, call: int, number: int, args: Any, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Note what a call has returned, or written to."""
        outs = out if isinstance(out, (list, tuple)) else (out,)
        if kind in WRITE:
            for i, (x, all_of_it) in enumerate(written(func, args, kwargs)):
                if x.layout is torch.strided:
                    before = frozenset() if all_of_it and _fills_storage(x) else self.places(x)
                    self._note(x, (number, "written", i), 0, before | {(call, i)})
        if kind == "writes":
            return
        for i, y in enumerate(outs):
            if not isinstance(y, Tensor) or y.layout is not torch.strided:
                continue
            storage = y.untyped_storage()
            if any(address_of(x) == storage._cdata for x in tensors_of(args, kwargs)):
                continue  # a view, whatever the schema says
            if kind == "view" and (given := tensors_of(args, kwargs)):  # of what is not there yet
                self._origins[storage._cdata] = self.origin(given[0])._replace(storage=weakref.ref(storage))
                continue
            self._note(y, (number, i), y.storage_offset(), frozenset({(call, i)}))

    def _note(self, x: Tensor, key: Any, offset: Any, places: frozenset[Place]) -> None:
        storage = x.untyped_storage()
        self._origins[storage._cdata] = _Origin(weakref.ref(storage), self._number(key), offset, places)


def _wrapping(x: Tensor) -> tuple[Any, ...]:
    """The dimensions in which `x` is batched, innermost level first."""
    found = []
    while _torch.is_functorch_wrapped_tensor(x):
        if _torch.is_batchedtensor(x):
            found.append(_torch.maybe_get_bdim(x))
        x = _torch.get_unwrapped(x)
    return tuple(found)


def _fills_storage(x: Tensor) -> bool:
    dense = x.is_contiguous() and x.layout is torch.strided
    return dense and x.numel() * x.element_size() == x.untyped_storage().nbytes()
