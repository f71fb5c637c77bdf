"""The rules of remat, applied directly to functorch's interpreters.

`bind(program, inputs)` looks at the innermost active level, applies the rule for its kind, leaves
that level and starts again, until none is left; there the program runs. This is what functorch
does with an `autograd.Function` (`primitive` has remat as one), without a class built for each
level and call, and with what that route cannot express:

* forward mode gives primal and tangent in one evaluation;
* `torch.func.functionalize` has a rule;
* under randomness="different" the rule for vmap is reached although no input is batched;
* the last backward of `torch.func.grad` records nothing at its own level.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import autograd, functorch, wrappers
from ..tape import recompute, recording
from . import net
from .program import (
    Functional,
    Jvp,
    Program,
    Recording,
    Tensors,
    Vmap,
    WithCaptured,
    is_differentiable,
    recorded,
    zeros_for_none,
)
from .pullback import CotangentBatch, Vjp


def bind(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """R[program](inputs), under whatever transforms are active."""
    # Operators unwrap what belongs to a level that is gone; a rule has to do so itself.
    if any(map(wrappers.is_dead_tensor_wrapper, inputs)):
        inputs = wrappers.all_alive(inputs)
    interpreter = functorch.peek_interpreter_stack()
    if interpreter is not None:
        return _RULES[interpreter.key().value](interpreter, program, inputs)
    # No functorch level is left: plain reverse and forward mode, or just the values.
    if wrappers.in_dual_level():
        primals, tangents, along = _split_duals(inputs)
        if along:
            return _bind_dual(program, inputs, primals, tangents, along)
    if program.is_pullback and any(map(wrappers.is_legacy_batchedtensor, inputs)):
        return _bind_legacy(program, inputs)
    return _bind_values(program, inputs)


def _bind_grad(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    inputs = [*map(functorch.CGradInterpreterPtr(interpreter).lift, inputs)]
    differentiated: Sequence[int] = ()
    if torch.is_grad_enabled():
        differentiated = (*compress(range(len(inputs)), map(wrappers.require_grad, inputs)),)
    recording = recorded(program, differentiated)
    unwrapped = wrappers.unwrapped_for_grad(inputs, level)
    outputs = functorch.below(interpreter, bind, recording, unwrapped)
    outputs = tuple(wrappers.wrapped_for_grad(outputs, level))
    if not differentiated:
        return outputs
    if isinstance(recording, Recording):
        active = [*recording.active]
        for i in recording.unused:
            inputs[i] = wrappers.fresh(inputs[i])
    else:
        active = [*map(is_differentiable, outputs)]
    return attach(program, outputs, active, inputs, level)


def _bind_jvp(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    inputs = [*map(functorch.CJvpInterpreterPtr(interpreter).lift, inputs)]
    along: tuple[int, ...] = ()
    if torch._C._is_fwd_grad_enabled():
        primals, tangents, along = _split_duals(inputs)
    else:
        primals, tangents = inputs, []
    unwrapped = [wrappers._unwrap_for_grad(x, level) for x in (*primals, *tangents)]
    if not along:
        outputs = functorch.below(interpreter, bind, recorded(program, ()), unwrapped)
        return tuple(wrappers.wrapped_for_grad(outputs, level))
    jvp = Jvp(program, min(program.home, level - 1), len(inputs), along)
    outputs = functorch.below(interpreter, bind, jvp, unwrapped)
    return _make_duals(jvp, tuple(wrappers.wrapped_for_grad(outputs, level)))


def _vmapped(
    program: Program,
    level: int,
    in_dims: tuple[int | None, ...],
    batch_size: int,
    randomness: str,
) -> Vmap | Vjp:
    """vmap of a program, at a level; the pullback alone where only cotangents are batched."""
    home = min(program.home, level - 1)
    # A level that was not there when the user called f has no say in its randomness.
    if level > program.home:
        randomness = "same"
    if isinstance(program, Vjp) and in_dims[: program.arity].count(None) == program.arity:
        if randomness == "same" or program.source.random is False:
            cotangents = CotangentBatch(in_dims[program.arity :], batch_size, randomness)
            return program.batched(home, cotangents)
    return Vmap(program, home, in_dims, batch_size, randomness)


def _bind_vmap(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    unwrapped, in_dims = functorch.unbatched(inputs, level)
    batch_size, randomness = functorch.options_of_vmap(interpreter)
    if in_dims.count(None) == len(in_dims) and _may_skip_vmap(program, level, randomness):
        return functorch.below(interpreter, bind, program, unwrapped)
    batched = _vmapped(program, level, in_dims, batch_size, randomness)
    outputs = functorch.below(interpreter, bind, batched, unwrapped)
    return functorch.batched(outputs, batched.out_dims, level)


def _bind_legacy(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """The same at the vmap of plain autograd (`is_grads_batched`), which has batched some input."""
    unwrapped_and_dims = [wrappers.unwrap_legacy(x) for x in inputs]
    in_dims = tuple([dim for _, dim in unwrapped_and_dims])
    unwrapped = [x for x, _ in unwrapped_and_dims]
    size = next(x.shape[dim] for x, dim in unwrapped_and_dims if dim is not None)
    batched = _vmapped(program, program.home + 1, in_dims, size, "same")
    with functorch.without_vmap_mode():
        outputs = _bind_values(batched, unwrapped)
    return tuple([wrappers.wrap_legacy(y, dim) for y, dim in zip(outputs, batched.out_dims, strict=True)])


def _may_skip_vmap(program: Program, level: int, randomness: str) -> bool:
    """Whether a level at which no input is batched makes no difference to a program.

    Under "different" each sample draws its own numbers even from unbatched inputs, and under "error"
    f must be allowed to fail.
    """
    return randomness == "same" or level > program.home or program.source.random is False


def _bind_functionalize(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    add_back_views = functorch.adds_back_views(interpreter)
    functional = Functional(program, min(program.home, level - 1), add_back_views)
    unwrapped = functorch.eager_transforms._unwrap_all_tensors_from_functional(
        tuple(inputs), reapply_views=add_back_views
    )
    outputs = functorch.below(interpreter, bind, functional, unwrapped)
    wrapped: Tensors = functorch.eager_transforms._wrap_all_tensors_to_functional(outputs, level=level)
    return wrapped


_RULES = {
    functorch.GRAD: _bind_grad,
    functorch.JVP: _bind_jvp,
    functorch.VMAP: _bind_vmap,
    functorch.FUNCTIONALIZE: _bind_functionalize,
}


def _bind_values(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    program, outputs, active, inputs = _run(program, inputs)
    if not any(active):
        return outputs
    attached: Tensors = _Node.apply(program, 0, outputs, active, *inputs)  # type: ignore[attr-defined]
    return attached


def _bind_dual(
    program: Program,
    inputs: Sequence[Tensor],
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor],
    along: tuple[int, ...],
) -> Tensors:
    """Plain reverse and forward mode are one level: f sees both at once."""
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    differentiated = [i for i, x in enumerate(inputs) if x.requires_grad and records]
    inner = recorded(program, differentiated) if differentiated else program
    jvp = Jvp(inner, program.home, len(inputs), along)
    arguments = [*primals, *tangents]
    if any(map(wrappers.is_legacy_batchedtensor, arguments)):
        outputs, out_tangents = jvp.split(_bind_legacy(jvp, arguments))
        captured: Sequence[Tensor] = ()
    else:
        of, results, active, found = _run(jvp, arguments)
        captured = found[len(arguments) :]
        if any(active):
            results = attach(of, results, active, found)
        outputs, out_tangents = jvp.split(results)
    if not any(map(wrappers.require_grad, (*inputs, *captured))) or not records:
        return _make_duals_plain(outputs, out_tangents)
    if captured:
        program = WithCaptured(program, captured)
    # The graph of the primal has to lead back to the dual inputs, so that a backward through it is
    # differentiated in forward mode too.
    outputs = tuple([wrappers.with_memory_for_each(y) for y in outputs])
    detached = [wrappers.fresh(y) for y in outputs]
    dual: Tensors = _AtDualLevel.apply(program, detached, out_tangents, *inputs, *captured)
    return dual


def _run(
    program: Program, inputs: Sequence[Tensor]
) -> tuple[Program, Tensors, Sequence[bool], Sequence[Tensor]]:
    """The values of a program; of which program and inputs, and which of them plain autograd looks at."""
    source = program.source
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # A recording of make_fx knows no graph of plain autograd: what requires grad is constant in it.
    records = records and (source.is_compiled or not functorch.is_tracing())
    values = inputs
    if wrappers.has_dual_level():
        values = wrappers.without_forward_views(inputs, record=records)
    active: Sequence[bool]
    if (layers := source.take_layers()) is not None:
        outputs, active, captured, reached = net.run_first(program, source, values, layers)
        source.seen = captured
        if captured:
            if len(inputs) > source.arity:
                arity = source.arity
                inputs = [x if i < arity or i in reached else wrappers.fresh(x) for i, x in enumerate(inputs)]
            if layers:
                source.captured = captured
    else:
        outputs, captured = net.run(program, values), source.captured
        active = ()
        if records and any(map(wrappers.require_grad, (*inputs, *captured))):
            active = [*map(is_differentiable, outputs)]
    if not records:
        active = ()
    elif captured and any(active):
        program, inputs = WithCaptured(program, captured), [*inputs, *captured]
    return program, outputs, active, inputs


def attach(
    program: Program, outputs: Tensors, active: Sequence[bool], inputs: Sequence[Tensor], level: int = 0
) -> Tensors:
    """Give values the history of R[program](inputs), in plain autograd or at the innermost grad level.

    `active` says for each whether it depends on an input that requires grad.
    """
    if level:
        functorch.set_single_level_autograd_function_allowed(True)
    try:
        attached: Tensors = _Node.apply(program, level, outputs, active, *inputs)  # type: ignore[attr-defined]
    finally:
        if level:
            functorch.set_single_level_autograd_function_allowed(False)
    return attached


def _interpreter_of_last(level: int, thread: int, x: Tensor) -> Any:
    """The interpreter of a level, if the backward that is running is the last that this will see.

    Nobody can differentiate at the level any more: what it would record is dead weight.
    """
    interpreter = functorch.peek_interpreter_stack()
    if (
        interpreter is not None
        and interpreter.level() == level
        and not wrappers.is_dead_tensor_wrapper(x)
        and autograd.is_final_backward(level, thread)
    ):
        return interpreter
    return None


class _Backward:
    """What the autograd nodes of remat share: they save their inputs, and what a policy keeps."""

    @staticmethod
    def keep(
        ctx: Any,
        program: Program,
        inputs: Sequence[Tensor],
        outputs: Tensors,
        home: int,
        level: int,
        active: Sequence[bool] | None = None,
    ) -> Tensors:
        if active is None:
            active = [is_differentiable(y) for y in outputs]
        ctx.set_materialize_grads(False)
        ctx.program, ctx.home, ctx.level = program, home, level
        if level:
            ctx.thread = threading.get_ident()
        ctx.kept, tensors = recompute.kept_for(program)
        ctx.save_for_backward(*inputs, *tensors)
        if not all(active):
            ctx.mark_non_differentiable(
                *[y for y, is_active in zip(outputs, active, strict=True) if not is_active]
            )
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            try:
                inputs = ctx.saved_tensors
            except RuntimeError as error:
                raise ctx.program.source.changed_since(error) from None
            return _Backward.pull(ctx, inputs, cotangents)
        inputs, kept = recording.split(ctx.kept, ctx.saved_tensors)
        with recompute.handing_out(ctx.program.source, ctx.kept, kept):
            return _Backward.pull(ctx, inputs, cotangents)

    @staticmethod
    def pull(
        ctx: Any, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        program, level, needed = ctx.program, ctx.level, ctx.needs_input_grad
        primals, arity = [*inputs], len(inputs)
        del inputs
        leading = len(needed) - arity
        last = _interpreter_of_last(level, ctx.thread, primals[0]) if level else None
        wrt = (*compress(range(arity), needed[leading:]),)
        given = (*map(operator.is_not, cotangents, repeat(None)),)
        of = (*compress(range(len(given)), given),)
        if not wrt or not of:
            return (None,) * len(needed)
        vjp = Vjp(program, ctx.home, arity, wrt, of, level > 0)
        arguments: list[Any] = [*primals, *compress(cotangents, given)]
        del primals, cotangents
        if last is not None:
            arguments = wrappers.unwrapped_for_grad(arguments, level)
            results = functorch.below(last, bind, vjp, arguments)
            results = tuple(wrappers.wrapped_for_grad(results, level))
        else:
            results = bind(vjp, arguments)
        if len(results) == arity:
            return (*(None,) * leading, *results)
        gradients: list[Tensor | None] = [None] * len(needed)
        remaining = iter(results)
        for i, connected in zip(wrt, vjp.connected, strict=True):
            if connected:
                gradients[leading + i] = next(remaining)
        return tuple(gradients)


@autograd.without_detour
class _Node(_Backward, functorch.SingleLevelFunction):
    """R in plain autograd or at one grad level: values that were computed before get a history."""

    @staticmethod
    def forward(
        ctx: Any, program: Program, level: int, outputs: Tensors, active: Sequence[bool], *inputs: Tensor
    ) -> Tensors:
        home = min(program.home, level - 1) if level else program.home
        return _Backward.keep(ctx, program, inputs, outputs, home, level, active)


class _AtDualLevel(_Backward, torch.autograd.Function):
    """R at plain autograd and plain forward mode together."""

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        outputs: list[Tensor],
        tangents: list[Tensor | None],
        *inputs: Tensor,
    ) -> Tensors:
        ctx.tangents = zeros_for_none(outputs, tangents)
        return _Backward.keep(ctx, program, inputs, tuple(outputs), program.home, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        out_tangents = ctx.tangents
        del ctx.tangents
        return tuple(out_tangents)


def _split_duals(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    primals = list(inputs)
    tangents, along = [], []
    for i, x in enumerate(inputs):
        tangent = wrappers.tangent_of(x)
        if tangent is not None:
            primals[i] = wrappers.unpack_dual(x)[0]
            tangents.append(tangent)
            along.append(i)
    return primals, tangents, tuple(along)


def _make_duals(jvp: Jvp, outputs: Tensors) -> Tensors:
    return _make_duals_plain(*jvp.split(outputs))


def _make_duals_plain(primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensors:
    return tuple(
        [
            y if t is None else forward_ad.make_dual(y, t, level=0)
            for y, t in zip(primals, tangents, strict=True)
        ]
    )
