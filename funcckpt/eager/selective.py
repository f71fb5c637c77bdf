"""Selective checkpointing: which operators of a region are not run again.

A policy looks at every operator of the forward, below autograd. What it says to save is kept beside the
graph, and handed out in the recomputation in place of running the operator; the n-th call of an operator
there is the n-th of the forward. The names, the enum and the order of arguments are torch's. Ours is
written anew for `MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD`, which torch 2.13 to 2.15 have as names and
treat as "recompute": here the bytes leave the device, while the forward goes on, and come back when the
recomputation reaches the operator.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch, world
from ..errors import CheckpointError, MutationError, OptionError, describe
from ..policies.chooser import Chooser, as_function
from ..policies.names import current_name
from ..policies.offload import Offloaded, is_far
from ..tape.operators import WRITE, kind_of_call, run_operator, written
from ..tape.recording import Call, Tape

__all__ = ["CheckpointPolicy", "SelectiveCheckpointContext", "create_selective_checkpoint_contexts"]

Policy = Callable[..., CheckpointPolicy | bool]

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | Sequence[Any], allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Contexts for a checkpoint in which some operators are not recomputed.

    Parameters
    ----------
    policy_fn_or_list : callable or list of operators
        ``policy(ctx, op, *args, **kwargs)`` is called after each operator of the forward, and returns a
        `CheckpointPolicy`: save the result, offload it to the CPU, or recompute it; ``ctx.op_output`` is
        the result. All of `funcckpt.policies` are such, but for a budget. Or a list of operators
        (overloads, such as ``torch.ops.aten.mm.default``) to save. MUST and PREFER are the same in eager
        mode.
    allow_cache_entry_mutation : bool
        Do not mind that a saved result is changed in place: in the forward, a copy of it is made before.

    Returns
    -------
    tuple of two context managers
        For the forward and for one recomputation: a region can be gone through backward once.

    Raises
    ------
    InputError, OptionError
        The argument is neither a policy nor a list of overloads.
    CheckpointError
        In the backward: the recomputation calls other operators than the forward did, or comes twice.
    MutationError
        In the backward: a saved result was changed in place.

    Examples
    --------
    >>> import functools, torch
    >>> from funcckpt import checkpoint, create_selective_checkpoint_contexts
    >>> context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> checkpoint(lambda x: torch.tanh(x @ x).sum(), x, context_fn=context_fn).backward()
    >>> x.grad.shape
    torch.Size([2, 2])
    """
    if torch.compiler.is_compiling():  # which reads torch's off the graph
        return torch_checkpoint.create_selective_checkpoint_contexts(
            policy_fn_or_list, allow_cache_entry_mutation
        )
    if isinstance(policy_fn_or_list, Chooser):
        raise OptionError(
            f"{policy_fn_or_list!r} chooses when it has seen all operators, which only remat(f, policy=...) "
            "can wait for."
        )
    policy = as_function(policy_fn_or_list, "create_selective_checkpoint_contexts")
    calls: Calls = defaultdict(list)
    forward = Forward(policy, calls, allow_cache_entry_mutation)
    return forward, Recompute(calls, allow_cache_entry_mutation)


# -- results that are kept -------------------------------------------------------------------------

# By operator, in the order of the calls; None for one that was handed out.
Calls = dict[Any, list[Call | None]]


class Kept:
    """A tensor that is kept where it is, or where the hooks of the caller put it."""

    def __init__(self, x: Tensor, hooks: _torch.Hooks | None) -> None:
        x = _torch.alias(x)
        self._packed: Any = x if hooks is None else hooks[0](x)
        self._unpack = None if hooks is None else hooks[1]
        self._version = x._version
        # Whether the forward has written to its memory, be it under another version counter.
        self.written = False

    def is_about_to_be_written(self, allow_mutation: bool) -> None:
        if not allow_mutation:
            self.written = True
            return
        with torch.no_grad():
            self._packed = self._packed.clone()  # and go on with a copy
        self._version = self._packed._version

    def get(self, allow_mutation: bool) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._packed)
        x: Tensor = self._packed
        if not allow_mutation and (self.written or x._version != self._version):
            raise MutationError(
                f"Tensor cached during selective activation checkpoint has been mutated ({describe(x)}). "
                "Change a copy (x.clone()), or pass allow_cache_entry_mutation=True if you know better."
            )
        return x


# -- the two modes ------------------------------------------------------------------------------------


class _Copying(threading.local):
    here = False


_copying = _Copying()


@contextmanager
def _uncounted() -> Iterator[None]:
    """Copies of ours are no operators of f for a selective region around this one: how many are made differs
    between its forward and its recomputation.
    """
    before, _copying.here = _copying.here, True
    try:
        yield
    finally:
        _copying.here = before


class Forward(TorchDispatchMode):
    """Asks the policy, and keeps what it says."""

    sees_names = True
    respect_saved_tensors_hooks: bool | None = None
    # The hooks that are active around the checkpoint.
    hooks: _torch.Hooks | None = None

    def __init__(self, policy: Policy, calls: Calls, allow_mutation: bool) -> None:
        super().__init__()
        self.policy = policy
        self._chooser = Chooser(policy, "create_selective_checkpoint_contexts")
        self._calls = calls
        self._allow_mutation = allow_mutation
        self._tape = Tape()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for call in self._tape.calls:
            for kept in call.values.values():
                if isinstance(kept, Offloaded):
                    kept.is_about_to_be_written(True)  # the caller may, if it is an output
        self._tape = Tape()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _copying.here:
            return func(*args, **kwargs)
        kind = kind_of_call(func, args, kwargs)
        before = world.states_drawn_from(func, args, kwargs)
        if kind in WRITE:
            for x, _ in written(func, args, kwargs):
                self._about_to_be_written(x)
        out = run_operator(func, args, kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        decision = self._chooser.decides(func, args, kwargs, out)
        keeps, offloads = decision is not None and decision.keep, decision is not None and decision.offload
        call = self._tape.note(func, kind, args, kwargs, out)
        if call is None or kind in ("view", "writes"):
            # It is run again in any case: what comes after it may read or write the memory that it was given,
            # which in the recomputation is another. A view costs nothing.
            if func is torch.ops.aten.alias.default and current_name() is not None and keeps:
                self._name_given(args[0], offloads)
            call = Call(func, frozenset(), None)
        else:
            call.streams = before, world.states_drawn_from(func, args, kwargs)
            if keeps:
                outs = [out] if call.count is None else out
                self._keep(call, dict(enumerate(outs)), offloads)
        self._calls[func].append(call)
        return out

    def _keep(self, call: Call, outs: dict[int, Any], offloads: bool) -> None:
        hooks = self.hooks if self.respect_saved_tensors_hooks else None
        with _uncounted():
            for i, x in outs.items():
                if isinstance(x, Tensor):
                    x = Offloaded(x) if offloads and is_far(x) else Kept(x, hooks)
                call.values[i] = x

    def _about_to_be_written(self, x: Tensor) -> None:
        for index, i in self._tape.makers(x):
            kept = self._tape.calls[index].values.get(i)
            if isinstance(kept, (Kept, Offloaded)):
                with _uncounted():
                    kept.is_about_to_be_written(self._allow_mutation)

    def _name_given(self, x: Tensor, offloads: bool) -> None:
        """Keep what an operator has returned earlier, and what is only now given a name."""
        makers = self._tape.makers(x)
        if len(makers) != 1:
            return
        ((index, i),) = makers
        call = self._tape.calls[index]
        meta = call.outputs.get(i)
        if meta is not None and meta.dtype == x.dtype and call.count is None and not call.values:
            self._keep(call, {i: x.as_strided(meta.size, meta.strides, meta.offset)}, offloads)


class Recompute(TorchDispatchMode):
    """Hands out what was kept."""

    sees_names = True

    def __init__(self, calls: Calls, allow_mutation: bool) -> None:
        super().__init__()
        self._calls = calls
        self._allow_mutation = allow_mutation
        self._count: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._count.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _copying.here or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if not self._count:
            self._begin()
        i = self._count[func]
        self._count[func] += 1
        calls = self._calls.get(func, [])
        if i >= len(calls):
            raise CheckpointError(
                f"{func} (call {i}) encountered during backward but not found in storage: the forward has "
                f"called it {len(calls)} times. The function has to do the same each time."
            )
        call = calls[i]
        if call is None:
            raise CheckpointError(
                "Trying to backward an extra time. You are only allowed to backward once on any region "
                "computed under selective activation checkpoint."
            )
        if not call.values:
            return run_operator(func, args, kwargs)
        calls[i] = None
        before, after = call.streams
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        with _uncounted():
            found = [
                x.get(self._allow_mutation) if isinstance(x, (Kept, Offloaded)) else x
                for x in call.values.values()
            ]
        return found[0] if call.count is None else tuple(found)

    def _begin(self) -> None:
        """Let what is elsewhere come back while others go on."""
        with _uncounted():
            for calls in self._calls.values():
                for call in calls:
                    for x in call.values.values() if call is not None else ():
                        if isinstance(x, Offloaded):
                            x.begin()
