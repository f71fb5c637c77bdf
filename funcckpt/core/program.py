"""What a checkpoint recomputes: a pure function of flat tensors, and how the next one is made.

`Vjp`, `Jvp` and `Vmap` are the three programs on the right of the lines in `funcckpt.core`; `Functional` is
the same for `torch.func.functionalize`, and `Recording` runs a program at a grad level that does not
differentiate it, so that f meets the same stack of levels as it would without remat. A program runs with no
functorch level below it: all of them have been moved into the program.

A program never holds a tensor that is among its inputs: `autograd` owns those, and frees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge

from .. import _torch
from ..errors import ClosureError, describe
from ..tape import recompute, recording
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
        self.home = _torch.current_level()
        self.torch_function = _torch._get_torch_function_state()

    @property
    def source(self) -> Leaf:  # type: ignore[override]
        return self

    def recorder(self) -> recording.Record | None:
        """The mode for the first run, if a policy has to see it."""
        return None

    def finish(self, record: recording.Record | None) -> None:
        """Take over what was recorded for a policy, after the first run."""

    @abstractmethod
    def take_layers(self) -> list[_torch.Layer] | None:
        """The levels that were active at the call, before the first run; None from then on."""

    def captured_at(self, edge: Any, outputs: Sequence[Tensor]) -> Tensor | None:
        """The captured tensor at an edge by which the graph of the outputs leaves f, if it is one."""
        raise AssertionError(edge)

    def where_is(self, captured: Sequence[tuple[int, Tensor]]) -> AbstractContextManager[None]:
        """For a recomputation, the captured tensors, with the ids that they had in the forward."""
        return _NOWHERE

    def received(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of a program made from this one, where no level is left."""
        return inputs

    @abstractmethod
    def versions(self, inputs: Sequence[Tensor]) -> list[int | None]:
        """How often each input was changed in place."""

    def changed_since(self, error: RuntimeError) -> RuntimeError:
        """What to raise where autograd finds that an input is not what it was."""
        return error

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The tensors that are kept for a recomputation, beside the inputs."""

    @abstractmethod
    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        """Raise if f has changed an input in place."""


class _Derived(Program):
    def __init__(self, inner: Program, home: int) -> None:
        self.inner = inner
        self.source = inner.source
        self.home = home
        if inner.is_pullback:
            self.is_pullback = True

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()}({self.inner.name})"


class Vmap(_Derived):
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
        super().__init__(inner, home)
        self.in_dims = in_dims
        self.batch_size = batch_size
        self.randomness = randomness

    def run(self, *inputs: Tensor) -> Tensors:
        outputs, self.out_dims = _vmap(self.inner.run, inputs, self.in_dims, self.batch_size, self.randomness)
        return outputs


class Recording(_Derived):
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
        super().__init__(inner, inner.home)
        self.differentiated = differentiated

    def run(self, *inputs: Tensor) -> Tensors:
        with _torch.recording_level() if self.differentiated else _torch.grad_level() as level:
            wrapped = _torch.wrapped_for_grad(inputs, level)
            leaves = _torch.require_grad_at_this_level(wrapped, self.differentiated)
            looks = bool(self.differentiated) and self.differentiated[-1] >= self.source.arity
            outputs = self.inner.run(*wrapped)
            if looks:
                used = {id(x) for x in _torch.leaves_of(outputs)}
                at = zip(self.differentiated, leaves, strict=True)
                self.unused = [i for i, x in at if i >= self.source.arity and id(x) not in used]
            if (watch := watch_of(self.source)) is not None:
                watch.note_graph(outputs)
            self.active = (*map(_torch.require_grad, outputs),)
            return tuple(_torch.unwrapped_for_grad(outputs, level))


def recorded(program: Program, differentiated: Sequence[int]) -> Program | Recording:
    """`program` as it runs at a grad or jvp level. A pullback brings a level of its own."""
    if program.is_pullback or (isinstance(program, Recording) and not differentiated):
        return program
    return Recording(program, differentiated)


class WithCaptured(_Derived):
    """(inputs, captured tensors) -> outputs: what f refers to in plain autograd, as inputs."""

    def __init__(self, inner: Program, captured: Sequence[Tensor]) -> None:
        super().__init__(inner, inner.home)
        self.numbers = [*map(id, captured)]

    def run(self, *inputs: Tensor) -> Tensors:
        arity = len(inputs) - len(self.numbers)
        with self.source.where_is([*zip(self.numbers, inputs[arity:], strict=True)]):
            return self.inner.run(*inputs[:arity])


class Vjp(_Derived):
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

    def settle(self, connected: tuple[bool, ...]) -> None:
        """Say which gradients there are, here and to the program of which this is a vmap."""
        self.connected = connected
        if self._unbatched is not None:
            self._unbatched.settle(connected)

    def run(self, *inputs: Tensor) -> Tensors:
        source = self.source
        if source.torch_function != _torch._get_torch_function_state():
            with _torch.torch_function_as(source.torch_function):
                return self.run(*inputs)
        arity = self.arity
        primals, cotangents = [*inputs[:arity]], inputs[arity:]
        del inputs
        originals: Sequence[Tensor] = ()
        # Grad mode on means that this program is itself being differentiated.
        nested = torch.is_grad_enabled()
        is_plain = (
            not self.at_level and _torch.peek_interpreter_stack() is None and not _torch.in_dual_level()
        )
        if is_plain and not nested:
            first = self._captured_from()
            own = {id(x) for x in primals[first:] if _is_own_leaf(x)}
            originals = [x for i in self.wrt if (x := primals[i]).requires_grad and id(x) not in own]
        replay = watch_of(source)
        with replay.recording() if isinstance(replay, recompute.Replay) else _NOWHERE:
            if is_plain:
                outputs, leaves = self._record_plain(primals, nested)
            else:
                outputs, leaves = self._record_at_level(primals)
        primals.clear()
        # A batched pullback takes the formulas that torch.func takes: some that autograd prefers where
        # nobody looks have no right batching rule (lu_solve under two vmaps).
        as_func = bool(self.batches) or (_torch.current_level() > 1 and _torch.number_of_vmaps() > 1)
        pull = self._pull if self.batches else self._pull_once
        gradients = pull(outputs, leaves, originals, cotangents, nested or as_func)
        if self.batches and not nested:
            gradients = tuple([_torch.fresh(g) for g in gradients])
        return gradients

    def _captured_from(self) -> int:
        """Where the inputs begin that f refers to itself."""
        captured = self.inner.numbers if isinstance(self.inner, WithCaptured) else ()
        return self.arity - len(captured)

    def _record_plain(self, primals: list[Tensor], nested: bool) -> tuple[list[Tensor], list[Tensor]]:
        """With no level active plain autograd is enough, and takes what functorch refuses."""
        leaves = []
        first = self._captured_from()
        for i in self.wrt:
            x = primals[i]
            if i >= first and x.requires_grad and _is_own_leaf(x):
                leaf = x  # f refers to it, and no history leads on
            else:
                leaf = x.view_as(x) if nested and x.requires_grad else _torch.fresh(x).requires_grad_()
            leaves.append(leaf)
            primals[i] = leaf
        if torch.is_inference_mode_enabled():  # where a backward may be called, and nothing be recorded
            with torch.inference_mode(False):
                return self._chosen(self.inner.run(*_as_arguments(primals))), leaves
        with _torch.grad_mode(True):
            return self._chosen(self.inner.run(*_as_arguments(primals))), leaves

    def _record_at_level(self, primals: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        source = self.source
        if not torch.is_grad_enabled() and not source.captured:
            # Kernels ask for the grad mode below all levels (mkldnn's LSTM).
            with _torch.grad_mode(True):
                return self._record_at_level([_torch.fresh(x) if x.requires_grad else x for x in primals])
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._record_at_level(primals)
        with _torch.recording_level() as level:
            wrapped = _torch.wrapped_for_grad(primals, level)
            leaves = _torch.require_grad_at_this_level(wrapped, self.wrt)
            outputs = self.inner.run(*_as_arguments(wrapped))
            return self._chosen(outputs), leaves

    def _chosen(self, outputs: Tensors) -> list[Tensor]:
        """The outputs that have cotangents."""
        return [*outputs] if len(self.of) == len(outputs) else [outputs[i] for i in self.of]

    def _pull(
        self,
        outputs: list[Tensor],
        leaves: list[Tensor],
        originals: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        create_graph: bool,
    ) -> Tensors:
        def pull(*cotangents: Tensor) -> Tensors:
            return self._pull_once(outputs, leaves, originals, cotangents, create_graph)

        # Each batch belongs to the program that it made, which wants to know its dimensions.
        owners = [self]
        while (unbatched := owners[-1]._unbatched) is not None:
            owners.append(unbatched)
        for batch, owner in zip(self.batches, reversed(owners[:-1]), strict=True):
            pull = batch.over(pull, owner)
        return pull(*cotangents)

    def _pull_once(
        self,
        outputs: list[Tensor],
        leaves: list[Tensor],
        originals: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        create_graph: bool,
    ) -> Tensors:
        if self.inner.is_pullback and _torch.peek_interpreter_stack() is None:
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
        self.settle(tuple([g is not None for g in gradients]))
        return (*_torch.all_alive([g for g in gradients if g is not None]),)


def _is_own_leaf(x: Tensor) -> bool:
    """Whether a recomputation may differentiate a captured tensor itself: its hooks are for the backward."""
    return x.is_leaf and not x._backward_hooks


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
            edges.append(_edge(y))
            used.append(ct)
    del y
    outputs.clear()
    if not edges or not inputs:
        return (None,) * len(inputs)
    return _torch.gradients(edges, inputs, used, create_graph)


def _edge(y: Tensor) -> Any:
    if (node := y.grad_fn) is None:
        return y
    # A node of Python's is owned by the graph, of which the tensor is all that there is (torch 2.11).
    owner: Any = y if isinstance(node, FunctionCtx) else None
    return GradientEdge(node, y.output_nr, owner)


def _as_arguments(leaves: list[Tensor]) -> list[Tensor]:
    """What f is given. A module tracker puts hooks on it, and must not on a leaf in a backward."""
    if not _torch.has_global_module_hook():
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
            outputs, owner.out_dims = _vmap(pull, cotangents, self.in_dims, self.batch_size, self.randomness)
            return outputs

        return batched


def vmapped(
    program: Program,
    level: int,
    in_dims: tuple[int | None, ...],
    batch_size: int,
    randomness: str,
) -> Vmap | Vjp:
    """vmap of a program, at a level; the pullback alone where only cotangents are batched."""
    home = min(program.home, level - 1)
    # A level that was not there when the user called f has no say in its randomness.
    if level > program.home:
        randomness = "same"
    if isinstance(program, Vjp) and all(dim is None for dim in in_dims[: program.arity]):
        if randomness == "same" or program.source.random is False:
            cotangents = CotangentBatch(in_dims[program.arity :], batch_size, randomness)
            return program.batched(home, cotangents)
    return Vmap(program, home, in_dims, batch_size, randomness)


def bind_vmap(
    interpreter: Any,
    program: Program,
    inputs: Sequence[Tensor],
    bind: Callable[[Program, Sequence[Tensor]], Tensors],
) -> Tensors:
    """R[program] at a vmap level, by way of R[vmap(program)] below it, which `bind` runs."""
    level = interpreter.level()
    unwrapped_and_dims = [_torch._unwrap_batched(x, level) for x in inputs]
    unwrapped = [x for x, _ in unwrapped_and_dims]
    in_dims = tuple([dim for _, dim in unwrapped_and_dims])
    randomness = _torch.randomness_of(interpreter)
    if all(dim is None for dim in in_dims) and _may_skip_vmap(program, level, randomness):
        with _torch.lower(interpreter, "vmap"):
            return bind(program, unwrapped)
    batched = vmapped(program, level, in_dims, _torch.batch_size_of(interpreter), randomness)
    with _torch.lower(interpreter, "vmap"):
        outputs = bind(batched, unwrapped)
    return tuple(
        [
            y if dim is None else _torch._add_batch_dim(y, dim, level)
            for y, dim in zip(outputs, batched.out_dims, strict=True)
        ]
    )


def bind_legacy(
    program: Program, inputs: Sequence[Tensor], bind: Callable[[Program, Sequence[Tensor]], Tensors]
) -> Tensors:
    """The same at the vmap of plain autograd (`is_grads_batched`), if it has batched any input."""
    if not any(map(_torch.is_legacy_batchedtensor, inputs)):
        return bind(program, inputs)
    unwrapped_and_dims = [_torch.unwrap_legacy(x) for x in inputs]
    in_dims = tuple([dim for _, dim in unwrapped_and_dims])
    unwrapped = [x for x, _ in unwrapped_and_dims]
    size = next(x.shape[dim] for x, dim in unwrapped_and_dims if dim is not None)
    batched = vmapped(program, program.home + 1, in_dims, size, "same")
    with _torch.without_vmap_mode():
        outputs = bind(batched, unwrapped)
    return tuple([_torch.wrap_legacy(y, dim) for y, dim in zip(outputs, batched.out_dims, strict=True)])


def _may_skip_vmap(program: Program, level: int, randomness: str) -> bool:
    """Whether a level at which no input is batched makes no difference to a program.

    Under "different" each sample draws its own numbers even from unbatched inputs, and under "error"
    f must be allowed to fail.
    """
    return randomness == "same" or level > program.home or program.source.random is False


class Jvp(_Derived):
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
        with _torch.jvp_level() as level, _torch.grad_mode(True):
            duals = [_torch._wrap_for_grad(x, level) for x in inputs[: self.arity]]
            for i, t in zip(self.along, inputs[self.arity :], strict=True):
                duals[i] = _torch.forward_ad.make_dual(duals[i], t, level=0)
            primals, tangents = [], []
            for y in self.inner.run(*duals):
                tangent = _torch.tangent_of(y)
                if tangent is not None:
                    y = _torch.forward_ad.unpack_dual(y, level=0).primal
                    tangents.append(_torch._unwrap_for_grad(tangent, level))
                primals.append((_torch._unwrap_for_grad(y, level), tangent is not None))
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


class Functional(_Derived):
    """A program under `torch.func.functionalize`."""

    def __init__(self, inner: Program, home: int, add_back_views: bool) -> None:
        super().__init__(inner, home)
        self.remove = "mutations" if add_back_views else "mutations_and_views"

    def run(self, *inputs: Tensor) -> Tensors:
        outputs: Tensors = torch.func.functionalize(
            lambda *xs: tuple(self.inner.run(*xs)), remove=self.remove
        )(*inputs)
        return outputs


def _vmap(
    run: Callable[..., Tensors],
    inputs: Sequence[Tensor],
    in_dims: tuple[int | None, ...],
    batch_size: int,
    randomness: str,
) -> tuple[Tensors, tuple[int | None, ...]]:
    with _torch.vmap_level(batch_size, randomness) as level:
        outputs = run(
            *[
                x if dim is None else _torch._add_batch_dim(x, dim, level)
                for x, dim in zip(inputs, in_dims, strict=True)
            ]
        )
        unwrapped = [_torch._unwrap_batched(y, level) for y in outputs]
    return tuple([y for y, _ in unwrapped]), tuple([dim for _, dim in unwrapped])
