"""When does `chunk_size` win over `remat`, and when do they win together?

    python tests/benchmarks/chunks.py

A transformer of 6 blocks of width 64 and 8 samples. The longer the sample, the more bytes its forward keeps for
its backward (its activations), for the same bytes of its gradient: the problems go from activations of a fraction
of the gradient to many times as much. Two jobs: all per-sample gradients at once
(``vmap(grad(loss), chunk_size=)``), and their clipped sum, which holds those of a chunk (`per_sample.clipped_sum`).
Bytes and FLOPs are those of meta tensors.
"""

from __future__ import annotations

import torch
from common import Methods, main, none, of_torch
from torch.func import functional_call, grad, vjp, vmap
from torch_models import Transformer, cross_entropy

from funcckpt import remat
from funcckpt.meter import measure
from funcckpt.per_sample import clipped_sum

POSITIONS = [4, 16, 64, 256]
BATCH, CHUNK = 8, 2


def model(wrap, toy):
    with torch.device("meta"):
        return Transformer(wrap, 256, 2 if toy else 6, 16 if toy else 64, 4)


def loss_of(model):
    return lambda p, x, y: cross_entropy(functional_call(model, p, (x[None],)), y[None])


def given(positions, toy):
    parameters = {name: p.detach() for name, p in model(none, toy).named_parameters()}
    tokens = torch.empty(BATCH, positions, dtype=torch.long, device="meta")
    return parameters, tokens, tokens


def all_gradients(wrap, toy, chunk_size=None):
    return vmap(grad(loss_of(model(wrap, toy))), (None, 0, 0), chunk_size=chunk_size)


def clipped(wrap, toy, chunk_size=None):
    loss = loss_of(model(wrap, toy))
    return lambda p, x, y: clipped_sum(loss, p, x, y, max_norm=1.0, chunk_size=chunk_size)


def sized(positions):
    def problem(toy: bool) -> Methods:
        args = given(positions // 4 if toy else positions, toy)
        ways = {
            "neither": (none, None), "remat": (remat, None),
            f"chunk_size={CHUNK}": (none, CHUNK), f"remat, chunk_size={CHUNK}": (remat, CHUNK),
        }  # fmt: skip
        return {
            f"{name}: {way}": lambda job=job, how=how: of_torch(job(how[0], toy, how[1]), *args)
            for name, job in (("all gradients", all_gradients), ("clipped sum", clipped))
            for way, how in ways.items()
        }

    return problem


def kept_by_the_forward(positions):
    parameters, x, y = given(positions, False)
    loss = loss_of(model(none, False))
    return measure(lambda: vjp(lambda p: loss(p, x[0], y[0]), parameters)).end_bytes


def of_a_sample(rows):
    """Bytes of the gradient of one sample, and bytes that its forward keeps without remat."""
    return {
        "gradient_bytes": sum(p.nbytes for p in given(1, False)[0].values()),
        "activation_bytes": [kept_by_the_forward(n) for n in POSITIONS],
    }


PROBLEMS = {f"{n} positions": sized(n) for n in POSITIONS}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=0, summary=of_a_sample)
