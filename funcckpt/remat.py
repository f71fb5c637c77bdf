"""`remat(f)`: the user's function, from a call to a program and back.

A call is flattened into a `_Call`: a program over flat tensors, which are the tensors among the
arguments and those that f captured (`closure`). `dispatch` runs it under whatever transforms are
active, and keeps nothing but its inputs.

With no functorch level active the forward needs no program: f runs as it is on detached arguments,
and the graph that it leaves behind, if any, leads to exactly the tensors that it captured.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from . import _torch, compiled, dispatch, net, world
from .closure import Closure, Uninitialized, code_of, take_for_own
from .errors import (
    CheckpointError,
    ClosureError,
    EscapeError,
    InputError,
    MutationError,
    describe,
)
from .flat import Arguments, Call, Outputs
from .nodes import may_be_statistics, snapshot_of_statistics, versions_of
from .policies.chooser import Chooser, Policy
from .policies.policies import chooser_of
from .program import Tensors
from .tape import drawing, recording

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_CHECKS = ("default", "none", "values")


@overload
def remat(
    f: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: str = ...,
    policy: Policy | None = ...,
) -> Callable[P, R]: ...


@overload
def remat(
    f: None = None,
    *,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: str = ...,
    policy: Policy | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def remat(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    policy: Policy | None = None,
) -> Any:
    """Recompute f in the backward instead of keeping what it computed.

    The function returned takes and gives what f does, and may be used wherever f may: under any
    composition of `torch.func` transforms, and under plain autograd in reverse and forward
    mode. Between the forward and the backward only its inputs are kept: the tensors among the
    arguments, and those that f captured.

    Parameters
    ----------
    f : callable
        A function, a bound method, a `functools.partial`, an `nn.Module` or any callable, of tensors
        of any dtype, shape and device, and of anything else, in any pytree. It has to be pure up to
        random numbers and buffers of a module that is training. Without f, a decorator.
    static_argnums, static_argnames : int or str, or several
        Positions and names of arguments that are handed to f as they are, and not searched for
        tensors.
    preserve_rng_state : bool
        Draw in the recomputation the random numbers of the forward. Costs nothing if f draws none.
    determinism_check : {"default", "none", "values"}
        Compare structure, shapes, dtypes and devices of the recomputed outputs with those of the
        forward; or nothing; or the values too, which keeps a copy of the outputs. The values are compared
        by default as well if f has assigned what it captured, draws from an iterator, or may tell a tensor
        by its identity.
    policy : callable, list of operators, or None
        What to keep beside the inputs: one of :mod:`funcckpt.policies`, a list of operators, or a
        function as :func:`create_selective_checkpoint_contexts` takes it. None keeps nothing.

    Returns
    -------
    callable
        f, checkpointed.

    Raises
    ------
    InputError
        f or an option is of the wrong kind, or an argument can be used only once (an iterator).
    ClosureError
        f uses a differentiated, batched or dual tensor that could not be found. Pass it as an argument.
    MutationError
        f changed an argument or a captured tensor in place.
    OutputError
        f returned tensors inside of an object that is no pytree node.
    EscapeError
        f stored a tensor outside of itself, under a transform.
    CheckpointError
        A recomputation gave something else than the forward did, or could not be right.

    Notes
    -----
    The transform is `jax.checkpoint`'s, described by Griewank and Walther, "Evaluating Derivatives"
    (2008), chapter 12, for loops, and by Chen et al., "Training Deep Nets with Sublinear Memory
    Cost" (arXiv 1604.06174), for networks.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import remat
    >>> def loss(w, x):
    ...     return remat(lambda x: torch.tanh(x @ w))(x).sum()
    >>> per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    >>> per_sample(torch.ones(3, 2), torch.zeros(5, 3)).shape
    torch.Size([5, 3, 2])
    """
    if torch.compiler.is_dynamo_compiling():
        return _made_compiled(f, preserve_rng_state, determinism_check, policy)
    positions = _several(int, static_argnums, "static_argnums", f)
    names = _several(str, static_argnames, "static_argnames", f)
    if determinism_check not in _CHECKS:
        raise InputError(
            f"{_title(f)}: determinism_check is one of {', '.join(map(repr, _CHECKS))}, not "
            f"{determinism_check!r}"
        )

    chooser = chooser_of(policy, _title(f))

    def made(f: Callable[..., Any]) -> Callable[..., Any]:
        name = _name_and_check(f)
        take_for_own(f)
        static = _positions_and_names(f, name, positions, names)
        return _Checkpointed(
            f, name, _Options(*static, preserve_rng_state, determinism_check, policy, chooser)
        )

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        return type(f)(made(f.__func__)) if isinstance(f, staticmethod | classmethod) else made(f)

    return wrap if f is None else wrap(f)


def _made_compiled(f: Callable[..., Any] | None, *options: Any) -> Any:
    """`remat(f)`, made in code that Dynamo traces: it need not be told which arguments are static."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(f, "__name__", None) or type(f).__name__  # Dynamo is not at home with __qualname__
        return lambda *args, **kwargs: call_compiled(f, name, args, kwargs, *options)

    return wrap if f is None else wrap(f)


# What decides whether a call is checkpointed, while `explain` compares: it is given f, a title, f called as
# it is, and f called with other options, checkpointed.
instead: ContextVar[Callable[[Any, str, Callable[[], Any], Callable[..., Any]], Any] | None]
instead = ContextVar("funcckpt_instead", default=None)


# f, and its arguments that are no tensors.
_Parts = tuple[Callable[..., Any], list[Any], dict[int | str, Any]]


class _Options(NamedTuple):
    static_argnums: frozenset[int]
    static_argnames: frozenset[str]
    preserve_rng_state: bool
    determinism_check: str
    policy: Any = None
    chooser: Chooser | None = None
    # What gives the values of f under transforms, where nothing is recorded: f again, unless there is a
    # cheaper way to them.
    forward: Callable[..., Any] | None = None


def _title(f: Callable[..., Any] | None) -> str:
    return "remat" if f is None else f"remat({_name(f)})"


def _name(f: Any) -> str:
    # An nn.Module takes long to say that it has none.
    name: str = (not isinstance(f, nn.Module) and getattr(f, "__qualname__", None)) or type(f).__qualname__
    return name


def _several(kind: type[T], value: Any, option: str, f: Any) -> tuple[T, ...]:
    values = tuple(value) if isinstance(value, (tuple, list, set, frozenset, range)) else (value,)
    if not all(isinstance(item, kind) for item in values):
        raise InputError(f"{_title(f)}: {option} takes one {kind.__name__} or several, not {value!r}")
    return values


def _positions_and_names(
    f: Callable[..., Any], name: str, positions: tuple[int, ...], names: tuple[str, ...]
) -> tuple[frozenset[int], frozenset[str]]:
    """Each parameter by position and by name, as far as the signature tells: a call may use both."""
    if not positions and not names:
        return frozenset(), frozenset()
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return frozenset(positions), frozenset(names)
    by_name = {p.name: i for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
    known = {p.name for p in parameters}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (missing := set(names) - known):
        raise InputError(
            f"remat({name}): static_argnames names {sorted(missing)}, and the parameters are {sorted(known)}."
        )
    count = len(parameters)
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        outside = [i for i in positions if not -count <= i < count]
        if outside:
            raise InputError(
                f"remat({name}): static_argnums names {outside}, and there are {count} parameters."
            )
    more_names = {n for n, i in by_name.items() if i in positions or i - count in positions}
    more_positions = {by_name[n] for n in names if n in by_name}
    return frozenset(positions) | more_positions, frozenset(names) | more_names


def _name_and_check(f: Callable[..., Any], taker: str = "remat") -> str:
    """What f is called in messages; raises if it cannot be checkpointed."""
    if not callable(f):
        raise InputError(
            f"{taker} takes a callable, not {type(f).__name__}. Write {taker}(f)(x), not {taker}(f(x))."
        )
    name = _name(f)
    for unwrapped in (f, getattr(f, "forward", None), type(f).__call__):
        if _is_generator_or_coroutine(unwrapped):
            raise InputError(
                f"{taker}({name}): a generator or coroutine function gives nothing that could be "
                "recomputed. Return the values in a list or tuple."
            )
    return name


def _is_generator_or_coroutine(f: Any) -> bool:
    # inspect's own functions ask an nn.Module for what it has not, which takes long.
    while isinstance(f, types.MethodType | functools.partial):
        f = f.func if isinstance(f, functools.partial) else f.__func__
    lazy = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return isinstance(f, types.FunctionType) and (
        f.__code__.co_flags & lazy != 0 or inspect.iscoroutinefunction(f)
    )


class _Checkpointed:
    """A function that was given to remat. An object, so that a copy of a model copies what it refers to."""

    def __init__(self, f: Callable[..., Any], name: str, options: _Options) -> None:
        # The __dict__ of other callables is their state, not an annotation.
        updated = ("__dict__",) if isinstance(f, types.FunctionType) else ()
        # Dynamo of torch 2.11 asks functions written in C for annotations, which they do not have.
        wrapped = f.forward if isinstance(f, nn.Module) else f
        assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(wrapped, name)]
        functools.update_wrapper(self, wrapped, assigned=assigned, updated=updated)
        self._made_of = f, name, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            f, name, options = self._made_of
            return call_compiled(f, name, args, kwargs, *options[2:5])
        if (ask := instead.get()) is not None:
            f, name, _ = self._made_of
            return ask(
                f,
                f"remat({name})",
                lambda: f(*args, **kwargs),
                lambda **changes: _call(*self._with(changes), args, kwargs),
            )
        return _call(*self._made_of, args, kwargs)

    def _with(self, changes: dict[str, Any]) -> tuple[Callable[..., Any], str, _Options]:
        """What this is made of, were it made with other options."""
        if not changes:
            return self._made_of
        f, _, options = self._made_of
        other: Any = remat(
            f,
            static_argnums=tuple(options.static_argnums),
            static_argnames=tuple(options.static_argnames),
            **{
                "preserve_rng_state": options.preserve_rng_state,
                "determinism_check": options.determinism_check,
                "policy": options.policy,
                **changes,
            },
        )
        made: tuple[Callable[..., Any], str, _Options] = other._made_of
        return made

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"remat({self._made_of[1]})"

    def __reduce__(self) -> Any:
        name: str = getattr(self, "__qualname__", "")
        with suppress(AttributeError):
            if operator.attrgetter(name)(sys.modules.get(self.__module__)) is self:
                return name  # a decorated function is found by its name
        return _Checkpointed, self._made_of


def _call(
    f: Callable[..., Any],
    name: str,
    options: _Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        if _torch.differentiates_in_inference_mode():
            raise CheckpointError(
                f"remat({name}): torch {torch.__version__} records nothing in inference mode, and gives "
                "zeros for the derivatives that are taken here. Use torch.no_grad() instead of it."
            )
        # Nothing is recorded at any level, so that there is nothing to save. f is free to switch grad
        # mode on inside, and forward mode and vmap need no checkpoint.
        return f(*args, **kwargs)
    plain = _torch.peek_interpreter_stack() is None and not _torch.in_dual_level()
    if _torch.is_tracing() and all(layer.kind != "grad" for layer in _torch.active_layers()):
        # make_fx records values and no graph of plain autograd, and forward mode saves nothing.
        return f(*args, **kwargs)

    def call(hidden: Sequence[Tensor] = ()) -> _Call:
        return _Call(f, name, options, Arguments(name, args, kwargs, *options[:2]), hidden)

    try:
        first = call()
    except Uninitialized:  # lazy modules: from their second call on
        return f(*args, **kwargs)
    if plain:
        return first.run_eager(f)
    try:
        return first.run_under_transforms()
    except net.HiddenCapture as error:
        # The search has missed a tensor, and the net has seen it: look while f runs, and lift it.
        first.undo()
        hidden = call().search_while_running()
        first.undo()
        if not hidden:
            raise error
        return call(hidden).run_under_transforms()


def call_compiled(
    f: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    policy: Any = None,
) -> Any:
    """A call in code that Dynamo traces, for which static arguments are like all others."""
    if policy is not None:
        compiled.refuse(f"remat({name}): policy")
    if not torch.is_grad_enabled():
        return f(*args, **kwargs)
    untraced = functools.partial(
        _call_untraced, name=name, preserve_rng_state=preserve_rng_state, determinism_check=determinism_check
    )
    return compiled.call(untraced, name, f, args, kwargs)


def _call_untraced(
    f: Callable[..., Any], name: str, preserve_rng_state: bool, determinism_check: str, args: Any
) -> Any:
    return _call(f, name, _Options(frozenset(), frozenset(), preserve_rng_state, determinism_check), args, {})


def _within(contexts: Iterable[AbstractContextManager[Any] | None]) -> AbstractContextManager[Any]:
    """Those contexts that there are, entered: most often none."""
    entered = [context for context in contexts if context is not None]
    if not entered:
        return _NOWHERE
    with ExitStack() as stack:
        for context in entered:
            stack.enter_context(context)
        return stack.pop_all()


_NOWHERE = nullcontext()


class _Before:
    """What captured tensors were before f ran, to see what it did to them."""

    def __init__(self, captured: Sequence[Tensor], copies: bool) -> None:
        self._captured = captured
        self._versions = versions_of(captured)
        self._copies = [_copy(x) for x in captured] if copies else []
        self._hooks = _counts_of_hooks(captured)
        self._gradients = _gradients(captured)
        # Other threads may accumulate meanwhile.
        self.accumulation = _torch.accumulation(captured) if threading.active_count() > 1 else None

    def check(self, name: str, where: Callable[[Tensor], str]) -> None:
        for x in self._differing(self._hooks, _counts_of_hooks(self._captured)):
            raise MutationError(
                f"remat({name}) registers a hook on {where(x)} ({describe(x)}), and would do so again in "
                "the recomputation. Register it outside."
            )
        for x in self._differing(self._gradients, _gradients(self._captured)):
            if self.accumulation is None or id(x) in self.accumulation.seen:
                raise MutationError(
                    f"remat({name}) calls backward(), which accumulates the gradient of {where(x)} "
                    f"({describe(x)}), and would do so again in the recomputation. Use torch.autograd.grad "
                    "inside of it."
                )

    def written(self) -> set[int]:
        """The ids of those that f has written to."""
        written = {id(x) for x in self._differing(self._versions, versions_of(self._captured))}
        copies = zip(self._captured, self._copies, strict=False)
        return written | {id(x) for x, copy in copies if copy is not None and not _same(x, copy)}

    def _differing(self, before: list[Any], now: list[Any]) -> list[Tensor]:
        if before == now:
            return []
        return [x for x, a, b in zip(self._captured, before, now, strict=True) if a != b]


class _Call(Call):
    """A call of a function that may have captured tensors.

    It knows its inputs by their ids alone: the tensors belong to the graph, which frees them as the
    backward goes.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        name: str,
        options: _Options,
        arguments: Arguments,
        hidden: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(name, code_of(f))
        self._options = options
        self._arguments = arguments
        # Arguments that hold nothing need no search.
        others = None if arguments.is_flat else arguments.others
        self._arguments_are_plain = not others and not arguments.static
        root = f if self._arguments_are_plain else (f, others, arguments.static or None)
        self._closure = Closure(root, stand_in=net.stand_in if net.is_replacing() else None)
        # Inside of another recomputation some tensors stand for others, by which f refers to them.
        # One tensor may stand for several by which f refers to it.
        self._originals: dict[int, list[int]] = {}
        captured = {id(x): x for x in (*self._closure.tensors, *hidden)}
        if net.is_replacing():
            for x in {**captured, **{id(x): x for x in arguments.tensors}}.values():
                self._originals.setdefault(id(net.stand_in(x)), []).append(id(x))
            captured = {id(stand_in): stand_in for stand_in in map(net.stand_in, captured.values())}
            arguments.tensors = [net.stand_in(x) for x in arguments.tensors]
        given = {id(x) for x in arguments.tensors}
        self._captured = [x for key, x in captured.items() if key not in given]
        # What is put in place of the original by a mode, since it cannot be by rebuilding f.
        # Held here, since an id is good for as long as its object lives.
        self._replaced = {id(x): x for x in (*hidden, *self._closure.loose)}
        self._met: set[int] = set()
        # Inputs that f writes to, without autograd: a recomputation does so on copies.
        self._written: frozenset[int] = frozenset()
        # What statistics were that f was given, by their positions, where it has updated them.
        self._statistics: dict[int, Tensor] = {}
        # The inputs as they were before the first run, if that may write to them unseen.
        self._copies: list[Tensor | None] = []
        self.replaces = bool(self._replaced)
        self._ids: list[list[int]] = []
        self._attributes: list[dict[str, Any]] = []
        self._layers: list[_torch.Layer] | None = None
        self._streams = world.random_streams(self._closure.generators, self._closure.reaches_packages)
        self._states: world.States | None = None
        # Where the first run has left them, if it was seen to draw from them.
        self._ends: list[int] = []
        self._world: world.World | None = None
        self._drawn: drawing.Drawn | None = None
        self._values: list[tuple[Tensor, int]] = []

    # -- the forward ------------------------------------------------------------------------

    def run_under_transforms(self) -> Any:
        self._layers = _torch.active_layers()
        inputs = self._take_inputs(self._captured)
        for i, x in enumerate(inputs):
            if _torch.has_torch_function(x):
                raise InputError(
                    f"remat({self._name}): {self.where(i)} ({describe(x)}) is a {type(x).__name__}, whose "
                    "__torch_function__ says what operators do. Recomputed under a transform it would be a "
                    "plain tensor: use remat around what does not need it, or no transform."
                )
        try:
            outputs = dispatch.call(self, inputs)
        finally:
            self._hand_over_kept()
        assert self._outputs is not None
        return self._outputs.assemble(outputs, inputs)

    def run_eager(self, f: Callable[..., Any]) -> Any:
        """Without transforms f runs as it is; the graph it leaves behind shows what it captured."""
        arguments = self._arguments.tensors
        captured = self._captured
        versions = self.versions(arguments)
        before = _Before(captured, self._closure.writes_unseen) if captured else None
        originals = [*arguments, *captured]
        retains = self._closure.retains_gradients
        inner = [_detached(x, retains) if x.requires_grad else x for x in arguments]
        first_node = _torch.next_sequence_number()
        given = [*inner, *captured]
        # f may make an argument require grad that did not: that is the caller's own.
        leaves = [weakref.ref(x if x._base is None else x._base) for x in inner if x.requires_grad]
        record = self.recorder()
        f_and_others = f, self._arguments.others, self._arguments.static
        hooked = net.Hooked() if self._closure.registers_hooks else None
        watch = None if before is None else before.accumulation
        if record is None:
            outputs = self._run_first(f_and_others, inner, given, watch, hooked)
        else:
            with record.of([self._keys(x)[0] for x in originals], given):
                outputs = self._run_first(f_and_others, inner, given, watch, hooked)
                record.note_graph(outputs, first_node)
        assert self._outputs is not None
        if not any([y.requires_grad for y in outputs]):
            return self._outputs.assemble(outputs, originals)  # nothing to recompute
        self.check_versions(versions, arguments)
        if retains:
            _retain(arguments, inner)
        written: Collection[int] = ()
        if before is not None:
            before.check(self._name, self._where_captured)
            written = before.written()
        if written:
            # The same writes again change nothing (a norm is limited, say), or the outputs will tell.
            self._closure.is_pure = False
        self._settle(outputs)
        own = {_edge(x) for x in inner if x.requires_grad}
        used = self._find_captured(outputs, own, first_node)
        if captured or used:
            self._settle_captured(captured, used, written)
        del inner, given
        self._check_escaped(functools.partial(_leads_to, edges=own))
        detached, active = tuple([y.detach() for y in outputs]), [y.requires_grad for y in outputs]
        inputs = self._take_inputs(used)
        if written:
            self._written = frozenset([i for i, x in enumerate(inputs) if id(x) in written])
        self._closure.seal()
        self.kept = None if record is None else record.finish()
        del outputs, arguments, captured, used, record, before, own
        if hooked is not None:
            hooked.remove()
        watched = self._closure.has_rnn or _torch.has_global_module_hook()
        if not watched and _outlive(leaves):
            raise EscapeError(
                f"remat({self._name}) stores a tensor that it has computed, or its input, where it cannot be "
                "seen. It belongs to the inside of the checkpoint, and its gradient would be lost: return it "
                "from the function, or store a detached copy."
            )
        attached = dispatch.attach(self, detached, active, inputs)
        self._hand_over_kept()
        return self._outputs.assemble(attached, originals)

    def _settle_captured(
        self, captured: Sequence[Tensor], used: Sequence[Tensor], written: Collection[int]
    ) -> None:
        """Which captured tensors are inputs, and in what way, now that f has run."""
        found = {*map(id, self._closure.tensors)}
        by_rebuilding = found.difference(map(id, self._closure.loose))
        self._replaced = {key: x for x in used for key in self._keys(x) if key not in by_rebuilding}
        self._met = self._replaced.keys() - found
        self.replaces = bool(self._replaced)
        unused = dict(zip(map(id, captured), captured, strict=True))
        for x in used:
            unused.pop(id(x), None)
        if self._originals:
            unused = {key: x for x in unused.values() for key in self._keys(x)}
        self._closure.keep_as_constants(unused)
        for x in unused.values() if written else ():
            if id(x) in written:
                raise MutationError(
                    f"remat({self._name}) changed {self._where_captured(x)} ({describe(x)}) in "
                    "place. The recomputation would start from the changed values: change it outside."
                )

    def search_while_running(self) -> list[Tensor]:
        """Tracked tensors that f uses and that the search has missed, seen by what it does to them."""
        inputs = (*self._arguments.tensors, *self._captured)
        mapped = {key: x for x in inputs for key in self._keys(x)}
        f, others, static = self._parts(self._closure.rebuild(mapped))
        args, kwargs = self._arguments.unflatten(self._arguments.tensors, others, static)
        with net.Watching({id(x): x for x in inputs}) as watching:
            f(*args, **kwargs)
        return watching.seen

    def undo(self) -> None:
        """As if f had not run: random streams are where they were before the first run."""
        world.set_streams(self._states or [])

    def _take_inputs(self, captured: Sequence[Tensor]) -> list[Tensor]:
        """Hand over the inputs, and keep their ids."""
        inputs = [*self._arguments.tensors, *captured]
        self._ids = [self._keys(x) for x in inputs]
        self._attributes = [_attributes(x) for x in inputs]
        self._arguments.tensors = []
        self._captured = []
        return inputs

    def _hand_over_kept(self) -> None:
        """What is kept belongs to the graph from here on."""
        if self.kept is not None:
            self.kept.tensors = []
            self.kept = None

    def recorder(self) -> recording.Record | None:
        chooser = self._options.chooser
        if chooser is None or _torch.is_tracing():
            return None
        return recording.Record(self, chooser)

    def _run_first(
        self,
        parts: _Parts,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        *contexts: AbstractContextManager[Any] | None,
    ) -> Tensors:
        f, others, static = parts
        args, kwargs = self._arguments.unflatten(tensors, others, static)
        content = self._arguments.content(args, kwargs)
        statistics = map(snapshot_of_statistics, tensors if self._closure.normalizes else ())
        snapshots = [(i, node) for i, node in enumerate(statistics) if node is not None]
        self._world = world.World()
        self._states = world.states(self._streams)
        if _torch.is_tracing():
            self._drawn = drawing.Drawn(self._name)
        cache = world.cleared_autocast_cache() if self._world.casts else None
        try:
            with _within((*contexts, cache, self._drawn, world.parametrizations_anew())):
                out = f(*args, **kwargs)
        except RuntimeError as error:
            if any(words in str(error) for words in _torch.WRITES_TO_INPUT):
                raise self._changed_input(tensors) from error
            raise
        self.random = world.have_moved(self._states) or (self._drawn is not None and self._drawn.seen)
        self.random |= self._closure.moves_streams
        if self.random:
            self._ends = world.marks(self._streams)
        else:
            self._states = None  # there is nothing to put back, and each is some kilobytes
        self._arguments.check_unchanged(self._name, content, args, kwargs)
        for i, node in snapshots:
            if node.settle(writes_unseen=False):
                if _torch.constant_of(tensors[i]) is None:  # batched: the outputs will tell
                    self._closure.is_pure = False
                elif node.snapshot is not None:
                    self._statistics[i] = node.snapshot[1]
        self._outputs = Outputs(self._name, out, given)
        return self._outputs.take()

    def _settle(self, outputs: Sequence[Tensor]) -> None:
        self._closure.settle(self._name)
        check = self._options.determinism_check
        compared = check == "values" or (check == "default" and not self._closure.is_pure)
        if compared and not _torch.is_tracing():
            self._values = [_torch.physical(y.detach().clone()) for y in outputs]

    def _check_escaped(self, is_lost: Callable[[Tensor], bool]) -> None:
        for tensor, where in self._closure.escaped():
            if is_lost(tensor):
                raise EscapeError(
                    f"remat({self._name}) stores a tensor ({describe(tensor)}) as {where}. It belongs to "
                    "the inside of the checkpoint, and its gradient would be lost: return it "
                    "from the function, or store a detached copy."
                )

    def _find_captured(
        self, outputs: Sequence[Tensor], own: Collection[_Edge], first_node: int
    ) -> list[Tensor]:
        """The captured tensors to which the graph of the outputs leads."""
        # An argument that is captured as well is an input twice.
        tensors = [x for x in (*self._arguments.tensors, *self._captured) if x.requires_grad]
        known = dict(zip(_edges(tensors), tensors, strict=True))
        searched = False
        used: list[Tensor] = []
        for edge in _entering(outputs, known, first_node):
            if edge in own:
                continue
            if edge not in known:
                if edge[1] == _LEAF and _is_private(edge[0], outputs):
                    continue  # made inside, for an inner optimisation
                if not searched:
                    searched = True
                    with world.streams_at(self._states or []):
                        for x in self.search_while_running():
                            stand_in = net.stand_in(x)
                            known[_edge(stand_in)] = stand_in
                            self._originals.setdefault(id(stand_in), []).append(id(x))
                if edge not in known:
                    raise self._not_found(edge, outputs)
            used.append(known[edge])
        return used

    def _not_found(self, edge: _Edge, outputs: Sequence[Tensor]) -> ClosureError:
        node, number = edge
        what = "a leaf"
        if number != _LEAF:
            shape = list(node._input_metadata[number].shape)
            dtype = str(node._input_metadata[number].dtype).removeprefix("torch.")
            what = f"{dtype}{shape}, the result of {node.name()}"
        else:
            what = f"a leaf, {describe(_leaf(node, outputs))}"
        return ClosureError(
            f"remat({self._name}) uses a tensor that requires grad and that it was not given ({what}), "
            "in a way that could not be traced. Pass it as an argument, so that it gets its gradient."
        )

    # -- the program --------------------------------------------------------------------------

    def versions(self, inputs: Sequence[Tensor]) -> list[int | None]:
        if self._closure.writes_unseen and not _torch.is_tracing():
            self._copies = [*map(_copy, inputs)]
        return super().versions(inputs)

    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        super().check_versions(before, inputs)
        for i, (x, copy) in enumerate(zip(inputs, self._copies, strict=False)):
            if copy is not None and i not in self._statistics and not _same(x, copy):
                raise self._changed(i, x)
        self._copies = []

    def run(self, *inputs: Tensor) -> Tensors:
        return self._run_under_net(inputs) if self._outputs is None else self._run_again(inputs)

    def take_layers(self) -> list[_torch.Layer] | None:
        """The levels at the time of the call, for the first run; None for any other."""
        layers, self._layers = self._layers, None
        return layers

    def _run_under_net(self, inputs: Tensors) -> Tensors:
        mapped = self._mapped(inputs)
        if (watch := recording.watch_of(self)) is not None:
            watch.label([keys[0] for keys in self._ids], inputs)
        for x, attributes in zip(inputs, self._attributes, strict=True):
            _dress(x, attributes)
        replacing = self._replacing(mapped)
        with self._closure.rebuilt_once(mapped, self._name) as rebuilt:
            f, others, static = self._parts(rebuilt)
            outputs = self._run_first(
                (self._options.forward or f, others, static),
                inputs[: self._arguments.arity],
                inputs,
                self._closure.caches_kept_clean(),
                replacing,
            )
        if replacing is not None:
            self._met = replacing.met
        self._settle(outputs)
        self._check_escaped(lambda x: _torch.constant_of(x) is None)
        self._closure.seal()
        return outputs

    def _run_again(self, inputs: Tensors) -> Tensors:
        assert self._world is not None and self._outputs is not None
        refused = self._closure.check_unchanged(self._name)
        if self.random and self._drawn is None and _torch.is_tracing():
            raise CheckpointError(
                f"remat({self._name}) has drawn random numbers before make_fx began to record. Draw them "
                "outside of the function, and pass them as arguments, or trace the forward too."
            )
        # batch_norm updates its running statistics without a word to the version counter: what looks
        # like them is copied, so that a recomputation does not update them again.
        inputs = tuple(
            [
                self._statistics.get(i, x).clone() if may_be_statistics(x) or i in self._written else x
                for i, x in enumerate(inputs)
            ]
        )
        if (watch := recording.watch_of(self)) is not None:
            watch.label([keys[0] for keys in self._ids], inputs)
        for x, attributes in zip(inputs, self._attributes, strict=True):
            _dress(x, attributes)
        mapped = self._mapped(inputs)
        f, others, static = self._parts(self._closure.rebuild(mapped))
        args, kwargs = self._arguments.unflatten(inputs[: self._arguments.arity], others, static)
        replacing = self._replacing(mapped)
        del others, static, inputs, mapped
        draws = self.random and self._options.preserve_rng_state and self._states is not None
        contexts = (
            replacing,
            net.Refusing(refused) if refused else None,
            self._closure.restored(),
            self._closure.caches_kept_clean(),
            None if self._world.is_here() else self._world.replayed(),
            world.cleared_autocast_cache() if self._world.casts else None,
            world.streams_at(self._states or []) if draws else None,
            _torch.without_vmap_mode() if draws else None,
            None if self._drawn is None else self._drawn.replayed(),
            world.parametrizations_anew(),
        )
        try:
            with _within(contexts):
                out = f(*args, **kwargs)
                if draws and self._drawn is None and self._ends:
                    self._check_streams()
        except RuntimeError as error:
            if replacing is not None and _torch.NEEDS_SETUP_CONTEXT in str(error):
                raise self._needs_a_level() from error
            raise
        if replacing is not None and self._met - replacing.met:
            label = describe(self._replaced[min(self._met - replacing.met)])
            raise MutationError(
                f"remat({self._name}) used a captured tensor ({label}) in the forward and does not find it "
                "in the recomputation: what refers to it was assigned another value since. Pass it as "
                "an argument."
            )
        again = Outputs(self._name, out)
        if self._options.determinism_check != "none":
            self._compare(again)
        return again.as_in(self._outputs)

    def _check_streams(self) -> None:
        if self._options.determinism_check != "none" and world.ended_elsewhere(
            self._states or [], self._ends
        ):
            raise CheckpointError(
                f"remat({self._name}) has not drawn the random numbers of the forward in the recomputation. "
                "Maybe another thread draws from the same stream: give each thread a torch.Generator of its "
                'own. If f may draw others, pass determinism_check="none".'
            )

    def _needs_a_level(self) -> ClosureError:
        """A mode sees what an autograd.Function is given at functorch levels only."""
        label = " and ".join(
            [f"{self._closure.where(key)} ({describe(x)})" for key, x in self._replaced.items()]
        )
        return ClosureError(
            f"remat({self._name}) finds {label} in what cannot be copied, so that it is recomputed under a "
            "functorch level, and calls an autograd.Function without setup_context, which no level allows. "
            "Pass the tensor as an argument, or give the Function a setup_context."
        )

    def _parts(self, rebuilt: Any) -> _Parts:
        """f and its arguments that are no tensors, out of what the closure has rebuilt."""
        if self._arguments_are_plain:
            return rebuilt, self._arguments.others, {}
        f, others, static = rebuilt
        return f, others or self._arguments.others, static or {}

    def _keys(self, x: Tensor) -> list[int]:
        """The ids of the tensors for which one stands."""
        return self._originals.get(id(x)) or [id(x)]

    def _mapped(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        return {key: x for keys, x in zip(self._ids, inputs, strict=True) for key in keys}

    def _where_captured(self, x: Tensor) -> str:
        return self._closure.where(self._keys(x)[0])

    def _replacing(self, mapped: dict[int, Tensor]) -> net.Replacing | None:
        replaced = {key: mapped[key] for key in self._replaced}
        if self._outputs is not None:
            replaced |= self._closure.statistics()
        return net.Replacing(replaced) if replaced else None

    def _compare(self, again: Outputs) -> None:
        assert self._outputs is not None
        difference = self._outputs.difference(again)
        if difference is None:
            outputs = again.as_in(self._outputs) if self._values else ()
            for i, ((here, levels), y) in enumerate(zip(self._values, outputs, strict=False)):
                there, now = _torch.physical(y.detach())
                # Another level (the vmap of jacfwd, say) may have batched it: then there is
                # nothing to compare with.
                if levels == now and not _close(here, there):
                    difference = f"other values in output {i}, {describe(here)}, than the forward"
                    break
        if difference is not None:
            raise self._not_the_same(difference)

    # -- what `net` and the backward need to know ----------------------------------------------

    def held(self) -> list[Tensor]:
        """The tensors that are kept here and not by the graph: constants of f, and copies to compare with."""
        return [
            *self._closure.constants,
            *self._closure.copies(),
            *self._statistics.values(),
            *[x for x, _ in self._values],
        ]

    def where(self, i: int) -> str:
        arity = self._arguments.arity
        return self._arguments.where(i) if i < arity else self._closure.where(self._ids[i][0])


# A place in the graph: a node and the number of one of its outputs, or the id of a leaf and _LEAF.
_Edge = tuple[Any, int]
_LEAF = -1
# The number of the nodes that accumulate in a leaf, whenever they were made.
_LAST = (1 << 64) - 1


def _edge(x: Tensor) -> _Edge:
    return (id(x), _LEAF) if x.grad_fn is None else (x.grad_fn, x.output_nr)


def _edges(tensors: Sequence[Tensor]) -> list[_Edge]:
    functions = map(operator.attrgetter("grad_fn"), tensors)
    return [
        (id(x), _LEAF) if function is None else (function, x.output_nr)
        for x, function in zip(tensors, functions, strict=True)
    ]


def _entering(outputs: Sequence[Tensor], known: Collection[_Edge], first_node: int) -> list[_Edge]:
    """The edges at which the graph of some tensors begins: known ones, leaves, and results of older nodes."""
    found = {_edge(y): None for y in outputs if y.requires_grad and y.grad_fn is None}
    pending: list[_Edge] = [(y.grad_fn, y.output_nr) for y in outputs]
    # Of the known ones, those that f has made, by writing to something.
    made = {edge for edge in known if edge[1] != _LEAF and edge[0]._sequence_nr() >= first_node}
    seen = set()
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node is None or (node in seen and edge not in made):
            continue
        order = node._sequence_nr()
        if order < first_node or edge in made:
            found[edge] = None
            continue
        seen.add(node)
        if order == _LAST and (variable := _variable(node)) is not None:
            found[id(variable), _LEAF] = None
        else:
            pending.extend(node.next_functions)
    return list(found)


def _leads_to(x: Tensor, edges: Collection[_Edge]) -> bool:
    """Whether the graph of a tensor leads to one of some others."""
    return any(edge in edges for edge in _entering([x], edges, 0))


def _variable(node: Any) -> Tensor | None:
    """The leaf to which a node leads, if it is the end of a graph."""
    # Other nodes may have an attribute of this name.
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None


def _outlive(references: Sequence[weakref.ref[Tensor]]) -> bool:
    """Whether somebody still holds what nobody should."""
    for generation in (0, 1, 2):  # f may have left a cycle of references
        if all(reference() is None for reference in references):
            return False
        gc.collect(generation)
    return any(reference() is not None for reference in references)


def _detached(x: Tensor, retains: bool) -> Tensor:
    """What f is given for a tensor that requires grad. A leaf would not say if it was told to retain that."""
    leaf = x.detach().requires_grad_()
    return _dress(leaf.view_as(leaf) if retains else leaf, _attributes(x))


def _retain(originals: Sequence[Tensor], inner: Sequence[Tensor]) -> None:
    for original, x in zip(originals, inner, strict=True):
        if x.requires_grad and x.retains_grad:
            original.retain_grad()


def _attributes(x: Tensor) -> dict[str, Any]:
    """What code can tell of a tensor beside its values: it may be a parameter, and carry marks."""
    # A copy: marks may be changed before the recomputation.
    return {**x.__dict__, "_is_param": True} if isinstance(x, nn.Parameter) else x.__dict__.copy()


def _dress(x: Tensor, attributes: dict[str, Any]) -> Tensor:
    """Give the attributes of a tensor to one that stands for it."""
    for name, value in attributes.items():
        if name not in x.__dict__:
            setattr(x, name, value)
    return x


def _counts_of_hooks(tensors: Iterable[Tensor]) -> list[int]:
    return [len(hooks) if (hooks := x._backward_hooks) else 0 for x in tensors]


def _gradients(tensors: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """What tells whether the `.grad` of tensors was assigned or added to."""
    return [(id(g), g._version) if x.is_leaf and (g := x.grad) is not None else None for x in tensors]


def _copy(x: Tensor) -> Tensor | None:
    return x.detach().clone() if x.layout == torch.strided and not x.is_meta else None


def _same(a: Tensor, b: Tensor) -> bool:
    a = a.detach()
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether values agree, up to the rounding of their dtype; where there are values."""
    if a.is_meta or b.is_meta:
        return True
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _leaf(key: int, outputs: Sequence[Tensor]) -> Tensor:
    """The leaf with an id, among those to which the graphs of the outputs lead."""
    pending, seen = [y.grad_fn for y in outputs], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := _variable(node)) is not None and id(variable) == key:
            return variable
        pending.extend([n for n, _ in node.next_functions])
    return next(y for y in outputs if id(y) == key)


def _is_private(key: int, outputs: Sequence[Tensor]) -> bool:
    """Whether nothing but the graph refers to a leaf, so that nobody can ask for its gradient."""
    leaf = _leaf(key, outputs)
    return sys.getrefcount(leaf) <= _references_of_private_leaf()


@functools.cache
def _references_of_private_leaf() -> int:
    """How many there are to a leaf that one local variable holds, and the graph."""
    with torch.enable_grad():
        y = torch.zeros((), requires_grad=True).sin()
    leaf = _variable(y.grad_fn.next_functions[0][0])  # type: ignore[union-attr]
    return sys.getrefcount(leaf)
