"""What a module assigns itself, and parts of it that are changed before the backward (see also
`tests/test_changes.py`).
"""

import pytest
import torch
from oracles import assert_same
from torch import nn

from funcckpt import checkpoint

from .implementations import D, leaf


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


def nested():
    return [{"a": {"b": {"c": {"d": {"e": 2.0}}}}}]


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
