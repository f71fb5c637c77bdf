"""`inner_grad`: a gradient that is differentiated in mixed mode.

A meta-gradient differentiates through inner gradient steps. Let the inner loss be L(θ, η), where η is all
else that it depends on. The pullback of its gradient at θ is v ↦ ∂/∂(θ, η) of ⟨∇L(θ, η), v⟩; for θ that is
Hv. Reverse mode over reverse mode computes it from all that the inner backward has saved. But ⟨∇L, v⟩ is also
the tangent of L along v, which needs no inner backward: forward mode computes the tangent, and one reverse
sweep its gradient.

Like `remat`, a gradient keeps only its inputs. It is made of the same programs.

Source: Kemaev et al., "Scalable Meta-Learning via Mixed-Mode Differentiation" (arXiv 2505.00793), who use
forward over reverse. Reverse over forward gives the same product (Pearlmutter, "Fast exact multiplication by
the Hessian", 1994), and its reverse sweep need not record itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import functorch, wrappers
from ..core import dispatch, net
from ..core.call import Call, Options
from ..core.primitive import Remat
from ..core.program import Derived, Jvp, Program, Tensors, Vjp, Vmap, is_differentiable, zeros_for_none
from ..errors import InputError, OptionError
from ..remat import name_and_check, remat
from .steps import in_words


def inner_grad(
    loss: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`torch.func.grad` for gradients that are differentiated again, as in the inner steps of meta-learning.

    The values and all derivatives are those of `torch.func.grad`, with respect to the arguments chosen by
    `argnums`, an int or a tuple of ints. But the derivative of the gradient is computed in mixed mode, from
    the arguments alone. That takes less memory than reverse over reverse, for about a fifth more operations.
    It saves nothing if `remat` is already around all parts of the loss.

    `loss` returns a real scalar. The contract of `remat` applies to it: it runs again in the backward, with
    the same random numbers. With `has_aux` it returns a scalar and a pytree of tensors, and the result is the
    pair of the gradients and that pytree; this form is `torch.func.grad` of a `remat`, without mixed mode.

    Raises
    ------
    InputError
        The loss is not a scalar, or an argument to differentiate has a tensor that is not floating-point.
    FuncckptError
        As for `remat`.

    Examples
    --------
    The gradient of the learning rate through ten steps of gradient descent, with few carries kept:

    >>> import torch
    >>> from funcckpt import inner_grad, scan
    >>> def after_training(rate):
    ...     loss = lambda w: ((w - 3) ** 2).sum()
    ...     step = lambda w, _: (w - rate * inner_grad(loss)(w), None)
    ...     w, _ = scan(step, torch.zeros(2), length=10)
    ...     return loss(w)
    >>> torch.func.grad(after_training)(torch.tensor(0.1))
    tensor(-10.3763)
    """
    name = name_and_check(loss, "inner_grad")
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(i, int) for i in numbers):
        raise OptionError(f"inner_grad({name}): argnums={argnums!r} is not an int or a tuple of ints.")
    if has_aux:
        return torch.func.grad(remat(loss), argnums, has_aux=True)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in numbers):
            raise InputError(f"inner_grad({name}): argnums={argnums}, but there are {len(args)} arguments.")
        kinds = {layer.kind for layer in functorch.active_layers()}
        if (
            not torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or "functionalize" in kinds  # it does not support autograd.Function
            or (functorch.is_tracing() and "grad" not in kinds)  # as `remat` does
        ):
            return torch.func.grad(loss, argnums)(*args, **kwargs)

        own = list(args)  # new tensors: the same tensor elsewhere is a constant
        for i in numbers:
            own[i] = pytree.tree_map_only(Tensor, lambda x: x.view_as(x), args[i])
            for path, x in pytree.tree_flatten_with_path(own[i])[0]:
                if not isinstance(x, Tensor) or not is_differentiable(x):
                    raise InputError(
                        f"inner_grad({name}): argument {i}{pytree.keystr(path)} is {in_words(x)}, which has "
                        "no gradient. Select other arguments with argnums."
                    )
        leaves, structure = pytree.tree_flatten(tuple([own[i] for i in numbers]))
        call = Call(_scalar(loss, name), name, Options(), tuple(own), kwargs, lifts_all=True)
        inputs = call.take_inputs()
        places = {id(x): i for i, x in enumerate(inputs)}
        wrt = tuple([places[id(x)] for x in leaves])
        program = _Gradient(call, call.call_level, len(inputs), wrt, with_zeros=True)
        # functorch applies the vmap rule only if an input is batched. But the loss may draw random numbers,
        # which differ from sample to sample anyway: so one input is batched, and empty.
        outputs = _Symmetric.apply(program, *inputs, *functorch.batched_nothing())
        call.seal()
        gradients = pytree.tree_unflatten(list(outputs), structure)
        return gradients if isinstance(argnums, tuple) else gradients[0]

    return gradient


def _scalar(loss: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    def scalar(*args: Any, **kwargs: Any) -> Tensor:
        out = loss(*args, **kwargs)
        if not isinstance(out, Tensor) or out.ndim > 0 or not out.is_floating_point():
            raise InputError(f"inner_grad({name}): the loss returned {in_words(out)}, not a real scalar.")
        return out.clone()  # a new tensor, even if the loss returns an input

    return scalar


class _Gradient(Vjp):
    """(inputs) -> gradients of the only output of a program, a scalar, with respect to the inputs `wrt`.

    Only the inputs on which the output depends have a gradient; `with_zeros`, all have. Inputs after the
    first `arity` are not used.
    """

    # Which gradients require grad in plain autograd, after the first run.
    active: Sequence[bool] | None = None

    def __init__(
        self, inner: Program, call_level: int, arity: int, wrt: tuple[int, ...], with_zeros: bool = False
    ) -> None:
        super().__init__(inner, call_level, arity, wrt, (0,), at_level=False)
        self.with_zeros = with_zeros

    def run(self, *inputs: Tensor) -> Tensors:
        primals = list(inputs[: self.arity])
        nested = torch.is_grad_enabled()
        # If no level is active and nothing differentiates this, plain autograd records it, which is cheaper.
        plain = functorch.peek_interpreter_stack() is None and not wrappers.in_dual_level()
        outputs, leaves = self.record(primals, plain and not nested)
        primals.clear()
        del outputs[1:]
        one = torch.ones_like(outputs[0])
        gradients = self.pull(outputs, leaves, nested, one)
        if not self.with_zeros:
            return gradients
        found, wrt = iter(gradients), zip(self.wrt, self.connected, strict=True)
        return tuple([next(found) if connected else torch.zeros_like(inputs[i]) for i, connected in wrt])

    def pullback(self, call_level: int, wrt: tuple[int, ...], of: tuple[int, ...]) -> Program:
        """(inputs, cotangents of the gradients `of`) -> gradients for the inputs `wrt`."""
        along = tuple([self.wrt[i] for i in of])
        directional = _Directional(self.inner, call_level, self.arity, along)
        return _Gradient(directional, call_level, self.arity + len(of), wrt)


class _Directional(Derived):
    """(inputs, tangents) -> the tangent of the first output, along the inputs `along`."""

    def __init__(self, inner: Program, call_level: int, arity: int, along: tuple[int, ...]) -> None:
        super().__init__(inner, call_level)
        self.arity = arity
        self.along = along

    def run(self, *inputs: Tensor) -> Tensors:
        jvp = Jvp(self.inner, self.call_level, self.arity, self.along)
        arguments = list(inputs)
        for i in self.along:  # A shared input was expanded to all samples; now it gets tangents.
            arguments[i] = wrappers.with_memory_for_each(inputs[i])
        primals, tangents = jvp.split(jvp.run(*arguments))
        return (torch.zeros_like(primals[0]) if tangents[0] is None else tangents[0],)


class _Sum(Vmap):
    """The sum of the losses of all samples. If no input is shared, its gradients are those of each sample."""

    def run(self, *inputs: Tensor) -> Tensors:
        (losses,) = super().run(*inputs)
        return (losses if self.out_dims == (None,) else losses.sum(),)


class _Symmetric(torch.autograd.Function):
    """A gradient as an autograd.Function, with a rule for each transform."""

    @staticmethod
    def forward(program: Any, *inputs: Tensor) -> Tensors:
        outputs, program.active = net.run_in_function(program, wrappers.without_forward_views(inputs))
        return tuple([wrappers.detached(y) for y in outputs])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        program, *tensors = inputs
        level = functorch.current_level()
        ctx.set_materialize_grads(False)
        ctx.program = program
        ctx.call_level = min(program.call_level, level - 1) if level else program.call_level
        for i in program.source.unused:
            tensors[i] = wrappers.detached(tensors[i])
        if (
            level == 0
            and program.source.unused
            and program.active is not None
            and not wrappers.in_dual_level()
        ):
            active = zip(output, program.active, strict=True)
            ctx.mark_non_differentiable(*[y for y, is_active in active if not is_active])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        inputs, program = ctx.saved_tensors, ctx.program
        gradients: list[Tensor | None] = [None] * (len(inputs) + 1)
        wrt = tuple([i for i in range(program.arity) if ctx.needs_input_grad[i + 1]])
        of = tuple([i for i, ct in enumerate(cotangents) if ct is not None])
        if not wrt or not of:
            return tuple(gradients)
        pullback = program.pullback(ctx.call_level, wrt, of)
        arguments = [*inputs[: program.arity], *[ct for ct in cotangents if ct is not None]]
        found = iter(dispatch.bind(pullback, arguments))
        for i, connected in zip(wrt, pullback.connected, strict=True):
            if connected:
                gradients[i + 1] = next(found)
        return tuple(gradients)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], program: _Gradient, *inputs: Tensor
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        level = functorch.current_level() + 1
        # A level that was entered after the user called the loss does not decide its randomness.
        randomness = "same" if level > program.call_level else info.randomness
        size, arity, dim = info.batch_size, program.arity, None
        inputs, in_dims = inputs[:arity], in_dims[1 : arity + 1]
        if randomness == "different" or any([dim is not None for dim in in_dims]):
            # Each sample gets its own copy of a shared input.
            dim = 0
            own = zip(inputs, in_dims, strict=True)
            inputs = tuple([x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in own])
        call_level = min(program.call_level, level - 1)
        losses = _Sum(program.inner, call_level, (dim,) * arity, size, randomness)
        outputs = _Symmetric.apply(
            _Gradient(losses, call_level, arity, program.wrt, program.with_zeros), *inputs
        )
        return outputs, (dim,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        along = tuple([i for i, t in enumerate(tangents) if t is not None])
        jvp = Jvp(ctx.program, ctx.call_level, len(inputs), along)
        outputs = Remat.apply(jvp.run, *inputs, *[t for t in tangents if t is not None])
        return tuple(zeros_for_none(*jvp.split(outputs)))
