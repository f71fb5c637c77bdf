"""Exact numbers: how often f runs, how many FLOPs are spent, how many bytes wait for the backward.

No tolerances: a wall-clock time may not be asserted, a count may.
"""

import pytest
import torch
from support import Counter, Storages, no_remat, tensor_bytes
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from funcckpt import remat

X = (0.3, -0.2, 0.5)


def body(x):
    return (x.sin() * x).sum()


def vector(x):
    return x.sin() * x.sum()


def plain_backward(f):
    def run(x):
        x = x.clone().requires_grad_()
        f(x).sum().backward()

    return run


def plain_double_backward(f):
    def run(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)

    return run


def plain_dual(f):
    def run(x):
        with torch.autograd.forward_ad.dual_level():
            f(torch.autograd.forward_ad.make_dual(x, x.cos()))

    return run


def pullback_thrice(f):
    def run(x):
        out, pull = vjp(f, x)
        for i in range(3):
            pull(torch.full_like(out, float(i)))

    return run


def samples(x):
    return torch.stack([x, x * 2, x - 1])


# f is entered once for each evaluation, however many samples, cotangents or tangents are batched
# in it. Each level of reverse mode adds one evaluation, its recomputation; forward mode keeps
# nothing and so adds none. A gradient of a gradient needs three: the forward, the forward inside
# the first backward, and that backward again in the second one. What comes out of f in the forward
# is not needed for the second derivative here, as each loss is linear in it.
COUNTS = [
    ("no transform", lambda f: f, 1),
    ("jvp", lambda f: lambda x: jvp(f, (x,), (x.cos(),)), 1),
    ("jacfwd", jacfwd, 1),
    ("jvp of jvp", lambda f: lambda x: jvp(lambda x: jvp(f, (x,), (x,))[1], (x,), (x,)), 1),
    ("jacfwd of jacfwd", lambda f: jacfwd(jacfwd(f)), 1),
    ("vmap", lambda f: lambda x: vmap(f)(samples(x)), 1),
    ("vmap of vmap", lambda f: lambda x: vmap(vmap(f))(samples(samples(x))), 1),
    ("vmap of jvp", lambda f: lambda x: vmap(lambda x: jvp(f, (x,), (x,)))(samples(x)), 1),
    ("vjp without a pullback", lambda f: lambda x: vjp(f, x), 1),
    ("dual level", plain_dual, 1),
    ("grad", lambda f: grad(lambda x: f(x).sum()), 2),
    ("grad_and_value", lambda f: grad_and_value(lambda x: f(x).sum()), 2),
    ("backward", plain_backward, 2),
    ("jacrev", jacrev, 2),
    ("vmap of grad", lambda f: lambda x: vmap(grad(lambda x: f(x).sum()))(samples(x)), 2),
    ("grad of vmap", lambda f: lambda x: grad(lambda x: vmap(f)(samples(x)).sum())(x), 2),
    ("vmap of jacrev", lambda f: lambda x: vmap(jacrev(f))(samples(x)), 2),
    ("jvp of grad", lambda f: lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)), 2),
    ("grad of jvp", lambda f: lambda x: grad(lambda x: jvp(f, (x,), (x,))[1].sum())(x), 2),
    ("hessian", lambda f: hessian(lambda x: f(x).sum()), 2),
    ("vmap of hessian", lambda f: lambda x: vmap(hessian(lambda x: f(x).sum()))(samples(x)), 2),
    ("jacrev of jacfwd", lambda f: jacrev(jacfwd(f)), 2),
    ("grad of grad", lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum()), 3),
    ("double backward", plain_double_backward, 3),
    ("jacrev of jacrev", lambda f: jacrev(jacrev(f)), 3),
    (
        "vmap of grad of grad",
        lambda f: lambda x: vmap(grad(lambda x: grad(lambda x: f(x).sum())(x).sum()))(samples(x)),
        3,
    ),
    (
        "grad of grad of grad",
        lambda f: grad(lambda x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x).sum()),
        4,
    ),
    ("three pullbacks of one vjp", pullback_thrice, 4),
]


@pytest.mark.parametrize("f", [body, vector], ids=["scalar", "vector"])
@pytest.mark.parametrize(("transform", "expected"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_evaluations(transform, expected, f):
    counter = Counter(f)
    transform(remat(counter))(torch.tensor(X))
    assert counter.calls == expected


@pytest.mark.parametrize("transform", [c[1] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_without_remat_f_runs_once(transform):
    """What the table above is measured against: also that it counts what it says."""
    counter = Counter(vector)
    transform(no_remat(counter))(torch.tensor(X))
    assert counter.calls == 1


@pytest.mark.parametrize("wrap", [remat, no_remat])
def test_linearize_evaluates_twice_by_itself(wrap):
    """torch.func.linearize runs f once for its value and once more to trace its tangent; remat
    adds nothing.
    """
    counter = Counter(vector)
    _, push = linearize(wrap(counter), torch.tensor(X))
    push(torch.ones(3)), push(torch.ones(3))
    assert counter.calls == 2


@pytest.mark.parametrize(("transform", "expected"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_evaluations_with_a_captured_tensor(transform, expected):
    """Finding what f captures costs no extra evaluation when it is found by looking at f."""
    counter = Counter(lambda x, w: (w * x).sin() * x)

    def fn(x):
        w = x * 2
        return remat(lambda x: counter(x, w))(x)

    transform(fn)(torch.tensor(X))
    assert counter.calls == expected


def test_the_graph_that_is_not_differentiated_costs_nothing():
    counter = Counter(vector)
    x = torch.tensor(X, requires_grad=True)
    y = remat(counter)(x)
    (y.detach() * x).sum().backward()
    assert counter.calls == 1
    with torch.no_grad():
        remat(counter)(x)
    assert counter.calls == 2


# Recursive halving


def halved(f, n):
    """n applications of f; of each half, the one that runs last is kept whole and the other
    recomputed.
    """
    if n == 1:
        return f
    if n == 2:
        return lambda x: f(f(x))
    first, last = remat(halved(f, n // 2)), halved(f, n // 2)
    return lambda x: last(first(x))


@pytest.mark.parametrize(("n", "expected"), [(2, 0), (4, 2), (8, 8), (16, 24), (32, 64)])
@pytest.mark.parametrize("how", ["grad", "vmap of grad", "backward"])
def test_recursive_halving(n, expected, how):
    """n / 2 * log2(n / 2) evaluations in the backward: what JAX's test of recursive checkpoints
    asks for.
    """
    counter = Counter(torch.sin)
    f = halved(counter, n)
    forward = []

    def loss(x):
        y = f(x).sum()
        forward.append(counter.calls)
        return y

    transform = {
        "grad": grad,
        "backward": plain_backward,
        "vmap of grad": lambda f: lambda x: vmap(grad(f))(samples(x)),
    }
    transform[how](loss)(torch.tensor(X))
    assert forward == [n]
    assert counter.calls - n == expected


# FLOPs

WIDTH = 8


def block(x, w):
    """Both products are needed by the backward, so that no recomputation of them is dead."""
    return torch.tanh(torch.tanh(x @ w) @ w)


def block_inputs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(5, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)


def flops(run, *args):
    with FlopCounterMode(display=False) as mode:
        run(*args)
    return mode.get_total_flops()


def test_the_flop_counter_sees_through_the_transforms():
    product = 2 * 5 * WIDTH * WIDTH
    assert flops(block, *block_inputs()) == 2 * product
    assert flops(grad(lambda x, w: block(x, w).sum(), (0, 1)), *block_inputs()) == 6 * product


def total(f):
    return lambda x, w: f(x, w).sum()


def per_sample(f):
    return lambda x, w: vmap(grad(lambda x, w: f(x, w).sum(), 1), (0, None))(x.unsqueeze(1), w)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(total(f), (0, 1)),
        lambda f: grad(total(f), 1),
        lambda f: grad_and_value(total(f), (0, 1)),
        per_sample,
        lambda f: grad(lambda x, w: vmap(f, (0, None))(x.unsqueeze(1), w).sum(), (0, 1)),
        lambda f: lambda x, w: plain_backward(lambda w: f(x, w))(w),
    ],
    ids=["grad both", "grad w", "grad_and_value", "vmap of grad", "grad of vmap", "backward"],
)
def test_flops_of_reverse_mode_are_forward_recompute_backward(transform):
    args = block_inputs()
    assert flops(transform(remat(block)), *args) == flops(transform(block), *args) + flops(block, *args)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x, w: jvp(f, (x, w), (x, w)),
        lambda f: lambda x, w: jvp(lambda w: f(x, w), (w,), (w,)),
        lambda f: jacfwd(lambda x, w: f(x, w)[0], 1),
        lambda f: lambda x, w: vmap(lambda x: jvp(lambda w: f(x, w), (w,), (w,)))(x.unsqueeze(1)),
        lambda f: f,
        lambda f: vmap(f, (0, None)),
    ],
    ids=["jvp both", "jvp w", "jacfwd", "vmap of jvp", "no transform", "vmap"],
)
def test_flops_of_forward_mode_are_those_without_remat(transform):
    args = block_inputs()
    assert flops(transform(remat(block)), *args) == flops(transform(block), *args)


def test_flops_of_jacrev_recompute_once():
    """The recomputation is not batched over the cotangents."""
    args = block_inputs()
    transform = lambda f: jacrev(lambda x, w: f(x, w)[0], 1)
    assert flops(transform(remat(block)), *args) == flops(transform(block), *args) + flops(block, *args)


def test_flops_of_a_hessian_vector_product():
    """Forward over reverse: the tangent rides along in the forward and in the recomputation."""
    args = block_inputs()

    def hvp(f):
        return lambda x, w: jvp(lambda w: grad(total(f), 1)(x, w), (w,), (w,))

    def forward(x, w):
        return jvp(lambda w: block(x, w), (w,), (w,))

    assert flops(hvp(remat(block)), *args) == flops(hvp(block), *args) + flops(forward, *args)


# Bytes between the forward and the backward


def chain(f, n):
    def run(x, w):
        for _ in range(n):
            x = f(x, w)
        return x

    return run


@pytest.mark.parametrize("n", [1, 2, 5])
def test_bytes_held_in_plain_autograd_are_block_inputs(n):
    x, w = (t.requires_grad_() for t in block_inputs())
    with Storages().known(x, w) as storages:
        y = chain(remat(block), n)(x, w)
        assert storages.live == n * tensor_bytes(x), "the inputs of n - 1 blocks and one output"
        y.sum().backward()
        del y
    assert storages.live == tensor_bytes(x.grad, w.grad)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_bytes_held_by_vjp_are_block_inputs(n):
    x, w = block_inputs()
    with Storages().known(x, w) as storages:
        y, pull = vjp(chain(remat(block), n), x, w)
        assert storages.live == n * tensor_bytes(x)
        del pull
        assert storages.live == tensor_bytes(y)


@pytest.mark.parametrize("n", [1, 3])
def test_bytes_held_under_vmap_are_block_inputs(n):
    x, w = block_inputs()
    held = []
    with Storages().known(x, w) as storages:

        def sample(x, w):
            y, pull = vjp(chain(remat(block), n), x, w)
            held.append(storages.live)
            return pull(torch.ones_like(y))

        vmap(sample, (0, None))(x.unsqueeze(1), w)
    assert held == [n * tensor_bytes(x)]


def test_bytes_held_for_captured_tensors_are_theirs_alone():
    x, w = (t.requires_grad_() for t in block_inputs())
    with Storages().known(x, w) as storages:
        h = w * 2
        y = remat(lambda x: block(x, h))(x)
        assert storages.live == tensor_bytes(h, y)
        y.sum().backward()


def test_a_plain_forward_holds_more():
    """That the numbers above are not what anything gives: three products' results and tanh's, less
    the output.
    """
    x, w = (t.requires_grad_() for t in block_inputs())
    with Storages().known(x, w) as storages:
        y = chain(block, 5)(x, w)
        assert storages.live == 10 * tensor_bytes(x)
        del y
