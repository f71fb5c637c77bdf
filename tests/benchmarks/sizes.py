"""What does `remat` cost and save, by the size of the model?

    python tests/benchmarks/sizes.py

Per-sample gradients of a transformer of 6 blocks, of 8 samples of 128 tokens, in several widths: plain, with `remat`
around the blocks, and with the policy that keeps products.
"""

from __future__ import annotations

from functools import partial

from common import Methods, main, none, of_torch
from per_sample import numbers, per_sample_gradients
from torch_models import Transformer

from funcckpt import policies, remat

WIDTHS = [32, 64, 128, 256]
WAYS = {"plain": none, "remat": remat, "remat, dots_saveable": partial(remat, policy=policies.dots_saveable)}


def of_width(width: int):
    def problem(toy: bool) -> Methods:
        layers, context = (2, 8) if toy else (6, 128)
        model = lambda wrap: Transformer(wrap, 256, layers, width // 4 if toy else width, 4)
        parameters = {name: p.detach() for name, p in model(none).named_parameters()}
        args = parameters, numbers(256, 8, context), numbers(256, 8, context)
        return {
            name: lambda wrap=wrap: of_torch(per_sample_gradients(model(wrap)), *args)
            for name, wrap in WAYS.items()
        }

    return problem


PROBLEMS = {f"width {width}": of_width(width) for width in WIDTHS}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=3)
