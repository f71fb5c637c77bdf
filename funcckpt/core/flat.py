"""A call as flat tensors and all the rest: what f is given, and what it returns."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import wrappers
from ..closures import Found
from ..errors import InputError, MutationError, OutputError, describe
from .program import Tensors

# What may be an argument and holds nothing.
LEAVES = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Arguments:
    """Arguments as flat tensors and all the rest."""

    tensors: list[Tensor]
    # What is no tensor, in its place.
    others: list[Any]
    # Where tensors stand among the leaves, and which of them.
    positions: Sequence[int]
    numbers: Sequence[int]
    is_flat = True
    _keys: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static_argnums: frozenset[int] = frozenset(),
        static_argnames: frozenset[str] = frozenset(),
    ) -> None:
        self.static: dict[int | str, Any] = {}
        self.are_tensors = not (kwargs or static_argnums or static_argnames) and are_distinct_tensors(args)
        if self.are_tensors:
            self.tensors, self.arity = [*args], len(args)
            self.others = [None] * self.arity
            self.positions = self.numbers = range(self.arity)
            return
        leaves: list[Any] = [*args]
        for i in static_argnums:
            if not -len(args) <= i < len(args):
                continue  # given by keyword, or left to its default
            self.static[i % len(args)], leaves[i] = leaves[i], None
        for key in static_argnames:
            if key in kwargs:
                self.static[key], kwargs = kwargs[key], {**kwargs, key: None}
        # Most calls have tensors and numbers for arguments: no tree to take apart.
        self._keys = tuple(kwargs)
        values = [*leaves, *kwargs.values()]
        self.is_flat = all(map(isinstance, values, repeat(LEAVES)))
        if self.is_flat:
            leaves = values
        else:
            leaves, self._structure = pytree.tree_flatten((leaves, kwargs))
        self.others = leaves
        self.tensors = []
        self.positions, self.numbers = positions, ordinals = [], []
        numbers: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            # An inference tensor is no variable of any graph, which would refuse to save it.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                # The same tensor twice is one input, and f finds it to be one.
                number = numbers.setdefault(id(leaf), len(numbers))
                if number == len(self.tensors):
                    self.tensors.append(leaf)
                positions.append(i)
                ordinals.append(number)
                leaves[i] = None
            elif not self.is_flat and hasattr(type(leaf), "__next__"):
                raise InputError(
                    f"remat({name}): {self._where_leaf(i)} is an iterator ({type(leaf).__name__}). The "
                    "forward uses it up, and the recomputation would find it empty: pass a list or a "
                    "tuple."
                )
        self.arity = len(self.tensors)

    def unflatten(
        self, tensors: Sequence[Tensor], others: Sequence[Any], static: dict[int | str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        if self.are_tensors and not static:
            return [*tensors], {}
        leaves = list(others)
        for i, number in zip(self.positions, self.numbers, strict=True):
            leaves[i] = tensors[number]
        if self.is_flat:
            args, kwargs = self._apart(leaves)
        else:
            args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        for key, value in static.items():
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        return args, kwargs

    def _apart(self, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        if not self._keys:
            return leaves, {}
        count = len(leaves) - len(self._keys)
        return leaves[:count], dict(zip(self._keys, leaves[count:], strict=True))

    def check_unchanged(self, name: str, before: tuple[list[Any], Any], args: Any, kwargs: Any) -> None:
        """f is given containers of its own: what it does to them nobody would see."""
        leaves, structure = before
        now, new_structure = pytree.tree_flatten((args, kwargs))
        if structure != new_structure or any(map(operator.is_not, leaves, now)):
            raise MutationError(
                f"remat({name}) changes a list or dict among its arguments. The caller would not see it: "
                "return the changed one."
            )

    def where(self, i: int) -> str:
        """The place of tensor `i` among the arguments, in words."""
        return self._where_leaf(self.positions[self.numbers.index(i)])

    def _where_leaf(self, i: int) -> str:
        leaves = [*range(len(self.others))]
        places = self._apart(leaves) if self.is_flat else pytree.tree_unflatten(leaves, self._structure)
        for path, position in pytree.tree_flatten_with_path(places)[0]:
            if position == i:
                return f"argument {pytree.keystr(path[1:])}"
        raise AssertionError(f"no leaf {i} among the arguments")


def are_distinct_tensors(leaves: Sequence[Any]) -> bool:
    """Whether all are tensors of no subclass, of which autograd keeps account, and none is given twice."""
    return (
        _ONLY_TENSORS.issuperset(map(type, leaves))
        and not any(map(Tensor.is_inference, leaves))
        and (len(leaves) < 2 or len({*map(id, leaves)}) == len(leaves))
    )


_ONLY_TENSORS = frozenset({Tensor})


class Outputs:
    """What f returned: its structure, what is no tensor, and how each tensor looked."""

    # What holds of one tensor alone.
    structure: pytree.TreeSpec | None = None
    positions: Sequence[int] = (0,)
    others: Sequence[Any] = (None,)
    # Each tensor is an input, which is handed back as it is, or an output, once.
    _sources: Sequence[tuple[bool, int]] = ((False, 0),)
    _kept: Sequence[int] = (0,)
    _aliased: frozenset[int] = frozenset()
    tensors: list[Tensor]
    # What another run has to give as well: how each tensor looks, and where it stands.
    form: Any

    def __init__(self, name: str, out: Any, inputs: Sequence[Tensor] = (), views_tell: bool = False) -> None:
        """`inputs` are the tensors that f was given for them.

        What shares memory and can be differentiated is a view, where no autograd.Function hides that.
        """
        if isinstance(out, Tensor) and id(out) not in map(id, inputs):  # as most of them are
            self.tensors, self.looks = [out], [_look_of(out)]
            self.form = self.looks
            may_share = inputs and (
                wrappers.below_wrappers(out)._is_view() if views_tell else _may_share(out)
            )
            if may_share and _shares_memory(out, inputs):
                self._aliased = frozenset({0})
            return
        given = {id(x): i for i, x in enumerate(inputs)}
        leaves: list[Any] = [out]
        if not isinstance(out, Tensor):
            leaves, self.structure = pytree.tree_flatten(out)
        self.positions = (*[i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)],)
        sources: list[tuple[bool, int]] = []
        kept: list[int] = []
        everything = [leaves[i] for i in self.positions]
        self.looks = [_look_of(x) for x in everything]
        self.form = self.looks, self.structure, self.positions
        outputs: dict[int, Tensor] = {}
        for i, x in enumerate(everything):
            if id(x) in given:
                sources.append((True, given[id(x)]))
                continue
            if id(x) not in outputs:
                outputs[id(x)] = x
                kept.append(i)
            sources.append((False, list(outputs).index(id(x))))
        self.tensors, self._sources, self._kept = list(outputs.values()), sources, kept
        self._aliased = _aliased(self.tensors, inputs) if inputs else frozenset()
        for i in self.positions:
            leaves[i] = None
        self.others = leaves
        for leaf in leaves:
            if isinstance(leaf, LEAVES):
                continue
            if hasattr(type(leaf), "__next__") or inspect.isawaitable(leaf):
                raise OutputError(
                    f"remat({name}) returned a {type(leaf).__name__}, whose values come only after the "
                    "checkpoint. Return them in a list or tuple."
                )
            hidden = [x for x in Found(leaf, everything=True).tensors.values() if wrappers.is_tracked(x)]
            if hidden:
                raise OutputError(
                    f"remat({name}) returned a {type(leaf).__name__} that holds a tensor "
                    f"({describe(hidden[0])}), which would lose its gradient. Return a tuple, list or "
                    "dict of tensors, or register the class with torch.utils._pytree."
                )

    def as_in(self, first: Outputs) -> Tensors:
        """The tensors that were outputs in the first run, where this is another one."""
        if self.structure is None and self._kept == first._kept:
            return (*self.tensors,)
        return tuple([self.tensors[self._sources[i][1]] for i in first._kept])

    def assemble(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        if self.structure is None and self._kept and not self._aliased:
            return tensors[0]
        leaves = list(self.others)
        tensors = [_guarded(y) if i in self._aliased else y for i, y in enumerate(tensors)]
        for i, (is_input, number) in zip(self.positions, self._sources, strict=True):
            leaves[i] = (inputs if is_input else tensors)[number]
        if self.structure is None:
            return leaves[0]
        return pytree.tree_unflatten(leaves, self.structure)

    def difference(self, again: Outputs) -> str | None:
        """How the outputs of a recomputation differ from these, in words."""
        if self.structure != again.structure:
            return f"structure {again.structure}, and the forward {self.structure}"
        for i, (here, there) in enumerate(zip(self.looks, again.looks, strict=False)):
            if here != there:
                return f"output {i} as {_look(there)}, and the forward as {_look(here)}"
        if self.positions != again.positions:
            return f"tensors at {again.positions}, and the forward at {self.positions}"
        return None


def _look_of(x: Tensor) -> tuple[torch.dtype, tuple[int, ...], torch.device]:
    # A nested tensor with strides has no shape that one may ask for.
    return x.dtype, () if x.is_nested and x.layout == torch.strided else x.shape, x.device


def _look(look: tuple[torch.dtype, tuple[int, ...], torch.device]) -> str:
    dtype, shape, device = look
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def _aliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> frozenset[int]:
    """Which outputs share memory with another one, or with an input."""
    if len(outputs) < 2 and not any(map(_may_share, outputs)):
        return frozenset()
    storages, shared = wrappers.storages_of(outputs), {*wrappers.storages_of(inputs)}
    if len(storages) > 1:
        shared |= {key for key, count in Counter(storages).items() if count > 1}
    return frozenset([i for i, key in enumerate(storages) if key is not None and key in shared])


def _may_share(y: Tensor) -> bool:
    return y._is_view() or wrappers.is_functorch_wrapped_tensor(y)


def _shares_memory(y: Tensor, inputs: Sequence[Tensor]) -> bool:
    key, *others = wrappers.storages_of((y, *inputs))
    return key is not None and key in others


def _guarded(y: Tensor) -> Tensor:
    """`y` as one of several views, to which autograd lets nobody write.

    The others would change with it, and their gradients would not know.
    """
    return y.unsqueeze(0).unbind()[0] if y.requires_grad else y
