"""Exact live bytes, FLOPs and op counts of any function of tensors.

``measure(f, *args)`` runs ``f(*args)`` once and tells the most bytes that were alive at a time, the
bytes that are alive at the end, and the floating-point operations spent. :class:`Meter` is the
context manager under it, and :func:`mark` notes the bytes that are alive at one line of `f`.

The meter is a ``TorchDispatchMode``, so it sits below autograd and below every ``torch.func``
transform. It sees the ops that reach a backend, with the tensors that hold memory:
``vmap(grad(f))`` is counted as the batched ops that it becomes, the backward's ops included. An
allocator's statistics (``torch.cuda.max_memory_allocated``) see rounding, caching and whatever
else runs in the process; the meter sees the tensors of this one region, and gives the same number
each time, on every device, also where there is no memory to measure: on the ``meta`` device and
under ``FakeTensorMode`` it counts the bytes that the tensors stand for.

What is counted
    A storage is *new* when it first appears as the output of an op. It is alive from then until
    its last reference dies, in Python, in a graph, or anywhere else. Views share their storage and
    add nothing. Storages that are resized count with their present size. Storages that an op reads
    before any op has made them (arguments, parameters, captured tensors) existed before, and count
    only by what they grow. Of a sparse tensor, the components are counted.

What is not counted
    Workspace that a kernel allocates and frees within one op. Storages that no op makes:
    ``torch.from_numpy``, ``torch.load``, ``torch.UntypedStorage(n)``, opaque (MKL-DNN) tensors.
    Threads that f starts itself. (The engine's own threads, which run a backward on an accelerator,
    carry the mode and are counted.) FLOPs other than those of matrix products, convolutions and
    attention: the formulas are those of ``torch.utils.flop_counter``, with matrix-vector products
    and the CPU's attention kernel added.

Further limits
    Under any dispatch mode torch runs compiled functions eagerly, so of a ``torch.compile``-d
    function it is the original that is measured; and it refuses higher-order ops (``torch.cond``).
    Tensors in reference cycles are alive until Python's collector runs, which makes bytes depend on
    the moment. Each op takes longer, so time is measured without a meter.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (  # Torch's extension point, public but for its name.
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from .flops import flops_of

__all__ = ["Measurement", "Meter", "mark", "measure"]

P = ParamSpec("P")
T = TypeVar("T")
aten = torch.ops.aten


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What :func:`measure` found.

    Attributes
    ----------
    result
        What the function returned.
    peak_bytes : int
        The most bytes that were alive after any one op.
    end_bytes : int
        The bytes alive at the end: the new storages of `result`, and all that it holds on to.
    flops : int
        Floating-point operations; a multiply and an add are two.
    ops : Counter[str]
        How often each op ran, by its name, such as ``"aten.mm.default"``.
    marks : dict[str, int]
        The bytes that were alive at each :func:`mark`.
    """

    result: T = field(repr=False)
    peak_bytes: int
    end_bytes: int
    flops: int
    ops: Counter[str] = field(repr=False)
    marks: dict[str, int]


def measure(f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Measurement[T]:
    """Run ``f(*args, **kwargs)`` once and measure its bytes and FLOPs.

    >>> import torch
    >>> from funcckpt.meter import measure
    >>> x, w = torch.ones(16, 32), torch.ones(32, 8)
    >>> m = measure(lambda x, w: torch.tanh(x @ w).sum(), x, w)
    >>> m.peak_bytes            # x @ w and its tanh: 2 * 16 * 8 floats of 4 bytes
    1024
    >>> m.end_bytes             # the sum
    4
    >>> m.flops                 # 2 * 16 * 32 * 8
    8192
    >>> m.ops["aten.mm.default"]
    1

    Transforms of torch.func are seen as the ops that they become. Here the gradients of 16 samples
    keep their own copies of ``w``'s shape:

    >>> loss = lambda w, x: torch.tanh(x @ w).sum()
    >>> m = measure(torch.func.vmap(torch.func.grad(loss), (None, 0)), w, x)
    >>> m.result.shape, m.end_bytes == 16 * 32 * 8 * 4
    (torch.Size([16, 32, 8]), True)

    See Also
    --------
    mark : the bytes alive at one line inside `f`.
    Meter : the same for a block of code.
    """
    with Meter() as meter:
        result = f(*args, **kwargs)
    return Measurement(result, meter.peak_bytes, meter.live_bytes, meter.flops, meter.ops, meter.marks)


def mark(name: str) -> None:
    """Note the bytes that are alive here, under `name`, in every meter that is running.

    At the end of a loss function this tells what is held between the forward and the backward.
    Without a meter it does nothing, so it may stay in the code. A name that is marked again keeps
    the last value.

    >>> import torch
    >>> from funcckpt.meter import mark, measure
    >>> def loss(x):
    ...     y = x.exp().sum()   # exp keeps its result
    ...     mark("saved")
    ...     return y
    >>> measure(torch.func.grad(loss), torch.zeros(256)).marks     # 256 + 1 floats
    {'saved': 1028}
    """
    for mode in _get_current_dispatch_mode_stack():
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

    Storages that were made in the block are followed to their end, after the block too:

    >>> del y
    >>> meter.live_bytes
    0

    Meters nest, and each counts what happens inside its own block. A meter that is entered again
    continues to count.

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
        self._tracked: dict[weakref.ref[torch.UntypedStorage], _Extent] = {}
        # A storage may die at any moment and in any thread; its death is only noted there, and
        # booked in order by _settle.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        # The engine has a thread for each accelerator.
        self._lock = threading.RLock()

    def __enter__(self) -> Meter:
        if any(mode is self for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("this Meter is running already; nest a second Meter() instead")
        super().__enter__()
        return self

    @property
    def live_bytes(self) -> int:
        with self._lock:
            self._settle()
            for ref in list(self._tracked):
                # `storage.resize_()` is no op: nobody tells us.
                if (storage := ref()) is not None:
                    self._book(storage, new=False)
            return self._live_bytes

    def mark(self, name: str) -> None:
        """Note the bytes that are alive now under `name`."""
        self.marks[name] = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
            if func is not aten.lift_fresh.default:
                for storage in _storages((args, kwargs)):
                    self._book(storage, new=False)
        out = func(*args, **kwargs)
        with self._lock:
            self._settle()
            for storage in _storages(out):
                self._book(storage, new=True)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self.ops[str(func)] += 1
            self.flops += flops_of(func, args, kwargs, out)
        return out

    def _book(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        """Bring the live bytes up to date with the present size of one storage."""
        size = storage.nbytes()
        extent = self._tracked.get(weakref.ref(storage))
        if extent is None:
            extent = _Extent(before=0 if new else size)
            self._tracked[weakref.ref(storage, self._dead.append)] = extent
        counted = max(0, size - extent.before)
        self._live_bytes += counted - extent.counted
        extent.counted = counted

    def _settle(self) -> None:
        """Take off the storages that have died."""
        while self._dead:
            self._live_bytes -= self._tracked.pop(self._dead.popleft()).counted


@dataclass
class _Extent:
    """Bytes of one storage: those that existed before the meter saw it, and those counted since."""

    before: int
    counted: int = 0


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            for part in _SPARSE_PARTS.get(leaf.layout, _itself)(leaf):
                if part._is_zerotensor():  # An absent tangent of forward mode: a size, no memory.
                    continue
                try:
                    storage = part.untyped_storage()
                except NotImplementedError:  # An opaque tensor: MKL-DNN, Vulkan.
                    continue
                yield storage


def _itself(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x,)


def _compressed_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.crow_indices(), x.col_indices(), x.values()


def _compressed_columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.ccol_indices(), x.row_indices(), x.values()


_SPARSE_PARTS: dict[torch.layout, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    # The public names refuse a tensor that is not coalesced.
    torch.sparse_coo: lambda x: (x._indices(), x._values()),
    torch.sparse_csr: _compressed_rows,
    torch.sparse_bsr: _compressed_rows,
    torch.sparse_csc: _compressed_columns,
    torch.sparse_bsc: _compressed_columns,
}
