"""Functions that can reach nothing but their arguments: their calls need no search and no net.

A function is closed if it refers to nothing outside of itself but to tensors and constants, in variables
around it, and names nothing but methods of tensors and of Python's own types that are written in C, and what
`names` allows. Given tensors of no subclass, without attributes, where no mode is active, it has no way to a
tensor that it was not given, or to a place where it could store one. That nobody has changed the methods of
tensors, or what the names stand for, is checked in each call.

Such a function may run where it is called, among the levels of the caller, if only the innermost of them
differentiates its arguments: no other level would record what it computes. All else (several levels that
differentiate, other spellings of `dispatch`) goes the way of all programs.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from . import _torch, dispatch, net, recompute, world
from .errors import MutationError
from .flat import Call, Outputs, are_distinct_tensors
from .names import NOTHING, Found, Names, is_constant, methods_are_torchs, names_if_closed
from .nodes import versions_of
from .program import Tensors, pulled


def names_of(f: Any) -> Names | None:
    """What f names, if its code can reach nothing but what it is given, and its variables hold."""
    return names_if_closed(f.__code__) if type(f) is types.FunctionType else None


def closed_call(
    f: Any, name: str, names: Names, args: tuple[Any, ...], compares: bool = True
) -> tuple[Closed, Sequence[Tensor]] | None:
    """A call of f with some arguments, and its inputs, if f can reach nothing else."""
    if (
        (f.__code__ is names.code or f.__code__ == names.code)
        and not (f.__defaults__ or f.__kwdefaults__)
        and are_distinct_tensors(args)
        and not any(map(vars, args))
        and methods_are_torchs()
        and _torch.kernels_are_torchs()
        and _torch.is_bare()
        and not net.is_replacing()
        and (found := names.find(f)) is not None
    ):
        if f.__closure__ is None:
            return Closed(f, name, found, compares), args
        if (taken := _variables(f.__closure__, args)) is not None:
            inputs, variables = taken
            return Closed(f, name, found, compares, len(args), variables), inputs
    return None


# What a variable of an enclosing function holds: an input, by its number, or else a constant.
_Variable = tuple[int | None, Any]


def _variables(
    cells: tuple[types.CellType, ...], args: Sequence[Tensor]
) -> tuple[list[Tensor], list[_Variable]] | None:
    """The inputs of a function around some variables, and what these hold; None if that is something else."""
    inputs = [*args]
    variables: list[_Variable] = []
    numbers = {id(x): i for i, x in enumerate(args)}
    for cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # it has none yet
            return None
        if are_distinct_tensors((value,)) and not vars(value):
            number = numbers.setdefault(id(value), len(inputs))
            if number == len(inputs):
                inputs.append(value)
            variables.append((number, None))
        elif is_constant(value):
            variables.append((None, value))
        else:
            return None
    return inputs, variables


class Closed(Call):
    """A call of a function that reaches no tensor but its inputs.

    These are its arguments, `arity` of them, and what the variables around it hold. Of the function itself
    nothing is kept: it may be given defaults, other code or other variables after the call.
    """

    is_closed = True

    def __init__(
        self,
        f: types.FunctionType,
        name: str,
        found: Found,
        compares: bool,
        arity: int | None = None,
        variables: Sequence[_Variable] = (),
    ) -> None:
        super().__init__(name, f.__code__)
        self._globals = f.__globals__
        self._found = found
        self._compares = compares
        self._arity, self._variables = arity, variables
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
        versions = versions_of(values)
        outputs = self._run_first(inputs)
        self.check_versions(versions, values)
        return outputs

    def _attached(self, inputs: Sequence[Tensor], values: Sequence[Tensor], level: int) -> Tensors:
        """f runs where it is called, and what it returns is given the history that it is to have.

        `values` are those of the inputs below the only level that differentiates them.
        """
        wrt = compress(range(len(inputs)), map(_torch.require_grad, inputs))
        leaves, _ = _torch.with_leaves(values, wrt, level)
        outputs = self._run_checked(leaves, _torch.all_below_wrappers(values) if level else values)
        active = [*map(_torch.require_grad, outputs)]
        if not any(active):
            return outputs
        detached = _torch.detached(outputs, level)
        del outputs  # and with them the graph of f
        return dispatch.attach(self, detached, active, inputs, level)

    def where(self, i: int) -> str:
        if self._arity is None or i < self._arity:
            return f"argument [{i}]"
        numbers = [number for number, _ in self._variables]
        return f"closure variable {self.code.co_freevars[numbers.index(i)]!r}"

    def changed_since(self, error: RuntimeError) -> RuntimeError:
        names = [
            repr(name)
            for name, (number, _) in zip(self.code.co_freevars, self._variables, strict=False)
            if number is not None
        ]
        if not names or "modified by an inplace operation" not in str(error):
            return error
        return MutationError(
            f"remat({self._name}): an argument, or what it captured ({', '.join(names)}), was changed in "
            "place between the forward and the recomputation. Pass a copy of it, or change it after the "
            f"backward. Autograd says: {error}"
        )

    def take_layers(self) -> list[_torch.Layer] | None:
        return [] if self._outputs is None else None

    def held(self) -> list[Tensor]:
        return []

    def run(self, *inputs: Tensor) -> Tensors:
        return self._run_first(inputs) if self._outputs is None else self._run_again(inputs)

    def _run_first(self, inputs: Sequence[Tensor]) -> Tensors:
        try:
            out = self._apply(inputs, self._globals)
        except RuntimeError as error:
            if any(words in str(error) for words in _torch.WRITES_TO_INPUT):
                raise self._changed_input(inputs) from error
            raise
        self.random = False
        self._outputs = Outputs(self._name, out, inputs, views_tell=True)
        return self._outputs.take()

    def _run_again(self, inputs: Sequence[Tensor]) -> Tensors:
        if _torch.is_bare() and torch.get_default_dtype() is self._dtype:
            out = self._apply(inputs, self._globals_again())
        else:
            with world.World.bare(self._dtype).replayed():
                out = self._apply(inputs, self._globals_again())
        return self._as_first(out)

    def _apply(self, inputs: Sequence[Tensor], content: dict[str, Any]) -> Any:
        """What f returns, made around other variables, with some globals."""
        if self._arity is None:
            return types.FunctionType(self.code, content)(*inputs)
        cells = [types.CellType(value if i is None else inputs[i]) for i, value in self._variables]
        return types.FunctionType(self.code, content, None, None, (*cells,))(*inputs[: self._arity])

    def _globals_again(self) -> dict[str, Any]:
        """The globals of f, in which names stand for what they did in the forward."""
        found = self._found
        if found is NOTHING:
            return self._globals
        if not found.holds():
            raise MutationError(
                f"remat({self._name}) uses a function of a module ({found.changed()}) that was assigned "
                "another value since the forward. Assign it before the forward, or after the backward."
            )
        return self._globals if found.is_in(self._globals) else found.as_globals()

    def _as_first(self, out: Any) -> Tensors:
        first = self._outputs
        assert first is not None
        if first.is_one_like(out):
            return (out,)
        again = Outputs(self._name, out)
        if self._compares and (difference := first.difference(again)) is not None:
            raise self._not_the_same(difference)
        return again.as_in(first)

    def pulls(self, inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> bool:
        """Whether `pull` may run in the world that there is, with nothing to be put off."""
        return (
            _torch.is_bare()
            and torch.get_default_dtype() is self._dtype
            and not torch.is_inference_mode_enabled()
            and not recompute.puts_off(self, (*inputs, *cotangents))
        )

    def pull(
        self,
        inputs: list[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Tensor],
        at_level: bool = False,
    ) -> Sequence[Tensor | None]:
        """The gradients that are needed, in a backward at which nobody looks.

        It is `Vjp` that is no program. The inputs are taken away when they have been used.
        """
        with _torch.recording_level() if at_level else _torch.grad_mode(True) as level:
            tensors, leaves = _torch.with_leaves(inputs, compress(range(len(inputs)), needed), level or 0)
            inputs.clear()
            outputs = [*self._as_first(self._apply(tensors, self._globals_again()))]
        del tensors
        found = pulled(outputs, leaves, cotangents)
        if len(found) < len(needed):
            gradients = iter(found)
            found = [next(gradients) if need else None for need in needed]
        return found
