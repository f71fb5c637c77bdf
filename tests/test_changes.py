"""What a model refers to is changed after its forward: the gradient is that of the forward, or an error says so.

The model is one of one's own, and not all of what it refers to leads to tensors. Torch's checkpoint gives the
gradient of what is there in the backward, in each of these cases.
"""

import functools

import changes
import pytest
import torch
from oracles import assert_same
from torch.func import functional_call, grad_and_value

from funcckpt import CheckpointError, MutationError, checkpoint, nn, remat

# Where a copy cannot stand for it.
REFUSED = {
    *("tensor of an object, in place", "buffer, in place"),
    *("attribute of a class", "attribute of a module's class"),
}


@pytest.fixture(autouse=True)
def put_back():
    yield
    changes.undo()


def plain(f):
    return f


def model():
    torch.manual_seed(0)
    return changes.Model()


def in_plain_eager(wrap, change):
    m = model()
    return changes.gradients(m, wrap(m), functools.partial(change, m))


def by_hooks(wrap, change):
    m = model()
    f = m if wrap is plain else functools.partial(checkpoint, m, use_reentrant=False)
    return changes.gradients(m, f, functools.partial(change, m))


def in_modules(wrap, change):
    m = model()
    if wrap is remat:
        nn.apply_remat(m, changes.Part)
    return changes.gradients(m, m, functools.partial(change, m))


def under_grad(wrap, change):
    m = model()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    parameters = {name: p.detach() for name, p in m.named_parameters()}

    def loss(parameters, change):
        # The wrapped module is called where the parameters are in their places.
        y = functional_call(Holder(m, wrap), {f"m.{name}": p for name, p in parameters.items()}, x)
        change(m)
        return y.sin().sum()

    found, value = grad_and_value(loss)(parameters, change)
    return [value, *found.values()]


class Holder(torch.nn.Module):
    def __init__(self, m, wrap):
        super().__init__()
        self.m, self.wrap = m, wrap

    def forward(self, x):
        return self.wrap(self.m)(x)


@pytest.mark.parametrize("run", [in_plain_eager, in_modules, under_grad, by_hooks])
@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("change", changes.CHANGES)
def test_changed_before_the_backward(change, part, run):
    changed = lambda m: changes.CHANGES[change](getattr(m, part))
    if run is under_grad and "in place" in change:
        with pytest.raises(RuntimeError, match="in-place operation"):  # of torch, whatever is differentiated
            run(remat, changed)
        return
    expected = run(plain, lambda m: None)
    try:
        found = run(remat, changed)
    except (CheckpointError, MutationError) as error:
        assert change in REFUSED and (run is not by_hooks or "in place" in change), error
    else:
        assert_same(found, expected)
