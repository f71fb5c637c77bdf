"""How do bytes and time grow with the number of blocks?

    python tests/benchmarks/depth.py

The transformer of ``python -m funcckpt`` with 4 to 96 blocks: the gradient with respect to what goes into the first
block, in which nothing but activations grows with depth, and per-sample gradients, which are themselves as large
as the parameters. Compared are no `remat`, `remat` around each block, and around √n segments as well; and
`torch.utils.checkpoint` around each block in plain eager code, for the first of the two. The summary has the
fitted exponents of peak bytes and of time. Bytes and FLOPs are those of meta tensors.
"""

import math

import torch
from common import Methods, exponent, main, none, of_torch, torch_checkpoint
from language_model import Shape, block, init
from torch.func import grad, vmap

from funcckpt import remat

DEPTHS = [4, 8, 16, 32, 64, 96]


def in_turn(wrap):
    wrapped = wrap(block)

    def run(blocks, x):
        for p in blocks:
            x = wrapped(p, x)
        return x

    return run


def in_segments(blocks, x):
    length = math.isqrt(len(blocks))
    segment = remat(in_turn(remat))
    for start in range(0, len(blocks), length):
        x = segment(blocks[start : start + length], x)
    return x


def squares(run):
    return lambda blocks, x: run(blocks, x).square().sum()


def of_input(run):
    return lambda blocks, x: grad(squares(run), argnums=1)(blocks, x)


def of_input_in_plain_eager(run):
    def gradient(blocks, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(squares(run)(blocks, x), x)[0]

    return gradient


def per_sample(run):
    return lambda blocks, x: vmap(grad(squares(run)), (None, 0))(blocks, torch.stack([x, -x]))


def deep(depth: int, kind: str):
    def problem(toy: bool) -> Methods:
        shape = Shape(depth // 4, 16, 2, 16) if toy else Shape(depth, 64, 4, 128)
        generator = torch.Generator().manual_seed(0)
        blocks = init(shape, generator=generator)["blocks"]
        x = torch.randn(shape.context, shape.width, generator=generator)
        transform = {"input": of_input, "per sample": per_sample}[kind]
        found = {
            "no remat": lambda: of_torch(transform(in_turn(none)), blocks, x, on_meta=True),
            "remat(block)": lambda: of_torch(transform(in_turn(remat)), blocks, x, on_meta=True),
            "remat(segment), remat(block)": lambda: of_torch(transform(in_segments), blocks, x, on_meta=True),
        }
        if kind == "input":
            found["torch.utils.checkpoint, plain eager"] = lambda: of_torch(
                of_input_in_plain_eager(in_turn(torch_checkpoint)), blocks, x, on_meta=True
            )
        return found

    return problem


def exponents(rows):
    """Of bytes and time, for each kind of gradient and each method."""
    found = {}
    for row in rows:
        kind = row["problem"].split(": ")[1]
        found.setdefault(kind, {}).setdefault(row["method"], []).append(row)
    return {
        kind: {
            method: {
                "bytes": round(exponent(DEPTHS, [row["peak_bytes"] for row in of_method]), 2),
                "time": round(exponent(DEPTHS, [row["seconds"] for row in of_method]), 2),
            }
            for method, of_method in methods.items()
        }
        for kind, methods in found.items()
    }


PROBLEMS = {f"{n} blocks: {kind}": deep(n, kind) for kind in ("input", "per sample") for n in DEPTHS}

if __name__ == "__main__":
    main(__file__, PROBLEMS, summary=exponents, rounds=2)
