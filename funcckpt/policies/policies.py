"""Policies by operators and by names, and how the forward asks them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .._torch import autograd, functorch, kernels
from ..errors import FuncckptError, InputError, OptionError, describe
from ..tape.tape import OpCall, Place

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
    """Give a value a name, by which policies and reports refer to it. Returns the value.

    `x` is any pytree; its tensors, of any shape and dtype, get the name. Several values may have the same
    name. Under `torch.func.vmap` the batched value has it, and in forward mode the primal, not the tangent.

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
    if torch.compiler.is_dynamo_compiling():
        return x
    watchers = (*functorch.dispatch_modes(), *kernels.here.watchers)
    if not any([getattr(watcher, "sees_names", False) for watcher in watchers]):
        return x
    before, _current.name = current_name(), name
    try:
        return pytree.tree_map_only(_has_alias, aten.alias.default, x)
    finally:
        _current.name = before


def _has_alias(x: Any) -> bool:
    """Whether x can get a name. Tensors of other layouts cannot: they are not kept by name."""
    return isinstance(x, Tensor) and x.layout is torch.strided


def current_name() -> str | None:
    """The name that is being given now. For dispatch modes with `sees_names = True`.

    While such a mode is active, a name reaches it as an `aten.alias` of the named tensor.
    """
    return getattr(_current, "name", None)


# -- how a policy is asked ---------------------------------------------------------------------------------


class Decision(NamedTuple):
    """What to do with the results of an operator."""

    keep: bool
    offload: bool = False
    # Whether the value must not be kept, whatever else speaks for it: a policy excludes its name.
    forbid: bool = False


class Chooser:
    """Asks a policy about one operator after the other."""

    def __init__(self, policy: Callable[..., Any], title: str) -> None:
        self.policy = policy
        self._title = title

    @property
    def known(self) -> Any:
        """A key, equal for policies that give the same answers; None if the answers may change."""
        return _known(self.policy)

    def decides(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        """What to do with the results of an operator; for an `aten.alias` with a name, the named value."""
        # Some versions of torch pass the result to the context, and some do not.
        ctx: Any = SelectiveCheckpointContext.__new__(SelectiveCheckpointContext)
        ctx.is_recompute, ctx.op_output, ctx.name = False, out, current_name()
        try:
            answer = self.policy(ctx, func, *args, **kwargs)
        except TypeError as error:  # the operator around it would take this for an error of its own
            raise FuncckptError(
                f"{self._title}: the policy raised {error!r}. It is called as policy(ctx, op, *args, "
                "**kwargs). If it makes a policy, as save_only_these_names does, call it first."
            ) from error
        if answer in _KEEPS or answer in _OFFLOADS:
            return Decision(True, answer in _OFFLOADS)
        if not isinstance(answer, (bool, CheckpointPolicy, type(None))):
            said = f"the policy returned {answer!r} for {func}"
            raise FuncckptError(f"{self._title}: {said}, not a CheckpointPolicy or bool.")
        return Decision(False, forbid=answer is _FORBID)

    def choose(self, calls: Sequence[OpCall], read: frozenset[Place]) -> frozenset[Place]:
        """The values to keep, given all calls and the values that the backward reads."""
        return frozenset([(index, i) for index, call in enumerate(calls) for i in call.values])


def _known(policy: Any) -> Any:
    """`Chooser.known` of a policy: a key for those of this module, None for all others."""
    if isinstance(policy, (frozenset, CheckpointPolicy)):
        return policy
    if isinstance(policy, functools.partial):
        known = [*map(_known, (policy.func, *policy.args))]
        return None if policy.keywords or None in known else (*known,)
    return policy if getattr(policy, "__module__", None) == __name__ else None


Policy = Callable[..., CheckpointPolicy | bool] | Sequence[Any] | Chooser


def as_function(policy: Any, title: str) -> Callable[..., Any]:
    """A policy of either form as a function."""
    if isinstance(policy, Chooser):
        raise OptionError(
            f"{title} does not take {policy!r}, which compares all values of a call. Pass it alone, as "
            "remat(f, policy=...)."
        )
    if callable(policy) and not isinstance(policy, (*autograd.OPERATORS, autograd.Packet)):
        if (code := getattr(policy, "__code__", None)) is not None:
            named, more = code.co_argcount, code.co_flags & inspect.CO_VARARGS
            if named == 1 or (named < 3 and not more) or (named == 0 and policy.__module__ == __name__):
                raise OptionError(
                    f"{title}: {policy.__name__} does not take (ctx, op, *args, **kwargs), as a policy does. "
                    "If it makes a policy, call it. A policy of JAX has no ctx, and is given primitives."
                )
        return policy  # type: ignore[no-any-return]
    if not isinstance(policy, (list, tuple, set, frozenset)):
        raise OptionError(
            f"{title}: a policy is either a function or a list of ops, not {policy!r}. Write, for example, "
            "funcckpt.policies.dots_saveable or [torch.ops.aten.mm.default]."
        )
    for op in policy:
        if not isinstance(op, autograd.OPERATORS):
            more = f", such as {op}.default" if hasattr(op, "default") else ""
            # In torch's words, by which programs recognize this error.
            raise OptionError(
                f"{title}: Expected op in `op_list` to be an OpOverload but got: {op}. Please update the "
                f"OpOverloadPacket to a specific OpOverload{more}."
            )
    names = frozenset(map(_name_of, policy))
    return _named("[{}]", sorted(names), _is_listed, names)


_name_of = functools.cache(str)


class _Named(functools.partial[Any]):
    """A policy that says how it was made."""

    title = ""

    def __repr__(self) -> str:
        return self.title


def _named(title: str, parts: Sequence[Any], *call: Any) -> Any:
    policy = _Named(*call)
    policy.title = title.format(", ".join(map(str, parts)))
    return policy


def names_of(title: str, policies: Iterable[Any], taken: Collection[str] = ()) -> list[str]:
    """Check policies, and give them names for tables. Numbers tell those with the same name apart."""
    names = []
    for policy in policies:
        chooser = chooser_of(policy, title)
        asked = policy if chooser is None else getattr(chooser, "policy", chooser)
        names.append(getattr(asked, "__name__", repr(asked)))
    return [f"{x} {i}" if names.count(x) > 1 or x in taken else x for i, x in enumerate(names, 1)]


def _is_listed(names: frozenset[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy of a list of operators, by their names: operators cannot be pickled."""
    return _name_of(op) in names


def chooser_of(policy: Any, title: str) -> Chooser | None:
    """The Chooser of a policy; None if the policy keeps nothing."""
    if policy is None or policy is nothing_saveable:
        return None
    return policy if isinstance(policy, Chooser) else Chooser(as_function(policy, title), title)


# -- the policies ------------------------------------------------------------------------------------------

# Products without batch dimensions; below, those with them, attention and convolutions.
_PRODUCTS = frozenset((aten.mm, aten.addmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten._addmm_activation))
_DOTS = _PRODUCTS | {
    *(aten.bmm, aten.baddbmm, aten.addbmm, aten.convolution, aten._convolution, aten.cudnn_convolution),
    *[getattr(aten, f"_scaled_dot_product_{kind}_attention") for kind in ("flash", "efficient", "cudnn")],
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
    """Keep nothing beside the inputs: the same as no policy."""
    return _LEAVE


def everything_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep all values that the backward reads. Only views are computed again."""
    return _KEEP


def dots_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, of attention and of convolutions."""
    return _KEEP if is_dot(op) else _LEAVE


def dots_with_no_batch_dims_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products without a batch dimension: of linear layers, not of attention.

    Under `torch.func.vmap`, a product of two batched tensors has a batch dimension.
    """
    return _KEEP if is_product(op) else _LEAVE


# JAX has both names.
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "pinned_host") -> _Made:
    """Make a policy that moves matrix products without a batch dimension to the memory of the host.

    `offload_src` and `offload_dst` are JAX's names of the two memories. Only the defaults are supported.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.offload_dot_with_no_batch_dims())
    """
    _check_places(offload_src, offload_dst)
    return _named("offload_dot_with_no_batch_dims()", (), _offload_products)  # type: ignore[no-any-return]


def _offload_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _OFFLOAD if is_product(op) else _LEAVE


def save_only_these_names(*names: str) -> _Made:
    """Make a policy that keeps only the values to which :func:`checkpoint_name` gave one of these `names`.

    >>> from funcckpt import checkpoint_name, policies, remat
    >>> policy = policies.save_only_these_names("product")
    >>> f = remat(lambda x: checkpoint_name(x @ x, "product").sin(), policy=policy)
    """
    return _by_name("save_only_these_names", names, _KEEP, _LEAVE)


def save_any_names_but_these(*names: str) -> _Made:
    """Make a policy that keeps all values that have a name, except those with one of these `names`.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_any_names_but_these("scores"))
    """
    return _by_name("save_any_names_but_these", names, _FORBID, _KEEP)


def save_anything_except_these_names(*names: str) -> _Made:
    """Make a policy that keeps all values that the backward reads, except those with these `names`.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_anything_except_these_names("scores"))
    """
    return _by_name("save_anything_except_these_names", names, _FORBID, _KEEP, _KEEP)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> _Made:
    """Make a policy that keeps values with some names on the device, and those with others on the host.

    No name may be in both lists. Of `offload_src` and `offload_dst` only the defaults are supported.

    >>> from funcckpt import policies
    >>> policy = policies.save_and_offload_only_these_names(
    ...     names_which_can_be_saved=["h"], names_which_can_be_offloaded=["scores"]
    ... )
    """
    _check_places(offload_src, offload_dst)
    saved = _by_name("save_only_these_names", names_which_can_be_saved, _KEEP, _LEAVE)
    offloaded = _by_name("offload", names_which_can_be_offloaded, _OFFLOAD, _LEAVE)
    if both := sorted({*names_which_can_be_saved} & {*names_which_can_be_offloaded}):
        raise OptionError(f"save_and_offload_only_these_names: {both} cannot be saved and offloaded.")
    return save_from_both_policies(saved, offloaded)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> _Made:
    """Make a policy that keeps what `policy_1` or `policy_2` keeps. To save goes before to offload.

    >>> from funcckpt import policies
    >>> names = policies.save_only_these_names("h")
    >>> policy = policies.save_from_both_policies(names, policies.dots_saveable)
    """
    both = [as_function(policy, "save_from_both_policies") for policy in (policy_1, policy_2)]
    names = names_of("save_from_both_policies", both)
    return _named("save_from_both_policies({})", names, _from_both, *both)


def _from_both(first: _Made, second: _Made, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    said = [policy(ctx, op, *args, **kwargs) for policy in (first, second)]
    if any(answer in _KEEPS for answer in said):
        return _KEEP
    if any(answer in _OFFLOADS for answer in said):
        return _OFFLOAD
    return _FORBID if said == [_FORBID, _FORBID] else _LEAVE


def _by_name(title: str, names: Sequence[str], listed: Any, others: Any, unnamed: Any = _LEAVE) -> _Made:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{title}: names are strings ('h', 'scores'), or for two kinds of names a sequence of strings "
            f"each, not {names!r}."
        )
    parts = [*map(repr, names)]
    return _named(f"{title}({{}})", parts, _of_name, frozenset(names), listed, others, unnamed)  # type: ignore[no-any-return]


def _of_name(
    names: frozenset[str],
    listed: Any,
    others: Any,
    unnamed: Any,
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A policy of names: what it says of these, of other names, and of values without a name."""
    name = current_name() if op is aten.alias.default else None
    return unnamed if name is None else listed if name in names else others


def _check_places(source: str, destination: str) -> None:
    if source != "device" or destination != "pinned_host":
        raise OptionError(
            f"a policy offloads only from 'device' to 'pinned_host', not from {source!r} to {destination!r}."
        )
