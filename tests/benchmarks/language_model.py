"""A byte-level transformer language model as pure functions of a pytree of parameters.

``loss(parameters, inputs, targets)`` is written for one sequence; ``torch.func.vmap`` makes the
batch. `loss_with(wrap)` puts each block through `wrap`, which is where recomputation comes in::

    loss = loss_with(remat)
    gradients = vmap(grad(loss), (None, 0, 0))(parameters, inputs, targets)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funcckpt.meter import mark

BYTES = 256

Parameters = dict[str, Any]
Block = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; `width` is a multiple of `heads`."""

    layers: int
    width: int
    heads: int
    context: int


def init(
    shape: Shape, *, generator: torch.Generator, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Parameters:
    """Parameters drawn on the CPU, so that a seed means the same on every device."""
    width, heads = shape.width, shape.heads
    residual = 1 / math.sqrt(2 * shape.layers)  # The stream's variance is the sum over layers.

    def normal(*size: int, std: float) -> Tensor:
        return (torch.randn(*size, generator=generator, dtype=dtype) * std).to(device)

    def block_parameters() -> dict[str, Tensor]:
        return {
            "attention_norm": torch.ones(width, dtype=dtype, device=device),
            "qkv": normal(3, heads, width, width // heads, std=1 / math.sqrt(width)),
            "merge": normal(width, width, std=residual / math.sqrt(width)),
            "mlp_norm": torch.ones(width, dtype=dtype, device=device),
            "up": normal(width, 4 * width, std=1 / math.sqrt(width)),
            "down": normal(4 * width, width, std=residual / math.sqrt(4 * width)),
        }

    return {
        "embedding": normal(BYTES, width, std=1.0),
        "position": normal(shape.context, width, std=0.1),
        "blocks": [block_parameters() for _ in range(shape.layers)],
        "norm": torch.ones(width, dtype=dtype, device=device),
        "unembedding": normal(width, BYTES, std=1 / math.sqrt(width)),
    }


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One transformer block: ``(context, width)`` to the same."""
    context, width = x.shape
    q, k, v = F.rms_norm(x, (width,), p["attention_norm"]) @ p["qkv"]  # (3, heads, context, size)
    # Spelled out because vmap has no rule for the fused attention on a CPU.
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    x = x + mixed.transpose(0, 1).reshape(context, width) @ p["merge"]
    return x + F.gelu(F.rms_norm(x, (width,), p["mlp_norm"]) @ p["up"]) @ p["down"]


def loss_with(wrap: Callable[[Block], Block]) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    """The mean cross-entropy of one sequence, in nats a byte, each block put through `wrap`."""
    wrapped = wrap(block)

    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        x = parameters["embedding"][inputs] + parameters["position"]
        for p in parameters["blocks"]:
            x = wrapped(p, x)
        x = F.rms_norm(x, x.shape[-1:], parameters["norm"])
        value = F.cross_entropy(x @ parameters["unembedding"], targets)
        mark("saved")
        return value

    return loss
