"""Each module of torch's own database of modules, called in ten ways, twice in one process.

The database brings sample inputs for every `nn.Module` of torch. The reference is the same program without
remat, on a copy of the module. What torch refuses without remat is seen by running it.
"""

import copy
import functools
import zlib

import pytest
import torch
from oracles import differentiable, moving, of_one, tensor
from support import assert_same_outcome, no_remat, outcome
from torch.func import functional_call
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from funcckpt import checkpoint, policies, remat
from funcckpt.nn import Remat


def with_policy(f):
    inner = remat(f, policy=policies.dots_saveable)
    return remat(lambda *args, **kwargs: inner(*args, **kwargs))


def own(module, wrap):
    """With its own parameters, which require grad."""
    return wrap(module)


def of(module, args, kwargs):
    """Its parameters, which move with one of its inputs; and buffers at the level of this input."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if differentiable(x)]
    zero = sum([x.detach().sum() * 0 for x in leaves], torch.zeros(()))
    zero = zero.real if zero.is_complex() else zero
    some = sum([x.sum() * 0.01 for x in leaves if x.is_floating_point()], torch.zeros(()))
    p = {name: x.detach() * (1 + some.tanh() * 0.1).to(x.dtype) for name, x in module.named_parameters()}
    return p, {name: x.clone() + zero.to(x.dtype) for name, x in module.named_buffers()}


def stateless(module, wrap):
    f = wrap(lambda p, buffers, args, kwargs: functional_call(module, {**p, **buffers}, args, kwargs))

    def run(*args, **kwargs):
        p, buffers = of(module, args, kwargs)
        return f(p, buffers, args, kwargs), p, buffers

    return run


def captured(module, wrap):
    def run(*args, **kwargs):
        p, _ = of(module, args, kwargs)
        return wrap(lambda: functional_call(module, p, args, kwargs))()

    return run


WAYS = [
    (own, remat, "backward"),
    (own, lambda f: functools.partial(checkpoint, f), "backward"),
    (own, Remat, "backward"),
    (own, remat, "double_backward"),
    (own, with_policy, "double_backward"),
    (stateless, remat, "grad_x"),
    (stateless, remat, "vmap_different grad_x"),
    (captured, remat, "grad_x"),
    (stateless, with_policy, "grad_x"),
    (stateless, remat, "jvp_x"),
]


def complaints(info, training, ways, which=(0, -1)):
    """What is wrong with some of the samples, by some ways of calling a module."""
    torch.manual_seed(1)
    dtype = torch.float64 if torch.float64 in info.dtypes else torch.float32
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in {id(samples[i]): samples[i] for i in which}.values():
        made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        made = made.to(dtype).train(training)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        for way, wrap, names in ways:

            def run(module, wrap, call):
                f = moving(way(module, wrap), args, kwargs)  # noqa: B023
                found = outcome(lambda: of_one(*names.split())(f, tensor(3)), call)  # noqa: B023
                if found.error is None:
                    state = [(x.detach(), x.grad) for x in module.parameters()], [*module.buffers()]
                    found.value = found.value, f.rest, state
                return found

            plain, recomputed = copy.deepcopy(made), copy.deepcopy(made)
            for call in range(2):
                expected, actual = run(plain, no_remat, call), run(recomputed, wrap, call)
                if expected.error is not None and actual.error is not None:
                    break  # the messages need not be the same
                try:
                    assert_same_outcome(actual, expected)
                except Exception as error:
                    yield f"{way.__name__}, {names}, call {call}: {type(error).__name__}: {str(error)[:500]}"
                    break


each_module = pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# Of modules about their own options.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@each_mode
@each_module
def test_module(info, training):
    """Five ways of ten: with others for first."""
    first = zlib.crc32(info.name.encode()) + training
    ways = [WAYS[(first + i) % 10] for i in (0, 2, 3, 4, 8)]
    assert not list(complaints(info, training, ways, which=[-training]))


@pytest.mark.exhaustive
@each_mode
@each_module
def test_module_in_all_ways(info, training):
    assert not list(complaints(info, training, WAYS))
