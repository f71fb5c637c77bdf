"""Exact numbers: how often f runs, how many FLOPs are spent, how many bytes wait for the backward.

No tolerances: a wall-clock time may not be asserted, a count may.
"""

import pytest
import torch
from support import Counter, Storages, no_remat, tensor_bytes
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from funcckpt import remat

from .stacks import stack

X = (0.3, -0.2, 0.5)
vector = lambda x: x.sin() * x.sum()
gradient = lambda f, argnums=0: grad(lambda *args: f(*args).sum(), argnums)
tangent = lambda f: lambda x: jvp(f, (x,), (x,))[1]
batched = lambda f: lambda x: vmap(f)(torch.stack([x, x * 2, x - 1]))
plain_backward = lambda f: lambda x: f(x.clone().requires_grad_()).sum().backward()


def plain_double_backward(f):
    def run(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)

    return run


# f is entered once for each evaluation, however many samples, cotangents or tangents are batched in it. Each
# level of reverse mode adds one evaluation, its recomputation; forward mode keeps nothing and so adds none. A
# gradient of a gradient needs three: the forward, the forward inside the first backward, and that backward
# again in the second one. What comes out of f in the forward is not needed for the second derivative here, as
# each loss is linear in it.
COUNTS = {
    "no transform": (lambda f: f, 1),
    "jacfwd of jacfwd": (lambda f: jacfwd(jacfwd(f)), 1),
    "vmap of jvp": (lambda f: batched(tangent(f)), 1),
    "vjp without a pullback": (lambda f: lambda x: vjp(f, x), 1),
    "dual level": (lambda f: lambda x: stack("dual")(lambda x, w: f(x))(x, x), 1),
    "grad": (gradient, 2),
    "backward": (plain_backward, 2),
    "vmap of grad": (lambda f: batched(gradient(f)), 2),
    "vmap of jacrev": (lambda f: batched(jacrev(f)), 2),
    "jvp of grad": (lambda f: tangent(gradient(f)), 2),
    "grad of jvp": (lambda f: gradient(tangent(f)), 2),
    "jacrev of jacfwd": (lambda f: jacrev(jacfwd(f)), 2),
    "double backward": (plain_double_backward, 3),
    "jacrev of jacrev": (lambda f: jacrev(jacrev(f)), 3),
    "grad of grad of grad": (lambda f: gradient(gradient(gradient(f))), 4),
    "two pullbacks of one vjp": (lambda f: lambda x: stack("vjp_twice")(lambda x, w: f(x))(x, x), 3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_evaluations(name):
    transform, expected = COUNTS[name]

    def capturing(counter):
        """Finding what f captures costs no evaluation when it is found by looking at f."""

        def fn(x):
            w = x * 2
            return remat(lambda x: counter(x, w))(x)

        return fn

    for make, f, calls in (
        (no_remat, vector, 1),
        (remat, vector, expected),
        (capturing, lambda x, w: (w * x).sin() * x, expected),
    ):
        counter = Counter(f)
        transform(make(counter))(torch.tensor(X))
        assert counter.calls == calls


def test_the_graph_that_is_not_differentiated_costs_nothing():
    counter = Counter(vector)
    x = torch.tensor(X, requires_grad=True)
    (remat(counter)(x).detach() * x).sum().backward()
    assert counter.calls == 1
    with torch.no_grad():
        remat(counter)(x)
    assert counter.calls == 2


def halved(f, n):
    """n applications of f; of each half, the one that runs last is kept and the other recomputed."""
    if n == 2:
        return lambda x: f(f(x))
    first, last = remat(halved(f, n // 2)), halved(f, n // 2)
    return lambda x: last(first(x))


@pytest.mark.parametrize("transform", [plain_backward, lambda f: batched(gradient(f))], ids=["plain", "func"])
def test_recursive_halving(transform):
    """n / 2 * log2(n / 2) evaluations in the backward: what JAX's test of recursive checkpoints asks for."""
    counter = Counter(torch.sin)
    transform(halved(counter, 32))(torch.tensor(X))
    assert counter.calls == 32 + 64


# FLOPs

WIDTH = 8


def block(x, w):
    """Both products are needed by the backward, so that no recomputation of them is dead."""
    return torch.tanh(torch.tanh(x @ w) @ w)


def block_inputs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(5, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)


def flops(run):
    with FlopCounterMode(display=False) as mode:
        run(*block_inputs())
    return mode.get_total_flops()


along_w = lambda f: lambda x, w: jvp(lambda w: f(x, w), (w,), (w,))


# By what remat adds.
FLOPS = {
    "grad both": (lambda f: gradient(f, (0, 1)), block),
    "vmap of grad": (lambda f: lambda x, w: vmap(gradient(f, 1), (0, None))(x.unsqueeze(1), w), block),
    "backward": (lambda f: lambda x, w: plain_backward(lambda w: f(x, w))(w), block),
    # The recomputation is not batched over the cotangents.
    "jacrev": (lambda f: jacrev(lambda x, w: f(x, w)[0], 1), block),
    # Forward over reverse: the tangent rides along in the forward and in the recomputation.
    "a Hessian-vector product": (lambda f: along_w(gradient(f, 1)), along_w(block)),
    "jvp w": (along_w, None),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name):
    transform, more = FLOPS[name]
    product = 2 * 5 * WIDTH * WIDTH
    assert flops(block) == 2 * product and flops(gradient(block, (0, 1))) == 6 * product
    assert flops(transform(remat(block))) - flops(transform(block)) == (flops(more) if more else 0)


# Bytes between the forward and the backward


def chain(n, x, w, f=remat(block)):
    return x if n == 0 else f(chain(n - 1, x, w, f), w)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_bytes_held_are_block_inputs(n):
    x, w = block_inputs()
    held = []
    with Storages().known(x, w) as storages:
        y, pull = vjp(lambda x, w: chain(n, x, w), x, w)
        assert storages.live == n * tensor_bytes(x), "the inputs of n - 1 blocks and one output"
        del pull
        assert storages.live == tensor_bytes(y)
        del y

        def sample(x, w):
            y, pull = vjp(lambda x, w: chain(n, x, w), x, w)
            held.append(storages.live)
            return pull(torch.ones_like(y))

        vmap(sample, (0, None))(x.unsqueeze(1), w)
        assert held == [n * tensor_bytes(x)]
        x.requires_grad_(), w.requires_grad_()
        y = chain(n, x, w)
        assert storages.live == n * tensor_bytes(x)
        y.sum().backward()
        del y
        assert storages.live == tensor_bytes(x.grad, w.grad)
        # These numbers are not what anything gives: three products' results and tanh's, less the output.
        y = chain(5, x, w, block)
        assert storages.live - tensor_bytes(x.grad, w.grad) == 10 * tensor_bytes(x)
        del y
