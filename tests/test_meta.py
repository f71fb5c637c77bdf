"""Meta-learning and other derivatives through long loops: float64, against the plain unrolled loop."""

import pytest
import torch
from support import assert_same
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

from funcckpt import inner_grad, scan
from funcckpt.meter import measure

F64 = torch.float64
HIDDEN = 6


def tree_map(f, *trees):
    return pytree.tree_map(f, *trees)


# Optimizers as pure functions: (state, parameters, gradients, rate) -> (state, parameters).


def sgd(state, p, g, rate):
    return state, tree_map(lambda p, g: p - rate * g, p, g)


def momentum(state, p, g, rate):
    state = tree_map(lambda m, g: 0.9 * m + g, state, g)
    return state, tree_map(lambda p, m: p - rate * m, p, state)


def adam(state, p, g, rate):
    t, m, v = state
    t = t + 1
    m = tree_map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
    update = lambda p, m, v: p - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return (t, m, v), tree_map(update, p, m, v)


def start(optimizer, p):
    zeros = lambda: tree_map(torch.zeros_like, p)
    return {sgd: None, momentum: zeros(), adam: (0, zeros(), zeros())}[optimizer]


def network(p, x):
    return torch.tanh(torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"]


def mse(p, x, y):
    return ((network(p, x) - y) ** 2).mean()


def parameters():
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (1, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN, 1)}
    return {name: torch.randn(shape, generator=g, dtype=F64) / 2 for name, shape in shapes.items()}


def sinusoid(seed, tasks=()):
    """Samples to adapt to and to be judged by, of sines of random amplitude and phase."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand((*tasks, 20, 1), generator=g, dtype=F64) * 10 - 5
    amplitude = torch.rand((*tasks, 1, 1), generator=g, dtype=F64) * 4 + 0.1
    phase = torch.rand((*tasks, 1, 1), generator=g, dtype=F64) * torch.pi
    y = amplitude * torch.sin(x + phase)
    return x[..., :10, :], y[..., :10, :], x[..., 10:, :], y[..., 10:, :]


def adapted_loss(meta, task, optimizer, gradient, options, steps):
    """MAML with a learned rate: the loss after some steps from the learned initial parameters."""
    x, y, x_test, y_test = task

    def step(carry, _):
        state, p = carry
        return optimizer(state, p, gradient(mse)(p, x, y), meta["rate"]), None

    carry = (start(optimizer, meta["p"]), meta["p"])
    if options is None:
        for _ in range(steps):
            carry, _ = step(carry, None)
    else:
        carry, _ = scan(step, carry, length=steps, **options)
    return mse(carry[1], x_test, y_test)


META = {"p": parameters(), "rate": torch.tensor(0.02, dtype=F64)}
OPTIONS = [
    {"checkpoint": None},
    {"checkpoint": "sqrt"},
    {"checkpoint": "recursive"},
    {"checkpoints": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gradient", [grad, inner_grad])
@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
def test_meta_gradients(optimizer, gradient, options):
    task = sinusoid(1)
    meta_gradient = lambda gradient, options: grad(adapted_loss)(META, task, optimizer, gradient, options, 12)
    assert_same(meta_gradient(gradient, options), meta_gradient(grad, None))


@pytest.mark.parametrize("gradient", [grad, inner_grad])
@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_meta_gradients_over_a_batch_of_tasks(optimizer, gradient):
    tasks = sinusoid(2, tasks=(4,))

    def meta_gradient(gradient, options):
        def loss(meta):
            one = lambda *task: adapted_loss(meta, task, optimizer, gradient, options, 7)
            return vmap(one)(*tasks).mean()

        each = lambda *task: grad(adapted_loss)(META, task, optimizer, gradient, options, 7)
        return grad(loss)(META), vmap(each)(*tasks)

    assert_same(meta_gradient(gradient, {"checkpoints": 2}), meta_gradient(grad, None))


def test_hundreds_of_inner_steps():
    task = sinusoid(3)
    meta_gradient = lambda gradient, options: grad(adapted_loss)(META, task, momentum, gradient, options, 500)
    got = meta_gradient(inner_grad, {"checkpoints": 20})
    want = meta_gradient(grad, None)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        # 500 steps amplify the rounding of another order of operations.
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_eager_backward_through_inner_steps():
    task = sinusoid(4)

    def backward(options, gradient):
        meta = tree_map(lambda t: t.clone().requires_grad_(), META)
        adapted_loss(meta, task, adam, gradient, options, 9).backward()
        return tree_map(lambda t: t.grad, meta)

    assert_same(backward({"checkpoints": 3}, inner_grad), backward(None, grad))
    assert_same(backward({"checkpoints": 3}, grad), backward(None, grad))


def test_memory_does_not_grow_with_the_inner_steps():
    task = sinusoid(5)
    peak = lambda gradient, options, steps: (
        measure(grad(adapted_loss), META, task, adam, gradient, options, steps).peak_bytes
    )
    assert peak(grad, None, 64) > 3.5 * peak(grad, None, 16)
    assert peak(inner_grad, {"checkpoints": 6}, 64) < 1.1 * peak(inner_grad, {"checkpoints": 6}, 16)
    assert peak(inner_grad, {"checkpoints": 6}, 64) < 0.1 * peak(grad, None, 64)


def test_jacobians_through_a_sampler():
    """Langevin steps down a learned energy: noise is drawn in each, and the Jacobian is of all of them."""
    w = torch.randn(3, 3, generator=torch.Generator().manual_seed(7), dtype=F64)
    x = torch.ones(3, dtype=F64)
    steps = 200

    def sample(loop, x, w):
        energy = lambda x: torch.log(torch.cosh(w @ x)).sum() + (x**2).sum() / 2
        step = lambda x: x - 0.05 * grad(energy)(x) + 0.1 * torch.randn(3, dtype=F64)
        if loop is None:
            for _ in range(steps):
                x = step(x)
            return x
        return loop(lambda x, _: (step(x), None), x, length=steps, checkpoints=8)[0]

    for jacobian in (
        lambda f: jacrev(f)(x, w),
        lambda f: jacrev(f, 1)(x, w),
        lambda f: jacfwd(f, randomness="same")(x, w),
        lambda f: jvp(grad(lambda x: f(x, w).sum()), (x,), (x,)),
    ):
        torch.manual_seed(11)
        got = jacobian(lambda x, w: sample(scan, x, w))
        torch.manual_seed(11)
        assert_same(got, jacobian(lambda x, w: sample(None, x, w)))
