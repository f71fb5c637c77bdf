"""What a checkpoint recomputes: a pure function of flat tensors, and how the next one is made.

`Vjp`, `Jvp` and `Vmap` are the three programs on the right of the lines in `funcckpt.core`; `Functional` is
the same for `torch.func.functionalize`, and `Recording` runs a program at a grad level that does not
differentiate it, so that f meets the same stack of levels as it would without remat. A program runs with no
functorch level below it: all of them have been moved into the program.

A program never holds a tensor that is among its inputs: `autograd` owns those, and frees them.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge

from .._torch import autograd, functorch, wrappers
from ..policies.policies import Chooser
from ..tape import recompute, recording
from ..tape.tape import watch_of
from .tensors import Tensors as Tensors


class Program:
    """A pure function from flat tensors to flat tensors."""

    # The program at the root: the user's function.
    source: UserProgram
    # Levels up to this one existed when the user called f, and decide about its randomness. Levels above came
    # later (the vmap of `jacrev` over cotangents), and do not.
    call_level: int
    # Whether this is, or is made from, the pullback of another program.
    is_pullback = False

    def run(self, *inputs: Tensor) -> Tensors:
        raise NotImplementedError

    def pullback(
        self, call_level: int, arity: int, wrt: tuple[int, ...], of: tuple[int, ...], at_level: bool
    ) -> Vjp:
        """(inputs, cotangents of the outputs `of`) -> gradients for the inputs `wrt`; see `Vjp`."""
        return Vjp(self, call_level, arity, wrt, of, at_level)

    def vmapped(
        self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str, inputs: Sequence[Tensor]
    ) -> tuple[Vmap | Vjp, Sequence[Tensor]]:
        """vmap of this program, and the inputs for it. Its `out_dims` are known once it has run."""
        return Vmap(self, call_level, in_dims, size, randomness), inputs


class UserProgram(Program):
    """The user's function, flat. `run` says how it runs the first time, and how again."""

    # Whether this is a graph that `torch.compile` traces: plain autograd goes through it.
    is_compiled = False
    # Whether a run draws random numbers; None before the first.
    random: bool | None = None
    # What its code is, to expect of another call what this one did.
    code: Any = None
    # For a policy: those of all that it refers to, and arguments that may decide what it does.
    codes: tuple[Any, ...] = ()
    # What a policy has kept of the first run, until the nodes have it.
    kept: recording.Kept | None = None
    # How many of the inputs are arguments. The others f has captured at levels, and maybe does not use.
    arity = 1 << 30
    # The tensors of plain autograd that f has captured and uses. After the call they are held here only if
    # that was under a transform: nodes above hold no such.
    captured: Sequence[Tensor] = ()
    # Of captured inputs, those that require grad in plain autograd, and on which no output depends.
    unused: Sequence[int] = ()
    # What a policy asks in the first run.
    chooser: Chooser | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.call_level = functorch.maybe_current_level() or 0
        self.torch_function = functorch._get_torch_function_state()
        # The levels that are active at the call, until the first run.
        self.layers: list[functorch.Layer] | None = functorch.active_layers()

    # An attribute would be a cycle, in which the tensors of a call wait for the collector.
    @property
    def source(self) -> UserProgram:  # type: ignore[override]
        return self

    def captured_at(self, edges: Mapping[autograd.Edge, Tensor | None]) -> Sequence[Tensor]:
        """The captured tensors at the edges by which the graph of the outputs leaves f."""
        raise AssertionError(edges)

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of a program made from this one, where no level is left."""
        return inputs

    def held(self) -> list[Tensor]:
        """The tensors that are kept for a recomputation, beside the inputs."""
        return []

    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        """Raise if f has changed an input in place."""


@dataclass(eq=False)
class Derived(Program):
    """A program made from another one."""

    inner: Program
    call_level: int

    def __post_init__(self) -> None:
        self.source = self.inner.source
        self.is_pullback = self.is_pullback or self.inner.is_pullback


@dataclass(eq=False)
class Vmap(Derived):
    """vmap of a program; `out_dims` is known once it has run."""

    in_dims: functorch.Dims
    batch_size: int
    randomness: str
    out_dims: functorch.Dims = ()

    def run(self, *inputs: Tensor) -> Tensors:
        outputs, self.out_dims = functorch.vmapped(
            self.inner.run, inputs, self.in_dims, self.batch_size, self.randomness
        )
        return outputs


@dataclass(eq=False)
class Recording(Derived):
    """A program at a grad level of its own, as f would find it without remat.

    Some operators have a batching rule only for what they decompose into once autograd has seen
    them (`column_stack`), some run other kernels when something requires grad, and f may itself call
    `torch.autograd.grad`. What the level records goes when it closes.
    """

    differentiated: Sequence[int] = ()
    # Once it has run: which outputs depend on an input that requires grad, and which such inputs that f has
    # captured no output depends on.
    active: Sequence[bool] = ()
    unused: Sequence[int] = ()

    def run(self, *inputs: Tensor) -> Tensors:
        mode = torch.is_grad_enabled()
        level = functorch._grad_increment_nesting()
        try:
            if self.differentiated:
                functorch.set_grad_enabled(True)
            wrapped = wrappers.wrapped_for_grad(inputs, level)
            leaves = wrappers.require_grad_at_this_level(wrapped, self.differentiated)
            outputs = self.inner.run(*wrapped)
            if self.differentiated and self.differentiated[-1] >= self.source.arity:
                used = autograd.entering(outputs)
                at = zip(self.differentiated, leaves, strict=True)
                self.unused = [
                    i for i, x in at if i >= self.source.arity and (id(x), autograd.LEAF) not in used
                ]
            if functorch.number_of_dispatch_modes() and (watch := watch_of(self.source)) is not None:
                watch.note_graph(outputs)
            self.active = (*map(wrappers.require_grad, outputs),)
            return tuple(wrappers.unwrapped_for_grad(outputs, level))
        finally:
            functorch._grad_decrement_nesting()
            functorch.set_grad_enabled(mode)


def recorded(program: Program, differentiated: Sequence[int]) -> Program | Recording:
    """`program` as it runs at a grad or jvp level. A pullback brings a level of its own."""
    if program.is_pullback or (isinstance(program, Recording) and not differentiated):
        return program
    return Recording(program, program.call_level, differentiated)


@dataclass(eq=False)
class WithCaptured(Derived):
    """(inputs, captured tensors) -> outputs: what f refers to in plain autograd, by its ids, as inputs."""

    ids: Sequence[int]

    def run(self, *inputs: Tensor) -> Tensors:
        arity = len(inputs) - len(self.ids)
        before = here.captured
        here.captured = self.source, [*zip(self.ids, inputs[arity:], strict=True)]
        try:
            return self.inner.run(*inputs[:arity])
        finally:
            here.captured = before


class _Here(threading.local):
    # Of the function that runs again in this thread: captured tensors, with their ids in the forward.
    captured: tuple[Any, Sequence[tuple[int, Tensor]]] = None, ()


here = _Here()


@dataclass(eq=False)
class Jvp(Derived):
    """(inputs, tangents) -> (outputs, tangents), in one evaluation.

    The tangents are those of the inputs `along`. Output tangents come for the outputs that have
    one: `active` says which, once the program has run.
    """

    arity: int
    along: tuple[int, ...]
    active: tuple[int, ...] = ()

    def run(self, *inputs: Tensor) -> Tensors:
        # Some backward formulas inside of the program are differentiable only where grad mode is on.
        with functorch.jvp_level() as level, torch.enable_grad():
            duals = wrappers.wrapped_for_grad(inputs[: self.arity], level)
            for i, t in zip(self.along, inputs[self.arity :], strict=True):
                duals[i] = forward_ad.make_dual(duals[i], t, level=0)
            primals, tangents, self.active = split_duals(self.inner.run(*duals))
            return (*wrappers.unwrapped_for_grad((*primals, *tangents), level),)

    def split(self, outputs: Tensors) -> tuple[Tensors, list[Tensor | None]]:
        """The outputs of a run as primals and tangents."""
        arity = len(outputs) - len(self.active)
        tangents = dict(zip(self.active, outputs[arity:], strict=True))
        return outputs[:arity], [*map(tangents.get, range(arity))]


def split_duals(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    """Primals, tangents, and the numbers of those that have one."""
    primals = [*tensors]
    tangents = {i: t for i, t in enumerate(map(wrappers.tangent_of, tensors)) if t is not None}
    for i in tangents:
        primals[i] = forward_ad.unpack_dual(primals[i], level=0).primal
    return primals, [*tangents.values()], (*tangents,)


@dataclass(eq=False)
class Functional(Derived):
    """A program under `torch.func.functionalize`."""

    adds_back_views: bool

    def run(self, *inputs: Tensor) -> Tensors:
        remove = "mutations" if self.adds_back_views else "mutations_and_views"
        outputs: Tensors = torch.func.functionalize(self.inner.run, remove=remove)(*inputs)
        return outputs


@dataclass(eq=False)
class Vjp(Derived):
    """(inputs, cotangents) -> gradients.

    Differentiates with respect to the inputs `wrt`; the cotangents are those of the outputs
    `of`. Gradients come for those of `wrt` on which the outputs depend: `connected` says
    which, once the program has run, so that an unused input gets None and not zeros.

    `at_level` says whether f was recorded at a functorch level: then it is recorded again at one, and
    meets the same kernels, refusals and wrappers. Plain autograd takes more, and is faster.

    A batched one is under a vmap over the cotangents alone. That applies to the pullback and not to the
    program, which therefore runs once for a whole Jacobian.
    """

    is_pullback = True

    arity: int
    wrt: tuple[int, ...]
    of: tuple[int, ...]
    at_level: bool
    connected: Sequence[bool] = ()
    # Of a batched one, what it was before, and the dimensions of cotangents, batch size and randomness.
    unbatched: Vjp | None = None
    batch: tuple[functorch.Dims, int, str] = (), 0, ""
    out_dims: functorch.Dims = ()

    def __post_init__(self) -> None:
        # A pullback records by itself. But f may look for a graph of what only an inner level differentiates.
        if isinstance(self.inner, Recording) and set(self.inner.differentiated) <= set(self.wrt):
            self.inner = self.inner.inner
        self.source = self.inner.source

    def vmapped(
        self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str, inputs: Sequence[Tensor]
    ) -> tuple[Vmap | Vjp, Sequence[Tensor]]:
        only_cotangents = in_dims[: self.arity].count(None) == self.arity
        if only_cotangents and (randomness == "same" or self.source.random is False):
            batch = in_dims[self.arity :], size, randomness
            return replace(self, call_level=call_level, unbatched=self, batch=batch), inputs
        return super().vmapped(call_level, in_dims, size, randomness, inputs)

    def run(self, *inputs: Tensor) -> Tensors:
        source = self.source
        if source.torch_function != functorch._get_torch_function_state():
            with functorch.torch_function_as(source.torch_function):
                return self.run(*inputs)
        primals, cotangents = [*inputs[: self.arity]], inputs[self.arity :]
        # Grad mode on means that this program is itself being differentiated.
        nested = torch.is_grad_enabled()
        is_plain = (
            not self.at_level and functorch.peek_interpreter_stack() is None and not wrappers.in_dual_level()
        )
        replay = watch_of(source) if functorch.number_of_dispatch_modes() else None
        with replay.recording() if isinstance(replay, recompute.Replay) else nullcontext():
            outputs, leaves = self.record(primals, is_plain)
        if len(self.of) < len(outputs):
            outputs = [outputs[i] for i in self.of]
        # A batched pullback takes the formulas that torch.func takes: some that autograd prefers where
        # nobody looks have no right batching rule (lu_solve under two vmaps).
        create_graph = nested or self.unbatched is not None
        if not create_graph and (functorch.maybe_current_level() or 0) > 1:
            create_graph = [layer.kind for layer in functorch.active_layers()].count("vmap") > 1
        gradients = self.pull(outputs, leaves, create_graph, *cotangents)
        return gradients if self.unbatched is None or nested else (*map(wrappers.detached, gradients),)

    def record(self, primals: list[Tensor], is_plain: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of f on leaves, and these. Plain autograd takes what functorch refuses."""
        if torch.is_inference_mode_enabled():  # where a backward may be called, and nothing be recorded
            with torch.inference_mode(False), torch.no_grad():
                return self.record(primals, is_plain)
        mode, level = torch.is_grad_enabled(), 0
        if not is_plain:
            if not mode and not self.source.captured:
                if any(map(wrappers.require_grad, primals)):
                    primals = [wrappers.detached(x) if x.requires_grad else x for x in primals]
                # Kernels ask for the grad mode below all levels (mkldnn's LSTM).
                functorch.set_grad_enabled(True)
            level = functorch._grad_increment_nesting()
        try:
            functorch.set_grad_enabled(True)
            if is_plain:
                given = self.arity - len(self.inner.ids if isinstance(self.inner, WithCaptured) else ())
                detach = wrappers.how_to_detach(primals)
                for i in self.wrt:
                    x = primals[i]
                    # A captured leaf f may differentiate itself. Hooks of a leaf are for the backward.
                    if i < given or not x.requires_grad or not x.is_leaf or x._backward_hooks:
                        is_nested = mode and x.requires_grad
                        primals[i] = x.view_as(x) if is_nested else detach(x).requires_grad_()
                leaves = [*map(primals.__getitem__, self.wrt)]
            else:
                primals = wrappers.wrapped_for_grad(primals, level)
                leaves = wrappers.require_grad_at_this_level(primals, self.wrt)
            # A module tracker puts hooks on what f is given, and must not on a leaf in a backward.
            if functorch.has_global_module_hook():
                primals = [x.view_as(x) if x.requires_grad and x.is_leaf else x for x in primals]
            return [*self.inner.run(*primals)], leaves
        finally:
            if level:
                functorch._grad_decrement_nesting()
            functorch.set_grad_enabled(mode)

    def pull(
        self, outputs: list[Tensor], leaves: list[Tensor], create_graph: bool, *cotangents: Tensor
    ) -> Tensors:
        if self.unbatched is not None:
            inner = functools.partial(self.unbatched.pull, outputs, leaves, create_graph)
            results, self.out_dims = functorch.vmapped(inner, cotangents, *self.batch)
            return results
        if self.inner.is_pullback and functorch.peek_interpreter_stack() is None:
            # It raises in a backward, and not in `torch.autograd.grad`: its node leads to none of the leaves.
            if any([node.name() == "torch::autograd::Error" for node in autograd.nodes_of(outputs)]):
                raise RuntimeError(
                    "trying to differentiate twice a function that was marked with @once_differentiable"
                )
        edges, used, owner = [], [], None
        for y, ct in zip(outputs, cotangents, strict=True):
            if y.requires_grad:
                # A node of Python's is owned by the graph, of which there is the tensor alone (torch 2.11).
                owner = y if isinstance(y.grad_fn, FunctionCtx) else None
                edges.append(y if y.grad_fn is None else GradientEdge(y.grad_fn, y.output_nr, owner))
                used.append(ct)
        del y, owner
        outputs.clear()  # no value of them is needed any more
        gradients: Sequence[Tensor | None] = (None,) * len(leaves)
        if edges:
            gradients = autograd.gradients(edges, leaves, used, create_graph)
        self.connected = (*map(operator.is_not, gradients, repeat(None)),)
        some: Tensors = (*compress(gradients, self.connected),)  # type: ignore[arg-type]
        return (*map(wrappers.alive, some),) if any(map(wrappers.is_dead_tensor_wrapper, some)) else some


def zeros_for_none(primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Any]:
    """Tangents as an autograd.Function has to give them: None only where there can be none."""
    zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)
    pairs = zip(primals, tangents, strict=True)
    return [zeros(y) if t is None and is_differentiable(y) else t for y, t in pairs]


def is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
