"""What a module refers to is changed after its forward: the gradient is that of the forward, or an error says so.

More of it in `PLACES` of test_contract.py.
"""

import copy
import functools

import pytest
import torch
from support import assert_same
from torch import nn

from funcckpt import CheckpointError, MutationError, checkpoint, remat
from funcckpt.closures import Found
from funcckpt.nn import apply_remat

F64 = torch.float64


class Part(nn.Module):
    slope = 1.25

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, dtype=F64), nn.LayerNorm(4, dtype=F64)
        self.options = {"more": {"z": 2.0}, "layer": nn.Linear(4, 4, dtype=F64)}
        self.seq = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Sigmoid())
        self.register_buffer("b", torch.full((4,), 0.7, dtype=F64))
        self.f = lambda x: x.cos()
        self.ps = nn.ParameterList([torch.ones(4, dtype=F64)])

    def forward(self, x):
        x = self.options["layer"](self.norm(self.linear(x)) * self.options["more"]["z"])
        return (x.tanh() + self.f(self.seq(x) * self.b)) * self.slope * self.ps[0]


CHANGES = {
    "attribute of a module's class": lambda m: setattr(Part, "slope", 0.5),
    "item of a dict in a dict": lambda m: m.options["more"].__setitem__("z", -1.0),
    "module in a dict": lambda m: m.options.__setitem__("layer", copy.deepcopy(m.seq[0])),
    "module of a sequence": lambda m: m.seq.__setitem__(1, nn.Tanh()),
    "buffer, in place": lambda m: m.b.mul_(2),
    "buffer registered anew": lambda m: (delattr(m, "b"), m.register_buffer("b", torch.zeros(4, dtype=F64))),
    "function": lambda m: setattr(m, "f", lambda x: x.exp()),
    "no parameter": lambda m: setattr(m.linear, "bias", None),
    "parameter of a list": lambda m: m.ps.__setitem__(0, nn.Parameter(torch.zeros(4, dtype=F64))),
    "setting of a library's module": lambda m: setattr(m.norm, "eps", 0.5),
}
# Where a copy cannot stand for it.
REFUSED = {"buffer, in place", "attribute of a module's class"}
WRAPS = {
    "remat": remat,
    "apply_remat": lambda m: apply_remat(m, Part),
    "checkpoint": lambda m: functools.partial(checkpoint, m, use_reentrant=False),
}


def run(wrap=lambda m: m, change=lambda m: None):
    """The value of a loss and its gradients, with something changed before the backward."""
    torch.manual_seed(0)
    m = nn.Sequential(Part(), Part())
    parameters = list(m.parameters())
    value = wrap(m)(torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4)).sin().sum()
    change(m)
    return [value.detach(), *torch.autograd.grad(value, parameters)]


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_before_the_backward(change, part, how, monkeypatch):
    monkeypatch.setattr(Part, "slope", Part.slope)  # is put back
    expected = run()
    try:
        found = run(WRAPS[how], lambda m: CHANGES[change](m[part]))
    except (CheckpointError, MutationError) as error:
        assert change in REFUSED and (how != "checkpoint" or "in place" in change), error
    else:
        assert_same(found, expected)


class Stack(nn.Module):
    """Blocks that are called by one method: the calls of a forward refer to the same model."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Part() for _ in range(3)])
        self.power, self.calls = 1.0, 0
        self.functions = [lambda x, i=i: self.block(i, x) for i in range(3)]
        self.same = [self.other(i) for i in range(3)]

    def block(self, i, x):
        return self.blocks[i](x) * self.power

    def other(self, i):
        return lambda x: self.block(i, x) + (self.same[0](x) if i else 0)

    def counted(self, i, x):
        self.calls += 1
        return self.block(i, x) / self.calls

    def forward(self, x, way, wrap, change):
        for i in range(3):
            x = WAYS[way](self, i, wrap)(x)
            change(self, i)
        return x


WAYS = {
    "partial of a method": lambda m, i, wrap: wrap(functools.partial(m.block, i)),
    "partial with a keyword": lambda m, i, wrap: wrap(functools.partial(lambda x, i: m.block(i, x), i=i)),
    "method": lambda m, i, wrap: functools.partial(wrap(m.block), i),
    "what it assigns itself": lambda m, i, wrap: functools.partial(wrap(m.counted), i),
    "lambda": lambda m, i, wrap: wrap(lambda x: m.block(i, x)),
    "lambda with a default": lambda m, i, wrap: wrap(lambda x, i=i: m.block(i, x)),
    "functions of the model": lambda m, i, wrap: wrap(m.functions[i]),
    "functions that call each other": lambda m, i, wrap: wrap(m.same[i]),
}
BETWEEN = {
    "nothing": lambda m, i: None,
    "number": lambda m, i: setattr(m, "power", m.power + 0.5),
    "module": lambda m, i: m.blocks[0].seq.__setitem__(1, nn.Tanh()),
    "item": lambda m, i: m.blocks[i].options["more"].__setitem__("z", float(i)),
    "to what was empty": lambda m, i: m.blocks[0].register_forward_hook(lambda m, args, out: out * 2),
    "by another function": lambda m, i: m.functions.__setitem__(i, lambda x: x.exp()),
}


def run_stack(way, change, wrap=lambda f: f, after=lambda m: None):
    torch.manual_seed(0)
    m = Stack()
    value = m(torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4), way, wrap, change).sin().sum()
    after(m)
    return [value.detach(), *torch.autograd.grad(value, [*m.parameters()])]


@pytest.mark.parametrize("how", ["remat", "checkpoint"])
@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize("way", WAYS)
def test_changed_between_calls_that_share_a_search(way, change, how):
    for after in (lambda m: None, lambda m: setattr(m, "power", 7.0)):
        expected = run_stack(way, BETWEEN[change], after=after)
        assert_same(run_stack(way, BETWEEN[change], WRAPS[how], after), expected)


@pytest.mark.parametrize("way", ["partial of a method", "method", "lambda", "lambda with a default"])
def test_calls_of_a_forward_share_a_search(way, monkeypatch):
    searches = []
    init = Found.__init__
    monkeypatch.setattr(Found, "__init__", lambda self, root: (searches.append(root), init(self, root))[1])
    run_stack(way, BETWEEN["nothing"], remat)
    assert len(searches) == 1
    run_stack(way, BETWEEN["number"], remat)
    assert len(searches) == 4
