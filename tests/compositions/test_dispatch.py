"""Programs under transforms that some way of moving the transforms into a program got wrong once."""

import pytest
import torch
from support import assert_same_outcome, message, no_remat, outcome, registered
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from funcckpt import remat

from .test_matrix import inputs

# Each is given remat, or what does nothing in its place.
CASES = {}
case = registered(CASES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_same_as_without_remat(name):
    expected = outcome(lambda: CASES[name](no_remat, *inputs()))
    assert expected.error is None, message(expected.error)
    assert_same_outcome(outcome(lambda: CASES[name](remat, *inputs())), expected)


def pair(t):
    return torch.stack([t, t * 2])


@case
def gradients_through_outputs_that_are_not_batched(wrap, x, w):
    """Their cotangent counts once, and not once for each sample."""
    f = wrap(lambda x, w: (x * w[0], w.sin(), w.sum(), x.sum() * w))

    def sample(x, w):
        a, b, c, d = f(x, w)
        return a * c, b, (d * b).sum()

    def results(batched, xs):
        loss = lambda xs, w: sum(y.cos().sum() for y in batched(xs, w))
        leaf = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(xs, leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), leaf)
        return grad(loss, (0, 1))(xs, w), first.detach(), second, jacrev(loss, 1)(xs, w)

    batched = vmap(sample, (0, None))
    return (
        results(batched, x[None]),
        results(batched, pair(x)),
        results(vmap(batched, (0, None)), pair(pair(x))),
    )


@case
def plain_forward_mode_inside_of_a_reverse_transform(wrap, x, w):
    net = wrap(lambda w, x: torch.tanh(w @ x))

    def loss(w, x):
        with forward_ad.dual_level():
            y = forward_ad.unpack_dual(net(w, forward_ad.make_dual(x, x.cos())))
            return y.primal.sum() + y.tangent.square().sum()

    twice = grad(lambda w: grad(loss, 1)(w, x).square().sum())
    return grad(loss)(w, x), vmap(grad(loss, 1), (None, 0))(w, pair(x)), jacrev(loss)(w, x), twice(w)


@case
def a_vmap_over_cotangents_draws_no_random_numbers(wrap, x, w):
    """It was not there when f was called: all cotangents meet the numbers of the forward."""
    f = wrap(lambda x: F.dropout(torch.tanh(w @ x), 0.5) * x * torch.rand(3))
    results = []
    for inside in (None, "same", "different"):
        g = f if inside is None else lambda x, inside=inside: vmap(f, randomness=inside)(pair(x))
        y, pull = vjp(g, x)
        leaf = x.clone().requires_grad_()
        batched = torch.autograd.grad(g(leaf), leaf, torch.stack([y, y * 2]), is_grads_batched=True)
        cts = torch.stack([torch.ones_like(y), y])
        pulled = [vmap(pull, randomness=each)(cts) for each in ("error", "same", "different")]
        results.append((pulled, batched))
    return results


class SineIsTwice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.Tensor.sin) else out


@case
def function_modes_see_the_inside(wrap, x, w):
    """functorch hands an autograd.Function to each mode, and leaves the mode for it."""
    f = wrap(lambda x: x.sin() * x)
    with SineIsTwice():
        y, pull = vjp(f, x)
        results = [grad(lambda x: f(x).sum())(x), vmap(f)(pair(x)), vmap(vmap(grad(f)))(x[None])]
    return results, y, pull(x)


@case
def solve_under_two_vmaps_one_of_which_batches_the_cotangent_alone(wrap, x, w):
    """Without a graph autograd takes lu_solve, whose batching rule is wrong there (torch 2.13)."""
    results = []
    for inside in ("error", "same", "different"):
        noise = (lambda y: y) if inside == "error" else (lambda y: y * torch.rand(3))
        f = wrap(lambda x, w, noise=noise: noise(torch.linalg.solve(w @ w.mT + 2 * torch.eye(3), x)))
        loss = lambda x, w, s, f=f: (f(x, w) * s).sin().sum()

        def sample(x, w, loss=loss, inside=inside):
            scales = torch.tensor([1.0, 3.0, 5.0])
            return vmap(lambda s: grad(loss, (0, 1))(x, w, s), randomness=inside)(scales)

        results.append(vmap(sample, randomness=inside)(pair(x), pair(w)))
        results.append(vmap(jacrev(f, (0, 1)), randomness=inside)(pair(x), pair(w)))
    return results


@case
def f_asks_for_a_gradient_that_an_inner_level_alone_differentiates(wrap, x, w):
    """The inner level is gone when the outer one recomputes."""

    def f(x, w):
        (g,) = torch.autograd.grad((w @ x).cos().sum(), x, create_graph=True)
        return (g * x).sum()

    return grad(lambda w: grad(wrap(f))(x, w).sin().sum())(w)


@case
def deep_nesting_stays_within_the_levels_that_torch_has(wrap, x, w):
    """A nested remat meets the levels of its caller twice, and not four times, eight times and so on."""
    f = lambda x: torch.tanh(w @ x)
    for _ in range(5):
        f = wrap(lambda x, f=f: f(x) * 1.1)
    per_sample = vmap(vmap(vmap(grad(lambda x: f(x).sum()))))
    return per_sample(x.expand(2, 1, 2, 3)), vmap(vmap(f), randomness="same")(x.expand(2, 2, 3))


def elements_share_memory(op):
    def run(wrap, x, w):
        f = wrap(lambda x: (op(x), op(x.detach()), op(torch.ones_like(x))))
        pullback = lambda x, ct: vjp(lambda x: f(x)[0], x)[1](op(ct))
        results = [
            jvp(f, (x,), (x,)),
            jvp(pullback, (x, x), (x, x)),
            vmap(lambda x: jvp(f, (x,), (x,)))(pair(x)),
        ]
        with forward_ad.dual_level():
            primal = forward_ad.make_dual(x.clone().requires_grad_(), x)
            y = sum(y.sum() for y in f(primal)) * primal
            (g,) = torch.autograd.grad(y.sum(), primal, create_graph=True)
            return results, [t.detach() for t in forward_ad.unpack_dual(g)]

    return run


CASES |= {
    "tangents_of_expanded": elements_share_memory(lambda x: x.expand(4, 3)),
    "tangents_of_an_expanded_number": elements_share_memory(lambda x: x.sum().expand(2, 2)),
}


@case
def operators_that_choose_a_kernel_by_what_requires_grad(wrap, x, w):
    """embedding_bag and attention with a mask have a derivative only where they know that it is asked for."""
    index = torch.tensor([[0, 1], [1, 2]])
    bag = wrap(lambda w: F.embedding_bag(index, w, mode="sum").sin())

    @wrap
    def attend(w, mask):
        q = w.reshape(1, 1, 3, 3)
        return F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=mask).sum()

    pullback = lambda w, mask: grad(attend, (0, 1))(w, mask)
    return (
        vmap(grad(lambda w: bag(w).sum()))(pair(w)),
        vmap(pullback)(pair(w), pair(w.t())),
        jvp(pullback, (w, w.t()), (w, w)),
    )


@case
def what_depends_on_an_outer_level_alone(wrap, x, w):
    """To f, at the inner level, it does not require grad; nor does it in a recomputation."""

    def meta(s):
        def f(u):
            c = s + 1.0
            return (c * 2 if c.requires_grad else c) * u.sin()

        return grad(lambda z: wrap(f)(z * s).sin().sum())(x).sum()

    return grad(meta)(x[0] + 0.5), grad(grad(meta))(x[0])


@case
def results_of_operators_with_names(wrap, x, w):
    """A torch.return_types is a tuple, and no named tuple of Python."""

    def gradient(x):
        q = torch.linalg.qr(w + torch.diag(x) * 3)
        values = torch.sort(x * w[0])
        return grad(wrap(lambda u: ((u @ q.R).sin() * values.values * values[0].cos()).sum()))(
            x.detach().cos()
        )

    return (
        jvp(gradient, (x,), (x.cos(),)),
        jacrev(gradient)(x),
        vmap(gradient)(pair(x)),
        grad(lambda x: gradient(x).sum())(x),
    )


@case
def plain_forward_mode_in_a_backward(wrap, x, w):
    """Of a call outside of it."""
    x, w = x.requires_grad_(), w.requires_grad_()
    h = (x * w.sum()).sin()
    f = wrap(lambda x: torch.tanh(w @ x) * w.exp().sum() * h)
    y, (_, pull) = f(x), vjp(f, x.detach())
    _, tangent = jvp(f, (x,), (x.cos(),))
    first = torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]
    results = []
    for out in (y, first, tangent):
        for create_graph in (False, True):
            for cts in (out.detach(), pair(out.detach())):
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(cts, cts.cos())
                    of, more = ([x, w], cts.dim() > out.dim())
                    gs = torch.autograd.grad(out, of, dual, True, create_graph, is_grads_batched=more)
                    results += [t.detach() for g in gs for t in forward_ad.unpack_dual(g)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(pair(y.detach()), pair(y.detach()).cos())
        return results, [t.detach() for g in vmap(pull)(dual) for t in forward_ad.unpack_dual(g)]


@case
def batched_cotangents_of_plain_autograd(wrap, x, w):
    """In functions that differentiate, batch or capture them. (Functorch has a wrong rule for cdist.)"""

    class Outer(torch.autograd.Function):
        forward = staticmethod(lambda x, way: x.sin())
        setup_context = staticmethod(lambda ctx, inputs, out: setattr(ctx, "inputs", inputs))

        @staticmethod
        def backward(ctx, ct):
            x, way = ctx.inputs
            return way(x.detach(), ct), None

    f = wrap(lambda x: torch.tanh(w @ x))
    ways = [
        lambda x, ct: jvp(f, (x,), (ct,))[1],
        lambda x, ct: grad(lambda x: jvp(f, (x,), (ct,))[1].sum())(x),
        lambda x, ct: grad(lambda x: wrap(lambda x: (x * ct).sin())(x).sum())(x),
        lambda x, ct: vmap(wrap(torch.mul))(x, ct),
    ]
    draws_nothing = wrap(lambda x: x.sin() + torch.rand(0).sum())  # so no stream has to be restored
    functions = [lambda x, way=way: Outer.apply(x, way) for way in ways]
    functions += [lambda x: torch.cdist(w * x, w), draws_nothing]
    x, found = x.requires_grad_(), []
    for function in functions:
        for y in (function(x), wrap(function)(x * 2)):
            cts = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
            found += torch.autograd.grad(y, x, cts, is_grads_batched=True)
    return found


@case
def pullbacks_that_f_captures(wrap, x, w):
    """Of torch.func.vjp. The graph behind them cannot be rebuilt."""
    _, pull = vjp(lambda u: torch.tanh(w @ u), x.detach())
    loss = lambda u: pull(u)[0].square().sum()

    def inside(z):
        _, pull = vjp(lambda u: torch.tanh(w @ u), z)
        return wrap(lambda u: u * pull(u)[0])(z.sin())

    return (
        grad(wrap(loss))(x),
        grad(wrap(lambda pull, u: pull(u)[0].square().sum()), 1)(pull, x),
        jacrev(jacrev(wrap(loss)))(x),
        jvp(wrap(loss), (x,), (x.cos(),)),
        vmap(grad(wrap(loss)))(pair(x)),
        vmap(inside)(pair(x)),
        jvp(inside, (x,), (x.cos(),)),
    )


class StraightThrough(torch.autograd.Function):
    """Its tangent is the one that it gets."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, ct):
        return ct

    @staticmethod
    def jvp(ctx, t):
        return t


@case
def a_tangent_that_f_hands_on(wrap, x, w):
    """It requires grad in plain autograd, and belongs to no level that f sees."""
    t = x.detach().cos().requires_grad_()
    found = []
    for f in (StraightThrough.apply, lambda u: u[...]):
        _, tangent = jvp(grad(lambda u, f=f: wrap(f)(u).pow(3).sum()), (x.detach(),), (t,))
        found += torch.autograd.grad(tangent.sin().sum(), t)
    return found


@case
def a_part_without_grad_inside_of_forward_mode(wrap, x, w):
    """Forward mode switches grad mode on; what is computed there has no history all the same."""
    x, t = x.requires_grad_(), x.detach().cos().requires_grad_()
    gradient = grad(lambda x: (wrap(torch.cos)(x) * 2).sin().sum())

    def both(x):
        with torch.no_grad():
            constant = gradient(x)
        return constant + gradient(x)

    out, tangent = jvp(both, (x,), (t,))
    return out, tangent, *torch.autograd.grad((out * tangent).sum(), (x, t))
