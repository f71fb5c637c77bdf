"""`apply_remat` on models of others, as they are."""

import copy

import pytest
import torch
from models import BLOCKS, SAMPLES, adapt, densenet, trained, vision_transformer
from support import Storages
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt.nn import Remat, apply_remat

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")


def wrapped_and_plain(build):
    torch.manual_seed(0)
    plain, make = build()
    plain.train().double()
    return apply_remat(copy.deepcopy(plain), BLOCKS[build]), plain, make


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_per_sample_gradients(build):
    *models, make = wrapped_and_plain(build)
    assert sum(isinstance(m, Remat) for m in models[0].modules()) == (8 if build is densenet else 4)
    results = []
    for model in models:
        parameters = {k: p.detach() for k, p in model.named_parameters()}
        loss, batch = make(model, parameters, dict(model.named_buffers()))
        torch.manual_seed(2)
        with Storages().known(parameters, dict(model.named_buffers()), batch) as storages:
            gradients = vmap(grad(loss), (None, 0), randomness="different")(parameters, batch)
        results.append((gradients, torch.rand(3), storages.peak))
    (actual, after, peak), (expected, plain_after, plain_peak) = results
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12)
    assert torch.equal(after, plain_after)
    assert peak < 0.8 * plain_peak


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_plain_backward(build):
    results = []
    *models, make = wrapped_and_plain(build)
    for model in models:
        parameters = dict(model.named_parameters())
        loss, batch = make(model, parameters, dict(model.named_buffers()))
        torch.manual_seed(2)
        results.append(torch.autograd.grad(loss(parameters, batch[0]), list(parameters.values())))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


class Shapes(TorchDispatchMode):
    """Of all tensors that are made, below functorch."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def test_no_gradient_of_a_frozen_parameter_is_made():
    """Per-sample gradients of adapters in a frozen model."""
    torch.manual_seed(0)
    plain, make = vision_transformer()
    adapt(plain).double()
    wrapped = apply_remat(copy.deepcopy(plain), "blocks.*")
    weight = plain.blocks[0].mlp.fc1.weight.shape
    of_weight = {(SAMPLES, *weight), (SAMPLES, *weight[::-1])}

    def run(model, parameters):
        loss, batch = make(model, parameters, dict(model.named_buffers()))
        torch.manual_seed(2)
        with Shapes() as shapes:
            return vmap(grad(loss), (None, 0), randomness="different")(parameters, batch), shapes.seen

    gradients, seen = run(wrapped, trained(wrapped))
    assert not of_weight & seen
    assert of_weight & run(wrapped, dict(wrapped.named_parameters()))[1]  # what it would look like
    for name, expected in run(plain, trained(plain))[0].items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-12)
