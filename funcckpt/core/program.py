"""What a checkpoint recomputes: a pure function of flat tensors, and how the next one is made.

`Vjp`, `Jvp` and `Vmap` are the three programs on the right of the lines in `funcckpt.core`; `Functional` is
the same for `torch.func.functionalize`, and `Recording` runs a program at a grad level that does not
differentiate it, so that f meets the same stack of levels as it would without remat. A program runs with no
functorch level below it: all of them have been moved into the program.

A program never holds a tensor that is among its inputs: `autograd` owns those, and frees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch import functorch, wrappers
from ..tape import recording
from ..tape.tape import watch_of

Tensors = tuple[Tensor, ...]

_NOWHERE = nullcontext()


class Program(ABC):
    """A pure function from flat tensors to flat tensors.

    Attributes
    ----------
    source : Leaf
        The program at the root: the user's function.
    home : int
        Levels up to this one existed when the user called f, and decide about its randomness.
        Levels above came later (the vmap of `jacrev` over cotangents), and do not.
    """

    source: Leaf
    home: int
    # Whether this is, or is made from, the pullback of another program.
    is_pullback = False

    @abstractmethod
    def run(self, *inputs: Tensor) -> Tensors: ...

    @property
    @abstractmethod
    def name(self) -> str: ...


class Leaf(Program):
    """The user's function, flat. `remat` says how it runs the first time, and how again."""

    # Whether this is a graph that `torch.compile` traces: plain autograd goes through it.
    is_compiled = False
    # Whether a run draws random numbers; None before the first.
    random: bool | None = None
    # What its code is, to expect of another call what this one did.
    code: Any = None
    # What a policy has kept of the first run, until the nodes have it.
    kept: recording.Kept | None = None
    # How many of the inputs are arguments. The others f has captured at levels, and maybe does not use.
    arity = 1 << 30
    # What f has captured of plain autograd, if it was called under a transform: nodes above hold no such.
    captured: Sequence[Tensor] = ()
    # Of captured inputs, those that require grad in plain autograd, and on which no output depends.
    unused: Sequence[int] = ()
    seen: Sequence[Tensor] = ()

    def __init__(self) -> None:
        self.home = functorch.maybe_current_level() or 0
        self.torch_function = functorch._get_torch_function_state()

    @property
    def source(self) -> Leaf:  # type: ignore[override]
        return self

    def recorder(self) -> recording.Record | None:
        """The mode for the first run, if a policy has to see it."""
        return None

    def finish(self, record: recording.Record) -> None:
        """Take over what was recorded for a policy, after the first run."""

    @abstractmethod
    def take_layers(self) -> list[functorch.Layer] | None:
        """The levels that were active at the call, before the first run; None from then on."""

    def captured_at(self, edges: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The captured tensors at the edges by which the graph of the outputs leaves f."""
        raise AssertionError(edges)

    def where_is(self, captured: Sequence[tuple[int, Tensor]]) -> AbstractContextManager[None]:
        """For a recomputation, the captured tensors, with the ids that they had in the forward."""
        return _NOWHERE

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of a program made from this one, where no level is left."""
        return inputs

    def changed_since(self, error: RuntimeError) -> RuntimeError:
        """What to raise where autograd finds that an input is not what it was."""
        return error

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors that are kept for a recomputation, beside the inputs."""

    @abstractmethod
    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        """Raise if f has changed an input in place."""


class Derived(Program):
    def __init__(self, inner: Program, home: int) -> None:
        self.inner = inner
        self.source = inner.source
        self.home = home
        if inner.is_pullback:
            self.is_pullback = True

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()}({self.inner.name})"


class Vmap(Derived):
    """vmap of a program; `out_dims` is known once it has run."""

    out_dims: tuple[int | None, ...]

    def __init__(
        self,
        inner: Program,
        home: int,
        in_dims: tuple[int | None, ...],
        batch_size: int,
        randomness: str,
    ) -> None:
        self.inner, self.source, self.home = inner, inner.source, home
        self.is_pullback = inner.is_pullback
        self.in_dims = in_dims
        self.options = batch_size, randomness

    def run(self, *inputs: Tensor) -> Tensors:
        outputs, self.out_dims = functorch.vmapped(self.inner.run, inputs, self.in_dims, *self.options)
        return outputs


class Recording(Derived):
    """A program at a grad level of its own, as f would find it without remat.

    Some operators have a batching rule only for what they decompose into once autograd has seen
    them (`column_stack`), some run other kernels when something requires grad, and f may itself call
    `torch.autograd.grad`. What the level records goes when it closes.
    """

    # Which outputs depend on an input that requires grad, once it has run; and which such inputs that f has
    # captured no output depends on.
    active: tuple[bool, ...]
    unused: Sequence[int] = ()

    def __init__(self, inner: Program, differentiated: Sequence[int] = ()) -> None:
        self.inner, self.source, self.home = inner, inner.source, inner.home
        self.differentiated = differentiated

    def run(self, *inputs: Tensor) -> Tensors:
        mode = torch.is_grad_enabled()
        level = functorch._grad_increment_nesting()
        try:
            if self.differentiated:
                functorch.set_grad_enabled(True)
            wrapped = wrappers.wrapped_for_grad(inputs, level)
            leaves = wrappers.require_grad_at_this_level(wrapped, self.differentiated)
            looks = bool(self.differentiated) and self.differentiated[-1] >= self.source.arity
            outputs = self.inner.run(*wrapped)
            if looks:
                used = {id(x) for x in wrappers.leaves_of(outputs)}
                at = zip(self.differentiated, leaves, strict=True)
                self.unused = [i for i, x in at if i >= self.source.arity and id(x) not in used]
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
    return Recording(program, differentiated)


class WithCaptured(Derived):
    """(inputs, captured tensors) -> outputs: what f refers to in plain autograd, as inputs."""

    def __init__(self, inner: Program, captured: Sequence[Tensor]) -> None:
        self.inner, self.source, self.home = inner, inner.source, inner.home
        self.numbers = [*map(id, captured)]

    def run(self, *inputs: Tensor) -> Tensors:
        arity = len(inputs) - len(self.numbers)
        with self.source.where_is([*zip(self.numbers, inputs[arity:], strict=True)]):
            return self.inner.run(*inputs[:arity])


class Jvp(Derived):
    """(inputs, tangents) -> (outputs, tangents), in one evaluation.

    The tangents are those of the inputs `along`. Output tangents come for the outputs that have
    one: `active` says which, once the program has run.
    """

    active: tuple[bool, ...]

    def __init__(self, inner: Program, home: int, arity: int, along: tuple[int, ...]) -> None:
        super().__init__(inner, home)
        self.arity = arity
        self.along = along

    def run(self, *inputs: Tensor) -> Tensors:
        # Some backward formulas inside of the program are differentiable only where grad mode is on.
        with functorch.jvp_level() as level, functorch.grad_mode(True):
            duals = [wrappers._wrap_for_grad(x, level) for x in inputs[: self.arity]]
            for i, t in zip(self.along, inputs[self.arity :], strict=True):
                duals[i] = wrappers.forward_ad.make_dual(duals[i], t, level=0)
            primals, tangents = [], []
            for y in self.inner.run(*duals):
                tangent = wrappers.tangent_of(y)
                if tangent is not None:
                    y = wrappers.forward_ad.unpack_dual(y, level=0).primal
                    tangents.append(wrappers._unwrap_for_grad(tangent, level))
                primals.append((wrappers._unwrap_for_grad(y, level), tangent is not None))
        self.active = tuple([has_tangent for _, has_tangent in primals])
        return (*[y for y, _ in primals], *tangents)

    def split(self, outputs: Tensors) -> tuple[Tensors, list[Tensor | None]]:
        """The outputs of a run as primals and tangents."""
        arity = len(self.active)
        tangents = iter(outputs[arity:])
        return outputs[:arity], [next(tangents) if has else None for has in self.active]


def zeros_for_none(primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Any]:
    """Tangents as an autograd.Function has to give them: None only where there can be none."""
    return [
        torch.zeros_like(y, memory_format=torch.contiguous_format)
        if t is None and is_differentiable(y)
        else t
        for y, t in zip(primals, tangents, strict=True)
    ]


def is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Functional(Derived):
    """A program under `torch.func.functionalize`."""

    def __init__(self, inner: Program, home: int, add_back_views: bool) -> None:
        super().__init__(inner, home)
        self.remove = "mutations" if add_back_views else "mutations_and_views"

    def run(self, *inputs: Tensor) -> Tensors:
        outputs: Tensors = torch.func.functionalize(
            lambda *xs: tuple(self.inner.run(*xs)), remove=self.remove
        )(*inputs)
        return outputs
