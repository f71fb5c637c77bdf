"""What a function keeps for its backward, in words.

A residual is a tensor that autograd keeps from the forward until the backward has used it. A backward begins
at the call of `torch.autograd.grad` or `backward` that f makes itself, as every reverse-mode transform of
`torch.func` does; or, of a function that makes none, at its end. During one run of f

* a dispatch mode, below all transforms, notes which operator, for which line of the user, made each storage;
* a function mode sees a backward begin, while all functorch levels are active;
* then `graph.Walk` goes from the outputs to all that the graph keeps, at every level.

So storages are counted, each once, with their size below all levels. A backward inside of a backward (a
recomputation) is not counted; of several, one after the other, the largest is. What autograd nodes that are
written in C++ keep without saying so is not seen.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import world
from .._torch import autograd, functorch, wrappers
from ..closures import Found
from ..errors import InputError
from ..meter import storages
from ..policies.policies import current_name
from ..tape.operators import StorageTable, run_operator
from .graph import Walk

__all__ = ["Residual", "print_saved_residuals", "saved_residuals"]


@dataclass(frozen=True)
class Residual:
    """A tensor that is kept for a backward. Its `str` is a line of :func:`print_saved_residuals`.

    Attributes
    ----------
    dtype : torch.dtype
        Of the tensor that is saved.
    shape : tuple of int
        Its shape with the batch dimensions of all vmaps, wherever those are in memory.
    bytes : int
        The size of its storage, which may be more than the tensor needs if it is a part of another.
    kind : {"argument", "closure", "output"}
        Whether f was given it, has captured it, or has made it.
    source : str
        Where it comes from: ``"argument params['w1']"``, ``"closure variable 'scale'"``, or
        ``"output of aten.mm at model.py:42 (block)"``.
    name : str or None
        What :func:`~funcckpt.checkpoint_name` has called it.
    kept_by : str
        The first graph node found to keep it, such as ``"MmBackward0"`` or ``"remat(block)"``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    kind: str
    source: str
    name: str | None = None
    kept_by: str = field(default="", compare=False)

    def __str__(self) -> str:
        return "  ".join(self._words())

    def _words(self) -> tuple[str, str, str]:
        look = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        named = f"named {self.name!r}, " if self.name else ""
        return look, f"{self.bytes:,} bytes", named + self.source


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """Run ``f(*args, **kwargs)`` and tell what it keeps for the backward, and where that comes from.

    Parameters
    ----------
    f : callable
        Any differentiable function. If it takes derivatives itself (``vmap(grad(loss))``, a training step),
        what is kept is told for the moment when its (largest) backward begins. If it takes none, for its
        end: with respect to the arguments, parameters and captured tensors that require grad, or, if none
        does and no transform is active, to all floating-point arguments.
    *args, **kwargs
        What to call it with.

    Returns
    -------
    list of Residual
        One for each storage: first arguments, then what f has captured, then what it has computed. Only
        those of kind ``"output"`` are what the derivative costs. Numbers (the 2 of ``x * 2``) are left out.

    Raises
    ------
    InputError
        f is not callable.

    Notes
    -----
    The counterpart of JAX's `saved_residuals`; torch has none. f may be run twice: to see whether it takes
    a derivative, and again with arguments that require grad. Random streams are left as they were.

    Examples
    --------
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
    return Subject(f, args, kwargs).first.residuals


def print_saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Print what ``f(*args, **kwargs)`` keeps for the backward, one line each.

    The parameters are those of :func:`saved_residuals`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import print_saved_residuals, remat
    >>> def block(p, x):
    ...     return torch.tanh(x @ p["w"])
    >>> p, x = {"w": torch.ones(32, 8)}, torch.ones(16, 32)
    >>> print_saved_residuals(block, p, x)           # doctest: +ELLIPSIS
    float32[32, 8]   1,024 bytes  argument p['w']
    float32[16, 32]  2,048 bytes  argument x
    float32[16, 8]     512 bytes  output of aten.tanh at ... (block)
    >>> print_saved_residuals(remat(block), p, x)
    float32[32, 8]   1,024 bytes  argument p['w']
    float32[16, 32]  2,048 bytes  argument x
    """
    rows = [r._words() for r in saved_residuals(f, *args, **kwargs)]
    widths = [max([len(row[i]) for row in rows], default=0) for i in (0, 1)]
    for what, size, where in rows:
        print(f"{what:{widths[0]}}  {size:>{widths[1]}}  {where}")


# -- one run of f ---------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where a storage comes from; sources are told in this order."""

    kind: int
    order: int
    words: str


_KINDS = ("argument", "closure", "output")
_ARGUMENT, _CLOSURE, _OUTPUT = range(3)


class Run(TorchDispatchMode):
    """One run of f: what it has returned, what it kept, and which operator has made or written to that."""

    sees_names = True

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._count = 0
        self._sources: StorageTable[_Source] = StorageTable()
        self._names: StorageTable[str] = StorageTable()
        self._learn(_ARGUMENT, _arguments(f, args, kwargs))
        self._learn(_CLOSURE, _captured(f))
        # What there was to keep when each backward began.
        self._kept: list[list[Residual]] = []
        with self, _Backwards(self._take):
            result = f(*args, **kwargs)
        # Whether f has taken a derivative itself.
        self.is_complete = bool(self._kept)
        self.outputs = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.requires_grad]
        if self.outputs:
            self._take(self.outputs)

    @property
    def residuals(self) -> list[Residual]:
        return max(self._kept, key=lambda kept: sum(r.bytes for r in kept), default=[])

    def _learn(self, kind: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for words, x in tensors:
            self._count += 1
            for storage in storages(wrappers.below_wrappers(x)):
                if self._sources.get(storage) is None:
                    self._sources.set(storage, _Source(kind, self._count, words))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # The subclass acts first; its inner tensors come by here.
        out = run_operator(func, args, kwargs or {})
        self._count += 1
        name = current_name()
        for storage in storages(out):
            if name is not None:
                self._names.set(storage, name)
            known = self._sources.get(storage)
            if known is None or (func._schema.is_mutable and known.kind == _OUTPUT):
                self._sources.set(storage, _Source(_OUTPUT, self._count, _made_by(func)))
        return out

    def _take(self, outputs: Iterable[Tensor]) -> None:
        """Note what there is to keep for a backward of some outputs."""
        with autograd.without_dispatch_modes():
            walk = Walk(outputs)
            found: dict[int, tuple[Tensor, torch.UntypedStorage, str]] = {}
            for i, (x, by) in enumerate([*walk.saved, *walk.held]):
                for storage in storages(x):
                    source = self._sources.get(storage)
                    # An object may know the parameters of a whole module, which live anyway.
                    if i >= len(walk.saved) and (source is None or source.kind == _CLOSURE):
                        continue
                    before = found.get(storage._cdata)
                    # Of several views, the one that shows the most.
                    if before is None or before[0].numel() < x.numel():
                        found[storage._cdata] = x, storage, by if before is None else before[2]
            residuals = []
            for x, storage, by in found.values():
                source = self._sources.get(storage)
                # A number in Python stands in the graph as a tensor without dimensions that nothing has made.
                if storage.nbytes() == 0 or (source is None and x.dim() == 0):
                    continue
                source = source or _Source(_CLOSURE, 0, "a captured tensor")
                what = x.dtype, tuple(x.shape), storage.nbytes(), _KINDS[source.kind], source.words
                residuals.append((source, Residual(*what, self._names.get(storage), by)))
        self._kept.append([residual for _, residual in sorted(residuals, key=lambda item: item[0][:2])])


class Subject:
    """A function and its arguments, to be run several times under the same conditions.

    Random streams are where they were after each run. If f neither takes a derivative nor returns anything
    that could be differentiated, its arguments of floating point are made to require grad.
    """

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not callable(f):
            raise InputError(f"give a function and its arguments, not {type(f).__name__}: f, *args.")
        self._f, self._args, self._kwargs = f, args, kwargs
        self._streams = world.states(world.random_streams(()))
        self.first = self.run()
        known = self.first.is_complete or self.first.outputs
        # Under a transform that one decides what is differentiated.
        if not known and torch.is_grad_enabled() and functorch.peek_interpreter_stack() is None:
            self._args, self._kwargs = pytree.tree_map_only(Tensor, _leaf, (args, kwargs))
            self.first = self.run()

    def run(self) -> Run:
        with world.streams_at(self._streams):
            return Run(self._f, self._args, self._kwargs)

    def run_all(self) -> Run:
        """Run f, and its backward with it if it has none of its own."""
        run = self.run()
        if not run.is_complete and run.outputs:
            tensors = [*pytree.tree_leaves((self._args, self._kwargs)), *Found(self._f).tensors.values()]
            inputs = {id(x): x for x in tensors if isinstance(x, Tensor) and x.requires_grad}
            outputs, run.outputs = run.outputs, []
            ones = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, [*inputs.values()], ones, allow_unused=True)
        return run


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() or x.is_complex() else x


class _Backwards(world.Mode):
    """Tells when a backward begins that is not part of another one, and from what."""

    def __init__(self, begins: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._begins = begins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The mode is not active in here: what a backward differentiates itself passes unseen.
        if func in _BACKWARDS and autograd.graph_task() == -1:
            outputs = args[0] if args else next(iter((kwargs or {}).values()))
            self._begins([y for y in pytree.tree_leaves(outputs) if isinstance(y, Tensor)])
        return func(*args, **(kwargs or {}))


_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


# -- where tensors come from ----------------------------------------------------------------------------


def _arguments(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, and how f calls them."""
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
        arguments = signature.bind(*args, **kwargs).arguments
        for name in [*arguments]:
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name))
    except (TypeError, ValueError):  # a builtin, or a wrapper that tells nothing
        arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    for name, tree in arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor):
                yield f"argument {name}{pytree.keystr(path)}", leaf


def _captured(f: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that f refers to, in words."""
    # What a decorator or a transform has wrapped has better names than the wrapper.
    for g in dict.fromkeys((inspect.unwrap(f), f)):
        found = Found(g)
        for x in found.tensors.values():
            yield found.where(id(x)), x


_HERE = str(Path(__file__).parent.parent) + os.sep
_DEMO = _HERE + "demo" + os.sep
_NOT_THE_USERS = (_HERE, str(Path(torch.__file__).parent) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep)


def _made_by(func: Any) -> str:
    """An operator that runs, and the user's line for which it does, in words."""
    name = str(getattr(func, "overloadpacket", func))
    backward = " in a backward" if autograd.graph_task() != -1 else ""
    return f"output of {name}{backward}{_place()}"


def _place() -> str:
    """The line of the innermost frame that belongs to the user, if f has one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Run.__init__.__code__:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_DEMO) or not file.startswith((*_NOT_THE_USERS, "<frozen", "<string>")):
            function = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
            folder, name = os.path.split(file)
            name = "<cell>" if os.path.basename(folder).startswith("ipykernel_") else name
            return f" at {name}:{frame.f_lineno} ({function})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
