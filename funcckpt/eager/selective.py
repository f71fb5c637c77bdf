"""Selective checkpointing: which operators of a region are not run again.

A policy looks at every operator of the forward, below autograd. What it says to save is kept beside the
graph, and handed out in the recomputation in place of running the operator; the n-th call of an operator
there is the n-th of the forward. Beyond torch's, `MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD` move the bytes
off the device until the recomputation needs them, values may have names, and writes to what is kept are seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import world
from .._torch import autograd
from ..errors import CheckpointError, MutationError, OptionError, describe
from ..policies.offload import Offloaded, is_far
from ..policies.policies import Chooser, as_function, current_name
from ..tape.operators import (
    StorageTable,
    TensorMeta,
    address_of,
    is_plain,
    kind_of_call,
    run_operator,
    tensors_of,
    written,
)

__all__ = ["CheckpointPolicy", "SelectiveCheckpointContext", "create_selective_checkpoint_contexts"]

Policy = Callable[..., CheckpointPolicy | bool]


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
    calls: _Calls = defaultdict(list)
    forward = Forward(policy, calls, allow_cache_entry_mutation)
    return forward, Recompute(calls, allow_cache_entry_mutation)


class _Kept:
    """A tensor that is kept where it is."""

    def __init__(self, x: Tensor) -> None:
        self._x = autograd.alias(x)
        self._version = self._x._version
        # Whether the forward has written to its memory, be it under another version counter.
        self._written = False

    def is_about_to_be_written(self, allow_mutation: bool) -> None:
        if allow_mutation:
            self._x = self._x.clone()
            self._version = self._x._version
        else:
            self._written = True

    def get(self, allow_mutation: bool) -> Tensor:
        x = self._x
        if not allow_mutation and (self._written or x._version != self._version):
            raise MutationError(
                f"Tensor cached during selective activation checkpoint has been mutated ({describe(x)}). "
                "Change a copy (x.clone()), or pass allow_cache_entry_mutation=True if you know better."
            )
        return x


class _Call:
    """A call of an operator in the forward."""

    # What it returned, if that is kept; whether it was handed out.
    results: list[Any] | None = None
    is_spent = False
    # What its one result looks like, as long as nothing else was written to that.
    meta: TensorMeta | None = None

    def __init__(self, before: world.States, after: world.States, is_alone: bool) -> None:
        # The random streams before it and after it, if it draws.
        self.streams = before, after
        # Whether it returns a tensor, and no tuple.
        self.is_alone = is_alone


# By operator, in the order of the calls.
_Calls = dict[Any, list[_Call]]


class _Mode(TorchDispatchMode):
    sees_names = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Forward(_Mode):
    """Asks the policy, and keeps what it says."""

    def __init__(self, policy: Policy, calls: _Calls, allow_mutation: bool) -> None:
        super().__init__()
        self.policy = policy
        self._chooser = Chooser(policy, "create_selective_checkpoint_contexts")
        self._calls = calls
        self._allow_mutation = allow_mutation
        # Which call has made what is in memory.
        self._makers: StorageTable[_Call] = StorageTable()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for call in [call for calls in self._calls.values() for call in calls]:
            for x in call.results or ():
                if isinstance(x, Offloaded):
                    x.is_about_to_be_written()  # the caller may, if it is an output
        self._makers = StorageTable()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in written(func, args, kwargs):
            if (maker := self._makers.get(x)) is not None:
                maker.meta = None
                with torch.no_grad(), autograd.without_dispatch_modes():
                    for kept in maker.results or ():
                        if isinstance(kept, (_Kept, Offloaded)):
                            kept.is_about_to_be_written(self._allow_mutation)
        given = {*map(address_of, tensors_of(args, kwargs))}
        before = world.states_drawn_from(func, args, kwargs)
        out = run_operator(func, args, kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        is_alone = not isinstance(out, (list, tuple))
        call = _Call(before, world.states_drawn_from(func, args, kwargs), is_alone)
        self._calls[func].append(call)
        decision = self._chooser.decides(func, args, kwargs, out)
        outs = (out,) if is_alone else out
        # In place or on the memory that it was given: it is run again in any case, since what comes after it
        # may read or write that memory, which in the recomputation is another. A view costs nothing.
        plain = [y for y in outs if isinstance(y, Tensor) and is_plain(y)]
        is_new = kind_of_call(func, args, kwargs) not in ("view", "writes") and not any(
            address_of(y) in given or self._makers.get(y) is not None for y in plain
        )
        if is_new:
            for y in plain:
                self._makers.set(y, call)
            call.meta = TensorMeta.of(out) if is_alone and plain else None
        if decision is not None and decision.keep:
            if is_new:
                self._keep(call, outs, decision.offload)
            elif func is torch.ops.aten.alias.default and current_name() is not None:
                self._name_given(args[0], decision.offload)
        return out

    def _keep(self, call: _Call, outs: Sequence[Any], offloads: bool) -> None:
        with autograd.without_dispatch_modes():
            call.results = [
                y if not isinstance(y, Tensor) else Offloaded(y) if offloads and is_far(y) else _Kept(y)
                for y in outs
            ]

    def _name_given(self, x: Tensor, offloads: bool) -> None:
        """Keep what an operator has returned earlier, and what is only now given a name."""
        call = self._makers.get(x)
        if call is not None and call.results is None and call.meta and call.meta.dtype == x.dtype:
            with autograd.without_dispatch_modes():
                x = x.as_strided(call.meta.size, call.meta.strides, call.meta.offset)
            self._keep(call, [x], offloads)


class Recompute(_Mode):
    """Hands out what was kept."""

    def __init__(self, calls: _Calls, allow_mutation: bool) -> None:
        super().__init__()
        self._calls = calls
        self._allow_mutation = allow_mutation

    def __enter__(self) -> Any:
        self._count: dict[Any, int] = defaultdict(int)
        # What is elsewhere comes back while others go on.
        for call in [call for calls in self._calls.values() for call in calls if not call.is_spent]:
            for x in call.results or ():
                if isinstance(x, Offloaded):
                    x.begin()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        i = self._count[func]
        self._count[func] += 1
        calls = self._calls.get(func, [])
        if i >= len(calls):
            raise CheckpointError(
                f"{func} (call {i}) encountered during backward but not found in storage: the forward has "
                f"called it {len(calls)} times. The function has to do the same each time."
            )
        call = calls[i]
        if call.is_spent:
            raise CheckpointError(
                "Trying to backward an extra time. You are only allowed to backward once on any region "
                "computed under selective activation checkpoint."
            )
        if call.results is None:
            return run_operator(func, args, kwargs)
        results, call.results, call.is_spent = call.results, None, True
        before, after = call.streams
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        with autograd.without_dispatch_modes():
            found = [x.get(self._allow_mutation) if isinstance(x, (_Kept, Offloaded)) else x for x in results]
        return found[0] if call.is_alone else tuple(found)
