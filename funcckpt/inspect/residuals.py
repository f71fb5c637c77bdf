"""What a function keeps for its backward, in words.

A residual is a tensor that autograd keeps from the forward until the backward has used it. A backward begins
where f calls `torch.autograd.grad` or `backward`, as every reverse-mode transform of `torch.func` does. If f
calls neither, it begins at the end of f. While f runs, a dispatch mode below all transforms records for each
storage the operator that made it, and the user's line. A function mode sees where a backward begins, with
all functorch levels active. Then a walk from the outputs finds all that their graphs keep, at every level.

Of several backwards only the one that keeps most is reported. A recomputation is not a backward. Tensors that
autograd nodes in C++ keep in private fields are not seen.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import world
from .._torch import autograd, functorch, wrappers
from ..closures import Found
from ..core.dispatch import Owner, program_of
from ..core.program import is_differentiable
from ..core.tensors import with_paths
from ..errors import InputError
from ..meter import storages
from ..policies.policies import current_name
from ..tape.operators import is_subclass_first, run_operator, tensors_in


@dataclass(frozen=True)
class Residual:
    """A tensor that is kept for a backward. Its `str` is a line of :func:`print_saved_residuals`."""

    dtype: torch.dtype
    shape: tuple[int, ...]  #: with the batch dimensions of all vmaps
    bytes: int  #: of its storage, which is larger than the tensor if that is a view of a part
    kind: str  #: "argument", "closure" (captured by f) or "output" (computed by f)
    source: str  #: such as "argument params['w1']", or "output of aten.mm at model.py:42 (block)"
    name: str | None = None  #: its name, if :func:`~funcckpt.checkpoint_name` gave it one
    #: The first graph node that was found to keep it, such as "MmBackward0" or "remat(block)".
    kept_by: str = field(default="", compare=False)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        named = f"named {self.name!r}, " if self.name else ""
        return f"{dtype}{list(self.shape)}  {self.bytes:,} bytes  {named}{self.source}"


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """Run ``f(*args, **kwargs)`` and list the tensors that it keeps for the backward, with their origin.

    If f takes derivatives itself (``vmap(grad(loss))``, a training step), the list shows what is kept when
    its backward begins; of several backwards, the one that keeps most. Otherwise it shows what is kept at the
    end of f, for derivatives with respect to the arguments, parameters and captured tensors that require
    grad. If none does, and no transform is active, f runs again, for derivatives with respect to all
    floating-point arguments. Random streams are restored.

    There is one residual for each storage: first arguments, then captured tensors, then what f has computed.
    Only the last, of kind ``"output"``, are the cost of the derivative. Numbers (``x * 2``) do not count.

    >>> import torch
    >>> from torch.func import grad, vmap
    >>> from funcckpt import saved_residuals
    >>> def loss(w, x):
    ...     return torch.tanh(x @ w).sum()
    >>> w, x = torch.ones(32, 8), torch.ones(16, 32)
    >>> [(r.shape, r.bytes, r.kind) for r in saved_residuals(loss, w, x)]
    [((32, 8), 1024, 'argument'), ((16, 32), 2048, 'argument'), ((16, 8), 512, 'output')]
    >>> saved_residuals(vmap(grad(loss), (None, 0)), w, x)[-1].source.split(" at ")[0]
    'output of aten.tanh'
    """
    return Subject(f, args, kwargs).residuals


def print_saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Print what :func:`saved_residuals` finds that ``f(*args, **kwargs)`` keeps for the backward.

    >>> import torch
    >>> from funcckpt import print_saved_residuals
    >>> def block(p, x):
    ...     return torch.tanh(x @ p["w"])
    >>> p, x = {"w": torch.ones(32, 8)}, torch.ones(16, 32)
    >>> print_saved_residuals(block, p, x)           # doctest: +ELLIPSIS
    float32[32, 8]   1,024 bytes  argument p['w']
    float32[16, 32]  2,048 bytes  argument x
    float32[16, 8]     512 bytes  output of aten.tanh at ... (block)
    """
    rows = [str(r).split("  ", 2) for r in saved_residuals(f, *args, **kwargs)]
    widths = [max([len(row[i]) for row in rows], default=0) for i in (0, 1)]
    for what, size, where in rows:
        print(f"{what:{widths[0]}}  {size:>{widths[1]}}  {where}")


# -- one run of f ---------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where a storage comes from. Sources are reported in the order of their numbers."""

    number: int
    kind: str
    words: str
    name: str | None = None


class Subject(TorchDispatchMode):
    """A function and its arguments, to be run several times under the same conditions."""

    sees_names = True

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        if not callable(f):
            raise InputError(f"pass a function and its arguments, not {type(f).__name__}: (f, *args).")
        self._f, self._args, self._kwargs = f, args, kwargs
        found = Found((f, args, kwargs))
        self._streams = world.states(world.random_streams(found.streams, found.draws_elsewhere))
        self.residuals = self.run(with_backward=False)
        # Under a transform, the transform decides what is differentiated.
        if not self._kept and torch.is_grad_enabled() and functorch.peek_interpreter_stack() is None:
            self._args, self._kwargs = pytree.tree_map_only(
                Tensor, lambda x: x.detach().requires_grad_(is_differentiable(x)), (args, kwargs)
            )
            self.residuals = self.run(with_backward=False)

    def run(self, with_backward: bool = True) -> list[Residual]:
        """Run f, and `with_backward` its backward if f runs none itself. Returns what f keeps."""
        self._count = 0
        self._sources: WeakKeyDictionary[torch.UntypedStorage, _Source] = WeakKeyDictionary()
        self._learn("argument", _arguments(self._f, self._args, self._kwargs))
        # The names inside of a wrapped function are better than those of the wrapper.
        for g in dict.fromkeys((inspect.unwrap(self._f), self._f)):
            found = Found(g)
            self._learn("closure", [(found.where(id(x)), x) for x in found.tensors.values()])
        self._count += 1
        self._unknown = _Source(self._count, "closure", "a captured tensor")
        # For each backward: what was kept when it began.
        self._kept: list[list[Residual]] = []
        with world.streams_at(self._streams):
            with self, _Backwards(self._take):
                out = self._f(*self._args, **self._kwargs)
                outputs = [y for y in tensors_in(out) if y.requires_grad]
            has_backward, out = bool(self._kept), None
            if outputs:
                self._take(outputs)
            if outputs and with_backward and not has_backward:
                tensors = Found((self._f, self._args, self._kwargs)).tensors.values()
                inputs, ones = [x for x in tensors if x.requires_grad], [*map(torch.ones_like, outputs)]
                if not inputs:  # f has made its leaves
                    inputs = [x for x in autograd.entering(outputs).values() if x is not None]
                torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        return max(self._kept, key=lambda kept: sum(r.bytes for r in kept), default=[])

    def _learn(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for words, x in tensors:
            self._count += 1
            for storage in storages(wrappers.below_wrappers(x)):
                self._sources.setdefault(storage, _Source(self._count, kind, words))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_subclass_first(types):
            return NotImplemented
        out = run_operator(func, args, kwargs or {})
        self._count += 1
        for storage in storages(out):
            source = self._sources.get(storage)
            name = current_name() or (source and source.name)
            if source is None or (func._schema.is_mutable and source.kind == "output"):
                source = _Source(self._count, "output", _made_by(func))
            self._sources[storage] = source._replace(name=name)
        return out

    def _take(self, outputs: Iterable[Tensor]) -> None:
        """Record what is kept for a backward from `outputs`."""
        found: dict[int, tuple[int, Residual]] = {}
        with autograd.without_dispatch_modes():
            # Tensors that autograd saved come first: they name the node.
            for x, by, is_saved in sorted(_kept_for(outputs), key=lambda kept: not kept[2]):
                for storage in storages(x):
                    source = self._sources.get(storage) or self._unknown
                    # An object may refer to all parameters of a module, which are alive anyway.
                    is_known_anyway = not is_saved and source.kind == "closure"
                    # The graph keeps a Python number as a tensor without dimensions, made by no operator.
                    is_number = source is self._unknown and x.dim() == 0
                    if is_known_anyway or is_number or storage.nbytes() == 0:
                        continue
                    _, before = found.get(storage._cdata, (0, None))
                    # Of several views, the largest.
                    if before is None or math.prod(before.shape) < x.numel():
                        first = by if before is None else before.kept_by
                        residual = Residual(x.dtype, tuple(x.shape), storage.nbytes(), *source[1:], first)
                        found[storage._cdata] = source.number, residual
        self._kept.append([residual for _, residual in sorted(found.values(), key=itemgetter(0))])


class _Backwards(world.Mode):
    """Calls `begins` with the outputs, when a backward begins that is not inside of another one."""

    def __init__(self, begins: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._begins = begins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The mode is off in here: what a backward itself differentiates is not seen.
        if func in _BACKWARDS and autograd.graph_task() == -1:
            outputs = args[0] if args else next(iter((kwargs or {}).values()))
            self._begins(tensors_in(outputs))
        return func(*args, **(kwargs or {}))


_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


# -- where tensors come from ----------------------------------------------------------------------------


def _arguments(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, with the names that f gives them."""
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
        arguments: Mapping[str, Any] = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a builtin, or a wrapper without a signature
        arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    for name, tree in arguments.items():
        for path, leaf in with_paths(tree):
            if isinstance(leaf, Tensor):
                yield f"argument {name}{pytree.keystr(path)}", leaf


_FOLDERS = Path(__file__).parents[1], Path(torch.__file__).parent, Path(os.__file__).parent
_NOT_THE_USERS = (*[str(folder) + os.sep for folder in _FOLDERS], "<frozen", "<string>")


def _made_by(func: Any) -> str:
    """An operator in words, with the line of the user that called it, if there is one."""
    words = f"output of {getattr(func, 'overloadpacket', func)}"
    if autograd.graph_task() != -1:
        words += " in a backward"
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not Subject.run.__code__:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            folder, name = os.path.split(file)
            name = "<cell>" if os.path.basename(folder).startswith("ipykernel_") else name
            return f"{words} at {name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return words


# -- what graphs keep -------------------------------------------------------------------------------------


def _kept_for(outputs: Iterable[Tensor]) -> list[tuple[Tensor, str, bool]]:
    """The tensors that the graphs of `outputs` keep: (plain tensor, name of the node, whether it was saved).

    Those that were not saved belong to Python objects of the graph: the context of a custom function, a
    saved-tensor hook, or what a hook returned in place of a tensor.
    """
    found: list[tuple[Tensor, str, bool]] = []
    nodes: list[Any] = []  # those that made a tensor or its tangents, at all levels
    with functorch.set_forward_mode(True):
        for y in outputs:
            wrappers.everything_below(y, nodes)
        pending: list[tuple[Any, str, bool]] = [(nodes, "", False)]
        seen: dict[int, Any] = {}  # by id, with the object, so that no other one takes its id
        while pending:
            item, by, is_saved = pending.pop()
            if isinstance(item, Tensor):
                nodes = []
                found += [(x, by, is_saved) for x in wrappers.everything_below(item, nodes)]
                pending.append((nodes, "", False))
            elif not isinstance(item, _LEAVES) and id(item) not in seen:
                seen[id(item)] = item
                pending += _parts_of(item, by)
    return found


# Types that hold no tensors, and those that lead to the whole program.
_LEAVES = str, bytes, int, float, type(None), torch.dtype, torch.device, type, ModuleType, CodeType, FrameType


def _parts_of(item: Any, by: str) -> Iterator[tuple[Any, str, bool]]:
    """The parts of an object, in the form of `_kept_for`."""
    if isinstance(item, Node):
        by = item.name()
        yield from [(node, "", False) for node, _ in item.next_functions]
        if (program := program_of(item)) is not None:
            by = f"remat({program.source.name})"
            yield from [(x, by, True) for x in program.source.kept_tensors()]
            yield program, by, False
        if isinstance(item, torch.autograd.function.BackwardCFunction):
            yield vars(item), by, False
        yield from [(saved, by, False) for saved in autograd.saved_by(item)]
    elif isinstance(item, autograd.SavedTensor):
        saved: Any = item  # to unpack it might recompute
        if saved.unpack_hook is None:
            yield from [] if isinstance(saved.data, Owner) else [(saved.data, by, True)]
        else:
            yield (saved.data, saved.unpack_hook), by, False
    elif isinstance(item, Found):  # not all that f refers to
        yield from [(x, by, False) for x in item.tensors.values()]
    elif isinstance(item, FunctionType):  # not its globals
        yield (item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__), by, False
    else:
        yield from [(x, by, False) for x in gc.get_referents(item)]
