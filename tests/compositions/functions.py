"""The functions of the matrix: what random programs (`programs.py`) do not draw, and some that they do.

Each factory is given a `remat` (the real one, or one that does nothing) and returns `fn(x, w)` with x of shape
(3,) and w of shape (3, 3); what fn does with `remat` inside is the case. What it returns is any pytree.
"""

from collections import namedtuple
from typing import NamedTuple

import torch
from support import registered
from torch.func import grad, vmap

FUNCTIONS = {}
case = registered(FUNCTIONS)


def whole(f):
    """A case that is one function in remat."""
    FUNCTIONS[f.__name__] = lambda remat: remat(f)
    return f


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


Classic = namedtuple("Classic", ["a", "b"])


@case
def trees(remat):
    @remat
    def f(d, pair, *rest, **named):
        h = d["w"] @ d["x"] * 0.5 + pair.left * pair.right[0]
        return {
            "h": h.sin(),
            "pair": Pair(h.cos() * rest[0], [named["k"] * 2.0, h.sum()]),
        }, Classic(rest[0] + h, h[:2])

    return lambda x, w: f({"x": x, "w": w}, Pair(x.sin(), (w.sum(1), None)), x.cos(), k=w.diag())


@case
def closure_over_everything(remat):
    def fn(x, w):
        h = w @ x
        return remat(lambda: h.sin() * x + w.sum(0))()

    return fn


@case
def nested(remat):
    inner = remat(lambda x, w: torch.tanh(w @ x))
    return remat(lambda x, w: inner(inner(x, w) * x, w.t()).cos())


# Transforms and autograd inside


@case
def vmap_of_grad_inside(remat):
    loss = remat(lambda row, y: ((row * y).sin().sum() - 1) ** 2)
    return remat(lambda x, w: vmap(grad(loss), (0, None))(w, x))


@whole
def autograd_grad_inside(x, w):
    energy = (torch.cos(w @ x) * x).sum()
    (g,) = torch.autograd.grad(energy, x, create_graph=True)
    return g * x


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x**3 * scale, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, h):
        x, scale = ctx.saved_tensors
        return 3 * x**2 * scale * g + 2 * h, x**3 * g

    @staticmethod
    def jvp(ctx, tx, ts):
        x, scale = ctx.saved_tensors
        tx = torch.zeros_like(x) if tx is None else tx
        ts = torch.zeros_like(scale) if ts is None else ts
        return 3 * x**2 * scale * tx + x**3 * ts, 2 * tx


@whole
def no_grad_and_detach_inside(x, w):
    with torch.no_grad():
        a = w @ x
    return a * x.sin() + (w.detach() @ x).cos() + x * x.detach()


# Operators with formulas of their own


@whole
def solve(x, w):
    return torch.linalg.solve(w @ w.mT + 2 * torch.eye(3), x)


@case
def conjugate_and_negative_views(remat):
    f = remat(lambda x, w: (torch.fft.fft(torch.complex(w @ x, x)).conj(), torch.complex(x, x).conj().imag))

    def fn(x, w):
        z, imag = f(x, w)
        return z.abs().sum() + (imag * x).sum(), z

    return fn


# Outputs of every kind


@whole
def integer_and_boolean_outputs(x, w):
    values, index = (w @ x).max(0)
    mantissa, exponent = torch.frexp(w @ x)
    return values, index, x > 0, torch.argsort(x), (w * x).topk(2, 1), mantissa * 2, exponent


@case
def view_outputs(remat):
    f = remat(lambda x, w: (x[1:], w.t(), x.view(3, 1), w[0], w.diagonal(), x.expand(2, 3)))

    def fn(x, w):
        a, b, c, d, e, g = f(x, w)
        return (a.sin().sum() * b @ x, c * d, (e * g).cos())

    return fn


@whole
def several_views_of_one_base(x, w):
    h = w @ x
    return *h.unbind(), h[:2], *w.chunk(3), h


@case
def inputs_as_outputs(remat):
    f = remat(lambda x, w: (w, x, x, (w @ x).sin()))

    def fn(x, w):
        v, y, z, h = f(x, w)
        return (v @ y) * z + h, y, v

    return fn


@case
def unused_and_constant(remat):
    """Inputs that are not used, that are empty, or no tensors; outputs that depend on nothing."""
    f = remat(lambda x, w, z, e: (x.sin(), torch.ones(3), (w @ x).detach(), e.sin(), x.sum() + e.sum()))
    g = remat(lambda n: torch.arange(n) * 0.5)
    return lambda x, w: (f(x, w, x * 2, x[:0]), g(3) * (w @ x))


# Writing in place


@case
def in_place_on_outputs(remat):
    f = remat(lambda x, w: (w @ x, (x * 2).expand(3, 3).sum(0)))

    def fn(x, w):
        a, b = f(x, w)
        a.mul_(2).sin_()
        b[0] = 0.0
        b += a
        return a, b

    return fn
