"""Selective checkpointing: some operators of a region are not run again.

A policy is asked about every operator of the forward, below autograd. The results that it saves are kept
beside the graph. In the recomputation they are handed out, and the operator does not run: a call gets the
results of that call of the forward before which the same operators ran (`tape`). More than in torch:
`MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD` offload, values may have names, and results to which the function
writes are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import world
from .._torch import autograd, dynamo
from ..errors import CheckpointError
from ..policies.offload import Offloaded, is_far
from ..policies.policies import Chooser, Policy, as_function
from ..tape.operators import kind_of, run_operator
from ..tape.recording import Asking
from ..tape.tape import Call, Tape, Watch
from .region import Versioned

__all__ = ["CheckpointPolicy", "SelectiveCheckpointContext", "create_selective_checkpoint_contexts"]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Contexts for a checkpoint in which some operators are not recomputed.

    Parameters
    ----------
    policy_fn_or_list : callable or list of operators
        A policy, or a list of operators to save (overloads, such as ``torch.ops.aten.mm.default``).
        ``policy(ctx, op, *args, **kwargs)`` is called after each operator of the forward. It returns a
        `CheckpointPolicy`: save the result, offload it to the CPU, or recompute it. ``ctx.op_output`` is the
        result. MUST and PREFER mean the same in eager mode. The policies of :mod:`funcckpt.policies` can be
        used here, except a budget.
    allow_cache_entry_mutation : bool
        What happens if a saved result was changed in place after the forward. True: the changed result is
        used. False: a MutationError is raised.

    Returns
    -------
    tuple of two context managers
        For the forward and for the recomputation. A second recomputation runs all operators.

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
    # A compiler needs torch's own contexts. (In torch 2.11, is_compiling() is False under AOTAutograd.)
    if torch.compiler.is_compiling() or dynamo.is_traced_by_aot_autograd():
        return torch_checkpoint.create_selective_checkpoint_contexts(
            policy_fn_or_list, allow_cache_entry_mutation
        )
    forward = Forward(as_function(policy_fn_or_list, "create_selective_checkpoint_contexts"))
    return forward, Recompute(forward, allow_cache_entry_mutation)


class _Mode(Watch):
    """What both modes have in common."""

    # False in recomputations, which `unwatched` excepts: f may take a gradient itself.
    in_f = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self.number, self._ignored = 0, SAC_IGNORED_OPS
        if world.autocasts():
            # One run may find in the cache of autocast what the other one casts.
            self._ignored = SAC_IGNORED_OPS | {torch.ops.aten._to_copy.default}
        return super().__enter__()

    @dynamo.hidden
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._ignored:
            return run_operator(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class Forward(_Mode, Asking):
    """The mode for the forward: asks the policy, and keeps what it saves."""

    counts_flops = False
    kinds = (*Asking.kinds, "like", "other")

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__(None, Chooser(policy, "create_selective_checkpoint_contexts"))
        self.policy = policy
        # By number: the calls of which all results are kept. And all operators that ran.
        self.kept: dict[int, Call] = {}
        self.operators: set[Any] = set()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for call in self.tape.calls if self.tape is not None else ():
            if len(call.values) == (call.count or 1):
                self.kept[call.number] = call
        for _, _, x in self.offloaded():
            x.is_about_to_be_written()  # the caller may write to it, if it is an output
        self.tape = Tape()

    def offloaded(self) -> list[tuple[Call, int, Offloaded]]:
        values = [(call, i, x) for call in self.kept.values() for i, x in call.values.items()]
        return [(call, i, x) for call, i, x in values if isinstance(x, Offloaded)]

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        self.operators.add(func)
        out, call = super().call(tape, func, args, kwargs)
        # Some take a dimension away in place, as `squeeze_` in a product with a vector.
        reshapes = torch.Tag.inplace_view in getattr(func, "tags", ())
        if reshapes or func is torch.ops.aten._unsafe_view.default:
            # The same memory has another version or counter from here on, and the caller may write to it.
            for other, i, x in tape.named(out):
                if isinstance(other.values.get(i), Versioned):
                    other.values[i] = Versioned(x, out, reshapes)  # torch counts it when this call is over
        return out, call

    def hold(self, call: Call, i: int, x: Tensor) -> None:
        call.values[i] = Offloaded(x) if call.offloads and is_far(x) else Versioned(x)


class Recompute(_Mode):
    """The mode for the recomputation: hands out each kept result once."""

    def __init__(self, forward: Forward, allow_mutation: bool) -> None:
        super().__init__(None, Tape())  # with a tape, `call` runs what is not handed out
        self._forward, self.known, self._allow_mutation = forward, forward.kept, allow_mutation

    def __enter__(self) -> Any:
        for call, i, x in self._forward.offloaded():
            call.values[i] = x.back(x.host)  # copies run beside the computation
        return super().__enter__()

    def hand_out(self, call: Call, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        values, call.values = [*call.values.values()], {}
        if not values:
            return run_operator(func, args, kwargs)
        call.move_streams()
        with autograd.without_dispatch_modes():
            found = [x.get(self._allow_mutation) for x in values]
        return found[0] if call.count is None else tuple(found)

    def call(self, tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call | None]:
        # No view is kept. (Since torch 2.15 the hooks of a checkpoint may call some, too.)
        if func not in self._forward.operators and kind_of(func) != "view":
            raise CheckpointError(
                f"{func} encountered during backward but not found in storage: the forward did not call it. "
                "The function must do the same each time."
            )
        return run_operator(func, args, kwargs), None
