"""What a checkpoint recomputes: a pure function of flat tensors, and how the next one is made.

`Vjp`, `Jvp` and `Vmap` are the three programs on the right of the lines in `funcckpt.core`. `Functional` is
the same for `torch.func.functionalize`. `Recording` runs a program at a grad level that does not
differentiate it, so that f meets the same stack of levels as without remat. A program runs with no functorch
level below it: all of them have been moved into the program.

A program never holds one of its input tensors: `autograd` owns those, and frees them.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
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
from ..errors import MutationError, describe
from ..policies.policies import Chooser
from ..tape import recompute, recording
from ..tape.tape import watch_of
from .tensors import Tensors as Tensors


class Program:
    """A pure function from flat tensors to flat tensors."""

    # The program at the root: the user's function.
    source: UserProgram
    # Levels up to this one existed when the user called f, and decide its randomness. Higher levels came
    # later (the vmap of `jacrev` over cotangents), and do not.
    call_level: int
    # Whether this is a pullback, or made from one.
    is_pullback = False

    def run(self, *inputs: Tensor) -> Tensors:
        raise NotImplementedError

    def vmapped(self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str) -> Vmap | Vjp:
        """vmap of this program. Its `out_dims` are known once it has run."""
        return Vmap(self, call_level, in_dims, size, randomness)


class UserProgram(Program):
    """The user's function, flat. `run` makes the first run, and the recomputations."""

    # Whether this is a graph that `torch.compile` traces. Plain autograd differentiates through such a graph.
    is_compiled = False
    # Whether a run draws random numbers; None before the first.
    random: bool | None = None
    # Whether other levels stand for those of vmap in the first run.
    replaces_levels = False
    # Whether it refers to a pullback of torch.func.vjp, or to something that `torch.compile` has compiled.
    has_pullbacks = calls_compiled = False
    # Its code, the key for what is learned for later calls.
    code: Any = None
    # For a policy: the codes of all functions that f refers to, and arguments that may decide what f does.
    codes: tuple[Any, ...] = ()
    # What a policy keeps of the first run, until the graph nodes own it.
    kept: recording.Kept | None = None
    # How many of the inputs are arguments. f has captured the others at levels, and may not use them.
    arity = 1 << 30
    # How many inputs there are, captured ones included.
    count = 1 << 30
    # The captured tensors that are not inputs.
    constants: Sequence[Tensor] = ()
    # The captured tensors of plain autograd that f uses. Cleared after the call, except under a transform:
    # there no graph node holds them.
    captured: Sequence[Tensor] = ()
    # The captured inputs that require grad in plain autograd, but on which no output depends.
    unused: Sequence[int] = ()
    # Asks the policy in the first run.
    chooser: Chooser | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        level = functorch.maybe_current_level()
        self.call_level = level or 0
        # The levels that are active at the call; None after the first run.
        self.layers: list[functorch.Layer] | None = functorch.active_layers() if level else []

    # Not an attribute: a reference cycle would keep the tensors of a call until Python's collector runs.
    @property
    def source(self) -> UserProgram:  # type: ignore[override]
        return self

    def history(self) -> Collection[autograd.Edge]:
        """The edges at which captured tensors were computed outside of f."""
        return ()

    def doubt(self, nodes: Sequence[Any]) -> None:
        """Called with nodes that f has made in another thread, or that belong to hidden tensors."""

    def captured_at(self, edges: Mapping[autograd.Edge, Tensor | None]) -> Sequence[Tensor]:
        """The captured tensors at the edges at which the graph of the outputs begins."""
        raise AssertionError(edges)

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Called with the inputs of a program made from this one when no level is left; may replace them."""
        return inputs

    def kept_tensors(self) -> list[Tensor]:
        """The tensors beside the inputs that are kept for a recomputation."""
        return []

    def where(self, i: int) -> str:
        """The name of input `i` in messages."""
        return "a tensor"

    def reads_grad_mode(self) -> bool:
        """Whether f may have a kernel that reads the grad mode below all levels."""
        return False

    def check_error(
        self,
        error: Exception,
        inputs: Sequence[Tensor],
        captured: Sequence[str] = (),
        perhaps: str = "",
    ) -> None:
        """Raise a MutationError if torch has refused a write. It does not say to which tensor.

        f gets its inputs as leaves, to which autograd allows none; nor does functorch to captured tensors, of
        which `perhaps` is the name of the most likely one.
        """
        if autograd.is_about_writes(error):
            given = [f"{self.where(i)} ({describe(x)})" for i, x in enumerate(inputs) if is_differentiable(x)]
            names = f" ({' or '.join(captured)})" if 0 < len(captured) < 4 else ""
            what = " or ".join([*given, f"what it captured{names}"])
            way = "Work on a copy (x.clone()) inside the function, or return the new value."
            if perhaps and autograd.WRITES_TO_CAPTURED in str(error):
                what = f"what it captured, perhaps to {perhaps}"
                way = "Pass the buffers, too, to the function that is transformed, or call eval()."
            raise MutationError(f"remat({self.name}) writes in place to {what}. {way}") from error


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

    Some operators (`column_stack`) have a batching rule only for the parts into which autograd decomposes
    them. Some run other kernels if an input requires grad. And f may itself call `torch.autograd.grad`. What
    the level records is dropped when it closes.
    """

    differentiated: Sequence[int] = ()
    # Known after the run: whether each output depends on an input that requires grad; and the captured inputs
    # that require grad, but on which no output depends.
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
                uses = zip(self.differentiated, map(wrappers.uses_of, leaves), strict=True)
                alone = {id(wrapped[i]): i for i, count in uses if count == 1 and i >= self.source.arity}
                self.unused = [i for key, i in alone.items() if key not in map(id, outputs)]
            if functorch.number_of_dispatch_modes() and (watch := watch_of(self.source)) is not None:
                watch.note_graph(outputs)
            self.active = (*map(wrappers.require_grad, outputs),)
            return tuple(wrappers.unwrapped_for_grad(outputs, level))
        finally:
            functorch._grad_decrement_nesting()
            functorch.set_grad_enabled(mode)


def recorded(program: Program, differentiated: Sequence[int]) -> Program | Recording:
    """`program` as it runs at a grad or jvp level. A pullback has a level of its own already."""
    if program.is_pullback or (isinstance(program, Recording) and not differentiated):
        return program
    return Recording(program, program.call_level, differentiated)


@dataclass(eq=False)
class WithCaptured(Derived):
    """(inputs, captured tensors) -> outputs. The captured tensors of plain autograd become inputs, by id."""

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
    # The function that is recomputed in this thread, and its captured tensors, with their ids in the forward.
    captured: tuple[Any, Sequence[tuple[int, Tensor]]] = None, ()
    # What frees what the run has left, when its graph has gone.
    left: tuple[Callable[[], Any], ...] = ()

    def hold(self, nodes: Collection[Any]) -> None:
        """Called with the nodes of a graph at which Python has looked, and which goes after the run."""
        if len(nodes) > autograd.MANY_NODES:
            self.left = *self.left, autograd.in_order(nodes).clear


here = _Here()


@dataclass(eq=False)
class Jvp(Derived):
    """(inputs, tangents) -> (outputs, tangents), in one evaluation.

    The input tangents are those of the inputs `along`. Only outputs that have a tangent give one: `active`
    says which, once the program has run.
    """

    arity: int
    along: tuple[int, ...]
    active: tuple[int, ...] = ()

    def run(self, *inputs: Tensor) -> Tensors:
        with functorch.jvp_level() as level:
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
    """Primals, tangents, and the numbers of the tensors that have a tangent."""
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
        return torch.func.functionalize(self.inner.run, remove=remove)(*inputs)


# The code of functions whose backward by plain autograd asks for a memory format (group_norm), below a vmap.
_asks_for_format: set[Any] = set()


@dataclass(eq=False)
class Vjp(Derived):
    """(inputs, cotangents) -> gradients.

    Differentiates with respect to the inputs `wrt`; the cotangents are those of the outputs `of`. Only inputs
    on which the outputs depend have a gradient: `connected` says which, once the program has run. So an
    unused input gets None, not zeros. The inputs `tracked` require grad while f runs: those of `wrt`, and
    others whose gradient this backward does not use.

    `at_level`: f was recorded at a functorch level. So it is again, and meets the same kernels, errors and
    wrappers. If not, it is recorded by plain autograd, which supports more and is faster.

    In a batched Vjp, only the cotangents are batched. The vmap applies to the pullback and not to the
    program, which therefore runs once for a whole Jacobian.
    """

    is_pullback = True

    arity: int
    wrt: tuple[int, ...]
    of: tuple[int, ...]
    at_level: bool
    tracked: tuple[int, ...] = ()
    connected: Sequence[bool] = ()
    # For a batched Vjp: the unbatched one; and the dims of the cotangents, batch size and randomness.
    unbatched: Vjp | None = None
    batch: tuple[functorch.Dims, int, str] = (), 0, ""
    out_dims: functorch.Dims = ()

    def __post_init__(self) -> None:
        self.tracked = self.tracked or self.wrt
        # A pullback records by itself, so no Recording of the same is needed. But f may look at what requires
        # grad at an inner level.
        if isinstance(self.inner, Recording) and set(self.inner.differentiated) == set(self.tracked):
            self.inner = self.inner.inner
        self.source = self.inner.source

    def vmapped(self, call_level: int, in_dims: functorch.Dims, size: int, randomness: str) -> Vmap | Vjp:
        only_cotangents = in_dims[: self.arity].count(None) == self.arity
        if only_cotangents and (randomness == "same" or self.source.random is False):
            batch = in_dims[self.arity :], size, randomness
            return replace(self, call_level=call_level, unbatched=self, batch=batch)
        return super().vmapped(call_level, in_dims, size, randomness)

    def run(self, *inputs: Tensor) -> Tensors:
        source = self.source
        primals, cotangents = [*inputs[: self.arity]], inputs[self.arity :]
        # If grad mode is on, this program is itself being differentiated.
        nested = torch.is_grad_enabled()
        is_plain = not self.at_level and functorch.peek_interpreter_stack() is None
        replay = watch_of(source) if functorch.number_of_dispatch_modes() else None
        with replay.recording() if isinstance(replay, recompute.Replay) else nullcontext():
            outputs, leaves = self.record(primals, is_plain)
        if len(self.of) < len(outputs):
            outputs = [outputs[i] for i in self.of]
        # A batched pullback uses the formulas of torch.func (create_graph=True). Without it, autograd prefers
        # some that take less memory, but have no tangent or a wrong batching rule (lu_solve under two vmaps).
        # Graphs that make_fx traces may be differentiated later.
        create_graph = nested or self.unbatched is not None or functorch.is_tracing()
        if not create_graph and functorch.maybe_current_level():
            kinds = functorch.active_kinds()
            create_graph = "jvp" in kinds or kinds.count("vmap") > 1 or source.code in _asks_for_format
        # At a level of its own nobody can differentiate the graph again.
        retain_graph = create_graph and is_plain
        if nested or is_plain or not create_graph or functorch.is_tracing():
            gradients: Tensors | None = None
            try:
                gradients = self.pullback(outputs, leaves, create_graph, retain_graph, *cotangents)
            except RuntimeError as error:
                if create_graph or functorch.ASKS_FOR_FORMAT not in str(error):
                    raise
            if gradients is None:
                _asks_for_format.add(source.code)
                return self.run(*inputs)
            return gradients if self.unbatched is None or nested else (*map(wrappers.detached, gradients),)
        with functorch.grad_increment_nesting():  # below it nothing is recorded
            gradients = self.pullback(outputs, leaves, create_graph, retain_graph, *cotangents)
        return (*map(wrappers.unwrap_if_dead, gradients),)

    def record(self, primals: list[Tensor], is_plain: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Record f on leaves; gives outputs and leaves. Plain autograd supports more than functorch."""
        if torch.is_inference_mode_enabled():  # a backward may be called in it, but nothing is recorded
            with torch.inference_mode(False), torch.no_grad():
                return self.record(primals, is_plain)
        mode, level = torch.is_grad_enabled(), 0
        if not is_plain:
            source = self.source
            reads = not (source.captured or any(map(wrappers.require_grad, source.constants)))
            # Under two levels of forward mode, `silu` and others have a tangent only with grad mode on.
            reads = reads or source.reads_grad_mode() or functorch.active_kinds().count("jvp") > 1
            if not mode and reads:
                if any(map(wrappers.require_grad, primals)):
                    primals = [wrappers.detached(x) if x.requires_grad else x for x in primals]
                # Some kernels read the grad mode below all levels (mkldnn's LSTM).
                functorch.set_grad_enabled(True)
            level = functorch._grad_increment_nesting()
        try:
            functorch.set_grad_enabled(True)
            if is_plain:
                ids = self.inner.ids if isinstance(self.inner, WithCaptured) else ()
                captured = dict(zip(range(self.arity - len(ids), self.arity), ids, strict=True))
                detach = wrappers.how_to_detach(primals)
                for i in self.tracked:
                    x = primals[i]
                    # A captured leaf stays, since f may differentiate it; but its hooks are for the backward.
                    # With grad mode on, other inputs may lead to it.
                    # Saved-tensor hooks give another object, of which the graph would show the original.
                    stays = not mode and id(x) == captured.get(i) and x.is_leaf and x.requires_grad
                    if not stays or x._backward_hooks:
                        is_nested = mode and x.requires_grad
                        primals[i] = wrappers.viewed(x) if is_nested else wrappers.requires_grad_(detach(x))
            else:
                primals = wrappers.wrapped_for_grad(primals, level)
                wrappers.require_grad_at_this_level(primals, self.tracked)
            leaves = [*map(primals.__getitem__, self.wrt)]
            # A module tracker puts hooks on the arguments of f. In a backward, it must not get a leaf.
            if functorch.has_global_module_hook():
                primals = [wrappers.viewed(x) if x.requires_grad and x.is_leaf else x for x in primals]
            return [*self.inner.run(*primals)], leaves
        finally:
            if level:
                functorch._grad_decrement_nesting()
            functorch.set_grad_enabled(mode)

    def pullback(
        self,
        outputs: list[Tensor],
        leaves: list[Tensor],
        create_graph: bool,
        retain_graph: bool,
        *cotangents: Tensor,
    ) -> Tensors:
        if self.unbatched is not None:
            inner = functools.partial(self.unbatched.pullback, outputs, leaves, create_graph, retain_graph)
            results, self.out_dims = functorch.vmapped(inner, cotangents, *self.batch)
            return results
        if self.inner.is_pullback and functorch.peek_interpreter_stack() is None:
            # The node of @once_differentiable leads to no leaf, so `torch.autograd.grad` would not reach it.
            nodes = [*autograd.nodes_of(outputs)]
            if any([node.name() == "torch::autograd::Error" for node in nodes]):
                raise RuntimeError(
                    "trying to differentiate twice a function that was marked with @once_differentiable"
                )
            here.hold(nodes)
            del nodes
        edges, used, owner = [], [], None
        own = {*map(id, leaves)}
        for y, ct in zip(outputs, cotangents, strict=True):
            # A view of a leaf that was made under no_grad requires grad, too, and leads nowhere.
            if y.requires_grad and (y.grad_fn is not None or id(y) in own):
                owner = y if isinstance(y.grad_fn, FunctionCtx) and not autograd.NODES_STAY else None
                edges.append(y if y.grad_fn is None else GradientEdge(y.grad_fn, y.output_nr, owner))
                used.append(ct)
        del y, owner
        outputs.clear()  # frees their values
        gradients: Sequence[Tensor | None] = (None,) * len(leaves)
        if edges:
            gradients = autograd.gradients(edges, leaves, used, create_graph, retain_graph)
        connected = (*map(operator.is_not, gradients, repeat(None)),)
        if self.connected and connected != self.connected:
            # Outer programs know the gradients of the first run. (`prod` has another formula under a mode.)
            known = zip(self.connected, gradients, leaves, strict=True)
            gradients = [
                (torch.zeros_like(x) if g is None else g) if is_there else None for is_there, g, x in known
            ]
        else:
            self.connected = connected
        some: Tensors = (*compress(gradients, self.connected),)  # type: ignore[arg-type]
        return (*map(wrappers.alive, some),) if any(map(wrappers.is_dead_tensor_wrapper, some)) else some


def is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
