"""One call of a checkpointed function: what f is given, what it refers to, and the world in which it ran.

`Call` is the program at the root. It runs f twice: the first time as it is, and noting what a second run has
to know; and again, from its inputs, as it was then.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import world
from .._torch import autograd, functorch, wrappers
from ..closures import Found, Rebuilt, stored
from ..errors import CheckpointError, ClosureError, EscapeError, InputError, MutationError, describe
from ..policies.policies import Chooser
from ..tape import drawing, recording
from ..tape.tape import watch_of
from . import dispatch
from .flat import Arguments, Outputs
from .net import LEAF, Edge, edges_of
from .program import Leaf, Tensors
from .tensors import (
    MAX_BUFFER,
    Refusing,
    attributes_of,
    check_gradients,
    dress,
    gradient_of,
    is_close,
    is_lifted,
    is_same,
    may_be_buffer,
    references_of_private_leaf,
    requires_grad,
    version_of,
)


class Options(NamedTuple):
    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    policy: Any = None
    chooser: Chooser | None = None


class _Update(NamedTuple):
    """What a tensor was that f may update without being told so: running statistics, a count of batches."""

    version: int | None
    before: Tensor


class Call(Leaf):
    """One call of a checkpointed function, which captures tensors, or not.

    It knows its inputs by their ids alone: the tensors belong to the graph, which frees them as the backward
    goes.
    """

    # What f returned, once it has run.
    _outputs: Outputs | None = None

    def __init__(
        self,
        f: Callable[..., Any],
        name: str,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lifts_all: bool = False,
    ) -> None:
        """With `lifts_all`, captured tensors of plain autograd are inputs as well, used or not."""
        super().__init__()
        self._name, self._options = name, options
        self.code = code_of(f)
        self._arguments = arguments = Arguments(
            name, args, kwargs, options.static_argnums, options.static_argnames
        )
        # Arguments that hold nothing need no search.
        self._is_f_alone = arguments.is_flat and not arguments.static
        root = f if self._is_f_alone else (f, arguments.others, arguments.static)
        self._found = found = Found(root)
        self.arity = arguments.arity
        given = {id(x) for x in arguments.tensors}
        # What f has captured at levels is an input. What belongs to plain autograd alone the graph will show.
        lifted = {key for key, x in found.tensors.items() if is_lifted(x) or (lifts_all and x.requires_grad)}
        self._lifted = [found.tensors[key] for key in found.tensors if key in lifted and key not in given]
        # The ids of the inputs by which f refers to them beside its arguments.
        self._ids = {id(x): i for i, x in enumerate((*arguments.tensors, *self._lifted)) if id(x) in lifted}
        self._attributes = [attributes_of(x) for x in (*arguments.tensors, *self._lifted)]
        self._is_lazy = any(map(is_lazy, found.tensors.values()))
        self._constants = (
            []
            if self._is_lazy
            else [(x, version_of(x)) for x in found.tensors.values() if id(x) not in self._ids]
        )
        self._layers: list[functorch.Layer] | None = functorch.active_layers()
        # Arguments that levels wrap anew: autograd, which has the wrappers, sees no write to them.
        self._plain = [
            (weakref.ref(x), version_of(x), i)
            for i, x in enumerate(arguments.tensors)
            if self._layers and not wrappers.is_functorch_wrapped_tensor(x)
        ]
        self._updated: dict[int, _Update] = {}
        # Inputs that may be buffers: of levels, which of those f has updated, and of no level.
        self._rebound: dict[int, Any] = {}
        self._was_updated: set[int] = set()
        self._in_place: dict[int, Tensor] = {}
        self._buffers: set[int] = set()
        # The attributes of tensors that the graph owns, by their ids.
        self._marks: dict[int, dict[str, Any]] = {}
        # Tensors with a history that f has captured, and no output depends on.
        self._unused: dict[int, Tensor] = {}
        self._world: world.World | None = None
        self._streams = world.random_streams(found.streams, found.draws_elsewhere)
        self._states: world.States | None = None
        # Where the first run has left them, if it was seen to draw from them.
        self._ends: list[int] = []
        self._drawn: drawing.Drawn | None = None
        self._values: list[tuple[Tensor, int]] = []
        # Where captured tensors of plain autograd are, for the recomputation of this thread.
        self._where = threading.local()

    @property
    def name(self) -> str:
        return self._name

    def is_looked_at(self) -> bool:
        """Whether reverse mode looks at any tensor that f may use, so that there is something to save."""
        if self._is_lazy:  # a lazy module in its first call
            return False
        if self._layers and any([layer.kind == "grad" for layer in self._layers]):
            return True
        if functorch.is_tracing():
            return False  # make_fx records values, and no graph of plain autograd
        return any(map(requires_grad, (*self._arguments.tensors, *self._found.tensors.values())))

    def call(self) -> Any:
        """Run f under whatever transforms are active, keeping only its inputs."""
        inputs = self.take_inputs()
        constants = [x for x, _ in self._constants]
        buffers = self._take_buffers(inputs)
        pure = [*inputs]
        for i, x in buffers.items():
            if wrappers.is_functorch_wrapped_tensor(x):
                pure[i] = x.clone()
            else:
                with functorch.without_levels():
                    pure[i] = x.clone()
        try:
            outputs = dispatch.bind(self, pure)
        finally:
            # What is kept belongs to the graph from here on.
            if self.kept is not None:
                self.kept.tensors = []
                self.kept = None
        for i, x in reversed(self._rebound.items()):
            outputs, updated = outputs[:-1], outputs[-1]
            if i in self._was_updated:
                with torch.no_grad():
                    x.copy_(updated)
        self._rebound = dict.fromkeys(self._rebound, None)
        self.seal()
        assert self._outputs is not None
        return self._outputs.assemble(outputs, [*inputs, *constants])

    def _take_buffers(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Inputs that may be buffers given to `functional_call`: read as of the call, updated once.

        A buffer of a level is updated through one more output, since the first run has no level.
        """
        if not self._found.updates_statistics:
            return {}
        buffers = {i: x for i, x in enumerate(inputs) if may_be_buffer(x)}
        self._rebound = {i: x for i, x in buffers.items() if wrappers.is_functorch_wrapped_tensor(x)}
        self._in_place = {i: x for i, x in buffers.items() if i not in self._rebound}
        return buffers

    def take_inputs(self) -> list[Tensor]:
        inputs = [*self._arguments.tensors, *self._lifted]
        if self._layers:
            self._refuse_subclasses(inputs)
        self._arguments.tensors, self._lifted = [], []
        return inputs

    def seal(self) -> None:
        """From now on the graph owns what it has made, and this refers to it by id."""
        found = self._found.tensors
        owned = {key: x for key, x in found.items() if x.grad_fn is not None or is_lifted(x)}
        if owned:
            # f may read values through which nothing is differentiated.
            used = {*map(id, self.seen), *self._ids}
            with functorch.without_levels():  # which would wrap the results
                self._unused = {key: x.detach() for key, x in owned.items() if key not in used}
            self._marks = {key: x.__dict__.copy() for key, x in owned.items() if x.__dict__}
            self._found.seal(owned.values())
            self._constants = [
                (self._unused.get(id(x), x), version)
                for x, version in self._constants
                if id(x) not in owned or id(x) in self._unused
            ]
        self.seen = ()

    def _refuse_subclasses(self, inputs: Sequence[Tensor]) -> None:
        for i, x in enumerate(inputs):
            if wrappers.has_torch_function(x):
                raise InputError(
                    f"remat({self._name}): {self.where(i)} ({describe(x)}) is a {type(x).__name__}, whose "
                    "__torch_function__ says what operators do. Recomputed under a transform it would be a "
                    "plain tensor: use remat around what does not need it, or no transform."
                )

    def take_layers(self) -> list[functorch.Layer] | None:
        layers, self._layers = self._layers, None
        return layers

    def where(self, i: int) -> str:
        """What input `i` is to f, in words."""
        if i < self.arity:
            return self._arguments.where(i)
        key = next((key for key, number in self._ids.items() if number == i), 0)
        return self._found.where(key)

    # -- the first run ------------------------------------------------------------------------------

    def run(self, *inputs: Tensor) -> Tensors:
        return self._run_first(inputs) if self._outputs is None else self._run_again(inputs)

    def _run_first(self, inputs: Tensors) -> Tensors:
        found, before = self._found, inputs
        if self._rebound or self._in_place:
            inputs = tuple([x.clone() if i in self._rebound else x for i, x in enumerate(inputs)])
            inputs = tuple([self._in_place.get(i, x) for i, x in enumerate(inputs)])
            self._buffers, self._in_place = {*self._rebound, *self._in_place}, {}
        for x, attributes in zip(inputs, self._attributes, strict=True):
            dress(x, attributes)
        updates = self._before_updates()
        gradients = [
            (x, gradient_of(x)) for x in found.tensors.values() if found.calls_backward and x.is_leaf
        ]
        mapped = {key: inputs[i] for key, i in self._ids.items()}
        rebuilt = Rebuilt(found, mapped) if mapped else None
        self._world = world.World()
        self._states = world.states(self._streams)
        if functorch.is_tracing():
            self._drawn = drawing.Drawn(self._name)
        contexts = (
            rebuilt,
            world.cleared_autocast_cache() if self._world.casts else None,
            self._drawn,
            world.parametrizations_anew(),
        )
        with _within(contexts):
            f, others, static = self._parts(found.root if rebuilt is None else rebuilt.callable)
            args, kwargs = self._arguments.unflatten(inputs[: self.arity], others, static)
            content = self._arguments.content(args, kwargs)
            if (watch := watch_of(self)) is not None:
                watch.begin([*inputs, *[x for x, _ in self._constants]])
            try:
                out = f(*args, **kwargs)
            except RuntimeError as error:
                if any(words in str(error) for words in autograd.WRITES_TO_INPUT):
                    raise self._writes_to_input(inputs) from error
                raise
            finally:
                if rebuilt is not None:
                    rebuilt.write_back()
        self.random = (
            found.moves_streams
            or world.have_moved(self._states)
            or (self._drawn is not None and self._drawn.seen)
        )
        if self.random:
            self._ends = world.marks(self._streams)
        else:
            self._states = None  # there is nothing to put back, and each is some kilobytes
        self._arguments.check_unchanged(self._name, content, args, kwargs)
        if gradients:
            check_gradients(gradients, f"remat({self._name})", found.where)
        self._settle_updates(updates)
        for i in self._rebound:
            if inputs[i]._version or not is_same(inputs[i], wrappers.physical(before[i])[0]):
                self._was_updated.add(i)
        self._outputs = Outputs(self._name, out, [*inputs, *[x for x, _ in self._constants]])
        outputs = self._outputs.take()
        self._check_nothing_escaped(inputs)
        if self._options.determinism_check == "values" and not functorch.is_tracing():
            self._values = [wrappers.physical(y.detach().clone()) for y in outputs]
        return (*outputs, *[inputs[i] for i in self._rebound])

    def _check_nothing_escaped(self, inputs: Tensors) -> None:
        changed = self._found.changed()
        inside = {*map(id, inputs)} if changed else ()
        for x, where in stored(self._found, changed):
            if id(x) in inside or wrappers.constant_of(x) is None:
                raise EscapeError(
                    f"remat({self._name}) stores a tensor ({describe(x)}) as {where}. It belongs to the "
                    "inside of the checkpoint, and its gradient would be lost: return it from the function, "
                    "or store a detached copy."
                )

    def _before_updates(self) -> dict[int, _Update]:
        """Buffers of modules that are training, as they are: f may update them, and must not do so twice."""
        return {
            id(x): _Update(version_of(x), wrappers.physical(x.clone())[0])
            for x in self._buffers_of_f()
            if id(x) not in self._ids and not x.requires_grad and x.numel() <= MAX_BUFFER
        }

    def _buffers_of_f(self) -> list[Tensor]:
        if not self._found.updates_statistics:
            return []
        # And others that may be given in their place.
        others = [x for x in self._found.tensors.values() if may_be_buffer(x)]
        return self._found.buffers_in_training() + others

    def _settle_updates(self, updates: dict[int, _Update]) -> None:
        """Keep what buffers were that f has updated; anything else that it has written to is an error."""
        for i, (x, version) in enumerate(self._constants):
            update = updates.get(id(x))
            if update is None:
                if version_of(x) != version:
                    raise MutationError(
                        f"remat({self._name}) changed {self._found.where(id(x))} ({describe(x)}) in "
                        "place. The "
                        "recomputation would start from the changed values. Return the new value instead, or "
                        f"make it a buffer, of at most {MAX_BUFFER} elements, of a module that is training."
                    )
            elif version != version_of(x) or not is_same(x, update.before):
                self._updated[id(x)] = update
                self._constants[i] = x, None

    def finish(self, record: recording.Record | None) -> None:
        if record is not None:
            with functorch.grad_mode(False):
                self.kept = record.finish()

    def recorder(self) -> recording.Record | None:
        chooser = self._options.chooser
        if chooser is None or functorch.is_tracing():
            return None
        return recording.Record(self, chooser)

    def captured_at(self, edges: Sequence[Edge], outputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = [x for x in self._found.tensors.values() if x.requires_grad]
        found = dict(zip(edges_of(tensors), tensors, strict=True))
        captured = [found[edge] if edge in found else self._not_found(edge, outputs) for edge in edges]
        return [x for x in captured if x is not None]

    def _not_found(self, edge: Edge, outputs: Sequence[Tensor]) -> Tensor | None:
        if edge[1] == LEAF:
            leaf = next(x for x in wrappers.leaves_of(outputs) if id(x) == edge[0])
            # Made by f itself, for an inner optimisation: nobody can ask for its gradient.
            return leaf if sys.getrefcount(leaf) > references_of_private_leaf() else None
        node, number = edge
        described = node._input_metadata[number]
        dtype = str(described.dtype).removeprefix("torch.")
        raise ClosureError(
            f"remat({self._name}) uses a tensor that requires grad and that it was not given "
            f"({dtype}{list(described.shape)}, the result of {node.name()}), in a way that could not be "
            "traced. Pass it as an argument, so that it gets its gradient."
        )

    # -- a recomputation ------------------------------------------------------------------------------

    @contextmanager
    def where_is(self, captured: Sequence[tuple[int, Tensor]]) -> Iterator[None]:
        before = getattr(self._where, "captured", ())
        self._where.captured = captured
        try:
            yield
        finally:
            self._where.captured = before

    def _run_again(self, inputs: Tensors) -> Tensors:
        assert self._world is not None and self._outputs is not None
        found = self._found
        if self.random and self._drawn is None and functorch.is_tracing():
            raise CheckpointError(
                f"remat({self._name}) has drawn random numbers before make_fx began to record. Draw them "
                "outside of the function, and pass them as arguments, or trace the forward too."
            )
        for ref, version, i in self._plain:
            if (x := ref()) is not None and version_of(x) != version and i not in self._buffers:
                raise self._changed_between(self.where(i), x)
        for x, attributes in zip(inputs, self._attributes, strict=True):
            dress(x, attributes)
        if self._buffers:
            inputs = tuple([x.clone() if i in self._buffers else x for i, x in enumerate(inputs)])
        buffers = [inputs[i] for i in self._rebound]
        mapped = {key: inputs[i] for key, i in self._ids.items()}
        mapped.update(self._unused)
        for key, x in getattr(self._where, "captured", ()):
            if id(x) != key:
                mapped[key] = x
                if not found.has_met(key):
                    raise ClosureError(
                        f"remat({self._name}) uses a tensor that requires grad ({describe(x)}) and that it "
                        "was not given, in a way that could not be traced. Pass it as an argument."
                    )
        mapped.update({key: update.before.clone() for key, update in self._updated.items()})
        for key, attributes in self._marks.items():
            if key in mapped:
                dress(mapped[key], attributes)
        changed = found.changed()
        rebuilt = Rebuilt(found, mapped, changed) if mapped or changed or found.gone else None
        draws = self.random and self._options.preserve_rng_state and self._states is not None
        contexts = (
            None if rebuilt is None else _with_effects(rebuilt),
            self._refusing(),
            None if self._world.is_here() else self._world.replayed(),
            world.cleared_autocast_cache() if self._world.casts else None,
            world.streams_at(self._states or []) if draws else None,
            functorch.without_vmap_mode() if draws else None,
            None if self._drawn is None else self._drawn.replayed(),
            world.parametrizations_anew(),
        )
        with _within(contexts):
            f, others, static = self._parts(found.root if rebuilt is None else rebuilt.callable)
            args, kwargs = self._arguments.unflatten(inputs[: self.arity], others, static)
            del inputs, mapped, others, static
            if (watch := watch_of(self)) is not None:
                watch.begin()
            out = f(*args, **kwargs)
            if draws and self._drawn is None and self._ends:
                self._check_streams()
        again = Outputs(self._name, out)
        if self._options.determinism_check != "none":
            self._compare(again)
        return (*again.as_in(self._outputs), *buffers)

    def _changed_between(self, where: str, x: Tensor) -> MutationError:
        return MutationError(
            f"{where} ({describe(x)}) of remat({self._name}) was changed in place between the forward and "
            "the recomputation. Pass a copy of it, or change it after the backward."
        )

    def _was_changed(self, x: Tensor) -> MutationError:
        return self._changed_between(self._found.where(id(x)), x)

    def _refusing(self) -> AbstractContextManager[Any] | None:
        """If captured constants were changed in place since the forward: an error, if f uses one."""
        changed = [x for x, version in self._constants if version is not None and version_of(x) != version]
        return Refusing(changed, self._was_changed) if changed else None

    def _check_streams(self) -> None:
        if self._options.determinism_check != "none" and world.ended_elsewhere(
            self._states or [], self._ends
        ):
            raise CheckpointError(
                f"remat({self._name}) has not drawn the random numbers of the forward in the recomputation. "
                "Maybe another thread draws from the same stream: give each thread a torch.Generator of its "
                'own. If f may draw others, pass determinism_check="none".'
            )

    def _parts(self, root: Any) -> tuple[Callable[..., Any], Sequence[Any], dict[int | str, Any]]:
        """f, and its arguments that are no tensors, out of what was searched."""
        return (root, self._arguments.others, {}) if self._is_f_alone else root

    def _compare(self, again: Outputs) -> None:
        assert self._outputs is not None
        difference = self._outputs.difference(again)
        if difference is None and self._values:
            for i, ((here, levels), y) in enumerate(
                zip(self._values, again.as_in(self._outputs), strict=True)
            ):
                there, now = wrappers.physical(y.detach())
                # Another level (the vmap of jacfwd, say) may have batched it: then there is nothing to
                # compare with.
                if levels == now and not is_close(here, there):
                    difference = f"other values in output {i}, {describe(here)}, than the forward"
                    break
        if difference is not None:
            raise CheckpointError(
                f"remat({self._name}): the recomputation gave {difference}. The function has to do the "
                "same each time: give it what it depends on as arguments, or, if you know better, "
                'pass determinism_check="none".'
            )

    # -- versions -----------------------------------------------------------------------------------

    def versions(self, inputs: Sequence[Tensor]) -> list[int | None]:
        return [*map(version_of, inputs)]

    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        for i, (version, x) in enumerate(zip(before, inputs, strict=True)):
            if version != version_of(x):
                raise MutationError(
                    f"remat({self._name}) changed {self.where(i)} ({describe(x)}) in place. The "
                    "recomputation would start from the changed values: work on a copy (x.clone()) inside "
                    "the function, or "
                    "return the new value."
                )

    def changed_since(self, error: RuntimeError) -> RuntimeError:
        if "modified by an inplace operation" not in str(error):
            return error
        return MutationError(
            f"an input of remat({self._name}), or a tensor that it captured, was changed in place between "
            "the forward and the backward. Pass a copy of it (x.clone()), or change it after the backward. "
            f"Autograd says: {error}"
        )

    def _writes_to_input(self, tensors: Sequence[Tensor]) -> MutationError:
        """f sees its arguments as leaves, to which autograd lets nobody write."""
        candidates = [
            f"{self.where(i)} ({describe(x)})"
            for i, x in enumerate(tensors)
            if x.is_floating_point() or x.is_complex()
        ]
        return MutationError(
            f"remat({self._name}) writes in place to something that it was given or has captured, maybe "
            f"{' or '.join(candidates)}. The recomputation would start from the changed values: work "
            "on a copy (x.clone()) inside the function."
        )

    def held(self) -> list[Tensor]:
        """The tensors that are kept here and not by the graph: constants of f, and copies to compare with."""
        return [
            *[x for x, _ in self._constants],
            *[update.before for update in self._updated.values()],
            *[x for x, _ in self._values],
        ]


def code_of(f: Any) -> Any:
    """The code of a function or method, or the type of any other callable."""
    f = getattr(f, "__func__", f)
    return getattr(f, "__code__", None) or type(f)


@contextmanager
def _with_effects(rebuilt: Rebuilt) -> Iterator[None]:
    with rebuilt:
        yield
        rebuilt.repeat_effects()


def _within(contexts: Iterable[AbstractContextManager[Any] | None]) -> AbstractContextManager[Any]:
    """Those contexts that there are, entered one after the other."""
    stack = ExitStack()
    with ExitStack() as entering:
        for context in contexts:
            if context is not None:
                entering.enter_context(context)
        stack = entering.pop_all()
    return stack
