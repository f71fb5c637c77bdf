"""What a function refers to, as it was in its forward: a recomputation has to find the same.

A region keeps the inputs of f. What f finds elsewhere (the parameters and buffers of its module, variables
of the enclosing function, globals) may be another when the backward runs: an optimizer has stepped it,
`functional_call` has put the module's own back, a loop has gone on, or f itself has changed it. What can be
put back is put back for the time of a recomputation: variables, buffers, `training`, and what
`functional_call` had replaced. What cannot, a parameter or another tensor that was changed in place, is an
error if it is used.

The search goes where code of f leads directly: modules with all that is inside of them, closures,
defaults, globals that the code names, partial arguments, methods, containers and plain objects. Leaves that
require grad are found wherever they come from, in the graph of what f has returned.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

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
_DEEPEST = 4
# What these look up in their globals is not the user's.
_LIBRARIES = ("torch.", "funcckpt.")


class Held:
    """What `f` refers to, now."""

    __slots__ = (
        "_attributes",
        "_cells",
        "_globals",
        "_leaves",
        "_modules",
        "_parameters",
        "_running",
        "_seen",
        "_small",
        "_snapshots",
        "_tensors",
    )

    def __init__(self, f: Any, others: Iterable[Any] = ()) -> None:
        self._modules: list[tuple[nn.Module, bool]] = []
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
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._search(f, 0)
        for x in others:
            if type(x) not in _PLAIN and isinstance(
                x, (nn.Module, FunctionType, MethodType, functools.partial)
            ):
                self._search(x, 0)
        self._snapshots = _copies([x for _, _, x, _ in self._small]) if self._small else []

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
            for y in x.values() if isinstance(x, dict) else x:
                self._search(y, depth + 1)
        elif depth < 2 and kind.__flags__ & _HEAP_TYPE and not isinstance(x, type):
            for y in getattr(x, "__dict__", {}).values():
                if isinstance(y, (Tensor, nn.Module, FunctionType, *_CONTAINERS)):
                    self._search(y, depth + 1)

    def _take_module(self, module: nn.Module) -> None:
        modules = [module]
        while modules:
            module = modules.pop()
            if type(module._parameters) is not dict:  # of TorchScript
                for tensor in (*module.parameters(), *module.buffers()):
                    self._search(tensor, 0)
                continue
            self._modules.append((module, module.training))
            for name, x in module._parameters.items():
                if x is not None and (version := _version(x)) is not None:
                    self._parameters.append((module._parameters, name, x, version))
            if module._buffers:
                self._take_buffers(module)
            for name, x in module.__dict__.items():
                # The result of an earlier forward would keep its graph alive.
                if (
                    type(x) not in _NO_TENSORS
                    and isinstance(x, Tensor)
                    and x.grad_fn is None
                    and (version := _version(x)) is not None
                ):
                    self._attributes.append((module.__dict__, name, x, version))
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
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            self._cells.append((cell, value))
            self._search(value, depth + 1)
        there = f.__globals__
        if there.get("__name__", "").startswith(_LIBRARIES):
            return
        for value in f.__defaults__ or ():
            self._search(value, depth + 1)
        if f.__kwdefaults__:
            for value in f.__kwdefaults__.values():
                self._search(value, depth + 1)
        for name in _names(f.__code__):
            value = there.get(name)
            if type(value) in _CONSTANTS:
                if value is not None:
                    self._globals.append((there, name, value))
            elif isinstance(value, (Tensor, nn.Module)):
                self._globals.append((there, name, value))
                self._search(value, depth + 1)
            elif type(value) is FunctionType and value.__globals__ is there:
                self._search(value, depth + 1)

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
        if self._globals:
            self._globals = [g for g in self._globals if isinstance(g[2], Tensor) or g[0].get(g[1]) is g[2]]
        leaves = _leaves(out, first)
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
        for there, key, value in self._globals:
            there[key] = value
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
            for there, name, value in held._globals:
                if there.get(name) is not value:
                    self._put(there, name, value)
            for module, training in held._modules:
                if module.training is not training:
                    self._undo.append(functools.partial(setattr, module, "training", module.training))
                    module.training = training
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


def _leaves(out: Any, first: int) -> list[Tensor]:
    """The leaves that are used by what was recorded since node number `first`."""
    outputs = (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out)
    nodes = [y.grad_fn for y in outputs if isinstance(y, Tensor) and y.grad_fn is not None]
    seen, leaves = set(nodes), []
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
    return leaves
