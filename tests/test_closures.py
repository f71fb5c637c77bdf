"""Tensors that f uses without being given them: the gradient, batch dimension and tangent that they
have without remat.

A kind is a function (wrap, w, x) in which something captures w and is remat'd by `wrap`; each meets
every way of differentiating and batching w and x in `oracles.CAPTURES`. What cannot be found may
raise `ClosureError`; nothing may be silent.
"""

import collections
import contextvars
import copy
import functools
import itertools
import queue
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from compositions.functions import Cube
from oracles import CAPTURES, F64, assert_same, compare, plain, tensor, total
from support import WRAPS, registered
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from funcckpt import ClosureError, EscapeError, MutationError, checkpoint, remat

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
def nothing_kept():
    yield
    set_global(None)
    HOLDER.__dict__.clear()
    MODULE.__dict__.pop("w", None)
    LOCAL.__dict__.clear()
    CONTEXT.set(None)
    sys.modules.pop("funcckpt_test_weights", None)


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


class Indexed:
    def __init__(self, w):
        self._items = [w]

    def __getitem__(self, i):
        return self._items[i]


@dataclass(frozen=True, slots=True)
class FrozenData:
    w: torch.Tensor


class Layer(nn.Module):
    """Its weight is put in as `functional_call` does it."""

    def __init__(self, w=None, shift=None):
        super().__init__()
        self.register_parameter("weight", None)
        self.register_buffer("shift", shift)
        self._parameters["weight"] = w

    def forward(self, x):
        return act(self.weight, x if self.shift is None else x * self.shift)


class Model(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap, self.layer = wrap, Layer(nn.Parameter(torch.full((3,), float("nan"), dtype=F64)))

    def forward(self, x):
        return self.wrap(self.layer)(x)


def read_global(z):
    return act(GLOBAL, z)


LIFTED = {}
lifted = registered(LIFTED)


@lifted
def global_of_helper(wrap, w, x):
    set_global(w)
    return wrap(lambda x: read_global(x))(x)


@lifted
def global_object(wrap, w, x):
    HOLDER.w = MODULE.w = w
    return wrap(lambda x: act(HOLDER.w, x) * MODULE.w)(x)


@lifted
def function_attribute(wrap, w, x):
    def f(x):
        return act(f.w, x)

    f.w = w
    return wrap(f)(x)


@lifted
def captured_and_its_view(wrap, w, x):
    table = torch.stack([w, w * 2])
    row = table[1]
    return wrap(lambda x: act(row, x) + table.sum(0))(x)


@lifted
def in_cached_property(wrap, w, x):
    holder = Attributes(w)
    assert holder.squared is not None
    return wrap(lambda x: act(holder.squared, x))(x)


@lifted
def in_cyclic_object(wrap, w, x):
    holder = Attributes(w)
    holder.me = [holder]
    return wrap(lambda x: act(holder.me[0].me[0].w, x))(x)


@lifted
def in_class_attribute(wrap, w, x):
    class Constants:
        weight = w

        def __call__(self, x):
            return act(self.weight, x)

    return wrap(lambda x: act(Constants.weight, x))(x) + wrap(Constants())(x)


@lifted
def in_base_class_attribute(wrap, w, x):
    class Base:
        weight = w

    class Derived(Base):
        def method(self, x):
            return act(type(self).weight, x)

    return wrap(Derived().method)(x)


@lifted
def decorated_method(wrap, w, x):
    class Layer(Attributes):
        @wrap
        def forward(self, x):
            return act(self.w, x)

    return Layer(w).forward(x)


@lifted
def super_call(wrap, w, x):
    class Layer(Attributes):
        def method(self, x):
            return super().method(x) * 2

    return wrap(Layer(w).method)(x)


@lifted
def partial_method(wrap, w, x):
    class Layer:
        def general(self, w, x):
            return act(w, x)

        forward = functools.partialmethod(general, w)

    return wrap(Layer().forward)(x)


@lifted
def functools_wraps(wrap, w, x):
    def with_bias(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x) + w

        return wrapper

    return wrap(with_bias(lambda x: act(w, x)))(x)


@lifted
def module_attribute(wrap, w, x):
    layer = Layer()
    del layer.weight
    layer.weight = w
    return wrap(layer)(x)


@lifted
def module_in_an_attribute_list(wrap, w, x):
    model = nn.Module()
    model.hidden = [Layer(w)]
    return wrap(lambda x: model.hidden[0](x))(x)


@lifted
def deleted_cell(wrap, w, x):
    v = w
    out = wrap(lambda x: act(v, x))(x)  # noqa: F821
    del v
    return out


@lifted
def rebound_slot(wrap, w, x):
    holder = Slots(w)
    out = wrap(holder)(x)
    holder.w = w * 7
    return out


def held_by(make, read):
    """A kind in which f reads w from an object that holds it."""

    def kind(wrap, w, x):
        holder = make(w)
        return wrap(lambda x: act(read(holder), x))(x)

    return kind


LIFTED |= {
    "defaultdict": held_by(lambda w: collections.defaultdict(list, a=[w]), lambda o: o["a"][0]),
    "ordered_dict": held_by(lambda w: collections.OrderedDict(b=w * 2, a=w), lambda o: sum(o.values())),
    "deque": held_by(lambda w: collections.deque([w, w * 2], maxlen=2), lambda o: o[-1] + o[0]),
    "frozenset": held_by(lambda w: frozenset([w]), lambda o: next(iter(o))),
    "chain_map": held_by(lambda w: collections.ChainMap({}, {"w": w}), lambda o: o["w"]),
    "user_dict": held_by(lambda w: collections.UserDict(w=w), lambda o: o["w"]),
    "property": held_by(Attributes, lambda o: o.doubled),
    "slots_of_a_base": held_by(SlotsBelow, lambda o: o.w),
    "frozen_dataclass": held_by(FrozenData, lambda o: o.w),
    "delegate": held_by(lambda w: Delegate(Attributes(w)), lambda o: o.w),
    "indexed_object": held_by(Indexed, lambda o: o[0]),
    "captured_and_argument": lambda wrap, w, x: wrap(lambda v, x: act(w, x) * v)(w, x),
    "captured_is_the_only_argument": lambda wrap, w, x: wrap(lambda v: act(v, w))(w) * x,
    "argument_captured_too": lambda wrap, w, x: wrap(lambda z: act(w, z) * x)(x),
    "object_argument": lambda wrap, w, x: wrap(lambda holder, x: act(holder.w, x))(Attributes(w), x),
    "list_in_object_argument": lambda wrap, w, x: wrap(lambda x, o: act(o.w[0], x))(x, o=Slots([w])),
    "static_argument": lambda wrap, w, x: wrap(lambda o, x: act(o.w, x), static_argnums=0)(Attributes(w), x),
    "function_argument": lambda wrap, w, x: wrap(lambda f, x: f(x) * 2)(lambda z: act(w, z), x),
    "captured_bound_method": lambda wrap, w, x: (lambda method: wrap(lambda x: method(x))(x))(
        Attributes(w).method
    ),
    "bound_tensor_method": lambda wrap, w, x: wrap(w.mul)(x) + x,
    "custom_function_only": lambda wrap, w, x: wrap(lambda: Cube.apply(w, x)[0])(),
    "module": lambda wrap, w, x: wrap(Layer(w))(x),
    "module_buffer": lambda wrap, w, x: wrap(Layer(torch.ones(3, dtype=F64), w.sin()))(x),
    "module_as_argument": lambda wrap, w, x: wrap(lambda layer, x: layer(x))(Layer(w), x),
    "module_forward_method": lambda wrap, w, x: wrap(Layer(w).forward)(x),
    "through_functional_call": lambda wrap, w, x: functional_call(Model(wrap), {"layer.weight": w}, (x,)),
}


# ---------------------------------------------------------------- found by other ways, then rebound
#
# What a rebuilt f cannot be given (it reads a class, a Python module, a context variable itself) is
# another thing at the time of the recomputation: the value of the forward, or an error.

CONSTANTS = torch.full((3,), 2.0, dtype=F64), torch.full((3,), 7.0, dtype=F64)
NUMBERS = 2.0, 7.0


class Constants:
    value = None


ITEMS = set()
# How a value is put there, and how it is read.
SHELVES = {
    "namespace": (lambda v: setattr(HOLDER, "value", v), lambda: HOLDER.value),
    "python_module": (lambda v: setattr(MODULE, "w", v), lambda: MODULE.w),
    "class": (lambda v: setattr(Constants, "value", v), lambda: Constants.value),
    "global": (set_global, lambda: GLOBAL),
    "set": (lambda v: (ITEMS.clear(), ITEMS.add(v)), lambda: next(iter(ITEMS))),
    "context_variable": (CONTEXT.set, lambda: CONTEXT.get()),
}


def rebound(place, what, wrap, w, x):
    first, then = {
        "tracked": (w, w * 7),
        "constant": CONSTANTS,
        "number": NUMBERS,
        "function": (torch.sin, torch.cos),
    }[what]
    put, read = SHELVES[place]
    put(first)
    if what == "function":
        out = wrap(lambda x: act(read()(w), x))(x)
    elif what == "tracked":
        out = wrap(lambda x: act(read(), x))(x)
    else:
        out = wrap(lambda x: act(read() * w, x))(x)
    put(then)
    return out


# ---------------------------------------------------------------- what cannot be found by looking at f

HIDDEN = {}
hidden = registered(HIDDEN)


@hidden
def context_variable(wrap, w, x):
    CONTEXT.set(w)
    return wrap(lambda x: act(CONTEXT.get(), x))(x)


@hidden
def thread_local(wrap, w, x):
    LOCAL.w = w
    return wrap(lambda x: act(LOCAL.w, x))(x)


@hidden
def generator(wrap, w, x):
    def endless():
        while True:
            yield w

    source = endless()
    return wrap(lambda x: act(next(source), x))(x)


@hidden
def cache(wrap, w, x):
    @functools.cache
    def fetch():
        return w * 2

    fetch()
    return wrap(lambda x: act(fetch(), x))(x)


@hidden
def weak_reference(wrap, w, x):
    ref = weakref.ref(w)
    return wrap(lambda x: act(ref(), x))(x)


@hidden
def weak_dictionary(wrap, w, x):
    REGISTRY["w"] = w
    return wrap(lambda x: act(REGISTRY["w"], x))(x)


@hidden
def object_array(wrap, w, x):
    items = np.empty(1, dtype=object)
    items[0] = w
    return wrap(lambda x: act(items[0], x))(x)


@hidden
def c_queue(wrap, w, x):
    items = queue.SimpleQueue()
    items.put(w)

    def f(x):
        v = items.get()
        items.put(v)
        return act(v, x)

    return wrap(f)(x)


@hidden
def by_name_in_globals(wrap, w, x):
    set_global(w)
    return wrap(lambda x: act(globals()["GLO" + "BAL"], x) * eval("GLOBAL"))(x)


@hidden
def by_name_in_modules(wrap, w, x):
    sys.modules["funcckpt_test_weights"] = MODULE
    MODULE.w = w

    def f(x):
        import funcckpt_test_weights

        return act(funcckpt_test_weights.w, x)

    return wrap(f)(x)


@hidden
def from_a_frame(wrap, w, x):
    def f(x):
        frame = sys._getframe()
        while "hidden_weight" not in frame.f_locals:
            frame = frame.f_back
        return act(frame.f_locals["hidden_weight"], x)

    hidden_weight = w  # noqa: F841
    return wrap(f)(x)


@hidden
def custom_function_from_context(wrap, w, x):
    CONTEXT.set(w)
    return wrap(lambda x: Cube.apply(CONTEXT.get(), x)[0])(x)


HIDDEN |= {
    "iterator": held_by(itertools.repeat, next),
    "mapping_proxy": held_by(lambda w: types.MappingProxyType({"w": w}), lambda o: o["w"]),
    "object_in_an_iterator": held_by(lambda w: itertools.cycle([Attributes(w)]), lambda o: next(o).w),
}
# What is gone by the time of the recomputation: f itself fails, loudly, in its own words.
PASSING = {
    "weak_reference": (TypeError,),
    "weak_dictionary": (KeyError,),
    # Who looks at the locals of a frame of remat holds what is in them.
    "from_a_frame": (AttributeError, EscapeError),
}


def observe(kind, transform, wrap):
    return CAPTURES[transform](functools.partial(kind, wrap), tensor(3), tensor(3, seed=1))


@pytest.mark.parametrize("transform", CAPTURES)
@pytest.mark.parametrize("kind", LIFTED)
def test_captured_as_if_given(kind, transform):
    compare(lambda wrap: observe(LIFTED[kind], transform, wrap), remat)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("transform", CAPTURES)
@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_is_right_or_named(kind, transform, wrap):
    if kind == "from_a_frame" and sys.version_info >= (3, 13):
        kind = "by_name_in_globals"  # reading f_locals makes a new dictionary there
    allowed = (ClosureError, *PASSING.get(kind, ()))
    error = compare(lambda wrap: observe(HIDDEN[kind], transform, wrap), WRAPS[wrap], allowed=allowed)
    if isinstance(error, ClosureError):
        text = str(error)
        assert "3" in text and "float64" in text, text  # shape and dtype of the tensor
        assert "lambda" in text or ".f" in text or " f" in text, text  # the function


@pytest.mark.parametrize(
    "transform",
    ["backward_leaf", "double_backward", "grad", "vjp_later", "jvp", "vmap_grad", "hessian_mixed"],
)
@pytest.mark.parametrize("what", ["tracked", "constant", "number", "function"])
@pytest.mark.parametrize("place", SHELVES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_rebound_is_right_or_refused(wrap, place, what, transform):
    compare(
        lambda wrap: observe(functools.partial(rebound, place, what), transform, wrap),
        WRAPS[wrap],
        allowed=(MutationError,),
    )


SCALE = None


class Scaled:
    """Its code, not its state, refers to a global."""

    def method(self, x):
        return x * SCALE

    @property
    def value(self):
        return SCALE

    @staticmethod
    def static(x):
        return x * SCALE

    @classmethod
    def of_class(cls, x):
        return cls.static(x)

    def __getitem__(self, key):
        return SCALE

    def __call__(self, x):
        return self.by_name(x)

    def by_name(self, x):
        return getattr(self, "meth" + "od")(x)


class ScaledModule(nn.Module):
    def __init__(self, deep):
        super().__init__()
        self.deep = deep

    def helper(self, x):
        return x * SCALE

    def forward(self, x):
        return self.helper(x) if self.deep else x * SCALE


class ScaledFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * SCALE

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, ct):
        return ct * SCALE

    @staticmethod
    def jvp(ctx, t):
        return t * SCALE


BY_METHODS = {
    "method": lambda: lambda x, it=Scaled(): it.method(x),
    "property": lambda: lambda x, it=Scaled(): it.value * x,
    "static": lambda: lambda x: Scaled.static(x),
    "class_method": lambda: Scaled.of_class,
    "operator": lambda: lambda x, it=Scaled(): x * it[0],
    "call": lambda: lambda x, it=Scaled(): it.method(it(x)),
    "bound": lambda: Scaled().method,
    "partial": lambda: functools.partial(Scaled.method, Scaled()),
    "forward": lambda: ScaledModule(False),
    "helper": lambda: ScaledModule(True),
    "module_in_lambda": lambda: lambda x, net=nn.Sequential(ScaledModule(True)): net(x),
    "custom_function": lambda: ScaledFunction.apply,
    "made_inside": lambda: lambda x: Scaled().method(x),
    "imported_inside": lambda: import_inside,
}


def import_inside(x):
    import funcckpt_test_weights

    return x * funcckpt_test_weights.w


@pytest.mark.parametrize(
    "transform", ["backward_leaf", "double_backward", "vjp_later", "jvp", "vmap_grad", "hessian_mixed"]
)
@pytest.mark.parametrize("what", ["constant", "number"])
@pytest.mark.parametrize("kind", BY_METHODS)
def test_rebound_where_methods_read_it(kind, what, transform):
    first, then = CONSTANTS if what == "constant" else NUMBERS

    def f(wrap, w, x):
        global SCALE
        SCALE = first
        sys.modules["funcckpt_test_weights"] = MODULE
        MODULE.w = first
        out = wrap(BY_METHODS[kind]())(act(w, x)).sin()
        MODULE.w = SCALE = then
        return out

    compare(lambda wrap: observe(functools.partial(f), transform, wrap), remat, allowed=(MutationError,))


def test_what_a_class_gains_is_no_change():
    """A cache that grows, as those of rotary embeddings do, and an attribute that nobody read."""

    class Tables:
        made: ClassVar[dict] = {}

        def __call__(self, x):
            if len(x) not in self.made:
                self.made[len(x)] = torch.arange(len(x), dtype=F64)
            return (x * self.made[len(x)]).sin()

    def run(wrap):
        Tables.made.clear()
        leaves = [tensor(3, requires_grad=True), tensor(3, seed=1, requires_grad=True), tensor(4, seed=2)]
        out = sum(wrap(Tables())(x).sum() for x in leaves)
        Tables.other = out.detach()
        out.backward()
        return [x.grad for x in leaves]

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("place", ["class", "python_module"])
def test_batch_norm_where_no_copy_can_be_put(place):
    class Shelf:
        pass

    def run(wrap):
        shelf = Shelf if place == "class" else MODULE
        shelf.w = norm = nn.BatchNorm1d(3, dtype=F64)
        x = tensor(4, 3, requires_grad=True)
        wrap(lambda x: shelf.w(x).sin())(x).sum().backward()
        return x.grad, norm.weight.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- other dtypes, modes and shapes
# of captured tensors


PROGRAMS = {}
program = registered(PROGRAMS)


@program
def captured_integers_and_masks_under_vmap(wrap):
    def f(index, mask, x):
        return wrap(lambda x: torch.where(mask, x.sin(), x)[index])(x)

    index, mask = (
        torch.tensor([[0, 1], [2, 2]]),
        torch.tensor([[True, False, True], [False, False, True]]),
    )
    x = tensor(3)
    loss = lambda index, mask, x: f(index, mask, x).sum()
    return (
        vmap(f, (0, 0, None))(index, mask, x),
        vmap(grad(loss, argnums=2), (0, 0, None))(index, mask, x),
        vmap(grad(loss, argnums=2), (None, 0, None))(index[0], mask, x),
        grad(lambda x: vmap(loss, (0, 0, None))(index, mask, x).sum())(x),
    )


@program
def captured_detached_inside(wrap):
    w, x = tensor(3, requires_grad=True), tensor(3, seed=1, requires_grad=True)
    wrap(lambda x: act(w.detach(), x))(x).sum().backward()
    first = w.grad, x.grad
    inner = grad(lambda w: wrap(lambda x: (w.detach() * x).sum() + w.sum())(x.detach()))(w.detach())
    return first, inner


@program
def levels_of_their_own_for_each_captured(wrap):
    """One tensor of each level: plain autograd, outer grad, inner grad, vmap, jvp."""
    a, x = tensor(3, seed=1, requires_grad=True), tensor(3, seed=6)

    def level1(b):
        def level2(c):
            def level3(d):
                def level4(e):
                    return wrap(lambda x: total(act(a, x) * act(b, c) + act(d, e) * x))(x)

                return jvp(level4, (d,), (c,))[1]

            return vmap(level3)(torch.stack([c, c * 2])).sum()

        return total(grad(level2)(b * 2))

    g = grad(level1)(tensor(3, seed=2))
    total(g).backward()
    return g.detach(), a.grad


@program
def one_remat_object_at_many_levels(wrap):
    """The remat object is made once; each call captures what the cell holds at its time."""
    box = {}
    f = wrap(lambda x: act(box["w"], x))

    def call(w, x):
        box["w"] = w
        return total(f(x))

    w, x = tensor(3), tensor(3, seed=1)
    leaf = w.clone().requires_grad_()
    call(leaf, x).backward()
    batch = torch.stack([w, w * 2])
    return (
        leaf.grad,
        grad(call)(w, x),
        vmap(grad(call), (0, None))(batch, x),
        jvp(call, (w, x), (x, w)),
        grad(lambda w: total(grad(call)(w, x)))(w),
        call(w, x),
    )


@program
def dead_wrapper_captured(wrap):
    """A tensor that outlived its grad level is, as without remat, an ordinary one."""
    kept = []

    def f(w):
        kept.append(w * 2)
        return w.sum()

    grad(f)(tensor(3))
    return grad(lambda x: wrap(lambda x: act(kept[0], x))(x).sum())(tensor(3, seed=1))


@program
def leaf_hooks_run_once_per_backward(wrap):
    calls = []
    w, x = tensor(3, requires_grad=True), tensor(3, seed=1)
    w.register_hook(lambda g: calls.append(g.clone()))
    wrap(lambda x: act(w, x))(x).sum().backward()
    return calls


@program
def an_object_that_holds_the_globals_of_its_function(wrap):
    space = {"k": 2.0}
    exec("def f(x):\n    return (x * k).sin()", space)
    holder = types.SimpleNamespace(f=space["f"], space=space)
    x = tensor(3, requires_grad=True)
    y = wrap(lambda x: holder.f(x) * holder.space["k"])(x).sum()
    space["k"] = 3.0
    return torch.autograd.grad(y, x)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without_a_checkpoint(name, wrap):
    assert_same(PROGRAMS[name](WRAPS[wrap]), PROGRAMS[name](plain))


def _hook_on_a_copy(wrap, x):
    a = nn.Linear(3, 3, dtype=F64)
    nn.init.constant_(a.weight, 0.3), nn.init.constant_(a.bias, 0.1)
    b = copy.copy(a)
    y = wrap(lambda x: b(a(x)))(x)
    a.register_forward_hook(lambda module, args, out: 2 * out)
    return y


def _captured_hooks(wrap, x):
    a = nn.Tanh()
    hooks = a._forward_hooks
    y = wrap(lambda x: a(x) * (1 + len(hooks)))(x)
    a.register_forward_hook(lambda module, args, out: 2 * out)
    return y


def _key_named_as_the_class(wrap, x):
    d = {"__class__": {"w": x.detach().cos()}}
    y = wrap(lambda x: x.sin() * d["__class__"]["w"])(x)
    d["__class__"].clear()
    return y


def _buffer_that_f_registers(wrap, x):
    module = nn.Tanh()

    def f(x):
        if not module._buffers:
            module.register_buffer("cache", torch.ones(3, dtype=F64), persistent=False)
        return module(x) * module.cache

    return wrap(f)(x)


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda x: checkpoint(f, x)], ids=["remat", "checkpoint"])
@pytest.mark.parametrize(
    "program", [_hook_on_a_copy, _captured_hooks, _key_named_as_the_class, _buffer_that_f_registers]
)
def test_what_was_empty_at_the_call(program, wrap):
    """Containers without content are shared by shallow copies, captured by themselves, and filled later."""

    def run(wrap):
        x = torch.linspace(-1, 1, 3, dtype=F64, requires_grad=True)
        return torch.autograd.grad(program(wrap, x).sum(), x)

    assert_same(run(wrap), run(lambda f: f))
