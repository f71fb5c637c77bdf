"""Peak live bytes, exact: seen from below functorch, with Python's garbage collector switched off.

The bounds are put together from what is measured without remat and from sizes; the factors are those that the
project promises (1.10 of torch.utils.checkpoint in plain eager; 1.25 of one block's working set).
"""

import gc

import pytest
import torch
from support import Storages, tensor_bytes
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from funcckpt import remat
from funcckpt._torch import autograd
from funcckpt.meter import measure

BLOCKS, ROWS, WIDTH, HIDDEN = 24, 16, 16, 64
block = lambda x, w1, w2: x + F.layer_norm(F.gelu(x @ w1), (w1.shape[1],)) @ w2


def deep(block):
    def loss(weights, x):
        for w1, w2 in weights:
            x = block(x, w1, w2)
        return (x * x).mean()

    return loss


normal = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(4)) * 0.2
weights = lambda hidden: [(normal(WIDTH, n), normal(n, WIDTH)) for n in hidden]


def peak(f, *args):
    """Peak live bytes of what f makes, and its result."""
    gc.collect()
    gc.disable()
    try:
        with Storages().known(args) as storages:
            result = f(*args)
        return storages.peak, result
    finally:
        gc.enable()


def in_plain_eager(block):
    def run(weights, x):
        weights = [[w.detach().requires_grad_() for w in pair] for pair in weights]
        return torch.autograd.grad(deep(block)(weights, x), [w for pair in weights for w in pair])

    return run


per_sample = lambda block: vmap(grad(deep(block)), (None, 0))
torch_checkpointed = lambda x, w1, w2: torch_checkpoint(block, x, w1, w2, use_reentrant=False)


@pytest.mark.parametrize("transform", [lambda f: grad(deep(f)), in_plain_eager], ids=["grad", "plain eager"])
def test_needs_what_torch_checkpoint_needs_in_plain_eager(transform):
    w, x = weights([HIDDEN] * BLOCKS), normal(ROWS, WIDTH)
    theirs, expected = peak(in_plain_eager(torch_checkpointed), w, x)
    ours, result = peak(transform(remat(block)), w, x)
    leaves = torch.utils._pytree.tree_leaves(result)
    torch.testing.assert_close(leaves, list(expected), rtol=1e-10, atol=1e-12)
    assert ours <= 1.10 * theirs
    assert peak(grad(deep(block)), w, x)[0] > 3 * ours, "the job is too small to tell"


HIDDEN_OF = {
    "equal": lambda n: [64] * n,
    "growing": lambda n: [16 + 8 * i for i in range(n)],
    "first is large": lambda n: [512] + [64] * (n - 1),
    "last is large": lambda n: [64] * (n - 1) + [512],
}


def leanest(x, w1, w2, samples):
    """The most that one block's forward and backward hold at once in plain autograd, the gradients of its
    weights among it, without remat and without functorch's graph of the backward."""
    f = block
    if samples:
        f, (w1, w2) = vmap(block), (w.expand(len(x), *w.shape).contiguous() for w in (w1, w2))
    leaves = [t.detach().requires_grad_() for t in (x, w1, w2)]
    return measure(lambda ct: torch.autograd.grad(f(*leaves), leaves, ct), torch.ones_like(x)).peak_bytes


@pytest.mark.parametrize("samples", [False, True], ids=["grad", "vmap of grad"])
@pytest.mark.parametrize("sizes", HIDDEN_OF)
@pytest.mark.parametrize("n", [4, 24, 96])
@pytest.mark.parametrize("length", [1, 64])
def test_the_floor(samples, sizes, n, length):
    """As block i goes backward, the inputs up to its own are alive, a cotangent, the gradients of the
    later blocks, what the loss keeps (one output), and what the block itself needs."""
    w, x = weights(HIDDEN_OF[sizes](n)), normal(4, length, WIDTH)
    ours = measure((per_sample if samples else lambda f: grad(deep(f)))(remat(block)), w, x)
    gradients = [tensor_bytes(g) for g in ours.result]
    own = {pair[0].shape: leanest(x, *pair, samples) for pair in w}
    floor = max(
        (i + 2) * tensor_bytes(x) + sum(gradients[i + 1 :]) + own[pair[0].shape] for i, pair in enumerate(w)
    )
    assert ours.peak_bytes <= 1.01 * floor


@pytest.mark.parametrize("blocks", [4, 24])
def test_the_graph_of_the_backward_keeps_an_input_and_a_cotangent_of_each_block(blocks):
    """create_graph=True: what is needed to run its pullback again, to the byte."""

    def held(block):
        w, x = weights([HIDDEN] * blocks), normal(ROWS, WIDTH)
        leaves = [w.requires_grad_() for pair in w for w in pair]
        with Storages().known(w, x) as storages:
            gradients = torch.autograd.grad(deep(block)(w, x), leaves, create_graph=True)
            return (storages.live - tensor_bytes(gradients)) / tensor_bytes(x)

    assert held(remat(block)) == 2 * blocks
    assert held(torch_checkpointed) > 20 * blocks, "the job is too small to tell"


def halves(wrap, step):
    def run(carry, xs):
        if len(xs) == 1:
            return wrap(step)(carry, xs[0])
        half = len(xs) // 2
        return wrap(run)(wrap(run)(carry, xs[:half]), xs[half:])

    return run


@pytest.mark.parametrize(("transform", "carries"), [("eager", 1), ("grad", 1), ("forward over reverse", 2)])
def test_nested_remats_hold_one_carry_for_each_level(transform, carries):
    """Twice as many steps are one level more; with tangents each carry counts twice."""
    w, carry = normal(1024), normal(1024)
    run = halves(remat, lambda carry, x: torch.tanh(torch.sin(carry * w + x)) + carry * 0.1)

    def peak(steps):
        loss = lambda carry: run(carry, torch.ones(steps, 1, dtype=w.dtype)).square().sum()
        if transform == "eager":
            x = carry.clone().requires_grad_()
            return measure(lambda: torch.autograd.grad(loss(x), x)).peak_bytes
        if transform == "grad":
            return measure(grad(loss), carry).peak_bytes
        return measure(lambda: jvp(grad(loss), (carry,), (carry,))).peak_bytes

    for_each = carries if autograd.NODES_STAY else 2 * carries  # with the output of each level
    assert peak(32) - peak(8) < (2 * for_each + 0.5) * carry.nbytes
