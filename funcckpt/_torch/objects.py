"""For the search in `closures`: versions of dicts, pullbacks of torch.func, and what torch.compile has made.

`core.primitive` searches, too, where other private names are missing. So this module imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

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


# The attributes that torch.compile gives to a function.
_OF_COMPILED = frozenset(
    "__wrapped__ get_compiler_config aot_compile _is_torch_compile _isolate_recompiles_id "
    "_torchdynamo_orig_callable _torchdynamo_wrapper_id _torchdynamo_inline _torchdynamo_disable "
    "_torchdynamo_disable_msg _torchdynamo_disable_recursive".split()
)


def compiler_of(value: Any) -> Callable[[Any], Any] | None:
    """What has made a compiled function or module: it compiles another one in the same way. Else None.

    None for a function with attributes of its own, too. Then the search follows the code of torch, which is
    right, but takes four times longer.
    """
    if isinstance(value, nn.Module):
        return getattr(value, "dynamo_ctx", None)
    attributes = value.__dict__
    # (`functools.wraps` copies the attributes of a compiled function to others.)
    if attributes.get("_torchdynamo_wrapper_id") != id(value) or attributes.keys() - _OF_COMPILED:
        return None
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return cells["self"].cell_contents if "self" in cells else None
