"""Functions that can reach nothing but their arguments: their calls need no search and no net.

A function is closed if it refers to nothing outside of itself, and names nothing but methods of tensors and
of Python's own types that are written in C. Given tensors of no subclass, without attributes, where no mode
is active, it has no way to a tensor that it was not given, or to a place where it could store one. That
nobody has changed the methods of tensors is checked in each call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeGuard

from torch import Tensor

from . import _torch, dispatch, net, world
from .flat import LEAVES, Arguments, Call, Outputs
from .lookup import assigned_by, global_names, holds_nothing, imported, is_of_library
from .program import Tensors

# What leads out of a tensor, or into it unseen.
_LEADS_OUT = frozenset(
    "data data_ptr detach_ grad grad_fn numpy output_nr requires_grad requires_grad_ retain_grad set_ "
    "untyped_storage".split()
)
# What Tensor has in Python beside what is written in C, and nobody can change.
_IN_PYTHON = vars(Tensor)
_METHODS = (*_IN_PYTHON.values(),)
_FUNCTIONS = {name: f for name, f in _IN_PYTHON.items() if isinstance(f, types.FunctionType)}
_NAMES = {
    name
    for kind in (Tensor, list, tuple, dict, int, float, str, slice)
    for name in dir(kind)
    if not name.startswith("_")
} - (_LEADS_OUT | _FUNCTIONS.keys())
_ARE_TORCHS = all(map(is_of_library, _FUNCTIONS.values()))
_ATOMS = frozenset({*LEAVES, bool}) - {Tensor}


def is_closed(f: Any, arguments: Arguments) -> TypeGuard[types.FunctionType]:
    """Whether f, called with some arguments, can reach nothing else."""
    return (
        type(f) is types.FunctionType
        and _names_nothing(f.__code__)
        and holds_nothing(f)
        and (arguments.are_tensors or _holds_nothing_else(arguments))
        and not any(map(vars, arguments.tensors))
        and (*_IN_PYTHON.values(),) == _METHODS
        and not _torch.has_modes()
        and not net.is_replacing()
    )


def _holds_nothing_else(arguments: Arguments) -> bool:
    return (
        arguments.is_flat
        and not arguments.static
        and _ATOMS.issuperset(map(type, arguments.others))
        and all([type(x) is Tensor for x in arguments.tensors])
    )


@functools.lru_cache(maxsize=4096)
def _names_nothing(code: types.CodeType) -> bool:
    """Whether code names nothing that could lead out of it."""
    return (
        _ARE_TORCHS
        and not (code.co_freevars or global_names(code) or imported(code) or assigned_by(code))
        and _all_names(code) <= _NAMES
    )


def _all_names(code: types.CodeType) -> set[str]:
    inner = [_all_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


class Closed(Call):
    """A call of a function that has captured nothing."""

    is_closed = True
    _world: world.World
    _states: world.States

    def __init__(self, f: types.FunctionType, name: str, arguments: Arguments, options: Any) -> None:
        super().__init__(name, f.__code__, arguments)
        self._f = f
        self._replays_draws: bool = options.preserve_rng_state
        self._compares: bool = options.determinism_check != "none"

    def call(self, plain: bool) -> Any:
        """What f returns, under whatever transforms are active; or plain, with none."""
        inputs, self._arguments.tensors = self._arguments.tensors, []
        outputs = self._attached(inputs) if plain else dispatch.call(self, inputs)
        assert self._outputs is not None
        return self._outputs.assemble(outputs, inputs)

    def _attached(self, inputs: list[Tensor]) -> Tensors:
        """f runs as it is, and what it returns is given the history that it is to have."""
        versions = self.versions(inputs)
        outputs = self.run(*[x.detach().requires_grad_() if x.requires_grad else x for x in inputs])
        active = [y.requires_grad for y in outputs]
        if not any(active):
            return outputs
        self.check_versions(versions, inputs)
        return dispatch.attach(self, tuple([y.detach() for y in outputs]), active, inputs)

    def take_layers(self) -> list[_torch.Layer] | None:
        return [] if self._outputs is None else None

    def held(self) -> list[Tensor]:
        return []

    def run(self, *inputs: Tensor) -> Tensors:
        args, kwargs = self._arguments.unflatten(inputs, self._arguments.others, {})
        if self._outputs is None:
            return self._run_first(inputs, args, kwargs)
        return self._run_again(args, kwargs)

    def _run_first(self, inputs: Tensors, args: list[Any], kwargs: dict[str, Any]) -> Tensors:
        self._world = world.World()
        states = world.states(world.random_streams(()))
        try:
            with world.cleared_autocast_cache() if self._world.casts else _NOWHERE:
                out = self._f(*args, **kwargs)
        except RuntimeError as error:
            if any(words in str(error) for words in _torch.WRITES_TO_INPUT):
                raise self._changed_input(inputs) from error
            raise
        self.random = world.have_moved(states)
        if self.random:
            self._states = states
        self._outputs = Outputs(self._name, out, inputs)
        return self._outputs.take()

    def _run_again(self, args: list[Any], kwargs: dict[str, Any]) -> Tensors:
        first = self._outputs
        assert first is not None
        if self.random or self._world.casts or not self._world.is_here():
            with self._as_before():
                out = self._function()(*args, **kwargs)
        else:
            out = self._function()(*args, **kwargs)
        if first.is_one_like(out):
            return (out,)
        again = Outputs(self._name, out)
        if self._compares and (difference := first.difference(again)) is not None:
            raise self._not_the_same(difference)
        return again.as_in(first)

    def _function(self) -> types.FunctionType:
        """f, or what it was if it was given defaults since, or other code."""
        f, code = self._f, self.code
        return f if f.__code__ is code and holds_nothing(f) else types.FunctionType(code, f.__globals__)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self._world.is_here():
                stack.enter_context(self._world.replayed())
            if self._world.casts:
                stack.enter_context(world.cleared_autocast_cache())
            if self.random and self._replays_draws:
                stack.enter_context(world.streams_at(self._states))
                stack.enter_context(_torch.without_vmap_mode())
            yield


_NOWHERE = nullcontext()
