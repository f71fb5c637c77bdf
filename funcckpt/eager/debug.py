"""The operators of a forward and of its recomputation, for errors that say how the two differ."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import describe

_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


class Log(TorchDispatchMode):
    """The operators that were run, one a line, with the line of the program that asked for each.

    Started anew each time that it is entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Any:
        self.lines.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.lines.append(f"{_words(out)} = {func}({_words((args, kwargs))}){_place()}")
        return out


def logged() -> tuple[tuple[Log, Log], Callable[[], str]]:
    """Contexts for the forward and for the recomputation, and what tells the operators of both."""
    forward, recompute = Log(), Log()

    def listed() -> str:
        return "\n".join(
            [
                "Operations executed during the original forward:",
                "",
                *forward.lines,
                "",
                "Operations executed during recomputation:",
                "",
                *recompute.lines,
            ]
        )

    return (forward, recompute), listed


def _words(tree: Any) -> str:
    leaves = pytree.tree_leaves(tree)
    return ", ".join([describe(x) if isinstance(x, Tensor) else repr(x) for x in leaves])


def _place() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"  # {frame.f_code.co_filename}:{frame.f_lineno}"
