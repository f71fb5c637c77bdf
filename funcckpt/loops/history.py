"""Values without their history, at every level of `torch.func` that is active.

`detach` drops the history of the innermost level alone, and with it that a tensor requires grad. Where the
steps of a loop run for their values, all levels have to forget the steps before, and to know all the same
which tensors are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .. import _torch
from ..core import dispatch, net
from ..core.program import note_dropped

__all__ = ["can_restart", "restart", "tensors_of"]


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def can_restart(tree: Any) -> bool:
    """Whether `restart` knows all levels that are active."""
    return (
        {layer.kind for layer in _torch.active_layers()} <= {"grad", "vmap", "jvp"}
        and _torch.in_dual_level() == _torch.has_dual_level()
        and not _torch.is_tracing()
        and not torch.is_inference_mode_enabled()
        and dispatch._implementation.get() == "direct"
        and not any([_torch.is_legacy_batchedtensor(_torch.below_wrappers(x)) for x in tensors_of(tree)])
    )


def restart(tree: Any) -> Any:
    """The tensors of a tree without their history, requiring grad at the levels at which they did."""
    leaves, structure = pytree.tree_flatten(tree)
    found = iter(_restart(tensors_of(leaves)))
    return pytree.tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], structure)


def _restart(tensors: Sequence[Tensor]) -> list[Tensor]:
    tensors = [_torch.alive(x) for x in tensors]
    interpreter = _torch.peek_interpreter_stack()
    kind = "" if interpreter is None else _torch.kind_of(interpreter)
    if kind in ("", "jvp") and _torch.has_dual_level():
        primals, tangents, along = dispatch._split_duals(tensors)
        if along:
            found = _restart_below(interpreter, kind, [*primals, *tangents])
            for i, tangent in zip(along, found[len(primals) :], strict=True):
                found[i] = forward_ad.make_dual(found[i], tangent, level=0)
            return found[: len(primals)]
    return _restart_below(interpreter, kind, tensors)


def _restart_below(interpreter: Any, kind: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same for tensors without a tangent at the innermost level."""
    if not kind:
        return net.restarted(tensors)
    level = interpreter.level()
    if kind == "vmap":
        values_and_dims = [_torch._unwrap_batched(x, level) for x in tensors]
        with _torch.lower(interpreter, "vmap"):
            values = _restart([x for x, _ in values_and_dims])
        return [
            x if dim is None else _torch._add_batch_dim(x, dim, level)
            for x, (_, dim) in zip(values, values_and_dims, strict=True)
        ]
    note_dropped(tensors)
    with _torch.lower(interpreter, kind):
        values = _restart([_torch._unwrap_for_grad(x, level) for x in tensors])
    wrapped = [_torch._wrap_for_grad(x, level) for x in values]
    _torch.require_grad_at_this_level(wrapped, [i for i, x in enumerate(tensors) if x.requires_grad])
    return wrapped
