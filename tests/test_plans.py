"""A closure that follows the plan of an earlier search finds what a search would find.

The oracle is the search itself, with no plan to follow: the same objects in the same places.
"""

import functools
import types

import pytest
import torch
from torch import nn

from funcckpt import closure
from funcckpt.closure import Closure


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.scale = nn.BatchNorm1d(3), nn.Linear(3, 3), 2.0

    def forward(self, x):
        return self.linear(self.norm(x)) * self.scale


class Holder:
    def __init__(self, *things):
        self.things = things


SCALE = [2.0]


def called(x, holder):
    return x * SCALE[0] * holder.things[0]


def of_variable(w):
    return lambda x: called(x, Holder(w)) * w


def of_defaults(w, flag=True):
    return functools.partial(lambda x, v=w, options={"flag": flag}: x * v, flag)


def of_two(w, v):
    return lambda x: x * w * v


def swapped(module):
    module.linear.forward = types.MethodType(nn.Linear.forward, module.linear)
    return module


def with_hook(module):
    module.linear.register_forward_pre_hook(lambda module, args: None)
    return module


def weight():
    return torch.ones(3, requires_grad=True)


SHARED = weight()
# What is searched first, and what then; whether the plan of the first serves.
CASES = {
    "the same": (lambda: of_variable(SHARED), lambda: of_variable(SHARED), True),
    "other values": (lambda: of_variable(weight()), lambda: of_variable(weight()), True),
    "no gradient": (lambda: of_variable(weight()), lambda: of_variable(torch.ones(3)), True),
    "a number": (lambda: of_variable(weight()), lambda: of_variable(2.0), False),
    "one tensor twice": (lambda: of_two(weight(), weight()), lambda: of_two(SHARED, SHARED), False),
    "two tensors": (lambda: of_two(SHARED, SHARED), lambda: of_two(weight(), weight()), False),
    "another function": (lambda: of_two(torch.sin, 1), lambda: of_two(torch.cos, 1), False),
    "another class": (lambda: of_two(Block, 1), lambda: of_two(Holder, 1), False),
    "another default": (lambda: of_defaults(SHARED), lambda: of_defaults(weight(), False), True),
    "a module": (Block, Block, True),
    "its hook": (Block, lambda: with_hook(Block()), False),
    "its forward": (Block, lambda: swapped(Block()), False),
    "in evaluation": (Block, lambda: Block().eval(), True),
    "frozen": (Block, lambda: Block().requires_grad_(False), True),
    "a method": (lambda: Block().forward, lambda: Block().forward, True),
    "a longer list": (lambda: of_two([SHARED], 1), lambda: of_two([SHARED, weight()], 1), False),
    "a generator": (lambda: of_two(SHARED, 1), lambda: of_two(torch.Generator(), 1), False),
    "an iterator": (lambda: of_two(1.0, 1), lambda: of_two(iter([1]), 1), False),
}


def seen(found):
    """All that a closure has found, in the order in which it was."""
    return (
        [
            (
                *(
                    key,
                    type(node),
                    node.parent,
                    node.label,
                    node.children,
                    node.needed,
                    node.frozen,
                    node.shared,
                ),
                {name: id(item) for name, item in node.items.items()},
            )
            for key, node in found._nodes.items()
        ],
        [[id(x) for x in xs] for xs in (found.tensors, found.constants, found.loose, found.generators)],
        (found.is_pure, found.has_rnn, found.moves_streams, found.writes_unseen, found._names),
    )


@pytest.mark.parametrize(("first", "then", "serves"), CASES.values(), ids=CASES)
def test_a_plan_leads_where_a_search_does(first, then, serves, monkeypatch):
    searches = []
    search = Closure._search
    monkeypatch.setattr(Closure, "_search", lambda self, root: searches.append(root) or search(self, root))
    closure._plans.clear()
    Closure(first())
    value = then()
    assert len(searches) == 1
    followed = Closure(value)
    assert len(searches) == (1 if serves else 2)
    closure._plans.clear()
    assert seen(followed) == seen(Closure(value))


def test_a_class_of_a_function_is_not_kept():
    class Local:
        def __call__(self, x):
            return x

    closure._plans.clear()
    Closure(Local())
    Closure(of_two(Local(), Local))
    assert not closure._plans
