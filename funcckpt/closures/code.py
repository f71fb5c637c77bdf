"""What code names, and whose code it is: that of libraries is not searched."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

# Libraries whose globals and classes hold nothing of the user's. Their closures and objects are searched.
# So is every installed package, but for a function that is itself given to remat.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "funcckpt"}


@functools.lru_cache(maxsize=4096)
def is_library(module: Any) -> bool:
    """Whether a module, given by its name, is of torch, numpy, Python or an installed package."""
    package = _package(module)
    return package in _LIBRARIES or is_installed(module)


@functools.lru_cache(maxsize=4096)
def is_installed(module: Any) -> bool:
    """Whether a module is of an installed package, other than torch and numpy."""
    package = _package(module)
    if package in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _package(module: Any) -> str:
    # Cython's types may have something else in the place of the name.
    return module.partition(".")[0] if isinstance(module, str) else ""


@functools.lru_cache(maxsize=4096)
def own_classes(kind: Any) -> tuple[type, ...]:
    """A class and its bases, without those of libraries."""
    return tuple([base for base in kind.__mro__ if not is_library(base.__module__)])


@functools.lru_cache(maxsize=4096)
def libraries_of(kind: Any) -> frozenset[str]:
    """The modules of the libraries in which bases of a class are."""
    return frozenset([base.__module__ for base in kind.__mro__ if is_library(base.__module__)])


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code loads, in itself or in a function within it."""
    names = dict.fromkeys([i.argval for i in dis.get_instructions(code) if i.opname in _LOADS])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def imported(code: types.CodeType) -> tuple[str, ...]:
    """The modules that code imports, in itself or in a function within it."""
    names = dict.fromkeys([i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(imported(constant)))
    return tuple(names)


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """All names that code looks up, and its strings, which it may hand to `getattr`."""
    names = {*code.co_names}
    pending = [*code.co_consts]
    while pending:
        constant = pending.pop()
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, tuple):  # of a loop over names, or of a class pattern
            pending.extend(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the slots of a class."""
    return tuple(
        [
            name
            for base in kind.__mro__
            for name, member in base.__dict__.items()
            if isinstance(member, types.MemberDescriptorType) and "__slots__" in base.__dict__
        ]
    )


@functools.lru_cache(maxsize=4096)
def is_plain_python(kind: Any) -> bool:
    """Whether an instance is fully described by its `__dict__` and slots."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by an extension
    if (kind.__dictoffset__ == 0 and not slots_of(kind)) or _package(kind.__module__) in _OPAQUE:
        return False
    for base in kind.__mro__:
        if base in (object, types.SimpleNamespace):
            continue
        if not base.__flags__ & heap_type or isinstance(
            base.__dict__.get("__new__"), types.BuiltinFunctionType
        ):
            return False
    return True


# Objects of these packages stand for something outside of Python that a copy would not share.
_OPAQUE = frozenset(
    "asyncio concurrent ctypes datetime enum io logging multiprocessing pathlib queue re socket subprocess "
    "threading weakref".split()
)
