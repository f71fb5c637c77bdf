"""remat(op) against op, for every operator that torch itself tests: values, derivatives, random streams.

The plain function runs first. What plain torch passes, the wrapped function has to pass with the same outputs,
the same derivatives and the same state of the random stream afterwards; what plain torch refuses, it has to
refuse. In five minutes the first sample of each in float64, under two transforms. In the run that is exhaustive
all samples in float64 and two in complex128, under all of them.
"""

import itertools
import random
import warnings
import zlib

import pytest
import torch
from oracles import differentiable, moving, of_one, tensor
from support import no_remat, outcome
from torch.utils import _pytree as pytree

from funcckpt import MutationError, remat

pytestmark = pytest.mark.filterwarnings("ignore")  # some operators are deprecated

LARGE = 100_000  # elements
moves = lambda leaf: differentiable(leaf) and leaf.requires_grad
# What remat does although plain torch refuses it: recomputed without create_graph, where the derivative needs
# no .item().
MORE_THAN_TORCH = {"index_reduce.prod", "scatter_reduce.prod"}
# The recomputation of a batch has no level of `grad` inside, and there torch's derivative asks tensors of vmap
# whether they are channels_last, which torch has not implemented.
NOT_IMPLEMENTED = {
    ("nn.functional.max_unpool2d", "vmap_different grad_x"),
    ("nn.functional.max_unpool2d.grad", "vmap_different grad_x"),
}
TRANSFORMS = (
    "backward | double_backward | grad_x grad_x | vjp_vmap | vmap_different grad_x | jvp_x | jvp_x grad_x"
).split(" | ")


def load():
    """The operators that have a derivative in float64 on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    # Importing torch's test helpers freezes torch.backends.*.flags for the whole process, and Opacus sets one.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    # Samples seed random operators by this, which would hide each error of the random stream.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return [
        op
        for op in invocations.op_db
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")
    ]


def size(sample):
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def samples(op, dtype, limit):
    random.seed(1234)
    torch.manual_seed(1234)
    made = op.sample_inputs("cpu", dtype, requires_grad=True)
    return [*itertools.islice((sample for sample in made if size(sample) < LARGE), limit)]


def body(op, sample):
    """Some samples name a part of the output that has a derivative at all (the product of eigenvectors with
    their adjoint, say). With a boundary between the two, neither side alone would have a second derivative.
    """
    finish = sample.output_process_fn_grad
    if finish.__qualname__.startswith("SampleInput."):
        return op.op
    return lambda *args, **kwargs: finish(op.op(*args, **kwargs))


def arguments(sample):
    """args, kwargs, and the tensors that do not move. These are copies, which the operator may change."""
    leaves, tree = pytree.tree_flatten((sample.input, *sample.args, sample.kwargs))
    leaves = [x.clone() if isinstance(x, torch.Tensor) and not moves(x) else x for x in leaves]
    # The weights of cov are of float32 in all samples: what is summed up would be rounded.
    leaves = [x.double() if moves(x) and x.dtype == torch.float32 else x for x in leaves]
    *args, kwargs = pytree.tree_unflatten(leaves, tree)
    return args, kwargs, [x for x in leaves if isinstance(x, torch.Tensor) and not moves(x)]


def changes_its_input(op, sample):
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), arguments(sample)[:2])
    body(op, sample)(*args, **kwargs)
    given = zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(arguments(sample)[:2]))
    return any(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in given)


def run(op, sample, wrap, names):
    args, kwargs, others = arguments(sample)
    function = moving(wrap(body(op, sample)), args, kwargs, moves)
    found = outcome(lambda: of_one(*names.split())(function, tensor(3, seed=9)))
    while wrap is no_remat and torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()  # torch's own error has left it
    found.value = found.value, others
    return found, function.rest


def complaints(op, wrap, dtype, limit, transforms=TRANSFORMS):
    if dtype not in op.supported_backward_dtypes("cpu"):
        return
    for sample, names in itertools.product(samples(op, dtype, limit), transforms):
        (expected, structure), (actual, again) = [run(op, sample, each, names) for each in (no_remat, wrap)]
        what = None
        if expected.error is not None:
            if actual.error is None and op.full_name not in MORE_THAN_TORCH:
                what = f"plain torch raises, remat does not: {expected.error}"
        elif actual.error is not None:
            if not (isinstance(actual.error, MutationError) and changes_its_input(op, sample)):
                what = actual.error
        elif structure != again or not torch.equal(actual.rng, expected.rng):
            what = "another structure, or the random stream ends in another state"
        else:
            try:
                torch.testing.assert_close(actual.value, expected.value, equal_nan=True)
            except AssertionError as error:
                what = error
        if what is not None and (op.full_name, names) not in NOT_IMPLEMENTED:
            yield f"{op.full_name}, {dtype}, {names}: {what!r:.300}"


OPERATORS = pytest.mark.parametrize("op", [pytest.param(op, id=op.full_name) for op in load()])


@OPERATORS
def test_the_first_sample_of_an_operator(op):
    first = zlib.crc32(op.full_name.encode())
    # Each of the seven for two sevenths of the operators.
    few = [TRANSFORMS[(first + i) % 7] for i in (0, 3)]
    assert not list(complaints(op, remat, torch.float64, 1, few))


@pytest.mark.exhaustive
@OPERATORS
def test_remat_of_an_operator_is_the_operator(op):
    for dtype, limit in ((torch.float64, None), (torch.complex128, 2)):
        assert not list(complaints(op, remat, dtype, limit))


def test_the_harness_finds_what_it_should():
    """A remat with one flaw each: its values, its derivative, its random stream."""
    by_name = {op.full_name: op for op in load()}
    found = lambda name, flawed: len([*complaints(by_name[name], flawed, torch.float64, 1)])
    assert found("sin", lambda f: f) == 0
    assert found("sin", lambda f: lambda x: f(x * 1.001)) == 7
    assert found("sin", lambda f: lambda x: f(x.detach())) == 7
    twice = lambda f: lambda *a, **k: (f(*a, **k), f(*a, **k))[0]
    assert list(complaints(by_name["nn.functional.dropout"], twice, torch.float64, 4))
