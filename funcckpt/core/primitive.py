"""remat as a `torch.autograd.Function`, on public API alone.

This is the shortest definition: a Function whose first argument is a program, with a rule for each transform
that makes the next program. `dispatch` applies the same rules without building a class for each level and
call. This module is the fallback if a release of torch has moved a private name, and the tests compare
`dispatch` with it. The vmap rule of `Generated` is derived by torch, independently of ours.

This form cannot do all that `dispatch` does. It does not leave out captured tensors that f does not use,
compute primal and tangent in one evaluation, skip the recording in the last backward of a level, support
`functionalize` or policies, or restore random streams other than torch's or under a vmap that came after the
call. An unused input gets zeros for its gradient. A tensor that the search does not find is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from ..closures import Found, Rebuilt

Tensors = tuple[Tensor, ...]
Program = Callable[..., Tensors]


class _Rules(torch.autograd.Function):
    """Reverse mode."""

    @staticmethod
    def forward(program: Program, *inputs: Tensor) -> Tensors:
        # With grad mode off, some backward formulas are not differentiable (that of linalg.solve).
        with torch.enable_grad():
            outputs = program(*[x.detach() for x in inputs])
        return tuple([y.detach() for y in outputs])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.program, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*[y for y in output if not _is_differentiable(y)])

    @classmethod
    def backward(cls, ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        """The pullback of R[f] at x, applied to ct, is R[(x, ct) -> vjp(f, x)(ct)](x, ct)."""
        program, saved, needed = ctx.program, ctx.saved_tensors, ctx.needs_input_grad[1:]
        arity = len(saved)
        wrt = [i for i, x in enumerate(saved) if needed[i] and _is_differentiable(x)]
        of = [i for i, ct in enumerate(cotangents) if ct is not None]

        def pullback(*inputs: Tensor) -> Tensors:
            f, primals = _partly(program, inputs[:arity], wrt, of)
            return vjp(f, *primals)[1](inputs[arity:])  # type: ignore[no-any-return]

        gradients: dict[int, Tensor] = {}
        if wrt and of:
            results = cls.apply(pullback, *saved, *[cotangents[i] for i in of])
            gradients.update(zip(wrt, results, strict=True))
        return None, *map(gradients.get, range(arity))


class Remat(_Rules):
    """R with hand-written rules for vmap and jvp."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], program: Program, *inputs: Tensor) -> Any:
        """vmap of R[f] is R[vmap(f, in_dims, randomness)]."""
        batched = vmap(program, in_dims[1:], randomness=info.randomness)
        outputs = Remat.apply(batched, *inputs)
        return outputs, (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The tangent of R[f] at x along t is R[(x, t) -> jvp(f, x, t)](x, t)."""
        program, saved = ctx.program, ctx.saved_tensors
        arity = len(saved)
        along = [i for i, t in enumerate(tangents) if t is not None]

        def tangent(*inputs: Tensor) -> Tensors:
            """Computed by two pullbacks: plain forward mode cannot be nested."""
            f, primals = _partly(program, inputs[:arity], along)
            outputs, pull = vjp(f, *primals)[:2]
            results = vjp(pull, tuple(map(torch.zeros_like, outputs)))[1](inputs[arity:])[0]
            pairs = zip(results, outputs, strict=True)
            return tuple([t if _is_differentiable(y) else torch.zeros_like(t) for t, y in pairs])

        given = [t for t in tangents if t is not None]
        return Remat.apply(tangent, *saved, *given)  # type: ignore[no-any-return]


class Generated(_Rules):
    """R with the vmap rule that torch derives, and without forward mode."""

    generate_vmap_rule = True


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _partly(
    program: Program, primals: Tensors, wrt: Sequence[int], of: Sequence[int] | None = None
) -> tuple[Program, list[Tensor]]:
    """A program restricted to some of its inputs and outputs; and these inputs."""

    def run(*some: Tensor) -> Tensors:
        inputs = dict(enumerate(primals)) | dict(zip(wrt, some, strict=True))
        outputs = program(*inputs.values())
        return outputs if of is None else tuple([outputs[i] for i in of])

    return run, [primals[i] for i in wrt]


class _Call:
    """One call of f, flat: the program at the root. One search finds arguments and captured tensors."""

    # What f returned, with `_PLACE` in place of tensors.
    outputs: Any = None

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found = Found((f, args, kwargs))
        self.inputs = [*self._found.tensors.values()]
        self._ids = [*self._found.tensors]
        self._state = torch.get_rng_state()

    def run(self, *inputs: Tensor) -> Tensors:
        mapped = dict(zip(self._ids, inputs, strict=True))
        with torch.random.fork_rng(enabled=self.outputs is not None):
            torch.set_rng_state(self._state)
            with Rebuilt(self._found, mapped, self._found.changed()) as (f, args, kwargs):
                flat, structure = pytree.tree_flatten(f(*args, **kwargs))
        self.outputs = [_PLACE if isinstance(x, Tensor) else x for x in flat], structure
        return tuple([x for x in flat if isinstance(x, Tensor)])

    def assemble(self, tensors: Tensors) -> Any:
        others, structure = self.outputs
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if x is _PLACE else x for x in others], structure)


_PLACE = object()  # stands for a tensor among the outputs


def remat(f: Callable[..., Any], spelling: type[_Rules] = Remat) -> Callable[..., Any]:
    """Recompute f in the backward instead of keeping what it computed, by a `torch.autograd.Function`.

    Parameters
    ----------
    f : callable
        As for `funcckpt.remat`, whose options this function does not take.
    spelling : type
        `Remat`, or `Generated`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.core.primitive import remat
    >>> torch.func.grad(remat(torch.sin))(torch.tensor(0.0))
    tensor(1.)
    """

    def rematted(*args: Any, **kwargs: Any) -> Any:
        call = _Call(f, args, kwargs)
        return call.assemble(spelling.apply(call.run, *call.inputs))

    return rematted
