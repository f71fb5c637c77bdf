"""For the search in `closures`: versions of dicts, pullbacks of torch.func, and what compiles functions.

`core.primitive` searches, too, where other private names are missing. So this module imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Gives the version of a dict, a number that each write changes: the guards of compiled code compare it. To
# look at the content of all modules of a model takes ten times longer. That is done where the function is
# missing; where threads run at once, for which its table is not made; and in Python 3.13.0, where it misses
# attributes (python/cpython#125608).
dict_version: Callable[[Any], int] | None = None
if sys.version_info[:3] != (3, 13, 0) and getattr(sys, "_is_gil_enabled", lambda: True)():
    with suppress(ImportError):
        from torch._C._dynamo.guards import dict_version


def is_pullback(function: Any) -> bool:
    """Whether a function is what `torch.func.vjp` returns. The graph behind its tensors cannot be rebuilt."""
    if function.__qualname__ != "_vjp_with_argnums.<locals>.wrapper":
        return False
    module: str = function.__globals__.get("__name__", "")  # another function may have been given this name
    return module == "torch._functorch.eager_transforms"


def is_of_dynamo(cls: Any) -> bool:
    """Whether objects of a class are of Dynamo, which puts some around what it compiles or leaves alone."""
    return str(cls.__module__).startswith("torch._dynamo.")


def is_compiler(cls: Any) -> bool:
    """The same, of what it compiles."""
    return is_of_dynamo(cls) and cls.__name__ != "DisableContext"


def below_compiler(function: Any) -> Any:
    """The user's function, if torch has put another one around it to compile it, or to leave it alone."""
    return getattr(function, "__dict__", {}).get("_torchdynamo_orig_callable", function)
