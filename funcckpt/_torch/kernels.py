"""Some operators, seen without a dispatch mode: by kernels at a dispatch key that nothing else uses.

A dispatch mode is called for each operator, which takes some microseconds, and ten if it does anything. A
kernel is called for its operator alone, and torch passes all others on in C++. The key "Fake" is beside that
of modes, below autograd and transforms. Torch has it for another project (torchdistx, which has ended), and
registers nothing at it. (A key of a backend, such as "FPGA", would not do: operators that are composed for
backends without a kernel of their own are composed there, too.)

`torch.library` registers the kernels. To switch the key on takes names that are private.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._C import (  # type: ignore[attr-defined]
    DispatchKeySet,
    _dispatch_key_parse,
    _ExcludeDispatchKeyGuard,
)
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

from . import dynamo
from .autograd import is_composite

_KEY = "Fake"
_include: Any = getattr(torch._C, "_dispatch_tls_set_dispatch_key_included", None)


class Watcher(Protocol):
    """Is asked for the results of operators."""

    def see(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...


class _Here(threading.local):
    # Innermost last.
    watchers: tuple[Watcher, ...] = ()


here = _Here()
# The operators that have a kernel; and what has registered it, which torch removes with its library.
_known: set[Any] = set()
_libraries: dict[str, Library] = {}
_lock = threading.Lock()
_keys: list[Any] = []


@functools.cache
def are_possible() -> bool:
    """Whether torch has the key, and its names. Registers that other operators pass it."""
    if _include is None:
        return False
    try:
        _keys.append(DispatchKeySet(_dispatch_key_parse(_KEY)))
        _libraries["_"] = Library("_", "IMPL")
        _libraries["_"].fallback(fallthrough_kernel, _KEY)
    except Exception:  # of several types
        return False
    return True


def watch(funcs: Iterable[Any]) -> bool:
    """Give operators a kernel. False if torch does not allow that."""
    with _lock:
        if not are_possible():
            return False
        for func in funcs:
            if func in _known:
                continue
            # (With a kernel of its own, torch would no longer take a composite operator apart.)
            if not isinstance(func, OpOverload) or is_composite(func):
                return False
            space = func.namespace
            library = _libraries[space] = _libraries.get(space) or Library(space, "IMPL")
            try:
                library.impl(func, _kernel_of(func), _KEY)
            except Exception:
                return False
            _known.add(func)
    return True


def _kernel_of(func: OpOverload) -> Callable[..., Any]:
    @dynamo.hidden
    def kernel(*args: Any, **kwargs: Any) -> Any:
        watchers = here.watchers
        if len(watchers) > 1:  # the next one sees it, too
            here.watchers = watchers[:-1]
            try:
                return watchers[-1].see(func, args, kwargs)
            finally:
                here.watchers = watchers
        with _ExcludeDispatchKeyGuard(_keys[0]):
            # (Another thread of a backward has the key of the first one, and no watchers.)
            return watchers[0].see(func, args, kwargs) if watchers else func(*args, **kwargs)

    return kernel


def begin(watcher: Watcher) -> None:
    """From now on, `watcher` sees the operators of this thread that have a kernel, before others do."""
    _include(_KEY, True)
    here.watchers = *here.watchers, watcher


def end(watcher: Watcher) -> None:
    here.watchers = tuple([x for x in here.watchers if x is not watcher])
    if not here.watchers:
        _include(_KEY, False)
