"""The rules of remat, applied directly to functorch's interpreters.

`bind(program, inputs)` looks at the innermost active level, applies the rule for its kind, leaves that level
and starts again, until none is left. Then the program runs. functorch does the same with an
`autograd.Function` (`primitive` is remat in this form), but builds a class for each level and call, and
cannot express all that is done here.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .._torch import autograd, dynamo, functorch, wrappers
from ..errors import CheckpointError, InputError, MutationError
from ..tape import recompute
from . import net
from .program import (
    Functional,
    Jvp,
    Program,
    Recording,
    Vjp,
    WithCaptured,
    here,
    is_differentiable,
    recorded,
    split_duals,
)
from .tensors import Tensors


def bind(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """R[program](inputs), under whatever transforms are active."""
    # Operators unwrap tensors of a level that has closed; a rule must do so itself.
    if any(map(wrappers.is_dead_tensor_wrapper, inputs)):
        inputs = [*map(wrappers.alive, inputs)]
    interpreter = functorch.peek_interpreter_stack()
    if interpreter is not None:
        return _RULES[interpreter.key().value](interpreter, program, inputs)
    # No functorch level is left: plain autograd, or values only.
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
    active: Sequence[bool] = (*map(is_differentiable, outputs),)
    unused = {*program.source.unused}
    if isinstance(recording, Recording):
        active = recording.active
        unused.update(recording.unused)
    # The inputs that no output uses. (Numbers beyond them are tangents of inner levels.)
    if unused and (unused := {i for i in unused if i < len(inputs)}):
        # Tangents are kept: torch would make zeros of missing ones, and f may write to them in place.
        keeps_tangents = "jvp" in functorch.active_kinds()
        for i in unused:
            x = unwrapped[i]
            if keeps_tangents and wrappers.is_functorch_wrapped_tensor(x):
                inputs[i] = wrappers._wrap_for_grad(x, level)
            else:
                inputs[i] = wrappers.detached(inputs[i])
    return attach(program, outputs, active, inputs, level=level)


def _bind_jvp(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    inputs = [*map(functorch.CJvpInterpreterPtr(interpreter).lift, inputs)]
    looks = torch._C._is_fwd_grad_enabled()
    primals, tangents, along = split_duals(inputs) if looks else (inputs, [], ())
    unwrapped = wrappers.unwrapped_for_grad((*primals, *tangents), level)
    if not along:
        outputs = functorch.below(interpreter, bind, recorded(program, ()), unwrapped)
        return tuple(wrappers.wrapped_for_grad(outputs, level))
    jvp = Jvp(program, min(program.call_level, level - 1), len(inputs), along)
    outputs = functorch.below(interpreter, bind, jvp, unwrapped)
    duals = zip(*jvp.split(tuple(wrappers.wrapped_for_grad(outputs, level))), strict=True)
    return tuple([y if t is None else forward_ad.make_dual(y, t, level=0) for y, t in duals])


def _bind_vmap(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    values, in_dims = functorch.unbatched(inputs, level)
    batch_size, randomness = functorch.options_of_vmap(interpreter)
    # Under "different" each sample draws its own numbers, even if no input is batched. Under "error", f must
    # be able to raise.
    draws = randomness != "same" and level <= program.call_level and program.source.random is not False
    if not draws and in_dims.count(None) == len(in_dims):
        return functorch.below(interpreter, bind, program, values)
    # A level that was entered after the user called f does not decide its randomness.
    if level > program.call_level:
        randomness = "same"
    call_level = min(program.call_level, level - 1)
    batched = program.vmapped(call_level, in_dims, batch_size, randomness)
    outputs = functorch.below(interpreter, bind, batched, values)
    return functorch.batched(outputs, batched.out_dims, level)


def _bind_functionalize(interpreter: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    level = interpreter.level()
    views = functorch.CFunctionalizeInterpreterPtr(interpreter).functionalizeAddBackViews()
    functional = Functional(program, min(program.call_level, level - 1), views)
    unwrap = functorch.eager_transforms._unwrap_all_tensors_from_functional
    unwrapped = unwrap(tuple(inputs), reapply_views=views)
    outputs = functorch.below(interpreter, bind, functional, unwrapped)
    return (*functorch.eager_transforms._wrap_all_tensors_to_functional(outputs, level=level),)


_RULES = {
    functorch.GRAD: _bind_grad,
    functorch.JVP: _bind_jvp,
    functorch.VMAP: _bind_vmap,
    functorch.FUNCTIONALIZE: _bind_functionalize,
}


def _bind_values(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """The rule for plain reverse mode."""
    # Plain forward mode looks into a backward, as it does into f. So does the vmap of `is_grads_batched`.
    looks_inside = program.is_pullback and (
        wrappers.in_dual_level() or any(map(wrappers.is_legacy_batchedtensor, inputs))
    )
    source = program.source
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    layers, source.layers = source.layers, None
    before, here.left = here.left, ()
    try:
        if looks_inside:
            with functorch.without_vmap_mode():  # which is about random numbers of f
                return net.run(program, inputs, records)
        values = wrappers.without_forward_views(inputs, records)
        if layers is not None:
            outputs, active, captured = net.run_first(program, source, values, layers)
        else:
            outputs, active, captured = net.run(program, values), [], source.captured
    finally:
        left: Any = here.left
        here.left = before
        for free in left:
            free()
    if unused := {*source.unused}:
        inputs = [wrappers.detached(x) if i in unused else x for i, x in enumerate(inputs)]
    if layers is not None:
        source.captured = captured
    elif records and any(map(wrappers.require_grad, (*inputs, *captured))):
        active = [*map(is_differentiable, outputs)]
    if not records or not any(active):
        return outputs
    return attach(program, outputs, active, inputs, captured)


def attach(
    program: Program,
    outputs: Tensors,
    active: Sequence[bool],
    inputs: Sequence[Tensor],
    captured: Sequence[Tensor] = (),
    level: int = 0,
) -> Tensors:
    """Give values the history of R[program](inputs), in plain autograd or at the innermost grad level.

    `active` says for each value whether it depends on an input that requires grad.
    """
    if captured:
        program = WithCaptured(program, program.call_level, [*map(id, captured)])
        inputs = [*inputs, *captured]
    try:
        functorch.set_single_level_autograd_function_allowed(True)
        return (*_Node.apply(program, level, outputs, active, *inputs),)  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "NestedTensorImpl" not in str(error):
            raise
        raise InputError(
            f"remat({program.source.name}): no torch.autograd.Function takes a nested tensor of strided "
            'layout. Use layout=torch.jagged, or checkpoint(..., determinism_check="none").'
        ) from error
    finally:
        functorch.set_single_level_autograd_function_allowed(False)


class Owner(Tensor):
    """An empty tensor that owns a program: the backward that frees what the graph has saved frees both.

    f may refer to what was computed from its result, such as an object that stores its loss. If the node held
    the program, that would be a cycle through the graph, where the collector of Python does not look.
    """

    program: Program

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """For tools that look at what a graph saves: it is empty."""
        args, kwargs = pytree.tree_map_only(Owner, lambda _: torch.empty(0), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Node(functorch.SingleLevelFunction):
    """R in plain autograd or at one grad level: gives a history to values that are computed already.

    It saves its inputs, and what a policy keeps.
    """

    @staticmethod
    def forward(
        ctx: Any, program: Program, level: int, outputs: Tensors, active: Any, *inputs: Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        source = program.source
        ctx.called, ctx.level = source.name, level
        ctx.call_level = program.call_level
        if level:
            ctx.call_level, ctx.thread = min(program.call_level, level - 1), threading.get_ident()
        ctx.kept, tensors = recompute.kept_for(program, source)
        ctx.program = program
        # At a level no backward frees anything. And hooks would get the owner, and give back something else.
        if not level and autograd.top_saved_tensors_hooks() is None:
            owner = functorch.make_wrapper(Owner, (0,))
            owner.program, ctx.program = program, None
            tensors = *tensors, owner
        ctx.save_for_backward(*inputs, *tensors)
        if not all(active):
            ctx.mark_non_differentiable(*compress(outputs, map(operator.not_, active)))
        return outputs

    @staticmethod
    @dynamo.hidden
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        level, needed = ctx.level, ctx.needs_input_grad
        try:
            arguments: Any = [*ctx.saved_tensors]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise MutationError(
                f"an input of remat({ctx.called}), a tensor that it captured, an output that its policy "
                "keeps, or a gradient that was given to its backward was changed in place before this "
                f"backward. Change it afterwards, or use a copy of it (x.clone()). {error}"
            ) from None
        if (program := ctx.program) is None:
            owner = arguments.pop()
            if not isinstance(owner, Owner):
                raise CheckpointError(
                    f"remat({ctx.called}): a hook on its node has exchanged the last saved tensor, which is "
                    "empty. Register hooks on the others alone."
                )
            program = owner.program
        handing_out: Any = _NOTHING
        if ctx.kept is not None:
            kept = slice(-len(ctx.kept.places), None)
            handing_out = recompute.handing_out(program.source, ctx.kept, arguments[kept])
            del arguments[kept]
        arity = len(arguments)
        leading = len(needed) - arity
        # Nobody can differentiate the last backward of a level at that level: a recording is dead weight.
        last = functorch.peek_interpreter_stack() if level else None
        if last is not None and (
            last.level() != level
            or wrappers.is_dead_tensor_wrapper(arguments[0])
            or not autograd.is_final_backward(level, ctx.thread)
        ):
            last = None
        flags = needed[leading:]
        tracked = wrt = (*compress(range(arity), flags),)
        if not level and len(tracked) > 1:
            wrt = (*compress(range(arity), autograd.used_gradients(ctx.next_functions, flags)),)
        given = (*map(operator.is_not, cotangents, repeat(None)),)
        of = (*compress(range(len(given)), given),)
        if not wrt or not of:
            return (None,) * len(needed)
        vjp = Vjp(program, ctx.call_level, arity, wrt, of, level > 0, tracked)
        arguments += compress(cotangents, given)
        del cotangents
        # Only what is differentiated again depends on them: other threads may use the same leaves.
        records = torch.is_grad_enabled() and not level
        is_changed = records and any(map(operator.ne, map(wrappers.require_grad, arguments), flags))
        with handing_out, _as_frozen_before(arguments, flags) if is_changed else _NOTHING:
            if last is not None:
                arguments = wrappers.unwrapped_for_grad(arguments, level)
                results = functorch.below(last, bind, vjp, arguments)
                results = tuple(wrappers.wrapped_for_grad(results, level))
            else:
                results = bind(vjp, arguments)
        gradients = dict(zip(compress(wrt, vjp.connected), results, strict=True))
        return *(None,) * leading, *map(gradients.get, range(arity))


_NOTHING = nullcontext()


def program_of(node: Any) -> Program | None:
    """The program of a graph node, if it has one, and no backward has freed it."""
    if not autograd.is_node_of(node, _Node):
        return None
    return node.program or next((x.data.program for x in autograd.saved_by(node)[-1:]), None)


@contextmanager
def _as_frozen_before(inputs: Sequence[Tensor], flags: Sequence[bool]) -> Iterator[None]:
    """A block in which leaves require grad as in the forward: a model may be frozen for it alone."""
    pairs = zip(inputs, flags, strict=False)
    changed = [(x, flag) for x, flag in pairs if x.is_leaf and x.requires_grad != flag]
    try:
        for x, flag in changed:
            x.requires_grad_(flag)
        yield
    finally:
        for x, flag in changed:
            x.requires_grad_(not flag)
