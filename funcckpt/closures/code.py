"""The names in code, and whether code belongs to a library: that is not searched."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

# Libraries whose globals and classes are not searched, since they hold no objects of the user. Closures and
# instances are. All installed packages count as libraries, except for the function that is passed to remat.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "funcckpt"}


@functools.lru_cache(maxsize=4096)
def is_library(module: Any) -> bool:
    """Whether a module, given by its name, belongs to torch, numpy, Python or an installed package."""
    # The __module__ of Cython's types may not be a string.
    return str(module).partition(".")[0] in _LIBRARIES or is_installed(module)


@functools.lru_cache(maxsize=4096)
def is_installed(module: Any) -> bool:
    """Whether a module belongs to an installed package other than torch and numpy."""
    package = str(module).partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in _LIBRARIES and ("site-packages" in file or "dist-packages" in file)


def code_of(f: Any) -> Any:
    """The code of a function, method, partial or other callable; its type if that is written in C."""
    while type(f) is functools.partial:
        f = f.func
    f = getattr(f, "__func__", f)
    if (code := getattr(f, "__code__", None)) is None:
        cls: Any = type(f)
        code = getattr(getattr(cls, "forward", cls.__call__), "__code__", cls)
    return code


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names that code looks up, those of them that are globals, and the modules that it imports.

    Functions inside of the code count, too. All names count, and strings, which may be passed to `getattr`.
    """
    looked_up = {*code.co_names}
    instructions = [*dis.get_instructions(code)]
    of_globals = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    imported = {i.argval for i in instructions if i.opname == "IMPORT_NAME"}
    pending = [*code.co_consts]
    while pending:
        constant = pending.pop()
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            looked_up |= inner[0]
            of_globals |= inner[1]
            imported |= inner[2]
        elif isinstance(constant, tuple):  # the names of a loop or a class pattern
            pending.extend(constant)
        elif isinstance(constant, str):  # maybe with dots, for `attrgetter`
            looked_up.update(filter(str.isidentifier, constant.split(".")))
    return frozenset(looked_up), frozenset(of_globals), frozenset(imported)


def names_for(kind: Any) -> frozenset[str]:
    """Names in no code of f: what patterns of `match` read by position; a method that looks up any name."""
    names: set[Any] = set()
    for space in [vars(base) for base in kind.__mro__ if not is_library(base.__module__)]:
        if "__getattribute__" in space:
            names.add("__getattribute__")
        if type(arguments := space.get("__match_args__")) is tuple:
            names.update(arguments)
    return frozenset(names)


def slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the slots of a class."""
    members: dict[str, Any] = {}
    for base in kind.__mro__:
        members.update(base.__dict__ if "__slots__" in base.__dict__ else ())
    return tuple([name for name, x in members.items() if isinstance(x, types.MemberDescriptorType)])


def is_plain_python(kind: Any) -> bool:
    """Whether an instance is fully described by its `__dict__` and slots."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by an extension
    if (kind.__dictoffset__ == 0 and not slots_of(kind)) or str(kind.__module__).partition(".")[0] in _OPAQUE:
        return False
    bases = [base for base in kind.__mro__ if base not in (object, types.SimpleNamespace)]
    makers = [base.__dict__.get("__new__") for base in bases if base.__flags__ & heap_type]
    return len(makers) == len(bases) and types.BuiltinFunctionType not in map(type, makers)


# Objects of these packages stand for things outside of Python, which a copy would not share; or, as a Trainer
# of Lightning, for the whole program.
_OPAQUE = frozenset(
    "asyncio concurrent ctypes datetime enum io lightning logging multiprocessing pathlib pytorch_lightning "
    "queue re socket subprocess threading weakref".split()
)
