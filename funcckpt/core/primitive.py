"""remat as a `torch.autograd.Function`, on public API alone.

This is the definition, as short as it can be said: a Function whose first argument is a program, with a rule
for each transform that makes the next program. `dispatch` applies the same rules without a class built for
each level and call. What is here is the fallback where a release of torch has moved a private name, and what
the tests compare `dispatch` with. `Generated` has its rule for vmap derived by torch, independently of ours.

What this form cannot do, and `dispatch` can: leave out captured tensors that f does not use; give primal and
tangent in one evaluation; record nothing in the last backward of a level; `functionalize`; keep what a policy
says; put back random streams other than torch's, or under a vmap that came after the call. An input on which
nothing depends gets zeros, and a tensor that the search does not find is a constant.
"""

from __future__ import annotations

import functools
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
        # With grad mode off some formulas inside of a pullback are not differentiable (that of linalg.solve).
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
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        wrt = [i for i, x in enumerate(inputs) if needed[i] and _is_differentiable(x)]
        of = [i for i, ct in enumerate(cotangents) if ct is not None]
        gradients: dict[int, Tensor] = {}
        if wrt and of:
            pullback = functools.partial(_pullback, ctx.program, len(inputs), wrt, of)
            results = cls.apply(pullback, *inputs, *[cotangents[i] for i in of])
            gradients.update(zip(wrt, results, strict=True))
        return None, *map(gradients.get, range(len(inputs)))


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
        along = [i for i, t in enumerate(tangents) if t is not None]
        tangent = functools.partial(_tangent, ctx.program, len(ctx.saved_tensors), along)
        given = [t for t in tangents if t is not None]
        return Remat.apply(tangent, *ctx.saved_tensors, *given)  # type: ignore[no-any-return]


class Generated(_Rules):
    """R with the rule for vmap that torch derives; it has no forward mode."""

    generate_vmap_rule = True


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _pullback(
    program: Program, arity: int, wrt: Sequence[int], of: Sequence[int], *inputs: Tensor
) -> Tensors:
    primals, cotangents = inputs[:arity], inputs[arity:]
    return vjp(_partly(program, primals, wrt, of), *[primals[i] for i in wrt])[1](cotangents)


def _tangent(program: Program, arity: int, along: Sequence[int], *inputs: Tensor) -> Tensors:
    """By two pullbacks: plain forward mode would not nest."""
    primals, tangents = inputs[:arity], inputs[arity:]
    outputs, pull = vjp(_partly(program, primals, along), *[primals[i] for i in along])[:2]
    results: Tensors = vjp(pull, tuple(map(torch.zeros_like, outputs)))[1](tangents)[0]
    pairs = zip(results, outputs, strict=True)
    return tuple([t if _is_differentiable(y) else torch.zeros_like(t) for t, y in pairs])


def _partly(
    program: Program, primals: Sequence[Tensor], wrt: Sequence[int], of: Sequence[int] | None = None
) -> Callable[..., Tensors]:
    """A program as a function of some of its inputs, and with some of its outputs."""

    def run(*some: Tensor) -> Tensors:
        inputs = dict(enumerate(primals)) | dict(zip(wrt, some, strict=True))
        outputs = program(*inputs.values())
        return outputs if of is None else tuple([outputs[i] for i in of])

    return run


class _Call:
    """One call of f, flat: the program at the root."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._others = [None if isinstance(x, Tensor) else x for x in leaves]
        self._positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        given = [leaves[i] for i in self._positions]
        self._found = Found((f, self._others))
        captured = [x for key, x in self._found.tensors.items() if key not in map(id, given)]
        self.inputs = [*given, *captured]
        self._captured = [*map(id, captured)]
        self._state = torch.get_rng_state()
        self.outputs: Any = None

    def run(self, *inputs: Tensor) -> Tensors:
        mapped = dict(zip(self._captured, inputs[len(self._positions) :], strict=True))
        with torch.random.fork_rng(enabled=self.outputs is not None):
            torch.set_rng_state(self._state)
            with Rebuilt(self._found, mapped, self._found.changed()) as (f, others):
                leaves = [*others]
                for i, x in zip(self._positions, inputs, strict=False):
                    leaves[i] = x
                args, kwargs = pytree.tree_unflatten(leaves, self._structure)
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
        As for `funcckpt.remat`.
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
