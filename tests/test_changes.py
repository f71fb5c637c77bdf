"""What a model refers to is changed after its forward: the gradient is that of the forward, or an error says so.

The model is one of one's own, and not all of what it refers to leads to tensors. Torch's checkpoint gives the
gradient of what is there in the backward, in each of these cases.
"""

import copy
import functools

import numpy
import pytest
import torch
from support import assert_same
from torch import nn
from torch.func import functional_call, grad_and_value

from funcckpt import CheckpointError, MutationError, checkpoint, remat
from funcckpt.nn import apply_remat

F64 = torch.float64
FACTOR = 2.0


def by_factor(x):
    return x * FACTOR


class Settings:
    scale = 1.5

    def __init__(self):
        self.k = 0.5
        self.t = torch.full((4,), 0.9, dtype=F64)
        self.f = by_factor

    def scaled(self, x):
        return x * self.scale * self.k + self.t


class Part(nn.Module):
    slope = 1.25

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F64)
        self.norm = nn.LayerNorm(4, dtype=F64)
        self.settings = Settings()
        self.options = {"a": 1.1, "act": "tanh", "more": {"z": 2.0}}
        self.items = [0.3, nn.Linear(4, 4, dtype=F64)]
        self.pair = 1.0, 2.0
        self.act = nn.Tanh()
        self.seq = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Sigmoid())
        self.register_buffer("b", torch.full((4,), 0.7, dtype=F64))
        self.f = lambda x: x.cos()
        self.part = functools.partial(torch.mul, other=torch.tensor(1.2, dtype=F64))
        self.shifts = True
        self.ps = nn.ParameterList([torch.ones(4, dtype=F64)])
        self.array = numpy.ones(4)

    def sloped(self, x):
        return x * self.slope

    def forward(self, x):
        x = self.norm(self.settings.scaled(self.linear(x)))
        x = getattr(torch, self.options["act"])(x) * self.options["a"] * self.options["more"]["z"]
        x = self.act(self.items[1](x) * self.items[0]) + self.seq(x) * self.b
        x = self.f(x) + self.part(x) + self.settings.f(x)
        if self.shifts:
            x = x * self.pair[0] + self.pair[1]
        if self.training:
            x = x * 1.7
        return self.sloped(x) * self.ps[0] + torch.from_numpy(self.array)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        return self.second(self.first(x))


# What is changed of a part. What stands outside of it is put back by `undo`.
CHANGES = {
    "tensor of an object": lambda m: setattr(m.settings, "t", torch.zeros(4, dtype=F64)),
    "tensor of an object, in place": lambda m: m.settings.t.mul_(2),
    "function of an object": lambda m: setattr(m.settings, "f", torch.sin),
    "attribute of a class": lambda m: setattr(Settings, "scale", 2.5),
    "attribute of a module's class": lambda m: setattr(Part, "slope", 0.5),
    "item of a dict": lambda m: m.options.__setitem__("a", 0.2),
    "item of a dict in a dict": lambda m: m.options["more"].__setitem__("z", -1.0),
    "dict": lambda m: setattr(m, "options", {"a": 0.5, "act": "cos", "more": {"z": 1.0}}),
    "item of a list": lambda m: m.items.__setitem__(0, 0.9),
    "module in a list": lambda m: m.items.__setitem__(1, copy.deepcopy(m.seq[0])),
    "tuple": lambda m: setattr(m, "pair", (3.0, 1.0)),
    "module": lambda m: setattr(m, "act", nn.ReLU()),
    "module of a sequence": lambda m: m.seq.__setitem__(1, nn.Tanh()),
    "sequence gets longer": lambda m: m.seq.append(nn.Tanh()),
    "buffer": lambda m: setattr(m, "b", torch.full((4,), 0.2, dtype=F64)),
    "buffer, in place": lambda m: m.b.mul_(2),
    "function": lambda m: setattr(m, "f", lambda x: x.exp()),
    "partial": lambda m: setattr(m, "part", functools.partial(torch.add, other=0.3)),
    "argument of a partial": lambda m: m.part.keywords.__setitem__("other", torch.tensor(0.2, dtype=F64)),
    "flag": lambda m: setattr(m, "shifts", False),
    "eval": lambda m: m.eval(),
    "global": lambda m: globals().__setitem__("FACTOR", 3.0),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.eye(4, dtype=F64))),
    "no parameter": lambda m: setattr(m.linear, "bias", None),
    "parameter of a list": lambda m: m.ps.__setitem__(0, nn.Parameter(torch.zeros(4, dtype=F64))),
    "forward of a module": lambda m: setattr(m.act, "forward", lambda x: x.sin()),
    "method": lambda m: setattr(m, "sloped", lambda x: x * 0.1),
    "setting of a library's module": lambda m: setattr(m.norm, "eps", 0.5),
}


# Where a copy cannot stand for it.
REFUSED = {
    *("tensor of an object, in place", "buffer, in place"),
    *("attribute of a class", "attribute of a module's class"),
}


@pytest.fixture(autouse=True)
def put_back():
    yield
    globals()["FACTOR"], Settings.scale, Part.slope = 2.0, 1.5, 1.25


class Holder(nn.Module):
    """Wraps the module where it is called, and its parameters are in their places."""

    def __init__(self, m, wrap):
        super().__init__()
        self.m, self.wrap = m, wrap

    def forward(self, x):
        return self.wrap(self.m)(x)


WRAPS = {
    "plain": lambda m: m,
    "remat": remat,
    "apply_remat": lambda m: apply_remat(m, Part),
    "checkpoint": lambda m: functools.partial(checkpoint, m, use_reentrant=False),
    "under grad": remat,
}


def run(wrap, under_grad=False, change=lambda m: None):
    """The value of a loss and its gradients, with something changed before the backward."""
    torch.manual_seed(0)
    m = Model()
    x = torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4)
    parameters = dict(m.named_parameters())

    def loss(parameters):
        call = functools.partial(functional_call, Holder(m, WRAPS[wrap])) if under_grad else None
        y = call({f"m.{n}": p for n, p in parameters.items()}, x) if under_grad else WRAPS[wrap](m)(x)
        change(m)
        return y.sin().sum()

    if under_grad:
        found, value = grad_and_value(loss)({name: p.detach() for name, p in parameters.items()})
        return [value, *found.values()]
    value = loss(parameters)
    return [value.detach(), *torch.autograd.grad(value, list(parameters.values()))]


@pytest.mark.parametrize("how", list(WRAPS)[1:])
@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_before_the_backward(change, part, how):
    under_grad = how == "under grad"
    changed = functools.partial(run, how, under_grad, lambda m: CHANGES[change](getattr(m, part)))
    if under_grad and "in place" in change:
        with pytest.raises(RuntimeError, match="in-place operation"):  # of torch, whatever is differentiated
            changed()
        return
    expected = run("plain", under_grad)
    try:
        found = changed()
    except (CheckpointError, MutationError) as error:
        assert change in REFUSED and (how != "checkpoint" or "in place" in change), error
    else:
        assert_same(found, expected)
