"""What a function refers to, as it was in its forward: a recomputation has to find the same.

A region keeps the inputs of f. What f finds elsewhere (the parameters and buffers of its module, variables
of the enclosing function, globals) may be another when the backward runs: an optimizer has stepped it,
`functional_call` has put the module's own back, a loop has gone on, or f itself has changed it. What can be
put back is put back for the time of a recomputation: variables, contents of lists and dicts, attributes,
buffers, and what `functional_call` had replaced. What cannot, a parameter or another tensor that was changed
in place, is an error if it is used. What f itself has assigned is left as it is: a counter counts on.

The search goes where code of f leads directly: modules with all that is inside of them, closures,
defaults, globals that the code names, partial arguments, methods, containers and plain objects. Leaves that
require grad are found wherever they come from, in the graph of what f has returned.
"""

from __future__ import annotations

import functools
import operator
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch, world
from ..errors import CheckpointError, MutationError, describe

# Buffers up to this size are copied before a forward that may change them.
_SMALL = 2**16
_CONSTANTS = {type(None), bool, int, float, complex, str, bytes}
_PLAIN = {*_CONSTANTS, Tensor, nn.Parameter}
_NO_TENSORS = {*_CONSTANTS, dict, OrderedDict, set}
_CONTAINERS = (list, tuple, dict)
# Those whose contents are put back.
_MUTABLE = {list, dict, OrderedDict, defaultdict}
_DEEPEST = 4
_STREAMS = (
    torch.Generator,
    random.Random,
    numpy.random.RandomState,
    numpy.random.Generator,
    numpy.random.BitGenerator,
)
# Those of the process, by the modules that draw from them.
_PROCESS: dict[Any, Any] = {random: random._inst, numpy.random: numpy.random.mtrand._rand}  # type: ignore[attr-defined]
# Lists and dicts among globals up to this length are searched.
_LONGEST = 1000
# What these look up in their globals is not the user's.
_LIBRARIES = ("torch.", "funcckpt.")


class Held:
    """What `f` refers to, now."""

    __slots__ = (
        "_again_as_before",
        "_attributes",
        "_cells",
        "_contents",
        "_leaves",
        "_parameters",
        "_results",
        "_running",
        "_seen",
        "_small",
        "_snapshots",
        "_tensors",
        "_variables",
        "streams",
    )

    def __init__(self, f: Any, others: Iterable[Any] = (), again_as_before: bool = False) -> None:
        self._again_as_before = again_as_before
        # Tensors by where modules have them, and their versions.
        self._parameters: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._attributes: list[tuple[dict[str, Any], str, Tensor, int]] = []
        # What batch_norm updates without a word to the version counter.
        self._running: list[tuple[dict[str, Any], str]] = []
        self._small: list[tuple[dict[str, Any], str, Tensor, int]] = []
        # Other tensors.
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        self._leaves: list[tuple[weakref.ref[Tensor], int]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._contents: list[_Contents] = []
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
        self._snapshots = _copies([x for _, _, x, _ in self._small]) if self._small else []

    def _take_contents(self, there: Any, whole: bool) -> None:
        was = dict(there.items() if isinstance(there, dict) else enumerate(there))
        for key, x in was.items():
            if type(x) not in _CONSTANTS and isinstance(x, Tensor) and x.grad_fn is not None:
                self._results.append((was, key))
        self._contents.append(_Contents(there, was, whole))

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
                self._take_contents(x, whole=True)
            for y in x.values() if isinstance(x, dict) else x:
                self._search(y, depth + 1)
        elif kind is ContextVar:
            self._variables.append((x, x.get(_EMPTY)))
        elif self._take_stream(x):
            pass
        elif depth < 2 and _is_plain_object(x):
            if attributes := getattr(x, "__dict__", None):
                self._take_contents(attributes, whole=False)
                for y in attributes.values():
                    if isinstance(y, (Tensor, nn.Module, FunctionType, *_CONTAINERS, *_STREAMS)):
                        self._search(y, depth + 1)

    def _take_module(self, module: nn.Module) -> None:
        modules = [module]
        while modules:
            module = modules.pop()
            if type(module._parameters) is not dict:  # of TorchScript
                for tensor in (*module.parameters(), *module.buffers()):
                    self._search(tensor, 0)
                continue
            for name, x in module._parameters.items():
                if x is not None and (version := _version(x)) is not None:
                    self._parameters.append((module._parameters, name, x, version))
            if module._buffers:
                self._take_buffers(module)
            attributes: dict[str, Any] = {}
            for name, x in module.__dict__.items():
                kind = type(x)
                if kind in _CONSTANTS:
                    attributes[name] = x
                elif kind is list:
                    self._search(x, 1)
                elif kind not in _NO_TENSORS and isinstance(x, Tensor):
                    if x.grad_fn is not None:
                        attributes[name] = x
                        self._results.append((attributes, name))
                    elif (version := _version(x)) is not None:
                        self._attributes.append((module.__dict__, name, x, version))
            self._contents.append(_Contents(module.__dict__, attributes, False))
            if module._modules:
                self._contents.append(_Contents(module._modules, module._modules.copy(), True))
            for part in module._modules.values():
                if part is not None and id(part) not in self._seen:
                    self._seen.add(id(part))
                    modules.append(part)

    def _take_buffers(self, module: nn.Module) -> None:
        buffers = module._buffers
        runs = module.training and buffers.get("running_mean") is not None
        for name, x in buffers.items():
            if x is None or (version := _version(x)) is None:
                continue
            if runs:
                self._running.append((buffers, name))
            if module.training and x.layout is torch.strided and x.numel() <= _SMALL:
                self._small.append((buffers, name, x, version))
            else:
                self._attributes.append((buffers, name, x, version))

    def _take_function(self, f: FunctionType, depth: int) -> None:
        names = _names(f.__code__)
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            self._cells.append((cell, value))
            if type(value) is ModuleType:
                self._take_stream(value, names)
            else:
                self._search(value, depth + 1)
        there = f.__globals__
        if there.get("__name__", "").startswith(_LIBRARIES):
            return
        for value in f.__defaults__ or ():
            self._search(value, depth + 1)
        if f.__kwdefaults__:
            for value in f.__kwdefaults__.values():
                self._search(value, depth + 1)
        variables: dict[str, Any] = {}
        for name in names:
            value = there.get(name)
            if value is None or isinstance(value, type):
                continue
            if isinstance(value, FunctionType):
                if value.__globals__ is there:
                    self._search(value, depth + 1)
            elif not self._take_stream(value, names) and not isinstance(value, ModuleType):
                variables[name] = value
                if type(value) not in _CONTAINERS or len(value) <= _LONGEST:
                    self._search(value, depth + 1)
        if variables:
            self._contents.append(_Contents(there, variables, False))

    def _take_stream(self, x: Any, names: Iterable[str] = ()) -> bool:
        """Whether it is a random stream, or draws from one."""
        if isinstance(x, ModuleType):
            if x is numpy and "random" in names:
                x = numpy.random
            x = _PROCESS.get(x)
        elif isinstance(x, (BuiltinMethodType, MethodType)):
            x = x.__self__
        if not isinstance(x, _STREAMS):
            return False
        stream = x if isinstance(x, torch.Generator) else world.PythonStream.of(x)
        if stream is not None:
            self.streams.append(stream)
        return True

    # -- after the forward --------------------------------------------------------------------------

    def is_statistics(self, x: Tensor) -> bool:
        """Whether `x` belongs to a batch_norm that was found."""
        return any(there[name] is x for there, name in self._running)

    def forward_is_done(self, out: Any, first: int) -> None:
        """Look at what f has changed itself, and at the leaves in the graph of what it has returned."""
        small, self._small = self._small, []
        snapshots, self._snapshots = self._snapshots, []
        for record, copy in zip(small, snapshots, strict=True):
            if _has_changed(*record):
                self._small.append(record)
                self._snapshots.append(copy)
            else:
                self._attributes.append(record)
        # A counter in f counts on.
        if self._cells:
            self._cells = [(c, x) for c, x in self._cells if isinstance(x, Tensor) or _contents(c) is x]
        leaves, sources = _edges(out, first)
        for was, key in self._results:
            if was[key].grad_fn not in sources:
                was[key] = _Weak(was[key])
        self._results.clear()
        self._contents = [
            contents if self._again_as_before and not contents.whole else contents.after_forward()
            for contents in self._contents
        ]
        if self._variables:
            self._variables = [(v, x) for v, x in self._variables if v.get(_EMPTY) is x]
        if leaves:
            known = {id(x) for _, _, x, _ in self._parameters}
            self._leaves = [
                (weakref.ref(x), version)
                for x in leaves
                if id(x) not in known and (version := _version(x)) is not None
            ]

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
            contents.put_back(name)
        for variable, value in self._variables:
            if value is not _EMPTY:
                variable.set(value)
        for there, key, x, version in (*self._parameters, *self._attributes):
            there[key] = x
            if x._version != version:
                raise _started_anew(name, f"{key!r} ({describe(x)})")
        for ref, version in self._tensors:
            if (tensor := ref()) is not None and tensor._version != version:
                raise _started_anew(name, describe(tensor))

    # -- the recomputation --------------------------------------------------------------------------

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
            for cell, value in held._cells:
                if _contents(cell) is not value:
                    self._undo.append(functools.partial(setattr, cell, "cell_contents", _contents(cell)))
                    cell.cell_contents = value
            for contents in held._contents:
                if (undo := contents.put_back(self._name)) is not None:
                    self._undo.append(undo)
            for variable, value in held._variables:
                if variable.get(_EMPTY) is not value and value is not _EMPTY:
                    self._undo.append(functools.partial(variable.reset, variable.set(value)))
            for there, name, x, version in held._parameters:
                now = there.get(name)
                if now is x:
                    if x._version != version:
                        watched[id(x)] = functools.partial(_changed, self._name, name, x)
                elif _layout(now) == _layout(x):
                    # fully_shard exchanges sharded and whole parameters as it sees fit.
                    self._put(there, name, x)
            for there, name, x, version in held._attributes:
                if there.get(name) is not x:
                    self._put(there, name, x)
                if x._version != version:
                    watched[id(x)] = functools.partial(_changed, self._name, name, x)
            for (there, name, _, _), value in zip(held._small, held._snapshots, strict=True):
                self._put_copy(there, name, value)
            for there, name in held._running:
                if isinstance(there.get(name), Tensor):
                    self._put_copy(there, name, there[name])
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

    def _put_copy(self, there: dict[str, Any], name: str, x: Tensor) -> None:
        (x,) = _copies([x])
        self.copies.add(x.untyped_storage()._cdata)
        self._put(there, name, x)


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
    # Whether there was nothing else.
    whole: bool

    def _is_here(self) -> bool:
        """Quickly; for results of something, which are held by a weak reference, not."""
        there, was = self.there, self.was
        if self.whole and len(there) != len(was):
            return False
        now = map(there.get, was) if isinstance(there, dict) else self._now()
        return all(map(operator.is_, now, was.values()))

    def _now(self) -> list[Any]:
        there = self.there
        if isinstance(there, dict):
            return [there.get(key, _EMPTY) for key in self.was]
        return [there[i] if i < len(there) else _EMPTY for i in self.was]

    def after_forward(self) -> _Contents:
        """Without what f has assigned itself, but for tensors."""
        if self._is_here():
            return self
        kept = {
            key: x
            for (key, x), now in zip(self.was.items(), self._now(), strict=True)
            if now is x or isinstance(x, (Tensor, _Weak))
        }
        whole = self.whole and len(kept) == len(self.was) == len(self.there)
        return _Contents(self.there, kept, whole)

    def put_back(self, name: str) -> Callable[[], None] | None:
        """Returns what undoes it, if there was anything to do."""
        if self._is_here():
            return None
        there, was, now = self.there, self.was, self._now()
        if self.whole and (len(there) != len(was) or any([x is _EMPTY for x in now])):
            return self._put_all_back(name)
        changed = [
            (key, _value(x, name), y)
            for (key, x), y in zip(was.items(), now, strict=True)
            if x is not y and _value(x) is not y and not (y is _EMPTY and isinstance(there, list))
        ]
        for key, x, _ in changed:
            there[key] = x

        def undo() -> None:
            for key, _, y in changed:
                if y is _EMPTY:
                    there.pop(key, None)
                else:
                    there[key] = y

        return undo if changed else None

    def _put_all_back(self, name: str) -> Callable[[], None]:
        """In their order, which may be that of the layers of a module."""
        there, was = self.there, [_value(x, name) for x in self.was.values()]
        if isinstance(there, list):
            items = list(there)
            there[:] = was

            def undo() -> None:
                there[:] = items + there[len(was) :]  # to which another thread may have appended
        else:
            before = dict(there)
            there.clear()
            there.update(zip(self.was, was, strict=True))

            def undo() -> None:
                others = {key: x for key, x in there.items() if key not in self.was}
                there.clear()
                there.update(before | others)

        return undo


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


_HEAP_TYPE = 1 << 9  # a class made in Python


def _is_plain_object(x: Any) -> bool:
    kind = type(x)
    return bool(kind.__flags__ & _HEAP_TYPE or kind is SimpleNamespace) and not isinstance(
        x, (type, ModuleType)
    )


_names_of: weakref.WeakKeyDictionary[CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function and those inside of it may look up in its globals."""
    names = _names_of.get(code)
    if names is None:
        found = dict.fromkeys(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                found.update(dict.fromkeys(_names(constant)))
        names = _names_of[code] = tuple(found)
    return names


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


def _has_changed(buffers: dict[str, Any], name: str, x: Tensor, version: int) -> bool:
    """Whether a forward has updated a buffer, other than those that batch_norm updates."""
    if buffers.get("running_mean") is not None:
        return False
    return buffers.get(name) is not x or x._version != version


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, made by few operators, and none that a mode which is active would see."""
    modes = _torch._get_current_dispatch_mode_stack()
    for _ in modes:
        _torch._pop_mode()
    try:
        with torch.no_grad(), _torch.plain():
            if len(tensors) == 1:
                return [tensors[0].clone()]
            groups: dict[Any, list[int]] = defaultdict(list)
            for i, x in enumerate(tensors):
                groups[x.dtype, x.device, x.dim() > 0].append(i)
            copies = list(tensors)
            for (_, _, has_dimensions), group in groups.items():
                some = [tensors[i] for i in group]
                if has_dimensions:
                    parts = torch.cat([x.reshape(-1) for x in some]).split([x.numel() for x in some])
                else:
                    parts = torch.stack(some).unbind()
                for i, part in zip(group, parts, strict=True):
                    copies[i] = part.view(tensors[i].shape)
            return copies
    finally:
        for mode in modes:
            _torch._push_mode(mode)


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
