"""Selective checkpointing: which operators of a region are not run again.

A policy looks at every operator of the forward, below autograd. What it says to save is kept beside the
graph, and handed out in the recomputation in place of running the operator; the n-th call of an operator
there is the n-th of the forward. The names, the enum and the order of arguments are torch's. Ours is
written anew for `MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD`, which torch 2.13 to 2.15 have as names and
treat as "recompute": here the bytes leave the device, while the forward goes on, and come back when the
recomputation reaches the operator.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch, policies, world
from ..errors import CheckpointError, MutationError, OptionError, describe
from ..offload import Offloaded, is_far
from .scope import written

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
    if isinstance(policy_fn_or_list, policies.Budget):
        raise OptionError(
            f"{policy_fn_or_list!r} chooses when it has seen all operators, which only remat(f, policy=...) "
            "can wait for."
        )
    policy = policies.as_function(policy_fn_or_list, "create_selective_checkpoint_contexts")
    results: Results = defaultdict(list)
    forward = Forward(policy, results, allow_cache_entry_mutation)
    return forward, Recompute(results, allow_cache_entry_mutation)


# -- results that are kept -------------------------------------------------------------------------

# By operator, in the order of the calls: the result with its tensors kept and the random streams before
# and after it, or one of the marks.
Results = dict[Any, list[Any]]
_RECOMPUTE = object()
_CONSUMED = object()


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

    def __init__(self, policy: Policy, results: Results, allow_mutation: bool) -> None:
        super().__init__()
        self.policy = policy
        self._results = results
        # What an operator returned that was not kept, by the address of its storage, and where to put it if
        # it is given a name.
        self._makers: dict[int, Any] = {}
        self._allow_mutation = allow_mutation
        # What is kept, by the address of the storage in which it is or was.
        self._kept: dict[int, list[Kept | Offloaded]] = defaultdict(list)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for kept in itertools.chain(*self._kept.values()):
            if isinstance(kept, Offloaded):
                kept.is_about_to_be_written(True)  # the caller may, if it is an output
        self._kept.clear()
        self._makers.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _copying.here:
            return func(*args, **kwargs)
        before = world.states_drawn_from(func, args, kwargs)
        if self._kept or self._makers:
            for x in written(func, args, kwargs):
                self._makers.pop(_address(x), None)
                with _uncounted():
                    for kept in self._kept.pop(_address(x), ()):
                        kept.is_about_to_be_written(self._allow_mutation)
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        policy = self.policy(policies.context(out), func, *args, **kwargs)
        saves = policy is True or policy in _SAVE or policy in _OFFLOAD
        offloads = policy in _OFFLOAD
        result: Any = _RECOMPUTE
        after = world.states_drawn_from(func, args, kwargs)
        if func is torch.ops.aten.alias.default and policies.current_name() is not None:
            with _uncounted():
                self._name_given(args[0], saves, offloads)
        elif not _shares(func):
            if saves:
                with _uncounted():
                    result = pytree.tree_map_only(Tensor, self._keeping(offloads), out), before, after
            elif isinstance(out, Tensor) and out.layout is torch.strided:
                look = out.size(), out.stride(), out.storage_offset(), out.dtype
                storage, results = weakref.ref(out.untyped_storage()), self._results[func]
                self._makers[_address(out)] = storage, look, results, len(results), before, after
        self._results[func].append(result)
        return out

    def _keeping(self, offloads: bool) -> Callable[[Tensor], Kept | Offloaded]:
        hooks = self.hooks if self.respect_saved_tensors_hooks else None

        def keep(x: Tensor) -> Kept | Offloaded:
            kept = Offloaded(x) if offloads and is_far(x) else Kept(x, hooks)
            if hooks is None or isinstance(kept, Offloaded):
                self._kept[_address(x)].append(kept)
            return kept

        return keep

    def _name_given(self, x: Tensor, saves: bool, offloads: bool) -> None:
        """Keep what an operator has returned earlier, and what is only now given a name."""
        maker = self._makers.get(_address(x))
        if not saves or maker is None or maker[0]() is not x.untyped_storage() or maker[1][3] != x.dtype:
            return
        _, (size, strides, offset, _), results, number, before, after = maker
        made = x.as_strided(size, strides, offset)
        results[number] = self._keeping(offloads)(made), before, after


def _shares(func: Any) -> bool:
    """Whether an operator writes to its arguments, or returns their memory.

    It is run again in any case: what comes after it may read or write those arguments, which in the
    recomputation are others. A view costs nothing.
    """
    schema = getattr(func, "_schema", None)  # operators that take functions have none
    return schema is not None and (
        schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns)
    )


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


class Recompute(TorchDispatchMode):
    """Hands out what was kept."""

    sees_names = True

    def __init__(self, results: Results, allow_mutation: bool) -> None:
        super().__init__()
        self._results = results
        self._allow_mutation = allow_mutation
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _copying.here or func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if not self._calls:
            for x in pytree.tree_leaves([*self._results.values()]):
                if isinstance(x, Offloaded):
                    with _uncounted():
                        x.begin()
        i = self._calls[func]
        self._calls[func] += 1
        results = self._results.get(func, [])
        if i >= len(results):
            raise CheckpointError(
                f"{func} (call {i}) encountered during backward but not found in storage: the forward has "
                f"called it {len(results)} times. The function has to do the same each time."
            )
        if results[i] is _RECOMPUTE:
            return func(*args, **kwargs)
        if results[i] is _CONSUMED:
            raise CheckpointError(
                "Trying to backward an extra time. You are only allowed to backward once on any region "
                "computed under selective activation checkpoint."
            )
        (kept, before, after), results[i] = results[i], _CONSUMED
        if after and not world.have_moved(before):
            world.set_streams(after)  # as it would have left them for those that are run again
        with _uncounted():
            return pytree.tree_map_only((Kept, Offloaded), lambda x: x.get(self._allow_mutation), kept)
