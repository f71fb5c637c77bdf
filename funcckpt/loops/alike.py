"""Whether carries, and ys, look alike from step to step, and what to say where they do not."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError, describe

__all__ = ["check_carry", "check_y", "in_words", "looks"]


def check_carry(before: Any, after: Any, name: str, step: int) -> None:
    if _is_alike(before, after) or (found := _difference(before, after, "carry")) is None:
        return
    path, a, b = found
    cast = " Cast or broadcast the first carry to what f makes." if isinstance(b, Tensor) else ""
    raise InputError(
        f"{name}: step {step} returned {path} as {in_words(b)}, and was given {in_words(a)}.{cast}"
    )


def check_y(one: Any, other: Any, name: str, step: int, other_step: int) -> None:
    if _is_alike(one, other) or (found := _difference(one, other, "y")) is None:
        return
    path, a, b = found
    raise InputError(
        f"{name}: step {other_step} returned {path} as {in_words(b)}, and step {step} as {in_words(a)}."
    )


def _difference(before: Any, after: Any, path: str) -> tuple[str, Any, Any] | None:
    """The first place where two trees look different, and what they have there."""
    old, structure = _children(before)
    new, new_structure = _children(after)
    # The order of the keys of a dict means nothing.
    is_same_dict = type(before) is type(after) is dict and old.keys() == new.keys()
    if structure != new_structure and not is_same_dict:
        return path, before, after
    if structure.is_leaf():
        return None if _look(before) == _look(after) else (path, before, after)
    for key, child in old.items():
        if (found := _difference(child, new[key], path + key)) is not None:
            return found
    return None


def _children(tree: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    children, structure = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {pytree.keystr(path): x for path, x in children}, structure


def _is_alike(a: Any, b: Any) -> bool:
    """Whether a carry surely looks like another one: for most, without taking trees apart."""
    kind = type(a)
    if kind is not type(b):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _look(a) == _look(b)
    if kind is tuple or kind is list:
        return len(a) == len(b) and all(map(_is_alike, a, b))
    if kind is dict:
        return list(a) == list(b) and all(map(_is_alike, a.values(), b.values()))
    return _look(a) == _look(b) if isinstance(a, Tensor) else kind in (int, float, bool, type(None))


def _look(x: Any) -> Any:
    return (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x)


def looks(stack: Any) -> Any:
    """The looks of the ys in a stack."""
    leaves, structure = pytree.tree_flatten(stack)
    return structure, [None if y is None else (y.dtype, y.shape[1:], y.device) for y in leaves]


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
