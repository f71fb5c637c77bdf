"""Policies by operators and by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import InputError, OptionError
from .chooser import FORBID, KEEPS, OFFLOADS, Chooser, Policy, as_function
from .names import current_name

_KEEP = CheckpointPolicy.PREFER_SAVE
_OFFLOAD = CheckpointPolicy.PREFER_CPU_OFFLOAD
_LEAVE = CheckpointPolicy.PREFER_RECOMPUTE

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


def offload_dot_with_no_batch_dims(
    offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps the same results in the memory of the host.

    `offload_src` and `offload_dst` are JAX's names of the memories; others than the defaults there are not.

    >>> from funcckpt import policies, remat
    >>> policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    >>> f = remat(lambda x: (x @ x).sin(), policy=policy)
    """
    _check_places(offload_src, offload_dst)
    return lambda ctx, op, *args, **kwargs: _OFFLOAD if is_product(op) else _LEAVE


def save_only_these_names(*names: str) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps the values with these names, given by :func:`checkpoint_name`, and no others.

    >>> import torch
    >>> from funcckpt import checkpoint_name, policies, remat
    >>> def f(x):
    ...     return checkpoint_name(x @ x, "product").sin().sum()
    >>> g = remat(f, policy=policies.save_only_these_names("product"))
    >>> torch.func.grad(g)(torch.zeros(2, 2))
    tensor([[0., 0.],
            [0., 0.]])
    """
    known = _names(names)
    return _by_name(lambda name: _KEEP if name in known else _LEAVE, _LEAVE)


def save_any_names_but_these(*names: str) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps the values that have a name, unless it is one of these.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_any_names_but_these("attention"))
    """
    known = _names(names)
    return _by_name(lambda name: FORBID if name in known else _KEEP, _LEAVE)


def save_anything_except_these_names(*names: str) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps all that the backward reads, but for the values with these names.

    >>> from funcckpt import policies, remat
    >>> f = remat(lambda x: (x @ x).sin(), policy=policies.save_anything_except_these_names("scores"))
    """
    known = _names(names)
    return _by_name(lambda name: FORBID if name in known else _KEEP, _KEEP)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps the values with some names where they are, and those with others on the host.

    Raises
    ------
    OptionError
        A name is in both, or `offload_src` and `offload_dst` are not the defaults: there are no others.

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
    return _by_name(
        lambda name: _OFFLOAD if name in offloaded else _KEEP if name in saved else _LEAVE, _LEAVE
    )


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Callable[..., CheckpointPolicy]:
    """Make a policy that keeps what either of two keeps. What one saves and the other offloads is saved.

    >>> from funcckpt import policies, remat
    >>> policy = policies.save_from_both_policies(
    ...     policies.dots_saveable, policies.save_only_these_names("mask")
    ... )
    >>> f = remat(lambda x: (x @ x).sin(), policy=policy)
    """
    both = [as_function(policy, "save_from_both_policies") for policy in (policy_1, policy_2)]
    if any(isinstance(policy, Chooser) for policy in both):
        raise OptionError("save_from_both_policies: a budget chooses among everything. Give it alone.")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        said = [p(ctx, op, *args, **kwargs) for p in both]
        for answers, meaning in ((KEEPS, _KEEP), (OFFLOADS, _OFFLOAD)):
            if any(answer in answers for answer in said):
                return meaning
        return FORBID if said == [FORBID, FORBID] else _LEAVE

    return policy


def _by_name(
    decide: Callable[[str], CheckpointPolicy], otherwise: CheckpointPolicy
) -> Callable[..., CheckpointPolicy]:
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
        raise OptionError(
            f"values are offloaded from 'device' to 'pinned_host', not from {source!r} to {destination!r}."
        )


def chooser_of(policy: Any, title: str) -> Chooser | None:
    """What asks a policy in the forward; None if there is nothing to ask."""
    if policy is None or policy is nothing_saveable:
        return None
    function = as_function(policy, title)
    return function if isinstance(function, Chooser) else Chooser(function, title)
