"""One call of a checkpointed function: its arguments, what it refers to, and the world in which it ran.

`Call` is the program at the root. It runs f twice. The first run records what the second one must know. The
second run starts from the same inputs, in the same state.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import world
from .._torch import autograd, dynamo, functorch, wrappers
from ..closures import Found, Rebuilt, code_of, exchange_stored, kinds, put_marks, search, stored
from ..errors import CheckpointError, EscapeError, InputError, MutationError, describe
from ..policies.policies import Chooser
from ..tape import drawing
from ..tape.tape import unwatched, watch_of
from . import dispatch, net, tensors
from .flat import Arguments, Outputs
from .program import Program, Tensors, UserProgram, here
from .tensors import PLAIN_TYPES


class Options(NamedTuple):
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    chooser: Chooser | None = None


class Call(UserProgram):
    """One call of a checkpointed function.

    It knows its inputs only by their ids: the tensors belong to the graph, which frees them in the backward.
    """

    # What f returned, after its first run.
    _outputs: Outputs = None  # type: ignore[assignment]
    # The ids of the objects to which the first run has assigned, and the tensors of levels that it has stored
    # there. These are returned beside the outputs, since the levels of a run end with it.
    _assigned: Collection[int] = ()
    _stored: Sequence[Tensor] = ()
    _beside = 0  # how many tensors are returned beside the outputs: these, and updated buffers

    def __init__(self, f: Any, name: str, options: Options, args: Any, kwargs: Any) -> None:
        super().__init__(name)
        self._options, self.chooser = options, options.chooser
        self.code = code_of(f), options.determinism_check
        self._arguments = arguments = Arguments(args, kwargs)
        if (i := arguments.iterator) is not None:
            kind = type(arguments.others[i]).__name__
            raise InputError(
                f"remat({name}): {arguments.where_leaf(i)} is an iterator ({kind}), which the recomputation "
                "would find empty: pass a list or a tuple."
            )
        self.found = found = search(f if arguments.are_atoms else (f, arguments.others))
        if found.tensors:
            tensors.drop_stale(found.tensors, self.layers or ())
        if found.has_hooks_of_opacus:
            check_no_opacus(f"remat({name})", f, found)
        self.has_pullbacks, self.calls_compiled = found.has_pullbacks, found.calls_compiled
        if self.chooser is not None:
            self.codes = (*found.codes(), *arguments.flags())
        self.arity = arguments.arity
        # Captured tensors of functorch levels are inputs. The graph will show those of plain autograd.
        inputs = self._inputs = arguments.tensors
        # What f can see of arguments beside their values.
        self._marks = [*zip(map(tensors.attributes_of, inputs), map(type, inputs), strict=True)]
        # By id: the numbers of the inputs that f captured.
        self._numbers: dict[int, int] = {}
        if found.tensors and self.layers:
            is_wrapped = wrappers.is_functorch_wrapped_tensor
            numbers = {id(x): i for i, x in enumerate(inputs)}
            for key, x in found.tensors.items():
                if is_wrapped(x) and is_wrapped(wrappers.alive(x)):
                    number = self._numbers[key] = numbers.get(key, len(inputs))
                    if number == len(inputs):
                        inputs.append(x)
        self.count = len(inputs)
        # The first call of a lazy module is not checkpointed.
        self._is_lazy = bool(found.tensors) and tensors.has_lazy(found.tensors.values())
        # Captured tensors that are not inputs, and their versions. (Pairs would take the collector time.)
        self.constants: list[Tensor] = []
        self._versions: list[int | None] = []
        if found.tensors and not self._is_lazy:
            self.constants = [*found.tensors.values()]
            if self._numbers:
                self.constants = [x for x in self.constants if id(x) not in self._numbers]
            self._versions = tensors.versions_of(self.constants)
        # Arguments that no level has wrapped. Autograd saves a wrapper, whose version misses writes to them.
        self._plain: list[tuple[weakref.ref[Tensor], int | None, int]] = []
        if self.layers:
            for i, x in enumerate(inputs[: self.arity]):
                if not wrappers.is_functorch_wrapped_tensor(x):
                    self._plain.append((weakref.ref(x), tensors.version_of(x), i))
        # By id: the old values of captured buffers that f has updated.
        self._updated: dict[int, Tensor] = {}
        self._buffers: tensors.GivenBuffers | None = None
        # By id: captured tensors with a history, on which no output depends, detached.
        self._unused: dict[int, Tensor] = {}
        # The ids of leaves that the search did not find: f has made them, or they are hidden.
        self._own_or_hidden: set[int] = set()
        # The edges of captured results of something else, which the graph of a recomputation does not have.
        self._replaced: set[autograd.Edge] = set()
        # By id: the numbers of inputs that f has stored. The caller gets the tensors that it has given.
        self._stored_inputs: dict[int, int] = {}
        self._streams = world.random_streams(found.streams, found.draws_elsewhere)
        self._states: world.States | None = None
        # What marks the graph nodes of the first run of which it is not known whether f has made them.
        self._mark: object | None = None
        # Where the first run left the streams, if it drew from them.
        self._ends: list[int] = []
        self._drawn: drawing.Drawn | None = None

    def is_differentiated(self) -> bool:
        """Whether reverse mode tracks any tensor that f may use: else there is nothing to save."""
        if self._is_lazy:
            return False
        if self.layers and "grad" in map(functorch.kind_of_layer, self.layers):
            return True
        if functorch.is_tracing():
            return False  # make_fx records values, not the graph of plain autograd
        arguments = self._arguments
        if not arguments.is_flat and any(map(isinstance, arguments.others, repeat(torch.fx.Proxy))):
            return False  # so does torch.fx
        looks = tensors.requires_grad if self.layers else wrappers.require_grad
        return any(map(looks, (*self._inputs, *self.found.tensors.values())))

    @dynamo.hidden
    def call(self, program: Program | None = None) -> Any:
        """Run f under whatever transforms are active, keeping only its inputs.

        Or run `program`, which is made from this one; then the result is its outputs.
        """
        if self.found.opaque:
            self._check_not_sharded()
        inputs, self._inputs, self._arguments.tensors = self._inputs, [], []
        if self.layers and not PLAIN_TYPES.issuperset(map(type, inputs)):
            for i, x in enumerate(inputs):
                if wrappers.has_torch_function(x):
                    raise InputError(
                        f"remat({self.name}): {self.where(i)} ({describe(x)}) is a {type(x).__name__}, whose "
                        "__torch_function__ remat does not call under a transform. Pass "
                        "x.as_subclass(torch.Tensor), or call the function without remat there."
                    )
        handed_back = [*inputs, *self.constants]
        if self.found.updates_statistics:
            self._buffers = tensors.GivenBuffers(inputs, self.found.buffers_in_training())
            inputs = self._buffers.saved(inputs)
        try:
            outputs = dispatch.bind(program or self, inputs)
        finally:
            # From here on the graph owns the kept tensors.
            if self.kept is not None:
                self.kept.tensors = []
                self.kept = None
        count = len(outputs) - self._beside
        outputs, beside = outputs[:count], outputs[count:]
        if self._buffers is not None:
            self._buffers.settle(beside)
        if self._assigned:
            returned = dict(zip(map(id, self._stored), beside, strict=False))
            returned |= {number: handed_back[i] for number, i in self._stored_inputs.items()}
            self._stored, self._stored_inputs = (), {}
            exchange_stored(self.found, self._assigned, returned, wrappers.alive)
        self.seal()
        if program is not None:
            return outputs
        return self._outputs.assemble(outputs, handed_back)

    def _check_not_sharded(self) -> None:
        """Raise if f calls a module that FSDP has sharded. Around f, as in `nn.Remat`, it does no harm.

        FSDP1 collects the gradients inside of another FSDP1, if it does not cast the parameters.
        """
        around = getattr(self.found.root, "__self__", None)
        for module in [inner for x in self.found.opaque if isinstance(x, nn.Module) for inner in x.modules()]:
            names = [base.__name__ for base in type(module).__mro__]
            is_sharded = "FSDPModule" in names
            if "FullyShardedDataParallel" in names:
                fsdp: Any = module
                is_sharded = fsdp.mixed_precision.param_dtype is not None or fsdp._is_root is not False
            if module is not around and is_sharded:
                raise InputError(
                    f"remat({self.name}) calls a {type(module).__name__}, which FSDP has sharded: its "
                    "parameters would get no gradient. Use checkpoint without policy=, or with context_fn=; "
                    "or wrap the module in funcckpt.nn.Remat, and shard that."
                )

    def seal(self) -> None:
        """Let go of tensors that the graph owns. From now on they are known by id."""
        tensors_of_f = self.found.tensors
        if owned := {*self._numbers, *map(id, filter(autograd.grad_fn_of, tensors_of_f.values()))}:
            # f may read the values of captured tensors on which no output depends.
            if unused := owned - {*map(id, self.captured), *self._numbers}:
                with functorch.without_levels():  # which would wrap the results
                    # f may also differentiate with respect to them.
                    self._unused = {
                        key: wrappers.requires_grad_(tensors_of_f[key].detach()) for key in unused
                    }
            stay = [id(x) not in owned or id(x) in self._unused for x in self.constants]
            self._versions = [*compress(self._versions, stay)]
            self.constants = [self._unused.get(id(x), x) for x in compress(self.constants, stay)]
            self.found.seal([*map(tensors_of_f.__getitem__, owned)])
        if not self.call_level:
            self.captured = ()

    def where(self, i: int) -> str:
        if i < self.arity:
            return self._arguments.where(i)
        return self.found.where(next((key for key, number in self._numbers.items() if number == i), 0))

    def _around(self, *contexts: Any) -> Any:
        """What is around a run of f: the given contexts that are not None, and those that each run needs."""
        casts = world.own_autocast_cache() if self._world.casts else None
        entered = [*filter(None, (*contexts, casts, autograd.parametrizations_anew()))]
        return _all_of(entered) if len(entered) > 1 else entered[0] if entered else _NOTHING

    def _callable(self, inputs: Tensors, rebuilt: Rebuilt | None) -> Any:
        """f and its arguments for one run."""
        root, arguments = self.found.root, self._arguments
        if rebuilt is not None:
            root = rebuilt.callable
            if rebuilt.is_cyclic:
                here.left = *here.left, rebuilt.release
        f, leaves = (root, arguments.others) if arguments.are_atoms else root
        if functorch.number_of_dispatch_modes() and (watch := watch_of(self)) is not None:
            watch.begin([*inputs, *self.constants])
        return f, *arguments.unflatten(inputs[: self.arity], leaves)

    # -- the first run ------------------------------------------------------------------------------

    def run(self, *inputs: Tensor) -> Tensors:
        for x, (attributes, cls) in zip(inputs, self._marks, strict=False):
            if attributes or cls is not Tensor:
                put_marks(x, attributes, cls)
        return self._run_first(inputs) if self._outputs is None else self._run_again(inputs)

    def _run_first(self, inputs: Tensors) -> Tensors:
        found, buffers, before = self.found, self._buffers, inputs
        if buffers is not None:
            inputs = buffers.given(inputs)
        updates: dict[int, Tensor] = {}
        if found.updates_statistics:
            own = found.buffers_in_training()
            others = [*own, *tensors.buffers_among(found.tensors.values(), own)]
            updates = tensors.copies_of([x for x in others if id(x) not in self._numbers])
        gradients = []
        if found.calls_backward:
            gradients = tensors.gradients_behind((*found.tensors.values(), *inputs))
        rebuilt = None
        if self._numbers:
            rebuilt = Rebuilt(found, {key: inputs[i] for key, i in self._numbers.items()})
        self._world = world.World()
        self._states = world.states(self._streams)
        drawn = self._drawn = drawing.Drawn(self.name) if functorch.is_tracing() else None
        with self._around(rebuilt, drawn):
            f, args, kwargs = self._callable(inputs, rebuilt)
            failed = True
            try:
                out = f(*args, **kwargs)
                failed = False
            except RuntimeError as error:
                updated = {*map(id, found.buffers_in_training())}
                names = {id(x): found.where(id(x)) for x in self.constants}
                # A normalization in training writes to its count of batches first.
                counts = [where for key, where in names.items() if key in updated and "num_batches_" in where]
                self.check_error(error, inputs, [*names.values()], *counts[-1:])
                raise
            finally:
                if rebuilt is not None:
                    rebuilt.write_back()
                    if failed:  # what f has made and stored may be used all the same
                        exchange_stored(found, found.changed(), rebuilt.originals, wrappers.alive)
        moved = world.moved(self._states)
        self.random = bool(moved or (drawn and drawn.results) or found.moves_streams)
        # Of the other streams there is nothing to restore, and a state takes some kilobytes.
        if not found.moves_streams:
            self._states = moved if self.random else None
        if moved and self._states:
            self._ends = world.hashes(world.states([stream for stream, _ in self._states]))
        if not (arguments := self._arguments).is_flat:
            root = found.root if rebuilt is None else rebuilt.callable
            others = arguments.others if arguments.are_atoms else root[1]
            arguments.check_unchanged(self.name, inputs, others, args, kwargs)
        if gradients:
            names = {id(x): self.where(i) for i, x in enumerate(inputs)}
            tensors.check_gradients(gradients, f"remat({self.name})", names, found.where)
        if self.constants:
            self._settle_updates(updates)
        self._outputs = Outputs(self.name, out, [*inputs, *self.constants])
        outputs, self._outputs.tensors = tuple(self._outputs.tensors), []
        beside: list[Tensor] = []
        if assigned := found.changed():
            beside = self._stored_beside(assigned, inputs, {} if rebuilt is None else rebuilt.originals)
        if self._options.determinism_check == "values" and not functorch.is_tracing():
            self._outputs.values = [wrappers.physical(y.detach().clone()) for y in outputs]
        if buffers is not None:
            beside += buffers.updated(inputs, before)
        self._beside = len(beside)
        return (*outputs, *beside)

    def _stored_beside(
        self, assigned: Collection[int], inputs: Tensors, originals: dict[int, Any]
    ) -> list[Tensor]:
        """The tensors of levels that the first run has stored, which are returned beside the outputs."""
        found = self.found
        self._assigned = assigned
        self._stored = bound = []
        # The program's inputs stand for captured tensors, also in tuples and lists that f has made of them.
        reached = exchange_stored(found, self._assigned, originals, lambda x: x)
        given = {id(x): i for i, x in enumerate(inputs)}
        for x, where in stored(found, self._assigned):
            if wrappers.is_over(x):
                continue
            is_bound, is_given = wrappers.is_bound(x), id(x) in given
            is_replaced = self.replaces_levels and id(x) in reached
            if not (is_given or wrappers.is_constant(x)) or ((is_given or is_bound) and id(x) not in reached):
                raise EscapeError(
                    f"remat({self.name}) stores a tensor ({describe(x)}) as {where}: its gradient would "
                    "be lost. Return it, or store a detached copy (under vmap not in a closure)."
                )
            if is_given:
                self._stored_inputs[id(x)] = given[id(x)]
            elif is_bound or (is_replaced and wrappers.is_functorch_wrapped_tensor(x)):
                bound.append(x)
        return [*map(wrappers.alive, bound)]

    def _settle_updates(self, updates: dict[int, Tensor]) -> None:
        """Keep the old values of buffers that f has updated. A write to any other constant is an error."""
        versions, before = tensors.versions_of(self.constants), self._versions
        if not updates and versions == before:
            return
        self._updated = tensors.updated(
            [(x, updates[id(x)], v) for x, v in zip(self.constants, before, strict=True) if id(x) in updates]
        )
        for i, x in enumerate(self.constants):
            if id(x) in self._updated:
                before[i] = None
            elif versions[i] != before[i]:
                raise tensors.changed_inside(f"remat({self.name})", x, self.found.where(id(x)))

    def history(self) -> set[autograd.Edge]:
        # Each thread numbers its nodes by itself, so the numbers do not tell those of another thread.
        return autograd.edges_of(self.found.tensors.values())

    def doubt(self, nodes: Sequence[Any]) -> None:
        self._mark = object()
        for node in nodes:
            node.metadata[net.MARK] = self._mark

    def captured_at(self, edges: Mapping[autograd.Edge, Tensor | None]) -> list[Tensor]:
        tensors_of_f, results = self.found.tensors, {}
        if type(None) in map(type, edges.values()):
            results = {autograd.edge_of(x): x for x in filter(autograd.grad_fn_of, tensors_of_f.values())}
        captured, private = [], autograd.references_of_private_leaf()
        for edge, leaf in edges.items():
            if leaf is not None and edge[0] in tensors_of_f:
                captured.append(leaf)
            elif edge in results:
                captured.append(results[edge])
                self._replaced.add(edge)
            elif leaf is None:
                raise net.not_given(self, f"that requires grad ({net.result_of(*edge)})")
            # Otherwise f made the leaf itself, for an inner optimisation: nobody can ask for its gradient.
            # (Only TorchScript holds the parameters of a module that it has loaded.)
            elif (
                sys.getrefcount(leaf) > private
                or self.found.opaque
                or wrappers.is_functorch_wrapped_tensor(leaf)
            ):
                if kinds.is_expanded_weight(type(leaf)):
                    raise InputError(
                        f"remat({self.name}) uses an ExpandedWeight, which torch's gradients for each sample "
                        "put in place of a parameter. Use checkpoint or funcckpt.nn.Remat, without a policy."
                    )
                captured.append(leaf)
                # A wrapper comes from hooks around the call, for an input at a level.
                if not wrappers.is_functorch_wrapped_tensor(leaf):
                    self._own_or_hidden.add(id(leaf))
        return captured

    # -- a recomputation ------------------------------------------------------------------------------

    def _run_again(self, inputs: Tensors) -> Tensors:
        found, checks = self.found, self._options.determinism_check != "none"
        if self.random and self._drawn is None and functorch.is_tracing():
            raise CheckpointError(
                f"remat({self.name}) drew its random numbers before make_fx began to trace. Pass them as "
                "arguments, or trace the forward too."
            )
        for ref, version, i in self._plain:
            is_updated = self._buffers is not None and i in self._buffers
            if (x := ref()) is not None and tensors.version_of(x) != version and not is_updated:
                raise self._changed_between(x, self.where(i))
        if self._buffers is not None:
            inputs = self._buffers.given(inputs)
        changed, mapped = found.changed(), self._mapped(inputs)
        source, captured = here.captured
        leaves: dict[int, str] = {}
        results: set[autograd.Edge] = set()
        if source is self and (self._own_or_hidden or any([id(x) != key for key, x in captured])):
            keys = (key for key, x in captured if key in self._own_or_hidden or key in found.tensors)
            leaves = {key: describe(mapped[key]) for key in keys if key in mapped}
            results = self._replaced
        replaced: net.Replaced | None = None
        if leaves or results or self._mark:
            replaced = net.Replaced(self, [*inputs, *[x for _, x in captured]], leaves, results, self._mark)
        rebuilt = Rebuilt(found, mapped, changed) if mapped or changed or found.gone else None
        written: list[Tensor] = []
        if self.constants and tensors.versions_of(self.constants) != self._versions:
            pairs = zip(self.constants, self._versions, strict=True)
            written = [x for x, version in pairs if version is not None and x._version != version]
        states = self._states if self.random and self._options.preserve_rng_state else None
        with self._around(
            rebuilt,
            tensors.Refusing(written, self._changed_between) if written else None,
            None if self._world.is_here() else self._world.replayed(),
            world.streams_at(states) if states else None,
            functorch.without_vmap_mode() if states is not None else None,
            None if self._drawn is None else self._drawn.replayed(),
        ):
            f, args, kwargs = self._callable(inputs, rebuilt)
            del inputs, mapped
            out = f(*args, **kwargs)
            if states is not None and self._drawn is None and checks and self._ends:
                if world.ended_elsewhere(states, self._ends):
                    raise CheckpointError(
                        f"remat({self.name}): the recomputation drew other random numbers than the forward, "
                        "perhaps since another thread drew too. Give each thread a torch.Generator, or "
                        'pass determinism_check="none" to allow other numbers.'
                    )
        again = Outputs(self.name, out)
        if replaced is not None:
            replaced.check(again.tensors)
        if checks and (difference := self._outputs.difference(again)):
            raise CheckpointError(
                f"remat({self.name}): the recomputation gave {difference}. Pass what the function depends on "
                'as arguments, or turn this check off with determinism_check="none".'
            )
        # What the first run returned beside them has no gradient.
        return (*again.as_in(self._outputs), *[torch.empty(0)] * self._beside)

    def _mapped(self, inputs: Tensors) -> dict[int, Tensor]:
        """By id: the tensors that replace captured ones in a recomputation."""
        mapped = self._unused.copy()
        for key, i in self._numbers.items():
            mapped[key] = inputs[i]
        source, captured = here.captured
        for key, x in captured:
            # A tensor that `seal` let go may be gone, and the new one at its address.
            is_let_go = key in self.found.places and key not in self.found.tensors
            if source is self and (id(x) != key or is_let_go):
                mapped[key] = x
                if key not in self.found.places and key not in self._own_or_hidden:
                    raise net.not_given(self, f"that requires grad ({describe(x)})")
        if self._updated:
            with unwatched(), functorch.without_levels():  # f itself updates them, as in the first run
                mapped |= {key: update.clone() for key, update in self._updated.items()}
        return mapped

    # -- versions -----------------------------------------------------------------------------------

    def _changed_between(self, x: Tensor, where: str = "") -> MutationError:
        return tensors.changed_between(f"remat({self.name})", x, where or self.found.where(id(x)))

    def reads_grad_mode(self) -> bool:
        modules = any([isinstance(node.value, nn.RNNBase) for node in self.found.nodes.values()])
        return modules or "lstm" in self.found.names  # `torch.lstm`

    def kept_tensors(self) -> list[Tensor]:
        """The tensors that this call holds itself: constants of f, and copies of values."""
        return [*self.constants, *[x for x, _ in self._outputs.values], *self._updated.values()]


def has_hook_of_opacus(module: nn.Module) -> bool:
    """Whether Opacus collects what a layer is given, for per-sample gradients."""
    hooks = [getattr(hook, "__name__", "") for hook in module._forward_hooks.values()]
    return "capture_activations_hook" in hooks


def check_no_opacus(title: str, f: Any, found: Found) -> None:
    """Raise if f calls a module with the hooks of Opacus; around f they do no harm."""
    for module in [node.value for node in found.nodes.values() if isinstance(node.value, nn.Module)]:
        is_inside = module.training and module is not getattr(f, "__self__", None)
        if is_inside and has_hook_of_opacus(module):
            raise InputError(
                f"{title}: the hooks of GradSampleModule on a {type(module).__name__} inside of it would run "
                "again in the recomputation, and its parameters would get no grad_sample. Wrap single layers "
                "in funcckpt.nn.Remat, or use funcckpt.per_sample.clipped_sum."
            )


@contextmanager
def _all_of(contexts: list[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_NOTHING = nullcontext()
