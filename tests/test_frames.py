"""Python frames of ours in one warm call, forward and backward: what a call costs beside its operators."""

import sys
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import funcckpt
from funcckpt import remat
from funcckpt.nn import Remat, apply_remat

OURS = str(Path(funcckpt.__file__).parent)
X = torch.randn(5, 4)
IN_EAGER = 68 if torch.__version__ >= "2.13" else 71  # torch 2.11 has no saved variables in Python
IN_EAGER += 3 * torch.accelerator.is_available()  # which has a random stream, too
layers = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def per_sample(f, module):
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return lambda: vmap(grad(lambda p, x: f(p, x).sum()), (None, 0))(parameters, X)


def block_per_sample():
    return per_sample(remat(lambda p, x: torch.tanh(x @ p["weight"] + p["bias"])), nn.Linear(4, 4))


def checkpoint_backward():
    net, x = layers(), torch.randn(2, 4, requires_grad=True)
    return lambda: funcckpt.checkpoint(net, x).sum().backward()


def four_blocks():
    net = nn.Sequential(*[Remat(layers()) for _ in range(4)])
    return per_sample(lambda p, x: functional_call(net, p, (x,)), net)


@pytest.mark.parametrize(
    ("make", "most"), [(block_per_sample, 148), (checkpoint_backward, IN_EAGER), (four_blocks, 864)]
)
def test_frames(make, most):
    """No more than they are. Comprehensions are frames before Python 3.12."""
    assert (count := frames_of(make())) <= most, count


def test_frames_of_gpt2():
    """For each block of transformers' model, around which are some 900 objects."""
    model, _ = models.gpt2(6)
    apply_remat(model.eval(), models.BLOCKS[models.gpt2])
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(0, 61, (3, 8))

    loss = lambda p, x: functional_call(model, p, (x[None],)).logits.pow(2).mean()
    count = frames_of(lambda: vmap(grad(loss), (None, 0))(parameters, tokens))
    assert count <= 6 * 500, count


def frames_of(call):
    frames = []

    def count(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            frames.append(frame.f_code.co_name)

    counts = []
    for _ in range(4):
        frames.clear()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
        counts.append(len(frames))
    return min(counts[1:])  # in the others the collector may have called something of ours
