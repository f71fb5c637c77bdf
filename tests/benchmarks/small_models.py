"""What does `nn.Remat` cost in models of others, and in larger ones?

    python tests/benchmarks/small_models.py

Per-sample gradients of small models of transformers (``pip install ".[models]"``; 6 layers of width 64, 8 samples
of 48 tokens), with all blocks in `Remat` and without. And one block of a model, forward and backward in plain
eager, in models of 1 to 256 blocks: `growth` in the JSON is the exponent of the time of that one call.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from common import Methods, Row, exponent, main, none, of_torch, torch_checkpoint
from overhead import Block
from torch import nn
from torch.func import functional_call, grad, vmap

from funcckpt import policies, remat
from funcckpt.nn import Remat, apply_remat

sys.path.append(str(Path(__file__).parents[1]))
from models import library_of_models  # of the tests

LAYERS, WIDTH, SAMPLES, TOKENS, WORDS = 6, 64, 8, 48, 128
BLOCKS = [1, 4, 16, 64, 256]


def gpt2() -> nn.Module:
    transformers = library_of_models("transformers")
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        **sizes, **off, bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = library_of_models("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=TOKENS,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


WAYS = {
    "plain": none,
    "Remat": lambda model: apply_remat(model, "GradientCheckpointingLayer"),
    "Remat, dots_saveable": lambda model: apply_remat(
        model, "GradientCheckpointingLayer", policy=policies.dots_saveable
    ),
}


def per_sample_gradients(make, toy: bool) -> Methods:
    samples, tokens = (2, 8) if toy else (SAMPLES, TOKENS)
    ids = torch.randint(0, WORDS, (samples, tokens), generator=torch.Generator().manual_seed(0))

    def method(wrap):
        torch.manual_seed(0)
        model = wrap(make())

        def loss(parameters, ids):
            ids = ids[None]
            return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids}).loss

        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return of_torch(vmap(grad(loss), (None, 0)), parameters, ids)

    return {name: partial(method, wrap) for name, wrap in WAYS.items()}


def one_call(blocks: int, toy: bool) -> Methods:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def method(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(blocks)])
        f = wrap(model[-1])

        def calls(x):
            for _ in range(1 if toy else 200):
                (g,) = torch.autograd.grad(f(x).sum(), x)
            return g

        return of_torch(calls, x)

    ways = {"torch.utils.checkpoint": torch_checkpoint, "remat(block)": remat, "Remat(block)": Remat}
    return {name: partial(method, wrap) for name, wrap in ways.items()}


def growth(rows: list[Row]) -> dict[str, float]:
    calls: dict[str, list[float]] = {}
    for row in rows:
        if "blocks" in row["problem"] and "seconds" in row:
            calls.setdefault(row["method"], []).append(row["seconds"])
    return {name: round(exponent(BLOCKS, seconds), 3) for name, seconds in calls.items()}


PROBLEMS = {
    "GPT-2": partial(per_sample_gradients, gpt2),
    "Llama": partial(per_sample_gradients, llama),
    **{f"one of {n} blocks": partial(one_call, n) for n in BLOCKS},
}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=10, summary=growth)
