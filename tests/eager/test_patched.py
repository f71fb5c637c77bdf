"""patched, install and uninstall: what they touch, where they hold, and that they are undone."""

import functools
import threading

import pytest
import torch
from support import Counter, assert_same
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import funcckpt
from funcckpt.eager.patched import active

from .implementations import D

WORKS = torch.utils.checkpoint.checkpoint.__wrapped__


@pytest.fixture(autouse=True)
def undone():
    with funcckpt.patched():  # the first one makes the attribute
        pass
    before, function = dict(WORKS.__dict__), torch.utils.checkpoint.checkpoint
    yield
    assert WORKS.__dict__ == before and torch.utils.checkpoint.checkpoint is function


def refused(f=None):
    call = f or (lambda x: checkpoint(torch.sin, x, use_reentrant=False))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad(call)(torch.zeros(()))


def works(f=None):
    call = f or (lambda x: checkpoint(torch.sin, x, use_reentrant=False))
    assert vmap(grad(call))(torch.zeros(3)).tolist() == [1, 1, 1]


HELD = {
    "imported": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "attribute": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "partial": functools.partial(checkpoint, torch.sin, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, torch.sin, use_reentrant=True),
    "default": lambda x, call=checkpoint: call(torch.sin, x, use_reentrant=False),
    "sequential": lambda x: checkpoint_sequential(
        [torch.sin, torch.sin, torch.sin], 3, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("held", HELD)
def test_every_reference_is_meant(held):
    with funcckpt.patched():
        works(HELD[held])
    with pytest.raises(RuntimeError):
        grad(HELD[held])(torch.zeros(()))


def test_what_was_imported_meanwhile_is_torchs_afterwards():
    with funcckpt.patched():
        from torch.utils.checkpoint import checkpoint as imported

        works(lambda x: imported(torch.sin, x, use_reentrant=False))
    refused(lambda x: imported(torch.sin, x, use_reentrant=False))


def test_nested_and_after_an_exception():
    with funcckpt.patched():
        with funcckpt.patched():
            works()
        works()
        with pytest.raises(ValueError, match="mine"), funcckpt.patched():
            raise ValueError("mine")
        works()
    refused()


def test_install_and_uninstall():
    funcckpt.install()
    try:
        funcckpt.install()
        works()
        with funcckpt.patched():
            works()
        works()
        thread = threading.Thread(target=works)
        thread.start()
        thread.join()
    finally:
        funcckpt.uninstall()
    refused()
    funcckpt.uninstall()


def test_uninstalled_inside_of_a_block():
    funcckpt.install()
    with funcckpt.patched():
        funcckpt.uninstall()
        works()
    refused()


def test_other_threads_are_left_alone():
    inside, done = threading.Event(), threading.Event()
    found = []

    def other():
        inside.wait(10)
        try:
            refused()
            found.append("refused")
        finally:
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with funcckpt.patched():
        inside.set()
        done.wait(10)
        works()
    thread.join()
    assert found == ["refused"]


def test_many_threads():
    errors = []

    def work():
        try:
            for _ in range(20):
                with funcckpt.patched():
                    works()
                refused()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_install_while_threads_enter_and_leave_blocks():
    errors, done = [], threading.Event()

    def work():
        try:
            while not done.is_set():
                with funcckpt.patched():
                    works()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(50):
        funcckpt.install()
        works()
        funcckpt.uninstall()
        refused()
    done.set()
    for t in threads:
        t.join()
    assert not errors


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

    if in_thread:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    w = model.w.detach().requires_grad_()
    plain = ((x.exp() * w).sin() * w).exp().sum()
    assert_same([x.grad, model.w.grad], list(torch.autograd.grad(plain, [x, w])))


def test_recomputation_under_transforms_after_the_block():
    f = Counter(torch.sin)

    def body(x):
        return checkpoint(f, x.exp(), use_reentrant=False).exp()

    x = torch.linspace(0, 1, 3, dtype=D)
    with funcckpt.patched():
        _, pull = torch.func.vjp(lambda x: checkpoint(body, x, use_reentrant=False), x)
    (g,) = pull(torch.ones(3, dtype=D))
    assert_same(g, grad(lambda x: x.exp().sin().exp().sum())(x))


def test_compiled_code_is_not_concerned():
    x = torch.ones(3, requires_grad=True)
    f = torch.compile(
        lambda x: checkpoint(torch.sin, x, use_reentrant=False) * 2, backend="aot_eager", fullgraph=True
    )
    with funcckpt.patched():
        (g,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(g, 2 * torch.ones(3).cos())


def test_while_make_fx_traces():
    from torch.fx.experimental.proxy_tensor import make_fx

    with funcckpt.patched():
        graph = make_fx(lambda x: checkpoint(torch.sin, x, use_reentrant=False))(torch.ones(3))
    assert torch.equal(graph(torch.ones(3)), torch.ones(3).sin())
