"""What a checkpoint keeps beside its inputs, and names for values.

A policy is what `torch.utils.checkpoint` takes for one: a function ``policy(ctx, op, *args, **kwargs)``
that is asked about every operator of the forward, below autograd and all transforms, and returns a
`CheckpointPolicy` or a bool; or a list of operators. It serves `remat(f, policy=...)` and, by
`create_selective_checkpoint_contexts`, `checkpoint`. The names here are those of
``jax.checkpoint_policies``, and so is what they mean.

A policy says what may be kept. Of that, `remat` keeps what the backward reads, or needs to compute what
it reads; views, and what is written to in place, are computed again in any case.

>>> import torch
>>> from funcckpt import policies, remat
>>> def block(x, w):
...     return torch.tanh(x @ w).sum()
>>> x, w = torch.ones(2, 3), torch.ones(3, 4)
>>> torch.func.grad(remat(block, policy=policies.dots_saveable))(x, w).shape
torch.Size([2, 3])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from . import _torch
from .errors import FuncckptError, InputError, OptionError, describe
from .knapsack import Frontier
from .recording import Call, Decision, Place

T = TypeVar("T")

__all__ = [
    "Policy",
    "budget",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "checkpoint_name",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
]

Policy = Callable[..., CheckpointPolicy | bool] | Sequence[Any]

_KEEP = CheckpointPolicy.PREFER_SAVE
_OFFLOAD = CheckpointPolicy.PREFER_CPU_OFFLOAD
_LEAVE = CheckpointPolicy.PREFER_RECOMPUTE
# Of a name: not even if the operator that has made the value is to be kept.
_FORBID = CheckpointPolicy.MUST_RECOMPUTE
_KEEPS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)

aten = torch.ops.aten

# Without batch dimensions, with them, attention and convolutions.
_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten._addmm_activation))
_DOTS = _PRODUCTS | {
    aten.bmm,
    aten.baddbmm,
    aten.addbmm,
    aten.convolution,
    aten._convolution,
    aten.cudnn_convolution,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
}


# -- policies -----------------------------------------------------------------------------------------


def nothing_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep nothing: the same as no policy."""
    return _LEAVE


def everything_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep all that the backward reads, so that nothing but views is computed again."""
    return _KEEP


def dots_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, of attention and of convolutions."""
    return _KEEP if getattr(op, "overloadpacket", op) in _DOTS else _LEAVE


def dots_with_no_batch_dims_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products without a batch dimension: of linear layers, not of attention.

    Under `torch.func.vmap` a product of two batched tensors has one.
    """
    return _KEEP if getattr(op, "overloadpacket", op) in _PRODUCTS else _LEAVE


# JAX has both names.
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(
    offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Callable[..., CheckpointPolicy]:
    """The same results, kept in the memory of the host.

    Parameters
    ----------
    offload_src, offload_dst : str
        As JAX calls the memories; others than these there are not.

    Returns
    -------
    callable
        A policy.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    >>> f = remat(lambda x: (x @ x).sin(), policy=policy)
    """
    _check_places(offload_src, offload_dst)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return _OFFLOAD if getattr(op, "overloadpacket", op) in _PRODUCTS else _LEAVE

    return policy


def save_only_these_names(*names: str) -> Callable[..., CheckpointPolicy]:
    """Keep the values with these names, given by :func:`checkpoint_name`, and nothing else.

    Parameters
    ----------
    *names : str
        The names.

    Returns
    -------
    callable
        A policy.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import checkpoint_name, policies, remat
    >>> def f(x):
    ...     return checkpoint_name(x @ x, "product").sin().sum()
    >>> g = remat(f, policy=policies.save_only_these_names("product"))
    >>> torch.func.grad(g)(torch.zeros(2, 2))
    tensor([[0., 0.],
            [0., 0.]])
    """
    return _by_name(_names(names), lambda name, names: _KEEP if name in names else _LEAVE, _LEAVE)


def save_any_names_but_these(*names: str) -> Callable[..., CheckpointPolicy]:
    """Keep the values that have a name, unless it is one of these.

    Parameters
    ----------
    *names : str
        The names.

    Returns
    -------
    callable
        A policy.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_any_names_but_these("attention"))
    """
    return _by_name(_names(names), lambda name, names: _FORBID if name in names else _KEEP, _LEAVE)


def save_anything_except_these_names(*names: str) -> Callable[..., CheckpointPolicy]:
    """Keep all that the backward reads, but for the values with these names.

    Parameters
    ----------
    *names : str
        The names.

    Returns
    -------
    callable
        A policy.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_anything_except_these_names("scores"))
    """
    return _by_name(_names(names), lambda name, names: _FORBID if name in names else _KEEP, _KEEP)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Callable[..., CheckpointPolicy]:
    """Keep the values with some names where they are, and those with others in the memory of the host.

    Parameters
    ----------
    names_which_can_be_saved, names_which_can_be_offloaded : sequence of str
        The names.
    offload_src, offload_dst : str
        As JAX calls the memories; others than these there are not.

    Returns
    -------
    callable
        A policy.

    Raises
    ------
    OptionError
        A name is in both, or there is no such memory.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> policy = policies.save_and_offload_only_these_names(
    ...     names_which_can_be_saved=["scores"], names_which_can_be_offloaded=["hidden"]
    ... )
    >>> f = remat(lambda x: (x @ x).sin(), policy=policy)
    """
    _check_places(offload_src, offload_dst)
    saved, offloaded = _names(names_which_can_be_saved), _names(names_which_can_be_offloaded)
    if saved & offloaded:
        raise OptionError(
            f"save_and_offload_only_these_names: {sorted(saved & offloaded)} are to be saved and offloaded."
        )

    def decide(name: str, names: frozenset[str]) -> CheckpointPolicy:
        return _OFFLOAD if name in offloaded else _KEEP if name in saved else _LEAVE

    return _by_name(saved | offloaded, decide, _LEAVE)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Callable[..., CheckpointPolicy]:
    """Keep what either of two policies keeps.

    Parameters
    ----------
    policy_1, policy_2 : callable or list of operators
        The policies. What one saves and the other offloads is saved.

    Returns
    -------
    callable
        A policy.

    Examples
    --------
    >>> from funcckpt import policies, remat
    >>> policy = policies.save_from_both_policies(
    ...     policies.dots_saveable, policies.save_only_these_names("mask")
    ... )
    >>> f = remat(lambda x: (x @ x).sin(), policy=policy)
    """
    both = [as_function(policy, "save_from_both_policies") for policy in (policy_1, policy_2)]
    if any(isinstance(policy, Budget) for policy in both):
        raise OptionError("save_from_both_policies: a budget chooses among everything. Give it alone.")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        said = [p(ctx, op, *args, **kwargs) for p in both]
        for answers, meaning in ((_KEEPS, _KEEP), (_OFFLOADS, _OFFLOAD)):
            if any(answer in answers for answer in said):
                return meaning
        return _FORBID if said == [_FORBID, _FORBID] else _LEAVE

    return policy


def budget(*, bytes: int | None = None, fraction: float | None = None) -> Budget:
    """Keep the values that save the most recomputation for their bytes.

    The first call of a function, for what its inputs look like, measures the FLOPs and the bytes of every
    operator whose result the backward reads, or needs to compute what it reads. The set that is kept is
    then the best that fits. The call keeps all of them while it runs; those that follow only what was
    chosen.

    Parameters
    ----------
    bytes : int
        How much each call may keep beside its inputs. Under `torch.func.vmap` the batched size counts.
    fraction : float
        The same as a part of all that the backward reads: 0 keeps nothing, 1 recomputes nothing.

    Returns
    -------
    Budget
        A policy, for `remat`.

    Raises
    ------
    OptionError
        Neither or both are given, or one is out of its range.

    Notes
    -----
    The sets considered are those of the Pareto frontier of bytes against FLOPs, found as Nemhauser and
    Ullmann (1969) find that of a knapsack: exact where what two values save adds up, and never worse than
    `dots_saveable`, `dots_with_no_batch_dims_saveable` and `everything_saveable` where these fit. More
    budget never means more FLOPs.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin().sum(), policy=policies.budget(fraction=0.5))
    >>> torch.func.grad(f)(torch.zeros(2, 2)).shape
    torch.Size([2, 2])
    """
    if (bytes is None) == (fraction is None):
        raise OptionError("budget takes bytes=... or fraction=..., one of the two.")
    if bytes is not None and bytes < 0:
        raise OptionError(f"budget: bytes={bytes} is less than nothing.")
    if fraction is not None and not 0 <= fraction <= 1:
        raise OptionError(f"budget: fraction={fraction} is not between 0 and 1.")
    return Budget(bytes, fraction)


def _by_name(
    names: frozenset[str],
    decide: Callable[[str, frozenset[str]], CheckpointPolicy],
    otherwise: CheckpointPolicy,
) -> Callable[..., CheckpointPolicy]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = current_name() if op is aten.alias.default else None
        return otherwise if name is None else decide(name, names)

    return policy


def _names(names: Sequence[str]) -> frozenset[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"names are strings, several of them, not {names!r}.")
    return frozenset(names)


def _check_places(source: str, destination: str) -> None:
    if source != "device" or destination != "pinned_host":
        raise OptionError(
            f"values are offloaded from 'device' to 'pinned_host', not from {source!r} to {destination!r}."
        )


# -- as remat asks them --------------------------------------------------------------------------------


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


def chooser_of(policy: Any, title: str) -> Chooser | None:
    """What asks a policy in the forward; None if there is nothing to ask."""
    if policy is None or policy is nothing_saveable:
        return None
    function = as_function(policy, title)
    return function if isinstance(function, Budget) else Chooser(function, title)


class Chooser:
    """Asks a policy about one operator after the other."""

    def __init__(self, policy: Callable[..., Any], title: str) -> None:
        self._policy = policy
        self._title = title

    def for_call(self, signature: Any) -> Chooser:
        """What to ask in one call of f; `signature` is its code, and what its inputs look like."""
        return self

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        if func in SAC_IGNORED_OPS:
            return None
        try:
            answer = self._policy(context(out), func, *args, **kwargs)
        except TypeError as error:  # which Python takes for "unsupported operand" where it asks for `a * b`
            raise FuncckptError(
                f"{self._title}: the policy raised {error!r} for {func}. It is called as "
                "policy(ctx, op, *args, **kwargs). Call what makes a policy, such as save_only_these_names."
            ) from error
        if answer in _KEEPS:
            return Decision(keep=True)
        if answer in _OFFLOADS:
            return Decision(keep=True, offload=True)
        if not isinstance(answer, (bool, CheckpointPolicy)) and answer is not None:
            raise FuncckptError(
                f"{self._title}: the policy returned {answer!r} for {func}, no CheckpointPolicy."
            )
        return Decision(keep=False, forbid=answer is _FORBID)

    def wants(self, call: int, func: Any, sizes: dict[int, int]) -> bool:
        return False

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        return frozenset()


def context(out: Any, is_recompute: bool = False) -> SelectiveCheckpointContext:
    """What a policy is given first: torch's context, with the result and the name that is being given."""
    # Of torch's versions some take the result, and some do not know it.
    ctx: Any = SelectiveCheckpointContext.__new__(SelectiveCheckpointContext)
    ctx.is_recompute, ctx.op_output, ctx.name = is_recompute, out, current_name()
    return ctx  # type: ignore[no-any-return]


class Budget(Chooser):
    """A policy that chooses among all values; see :func:`budget`."""

    def __init__(self, limit: int | None, fraction: float | None) -> None:
        self._limit = limit
        self._fraction = fraction
        self._plans: dict[Any, _Plan] = {}

    def __repr__(self) -> str:
        given = f"bytes={self._limit}" if self._fraction is None else f"fraction={self._fraction}"
        return f"budget({given})"

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        raise OptionError(
            f"{self!r} chooses when it has seen all operators, which only remat(f, policy=...) can wait for."
        )

    def for_call(self, signature: Any) -> Chooser:
        return _BudgetOfCall(self, signature)

    def limit(self, everything: int) -> int:
        if self._limit is not None:
            return self._limit
        assert self._fraction is not None
        return int(self._fraction * everything)


class _Plan(NamedTuple):
    """What is kept of a function: of which operators, with the bytes of their results."""

    kept: frozenset[Place]
    calls: dict[int, tuple[Any, dict[int, int]]]


class _BudgetOfCall(Chooser):
    def __init__(self, budget: Budget, signature: Any) -> None:
        self._budget = budget
        self._signature = signature
        self._plan = budget._plans.get(signature)

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision | None:
        return None

    def wants(self, call: int, func: Any, sizes: dict[int, int]) -> bool:
        if self._plan is None:
            return True
        if call not in self._plan.calls:
            return False
        planned, planned_sizes = self._plan.calls[call]
        as_planned = planned is func and planned_sizes.items() <= sizes.items()
        if not as_planned:
            # Something else decides what f does (an argument that is no tensor): measure again next time.
            self._budget._plans.pop(self._signature, None)
        return as_planned

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        if self._plan is not None:
            return self._plan.kept
        frontier = Frontier(calls, read, [_is_dot, _is_product])
        chosen = frontier.best(self._budget.limit(frontier.everything))
        plans = self._budget._plans
        if len(plans) >= _MANY:
            plans.clear()
        planned = {call: (calls[call].func, calls[call].sizes) for call, _ in chosen}
        plans[self._signature] = _Plan(chosen, planned)
        return chosen


_MANY = 1024


def _is_dot(func: Any) -> bool:
    return getattr(func, "overloadpacket", func) in _DOTS


def _is_product(func: Any) -> bool:
    return getattr(func, "overloadpacket", func) in _PRODUCTS


# -- names ----------------------------------------------------------------------------------------------


def checkpoint_name(x: T, name: str) -> T:
    """Label a value, so that policies and reports can speak of it. The identity for everyone else.

    Parameters
    ----------
    x : pytree of tensors
        What to label, of any shapes. Under `torch.func.vmap` the batched value is labelled; in forward mode
        the primal, and not its tangent.
    name : str
        The label. Several values may have the same one.

    Returns
    -------
    pytree of tensors
        x, of the same shapes.

    Raises
    ------
    InputError
        The name is no string.

    Notes
    -----
    The counterpart of `jax.ad_checkpoint.checkpoint_name`. It costs nothing where no policy looks.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import checkpoint_name
    >>> def block(x, w):
    ...     return torch.tanh(checkpoint_name(x @ w, "projected"))
    >>> block(torch.zeros(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    if not isinstance(name, str):
        what = describe(name) if isinstance(name, Tensor) else repr(name)
        raise InputError(f"checkpoint_name takes a value and then its name, a string, not {what}.")
    if torch.compiler.is_compiling() or not _is_looked_at():
        return x
    with _named(name):
        named: T = pytree.tree_map_only(Tensor, torch.ops.aten.alias.default, x)
    return named


# -- for modes that look ------------------------------------------------------------------------------


class _Current(threading.local):
    name: str | None = None


_current = _Current()


@contextmanager
def _named(name: str) -> Iterator[None]:
    before, _current.name = _current.name, name
    try:
        yield
    finally:
        _current.name = before


def current_name() -> str | None:
    """The name that is being given, asked by a dispatch mode as it is handed an operator.

    A name arrives as `aten.alias` of the labelled tensor, below autograd and all transforms, in modes that
    have an attribute `sees_names = True`: only while one of them is active is there such an operator.
    """
    return _current.name


def _is_looked_at() -> bool:
    return any(getattr(mode, "sees_names", False) for mode in _torch.dispatch_modes())
