"""Functions that can reach nothing but their arguments: their calls need no search and no net.

A function is closed if it refers to nothing outside of itself, and names nothing but methods of tensors and
of Python's own types that are written in C. Given tensors of no subclass, without attributes, where no mode
is active, it has no way to a tensor that it was not given, or to a place where it could store one. That
nobody has changed the methods of tensors is checked in each call.

Such a function may run where it is called, among the levels of the caller, if only the innermost of them
differentiates its arguments: no other level would record what it computes. All else (several levels that
differentiate, other spellings of `dispatch`) goes the way of all programs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch, dispatch, net, world
from .closure import WRITES_UNSEEN
from .flat import Call, Outputs, are_distinct_tensors
from .lookup import assigned_by, global_names, holds_nothing, imported, is_of_library
from .program import Tensors

# What leads out of a tensor, or into it unseen, and what draws random numbers.
_LEADS_OUT = frozenset(WRITES_UNSEEN) | frozenset(
    "grad grad_fn output_nr requires_grad requires_grad_ retain_grad".split()
)
_DRAWS = frozenset(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ "
    "uniform_".split()
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
} - (_LEADS_OUT | _DRAWS | _FUNCTIONS.keys())
_ARE_TORCHS = all(map(is_of_library, _FUNCTIONS.values()))


def code_if_closed(f: Any) -> types.CodeType | None:
    """The code of f, if that can reach nothing but what it is given."""
    return f.__code__ if type(f) is types.FunctionType and _names_nothing(f.__code__) else None


def is_closed(f: Any, code: types.CodeType, args: tuple[Any, ...]) -> bool:
    """Whether f, whose code is closed, can reach nothing else in a call with some arguments."""
    return (
        f.__code__ is code
        and holds_nothing(f)
        and are_distinct_tensors(args)
        and not any(map(vars, args))
        and (*_IN_PYTHON.values(),) == _METHODS
        and _torch.is_bare()
        and not net.is_replacing()
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
    """A call of a function that has captured nothing, with tensors for arguments."""

    is_closed = True

    def __init__(self, f: Any, name: str, compares: bool) -> None:
        super().__init__(name, f.__code__)
        self._f = f
        self._compares = compares
        self._dtype = torch.get_default_dtype()

    def call(self, inputs: Sequence[Tensor], plain: bool) -> Any:
        """What f returns, under whatever transforms are active; or plain, with none."""
        inputs = _torch.all_alive(inputs)
        if plain:
            outputs = self._attached(inputs, inputs, 0)
        elif level := dispatch.only_level_that_looks(inputs, "grad"):
            outputs = self._attached(inputs, _torch.unwrapped_for_grad(inputs, level), level)
        elif dispatch.only_level_that_looks(inputs, "jvp"):
            outputs = self._run_checked(inputs, _torch.all_below_wrappers(inputs))  # which keeps nothing
        else:
            outputs = dispatch.call(self, inputs)
        assert self._outputs is not None
        return self._outputs.assemble(outputs, inputs)

    def _run_checked(self, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> Tensors:
        """Raise if f changes the values, which no level wraps."""
        versions = self.versions(values)
        outputs = self.run(*inputs)
        self.check_versions(versions, values)
        return outputs

    def _attached(self, inputs: Sequence[Tensor], values: Sequence[Tensor], level: int) -> Tensors:
        """f runs where it is called, and what it returns is given the history that it is to have.

        `values` are those of the inputs below the only level that differentiates them.
        """
        leaves = _torch.as_leaves(inputs, values, level)
        outputs = self._run_checked(leaves, _torch.all_below_wrappers(values) if level else values)
        active = [*map(_torch.require_grad, outputs)]
        if not any(active):
            return outputs
        detached = _torch.detached(outputs, level)
        del outputs  # and with them the graph of f
        return dispatch.attach(self, detached, active, inputs, level)

    def where(self, i: int) -> str:
        return f"argument [{i}]"

    def take_layers(self) -> list[_torch.Layer] | None:
        return [] if self._outputs is None else None

    def held(self) -> list[Tensor]:
        return []

    def run(self, *inputs: Tensor) -> Tensors:
        return self._run_first(inputs) if self._outputs is None else self._run_again(inputs)

    def _run_first(self, inputs: Tensors) -> Tensors:
        try:
            out = self._f(*inputs)
        except RuntimeError as error:
            if any(words in str(error) for words in _torch.WRITES_TO_INPUT):
                raise self._changed_input(inputs) from error
            raise
        self.random = False
        self._outputs = Outputs(self._name, out, inputs, views_tell=True)
        return self._outputs.take()

    def _run_again(self, inputs: Tensors) -> Tensors:
        first, f, code = self._outputs, self._f, self.code
        assert first is not None
        if f.__code__ is not code or not holds_nothing(f):
            f = types.FunctionType(code, f.__globals__)  # it was given defaults since, or other code
        if _torch.is_bare() and torch.get_default_dtype() is self._dtype:
            out = f(*inputs)
        else:
            with world.World.bare(self._dtype).replayed():
                out = f(*inputs)
        if first.is_one_like(out):
            return (out,)
        again = Outputs(self._name, out)
        if self._compares and (difference := first.difference(again)) is not None:
            raise self._not_the_same(difference)
        return again.as_in(first)
