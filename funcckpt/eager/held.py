"""What a function refers to, as it was in its forward: a recomputation has to find the same.

A region keeps the inputs of f. What f finds elsewhere (the parameters and buffers of its module, variables
of the enclosing function, globals) may be another when the backward runs: an optimizer has stepped it,
`functional_call` has put the module's own back, a loop has gone on, or f itself has changed it. What can be
put back is put back for the time of a recomputation: variables, contents of lists, dicts and small arrays,
attributes, buffers, code and defaults of functions, and what `functional_call` had replaced. What cannot, a
parameter or another tensor that was changed in place, is an error if it is used.

So f finds what it has itself assigned in the forward as it was before. What it does to that in the
recomputation is undone, but for what a caller looks at: counters count on, and lists grow. Numbers in lists
and closure variables to which f adds are not put back at all: by those, programs tell the forward from the
recomputation, and torch's checkpoint lets them. There, what is saved is compared by value.

The search goes where code of f leads directly: modules with all that is inside of them, closures,
defaults, globals that the code names, partial arguments, methods, containers and plain objects. Leaves that
require grad are found wherever they come from, in the graph of what f has returned.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import random
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..closure import WRITES_UNSEEN
from ..errors import CheckpointError, MutationError, describe
from ..lookup import OfClass, attributes_of, global_names, is_library, is_plain_python, names_of, own_classes
from ..nodes import may_be_statistics

# Buffers of up to so many elements are copied before a forward that may change them, and arrays of numpy.
_SMALL = 2**16
_CONSTANTS = {type(None), bool, int, float, complex, str, bytes}
_PLAIN = {*_CONSTANTS, Tensor, nn.Parameter}
_NO_TENSORS = {*_CONSTANTS, dict, OrderedDict, set, tuple, FunctionType, BuiltinFunctionType}
_CONTAINERS = (list, tuple, dict)
# Those whose contents are put back.
_MUTABLE = {list, dict, OrderedDict, defaultdict, Counter}
_DEEPEST = 4
_STREAMS = (
    torch.Generator,
    random.Random,
    numpy.random.RandomState,
    numpy.random.Generator,
    numpy.random.BitGenerator,
)
# Lists and dicts among globals up to this length are searched.
_LONGEST = 1000
# What these look up in their globals is not the user's.
_LIBRARIES = ("torch.", "funcckpt.")


class Held:
    """What `f` refers to, now."""

    __slots__ = (
        "_again_as_before",
        "_arrays",
        "_attributes",
        "_cells",
        "_contents",
        "_counted",
        "_functions",
        "_gradients",
        "_iterators",
        "_kinds",
        "_leaves",
        "_parameters",
        "_results",
        "_running",
        "_seen",
        "_small",
        "_snapshots",
        "_tensors",
        "_variables",
        "may_count",
        "streams",
    )

    def __init__(self, f: Any, others: Iterable[Any] = (), again_as_before: bool = False) -> None:
        self._again_as_before = again_as_before
        # Tensors by where modules have them, and their versions.
        self._parameters: list[tuple[dict[str, Any], dict[str, Tensor], list[int]]] = []
        self._attributes: list[tuple[dict[str, Any], str, Tensor, int]] = []
        # What batch_norm updates without a word to the version counter.
        self._running: set[int] = set()
        # Buffers that a forward may change, or has changed; and copies of what they were.
        self._small: list[tuple[dict[str, Any], str, Tensor, int]] = []
        # Other tensors.
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        self._leaves: list[tuple[weakref.ref[Tensor], int]] = []
        # The gradients of leaves, when one is asked for inside of f.
        self._gradients: list[tuple[Tensor, Any]] = []
        self._arrays: list[_Array] = []
        self._functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._contents: list[_Contents] = []
        self._iterators: list[tuple[Any, Any]] = []
        # The classes of modules and objects, and to which names their code and that of functions adds.
        self._kinds: set[type] = set()
        self._counted: set[str] | None = None
        # Whether f may count something by which it tells its recomputation.
        self.may_count = False
        # Where in those there are tensors with a graph.
        self._results: list[tuple[dict[Any, Any], Any]] = []
        self._variables: list[tuple[ContextVar[Any], Any]] = []
        # Random streams that are not torch's own.
        self.streams: list[world.Stream] = []
        self._seen: set[int] = set()
        self._search(f, 0)
        for x in others:
            if type(x) not in _PLAIN and not isinstance(x, Tensor):
                self._search(x, 0)
        if self.may_count:
            counts = [x for _, x in self._cells]
            for contents in self._contents:
                counts += contents.was.values() if contents.in_order else ()
            self.may_count = int in map(type, counts)
        self._snapshots = copies([x for _, _, x, _ in self._small]) if self._small else []

    def _take_contents(self, there: Any, in_order: bool) -> None:
        was = dict(there.items() if isinstance(there, dict) else enumerate(there))
        for key, x in was.items():
            if type(x) not in _CONSTANTS and isinstance(x, Tensor) and x.grad_fn is not None:
                self._results.append((was, key))
        self._contents.append(_Contents(there, was, len(was), in_order))

    # -- the search ---------------------------------------------------------------------------------

    def _search(self, x: Any, depth: int) -> None:
        kind = type(x)
        if kind in _CONSTANTS or depth > _DEEPEST or id(x) in self._seen:
            return
        self._seen.add(id(x))
        if isinstance(x, nn.Module):
            self._take_module(x)
        elif isinstance(x, Tensor):
            if (version := _version(x)) is not None:
                self._tensors.append((weakref.ref(x), version))
        elif kind is FunctionType:
            self._take_function(x, depth)
        elif kind is MethodType:
            self._search(x.__self__, depth)
            self._search(x.__func__, depth)
        elif isinstance(x, functools.partial):
            for y in (x.func, *x.args, *x.keywords.values()):
                self._search(y, depth + 1)
        elif isinstance(x, _CONTAINERS):
            if kind in _MUTABLE:
                self._take_contents(x, in_order=True)
            for y in x.values() if isinstance(x, dict) else x:
                self._search(y, depth + 1)
        elif kind is ContextVar:
            self._variables.append((x, x.get(_EMPTY)))
        elif kind is numpy.ndarray:
            if not x.dtype.hasobject:
                self._arrays.append(_Array(x))
        elif isinstance(x, type):
            if names := _data_of(x):
                self._take_attributes(
                    _Attributes(x, {name: vars(x)[name] for name in names if name in vars(x)}), depth
                )
        elif kind in _ITERATORS:
            self._iterators.append((x, _position(x)))
        elif self._take_stream(x) or not is_plain_python(kind):
            pass
        elif depth < 2 or not is_library(kind.__module__):
            there, attributes = getattr(x, "__dict__", None), attributes_of(x)
            if there is None or len(there) < len(attributes):
                there = _Attributes(x, attributes)
            self._kinds.add(kind)
            self._take_attributes(there, depth)
            self._search(kind, depth)

    def _take_attributes(self, there: dict[str, Any], depth: int) -> None:
        self._take_contents(there, in_order=False)
        for y in there.values():
            self._search(y, depth + 1)

    def _take_module(self, module: nn.Module) -> None:
        modules = [module]
        while modules:
            module = modules.pop()
            if type(module._parameters) is not dict:  # of TorchScript
                for tensor in (*module.parameters(), *module.buffers()):
                    self._search(tensor, 0)
                continue
            if module._parameters:
                self._take_parameters(module._parameters)
            if module._buffers:
                self._take_buffers(module)
            self._kinds.add(type(module))
            attributes = module.__dict__.copy()
            if not _NO_TENSORS.issuperset(map(type, attributes.values())):
                for name, x in module.__dict__.items():
                    if type(x) is list:
                        self._search(x, 1)
                    elif isinstance(x, Tensor):
                        if x.grad_fn is not None:
                            self._results.append((attributes, name))
                        elif (version := _version(x)) is not None:
                            self._attributes.append((module.__dict__, name, x, version))
            self._contents.append(_Contents(module.__dict__, attributes, len(attributes)))
            if module._modules:
                self._contents.append(
                    _Contents(module._modules, module._modules.copy(), len(module._modules), True)
                )
            for part in module._modules.values():
                if part is not None and id(part) not in self._seen:
                    self._seen.add(id(part))
                    modules.append(part)

    def _take_parameters(self, there: dict[str, Any]) -> None:
        try:
            self._parameters.append((there, there.copy(), [x._version for x in there.values()]))
        except (AttributeError, RuntimeError, ValueError):  # None, or one that has no version
            was = {name: x for name, x in there.items() if x is not None and _version(x) is not None}
            self._parameters.append((there, was, [x._version for x in was.values()]))

    def _take_buffers(self, module: nn.Module) -> None:
        buffers = module._buffers
        runs = module.training and buffers.get("running_mean") is not None
        for name, x in buffers.items():
            if x is None or (version := _version(x)) is None:
                continue
            if runs:
                self._running.add(id(x))
            changes = module.training and x.layout is torch.strided
            if changes and (runs or x.numel() <= _SMALL or _writes_unseen(type(module))):
                self._small.append((buffers, name, x, version))
            else:
                self._attributes.append((buffers, name, x, version))

    def _take_function(self, f: FunctionType, depth: int) -> None:
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            self._cells.append((cell, value))
            if type(value) is ModuleType:
                self._take_stream(value, f)
            else:
                self._search(value, depth + 1)
        there = f.__globals__
        if there.get("__name__", "").startswith(_LIBRARIES):
            return
        self._functions.append((f, _parts(f)))
        self.may_count |= "" in _added_to(f.__code__)
        for value in f.__defaults__ or ():
            self._search(value, depth + 1)
        if f.__kwdefaults__:
            for value in f.__kwdefaults__.values():
                self._search(value, depth + 1)
        variables: dict[str, Any] = {}
        for name in global_names(f.__code__):
            value = there.get(name)
            if value is None:
                continue
            if isinstance(value, type):
                self._search(value, depth + 1)
            elif isinstance(value, FunctionType):
                if value.__globals__ is there:
                    self._search(value, depth + 1)
            elif not self._take_stream(value, f) and not isinstance(value, ModuleType):
                variables[name] = value
                if type(value) not in _CONTAINERS or len(value) <= _LONGEST:
                    self._search(value, depth + 1)
        if variables:
            self._contents.append(_Contents(there, variables, None))

    def _take_stream(self, x: Any, f: FunctionType | None = None) -> bool:
        """Whether it is a random stream, or draws from one where f uses it."""
        if isinstance(x, ModuleType):
            if x is numpy and f is not None and "random" in names_of(f.__code__):
                x = numpy.random
            stream: world.Stream | None = world.OF_THE_PROCESS.get(x)
            if stream is not None:
                self.streams.append(stream)
            return stream is not None
        if isinstance(x, (BuiltinMethodType, MethodType)):
            x = x.__self__
        if not isinstance(x, _STREAMS):
            return False
        stream = x if isinstance(x, torch.Generator) else world.PythonStream.of(x)
        if stream is not None:
            self.streams.append(stream)
        return True

    def _all_parameters(self) -> list[Tensor]:
        return [x for _, was, _ in self._parameters for x in was.values()]

    def statistics(self, given: Iterable[Any]) -> list[Tensor]:
        """What f may hand to batch_norm, beside what modules hold."""
        return [
            x
            for x in (*[ref() for ref, _ in self._tensors], *given)
            if type(x) is Tensor and x.dim() == 1 and may_be_statistics(x)
        ]

    # -- after the forward --------------------------------------------------------------------------

    def is_statistics(self, x: Tensor) -> bool:
        """Whether `x` belongs to a batch_norm that was found."""
        return id(x) in self._running

    def gradient_begins(self, given: Any) -> None:
        """Inside of f, someone asks for a gradient: of `backward`, leaves would have it twice."""
        if not self._gradients:
            leaves = self._all_parameters()
            leaves += [x for ref, _ in self._tensors if (x := ref()) is not None]
            leaves += [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
            self._gradients = [(x, _gradient(x)) for x in leaves if x.is_leaf]

    def forward_is_done(self, name: str, out: Any, first: int) -> None:
        """Look at what f has changed itself, and at the leaves in the graph of what it has returned."""
        for x, gradient in self._gradients:
            if _gradient(x) != gradient:
                raise MutationError(
                    f"{name}: the function calls backward(), which accumulates the gradient of a tensor that "
                    f"it has from outside ({describe(x)}), and would do so again in the recomputation. Use "
                    "torch.autograd.grad inside of it."
                )
        self._gradients = []
        if self._small:
            self._forget_unchanged()
        for iterator, position in self._iterators:
            if _position(iterator) != position:
                raise MutationError(
                    f"{name}: the function takes items from a {type(iterator).__name__} that it has from "
                    "outside, and would get the next ones in the recomputation. Pass it the items, or a list."
                )
        leaves, sources = _edges(out, first)
        for was, key in self._results:
            if was[key].grad_fn not in sources:
                was[key] = _Weak(was[key])
        self._results.clear()
        if leaves:
            known = set(map(id, self._all_parameters()))
            self._leaves = [
                (weakref.ref(x), version)
                for x in leaves
                if id(x) not in known and (version := _version(x)) is not None
            ]

    def _forget_unchanged(self) -> None:
        small, self._small = self._small, []
        snapshots, self._snapshots = self._snapshots, []
        with _torch.without_dispatch_modes(), _torch.plain():
            for record, copy in zip(small, snapshots, strict=True):
                there, key, x, version = record
                if there.get(key) is x and x._version == version and is_still(x, copy):
                    self._attributes.append(record)
                else:
                    self._small.append(record)
                    self._snapshots.append(copy)

    def undo(self, name: str) -> None:
        """After a forward that is to be started anew: put back what it has changed."""
        with torch.no_grad():
            for (there, key, x, _), value in zip(self._small, self._snapshots, strict=True):
                there[key] = x
                with _torch.version_kept(x):
                    x.copy_(value)
        for cell, value in self._cells:
            cell.cell_contents = value
        for contents in self._contents:
            contents.put_back(name, self.counts)
        for variable, value in self._variables:
            if value is not _EMPTY:
                variable.set(value)
        for there, was, versions in self._parameters:
            there.update(was)
            for (key, x), version in zip(was.items(), versions, strict=True):
                if x._version != version:
                    raise _started_anew(name, f"{key!r} ({describe(x)})")
        for there, key, x, version in self._attributes:
            there[key] = x
            if x._version != version:
                raise _started_anew(name, f"{key!r} ({describe(x)})")
        for ref, version in self._tensors:
            if (tensor := ref()) is not None and tensor._version != version:
                raise _started_anew(name, describe(tensor))

    # -- the recomputation --------------------------------------------------------------------------

    def counts(self, name: str) -> bool:
        """Whether f adds to a variable or attribute of this name, or to items, of no name."""
        if self._counted is None:
            codes = [f.__code__ for f, _ in self._functions]
            for kind in self._kinds:
                for base in own_classes(kind):
                    codes += [f.__code__ for f in vars(base).values() if isinstance(f, FunctionType)]
            self._counted = {name for code in codes for name in _added_to(code)}
        return name in self._counted and not (name and self._again_as_before)

    def here(self, name: str, check: bool) -> _Here:
        """A context in which what f refers to is as it was."""
        return _Here(self, name, check)


class _Here:
    def __init__(self, held: Held, name: str, check: bool) -> None:
        self._held = held
        self._name = name
        self._check = check
        self._undo: list[Callable[[], object]] = []
        self._watch: Watch | None = None
        # The storages of copies, whose versions mean nothing.
        self.copies: set[int] = set()

    def __enter__(self) -> _Here:
        held = self._held
        watched: dict[int, Callable[[], Exception]] = {}
        try:
            for function, parts in held._functions:
                if not all(map(operator.is_, present := _parts(function), parts)):
                    self._undo.append(functools.partial(_set_parts, function, present))
                    _set_parts(function, parts)
            for array in held._arrays:
                if (undo := array.put_back(self._name, self._check)) is not None:
                    self._undo.append(undo)
            for cell, value in held._cells:
                if not _is_count(value, now := _contents(cell), held.counts):
                    self._undo.append(functools.partial(_leave_cell, cell, now))
                    cell.cell_contents = value
            for contents in held._contents:
                self._undo.append(contents.put_back(self._name, held.counts))
            for variable, value in held._variables:
                if variable.get(_EMPTY) is not value and value is not _EMPTY:
                    self._undo.append(functools.partial(variable.reset, variable.set(value)))
            for there, was, versions in held._parameters:
                self._undo.append(functools.partial(_refill, there, there.copy()))
                for (name, x), version in zip(was.items(), versions, strict=True):
                    now = there.get(name)
                    if now is x:
                        if x._version != version:
                            watched[id(x)] = functools.partial(_changed, self._name, name, x)
                    elif _layout(now) == _layout(x):
                        # fully_shard exchanges sharded and whole parameters as it sees fit.
                        there[name] = x
            for there, name, x, version in held._attributes:
                if there.get(name) is not x:
                    self._put(there, name, x)
                if x._version != version:
                    watched[id(x)] = functools.partial(_changed, self._name, name, x)
            if held._small:
                self._put_copies()
            for ref, version in (*held._tensors, *held._leaves):
                if (tensor := ref()) is not None and tensor._version != version:
                    watched[id(tensor)] = functools.partial(_changed, self._name, "", tensor)
            if watched and self._check:
                self._watch = Watch(watched)
                self._watch.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        while self._undo:
            self._undo.pop()()

    def _put(self, there: dict[str, Any], name: str, x: Any) -> None:
        if name in there:
            self._undo.append(functools.partial(there.__setitem__, name, there[name]))
        else:
            self._undo.append(functools.partial(there.pop, name, None))
        there[name] = x

    def _put_copies(self) -> None:
        for (there, name, _, _), x in zip(self._held._small, copies(self._held._snapshots), strict=True):
            self.copies.add(x.untyped_storage()._cdata)
            self._put(there, name, x)


def _refill(there: dict[str, Any], content: dict[str, Any]) -> None:
    if len(there) != len(content) or not all(map(operator.is_, there.values(), content.values())):
        there.clear()
        there.update(content)


class _Weak(weakref.ref[Tensor]):
    """A result that is not in the graph of f: to hold it would keep another graph alive."""


class _Gone:
    """Stands where such a result has stood, which is not there any more."""

    def __init__(self, name: str) -> None:
        self.error = MutationError(
            f"{name}: a tensor that the function has found in a list, a dict or an attribute was replaced "
            "there since, and is gone: the recomputation cannot find it. Pass it as an argument."
        )

    def __getattr__(self, name: str) -> Any:
        raise self.error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(x.error for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls))


def _value(x: Any, name: str = "") -> Any:
    if type(x) is not _Weak:
        return x
    return _Gone(name) if (tensor := x()) is None else tensor


class _Contents(NamedTuple):
    """What was in a list or dict, by index or key."""

    there: Any
    was: dict[Any, Any]
    # How many there were in all, of which these are some; None where others come and go.
    size: int | None
    # Whether their order counts, as that of attributes does not.
    in_order: bool = False

    def _is_here(self) -> bool:
        """Quickly; for results of something, which are held by a weak reference, not."""
        there, was = self.there, self.was
        if self.size is not None and len(there) != self.size:
            return False
        now: Iterable[Any] = there
        if isinstance(there, dict):
            now = there.values() if self.size == len(was) else map(there.get, was)
        return all(map(operator.is_, now, was.values()))

    def put_back(self, name: str, counts: Counts) -> Callable[[], None]:
        """Returns what undoes it."""
        now = None
        if not self._is_here():
            now = self._take()
            self._give(
                {
                    key: now[key] if self.in_order and _is_count(x, now.get(key), counts) else _value(x, name)
                    for key, x in self.was.items()
                }
            )
        return functools.partial(self._leave, now, counts)

    def _leave(self, now: dict[Any, Any] | None, counts: Counts) -> None:
        """As it was before the recomputation, which may have counted or added something."""
        if now is None and self._is_here():
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
                if there.get(key, _EMPTY) is not x:
                    there[key] = x


Counts = Callable[[str], bool]


def _is_count(was: Any, now: Any, counts: Counts) -> bool:
    return type(was) is int and type(now) is int and counts("")


def _left(was: Any, now: Any, then: Any, name: str, counts: Counts) -> Any:
    """What a variable is after a recomputation, which has begun with `was` and left `then`."""
    if type(was) is int and type(now) is int and type(then) is int and counts(name):
        return then if name == "" else now + then - was
    return now


def _leave_cell(cell: CellType, now: Any) -> None:
    if now is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = now


@functools.lru_cache(maxsize=4096)
def _added_to(code: CodeType) -> frozenset[str]:
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
    return frozenset(names).union(*[_added_to(c) for c in code.co_consts if isinstance(c, CodeType)])


class Watch(world.Mode):
    """Notices that a tensor is used, also where autograd does not save it."""

    def __init__(self, errors: dict[int, Callable[[], Exception]]) -> None:
        super().__init__()
        self._errors = errors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(y, Tensor) for y in pytree.tree_leaves(out)):  # and not, say, its shape
            # A counter counts on, as long as no one reads it.
            read = args[1:] if args and out is args[0] else args
            for x in pytree.tree_leaves((read, kwargs)):
                if id(x) in self._errors:
                    raise self._errors[id(x)]()
        return out


def another(name: str, x: Tensor) -> CheckpointError:
    kind = "parameter" if isinstance(x, nn.Parameter) else "buffer"
    return CheckpointError(
        f"{name}: the recomputation finds another {kind} ({describe(x)}) than the forward used; "
        "torch.func.functional_call, for one, puts the module's own back when it returns. Use "
        "funcckpt.remat, which takes those of the call, or pass the parameters as arguments of the function."
    )


def changed(name: str, what: str) -> MutationError:
    return MutationError(
        f"{name}: a tensor that it uses ({what}) was changed in place since the forward, like a parameter by "
        "an optimizer: the recomputation would start from the changed values. Run the backward before, or "
        "change a copy (x.clone()). If the function itself does so, and you know better, pass "
        'determinism_check="none".'
    )


def _changed(name: str, label: str, x: Tensor) -> MutationError:
    return changed(name, f"{label!r}, {describe(x)}" if label else describe(x))


def _started_anew(name: str, what: str) -> MutationError:
    return MutationError(
        f"{name}: the function uses a torch.func transform, so that its forward has to be started anew, and "
        f"has changed {what} in place before. Use funcckpt.remat, or change it outside of the function."
    )


class _Attributes(dict[str, Any]):
    """Those of a class, or of an object with slots, as if they stood in a dict."""

    def __init__(self, of: Any, now: dict[str, Any]) -> None:
        super().__init__(now)
        self._of = of

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._of, name, default)

    def values(self) -> Any:
        return [getattr(self._of, name, _EMPTY) for name in self]

    def __setitem__(self, name: str, x: Any) -> None:
        setattr(self._of, name, x)

    def pop(self, name: str, default: Any = None) -> Any:
        with suppress(AttributeError):
            delattr(self._of, name)


class _Array:
    """One of numpy's, which has no version, and what was in it: all, or so much of one that is large."""

    def __init__(self, x: numpy.ndarray[Any, Any]) -> None:
        self._x = x
        self._was = self._now()

    def _now(self) -> bytes:
        x = self._x
        return x.tobytes() if x.size <= _SMALL else bytes(x.flat[:: x.size // _SMALL].data)

    def put_back(self, name: str, check: bool) -> Callable[[], None] | None:
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


def _parts(f: FunctionType) -> tuple[Any, ...]:
    return f.__code__, f.__defaults__, f.__kwdefaults__


def _set_parts(f: FunctionType, parts: tuple[Any, ...]) -> None:
    f.__code__, f.__defaults__, f.__kwdefaults__ = parts


@OfClass
def _data_of(kind: type) -> tuple[str, ...]:
    """The names of a class of the user's that are not its functions."""
    if is_library(kind.__module__) or issubclass(kind, (Tensor, nn.Module)):
        return ()
    data = (*_CONSTANTS, Tensor, *_CONTAINERS, numpy.ndarray)
    return tuple([name for name, x in vars(kind).items() if name[:2] != "__" and isinstance(x, data)])


# A generator, and iterators that say where they are.
_ITERATORS = {GeneratorType, itertools.count, enumerate, zip, map, filter, reversed}
_ITERATORS.update(map(type, map(iter, ([], (), range(0), {}, {}.values(), {}.items()))))  # type: ignore[arg-type]


def _position(x: Any) -> Any:
    """What changes when an item is taken."""
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if isinstance(x, itertools.count):
        return repr(x)
    if (left := operator.length_hint(x, -1)) >= 0:
        return left
    return [_position(y) for y in x.__reduce__()[1] if type(y) in _ITERATORS]


@OfClass
def _writes_unseen(kind: type) -> bool:
    """Whether the forward of a module may write to buffers past their version counters."""
    names, functions = {"forward"}, [getattr(kind, "forward", None)]
    while functions:
        f = functions.pop()
        if isinstance(f, FunctionType) and not f.__module__.startswith(_LIBRARIES):
            more = names_of(f.__code__) - names
            names |= more
            functions += [getattr(kind, name, None) or f.__globals__.get(name) for name in more]
    return not names.isdisjoint(WRITES_UNSEEN)


def _gradient(x: Tensor) -> Any:
    """What tells whether the gradient of a leaf was assigned, or added to."""
    return None if x.grad is None else (id(x.grad), x.grad._version)


def is_still(x: Tensor, copy: Tensor) -> bool:
    """Whether `x` is what it was; no, where to look would be to wait for a device."""
    return type(x) in _PLAIN and x.device.type == "cpu" and torch.equal(x, copy)


def _layout(x: Any) -> Any:
    """How a distributed tensor is laid out; None for all others."""
    return getattr(x, "device_mesh", None), getattr(x, "placements", None)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


_EMPTY = object()


def _version(x: Tensor) -> int | None:
    """None for those that have no version: of inference mode, and not initialized."""
    try:
        return x._version
    except (RuntimeError, ValueError):
        return None


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Made by operators that no mode and no graph sees."""
    with _torch.without_dispatch_modes(), _torch.plain():
        return [x.detach().clone() for x in tensors]


def _edges(out: Any, first: int) -> tuple[list[Tensor], set[Any]]:
    """The leaves that are used by what was recorded since node number `first`, and the nodes of before."""
    outputs = (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out)
    nodes = [y.grad_fn for y in outputs if isinstance(y, Tensor) and y.grad_fn is not None]
    seen, leaves, sources = set(nodes), [], set()
    while nodes:
        node = nodes.pop()
        following = node.next_functions
        if not following:
            if (x := getattr(node, "variable", None)) is not None:
                leaves.append(x)
        elif node._sequence_nr() >= first:
            for other, _ in following:
                if other is not None and other not in seen:
                    seen.add(other)
                    nodes.append(other)
        else:
            sources.add(node)
    return leaves, sources
