"""A call as flat tensors and other values: the arguments of f, and its outputs."""

from __future__ import annotations

import functools
import operator
from collections import Counter, deque
from collections.abc import ItemsView, Sequence, ValuesView
from itertools import repeat
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import wrappers
from ..closures import Found, kinds, short
from ..errors import MutationError, OutputError, describe
from .tensors import Tensors, is_close, with_paths

# Types of arguments and outputs that hold no other object.
LEAVES = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# Torch's pytrees would make a tuple of a shape.
_flattened = functools.partial(
    pytree.tree_flatten, is_leaf=functools.partial(type.__instancecheck__, torch.Size)
)

_FLAGS = frozenset((int, bool, str, bytes, type(None), torch.dtype, torch.device))


class Arguments:
    """Arguments as flat tensors and other values."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        # Most calls have no containers, and need no pytree. Then the structure is the names of the keywords.
        leaves: list[Any] = [*args, *kwargs.values()]
        self._structure: Any = (*kwargs,)
        self.is_flat = all(map(isinstance, leaves, repeat(LEAVES)))
        if not self.is_flat:
            leaves, self._structure = _flattened(([*args], kwargs))
        self.others = leaves  # the leaves, with None in place of tensors
        self.iterator: int | None = None  # the position of one, which the recomputation would find empty
        self.tensors: list[Tensor] = []
        # For the position of each tensor among the leaves, its number among the tensors.
        self._numbers: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            # The graph refuses to save inference tensors. (The wrappers of levels are of their mode.)
            if isinstance(leaf, Tensor) and (
                not leaf.is_inference() or wrappers.is_functorch_wrapped_tensor(leaf)
            ):
                # A tensor that is passed twice is one input, and one object to f.
                number = self._numbers[i] = numbers.setdefault(id(leaf), len(numbers))
                if number == len(self.tensors):
                    self.tensors.append(leaf)
                leaves[i] = None
            elif not self.is_flat and hasattr(type(leaf), "__next__"):
                self.iterator = i
        self.arity = len(self.tensors)
        # Whether the others hold nothing, so that they need no search.
        self.are_atoms = self.is_flat or kinds.ATOMS.issuperset(map(type, leaves))

    def unflatten(self, tensors: Sequence[Tensor], others: Sequence[Any]) -> Any:
        """The args and kwargs of the call, with these tensors and other leaves."""
        leaves = [*others]
        for i, number in self._numbers.items():
            leaves[i] = tensors[number]
        if not self.is_flat:
            return pytree.tree_unflatten(leaves, self._structure)
        if not self._structure:
            return leaves, {}
        count = len(leaves) - len(self._structure)
        return leaves[:count], dict(zip(self._structure, leaves[count:], strict=True))

    def flags(self) -> tuple[Any, ...]:
        """Values that may decide what f does: strings, numbers except floats, and tuples of them."""
        tuples = [(*x,) if isinstance(x, tuple) else (x,) for x in self.others]
        return short(tuple([short(items) for items in tuples if _FLAGS.issuperset(map(type, items))]))

    def check_unchanged(
        self, name: str, tensors: Sequence[Tensor], others: Sequence[Any], args: Any, kwargs: Any
    ) -> None:
        """Raise if f has changed a container: it is a copy, so the caller would not see the change.

        `args` and `kwargs` are what `unflatten` gave for `tensors` and `others`, after the run of f.
        """
        now, structure = _flattened((args, kwargs))
        then = [*others]
        for i, number in self._numbers.items():
            then[i] = tensors[number]
        if not _are_same(self._structure, structure) or any(map(operator.is_not, then, now)):
            # A node of the user may come back in another form.
            then, before = _flattened(self.unflatten(tensors, others))
            if not _are_same(before, structure) or any(map(operator.is_not, then, now)):
                raise MutationError(
                    f"remat({name}) changes a list or dict among its arguments. That is a copy, so the "
                    "caller would not see the change. Change a copy of your own, and return it: "
                    "remat(lambda d: f(dict(d))), or list(d); of nested ones, tree_map(lambda x: x, d) of "
                    "torch.utils._pytree."
                )

    def where(self, i: int) -> str:
        """The name of tensor `i` among the arguments."""
        return self.where_leaf(next(at for at, number in self._numbers.items() if number == i))

    def where_leaf(self, i: int) -> str:
        tree = self.unflatten([torch.empty(0)] * len(self._numbers), [0] * len(self.others))
        paths = with_paths(tree)
        return f"argument {pytree.keystr(paths[i][0][1:])}"


_BY_IDENTITY: Any = object.__eq__


def _are_same(a: pytree.TreeSpec, b: pytree.TreeSpec) -> bool:
    """Whether two structures are equal, as far as what nodes of the user add to them can be compared."""
    try:
        if a == b:
            return True
        x: Any = a.context
        y: Any = b.context
        # An object that is equal to itself alone may be made anew whenever its node is flattened.
        are_new = type(x) is type(y) and type(x).__eq__ is _BY_IDENTITY and not callable(x)
        same = (are_new and getattr(x, "__dict__", 0) == getattr(y, "__dict__", 0)) or bool(x == y)
    except Exception:  # arrays are neither equal nor not
        same = True
    same = same and (a.type, a.num_children) == (b.type, b.num_children)
    return same and all(map(_are_same, a.children(), b.children()))


_ONE = pytree.tree_structure(0)  # of a single leaf
OutputMeta = tuple[torch.dtype, tuple[int, ...], torch.device]


class Outputs:
    """What f returned: its structure, its other values, and shape, dtype and device of each tensor."""

    # If values are compared: each output below all levels, and its number of batch dimensions.
    values: Sequence[tuple[Tensor, int]] = ()

    def __init__(self, name: str, out: Any, inputs: Sequence[Tensor] = ()) -> None:
        """`inputs` are the tensors that f was given."""
        leaves: list[Any] = [out]
        self.structure = _ONE
        if not isinstance(out, Tensor):
            leaves, self.structure = _flattened(out)
        self.others = leaves
        self.tensors: list[Tensor] = []
        # By position among the leaves: what is compared of each tensor, and its number among the outputs. An
        # input that is returned has a negative number: its place, counted from the end of the inputs.
        self._metas: dict[int, OutputMeta] = {}
        self._numbers: dict[int, int] = {}
        numbers = dict(zip(map(id, inputs), range(-len(inputs), 0), strict=True))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                number = self._numbers[i] = numbers.setdefault(id(leaf), len(self.tensors))
                if number == len(self.tensors):
                    self.tensors.append(leaf)
                # A strided nested tensor refuses to tell its shape.
                shape = () if leaf.is_nested and leaf.layout == torch.strided else leaf.shape
                self._metas[i] = leaf.dtype, shape, leaf.device
                leaves[i] = None
            elif not isinstance(leaf, LEAVES):
                _refuse_if_it_hides_tensors(leaf, f"remat({name}) returned a {type(leaf).__name__}")
        self._aliased = _aliased(self.tensors, inputs) if inputs else ()

    def as_in(self, first: Outputs) -> Tensors:
        """The tensors of this run that correspond to the output tensors of the first run."""
        if self._numbers == first._numbers:
            return (*self.tensors,)
        found = {n: self.tensors[self._numbers[i]] for i, n in first._numbers.items() if n >= 0}
        return (*found.values(),)

    def assemble(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        leaves, tensors = [*self.others], [*tensors]
        for i in self._aliased:
            # Made one of several views, to which autograd refuses writes: a write would also change the
            # tensors that share the memory, without their gradients.
            if tensors[i].requires_grad:
                tensors[i] = tensors[i].unsqueeze(0).unbind()[0]
        tensors += inputs
        for i, number in self._numbers.items():
            leaves[i] = tensors[number]
        return leaves[0] if self.structure is _ONE else pytree.tree_unflatten(leaves, self.structure)

    def difference(self, again: Outputs) -> str | None:
        """How the outputs of a recomputation differ from these, in words."""
        if not (self.structure is again.structure or _are_same(self.structure, again.structure)):
            return f"structure {again.structure}, but the forward {self.structure}"
        for i in range(len(self.others)):
            meta, now = self._metas.get(i), again._metas.get(i)
            if meta != now:
                return f"output {i} as {_in_words(now)}, but the forward as {_in_words(meta)}"
        if self.values:
            for i, ((x, levels), y) in enumerate(zip(self.values, again.as_in(self), strict=True)):
                values, levels_now = wrappers.physical(y.detach())
                # If a level that came later (the vmap of jacfwd) has batched it, it cannot be compared.
                if levels == levels_now and not is_close(x, values):
                    return f"other values in output {i}, {describe(x)}, than the forward"
        return None


def _in_words(meta: OutputMeta | None) -> str:
    return "no tensor" if meta is None else f"{str(meta[0]).removeprefix('torch.')}{[*meta[1]]} on {meta[2]}"


def _refuse_if_it_hides_tensors(leaf: Any, returned: str) -> None:
    if any(hasattr(type(leaf), name) for name in ("__next__", "__anext__", "__await__")):
        raise OutputError(
            f"{returned}, whose values are computed after the checkpoint. Return a list or tuple of them."
        )
    for x in Found((leaf, _items_in(leaf, {})), everything=True).tensors.values():
        if wrappers.is_tracked(x):
            loss = "outlive its transform" if wrappers.is_constant(x) else "lose its gradient"
            raise OutputError(
                f"{returned} that holds a tensor ({describe(x)}), which would {loss}. Return a tuple, list "
                "or dict of tensors, or register the class with torch.utils._pytree."
            )


# Containers that pytrees and the search do not follow: subclasses of those in Python, and views.
_CONTAINERS = (list, tuple, set, frozenset, deque, ValuesView, ItemsView, MappingProxyType)


def _items_in(x: Any, seen: dict[int, Any]) -> list[Any]:
    """The items and attributes of a container, and those of containers in it."""
    if id(x) not in seen and isinstance(x, _CONTAINERS):
        seen[id(x)] = x
        items = [
            *(x.values() if isinstance(x, MappingProxyType) else x),
            *getattr(x, "__dict__", {}).values(),
        ]
        return [*items, *[inner for item in items for inner in _items_in(item, seen)]]
    return []


def _aliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[int]:
    """The numbers of the outputs that share memory with another output or an input."""
    if len(outputs) == 1 and not (outputs[0]._is_view() or wrappers.is_functorch_wrapped_tensor(outputs[0])):
        return ()
    storages, shared = wrappers.storages_of(outputs), {*wrappers.storages_of(inputs)}
    if len(outputs) > 1:
        shared |= {key for key, count in Counter(storages).items() if count > 1}
    return [i for i, key in enumerate(storages) if key is not None and key in shared]
