"""Operators, as a dispatch mode sees them: what they read, write, return and cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._torch import autograd, functorch

aten = torch.ops.aten

# Views and questions about shapes, which their schemas do not mark as such.
_VIEWS = frozenset(("_unsafe_view", "is_same_size", "_has_same_storage_numel"))
# They write to running statistics, which their schemas do not mark.
_UNTOLD = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"))
_UNTOLD |= {"batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
# The shapes of their results depend on values, which their tags do not tell.
_SHAPED_BY_VALUES = frozenset(("_pack_padded_sequence", "_padded_dense_to_jagged_forward", "_unsafe_index"))
_STATISTICS = frozenset(("running_mean", "running_var"))
# Namespaces of collectives. The schemas of c10d do not mark that they write.
_C10D = "c10d"
COLLECTIVES = (_C10D, "_c10d_functional")
# The kinds of operators that read no values.
READ_NO_VALUES = frozenset(("view", "like"))


@functools.cache
def name_of(func: Any) -> str:
    schema = getattr(func, "_schema", None)  # operators that take functions have none
    return "" if schema is None else str(schema.name).partition("::")[2]


class Operator(NamedTuple):
    """What is known of an operator. `func` itself is among it, so that its id stays its own."""

    func: Any
    # "pure", "custom" (pure, as its schema says), "random", "view", "writes", "like" or "other".
    kind: str
    # Whether it writes, and does not count that in a dispatch mode.
    counts_no_versions: bool
    # Whether it consists of other operators. These are what a mode sees, but not in inference mode, where the
    # dispatch keys of autograd are off, which take it apart. (Of nested tensors, some have kernels.)
    is_composite: bool
    # Whether it makes a tensor with given options, and is not a cast.
    is_factory: bool


# By id: to hash an operator takes torch a call of Python.
_operators: dict[int, Operator] = {}


def about(func: Any) -> Operator:
    if (of := _operators.get(id(func))) is None:
        counts_no_versions = name_of(func).startswith("_foreach") and func._schema.is_mutable
        arguments = getattr(getattr(func, "_schema", None), "arguments", ())
        is_factory = name_of(func) != "_to_copy" and "pin_memory" in [a.name for a in arguments]
        what = _kind_of(func), counts_no_versions, autograd.is_composite(func), is_factory
        of = _operators[id(func)] = Operator(func, *what)
    return of


def comes_whole(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is to be taken apart, as it is in other modes."""
    return about(func).is_composite and not any([x.is_nested for x in tensors_of(args, kwargs)])


def kind_of(func: Any) -> str:
    return about(func).kind


def _kind_of(func: Any) -> str:
    name = name_of(func)
    if not name or name in _UNTOLD:
        return "other"
    if func.namespace == _C10D:
        return "writes"
    if name in _VIEWS:
        return "view"
    random = torch.Tag.nondeterministic_seeded in func.tags
    if name.startswith(("empty", "new_")) or (name.endswith("_like") and not random):
        return "like"
    if func._schema.is_mutable:
        # Some in-place operators change the shape of a tensor, and not its memory.
        reshapes = torch.Tag.inplace_view in func.tags and name not in ("resize_", "resize_as_", "set_")
        return "view" if reshapes else "writes"
    returned = func._schema.returns
    if any(x.alias_info is not None for x in returned):
        return "view"
    if torch.Tag.data_dependent_output in func.tags or not any("Tensor" in str(x.type) for x in returned):
        return "other"
    if random:
        return "random"
    depends = torch.Tag.dynamic_output_shape in func.tags or name in _SHAPED_BY_VALUES
    return "custom" if depends or func.namespace != "aten" else "pure"


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if not name_of(func).startswith("_scaled_dot_product"):
        return True
    names = [a.name for a in func._schema.arguments]
    return bool(dict(zip(names, args, strict=False), **kwargs).get("dropout_p"))


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    if not (name := name_of(func)):
        return []
    arguments, untold = func._schema.arguments, _STATISTICS if name in _UNTOLD else frozenset()
    if func.namespace == _C10D and name.endswith("_"):
        untold = frozenset((arguments[0].name,))
    return [
        (i, a.name)
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in untold
    ]


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    places = _written_places(func)
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
    return tensors_in(values) if values else []


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator inside of a dispatch mode.

    A zero tensor of autograd has no memory, and a conjugate view that of another tensor. The dispatch keys
    that handle them are above that of modes. Some operators (`aten.mul.Scalar`, `aten.linalg_pinv`) need
    them in the operators that they call, and would crash or be wrong without them.
    """
    if (_operators.get(id(func)) or about(func)).counts_no_versions:
        torch.autograd.graph.increment_version(
            [x for x in written(func, args, kwargs) if not x.is_inference()]
        )
    for x in args:
        if isinstance(x, Tensor) and (x.is_complex() or x._is_zerotensor()):
            with functorch.handling_zeros(), functorch.handling_conjugates(), functorch.handling_negatives():
                return func(*args, **kwargs)
    return func(*args, **kwargs)


def results(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (list, tuple)) else (out,)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a pytree."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator."""
    found: list[Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [x for x in a if isinstance(x, Tensor)]
    return found


def signature(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What decides shapes and dtypes of the results of an operator: no values of tensors or factors."""
    return func, *map(meta_of, args), *map(meta_of, kwargs.items())


def meta_of(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.shape, a.stride() if a.layout is torch.strided else a.layout, a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return tuple(map(meta_of, a))
    return float if isinstance(a, float) else (type(a), a)


# Types that do not handle an operator before a mode does.
PLAIN_TYPES: set[type] = {Tensor, functorch.FakeTensor}


def is_subclass_first(types: Iterable[Any]) -> bool:
    """Whether a subclass among `types` handles an operator itself. A mode then sees its inner tensors."""
    return any(
        [t not in PLAIN_TYPES and t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types]
    )


def inner_tensors(x: Tensor) -> list[Tensor]:
    """The tensors of which a subclass consists, as it says itself."""
    if not is_traceable_wrapper_subclass(x):
        return []
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return [z for y in inner if isinstance(y, Tensor) for z in (y, *inner_tensors(y))]


# -- tensors and their memory ---------------------------------------------------------------------------


class TensorMeta(NamedTuple):
    """Shape, strides, offset, dtype and device of a strided tensor."""

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
    """Whether `x` is a plain strided tensor with memory."""
    return x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x._is_zerotensor() or x.is_nested)


# -- what they cost ---------------------------------------------------------------------------------------


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The floating-point operations of one call of an operator."""
    # Imported late, since this imports triton, if there is one.
    from torch.utils.flop_counter import flop_registry

    packet = getattr(func, "overloadpacket", func)
    formula = flop_registry.get(_COUNTED_AS.get(packet, packet)) or _MORE_FLOPS.get(packet)
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    except TypeError:  # it does not know an option of the operator, such as `out_dtype`
        return 0


# What torch.utils.flop_counter has no formula for (torch 2.13). Without these, `w @ x` of one sample would
# count zero, and count under vmap, where it becomes a matrix product.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    aten.dot: lambda x, y, out_val=None, **_: 2 * x.numel(),
    aten.vdot: lambda x, y, out_val=None, **_: 2 * x.numel(),
    aten.mv: lambda a, x, out_val=None, **_: 2 * a.numel(),
    aten.addmv: lambda y, a, x, out_val=None, **_: 2 * a.numel(),
}
_FLASH = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {
    getattr(aten, f"{_FLASH}_for_cpu{end}"): getattr(aten, _FLASH + end) for end in ("", "_backward")
}
