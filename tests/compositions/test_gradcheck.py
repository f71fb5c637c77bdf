"""Numerical derivatives as the judge, with every option of gradcheck on, also for captured tensors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from funcckpt import remat

from .functions import FUNCTIONS
from .stacks import is_differentiable
from .test_matrix import inputs

FIRST = "batched_grad forward_ad backward_ad batched_forward_grad undefined_grad grad_dtypes".split()
SECOND = "batched_grad fwd_over_rev rev_over_rev grad_dtypes".split()
# The plain kinds, captured tensors, nesting, outputs, and operators with formulas of their own.
NAMES = (
    "view_outputs trees closure_over_everything nested_three_deep_with_closures inputs_as_outputs solve "
    "vmap_of_grad_inside integer_and_boolean_outputs unused_inputs"
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


MAKE = {name: FUNCTIONS[name] for name in NAMES}
MAKE |= {f.__name__: f for f in (dropout_with_a_seed, vmap_grad_captured, complex_output)}


@pytest.mark.parametrize("name", MAKE)
def test_gradients(name):
    f = lambda x, w: tuple(filter(is_differentiable, pytree.tree_leaves(MAKE[name](remat)(x, w))))
    x, w = (t.requires_grad_() for t in inputs())
    options = {f"check_{option}": True for option in FIRST}
    # Batched tangents vmap the forward itself, in error mode: plain torch refuses any random op there.
    options["check_batched_forward_grad"] = name != "dropout_with_a_seed"
    assert gradcheck(f, (x, w), **options)
    assert gradgradcheck(f, (x, w), **{f"check_{option}": True for option in SECOND})
