"""What a model refers to is changed after its forward: the gradient is that of the forward, or an error says so."""

import copy
import functools

import pytest
import torch
from support import assert_same
from torch import nn
from torch.func import functional_call, grad_and_value

from funcckpt import CheckpointError, MutationError, checkpoint, remat
from funcckpt.nn import apply_remat

F64 = torch.float64


class Part(nn.Module):
    slope = 1.25

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, dtype=F64), nn.LayerNorm(4, dtype=F64)
        self.options = {"a": 1.1, "more": {"z": 2.0}, "layer": nn.Linear(4, 4, dtype=F64)}
        self.pair, self.act = (1.0, 2.0), nn.Tanh()
        self.seq = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Sigmoid())
        self.register_buffer("b", torch.full((4,), 0.7, dtype=F64))
        self.f = lambda x: x.cos()
        self.ps = nn.ParameterList([torch.ones(4, dtype=F64)])

    def forward(self, x):
        x = self.norm(self.linear(x)) * self.options["a"] * self.options["more"]["z"]
        x = self.act(self.options["layer"](x)) + self.f(self.seq(x) * self.b)
        return (x * self.pair[0] + self.pair[1]) * self.slope * self.ps[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        return self.second(self.first(x))


# What is changed of a part; more of it in `PLACES` of test_contract.py.
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


@pytest.fixture(autouse=True)
def put_back():
    yield
    Part.slope = 1.25


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
        holder, given = Holder(m, WRAPS[wrap]), {f"m.{n}": p for n, p in parameters.items()}
        y = functional_call(holder, given, x) if under_grad else WRAPS[wrap](m)(x)
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
