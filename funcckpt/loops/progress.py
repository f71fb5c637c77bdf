"""Bars of the steps of a loop, forward and backward, by tqdm."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from ..errors import OptionError

__all__ = ["advance", "close_bar", "open_bar"]

# The bars that are shown. A part knows its bar by number: an object would be searched for tensors.
_bars: dict[int, Any] = {}
_numbers = itertools.count(1)


def open_bar(progress: bool, name: str, total: int | None = None, number: int = 0) -> int:
    """Show a bar, and return its number; 0 if there is none."""
    if not progress:
        return 0
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise OptionError(f"{name}: progress=True needs tqdm: pip install 'funcckpt[progress]'") from error
    number = number or next(_numbers)
    _bars[number] = tqdm(total=total, desc=name)
    return number


def close_bar(number: int) -> None:
    if (bar := _bars.pop(number, None)) is not None:
        bar.close()


def advance(number: int, again: int, name: str) -> None:
    if not number:
        return
    if number not in _bars:  # The forward is over.
        open_bar(True, f"{name}, backward", again, number)
    bar = _bars[number]
    bar.update()
    if bar.total is not None and bar.n >= bar.total:
        close_bar(number)
