"""Some steps of a loop, one after another: what they are given, and what they return."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError, OptionError, describe
from ..policies.offload import fetch
from ..policies.policies import Policy

__all__ = ["Loop", "as_tensor", "check_carry", "concatenate", "in_words", "record", "split", "stack", "step"]


class Loop(NamedTuple):
    """What a part has to know of its loop."""

    f: Callable[..., Any]
    kind: str
    name: str
    reverse: bool = False
    offload: str | None = None
    policy: Policy | None = None
    # The number of the progress bar, and how many steps the backward will run.
    progress: tuple[int, int] = (0, 0)


def record(loop: Loop, first: int, steps: int, carry: Any, xs: Any) -> tuple[Any, Any]:
    """Steps `first` up to `first + steps`: the last carry, and ys."""
    carry, slices, ys = fetch(carry), _pieces(xs, steps, torch.unbind), []
    order = range(steps)
    for i in reversed(order) if loop.reverse else order:
        before = carry
        carry, y = step(loop, first + i, before, slices[i])
        check_carry(before, carry, loop.name, first + i)
        ys.append(y)
        _advance(loop)
    return carry, stack(ys[::-1] if loop.reverse else ys, loop.name, first)


def step(loop: Loop, i: int, carry: Any, x: Any) -> tuple[Any, Any]:
    try:
        if loop.kind == "fori_loop":
            return loop.f(i, carry), None
        if loop.kind == "while_loop":
            return loop.f(carry), None
        out = loop.f(carry, x)
    except Exception as error:
        note = f"in step {i} of {loop.name}"
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
            error.add_note(note)
        raise
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"{len(out)} values" if isinstance(out, (tuple, list)) else f"a {type(out).__name__}"
        raise InputError(f"{loop.name}: step {i} returned {what}, not the pair (carry, y).")
    return out[0], out[1]


# -- progress bars -----------------------------------------------------------------------------------

# The bars that are shown. A part knows its bar by number: an object would be searched for tensors.
_bars: dict[int, Any] = {}
_numbers = itertools.count(1)


def open_bar(name: str, total: int | None, number: int = 0) -> int:
    """Show a bar, and return its number."""
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise OptionError(f"{name}: progress=True needs tqdm: pip install 'funcckpt[progress]'") from error
    number = number or next(_numbers)
    _bars[number] = tqdm(total=total, desc=name)
    return number


def _advance(loop: Loop) -> None:
    number, again = loop.progress
    if not number:
        return
    if number not in _bars:  # The forward is over.
        open_bar(f"{loop.name}, backward", again, number)
    bar = _bars[number]
    bar.update()
    if bar.n == bar.total:
        close_bar(loop)


def close_bar(loop: Loop) -> None:
    if (bar := _bars.pop(loop.progress[0], None)) is not None:
        bar.close()


# -- xs and ys ---------------------------------------------------------------------------------------


def as_tensor(x: Any, where: str, name: str) -> Any:
    try:
        return None if x is None else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: {where} is {in_words(x)}, and no tensor can be made of it.") from error


def split(xs: Any, lengths: list[int], reverse: bool) -> list[Any]:
    """What each part takes of xs; one operator, whose pullback is one as well."""
    if len(lengths) == 1:
        return [xs]
    cut = (lambda x: x.split(lengths[::-1])[::-1]) if reverse else (lambda x: x.split(lengths))
    return _pieces(xs, len(lengths), cut)


def _pieces(xs: Any, count: int, cut: Callable[[Tensor], Any]) -> list[Any]:
    if xs is None:
        return [None] * count
    leaves, structure = pytree.tree_flatten(xs)
    pieces = [[x] * count if x is None else cut(x) for x in leaves]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def stack(ys: list[Any], name: str, first: int) -> Any:
    if all(y is None for y in ys):
        return None
    for i, y in enumerate(ys):
        _check_y(ys[0], y, name, first, first + i)

    def stacked(path: Any, *leaves: Any) -> Tensor | None:
        where = f"y{pytree.keystr(path)}"
        return None if leaves[0] is None else torch.stack([as_tensor(y, where, name) for y in leaves])

    return pytree.tree_map_with_path(stacked, *ys)


def concatenate(stacks: list[Any], name: str, starts: list[int]) -> Any:
    """The ys of the parts, which begin with these steps, as one stack."""
    if len(stacks) == 1 or all(ys is None for ys in stacks):
        return stacks[0]
    first = [pytree.tree_map(lambda y: None if y is None else y[0], ys) for ys in stacks]
    for start, y in zip(starts, first, strict=True):
        _check_y(first[0], y, name, starts[0], start)
    return pytree.tree_map(lambda *leaves: None if leaves[0] is None else torch.cat(leaves), *stacks)


# -- whether carries, and ys, look alike from step to step ---------------------------------------------


def check_carry(before: Any, after: Any, name: str, step: int) -> None:
    if (found := _difference(before, after, "carry")) is not None:
        path, a, b = found
        cast = " Cast or broadcast the first carry to what f makes." if isinstance(b, Tensor) else ""
        raise InputError(
            f"{name}: step {step} returned {path} as {in_words(b)}, and was given {in_words(a)}.{cast}"
        )


def _check_y(one: Any, other: Any, name: str, step: int, other_step: int) -> None:
    if (found := _difference(one, other, "y")) is not None:
        path, a, b = found
        raise InputError(
            f"{name}: step {other_step} returned {path} as {in_words(b)}, and step {step} as {in_words(a)}."
        )


def _difference(before: Any, after: Any, path: str) -> tuple[str, Any, Any] | None:
    """The first place where two trees look different, and what they have there."""
    leaves, structure = pytree.tree_flatten(before)
    new_leaves, new_structure = pytree.tree_flatten(after)
    if structure == new_structure and [*map(_look, leaves)] == [*map(_look, new_leaves)]:
        return None
    old, structure = _children(before)
    new, new_structure = _children(after)
    # The order of the keys of a dict means nothing.
    is_same_dict = type(before) is type(after) is dict and old.keys() == new.keys()
    if structure.is_leaf() or (structure != new_structure and not is_same_dict):
        return path, before, after
    found = (_difference(child, new[key], path + key) for key, child in old.items())
    return next((difference for difference in found if difference is not None), None)


def _children(tree: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    children, structure = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {pytree.keystr(path): x for path, x in children}, structure


def _look(x: Any) -> Any:
    return (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x)


def in_words(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{describe(x)} on {x.device}"
    if x is None:
        return "None"
    structure = _children(x)[1]
    what = f"a {type(x).__name__}"
    if structure.is_leaf():
        return what
    return f"{what} of {list(x)}" if isinstance(x, dict) else f"{what} of {structure.num_children}"
