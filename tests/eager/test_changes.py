"""What a model of one's own refers to is changed after its forward: the gradient is that of the forward, or an
error says so. Torch's checkpoint gives that of what is there in the backward, in each of these cases.
"""

import argparse
import collections
import functools

import changes
import pytest
import torch
from changes import by_factor
from oracles import assert_same
from torch import nn

from funcckpt import checkpoint
from funcckpt.errors import CheckpointError, MutationError

from .implementations import D, leaf

# What was written to in place.
REFUSED = {"tensor of an object, in place", "buffer, in place"}


@pytest.fixture(autouse=True)
def put_back():
    yield
    changes.undo()


def run(wrap, change, model=changes.Model):
    torch.manual_seed(0)
    m = model()
    return changes.gradients(m, wrap(m), functools.partial(change, m))


def plain(f):
    return f


@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("change", changes.CHANGES)
def test_changed_before_the_backward(change, part):
    changed = lambda m: changes.CHANGES[change](getattr(m, part))
    expected = run(plain, lambda m: None)
    try:
        found = run(lambda f: functools.partial(checkpoint, f, use_reentrant=False), changed)
    except (CheckpointError, MutationError) as error:
        assert change in REFUSED, error
    else:
        assert_same(found, expected)


class Counting(nn.Module):
    """Counts its calls, and fills a cache."""

    calls_of_all = 0

    def __init__(self):
        super().__init__()
        self.linear, self.cache, self.seen, self.calls = nn.Linear(4, 4, dtype=D), {}, [], 0

    def table(self, n):
        if n not in self.cache:
            self.cache[n] = torch.arange(1, n + 1, dtype=D) / n
        return self.cache[n]

    def forward(self, x):
        self.calls += 1
        Counting.calls_of_all += 1
        self.seen.append(len(x))
        return (self.linear(x) * self.table(4)).sin()


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_module_assigns_itself(nested):
    m, before = Counting(), Counting.calls_of_all
    f = nn.Sequential(nn.Tanh(), m) if nested else m
    x = leaf(2, 4)
    found = torch.autograd.grad(checkpoint(f, x).sum(), [x, *f.parameters()])
    # What is appended is appended twice. Numbers are those of the call again, and counted once.
    assert (m.calls, Counting.calls_of_all - before, m.seen, [*m.cache]) == (1, 1, [2, 2], [4])
    assert_same(found, torch.autograd.grad(f(x).sum(), [x, *f.parameters()]))


class Reader(nn.Module):
    def __init__(self, there):
        super().__init__()
        self.there = there

    def forward(self, x):
        return (x * self.scale).sin()


class OfASet(Reader):
    @property
    def scale(self):
        return len(self.there)


class OfItems(Reader):
    @functools.cached_property
    def _deepest(self):
        return self.there[0]["a"]["b"]["c"]["d"]

    @property
    def scale(self):
        return self._deepest["e"]


class OfAttributes(Reader):
    @staticmethod
    def by_global(x):
        return x * changes.FACTOR

    @property
    def scale(self):
        return self.by_global(self.there.k)


def nested():
    return [{"a": {"b": {"c": {"d": {"e": 2.0}}}}}]


READERS = {
    "set": (lambda: OfASet({"a"}), lambda m: m.there.add("b")),
    "deque": (lambda: OfASet(collections.deque([1])), lambda m: m.there.append(2)),
    "tuple": (lambda: OfItems((*nested(), 1.0)), lambda m: m._deepest.__setitem__("e", 3.0)),
    "deep": (lambda: OfItems(nested()), lambda m: m._deepest.__setitem__("e", 3.0)),
    "namespace": (lambda: OfAttributes(argparse.Namespace(k=2.0)), lambda m: setattr(m.there, "k", 3.0)),
    "global of a static method": (
        lambda: OfAttributes(argparse.Namespace(k=2.0)),
        lambda m: setattr(changes, "FACTOR", 3.0),
    ),
    "property": (
        lambda: OfAttributes(argparse.Namespace(k=2.0)),
        lambda m: setattr(OfAttributes, "scale", property(lambda self: 5.0)),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_where_else_a_module_reads(name, monkeypatch):
    monkeypatch.setattr(OfAttributes, "scale", OfAttributes.scale)
    make, change = READERS[name]
    expected = run(plain, lambda m: None, make)
    assert_same(run(lambda f: functools.partial(checkpoint, f), change, make), expected)


@pytest.mark.parametrize("way", ["imported", "of a module"])
def test_a_function_of_another_file(way):
    f = (lambda x: by_factor(x).sin()) if way == "imported" else (lambda x: changes.by_factor(x).sin())
    x = leaf(3)
    y, expected = checkpoint(f, x), torch.autograd.grad(f(x).sum(), x)
    changes.CHANGES["global"](None)
    assert_same(torch.autograd.grad(y.sum(), x), expected)


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return (x * self.scale["by"]).sin()


def doubled(module, args, out):
    return out * 2


def hook_of_a_torch_module(m):
    m[0].register_forward_hook(lambda module, args, out: out * 3)


def hook_that_is_gone(m):
    m[1]._forward_hooks.clear()


def hook_with_keywords(m):
    m[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)


def hooks_in_another_order(m):
    m[1].register_forward_hook(lambda module, args, out: out + 1, prepend=True)


def item_of_a_nested_module(m):
    m[2].scale["by"] = 0.5


def method_of_a_class(m):
    Scaled.forward = lambda self, x: x.exp()


@pytest.mark.parametrize(
    "change",
    [
        hook_of_a_torch_module,
        hook_that_is_gone,
        hook_with_keywords,
        hooks_in_another_order,
        item_of_a_nested_module,
        method_of_a_class,
    ],
)
def test_a_part_of_a_sequence(change, monkeypatch):
    monkeypatch.setattr(Scaled, "forward", Scaled.forward)

    def run(f, changed):
        torch.manual_seed(0)
        m, x = nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Tanh(), Scaled({"by": 2.0})), leaf(2, 4)
        m[1].register_forward_hook(doubled)
        wrt = [x, *m.parameters()]
        y = f(m, x)
        changed(m)
        found = torch.autograd.grad(y.sum(), wrt)
        return found, y, m

    *expected, _ = run(lambda m, x: m(x), lambda m: None)
    *found, m = run(checkpoint, change)
    assert_same(found, expected)
    # What was changed is as it was left.
    *_, left = run(lambda m, x: m(x), change)
    x = leaf(2, 4)
    assert_same(m(x), left(x))
