"""Numerical derivatives as the judge, with every option of gradcheck on, also for captured tensors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from funcckpt import remat

from .functions import FUNCTIONS
from .stacks import is_differentiable

ALL = dict(
    check_batched_grad=True,
    check_forward_ad=True,
    check_backward_ad=True,
    check_batched_forward_grad=True,
    check_undefined_grad=True,
    check_grad_dtypes=True,
)
SECOND = dict(
    check_batched_grad=True, check_fwd_over_rev=True, check_rev_over_rev=True, check_grad_dtypes=True
)
# Of the matrix: the plain kinds, captured tensors, nesting, outputs, and operators with formulas of their own.
NAMES = (
    "view_outputs trees closure_over_everything nested nested_three_deep_with_closures inputs_as_outputs "
    "cumprod solve activations group_norm vmap_of_grad_inside integer_and_boolean_outputs unused_inputs"
).split()


def dropout_with_a_seed(remat):
    """The same mask in each of the evaluations that the numerical derivative takes."""

    def f(x, w):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return remat(lambda x, w: F.dropout(w @ x, 0.5) * x)(x, w)

    return f


def vmap_grad_captured(remat):
    return lambda x, w: torch.func.vmap(torch.func.grad(remat(lambda row: (row * x).sin().sum() ** 2)))(w)


def complex_output(remat):
    return remat(lambda x, w: torch.fft.fft(torch.complex(w @ x, x)))


MAKE = {name: FUNCTIONS[name] for name in NAMES} | {
    f.__name__: f for f in (dropout_with_a_seed, vmap_grad_captured, complex_output)
}


def differentiable_outputs(f):
    return lambda x, w: tuple([y for y in pytree.tree_leaves(f(x, w)) if is_differentiable(y)])


def inputs():
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(3, generator=generator) + 0.2
    w = torch.randn(3, 3, generator=generator)
    return x.requires_grad_(), w.requires_grad_()


@pytest.mark.parametrize("name", MAKE)
def test_gradcheck(name):
    # Batched tangents vmap the forward itself, in error mode: plain torch refuses any random op there.
    options = ALL | dict(check_batched_forward_grad=name != "dropout_with_a_seed")
    assert gradcheck(differentiable_outputs(MAKE[name](remat)), inputs(), **options)


@pytest.mark.parametrize("name", MAKE)
def test_gradgradcheck(name):
    assert gradgradcheck(differentiable_outputs(MAKE[name](remat)), inputs(), **SECOND)


def test_gradcheck_finds_a_wrong_formula():
    """That the checks above can fail at all."""

    class Wrong(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] * g

    with pytest.raises(Exception, match="Jacobian mismatch"):
        gradcheck(lambda x: remat(Wrong.apply)(x), inputs()[:1])
