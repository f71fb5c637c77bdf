"""What do per-sample gradients take, by each of the ways to get them?

    python tests/benchmarks/per_sample.py [per_sample|sizes|chunks|depth|small_models]

per_sample    Of a transformer (12 blocks), a ResNet-18 and a GRU: ``vmap(grad(loss), (None, 0, 0))``, with `remat` around
              the blocks (of the GRU, 16 steps at a time), ``chunk_size=`` and both; peers are JAX, compiled, and Opacus.
              `torch.utils.checkpoint` refuses; its gradient of the batch shows what the recomputation alone can take.
sizes         What `remat` and the policy that keeps products cost and save in a transformer of several widths.
chunks        When `chunk_size` wins over `remat`: the longer the sample, the more its forward keeps for the same bytes
              of its gradient. All gradients at once, and their clipped sum. Of meta tensors.
depth         How bytes and time grow with the blocks of a transformer: the gradient of its input, in which nothing but
              activations grows, and per-sample gradients. The summary has exponents; bytes are of meta tensors.
small_models  What `nn.Remat` costs in small models of transformers (``pip install ".[models]"``), and in one block of
              models of 1 to 256 blocks, in plain eager: the summary has the exponent of the time of that call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import common
import torch
from common import Benchmark, Job, Methods, exponents, main, none, of_jax, of_torch, torch_checkpoint
from overhead import Block
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch_models import GRU, ResNet18, Shape, Transformer, block, cross_entropy, init

from funcckpt import policies, remat
from funcckpt.meter import measure
from funcckpt.nn import Remat, apply_remat
from funcckpt.per_sample import clipped_sum

sys.path.append(str(Path(__file__).parents[1]))
from models import library_of_models  # of the tests

CHUNKS = 4


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x, y: cross_entropy(functional_call(model, p, (x[None],)), y[None])


def per_sample_gradients(model: nn.Module, chunk_size: int | None = None) -> Callable[..., list[Tensor]]:
    gradients = vmap(grad(loss_of(model)), (None, 0, 0), chunk_size=chunk_size)
    return lambda *args: list(gradients(*args).values())


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def opacus_gradients(model: nn.Module) -> Callable[..., list[Tensor]]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum")

    def run(x, y):
        cross_entropy(wrapped(x), y).backward()
        found = [p.grad_sample for p in model.parameters()]
        for p in model.parameters():
            p.grad = p.grad_sample = None
        return found

    return run


def jax_gradients(jax_model: Callable[..., Callable], wrapped: bool, parameters: dict, *batch) -> Job:
    import jax
    import jax_models

    model = jax_model(jax_models, jax.checkpoint if wrapped else none)

    def run(values, x, y):
        loss = lambda values, x, y: jax_models.cross_entropy(model(dict(zip(parameters, values)), x), y)
        return jax.vmap(jax.grad(loss), (None, 0, 0))(values, x, y)

    return of_jax(run, list(parameters.values()), *batch)


def methods(model: Callable, jax_model: Callable, x: Tensor, y: Tensor) -> Methods:
    """`model(wrap)` and ``jax_model(jax_models, wrap)`` make the same model; x and y are a batch."""

    def seeded(wrap):
        torch.manual_seed(0)
        return model(wrap)

    args, chunk = (detached(seeded(none)), x, y), len(x) // CHUNKS
    ways = {
        "vmap(grad)": (none, None), "remat": (remat, None),
        f"chunk_size={chunk}": (none, chunk), f"remat, chunk_size={chunk}": (remat, chunk),
    }  # fmt: skip
    found: Methods = {
        name: lambda wrap=wrap, n=n: of_torch(per_sample_gradients(seeded(wrap), n), *args)
        for name, (wrap, n) in ways.items()
    }
    if common.is_installed("jax"):
        found["JAX"] = partial(jax_gradients, jax_model, False, *args)
        found["JAX, jax.checkpoint"] = partial(jax_gradients, jax_model, True, *args)
    if common.is_installed("opacus"):
        found["Opacus"] = lambda: of_torch(opacus_gradients(seeded(none)), x, y)
    torchs = seeded(torch_checkpoint)
    found["gradient of the batch, torch.utils.checkpoint"] = lambda: of_torch(
        lambda: torch.autograd.grad(cross_entropy(torchs(x), y), [*torchs.parameters()]), is_comparable=False
    )
    return found


def transformer(toy: bool) -> Methods:
    layers, width, context = (2, 16, 16) if toy else (12, 64, 128)
    return methods(
        lambda wrap: Transformer(wrap, 256, layers, width, 4),
        lambda jax_models, wrap: jax_models.transformer(wrap, 4),
        *[numbers(256, 8, context)] * 2,
    )


def resnet(toy: bool) -> Methods:
    width, side = (4, 8) if toy else (16, 32)
    return methods(
        lambda wrap: ResNet18(wrap, width, 10),
        lambda jax_models, wrap: jax_models.resnet18(wrap),
        torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(1)),
        numbers(10, 8),
    )


def gru(toy: bool) -> Methods:
    width, steps = (8, 32) if toy else (64, 256)
    return methods(
        lambda wrap: GRU(wrap, 256, width, 16),
        lambda jax_models, wrap: jax_models.gru(wrap, 16),
        *[numbers(256, 8, steps)] * 2,
    )


def of_width(width: int, toy: bool) -> Methods:
    layers, context = (2, 8) if toy else (6, 128)
    model = lambda wrap: Transformer(wrap, 256, layers, width // 4 if toy else width, 4)
    args = detached(model(none)), *[numbers(256, 8, context)] * 2
    dots = partial(remat, policy=policies.dots_saveable)
    return {
        name: lambda wrap=wrap: of_torch(per_sample_gradients(model(wrap)), *args)
        for name, wrap in {"plain": none, "remat": remat, "remat, dots_saveable": dots}.items()
    }


POSITIONS = [4, 16, 64, 256]


def on_meta(positions: int, toy: bool = False) -> tuple[Callable, tuple]:
    """The model for a wrapper, and what the loss is given."""

    def model(wrap):
        with torch.device("meta"):
            return Transformer(wrap, 256, 2 if toy else 6, 16 if toy else 64, 4)

    tokens = torch.empty(8, positions, dtype=torch.long, device="meta")
    return model, (detached(model(none)), tokens, tokens)


def clipped(model: nn.Module, chunk_size: int | None) -> Callable:
    return lambda p, x, y: clipped_sum(loss_of(model), p, x, y, max_norm=1.0, chunk_size=chunk_size)


def chunks(positions: int, toy: bool) -> Methods:
    model, args = on_meta(positions // 4 if toy else positions, toy)
    ways = {
        "neither": (none, None), "remat": (remat, None),
        "chunk_size=2": (none, 2), "remat, chunk_size=2": (remat, 2),
    }  # fmt: skip
    return {
        f"{name}: {way}": lambda job=job, wrap=wrap, size=size: of_torch(job(model(wrap), size), *args)
        for name, job in (("all gradients", per_sample_gradients), ("clipped sum", clipped))
        for way, (wrap, size) in ways.items()
    }


def of_a_sample(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes of the gradient of one sample, and bytes that its forward keeps without remat."""

    def kept(positions):
        model, (p, x, y) = on_meta(positions)
        loss = loss_of(model(none))
        return measure(lambda: vjp(lambda p: loss(p, x[0], y[0]), p)).end_bytes

    bytes = sum(p.nbytes for p in on_meta(1)[1][0].values())
    return {"gradient_bytes": bytes, "activation_bytes": [kept(n) for n in POSITIONS]}


DEPTHS = [4, 8, 16, 32, 64, 96]


def in_turn(wrap: Callable) -> Callable:
    run = lambda blocks, x: reduce(lambda x, p: wrapped(p, x), blocks, x)
    wrapped = wrap(block)
    return run


def in_segments(blocks: Sequence[Any], x: Tensor) -> Tensor:
    length = math.isqrt(len(blocks))
    segment = remat(in_turn(remat))
    parts = [blocks[start : start + length] for start in range(0, len(blocks), length)]
    return reduce(lambda x, part: segment(part, x), parts, x)


def squares(run: Callable) -> Callable:
    return lambda blocks, x: run(blocks, x).square().sum()


DEEP = {
    "input": lambda run: grad(squares(run), argnums=1),
    "per sample": lambda run: lambda p, x: vmap(grad(squares(run)), (None, 0))(p, torch.stack([x, -x])),
}


def deep(depth: int, kind: str, toy: bool) -> Methods:
    shape = Shape(depth // 4, 16, 2, 16) if toy else Shape(depth, 64, 4, 128)
    g = torch.Generator().manual_seed(0)
    blocks = init(shape, generator=g)["blocks"]
    x = torch.randn(shape.context, shape.width, generator=g)
    runs = {"no remat": none, "remat(block)": remat}
    runs = {name: DEEP[kind](in_turn(wrap)) for name, wrap in runs.items()}
    runs["remat(segment), remat(block)"] = DEEP[kind](in_segments)
    if kind == "input":
        run = common.in_plain_eager(squares(in_turn(torch_checkpoint)), argnum=1)
        runs["torch.utils.checkpoint, plain eager"] = run
    return {name: partial(of_torch, run, blocks, x, on_meta=True) for name, run in runs.items()}


def exponents_of_depth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of bytes and time, for each kind of gradient and each method."""
    found = {}
    for kind in DEEP:
        of_kind = [row for row in rows if row["problem"].endswith(f": {kind}")]
        bytes, times = (exponents(DEPTHS, of_kind, key) for key in ("peak_bytes", "seconds"))
        found[kind] = {way: {"bytes": bytes[way], "time": times[way]} for way in bytes}
    return found


LAYERS, WIDTH, TOKENS, WORDS = 6, 64, 48, 128
BLOCKS = [1, 4, 16, 64, 256]


def gpt2() -> nn.Module:
    transformers = library_of_models("transformers")
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=4, n_positions=TOKENS, vocab_size=WORDS, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = library_of_models("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=4,
        vocab_size=WORDS, max_position_embeddings=TOKENS, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def of_transformers(make: Callable[[], nn.Module], toy: bool) -> Methods:
    ids = torch.randint(0, WORDS, (2, 8) if toy else (8, TOKENS), generator=torch.Generator().manual_seed(0))

    def method(wrap):
        torch.manual_seed(0)
        model = wrap(make())

        given = lambda ids: {"input_ids": ids[None], "labels": ids[None]}
        loss = lambda parameters, ids: functional_call(model, parameters, (), given(ids)).loss
        return of_torch(vmap(grad(loss), (None, 0)), detached(model), ids)

    ours = partial(apply_remat, select="GradientCheckpointingLayer")
    dots = partial(ours, policy=policies.dots_saveable)
    ways = {"plain": none, "Remat": ours, "Remat, dots_saveable": dots}
    return {name: partial(method, wrap) for name, wrap in ways.items()}


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


BENCHMARKS = {
    "per_sample": Benchmark({"transformer": transformer, "ResNet-18": resnet, "GRU": gru}, rounds=2),
    "sizes": Benchmark({f"width {width}": partial(of_width, width) for width in (32, 64, 128, 256)}),
    "chunks": Benchmark(
        {f"{n} positions": partial(chunks, n) for n in POSITIONS}, rounds=0, summary=of_a_sample
    ),
    "depth": Benchmark(
        {f"{n} blocks: {kind}": partial(deep, n, kind) for kind in DEEP for n in DEPTHS},
        rounds=2,
        summary=exponents_of_depth,
    ),
    "small_models": Benchmark(
        {"GPT-2": partial(of_transformers, gpt2), "Llama": partial(of_transformers, llama)}
        | {f"one of {n} blocks": partial(one_call, n) for n in BLOCKS},
        rounds=10,
        summary=lambda rows: exponents(BLOCKS, [r for r in rows if "blocks" in r["problem"]], "seconds", 3),
    ),
}

if __name__ == "__main__":
    main(__file__, **BENCHMARKS)
