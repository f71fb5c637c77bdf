"""Python frames of ours in one warm call, forward and backward: what a call costs beside its operators."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import funcckpt
from funcckpt import remat
from funcckpt.nn import Remat

OURS = str(Path(funcckpt.__file__).parent)
X = torch.randn(5, 4)


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def per_sample(f, module):
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return lambda: vmap(grad(lambda p, x: f(p, x).sum()), (None, 0))(parameters, X)


def block_backward():
    p = {"w": torch.randn(4, 4, requires_grad=True), "b": torch.randn(4, requires_grad=True)}
    f = remat(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    return lambda: f(p, X).sum().backward()


def block_per_sample():
    f = remat(lambda p, x: torch.tanh(x @ p["weight"] + p["bias"]))
    return per_sample(f, nn.Linear(4, 4))


def module_backward():
    f = remat(layers())
    return lambda: f(X).sum().backward()


def checkpoint_backward():
    net, x = layers(), torch.randn(2, 4, requires_grad=True)
    return lambda: funcckpt.checkpoint(net, x).sum().backward()


def functional_call_inside():
    net = layers()
    return per_sample(lambda p, x: remat(lambda p, x: functional_call(net, p, (x,)))(p, x), net)


def four_blocks():
    net = nn.Sequential(*[Remat(layers()) for _ in range(4)])
    return per_sample(lambda p, x: functional_call(net, p, (x,)), net)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (block_backward, 228),
        (block_per_sample, 326),
        (module_backward, 309),
        (checkpoint_backward, 100),
        (functional_call_inside, 433),
        (four_blocks, 2390),
    ],
)
def test_frames(make, most):
    """No more than they are. Comprehensions are frames before Python 3.12."""
    call, frames = make(), []

    def count(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            frames.append(frame.f_code.co_name)

    for _ in range(4):
        frames.clear()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert len(frames) <= most, len(frames)
