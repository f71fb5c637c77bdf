"""Exact live bytes, FLOPs and op counts of any function of tensors.

A meter is a ``TorchDispatchMode``, below autograd and every ``torch.func`` transform, so it sees the ops that
reach a backend: ``vmap(grad(f))`` is counted as the batched ops that it becomes, with those of the backward.
Unlike an allocator's statistics it sees one region of code alone, and gives the same number each time, on
every device. On ``meta`` and under ``FakeTensorMode`` it counts the bytes that the tensors stand for.

A storage is new when it first appears as the output of an op. It is alive until its last reference is gone;
tensors in reference cycles live until Python's collector runs. Views add nothing. A storage that existed
before (an argument, a parameter) counts only by what it grows. What `storage.resize_()` frees is noticed by
the next op that gets the storage, and at a `mark`. Files that are mapped into memory (``offload="disk"``)
count like memory. Not counted are memory that no op allocates
(workspace inside of an op, tensors in opaque (MKL-DNN) and compressed sparse layouts),
threads that f starts, and FLOPs other than those of products, convolutions and attention. Under a dispatch
mode, such as this one, torch runs compiled functions eagerly (and refuses those with ``fullgraph=True``), and
refuses higher-order ops (``torch.cond``).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._torch import autograd, functorch
from .errors import InputError
from .tape.operators import comes_whole, flops_of, is_subclass_first, run_operator
from .tape.recompute import Placeholder

__all__ = ["Measurement", "Meter", "mark", "measure"]

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What :func:`measure` found."""

    result: T = field(repr=False)  #: what f returned
    peak_bytes: int  #: the most bytes that were alive after any op
    end_bytes: int  #: alive at the end, in new storages of `result` and of what it refers to
    flops: int  #: floating-point operations; a multiply and an add are two
    ops: Counter[str] = field(repr=False)  #: how often each ran, by its name, such as "aten.mm.default"
    marks: dict[str, int]  #: the bytes that were alive at each :func:`mark`


def measure(f: Callable[..., T], /, *args: Any, **kwargs: Any) -> Measurement[T]:
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
    if not callable(f):
        raise InputError(f"measure takes a function and its arguments, (f, x), not a {type(f).__name__}.")
    with Meter() as meter:
        result = f(*args, **kwargs)
    return Measurement(result, meter.peak_bytes, meter.live_bytes, meter.flops, meter.ops, meter.marks)


def mark(name: str) -> None:
    """Record the bytes that are alive at this point, under `name`, in every active meter.

    >>> import torch
    >>> from funcckpt.meter import mark, measure
    >>> def loss(x):
    ...     y = x.exp().sum()   # exp keeps its result
    ...     mark("saved")       # what is held between the forward and the backward
    ...     return y
    >>> measure(torch.func.grad(loss), torch.zeros(256)).marks     # 256 + 1 floats
    {'saved': 1028}
    """
    if torch.compiler.is_dynamo_compiling():
        return  # a meter has compiled functions run eagerly
    for mode in functorch.dispatch_modes():
        if isinstance(mode, Meter):
            mode.mark(name)


class Meter(TorchDispatchMode):
    """Counts live bytes, FLOPs and ops inside of a block: ``with Meter() as meter: ...``

    The attributes `peak_bytes`, `flops`, `ops` and `marks` are those of a :class:`Measurement`; `live_bytes`
    are the bytes alive now. Storages made in the block are counted after it, too. Meters may be nested; one
    that is entered again goes on counting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.flops = 0
        self.ops: Counter[str] = Counter()
        self.marks: dict[str, int] = {}
        # The operator that runs, or that has raised.
        self.running: Any = None
        self._live_bytes = 0
        # For each storage: its bytes before the block, and the bytes that were added since.
        self._tracked: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}
        # A storage may be freed at any moment and in any thread; _settle subtracts it later, in order.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        # The autograd engine has a thread for each accelerator.
        self._lock = threading.RLock()

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._settle()
            for ref in list(self._tracked):
                if (storage := ref()) is not None:
                    self._book(storage, new=False)  # `storage.resize_()` is not an op.
            return self._live_bytes

    def mark(self, name: str) -> None:
        """Record the bytes that are alive now, under `name`."""
        self.marks[name] = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_subclass_first(types):
            return NotImplemented
        if comes_whole(func, args, kwargs):
            with self:
                return autograd.taken_apart(func, args, kwargs)

        with self._lock:
            # torch.tensor makes its storage with the dispatcher off, then hands it to lift_fresh.
            if func is not torch.ops.aten.lift_fresh.default:
                for storage in storages((args, kwargs)):
                    self._book(storage, new=False)
        self.running = func
        out = run_operator(func, args, kwargs)
        self.running = None
        with self._lock:
            self._settle()
            for storage in storages(out):
                self._book(storage, new=True)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self.ops[str(func)] += 1
            self.flops += flops_of(func, args, kwargs, out)
        return out

    def _book(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        """Update the live bytes for the present size of a storage."""
        size = storage.nbytes()
        ref = weakref.ref(storage, self._dead.append)
        before, counted = self._tracked.get(ref, (0 if new else size, 0))
        grown = max(0, size - before)
        self._tracked[ref] = before, grown
        self._live_bytes += grown - counted

    def _settle(self) -> None:
        """Subtract the storages that were freed."""
        while self._dead:
            self._live_bytes -= self._tracked.pop(self._dead.popleft())[1]


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in a pytree, once for each tensor."""
    for x in pytree.tree_leaves(tree):
        # These have a size and no memory.
        if isinstance(x, torch.Tensor) and not (isinstance(x, Placeholder) or x._is_zerotensor()):
            # The public names refuse a sparse tensor that is not coalesced.
            for part in (x._indices(), x._values()) if x.layout is torch.sparse_coo else (x,):
                with suppress(NotImplementedError):  # a layout without a storage
                    yield part.untyped_storage()
