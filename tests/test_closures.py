"""Tensors that f uses without being given them have the gradient, batch dimension and tangent that they should.

A kind is a function (wrap, w, x) in which something holds w and is remat'd by `wrap`; each meets every way of
differentiating and batching w and x in `oracles.CAPTURES`. What cannot be found may raise `ClosureError`;
nothing may be silent.
"""

import collections
import contextvars
import functools
import threading
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from compositions.functions import Pair
from oracles import CAPTURES, F64, compare, tensor
from support import WRAPS, assert_same, registered
from torch import nn

from funcckpt import ClosureError, EscapeError, MutationError, checkpoint, policies, remat
from funcckpt.closures import Found

GLOBAL = None
MODULE = types.ModuleType("weights")
CONTEXT = contextvars.ContextVar("weight")
LOCAL = threading.local()
REGISTRY = weakref.WeakValueDictionary()


def set_global(value):
    global GLOBAL
    GLOBAL = value


def act(w, x):
    """Uses w and x nonlinearly, with something in between to save."""
    return torch.tanh(w * x) * w.sin() + x


class Attributes:
    def __init__(self, w):
        self.w = w


class OwnPartial(functools.partial):
    """As handlers of pyro are: the slot hides the attribute of a partial."""

    __slots__ = ("func",)

    def __init__(self, func):
        self.func = func


class Slots:
    __slots__ = ("__weakref__", "w")

    def __init__(self, w):
        self.w = w


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


class Doubled(Pair):
    def __new__(cls, w):
        return super().__new__(cls, w * 2, None)


class OwnDict(dict):
    __getattr__ = dict.__getitem__


class MadeAnew(dict):
    def __new__(cls, w):
        made = super().__new__(cls)
        made.w = w
        return made

    def __init__(self, w):
        super().__init__(k=2.0)


class AttributeDict(OwnDict):
    __slots__ = ()
    __setattr__ = dict.__setitem__


class Batch(dict):
    def __len__(self):
        return len(self["x"])


class Key:
    """As a `DispatchKey` of torch 2.15."""

    def __hash__(self):
        return 0

    def __eq__(self, other):
        raise RuntimeError("This compares itself with none of your keys.")


class Computed(dict):
    """As in the package munch."""

    __dict__ = property(dict)

    def __init__(self, default, **items):
        super().__init__(**items)
        object.__setattr__(self, "default", default)

    def copy(self):
        return Computed(self.default, **self)


LIFTED = {}
lifted = registered(LIFTED)


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
def leaf_made_for_an_inner_one(wrap, w, x):
    def f(x):
        v = torch.ones(3, dtype=F64, requires_grad=True)
        return wrap(lambda x: act(w * v, x))(x)

    return wrap(f)(x)


def held_by(make, read):
    """A kind in which f reads w from an object that holds it."""

    def kind(wrap, w, x):
        holder = make(w)
        return wrap(lambda x: act(read(holder), x))(x)

    return kind


LIFTED |= {
    "function_attribute": held_by(lambda w: (f := lambda: None, setattr(f, "w", w))[0], lambda f: f.w),
    "defaultdict": held_by(lambda w: collections.defaultdict(lambda: 2, a=[w]), lambda o: o["a"][0] * o["b"]),
    "own_defaultdict": held_by(
        lambda w: type("Own", (collections.defaultdict,), {})(lambda: 2, a=[w]), lambda o: o["a"][0] * o["b"]
    ),
    "deque": held_by(lambda w: collections.deque([w, w * 2], maxlen=2), lambda o: o[-1] + o[0]),
    "frozenset": held_by(lambda w: frozenset([w]), lambda o: next(iter(o))),
    "own_distribution": held_by(
        lambda w: type("Own", (torch.distributions.Normal,), {})(w, 1.0, validate_args=False),
        lambda o: o.mean,
    ),
    "own_user_dict": held_by(lambda w: type("Own", (collections.UserDict,), {})(w=w), lambda o: o["w"]),
    "own_dict": held_by(lambda w: OwnDict(w=w), lambda o: o.w),
    "attribute_of_a_dict": held_by(MadeAnew, lambda o: o.w * o["k"]),
    "keys_that_refuse_to_be_compared": held_by(
        lambda w: {Key(): {Key(): w}}, lambda o: sum([w for inner in o.values() for w in inner.values()])
    ),
    "dict_without_attributes": held_by(lambda w: AttributeDict(w=w), lambda o: o.w),
    "dict_with_a_length": held_by(lambda w: Batch(x=w), lambda o: o["x"] * len(o)),
    "computed_attributes": held_by(lambda w: Computed(2, w=w), lambda o: o["w"] * o.default),
    "its_own_dict": held_by(
        lambda w: (o := OwnDict(w=w), setattr(o, "__dict__", o))[0], lambda o: vars(o)["w"] * o["w"]
    ),
    "vars": held_by(Attributes, lambda o: vars(o)[chr(119)]),
    "slots_of_a_base": held_by(SlotsBelow, lambda o: o.w),
    "frozen_dataclass": held_by(FrozenData, lambda o: o.w),
    "named_tuple": held_by(Doubled, lambda o: o.left),
    "partial": held_by(lambda w: (f := functools.partial(w.mul), setattr(f, "w", w))[0], lambda f: f(f.w)),
    "own_partial": held_by(lambda w: OwnPartial(functools.partial(torch.mul, w)), lambda f: f(f(2.0))),
    "cyclic_object": held_by(
        lambda w: (o := Attributes(w), setattr(o, "me", [o]))[0], lambda o: o.me[0].me[0].w
    ),
    "thread_local": held_by(lambda w: (setattr(LOCAL, "w", w), LOCAL)[1], lambda o: o.w),
    "delegate": held_by(lambda w: Delegate(Attributes(w)), lambda o: o.w),
    "captured_and_argument": lambda wrap, w, x: wrap(lambda v, z: act(w, x) * v * z)(w, x),
    "object_argument": lambda wrap, w, x: wrap(lambda x, o: act(o.w[0], x))(x, o=Slots([w])),
    "static_argument": lambda wrap, w, x: wrap(lambda o, x: act(o.w, x), static_argnums=0)(Attributes(w), x),
    "function_argument": lambda wrap, w, x: wrap(lambda f, x: f(x) * 2)(lambda z: act(w, z), x),
    "bound_tensor_method": lambda wrap, w, x: wrap(w.mul)(x) + x,
    "method_descriptor": lambda wrap, w, x: wrap(torch.Tensor.mul)(w, x),
    "class_method": lambda wrap, w, x: type("T", (), {"f": wrap(classmethod(lambda cls, x: act(w, x)))}).f(x),
    "constructor": lambda wrap, w, x: wrap(Pair)(w, x),
    "twice_the_same": lambda wrap, w, x: wrap(lambda q, k: act(q * 2 if q is k else q, x))(w, w),
}


@pytest.mark.parametrize("transform", CAPTURES)
@pytest.mark.parametrize("kind", LIFTED)
def test_captured_as_if_given(kind, transform):
    compare(lambda wrap: observe(LIFTED[kind], transform, wrap), remat)


def observe(kind, transform, wrap):
    return CAPTURES[transform](functools.partial(kind, wrap), tensor(3), tensor(3, seed=1))


def test_attributes_of_a_dict_that_no_code_names_are_not_searched():
    o = OwnDict(w=torch.ones(2))
    vars(o).update(data=[torch.zeros(3)], scale=torch.ones(()))
    found = Found(lambda x: x * o.w * vars(o)["scale"] if x is None else x * o.scale)
    assert len(found.tensors) == 3  # `vars` may look up anything
    found = Found(lambda x: x * o.w * o.scale)
    assert {*found.tensors} == {id(o.w), id(o.scale)}


def test_a_trainer_of_lightning_is_not_copied():
    """It stands for the whole program: a method of its logger has to be the same object."""
    trainer = type("Trainer", (), {"__module__": "lightning.pytorch", "step": 0})()
    seen, layer = [], torch.nn.Linear(2, 2)
    layer.trainer = trainer
    y = remat(lambda x: (seen.append(layer.trainer), layer.trainer.step, layer(x))[2])(torch.ones(2))
    trainer.step = 1
    y.sum().backward()
    assert seen == [trainer, trainer]


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

    def __call__(self):
        return getattr(self, "of_" + "class")()


class ReaderModule(nn.Module, Reader):
    def forward(self):
        return self.static()


ITEMS, TABLE = set(), {}
PROXY = types.MappingProxyType(TABLE)
READER, NET = Reader(), nn.Sequential(ReaderModule())
# How a value is put there, and how it is read.
SHELVES = {
    "python_module": (lambda v: setattr(MODULE, "w", v), lambda: MODULE.w),
    "class": (lambda v: setattr(Constants, "value", v), lambda: Constants.value),
    "set": (lambda v: (ITEMS.clear(), ITEMS.add(v)), lambda: next(iter(ITEMS))),
    "mapping_proxy": (lambda v: TABLE.update(v=v), lambda: PROXY["v"]),
    "context_variable": (CONTEXT.set, lambda: CONTEXT.get()),
    "thread_local": (lambda v: setattr(LOCAL, "w", v), lambda: LOCAL.w),
    "property": (set_global, lambda: READER.value),
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


@pytest.mark.parametrize("transform", ["backward_leaf", "double_backward", "grad", "jvp", "vmap_grad"])
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("place", SHELVES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_rebound_is_right_or_refused(wrap, place, what, transform):
    compare(
        lambda wrap: observe(functools.partial(rebound, place, what), transform, wrap),
        WRAPS[wrap],
        allowed=(MutationError,),
    )


def test_what_only_torch_names_of_a_disabled_function():
    """The wrapper of `torch.compiler.disable` looks up any attribute."""

    class Trainer:
        def __init__(self):
            self.weight, self.data = tensor(3), [tensor(3)]

        def step(self, x):
            return x * self.weight

    trainer = Trainer()
    found = Found(torch.compiler.disable(trainer.step))
    assert id(trainer.weight) in found.tensors and id(trainer.data) not in found.nodes


def test_a_class_whose_module_is_a_property():
    class Proxy:
        __module__ = property(lambda self: "elsewhere")

        def __init__(self):
            self.weight = tensor(3, requires_grad=True)

    held, x = Proxy(), tensor(3)
    remat(lambda x: x * held.weight)(x).sum().backward()
    assert_same(held.weight.grad, x)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_context_variable_has_its_default(wrap):
    """Around the backward the caller sets what had only its default in the forward."""
    flag, x = contextvars.ContextVar("flag", default=True), torch.ones(3, dtype=F64, requires_grad=True)
    y = WRAPS[wrap](lambda x: (x * 3 if flag.get() else x).sin())(x)
    token = flag.set(False)
    y.sum().backward()
    assert_same(x.grad, 3 * (3 * x.detach()).cos())
    assert flag.get() is False
    flag.reset(token)


# What cannot be found by looking at f.
HIDDEN = {
    "cache": held_by(lambda w: (f := functools.cache(lambda: w * 2), f())[0], lambda f: f()),
    "weak_dictionary": held_by(lambda w: (REGISTRY.update(w=w), REGISTRY)[1], lambda o: o["w"]),
    "own_tuple": held_by(lambda w: type("Own", (tuple,), {})((w,)), lambda o: o[0]),
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


@pytest.mark.parametrize("way", ["hook", "second derivative", "in a checkpoint"])
def test_a_captured_leaf_that_a_weak_reference_hides_too(way):
    """The recomputation has another tensor in its place, and would lose a part of the gradient."""
    w = torch.nn.Parameter(tensor(3))
    parent, x = weakref.ref(w), tensor(3, seed=1, requires_grad=True)
    if way == "hook":
        w.register_hook(lambda g: g)
    f = remat(lambda x: (x * parent()).sin() * w)
    y = checkpoint(f, x) if way == "in a checkpoint" else f(x)
    with pytest.raises(ClosureError, match=r"float64\[3\]"):
        torch.autograd.grad(y.sum(), w, create_graph=way == "second derivative")[0].sum().backward()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_captured_result_that_a_weak_reference_hides_too(policy, both):
    """The same of a tensor that was computed outside: the closure has it, and f reaches it by another way."""
    w = tensor(3, requires_grad=True)
    t = w * 2
    hidden = weakref.ref(t)
    f = remat(lambda x: (x * hidden()).sin() + (t if both else len(t)), policy=policy)
    y = f(tensor(3, seed=1))
    with pytest.raises(ClosureError, match=r"float64\[3\], a result of MulBackward0"):
        torch.autograd.grad(y.sum(), w)


@pytest.mark.parametrize("around", ["hooks", "checkpoint", "torch's checkpoint"])
def test_captured_results_under_hooks_are_not_taken_for_hidden_ones(around):
    """The tensors of the first run are gone, and those of a recomputation may have their addresses."""
    w, x = tensor(3, 3, requires_grad=True), tensor(3, seed=1)

    def loss(w, wrap):
        for i in range(3):
            w = wrap(lambda x, t=w * (i + 1): (t @ x).sin() * t)(x)
        return w.sum()

    (expected,) = torch.autograd.grad(loss(w, lambda f: f), w)
    for _ in range(40):
        if around == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
                y = loss(w, remat)
        elif around == "checkpoint":
            y = checkpoint(loss, w, remat)
        else:
            y = torch.utils.checkpoint.checkpoint(loss, w, remat, use_reentrant=False)
        assert_same(torch.autograd.grad(y, w)[0], expected)


def multiplied(pull, u):
    return u * pull(u)[0]


def test_a_pullback_behind_which_something_is_differentiated():
    def inside(wrap, x):
        _, pull = torch.func.vjp(torch.sin, x)
        return wrap(lambda u: u * pull(u)[0])(x).sum()

    both, x = torch.stack([tensor(3), tensor(3)]), tensor(3, requires_grad=True)
    for transform in (
        lambda f: torch.func.grad(f)(tensor(3)),
        lambda f: torch.func.jvp(torch.func.grad(f), (tensor(3),), (tensor(3),)),
        lambda f: torch.func.vmap(torch.func.grad(f))(both),
    ):
        with pytest.raises(ClosureError, match=r"Call torch\.func\.vjp inside of the function"):
            transform(functools.partial(inside, remat))
    for f, transform in (
        (torch.sin, lambda f: torch.func.jacrev(f)(x.detach())),
        (lambda z: torch.tanh(z) * z.detach(), lambda f: torch.func.vmap(torch.func.grad(f))(both)),
    ):
        run = lambda u, f=f: remat(functools.partial(multiplied, torch.func.vjp(f, x.detach())[1]))(u).sum()
        with pytest.raises(ClosureError, match=r"Call torch\.func\.vjp inside of the function"):
            transform(run)  # the pullback is called at other levels than it was made at
    (g,) = torch.autograd.grad(inside(remat, x), x, create_graph=True)
    assert_same(g.detach(), torch.autograd.grad(inside(lambda f: f, x), x)[0])
    with pytest.raises(ClosureError, match=r"Call torch\.func\.vjp inside of the function"):
        torch.autograd.grad(g.sum(), x)
    _, pull = torch.func.vjp(torch.tanh, x.detach())

    def named_like_a_pullback(wrap):
        scale = 2.0

        @functools.wraps(pull)
        def scaled(u):
            return pull(u)[0] * scale

        y = wrap(lambda u: scaled(u.sin()))(x)
        scale = 5.0
        return torch.autograd.grad(y.sum(), x)

    assert_same(named_like_a_pullback(remat), named_like_a_pullback(lambda f: f))

    def uses_the_value_alone(x, wrap=lambda f: f):
        both = torch.func.vjp(torch.sin, x)
        return wrap(lambda u: u * both[0])(x.cos()).sum()

    for g in (uses_the_value_alone, torch.func.grad(uses_the_value_alone)):
        assert_same(g(x.detach(), wrap=remat), g(x.detach()))
    stored, harmless = types.SimpleNamespace(last=1.0), pull

    def calls_another_one(x, wrap=lambda f: f):
        pulls = [harmless, torch.func.vjp(torch.sin, x)[1]]

        def f(u):
            stored.last = None
            return (pulls[0](u)[0] * u).sum()

        return wrap(f)(x)

    gradient = torch.func.grad(functools.partial(calls_another_one, wrap=remat))(x.detach())
    assert stored.last is None
    assert_same(gradient, torch.func.grad(calls_another_one)(x.detach()))
    expected = torch.autograd.grad(uses_the_value_alone(x), x)
    assert_same(torch.autograd.grad(uses_the_value_alone(x, wrap=remat), x), expected)
    hooks = lambda f: lambda u: checkpoint(f, u)
    assert_same(torch.autograd.grad(inside(hooks, x), x), torch.autograd.grad(inside(lambda f: f, x), x))


def test_a_hidden_tensor_of_forward_mode_around_another_transform():
    x = tensor(3)

    def inside(y):
        hidden = type("Own", (tuple,), {})((y * 2,))
        return torch.func.grad(remat(lambda u: (u * hidden[0]).sin().sum()))(x)

    for transform in (lambda f: torch.func.jvp(f, (x,), (x,)), lambda f: torch.func.jacfwd(f)(x)):
        with pytest.raises(ClosureError, match="belongs to jvp at level"):
            transform(inside)


class KeyedByModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=F64) for _ in range(2)])
        self.gain, self.calls = {self.layers[0]: 0.3}, {self.layers[1]: 0}
        self.seen = {}

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.gain.get(layer, 1.0)
            if layer in self.calls:
                self.calls[layer] += 1
        self.seen = {layer: self.seen.get(layer, 0) + count for layer, count in self.calls.items()}
        return x


@pytest.mark.parametrize("wrap", WRAPS)
def test_dicts_with_modules_as_keys(wrap):
    def run(wrap):
        torch.manual_seed(0)
        net = KeyedByModules()
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        calls = wrap(lambda x: net(x))
        loss = lambda p, x: torch.func.functional_call(Around(net, calls), p, x).square().sum()
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(around(parameters), tensor(4, 3))
        assert net.calls == net.seen == {net.layers[1]: 1}
        return gradients

    class Around(nn.Module):
        def __init__(self, net, calls):
            super().__init__()
            self.net, self.calls = net, calls

        def forward(self, x):
            return self.calls(x)

    around = lambda parameters: {f"net.{name}": p for name, p in parameters.items()}
    assert_same(run(WRAPS[wrap]), run(lambda f: f))


def test_a_leaf_that_somebody_else_holds():
    held = []

    def f(x):
        held.append(torch.ones(3, dtype=F64, requires_grad=True))
        return (x * held[-1]).sin()

    with pytest.raises((ClosureError, EscapeError)):
        remat(f)(tensor(3, requires_grad=True))
