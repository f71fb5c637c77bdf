"""Each module of torch's own database of modules, called in eleven ways, several times in one process.

The database (`torch.testing._internal.common_modules.module_db`) brings sample inputs for every `nn.Module`
of torch. The reference is the same program without remat, on a copy of the module. What torch refuses without
remat is seen by running it.
"""

import copy
import zlib

import pytest
import torch
from oracles import differentiable, total, weight
from support import assert_same_outcome, no_remat, outcome
from torch.func import functional_call, grad, jvp, vmap
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import funcckpt
from funcckpt import policies
from funcckpt.nn import Remat

CALLS = 2


def loss(out):
    value = total(out)
    return torch.zeros(()) if value is None else value


def state(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def split(module):
    """Detached copies of the parameters; and of the buffers."""
    return [
        {name: x.detach().clone() for name, x in named}
        for named in (module.named_parameters(), module.named_buffers())
    ]


def zeros_for_none(gradients, inputs):
    return [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(gradients, inputs)]


class Case:
    """A module and its inputs; `with_remat` says whether it is recomputed."""

    def __init__(self, module, args, kwargs, with_remat):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.with_remat = with_remat
        self.remat = funcckpt.remat if with_remat else no_remat

    def inputs(self):
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def replaced(self, inputs):
        """The arguments around other tensors."""
        remaining = iter(inputs)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), (self.args, self.kwargs))

    def leaves(self):
        return [
            x.detach().clone().requires_grad_(differentiable(x) and x.requires_grad) for x in self.inputs()
        ]

    def stateless(self, p, inputs):
        """`functional_call` of the module, of all tensors."""
        args, kwargs = self.replaced(inputs)
        return functional_call(self.module, p, args, kwargs)


def _backward(case, f, create_graph=False):
    leaves = case.leaves()
    args, kwargs = case.replaced(leaves)
    out = f(*args, **kwargs)
    wrt = [x for x in (*case.module.parameters(), *leaves) if x.requires_grad]
    if not (value := loss(out)).requires_grad:
        return out
    first = torch.autograd.grad(value, wrt, allow_unused=True, create_graph=create_graph)
    if not create_graph:
        return out, first
    # A derivative that is None and one that is zero are the same where a gradient is differentiated.
    value = loss([g for g in first if g is not None])
    second = torch.autograd.grad(value, wrt, allow_unused=True) if value.requires_grad else [None] * len(wrt)
    return out, zeros_for_none(first, wrt), zeros_for_none(second, wrt)


def by_remat(case):
    return _backward(case, case.remat(case.module))


def by_checkpoint(case):
    if not case.with_remat:
        return _backward(case, case.module)
    return _backward(case, lambda *args, **kwargs: funcckpt.checkpoint(case.module, *args, **kwargs))


def by_nn_remat(case):
    return _backward(case, Remat(case.module) if case.with_remat else case.module)


def by_double_backward(case):
    return _backward(case, case.remat(case.module), create_graph=True)


def by_policy(case):
    inner = case.remat(case.module, policy=policies.dots_saveable)
    return _backward(case, case.remat(lambda *args, **kwargs: inner(*args, **kwargs)), create_graph=True)


def _functional(case, f):
    def run(p, buffers, *inputs):
        out = f({**p, **buffers}, inputs)
        return loss(out), (out, buffers)

    return run


def by_grad(case):
    p, buffers = split(case.module)
    inputs = [x.detach() for x in case.inputs()]
    f = _functional(case, case.remat(case.stateless))
    return grad(f, has_aux=True)(p, buffers, *inputs)


def by_vmap_grad(case):
    stacked = pytree.tree_map(lambda x: torch.stack([x, x]), [*split(case.module)])
    inputs = [torch.stack([x.detach(), x.detach()]) for x in case.inputs()]
    f = _functional(case, case.remat(case.stateless))
    return vmap(grad(f, has_aux=True), randomness="different")(*stacked, *inputs)


def by_nn_remat_under_grad(case):
    p, buffers = split(case.module)
    inputs = [x.detach() for x in case.inputs()]
    if case.with_remat:
        Remat(case.module)
    return grad(_functional(case, case.stateless), has_aux=True)(p, buffers, *inputs)


def by_grad_of_captured(case):
    """The module's own parameters are captured, require grad, and are replaced."""
    p, _ = split(case.module)
    inputs = [x.detach() for x in case.inputs()]
    f = case.remat(lambda p: case.stateless(p, inputs))
    return grad(lambda p: loss(f(p)))(p)


def by_policy_under_grad(case):
    p, buffers = split(case.module)
    inputs = [x.detach() for x in case.inputs()]
    inner = case.remat(case.stateless, policy=policies.dots_saveable)
    f = _functional(case, case.remat(lambda p, inputs: inner(p, inputs)))
    return grad(f, has_aux=True)(p, buffers, *inputs)


def by_jvp(case):
    p, buffers = split(case.module)
    inputs = [x.detach() for x in case.inputs()]
    f = case.remat(case.stateless)
    tangents = {name: weight(x) for name, x in p.items()}
    return jvp(lambda p: f({**p, **buffers}, inputs), (p,), (tangents,))


WAYS = {name[3:]: way for name, way in list(globals().items()) if name.startswith("by_")}


def complaints(info, training, ways, which=(0, -1)):
    """What is wrong with some of the samples, by some ways of calling a module."""
    torch.manual_seed(1)
    dtype = torch.float64 if torch.float64 in info.dtypes else torch.float32
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in {id(samples[i]): samples[i] for i in which}.values():
        made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        made = made.to(dtype).train(training)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        for name in ways:
            plain, recomputed = [
                Case(copy.deepcopy(made), args, kwargs, with_remat) for with_remat in (False, True)
            ]
            for call in range(CALLS):
                expected = outcome(lambda: WAYS[name](plain), call)  # noqa: B023
                actual = outcome(lambda: WAYS[name](recomputed), call)  # noqa: B023
                if expected.error is not None and actual.error is not None:
                    break  # the messages need not be the same
                expected.value = expected.value, state(plain.module)
                actual.value = actual.value, state(recomputed.module)
                try:
                    assert_same_outcome(actual, expected)
                except Exception as error:
                    yield f"{name}, call {call}: {type(error).__name__}: {str(error)[:500]}"
                    break


ALL = [*WAYS]
# Of eleven these five: with others for first, each two come together for two elevenths of the cases.
SOME = 0, 2, 3, 4, 8
each_module = pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# Of modules about their own options.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@each_mode
@each_module
def test_module(info, training):
    first = zlib.crc32(info.name.encode()) + training
    ways = [ALL[(first + i) % 11] for i in SOME]
    assert not list(complaints(info, training, ways, which=[-training]))


@pytest.mark.exhaustive
@each_mode
@each_module
def test_module_in_all_ways(info, training):
    assert not list(complaints(info, training, ALL))
