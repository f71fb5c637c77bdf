"""A model of one's own that refers to all kinds of things, and what may become of them before its backward."""

import copy
import functools

import numpy
import torch
from torch import nn

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
        self.by_name = nn.ParameterDict({"q": torch.full((4,), 0.8, dtype=F64)})
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
        return self.sloped(x) * self.ps[0] + self.by_name["q"] * torch.from_numpy(self.array)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        return self.second(self.first(x))


def _parameter():
    return nn.Parameter(torch.full((4,), 3.0, dtype=F64))


# What is changed of a part. What stands outside of it is put back by `undo`.
CHANGES = {
    "attribute of an object": lambda m: setattr(m.settings, "k", 0.6),
    "tensor of an object": lambda m: setattr(m.settings, "t", torch.zeros(4, dtype=F64)),
    "tensor of an object, in place": lambda m: m.settings.t.mul_(2),
    "function of an object": lambda m: setattr(m.settings, "f", torch.sin),
    "attribute over that of a class": lambda m: setattr(m.settings, "scale", 3.0),
    "attribute of a class": lambda m: setattr(Settings, "scale", 2.5),
    "attribute of a module's class": lambda m: setattr(Part, "slope", 0.5),
    "attribute over that of a module's class": lambda m: setattr(m, "slope", 0.4),
    "item of a dict": lambda m: m.options.__setitem__("a", 0.2),
    "name in a dict": lambda m: m.options.__setitem__("act", "sin"),
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
    "buffer registered anew": lambda m: (
        delattr(m, "b"),
        m.register_buffer("b", torch.full((4,), 0.3, dtype=F64)),
    ),
    "function": lambda m: setattr(m, "f", lambda x: x.exp()),
    "partial": lambda m: setattr(m, "part", functools.partial(torch.add, other=0.3)),
    "argument of a partial": lambda m: m.part.keywords.__setitem__("other", torch.tensor(0.2, dtype=F64)),
    "flag": lambda m: setattr(m, "shifts", False),
    "eval": lambda m: m.eval(),
    "global": lambda m: globals().__setitem__("FACTOR", 3.0),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.eye(4, dtype=F64))),
    "no parameter": lambda m: setattr(m.linear, "bias", None),
    "parameter of a list": lambda m: m.ps.__setitem__(0, _parameter()),
    "parameter of a dict": lambda m: m.by_name.__setitem__("q", _parameter()),
    "forward of a module": lambda m: setattr(m.act, "forward", lambda x: x.sin()),
    "method": lambda m: setattr(m, "sloped", lambda x: x * 0.1),
    "setting of a library's module": lambda m: setattr(m.norm, "eps", 0.5),
}


def undo():
    globals()["FACTOR"], Settings.scale, Part.slope = 2.0, 1.5, 1.25


def gradients(model, call, change=lambda: None):
    """The result of a call and its gradients, with something changed before the backward."""
    x = torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4).requires_grad_()
    leaves = [x, *[p for p in model.parameters() if p.requires_grad]]
    y = call(x).sin().sum()
    change()
    found = torch.autograd.grad(y, leaves, allow_unused=True)
    return [
        y.detach(),
        *[torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)],
    ]
