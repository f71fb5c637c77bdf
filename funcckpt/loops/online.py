"""Loops whose length is not known: online checkpointing, in one sweep.

The loop runs step by step, each step a `remat` whose history is dropped as soon as it is done, and
`schedules.Online` says which carries to keep. When the loop has ended, its length is known. Then each
part between two carries that are kept becomes a checkpoint as it would be in `scan`, but for one thing:
what it computes is known, and is not computed again. `dispatch.bind` gives known values the history of
R[part], at every level.

That is not possible everywhere. `Unknown` says so, before anything has changed, and `scan` counts the
steps instead:

* forward and reverse mode together, and what `make_fx` and `functionalize` trace;
* a step that captures a tensor which only its run shows, or that updates buffers;
* the other spellings of `dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .. import _torch, dispatch, net, world
from ..errors import MutationError
from ..flat import Arguments, Outputs
from ..remat import _Call, _Options

__all__ = ["Unknown", "can_restart", "first_run", "is_possible", "known", "restart"]


class Unknown(Exception):
    """The history of these values has to be recorded as they are computed."""


def can_restart(tensors: Sequence[Tensor]) -> bool:
    """Whether `restart` knows all levels that are active."""
    return (
        {layer.kind for layer in _torch.active_layers()} <= {"grad", "vmap", "jvp"}
        and _torch.in_dual_level() == _torch.has_dual_level()
        and not _torch.is_tracing()
        and not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
        and dispatch._implementation.get() == "direct"
        and not any(_torch.is_legacy_batchedtensor(_torch.below_wrappers(x)) for x in tensors)
    )


def is_possible(tensors: Sequence[Tensor]) -> bool:
    """Whether values that are known can be given a history."""
    return not _torch.has_dual_level() and can_restart(tensors)


_STATIC = frozenset({0, 1, 2}), frozenset[str]()
_OPTIONS = _Options(*_STATIC, True, "default")


def first_run(f: Callable[..., Any], name: str, args: tuple[Any, ...]) -> tuple[Any, bool]:
    """What ``f(*args)`` returns, as a checkpoint, and whether it has drawn random numbers.

    Raises
    ------
    Unknown
        The checkpoint needs to know more than its inputs.
    MutationError
        f would not do the same again.
    """
    call = _Call(f, name, _OPTIONS, Arguments(name, args, {}, *_STATIC))
    try:
        plain = _torch.peek_interpreter_stack() is None
        out = call.run_eager(f) if plain else call.run_under_transforms()
    except net.HiddenCapture as error:
        raise Unknown from error
    if call.replaces or call._closure.has_updated_buffers:
        raise Unknown
    if not call._closure.is_pure:
        raise MutationError(
            f"{name}: cond or body assigns something outside of itself, or draws from an iterator or "
            "from random numbers that are not torch's. The backward runs the steps a second time: put "
            "what changes into the carry."
        )
    return out, bool(call.random)


def known(
    f: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    out: Any,
    states: world.States,
    ends: world.States,
    random: bool,
) -> Any:
    """``remat(f)(*args)``, which is known to be `out`: values of which `restart` has dropped the history.

    `states` and `ends` are those of the random streams before and after f ran, if it is random.
    """
    call = _Call(f, name, _OPTIONS, Arguments(name, args, {}, *_STATIC))
    inputs = call._take_inputs(call._captured)
    call._world = world.World()
    call._states = states
    call._ends = [hash(world._bytes(state)) for _, state in ends]
    call.random = random
    call._outputs = Outputs(name, out)
    call._closure.settle(name)
    call._closure.seal()
    outputs = dispatch.bind(call, inputs, known=call._outputs.take())
    return call._outputs.assemble(outputs, inputs)


def restart(tree: Any) -> Any:
    """The tensors of a tree without their history, requiring grad at the levels at which they did."""
    if isinstance(tree, Tensor):
        return _restart([tree])[0]
    leaves, structure = pytree.tree_flatten(tree)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    found = iter(_restart(tensors))
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
        return [x.detach().requires_grad_(x.requires_grad) for x in tensors]
    level = interpreter.level()
    if kind == "vmap":
        values_and_dims = [_torch._unwrap_batched(x, level) for x in tensors]
        with _torch.lower(interpreter, "vmap"):
            values = _restart([x for x, _ in values_and_dims])
        return [
            x if dim is None else _torch._add_batch_dim(x, dim, level)
            for x, (_, dim) in zip(values, values_and_dims, strict=True)
        ]
    with _torch.lower(interpreter, kind):
        values = _restart([_torch._unwrap_for_grad(x, level) for x in tensors])
    wrapped = [_torch._wrap_for_grad(x, level) for x in values]
    _torch.require_grad_at_this_level(wrapped, [i for i, x in enumerate(tensors) if x.requires_grad])
    return wrapped
