"""Steps of a loop, one after another: what they are given, and what they return."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.call import Options
from ..core.tensors import with_paths
from ..errors import InputError, OptionError, describe
from ..policies.offload import Stored, fetch, store
from ..policies.policies import Chooser
from ..remat import call
from .schedules import PLAIN, Schedule, parts

# The types of the carry, of xs and of ys.
C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
Rule = Literal["binomial", "recursive", "sqrt", "every"]
Offload = Literal["host", "disk"]
# The options checkpoint, checkpoints and bytes.
Asked = tuple[str | int | None, int | None, int | None]


class Loop(NamedTuple):
    """A loop or a part of it, as a function of the first carry and xs.

    It is an object, since `remat` would search the code of a function, and all that it calls.
    """

    f: Callable[..., Any]
    kind: str
    name: str
    asked: Asked
    progress: bool
    offload: str | None
    chooser: Chooser | None
    reverse: bool = False
    # Steps `first` to `first + steps - 1`, cut by the schedule.
    schedule: Schedule = PLAIN
    first: int = 0
    steps: int = 0
    # Progress: `next` is called after each step. A generator, since it is not searched for tensors.
    bars: Generator[None, None, None] | None = None

    def __call__(self, carry: Any, xs: Any) -> tuple[Any, Any]:
        """The last carry, and ys."""
        first, cut = self.first, list(parts(self.schedule, self.steps))
        lengths = [part.steps for part in cut]
        # xs are in the order in which they were given, also if `reverse`; `first` counts in this order.
        ends = list(itertools.accumulate(lengths, initial=first))
        starts = [2 * first + self.steps - end for end in ends[1:]] if self.reverse else ends[:-1]
        options, stacks = Options(chooser=self.chooser), []
        for part, start, x in zip(cut, starts, split(xs, lengths, self.reverse), strict=True):
            if part.schedule is None:
                carry, ys = record(self, start, part.steps, carry, x)
            else:
                # The first carry of a part that runs again is stored already.
                if self.offload is not None and not isinstance(carry, Stored):
                    carry = store(carry, self.offload)
                again = self._replace(schedule=part.schedule, first=start, steps=part.steps)
                carry, ys = call(again, self.name, options, (carry, x), {})
            stacks.append(ys)
        if self.reverse:
            starts, stacks = starts[::-1], stacks[::-1]
        return carry, concatenate(stacks, self.name, starts)


def record(loop: Loop, first: int, steps: int, carry: Any, xs: Any) -> tuple[Any, Any]:
    """Steps `first` up to `first + steps`: the last carry, and ys."""
    carry, slices, ys = fetch(carry), _pieces(xs, steps, torch.unbind), []
    order, meta = range(steps), _meta_of(carry)
    for i in reversed(order) if loop.reverse else order:
        before = carry
        carry, y = step(loop, first + i, before, slices[i])
        if _meta_of(carry) != meta:
            check_alike("carry", before, carry, f"{loop.name}: step {first + i}", "was given")
        ys.append(y)
        if loop.bars is not None:
            next(loop.bars, None)
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
        if isinstance(x, list):
            note += (
                " (xs is a list, so f gets a slice of each item. To loop over a list of batches, stack them)"
            )
        if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
            error.add_note(note)
        raise
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"{len(out)} values" if isinstance(out, (tuple, list)) else f"a {type(out).__name__}"
        raise InputError(
            f"{loop.name}: step {i} returned {what}, not the pair (carry, y), such as (carry, None)."
        )
    return out[0], out[1]


def bars_of(name: str, *totals: int | None) -> Generator[None, None, None]:
    """A progress bar for the forward and one for the backward, advanced by `next`."""
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise OptionError(f"{name}: progress=True needs tqdm: pip install tqdm") from error

    def advance() -> Generator[None, None, None]:
        for total, title in zip(totals, (name, f"{name}, backward"), strict=False):
            with closing(tqdm(total=total, desc=title)) as bar:
                bar.update()
                while bar.n != total:
                    yield
                    bar.update()
            yield

    return advance()


# -- xs and ys ---------------------------------------------------------------------------------------


def as_tensor(x: Any, where: str, name: str) -> Any:
    try:
        return None if x is None else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: {where} is {in_words(x)}, which cannot become a tensor.") from error


def split(xs: Any, lengths: list[int], reverse: bool) -> list[Any]:
    """The slice of xs for each part. One operator for all, so that its pullback is one operator, too."""
    if len(lengths) == 1:
        return [xs]
    cut = (lambda x: x.split(lengths[::-1])[::-1]) if reverse else (lambda x: x.split(lengths))
    return _pieces(xs, len(lengths), cut)


def _pieces(xs: Any, count: int, cut: Callable[[Tensor], Any]) -> list[Any]:
    leaves, structure = pytree.tree_flatten(xs)
    if xs is None or not leaves:
        return [xs] * count
    pieces = [[x] * count if x is None else cut(x) for x in leaves]
    return [pytree.tree_unflatten(list(piece), structure) for piece in zip(*pieces, strict=True)]


def stack(ys: list[Any], name: str, first: int) -> Any:
    if all([y is None for y in ys]):  # as in `fori_loop`, where to compare them takes as long as the steps
        return None
    for i, y in enumerate(ys):
        check_alike("y", ys[0], y, f"{name}: step {first + i}", f"step {first} as")

    wheres = iter([f"y{pytree.keystr(path)}" for path, _ in with_paths(ys[0])])

    def stacked(*leaves: Any) -> Tensor | None:
        where = next(wheres)
        return None if leaves[0] is None else torch.stack([as_tensor(y, where, name) for y in leaves])

    return pytree.tree_map(stacked, *ys)


def concatenate(stacks: list[Any], name: str, starts: list[int]) -> Any:
    """Join the ys of the parts. `starts` are the first steps of the parts."""
    if len(stacks) == 1:
        return stacks[0]
    first = [pytree.tree_map(lambda y: None if y is None else y[0], ys) for ys in stacks]
    for start, y in zip(starts, first, strict=True):
        check_alike("y", first[0], y, f"{name}: step {start}", f"step {starts[0]} as")
    return pytree.tree_map(lambda *leaves: None if leaves[0] is None else torch.cat(leaves), *stacks)


def check_alike(what: str, before: Any, after: Any, who: str, other: str) -> None:
    """Raise unless two carries, or two ys, have the same structure, shapes, dtypes and devices."""
    if _meta_of(before) == _meta_of(after):
        return
    old, new = _parts(before), _parts(after)
    for key in {**old, **new}:  # The order of the keys of a dict does not matter.
        if old.get(key) != new.get(key):
            returned, was = new.get(key, "nothing"), old.get(key, "nothing")
            is_number = what == "carry" and was in ("a float", "an int")
            advice = " Begin with a tensor of that dtype: torch.tensor(0.0, dtype=...)." if is_number else ""
            raise InputError(f"{who} returned {what}{key} as {returned}, but {other} {was}.{advice}")


def _parts(tree: Any, path: str = "") -> dict[str, str]:
    """The nodes and leaves of a pytree in words, by their paths. All kinds of dicts are one."""
    children = with_paths(tree, is_leaf=lambda x: x is not tree)
    found = {path: "a dict" if type(tree) in pytree.STANDARD_DICT_TYPES else in_words(tree)}
    for key, child in children:
        if key:  # else the tree is a leaf
            found |= _parts(child, path + pytree.keystr(key))
    return found


def _meta_of(tree: Any) -> Any:
    leaves, structure = pytree.tree_flatten(tree)
    return structure, [(x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x) for x in leaves]


def in_words(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{describe(x)} on {x.device}"
    name = type(x).__name__
    return "None" if x is None else f"a{'n' * (name[0] in 'aeiou')} {name}"
