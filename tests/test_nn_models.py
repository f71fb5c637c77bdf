"""`apply_remat` on models of others, as they are. Random weights, built offline; needs the extra `models`."""

import copy

import pytest
import torch
from eager.test_models import SAMPLES, gpt2, llama, mixer, torchvision_without_operators, vision_transformer  # noqa: F401
from support import Storages
from torch import nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt.nn import Remat, apply_remat

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
BLOCKS = {gpt2: "transformer.h.*", llama: "model.layers.*", vision_transformer: "blocks.*", mixer: "blocks.*"}


def wrapped_and_plain(build):
    torch.manual_seed(0)
    plain, make = build()
    plain.train().double()
    return apply_remat(copy.deepcopy(plain), BLOCKS[build]), plain, make


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_per_sample_gradients(build):
    *models, make = wrapped_and_plain(build)
    assert sum(isinstance(m, Remat) for m in models[0].modules()) == 4
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


class Adapted(nn.Module):
    """A linear layer and an update of low rank (LoRA)."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


class Shapes(TorchDispatchMode):
    """Of all tensors that are made, below functorch."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def test_frozen_parameters_cost_nothing():
    """Per-sample gradients of the adapters alone: no gradient of a frozen parameter is ever made."""
    torch.manual_seed(0)
    plain, make = vision_transformer()
    for block in plain.blocks:
        block.attn.qkv = Adapted(block.attn.qkv)
    plain.double()
    wrapped = apply_remat(copy.deepcopy(plain), "blocks.*")
    weight = plain.blocks[0].mlp.fc1.weight.shape
    of_weight = {(SAMPLES, *weight), (SAMPLES, *weight[::-1])}

    def run(model, trained):
        model.requires_grad_(False)
        parameters = {k: p for k, p in model.named_parameters() if trained(k)}
        loss, batch = make(model, parameters, dict(model.named_buffers()))
        torch.manual_seed(2)
        with Shapes() as shapes:
            return vmap(grad(loss), (None, 0), randomness="different")(parameters, batch), shapes.seen

    def adapters(name):
        return ".up." in name or ".down." in name

    gradients, seen = run(wrapped, adapters)
    assert not of_weight & seen
    assert of_weight & run(wrapped, lambda name: True)[1]  # what it would look like
    for name, expected in run(plain, adapters)[0].items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-12)
