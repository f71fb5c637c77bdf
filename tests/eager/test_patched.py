"""patched, install and uninstall: what they touch, where they hold, and that they are undone."""

import contextvars
import functools
import subprocess
import sys

import pytest
import torch
from support import Counter, assert_same
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import funcckpt
from funcckpt.eager.patched import active

from .implementations import D, in_a_thread

WORKS = torch.utils.checkpoint.checkpoint.__wrapped__
checkpoint_sin = functools.partial(checkpoint, torch.sin, use_reentrant=False)


@pytest.fixture(autouse=True)
def undone():
    with funcckpt.patched():  # the first one makes the attribute
        pass
    before, function = dict(WORKS.__dict__), torch.utils.checkpoint.checkpoint
    yield
    assert WORKS.__dict__ == before and torch.utils.checkpoint.checkpoint is function
    refused()


def refused(f=checkpoint_sin):
    with pytest.raises(RuntimeError, match=r"saved tensor hooks|must override the setup_context"):
        grad(f)(torch.zeros(()))


def works(f=checkpoint_sin):
    assert vmap(grad(f))(torch.zeros(3)).tolist() == [1, 1, 1]


def imported_inside(x):
    from torch.utils.checkpoint import checkpoint as imported

    return imported(torch.sin, x, use_reentrant=False)


HELD = {
    "imported": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "imported inside": imported_inside,
    "attribute": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "partial": checkpoint_sin,
    "reentrant": functools.partial(checkpoint, torch.sin, use_reentrant=True),
    "sequential": lambda x: checkpoint_sequential([torch.sin] * 3, 3, x, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore:funcckpt.checkpoint treats use_reentrant=True:UserWarning")
@pytest.mark.parametrize("held", HELD)
def test_every_reference_is_meant(held):
    with funcckpt.patched():
        works(HELD[held])
    refused(HELD[held])


def test_where_it_holds():
    with funcckpt.patched():
        with funcckpt.patched():
            works()
        with active(False):
            refused()
        with pytest.raises(ValueError, match="mine"), funcckpt.patched():
            raise ValueError("mine")
        works()
        in_a_thread(refused)
    refused()
    funcckpt.install()
    try:
        funcckpt.install()
        works()
        with funcckpt.patched():
            works()
        in_a_thread(works)
        with active(False):
            refused()
        with funcckpt.patched():
            funcckpt.uninstall()
            works()
    finally:
        funcckpt.uninstall()


def test_one_attribute_is_touched():
    def state():
        places = (torch.utils.checkpoint, torch.autograd.graph, torch.autograd.Function, torch.Tensor, WORKS)
        return {(i, name): id(x) for i, place in enumerate(places) for name, x in vars(place).items()}

    before = state()
    WORKS.__dict__.pop("__dynamo_disable")
    with funcckpt.patched():
        works()
    now = state()
    assert {key for key in now | before if now.get(key) != before.get(key)} <= {(4, "__dynamo_disable")}


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 0.5, dtype=D))

    def inner(self, pair, *, scale):
        return (pair[0] * scale).sin() * self.w

    def forward(self, x):
        body = lambda x: checkpoint(self.inner, [x.exp()], scale=self.w, use_reentrant=False).exp()
        return checkpoint(body, x, use_reentrant=False)


@pytest.mark.parametrize("forward_patched", [True, False])
@pytest.mark.parametrize("backward_patched", [True, False])
@pytest.mark.parametrize("in_thread", [True, False])
def test_recomputation_is_of_the_same_make_as_the_forward(forward_patched, backward_patched, in_thread):
    model, x = Nested(), torch.linspace(0, 1, 3, dtype=D, requires_grad=True)
    with active(forward_patched):
        loss = model(x).sum()

    def backward():
        with active(backward_patched):
            loss.backward()

    in_a_thread(backward) if in_thread else backward()
    w = model.w.detach().requires_grad_()
    plain = ((x.exp() * w).sin() * w).exp().sum()
    assert_same([x.grad, model.w.grad], list(torch.autograd.grad(plain, [x, w])))


def test_recomputation_under_transforms_after_the_block():
    f = Counter(torch.sin)

    body = lambda x: checkpoint(f, x.exp(), use_reentrant=False).exp()
    x = torch.linspace(0, 1, 3, dtype=D)
    with funcckpt.patched():
        _, pull = torch.func.vjp(lambda x: checkpoint(body, x, use_reentrant=False), x)
    (g,) = pull(torch.ones(3, dtype=D))
    assert_same(g, grad(lambda x: x.exp().sin().exp().sum())(x))


INSIDE = """
import torch, funcckpt
from torch.utils.checkpoint import checkpoint

def inside(x):
    with funcckpt.patched():
        return checkpoint(torch.sin, x, use_reentrant=False)

x = torch.ones(3, requires_grad=True)
plain = lambda: checkpoint(torch.sin, x, use_reentrant=False)
before, compiled = plain(), torch.compile(inside, backend="eager")
assert all(torch.equal(before, y) for y in (compiled(x), compiled(x), compiled(x), plain()))
"""


def test_patched_inside_of_compiled_code():
    """In a process of its own, where nothing has been patched before."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", INSIDE], check=True)


def test_traced():
    x = torch.ones(3, requires_grad=True)
    f = torch.compile(lambda x: checkpoint_sin(x) * 2, backend="aot_eager", fullgraph=True)
    with funcckpt.patched():
        (g,) = torch.autograd.grad(f(x).sum(), x)
        graph = make_fx(checkpoint_sin)(torch.ones(3))
    torch.testing.assert_close(g, 2 * torch.ones(3).cos())
    assert torch.equal(graph(torch.ones(3)), torch.ones(3).sin())


def test_left_in_another_context_than_it_was_entered_in():
    """As an asynchronous fixture is."""

    def block():
        with funcckpt.patched():
            yield

    entered = block()
    contextvars.copy_context().run(next, entered)
    entered.close()
