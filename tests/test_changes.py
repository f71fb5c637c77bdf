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
