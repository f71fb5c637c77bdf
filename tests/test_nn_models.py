"""`apply_remat` on models of others, as they are."""

import copy

import pytest
import torch
from models import BLOCKS, SAMPLES, adapt, densenet, gpt2, trained, vision_transformer
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import EscapeError
from funcckpt.meter import measure
from funcckpt.nn import Remat, apply_remat

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    # peft calls transformers by names of before.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def built(build, **sizes):
    torch.manual_seed(0)
    model, make = build(**sizes)
    return model.train().double(), make


def per_sample(model, make):
    """Per-sample gradients of what is trained, the state of the random stream after them, and the bytes."""
    parameters = {k: p.detach() for k, p in trained(model).items()}
    loss, batch = make(model, parameters, dict(model.named_buffers()))
    torch.manual_seed(2)
    measured = measure(vmap(grad(loss), (None, 0), randomness="different"), parameters, batch)
    return measured.result, torch.rand(3), measured


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_per_sample_gradients(build):
    plain, make = built(build)
    wrapped = apply_remat(copy.deepcopy(plain), BLOCKS[build])
    expected, plain_after, without = per_sample(plain, make)
    actual, after, measured = per_sample(wrapped, make)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12)
    assert torch.equal(after, plain_after)
    assert measured.peak_bytes < 0.8 * without.peak_bytes


@pytest.mark.parametrize("build", [b for b in BLOCKS if b is not densenet], ids=lambda f: f.__name__)
def test_a_block_keeps_its_input(build):
    """What two blocks more keep for the backward is their inputs, to the byte."""
    kept, inputs = [], []
    for depth in (2, 4):
        model, make = built(build, depth=depth)
        apply_remat(model, BLOCKS[build])
        kept.append(per_sample(model, make)[2].marks["saved"])
        blocks = [m for m in model.modules() if isinstance(m, Remat)]
        sizes = []
        for block in blocks:
            block.register_forward_pre_hook(lambda _, args, into=sizes: into.append(args[0].numel() * 8))
        per_sample(model, make)
        inputs.append(SAMPLES * sum(sizes))
    assert kept[1] - kept[0] == inputs[1] - inputs[0] > 0


def test_a_cache_is_named():
    model, make = built(gpt2, use_cache=True)
    apply_remat(model, BLOCKS[gpt2])
    with pytest.raises(EscapeError, match=r"GPT2Block.*attribute 'keys'.*use_cache=False"):
        per_sample(model, make)


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_plain_backward(build):
    results = []
    plain, make = built(build)
    for model in (apply_remat(copy.deepcopy(plain), BLOCKS[build]), plain):
        parameters = trained(model)
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
