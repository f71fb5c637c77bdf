"""`use_reentrant=True`: the variant that torch gives up. It is accepted where it would give the same result,
without its means; where it raises, so does ours, and where it would give no gradient without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch
from ..errors import CheckpointError, OptionError


class _Reentrant(torch.autograd.Function):
    """The identity, with the conditions on a backward that torch's reentrant variant makes."""

    @staticmethod
    def forward(ctx: Any, title: object, are_differentiable: bool, anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.title, ctx.are_differentiable = title, are_differentiable
        ctx.save_for_backward(anchor)  # freed by the first backward, whatever the function itself saves
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if not _torch.accumulates_all():
            raise CheckpointError(
                f"{ctx.title}: When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() "
                "or passing an `inputs` parameter to .backward(). Pass use_reentrant=False: that allows both."
            )
        _ = ctx.saved_tensors
        if not ctx.are_differentiable:
            raise CheckpointError(
                f"{ctx.title}: none of output has requires_grad=True, this checkpoint() is not necessary. "
                "Call the function itself, or pass use_reentrant=False, which takes them for constants."
            )
        return None, None, None, *cotangents


def with_conditions(title: object, args: tuple[Any, ...], out: Any) -> Any:
    """What the function has returned, such that a backward raises where that of torch would."""
    if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        if any(isinstance(y, Tensor) and y.requires_grad for y in pytree.tree_leaves(out)):
            raise OptionError(
                f"{title}: use_reentrant=True, and no argument requires grad: torch would give no gradient "
                "to the parameters that the function uses, or to tensors inside of containers. Pass "
                "use_reentrant=False, which gives it."
            )
        return out
    if not isinstance(out, Tensor | tuple) or hasattr(out, "_fields"):
        return out
    outputs = (out,) if isinstance(out, Tensor) else out
    places = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and _may_require_grad(y)]
    if not places:
        return out
    tensors = [outputs[i] for i in places]
    anchor = torch.empty(0, requires_grad=True)
    made = list(outputs)
    found = _Reentrant.apply(title, any(y.requires_grad for y in tensors), anchor, *tensors)
    for i, y in zip(places, found, strict=True):
        made[i] = y
    return made[0] if isinstance(out, Tensor) else tuple(made)


def _may_require_grad(y: Tensor) -> bool:
    return y.is_floating_point() or y.is_complex()


def check(title: object, kwargs: dict[str, Any], has_own_contexts: bool) -> None:
    """What torch's takes no keyword arguments and no contexts for."""
    if kwargs:
        raise OptionError(
            f"{title}: Unexpected keyword arguments: {','.join(kwargs)}. With use_reentrant=True torch takes "
            "none: pass use_reentrant=False."
        )
    if has_own_contexts:
        raise OptionError(
            f"{title}: Passing `context_fn` or `debug` is only supported when use_reentrant=False."
        )
