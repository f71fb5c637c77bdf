"""Exact live bytes, FLOPs and op counts of any function of tensors.

:func:`measure` runs a function once, :class:`Meter` is the context manager under it, and :func:`mark` notes
the bytes that are alive at one line.

A meter is a ``TorchDispatchMode``, below autograd and every ``torch.func`` transform, so it sees the ops that
reach a backend: ``vmap(grad(f))`` is counted as the batched ops that it becomes, the backward's included.
Unlike an allocator's statistics it sees one region alone and gives the same number each time, on every
device; on ``meta`` and under ``FakeTensorMode`` it counts what the tensors stand for.

What is counted
    A storage is new when it first appears as the output of an op, and is alive until its last reference dies.
    Views add nothing. A storage that existed before (an argument, a parameter) counts by what it grows.

What is not counted
    Memory that no op makes: workspace inside one op, ``torch.from_numpy``, ``torch.load``, opaque (MKL-DNN)
    tensors. Threads that f starts itself. FLOPs other than those of products, convolutions and attention.

Under any dispatch mode torch runs compiled functions eagerly and refuses higher-order ops (``torch.cond``).
Tensors in reference cycles live until Python's collector runs.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ._torch import functorch
from .tape.operators import flops_of

__all__ = ["Measurement", "Meter", "mark", "measure"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What :func:`measure` found. The other attributes are those of a :class:`Meter`."""

    result: T = field(repr=False)
    peak_bytes: int
    end_bytes: int  # alive at the end: the new storages of `result`, and all that it holds on to
    flops: int
    ops: Counter[str] = field(repr=False)
    marks: dict[str, int]


def measure(f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Measurement[T]:
    """Run ``f(*args, **kwargs)`` once and measure its bytes and FLOPs.

    >>> import torch
    >>> from funcckpt.meter import measure
    >>> x, w = torch.ones(16, 32), torch.ones(32, 8)
    >>> m = measure(lambda x, w: torch.tanh(x @ w).sum(), x, w)
    >>> m.peak_bytes, m.end_bytes       # x @ w and its tanh: 2 * 16 * 8 floats of 4 bytes; the sum
    (1024, 4)
    >>> m.flops, m.ops["aten.mm.default"]       # 2 * 16 * 32 * 8
    (8192, 1)
    """
    with Meter() as meter:
        result = f(*args, **kwargs)
    return Measurement(result, meter.peak_bytes, meter.live_bytes, meter.flops, meter.ops, meter.marks)


def mark(name: str) -> None:
    """Note the bytes that are alive here, under `name`, in every meter that is running.

    At the end of a loss function this tells what is held between the forward and the backward. Without a
    meter it does nothing. A name that is marked again keeps the last value.

    >>> import torch
    >>> from funcckpt.meter import mark, measure
    >>> def loss(x):
    ...     y = x.exp().sum()   # exp keeps its result
    ...     mark("saved")
    ...     return y
    >>> measure(torch.func.grad(loss), torch.zeros(256)).marks     # 256 + 1 floats
    {'saved': 1028}
    """
    for mode in functorch.dispatch_modes():
        if isinstance(mode, Meter):
            mode.mark(name)


class Meter(TorchDispatchMode):
    """Count live bytes, FLOPs and ops inside a ``with`` block.

    >>> import torch
    >>> from funcckpt.meter import Meter
    >>> with Meter() as meter:
    ...     x = torch.zeros(1000)
    ...     meter.mark("one")
    ...     y = x + 1
    ...     del x
    >>> meter.marks, meter.live_bytes, meter.peak_bytes
    ({'one': 4000}, 4000, 8000)

    Storages made in the block are followed after it, too. Meters nest, and continue when entered again.

    Attributes
    ----------
    peak_bytes : int
        The most bytes that were alive after any one op in the block.
    live_bytes : int
        The bytes alive now.
    flops : int
        Floating-point operations; a multiply and an add are two.
    ops : Counter[str]
        How often each op ran, by its name, such as ``"aten.mm.default"``.
    marks : dict[str, int]
        The bytes that were alive at each :meth:`mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.flops = 0
        self.ops: Counter[str] = Counter()
        self.marks: dict[str, int] = {}
        self._live_bytes = 0
        # The bytes of each storage that were there before, and those counted since.
        self._tracked: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}
        # A storage may die at any moment and in any thread. _settle books it in order.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        # The engine has a thread for each accelerator.
        self._lock = threading.RLock()

    def __enter__(self) -> Meter:
        if any(mode is self for mode in functorch.dispatch_modes()):
            raise RuntimeError("this Meter is running already; nest a second Meter() instead")
        super().__enter__()
        return self

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._settle()
            for ref in list(self._tracked):
                if (storage := ref()) is not None:
                    self._book(storage, new=False)  # `storage.resize_()` is no op.
            return self._live_bytes

    def mark(self, name: str) -> None:
        """Note the bytes that are alive now under `name`."""
        self.marks[name] = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # The subclass acts first; its inner tensors come by here.
        if torch.is_inference_mode_enabled():
            # Composite ops are taken apart at autograd's dispatch keys, which are off here.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out

        with self._lock:
            # torch.tensor makes its storage with the dispatcher off, then hands it to lift_fresh.
            if func is not torch.ops.aten.lift_fresh.default:
                for storage in storages((args, kwargs)):
                    self._book(storage, new=False)
        out = func(*args, **kwargs)
        with self._lock:
            self._settle()
            for storage in storages(out):
                self._book(storage, new=True)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self.ops[str(func)] += 1
            self.flops += flops_of(func, args, kwargs, out)
        return out

    def _book(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        """Bring the live bytes up to date with the present size of one storage."""
        size = storage.nbytes()
        ref = weakref.ref(storage, self._dead.append)
        before, counted = self._tracked.get(ref, (0 if new else size, 0))
        grown = max(0, size - before)
        self._tracked[ref] = before, grown
        self._live_bytes += grown - counted

    def _settle(self) -> None:
        """Take off the storages that have died."""
        while self._dead:
            self._live_bytes -= self._tracked.pop(self._dead.popleft())[1]


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in a pytree, once for each tensor."""
    for leaf in pytree.tree_leaves(tree):
        for part in _components(leaf) if isinstance(leaf, torch.Tensor) else ():
            if not part._is_zerotensor():  # An absent tangent of forward mode: a size, no memory.
                with suppress(NotImplementedError):  # An opaque tensor: MKL-DNN, Vulkan.
                    yield part.untyped_storage()


def _components(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()  # The public names refuse a tensor that is not coalesced.
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)
