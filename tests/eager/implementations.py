"""The checkpoints that one test is run with: torch's own, and ours."""

import pytest
import torch.utils.checkpoint

import funcckpt


def theirs(f, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(f, *args, **{"use_reentrant": False, **kwargs})


both = pytest.mark.parametrize("checkpoint", [theirs, funcckpt.checkpoint], ids=["torch", "ours"])


def gradients(f, *xs, checkpoint=None, **options):
    """f(*xs).sum().backward(), plain or with a checkpoint; the value and the gradients of fresh leaves."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    y = f(*leaves) if checkpoint is None else checkpoint(f, *leaves, **options)
    y.sum().backward()
    return [y.detach(), *[x.grad for x in leaves]]
