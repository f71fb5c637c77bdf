"""Meta-learning and other derivatives through long loops: float64, against the plain unrolled loop."""

import pytest
import torch
import torch.utils.checkpoint
from support import assert_same
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from funcckpt import inner_grad, scan, while_loop
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
    {"checkpoint": "binomial"},
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


def test_meta_gradients_through_a_number_of_steps_that_the_loss_decides():
    """Adaptation until the loss is small: how many steps that takes is not known before."""
    task = sinusoid(6)

    def adapted(meta, loop):
        x, y, x_test, y_test = task
        gradient = inner_grad if loop else grad
        body = lambda c: (c[0] + 1, *momentum(c[1], c[2], gradient(mse)(c[2], x, y), meta["rate"]))
        cond = lambda c: c[0] < 100 and mse(c[2], x, y) > 0.4 * mse(META["p"], x, y)
        carry = (0, start(momentum, meta["p"]), meta["p"])
        if loop:
            carry = while_loop(cond, body, carry, checkpoints=3)
        else:
            while cond(carry):
                carry = body(carry)
        return mse(carry[2], x_test, y_test), torch.tensor(carry[0])

    got, steps = grad(adapted, has_aux=True)(META, True)
    want, steps_of_plain = grad(adapted, has_aux=True)(META, False)
    assert 5 < steps == steps_of_plain < 100
    assert_same(got, want)


def digits(adapt, judge):
    """Images of zeros and ones: some to adapt to, and some to be judged by."""
    datasets = pytest.importorskip("sklearn.datasets", reason="needs the extra `meta`")
    images, labels = datasets.load_digits(n_class=2, return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels)
    return x[:adapt], y[:adapt], x[adapt : adapt + judge], y[adapt : adapt + judge]


def classifier():
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (64, 12), "b1": (12,), "w2": (12, 2), "b2": (2,)}
    return {name: torch.randn(shape, generator=g, dtype=F64) / 4 for name, shape in shapes.items()}


def cross_entropy(p, x, y):
    logits = torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    return torch.nn.functional.cross_entropy(logits, y)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_meta_gradients_on_digits(steps, options):
    x, y, x_test, y_test = digits(16, 24)
    meta = {"p": classifier(), "rate": torch.tensor(0.1, dtype=F64)}

    def adapted(meta, gradient, options):
        step = lambda c, _: (sgd(None, c, gradient(cross_entropy)(c, x, y), meta["rate"])[1], None)
        p, _ = scan(step, meta["p"], length=steps, **options)
        return cross_entropy(p, x_test, y_test)

    want = grad(adapted)(meta, grad, {"checkpoint": None})
    for gradient in (grad, inner_grad):
        assert_same(grad(adapted)(meta, gradient, options), want)

    # The peer: each inner step under torch's own checkpoint, which has to stay out of torch.func.
    leaves = tree_map(lambda t: t.clone().requires_grad_(), meta)

    def eager_step(rate, *values):
        with torch.enable_grad():
            p = dict(zip(meta["p"], values))
            loss = cross_entropy(p, x, y)
            gradients = torch.autograd.grad(loss, values, create_graph=True)
        return tuple(w - rate * g for w, g in zip(values, gradients))

    values = tuple(leaves["p"].values())
    for _ in range(steps):
        values = torch.utils.checkpoint.checkpoint(eager_step, leaves["rate"], *values, use_reentrant=False)
    cross_entropy(dict(zip(meta["p"], values)), x_test, y_test).backward()
    assert_same(tree_map(lambda t: t.grad, leaves), want)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_functional_optimizers_of_torchopt(optimizer, options):
    torchopt = pytest.importorskip("torchopt", reason="needs the extra `meta`")
    x, y, x_test, y_test = sinusoid(1)

    def adapted(p, gradient, options):
        update = getattr(torchopt, optimizer)(lr=0.02, **({"momentum": 0.9} if optimizer == "sgd" else {}))

        def step(carry, _):
            state, p = carry
            updates, state = update.update(gradient(mse)(p, x, y), state, params=p, inplace=False)
            return (state, torchopt.apply_updates(p, updates, inplace=False)), None

        (_, p), _ = scan(step, (update.init(p), p), length=8, **options)
        return mse(p, x_test, y_test)

    want = grad(adapted)(META["p"], grad, {"checkpoint": None})
    assert_same(grad(adapted)(META["p"], inner_grad, options), want)
    assert_same(grad(adapted)(META["p"], grad, options), want)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_inner_steps():
    task = sinusoid(5)
    peak = lambda gradient, options, steps: (
        measure(grad(adapted_loss), META, task, adam, gradient, options, steps).peak_bytes
    )
    assert peak(grad, None, 64) > 3.5 * peak(grad, None, 16)
    assert peak(inner_grad, {"checkpoints": 6}, 64) < 1.1 * peak(inner_grad, {"checkpoints": 6}, 16)
    assert peak(inner_grad, {"checkpoints": 6}, 64) < 0.1 * peak(grad, None, 64)
