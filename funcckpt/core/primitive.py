"""The rules of remat as a `torch.autograd.Function`.

This is the definition: `dispatch` applies the same rules without building a Function class per level
and call. `GeneratedRemat` has its rule for vmap derived by torch, independently of ours, and is the
form that a compiler traces; it has no forward mode.

What this form cannot do:

* give primal and tangent in one evaluation: forward mode takes two for each level, of each nested
  remat too;
* record nothing in the last backward of a level, nor below a jvp level that stands inside of
  `torch.no_grad`;
* say that an output has no tangent: it gives zeros;
* `torch.func.functionalize`, for which torch has no rule;
* nest as deep: each level costs several times the frames of Python's stack;
* with the generated rule, to keep what a policy says below a vmap: it is computed again;
* with the generated rule, jvp, and a vmap over the cotangents of an operator that has no batching
  rule: f is recomputed under it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from ..errors import CheckpointError
from ..tape import recompute, recording
from . import net
from .program import (
    Jvp,
    Program,
    Recording,
    Tensors,
    Vjp,
    _Derived,
    bind_legacy,
    bind_vmap,
    is_differentiable,
    recorded,
    vmapped,
    zeros_for_none,
)


class _Level(NamedTuple):
    """An active level, and the inputs that it differentiates (grad) or that have a tangent there (jvp)."""

    number: int
    kind: str
    inputs: list[int]


# The function modes under which the Function that is being dispatched was called.
_handed_over: ContextVar[tuple[Any, ...]] = ContextVar("funcckpt_handed_over", default=())


class _Operand:
    """What the Functions are given beside tensors: a program, and what the levels need to know of it.

    Attributes
    ----------
    program : Program
        As it runs: at a grad or jvp level of its own for each of those that it meets before the next
        vmap, as f would find it without remat.
    has_say : tuple of bool
        For each vmap level, outermost first, whether the user called f inside of it, so that it
        decides about random numbers.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Tensor], has_say: tuple[bool, ...], skips: bool
    ) -> None:
        self.has_say = has_say
        # Function modes: functorch hands a Function to each, which is not active from there on.
        active = _torch.function_modes()
        self.modes = (*[mode for mode in _handed_over.get() if mode not in active], *active)
        # The program as it comes to a level, and as it is recorded there.
        self._met: dict[int, Program] = {}
        self._recorded: dict[int, Recording] = {}
        # The levels that come from the next vmap on.
        self.further: list[_Level] = []
        if not program.is_pullback:
            self.further = _levels(inputs, skips)
            while self.further and self.further[0].kind in ("grad", "jvp"):
                level = self.further.pop(0)
                self._met[level.number] = program
                program = _at_level(program, level)
                if isinstance(program, Recording) and level.inputs:
                    self._recorded[level.number] = program
        self.program = program
        # Which outputs depend on what requires grad in plain autograd, once that is known.
        self._active: Sequence[bool] | None = None
        self.is_empty = False

    def met_by(self, level: int) -> Program:
        return self._met.get(level, self.program)

    def run(self, inputs: Sequence[Tensor]) -> Tensors:
        """The values, where no level is left."""
        outputs, self._active = _run_plain(self.program, inputs)
        return outputs

    def constants(self, outputs: Tensors, level: int) -> list[Tensor]:
        """The outputs that do not depend on what a level differentiates, as far as that is known."""
        if self.is_empty:
            return list(outputs)
        active = self._active if level == 0 else None
        if level in self._recorded:
            active = self._recorded[level].active
        if active is None:
            active = tuple([is_differentiable(y) for y in outputs])
        return [y for y, is_active in zip(outputs, active, strict=True) if not is_active]


class _Dual(_Derived):
    """A program whose inputs have tangents as f runs for the first time: what f stores shows them."""

    def __init__(self, inner: Program, along: Sequence[int]) -> None:
        super().__init__(inner, inner.home)
        self.along = tuple(along)

    def run(self, *inputs: Tensor) -> Tensors:
        if self.source.random is not None:
            return self.inner.run(*inputs)
        jvp = Jvp(self.inner, self.home, len(inputs), self.along)
        outputs, _ = jvp.split(jvp.run(*inputs, *[inputs[i] for i in self.along]))
        return outputs


def _at_level(program: Program, level: _Level) -> Program:
    if level.kind == "jvp" and level.inputs:
        return _Dual(program, level.inputs)
    return recorded(program, level.inputs)


def _levels(inputs: Sequence[Tensor], skips: bool) -> list[_Level]:
    """The active levels, from the innermost, without the vmaps that torch skips for they batch no input."""
    interpreter = _torch.peek_interpreter_stack()
    if interpreter is None:
        return []
    number, kind = interpreter.level(), _torch.kind_of(interpreter)
    found: list[int] = []
    if kind == "vmap":
        values_and_dims = [_torch._unwrap_batched(x, number) for x in inputs]
        inputs = [value for value, _ in values_and_dims]
        skips_this = skips and all(dim is None for _, dim in values_and_dims)
    else:
        skips_this = False
        for i, x in enumerate(inputs):
            if _torch.maybe_get_level(x) == number and _is_looked_at(x, kind):
                found.append(i)
        inputs = [_torch._unwrap_for_grad(x, number) for x in inputs]
    with _torch.lower(interpreter, kind):
        further = _levels(inputs, skips)
    return further if skips_this else [_Level(number, kind, found), *further]


def _is_looked_at(x: Tensor, kind: str) -> bool:
    if kind == "jvp":
        return _torch.tangent_of(x) is not None
    return kind == "grad" and torch.is_grad_enabled() and x.requires_grad


def _run_plain(program: Program, inputs: Sequence[Tensor]) -> tuple[Tensors, Sequence[bool] | None]:
    # What plain autograd hands to the forward of a Function is dual if the input was.
    primals = _torch.without_forward_views([_torch.primal_of(x) for x in inputs])
    dual = [i for i, x in enumerate(inputs) if _torch.primal_of(x) is not x]
    if dual:
        differentiated = [i for i, x in enumerate(inputs) if x.requires_grad]
        program = _Dual(recorded(program, differentiated), dual)
    outputs, active = net.run_in_function(program, primals)
    if _torch.has_dual_level():
        outputs = tuple([_torch.with_memory_for_each(y) for y in outputs])
    # What does not depend on what requires grad may depend on what is dual.
    return tuple([_torch.fresh(y) for y in outputs]), None if dual else active


class _Rules:
    """What both spellings share: reverse mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        operand, *tensors = inputs
        # The vmaps on top are those that the rule of torch has entered again, to be recomputed under.
        layers = _torch.active_layers()
        entered = 0
        while entered < len(layers) and layers[-1 - entered].kind == "vmap":
            entered += 1
        level = len(layers) - entered
        ctx.unbatched = _unbatched(output, entered)
        outside = len(operand.has_say) - entered
        ctx.has_say = operand.has_say[:outside], operand.has_say[outside:]
        ctx.set_materialize_grads(False)
        ctx.program = operand.met_by(level)
        ctx.at_level = len(layers) > 0
        ctx.home = min(ctx.program.home, level - 1) if level else ctx.program.home
        # Where torch derives the rule for vmap, it would take what is kept for inputs that are not batched.
        ctx.kept, kept = (None, ()) if operand.has_say else recompute.kept_for(ctx.program)
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*operand.constants(output, level))

    @staticmethod
    def pull(spelling: Any, ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
        inputs, kept = recording.split(ctx.kept, ctx.saved_tensors)
        with recompute.handing_out(ctx.program.source, ctx.kept, kept):
            return _Rules.pull_with(spelling, ctx, inputs, cotangents)

    @staticmethod
    def pull_with(
        spelling: Any, ctx: Any, inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        inputs = [_torch.alive(x) for x in inputs]
        wrt = tuple([i for i in range(len(inputs)) if ctx.needs_input_grad[i + 1]])
        of = tuple([i for i, ct in enumerate(cotangents) if ct is not None])
        gradients: list[Tensor | None] = [None] * (len(inputs) + 1)
        if wrt and of:
            home: int = ctx.home
            has_say: tuple[bool, ...] = ()
            if spelling.generate_vmap_rule:
                # The levels that are entered again have other numbers: `has_say` knows them instead.
                home, has_say = _torch.current_level(), _has_say_now(ctx)
            vjp = Vjp(ctx.program, home, len(inputs), wrt, of, ctx.at_level)
            arguments = [*inputs, *_for_one_sample(ctx.unbatched, cotangents)]
            found = iter(apply(spelling, vjp, arguments, has_say))
            for i, connected in zip(wrt, vjp.connected, strict=True):
                if connected:
                    gradients[i + 1] = next(found)
        return tuple(gradients)


def _unbatched(outputs: Sequence[Tensor], entered: int) -> list[frozenset[int]]:
    """For each of the vmaps on top, from the innermost, the outputs that are not batched and others are."""
    found = []
    top = _torch.current_level()
    for level in range(top, top - entered, -1):
        values_and_dims = [_torch._unwrap_batched(y, level) for y in outputs]
        unbatched = frozenset([i for i, (_, dim) in enumerate(values_and_dims) if dim is None])
        found.append(unbatched if len(unbatched) < len(outputs) else frozenset())
        outputs = [value for value, _ in values_and_dims]
    return found


def _for_one_sample(unbatched: Sequence[frozenset[int]], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """The cotangents that there are; those of outputs without a batch dimension as the first sample's alone.

    The rule for vmap that torch generates sums gradients over the samples. It is wrong about those that
    belong to all samples together, where other outputs make them batched.
    """
    found = []
    for i, ct in enumerate(cotangents):
        if ct is None:
            continue
        for depth, indices in enumerate(unbatched):
            if i in indices:
                ct = ct * _torch.first_sample(_torch.current_level() - depth, ct)
        found.append(ct)
    return found


def _has_say_now(ctx: Any) -> tuple[bool, ...]:
    """Which of the levels at a backward were there at the call: those outside of what was recorded, and
    those that are entered again. A vmap over cotangents is between the two.
    """
    outside, entered = ctx.has_say
    later = _torch.number_of_vmaps() - len(outside) - len(entered)
    if later < 0:
        raise CheckpointError(
            f"remat({ctx.program.source.name}): its pullback is called outside of a vmap inside of which it "
            "was made. Call it there."
        )
    return (*outside, *[False] * later, *entered)


def apply(
    spelling: Any, program: Program, inputs: Sequence[Tensor], has_say: tuple[bool, ...] = ()
) -> Tensors:
    if len(has_say) == _torch.current_level() and any(
        _torch.is_legacy_batchedtensor(_torch.below_wrappers(x)) for x in inputs
    ):
        # The vmap of plain autograd is no level of functorch, and lies below all of them.
        with _torch.vmaps_again(has_say):
            return _apply_below_vmaps(spelling, program, inputs)
    return _dispatch(spelling, program, inputs, has_say)


def _apply_below_vmaps(spelling: Any, program: Program, inputs: Sequence[Tensor]) -> Tensors:
    interpreter = _torch.peek_interpreter_stack()
    if interpreter is None:
        return bind_legacy(program, inputs, functools.partial(_dispatch, spelling))
    return bind_vmap(interpreter, program, inputs, functools.partial(_apply_below_vmaps, spelling))


def _dispatch(
    spelling: Any, program: Program, inputs: Sequence[Tensor], has_say: tuple[bool, ...] = ()
) -> Tensors:
    if torch.is_inference_mode_enabled() and _torch.peek_interpreter_stack() is None:
        return net.run(program, inputs)  # nothing can be saved for a backward
    operand = _Operand(program, inputs, has_say, skips=not spelling.generate_vmap_rule)
    token = _handed_over.set(operand.modes)
    try:
        outputs: Tensors = spelling.apply(operand, *inputs)
    finally:
        _handed_over.reset(token)
    return () if operand.is_empty else outputs


class Remat(_Rules, torch.autograd.Function):
    """R with hand-written rules for vmap and jvp."""

    @staticmethod
    def forward(operand: _Operand, *inputs: Tensor) -> Tensors:
        with _torch.function_modes_again(operand.modes):
            return operand.run(inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return _Rules.pull(Remat, ctx, cotangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], operand: _Operand, *inputs: Tensor
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        level = _torch.current_level() + 1
        batched = vmapped(operand.program, level, in_dims[1:], info.batch_size, info.randomness)
        outputs = apply(Remat, batched, inputs)
        return outputs, batched.out_dims

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [_torch.alive(x) for x in ctx.saved_tensors]
        along = tuple([i for i, t in enumerate(tangents) if t is not None])
        program = ctx.program
        if _torch.peek_interpreter_stack() is None:
            # Plain reverse and forward mode are one level: f sees both at once.
            differentiated = [i for i, x in enumerate(inputs) if x.requires_grad]
            program = Recording(program, differentiated) if differentiated else program
        jvp = Jvp(program, ctx.home, len(inputs), along)
        outputs = apply(Remat, jvp, [*inputs, *[t for t in tangents if t is not None]])
        return tuple(zeros_for_none(*jvp.split(outputs)))


class GeneratedRemat(_Rules, torch.autograd.Function):
    """R with the rule for vmap that torch derives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operand: _Operand, *inputs: Tensor) -> Tensors:
        random = operand.program.source.random
        with _torch.function_modes_again(operand.modes), _torch.vmaps_again(operand.has_say):
            if _torch.peek_interpreter_stack() is None:
                outputs = operand.run(inputs)
            elif random is None or (random and not all(operand.has_say)):
                # By hand, where torch's rule does not do: in the first run the net has to lie below all
                # levels, and f must not draw random numbers at a level that it was not called in.
                outputs = _run_below_vmaps(operand.further, operand.program, inputs)
            else:
                outputs = operand.program.run(*inputs)
        operand.is_empty = not outputs
        if operand.is_empty:  # what the rule that torch generates does not take
            outputs = (torch.empty(0, dtype=torch.bool),)
        return tuple([_torch.fresh(y) for y in outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return _Rules.pull(GeneratedRemat, ctx, cotangents)


def _run_below_vmaps(levels: Sequence[_Level], program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Move the vmaps, which are active, into a program, and between them the levels that no longer are."""
    while levels and levels[0].kind != "vmap":
        program, levels = _at_level(program, levels[0]), levels[1:]
    interpreter = _torch.peek_interpreter_stack()
    if interpreter is None:
        return _run_plain(program, inputs)[0]
    return bind_vmap(interpreter, program, inputs, functools.partial(_run_below_vmaps, levels[1:]))


class _Padded(_Derived):
    """A program with inputs at the end that it does not use."""

    def __init__(self, inner: Program, arity: int) -> None:
        super().__init__(inner, inner.home)
        self.arity = arity

    def run(self, *inputs: Tensor) -> Tensors:
        return self.inner.run(*inputs[: self.arity])


def call(spelling: type[Any], program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """R[program](inputs) by one of the Functions above."""
    inputs = [_torch.alive(x) for x in inputs]
    if spelling.generate_vmap_rule:
        return apply(spelling, program, inputs, (True,) * _torch.number_of_vmaps())
    if padding := _torch.batched_nothing():
        # functorch skips the rule of a level at which no input is batched, and with it the level's
        # say in randomness. A batched input without elements makes it ask.
        program, inputs = _Padded(program, len(inputs)), [*inputs, *padding]
    return apply(spelling, program, inputs)
