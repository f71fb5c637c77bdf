"""What a function keeps for its backward, in words.

A residual is a tensor that autograd keeps from the forward until the backward has used it. Where the
forward ends is where a backward begins: at the call of `torch.autograd.grad` or `backward` that f makes
itself (every reverse-mode transform of `torch.func` makes one), or, of a function that makes none, at its
end. Three observers stand around one run of f:

* a dispatch mode, below autograd and all transforms, remembers which operator has made each storage, and
  for which line of the user's code;
* a function mode sees a backward begin, with all functorch levels still active;
* at that moment a walk goes through the graph: from the outputs to all nodes, through what each node has
  saved, or a saved-tensor hook in its place, and through the wrappers of every level to the graphs and
  tangents of the levels below.

So it is the storages that are counted, each once, with their size below all levels: the batched one. Of a
backward inside of a backward (a recomputation) nothing is counted. If f runs several backwards, one after
the other, the one that has the most to keep is reported.

What is not seen: what autograd nodes that are written in C++ keep without saying so.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import _torch, world
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
        what, size, where = self._words()
        return f"{what}  {size}  {where}"

    def _words(self) -> tuple[str, str, str]:
        look = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        named = f"named {self.name!r}, " if self.name else ""
        return look, f"{self.bytes:,} bytes", named + self.source


def saved_residuals(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """Run ``f(*args, **kwargs)`` and tell what it keeps for the backward, and where that comes from.

    Parameters
    ----------
    f : callable
        Any differentiable function, remat'd or not. If it takes derivatives itself
        (``vmap(grad(loss))``, or a training step), what is kept is told for the moment when its backward
        begins, and, if it runs several, for the one that has the most to keep. If it takes none, for its
        end: with respect to the arguments, parameters and captured tensors that require grad, or, if none
        does and no transform is active, to all floating-point arguments.
    *args, **kwargs
        What to call it with; tensors of any shape in any pytree.

    Returns
    -------
    list of Residual
        One for each storage: first arguments, then what f has captured, then what it has computed, in
        order. Arguments and captured tensors are alive anyway; those of kind ``"output"`` are what the
        derivative costs. Numbers (the 2 of ``x * 2``) are left out.

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

    Parameters
    ----------
    f, *args, **kwargs
        As for :func:`saved_residuals`.

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


class Run:
    """One run of f: what it has returned, and what it kept."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.sources = sources = _Sources(f, args, kwargs)
        # What there was to keep when each backward began.
        self._kept: list[list[Residual]] = []
        with sources, _Backwards(self._take):
            result = f(*args, **kwargs)
        # Whether f has taken a derivative itself.
        self.is_complete = bool(self._kept)
        self.outputs = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor) and y.requires_grad]
        if self.outputs:
            self._take(self.outputs)

    def _take(self, outputs: Iterable[Tensor]) -> None:
        with _torch.without_dispatch_modes():
            self._kept.append(self.sources.residuals(Walk(outputs)))

    @property
    def residuals(self) -> list[Residual]:
        return max(self._kept, key=lambda kept: sum(r.bytes for r in kept), default=[])


class Subject:
    """A function and its arguments, to be run several times under the same conditions.

    Random streams are where they were after each run. If f neither takes a derivative nor returns anything
    that could be differentiated, its arguments of floating point are made to require grad.
    """

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not callable(f):
            raise InputError(f"give a function and its arguments, not {type(f).__name__}: f, *args.")
        self._f = f
        self._args, self._kwargs = args, kwargs
        self._streams = world.states(world.random_streams(()))
        self.first = self.run()
        known = self.first.is_complete or self.first.outputs
        # Under a transform that one decides what is differentiated.
        if not known and torch.is_grad_enabled() and _torch.peek_interpreter_stack() is None:
            self._args, self._kwargs = _differentiated(args, kwargs)
            self.first = self.run()

    def run(self) -> Run:
        with world.streams_at(self._streams):
            return Run(self._f, self._args, self._kwargs)

    def run_all(self) -> Run:
        """Run f, and its backward with it if it has none of its own."""
        run = self.run()
        if run.is_complete or not run.outputs:
            return run
        leaves = pytree.tree_leaves((self._args, self._kwargs))
        inputs = [
            x
            for x in (*leaves, *Found(self._f).tensors.values())
            if isinstance(x, Tensor) and x.requires_grad
        ]
        unique = list({id(x): x for x in inputs}.values())
        outputs, run.outputs = run.outputs, []
        cotangents = [torch.ones_like(y) for y in outputs]
        torch.autograd.grad(outputs, unique, cotangents, allow_unused=True)
        return run


def _differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments, those of floating point as leaves that require grad."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if x.is_floating_point() or x.is_complex() else x

    leaves: tuple[Any, Any] = pytree.tree_map_only(Tensor, leaf, (args, kwargs))
    return leaves


class _Backwards(world.Mode):
    """Tells when a backward begins that is not part of another one, and from what."""

    def __init__(self, begins: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._begins = begins

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The mode is not active in here: what a backward differentiates itself passes unseen.
        if func in _BACKWARDS and _torch.graph_task() == -1:
            outputs = args[0] if args else next(iter((kwargs or {}).values()))
            self._begins([y for y in pytree.tree_leaves(outputs) if isinstance(y, Tensor)])
        return func(*args, **(kwargs or {}))


_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


# -- where tensors come from ----------------------------------------------------------------------------


@dataclass
class _Source:
    kind: str
    order: int
    words: str


class _Sources(TorchDispatchMode):
    """Which operator has made, or written to, each storage; and what there was before."""

    sees_names = True

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._count = 0
        self._known: StorageTable[_Source] = StorageTable()
        self._names: StorageTable[str] = StorageTable()
        for words, x in _arguments(f, args, kwargs):
            self._learn(x, "argument", words)
        for words, x in _captured(f):
            self._learn(x, "closure", words)

    def _learn(self, x: Tensor, kind: str, words: str) -> None:
        self._count += 1
        for storage in storages(_torch.below_wrappers(x)):
            if self._known.get(storage) is None:
                self._known.set(storage, _Source(kind, self._count, words))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # The subclass acts first; its inner tensors come by here.
        out = run_operator(func, args, kwargs or {})
        self._count += 1
        name, source = current_name(), None
        writes = func._schema.is_mutable
        for storage in storages(out):
            if name is not None:
                self._names.set(storage, name)
            known = self._known.get(storage)
            if known is None or (writes and known.kind == "output"):
                source = source or _Source("output", self._count, _made_by(func))
                self._known.set(storage, source)
        return out

    def _is_of_the_call(self, storage: torch.UntypedStorage) -> bool:
        source = self._known.get(storage)
        return source is not None and source.kind != "closure"

    def residuals(self, walk: Walk) -> list[Residual]:
        found: dict[int, tuple[Tensor, torch.UntypedStorage, str]] = {}
        for i, (x, by) in enumerate([*walk.saved, *walk.held]):
            for storage in storages(x):
                # An object may know the parameters of a whole module, which live anyway.
                if i >= len(walk.saved) and not self._is_of_the_call(storage):
                    continue
                before = found.get(storage._cdata)
                # Of several views, the one that shows the most.
                if before is None or before[0].numel() < x.numel():
                    found[storage._cdata] = x, storage, by if before is None else before[2]
        residuals = []
        for x, storage, by in found.values():
            source = self._known.get(storage)
            # A number in Python stands in the graph as a tensor without dimensions that nothing has made.
            if storage.nbytes() == 0 or (source is None and x.dim() == 0):
                continue
            source = source or _Source("closure", 0, "a captured tensor")
            residual = Residual(
                x.dtype,
                tuple(x.shape),
                storage.nbytes(),
                source.kind,
                source.words,
                self._names.get(storage),
                by,
            )
            residuals.append((_KINDS.index(source.kind), source.order, residual))
        return [residual for _, _, residual in sorted(residuals, key=lambda item: item[:2])]


_KINDS = ("argument", "closure", "output")


def _arguments(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, and how f calls them."""
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
        arguments = signature.bind(*args, **kwargs).arguments
        variable = [name for name in arguments if signature.parameters[name].kind is _VAR_KEYWORD]
        for name in variable:
            arguments.update(arguments.pop(name))
    except (TypeError, ValueError):  # a builtin, or a wrapper that tells nothing
        arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    for name, tree in arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor):
                yield f"argument {name}{pytree.keystr(path)}", leaf


_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _captured(f: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that f refers to, in words."""
    # What a decorator or a transform has wrapped has better names than the wrapper.
    for g in dict.fromkeys((inspect.unwrap(f), f)):
        found = Found(g)
        for x in found.tensors.values():
            yield found.where(id(x)), x


def _made_by(func: Any) -> str:
    """An operator that runs, and the user's line for which it does, in words."""
    name = str(getattr(func, "overloadpacket", func))
    place = _place()
    backward = " in a backward" if _torch.graph_task() != -1 else ""
    return f"output of {name}{backward}{place and f' at {place}'}"


_HERE = str(Path(__file__).parent.parent) + os.sep
_NOT_THE_USERS = (_HERE, str(Path(torch.__file__).parent) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep)


def _place() -> str:
    """The line of the innermost frame that belongs to the user, if f has one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENTRY:
        code = frame.f_code
        if _is_the_users(code):
            function = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
            return f"{_file(code.co_filename)}:{frame.f_lineno} ({function})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.lru_cache(1024)
def _is_the_users(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(_HERE + "demo" + os.sep):
        return True
    return not file.startswith((*_NOT_THE_USERS, "<frozen", "<string>"))


def _file(name: str) -> str:
    base = os.path.basename(name)
    return "<cell>" if os.path.basename(os.path.dirname(name)).startswith("ipykernel_") else base


_ENTRY = Run.__init__.__code__
