"""What do per-sample gradients take: bytes, FLOPs and time, of three models, by each of the ways to get them?

    python tests/benchmarks/per_sample.py

A small transformer (12 blocks), a ResNet-18 of a quarter of the width with group norms, and a GRU, with a
loss for each sample. Compared are ``vmap(grad(loss), (None, 0, 0))``; the same with `remat` around the blocks (of
the GRU, around 16 steps at a time), with ``chunk_size=`` and with both; and peers, where they are installed:
``jax.vmap(jax.grad(loss))``, compiled, with and without `jax.checkpoint` around the same blocks, and Opacus'
`GradSampleModule`. `torch.utils.checkpoint` refuses a transform; in plain eager code it gives the gradient of the
batch, one and not one for each sample, which shows what the recomputation by itself can take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from common import Job, Methods, is_installed, main, none, of_jax, of_torch, torch_checkpoint
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch_models import GRU, ResNet18, Transformer, cross_entropy

from funcckpt import remat

CHUNKS = 4


def per_sample_gradients(model: nn.Module, chunk_size: int | None = None) -> Callable[..., list[Tensor]]:
    def loss(parameters, x, y):
        return cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def run(parameters, x, y):
        return list(vmap(grad(loss), (None, 0, 0), chunk_size=chunk_size)(parameters, x, y).values())

    return run


def batch_gradient(model: nn.Module) -> Callable[..., Sequence[Tensor]]:
    def run(x, y):
        return torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))

    return run


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


def jax_gradients(jax_model: Callable[..., Callable], wrapped: bool, *args) -> Job:
    import jax
    from jax_models import cross_entropy

    model = jax_model(jax.checkpoint if wrapped else none)

    def run(values, x, y):
        loss = lambda values, x, y: cross_entropy(model(dict(zip(names, values, strict=True)), x), y)
        return jax.vmap(jax.grad(loss), (None, 0, 0))(values, x, y)

    parameters, *batch = args
    names = list(parameters)
    values = [jax.numpy.asarray(x.detach().numpy()) for x in parameters.values()]
    return of_jax(run, values, *[jax.numpy.asarray(x.numpy()) for x in batch])


def methods(
    model: Callable[..., nn.Module], jax_model: Callable[..., Callable], x: Tensor, y: Tensor
) -> Methods:
    """`model(wrap)` and ``jax_model(wrap)`` make the same model; x and y are a batch."""

    def seeded(wrap):
        torch.manual_seed(0)
        return model(wrap)

    parameters = {name: p.detach() for name, p in seeded(none).named_parameters()}
    args, chunk = (parameters, x, y), len(x) // CHUNKS
    found: Methods = {
        "vmap(grad)": lambda: of_torch(per_sample_gradients(seeded(none)), *args),
        "remat": lambda: of_torch(per_sample_gradients(seeded(remat)), *args),
        f"chunk_size={chunk}": lambda: of_torch(per_sample_gradients(seeded(none), chunk), *args),
        f"remat, chunk_size={chunk}": lambda: of_torch(per_sample_gradients(seeded(remat), chunk), *args),
    }
    if is_installed("jax"):

        def by_jax(wrapped):
            import jax_models

            return jax_gradients(lambda wrap: jax_model(jax_models, wrap), wrapped, *args)

        found |= {"JAX": lambda: by_jax(False), "JAX, jax.checkpoint": lambda: by_jax(True)}
    if is_installed("opacus"):
        found["Opacus"] = lambda: of_torch(opacus_gradients(seeded(none)), x, y)
    found["gradient of the batch, torch.utils.checkpoint"] = lambda: of_torch(
        batch_gradient(seeded(torch_checkpoint)), x, y, is_comparable=False
    )
    return found


def numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def transformer(toy: bool) -> Methods:
    layers, width, context = (2, 16, 16) if toy else (12, 64, 128)
    return methods(
        lambda wrap: Transformer(wrap, 256, layers, width, 4),
        lambda jax_models, wrap: jax_models.transformer(wrap, 4),
        numbers(256, 8, context),
        numbers(256, 8, context),
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
        numbers(256, 8, steps),
        numbers(256, 8, steps),
    )


PROBLEMS = {"transformer": transformer, "ResNet-18": resnet, "GRU": gru}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=2)
