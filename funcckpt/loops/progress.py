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


def open_bar(progress: bool, name: str, total: int | None = None) -> int:
    if not progress:
        return 0
    number = next(_numbers)
    _bars[number] = _bar(total, name)
    return number


def close_bar(number: int) -> None:
    if (bar := _bars.pop(number, None)) is not None:
        bar.close()


def advance(number: int, again: int, name: str) -> None:
    bar = _bars.get(number)
    if bar is None:  # The forward is over.
        bar = _bars[number] = _bar(again, f"{name}, backward")
    bar.update()
    if bar.total is not None and bar.n >= bar.total:
        close_bar(number)


def _bar(total: int | None, name: str) -> Any:
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise OptionError(f"{name}: progress=True needs tqdm: pip install 'funcckpt[progress]'") from error
    return tqdm(total=total, desc=name)
