"""Policies by operators and by names, and how the forward asks them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from .._torch import autograd, functorch
from ..errors import FuncckptError, InputError, OptionError, describe
from ..tape.tape import Call, Place

T = TypeVar("T")
_Made = Callable[..., CheckpointPolicy]

_KEEP = CheckpointPolicy.PREFER_SAVE
_OFFLOAD = CheckpointPolicy.PREFER_CPU_OFFLOAD
_LEAVE = CheckpointPolicy.PREFER_RECOMPUTE
# Of a name: not even if the operator that has made the value is to be kept.
_FORBID = CheckpointPolicy.MUST_RECOMPUTE
_KEEPS = (CheckpointPolicy.MUST_SAVE, _KEEP, True)
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, _OFFLOAD)

aten = torch.ops.aten

# -- names ----------------------------------------------------------------------------------------------

_current = threading.local()


def checkpoint_name(x: T, name: str) -> T:
    """Label a value, so that policies and reports can speak of it. The identity for everyone else.

    `x` is a pytree, and so is the result. Several values may have the same name. Under `torch.func.vmap` the
    batched value is labelled; in forward mode the primal, and not its tangent.

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
    if torch.compiler.is_compiling():
        return x
    if not any([getattr(mode, "sees_names", False) for mode in functorch.dispatch_modes()]):
        return x
    before, _current.name = current_name(), name
    try:
        named: T = pytree.tree_map_only(Tensor, aten.alias.default, x)
    finally:
        _current.name = before
    return named


def current_name() -> str | None:
    """The name that is being given, asked by a dispatch mode as it is handed an operator.

    A name arrives as `aten.alias` of the labelled tensor, in modes that have `sees_names = True`: only while
    one of them is active is there such an operator.
    """
    return getattr(_current, "name", None)


# -- how a policy is asked ---------------------------------------------------------------------------------


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

    @property
    def known(self) -> Any:
        """What tells policies apart that say the same of the same operators; None for one that may not."""
        return _known(self.policy)

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        """What to do with what an operator returned; for `aten.alias` with a name, with what is named."""
        if func in SAC_IGNORED_OPS:
            return Decision(False)
        # Of torch's versions some give a context the result, and some do not know it.
        ctx: Any = SelectiveCheckpointContext.__new__(SelectiveCheckpointContext)
        ctx.is_recompute, ctx.op_output, ctx.name = False, out, current_name()
        try:
            answer = self.policy(ctx, func, *args, **kwargs)
        except TypeError as error:  # which the operator around it would take for its own
            raise FuncckptError(
                f"{self._title}: the policy raised {error!r}. It is called as policy(ctx, op, *args, "
                "**kwargs): call what makes a policy (save_only_these_names) before that."
            ) from error
        if answer in _KEEPS or answer in _OFFLOADS:
            return Decision(True, answer in _OFFLOADS)
        if not isinstance(answer, (bool, CheckpointPolicy, type(None))):
            raise FuncckptError(
                f"{self._title}: the policy returned {answer!r} for {func}, no CheckpointPolicy."
            )
        return Decision(False, forbid=answer is _FORBID)

    def choose(self, calls: Sequence[Call], read: frozenset[Place]) -> frozenset[Place]:
        """What to keep in the end, given all calls and the values that the backward reads."""
        return frozenset([(index, i) for index, call in enumerate(calls) for i in call.values])


def _known(policy: Any) -> Any:
    """What two policies of ours have in common if they say the same; None for one that is not of ours."""
    if isinstance(policy, (frozenset, CheckpointPolicy)):
        return policy
    if isinstance(policy, functools.partial) and policy.func is _is_listed:
        return policy.args
    if getattr(policy, "__module__", None) != __name__:
        return None
    parts = [cell.cell_contents for cell in policy.__closure__ or ()]
    known = [_known(x) for part in parts for x in (part if isinstance(part, list) else [part])]
    return None if None in known else (policy.__code__, *known)


Policy = Callable[..., CheckpointPolicy | bool] | Sequence[Any] | Chooser


def as_function(policy: Any, title: str) -> Callable[..., Any]:
    """A policy of either form as a function."""
    if isinstance(policy, Chooser):
        raise OptionError(
            f"{title}: {policy!r} chooses among all values, for which only remat(f, policy=...) can wait. "
            "Give it alone."
        )
    if callable(policy) and not isinstance(policy, autograd.OPERATORS):
        if (code := getattr(policy, "__code__", None)) is not None:
            named, more = code.co_argcount, code.co_flags & inspect.CO_VARARGS
            if named == 1 or (named < 3 and not more) or (named == 0 and policy.__module__ == __name__):
                raise OptionError(
                    f"{title}: {policy.__name__} does not take (ctx, op, *args, **kwargs), as a policy does. "
                    "Call it, if it makes one. A policy of JAX has no ctx, and primitives for operators."
                )
        return policy  # type: ignore[no-any-return]
    if not isinstance(policy, (list, tuple, set, frozenset)):
        raise OptionError(
            f"{title}: a policy is either a function or a list of ops, not {policy!r}: write "
            "funcckpt.policies.dots_saveable, or [torch.ops.aten.mm.default]."
        )
    for op in policy:
        if not isinstance(op, autograd.OPERATORS):
            more = f", such as {op}.default" if hasattr(op, "default") else ""
            # In torch's words, by which programs tell this error.
            raise OptionError(
                f"{title}: Expected op in `op_list` to be an OpOverload but got: {op}. Please update the "
                f"OpOverloadPacket to a specific OpOverload{more}."
            )
    return functools.partial(_is_listed, frozenset(map(_name_of, policy)))


_name_of = functools.cache(str)


def _is_listed(names: frozenset[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy of a list of operators. By their names, since they have no pickle."""
    return _name_of(op) in names


def chooser_of(policy: Any, title: str) -> Chooser | None:
    """What asks a policy in the forward; None if there is nothing to ask."""
    if policy is None or policy is nothing_saveable:
        return None
    return policy if isinstance(policy, Chooser) else Chooser(as_function(policy, title), title)


# -- the policies ------------------------------------------------------------------------------------------

# Without batch dimensions, with them, attention and convolutions.
_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten._addmm_activation))
_ATTENTION = ("flash", "efficient", "cudnn")
_DOTS = _PRODUCTS | {
    *(aten.bmm, aten.baddbmm, aten.addbmm, aten.convolution, aten._convolution, aten.cudnn_convolution),
    *[getattr(aten, f"_scaled_dot_product_{kind}_attention") for kind in _ATTENTION],
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}


def is_dot(op: Any) -> bool:
    """Whether an operator is a matrix product, attention or a convolution."""
    return getattr(op, "overloadpacket", op) in _DOTS


def is_product(op: Any) -> bool:
    """Whether an operator is a matrix product without a batch dimension."""
    return getattr(op, "overloadpacket", op) in _PRODUCTS


def nothing_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep nothing: the same as no policy."""
    return _LEAVE


def everything_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep all that the backward reads, so that nothing but views is computed again."""
    return _KEEP


def dots_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, of attention and of convolutions."""
    return _KEEP if is_dot(op) else _LEAVE


def dots_with_no_batch_dims_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products without a batch dimension: of linear layers, not of attention.

    Under `torch.func.vmap` a product of two batched tensors has one.
    """
    return _KEEP if is_product(op) else _LEAVE


# JAX has both names.
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "pinned_host") -> _Made:
    """Make a policy that keeps the same results in the memory of the host.

    `offload_src` and `offload_dst` are JAX's names of the memories; others than the defaults there are not.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.offload_dot_with_no_batch_dims())
    """
    _check_places(offload_src, offload_dst)
    return lambda ctx, op, *args, **kwargs: _OFFLOAD if is_product(op) else _LEAVE


def save_only_these_names(*names: str) -> _Made:
    """Make a policy that keeps the values with these names, given by :func:`checkpoint_name`, and no others.

    >>> from funcckpt import checkpoint_name, policies, remat
    >>> policy = policies.save_only_these_names("product")
    >>> f = remat(lambda x: checkpoint_name(x @ x, "product").sin(), policy=policy)
    """
    known = _names(names)
    return _by_name(lambda name: _KEEP if name in known else _LEAVE)


def save_any_names_but_these(*names: str) -> _Made:
    """Make a policy that keeps the values that have a name, unless it is one of these `names`.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_any_names_but_these("scores"))
    """
    known = _names(names)
    return _by_name(lambda name: _FORBID if name in known else _KEEP)


def save_anything_except_these_names(*names: str) -> _Made:
    """Make a policy that keeps all that the backward reads, but for the values with these `names`.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_anything_except_these_names("scores"))
    """
    known = _names(names)
    return _by_name(lambda name: _FORBID if name in known else _KEEP, _KEEP)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> _Made:
    """Make a policy that keeps the values with some names where they are, and those with others on the host.

    No name may be in both. `offload_src` and `offload_dst` are JAX's; others than the defaults there are not.

    >>> from funcckpt import policies
    >>> policy = policies.save_and_offload_only_these_names(
    ...     names_which_can_be_saved=["h"], names_which_can_be_offloaded=["scores"]
    ... )
    """
    _check_places(offload_src, offload_dst)
    saved, offloaded = _names(names_which_can_be_saved), _names(names_which_can_be_offloaded)
    if saved & offloaded:
        raise OptionError(
            f"save_and_offload_only_these_names: {sorted(saved & offloaded)} are to be saved and offloaded."
        )
    return _by_name(lambda name: _OFFLOAD if name in offloaded else _KEEP if name in saved else _LEAVE)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> _Made:
    """Make a policy that keeps what `policy_1` or `policy_2` keeps. What one saves and one offloads is saved.

    >>> from funcckpt import policies
    >>> names = policies.save_only_these_names("h")
    >>> policy = policies.save_from_both_policies(names, policies.dots_saveable)
    """
    both = [as_function(policy, "save_from_both_policies") for policy in (policy_1, policy_2)]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        said = [p(ctx, op, *args, **kwargs) for p in both]
        if any(answer in _KEEPS for answer in said):
            return _KEEP
        if any(answer in _OFFLOADS for answer in said):
            return _OFFLOAD
        return _FORBID if said == [_FORBID, _FORBID] else _LEAVE

    return policy


def _by_name(decide: Callable[[str], CheckpointPolicy], otherwise: CheckpointPolicy = _LEAVE) -> _Made:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = current_name() if op is aten.alias.default else None
        return otherwise if name is None else decide(name)

    return policy


def _names(names: Sequence[str]) -> frozenset[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"names are strings, several of them, not {names!r}.")
    return frozenset(names)


def _check_places(source: str, destination: str) -> None:
    if source != "device" or destination != "pinned_host":
        raise OptionError(f"offload from 'device' to 'pinned_host', not from {source!r} to {destination!r}.")
