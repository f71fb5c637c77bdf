"""How far code reaches: whether it may use what is not found among its arguments and in its module."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from ..closure import WRITES_UNSEEN
from ..lookup import ATOMS, OfClass, global_names, imported, names_of

# What these look up in their globals is not the user's.
_LIBRARIES = ("torch.", "funcckpt.")
_OF_TORCH = ("torch", "math", "builtins")
_LOOKS_UP = {"globals", "vars", "eval", "exec", "__import__", "__globals__", "__dict__", "__subclasses__"}


@OfClass
def is_of_torch_alone(kind: type) -> bool:
    """Whether the code of a class of modules refers to nothing but to the module, and to what is torch's."""
    return all(
        refers_to_torch_alone(member)
        if isinstance(member, FunctionType)
        else type(member) in ATOMS or name[:2] == "__"
        for base in kind.__mro__
        if base is not object and not base.__module__.startswith("torch.nn.modules.")
        for name, member in vars(base).items()
        if name != "__init__"
    )


def refers_to_torch_alone(f: Any) -> bool:
    """Whether a function refers to nothing but to its arguments, and to what is torch's."""
    if isinstance(f, BuiltinFunctionType):
        return (f.__module__ or "torch").partition(".")[0] in _OF_TORCH
    if not isinstance(f, FunctionType):
        return False
    code, there = f.__code__, f.__globals__
    if {*code.co_freevars} - {"__class__"} or not ATOMS.issuperset(map(type, f.__defaults__ or ())):
        return False
    return there.get("__name__", "").startswith("torch.") or not (
        f.__kwdefaults__
        or looks_further(code)
        or not all(map(is_torch, [there[name] for name in global_names(code) if name in there]))
    )


def is_torch(x: Any) -> bool:
    """Whether it is a module of Python's that belongs to torch, or has no tensors."""
    return isinstance(x, ModuleType) and x.__name__.partition(".")[0] in _OF_TORCH


@functools.lru_cache(maxsize=4096)
def looks_further(code: CodeType) -> bool:
    """Whether code may look up what is not among its variables and global names."""
    return not _LOOKS_UP.isdisjoint(names_of(code)) or any(
        name.partition(".")[0] not in _OF_TORCH for name in imported(code)
    )


def is_plain(x: Any) -> bool:
    """Whether it is a tuple of constants, or such a function."""
    return ATOMS.issuperset(map(type, x)) if isinstance(x, tuple) else refers_to_torch_alone(x)


def is_of_torch_or_ours(f: FunctionType) -> bool:
    name: str = f.__globals__.get("__name__", "")
    return name.startswith(_LIBRARIES)


@OfClass
def writes_unseen(kind: type) -> bool:
    """Whether the forward of a module may write to buffers past their version counters."""
    names, functions = {"forward"}, [getattr(kind, "forward", None)]
    while functions:
        f = functions.pop()
        if isinstance(f, FunctionType) and not is_of_torch_or_ours(f):
            more = names_of(f.__code__) - names
            names |= more
            functions += [getattr(kind, name, None) or f.__globals__.get(name) for name in more]
    return not names.isdisjoint(WRITES_UNSEEN)
