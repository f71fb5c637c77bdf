"""The floating-point operations of operators, by torch's formulas and some that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The floating-point operations of one call of an operator."""
    formula = _flop_formula(func)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _flop_formula(func: Any) -> Callable[..., Any] | None:
    packet = getattr(func, "overloadpacket", func)
    return flop_registry.get(packet) or _MORE_FLOPS.get(packet)


# What torch.utils.flop_counter has no formula for (torch 2.13). Without the first four, `w @ x` of
# one sample would count zero, and count under vmap, where it becomes a matrix product.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    aten.dot: lambda x, y, out_val=None: 2 * x.numel(),
    aten.vdot: lambda x, y, out_val=None: 2 * x.numel(),
    aten.mv: lambda a, x, out_val=None: 2 * a.numel(),
    aten.addmv: lambda y, a, x, out_val=None, **_: 2 * a.numel(),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_val=None, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, out_val=None, **__: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
}
