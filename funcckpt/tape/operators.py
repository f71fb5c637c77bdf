"""Operators, as a dispatch mode meets them: what they read, write and return."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import _torch

T = TypeVar("T")

# They ask for shapes only, or give memory that nothing was written to.
ALLOCATES = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_LIKE = frozenset(
    (
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
    )
)
_ASKS = frozenset(("is_same_size", "_has_same_storage_numel"))
# They write to running statistics, and their schemas do not say so.
_UNTOLD = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"))
_STATISTICS = frozenset(("running_mean", "running_var"))
# The kinds of operators that may write to what they are given, and those that read no values.
WRITE = frozenset(("writes", "other"))
READ_NO_VALUES = frozenset(("view", "like", "asks"))
# They return the memory that they were given, and their schemas do not say so either.
_VIEWS = frozenset(("_unsafe_view",))
# In-place operators after which nothing is left of what was there.
FILLS = frozenset(
    (
        "zero_",
        "fill_",
        "copy_",
        "bernoulli_",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    )
)


@functools.cache
def name_of(func: Any) -> str:
    schema = getattr(func, "_schema", None)  # operators that take functions have none
    return "" if schema is None else str(schema.name).partition("::")[2]


def cached_by_identity(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of operators, computed once for each. They are slow to hash."""
    known: dict[int, tuple[Any, T]] = {}

    @functools.wraps(function)
    def cached(func: Any) -> T:
        found = known.get(id(func))
        if found is None:
            found = known[id(func)] = func, function(func)  # whose id stays its own
        return found[1]

    return cached


@cached_by_identity
def kind_of(func: Any) -> str:
    """ "pure", "custom" (pure, as its schema says), "random", "view", "writes", "like", "asks" or "other"."""
    name, schema = name_of(func), getattr(func, "_schema", None)
    if schema is None or name in _UNTOLD:
        return "other"
    if name in _ASKS:
        return "asks"
    if name in _LIKE or name in ALLOCATES:
        return "like"
    if schema.is_mutable:
        return "writes"
    if name in _VIEWS or any(returned.alias_info is not None for returned in schema.returns):
        return "view"
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or not _returns_tensors(schema):
        return "other"
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    if torch.Tag.dynamic_output_shape in tags or func.namespace != "aten":
        return "custom"
    return "pure"


def _returns_tensors(schema: Any) -> bool:
    return any("Tensor" in str(returned.type) for returned in schema.returns)


@functools.cache
def _place_of_dropout(func: Any) -> int | None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return i
    return None


def kind_of_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    kind = kind_of(func)
    if kind == "random" and (place := _place_of_dropout(func)) is not None:
        p = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
        if p == 0.0:
            return "pure"
    return kind


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Place, name, and whether it is an `out` that is written all over."""
    schema = getattr(func, "_schema", None)
    untold = _STATISTICS if name_of(func) in _UNTOLD else frozenset()
    return tuple(
        [
            (i, a.name, a.is_out)
            for i, a in enumerate(() if schema is None else schema.arguments)
            if (a.alias_info is not None and a.alias_info.is_write) or a.name in untold
        ]
    )


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """What an operator of a kind in `WRITE` writes to, and whether it writes all of it."""
    found = []
    for i, name, is_out in _written_places(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        found += [(x, is_out or name_of(func) in FILLS) for x in values if isinstance(x, Tensor)]
    return found


@functools.cache
def reshapes(func: Any) -> bool:
    """Whether an in-place operator changes what a tensor looks like, and not what is in its memory."""
    return torch.Tag.inplace_view in func.tags and name_of(func) not in ("resize_", "resize_as_", "set_")


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a dispatch mode calls to run an operator that it was handed.

    A tensor that is known to be zero has no memory, and is told by a key above that of modes. Some operators
    (`aten.mul.Scalar`) pass that key by, and count on it in what they call: without it they crash.
    """
    if any([isinstance(x, Tensor) and x._is_zerotensor() for x in args]):
        with _torch.zero_tensors_told():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def makes_nothing(func: Any, kind: str) -> bool:
    """Whether an operator only looks at a tensor, or at its memory in another shape."""
    return kind in ("view", "asks") or (kind == "writes" and reshapes(func))


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [x for x in a if isinstance(x, Tensor)]
    return found


def map_tensors(f: Callable[[Tensor], Any], a: Any) -> Any:
    if isinstance(a, Tensor):
        return f(a)
    if isinstance(a, (list, tuple)):
        return [map_tensors(f, x) for x in a]
    return a


def address_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


PLAIN: set[type] = {Tensor, nn.Parameter, nn.Buffer, _torch.FakeTensor}


def is_subclass_first(types: Iterable[Any]) -> bool:
    """Whether a subclass among `types` acts on an operator itself, and its inner tensors come by later."""
    return not PLAIN.issuperset(types) and any(
        t not in PLAIN and t.__torch_dispatch__ is not _torch.no_torch_dispatch for t in types
    )


# -- tensors and their memory ---------------------------------------------------------------------------


class TensorMeta(NamedTuple):
    """What a strided tensor looks like."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    @classmethod
    def of(cls, x: Tensor) -> TensorMeta:
        return cls(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device)


def is_plain(x: Tensor) -> bool:
    """Whether its memory says all about `x`. A tensor that is known to be zero has none."""
    return x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x._is_zerotensor())


class StorageTable(Generic[T]):
    """What is known about memory, by the storage or any tensor in it, for as long as that is alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def get(self, x: Tensor | torch.UntypedStorage) -> T | None:
        if isinstance(x, Tensor):
            if x.layout is not torch.strided:
                return None
            x = x.untyped_storage()
        found = self._found.get(x._cdata)
        return found[1] if found is not None and found[0]() is x else None

    def set(self, x: Tensor | torch.UntypedStorage, value: T) -> None:
        storage = x.untyped_storage() if isinstance(x, Tensor) else x
        self._found[storage._cdata] = weakref.ref(storage), value

    def alive(self) -> list[T]:
        return [value for storage, value in self._found.values() if storage() is not None]


def fills_storage(x: Tensor) -> bool:
    """Whether no other memory is in the storage of `x` than that of `x`."""
    dense = x.layout is torch.strided and x.is_contiguous()
    return dense and x.numel() * x.element_size() == x.untyped_storage().nbytes()
