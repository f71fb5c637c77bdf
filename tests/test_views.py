"""A closure that has a view of a model finds what a search would find, and sees each change of it.

The oracle is the search itself, with no plan to follow and no view; and for gradients, no remat.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
from oracles import no_gc
from test_plans import seen
from torch import nn

from funcckpt import EscapeError, MutationError, closure, remat
from funcckpt.closure import Closure

FACTORS = {"scale": 2.0}
SHIFT = 1.0


def shift(amount):
    global SHIFT
    if amount > 100:
        SHIFT = amount
    return SHIFT


@functools.lru_cache
def offset():
    return 0.5


def scaled(x):
    return x * FACTORS["scale"]


class Rates(dict):
    """A container of a class of its own."""


class Block(nn.Module):
    factor = 1.5

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(3), nn.Linear(3, 3), nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(2, 3))
        self.gain, self.shifts, self.options = 2.0, [0.5, 0.25], {"bias": 1.0}
        self.kinds, self.rates, self.mark = {"a"}, Rates(up=1.0), object()

    def forward(self, x):
        assert self.mark is not None
        x = x * len(self.kinds) * self.rates["up"]
        x = self.linear(self.norm(x)) * self.gain * self.factor * self.mask
        return x + self.act(scaled(x)) + sum(self.shifts) + self.options["bias"] + shift(self.gain) + offset()


class Storing(Block):
    stores = False

    def forward(self, x):
        y = super().forward(x)
        if self.stores:
            self.options["last"] = y
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def apply_block(self, i, x):
        return self.blocks[i](x)


def of_methods(model):
    return functools.partial(model.apply_block, 1)


def of_closure(model):
    w = torch.ones(3, requires_grad=True)
    return lambda x: model.blocks[0](x * w) + model.blocks[1].linear.weight


ROOTS = {"module": lambda model: model, "methods": of_methods, "closure": of_closure}


@pytest.fixture(autouse=True)
def forgotten():
    closure._plans.clear()
    yield
    closure._plans.clear()


def viewed(root, *args):
    """A closure of what `root` makes, the third: the first searches, the second makes a view."""
    for _ in range(2):
        Closure(root(*args))
    return Closure(root(*args))


def in_any_order(found):
    nodes, tensors, flags = seen(found)
    return sorted(nodes, key=lambda node: node[0]), [sorted(ids) for ids in tensors], flags


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_a_view_knows_what_a_search_finds(root):
    model, made = Model(), []
    value = functools.partial(root, model)
    found = viewed(lambda: made.append(value()) or made[-1])
    assert found._view is not None
    assert len(found._nodes) < 12
    found._leave_view()
    closure._plans.clear()
    assert in_any_order(found) == in_any_order(Closure(made[-1]))


def with_class_attribute(model, monkeypatch):
    monkeypatch.setattr(Block, "factor", 3.0)


def with_global(model, monkeypatch):
    monkeypatch.setitem(globals(), "FACTORS", {"scale": 3.0})


def with_item_of_global(model, monkeypatch):
    monkeypatch.setitem(FACTORS, "scale", 3.0)


def with_method(model, monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, x: x * 2)


def with_method_of_library(model, monkeypatch):
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 2)


def with_defaults(model, monkeypatch):
    monkeypatch.setattr(scaled, "__defaults__", (torch.ones(3),))


def with_code(model, monkeypatch):
    monkeypatch.setattr(scaled, "__code__", (lambda x: x * 5).__code__)


def with_class(model, monkeypatch):
    class Other(nn.Dropout):
        def forward(self, x):
            return x * 3

    model.blocks[1].act.__class__ = Other


def with_state(model, monkeypatch):
    monkeypatch.setitem(globals(), "SHIFT", 3.0)


CHANGES = {
    "an attribute": lambda model, _: setattr(model.blocks[1], "gain", 3.0),
    "an attribute over that of the class": lambda model, _: setattr(model.blocks[1], "factor", 3.0),
    "one attribute for another": lambda model, _: (
        model.blocks[1].__dict__.pop("extra", None),
        setattr(model.blocks[1], "factor", 3.0),
    ),
    "a flag": lambda model, _: model.blocks[1].act.eval(),
    "an item of a list": lambda model, _: model.blocks[1].shifts.__setitem__(0, 1.0),
    "an item of a set": lambda model, _: model.blocks[1].kinds.add("b"),
    "an item of a container": lambda model, _: model.blocks[1].rates.update(up=2.0),
    "a longer list": lambda model, _: model.blocks[1].shifts.append(1.0),
    "an item of a dict": lambda model, _: model.blocks[1].options.update(bias=2.0),
    "a parameter": lambda model, _: setattr(model.blocks[1].linear, "bias", nn.Parameter(torch.ones(3))),
    "no parameter": lambda model, _: setattr(model.blocks[1].linear, "bias", None),
    "a frozen parameter": lambda model, _: model.blocks[1].linear.bias.requires_grad_(False),
    "a tied parameter": lambda model, _: setattr(model.blocks[1].linear, "bias", model.blocks[0].linear.bias),
    "a buffer": lambda model, _: setattr(model.blocks[1], "mask", torch.zeros(2, 3)),
    "a new buffer": lambda model, _: model.blocks[1].act.register_buffer("more", torch.ones(1)),
    "a module": lambda model, _: setattr(model.blocks[1], "act", nn.Dropout(0.0)),
    "a module and what is in its place": lambda model, _: (
        delattr(model.blocks[1], "act"),
        gc.collect(),
        setattr(model.blocks[1], "act", nn.Dropout(0.0)),
    ),
    "a new module": lambda model, _: model.blocks.append(Block()),
    "a hook": lambda model, _: model.blocks[1].act.register_forward_hook(lambda m, i, y: y * 2),
    "a backward hook": lambda model, _: model.blocks[1].register_full_backward_hook(lambda m, i, o: None),
    "the forward of an object": lambda model, _: setattr(model.blocks[1].act, "forward", torch.sin),
    "the class of an object": with_class,
    "an attribute of a class": with_class_attribute,
    "a method": with_method,
    "a method of torch": with_method_of_library,
    "a global": with_global,
    "an item of a global": with_item_of_global,
    "a global that a function assigns": with_state,
    "a default": with_defaults,
    "code": with_code,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("root", [of_methods, lambda model: model.blocks[1]], ids=["methods", "module"])
def test_a_change_is_seen_by_the_next_search(root, change, monkeypatch):
    model = Model()
    model.blocks[1].extra = None
    assert viewed(root, model)._view is not None
    change(model, monkeypatch)
    value = root(model)
    found = Closure(value)
    found._leave_view()
    closure._plans.clear()
    assert in_any_order(found) == in_any_order(Closure(value))


def gradients(model, change=lambda model: None, wrap=remat):
    """Of a loss that the second block of three makes, where the model is changed before the backward."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    y = wrap(functools.partial(model.apply_block, 1))(x)
    change(model)
    return torch.autograd.grad(y.square().sum(), [x, model.blocks[1].norm.weight])


BETWEEN = {
    name: CHANGES[name]
    for name in (
        "an attribute",
        "a flag",
        "an item of a list",
        "an item of a dict",
        "a module",
        "a module and what is in its place",
        "a hook",
        "a new module",
    )
}


@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
def test_the_recomputation_finds_what_the_forward_found(change):
    model = Model()
    for _ in range(3):
        gradients(model)
    expected = gradients(copy.deepcopy(model), lambda model: None, lambda f: f)
    torch.testing.assert_close(gradients(model, lambda model: change(model, None)), expected)


def test_an_item_of_a_global_is_put_back(monkeypatch):
    model = Model()
    expected = [gradients(model) for _ in range(3)][-1]
    found = gradients(model, lambda model: with_item_of_global(model, monkeypatch))
    torch.testing.assert_close(found, expected)


REFUSED = {
    "factor": with_class_attribute,
    "kinds": CHANGES["an item of a set"],
    "rates": CHANGES["an item of a container"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_back_is_refused(name, monkeypatch):
    model = Model()
    for _ in range(3):
        gradients(model)
    with pytest.raises(MutationError, match=name):
        gradients(model, lambda model: REFUSED[name](model, monkeypatch))


def test_a_variable_that_a_function_assigns_is_refused(monkeypatch):
    model = Model()
    for _ in range(3):
        gradients(model)
    with pytest.raises(MutationError, match="SHIFT"):
        gradients(model, lambda model: with_state(model, monkeypatch))


def test_a_tensor_stored_after_some_calls_is_found():
    block = Storing()
    assert viewed(lambda: block)._view is not None
    block.stores = True
    for _ in range(2):
        Closure(block)
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(EscapeError, match="last"):
        remat(block)(x)


def test_statistics_are_put_back():
    def step(model, wrap):
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        return torch.autograd.grad(wrap(model)(x).square().sum(), x), dict(model.named_buffers())

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for _ in range(4):
        expected = step(copy.deepcopy(model), lambda f: f)
        torch.testing.assert_close(step(model, remat), expected)
    assert viewed(lambda: model)._view is not None


@pytest.mark.parametrize("has_cycle", [False, True], ids=["", "with a cycle"])
def test_a_view_keeps_no_model(has_cycle):
    model = Model()
    if has_cycle:
        object.__setattr__(model.blocks[0], "owner", model)
    with no_gc():
        y = [remat(of_methods(model))(torch.ones(2, 3)) for _ in range(4)][-1]
        (plans,) = [plans for plans in closure._plans.values() if plans[0].inner]
        assert plans[0].views
        reference = weakref.ref(model)
        del model
        if has_cycle:
            gc.collect()
        assert reference() is None
        assert not plans[0].views
        y.sum().backward()
