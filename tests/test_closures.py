"""Tensors that f uses without being given them: the gradient, batch dimension and tangent that they have
without remat.

A kind is a function (wrap, w, x) in which something holds w and is remat'd by `wrap`; each meets every way of
differentiating and batching w and x in `oracles.CAPTURES`. What cannot be found may raise `ClosureError`;
nothing may be silent.
"""

import collections
import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compositions.functions import Cube, Pair
from oracles import CAPTURES, F64, compare, tensor
from support import WRAPS, registered
from torch import nn
from torch.func import jacfwd
from torch.overrides import TorchFunctionMode

from funcckpt import ClosureError, EscapeError, MutationError, remat

GLOBAL = None
HOLDER = SimpleNamespace()
MODULE = types.ModuleType("weights")
CONTEXT = contextvars.ContextVar("weight")
LOCAL = threading.local()
REGISTRY = weakref.WeakValueDictionary()


def set_global(value):
    global GLOBAL
    GLOBAL = value


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "funcckpt_test_weights", MODULE)
    yield
    set_global(None)
    for space in (HOLDER, MODULE, LOCAL):
        space.__dict__.pop("w", None)
    CONTEXT.set(None)


def act(w, x):
    """Uses w and x nonlinearly, with something in between to save."""
    return torch.tanh(w * x) * w.sin() + x


# ---------------------------------------------------------------- what holds it


class Attributes:
    def __init__(self, w):
        self.w = w

    @property
    def doubled(self):
        return self.w * 2

    @functools.cached_property
    def squared(self):
        return self.w**2

    def method(self, x):
        return act(self.w, x)


class Slots:
    __slots__ = ("__weakref__", "w")

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return act(self.w, x)


class SlotsBelow(Slots):
    __slots__ = ("n",)


class Delegate:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class FrozenData:
    w: torch.Tensor


class Doubled(collections.namedtuple("Doubled", "w")):
    """It changes what it is given."""

    def __new__(cls, w):
        return super().__new__(cls, w * 2)


class OwnDict(dict):
    __getattr__ = dict.__getitem__


class Cos(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


LIFTED = {}
lifted = registered(LIFTED)


@lifted
def captured_and_its_view(wrap, w, x):
    table = torch.stack([w, w * 2])
    row = table[1]
    return wrap(lambda x: act(row, x) + table.sum(0))(x)


@lifted
def decorated_methods(wrap, w, x):
    class Layer(Attributes):
        scale = 2.0

        @wrap
        def method(self, x):
            return super().method(x) * 2

        @staticmethod
        @wrap
        def static(x):
            return act(w, x)

        @wrap
        @classmethod
        def of_class(cls, x):
            return act(w, x) * cls.scale

    return Layer(w).method(x) * Layer(w).static(x) * Layer.of_class(x)


@lifted
def partial_with_an_attribute(wrap, w, x):
    f = functools.partial(lambda a, x: act(w, x) * a, 2.0)
    f.scale = 3.0
    return wrap(lambda x: f(x) * f.scale)(x)


@lifted
def functools_wraps(wrap, w, x):
    wrapper = functools.wraps(torch.sin)(lambda x: torch.sin(x) + w * GLOBAL)
    set_global(2.0)
    out = wrap(wrapper)(x)
    set_global(7.0)
    return out


@lifted
def deleted_and_rebound(wrap, w, x):
    v, holder = w, Slots(w)
    out = wrap(lambda x: act(v, holder(x)))(x)  # noqa: F821
    del v
    holder.w = w * 7
    return out


@lifted
def attributes_of_tensors(wrap, w, x):
    v = w * 2
    v.mult = x.mult = 3.0
    return wrap(lambda x: act(v, x) * v.mult * x.mult)(x)


@lifted
def parameters_are_parameters(wrap, w, x):
    p = nn.Parameter(tensor(3, seed=2))
    p.register_hook(lambda g: None)  # what has hooks is replaced in a recomputation
    by_kind = lambda p, x: act(w, x) * (p if isinstance(p, nn.Parameter) else 1.0)
    return wrap(lambda x: by_kind(p, x))(x), wrap(by_kind)(p, x)


@lifted
def nested_in_a_python_module(wrap, w, x):
    MODULE.w = wrap(lambda x: act(w, x))
    return wrap(lambda x: MODULE.w(x.sin()))(x)


@lifted
def function_mode(wrap, w, x):
    with Cos():
        return wrap(lambda x: torch.sin(x) * w)(x)


@lifted
def class_constant_of_a_nested_remat(wrap, w, x):
    class Holder:
        v = w

    f = wrap(lambda x: x.sin() + (Holder.v * x).detach() * Holder.v)
    return wrap(lambda x: f(x).cos())(x)


@lifted
def autograd_grad_inside(wrap, w, x):
    def f(x):
        y = act(w, x)
        (of_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (of_y,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return of_x.norm() * of_y + y

    return wrap(f)(x * 1)


def held_by(make, read):
    """A kind in which f reads w from an object that holds it."""

    def kind(wrap, w, x):
        holder = make(w)
        return wrap(lambda x: act(read(holder), x))(x)

    return kind


def put(container, key, w):
    container[key] = w
    return container


def class_with(w):
    base = type("Base", (), {"w": w, "__module__": __name__})
    return type("Derived", (base,), {"read": lambda self: type(self).w, "__module__": __name__})


LIFTED |= {
    "function_attribute": held_by(lambda w: (f := lambda: None, setattr(f, "w", w))[0], lambda f: f.w),
    "base_class_attribute": held_by(lambda w: class_with(w)(), lambda o: o.read()),
    "defaultdict": held_by(lambda w: collections.defaultdict(lambda: 2, a=[w]), lambda o: o["a"][0] * o["b"]),
    "ordered_dict": held_by(
        lambda w: collections.OrderedDict(b=w * 2, a=w), lambda o: next(iter(o.values()))
    ),
    "deque": held_by(lambda w: collections.deque([w, w * 2], maxlen=2), lambda o: o[-1] + o[0]),
    "frozenset": held_by(lambda w: frozenset([w]), lambda o: next(iter(o))),
    "own_dict": held_by(lambda w: OwnDict(w=w), lambda o: o.w),
    "cached_property": held_by(lambda w: (o := Attributes(w), o.squared)[0], lambda o: o.squared),
    "getattr": held_by(Attributes, lambda o: getattr(o, chr(119))),
    "vars": held_by(Attributes, lambda o: vars(o)[chr(119)]),
    "property": held_by(Attributes, lambda o: o.doubled),
    "slots_of_a_base": held_by(SlotsBelow, lambda o: o.w),
    "frozen_dataclass": held_by(FrozenData, lambda o: o.w),
    "named_tuple": held_by(Doubled, lambda o: o.w),
    "cyclic_object": held_by(
        lambda w: (o := Attributes(w), setattr(o, "me", [o]))[0], lambda o: o.me[0].me[0].w
    ),
    "delegate": held_by(lambda w: Delegate(Attributes(w)), lambda o: o.w),
    "captured_and_argument": lambda wrap, w, x: wrap(lambda v, z: act(w, x) * v * z)(w, x),
    "object_argument": lambda wrap, w, x: wrap(lambda x, o: act(o.w[0], x))(x, o=Slots([w])),
    "static_argument": lambda wrap, w, x: wrap(lambda o, x: act(o.w, x), static_argnums=0)(Attributes(w), x),
    "function_argument": lambda wrap, w, x: wrap(lambda f, x: f(x) * 2)(lambda z: act(w, z), x),
    "bound_tensor_method": lambda wrap, w, x: wrap(w.mul)(x) + x,
    "custom_function": lambda wrap, w, x: wrap(lambda: Cube.apply(w, x)[0])() * wrap(Cube.apply)(w, x)[1],
    "jacfwd_inside": lambda wrap, w, x: wrap(jacfwd(act, argnums=1))(w, x),
    "method_descriptor": lambda wrap, w, x: wrap(torch.Tensor.mul)(w, x),
    "constructor": lambda wrap, w, x: wrap(Pair)(w, x),
    "twice_the_same": lambda wrap, w, x: wrap(lambda q, k: act(q * 2 if q is k else q, x))(w, w),
}


@pytest.mark.parametrize("transform", CAPTURES)
@pytest.mark.parametrize("kind", LIFTED)
def test_captured_as_if_given(kind, transform):
    compare(lambda wrap: observe(LIFTED[kind], transform, wrap), remat)


def observe(kind, transform, wrap):
    return CAPTURES[transform](functools.partial(kind, wrap), tensor(3), tensor(3, seed=1))


# ---------------------------------------------------------------- rebound between the two runs
#
# What a rebuilt f cannot be given (it reads a class, a Python module, a context variable itself) is
# another thing at the time of the recomputation: the value of the forward, or an error.


class Constants:
    value = None


class Reader:
    """Its code, not its state, refers to a global."""

    @property
    def value(self):
        return GLOBAL

    @staticmethod
    def static():
        return GLOBAL

    @classmethod
    def of_class(cls):
        return cls.static()

    def __getitem__(self, key):
        return GLOBAL

    def __call__(self):
        return getattr(self, "of_" + "class")()


class ReaderModule(nn.Module):
    def helper(self):
        return GLOBAL

    def forward(self):
        return self.helper()


def imported():
    import funcckpt_test_weights

    return funcckpt_test_weights.w


ITEMS = set()
READER, NET = Reader(), nn.Sequential(ReaderModule())
# How a value is put there, and how it is read.
SHELVES = {
    "namespace": (lambda v: setattr(HOLDER, "w", v), lambda: HOLDER.w),
    "python_module": (lambda v: setattr(MODULE, "w", v), lambda: MODULE.w),
    "imported_inside": (lambda v: setattr(MODULE, "w", v), imported),
    "class": (lambda v: setattr(Constants, "value", v), lambda: Constants.value),
    "set": (lambda v: (ITEMS.clear(), ITEMS.add(v)), lambda: next(iter(ITEMS))),
    "context_variable": (CONTEXT.set, lambda: CONTEXT.get()),
    "global": (set_global, lambda: GLOBAL),
    "property": (set_global, lambda: READER.value),
    "class_method": (set_global, lambda: READER.of_class()),
    "operator": (set_global, lambda: READER[0]),
    "call": (set_global, lambda: READER()),
    "made_inside": (set_global, lambda: Reader().value),
    "helper_of_a_module": (set_global, lambda: NET[0]()),
}
VALUES = {
    "tracked": lambda w: (w, w * 7),
    "constant": lambda w: (torch.full((3,), 2.0, dtype=F64), torch.full((3,), 7.0, dtype=F64)),
    "number": lambda w: (2.0, 7.0),
    "function": lambda w: (torch.sin, torch.cos),
}


def rebound(place, what, wrap, w, x):
    put, read = SHELVES[place]
    first, then = VALUES[what](w)
    put(first)
    out = wrap(lambda x: act(read()(w) if what == "function" else read() * w, x))(x)
    put(then)
    return out


@pytest.mark.parametrize(
    "transform",
    ["backward_leaf", "double_backward", "grad", "vjp_later", "jvp", "vmap_grad", "hessian_mixed"],
)
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("place", SHELVES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_rebound_is_right_or_refused(wrap, place, what, transform):
    compare(
        lambda wrap: observe(functools.partial(rebound, place, what), transform, wrap),
        WRAPS[wrap],
        allowed=(MutationError,),
    )


# ---------------------------------------------------------------- what cannot be found by looking at f

HIDDEN = {
    "thread_local": held_by(lambda w: (setattr(LOCAL, "w", w), LOCAL)[1], lambda o: o.w),
    "cache": held_by(lambda w: (f := functools.cache(lambda: w * 2), f())[0], lambda f: f()),
    "weak_dictionary": held_by(lambda w: put(REGISTRY, "w", w), lambda o: o["w"]),
    "object_array": held_by(lambda w: put(np.empty(1, dtype=object), 0, w), lambda o: o[0]),
    "by_name_in_globals": held_by(set_global, lambda _: globals()["GLO" + "BAL"] * eval("GLOBAL")),
    "iterator": held_by(itertools.repeat, next),
    "own_tuple": held_by(lambda w: type("Own", (tuple,), {})((w,)), lambda o: o[0]),
    "mapping_proxy": held_by(lambda w: types.MappingProxyType({"w": w}), lambda o: o["w"]),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("transform", CAPTURES)
@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_is_right_or_named(kind, transform, wrap):
    # What is gone by the time of the recomputation: f itself fails, in its own words.
    allowed = (ClosureError, KeyError) if kind == "weak_dictionary" else (ClosureError,)
    error = compare(lambda wrap: observe(HIDDEN[kind], transform, wrap), WRAPS[wrap], allowed=allowed)
    if isinstance(error, ClosureError):
        text = str(error)
        assert "3" in text and "float64" in text, text  # shape and dtype of the tensor
        assert "lambda" in text or ".f" in text or " f" in text, text  # the function


def test_a_leaf_that_somebody_else_holds():
    held = []

    def f(x):
        held.append(torch.ones(3, dtype=F64, requires_grad=True))
        return (x * held[-1]).sin()

    with pytest.raises((ClosureError, EscapeError)):
        remat(f)(tensor(3, requires_grad=True))
