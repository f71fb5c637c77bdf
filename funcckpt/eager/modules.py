"""What modules refer to, told again by identity.

A module that was searched is most often as it was when it is searched the next time, before the
recomputation and after it. A `Layout` knows where a module, with all that is inside of it, has what it refers
to: whoever looks again reads that in loops that run in C, and visits no module. It holds no module, and
nothing of one that could hold it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import _torch
from ..errors import MutationError
from ..lookup import ATOMS, own_classes
from ..nodes import MODULE_FLAGS, MODULE_HOOKS, PARTS
from .contents import Contents, from_snapshot, is_as_before, layout_of, snapshot, version
from .reach import is_of_torch_alone, is_plain, writes_unseen

# Buffers of up to so many elements are copied before a forward that may change them.
_SMALL = 2**16

# What a module has, and what does not change what it computes, or is changed inside.
_FIXED = MODULE_HOOKS | MODULE_FLAGS - {"training"}

# Of a module of a library, attributes that lead to what is the user's.
_GIVEN = (list, FunctionType, MethodType, functools.partial)

_forward_of = operator.attrgetter("forward")
state_of = operator.attrgetter("__dict__")
parts_of = operator.itemgetter(*PARTS)
hooks_of = operator.itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
_version_of = operator.attrgetter("_version")
# The hooks that a forward runs, and how it calls them.
_forward_hooks_of = operator.itemgetter(*sorted(name for name in MODULE_HOOKS if "forward" in name))


State = dict[str, Any]
# The items of dicts of hooks, if there are any.
Hooks = list[list[tuple[int, Any]]] | None


class Layout:
    """Where a module, with all that is inside of it, has what it refers to."""

    def __init__(self, root: nn.Module) -> None:
        modules: list[nn.Module] = []
        # Of TorchScript, which has parameters elsewhere.
        scripted: list[nn.Module] = []
        pending = [root]
        found = {id(root)}
        while pending:
            module = pending.pop()
            if type(module._parameters) is not dict or "training" not in module.__dict__:
                scripted.append(module)
                continue
            modules.append(module)
            for part in module._modules.values():
                if part is not None and id(part) not in found:
                    found.add(id(part))
                    pending.append(part)
        self.keys = frozenset(found)
        self.root = weakref.ref(root, lambda _: _layouts.pop(key, None))
        key = id(root)
        self.references = [*map(weakref.ref, modules)]
        self.scripted = [*map(weakref.ref, scripted)]
        self.kind_of_each = [*map(type, modules)]
        self.kinds = {*self.kind_of_each}
        # The code of the user's, and what is in classes beside it.
        self.own = {base for kind in self.kinds for base in own_classes(kind)}
        states = [*map(state_of, modules)]
        parts = [*chain.from_iterable(map(parts_of, states))]
        names = [tuple([name for name in state if name not in _FIXED]) for state in states]
        self._own = [operator.itemgetter(*each) for each in names]
        self._sizes = [*map(len, states)]
        self.names = [*names, *map(tuple, parts)]
        self._part_names = [*chain.from_iterable(parts)]
        places = [(i, name) for i, own in enumerate(names) for name in own]
        at_parts = [at for at, (_, name) in enumerate(places) if name in PARTS]
        at_parts.sort(key=lambda at: (places[at][0], [*PARTS].index(places[at][1])))
        self.parts = _at(at_parts)
        self._filled = _at([at for at, part in zip(at_parts, parts, strict=True) if part])
        self._empty = _at([at for at, part in zip(at_parts, parts, strict=True) if not part])
        self._training = _at([at for at, (_, name) in enumerate(places) if name == "training"])
        places += [(len(states) + i, name) for i, part in enumerate(parts) for name in part]
        # In which of all dicts each value is, and its name there.
        self.places = places
        values, _ = self.read(states)
        self._types = [*map(type, values)]
        self._modes = self._training(values)
        self._look_at(values, len(states))
        self._parts_inside = [*map(id, self._modules(values))]
        self._kinds_inside = [*map(type, self._modules(values))]

    def _look_at(self, values: Sequence[Any], number: int) -> None:
        """Find where there are which values."""
        tensors: list[int] = []
        modules: list[int] = []
        self._scratch: dict[int, Tensor] = {}
        self.loose: list[int] = []
        # What leads further than to tensors and modules.
        self.further: list[int] = []
        # Buffers that the forward may change, and whether it does so in any case, or unseen.
        self.changing: list[tuple[int, bool, bool]] = []
        # Whether all tensors have a version: one that has none may be exchanged for one that has.
        self.is_settled = True
        # Whether some get their shape in the first call.
        self.is_lazy = any(map(is_lazy, values))
        for at, ((i, name), x) in enumerate(zip(self.places, values, strict=True)):
            of, part = divmod(i - number, 3)
            if isinstance(x, Tensor):
                if i < number:
                    self.loose.append(at)
                elif version(x) is None:
                    self.is_settled = False
                elif part == 1 and self._modes[of]:
                    module: Any = self.references[of]()
                    runs = module._buffers.get("running_mean") is not None
                    self.changing.append((at, runs, writes_unseen(type(module))))
                else:
                    tensors.append(at)
            elif i < number:
                if name not in PARTS and self._leads_further(i, x):
                    self.further.append(at)
            elif part == 2 and x is not None:
                modules.append(at)
        self.tensors = _at(tensors)
        self._modules = _at(modules)
        self._find_others(values, {*tensors, *self.loose, *[at for at, _, _ in self.changing]}, number)

    def _find_others(self, values: Sequence[Any], tensors: set[int], number: int) -> None:
        """Find whether there may be something that leads to tensors that are not found."""
        plain = [
            at for at, x in enumerate(values) if isinstance(x, tuple | FunctionType | BuiltinFunctionType)
        ]
        self._plain = _at(plain)
        self._plain_values = self._plain(values)
        found = tensors.union(plain)
        self._forwards = [*map(_forward_of, self.kinds)]
        self.is_of_torch = all(kind.__module__.startswith("torch.nn.modules.") for kind in self.kinds)
        self._may_be_closed = (
            not self.scripted
            and all(map(is_of_torch_alone, self.kinds))
            and all(map(is_plain, self._plain_values))
            and all(
                at in found or i >= number or name in PARTS or type(values[at]) in ATOMS
                for at, (i, name) in enumerate(self.places)
            )
        )

    def _leads_further(self, i: int, x: Any) -> bool:
        is_own = len(own_classes(self.kind_of_each[i])) > 0
        return type(x) not in ATOMS if is_own else isinstance(x, _GIVEN)

    def is_closed(self, values: Sequence[Any]) -> bool:
        """Whether modules without hooks have nothing but the tensors found in them, and what is torch's."""
        return (
            self._may_be_closed
            and [*map(_forward_of, self.kinds)] == self._forwards
            and all(map(operator.is_, self._plain(values), self._plain_values))
            and not _torch.has_global_module_hook()
        )

    def modules(self) -> list[nn.Module | None]:
        return [reference() for reference in self.references]

    def are_of_their_kinds(self, values: Sequence[Any]) -> bool:
        kinds = [*map(type, self._modules(values))]
        return kinds == self._kinds_inside and type(self.root()) is self.kind_of_each[0]

    def read(self, states: Sequence[State]) -> tuple[list[Any], Sequence[State]]:
        """All values that there are, and the dicts of parts in which some are."""
        values: list[Any] = []
        for own, state in zip(self._own, states, strict=True):
            values += own(state)
        filled = self._filled(values)
        for part in filled:
            values += part.values()
        return values, filled

    def is_complete(self, states: Sequence[State], filled: Sequence[State], values: Sequence[Any]) -> bool:
        """Whether there are no others, and these have their names."""
        return (
            [*map(len, states)] == self._sizes
            and not any(self._empty(values))
            and [*chain.from_iterable(filled)] == self._part_names
        )

    def scratch_for(self, at: int, x: Tensor) -> Tensor:
        """A tensor that may be written to in place of `x`, and is read by no one."""
        scratch = self._scratch.get(at)
        if scratch is None or (scratch.shape, scratch.dtype, scratch.device) != (x.shape, x.dtype, x.device):
            scratch = self._scratch[at] = from_snapshot(x.detach(), x)
        return scratch

    def found(self, alone: bool) -> Modules | None:
        """What is there now, if it is of the same kind and in the same places."""
        try:
            states = [*map(state_of, self.modules())]
            values, filled = self.read(states)
            if (
                self.is_complete(states, filled, values)
                and type(self.root()) is self.kind_of_each[0]
                and [*map(type, values)] == self._types
                and self._training(values) == self._modes
                and [*map(id, self._modules(values))] == self._parts_inside
            ):
                return Modules(self, states, values, alone)
        except (AttributeError, KeyError, RuntimeError, ValueError):
            pass  # a module is gone, or an attribute; or a tensor has no version any more
        return None


# By the ids of their roots.
_layouts: dict[int, Layout] = {}


def modules_of(root: nn.Module, alone: bool) -> Modules:
    """What a module, with all that is inside of it, refers to now.

    `alone`: it is called with nothing but tensors and constants, and nobody else has it meanwhile.
    """
    layout = _layouts.get(id(root))
    found = None if layout is None else layout.found(alone)
    if found is None:
        layout = Layout(root)
        found = layout.found(alone)
        assert found is not None
        if layout.is_settled and not layout.is_lazy:
            _layouts[id(root)] = layout
    return found


class Modules:
    """What modules have referred to in a forward."""

    __slots__ = (
        "_hooks",
        "_states",
        "is_closed",
        "kept",
        "layout",
        "may_be_unchanged",
        "results",
        "snapshots",
        "values",
        "versions",
    )

    def __init__(self, layout: Layout, states: list[State], values: list[Any], alone: bool) -> None:
        self.layout, self._states, self.values = layout, states, values
        # Whether all tensors are found that a call may use, beside those that it is given.
        self._hooks = _hooks_in(states)
        self.is_closed = self._hooks is None and layout.is_closed(values)
        self.versions = [*map(_version_of, layout.tensors(values))]
        # Tensors that are looked at one by one, and their versions.
        self.kept: list[tuple[int, Tensor, int | None]] = []
        # Buffers that the forward may change, or has changed: copies of what they were, if that matters.
        self.snapshots: dict[int, tuple[Any, bool]] = {}
        # Where there are tensors with a graph.
        self.results: list[int] = []
        # Whether some of those may be copies of what is still the same: statistics are not compared.
        self.may_be_unchanged = False
        if layout.loose or layout.changing:
            self._look_closer(alone)

    def _look_closer(self, alone: bool) -> None:
        layout, values = self.layout, self.values
        for at in layout.loose:
            if values[at].grad_fn is not None:
                self.results.append(at)
            elif (now := version(values[at])) is not None:
                self.kept.append((at, values[at], now))
        for at, runs, unseen in layout.changing:
            x = values[at]
            self.kept.append((at, x, x._version))
            if runs and alone and self.is_closed and layout.is_of_torch:
                # In training, batch_norm updates them and does not read them; nor does anybody else.
                self.snapshots[at] = None, True
            elif x.layout is torch.strided and (runs or unseen or x.numel() <= _SMALL):
                self.snapshots[at] = snapshot(x), runs
                self.may_be_unchanged |= not runs

    def initialized(self) -> Modules:
        """After the forward, in which lazy modules have become what they are from then on."""
        root = self.layout.root() if self.layout.is_lazy else None
        return self if root is None else modules_of(root, alone=False)

    @property
    def running(self) -> list[Tensor]:
        """What batch_norm updates without a word to the version counter."""
        return [self.values[at] for at, runs, _ in self.layout.changing if runs]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Parameters, and buffers that the forward does not change."""
        return self.layout.tensors(self.values)

    def elsewhere(self) -> list[Any]:
        """What leads further, and tensors of what has no dicts."""
        found: list[Any] = [self.values[at] for at in self.layout.further]
        for reference in self.layout.scripted:
            if (module := reference()) is not None:
                found += [*module.parameters(), *module.buffers()]
        return found

    def hooks(self) -> list[Any]:
        return [hook for hooks in self._hooks or () for _, hook in hooks if not isinstance(hook, bool)]

    def forget_unchanged(self) -> None:
        """After the forward: buffers that it has not changed need no copies."""
        dicts = self._dicts()
        for at, x, before in self.kept:
            copy, runs = self.snapshots.get(at, (None, True))
            if not runs and x._version == before and is_as_before(x, copy):
                i, name = self.layout.places[at]
                if dicts[i].get(name) is x:
                    del self.snapshots[at]

    def _dicts(self) -> list[State]:
        return [*self._states, *self.layout.parts(self.values)]

    def is_here(self) -> bool:
        """Whether everything is where it was."""
        layout, states = self.layout, self._states
        try:
            values, filled = layout.read(states)
        except KeyError:
            return False
        return (
            layout.is_complete(states, filled, values)
            and all(map(operator.is_, values, self.values))
            and layout.are_of_their_kinds(values)
            and _hooks_in(states) == self._hooks
        )

    def put_back_calls(self, name: object) -> Callable[[], None]:
        """Let each module be of its class, and have its hooks. Returns what undoes it."""
        now = [*map(type, self.layout.modules())], _hooks_in(self._states)
        self._let_calls_be(name, self.layout.kind_of_each, self._hooks)
        return functools.partial(self._let_calls_be, name, *now)

    def _let_calls_be(self, name: object, kinds: Sequence[type], hooks: Hooks) -> None:
        for module, kind in zip(self.layout.modules(), kinds, strict=True):
            if module is not None and type(module) is not kind:
                try:
                    object.__setattr__(module, "__class__", kind)
                except TypeError as error:
                    raise MutationError(
                        f"{name}: a module that it uses, {kind.__qualname__}, was made a "
                        f"{type(module).__qualname__} since the forward, and cannot be made one again "
                        f"({error}). Run the backward before."
                    ) from None
        if _hooks_in(self._states) != hooks:
            of_each = [*chain.from_iterable(map(_forward_hooks_of, self._states))]
            for there, items in zip(of_each, hooks or [[]] * len(of_each), strict=True):
                there.clear()
                there.update(items)

    def contents(self) -> list[Contents]:
        """What is where, dict by dict."""
        found = []
        values = iter(self.values)
        number = len(self._states)
        for i, (there, names) in enumerate(zip(self._dicts(), self.layout.names, strict=True)):
            was = dict(zip(names, islice(values, len(names)), strict=True))
            kind = i % 3 if (i := i - number) >= 0 else -1
            if kind == -1:
                was |= {name: x for name, x in there.items() if name in _FIXED}
            elif kind == 0:  # fully_shard exchanges sharded and whole parameters as it sees fit
                for name, x in was.items():
                    if layout_of(now := there.get(name, x)) != layout_of(x):
                        was[name] = now
            found.append(Contents(there, was, len(was), in_order=kind == 2))
        return found

    def changed(self) -> list[tuple[str, Tensor]]:
        """Tensors that were changed in place and of which there is no copy, with their names."""
        found = []
        if self.kept:
            kept = [(at, x, before) for at, x, before in self.kept if at not in self.snapshots]
            found = [(at, x) for at, x, before in kept if x._version != before]
        now = [*map(_version_of, self.tensors)]
        if now != self.versions:
            at = self.layout.tensors(range(len(self.values)))
            found += [
                (i, self.values[i]) for i, was, is_ in zip(at, self.versions, now, strict=True) if was != is_
            ]
        return [(self.layout.places[at][1], x) for at, x in found] if found else []

    def updated(self, for_another_run: bool = False) -> list[tuple[State, str, Tensor, Any]]:
        """Where there are buffers that the forward has changed, these, and copies of what they were.

        The copies are snapshots, or tensors that another run may change.
        """
        dicts = self._dicts()
        found = []
        for at, (copy, _) in self.snapshots.items():
            i, name = self.layout.places[at]
            x = self.values[at]
            if for_another_run:
                copy = self.layout.scratch_for(at, x) if copy is None else from_snapshot(copy, x)
            found.append((dicts[i], name, x, copy))
        return found


def _hooks_in(states: Sequence[State]) -> Hooks:
    if any(chain.from_iterable(map(hooks_of, states))):
        return [[*there.items()] for there in chain.from_iterable(map(_forward_hooks_of, states))]
    return None


def _at(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    at = slice(places[0], places[0] + 1) if places else slice(0)
    return operator.itemgetter(at)
