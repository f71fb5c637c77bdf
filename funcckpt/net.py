"""The first run of a program, under a net that makes silence impossible.

A program runs with all functorch levels moved into it. A tensor that f uses without having been
given it, and that belongs to one of those levels, would there be a constant: a wrong gradient with
no error. So in its first run the levels of the caller are put back below it as shadows, over inputs
that belong to none of them. If an output then belongs to one, something was captured that nobody
lifted. An input that f changes in place is caught here as well, by its version counter.

What the net has caught is found by `Watching` the operators while f runs, and lifted by `Replacing`
it in what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _torch
from .errors import ClosureError, describe
from .nodes import is_tracked
from .program import Leaf, Program, Recording, Tensors
from .tape import recompute
from .tape.recording import Record
from .world import Mode


class HiddenCapture(ClosureError):
    """A tensor was captured that the search for captured tensors has missed."""


class Watching(Mode):
    """Sees the tracked tensors on which a function operates and that it has not made itself."""

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self._known = dict(known)
        self._level = _torch.current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._known and is_tracked(y := stand_in(x)):
                # A wrapper of a deeper level is the work of a transform inside of the function.
                if (_torch.maybe_get_level(y) or 0) <= self._level:
                    self.seen.append(x)
                self._known[id(x)] = x
        out = func(*args, **kwargs)
        for y in pytree.tree_leaves(out):
            if isinstance(y, Tensor):
                self._known[id(y)] = y
        return out


class Hooked(Mode):
    """Sees which tensors are given hooks.

    A hook that refers to its tensor is part of a cycle through the graph, which Python cannot collect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self._seen.append(args[0])
        return func(*args, **(kwargs or {}))

    def remove(self) -> None:
        """Remove the hooks, with which no backward will meet."""
        for x in self._seen:
            if x._backward_hooks:
                x._backward_hooks.clear()
        self._seen.clear()


class Replacing(Mode):
    """Puts other tensors in place of some, wherever an operator is given them."""

    def __init__(self, mapped: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._mapped = mapped
        # The ids of the tensors that were met.
        self.met: set[int] = set()

    def __enter__(self) -> Replacing:
        super().__enter__()
        self._token = _replacing.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _replacing.reset(self._token)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replaced: list[Tensor] = []

        def replace(x: Tensor) -> Tensor:
            if id(x) in self._mapped:
                replaced.append(x)
            return self.stand_in(x)

        args, kwargs = pytree.tree_map_only(Tensor, replace, (args, dict(kwargs or {})))
        out = func(*args, **kwargs)
        if replaced and _reads_values(func, out):
            self.met.update([id(x) for x in replaced])
        return out

    def stand_in(self, x: Tensor) -> Tensor:
        return self._mapped.get(id(x), x)


class Refusing(Mode):
    """Raises the error that there is for a tensor, if an operator is given that."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__()
        self._errors = errors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs)):
            if id(x) in self._errors and _reads_values(func, out):
                raise self._errors[id(x)]
        return out


def _reads_values(func: Any, out: Any) -> bool:
    """Whether an operator reads more of a tensor than its shape or dtype."""
    return isinstance(out, Tensor) or getattr(func, "__name__", "") != "__get__"


_replacing: ContextVar[Replacing | None] = ContextVar("replacing", default=None)


def is_replacing() -> bool:
    """Whether f runs inside of another one in which tensors stand for others."""
    return _replacing.get() is not None


def stand_in(x: Tensor) -> Tensor:
    """The tensor that stands for `x` where f runs again inside of another one that is recomputed."""
    replacing = _replacing.get()
    if replacing is None or (y := replacing.stand_in(x)) is x:
        return x
    replacing.met.add(id(x))
    return y


_HOW = {
    "grad": "that is being differentiated",
    "vmap": "that is batched",
    "jvp": "that has a tangent",
}


def run(program: Program, inputs: Sequence[Tensor]) -> Tensors:
    """Run a program with no level active, and record nothing; under the net if f has not run before."""
    if program.source.random is None:
        return run_recorded(program, inputs)[0]
    if not torch.is_grad_enabled():
        return recompute.run(program, inputs)
    with _torch.grad_mode(False):
        return recompute.run(program, inputs)


def run_recorded(program: Program, inputs: Sequence[Tensor]) -> tuple[Tensors, tuple[bool, ...] | None]:
    """The same, and which outputs depend on an input that requires grad, if that is known."""
    layers = program.source.take_layers()
    if layers is None:
        with _torch.grad_mode(False):
            return recompute.run(program, inputs), None
    if _torch.is_recording():
        return _run_first(program, inputs, layers)
    with _torch.recording():
        return _run_first(program, inputs, layers)


def _run_first(
    program: Program, inputs: Sequence[Tensor], layers: list[_torch.Layer]
) -> tuple[Tensors, tuple[bool, ...] | None]:
    source = program.source
    recording = None
    versions, detached = source.versions(inputs), inputs
    if any(map(_torch.require_grad, inputs)):
        recording = Recording(program, [i for i, x in enumerate(inputs) if x.requires_grad])
        detached = [_torch.fresh(x) if x.requires_grad else x for x in inputs]
    outputs, record = _run_above_shadows(source, recording or program, detached, layers)
    source.check_versions(versions, inputs)
    if record is not None:
        with _torch.grad_mode(False):
            source.kept = record.finish()
    return outputs, None if recording is None else recording.active


def _run_above_shadows(
    source: Leaf, program: Program, inputs: Sequence[Tensor], layers: list[_torch.Layer]
) -> tuple[Tensors, Record | None]:
    """The outputs, and what has recorded them for a policy."""
    record = None
    if isinstance(program, Recording) or any([layer.kind == "grad" for layer in layers]):
        record = source.recorder()
    with _torch.shadows(layers) as levels, record or nullcontext():
        outputs = program.run(*inputs)
        outputs = tuple([_below_shadows(y, layers, levels, source) for y in outputs])
    if _torch.has_dual_level():
        for y in outputs:
            if _torch.tangent_of(y) is not None:
                raise _captured(source, y, "that is dual")
    return outputs, record


def _below_shadows(y: Tensor, layers: Sequence[_torch.Layer], levels: Sequence[int], source: Leaf) -> Tensor:
    if _torch.is_legacy_batchedtensor(_torch.below_wrappers(y)):
        return _torch.unwrapped_at(y, levels)  # it has hardly any operators, least of all these
    for layer, level in zip(reversed(layers), reversed(levels), strict=True):
        captured = False
        if layer.kind == "vmap":
            y, dim = _torch._unwrap_batched(y, level)
            captured = dim is not None
        else:
            captured = _torch.tangent_of(y) is not None if layer.kind == "jvp" else y.requires_grad
            y = _torch._unwrap_for_grad(y, level)
        if captured:
            raise _captured(source, y, f"{_HOW[layer.kind]} by {layer.kind} at level {level}")
    if y.requires_grad:
        raise _captured(source, y, "that requires grad")
    return y


def _captured(source: Leaf, y: Tensor, how: str) -> HiddenCapture:
    return HiddenCapture(
        f"remat({source.name}) uses a tensor {how} and that it was not given, in a way that could not "
        f"be traced: an output ({describe(y)}) depends on it. Pass it as an argument."
    )
