"""`inner_grad`: the gradient of a step whose result is differentiated again, as in meta-learning.

A meta-gradient differentiates through inner gradient steps. Reverse mode then keeps what each inner forward
and each inner backward has computed. `inner_grad` keeps the inputs of a step alone. It is a program like
those of `core.program`: R of (inputs) -> gradients. So its pullback runs both again, and every transform of
it is one of R. (`remat(torch.func.grad(loss))` keeps as little, but enters functorch once more, which takes
longer in small steps.)

The pullback is reverse mode over reverse mode. Forward mode in place of the inner backward (mixed mode:
Kemaev et al., "Scalable Meta-Learning via Mixed-Mode Differentiation", arXiv 2505.00793) took as many bytes
here, at most 8 per cent fewer operators, and more time; and of many operators torch has a wrong mixed
derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import functorch, wrappers
from ..closures import Rebuilt
from ..core.call import Call, Options
from ..core.program import Program, Tensors, Vjp, Vmap, is_differentiable
from ..core.tensors import with_paths
from ..errors import InputError, OptionError
from ..remat import name_and_check, remat
from .steps import in_words


def inner_grad(
    loss: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`torch.func.grad` for gradients that are differentiated again, as in the inner steps of meta-learning.

    The values and all derivatives are those of `torch.func.grad`, with respect to the arguments chosen by
    `argnums`, an int or a tuple of ints. But for a derivative of the gradient only the arguments and what the
    loss captures are kept: the loss and its backward run again. That takes a third more operations, and saves
    less if `remat` is already around the parts of the loss.

    `loss` returns a real scalar. The contract of `remat` applies to it: it runs again in the backward, with
    the same random numbers. With `has_aux` it returns a scalar and a pytree of tensors, and the result is the
    pair of the gradients and that pytree; this form is `torch.func.grad` of a `remat`.

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
    if not all(isinstance(i, Integral) for i in numbers):
        raise OptionError(f"inner_grad({name}): argnums={argnums!r} is not an int or a tuple of ints.")
    if has_aux:
        return torch.func.grad(remat(loss), argnums, has_aux=True)

    scalar = functools.partial(_scalar, name, loss, ())

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in numbers):
            raise InputError(f"inner_grad({name}): argnums={argnums}, but there are {len(args)} arguments.")
        is_recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not is_recorded or wrappers.in_dual_level() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return torch.func.grad(scalar, argnums)(*args, **kwargs)

        chosen = {i % len(args): args[i] for i in numbers}
        leaves, structure = pytree.tree_flatten(chosen)
        for j, x in enumerate(leaves):
            if not isinstance(x, Tensor) or not is_differentiable(x):
                path = pytree.keystr(with_paths(chosen)[j][0])
                raise InputError(
                    f"inner_grad({name}): argument {path[1:].replace(']', '', 1)} is {in_words(x)}, which "
                    "has no gradient. Select other arguments with argnums, or let the loss close over it."
                )
        call = _Loss(loss, name, Options(), args, kwargs)
        is_given_twice = len(call._arguments._numbers) > call.arity
        if is_given_twice or not call.found.tensors.keys().isdisjoint(map(id, leaves)):
            # New tensors: elsewhere, the same tensor is a constant.
            leaves = [x.view_as(x) for x in leaves]
            new = pytree.tree_unflatten(leaves, structure)
            args = (*[new.get(i, x) for i, x in enumerate(args)],)
            call = _Loss(loss, name, Options(), args, kwargs)
        if not call.is_differentiated():
            return torch.func.grad(scalar, argnums)(*args, **kwargs)
        places = {id(x): i for i, x in enumerate(call._inputs)}
        wrt = tuple([places[id(x)] for x in leaves])
        outputs = call.call(_Gradient(call, call.call_level, len(places), wrt))
        of = pytree.tree_unflatten([*outputs], structure)
        gradients = (*[of[i % len(args)] for i in numbers],)
        return gradients if isinstance(argnums, tuple) else gradients[0]

    return gradient


def _scalar(name: str, loss: Callable[..., Any], given: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    """The loss; a copy if it is one of the tensors with the ids `given`."""
    out = loss(*args, **kwargs)
    if not isinstance(out, Tensor) or out.ndim > 0 or not out.is_floating_point():
        what = f"inner_grad({name}): the loss returned {in_words(out)}, not a real scalar."
        raise InputError(f"{what} If it returns more, pass has_aux=True." if isinstance(out, tuple) else what)
    return out.clone() if id(out) in given else out


class _Loss(Call):
    """A call of `_scalar`, which need not be searched."""

    def _callable(self, inputs: Tensors, rebuilt: Rebuilt | None) -> Any:
        f, args, kwargs = super()._callable(inputs, rebuilt)
        given = [*map(id, (*inputs, *self.constants))]
        return functools.partial(_scalar, self.name, f, given), args, kwargs


@dataclass(eq=False)
class _Gradient(Vjp):
    """(inputs) -> gradients of the first output, a scalar, for the inputs `wrt`; and the other outputs."""

    of: tuple[int, ...] = ()
    at_level: bool = False

    def vmapped(self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str) -> Vmap | Vjp:
        return Program.vmapped(self, call_level, in_dims, size, randomness)  # it has no cotangents

    def run(self, *inputs: Tensor) -> Tensors:
        # The first run is always recorded, since the net looks at what its outputs depend on. (What the loss
        # depends on may be more, such as a summand, or less: a custom backward may use other tensors.)
        nested = torch.is_grad_enabled() or self.source.random is None
        # If no level is active and nothing differentiates this, plain autograd records it, which is cheaper.
        plain = functorch.peek_interpreter_stack() is None
        (value, *others), leaves = self.record([*inputs], plain and not nested)
        found = iter(self.pullback([value], leaves, nested, False, torch.ones_like(value)))
        wrt = zip(self.wrt, self.connected, strict=True)
        gradients = [next(found) if is_found else torch.zeros_like(inputs[i]) for i, is_found in wrt]
        return (*gradients, *map(wrappers.detached, others))
