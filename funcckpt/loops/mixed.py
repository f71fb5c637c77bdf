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
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import world
from .._torch import functorch, wrappers
from ..closures import Found, Rebuilt, kinds
from ..core import dispatch
from ..core.call import Call, Options
from ..core.program import Derived, Jvp, Tensors, Vjp, Vmap, is_differentiable
from ..errors import InputError, OptionError, TransformError
from ..remat import name_and_check, remat
from .steps import in_words


def inner_grad(
    loss: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`torch.func.grad` for gradients that are differentiated again, as in the inner steps of meta-learning.

    The values and all derivatives are those of `torch.func.grad`, with respect to the arguments chosen by
    `argnums`, an int or a tuple of ints. But the derivative of the gradient is computed in mixed mode, from
    the arguments alone. That takes less memory than reverse over reverse, for about a fifth more operations.
    It saves less if `remat` is already around the parts of the loss.

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

    scalar = functools.partial(_scalar, name, loss, ())

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in numbers):
            raise InputError(f"inner_grad({name}): argnums={argnums}, but there are {len(args)} arguments.")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return torch.func.grad(scalar, argnums)(*args, **kwargs)
        if not torch._C._is_fwd_grad_enabled():  # as in a transform inside of inference mode
            return torch.func.grad(remat(scalar), argnums)(*args, **kwargs)

        chosen = {i % len(args): args[i] for i in numbers}
        leaves, structure = pytree.tree_flatten(chosen)
        for j, x in enumerate(leaves):
            if not isinstance(x, Tensor) or not is_differentiable(x):
                path = pytree.keystr(pytree.tree_flatten_with_path(chosen)[0][j][0])
                raise InputError(
                    f"inner_grad({name}): argument {path[1:].replace(']', '', 1)} is {in_words(x)}, which "
                    "has no gradient. Select other arguments with argnums."
                )
        call = _Loss(loss, name, Options(), args, kwargs, lifts_all=True)
        is_given_twice = len(call._arguments._numbers) > call.arity
        if is_given_twice or not call.found.tensors.keys().isdisjoint(map(id, leaves)):
            # New tensors: elsewhere, the same tensor is a constant.
            leaves = [x.view_as(x) for x in leaves]
            new = pytree.tree_unflatten(leaves, structure)
            args = (*[new.get(i, x) for i, x in enumerate(args)],)
            call = _Loss(loss, name, Options(), args, kwargs, lifts_all=True)
        if not call.is_looked_at():
            return torch.func.grad(scalar, argnums)(*args, **kwargs)
        inputs = call.take_inputs()
        places = {id(x): i for i, x in enumerate(inputs)}
        wrt = tuple([places[id(x)] for x in leaves])
        program = _Gradient(call, call.call_level, len(inputs), wrt, with_zeros=True)
        call.fits_mixed_mode, is_sure = _fits(call.found)
        unfit = _Unfit()
        with nullcontext() if is_sure else unfit:
            outputs = dispatch.bind(program, inputs)
        call.fits_mixed_mode &= not unfit.found
        call.seal()
        of = pytree.tree_unflatten([*outputs], structure)
        gradients = (*[of[i % len(args)] for i in numbers],)
        return gradients if isinstance(argnums, tuple) else gradients[0]

    return gradient


def _scalar(name: str, loss: Callable[..., Any], given: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    """The loss; a copy if it is one of the tensors with the ids `given`."""
    out = loss(*args, **kwargs)
    if not isinstance(out, Tensor) or out.ndim > 0 or not out.is_floating_point():
        raise InputError(f"inner_grad({name}): the loss returned {in_words(out)}, not a real scalar.")
    return out.clone() if id(out) in given else out


class _Loss(Call):
    """A call of `_scalar`, which need not be searched."""

    def _callable(self, inputs: Tensors, rebuilt: Rebuilt | None) -> Any:
        f, args, kwargs = super()._callable(inputs, rebuilt)
        given = [*map(id, (*inputs, *self._constants))]
        return functools.partial(_scalar, self.name, f, given), args, kwargs


# By name. In reverse over forward mode torch has wrong derivatives of these, or none (glu), or no vmap
# (lstm_cell).
_UNFIT = {"layer_norm", "native_layer_norm", "batch_norm", "native_batch_norm", "instance_norm", "glu"}
_UNFIT |= {"det", "logdet", "slogdet", "solve", "solve_ex", "tensorsolve", "eig", "eigh", "cholesky_inverse"}
_UNFIT |= {"cholesky", "cholesky_ex", "householder_product", "triangular_solve", "native_batch_norm_legit"}
_UNFIT |= {"cumprod", "logcumsumexp", "scatter_reduce", "lstm_cell", "select_scatter", "as_strided_scatter"}
_UNFIT |= {"column_stack", "tensor_split"}
# What stops reverse mode alone: forward mode goes through it.
_STOPS = torch.no_grad, torch.set_grad_enabled, torch.inference_mode
# At special points (zeros, ties), or since a derivative is recorded. Attributes of the user have such names,
# too: only a run of the loss shows what is called.
_CALLED = {"std", "std_mean", "dist", "prod", "atan2", "arctan2", "fmax", "fmin", "float_power", "vander"}
_CALLED |= {"max_unpool1d", "max_unpool2d", "max_unpool3d", "safe_softmax", "batch_norm_with_update"}
_CALLED |= {"gaussian_nll_loss", "register_hook", "retain_grad"}
# The same, if they are given a tensor as an exponent, a bound or a mask: from which argument on.
_GIVEN = dict.fromkeys(("pow", "__pow__", "pow_", "__ipow__", "clamp", "clip", "clamp_", "clip_"), 1)
_GIVEN |= {"clamp_min": 1, "clamp_max": 1, "scaled_dot_product_attention": 3}


def _spelled(names: set[str]) -> set[str]:
    """The names that function modes see, with those of operators in place and below."""
    names = names | {f"linalg_{name}" for name in names}
    return names | {spelled for name in names for spelled in (f"_{name}", f"{name}_")}


_UNFIT = _spelled(_UNFIT)
_SEEN = _UNFIT | _spelled(_CALLED)
_UNFIT |= {stop.__name__ for stop in _STOPS}
# Also a power whose exponent is no constant, code of torch that was not read, modules that the loss makes
# itself, and `torch.autograd.grad`.
_UNSURE = {*_CALLED, *_GIVEN, "**", "distributions", "utils", "autograd"} - {"__pow__", "__ipow__"}
_UNSURE |= {name for module in (nn.utils, torch.distributions) for name in dir(module) if name[0] != "_"}
_UNSURE |= {name for name, kind in vars(nn).items() if isinstance(kind, type)}


def _fits(found: Found) -> tuple[bool, bool]:
    """Whether a loss names none of these, as far as its code was read; and whether that is sure."""
    modules = [node.cls for node in found.nodes.values() if node.kind is kinds.MODULE]
    of_modules = [kinds.about(cls).names | {*cls.__module__.split(".")} for cls in modules]
    # TorchScript does not tell.
    fits = not found.opaque and all(map(_UNFIT.isdisjoint, (found.names, *of_modules)))
    fits = fits and not any([isinstance(node.value, _STOPS) for node in found.nodes.values()])
    is_sure = not found.draws_elsewhere and all(map(_UNSURE.isdisjoint, (found.names, *of_modules)))
    return fits, not fits or is_sure


class _Unfit(world.Mode):
    """Notes whether a loss calls one of these, whose gradient is then differentiated in reverse mode."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _SEEN or func is torch.autograd.grad:
            self.found = True
        elif name in _GIVEN:
            given = (*args[_GIVEN[name] :], *kwargs.values())
            self.found |= any(map(isinstance, given, repeat(Tensor)))
        elif name == "_set_grad_enabled" and not args[0]:  # by `no_grad`, and not by a checkpoint inside
            self.found |= sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "funcckpt"
        return func(*args, **kwargs)


@dataclass(eq=False)
class _Gradient(Vjp):
    """(inputs) -> gradients of the only output of a program, a scalar, with respect to the inputs `wrt`.

    Only the inputs on which the output depends have a gradient; `with_zeros`, all have. The pullback is the
    gradient of the tangent of that output. vmap is the gradient of the sum of the outputs, with all inputs
    batched, so that samples share nothing.
    """

    of: tuple[int, ...] = (0,)
    at_level: bool = False
    with_zeros: bool = False
    of_one_sample: _Gradient | None = None  # before the last vmap

    def pullback(
        self, call_level: int, arity: int, wrt: tuple[int, ...], of: tuple[int, ...], at_level: bool
    ) -> Vjp:
        if not self.source.fits_mixed_mode:
            return super().pullback(call_level, arity, wrt, of, at_level)
        gradients_of = self.wrt if self.with_zeros else (*compress(self.wrt, self.connected),)
        along = tuple([gradients_of[i] for i in of])
        directional = _Directional(self.inner, call_level, arity, along)
        return _Gradient(directional, call_level, arity + len(of), wrt)

    def vmapped(
        self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str, inputs: Sequence[Tensor]
    ) -> tuple[Vmap | Vjp, Sequence[Tensor]]:
        if not self.source.fits_mixed_mode:
            return super().vmapped(call_level, in_dims, size, randomness, inputs)
        at = zip(inputs, in_dims, strict=True)
        own = [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in at]
        losses = _Sum(self.inner, call_level, (0,) * self.arity, size, randomness)
        return replace(self, inner=losses, call_level=call_level, of_one_sample=self), own

    def run(self, *inputs: Tensor) -> Tensors:
        # The first run is always recorded, since the net looks at what its outputs depend on. (What the loss
        # depends on may be more, such as a summand, or less: a custom backward may use other tensors.)
        nested = torch.is_grad_enabled() or self.source.random is None
        # If no level is active and nothing differentiates this, plain autograd records it, which is cheaper.
        plain = functorch.peek_interpreter_stack() is None and not wrappers.in_dual_level()
        outputs, leaves = self.record([*inputs], plain and not nested)
        gradients = self.pull(outputs, leaves, nested, torch.ones_like(outputs[0]))
        if self.with_zeros:
            found, wrt = iter(gradients), zip(self.wrt, self.connected, strict=True)
            gradients = (*[next(found) if is_found else torch.zeros_like(inputs[i]) for i, is_found in wrt],)
        # The unbatched programs, one for each vmap, do not run themselves: they learn this here.
        program: _Gradient | None = self
        while program is not None:
            program.connected, program.out_dims = self.connected, (0,) * len(gradients)
            program = program.of_one_sample
        return gradients


@dataclass(eq=False)
class _Directional(Derived):
    """(inputs, tangents) -> the tangent of the first output, along the inputs `along`."""

    arity: int
    along: tuple[int, ...]

    def run(self, *inputs: Tensor) -> Tensors:
        jvp = Jvp(self.inner, self.call_level, self.arity, self.along)
        arguments = list(inputs)
        for i in self.along:  # A shared input was expanded to all samples; now it gets tangents.
            arguments[i] = wrappers.with_memory_for_each(inputs[i])
        try:
            primals, tangents = jvp.split(jvp.run(*arguments))
        except RuntimeError as error:
            # An operator has no forward mode, or a wrong one, or a Function has no jvp.
            if not isinstance(error, NotImplementedError) and "forward gradient" not in str(error):
                raise
            raise TransformError(
                f"inner_grad({self.source.name}) cannot be differentiated in mixed mode: {error} Write "
                "torch.func.grad(remat(loss)) in place of inner_grad(loss)."
            ) from error
        return (torch.zeros_like(primals[0]) if tangents[0] is None else tangents[0],)


class _Sum(Vmap):
    """The sum of the losses of all samples. If no input is shared, its gradients are those of each sample."""

    def run(self, *inputs: Tensor) -> Tensors:
        (losses,) = super().run(*inputs)
        return (losses if self.out_dims == (None,) else losses.sum(),)
