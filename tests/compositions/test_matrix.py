"""Every function crossed with every transform, and pairs of transforms shared out among the functions.

Each cell compares remat with the same thing without it: values, structure, the random stream afterwards, and,
where plain torch refuses, the error. Stacks of three and four are drawn with random programs.
"""

import itertools

import pytest
import torch
from support import assert_same_outcome, no_remat, outcome
from torch.utils import _pytree as pytree

from funcckpt import remat

from .functions import FUNCTIONS
from .stacks import INNER, OUTER, stack

SINGLE = [(name,) for name in (*INNER, *OUTER)]
# What makes a level of its own.
LEVELS = "grad_both vjp_pull jvp_both vmap_x jacfwd_same autograd_grad functionalized vmap_different".split()
PAIRS = [*itertools.product((*LEVELS, *OUTER, "vjp_vmap", "linearize_x"), LEVELS)]


def share(stacks, step):
    """Each stack with every `step`-th function, and each function with every `step`-th stack."""
    every = itertools.product(enumerate(stacks), enumerate(FUNCTIONS))
    return [(f, s) for (i, s), (j, f) in every if (i + j) % step == 0]


CELLS = [*share(SINGLE, 1), *share(PAIRS, 12)]


def inputs():
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(3, generator=generator, dtype=torch.float64) + 0.2
    return x, torch.randn(3, 3, generator=generator, dtype=torch.float64)


def run(make, names, remat):
    """The function is made inside, so that what it holds (modules, constants) is fresh for each
    run.
    """
    fn = stack(*names)(make(remat))
    return outcome(lambda: fn(*inputs()))


@pytest.mark.parametrize(("function", "names"), CELLS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_same_as_without_remat(function, names):
    make = FUNCTIONS[function]
    actual = run(make, names, remat)
    legacy = any("batched" in name or "vectorized" in name for name in names)
    if legacy and "aten::_neg_view" in str(actual.error):
        # The vmap of `is_grads_batched` has a rule for it where functorch, which remat uses, has none.
        assert function == "conjugate_and_negative_views"
        return
    expected = run(make, names, no_remat)
    if names[0] == "jacobian_vectorized":  # the first derivative of a linear function may require grad
        actual.value, expected.value = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.detach, (actual.value, expected.value)
        )
    assert_same_outcome(actual, expected)


@pytest.mark.exhaustive
def test_the_matrix_is_not_made_of_errors():
    """The cells compare errors too; this says how many compare values."""
    sample = share(SINGLE, 3)
    ran = {(f, s) for f, s in sample if run(FUNCTIONS[f], s, no_remat).error is None}
    assert len(ran) > 0.8 * len(sample)
    never = {("backward_after_free",), ("autograd_grad",)}
    assert {s for _, s in ran} == {s for _, s in sample} - never, "a transform that never runs"
    assert {f for f, _ in ran} == set(FUNCTIONS), "a function that never runs"
