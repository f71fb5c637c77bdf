"""How much memory does torch.func.grad take beside torch.autograd.grad, and what is left of it with remat?

    python tests/benchmarks/functorch_grad.py

The function is that of https://github.com/pytorch/pytorch/issues/134612: ten times cos(sin(x)) of 1024 x 1024
numbers (4 MiB). torch.func.grad always makes the graph of the backward, which keeps what the backward reads
until it is over.
"""

import torch
from common import Methods, main, none, of_torch, torch_checkpoint
from torch.func import grad

from funcckpt import remat

STEPS = 10


def step(x):
    return x.sin().cos()


def sum_of_steps(wrap):
    def h(x):
        for _ in range(STEPS):
            x = wrap(step)(x)
        return x.sum()

    return h


def in_plain_eager(f):
    def run(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return run


def ten_steps(toy: bool) -> Methods:
    side = 64 if toy else 1024
    x = torch.rand(side, side, generator=torch.Generator().manual_seed(0))
    return {
        "torch.autograd.grad": lambda: of_torch(in_plain_eager(sum_of_steps(none)), x),
        "torch.func.grad": lambda: of_torch(grad(sum_of_steps(none)), x),
        "torch.autograd.grad, torch.utils.checkpoint": lambda: of_torch(
            in_plain_eager(sum_of_steps(torch_checkpoint)), x
        ),
        "torch.func.grad, torch.utils.checkpoint": lambda: of_torch(grad(sum_of_steps(torch_checkpoint)), x),
        "torch.func.grad, remat": lambda: of_torch(grad(sum_of_steps(remat)), x),
    }


PROBLEMS = {"cos(sin(x)), 10 times": ten_steps}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=3)
