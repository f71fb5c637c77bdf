"""What does mixed mode (`inner_grad`) add to `remat` and `scan` in a bilevel problem?

    python tests/benchmarks/bilevel.py

The gradient of a loss after eight steps of gradient descent on a small language model, that of
``python -m funcckpt``, with respect to a learning rate for each of its blocks. Compared are
`torch.func.grad` and `inner_grad` for the inner gradient; the loop unrolled, and a `scan` that keeps three carries;
and blocks without `remat` and with it. The claims that this answers to are those of MixFlow-MG
(arXiv 2505.00793). All is in float64.
"""

import itertools

import torch
from common import Methods, main, none, of_torch
from language_model import Shape, init, loss_with
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from funcckpt import inner_grad, remat, scan

STEPS = 8
GRADIENTS = {"": grad, "inner_grad": inner_grad}
BLOCKS = {"": none, "remat(block)": remat}
LOOPS = {"": False, "scan": True}


def after_training(gradient, wrap, scans):
    of_sequence = loss_with(wrap)

    def loss(parameters, tokens):
        return vmap(of_sequence, (None, 0, 0))(parameters, tokens[:, :-1], tokens[:, 1:]).mean()

    def end(rates, parameters, tokens):
        def step(parameters, batch):
            g = gradient(loss)(parameters, batch)
            blocks = [
                pytree.tree_map(lambda w, g, rate=rate: w - rate * g, *pair)
                for rate, *pair in zip(rates, parameters["blocks"], g["blocks"])
            ]
            return {**parameters, "blocks": blocks}, None

        if scans:
            parameters, _ = scan(step, parameters, tokens[1:], checkpoints=3)
        else:
            for batch in tokens[1:]:
                parameters, _ = step(parameters, batch)
        return loss(parameters, tokens[0])

    return grad(end)


def language_model(toy: bool) -> Methods:
    shape, steps = (Shape(2, 16, 2, 8), 3) if toy else (Shape(6, 64, 4, 64), STEPS)
    generator = torch.Generator().manual_seed(0)
    parameters = init(shape, generator=generator, dtype=torch.float64)
    tokens = torch.randint(256, (steps + 1, 4, shape.context + 1), generator=generator)
    rates = torch.full((shape.layers,), 0.1, dtype=torch.float64)
    return {
        ", ".join(filter(None, names)) or "torch.func.grad": lambda names=names: of_torch(
            after_training(GRADIENTS[names[0]], BLOCKS[names[1]], LOOPS[names[2]]), rates, parameters, tokens
        )
        for names in itertools.product(GRADIENTS, BLOCKS, LOOPS)
    }


PROBLEMS = {"language model, 8 inner steps": language_model}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=1)
