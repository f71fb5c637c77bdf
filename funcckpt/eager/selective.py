"""Selective checkpointing: some operators of a region are not run again.

A policy is asked about every operator of the forward, below autograd. The results that it saves are kept
beside the graph. In the recomputation they are handed out, and the operator does not run: the n-th call of an
operator gets the result of its n-th call in the forward. More than in torch: `MUST_CPU_OFFLOAD` and
`PREFER_CPU_OFFLOAD` offload, values may have names, and results that the function writes to are recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import world
from .._torch import autograd, dynamo, functorch
from ..errors import CheckpointError
from ..policies.offload import Offloaded, Returning, is_far
from ..policies.policies import Chooser, Policy, as_function, current_name
from ..tape.operators import kind_of, results, run_operator, written
from ..tape.tape import OpCall, Tape
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
    # A compiler needs torch's own contexts. (`is_compiling()` tells whether any thread compiles.)
    if torch.compiler.is_dynamo_compiling() or dynamo.is_traced_by_aot_autograd():
        return torch_checkpoint.create_selective_checkpoint_contexts(
            policy_fn_or_list, allow_cache_entry_mutation
        )
    policy = as_function(policy_fn_or_list, "create_selective_checkpoint_contexts")
    calls: _Calls = defaultdict(list)
    return Forward(policy, calls), Recompute(calls, allow_cache_entry_mutation)


# The calls of each operator, in order; None for a call that returned memory of its arguments. `values` of a
# call are the results that are kept: all or none.
_Calls = dict[Any, list[OpCall | None]]


def _offloaded(calls: _Calls) -> list[tuple[OpCall, int, Offloaded]]:
    known = [call for of_one in calls.values() for call in of_one if call is not None]
    return [(call, i, x) for call in known for i, x in call.values.items() if isinstance(x, Offloaded)]


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True
    sees_names = True
    # False in recomputations, which `unwatched` excepts: f may take a gradient itself.
    in_f = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self.ignored = SAC_IGNORED_OPS
        if world.autocasts():
            # One run may find in the cache of autocast what the other one casts.
            self.ignored = SAC_IGNORED_OPS | {torch.ops.aten._to_copy.default}
        return super().__enter__()

    def sees_nothing(self, func: Any) -> bool:
        """Whether an operator just runs. In a graph that is traced, what is kept would be a constant."""
        return func in self.ignored or func.namespace == "profiler" or not self.in_f or functorch.is_tracing()


class Forward(_Mode):
    """The mode for the forward: asks the policy, and keeps what it saves."""

    def __init__(self, policy: Callable[..., Any], calls: _Calls) -> None:
        super().__init__()
        self.policy = policy
        self._chooser = Chooser(policy, "create_selective_checkpoint_contexts")
        self._calls = calls
        self._tape = Tape()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._tape = Tape()
        for _, _, x in _offloaded(self._calls):
            x.is_about_to_be_written()  # the caller may write to it, if it is an output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.sees_nothing(func):
            return run_operator(func, args, kwargs)
        # (Subclasses do not come first: DTensor calls more operators when it meets one for the first time.)
        calls = self._calls[func]
        calls.append(None)  # also if it raises an error that f catches
        out, calls[-1] = self._tape.run(func, args, kwargs)
        call = calls[-1]
        # As `squeeze_` in a product with a vector. (Operators that take functions have no tags.)
        reshapes = torch.Tag.inplace_view in getattr(func, "tags", ())
        if reshapes or func is torch.ops.aten._unsafe_view.default:
            # The same memory has another version or counter from here on, and the caller may write to it.
            for other, i, x in self._tape.named(out):
                if isinstance(other.values.get(i), Versioned):
                    other.values[i] = Versioned(x, out, reshapes)  # torch counts it when this call is over
        decision = self._chooser.decides(func, args, kwargs, out)
        if decision.keep:
            # (The recomputation may draw from another generator, which f makes anew.)
            draws = any([isinstance(a, torch.Generator) for a in (*args, *kwargs.values())])
            writes = kind_of(func) == "writes" or written(func, args, kwargs)
            if call is not None and not (draws or writes):
                self._keep(call, results(out), decision.offload)
            elif func is torch.ops.aten.alias.default and current_name() is not None:
                self._name_given(args[0], decision.offload)
        return out

    def _keep(self, call: OpCall, outs: Sequence[Any], offloads: bool) -> None:
        with autograd.without_dispatch_modes():
            for i, y in enumerate(outs):
                kind = Offloaded if offloads and isinstance(y, Tensor) and is_far(y) else Versioned
                call.values[i] = kind(y) if isinstance(y, Tensor) else y

    def _name_given(self, x: Tensor, offloads: bool) -> None:
        """Keep a result that was computed earlier, and gets its name only now."""
        with autograd.without_dispatch_modes():
            for call, _, result in self._tape.named(x):
                if call.count is None and not call.values:
                    self._keep(call, [result], offloads)


class Recompute(_Mode):
    """The mode for the recomputation: hands out each kept result once."""

    def __init__(self, calls: _Calls, allow_mutation: bool) -> None:
        super().__init__()
        self._calls = calls
        self._allow_mutation = allow_mutation

    def __enter__(self) -> Any:
        self._count: Counter[Any] = Counter()
        for call, i, x in _offloaded(self._calls):
            call.values[i] = x.back(x.host)  # copies run beside the computation
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # No view is kept. (Since torch 2.15 the hooks of a checkpoint may call some, too.)
        if self.sees_nothing(func) or kind_of(func) == "view":
            return run_operator(func, args, kwargs)
        i, calls = self._count[func], self._calls.get(func, [])
        self._count[func] += 1
        if i >= len(calls):
            raise CheckpointError(
                f"{func} (call {i}) encountered during backward but not found in storage: the forward "
                f"called it {len(calls)} times. The function must do the same each time."
            )
        call = calls[i]
        if call is None or not call.values:
            return run_operator(func, args, kwargs)
        values, call.values = call.values, {}
        call.move_streams()
        with autograd.without_dispatch_modes():
            kinds = Versioned, Returning
            found = [x.get(self._allow_mutation) if isinstance(x, kinds) else x for x in values.values()]
        return found[0] if call.count is None else tuple(found)
