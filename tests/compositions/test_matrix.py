"""Every function crossed with every transform, and with stacks of them up to four deep.

Each cell compares remat with the same thing without it: values, structure, the random stream
afterwards, and, where plain torch refuses, the error.
"""

import itertools
import os

import pytest
import torch
from support import assert_same_outcome, no_remat, outcome
from torch.utils import _pytree as pytree

from funcckpt import CheckpointError, remat

from .functions import FUNCTIONS, RANDOM
from .stacks import INNER, OUTER, stack

# Stacks that people write, and those that broke earlier attempts. Outermost first.
MIXES = [
    ("vmap_x", "grad_both"),  # per-sample gradients
    ("vmap_chunk", "value_and_grad"),
    ("vmap_dims", "grad_aux"),
    ("vmap_different", "grad_both"),
    ("vmap_same", "grad_both"),
    ("grad_both", "vmap_x"),
    ("grad_both", "vmap_different"),
    ("grad_both", "vmap_same_unbatched"),
    ("grad_both", "vmap_different_unbatched"),
    ("vmap_different", "jacrev_x"),
    ("vmap_same", "jvp_both"),
    ("vmap_x", "hessian_x"),
    ("vmap_w", "jacfwd_x"),
    ("hessian_x", "vmap_w"),
    ("jacrev_x", "jacrev_x"),
    ("jacfwd_x", "jacfwd_x"),
    ("jacrev_x", "jacfwd_same"),
    ("jacfwd_same", "jacrev_x"),
    ("jvp_x", "grad_both"),
    ("grad_both", "jvp_both"),
    ("jvp_both", "jvp_x"),
    ("vjp_pull", "vjp_pull"),
    ("vjp_vmap", "vjp_twice"),
    ("autograd_grad", "grad_x"),
    ("grad_both", "autograd_grad"),
    ("vmap_x", "grad_x", "autograd_grad"),
    ("linearize_x", "grad_x"),
    ("functionalized", "grad_both"),
    ("functionalized", "vmap_x", "grad_both"),
    ("vmap_x", "functionalized"),
    ("grad_x", "functionalized_views"),
    ("jvp_x", "functionalized"),
    ("jvp_both", "vmap_x", "grad_both"),
    ("grad_both", "vmap_x", "grad_x"),
    ("vmap_x", "vmap_w", "grad_both"),
    ("vmap_w", "jacrev_x", "vmap_x", "grad_x"),
    ("grad_x", "grad_x", "grad_both"),
    ("jacrev_x", "vmap_x", "jvp_x", "grad_x"),
    ("vmap_different", "jvp_x", "vmap_same", "grad_both"),
    ("grad_both", "vmap_x", "jvp_both", "vmap_w"),
    ("vmap_x", "vjp_pull", "jvp_x", "vjp_twice"),
    ("backward", "autograd_grad"),
    ("double_backward", "autograd_grad"),
    ("backward", "grad_both"),
    ("backward", "vmap_x"),
    ("backward", "vmap_different"),
    ("backward", "vmap_x", "grad_both"),
    ("backward", "jvp_both"),
    ("backward", "jacrev_x"),
    ("backward", "hessian_x"),
    ("double_backward", "vmap_x"),
    ("double_backward", "vmap_w", "grad_x"),
    ("grads_batched", "vmap_x"),
    ("grads_batched", "grad_both"),
    ("dual", "vmap_x"),
    ("dual", "grad_both"),
    ("dual_both", "vmap_x", "grad_both"),
    ("dual", "jvp_x"),
    ("jacobian_vectorized", "vmap_x"),
    ("traced", "grad_both"),
    ("traced", "vmap_x", "grad_both"),
    ("traced", "jvp_both"),
    ("traced", "hessian_x"),
    ("traced_then_differentiated", "grad_both"),
    ("traced_functionalized", "vmap_x", "grad_both"),
    ("traced_symbolically", "grad_both"),
]

SINGLE = [(name,) for name in (*INNER, *OUTER)]

# All pairs, triples and quadruples of what makes a level of its own, for functions that hold the
# hard parts.
LEVELS = (
    "grad_both",
    "vjp_pull",
    "jvp_both",
    "vmap_x",
    "vmap_w",
    "jacrev_x",
    "jacfwd_same",
    "autograd_grad",
)
PAIRS = list(itertools.product((*LEVELS, *OUTER), LEVELS))
TRIPLES = list(itertools.product(("grad_x", "jvp_x", "vmap_x"), repeat=3))
QUADRUPLES = list(itertools.product(("grad_x", "jvp_x", "vmap_x"), repeat=4))
QUADRUPLES += itertools.permutations(("grad_both", "jvp_both", "vmap_same", "jacrev_x"))
QUADRUPLES += itertools.permutations(("vjp_pull", "jacfwd_same", "vmap_different", "grad_x"))

# Tracers that take a tenth of a second for each cell: like the mixes, they meet a part of the
# functions, another part for each stack. `FUNCCKPT_MATRIX=full` crosses everything with everything
# (an hour instead of two minutes).
SLOW = [("linearize_x",), ("traced_symbolically",)]
SLOW_MIXES = [
    ("traced", "hessian_x"),
    ("linearize_x", "grad_x"),
    ("traced_symbolically", "grad_both"),
]
FULL = os.environ.get("FUNCCKPT_MATRIX") == "full"


def share(stacks, step, functions=tuple(FUNCTIONS)):
    """Each stack with every `step`-th function, and each function with every `step`-th stack."""
    step = 1 if FULL else step
    every = itertools.product(enumerate(stacks), enumerate(functions))
    return [(f, s) for (i, s), (j, f) in every if (i + j) % step == 0]


CELLS = share([s for s in SINGLE if s not in SLOW], 1) + share(SLOW, 4)
CELLS += share([s for s in MIXES if s not in SLOW_MIXES], 3) + share(SLOW_MIXES, 16)
CELLS += share(PAIRS, 3, ("trees", "closure_over_everything", "noise"))
CELLS += [(f, s) for f in ("nested_three_deep_with_closures", "noise_in_nested_remat") for s in TRIPLES]
CELLS += [(f, s) for f in ("closure_over_everything", "nested") for s in QUADRUPLES]
CELLS = list(dict.fromkeys(CELLS))

# Here torch 2.13 itself is wrong, so that there is nothing to compare with. The tangent of softmax
# and logsumexp changes a saved tensor in place, so that the backward after it raises. group_norm's
# second derivatives under the vmap of plain autograd (is_grads_batched) differ from those taken
# one by one.
TORCH_IS_WRONG = {
    ("group_norm", ("hessian_vectorized",)),
    ("group_norm", ("jacobian_vectorized",)),
    # Not wrong, only of another mind whether a result without create_graph requires grad.
    ("numbers_promoted", ("jacobian_vectorized",)),
    ("numbers_promoted", ("jacobian_vectorized", "vmap_x")),
    ("group_norm", ("hessian_forward_over_reverse",)),
    ("group_norm", ("grads_batched", "grad_both")),
    ("group_norm", ("grads_batched_then_backward",)),
    ("group_norm", ("traced_then_differentiated", "grad_both")),
    ("softmax_layer_norm_logsumexp", ("backward_over_dual",)),
    ("attention", ("backward_over_dual",)),
}
CELLS = [cell for cell in CELLS if cell not in TORCH_IS_WRONG]


def inputs():
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(3, generator=generator, dtype=torch.float64) + 0.2
    w = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    return x, w


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
    if "inference_mode" in names and isinstance(actual.error, CheckpointError):
        # torch 2.11 differentiates nothing there and gives zeros (pytorch#177318): remat refuses.
        outside = run(make, [name for name in names if name != "inference_mode"], no_remat)
        with pytest.raises(AssertionError):
            assert_same_outcome(expected, outside)
        return
    if function.startswith("module_") and names[0].startswith(("traced", "linearize")):
        # The module's own parameters are constants of what remat has recorded (see docs/compile.md).
        actual.value, expected.value = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.detach, (actual.value, expected.value)
        )
    assert_same_outcome(actual, expected)


@pytest.mark.exhaustive
def test_the_matrix_is_not_made_of_errors():
    """The cells compare errors too; this says how many compare values, so that a typo cannot hollow
    them out.
    """
    sample = share([s for s in SINGLE if s not in SLOW], 3)
    ran = {(f, s) for f, s in sample if run(FUNCTIONS[f], s, no_remat).error is None}
    assert len(ran) > 0.8 * len(sample)
    never = {("backward_after_free",), ("autograd_grad",)}
    assert {s for _, s in ran} == {s for _, s in sample} - never, "a transform that never runs"
    assert {f for f, _ in ran} == set(FUNCTIONS), "a function that never runs"
    for f in RANDOM:
        assert run(FUNCTIONS[f], ("vmap_different",), no_remat).error is None
