"""Objects that no copy can stand for: f finds them as they are, and they are checked or put back."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from .lookup import GONE, Content, attributes_of, own_classes
from .nodes import MAX_SNAPSHOT, FixedNode, ModuleNode, NamedNode, Sealed

# Bytes of a larger numpy array that are copied, and from how many places.
_MAX_SAMPLED, _SAMPLES = 1 << 15, 64


class SetNode(FixedNode):
    """A set. A copy could have another order."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {id(item): item for item in value}

    def label_of(self, name: Any) -> str:
        return "an item of a set"

    def changes(self) -> Iterator[Any]:
        yield from super().changes()
        if len(self.value) != len(self.items):
            yield ""


class MappingNode(FixedNode):
    """A mapping, or its keys, values or items, that only shows another one."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value if isinstance(value, types.MappingProxyType) else enumerate(value))


class ContainerNode(FixedNode):
    """A container of a class of its own, which may do anything with what is put into it."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        content: Content = {("", name): item for name, item in getattr(value, "__dict__", {}).items()}
        if isinstance(value, dict):
            items: Iterable[tuple[Any, Any]] = dict.items(value)
        else:
            items = enumerate(next(kind for kind in CONTAINERS if isinstance(value, kind)).__iter__(value))
        for name, item in items:
            content["item", name] = item
        return content

    def label_of(self, name: Any) -> str:
        kind, key = name
        return f"item {key!r}" if kind else f"attribute {key!r}"


class ArrayNode(FixedNode):
    """A numpy array or a bytearray, told by its content, or by samples of it if that is large."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        if not isinstance(value, np.ndarray):
            return {"": bytes(value) if len(value) <= MAX_SNAPSHOT else _samples(value, len(value), 1)}
        if value.dtype == object:
            return dict(enumerate(value.flat))
        if value.nbytes <= MAX_SNAPSHOT:
            return {"": value.tobytes()}
        in_memory = value.ravel("K") if value.flags.forc else value.flat
        return {"": _samples(in_memory, value.size, value.itemsize)}

    def differing(self, now: Content) -> Iterator[Any]:
        if isinstance(self.items.get(""), bytes):
            return iter(() if now == self.items else ("",))
        return super().differing(now)

    def label_of(self, name: Any) -> str:
        return "the content"


class WeakNode(FixedNode):
    """A weak reference. One to a tensor is how a module tells whether a parameter is still its own."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        referent = value()
        return {} if isinstance(referent, Tensor) else {"": referent}

    def label_of(self, name: Any) -> str:
        return "what is weakly referred to"


class WeakMappingNode(FixedNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        by_key = isinstance(value, weakref.WeakValueDictionary)
        return {key if by_key else id(key): item for key, item in value.items()}

    def label_of(self, name: Any) -> str:
        return "an item of a weak dictionary"


class StayingNode(FixedNode, NamedNode):
    """An object whose class would notice a copy."""

    __slots__ = ("looked_up",)

    def read(self, value: Any) -> Content:
        return self.named(attributes_of(value))

    def extra(self) -> Iterable[tuple[Any, Any]]:
        yield "__class__", type(self.value)

    def label_of(self, name: Any) -> str:
        return "" if name == "__class__" else f"attribute {name!r}"


class GeneratorNode(FixedNode):
    """A generator, which holds the variables of its function."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {} if value.gi_frame is None else dict(value.gi_frame.f_locals)

    def changes(self) -> Iterator[Any]:
        return iter(())  # the values that it gives are compared

    def label_of(self, name: Any) -> str:
        return f"variable {name!r} of a generator"


class MemberNode(FixedNode):
    """A member of an enumeration, which is told by its identity."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value.value}

    def label_of(self, name: Any) -> str:
        return f"the value of {self.value}"


class StayingModuleNode(FixedNode, ModuleNode):
    """A module whose class would notice a copy."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return ModuleNode.label_of(self, name)


class OfContextNode(FixedNode):
    """What has another value in each thread or context."""

    __slots__ = ()

    def was(self, name: Any) -> Any:
        """The value at the time of the search; `GONE` if there was none, or it is no more."""
        item = self.items[name]
        if isinstance(item, Sealed):
            item = item()
            return GONE if item is None else item
        return item

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        """Assign, here and now; returns what undoes it."""
        raise NotImplementedError


class VariableNode(OfContextNode):
    """A context variable."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value.get(GONE)}

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        return functools.partial(self.value.reset, self.value.set(value))

    def label_of(self, name: Any) -> str:
        return f"context variable {self.value.name!r}"


class ThreadLocalNode(OfContextNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value.__dict__)

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        here = self.value.__dict__
        undo = (
            functools.partial(here.__setitem__, name, here[name])
            if name in here
            else functools.partial(here.__delitem__, name)
        )
        here[name] = value
        return undo

    def label_of(self, name: Any) -> str:
        return f"thread-local attribute {name!r}"


class DescriptorNode(FixedNode):
    """What makes an attribute of a class from functions."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        names = ("fget", "fset", "__func__", "__wrapped__")
        return {name: getattr(value, name) for name in names if hasattr(value, name)}

    def label_of(self, name: Any) -> str:
        return ""


class PythonModuleNode(FixedNode, NamedNode):
    """A Python module: of what is in it, what some code looks up that names the module as well."""

    __slots__ = ("looked_up",)

    def identity(self) -> Any:
        return self.value

    def read(self, value: Any) -> Content:
        content = value.__dict__
        return {name: content[name] for name in self.looked_up if name in content}

    def label_of(self, name: Any) -> str:
        return f"attribute {name!r} of {self.value.__name__}"


class ClassNode(FixedNode, NamedNode):
    __slots__ = ("is_called", "looked_up")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        # Whether code may make an instance; an instance that is there has been made.
        self.is_called = False

    def identity(self) -> Any:
        return self.value

    def read(self, value: Any) -> Content:
        content: Content = {}
        is_module = issubclass(value, nn.Module)
        for base in reversed(own_classes(value)):
            for name, member in base.__dict__.items():
                # The forward of a module is followed from its instances, which may have a copy of it.
                # Methods with two underscores Python itself looks up.
                if EVERYTHING in self.looked_up:
                    content[name] = member
                if (name in self.looked_up and not (is_module and name == "forward")) or (
                    name.startswith("__")
                    and isinstance(member, types.FunctionType)
                    and (self.is_called or name not in _MAKES_INSTANCES)
                ):
                    content[name] = member
        return content

    def label_of(self, name: Any) -> str:
        return f"attribute {name!r} of {self.value.__name__}" if name else ""

    def extra(self) -> Iterable[tuple[Any, Any]]:
        yield "", type(self.value)


CONTAINERS = (dict, list, tuple, deque)
EVERYTHING = "*"
_MAKES_INSTANCES = ("__new__", "__init__", "__post_init__")


def _samples(values: Any, count: int, size: int) -> bytes:
    """Blocks from all over a large array of `count` values: there is no time to read all of it."""
    block = min(count, _MAX_SAMPLED // size // _SAMPLES + 1)
    starts = [(count - block) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return b"".join([bytes(values[start : start + block]) for start in starts])
