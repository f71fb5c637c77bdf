"""One call of a checkpointed function: what f is given, what it refers to, and the world in which it ran.

`Call` is the program at the root. It runs f twice: the first time as it is, and noting what a second run has
to know; and again, from its inputs, as it was then.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import world
from .._torch import autograd, functorch, wrappers
from ..closures import Found, Rebuilt, stored
from ..errors import CheckpointError, ClosureError, EscapeError, InputError, MutationError, describe
from ..policies.policies import Chooser
from ..tape import drawing, recording
from ..tape.tape import watch_of
from . import dispatch
from .buffers import GivenBuffers, Update, before_updates
from .flat import Arguments, Outputs
from .net import LEAF, Edge
from .program import Leaf, Tensors
from .tensors import (
    MAX_BUFFER,
    Refusing,
    at_active_levels,
    attributes_of,
    check_gradients,
    dress,
    gradient_of,
    is_close,
    is_same,
    may_be_buffer,
    references_of_private_leaf,
    requires_grad,
    version_of,
    versions_of,
)


class Options(NamedTuple):
    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    policy: Any = None
    chooser: Chooser | None = None


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
        self._layers: list[functorch.Layer] | None = functorch.active_layers()
        self._arguments = arguments = Arguments(
            name, args, kwargs, options.static_argnums, options.static_argnames
        )
        # Arguments that hold nothing need no search.
        self._is_f_alone = arguments.is_flat and not arguments.static
        root = f if self._is_f_alone else (f, arguments.others, arguments.static)
        self._found = found = Found(root)
        self.arity = arguments.arity
        # What f has captured at levels is an input. What belongs to plain autograd alone the graph will show.
        self._lifted: list[Tensor] = []
        # The ids of the inputs by which f refers to them beside its arguments.
        self._ids: dict[int, int] = {}
        self._at_levels: set[int] = set()
        if found.tensors and (lifts_all or self._layers or wrappers.has_dual_level()):
            self._at_levels = at_active_levels(found.tensors.values())
            numbers = {id(x): i for i, x in enumerate(arguments.tensors)}
            for key, x in found.tensors.items():
                if key in self._at_levels or (lifts_all and x.requires_grad):
                    if key not in numbers:
                        numbers[key] = len(numbers)
                        self._lifted.append(x)
                    self._ids[key] = numbers[key]
        self._attributes = attributes_of((*arguments.tensors, *self._lifted))
        self._is_lazy = any(map(is_lazy, found.tensors.values()))
        # Captured tensors that are no inputs, and how often they were changed.
        self._constants: list[tuple[Tensor, int | None]] = []
        if not self._is_lazy:
            for key, x in found.tensors.items():
                if key not in self._ids:
                    self._constants.append((x, None if x.is_inference() else x._version))
        # Arguments that levels wrap anew: autograd, which has the wrappers, sees no write to them.
        self._plain: list[tuple[weakref.ref[Tensor], int | None, int]] = []
        if self._layers:
            for i, x in enumerate(arguments.tensors):
                if not wrappers.is_functorch_wrapped_tensor(x):
                    self._plain.append((weakref.ref(x), version_of(x), i))
        # Of captured buffers that f has updated, what they were.
        self._updated: dict[int, Update] = {}
        self._buffers: GivenBuffers | None = None
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
        if self._layers and functorch.any_grad(self._layers):
            return True
        if functorch.is_tracing():
            return False  # make_fx records values, and no graph of plain autograd
        tensors = (*self._arguments.tensors, *self._found.tensors.values())
        return any(map(wrappers.require_grad, tensors)) or (
            bool(self._layers) and any(map(requires_grad, tensors))
        )

    def call(self) -> Any:
        """Run f under whatever transforms are active, keeping only its inputs."""
        inputs = self.take_inputs()
        handed_back: list[Tensor] = [*inputs]
        for x, _ in self._constants:
            handed_back.append(x)
        if self._found.updates_statistics:
            self._buffers = GivenBuffers(inputs)
            inputs = self._buffers.saved(inputs)
        try:
            outputs = dispatch.bind(self, inputs)
        finally:
            # What is kept belongs to the graph from here on.
            if self.kept is not None:
                self.kept.tensors = []
                self.kept = None
        if self._buffers is not None:
            outputs = self._buffers.settle(outputs)
        self.seal()
        assert self._outputs is not None
        return self._outputs.assemble(outputs, handed_back)

    def take_inputs(self) -> list[Tensor]:
        inputs = [*self._arguments.tensors, *self._lifted]
        if self._layers and not _PLAIN.issuperset(map(type, inputs)):
            self._refuse_subclasses(inputs)
        self._arguments.tensors, self._lifted = [], []
        return inputs

    def seal(self) -> None:
        """From now on the graph owns what it has made, and this refers to it by id."""
        found = self._found.tensors
        if not found:
            return
        owned: dict[int, Tensor] = {}
        for key, x in found.items():
            if x.grad_fn is not None or key in self._at_levels:
                owned[key] = x
        if owned:
            # f may read values through which nothing is differentiated.
            used = {*map(id, self.seen), *self._ids}
            if unused := owned.keys() - used:
                with functorch.without_levels():  # which would wrap the results
                    self._unused = {key: owned[key].detach() for key in unused}
            for key, x in owned.items():
                if x.__dict__:
                    self._marks[key] = x.__dict__.copy()
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
        found, buffers, before = self._found, self._buffers, inputs
        if buffers is not None:
            inputs = buffers.of_first_run(inputs)
        for x, attributes in zip(inputs, self._attributes, strict=True):
            if attributes:
                dress(x, attributes)
        updates: dict[int, Update] = {}
        if found.updates_statistics:
            # And others that may be given in their place.
            others = [*found.buffers_in_training(), *filter(may_be_buffer, found.tensors.values())]
            updates = before_updates([x for x in others if id(x) not in self._ids])
        gradients = []
        if found.calls_backward:
            gradients = [(x, gradient_of(x)) for x in found.tensors.values() if x.is_leaf]
        rebuilt = None
        if self._ids:
            rebuilt = Rebuilt(found, {key: inputs[i] for key, i in self._ids.items()})
        self._world = world.World()
        self._states = world.states(self._streams)
        if functorch.is_tracing():
            self._drawn = drawing.Drawn(self._name)
        with _within(
            rebuilt,
            world.cleared_autocast_cache() if self._world.casts else None,
            self._drawn,
            autograd.parametrizations_anew(),
        ):
            f, args, kwargs = self._applied(found.root if rebuilt is None else rebuilt.callable, inputs)
            content = None if self._arguments.is_flat else pytree.tree_flatten((args, kwargs))
            if functorch.number_of_dispatch_modes() and (watch := watch_of(self)) is not None:
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
            or bool(world.moved(self._states))
            or (self._drawn is not None and self._drawn.seen)
        )
        if self.random:
            self._ends = world.marks(self._streams)
        else:
            self._states = None  # there is nothing to put back, and each is some kilobytes
        if content is not None:
            self._arguments.check_unchanged(self._name, content, args, kwargs)
        if gradients:
            check_gradients(gradients, f"remat({self._name})", found.where)
        if self._constants:
            self._settle_updates(updates)
        given = [*inputs]
        for x, _ in self._constants:
            given.append(x)
        self._outputs = Outputs(self._name, out, given)
        outputs, self._outputs.tensors = tuple(self._outputs.tensors), []
        self._check_nothing_escaped(inputs)
        if self._options.determinism_check == "values" and not functorch.is_tracing():
            self._values = [wrappers.physical(y.detach().clone()) for y in outputs]
        if buffers is None:
            return outputs
        buffers.note(inputs, before)
        return (*outputs, *buffers.outputs(inputs))

    def _check_nothing_escaped(self, inputs: Tensors) -> None:
        changed = self._found.changed()
        if not changed:
            return
        inside = {*map(id, inputs)}
        for x, where in stored(self._found, changed):
            if id(x) in inside or wrappers.constant_of(x) is None:
                raise EscapeError(
                    f"remat({self._name}) stores a tensor ({describe(x)}) as {where}. It belongs to the "
                    "inside of the checkpoint, and its gradient would be lost: return it from the function, "
                    "or store a detached copy."
                )

    def _settle_updates(self, updates: dict[int, Update]) -> None:
        """Keep what buffers were that f has updated; anything else that it has written to is an error."""
        for i, (x, version) in enumerate(self._constants):
            now = None if x.is_inference() else x._version
            update = updates.get(id(x))
            if update is None:
                if now != version:
                    raise MutationError(
                        f"remat({self._name}) changed {self._found.where(id(x))} ({describe(x)}) in "
                        "place. The recomputation would start from the changed values. Return the new value "
                        f"instead, or make it a buffer of a module that is training, of at most {MAX_BUFFER} "
                        "elements."
                    )
            elif now != version or not is_same(x, update.before):
                self._updated[id(x)] = update
                self._constants[i] = x, None

    def finish(self, record: recording.Record) -> None:
        with functorch.grad_mode(False):
            self.kept = record.finish()

    def recorder(self) -> recording.Record | None:
        chooser = self._options.chooser
        if chooser is None or functorch.is_tracing():
            return None
        return recording.Record(self, chooser)

    def captured_at(self, edges: Sequence[Edge], outputs: Sequence[Tensor]) -> list[Tensor]:
        found: dict[Edge, Tensor] = {}
        for x in self._found.tensors.values():
            if x.requires_grad:
                found[(id(x), LEAF) if (node := x.grad_fn) is None else (node, x.output_nr)] = x
        captured = []
        for edge in edges:
            here = found[edge] if edge in found else self._not_found(edge, outputs)
            if here is not None:
                captured.append(here)
        return captured

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
            if (x := ref()) is not None and version_of(x) != version:
                if self._buffers is None or i not in self._buffers:
                    raise self._changed_between(self.where(i), x)
        for y, attributes in zip(inputs, self._attributes, strict=True):
            if attributes:
                dress(y, attributes)
        buffers: Sequence[Tensor] = ()
        if self._buffers is not None:
            inputs = self._buffers.of_recomputation(inputs)
            buffers = self._buffers.outputs(inputs)
        changed = found.changed()
        mapped = self._mapped(inputs)
        rebuilt = None
        if mapped or changed or found.gone:
            rebuilt = Rebuilt(found, mapped, changed, repeats_effects=True)
        draws = self.random and self._options.preserve_rng_state and self._states is not None
        with _within(
            rebuilt,
            self._refusing() if self._constants else None,
            None if self._world.is_here() else self._world.replayed(),
            world.cleared_autocast_cache() if self._world.casts else None,
            world.streams_at(self._states or []) if draws else None,
            functorch.without_vmap_mode() if draws else None,
            None if self._drawn is None else self._drawn.replayed(),
            autograd.parametrizations_anew(),
        ):
            f, args, kwargs = self._applied(found.root if rebuilt is None else rebuilt.callable, inputs)
            del inputs, mapped
            if functorch.number_of_dispatch_modes() and (watch := watch_of(self)) is not None:
                watch.begin()
            out = f(*args, **kwargs)
            if draws and self._drawn is None and self._ends:
                self._check_streams()
        again = Outputs(self._name, out)
        if self._options.determinism_check != "none" and (self._values or again.form != self._outputs.form):
            self._compare(again)
        return (*again.as_in(self._outputs), *buffers)

    def _mapped(self, inputs: Tensors) -> dict[int, Tensor]:
        """What stands for captured tensors in a recomputation, by their ids."""
        mapped = self._unused.copy()
        for key, i in self._ids.items():
            mapped[key] = inputs[i]
        for key, x in getattr(self._where, "captured", ()):
            if id(x) != key:
                mapped[key] = x
                if not self._found.has_met(key):
                    raise ClosureError(
                        f"remat({self._name}) uses a tensor that requires grad ({describe(x)}) and that it "
                        "was not given, in a way that could not be traced. Pass it as an argument."
                    )
        for key, update in self._updated.items():
            mapped[key] = update.before.clone()
        for key, attributes in self._marks.items():
            if key in mapped:
                dress(mapped[key], attributes)
        return mapped

    def _changed_between(self, where: str, x: Tensor) -> MutationError:
        return MutationError(
            f"{where} ({describe(x)}) of remat({self._name}) was changed in place between the forward and "
            "the recomputation. Pass a copy of it, or change it after the backward."
        )

    def _was_changed(self, x: Tensor) -> MutationError:
        return self._changed_between(self._found.where(id(x)), x)

    def _refusing(self) -> AbstractContextManager[Any] | None:
        """If captured constants were changed in place since the forward: an error, if f uses one."""
        changed = []
        for x, version in self._constants:
            if version is not None and x._version != version:
                changed.append(x)
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

    def _applied(self, root: Any, inputs: Tensors) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """f and its arguments, out of what was searched and the inputs."""
        arguments = self._arguments
        f, others, static = (root, arguments.others, {}) if self._is_f_alone else root
        if arguments.are_tensors:
            return f, [*inputs[: self.arity]], {}
        return f, *arguments.unflatten(inputs[: self.arity], others, static)

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

    def check_versions(self, before: Sequence[int | None], inputs: Sequence[Tensor]) -> None:
        for i, (version, now) in enumerate(zip(before, versions_of(inputs), strict=True)):
            if version != now:
                raise MutationError(
                    f"remat({self._name}) changed {self.where(i)} ({describe(inputs[i])}) in place. The "
                    "recomputation would start from the changed values: work on a copy (x.clone()) inside "
                    "the function, or return the new value."
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


def _within(*contexts: AbstractContextManager[Any] | None) -> AbstractContextManager[Any]:
    """Those contexts that there are, entered one after the other."""
    some = [*filter(None, contexts)]
    if not some:
        return _NOWHERE
    with ExitStack() as entering:
        for context in some:
            entering.enter_context(context)
        return entering.pop_all()


_NOWHERE = nullcontext()
_PLAIN = frozenset({Tensor, nn.Parameter})
