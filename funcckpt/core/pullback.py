"""The pullback of a program, as a program."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge

from .._torch import autograd, functorch, wrappers
from ..errors import ClosureError, describe
from ..tape import recompute
from ..tape.tape import watch_of
from .program import Derived, Program, Recording, Tensors, WithCaptured

_NOWHERE = nullcontext()


class Vjp(Derived):
    """(inputs, cotangents) -> gradients.

    Differentiates with respect to the inputs `wrt`; the cotangents are those of the outputs
    `of`. Gradients come for those of `wrt` on which the outputs depend: `connected` says
    which, once the program has run, so that an unused input gets None and not zeros.

    `at_level` says whether f was recorded at a functorch level: then it is recorded again at one, and
    meets the same kernels, refusals and wrappers. Plain autograd takes more, and is faster.

    `batches` are vmaps over the cotangents alone. They apply to the pullback and not to the
    program, which therefore runs once for a whole Jacobian.
    """

    connected: tuple[bool, ...]
    out_dims: tuple[int | None, ...] = ()
    is_pullback = True
    _unbatched: Vjp | None = None

    def __init__(
        self,
        inner: Program,
        home: int,
        arity: int,
        wrt: tuple[int, ...],
        of: tuple[int, ...],
        at_level: bool,
        batches: tuple[CotangentBatch, ...] = (),
    ) -> None:
        # A pullback records by itself. But f may look for a graph of what only an inner level differentiates.
        if isinstance(inner, Recording) and set(inner.differentiated) <= set(wrt):
            inner = inner.inner
        self.inner = inner
        self.source = inner.source
        self.home = home
        self.at_level = at_level
        self.arity = arity
        self.wrt = wrt
        self.of = of
        self.batches = batches

    def batched(self, home: int, batch: CotangentBatch) -> Vjp:
        """This program, vmapped over its cotangents."""
        batched = Vjp(
            self.inner,
            home,
            self.arity,
            self.wrt,
            self.of,
            self.at_level,
            (*self.batches, batch),
        )
        batched._unbatched = self
        return batched

    def run(self, *inputs: Tensor) -> Tensors:
        source = self.source
        if source.torch_function != functorch._get_torch_function_state():
            with functorch.torch_function_as(source.torch_function):
                return self.run(*inputs)
        arity = self.arity
        primals, cotangents = [*inputs[:arity]], inputs[arity:]
        del inputs
        originals: Sequence[Tensor] = ()
        # Grad mode on means that this program is itself being differentiated.
        nested = torch.is_grad_enabled()
        is_plain = (
            not self.at_level and functorch.peek_interpreter_stack() is None and not wrappers.in_dual_level()
        )
        # Captured leaves that a recomputation may differentiate themselves: their hooks are for the backward.
        own: dict[int, int] = {}
        if is_plain and isinstance(self.inner, WithCaptured):
            for i in range(arity - len(self.inner.numbers), arity):
                if primals[i].is_leaf and not primals[i]._backward_hooks:
                    own[i] = id(primals[i])
        if is_plain and not nested:
            leading = {*own.values()}
            originals = []
            for i in self.wrt:
                if primals[i].requires_grad and id(primals[i]) not in leading:
                    originals.append(primals[i])
        replay = watch_of(source) if functorch.number_of_dispatch_modes() else None
        with replay.recording() if isinstance(replay, recompute.Replay) else _NOWHERE:
            if is_plain:
                outputs, leaves = self._record_plain(primals, nested, own)
            else:
                outputs, leaves = self._record_at_level(primals)
        if len(self.of) < len(outputs):
            outputs = [outputs[i] for i in self.of]
        primals.clear()
        # A batched pullback takes the formulas that torch.func takes: some that autograd prefers where
        # nobody looks have no right batching rule (lu_solve under two vmaps).
        as_func = bool(self.batches) or (
            (functorch.maybe_current_level() or 0) > 1 and functorch.number_of_vmaps() > 1
        )
        pull = functools.partial(self.pull, outputs, leaves, originals, nested or as_func)
        gradients = (self._batched(pull) if self.batches else pull)(*cotangents)
        if self.batches and not nested:
            gradients = tuple([wrappers.fresh(g) for g in gradients])
        return gradients

    def _record_plain(
        self, primals: list[Tensor], nested: bool, own: Collection[int] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """With no level active plain autograd is enough, and takes what functorch refuses."""
        leaves = []
        detach = wrappers.how_to_detach(primals)
        for i in self.wrt:
            x = primals[i]
            if i in own and x.requires_grad:
                leaf = x  # f refers to it, and no history leads on
            else:
                leaf = x.view_as(x) if nested and x.requires_grad else detach(x).requires_grad_()
            leaves.append(leaf)
            primals[i] = leaf
        if torch.is_inference_mode_enabled():  # where a backward may be called, and nothing be recorded
            with torch.inference_mode(False):
                return [*self.inner.run(*_as_arguments(primals))], leaves
        functorch.set_grad_enabled(True)
        try:
            return [*self.inner.run(*_as_arguments(primals))], leaves
        finally:
            functorch.set_grad_enabled(nested)

    def _record_at_level(self, primals: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._record_at_level(primals)
        mode = torch.is_grad_enabled()
        if not mode and not self.source.captured:
            if any(map(wrappers.require_grad, primals)):
                primals = [wrappers.fresh(x) if x.requires_grad else x for x in primals]
            # Kernels ask for the grad mode below all levels (mkldnn's LSTM).
            functorch.set_grad_enabled(True)
        level = functorch._grad_increment_nesting()
        try:
            functorch.set_grad_enabled(True)
            wrapped = wrappers.wrapped_for_grad(primals, level)
            leaves = wrappers.require_grad_at_this_level(wrapped, self.wrt)
            return [*self.inner.run(*_as_arguments(wrapped))], leaves
        finally:
            functorch._grad_decrement_nesting()
            functorch.set_grad_enabled(mode)

    def _batched(self, pull: Callable[..., Tensors]) -> Callable[..., Tensors]:
        # Each batch belongs to the program that it made, which wants to know its dimensions.
        owners = [self]
        while (unbatched := owners[-1]._unbatched) is not None:
            owners.append(unbatched)
        for batch, owner in zip(self.batches, reversed(owners[:-1]), strict=True):
            pull = batch.over(pull, owner)
        return pull

    def pull(
        self,
        outputs: list[Tensor],
        leaves: list[Tensor],
        originals: Sequence[Tensor],
        create_graph: bool,
        *cotangents: Tensor,
    ) -> Tensors:
        if self.inner.is_pullback and functorch.peek_interpreter_stack() is None:
            _refuse_once_differentiable(outputs)
        gradients = pulled(outputs, [*leaves, *originals], cotangents, create_graph)
        # `originals` are the inputs for which the leaves stand. If the graph leads to one, f reached
        # it by a way that was not found, and the gradient of its leaf is not all there is.
        for x, g in zip(originals, gradients[len(leaves) :], strict=True):
            if g is not None:
                raise ClosureError(
                    f"remat({self.source.name}) uses an input ({describe(x)}) by a second "
                    "way that could not be traced, so that its gradient would be incomplete. "
                    "Use it as an argument only."
                )
        gradients = gradients[: len(leaves)]
        connected = (*map(operator.is_not, gradients, repeat(None)),)
        program: Vjp | None = self
        while program is not None:
            program.connected, program = connected, program._unbatched
        some: Tensors = (*compress(gradients, connected),)  # type: ignore[arg-type]
        return (*wrappers.all_alive(some),) if any(map(wrappers.is_dead_tensor_wrapper, some)) else some


def pulled(
    outputs: list[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of some inputs. The outputs, of which no value is needed any more, are taken away."""
    edges, used = [], []
    for y, ct in zip(outputs, cotangents, strict=True):
        if ct is not None and y.requires_grad:
            # A node of Python's is owned by the graph, of which the tensor is all that there is (torch 2.11).
            node = y.grad_fn
            owner: Any = y if isinstance(node, FunctionCtx) else None
            edges.append(y if node is None else GradientEdge(node, y.output_nr, owner))
            del owner
            used.append(ct)
    del y
    outputs.clear()
    if not edges or not inputs:
        return (None,) * len(inputs)
    return autograd.gradients(edges, inputs, used, create_graph)


def _as_arguments(leaves: list[Tensor]) -> list[Tensor]:
    """What f is given. A module tracker puts hooks on it, and must not on a leaf in a backward."""
    if not functorch.has_global_module_hook():
        return leaves
    return [x.view_as(x) if x.requires_grad and x.is_leaf else x for x in leaves]


def _refuse_once_differentiable(outputs: Sequence[Tensor]) -> None:
    """Raise what `once_differentiable` raises in a backward, and not in `torch.autograd.grad`.

    The node that raises leads nowhere, so that a search for the gradient of given inputs passes it by.
    """
    pending = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError(
                "trying to differentiate twice a function that was marked with @once_differentiable"
            )
        pending.extend([n for n, _ in node.next_functions if n is not None])


class CotangentBatch:
    """A vmap over cotangents."""

    __slots__ = ("batch_size", "in_dims", "randomness")

    def __init__(self, in_dims: tuple[int | None, ...], batch_size: int, randomness: str) -> None:
        self.in_dims = in_dims
        self.batch_size = batch_size
        self.randomness = randomness

    def over(self, pull: Callable[..., Tensors], owner: Vjp) -> Callable[..., Tensors]:
        def batched(*cotangents: Tensor) -> Tensors:
            outputs, owner.out_dims = functorch.vmapped(
                pull, cotangents, self.in_dims, self.batch_size, self.randomness
            )
            return outputs

        return batched
