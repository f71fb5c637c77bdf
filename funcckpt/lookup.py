"""What code looks up by name, and whose code it is: that of libraries is not searched."""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

# Libraries whose globals and classes hold nothing of the user's. Their closures and objects are searched.
# So is every installed package, but for those whose functions are given to remat.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "funcckpt"}
# Those of them that draw from Python's random numbers for others.
_DRAWS = ("statistics",)
_own_packages: set[str] = set()
# Objects of these packages stand for something outside of Python that a copy would not share.
_OPAQUE = frozenset(
    "asyncio concurrent ctypes datetime enum io logging multiprocessing pathlib queue re socket subprocess "
    "threading weakref".split()
)

GONE = object()

T = TypeVar("T")
Content = dict[Any, Any]


class OfClass(Generic[T]):
    """A function of a class, computed once for each, which it does not keep alive."""

    def __init__(self, function: Callable[[type], T]) -> None:
        self._function = function
        self._known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    def __call__(self, kind: type) -> T:
        try:
            return self._known[kind]
        except KeyError:
            found = self._known[kind] = self._function(kind)
            return found

    def forget(self) -> None:
        self._known.clear()


# Values that hold no tensor, told by their type alone.
ATOMS = frozenset(
    {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        slice,
        range,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.memory_format,
        torch.layout,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.GetSetDescriptorType,
        types.CodeType,
    }
)
# Types written in C whose instances have nothing but attributes, and object itself.
ALLOCATORS = (types.SimpleNamespace, object)
Cached = type(functools.lru_cache(lambda: None))


def count_as_own(module: Any) -> bool:
    """Count the package of a module among the user's own; False if it is one already."""
    package = _package(module)
    if package in _own_packages or package in _LIBRARIES:
        return False
    _own_packages.add(package)
    _is_installed.cache_clear()
    is_own.forget()
    _has_code_of_package.forget()
    is_library.cache_clear()
    return True


@functools.lru_cache(maxsize=4096)
def is_library(module: Any) -> bool:
    package = _package(module)
    return package in _LIBRARIES or _is_installed(package)


def _package(module: Any) -> str:
    # Cython's types may have something else in the place of the name.
    return module.partition(".")[0] if isinstance(module, str) else ""


@functools.lru_cache(maxsize=4096)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed and package not in _own_packages


def is_of_package(value: Any, kind: type) -> bool:
    """Whether an object has, or is, code of an installed package."""
    if isinstance(value, types.FunctionType):
        # What it imports in its first call may be one.
        return _is_installed_beside_torch(value.__globals__.get("__name__")) or any(
            [name not in sys.modules for name in imported(value.__code__)]
        )
    if isinstance(value, types.BuiltinFunctionType):
        return _is_installed_beside_torch(value.__module__)
    if isinstance(value, types.ModuleType):
        return _is_installed_beside_torch(value.__name__)
    return _has_code_of_package(value if isinstance(value, type) else kind)


def _is_installed_beside_torch(module: Any) -> bool:
    package = _package(module)
    return package in _DRAWS or (package not in _LIBRARIES and _is_installed(package))


@OfClass
def _has_code_of_package(kind: type) -> bool:
    return any([_is_installed_beside_torch(base.__module__) for base in kind.__mro__])


def holds_nothing(function: types.FunctionType) -> bool:
    """Whether a function refers to nothing but to its globals."""
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def refers_to_nothing(function: types.FunctionType) -> bool:
    code = function.__code__
    return holds_nothing(function) and not global_names(code) and not imported(code)


def is_of_library(function: types.FunctionType) -> bool:
    # Not `__module__`, which functools.wraps copies.
    return is_library(function.__globals__.get("__name__"))


def own_classes(kind: type) -> tuple[type, ...]:
    """A class and its bases, without those of libraries."""
    return tuple([base for base in kind.__mro__ if not is_library(base.__module__)])


def moves_on(value: Any) -> bool:
    """Whether an object that cannot be followed gives something else each time."""
    return isinstance(value, random.SystemRandom) or hasattr(type(value), "__next__")


@OfClass
def notices_copies(kind: type) -> bool:
    """Whether a class would close what a copy shares with the original, or remember each copy."""
    return hasattr(kind, "__del__") or any(
        isinstance(member, Cached) for base in kind.__mro__ for member in base.__dict__.values()
    )


@OfClass
def is_plain_python(kind: type) -> bool:
    """Whether an instance is fully described by its `__dict__` and slots."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by an extension

    def is_python(base: type) -> bool:
        new = base.__dict__.get("__new__")
        return bool(base.__flags__ & heap_type) and not isinstance(new, types.BuiltinFunctionType)

    return _package(kind.__module__) not in _OPAQUE and all(
        base in ALLOCATORS or is_python(base) for base in kind.__mro__
    )


@OfClass
def is_own(kind: type) -> bool:
    """Whether no library has code for instances of a class."""
    return len(own_classes(kind)) == len([b for b in kind.__mro__ if b not in (object, nn.Module)])


def attributes_of(value: Any) -> Content:
    content = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        with suppress(AttributeError):
            content[name] = getattr(value, name)
    return content


@OfClass
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        [
            name
            for base in kind.__mro__
            for name, member in base.__dict__.items()
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__"
        ]
    )


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code loads, in itself or in a function within it."""
    names = dict.fromkeys(_operands(code, "LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """All names that code looks up, and its strings, which it may hand to `getattr`."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        else:  # a tuple is of a loop over names, or of a class pattern
            names.update([s for s in pytree.tree_leaves(constant) if isinstance(s, str) and s.isidentifier()])
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def imported(code: types.CodeType) -> frozenset[str]:
    """The modules that code imports, in itself or in a function within it."""
    names = {*_operands(code, "IMPORT_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= imported(constant)
    return frozenset(names)


def _operands(code: types.CodeType, *opnames: str) -> list[str]:
    return [i.argval for i in dis.get_instructions(code) if i.opname in opnames]


@functools.lru_cache(maxsize=4096)
def assigned_by(code: types.CodeType) -> frozenset[str]:
    """The closure and global variables that code assigns, in itself or in a function within it."""
    assigned = _operands(code, "STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL")
    names = {name for name in assigned if name not in code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= assigned_by(constant) - set(code.co_cellvars)
    return frozenset(names)
