"""Programs under transforms that some way of moving the transforms into a program got wrong once."""

import warnings

import pytest
import torch
from support import (
    assert_same_outcome,
    message,
    no_remat,
    outcome,
)
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from funcckpt import remat

from .test_matrix import inputs

# What was wrong once. A run is given remat, or what does nothing in its place.


@pytest.fixture
def same():
    def compared(run):
        expected = outcome(lambda: run(no_remat))
        assert expected.error is None, message(expected.error)
        assert_same_outcome(outcome(lambda: run(remat)), expected)

    return compared


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_through_outputs_that_are_not_batched(same, samples, nested):
    """Some outputs are batched and others are not: the cotangent of these counts once, and not once for
    each sample.
    """
    x, w = inputs()
    xs = torch.stack([x * (i + 1) for i in range(samples)])

    def run(wrap):
        f = wrap(lambda x, w: (x * w[0], w.sin(), w.sum(), x.sum() * w))

        def sample(x, w):
            a, b, c, d = f(x, w)
            return a * c, b, (d * b).sum()

        batched = vmap(sample, (0, None))
        if nested:
            batched = vmap(batched, (0, None))

        def loss(xs, w):
            return sum(y.cos().sum() for y in batched(PAIR(xs) if nested else xs, w))

        leaf = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(xs, leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), leaf)
        return grad(loss, (0, 1))(xs, w), first.detach(), second, jacrev(loss, 1)(xs, w)

    same(run)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("inside", [None, "same", "different"])
def test_a_vmap_over_cotangents_draws_no_random_numbers(same, randomness, inside):
    """It was not there when f was called: all cotangents meet the numbers of the forward."""
    x, w = inputs()

    def run(wrap):
        f = wrap(lambda x: F.dropout(torch.tanh(w @ x), 0.5) * x * torch.rand(3))
        g = f if inside is None else lambda x: vmap(f, randomness=inside)(torch.stack([x, x * 0.5]))
        y, pull = vjp(g, x)
        leaf = x.clone().requires_grad_()
        out = g(leaf)
        cts = torch.stack([torch.ones_like(y), y])
        batched = torch.autograd.grad(out, leaf, torch.stack([y, y * 2]), is_grads_batched=True)
        return vmap(pull, randomness=randomness)(cts), batched

    same(run)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_in_place_random_operators_under_a_vmap_over_cotangents(same, randomness):
    """Plain torch 2.13 crashes where such an operator meets a vmap level that does not batch its input."""
    x, _ = inputs()

    def run(wrap):
        f = wrap(lambda x: x.sin() * torch.empty_like(x.detach()).bernoulli_(0.5))
        return vmap(jacrev(f), randomness=randomness)(torch.stack([x, x * 2]))

    same(run)


def test_pullbacks_without_a_result(same):
    x, w = inputs()

    def run(wrap):
        constant = wrap(lambda x, w: (w.sin(), x.detach(), None, 3))
        nothing = wrap(lambda x: None)

        def sample(x):
            nothing(x)
            return constant(x, w)[0].sum() + constant(x, w)[1].sum() + x.sum()

        xs = torch.stack([x, x])
        return vmap(grad(sample))(xs), jacrev(lambda x: constant(x, w)[0])(x), vmap(jacrev(sample))(xs)

    same(run)


PAIR = lambda t: torch.stack([t, t * 2])
UNDER = {
    "grad": lambda f: lambda x, w: grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w),
    "vmap": lambda f: lambda x, w: vmap(f)(PAIR(x), PAIR(w)),
    "vmap_of_grad": lambda f: lambda x, w: vmap(UNDER["grad"](f))(PAIR(x), PAIR(w)),
    "jvp_of_vmap": lambda f: lambda x, w: jvp(lambda x, w: vmap(f, (0, None))(PAIR(x), w), (x, w), (x, w)),
}


class SineIsTwice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.Tensor.sin) else out


def test_function_modes_see_the_inside(same):
    """functorch hands an autograd.Function to each mode, and leaves the mode for it."""
    x, _ = inputs()

    def run(wrap):
        f = wrap(lambda x: x.sin() * x)
        with SineIsTwice():
            y, pull = vjp(f, x)
            results = [grad(lambda x: f(x).sum())(x), vmap(f)(PAIR(x)), vmap(vmap(grad(f)))(x[None])]
        return results, y, pull(x)

    same(run)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_default_device_under_transforms(same, device):
    def run(wrap):
        f = wrap(lambda x: x.sin() * torch.ones(3))
        with torch.device(device):
            x = torch.zeros(3)
            results = (
                grad(lambda x: f(x).sum())(x),
                vmap(grad(lambda x: f(x).sum()))(PAIR(x)),
                vmap(f)(PAIR(x)),
            )
        return [(str(t.device), t.shape) for t in results]

    same(run)


@pytest.mark.parametrize("inside", ["error", "same", "different"])
def test_solve_under_two_vmaps_one_of_which_batches_the_cotangent_alone(same, inside):
    """Without a graph autograd takes lu_solve, whose batching rule is wrong there (torch 2.13)."""
    x, w = inputs()
    scales = torch.tensor([1.0, 3.0, 5.0])

    def run(wrap):
        noise = (lambda y: y) if inside == "error" else (lambda y: y * torch.rand(3))
        f = wrap(lambda x, w: noise(torch.linalg.solve(w @ w.mT + 2 * torch.eye(3), x)))
        loss = lambda x, w, s: (f(x, w) * s).sin().sum()
        sample = lambda x, w: vmap(lambda s: grad(loss, (0, 1))(x, w, s), randomness=inside)(scales)
        per_sample = vmap(sample, randomness=inside)(PAIR(x), PAIR(w))
        return per_sample, vmap(jacrev(f, (0, 1)), randomness=inside)(PAIR(x), PAIR(w))

    same(run)


def test_f_asks_for_a_gradient_that_an_inner_level_alone_differentiates(same):
    """The inner level is gone when the outer one recomputes."""
    x, w = inputs()

    def run(wrap):
        def f(x, w):
            (g,) = torch.autograd.grad((w @ x).cos().sum(), x, create_graph=True)
            return (g * x).sum()

        return grad(lambda w: grad(wrap(f))(x, w).sin().sum())(w)

    same(run)


@pytest.mark.parametrize("outer", ["grad", "vmap_of_grad", "jvp_of_vmap"])
def test_forward_mode_in_inference_mode(same, outer):
    x, w = inputs()

    def run(wrap, mode=True):
        def tangent(x, w):
            z = w.cos()
            return jvp(lambda y: wrap(lambda y, z=z: (w @ y) * z[0] * y)(y), (x,), (x,))[1]

        with torch.inference_mode(mode):
            results = UNDER[outer](tangent)(x.clone(), w.clone())
        return [t.clone() for t in results]

    try:
        torch.testing.assert_close(run(no_remat), run(no_remat, mode=False))
    except (AssertionError, RuntimeError):  # torch 2.11 gives zeros, or refuses vmap (pytorch#177318)
        with pytest.raises(RuntimeError):
            run(remat)
    else:
        same(run)


def test_deep_nesting_stays_within_the_levels_that_torch_has(same):
    """A nested remat meets the levels of its caller twice, and not four times, eight times and so on."""
    x, w = inputs()

    def run(wrap):
        f = lambda x: torch.tanh(w @ x)
        for _ in range(5):
            f = wrap(lambda x, f=f: f(x) * 1.1)
        sample = lambda x: grad(lambda x: f(x).sum())(x)
        return vmap(vmap(vmap(sample)))(x.expand(2, 1, 2, 3)), vmap(vmap(f), randomness="same")(
            x.expand(2, 2, 3)
        )

    same(run)


@pytest.mark.parametrize("op", [torch.sgn, lambda x: x.expand(4, 3), lambda x: x.sum().expand(2, 2)])
def test_tangents_of_outputs_whose_elements_share_memory(same, op):
    x, _ = inputs()

    def run(wrap):
        f = wrap(lambda x: (op(x), op(x.detach()), op(torch.ones_like(x))))
        pullback = lambda x, ct: vjp(lambda x: f(x)[0], x)[1](op(ct))
        results = [
            jvp(f, (x,), (x,)),
            jvp(pullback, (x, x), (x, x)),
            vmap(lambda x: jvp(f, (x,), (x,)))(PAIR(x)),
        ]
        with forward_ad.dual_level():
            primal = forward_ad.make_dual(x.clone().requires_grad_(), x)
            y = sum(y.sum() for y in f(primal)) * primal
            (g,) = torch.autograd.grad(y.sum(), primal, create_graph=True)
            return results, [t.detach() for t in forward_ad.unpack_dual(g)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(run)


def test_operators_that_choose_a_kernel_by_what_requires_grad(same):
    """embedding_bag and attention with a mask have a derivative only where they know that it is asked for."""
    _, w = inputs()
    index = torch.tensor([[0, 1], [1, 2]])

    def run(wrap):
        bag = wrap(lambda w: F.embedding_bag(index, w, mode="sum").sin())

        def attend(w, mask):
            q = w.reshape(1, 1, 3, 3)
            return F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=mask).sum()

        attend = wrap(attend)
        pullback = lambda w, mask: grad(attend, (0, 1))(w, mask)
        return (
            vmap(grad(lambda w: bag(w).sum()))(PAIR(w)),
            vmap(pullback)(PAIR(w), PAIR(w.t())),
            jvp(pullback, (w, w.t()), (w, w)),
        )

    same(run)


# The choice of one
