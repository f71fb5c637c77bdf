"""A policy as the modes ask it that record a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch
from ..errors import FuncckptError, InputError, OptionError
from .names import current_name

Policy = Callable[..., CheckpointPolicy | bool] | Sequence[Any]

# Of a name: not even if the operator that has made the value is to be kept.
FORBID = CheckpointPolicy.MUST_RECOMPUTE
KEEPS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)
OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


# An output of an operator: (call index, output index).
Place = tuple[int, int]


class Call(Protocol):
    """A call of an operator: what it reads, the FLOPs to run it again, the bytes of each output held."""

    func: Any
    needs: frozenset[Place]
    flops: int
    sizes: dict[int, int]


class Decision(NamedTuple):
    """What to do with the results of an operator."""

    keep: bool
    offload: bool = False
    # Whether a name that is not to be kept forbids to keep the value on any other grounds.
    forbid: bool = False


class Chooser:
    """Asks a policy about one operator after the other."""

    def __init__(self, policy: Callable[..., Any], title: str) -> None:
        self.policy = policy
        self._title = title

    def for_call(self, signature: Any) -> Chooser:
        """What to ask in one call of f; `signature` is its code, and what its inputs look like."""
        return self

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        """What to do with what an operator returned; for `aten.alias` with a name, with what is named.

        None where that is left to `wants` and `choose`.
        """
        if func in SAC_IGNORED_OPS:
            return None
        # Of torch's versions some give a context the result, and some do not know it.
        ctx: Any = SelectiveCheckpointContext.__new__(SelectiveCheckpointContext)
        ctx.is_recompute, ctx.op_output, ctx.name = False, out, current_name()
        try:
            answer = self.policy(ctx, func, *args, **kwargs)
        except TypeError as error:  # which Python takes for "unsupported operand" where it asks for `a * b`
            raise FuncckptError(
                f"{self._title}: the policy raised {error!r} for {func}. It is called as "
                "policy(ctx, op, *args, **kwargs). Call what makes a policy, such as save_only_these_names."
            ) from error
        if answer in KEEPS:
            return Decision(keep=True)
        if answer in OFFLOADS:
            return Decision(keep=True, offload=True)
        if not isinstance(answer, (bool, CheckpointPolicy)) and answer is not None:
            raise FuncckptError(
                f"{self._title}: the policy returned {answer!r} for {func}, no CheckpointPolicy."
            )
        return Decision(keep=False, forbid=answer is FORBID)

    def wants(self, index: int, func: Any, sizes: dict[int, int]) -> bool:
        """Whether the results of a call, of so many bytes, may be chosen in the end."""
        return False

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        """What to keep beside what was decided, given all calls and the values that the backward reads."""
        return frozenset()


def as_function(policy: Any, title: str) -> Callable[..., Any]:
    """A policy of either form as a function."""
    if callable(policy):
        function: Callable[..., Any] = policy
        return function
    if not isinstance(policy, (list, tuple, set, frozenset)):
        raise InputError(
            f"{title}: a policy is either a function or a list of ops, not {type(policy).__name__}: write "
            "policy(ctx, op, *args, **kwargs), or [torch.ops.aten.mm.default]."
        )
    for op in policy:
        if not isinstance(op, _torch.OPERATORS):
            # In torch's words, by which programs tell this error.
            hint = (
                f" Please update the OpOverloadPacket to a specific OpOverload, such as {op}.default."
                if hasattr(op, "default")
                else ""
            )
            raise OptionError(f"{title}: Expected op in `op_list` to be an OpOverload but got: {op}.{hint}")
    saved = frozenset(policy)
    return lambda ctx, op, *args, **kwargs: op in saved
