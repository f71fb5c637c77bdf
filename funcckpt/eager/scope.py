"""`checkpoint_scope`: what is made in a block of code is not kept for the backward, wherever it is used.

`checkpoint` says what to run again; a scope says what not to keep. The difference is in who uses it:
in ``with checkpoint_scope(): x = a + b`` and then ``y = x * c``, it is the product that wants x, after
the block and out of reach of any hook that was active in it. (RETURNN's `gradient_checkpoint_scope`
had the idea first, and another answer.) Four parts:

* **What was made.** In the block a dispatch mode sees every operator below autograd, and records those
  that make a new storage or write to one that the block has made, with the random state before those
  that draw. Autocast and default devices have done their work above, so that nothing of the world but
  random streams has to be replayed.
* **What is saved.** A saved-tensor hook looks up the storage of what autograd wants to save. If the
  block has made it, the graph gets a slot that says which part of which storage; by storage, views and
  detached aliases and the insides of composite operators are recognised as well as results. Anything
  else is kept as it is, with the version check that autograd would have made.
* **Who saves it.** The hook is active in the block. It cannot be left active behind it: hooks are a
  stack, and torch.func refuses to run under any. So at the end of the block the tensors themselves are
  told: their class becomes `ScopedTensor`, whose `__torch_function__` runs any operator that is given one
  of them under the hook. Nothing global is patched; it works in every thread; it ends with the tensors.
* **The recomputation.** The first slot that is read replays, in order, the operators that any slot still
  waits for, and no others; each storage is dropped after its last use there, and each slot gives its
  tensor away when it is read. What a backward did not ask for is there for the next.

What is kept: what the block reads from outside, once each, and the random states. That includes what an
earlier scope has made, so that a scope around each layer of a chain keeps the results of the layers, as
`checkpoint` does, and not nothing at the price of having everything at once in the end. A scope inside
of another one belongs to it. An `autograd.Function` that is given a tensor of the scope after the block
keeps it: no operator is called on it that could tell.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .. import _torch, world
from ..errors import FuncckptError, TransformError
from ..tape.operators import run_operator
from .made import PLAIN, Kept, Recording, Slot, View, find
from .region import in_checkpoint, is_of_checkpoint

_REFUSED = """checkpoint_scope works by saved-tensor hooks, which torch.func transforms refuse{}. Use \
remat there, with the block as a function: instead of
    with checkpoint_scope():
        x = a + b
write
    x = remat(lambda a, b: a + b)(a, b)"""


class checkpoint_scope:
    """Do not keep for the backward what is made in this block; recompute it when it is needed.

    Tensors that are made in the block, of any shape, are not stored by the graph, wherever they are used
    later, also after the block. They are recomputed once, in order, when the first of them is needed in
    a backward, and freed as they are used. What the block reads from outside is kept.

    Scopes may be nested and alive side by side; like other contexts, they are left in the order in which
    they were entered. A `checkpoint` may stand inside of a scope or around it. Gradients are those
    without it.

    Raises
    ------
    TransformError
        A `torch.func` transform is active around the block, or used inside of it: use `remat`.
    MutationError
        In the backward: a tensor that the block has read, or one that the block had made and saved,
        was changed in place afterwards.

    Notes
    -----
    Tensors of the block are of the class `ScopedTensor` after it, a subclass of `torch.Tensor` that is
    saved and copied as a `torch.Tensor`. Until a graph that uses it is gone, a tensor of the block that is
    alive keeps alive what the block has read; from then on it is a tensor like others. What an
    `autograd.Function` is given directly, after the block, it keeps. Where grad mode is off when the scope
    is entered, nothing is recorded. A dispatch mode of others that changes results has to be inside of the
    block: one around it is not there when the block is replayed.

    Examples
    --------
    Weight noise: neither the noise nor the noisy weight is kept.

    >>> import torch
    >>> from funcckpt import checkpoint_scope
    >>> w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    >>> with checkpoint_scope():
    ...     noisy = w + 0.1 * torch.randn_like(w)
    >>> (x @ noisy).sum().backward()
    >>> torch.allclose(x.grad[0], noisy.sum(1))
    True
    """

    def __init__(self) -> None:
        # The blocks that it was entered in, innermost last. None: nothing is recorded.
        self._blocks: list[_Block | None] = []

    def __enter__(self) -> checkpoint_scope:
        if _torch.maybe_current_level() is not None:
            kinds = ", ".join(layer.kind for layer in _torch.active_layers())
            raise TransformError(_REFUSED.format(f" ({kinds} is active)"))
        block = None
        if torch.is_grad_enabled():
            block, top = _here.block, _torch.top_saved_tensors_hooks()
            # Under hooks that came later, a checkpoint's perhaps, the scope does not belong to the one around
            # them: the recomputation, which is not in that one, has to save the same.
            if block is None or block.task != _torch.graph_task() or top is None or top[0] is not block.pack:
                block = _Block(top)
            block.depth += 1
        self._blocks.append(block)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._blocks:
            raise FuncckptError("checkpoint_scope is left without having been entered.")
        if (block := self._blocks.pop()) is not None:
            block.depth -= 1
            if block.depth == 0:
                block.close()
        if isinstance(error, RuntimeError) and _torch.REFUSES_HOOKS in str(error):
            raise TransformError(_REFUSED.format(" to run inside of")) from error


class _Here(threading.local):
    """The innermost block that this thread is in."""

    block: _Block | None = None

    def recording(self) -> Recording | None:
        """That of the block; a backward that runs in the middle of it is no part of it."""
        block = self.block
        return None if block is None or block.task != _torch.graph_task() else block.recording


_here = _Here()


class _Block:
    """An open block, and what it has active."""

    def __init__(self, below: _torch.Hooks | None) -> None:
        self.task = _torch.graph_task()
        self.depth = 0
        self.recording = Recording()
        self.pack = _pack_above(below)
        self._around = _here.block
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)
        self._mode = _Recorder(self, below)
        self._hooks.__enter__()
        self._mode.__enter__()
        _here.block = self

    def close(self) -> None:
        top = _torch.top_saved_tensors_hooks()
        if _here.block is not self or top is None or top[0] is not self.pack:
            raise FuncckptError(
                "checkpoint_scope is left in another thread, or before what was entered inside of it."
            )
        self._mode.__exit__(None, None, None)
        self._hooks.__exit__()
        _here.block = self._around
        del self._mode  # which refers to the block
        for x in self.recording.close():
            x.__class__ = ScopedTensor  # type: ignore[assignment]


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, block: _Block, below: _torch.Hooks | None) -> None:
        super().__init__()
        self._recording, self._below = block.recording, below

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass acts first; its inner tensors come by here
        # What an operator makes that takes functions is kept.
        if _here.recording() is not self._recording or isinstance(func, _torch.HigherOrderOperator):
            return func(*args, **kwargs)
        streams = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        self._recording.add(func, args, kwargs, out, streams, self._below)
        return out


# -- what is saved ----------------------------------------------------------------------------------


def _pack_above(below: _torch.Hooks | None) -> Any:
    """A pack hook that knows what blocks have made."""
    is_in_checkpoint = is_of_checkpoint(below)

    def pack(x: Tensor) -> Slot | Kept:
        entry, recording = find(x), _here.recording()
        if entry is None or entry.recording is not recording:
            # A checkpoint keeps nothing. It counts what is saved: that must be the same in the recomputation,
            # whichever tensors of other blocks are alive then.
            if entry is None or is_in_checkpoint:
                return Kept(x, below)
            if recording is not None:  # which keeps it in any case
                return Kept(x, below) if below else recording.keep(x, below)
        # Written to after the block: no recomputation gives that value.
        if entry.made.version not in (None, x._version):
            return Kept(x, below)
        return entry.recording.slot(View.of(entry.made, x))

    return pack


def _unpack(packed: Slot | Kept) -> Tensor:
    return packed.unpack()


# -- who saves it -----------------------------------------------------------------------------------

_NEVER_SAVE = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class ScopedTensor(Tensor):
    """A tensor that was made in a `checkpoint_scope`, after the end of the block."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEVER_SAVE or not all(t in _KNOWN for t in types):
            # Code of others is run, which should find plain tensors.
            with _unscoped((args, kwargs)):
                return func(*args, **kwargs)
        with _torch.subclasses_asleep():
            # A checkpoint keeps nothing, and counts what is saved, and what hooks inside of it do: in its
            # recomputation what it was given is a plain tensor.
            if (
                torch.is_grad_enabled()
                and _here.recording() is None
                and _torch.may_push_hooks()
                and not in_checkpoint()
            ):
                with torch.autograd.graph.saved_tensors_hooks(
                    _pack_above(_torch.top_saved_tensors_hooks()), _unpack
                ):
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
            for y in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
                if type(y) is Tensor and find(y) is not None:
                    y.__class__ = cls
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _torch.subclasses_asleep():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        with _torch.subclasses_asleep():
            return self.detach().as_subclass(Tensor).__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        with _torch.subclasses_asleep():
            copied = (
                self.as_subclass(Tensor).__deepcopy__(memo) if self.is_leaf else super().__deepcopy__(memo)
            )
        memo[id(self)] = copied
        return copied


PLAIN.add(ScopedTensor)
_KNOWN = {Tensor, torch.nn.Parameter, ScopedTensor, torch.nn.Buffer}


@contextmanager
def _unscoped(tree: Any) -> Iterator[None]:
    scoped = [x for x in pytree.tree_leaves(tree) if type(x) is ScopedTensor]
    for x in scoped:
        x.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for x in scoped:
            x.__class__ = ScopedTensor
