"""Meta-learning: float64, against the plain unrolled loop under `torch.func.grad`."""

import pytest
import torch
from support import assert_same
from test_scan import LOOPS, plain_while
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from funcckpt import inner_grad, while_loop

F64 = torch.float64
tree_map = pytree.tree_map


class Momentum:
    def init(self, p):
        return tree_map(torch.zeros_like, p)

    def update(self, state, p, g, rate):
        state = tree_map(lambda m, g: 0.9 * m + g, state, g)
        return state, tree_map(lambda p, m: p - rate * m, p, state)


class Adam:
    """Torchopt's; its rate is not learned."""

    def __init__(self):
        torchopt = pytest.importorskip("torchopt", reason="needs the extra `meta`")
        self.adam, self.apply = torchopt.adam(lr=0.02), torchopt.apply_updates
        self.init = self.adam.init

    def update(self, state, p, g, rate):
        updates, state = self.adam.update(g, state, params=p, inplace=False)
        return state, self.apply(p, updates, inplace=False)


def mse(p, x, y):
    h = torch.tanh(torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])
    return ((h @ p["w3"] - y) ** 2).mean()


def drawn():
    """Initial parameters and a rate; and (x, y, x_test, y_test) of four tasks: sines of random amplitude."""
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (1, 6), "b1": (6,), "w2": (6, 6), "b2": (6,), "w3": (6, 1)}
    p = {name: torch.randn(shape, generator=g, dtype=F64) / 2 for name, shape in shapes.items()}
    x = torch.rand((4, 20, 1), generator=g, dtype=F64) * 10 - 5
    y = torch.sin(x) * torch.rand((4, 1, 1), generator=g, dtype=F64) * 4
    return {"p": p, "rate": torch.tensor(0.02, dtype=F64)}, (x[:, :10], y[:, :10], x[:, 10:], y[:, 10:])


META, TASKS = drawn()
TASK = [t[0] for t in TASKS]


def adapted_loss(optimizer, gradient, options):
    """MAML with a learned rate: the loss after some steps from the learned initial parameters."""

    def loss(meta, x, y, x_test, y_test):
        step = lambda c: optimizer.update(*c, gradient(mse)(c[1], x, y), meta["rate"])
        _, p = LOOPS["scan"](step, (optimizer.init(meta["p"]), meta["p"]), 9, **options)
        return mse(p, x_test, y_test)

    return loss


def backward(loss):
    meta = tree_map(lambda t: t.clone().requires_grad_(), META)
    loss(meta, *TASK).backward()
    return tree_map(lambda t: torch.zeros_like(t) if t.grad is None else t.grad, meta)


of_all_tasks = lambda loss: vmap(grad(loss), (None, 0, 0, 0, 0))(META, *TASKS)


@pytest.mark.parametrize("gradient", [grad, inner_grad])
@pytest.mark.parametrize(
    ("how", "optimizer"), [(of_all_tasks, Momentum), (backward, Momentum), (backward, Adam)]
)  # torchopt branches on values, which vmap refuses
def test_meta_gradients(optimizer, how, gradient):
    optimizer = optimizer()
    plain = how(adapted_loss(optimizer, grad, {"checkpoint": None}))
    assert_same(how(adapted_loss(optimizer, gradient, {})), plain)


def test_meta_gradients_through_a_number_of_steps_that_the_loss_decides():
    """Adaptation until the loss is small: how many steps that takes is not known before."""
    x, y, x_test, y_test = TASK

    def adapted(meta, loop, gradient, **options):
        body = lambda c: (c[0] + 1, *Momentum().update(*c[1:], gradient(mse)(c[2], x, y), meta["rate"]))
        cond = lambda c: c[0] < 100 and mse(c[2], x, y) > 0.25 * mse(META["p"], x, y)
        steps, _, p = loop(cond, body, (0, Momentum().init(meta["p"]), meta["p"]), **options)
        assert 5 < steps < 100
        return mse(p, x_test, y_test)

    want = grad(adapted)(META, plain_while, grad)
    assert_same(grad(adapted)(META, while_loop, inner_grad, checkpoints=3), want)
